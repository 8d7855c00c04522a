"""GradScaler in torch's protocol: torch's bits, several optimizers, no host sync beyond torch's."""

import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, Adam

from halfstep import amp
from halfstep.amp import GradScaler, OverflowStreak
from halfstep.precision import DynamicScale
from tests.support.scaler_runs import (
    OPTIMIZERS,
    OVERFLOW_STEPS,
    Gan,
    TorchScaler,
    assert_same,
    fill_grads,
    make_batch,
    make_net_and_optimizer,
    make_scaler,
    run_gear_step,
    run_torch_iteration,
    train_and_record,
    trained_values,
)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_220_steps_with_planted_overflows_equal_torchs(optimizer: str, clip: bool) -> None:
    theirs = train_and_record(TorchScaler("cpu", growth_interval=5), optimizer, clip=clip)
    scaler = make_scaler()
    assert_same(train_and_record(scaler, optimizer, clip=clip), theirs)
    assert scaler.skipped == len(OVERFLOW_STEPS)
    assert scaler.skips_in_a_row == 1
    assert scaler.state_dict()["_growth_tracker"] == 0
    assert max(theirs[0]) > 2**30  # the scale really moved


def test_the_trajectory_equals_dynamic_scale_next() -> None:
    rule = DynamicScale(interval=5)
    state = rule.start(torch.device("cpu"))
    expected = []
    for step in range(220):
        state = rule.next(state, torch.tensor(float(step in OVERFLOW_STEPS)))
        expected.append(state.scale.item())
    assert train_and_record(make_scaler(), "adam")[0] == expected


def test_a_real_overflow_of_half_gradients_is_skipped_and_recovered() -> None:
    """Gradients of half products overflow while the scale is too high: nothing is planted."""
    runs = []
    for scaler in (
        TorchScaler("cpu", init_scale=2.0**24),
        make_scaler(init_scale=2.0**24, growth_interval=2000),
    ):
        net, opt = make_net_and_optimizer("sgd momentum")
        scales = []
        for step in range(20):
            opt.zero_grad()
            x, y = make_batch(step)
            with amp.autocast(device_type="cpu"):
                loss = F.mse_loss(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            scales.append(scaler.get_scale())
        runs.append([scales, *trained_values(net, opt)])
    assert_same(*runs)
    assert isinstance(scaler, GradScaler)
    assert 0 < scaler.skipped < 20
    assert runs[0][0][-1] < 2.0**24


def test_fused_sgd_with_momentum_survives_an_overflow_in_its_first_step() -> None:
    """torch leaves the buffers uninitialised there; ours equals a run without the skipped steps."""
    trained = []
    for steps in (range(40), sorted(set(range(40)) - OVERFLOW_STEPS)):
        net, _ = make_net_and_optimizer("adam")
        opt = SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True)
        scaler = make_scaler(growth_interval=0)
        for step in steps:
            run_torch_iteration(scaler, net, opt, step)
        trained.append(trained_values(net, opt))
    assert_same(*trained)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_same_clipped_update_at_every_scale(optimizer: str) -> None:
    runs = []
    for scale in (1.0, 2.0**16):
        scaler = make_scaler(init_scale=scale, growth_interval=0)
        runs.append(train_and_record(scaler, optimizer, range(2, 30), clip=True))
    assert_same(runs[0][1:], runs[1][1:])


def test_half_gradients_are_refused_as_in_torch_and_bfloat16_ones_are_not() -> None:
    net = nn.Linear(2, 2).half()
    scaler = make_scaler()
    opt = SGD(net.parameters(), lr=0.1)
    scaler.scale(torch.ones(()))
    fill_grads(net, 1.0)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(opt)
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale(net.parameters())
    net.bfloat16()
    fill_grads(net, 2.0**16)
    scaler.unscale(net.parameters())
    assert net.weight.grad is not None
    assert net.weight.grad.eq(1).all()


def test_torchs_misuse_errors_are_kept() -> None:
    net, opt = make_net_and_optimizer("adam")
    scaler = make_scaler()
    fill_grads(net, 1.0)
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
    theirs = train_and_record(TorchScaler("cpu", enabled=False), "adam", range(2, 9))
    assert_same(train_and_record(make_scaler(enabled=False), "adam", range(2, 9)), theirs)
    scaler = make_scaler(enabled=False)
    net, opt = make_net_and_optimizer("adam")
    assert scaler.state_dict() == {}
    scaler.load_state_dict(make_scaler().state_dict())
    run_gear_step(scaler, net, opt, 2, "automatic")
    assert scaler.scale_factor.item() == 1.0
    assert scaler.skipped == scaler.skips_in_a_row == 0
    scaler.scale_factor = 4.0
    assert scaler.get_scale() == 1
    assert pickle.loads(pickle.dumps(scaler)).is_enabled() is False


# Several optimizers


@pytest.mark.parametrize(("bad", "changed"), [("", "dg"), ("d", "g"), ("g", "d"), ("dg", "")])
def test_each_skips_on_its_own_and_the_scale_moves_once(bad: str, changed: str) -> None:
    gan = Gan(growth_interval=1)
    before = gan.weights()
    gan.backward(bad)
    for opt in gan.opts.values():
        gan.scaler.step(opt)
    gan.scaler.update()
    assert gan.changed_nets(before) == changed
    assert gan.scaler.get_scale() == 2.0 ** (15 if bad else 17)
    assert gan.scaler.skipped == bool(bad)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("bad", "changed"), [("", "dg"), ("d", ""), ("g", ""), ("dg", "")])
def test_all_skip_together(bad: str, changed: str, fused: bool) -> None:
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
    assert gan.changed_nets(before) == changed
    assert gan.scaler.get_scale() == 2.0 ** (15 if bad else 17)


def test_all_together_needs_every_check_before_the_first_step() -> None:
    gan = Gan(skip="all")
    d = gan.opts["d"]
    g = gan.opts["g"]
    before = gan.weights()
    gan.backward()
    with pytest.raises(
        RuntimeError, match=r"skip='all': .*do scaler.unscale_\(optimizer\) for each of them first"
    ):
        gan.scaler.step(d)
    assert gan.changed_nets(before) == ""  # refused before anything was done
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
    gan.scaler.scale(torch.ones(()))
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
        scaler = make_scaler()
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
def test_on_cuda_a_streak_is_raised_some_updates_later() -> None:
    net = nn.Linear(6, 3, device="cuda")
    opt = Adam(net.parameters(), lr=0.01, fused=True)
    scaler = GradScaler(max_skips=5)
    fill_grads(net)

    def step_until_raised() -> None:
        for _ in range(1000):
            scaler.scale(torch.ones((), device="cuda"))
            scaler.step(opt)
            scaler.update()
            torch.cuda.synchronize()

    with pytest.raises(OverflowStreak, match="optimizer 0"):
        step_until_raised()
    assert 5 <= scaler.skips_in_a_row <= 7


@pytest.mark.gpu
def test_an_update_can_be_captured() -> None:
    net = nn.Linear(6, 3, device="cuda")
    scaler = GradScaler(growth_interval=1)
    opt = Adam(net.parameters(), lr=torch.tensor(0.01, device="cuda"), fused=True, capturable=True)
    fill_grads(net, 1.0)

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
