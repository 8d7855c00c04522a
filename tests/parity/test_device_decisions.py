"""Deciding an update on the device or on the host gives the same bits.

Learning-rate tables equal rates set by hand.
"""

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
    assert_same_records,
    assert_same_state,
    batches_for,
    fused_sgd_works,
    grouped_optimizer_maker,
    has_fused,
    is_same,
    net_for,
    optimizer_maker,
    overflow_at,
)
from tests.support.torch_loops import MakeOptimizer, TorchLoop

# A rate of 0 is a rate; after the last update of the table its last rate stays.
RATES = [0.1, 0.05, 0.2, 0.01, 0.0, 0.07]
ALL_PRECISIONS = {**PRECISIONS, **ROUNDED}
IMPLEMENTATIONS = [
    {"foreach": True},
    {"foreach": False},
    {"fused": True},
    {"capturable": True},
]
CYCLES = 9


def build(
    name: str, flags: dict[str, bool], precision_name: str = "fp32", **options: Any
) -> hs.TrainStep:
    """Returns a step with this optimizer; `net` names the optimizer whose network it trains."""
    net = net_for(options.pop("net", name))
    optimizer = optimizer_maker(name, **flags)(list(net.parameters()))
    options.setdefault("nonfinite", "skip")
    precision, _ = ALL_PRECISIONS[precision_name]
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision, **options)


def implementation_flags(name: str) -> list[dict[str, bool]]:
    """Returns the flags that choose the optimizer's implementations, or [{}] if it has only one."""
    parameters = inspect.signature(getattr(optim, name)).parameters
    supported = []
    for flags in IMPLEMENTATIONS:
        (flag,) = flags
        if flag not in parameters:
            continue
        if flag == "fused" and not has_fused(name):
            continue
        supported.append(flags)
    return supported or [{}]


def optimizer_cases(*kinds: str) -> list[Any]:
    """Returns optimizers and implementations that this device classifies as one of `kinds`."""
    cases = []
    for name in OPTIMIZERS:
        for flags in implementation_flags(name):
            if build(name, flags).optimizer_kind in kinds:
                flag_words = [f"{flag}={value}" for flag, value in flags.items()]
                cases.append(pytest.param(name, flags, id="-".join([name, *flag_words])))
    return cases


def with_cycle_lengths(cases: list[Any]) -> list[Any]:
    """Adds cycles of 1 and 3 batches to the cases.

    An optimizer with a foreach loop and a plain loop takes one length for each of the two.
    """
    lengths_by_foreach = {True: [1], False: [3]}
    cases_with_length = []
    for case in cases:
        name, flags = case.values
        for length in lengths_by_foreach.get(flags.get("foreach"), [1, 3]):
            case_id = f"{name}-{flags}-{length}"
            cases_with_length.append(pytest.param(name, flags, length, id=case_id))
    return cases_with_length


ON_DEVICE = optimizer_cases("fused", "capturable")
ON_HOST = optimizer_cases("host")


def eventful_batches(net: nn.Module, accumulate: int = 1) -> Batches:
    """Returns the batches of nine cycles with overflows and ignored targets.

    The first cycle overflows, and two in a row do. One batch, then a full cycle, has only ignored
    targets.
    """
    last = accumulate - 1
    overflow_steps = [0, 3 * accumulate + last, 4 * accumulate]
    batches = overflow_at(batches_for(net, CYCLES * accumulate), overflow_steps)
    for i in (5 * accumulate + last, *range(6 * accumulate, 7 * accumulate)):
        x, y = batches[i]
        batches[i] = (x, torch.full_like(y, -100))
    return batches


@cache
def takes_tensor_rates(name: str, **flags: bool) -> bool:
    return build(name, flags, lr=RATES).optimizer_kind != "host"


def test_fused_flags_are_recognised() -> None:
    fused_kinds = {case.values[0] for case in optimizer_cases("fused")}
    takes_scale = set()
    for name in OPTIMIZERS:
        if {"fused": True} in implementation_flags(name):
            optimizer = build(name, {"fused": True}).optimizer
            if getattr(optimizer, "_step_supports_amp_scaling", False):
                takes_scale.add(name)
    assert fused_kinds == takes_scale  # torch 2.11 has no fused Adagrad for CUDA
    assert fused_kinds >= {"SGD", "Adam", "AdamW"}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", [n for n in OPTIMIZERS if {"capturable": True} in implementation_flags(n)]
)
def test_capturable_flags_are_recognised(name: str) -> None:
    assert build(name, {"capturable": True}).optimizer_kind == "capturable"


@pytest.mark.parametrize("name", ["Adafactor", "SparseAdam"])
def test_optimizers_that_must_read_on_the_host_are_recognised(name: str) -> None:
    assert build(name, {}).optimizer_kind == "host"


@pytest.mark.parametrize(("name", "flags"), ON_HOST)
def test_host_optimizers_refuse_to_decide_on_the_device(name: str, flags: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="decide='device'"):
        build(name, flags, decide="device")


def test_one_group_that_needs_the_host_is_enough_to_refuse() -> None:
    net = net_for("Adam")
    first_param, *other_params = net.parameters()
    groups = [
        {"params": [first_param], "momentum": 0.9, "foreach": False},
        {"params": other_params, "foreach": True},
    ]
    optimizer = optim.SGD(groups, lr=0.1)
    with pytest.raises(ValueError, match="decide='device'"):
        hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, lr=RATES, decide="device")


@pytest.mark.parametrize("precision", ALL_PRECISIONS)
@pytest.mark.parametrize(("name", "flags", "accumulate"), with_cycle_lengths(ON_DEVICE))
def test_host_and_device_agree_bit_for_bit(
    name: str, flags: dict[str, bool], precision: str, accumulate: int
) -> None:
    skip_broken_kernel(name, flags, precision)
    options: dict[str, Any] = {"accumulate": accumulate, "clip_norm": 0.5, "ema": 0.9}
    if takes_tensor_rates(name, **flags):
        options["lr"] = RATES
    host = build(name, flags, precision, decide="host", **options)
    device = build(name, flags, precision, decide="device", **options)
    assert_same_training(host, device, eventful_batches(host.net, accumulate))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("name", "flags"), [("SGD", {"foreach": True}), ("AdamW", {"fused": True})], ids=str
)
def test_host_and_device_restore_the_same_batch_norm_statistics(
    name: str, flags: dict[str, bool], precision: str
) -> None:
    host = build(name, flags, precision, net="conv", decide="host")
    device = build(name, flags, precision, net="conv", decide="device")
    assert_same_training(host, device, eventful_batches(host.net))


def skip_broken_kernel(name: str, flags: dict[str, bool], precision_name: str) -> None:
    """Skips fused SGD where torch's kernel is wrong.

    Roundings other than "nearest" widen the parameters for the optimizer and are not affected.
    """
    _, spec = ALL_PRECISIONS[precision_name]
    updates_low_params = spec.cast == "params" and spec.rounding == "nearest"
    is_fused_sgd = name == "SGD" and flags == {"fused": True}
    if updates_low_params and is_fused_sgd and not fused_sgd_works(spec.dtype):
        pytest.skip("torch's kernel is wrong for this dtype; the step refuses it")


def assert_same_training(host: hs.TrainStep, device: hs.TrainStep, batches: Batches) -> None:
    """Asserts equal records at every step, and equal fingerprints after commits and skips."""
    accumulate = len(batches) // CYCLES
    for i, (x, y) in enumerate(batches):
        assert_same_record(i, host(x, y), device(x, y))
        cycles_ended, open_batches = divmod(i + 1, accumulate)
        if open_batches == 0 and cycles_ended in (3, 5, 7, 9):
            assert_same_fingerprints(host, device)
    assert host.state.updates.item() == count_updates(host)
    assert host.state.skips.item() == 3


def assert_same_record(index: int, record: hs.Record, expected_record: hs.Record) -> None:
    for field in hs.Record._fields:
        actual = getattr(record, field)
        expected = getattr(expected_record, field)
        assert is_same(actual, expected), (index, field, actual, expected)


def assert_same_fingerprints(step: hs.TrainStep, expected_step: hs.TrainStep) -> None:
    actual = step.fingerprints()
    expected = expected_step.fingerprints()
    assert list(actual) == list(expected)
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []


def count_updates(step: hs.TrainStep) -> int:
    """Returns the nine cycles of `eventful_batches` less three overflows and those without terms.

    With one batch a cycle, the single batch of ignored targets is a cycle without terms as well.
    """
    return 4 if step.options.accumulate == 1 else 5


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16", "fp16-kahan"])
@pytest.mark.parametrize(("name", "flags"), ON_DEVICE)
def test_device_decisions_read_nothing_after_the_first_committed_update(
    name: str, flags: dict[str, bool], precision: str, accumulate: int
) -> None:
    skip_broken_kernel(name, flags, precision)
    options: dict[str, Any] = {"accumulate": accumulate, "clip_norm": 0.5, "ema": 0.9}
    step = build(name, flags, precision, decide="device", **options)
    read_counts_after_update = set()
    for x, y in eventful_batches(step.net, accumulate):
        step(x, y)
        if step.state.updates.item() > 0:
            read_counts_after_update.add(step.host_reads.reads)
    assert len(read_counts_after_update) == 1


def rates_on_device(rates: list[list[float]]) -> list[list[float]]:
    """Returns the rates as the device stores them: float64 on a CPU, float32 elsewhere."""
    dtype = torch.float64 if DEVICE == "cpu" else torch.float32
    return torch.tensor(rates, dtype=dtype).tolist()


def assert_equals_rates_by_hand(
    make_optimizer: MakeOptimizer, precision_name: str, rates: list[list[float]], **options: Any
) -> list[hs.Record]:
    """Asserts that a table equals setting group["lr"] before each update of a plain loop.

    Both skip overflows. Returns the records.
    """
    net = net_for("SGD")
    precision, spec = ALL_PRECISIONS[precision_name]
    loop = TorchLoop(
        copy.deepcopy(net), make_optimizer, spec, rates=rates_on_device(rates), ema=0.9
    )
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        make_optimizer(list(net.parameters())),
        precision=precision,
        lr=rates if len(rates) > 1 else rates[0],
        ema=0.9,
        nonfinite="skip",
        **options,
    )
    batches = overflow_at(batches_for(net, 14), [1, 4, 8, 9])
    records = [step(x, y) for x, y in batches]
    assert_same_records(records, loop.run(batches))
    assert_same_state(step, loop)
    for average, expected in zip(step.state.ema, loop.ema, strict=True):
        assert torch.equal(average, expected)
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
    assert_equals_rates_by_hand(optimizer_maker(name, **flags), precision, [RATES])


@pytest.mark.parametrize(
    "name", ["NAdam", "RAdam", "RMSprop", "Adafactor", "Adadelta", "Adamax", "ASGD", "Rprop"]
)
def test_a_table_drives_optimizers_that_decide_on_the_host(name: str) -> None:
    assert_equals_rates_by_hand(optimizer_maker(name), "O2", [RATES])


@pytest.mark.parametrize(
    ("flags", "decide"),
    [({"foreach": False}, "host"), ({"fused": True}, "host"), ({"fused": True}, "device")],
    ids=str,
)
def test_each_group_has_a_row(flags: dict[str, bool], decide: str) -> None:
    rates = [RATES[:3], [0.3, 0.2, 0.1]]
    make_optimizer = grouped_optimizer_maker("SGD", [1.0, 1.0], **flags)
    records = assert_equals_rates_by_hand(make_optimizer, "O2", rates, decide=decide)
    assert records[0].lr.tolist() == [row[0] for row in rates_on_device(rates)]


@pytest.mark.parametrize(
    ("flags", "decide"),
    [({"foreach": False}, "host"), ({"fused": True}, "host"), ({"fused": True}, "device")],
    ids=str,
)
def test_a_skipped_update_does_not_move_the_position(flags: dict[str, bool], decide: str) -> None:
    make_optimizer = optimizer_maker("SGD", **flags)
    records = assert_equals_rates_by_hand(make_optimizer, "O2", [RATES], decide=decide)
    (expected_rates,) = rates_on_device([RATES])
    updates = 0
    for i, record in enumerate(records):
        assert bool(record.skipped) == (i in (1, 4, 8, 9))
        assert record.lr.item() == expected_rates[min(updates, len(expected_rates) - 1)]
        updates += bool(record.updated)


@pytest.mark.parametrize("flags", [{"foreach": False}, {"fused": True}], ids=str)
def test_a_table_goes_on_driving_after_a_resume(flags: dict[str, bool]) -> None:
    """The rates must reach the new group dictionaries that torch's load_state_dict makes."""
    uninterrupted = build("SGD", flags, "O2", lr=RATES)
    resumed = build("SGD", flags, "O2", lr=RATES)
    for i, (x, y) in enumerate(batches_for(uninterrupted.net, 6)):
        if i == 2:
            resumed.load_state_dict(resumed.state_dict())
        assert_same_record(i, uninterrupted(x, y), resumed(x, y))
    assert_same_fingerprints(uninterrupted, resumed)
