"""Every torch optimizer in every precision, cycle and clip equals the loop in plain torch.

The loop is the one that a user would write.
"""

import contextlib
import copy
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import halfstep as hs
from halfstep.precision import TABLE
from tests.support.parity_cases import (
    DEVICE,
    OPTIMIZERS,
    PRECISIONS,
    ROUNDED,
    SCALED,
    assert_equals_torch_loop,
    assert_same_records,
    assert_same_state,
    batches_for,
    conv,
    fused_sgd_works,
    grouped_optimizer_maker,
    has_fused,
    mlp,
    net_for,
    optimizer_maker,
    run_batches,
)
from tests.support.torch_loops import BF16, F16, CastSpec, TorchLoop

# Steps of each cycle length: full cycles and a tail that flush() turns into an update of its own.
# They are 7, 7 and 6 updates.
STEPS = {1: 7, 3: 20, 8: 43}
CLASSES = {
    name: value
    for name, value in vars(optim).items()
    if inspect.isclass(value) and issubclass(value, optim.Optimizer)
}
FLAGS = {
    "amsgrad",
    "capturable",
    "centered",
    "decoupled_weight_decay",
    "foreach",
    "fused",
    "maximize",
    "nesterov",
}
# A step inside autograd: it refuses leaves, so it cannot train a module's parameters.
UNTESTED_FLAGS = {"differentiable"}


def flags_of(name: str) -> list[str]:
    """Returns the constructor's switches.

    These are the parameters whose default is a bool or, for implementations, None.
    """
    flags = []
    for parameter in inspect.signature(CLASSES[name]).parameters.values():
        if isinstance(parameter.default, bool) or parameter.name in ("foreach", "fused"):
            flags.append(parameter.name)
    if "fused" in flags and not has_fused(name):
        flags.remove("fused")
    return flags


def flag_cases() -> list[Any]:
    """Returns each optimizer with each of its switches away from the table's setting."""
    cases = []
    for name, settings in OPTIMIZERS.items():
        parameters = inspect.signature(CLASSES[name]).parameters
        for flag in sorted(set(flags_of(name)) & FLAGS):
            default = settings.get(flag, parameters[flag].default)
            values = (True, False) if default is None else (not default,)
            marks = [pytest.mark.gpu] if flag == "capturable" else []
            for value in values:
                case_id = f"{name}-{flag}={value}"
                cases.append(pytest.param(name, {flag: value}, marks=marks, id=case_id))
    return cases


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    assert set(CLASSES) - {"Optimizer", "LBFGS"} == set(OPTIMIZERS)


def test_every_switch_of_every_optimizer_is_tried_or_left_out_for_a_reason() -> None:
    assert {flag for name in OPTIMIZERS for flag in flags_of(name)} == FLAGS | UNTESTED_FLAGS


def test_every_precision_of_the_table_is_tried() -> None:
    assert {p.name for p, _ in PRECISIONS.values()} | {"tf32"} == set(TABLE)


def test_lbfgs_is_refused() -> None:
    net = mlp()
    with pytest.raises(ValueError, match="LBFGS"):
        hs.TrainStep(net, nn.CrossEntropyLoss(), optim.LBFGS(net.parameters()))


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("accumulate", STEPS)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_plain_torch(
    name: str, precision: str, accumulate: int, clip_norm: float | None
) -> None:
    net = net_for(name)
    assert_equals_torch_loop(
        net,
        optimizer_maker(name),
        precision,
        batches_for(net, STEPS[accumulate]),
        accumulate=accumulate,
        clip_norm=clip_norm,
    )


@pytest.mark.parametrize("accumulate", STEPS)
@pytest.mark.parametrize("precision", SCALED)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_scale_that_the_table_does_not_choose_equals_plain_torch(
    name: str, precision: str, accumulate: int
) -> None:
    net = net_for(name)
    assert_equals_torch_loop(
        net,
        optimizer_maker(name),
        precision,
        batches_for(net, STEPS[accumulate]),
        accumulate=accumulate,
        clip_norm=0.5,
    )


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("accumulate", STEPS)
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_rounded_updates_equal_an_fp32_optimizer_with_low_storage(
    name: str, precision: str, accumulate: int, clip_norm: float | None
) -> None:
    """Adagrad is among them because it has state before its first step."""
    net = net_for(name)
    step, loop = assert_equals_torch_loop(
        net,
        optimizer_maker(name),
        precision,
        batches_for(net, STEPS[accumulate]),
        accumulate=accumulate,
        clip_norm=clip_norm,
    )
    keeps_residue = precision.endswith("kahan")
    for actual, expected in zip(step.state.residue, loop.residue, strict=keeps_residue):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("precision", ["fp32", "O1", "bf16"])
@pytest.mark.parametrize(("name", "flags"), flag_cases())
def test_every_switch_equals_plain_torch(name: str, flags: dict[str, Any], precision: str) -> None:
    _, spec = PRECISIONS[precision]
    is_fused_sgd = name == "SGD" and flags == {"fused": True}
    if is_fused_sgd and spec.cast == "params" and not fused_sgd_works(spec.dtype):
        pytest.skip("torch's kernel is wrong for this dtype; the step refuses it")
    make_optimizer = optimizer_maker(name, **flags)
    net = net_for(name)
    batches = batches_for(net, 8)
    assert_equals_torch_loop(net, make_optimizer, precision, batches, accumulate=3, clip_norm=0.5)
    net = net_for(name)
    assert_equals_torch_loop(net, make_optimizer, precision, batches_for(net, 6))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "fused" in flags_of(n) and n != "SGD"])
def test_fused_equals_plain_torch_in_every_precision(name: str, precision: str) -> None:
    net = net_for(name)
    make_optimizer = optimizer_maker(name, fused=True)
    batches = batches_for(net, 8)
    assert_equals_torch_loop(net, make_optimizer, precision, batches, accumulate=3, clip_norm=0.5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_equals_plain_torch_or_is_refused_where_torch_is_wrong(
    precision: str, momentum: float
) -> None:
    step_precision, spec = PRECISIONS[precision]
    net = net_for("SGD")
    make_optimizer = optimizer_maker("SGD", fused=True, momentum=momentum)
    if spec.cast != "params" or fused_sgd_works(spec.dtype):
        batches = batches_for(net, 8)
        assert_equals_torch_loop(
            net, make_optimizer, precision, batches, accumulate=3, clip_norm=0.5
        )
    else:
        optimizer = make_optimizer(list(net.parameters()))
        with pytest.raises(ValueError, match="fused"):
            hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=step_precision)


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.0, "weight_decay": 0.1, "maximize": True},
    ],
)
@pytest.mark.parametrize("implementation", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_sgd_with_dampening_nesterov_and_weight_decay_equals_plain_torch(
    settings: dict[str, Any], implementation: dict[str, bool]
) -> None:
    net = net_for("SGD")
    assert_equals_torch_loop(
        net,
        optimizer_maker("SGD", **settings, **implementation),
        "O2",
        batches_for(net, 8),
        accumulate=3,
        clip_norm=0.5,
    )


@pytest.mark.parametrize("precision", ["fp32", "O2", "fp16"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
def test_each_group_keeps_its_rate(name: str, precision: str) -> None:
    net = net_for(name)
    make_optimizer = grouped_optimizer_maker(name, [0.1, 0.003])
    batches = batches_for(net, 8)
    step, _ = assert_equals_torch_loop(net, make_optimizer, precision, batches, accumulate=3)
    x, y = batches_for(net, 1)[0]
    assert step(x, y).lr.tolist() == [0.1, 0.003]


@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_norm_and_clip_follow_the_network_order_however_parameters_are_grouped(
    precision: str,
) -> None:
    """As clip_grad_norm_(net.parameters()) does, also where weights are grouped before biases."""
    net = net_for("SGD")
    make_optimizer = grouped_optimizer_maker("SGD", [0.1, 0.003], interleaved=True)
    assert_equals_torch_loop(net, make_optimizer, precision, batches_for(net, 40), clip_norm=0.1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_convolution_and_batch_norm_statistics_equal_plain_torch(name: str, precision: str) -> None:
    """On CUDA with convolutions as torch does them by itself: no other layout, nothing measured."""
    net = net_for("conv")
    assert_equals_torch_loop(
        net,
        optimizer_maker(name),
        precision,
        batches_for(net, 6),
        step_options={"channels_last": False, "cudnn_benchmark": False},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_batches_of_different_sizes_weigh_by_their_size(precision: str) -> None:
    net = net_for("SGD")
    assert_equals_torch_loop(
        net,
        optimizer_maker("SGD"),
        precision,
        batches_for(net, 20, sizes=(4, 1, 7)),
        accumulate=8,
        clip_norm=0.5,
    )


@pytest.mark.parametrize("precision", ["fp32", "O2", "bf16"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_another_loss_equals_plain_torch(precision: str, accumulate: int) -> None:
    net = net_for("SGD")
    batches = [(x, F.one_hot(y, 4).float()) for x, y in batches_for(net, 8, sizes=(4, 3))]
    assert_equals_torch_loop(
        net,
        optimizer_maker("SGD"),
        precision,
        batches,
        loss=nn.MSELoss(),
        accumulate=accumulate,
    )


def rounded_product(layer: nn.Module, low: torch.dtype, x: Tensor) -> Tensor:
    """Returns the fp32 product of operands rounded to the low dtype, rounded again."""
    weight = layer.weight.to(low).float()
    bias = layer.bias.to(low).float()
    product = F.conv2d if isinstance(layer, nn.Conv2d) else F.linear
    return product(x.to(low).float(), weight, bias).to(low)


@pytest.mark.skipif(DEVICE != "cpu", reason="fast half products are for CPUs")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make_net", [mlp, conv])
@pytest.mark.parametrize(
    ("precision", "spec"),
    [
        (hs.Precision("O1"), CastSpec("none", F16, scaled=True)),
        (hs.Precision("O2"), CastSpec("copies", F16, scaled=True)),
        (hs.Precision("O3", dtype="bfloat16"), CastSpec("copies", BF16, low_norms=True)),
        (hs.Precision("fp16"), CastSpec("params", F16)),
        (hs.Precision("bf16"), CastSpec("params", BF16)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_fast_half_products_equal_rounded_fp32_products(
    precision: hs.Precision, spec: CastSpec, make_net: Callable[..., nn.Module], accumulate: int
) -> None:
    net = net_for("conv" if make_net is conv else "SGD")
    rounding_net = copy.deepcopy(net)
    for layer in rounding_net.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.forward = partial(rounded_product, layer, spec.dtype)
    loop = TorchLoop(rounding_net, optimizer_maker("SGD"), spec, accumulate=accumulate)
    step = build(net, precision, accumulate)
    if not step.applied.rounds_fp32_products:
        pytest.skip("this CPU has half units: torch's kernels run")
    batches = batches_for(net, 7)
    assert_same_records(run_batches(step, batches), loop.run(batches))
    assert_same_state(step, loop)


def build(net: nn.Module, precision: hs.Precision, accumulate: int) -> hs.TrainStep:
    """Returns a step; BatchNorm in a cycle must give a notice."""
    optimizer = optimizer_maker("SGD")(list(net.parameters()))
    expects_notice = isinstance(net[0], nn.Conv2d) and accumulate > 1
    check = contextlib.nullcontext()
    if expects_notice:
        check = pytest.warns(hs.Notice, match="batch-coupled")
    with check:
        return hs.TrainStep(
            net, nn.CrossEntropyLoss(), optimizer, precision=precision, accumulate=accumulate
        )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["tf32", "ieee"])
def test_tf32_is_used_exactly_when_the_precision_says_so(mode: str) -> None:
    net = net_for("SGD")
    matmul_flags = torch.backends.cuda.matmul
    loop = TorchLoop(copy.deepcopy(net), optimizer_maker("SGD"), CastSpec("none", torch.float32))
    step = build(net, hs.Precision("tf32" if mode == "tf32" else "fp32"), 1)
    batches = batches_for(net, 7)
    records = run_batches(step, batches)
    fp32_precision_before = matmul_flags.fp32_precision
    try:
        matmul_flags.fp32_precision = mode
        assert_same_records(records, loop.run(batches))
    finally:
        matmul_flags.fp32_precision = fp32_precision_before
    assert_same_state(step, loop)
