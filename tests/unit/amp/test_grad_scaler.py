"""GradScaler: torch's bits, MegEngine's gears, several optimizers, streaks, and a state that comes back whole."""

import copy
import math
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from halfstep import amp
from halfstep.amp import GradScaler, OverflowStreak
from halfstep.grads import GradManager
from halfstep.precision import DynamicScale

TorchScaler = torch.amp.GradScaler
Params = Iterable[Tensor]
OPTIMIZERS: dict[str, Callable[[Params], Optimizer]] = {
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: Adam(p, lr=0.01),
    "fused adam": lambda p: Adam(p, lr=0.01, fused=True),
}
PLANTED = {0, 1, 30, 31, 32, 99, 150, 219}  # the first and the last step, single ones and a run
VALUES = (math.inf, -math.inf, math.nan)


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    yield
    amp.enabled = False
    amp.low_prec_dtype = "float16"


def make(**kwargs: Any) -> GradScaler:
    return GradScaler(**{"device": "cpu", "growth_interval": 5, **kwargs})


def net_and(optimizer: str) -> tuple[nn.Linear, Optimizer]:
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    return net, OPTIMIZERS[optimizer](net.parameters())


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=generator), torch.randn(5, 3, generator=generator)


def plant(net: nn.Linear, step: int) -> None:
    if step in PLANTED:
        assert net.weight.grad is not None
        net.weight.grad[step % 3, 0] = VALUES[step % 3]


def iterate(
    scaler: TorchScaler, net: nn.Linear, optimizer: Optimizer, step: int, clip: bool = False
) -> None:
    """One iteration of torch's protocol."""
    optimizer.zero_grad()
    x, y = batch(step)
    scaler.scale(F.mse_loss(net(x), y)).backward()
    plant(net, step)
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()


def train(
    scaler: TorchScaler, optimizer: str, steps: Iterable[int] = range(220), **how: bool
) -> list[Any]:
    """The scale after each step, then everything that was trained."""
    net, opt = net_and(optimizer)
    scales: list[Any] = []
    for step in steps:
        iterate(scaler, net, opt, step, **how)
        scales.append(scaler.get_scale())
    return [scales, *flat(net, opt)]


def flat(net: nn.Module, optimizer: Optimizer) -> list[Any]:
    state = optimizer.state_dict()["state"]
    return [*net.state_dict().values(), *(v for slot in state.values() for v in slot.values())]


def assert_same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b) if isinstance(a, Tensor) else a == b


def poison(net: nn.Module, value: float = math.nan) -> None:
    for p in net.parameters():
        p.grad = torch.full_like(p, value)


def skip_once(scaler: GradScaler, net: nn.Module, optimizer: Optimizer) -> None:
    scaler.scale(torch.ones(()))
    poison(net)
    scaler.step(optimizer)
    scaler.update()


# torch's protocol, bit for bit


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_220_steps_with_planted_overflows_equal_torchs(optimizer: str, clip: bool) -> None:
    theirs = train(TorchScaler("cpu", growth_interval=5), optimizer, clip=clip)
    scaler = make()
    assert_same(train(scaler, optimizer, clip=clip), theirs)
    assert scaler.skipped == len(PLANTED)
    assert scaler.skips_in_a_row == 1
    assert scaler.state_dict()["_growth_tracker"] == 0
    assert max(theirs[0]) > 2**30  # the scale really moved


def test_the_trajectory_equals_dynamic_scale_next() -> None:
    rule = DynamicScale(interval=5)
    state = rule.start(torch.device("cpu"))
    expected = []
    for step in range(220):
        state = rule.next(state, torch.tensor(float(step in PLANTED)))
        expected.append(state.scale.item())
    assert train(make(), "adam")[0] == expected


def test_a_real_overflow_of_half_gradients_is_skipped_and_recovered() -> None:
    """Gradients of half products overflow on their own while the scale is too high: nothing is planted."""
    runs = []
    for scaler in (
        TorchScaler("cpu", init_scale=2.0**24),
        make(init_scale=2.0**24, growth_interval=2000),
    ):
        net, opt = net_and("sgd momentum")
        scales = []
        for step in range(20):
            opt.zero_grad()
            x, y = batch(step)
            with amp.autocast(device_type="cpu"):
                loss = F.mse_loss(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        runs.append([scales, *flat(net, opt)])
    assert_same(*runs)
    assert isinstance(scaler, GradScaler)
    assert 0 < scaler.skipped < 20
    assert runs[0][0][-1] < 2.0**24


def test_fused_sgd_with_momentum_survives_an_overflow_in_its_first_step() -> None:
    """torch leaves the buffers uninitialised there; ours equals a run without the skipped steps."""
    trained = []
    for steps in (range(40), sorted(set(range(40)) - PLANTED)):
        net, _ = net_and("adam")
        opt = SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
        scaler = make(growth_interval=0)
        for step in steps:
            iterate(scaler, net, opt, step)
        trained.append(flat(net, opt))
    assert_same(*trained)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_clipped_update_at_every_scale(optimizer: str) -> None:
    runs = [
        train(make(init_scale=s, growth_interval=0), optimizer, range(2, 30), clip=True)
        for s in (1.0, 2.0**16)
    ]
    assert_same(runs[0][1:], runs[1][1:])


def test_half_gradients_are_refused_as_in_torch_and_bfloat16_ones_are_not() -> None:
    net = nn.Linear(2, 2).half()
    scaler = make()
    opt = SGD(net.parameters(), lr=0.1)
    scaler.scale(torch.ones(()))
    poison(net, 1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(opt)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale(net.parameters())
    net.bfloat16()
    poison(net, 2.0**16)
    scaler.unscale(net.parameters())
    assert net.weight.grad is not None
    assert net.weight.grad.eq(1).all()


def test_torchs_misuse_errors_are_kept() -> None:
    (net, opt) = net_and("adam")
    scaler = make()
    poison(net, 1.0)
    with pytest.raises(AssertionError, match=r"did not use scaler\.scale"):
        scaler.step(opt)
    scaler.scale(torch.ones(()))
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(opt)
    scaler.step(opt)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(opt)


def test_disabled_is_no_scaler_at_all() -> None:
    theirs = train(TorchScaler("cpu", enabled=False), "adam", range(2, 9))
    assert_same(train(make(enabled=False), "adam", range(2, 9)), theirs)
    scaler = make(enabled=False)
    (net, opt) = net_and("adam")
    assert scaler.state_dict() == {}
    scaler.load_state_dict(make().state_dict())
    gear_step(scaler, net, opt, 2, "automatic")
    assert scaler.scale_factor.item() == 1.0
    assert scaler.skipped == scaler.skips_in_a_row == 0
    scaler.scale_factor = 4.0
    assert scaler.get_scale() == 1
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False


# MegEngine's gears


def gear_step(scaler: GradScaler, net: nn.Linear, opt: Optimizer, step: int, gear: str) -> None:
    gm = GradManager().attach(net.parameters(), lambda t, g: bent(t, g, net, step))
    x, y = batch(step)
    with amp.autocast(device_type="cpu"), gm:
        loss = F.mse_loss(net(x), y)
        if gear == "automatic":
            scaler.backward(gm, loss)
        else:
            gm.backward(loss, dy=scaler.scale_factor)
    if gear == "manual":
        scaler.unscale(gm.attached_tensors())
        scaler.update()
    opt.step()
    opt.zero_grad()


def bent(tensor: Tensor, grad: Tensor, net: nn.Linear, step: int) -> Tensor:
    """The planted overflow as a callback of the manager."""
    return grad + math.inf if step in PLANTED and tensor is net.weight else grad


@pytest.mark.parametrize("optimizer", ["sgd momentum", "adam"])
def test_automatic_gear_equals_manual_gear_equals_torchs_protocol(optimizer: str) -> None:
    runs = []
    for gear in ("automatic", "manual", "torch"):
        (net, opt) = net_and(optimizer)
        scaler = make()
        scales = []
        for step in range(60):
            if gear == "torch":
                x, y = batch(step)
                with amp.autocast(device_type="cpu"):
                    loss = F.mse_loss(net(x), y)
                scaler.scale(loss).backward()
                plant(net, step)
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
            else:
                gear_step(scaler, net, opt, step, gear)
            scales.append(scaler.get_scale())
        runs.append([scales, scaler.skipped, *flat(net, opt)])
    assert_same(runs[0], runs[1])
    assert_same(runs[0], runs[2])
    assert runs[0][1] >= len(PLANTED & set(range(60)))  # and half gradients overflow on their own


@pytest.mark.parametrize("bad", [False, True])
def test_accumulation_equals_torchs(bad: bool) -> None:
    def micro(net: nn.Linear, i: int) -> Tensor:
        x, y = batch(100 + i)
        loss = F.mse_loss(net(x), y)
        return loss * math.nan if bad and i == 1 else loss

    (net, opt) = net_and("adam")
    scaler = make()
    gm = GradManager().attach(net.parameters())
    for i in range(4):
        with gm:
            scaler.backward(gm, micro(net, i), unscale_grad=False)
    assert scaler.get_scale() == 2**16  # no update inside the cycle
    scaler.unscale(gm.attached_tensors())
    scaler.update()
    opt.step()
    (theirs, their_opt) = net_and("adam")
    torchs = TorchScaler("cpu", growth_interval=5)
    for i in range(4):
        torchs.scale(micro(theirs, i)).backward()
    torchs.step(their_opt)
    torchs.update()
    assert_same(
        [scaler.get_scale(), *flat(net, opt)], [torchs.get_scale(), *flat(theirs, their_opt)]
    )
    assert scaler.skipped == bad


def test_unscale_takes_every_gradient_away_so_that_the_step_changes_nothing() -> None:
    (net, opt) = net_and("adam")
    scaler = make()
    gear_step(scaler, net, opt, 2, "automatic")
    before = copy.deepcopy(flat(net, opt))
    gm = GradManager().attach(net.parameters())
    with gm:
        gm.backward(net(torch.ones(1, 6)).sum(), dy=scaler.scale_factor)
    assert net.bias.grad is not None
    net.bias.grad[0] = math.inf
    assert scaler.unscale(gm.attached_tensors()) is scaler
    assert net.weight.grad is None
    assert net.bias.grad is None
    opt.step()
    assert_same(flat(net, opt), before)


def test_seeds_of_any_shape_and_number_are_scaled() -> None:
    def grads(backward: Callable[[GradManager, list[Tensor]], None]) -> list[Tensor]:
        net, _ = net_and("adam")
        gm = GradManager().attach(net.parameters())
        with gm:
            out = net(torch.arange(12.0).reshape(2, 6))
            backward(gm, [out, out.double().sum(dim=1)])
        return [p.grad for p in net.parameters() if p.grad is not None]

    scaler = make()
    for dy in (
        None,
        0.5,
        [torch.full((2, 3), 3.0).half(), torch.tensor([1.0, 2.0], dtype=torch.float64)],
        [None, 2.0],
    ):
        ours = grads(lambda gm, ys, dy=dy: scaler.backward(gm, ys, dy))  # type: ignore[misc]
        assert_same(ours, grads(lambda gm, ys, dy=dy: gm.backward(ys, dy)))  # type: ignore[misc]


def test_update_scale_is_a_choice_of_its_own() -> None:
    (net, _) = net_and("adam")
    scaler = make(growth_interval=1)
    gm = GradManager().attach(net.parameters())

    def run(**how: Any) -> float:
        with gm:
            scaler.backward(gm, net(torch.ones(1, 6)).sum(), **how)
        net.zero_grad()
        return scaler.get_scale() / 2**16

    assert run(update_scale=False) == 1
    assert run() == 2  # one update for both backward passes
    assert run(unscale_grad=False) == 2
    assert run(unscale_grad=False, update_scale=True) == 2  # nothing was checked, nothing moves
    with pytest.raises(
        ValueError,
        match="update_scale: expected True, False or 'if_unscale_grad', received 'never'",
    ):
        run(update_scale="never")


def test_update_with_a_new_scale_overrides_and_keeps_the_tracker() -> None:
    (net, opt) = net_and("adam")
    scaler = make()
    for step in (2, 3):
        iterate(scaler, net, opt, step)
    skip = torch.tensor(math.nan)
    scaler.scale(net(torch.ones(1, 6)).sum() * skip).backward()
    scaler.step(opt)
    scaler.update(new_scale=8.0)
    assert scaler.get_scale() == 8
    assert scaler.state_dict()["_growth_tracker"] == 2
    assert scaler.skipped == 1
    for value in (4, torch.tensor(2.0), torch.ones(1)):
        scaler.update(value)
        assert scaler.get_scale() == float(value)


def test_scale_factor_is_a_copy_and_can_be_set() -> None:
    scaler = make()
    seen = scaler.scale_factor
    scaler.scale_factor *= 2
    assert seen.shape == ()
    assert torch.equal(seen, torch.tensor(2.0**16))
    assert scaler.get_scale() == 2**17
    refused = {
        "power of two": (math.nan, -1.0),
        "move floor": (2.0**-20,),
        "reshape": (torch.ones(2),),
    }
    for advice, value in ((a, v) for a, values in refused.items() for v in values):
        with pytest.raises(ValueError, match=f"scale: expected .*, received .*do .*{advice}"):
            scaler.scale_factor = value
    assert scaler.get_scale() == 2**17


def test_the_two_protocols_do_not_unscale_twice() -> None:
    (net, opt) = net_and("adam")
    scaler = make()
    gm = GradManager().attach(net.parameters())
    with gm:
        scaler.backward(gm, net(torch.ones(1, 6)).sum())
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(
            RuntimeError, match=r"do optimizer.step\(\) after them instead of scaler.step"
        ):
            call(opt)
    opt.step()
    opt.zero_grad(set_to_none=False)
    iterate(scaler, net, opt, 2)  # torch's protocol next: scale() begins anew
    opt.zero_grad()
    scaler.scale(net(torch.ones(1, 6)).sum()).backward()
    scaler.unscale_(opt)
    with pytest.raises(
        RuntimeError, match=r"do scaler.step\(optimizer\) after it instead of scaler.unscale"
    ):
        scaler.unscale(net.parameters())
    scaler.step(opt)
    scaler.update()


def test_unscale_before_any_scale_says_what_to_do() -> None:
    (net, _) = net_and("adam")
    scaler = make()
    poison(net, 1.0)
    with pytest.raises(RuntimeError, match=r"do gm.backward\(loss, dy=scaler.scale_factor\) first"):
        scaler.unscale(net.parameters())
    with pytest.raises(ValueError, match="dy: expected one per y"):
        scaler.backward(GradManager(), [net(torch.ones(1, 6))], [1.0, 2.0])


# several optimizers


class Gan:
    """Two networks, two optimizers, one scaler; `bad` names those whose gradients overflow."""

    def __init__(self, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.nets = {"d": nn.Linear(3, 1), "g": nn.Linear(2, 3)}
        self.opts = {k: Adam(net.named_parameters(), lr=0.01) for k, net in self.nets.items()}
        self.scaler = make(**kwargs)

    def backward(self, bad: str = "") -> None:
        fake = self.nets["g"](torch.ones(4, 2))
        self.scaler.scale(self.nets["d"](fake).mean()).backward()
        for key in bad:
            poison(self.nets[key])

    def weights(self) -> dict[str, Tensor]:
        return {k: net.weight.detach().clone() for k, net in self.nets.items()}

    def moved(self, before: dict[str, Tensor]) -> str:
        return "".join(k for k, w in self.weights().items() if not torch.equal(w, before[k]))


@pytest.mark.parametrize(("bad", "moved"), [("", "dg"), ("d", "g"), ("g", "d"), ("dg", "")])
def test_each_skips_on_its_own_and_the_scale_moves_once(bad: str, moved: str) -> None:
    gan = Gan(growth_interval=1)
    before = gan.weights()
    gan.backward(bad)
    for opt in gan.opts.values():
        gan.scaler.step(opt)
    gan.scaler.update()
    assert gan.moved(before) == moved
    assert gan.scaler.get_scale() == 2.0 ** (15 if bad else 17)
    assert gan.scaler.skipped == bool(bad)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("bad", "moved"), [("", "dg"), ("d", ""), ("g", ""), ("dg", "")])
def test_all_skip_together(bad: str, moved: str, fused: bool) -> None:
    gan = Gan(skip="all", growth_interval=1)
    if fused:
        gan.opts = {k: Adam(net.parameters(), lr=0.01, fused=True) for k, net in gan.nets.items()}
    before = gan.weights()
    gan.backward(bad)
    for opt in gan.opts.values():
        gan.scaler.unscale_(opt)
    for opt in gan.opts.values():
        gan.scaler.step(opt)
    gan.scaler.update()
    assert gan.moved(before) == moved
    assert gan.scaler.get_scale() == 2.0 ** (15 if bad else 17)


def test_all_together_needs_every_verdict_before_the_first_step() -> None:
    gan = Gan(skip="all")
    d = gan.opts["d"]
    g = gan.opts["g"]
    before = gan.weights()
    gan.backward()
    with pytest.raises(
        RuntimeError, match=r"skip='all': .*do scaler.unscale_\(optimizer\) for each of them first"
    ):
        gan.scaler.step(d)
    assert gan.moved(before) == ""  # refused before anything was done
    gan.scaler.unscale_(d)
    gan.scaler.step(d)
    with pytest.raises(RuntimeError, match=r"skip='all': .*received unscale_\(\) after one"):
        gan.scaler.unscale_(g)


@pytest.mark.parametrize("skip", ["each", "all"])
@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_without_gradients_is_legal(skip: str, fused: bool) -> None:
    gan = Gan(skip=skip, growth_interval=1)
    idle = Adam([nn.Parameter(torch.ones(2))], fused=fused)
    gan.scaler.step(idle)  # before the scale was ever used
    gan.scaler.update()  # an iteration without any gradient
    assert gan.scaler.get_scale() == 2**16
    gan.backward()
    used = gan.opts["d"]
    for opt in (idle, used):
        gan.scaler.unscale_(opt)
    for opt in (idle, used):
        gan.scaler.step(opt)
    gan.scaler.update()
    assert gan.scaler.get_scale() == 2**17
    assert not idle.state


def test_gradients_that_come_after_unscale_are_not_applied_unchecked() -> None:
    for fused in (False, True):
        scaler = make()
        p = nn.Parameter(torch.ones(2))
        opt = Adam([p], fused=fused)
        loss = scaler.scale(p.sum())
        scaler.unscale_(opt)
        loss.backward()
        with pytest.raises(
            RuntimeError, match=r"do call scaler.unscale_\(optimizer\) after the last backward"
        ):
            scaler.step(opt)
        assert torch.equal(p, torch.ones(2))


def test_a_gan_in_megengines_gear_updates_once() -> None:
    gan = Gan(growth_interval=1)
    gms = {k: GradManager().attach(net.parameters()) for k, net in gan.nets.items()}
    for k, last in (("d", False), ("g", True)):
        with gms[k]:
            loss = gan.nets["d"](gan.nets["g"](torch.ones(4, 2))).mean()
            gan.scaler.backward(gms[k], loss * (math.inf if k == "d" else 1), update_scale=last)
        gan.opts[k].step()
    assert gan.scaler.get_scale() == 2**15
    # the generator's own gradients were finite
    assert [len(opt.state) for opt in gan.opts.values()] == [
        0,
        2,
    ]


# floor, cap, fixed scale, tracker


def test_floor_and_cap_hold_after_each_update() -> None:
    (net, opt) = net_and("adam")
    scaler = make(init_scale=4.0, floor=1.0, cap=8.0, growth_interval=1)
    scales = []
    for _ in range(4):
        skip_once(scaler, net, opt)
        scales.append(scaler.get_scale())
    for step in range(2, 8):
        iterate(scaler, net, opt, step)
        scales.append(scaler.get_scale())
    assert scales == [2, 1, 1, 1, 2, 4, 8, 8, 8, 8]


def test_the_default_floor_is_the_smallest_normal_half_and_zero_is_none() -> None:
    for floor, last in ((None, 2.0**-14), (0.0, 2.0**-24)):
        (net, opt) = net_and("adam")
        scaler = make(**({} if floor is None else {"floor": floor}))
        for _ in range(40):
            skip_once(scaler, net, opt)
        assert scaler.get_scale() == last
    assert torch.finfo(torch.float16).smallest_normal == 2.0**-14


def test_a_fixed_scale_never_moves_but_still_skips() -> None:
    (net, opt) = net_and("adam")
    scaler = make(init_scale=128.0, growth_interval=0)
    iterate(scaler, net, opt, 2)
    before = copy.deepcopy(flat(net, opt))
    skip_once(scaler, net, opt)
    assert_same(flat(net, opt), before)
    assert scaler.get_scale() == 128
    assert (scaler.skipped, scaler.skips_in_a_row) == (1, 1)
    iterate(scaler, net, opt, 3)
    assert (scaler.skipped, scaler.skips_in_a_row) == (1, 0)


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("tracker", [4, 5, 6, 1000])
def test_a_tracker_at_or_beyond_the_interval_grows_at_the_next_finite_update(
    tracker: int, used: bool
) -> None:
    (net, opt) = net_and("adam")
    scaler = make()
    if used:
        iterate(scaler, net, opt, 2)
    scaler.load_state_dict(
        {**TorchScaler("cpu", growth_interval=5).state_dict(), "_growth_tracker": tracker}
    )
    iterate(scaler, net, opt, 3)
    assert scaler.get_scale() == 2**17


def test_a_shortened_interval_grows_at_the_next_finite_update() -> None:
    (net, opt) = net_and("adam")
    scaler = make(growth_interval=2000)
    for step in range(2, 9):
        iterate(scaler, net, opt, step)
    scaler.set_growth_interval(3)
    iterate(scaler, net, opt, 9)
    assert scaler.get_scale() == 2**17


# streaks


def test_a_streak_raises_and_names_scale_and_parameters() -> None:
    scaler = make(max_skips=3)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    named = SGD(net.named_parameters(), lr=0.1)
    plain = Adam([nn.Parameter(torch.ones(5))])
    for round_ in range(3):
        scaler.scale(torch.ones(()))
        poison(net, 1.0)
        net[1].bias.grad.fill_(math.nan)  # type: ignore[union-attr, operator]
        plain.param_groups[0]["params"][0].grad = torch.full((5,), math.inf)
        for opt in (named, plain):
            scaler.step(opt)
        if round_ < 2:
            scaler.update()
    with pytest.raises(OverflowStreak) as caught:
        scaler.update()
    message = str(caught.value)
    assert "3 or more skipped in a row; the scale is 8192" in message
    assert (
        "optimizer 0 (SGD), group 0, parameter 3 '1.bias'; optimizer 1 (Adam), group 0, parameter 0 of"
        in message
    )
    assert "'0.weight'" not in message
    assert message.endswith("or go on in another dtype with on_skips='bf16' or on_skips='fp32'")
    assert isinstance(caught.value, FloatingPointError)
    assert (scaler.skipped, scaler.skips_in_a_row, scaler.get_scale()) == (3, 3, 2**13)
    with pytest.raises(OverflowStreak):  # it goes on being told
        skip_once(scaler, net, named)
    poison(net, 1.0)
    scaler.scale(torch.ones(()))
    scaler.step(named)
    scaler.update()  # a finite update ends the streak
    assert (scaler.skipped, scaler.skips_in_a_row) == (4, 0)


def test_a_streak_in_megengines_gear_names_the_tensors_whose_gradients_it_dropped() -> None:
    (net, _) = net_and("adam")
    scaler = make(max_skips=1)
    gm = GradManager().attach(net.parameters())
    x = torch.ones(1, 6)
    with (
        gm,
        pytest.raises(
            OverflowStreak, match=r"tensor 1 of unscale\(\), shape \(3,\), do look for inf"
        ),
    ):
        scaler.backward(
            gm, (net(x) * torch.tensor([math.inf, 1, 1])).sum() - (net.weight @ x.T).sum() * 0
        )


def test_a_streak_without_gradients_left_or_with_many() -> None:
    (net, opt) = net_and("adam")
    scaler = make(max_skips=1)
    scaler.scale(torch.ones(()))
    poison(net)
    scaler.step(opt)
    opt.zero_grad()
    with pytest.raises(
        OverflowStreak, match=r"cleared before update\(\) \(call zero_grad\(\) after it\)"
    ):
        scaler.update()
    many = [nn.Parameter(torch.ones(1)) for _ in range(10)]
    for p in many:
        p.grad = torch.full((1,), math.nan)
    scaler.scale(torch.ones(()))
    scaler.step(SGD(many, lr=0.1))
    with pytest.raises(OverflowStreak, match=r"parameter 7 of shape \(1,\); 2 more, do"):
        scaler.update()


def test_a_finite_update_or_none_at_all_does_not_extend_a_streak() -> None:
    (net, opt) = net_and("adam")
    scaler = make(max_skips=2)
    for step in range(2, 6):
        skip_once(scaler, net, opt)
        scaler.update()  # nothing checked: no update, no end of the streak either
        assert scaler.skips_in_a_row == 1
        iterate(scaler, net, opt, step)
    assert scaler.skipped == 4


@pytest.mark.parametrize(("on_skips", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_streak_can_turn_the_room_to_another_dtype(on_skips: str, dtype: torch.dtype) -> None:
    """A loss of 1e6 overflows half and neither bfloat16 nor float32: training really goes on."""
    (net, opt) = net_and("adam")
    scaler = make(max_skips=3, on_skips=on_skips, floor=0.0)

    def step() -> torch.dtype:
        opt.zero_grad()
        with amp.autocast(device_type="cpu"):
            out = net(torch.full((1, 6), 1e6))
        scaler.scale(out.float().sum()).backward()
        scaler.step(opt)
        scaler.update()
        return out.dtype

    before = net.weight.detach().clone()
    assert [step(), step()] == [torch.float16] * 2
    with pytest.warns(
        UserWarning, match=rf"parameter 0 of shape .* goes on in {amp_name(dtype)}"
    ) as caught:
        assert step() == torch.float16
    assert caught[0].filename == __file__
    assert torch.equal(net.weight, before)
    assert amp.low_prec_dtype == amp_name(dtype)
    assert step() == dtype
    assert not torch.equal(net.weight, before)
    assert (scaler.get_scale(), scaler.skipped, scaler.skips_in_a_row) == (1, 3, 0)
    for _ in range(10):
        step()  # more than the growth interval: the scale stays at 1
    assert scaler.get_scale() == 1
    for _ in range(2):
        skip_once(scaler, net, opt)
    with pytest.raises(
        OverflowStreak
    ) as caught_error:  # it still checks, and there is no second fallback
        skip_once(scaler, net, opt)
    assert "on_skips" not in str(caught_error.value)


def amp_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def test_the_fallback_warns_at_the_users_line_in_megengines_gear_too() -> None:
    (net, _) = net_and("adam")
    scaler = make(max_skips=1, on_skips="bf16")
    gm = GradManager().attach(net.parameters())
    amp.enabled = True
    with gm, pytest.warns(UserWarning, match="goes on in bfloat16") as caught:
        scaler.backward(gm, net(torch.full((1, 6), math.inf)).sum())
    assert caught[0].filename == __file__
    assert net(torch.ones(1, 6)).dtype == torch.bfloat16  # the switch follows


def test_a_fallen_scaler_takes_the_room_along_when_it_is_loaded() -> None:
    (net, opt) = net_and("adam")
    scaler = make(max_skips=1, on_skips="bf16")
    with pytest.warns(UserWarning, match="goes on in bfloat16"):
        skip_once(scaler, net, opt)
    state = scaler.state_dict()
    pickled = pickle.dumps(scaler)
    amp.low_prec_dtype = "float16"
    other = make()
    with pytest.warns(
        UserWarning, match="saved after a fallback; autocast.. goes on in bfloat16"
    ) as caught:
        other.load_state_dict(state)
    assert caught[0].filename == __file__
    assert amp.low_prec_dtype == "bfloat16"
    other.load_state_dict(state)  # nothing left to say
    amp.low_prec_dtype = "float16"
    assert pickle.loads(pickled).state_dict() == state
    assert amp.low_prec_dtype == "bfloat16"


# state


TORCHS = {
    "scale": 512.0,
    "growth_factor": 3.0,
    "backoff_factor": 0.25,
    "growth_interval": 11,
    "_growth_tracker": 3,
}
LIMITS = {"floor": 0.5, "cap": 2.0**20, "skip": "all", "max_skips": 7, "on_skips": "bf16"}
PERTURBED = TORCHS | LIMITS | {"skipped": 5, "skips_in_a_row": 2, "fallen": True}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("field", PERTURBED)
def test_every_field_survives_the_round_trip(field: str, used: bool) -> None:
    state = make().state_dict()
    scaler = make()
    assert {*state, *state["halfstep"]} - {"halfstep"} == set(PERTURBED)
    if used:
        skip_once(scaler, *net_and("adam"))
    owner = state if field in state else state["halfstep"]
    assert owner[field] != PERTURBED[field]
    owner[field] = PERTURBED[field]
    scaler.load_state_dict(copy.deepcopy(state))
    assert scaler.state_dict() == state
    assert pickle.loads(pickle.dumps(scaler)).state_dict() == state
    assert copy.deepcopy(scaler).state_dict() == state


@pytest.mark.parametrize("stop", [0, 1, 2, 31, 33, 60])
def test_stop_and_resume_also_right_after_a_skip(stop: int) -> None:
    whole = []
    cut = []
    for runs, stops in ((whole, ()), (cut, (stop,))):
        (net, opt) = net_and("adam")
        scaler = make(max_skips=4)
        for step in range(61):
            if step in stops:
                fresh = GradScaler(device="cpu")
                fresh.load_state_dict(scaler.state_dict())
                scaler = fresh
            iterate(scaler, net, opt, step)
            runs.append(scaler.state_dict())
        runs += flat(net, opt)
    assert_same(whole, cut)


def test_states_are_interchangeable_with_torchs_both_ways() -> None:
    runs = []
    for first, second in ((make, torchs), (torchs, make), (torchs, torchs)):
        (net, opt) = net_and("adam")
        scaler = first()
        scales = []
        for step in range(70):
            if step == 33:  # right after three skips
                fresh = second(init_scale=2.0, growth_interval=9)
                fresh.load_state_dict(scaler.state_dict())
                scaler = fresh
            iterate(scaler, net, opt, step)
            scales.append(scaler.get_scale())
        runs.append([scales, *flat(net, opt)])
    assert_same(runs[0], runs[2])
    assert_same(runs[1], runs[2])


def torchs(**kwargs: Any) -> TorchScaler:
    return TorchScaler("cpu", **{"growth_interval": 5, **kwargs})


def test_a_state_of_torchs_keeps_the_limits_and_begins_the_counts() -> None:
    scaler = make(cap=2.0**20, max_skips=9)
    skip_once(scaler, *net_and("adam"))
    scaler.load_state_dict(torchs().state_dict())
    assert (
        scaler.state_dict()["halfstep"] == make(cap=2.0**20, max_skips=9).state_dict()["halfstep"]
    )
    with pytest.raises(RuntimeError, match="state dict is empty"):
        scaler.load_state_dict({})
    bad = {**torchs().state_dict(), "halfstep": {"max_skips": 0}}
    with pytest.raises(ValueError, match="max_skips: expected an int of at least 1"):
        scaler.load_state_dict(bad)


# refusals at construction


NOT_POSITIVE = (math.nan, math.inf, -math.inf, -1.0, "2", None, True)


@pytest.mark.parametrize(
    ("field", "values", "advice"),
    [
        ("init_scale", (0.0, 1e39, *NOT_POSITIVE), "(leave the default 2\\*\\*16|name the device)"),
        ("growth_factor", (1.0, 0.5, *NOT_POSITIVE), "pass growth_interval=0"),
        ("backoff_factor", (1.0, 0.0, 2.0, *NOT_POSITIVE), "pass growth_interval=0"),
        ("growth_interval", (1.5, 2000.0, *NOT_POSITIVE), "leave the default 2000"),
        ("floor", NOT_POSITIVE, "leave the default 2"),
        ("cap", (0.0, 2.0**-20, *(v for v in NOT_POSITIVE if v is not None)), "pass None"),
        ("max_skips", (0, 1.5, *NOT_POSITIVE), "leave the default 50"),
        ("skip", ("both", None), "choose 'each'"),
        ("on_skips", ("fp16", None), "choose 'raise'"),
    ],
)
def test_settings_are_refused_at_construction(
    field: str, values: tuple[Any, ...], advice: str
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"^{field}: expected .*, received .*, do {advice}"):
            make(**{field: value})


def test_the_advice_in_refusals_works() -> None:
    with pytest.raises(
        ValueError, match=r"init_scale: .*do name the device: GradScaler\(device='cpu'\)"
    ):
        GradScaler("cpu")  # type: ignore[arg-type]
    GradScaler(device="cpu")
    GradScaler(device=torch.device("cpu"))
    with pytest.raises(
        ValueError, match=r"init_scale: expected between floor=6.*, do move floor or cap"
    ):
        make(init_scale=2.0**-20)
    make(init_scale=2.0**-20, floor=0.0)
    with pytest.raises(ValueError, match=r"and cap=8, received 16\.0, do move floor or cap"):
        make(init_scale=16.0, cap=8)
    make(init_scale=16.0, cap=16)
    with pytest.raises(ValueError, match="growth_interval: expected an int"):
        make().set_growth_interval(-1)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the accelerator is there")
def test_a_missing_device_is_refused_not_disabled() -> None:
    with pytest.raises(
        ValueError, match=r"device: .* has \(cpu\), received 'cuda', do leave device=None"
    ):
        GradScaler(device="cuda")
    assert GradScaler().scale_factor.device.type == "cpu"
    assert GradScaler(device="cuda", enabled=False).scale_factor == 1


# CUDA


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # torch calls it a prototype
@pytest.mark.parametrize("fused", [False, True])
def test_no_host_sync_beyond_torchs(fused: bool) -> None:
    net = nn.Linear(6, 3, device="cuda")
    opt = Adam(net.parameters(), lr=0.01, fused=fused, capturable=True)
    scaler = GradScaler(growth_interval=5)
    x = torch.randn(5, 6, device="cuda")

    def step() -> None:
        scaler.scale(net(x).square().mean()).backward()
        if fused:
            scaler.step(opt)
        else:
            scaler.unscale_(opt)  # the rest of a non-fused step is torch's own read
        scaler.update()
        scaler.scale_factor = scaler.scale_factor * 1

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.skipped == 0


@pytest.mark.gpu
def test_on_cuda_a_streak_is_heard_of_some_updates_later() -> None:
    net = nn.Linear(6, 3, device="cuda")
    opt = Adam(net.parameters(), lr=0.01, fused=True)
    scaler = GradScaler(max_skips=5)
    poison(net)

    def until_heard() -> None:
        for _ in range(1000):
            scaler.scale(torch.ones((), device="cuda"))
            scaler.step(opt)
            scaler.update()
            torch.cuda.synchronize()

    with pytest.raises(OverflowStreak, match="optimizer 0"):
        until_heard()
    assert 5 <= scaler.skips_in_a_row <= 7


@pytest.mark.gpu
def test_an_update_can_be_captured() -> None:
    net = nn.Linear(6, 3, device="cuda")
    scaler = GradScaler(growth_interval=1)
    opt = Adam(net.parameters(), lr=torch.tensor(0.01, device="cuda"), fused=True, capturable=True)
    poison(net, 1.0)

    def step() -> None:
        scaler.scale(torch.ones((), device="cuda"))
        scaler.step(opt)
        scaler.update()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = scaler.get_scale()
    graph.replay()
    assert scaler.get_scale() == 2 * before
    for p in net.parameters():
        assert p.grad is not None
        p.grad.fill_(math.nan)  # in place: the graph reads this memory
    graph.replay()
    assert (scaler.get_scale(), scaler.skipped) == (before, 1)
