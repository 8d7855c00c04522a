"""Every torch optimizer in every precision, cycle and clip equals the loop that a user would write in plain torch."""

import copy
import inspect
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
    batches_for,
    both,
    conv,
    fused_sgd_works,
    has_fused,
    in_groups,
    maker,
    mlp,
    net_for,
    run,
    same_records,
    same_state,
)
from tests.support.torch_loops import BF16, F16, Loop, Spec

# Steps of each cycle length: whole cycles and a tail that flush() turns into an update of its own; 7, 7 and 6 updates.
STEPS = {1: 7, 3: 20, 8: 43}
CLASSES = {
    n: c for n, c in vars(optim).items() if inspect.isclass(c) and issubclass(c, optim.Optimizer)
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
LEFT_OUT = {
    "differentiable"
}  # a step inside autograd: it refuses leaves, so it cannot train a module's parameters


def flags_of(name: str) -> list[str]:
    """The constructor's switches: parameters whose default is a bool or, for implementations, None."""
    parameters = inspect.signature(CLASSES[name]).parameters.values()
    implementation = ("foreach", "fused")
    names = [p.name for p in parameters if isinstance(p.default, bool) or p.name in implementation]
    return [n for n in names if n != "fused" or has_fused(name)]


def variants() -> list[Any]:
    """Each optimizer with each of its switches away from the table's setting; capturable needs CUDA."""
    found = []
    for name, settings in OPTIMIZERS.items():
        default = inspect.signature(CLASSES[name]).parameters
        for flag in sorted(set(flags_of(name)) & FLAGS):
            usual = settings.get(flag, default[flag].default)
            cases = [(flag, v) for v in ((True, False) if usual is None else (not usual,))]
            cuda = [pytest.mark.gpu] if flag == "capturable" else []
            found += [
                pytest.param(name, dict([case]), marks=cuda, id=f"{name}-{flag}={case[1]}")
                for case in cases
            ]
    return found


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    assert set(CLASSES) - {"Optimizer", "LBFGS"} == set(OPTIMIZERS)


def test_every_switch_of_every_optimizer_is_tried_or_left_out_for_a_reason() -> None:
    assert {flag for name in OPTIMIZERS for flag in flags_of(name)} == FLAGS | LEFT_OUT


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
    both(
        net,
        maker(name),
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
    both(
        net,
        maker(name),
        precision,
        batches_for(net, STEPS[accumulate]),
        accumulate=accumulate,
        clip_norm=0.5,
    )


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("accumulate", STEPS)
@pytest.mark.parametrize("precision", ROUNDED)
@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "Adagrad"]
)  # Adagrad has state before its first step
def test_rounded_updates_equal_an_fp32_optimizer_with_low_storage(
    name: str, precision: str, accumulate: int, clip_norm: float | None
) -> None:
    net = net_for(name)
    step, loop = both(
        net,
        maker(name),
        precision,
        batches_for(net, STEPS[accumulate]),
        accumulate=accumulate,
        clip_norm=clip_norm,
    )
    for ours, theirs in zip(step.state.residue, loop.residue, strict=precision.endswith("kahan")):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("precision", ["fp32", "O1", "bf16"])
@pytest.mark.parametrize(("name", "flags"), variants())
def test_every_switch_equals_plain_torch(name: str, flags: dict[str, Any], precision: str) -> None:
    net, spec = net_for(name), PRECISIONS[precision][1]
    if (
        flags == {"fused": True}
        and name == "SGD"
        and spec.cast == "whole"
        and not fused_sgd_works(spec.dtype)
    ):
        pytest.skip("torch's kernel is wrong here; the step refuses it")
    both(net, maker(name, **flags), precision, batches_for(net, 8), accumulate=3, clip_norm=0.5)
    net = net_for(name)
    both(net, maker(name, **flags), precision, batches_for(net, 6))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if "fused" in flags_of(n) and n != "SGD"])
def test_fused_equals_plain_torch_in_every_precision(name: str, precision: str) -> None:
    net = net_for(name)
    both(net, maker(name, fused=True), precision, batches_for(net, 8), accumulate=3, clip_norm=0.5)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_equals_plain_torch_or_is_refused_where_torch_is_wrong(
    precision: str, momentum: float
) -> None:
    net, (ours, spec) = net_for("SGD"), PRECISIONS[precision]
    make = maker("SGD", fused=True, momentum=momentum)
    if spec.cast != "whole" or fused_sgd_works(spec.dtype):
        both(net, make, precision, batches_for(net, 8), accumulate=3, clip_norm=0.5)
    else:
        with pytest.raises(ValueError, match="fused"):
            hs.TrainStep(net, nn.CrossEntropyLoss(), make(list(net.parameters())), precision=ours)


@pytest.mark.parametrize(
    "settings",
    [
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1},
        {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
        {"momentum": 0.0, "weight_decay": 0.1, "maximize": True},
    ],
)
@pytest.mark.parametrize("implementation", [{"foreach": True}, {"foreach": False}, {"fused": True}])
def test_sgd_with_damping_nesterov_decay(
    settings: dict[str, Any], implementation: dict[str, bool]
) -> None:
    net = net_for("SGD")
    both(
        net,
        maker("SGD", **settings, **implementation),
        "O2",
        batches_for(net, 8),
        accumulate=3,
        clip_norm=0.5,
    )


@pytest.mark.parametrize("precision", ["fp32", "O2", "fp16"])
@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adafactor"])
def test_each_group_keeps_its_rate(name: str, precision: str) -> None:
    net, make = net_for(name), in_groups(name, [0.1, 0.003])
    step, _ = both(net, make, precision, batches_for(net, 8), accumulate=3)
    assert step(*batches_for(net, 1)[0]).lr.tolist() == [0.1, 0.003]


@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_norm_and_clip_follow_the_network_order_however_parameters_are_grouped(
    precision: str,
) -> None:
    """As clip_grad_norm_(net.parameters()) in a loop whose optimizer groups, say, weights before biases."""
    net, make = net_for("SGD"), in_groups("SGD", [0.1, 0.003], interleaved=True)
    both(net, make, precision, batches_for(net, 40), clip_norm=0.1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_convolution_and_batch_norm_statistics_equal_plain_torch(name: str, precision: str) -> None:
    """On CUDA with convolutions as torch does them by itself: no other layout, nothing measured."""
    net = net_for("conv")
    both(
        net,
        maker(name),
        precision,
        batches_for(net, 6),
        given={"channels_last": False, "cudnn_benchmark": False},
    )


@pytest.mark.parametrize("precision", PRECISIONS)
def test_batches_of_different_sizes_weigh_what_they_hold(precision: str) -> None:
    net = net_for("SGD")
    both(
        net,
        maker("SGD"),
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
    both(net, maker("SGD"), precision, batches, loss=nn.MSELoss(), accumulate=accumulate)


def rounded_product(layer: nn.Module, low: torch.dtype, x: Tensor) -> Tensor:
    """round(fp32 product of the low operands)."""
    weight, bias = layer.weight.to(low).float(), layer.bias.to(low).float()
    product = F.conv2d if isinstance(layer, nn.Conv2d) else F.linear
    return product(x.to(low).float(), weight, bias).to(low)


@pytest.mark.skipif(DEVICE != "cpu", reason="fast half products are for CPUs")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make_net", [mlp, conv])
@pytest.mark.parametrize(
    ("precision", "spec"),
    [
        (hs.Precision("O1"), Spec("none", F16, scaled=True)),
        (hs.Precision("O2"), Spec("copies", F16, scaled=True)),
        (hs.Precision("O3", dtype="bfloat16"), Spec("copies", BF16, low_norms=True)),
        (hs.Precision("fp16"), Spec("whole", F16)),
        (hs.Precision("bf16"), Spec("whole", BF16)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_fast_half_products_equal_rounded_fp32_products(
    precision: hs.Precision, spec: Spec, make_net: Any, accumulate: int
) -> None:
    net = net_for("conv" if make_net is conv else "SGD")
    twin = copy.deepcopy(net)
    for layer in twin.modules():
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            layer.forward = partial(rounded_product, layer, spec.dtype)
    loop = Loop(twin, maker("SGD"), spec, accumulate=accumulate)
    step = build(net, precision, accumulate)
    if not step.applied.rounds_fp32_products:
        pytest.skip("this CPU has half units: torch's kernels run")
    batches = batches_for(net, 7)
    same_records(run(step, batches), loop.run(batches))
    same_state(step, loop)


def build(net: nn.Module, precision: hs.Precision, accumulate: int) -> hs.TrainStep:
    optimizer, coupled = (
        maker("SGD")(list(net.parameters())),
        isinstance(net[0], nn.Conv2d) and accumulate > 1,
    )
    if not coupled:
        return hs.TrainStep(
            net, nn.CrossEntropyLoss(), optimizer, precision=precision, accumulate=accumulate
        )
    with pytest.warns(hs.Notice, match="batch-coupled"):
        return hs.TrainStep(
            net, nn.CrossEntropyLoss(), optimizer, precision=precision, accumulate=accumulate
        )


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["tf32", "ieee"])
def test_tf32_is_used_exactly_when_asked(mode: str) -> None:
    net, switch = net_for("SGD"), torch.backends.cuda.matmul
    loop = Loop(copy.deepcopy(net), maker("SGD"), Spec("none", torch.float32))
    step = build(net, hs.Precision("tf32" if mode == "tf32" else "fp32"), 1)
    batches = batches_for(net, 7)
    records, before = run(step, batches), switch.fp32_precision
    try:
        switch.fp32_precision = mode
        same_records(records, loop.run(batches))
    finally:
        switch.fp32_precision = before
    same_state(step, loop)
