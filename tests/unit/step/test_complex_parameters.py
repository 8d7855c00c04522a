"""Complex parameters: every option of a step on them, beside plain torch; never a complex half."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from tests.support.captured_runs import differing_tensors
from tests.support.emulated_graphs import sink_with_emulated_graphs

STEPS = 12
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, foreach=False),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-4, foreach=True),
    "adamw amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-4, amsgrad=True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "skip": {"nonfinite": "skip"},
    "clip_norm": {"clip_norm": 0.05},
    "clip_value": {"clip_value": 0.01},
    "ema": {"ema": 0.9},
    "rates": {"lr": [0.1, 0.05, 0.01]},
    "all": {
        "accumulate": 2,
        "clip_norm": 0.05,
        "clip_value": 0.02,
        "ema": 0.9,
        "nonfinite": "skip",
        "lr": [0.1, 0.05, 0.01],
    },
}
PRECISIONS = (
    *("fp32", "fp64", "O1", "O1+bf16", "O2", "O2+bf16", "O3+bf16"),
    *("fp16", "bf16", "fp16+kahan", "bf16+stochastic"),
)


class Wave(nn.Module):
    """A complex layer and a complex buffer between two real layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.real = nn.Linear(6, 6)
        self.mix = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(6, dtype=torch.complex64))
        self.head = nn.Linear(6, 3)
        self.register_buffer("phase", torch.exp(1j * torch.arange(6.0)))

    def forward(self, x: Tensor) -> Tensor:
        real = self.real(x)
        # The conjugate makes a gradient that torch leaves unresolved.
        wave = (real.to(self.mix.dtype) * self.phase) @ self.mix.conj() + self.shift
        out: Tensor = self.head((wave.abs() + wave.real * wave.imag).to(real.dtype))
        return out


def make_batches(count: int = STEPS) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(count)
    ]


def make_step(optimizer: str, precision: str, **options: Any) -> hs.TrainStep:
    net = Wave()
    return hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        OPTIMIZERS[optimizer](net.parameters()),
        precision=precision,
        **options,
    )


def plain_training(
    optimizer_name: str, dtype: torch.dtype, options: dict[str, Any]
) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Losses, weights and their averages of a plain loop of torch's."""
    net = Wave()
    if dtype == torch.float64:
        net.double()
        for name in ("mix", "shift"):
            getattr(net, name).data = getattr(net, name).data.to(torch.complex128)
        net.phase = net.phase.to(torch.complex128)
    optimizer = OPTIMIZERS[optimizer_name](net.parameters())
    averages = [p.detach().clone() for p in net.parameters()]
    losses = []
    rates = iter(options.get("lr", ()))
    for x, y in make_batches():
        loss = nn.functional.cross_entropy(net(x.to(dtype)), y)
        optimizer.zero_grad()
        loss.backward()
        for p in net.parameters():
            assert p.grad is not None
            p.grad = p.grad.resolve_conj()  # torch's own optimizers ask for it
        if "clip_norm" in options:
            nn.utils.clip_grad_norm_(net.parameters(), options["clip_norm"])
        if "lr" in options:
            optimizer.param_groups[0]["lr"] = next(rates, options["lr"][-1])
        optimizer.step()
        for average, p in zip(averages, net.parameters(), strict=True):
            average.lerp_(p.detach(), 1 - 0.9)
        losses.append(loss.item())
    return losses, [p.detach() for p in net.parameters()], averages


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("precision", "rounding"), [("fp32", 1e-5), ("fp64", 1e-13)])
def test_clipped_steps_are_those_of_plain_torch_to_rounding(
    precision: str, rounding: float, optimizer: str
) -> None:
    """torch adds up the norms of one dtype after the other, halfstep parameter by parameter."""
    dtype = torch.float64 if precision == "fp64" else torch.float32
    losses, weights, _ = plain_training(optimizer, dtype, OPTIONS["clip_norm"])
    step = make_step(optimizer, precision, **OPTIONS["clip_norm"])
    received = [step(*batch).loss.item() for batch in make_batches()]
    assert received == pytest.approx(losses, rel=rounding)
    for p, q in zip(step.net.parameters(), weights, strict=True):
        torch.testing.assert_close(p.detach(), q, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("options", ["plain", "skip", "ema", "rates"])
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_plain_torch(optimizer: str, precision: str, options: str) -> None:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    losses, weights, averages = plain_training(optimizer, dtype, OPTIONS[options])
    step = make_step(optimizer, precision, **OPTIONS[options])
    assert [step(*batch).loss.item() for batch in make_batches()] == losses
    assert all(torch.equal(p, q) for p, q in zip(step.net.parameters(), weights, strict=True))
    for average, expected in zip(step.state.ema, averages, strict=False):
        assert torch.equal(average, expected)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_option_works_in_every_precision(precision: str, options: str) -> None:
    """Trains, stays complex, and continues exactly from its state, captured too."""
    step = make_step("adam", precision, **OPTIONS[options])
    expected_dtype = torch.complex128 if precision == "fp64" else torch.complex64
    batches = make_batches()
    before = step.net.mix.detach().clone()
    for batch in batches[:5]:
        step(*batch)
    resumed = make_step("adam", precision, **OPTIONS[options])
    resumed.load_state_dict(copy.deepcopy(step.state_dict()))
    for batch in batches[5:]:
        assert torch.equal(step(*batch).loss, resumed(*batch).loss)
    assert differing_tensors(step, resumed) == []
    assert not torch.equal(step.net.mix, before)
    for tensor in (step.net.mix, step.net.phase, step.optimizer.state[step.net.mix]["exp_avg"]):
        assert tensor.dtype == expected_dtype
        assert bool(torch.isfinite(torch.view_as_real(tensor.detach())).all())


@pytest.mark.parametrize("options", ["plain", "accumulate", "clip_norm", "clip_value", "ema"])
@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16"])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])  # torch's Adam: tests/gpu/step
def test_captured_steps_have_the_bits_of_eager_ones(
    optimizer: str, precision: str, options: str
) -> None:
    given = {**OPTIONS[options], "decide": "device", "nonfinite": "skip"}
    batches = make_batches(24)
    eager = make_step(optimizer, precision, **given)
    losses = [eager(*batch).loss.item() for batch in batches]
    captured = make_step(optimizer, precision, **given)
    sink = sink_with_emulated_graphs(captured, batches, every=6)
    assert [loss for records in sink for loss in records.loss.tolist()] == losses
    assert sink.runner.program.replays > 0
    assert differing_tensors(eager, captured) == []


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("part", ["real", "imag"])
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16"])
def test_an_overflow_in_one_part_skips_the_update(
    precision: str, value: float, part: str, decide: str
) -> None:
    step = make_step("momentum", precision, nonfinite="skip", decide=decide, ema=0.9)
    batches = make_batches()
    step(*batches[0])
    before = step.fingerprints()
    bad = complex(value, 0) if part == "real" else complex(0, value)
    hook = step.net.mix.register_hook(lambda grad: grad + bad)
    assert step(*batches[1]).skipped
    hook.remove()
    names = [name for name in before if not name.startswith("state.")]
    after = step.fingerprints()
    assert all(after[name] == before[name] for name in names)
    assert step.names[int(step.state.bad.nonzero()[0])] == "mix"


def test_the_norm_is_that_of_torch() -> None:
    step = make_step("sgd", "fp32", clip_norm=1e9)
    net = copy.deepcopy(step.net)
    x, y = make_batches()[0]
    nn.functional.cross_entropy(net(x), y).backward()
    for p in net.parameters():
        assert p.grad is not None
        p.grad = p.grad.resolve_conj()
    expected = nn.utils.clip_grad_norm_(net.parameters(), 1e9)
    assert step(x, y).grad_norm.item() == pytest.approx(expected.item(), rel=1e-6)


def test_accumulated_batches_have_the_gradient_of_the_full_batch() -> None:
    x, y = make_batches()[0]
    whole = make_step("sgd", "fp64")
    whole(x, y)
    parts = make_step("sgd", "fp64", accumulate=3)
    for piece in zip(x.split([3, 3, 2]), y.split([3, 3, 2]), strict=True):
        parts(*piece)
    for p, q in zip(whole.params, parts.params, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2"])
def test_complex128_is_refused_where_parameters_are_float32(precision: str) -> None:
    net = Wave()
    net.mix = nn.Parameter(net.mix.detach().to(torch.complex128))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"torch\.complex64, but 'mix' is torch\.complex128"):
        hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision)


@pytest.mark.parametrize("precision", ["fp32", "fp64", "O2", "bf16"])
def test_a_run_is_resumed_from_its_checkpoint(tmp_path: Path, precision: str) -> None:
    def fit(epochs: int, folder: Path) -> hs.Model:
        net = Wave()
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, ema=0.9)
        model.fit(epochs, make_batches(), callbacks=[hs.Checkpoint(folder)], resume="auto")
        return model

    fit(1, tmp_path / "stopped")
    resumed = fit(2, tmp_path / "stopped")
    whole = fit(2, tmp_path / "whole")
    assert differing_tensors(resumed.step, whole.step) == []
    assert resumed.evaluate(make_batches()) == whole.evaluate(make_batches())
