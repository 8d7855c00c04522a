"""Batches that a network or a loss cannot take: the message names step, column, dtype and shape, and its line works."""

import re
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep.engine.batch_errors import describe_value, explain_batch_error
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.model import Model

PIXELS = torch.randint(
    0, 256, (24, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)
IMAGES = PIXELS.float() / 255
LABELS = torch.arange(24) % 10
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "O1": {"precision": "O1"},
    "O2": {"precision": "O2"},
    "cycle": {"accumulate": 2},
}


def dense(classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, classes))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 10))


def model(
    net: nn.Module | None = None, loss: Any = None, precision: str = "fp32", **options: Any
) -> Model:
    torch.manual_seed(0)
    net = net or dense()
    return Model(
        net,
        loss or nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.01),
        precision,
        **options,
    )


def data(images: Tensor = IMAGES, labels: Tensor = LABELS) -> hs.data.Dataset:
    return hs.data.Dataset({"image": images, "label": labels}).batch(8)


def told(act: Any, cause: type[BaseException] | None) -> str:
    with pytest.raises(
        ValueError, match=r"^(step|evaluation, batch|prediction, batch) \d+: "
    ) as caught:
        act()
    assert cause is None or isinstance(
        caught.value.__cause__, cause
    )  # torch's own words stay in the traceback
    return str(caught.value)


def mapped(batches: hs.data.Dataset, said: str) -> hs.data.Dataset:
    """The data with the line of the message behind its batch()."""
    line = re.search(r"behind \.batch\(…\): (\.map\(.*\))$", said)
    assert line is not None, said
    made = eval(f"batches{line[1]}", {"batches": batches, "hs": hs, "torch": torch})
    assert isinstance(made, hs.data.Dataset)
    return made


def spoiled(value: int, at: int = 20) -> Tensor:
    labels = LABELS.clone()
    labels[at] = value
    return labels


# labels


LOSSES: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(),
    "weighted": nn.CrossEntropyLoss(torch.ones(10)),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "ours": hs.losses.CrossEntropy(0.1),
    "function": F.cross_entropy,
    "partial": partial(F.cross_entropy, label_smoothing=0.1),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_label_out_of_range(loss: Any, options: dict[str, Any]) -> None:
    """Step 3 holds it; steps 1 and 2 were done, and their rows were handed out."""
    history = hs.History()
    made = model(loss=loss, **options)
    said = told(lambda: made.fit(1, data(labels=spoiled(10)), callbacks=history), IndexError)
    name = type(loss).__name__ if isinstance(loss, nn.Module) else "cross_entropy"
    assert said.startswith(
        f"step 3: {name}: expected labels from 0 to 9, as the network has 10 outputs (or -100"
    )
    assert "got 10 in 'label' (int64 [8]), at place 4." in said
    assert "Give the last layer 11 outputs or more, or mend the labels." in said
    assert history.rows["global_step"] == [1, 2]


def test_the_advice_about_classes_works() -> None:
    assert model(dense(11)).fit(1, data(labels=spoiled(10))).global_step == 3
    model().fit(1, data(labels=spoiled(-100)))


def test_a_negative_label() -> None:
    said = told(lambda: model().fit(1, data(labels=spoiled(-1))), IndexError)
    assert "got -1 in 'label' (int64 [8]), at place 4." in said
    assert said.endswith(
        "Mend the labels, or give those to be left out the number ignore_index=-100."
    )
    other = told(
        lambda: model(loss=nn.CrossEntropyLoss(ignore_index=3)).fit(1, data(labels=spoiled(-1))),
        IndexError,
    )
    assert "(or 3, which is ignored), got -1" in other


def test_labels_that_count_from_one() -> None:
    said = told(lambda: model().fit(1, data(labels=LABELS + 1)), IndexError)
    assert (
        "They may count from 1. In the data, behind .batch(…): .map(lambda y: y - 1, 'label')"
        in said
    )
    ours, right = model(), model()
    ours.fit(1, mapped(data(labels=LABELS + 1), said))
    right.fit(1, data())
    assert torch.equal(
        *(torch.cat([p.flatten() for p in each.net.parameters()]) for each in (ours, right))
    )


def test_labels_of_pixels() -> None:
    net = nn.Conv2d(1, 4, 1)
    masks = torch.zeros(24, 6, 6, dtype=torch.int64)
    masks[11, 2, 3] = 4
    batches = hs.data.Dataset({"image": IMAGES[:, None], "mask": masks}).batch(8)
    said = told(lambda: model(net).fit(1, batches), IndexError)
    assert said.startswith("step 2: CrossEntropyLoss: expected labels from 0 to 3")
    assert f"got 4 in 'mask' (int64 [8, 6, 6]), at place {3 * 36 + 2 * 6 + 3}." in said


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int16])
def test_labels_of_another_dtype(dtype: torch.dtype, options: dict[str, Any]) -> None:
    batches = data(labels=LABELS.to(dtype))
    said = told(lambda: model(**options).fit(1, batches), RuntimeError)
    name = str(dtype).removeprefix("torch.")
    assert said == (
        f"step 1: CrossEntropyLoss: expected class numbers as int64, got 'label' ({name} [8]). In the data, behind "
        ".batch(…): .map(hs.data.Cast(torch.int64), 'label')"
    )
    model(**options).fit(1, mapped(batches, said))
    model(loss=hs.losses.CrossEntropy(), **options).fit(
        1, data(labels=LABELS.to(torch.int32))
    )  # takes any integers


def test_labels_of_another_shape() -> None:
    batches = data(labels=LABELS[:, None])
    said = told(lambda: model().fit(1, batches), RuntimeError)
    assert said.startswith(
        "step 1: CrossEntropyLoss: expected labels of shape [8], got 'label' (int64 [8, 1])."
    )
    model().fit(1, mapped(batches, said))


# inputs


class Wrong(NamedTuple):
    net: Any
    images: Tensor
    says: str
    transform: str

    @property
    def message(self) -> str:
        return f"{self.says}. In the data, behind .batch(…): .map({self.transform}, 'image')"


FLOATS, CAST = "Linear '1': expected float32, got 'image' ", "hs.data.Cast(torch.float32)"
PLANES = "Conv2d '0': expected a batch [N, 1, H, W], got 'image' "
BOTH = "Conv2d '0': expected float32, a batch [N, 1, H, W], got 'image' "
INPUTS: dict[str, Wrong] = {
    "uint8": Wrong(dense, PIXELS, f"{FLOATS}(uint8 [8, 6, 6])", "hs.data.Rescale(1 / 255)"),
    "int64": Wrong(dense, PIXELS.long(), f"{FLOATS}(int64 [8, 6, 6])", CAST),
    "float64": Wrong(dense, IMAGES.double(), f"{FLOATS}(float64 [8, 6, 6])", CAST),
    "gray": Wrong(conv, IMAGES, f"{PLANES}(float32 [8, 6, 6])", "hs.data.ToCHW()"),
    "HWC": Wrong(
        conv, IMAGES[..., None], f"{PLANES}(float32 [8, 6, 6, 1])", 'hs.data.ToCHW(layout="HWC")'
    ),
    "bytes": Wrong(
        conv, PIXELS, f"{BOTH}(uint8 [8, 6, 6])", "[hs.data.ToCHW(), hs.data.Rescale(1 / 255)]"
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_images_that_a_layer_cannot_take(name: str) -> None:
    case = INPUTS[name]
    said = told(lambda: model(case.net()).fit(1, data(case.images)), RuntimeError)
    assert said == f"step 1: {case.message}"
    model(case.net()).fit(1, mapped(data(case.images), said))


@pytest.mark.parametrize("precision", ["O1", "O2", "O3", "fp16", "bf16"])
def test_bytes_in_every_precision(precision: str) -> None:
    said = told(lambda: model(precision=precision).fit(1, data(PIXELS)), RuntimeError)
    assert said == f"step 1: {INPUTS['uint8'].message}"
    model(precision=precision).fit(1, mapped(data(PIXELS), said))


def test_images_that_were_not_flattened() -> None:
    said = told(lambda: model(nn.Linear(36, 10)).fit(1, data()), RuntimeError)
    assert said == (
        "step 1: Linear: expected 36 features in the last place, got 'image' (float32 [8, 6, 6]). Begin the network "
        "with nn.Flatten()."
    )
    narrow = told(lambda: model(nn.Linear(5, 10)).fit(1, data(IMAGES[:, 0])), RuntimeError)
    assert (
        narrow
        == "step 1: Linear: expected 5 features in the last place, got 'image' (float32 [8, 6])."
    )


# where it happens


def test_a_loader_has_no_names_and_gets_lines_for_its_own_code() -> None:
    def loader(*columns: Tensor) -> DataLoader[Any]:
        return DataLoader(TensorDataset(*columns), 8)

    said = told(lambda: model().fit(1, loader(PIXELS, LABELS)), RuntimeError)
    assert said.endswith(
        "got item 0 (uint8 [8, 6, 6]). Where the batch is made, x being item 0: x.float() / 255"
    )
    said = told(lambda: model().fit(1, loader(IMAGES, LABELS.float())), RuntimeError)
    assert said.endswith(
        "got item 1 (float32 [8]). Where the batch is made, y being item 1: y.long()"
    )
    model().fit(1, loader(PIXELS.float() / 255, LABELS.float().long()))


def test_evaluation_and_prediction_say_it_too() -> None:
    wrong = data(labels=spoiled(10))
    assert told(lambda: model().evaluate(wrong), IndexError).startswith(
        "evaluation, batch 3: CrossEntropyLoss: "
    )
    assert "evaluation, batch 3" in told(lambda: model().fit(1, data(), valid=wrong), IndexError)
    said = told(lambda: model().predict(data(PIXELS)), RuntimeError)
    assert said == f"prediction, batch 1: {INPUTS['uint8'].message}"


def test_a_dict_of_columns_is_known_by_its_names() -> None:
    made = model(forward=lambda net, batch: (net(batch["image"]), batch["label"]))
    said = told(lambda: made.fit(1, [{"label": LABELS[:8] + 5, "image": IMAGES[:8]}]), IndexError)
    assert "got 10 in 'label' (int64 [8]), at place 5." in said


class Odd(nn.Module):
    """Raises what it is given, at its second forward."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error, self.layer, self.calls = error, nn.Linear(36, 10), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return self.layer(x.flatten(1))


@pytest.mark.parametrize(
    "error", [ValueError("mine"), RuntimeError("mine"), KeyError("mine"), LookupError("mine")]
)
def test_an_error_of_the_users_own_stays_itself_with_a_note(error: Exception) -> None:
    with pytest.raises(type(error), match="mine") as caught:
        model(Odd(error)).fit(1, data())
    assert caught.value is error
    assert error.__notes__ == [
        "at step 2, on a batch of 'image' (float32 [8, 6, 6]), 'label' (int64 [8])"
    ]


def test_what_names_its_place_itself_gets_no_note() -> None:
    images = IMAGES.clone()
    images[20] = torch.nan
    with pytest.raises(hs.NonFiniteError, match="step 3: non-finite gradient") as caught:
        model().fit(1, data(images))
    assert not hasattr(caught.value, "__notes__")


def test_batches_that_are_no_tensors_are_described() -> None:
    with pytest.raises(TypeError, match="must be Tensor") as caught:
        model(nn.Linear(36, 10)).fit(1, [([1.0], LABELS.numpy()), ([1.0], 3)])
    assert caught.value.__notes__ == [
        "at step 1, on a batch of item 0 (list of 1), item 1 (ndarray [24])"
    ]
    assert describe_value(3) == "int"


def test_whole_numbers_for_an_embedding_are_no_mistake() -> None:
    """Its own error is about range, and stays torch's, with the batch in a note."""
    net = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 10))
    batches = hs.data.Dataset({"word": torch.full((8, 2), 5), "label": LABELS[:8]}).batch(8)
    with pytest.raises(IndexError, match="out of range") as caught:
        model(net).fit(1, batches)
    assert caught.value.__notes__ == [
        "at step 1, on a batch of 'word' (int64 [8, 2]), 'label' (int64 [8])"
    ]


@pytest.mark.parametrize("sink", [1, 3])
def test_a_sunk_run_says_the_same(sink: int) -> None:
    """Without graphs, and otherwise as on CUDA: the batch is the one that the step had in hand."""

    def sunk(**options: Any) -> Model:
        net = options.pop("net", None) or dense()
        made = Model(
            net,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(net.parameters(), lr=0.01, fused=True),
            **options,
        )
        made.captures.training_runner = lambda step, feed, steps: CapturedRunner.for_step(
            step, feed, direct=True
        )
        return made

    history = hs.History()
    made = sunk(decide="device")
    said = told(
        lambda: made.fit(1, data(labels=spoiled(10)), callbacks=history, sink=sink), IndexError
    )
    assert said.startswith("step 3: CrossEntropyLoss: expected labels from 0 to 9")
    assert "got 10 in 'label' (int64 [8]), at place 4." in said
    assert history.rows["global_step"] == [1, 2]
    said = told(lambda: sunk(decide="device").fit(1, data(PIXELS), sink=sink), RuntimeError)
    assert said == f"step 1: {INPUTS['uint8'].message}"
    with pytest.raises(KeyError) as caught:
        sunk(net=Odd(KeyError("mine")), decide="device").fit(1, data(), sink=sink)
    assert caught.value.__notes__ == [
        "at step 2, on a batch of 'image' (float32 [8, 6, 6]), 'label' (int64 [8])"
    ]


def test_a_device_that_asserts_gets_advice_and_is_not_read_from() -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")
    explain_batch_error(error, "step 9", None, (), None)
    assert len(error.__notes__) == 1
    assert error.__notes__[0].startswith(
        "the usual cause is a label or an index out of range: with the network on a CPU"
    )


def test_a_batch_that_is_not_finite_is_named_with_its_row() -> None:
    x = IMAGES.clone()
    x[9, 2, 3] = torch.nan
    with pytest.raises(
        hs.NonFiniteError,
        match=r"The batch itself is the cause: 'x' \(float32 \[6, 6, 6\]\).*row 3",
    ):
        model().fit(1, hs.data.Dataset({"x": x, "y": LABELS}).batch(6))
    with pytest.raises(hs.NonFiniteError) as said:
        model(loss=lambda out, y: (out.sum() * 0).log() * 0 + out.sum() * 0).fit(
            1, [(IMAGES, LABELS)]
        )
    assert "The batch itself" not in str(said.value)
