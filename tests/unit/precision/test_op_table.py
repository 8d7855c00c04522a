"""Every operation of torch's own table, inside a low network: sound, or in the list of exceptions.

The reference is float64 with the same low operands.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from halfstep.precision.op_rules import OpRules
from tests.support.op_info import OpSample, float_operations, samples_of

F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64

SAMPLES = 4  # of each operation
# Errors are 2-norms over the result, in units of the low dtype's eps. Rounding low operands again
# inside an elementwise chain costs a few of them.
TOLERANCE_EPS = 8
FP32_ERRORS = 4  # how many times the error of float32, which ill-conditioned samples have

# What is left as torch has it, and why.
NOT_COMPARED = {
    # Their memory is not initialised.
    **dict.fromkeys(
        ["empty", "empty_like", "empty_permuted", "empty_strided", "new_empty"], "uninitialised"
    ),
    "new_empty_strided": "uninitialised",
    # One number beyond the range of float16 makes the norm infinite: no kernel can hold it.
    **dict.fromkeys(["pow", "__rpow__", "tan"], "range of the low dtype"),
    "div.trunc_rounding": "a step function: the operands' last digit decides the step",
    # Aliases inside torch that no network calls by name.
    **dict.fromkeys(
        ["native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"], "internal"
    ),
    "_upsample_bilinear2d_aa": "internal: F.interpolate(antialias=True) has a rule",
    "torch.ops.aten._safe_softmax.default": "internal",
    "nn.functional.softplus": "range of the low dtype: exp(-20) is 0 in float16",
    "linalg.pinv.singular": "the sample is a low product before it is a pseudo-inverse",
    "nn.functional.layer_norm": "the sample's true gradient is 0, and float32 misses it too",
    "nn.functional.multi_head_attention_forward": "the gradient of the key's bias is 0",
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns of deprecated functions that its own table still has."""
    with warnings.catch_warnings(action="ignore"):
        yield


def error_in_eps(value: Tensor, low: torch.dtype, fp32: Tensor, exact: Tensor) -> float:
    """The error of `value` beyond what float32 has anyway, in units of the low dtype's eps."""
    is_counted = exact.isfinite() & fp32.isfinite() & (exact.abs() < torch.finfo(F16).max)
    value, fp32, exact = (t[is_counted].to(torch.complex128) for t in (value, fp32, exact))
    if not exact.numel():
        return 0.0
    # Below the smallest normal number the low dtype has a fixed step.
    underflow = torch.finfo(low).tiny * exact.numel() ** 0.5
    size = exact.abs().square().sum().sqrt().item() + underflow
    error = (value - exact).abs().square().sum().sqrt().item() / size
    fp32_error = (fp32 - exact).abs().square().sum().sqrt().item() / size
    excess = (error - FP32_ERRORS * fp32_error) / torch.finfo(low).eps
    return excess if excess == excess else float("inf")


def compare(
    compute: Callable[[OpSample], list[Tensor | None]], sample: OpSample, low: torch.dtype
) -> str:
    """What is wrong with the low results of one sample; empty if nothing is."""
    low_sample = sample.to(low)
    try:
        exact = compute(low_sample.to(F64))
        fp32 = compute(low_sample.to(F32))
    except Exception:
        return ""  # an error sample, or one that float32 or float64 does not have
    try:
        with OpRules(low):
            values = compute(low_sample)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    worst = 0.0
    for value, single, double in zip(values, fp32, exact, strict=True):
        if value is not None and single is not None and double is not None:
            worst = max(worst, error_in_eps(value, low, single, double))
    return f"error of {worst:.0f} eps" if worst > TOLERANCE_EPS else ""


def is_compared(value: Any) -> bool:
    is_plain = isinstance(value, Tensor) and value.layout == torch.strided
    return is_plain and (value.is_floating_point() or value.is_complex())


@pytest.mark.parametrize("low", [F16, BF16])
def test_every_result_is_sound(low: torch.dtype) -> None:
    assert unsound_results(low, "cpu") == {}


def unsound_results(low: torch.dtype, device: str) -> dict[str, str]:
    """The operations whose results are wrong, each with what is wrong."""
    unsound = {}
    for name, op in float_operations().items():
        if name in NOT_COMPARED:
            continue

        def results(sample: OpSample, function: Any = op.op) -> list[Tensor | None]:
            return [leaf for leaf in tree_leaves(sample.call(function)) if is_compared(leaf)]

        samples = samples_of(op, SAMPLES, device=device)
        found = [compare(results, sample, low) for sample in samples]
        if any(found):
            unsound[name] = max(found)
    return unsound


@pytest.mark.parametrize("low", [F16, BF16])
@pytest.mark.parametrize("dims", [2, 3])
def test_random_pooling_windows_lie_where_float32_has_them(dims: int, low: torch.dtype) -> None:
    """The same samples, rounded to half before: a window that begins elsewhere has other maxima."""
    pool = F.fractional_max_pool2d if dims == 2 else F.fractional_max_pool3d
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        x = torch.randn(2, 3, *([9] * dims), generator=generator).to(low)
        samples = torch.rand(2, 3, dims, generator=generator).to(low)
        options: dict[str, Any] = {"output_size": [4] * dims, "return_indices": True}
        with OpRules(low):
            out, indices = pool(x, 2, _random_samples=samples, **options)
            without_indices = pool(x, 2, output_size=[4] * dims, _random_samples=samples)
        expected, places = pool(x.float(), 2, _random_samples=samples.float(), **options)
        assert out.dtype == without_indices.dtype == low
        assert torch.equal(out.float(), expected)
        assert torch.equal(indices, places)
        assert torch.equal(without_indices, out)


@pytest.mark.parametrize("low", [F16, BF16])
def test_every_gradient_is_sound(low: torch.dtype) -> None:
    assert unsound_gradients(low, "cpu") == {}


def unsound_gradients(low: torch.dtype, device: str) -> dict[str, str]:
    """The operations whose gradients are wrong, each with what is wrong."""
    unsound = {}
    for name, op in float_operations().items():
        if name in NOT_COMPARED or not op.supports_autograd:
            continue

        def gradients(sample: OpSample, function: Any = op.op) -> list[Tensor | None]:
            leaves = [leaf for leaf in sample.floats() if leaf.requires_grad]
            results = tree_leaves(sample.call(function))
            outputs = [r for r in results if is_compared(r) and r.requires_grad]
            generator = torch.Generator().manual_seed(2)
            seeds = [torch.randn(r.shape, generator=generator).to(low).to(r.dtype) for r in outputs]
            grads = torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)
            return [grad if is_compared(grad) else None for grad in grads]

        samples = samples_of(op, SAMPLES, requires_grad=True, device=device)
        found = [compare(gradients, sample, low) for sample in samples]
        if any(found):
            unsound[name] = max(found)
    return unsound


# Functions of sparse tensors, and internal ones.
MIXED_UNSUPPORTED = {
    # torch 2.15 lists this kernel, which F.scaled_dot_product_attention calls behind a rule.
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "internal",
    "_chunk_cat": "internal",
    "_softmax_backward_data": "internal",
    "_unsafe_masked_index_put_accumulate": "internal",
    "sparse.mm.reduce": "sparse",
    **dict.fromkeys(
        ["native_batch_norm", "_native_batch_norm_legit", "_batch_norm_with_update"], "internal"
    ),
    **dict.fromkeys(["native_layer_norm", "native_group_norm"], "internal"),
}


def test_no_operation_refuses_a_float32_buffer_beside_low_tensors() -> None:
    """Whichever operand is the buffer, also where the operation writes into it."""
    assert all_mixed_refusals("cpu") == {}


def all_mixed_refusals(device: str) -> dict[str, str]:
    """The operations that refuse operands of two dtypes, each with its error."""
    refusals: dict[str, str] = {}
    for name, op in float_operations().items():
        if name in MIXED_UNSUPPORTED:
            continue
        for function in (op.op, op.inplace_variant):
            for sample in samples_of(op, SAMPLES, device=device):
                if function is not None and len(sample.floats()) > 1:
                    refusals |= mixed_refusals(name, function, sample)
    return refusals


def mixed_refusals(name: str, function: Any, sample: OpSample) -> dict[str, str]:
    """The errors of a call with operands of two dtypes that works with either alone, by name."""
    with OpRules(F16):
        try:
            sample.to(F32).call(function)
            sample.to(F16).call(function)
        except Exception:
            return {}
        refusals = {}
        for dtypes in ((F16, F32), (F32, F16)):
            try:
                sample.to(*dtypes).call(function)
            except Exception as error:
                refusals[f"{name} {dtypes}"] = str(error).splitlines()[0]
    return refusals
