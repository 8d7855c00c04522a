"""Names of other libraries under `hs.`: each answered with what to write here."""

from collections.abc import Callable, Iterable, Mapping
from typing import NoReturn

from halfstep.errors import closest_name
from halfstep.utils.text import write_line

_MODEL = "hs.Model(net, loss, optimizer, 'O1')"
_FIT = "hs.Model(net, loss, optimizer).fit(2, data)"

# Name → what it is here, and the line.
NAMES: dict[str, tuple[str, str]] = {
    "Trainer": ("a Model trains its network itself", _FIT),
    "TrainingArguments": ("they are arguments of Model and fit", _FIT),
    "Learner": ("a Model trains its network itself", _FIT),
    "Engine": ("a Model trains its network itself", _FIT),
    "LightningModule": ("the network stays an nn.Module", _MODEL),
    "Module": ("the network stays an nn.Module", _MODEL),
    "Sequential": ("layers are torch's", "nn.Sequential(nn.Linear(6, 3))"),
    "LightningDataModule": ("data goes into fit", _FIT),
    "DataModule": ("data goes into fit", _FIT),
    "Accelerator": (
        "a TrainStep is one step of a loop of your own",
        "step = hs.TrainStep(net, loss, optimizer, precision='O1')",
    ),
    "Fabric": (
        "a TrainStep is one step of a loop of your own",
        "step = hs.TrainStep(net, loss, optimizer, precision='O1')",
    ),
    "Step": (
        "a TrainStep is one step of a loop of your own",
        "step = hs.TrainStep(net, loss, optimizer, precision='O1')",
    ),
    "ModelCheckpoint": ("it is called Checkpoint", "hs.Checkpoint('runs/mine', best='loss')"),
    "LearningRateMonitor": ("it is called LRMonitor", "hs.LRMonitor()"),
    "LearningRateScheduler": (
        "the schedule belongs to the Model",
        "hs.Model(net, loss, optimizer, schedule=lambda update: 0.1 / (1 + update))",
    ),
    "CSVLogger": ("it is called CSVLog", "hs.CSVLog('log.csv')"),
    "TensorBoardLogger": ("it is called TensorBoard", "hs.TensorBoard('runs/board')"),
    "TQDMProgressBar": ("it is called ProgressBar", "hs.ProgressBar()"),
    "RichProgressBar": ("it is called ProgressBar", "hs.ProgressBar()"),
    "LambdaCallback": ("it is called Lambda", "hs.Lambda(step=lambda run, row: None)"),
    "Timer": ("it is called TimeMonitor", "hs.TimeMonitor()"),
    "GradScaler": ("it stands in hs.amp", "hs.amp.GradScaler()"),
    "autocast": ("it stands in hs.amp", "hs.amp.autocast()"),
    "Accuracy": ("it stands in hs.metrics", "hs.metrics.Accuracy()"),
    "CrossEntropy": ("it stands in hs.losses", "hs.losses.CrossEntropy()"),
    "Dataset": ("it stands in hs.data", "hs.data.Dataset((x, y)).shuffle().batch(32)"),
    "TensorDataset": ("it stands in hs.data", "hs.data.Dataset((x, y)).shuffle().batch(32)"),
    "DataLoader": ("torch's is taken as it is", "model.fit(2, DataLoader(train_ds, batch_size=8))"),
    "fit": ("it is a method of a Model", _FIT),
    "train": ("it is a method of a Model, fit", _FIT),
    "compile": ("a Model gets its parts when it is built", _MODEL),
    "initialize": ("a Model gets its parts when it is built", _MODEL),
    "save": ("it is a method of a Model", "model.save('weights.safetensors')"),
    "load": ("it is a method of a Model", "model.load('weights.safetensors')"),
    "set_seed": ("it is called seed_everything", "hs.seed_everything(0)"),
    "set_random_seed": ("it is called seed_everything", "hs.seed_everything(0)"),
}


# Names of torchvision and others under `hs.data`.
_BATCHES = "hs.data.Dataset((x, y)).shuffle().batch(32)"
DATA_NAMES: dict[str, tuple[str, str]] = {
    "DataLoader": ("torch's is taken by fit as it is, and a Dataset makes batches", _BATCHES),
    "TensorDataset": ("it is called Dataset", _BATCHES),
    "Compose": ("map takes a list", "data.map([hs.data.Flip(), hs.data.ToCHW()], 'image')"),
    "ToTensor": (
        "it is two transforms",
        "data.map([hs.data.ToCHW(), hs.data.Rescale(1 / 255)], 'image')",
    ),
    "RandomHorizontalFlip": ("it is called Flip", "hs.data.Flip()"),
    "RandomCrop": ("it is called PadCrop", "hs.data.PadCrop(32, padding=4)"),
    "RandAugment": ("there is its trivial form", "hs.data.TrivialAugment()"),
    "AutoAugment": ("there is its trivial form", "hs.data.TrivialAugment()"),
    "TrivialAugmentWide": ("it is called TrivialAugment", "hs.data.TrivialAugment()"),
}


def missing_name_message(
    name: str,
    known: Iterable[str],
    module: str = "halfstep",
    answers: Mapping[str, tuple[str, str]] = NAMES,
) -> str:
    """What to write instead of a name that a module does not have."""
    if name in answers:
        problem, line = answers[name]
        return write_line(f"module {module!r} has no attribute {name!r}: {problem}", line)
    close = closest_name(name, known)
    suggestion = f"; did you mean {close!r}?" if close else ""
    return f"module {module!r} has no attribute {name!r}{suggestion}"


def missing_names(
    module: str, known: Iterable[str], answers: Mapping[str, tuple[str, str]] | None = None
) -> Callable[[str], NoReturn]:
    """A `__getattr__` of a module, which answers a name that it does not have."""

    def refuse(name: str) -> NoReturn:
        raise AttributeError(missing_name_message(name, known, module, answers or {}))

    return refuse
