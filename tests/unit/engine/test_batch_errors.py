"""Batches that a network or a loss cannot take.

The message names the step, the column, its dtype and shape, and the line of code that it advises
works.
"""

import re
from collections.abc import Callable
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
from tests.support.equal_tensors import assert_equal_tensors

PIXELS = torch.randint(
    0, 256, (24, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)
IMAGES = PIXELS.float() / 255
LABELS = torch.arange(24) % 10
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "O1": {"precision": "O1"},
    "O2": {"precision": "O2"},
    "cycle": {"accumulate": 2},
}


def make_dense(classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(36, classes))


def make_conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 10))


def make_model(net: nn.Module | None = None, loss: Any = None, **options: Any) -> Model:
    torch.manual_seed(0)
    if net is None:
        net = make_dense()
    if loss is None:
        loss = nn.CrossEntropyLoss()
    return Model(net, loss, torch.optim.SGD(net.parameters(), lr=0.01), **options)


def make_data(images: Tensor = IMAGES, labels: Tensor = LABELS) -> hs.data.Dataset:
    """Three batches of eight."""
    return hs.data.Dataset({"image": images, "label": labels}).batch(8)


def labels_with(value: int, index: int = 20) -> Tensor:
    """The labels with one of them changed; index 20 is the fifth of batch 3."""
    labels = LABELS.clone()
    labels[index] = value
    return labels


def error_message(action: Callable[[], Any], cause: type[BaseException]) -> str:
    """The message of the ValueError that this raises. torch's own error must be its cause."""
    place = r"^(step|evaluation, batch|prediction, batch) \d+: "
    with pytest.raises(ValueError, match=place) as caught:
        action()
    assert isinstance(caught.value.__cause__, cause)
    return str(caught.value)


def fit_error(model: Model, data: Any, cause: type[BaseException]) -> str:
    """The message of the error that ends a fit of one epoch."""
    return error_message(lambda: model.fit(1, data), cause)


def follow_advice(data: hs.data.Dataset, message: str) -> hs.data.Dataset:
    """The data with the advised `.map(...)` behind its `batch()`."""
    advice = re.search(r"behind \.batch\(…\): (\.map\(.*\))$", message)
    assert advice is not None, message
    mapped = eval(f"data{advice[1]}", {"data": data, "hs": hs, "torch": torch})
    assert isinstance(mapped, hs.data.Dataset)
    return mapped


# --- Labels ---


LOSSES: dict[str, Any] = {
    "module": nn.CrossEntropyLoss(),
    "weighted": nn.CrossEntropyLoss(torch.ones(10)),
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "ours": hs.losses.CrossEntropy(0.1),
    "function": F.cross_entropy,
    "partial": partial(F.cross_entropy, label_smoothing=0.1),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("options", MODEL_OPTIONS.values(), ids=MODEL_OPTIONS)
def test_a_label_out_of_range_is_named(loss: Any, options: dict[str, Any]) -> None:
    """It is in batch 3; steps 1 and 2 were done, and callbacks got their rows."""
    history = hs.History()
    model = make_model(loss=loss, **options)
    data = make_data(labels=labels_with(10))
    message = error_message(lambda: model.fit(1, data, callbacks=history), IndexError)
    loss_name = type(loss).__name__ if isinstance(loss, nn.Module) else "cross_entropy"
    assert message.startswith(
        f"step 3: {loss_name}: expected labels from 0 to 9, as the network has 10 outputs (or -100"
    )
    assert "got 10 in 'label' (int64 [8]), at place 4." in message
    assert "Give the last layer 11 outputs or more, or mend the labels." in message
    assert history.rows["global_step"] == [1, 2]


def test_the_advice_for_a_label_out_of_range_works() -> None:
    assert make_model(make_dense(11)).fit(1, make_data(labels=labels_with(10))).global_step == 3
    make_model().fit(1, make_data(labels=labels_with(-100)))


def test_a_negative_label_is_named_with_the_ignored_one() -> None:
    data = make_data(labels=labels_with(-1))
    message = fit_error(make_model(), data, IndexError)
    assert "got -1 in 'label' (int64 [8]), at place 4." in message
    assert message.endswith(
        "Mend the labels, or give those to be left out the number ignore_index=-100."
    )

    model = make_model(loss=nn.CrossEntropyLoss(ignore_index=3))
    message = fit_error(model, data, IndexError)
    assert "(or 3, which is ignored), got -1" in message


def test_labels_that_count_from_one_get_advice_that_works() -> None:
    data = make_data(labels=LABELS + 1)
    message = fit_error(make_model(), data, IndexError)
    advice = "They may count from 1. In the data, behind .batch(…): .map(lambda y: y - 1, 'label')"
    assert advice in message

    advised = make_model()
    advised.fit(1, follow_advice(data, message))
    correct = make_model()
    correct.fit(1, make_data())
    assert_equal_tensors(advised.net.parameters(), correct.net.parameters())


def test_a_label_of_a_pixel_is_named_by_its_flat_index() -> None:
    masks = torch.zeros(24, 6, 6, dtype=torch.int64)
    masks[11, 2, 3] = 4
    data = hs.data.Dataset({"image": IMAGES[:, None], "mask": masks}).batch(8)
    message = fit_error(make_model(nn.Conv2d(1, 4, 1)), data, IndexError)
    assert message.startswith("step 2: CrossEntropyLoss: expected labels from 0 to 3")
    index = 3 * 36 + 2 * 6 + 3
    assert f"got 4 in 'mask' (int64 [8, 6, 6]), at place {index}." in message


@pytest.mark.parametrize("options", MODEL_OPTIONS.values(), ids=MODEL_OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int16])
def test_labels_of_another_dtype_get_advice_that_works(
    dtype: torch.dtype, options: dict[str, Any]
) -> None:
    data = make_data(labels=LABELS.to(dtype))
    message = fit_error(make_model(**options), data, RuntimeError)
    name = str(dtype).removeprefix("torch.")
    assert message == (
        f"step 1: CrossEntropyLoss: expected class numbers as int64, got 'label' ({name} [8]). "
        "In the data, behind .batch(…): .map(hs.data.Cast(torch.int64), 'label')"
    )
    make_model(**options).fit(1, follow_advice(data, message))

    # Our own loss takes integers of any size.
    model = make_model(loss=hs.losses.CrossEntropy(), **options)
    model.fit(1, make_data(labels=LABELS.to(torch.int32)))


def test_labels_of_another_shape_get_advice_that_works() -> None:
    data = make_data(labels=LABELS[:, None])
    message = fit_error(make_model(), data, RuntimeError)
    assert message.startswith(
        "step 1: CrossEntropyLoss: expected labels of shape [8], got 'label' (int64 [8, 1])."
    )
    make_model().fit(1, follow_advice(data, message))


# --- Inputs ---


class InputCase(NamedTuple):
    """Images that a network cannot take."""

    make_net: Callable[[], nn.Module]
    images: Tensor
    problem: str
    transform: str

    @property
    def message(self) -> str:
        return f"{self.problem}. In the data, behind .batch(…): .map({self.transform}, 'image')"


NO_FLOATS = "Linear '1': expected float32, got 'image'"
NO_CHANNELS = "Conv2d '0': expected a batch [N, 1, H, W], got 'image'"
NEITHER = "Conv2d '0': expected float32, a batch [N, 1, H, W], got 'image'"
CAST = "hs.data.Cast(torch.float32)"
INPUTS: dict[str, InputCase] = {
    "uint8": InputCase(
        make_dense, PIXELS, f"{NO_FLOATS} (uint8 [8, 6, 6])", "hs.data.Rescale(1 / 255)"
    ),
    "int64": InputCase(make_dense, PIXELS.long(), f"{NO_FLOATS} (int64 [8, 6, 6])", CAST),
    "float64": InputCase(make_dense, IMAGES.double(), f"{NO_FLOATS} (float64 [8, 6, 6])", CAST),
    "float16": InputCase(make_dense, IMAGES.half(), f"{NO_FLOATS} (float16 [8, 6, 6])", CAST),
    "bfloat16": InputCase(make_dense, IMAGES.bfloat16(), f"{NO_FLOATS} (bfloat16 [8, 6, 6])", CAST),
    "gray": InputCase(make_conv, IMAGES, f"{NO_CHANNELS} (float32 [8, 6, 6])", "hs.data.ToCHW()"),
    "HWC": InputCase(
        make_conv,
        IMAGES[..., None],
        f"{NO_CHANNELS} (float32 [8, 6, 6, 1])",
        'hs.data.ToCHW(layout="HWC")',
    ),
    "bytes": InputCase(
        make_conv,
        PIXELS,
        f"{NEITHER} (uint8 [8, 6, 6])",
        "[hs.data.ToCHW(), hs.data.Rescale(1 / 255)]",
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_images_that_a_layer_cannot_take_get_advice_that_works(name: str) -> None:
    case = INPUTS[name]
    data = make_data(case.images)
    message = fit_error(make_model(case.make_net()), data, RuntimeError)
    assert message == f"step 1: {case.message}"
    make_model(case.make_net()).fit(1, follow_advice(data, message))


@pytest.mark.parametrize("precision", ["O1", "O2", "O3", "fp16", "bf16"])
def test_images_of_bytes_get_the_same_advice_in_every_precision(precision: str) -> None:
    data = make_data(PIXELS)
    message = fit_error(make_model(precision=precision), data, RuntimeError)
    assert message == f"step 1: {INPUTS['uint8'].message}"
    make_model(precision=precision).fit(1, follow_advice(data, message))


def test_images_that_are_not_flattened_get_advice() -> None:
    message = fit_error(make_model(nn.Linear(36, 10)), make_data(), RuntimeError)
    assert message == (
        "step 1: Linear: expected 36 features in the last place, "
        "got 'image' (float32 [8, 6, 6]). Begin the network with nn.Flatten()."
    )
    message = fit_error(make_model(nn.Linear(5, 10)), make_data(IMAGES[:, 0]), RuntimeError)
    assert message == (
        "step 1: Linear: expected 5 features in the last place, got 'image' (float32 [8, 6])."
    )


# --- Other data, evaluation and prediction ---


def test_batches_of_a_dataloader_have_no_names_and_get_advice_for_its_code() -> None:
    def make_loader(images: Tensor, labels: Tensor) -> DataLoader[Any]:
        return DataLoader(TensorDataset(images, labels), batch_size=8)

    message = fit_error(make_model(), make_loader(PIXELS, LABELS), RuntimeError)
    assert message.endswith(
        "got item 0 (uint8 [8, 6, 6]). Where the batch is made, x being item 0: x.float() / 255"
    )
    message = fit_error(make_model(), make_loader(IMAGES, LABELS.float()), RuntimeError)
    assert message.endswith(
        "got item 1 (float32 [8]). Where the batch is made, y being item 1: y.long()"
    )
    make_model().fit(1, make_loader(PIXELS.float() / 255, LABELS.float().long()))


def test_evaluation_and_prediction_name_their_batch() -> None:
    data = make_data(labels=labels_with(10))
    message = error_message(lambda: make_model().evaluate(data), IndexError)
    assert message.startswith("evaluation, batch 3: CrossEntropyLoss: ")
    message = error_message(lambda: make_model().fit(1, make_data(), valid=data), IndexError)
    assert "evaluation, batch 3" in message
    message = error_message(lambda: make_model().predict(make_data(PIXELS)), RuntimeError)
    assert message == f"prediction, batch 1: {INPUTS['uint8'].message}"


def test_columns_of_a_dict_are_named() -> None:
    model = make_model(forward=lambda net, batch: (net(batch["image"]), batch["label"]))
    batches = [{"label": LABELS[:8] + 5, "image": IMAGES[:8]}]
    message = fit_error(model, batches, IndexError)
    assert "got 10 in 'label' (int64 [8]), at place 5." in message


# --- Errors that stay as they are, with a note ---


class FailsAtSecondForward(nn.Module):
    """Raises this error at its second forward."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error
        self.layer = nn.Linear(36, 10)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return self.layer(x.flatten(1))


@pytest.mark.parametrize("error_type", [ValueError, RuntimeError, KeyError, LookupError])
def test_an_error_of_the_users_code_stays_itself_with_a_note(error_type: type[Exception]) -> None:
    error = error_type("from forward")
    with pytest.raises(error_type, match="from forward") as caught:
        make_model(FailsAtSecondForward(error)).fit(1, make_data())
    assert caught.value is error
    assert error.__notes__ == [
        "at step 2, on a batch of 'image' (float32 [8, 6, 6]), 'label' (int64 [8])"
    ]


def test_an_error_that_names_its_step_itself_gets_no_note() -> None:
    images = IMAGES.clone()
    images[20] = torch.nan
    with pytest.raises(hs.NonFiniteError, match="step 3: non-finite gradient") as caught:
        make_model().fit(1, make_data(images))
    assert not hasattr(caught.value, "__notes__")


def test_batches_without_tensors_are_described() -> None:
    batches = [([1.0], LABELS.numpy()), ([1.0], 3)]
    with pytest.raises(TypeError, match="must be Tensor") as caught:
        make_model(nn.Linear(36, 10)).fit(1, batches)
    assert caught.value.__notes__ == [
        "at step 1, on a batch of item 0 (list of 1), item 1 (ndarray [24])"
    ]
    assert describe_value(3) == "int"


def test_integers_for_an_embedding_are_not_called_a_mistake() -> None:
    """Its own error is about the range, and stays torch's, with the batch in a note."""
    net = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 10))
    data = hs.data.Dataset({"word": torch.full((8, 2), 5), "label": LABELS[:8]}).batch(8)
    with pytest.raises(IndexError, match="out of range") as caught:
        make_model(net).fit(1, data)
    assert caught.value.__notes__ == [
        "at step 1, on a batch of 'word' (int64 [8, 2]), 'label' (int64 [8])"
    ]


# --- The captured loop, and errors of the device ---


def make_captured_model(net: nn.Module) -> Model:
    """A model whose steps run as on CUDA, but without graphs."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, fused=True)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, decide="device")
    model.captures.training_runner = lambda step, feed, steps: CapturedRunner.for_step(
        step, feed, direct=True
    )
    return model


@pytest.mark.parametrize("sink", [1, 3])
def test_a_captured_run_gives_the_same_messages(sink: int) -> None:
    """The batch that it names is the one of the step that failed."""
    history = hs.History()
    model = make_captured_model(make_dense())
    data = make_data(labels=labels_with(10))
    message = error_message(lambda: model.fit(1, data, callbacks=history, sink=sink), IndexError)
    assert message.startswith("step 3: CrossEntropyLoss: expected labels from 0 to 9")
    assert "got 10 in 'label' (int64 [8]), at place 4." in message
    assert history.rows["global_step"] == [1, 2]

    model = make_captured_model(make_dense())
    message = error_message(lambda: model.fit(1, make_data(PIXELS), sink=sink), RuntimeError)
    assert message == f"step 1: {INPUTS['uint8'].message}"

    model = make_captured_model(FailsAtSecondForward(KeyError("from forward")))
    with pytest.raises(KeyError) as caught:
        model.fit(1, make_data(), sink=sink)
    assert caught.value.__notes__ == [
        "at step 2, on a batch of 'image' (float32 [8, 6, 6]), 'label' (int64 [8])"
    ]


def test_a_device_side_assert_gets_advice_and_the_device_is_not_read() -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")
    explain_batch_error(error, "step 9", None, (), None)
    assert len(error.__notes__) == 1
    assert error.__notes__[0].startswith(
        "the usual cause is a label or an index out of range: with the network on a CPU"
    )


def test_a_batch_that_is_not_finite_is_named_with_its_row() -> None:
    images = IMAGES.clone()
    images[9, 2, 3] = torch.nan
    data = hs.data.Dataset({"x": images, "y": LABELS}).batch(6)
    message = r"The batch itself is the cause: 'x' \(float32 \[6, 6, 6\]\).*row 3"
    with pytest.raises(hs.NonFiniteError, match=message):
        make_model().fit(1, data)

    # Here the batch is finite, and the loss is not.
    def nan_loss(out: Tensor, y: Tensor) -> Tensor:
        return (out.sum() * 0).log() * 0 + out.sum() * 0

    with pytest.raises(hs.NonFiniteError) as caught:
        make_model(loss=nan_loss).fit(1, [(IMAGES, LABELS)])
    assert "The batch itself" not in str(caught.value)


# Functions that do not fit the batch.


class OneInput(nn.Module):
    """A network of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(36, 10)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x.flatten(1))


def whole(net: nn.Module, b: Any) -> Any:
    return net(b[0]), b[1]


def loss_and_outputs(net: nn.Module, x: Tensor, y: Tensor) -> Any:
    return F.cross_entropy(net(x), y), net(x)


CALL_ERRORS: dict[str, tuple[dict[str, Any], list[Any], str]] = {
    "forward= takes the batch whole": (
        {"forward": whole},
        [(IMAGES, LABELS)],
        "forward: expected a function of the network and the 2 items of a batch, got "
        "whole(net: torch.nn.modules.module.Module, b: Any) -> Any; "
        "write it as forward=lambda net, x, y: …",
    ),
    "forward= returns the loss too": (
        {"forward": loss_and_outputs},
        [(IMAGES, LABELS)],
        "forward: expected (outputs, target) for the loss CrossEntropyLoss, received a single "
        "number first",
    ),
    "more inputs than the network has": (
        {},
        [(IMAGES, LABELS, LABELS, LABELS)],
        "cannot take 3 inputs; say how to use a batch: forward=lambda net, *batch: …",
    ),
}


@pytest.mark.parametrize("case", CALL_ERRORS)
def test_a_call_that_does_not_fit_the_batch_says_how_to_write_it(case: str) -> None:
    options, data, expected = CALL_ERRORS[case]
    net = OneInput()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, **options)
    with pytest.raises(ValueError, match=re.escape(expected)) as caught:
        model.fit(1, data, progress=False)
    assert str(caught.value).startswith("step 1: ")


def test_a_type_error_inside_forward_stays_as_it_is() -> None:
    def forward(net: nn.Module, x: Tensor, y: Tensor) -> Any:
        return net(x), y + "one"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        make_model(forward=forward).fit(1, make_data(), progress=False)
