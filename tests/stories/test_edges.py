"""Where two features meet: loads before the first update, wrappers that look like norms, counters kept in Python."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep as hs
from halfstep.step.gradients import grad_norms

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
X, Y = torch.ones(4, 3, device=DEVICE), torch.zeros(4, dtype=torch.int64, device=DEVICE)
BAD = torch.full_like(X, torch.inf)


def build(make: Any = None, **options: Any) -> hs.TrainStep:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to(DEVICE)
    make = make or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    return hs.TrainStep(net, nn.CrossEntropyLoss(), make(net.parameters()), **options)


def test_a_skip_after_loading_a_state_from_before_the_first_update_poisons_nothing() -> None:
    step = build(decide="device", nonfinite="skip")
    fresh = step.state_dict()
    step(X, Y)
    step(X, Y)
    step.load_state_dict(fresh)
    assert step(BAD, Y).skipped
    for _ in range(2):
        assert step(X, Y).loss.isfinite()
    assert all(p.isfinite().all() for p in step.params)


def test_one_saved_state_serves_two_steps_that_then_go_their_own_ways() -> None:
    first = build()
    first(X, Y)
    saved = first.state_dict()
    one, two = build(), build()
    one.load_state_dict(saved)
    two.load_state_dict(saved)
    before = [t.clone() for s in two.optimizer.state.values() for t in s.values()]
    one(X, Y)
    after = [t for s in two.optimizer.state.values() for t in s.values()]
    assert before
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


class Deeper(nn.Module):
    def __init__(self, extra: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.more = nn.ModuleList(nn.Linear(4, 4) for _ in range(extra))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x))
        return out


@pytest.mark.parametrize(
    ("mine", "theirs"), [(0, 1), (1, 0)], ids=["more than it has", "less than it has"]
)
def test_a_state_of_another_network_changes_nothing(mine: int, theirs: int) -> None:
    steps = []
    for extra in (mine, theirs):
        net = Deeper(extra).to(DEVICE)
        steps.append(
            hs.TrainStep(
                net, nn.CrossEntropyLoss(), torch.optim.SGD(net.first.parameters(), lr=0.1)
            )
        )
    steps[0](X, Y)
    before = {name: t.clone() for name, t in steps[0].net.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"more\.0\.weight: expected .* received .* Nothing was loaded"
    ):
        steps[0].load_state_dict(steps[1].state_dict())
    assert all(torch.equal(t, before[name]) for name, t in steps[0].net.state_dict().items())


class PreNorm(nn.Module):
    """The usual wrapper: its name ends in Norm, but it holds the layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fn(self.norm(x))
        return out


def test_a_wrapper_named_like_a_norm_runs_its_layers_low() -> None:
    net = nn.Sequential(PreNorm()).to(DEVICE)
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), precision="O2"
    )
    step(X, Y)
    seen = step.report().modules
    assert (seen["0.norm"].weight, seen["0.fn"].weight) == ("float32", "float16")


class Counting(torch.optim.SGD):
    """Keeps a counter in its groups, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr=lr)
        self.param_groups[0]["k"] = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        self.param_groups[0]["k"] += 1


def test_an_optimizer_that_counts_in_python_is_decided_on_the_host() -> None:
    step = build(Counting, nonfinite="skip")
    assert step.optimizer_kind == "host"
    step(X, Y)
    step(BAD, Y)
    assert step.optimizer.param_groups[0]["k"] == int(step.state.updates) == 1


@pytest.mark.parametrize("clip", [{"clip_value": 1.0}, {"clip_norm": 1.0}])
def test_the_blamed_parameter_is_found_before_clipping(clip: dict[str, float]) -> None:
    step = build(**clip, decide="host")
    step.params[3].register_hook(lambda g: g * torch.inf)
    with pytest.raises(hs.NonFiniteError, match=r"gradient in 2\.bias\."):
        step(X, Y)


def test_a_loaded_rate_of_another_dtype_does_not_round_the_table() -> None:
    step = build(lambda p: torch.optim.SGD(p, lr=0.1, fused=True), lr=[0.1, 0.2, 0.2])
    step(X, Y)
    step.optimizer.param_groups[0]["lr"] = torch.tensor(0.1, dtype=torch.bfloat16, device=DEVICE)
    expected = (
        0.2 if DEVICE == "cpu" else torch.tensor(0.2).item()
    )  # float64 on the CPU, float32 on CUDA
    assert step(X, Y).lr.item() == expected


def test_evaluation_refuses_a_forward_that_returns_no_arguments() -> None:
    net = nn.Linear(3, 2).to(DEVICE)
    evaluate = hs.EvalStep(net, nn.MSELoss(), forward=lambda n, x: n(x))
    with pytest.raises(TypeError, match="tuple of the loss's arguments"):
        evaluate(X)


def test_averages_are_not_saved_as_weights() -> None:
    step = build(ema=0.9)
    step(X, Y)
    with step.averaged(), pytest.raises(ValueError, match="leave the block"):
        step.state_dict()


def test_a_halted_device_moves_nothing() -> None:
    step = build(decide="device")
    step(X, Y)
    before = [p.detach().clone() for p in step.params]
    step.state.halted.fill_(1)
    step._update_on_device(step.state, halted_cycle(step))
    assert all(torch.equal(a, b) for a, b in zip(before, step.params, strict=True))


def halted_cycle(step: hs.TrainStep) -> list[int]:
    """A cycle with gradients in it, not yet ended."""
    step.accumulator(step.state, (X, Y))
    return list(range(len(step.params)))


class Copies(TorchDispatchMode):
    """The dtypes of every foreach copy, and how many there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[set[torch.dtype], ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._foreach_copy_.default:
            self.seen.append(tuple({t.dtype for t in each} for each in args[:2]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("skip", [False, True])
def test_norms_are_taken_back_by_dtype_since_mixed_lists_are_copied_one_by_one(skip: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(6)), nn.Linear(3, 2)).to(
        DEVICE
    )  # 12 floats, 6 integers
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, decide="device", nonfinite="skip")
    step(X, Y)
    step(X, Y)
    before = [b.clone() for b in net.buffers()]
    with Copies() as copies:
        record = step(BAD if skip else X, Y)
    assert bool(record.skipped) is skip
    assert copies.seen
    assert all(len(mine) == len(given) == 1 for mine, given in copies.seen)
    same = [torch.equal(a, b) for a, b in zip(before, net.buffers(), strict=True)]
    assert all(same) is skip


class Replacing(nn.Module):
    """Puts another tensor where a buffer was, as networks over streams do, instead of writing into it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.how = nn.Linear(3, 2), how
        self.register_buffer(
            "last", None if how == "filled" else torch.zeros(1 if how == "grown" else 4, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.cat([self.last, x.detach()]) if self.how == "grown" else x.detach()
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("how", ["replaced", "grown", "filled"])
def test_a_buffer_that_forward_replaced_is_put_back_and_the_batch_is_left_alone(
    how: str, decide: Any
) -> None:
    net = Replacing(how).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, decide=decide, nonfinite="skip")
    step(X.clone(), Y)
    before, kept = net.last, net.last.clone()
    bad = BAD.clone()
    assert step(bad, Y).skipped
    assert net.last is before
    assert torch.equal(net.last, kept)
    assert torch.equal(bad, BAD)
    good = X * 2
    assert step(good, Y).updated
    assert torch.equal(net.last[-4:], good)


@pytest.mark.parametrize("decide", ["host", "device"])
@pytest.mark.parametrize("fused", [True, False])
def test_momentum_that_is_switched_on_later_starts_from_nothing_after_a_skip_too(
    fused: bool, decide: Any
) -> None:
    def run(decide: Any) -> list[Tensor]:
        step = build(
            lambda p: torch.optim.SGD(p, lr=0.1, fused=fused), decide=decide, nonfinite="skip"
        )
        for _ in range(3):
            step(X, Y)
        step.optimizer.param_groups[0]["momentum"] = 0.9
        assert step(BAD, Y).skipped
        for _ in range(3):
            assert step(X, Y).updated
        return [p.detach().clone() for p in step.params]

    def plain() -> list[Tensor]:
        net = build().net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
        for i in range(6):
            optimizer.param_groups[0]["momentum"] = 0.9 if i >= 3 else 0.0
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(X), Y).backward()
            optimizer.step()
        return [p.detach().clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(decide), plain(), strict=True))


def test_the_norm_of_float16_gradients_beside_kept_ones_is_computed_in_float32() -> None:
    wide, low = (
        torch.ones(3, device=DEVICE),
        torch.full((8,), 40000.0, dtype=torch.float16, device=DEVICE),
    )
    for order in ([wide, low], [low, wide]):
        assert sorted(grad_norms(order).tolist()) == [
            g.double().norm().float().item() for g in (wide, low)
        ]
