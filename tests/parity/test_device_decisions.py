"""Deciding an update on the device or on the host gives the same bits; learning-rate tables equal rates set by hand."""

import copy
import inspect
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn, optim

import halfstep as hs
from tests.support.parity_cases import (
    DEVICE,
    OPTIMIZERS,
    PRECISIONS,
    ROUNDED,
    Batches,
    batches_for,
    fused_sgd_works,
    has_fused,
    in_groups,
    maker,
    net_for,
    overflow_at,
    same,
    same_records,
    same_state,
)
from tests.support.torch_loops import Loop, Make

RATES = [0.1, 0.05, 0.2, 0.01, 0.0, 0.07]  # a rate of 0 is a rate; past the end the last one holds
ALL = {**PRECISIONS, **ROUNDED}
IMPLEMENTATIONS = ("foreach=True", "foreach=False", "fused=True", "capturable=True")


def build(
    name: str, flags: dict[str, bool], precision: str = "fp32", **options: Any
) -> hs.TrainStep:
    net = net_for(options.pop("net", name))
    optimizer = maker(name, **flags)(list(net.parameters()))
    options.setdefault("nonfinite", "skip")
    return hs.TrainStep(
        net, nn.CrossEntropyLoss(), optimizer, precision=ALL[precision][0], **options
    )


def switches(name: str) -> list[dict[str, bool]]:
    """The optimizer's implementations, or its only one."""
    known = inspect.signature(getattr(optim, name)).parameters
    pairs = [
        (flag, value == "True")
        for flag, value in (i.split("=") for i in IMPLEMENTATIONS)
        if flag in known
    ]
    return [dict([pair]) for pair in pairs if pair != ("fused", True) or has_fused(name)] or [{}]


def variants(*kinds: str) -> list[Any]:
    """Optimizers and implementations that this device classifies as one of `kinds`."""
    every = [(name, flags) for name in OPTIMIZERS for flags in switches(name)]
    found = [(name, flags) for name, flags in every if build(name, flags).optimizer_kind in kinds]
    return [
        pytest.param(n, f, id="-".join([n, *(f"{k}={v}" for k, v in f.items())])) for n, f in found
    ]


def with_cycles(params: list[Any]) -> list[Any]:
    """Cycles of 1 and 3 batches; of an optimizer's two loops over parameters, each takes one of them."""
    found = []
    for name, flags in (param.values for param in params):
        lengths = {True: [1], False: [3]}.get(flags.get("foreach"), [1, 3])
        found += [pytest.param(name, flags, k, id=f"{name}-{flags}-{k}") for k in lengths]
    return found


ON_DEVICE, ON_HOST = variants("fused", "capturable"), variants("host")


def eventful(net: nn.Module, accumulate: int = 1) -> Batches:
    """Nine cycles: an overflow in the first, and in two in a row; one batch, then a whole cycle, of ignored targets."""
    last = accumulate - 1
    batches = overflow_at(
        batches_for(net, 9 * accumulate), [0, 3 * accumulate + last, 4 * accumulate]
    )
    for i in (5 * accumulate + last, *range(6 * accumulate, 7 * accumulate)):
        batches[i] = (batches[i][0], torch.full_like(batches[i][1], -100))
    return batches


@cache
def takes_tensor_rates(name: str, **flags: bool) -> bool:
    return build(name, flags, lr=RATES).optimizer_kind != "host"


def test_fused_flags_are_seen() -> None:
    fused = {param.values[0] for param in variants("fused")}
    said = [name for name in OPTIMIZERS if {"fused": True} in switches(name)]
    takes = {
        n
        for n in said
        if getattr(build(n, {"fused": True}).optimizer, "_step_supports_amp_scaling", False)
    }
    assert fused == takes  # torch 2.11 has no fused Adagrad for CUDA
    assert fused >= {"SGD", "Adam", "AdamW"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if {"capturable": True} in switches(n)])
def test_capturable_flags_are_seen(name: str) -> None:
    assert build(name, {"capturable": True}).optimizer_kind == "capturable"


@pytest.mark.parametrize("name", ["Adafactor", "SparseAdam"])
def test_optimizers_that_must_read_on_the_host_are_known(name: str) -> None:
    assert build(name, {}).optimizer_kind == "host"


@pytest.mark.parametrize(("name", "flags"), ON_HOST)
def test_host_optimizers_refuse_to_decide_on_the_device(name: str, flags: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="decide='device'"):
        build(name, flags, decide="device")


def test_one_group_that_needs_the_host_is_enough_to_refuse() -> None:
    net = net_for("Adam")
    first, *rest = net.parameters()
    groups = [
        {"params": [first], "momentum": 0.9, "foreach": False},
        {"params": rest, "foreach": True},
    ]
    optimizer = optim.SGD(groups, lr=0.1)
    with pytest.raises(ValueError, match="decide='device'"):
        hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, lr=RATES, decide="device")


@pytest.mark.parametrize("precision", ALL)
@pytest.mark.parametrize(("name", "flags", "accumulate"), with_cycles(ON_DEVICE))
def test_host_and_device_agree_bit_for_bit(
    name: str, flags: dict[str, bool], precision: str, accumulate: int
) -> None:
    skip_broken_kernel(name, flags, precision)
    table = {"lr": RATES} if takes_tensor_rates(name, **flags) else {}
    options = {"accumulate": accumulate, "clip_norm": 0.5, "ema": 0.9, **table}
    host = build(name, flags, precision, decide="host", **options)
    device = build(name, flags, precision, decide="device", **options)
    agree(host, device, eventful(host.net, accumulate))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("name", "flags"), [("SGD", {"foreach": True}), ("AdamW", {"fused": True})], ids=str
)
def test_host_and_device_take_batch_norm_statistics_back_alike(
    name: str, flags: dict[str, bool], precision: str
) -> None:
    host, device = (
        build(name, flags, precision, net="conv", decide=where) for where in ("host", "device")
    )
    agree(host, device, eventful(host.net))


def skip_broken_kernel(name: str, flags: dict[str, bool], precision: str) -> None:
    spec = ALL[precision][1]
    low = (
        spec.cast == "whole" and spec.rounding == "nearest"
    )  # the other roundings widen parameters for the optimizer
    if low and (name, flags) == ("SGD", {"fused": True}) and not fused_sgd_works(spec.dtype):
        pytest.skip("torch's kernel is wrong here; the step refuses it")


def agree(host: hs.TrainStep, device: hs.TrainStep, batches: Batches) -> None:
    """Equal records at every step; equal fingerprints after commits, after skips, and at the end."""
    for i, (x, y) in enumerate(batches):
        for field, ours, theirs in zip(hs.Record._fields, host(x, y), device(x, y), strict=True):
            assert same(ours, theirs), (i, field, ours, theirs)
        cycle, rest = divmod(i + 1, len(batches) // 9)
        if rest == 0 and cycle in (3, 5, 7, 9):
            same_prints(host, device)
    assert (host.state.updates.item(), host.state.skips.item()) == (len_updates(host), 3)


def same_prints(host: hs.TrainStep, device: hs.TrainStep) -> None:
    ours, theirs = host.fingerprints(), device.fingerprints()
    assert list(ours) == list(theirs)
    assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []


def len_updates(step: hs.TrainStep) -> int:
    """Nine cycles less three overflows and the ignored ones: with one batch a cycle both of the latter are empty."""
    return 4 if step.options.accumulate == 1 else 5


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16", "fp16-kahan"])
@pytest.mark.parametrize(("name", "flags"), ON_DEVICE)
def test_device_decisions_read_nothing_after_the_first_committed_update(
    name: str, flags: dict[str, bool], precision: str, accumulate: int
) -> None:
    skip_broken_kernel(name, flags, precision)
    step = build(
        name, flags, precision, decide="device", accumulate=accumulate, clip_norm=0.5, ema=0.9
    )
    reads = []
    for x, y in eventful(step.net, accumulate):
        step(x, y)
        reads.append((step.state.updates.item(), step.host_reads.reads))
    after = {count for updates, count in reads if updates > 0}
    assert len(after) == 1


def by_hand(rates: list[list[float]]) -> list[list[float]]:
    """The rates as the device holds them: float64 on a CPU, float32 elsewhere."""
    dtype = torch.float64 if DEVICE == "cpu" else torch.float32
    return torch.tensor(rates, dtype=dtype).tolist()


def against_hand(
    make: Make, precision: str, rates: list[list[float]], **options: Any
) -> list[hs.Record]:
    """Asserts that a table equals setting group["lr"] before each update of a plain loop; both skip overflows."""
    net, (ours, spec) = net_for("SGD"), ALL[precision]
    loop = Loop(copy.deepcopy(net), make, spec, rates=by_hand(rates), ema=0.9)
    optimizer = make(list(net.parameters()))
    lr = rates if len(rates) > 1 else rates[0]
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        precision=ours,
        lr=lr,
        ema=0.9,
        nonfinite="skip",
        **options,
    )
    batches = overflow_at(batches_for(net, 14), [1, 4, 8, 9])
    records = [step(x, y) for x, y in batches]
    same_records(records, loop.run(batches))
    same_state(step, loop)
    assert all(torch.equal(a, b) for a, b in zip(step.state.ema, loop.ema, strict=True))
    return records


@pytest.mark.parametrize("precision", ["fp32", "fp64", "O2", "bf16"])
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_a_table_equals_rates_set_by_hand(
    name: str, flags: dict[str, bool], precision: str
) -> None:
    if flags.get("fused") and not has_fused(name):
        pytest.skip("this torch has no such kernel for the device")
    skip_broken_kernel(name, flags, precision)
    against_hand(maker(name, **flags), precision, [RATES])


@pytest.mark.parametrize(
    "name", ["NAdam", "RAdam", "RMSprop", "Adafactor", "Adadelta", "Adamax", "ASGD", "Rprop"]
)
def test_a_table_drives_optimizers_that_decide_on_the_host(name: str) -> None:
    against_hand(maker(name), "O2", [RATES])


@pytest.mark.parametrize(
    ("flags", "decide"),
    [({"foreach": False}, "host"), ({"fused": True}, "host"), ({"fused": True}, "device")],
    ids=str,
)
def test_each_group_has_a_row(flags: dict[str, bool], decide: str) -> None:
    rates = [RATES, [0.3, 0.2, 0.1]]
    with_short_row = [rates[0][:3], rates[1]]
    records = against_hand(
        in_groups("SGD", [1.0, 1.0], **flags), "O2", with_short_row, decide=decide
    )
    assert records[0].lr.tolist() == [row[0] for row in by_hand(with_short_row)]


@pytest.mark.parametrize(
    ("flags", "decide"),
    [({"foreach": False}, "host"), ({"fused": True}, "host"), ({"fused": True}, "device")],
    ids=str,
)
def test_a_skipped_update_does_not_move_the_position(flags: dict[str, bool], decide: str) -> None:
    records = against_hand(maker("SGD", **flags), "O2", [RATES], decide=decide)
    (expected,), done = by_hand([RATES]), 0
    for i, record in enumerate(records):
        assert bool(record.skipped) == (i in (1, 4, 8, 9))
        assert record.lr.item() == expected[min(done, len(expected) - 1)]
        done += bool(record.updated)


@pytest.mark.parametrize("flags", [{"foreach": False}, {"fused": True}], ids=str)
def test_a_table_goes_on_driving_after_a_resume(flags: dict[str, bool]) -> None:
    """torch's load_state_dict replaces an optimizer's group dictionaries; the rates must reach the new ones."""
    straight, resumed = (build("SGD", flags, "O2", lr=RATES) for _ in range(2))
    for i, (x, y) in enumerate(batches_for(straight.net, 6)):
        if i == 2:
            resumed.load_state_dict(resumed.state_dict())
        for field, ours, theirs in zip(
            hs.Record._fields, straight(x, y), resumed(x, y), strict=True
        ):
            assert same(ours, theirs), (i, field, ours, theirs)
    same_prints(straight, resumed)
