"""Options and names of other libraries: answered with ours, never with Python's bare error."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep.callbacks import checkpoint, logs, plateau, tensorboard
from halfstep.preflight import lr_range_test, net_summary
from halfstep.utils.foreign_names import DATA_NAMES

# What is called, and its tables: other name → our option, other name → what to write.
CALLS: list[tuple[str, Callable[..., Any], dict[str, str], dict[str, str]]] = [
    ("find_lr", hs.find_lr, lr_range_test.FOREIGN_OPTIONS, {}),
    ("summary", hs.summary, net_summary.FOREIGN_OPTIONS, net_summary.MISPLACED_OPTIONS),
    ("Checkpoint", hs.Checkpoint, checkpoint.FOREIGN_OPTIONS, checkpoint.MISPLACED_OPTIONS),
    ("EarlyStopping", hs.EarlyStopping, plateau.FOREIGN_OPTIONS, plateau.NO_VERBOSE),
    ("CSVLog", hs.CSVLog, logs.FOREIGN_OPTIONS, logs.MISPLACED_OPTIONS),
    ("JSONLLog", hs.JSONLLog, logs.FOREIGN_OPTIONS, logs.MISPLACED_OPTIONS),
    ("TensorBoard", hs.TensorBoard, tensorboard.FOREIGN_OPTIONS, {}),
]


@pytest.mark.parametrize(("owner", "call", "names", "advice"), CALLS)
def test_an_option_of_another_library_is_answered_with_ours(
    owner: str, call: Callable[..., Any], names: dict[str, str], advice: dict[str, str]
) -> None:
    for foreign, ours in names.items():
        expected = f"{owner}: unknown option {foreign!r}; did you mean {ours!r}? options are: "
        with pytest.raises(TypeError, match=re.escape(expected)) as caught:
            call(**{foreign: 1})
        assert re.search(rf"options are: .*\b{ours}\b", str(caught.value))
    for foreign, sentence in advice.items():
        with pytest.raises(TypeError, match=re.escape(f"{foreign!r}; {sentence}")):
            call(**{foreign: 1})


def test_an_optimizer_for_the_plateau_and_a_worker_seed() -> None:
    with pytest.raises(TypeError, match="'optimizer'; it moves the rates of the Model's optimizer"):
        hs.ReduceLROnPlateau(optimizer=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'workers'; a DataLoader's workers always follow"):
        hs.seed_everything(0, workers=True)  # type: ignore[call-arg]


def test_the_line_for_save_best_only_builds_that_checkpoint() -> None:
    line = checkpoint.MISPLACED_OPTIONS["save_best_only"].removeprefix("write ")
    built = eval(line)
    assert (built.best.metric, built.keep) == ("loss", 1)


@pytest.mark.parametrize(
    ("module", "name", "close"),
    [
        (hs.data, "RandomRotate", "RandomRotation"),
        (hs.metrics, "accuracy", "Accuracy"),
        (hs.nets, "resnet19", "resnet18"),
        (hs.schedules, "cosin", "cosine"),
        (hs.callbacks, "EarlyStop", "EarlyStopping"),
    ],
)
def test_a_mistyped_name_of_a_module_has_the_closest_one(
    module: Any, name: str, close: str
) -> None:
    assert not hasattr(module, name)
    expected = f"module {module.__name__!r} has no attribute {name!r}; did you mean {close!r}?"
    with pytest.raises(AttributeError, match=re.escape(expected)):
        getattr(module, name)


@pytest.mark.parametrize("name", DATA_NAMES)
def test_a_name_of_torchvision_is_answered_with_a_line_that_works(name: str) -> None:
    with pytest.raises(AttributeError, match=f"has no attribute '{name}': ") as caught:
        getattr(hs.data, name)
    line = str(caught.value).split("; write ")[1]
    pixels = torch.zeros(40, 32, 32, 3, dtype=torch.uint8)
    data = hs.data.Dataset({"image": pixels, "label": torch.zeros(40)}).batch(8)
    result = eval(line, {"hs": hs, "data": data, "x": pixels, "y": torch.zeros(40)})
    if isinstance(result, hs.data.Dataset):
        assert len(next(iter(result))) == 2
    else:
        assert next(iter(data.map(result, "image")))[0].shape == (8, 32, 32, 3)


def test_inputs_and_labels_for_a_dataset_are_one_tuple() -> None:
    x, y = torch.zeros(8, 2), torch.zeros(8)
    with pytest.raises(TypeError, match=r"expected names, got a Tensor; .*Dataset\(\(x, y\)\)$"):
        hs.data.Dataset(x, y)  # type: ignore[arg-type]
    assert hs.data.Dataset((x, y)).columns == ("x", "y")


def test_a_summary_that_the_network_refuses_says_what_it_was_called_with() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied") as caught:
        hs.summary(nn.Linear(8, 3), (4, 9))
    assert re.search(r"item 0 \(float32 \[4, 9\]\); a shape has", caught.value.__notes__[0])
