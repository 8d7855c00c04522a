"""Rules for operations inside a low network, by the operation that is called.

A network in half precision still holds float32 tensors (its buffers), takes losses, and calls
functions that no half kernel computes soundly. While `OpRules` is active, whoever calls them:

- a product of low and float32 operands takes low copies of the float32 ones;
- functions that want one dtype get one: the widest, or that of the tensor they write into;
- loss functions, and sums and means over a whole tensor, come out in float32;
- functions without a sound half kernel (FP32_FUNCTIONS) run in float32, and round their result;
- a norm layer's statistics stay float32 beside its low input.

Everything else runs as it is. In a CUDA graph, and in a compiled program, the rules cost nothing.
In eager steps each call of a torch function costs about 2 to 5 µs more; torch's own layers, in
which no rule applies, are left out (`without_rules`).
docs/reference/precision.md has the table for users.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from halfstep.precision.cpu_half import PRODUCTS, without_dispatch
from halfstep.precision.policy import BF16, F16, F32, F64

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
Function: TypeAlias = Callable[..., Any]
Rule: TypeAlias = Callable[["OpRules", Function, Args, Kwargs], Any]

_LOW = (F16, BF16)
_WIDE = (F32, F64)


class OpRules(TorchFunctionMode):
    """While active, functions with a rule follow it.

    `product_dtype` is the dtype in which products of mixed operands are formed: the low one, or
    another inside a module that `keep=` names.
    """

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.low = low
        self.product_dtype = low

    def __torch_function__(
        self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        rule = RULES.get(func)
        if rule is None:
            return func(*args, **(kwargs or {}))
        return rule(self, func, args, kwargs or {})

    def with_products_in(self, dtype: torch.dtype, forward: Function) -> Function:
        """`forward` of a module that `keep=` runs in `dtype`: its mixed products too."""

        def forward_with_products(*args: Any, **kwargs: Any) -> Any:
            dtype_around = self.product_dtype
            self.product_dtype = dtype
            try:
                return forward(*args, **kwargs)
            finally:
                self.product_dtype = dtype_around

        return forward_with_products


# What happens to a call


def _product(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Operands of two dtypes: all in the low one, or in that of the tensor that is written."""
    if not _is_mixed(args, kwargs):
        return func(*args, **kwargs)
    dtype = _written_dtype(func, args, kwargs) or rules.product_dtype
    args, kwargs = _cast_floats((args, kwargs), dtype)
    return func(*args, **kwargs)


def _einsum(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A product; one that gives a single number, as "ij,ij->" does, is in float32."""
    equation = args[0] if args else None
    if isinstance(equation, str) and equation.replace(" ", "").endswith("->"):
        args, kwargs = _widen_low((args, kwargs))
    return _product(rules, func, args, kwargs)


def _product_with_mask(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A product to which a mask is added: in a low copy of it, finite numbers stay finite.

    Masks often hold torch.finfo(torch.float32).min. As -inf, a row that is masked as a whole would
    become NaN.
    """
    if not _is_mixed(args, kwargs):
        return func(*args, **kwargs)
    dtype = _written_dtype(func, args, kwargs) or rules.product_dtype
    args, kwargs = tree_map(lambda leaf: _cast_mask(leaf, dtype), (args, kwargs))
    return func(*args, **kwargs)


def _same_dtype(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Operands of two dtypes: all in the widest, or in that of the tensor that is written."""
    if not _is_mixed(args, kwargs):
        return func(*args, **kwargs)
    dtype = _written_dtype(func, args, kwargs) or _widest_dtype(args, kwargs)
    args, kwargs = _cast_floats((args, kwargs), dtype)
    return func(*args, **kwargs)


def _fp32_loss(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A loss in float32: in half, its sum overflows and its small terms are lost."""
    args, kwargs = _widen_low((args, kwargs))
    return func(*args, **kwargs)


def _fp32_sum(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A sum or mean over a whole low tensor comes out in float32. Others stay as they are.

    Whoever reduces to one number writes a loss or a statistic: in float16, it ends at 65,504, and
    the loss scale 2^16, where backward begins, is inf.
    """
    x, *dims = args or (kwargs.get("input"),)
    is_low = isinstance(x, Tensor) and x.dtype in _LOW
    has_output_dtype = kwargs.get("dtype") is not None or kwargs.get("out") is not None
    if not is_low or has_output_dtype or not _reduces_all(x, dims, kwargs):
        return func(*args, **kwargs)
    return func(*args, **{**kwargs, "dtype": F32})


def _fp32_spread(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A variance or deviation over a whole low tensor comes out in float32. Others stay."""
    x, *others = args or (kwargs.get("input"),)
    dims = [value for value in others if not isinstance(value, bool)]  # not `unbiased`
    is_low = isinstance(x, Tensor) and x.dtype in _LOW
    if not is_low or kwargs.get("out") is not None or not _reduces_all(x, dims, kwargs):
        return func(*args, **kwargs)
    args, kwargs = _widen_low((args, kwargs))
    return func(*args, **kwargs)


def _fp32_number(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Functions of low tensors that give one number always: in float32."""
    if _written_dtype(func, args, kwargs) is None:
        args, kwargs = _widen_low((args, kwargs))
    else:
        return _product(rules, func, args, kwargs)
    return func(*args, **kwargs)


def _fp32_norm(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A norm over a whole low tensor comes out in float32. Others stay as they are.

    The nuclear norm is that of singular values, which have no half kernel.
    """
    x, *others = args or (None,)
    if not isinstance(x, Tensor) or x.dtype not in _LOW:
        return func(*args, **kwargs)
    p = others[0] if others else kwargs.get("p", "fro")
    if p == "nuc":
        return _fp32_function(rules, func, args, kwargs)
    has_dims = len(others) > 1 or kwargs.get("dim") is not None
    has_output_dtype = kwargs.get("dtype") is not None or kwargs.get("out") is not None
    if has_dims or has_output_dtype:
        return func(*args, **kwargs)
    return func(x.float(), *others, **kwargs)


def _fp32_function(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A function without a sound half kernel: in float32, with the result rounded to low.

    Single numbers, such as a determinant, and complex results are not rounded.
    """
    written = _written_dtype(func, args, kwargs)
    if not _has_low(args, kwargs):
        return func(*args, **kwargs)
    low_args = args
    args, kwargs = _widen_low((args, kwargs))
    if written is None:
        return _round_results(func(*args, **kwargs), rules.low)

    # In place, or with out=: the result goes where it was asked to go.
    if "out" in kwargs:
        out = kwargs.pop("out")
        return out.copy_(func(*args, **kwargs))
    func(*args, **kwargs)
    return low_args[0].copy_(args[0])


def _fp32_on_cpu(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A function whose half kernel is missing on the CPU only."""
    is_on_cpu = any(isinstance(arg, Tensor) and arg.device.type == "cpu" for arg in args)
    if is_on_cpu:
        return _fp32_function(rules, func, args, kwargs)
    return func(*args, **kwargs)


def _interpolate(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Resizing with antialias=True has no half kernel on the CPU."""
    if kwargs.get("antialias"):
        return _fp32_on_cpu(rules, func, args, kwargs)
    return func(*args, **kwargs)


def _norm_with_statistics(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A low input beside float32 statistics: that kernel takes float32 weights, and rounds once."""
    if not _is_mixed(args, kwargs):
        return func(*args, **kwargs)
    if not args:
        x = kwargs.pop("input")
        return func(x, **_widen_low(kwargs))
    x, *others = args
    others, kwargs = _widen_low((others, kwargs))
    return func(x, *others, **kwargs)


def _norm(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """A norm of operands of two dtypes: in float32, with the result in the dtype of its input."""
    if not _is_mixed(args, kwargs):
        return func(*args, **kwargs)
    x = args[0] if args else kwargs["input"]
    args, kwargs = _widen_low((args, kwargs))
    return func(*args, **kwargs).to(x.dtype)


def _backward(rules: OpRules, func: Function, args: Args, kwargs: Kwargs) -> Any:
    """Backward: activation checkpointing calls parts of forward in it, and they have rules."""
    with rules:
        return without_dispatch(func)(*args, **kwargs)


# Dtypes of arguments


def _is_mixed(args: Args, kwargs: Kwargs) -> bool:
    """Whether there are low tensors and wide ones, or low ones of both kinds."""
    dtypes: set[torch.dtype] = set()
    _add_dtypes(args, dtypes)
    if kwargs:
        _add_dtypes(kwargs.values(), dtypes)
    return len(dtypes) > 1


def _has_low(args: Args, kwargs: Kwargs) -> bool:
    dtypes: set[torch.dtype] = set()
    _add_dtypes(args, dtypes)
    _add_dtypes(kwargs.values(), dtypes)
    return F16 in dtypes or BF16 in dtypes


def _widest_dtype(args: Args, kwargs: Kwargs) -> torch.dtype:
    dtypes: set[torch.dtype] = set()
    _add_dtypes(args, dtypes)
    _add_dtypes(kwargs.values(), dtypes)
    return F64 if F64 in dtypes else F32


def _add_dtypes(values: Iterable[Any], dtypes: set[torch.dtype]) -> None:
    """Adds the floating dtypes of tensors among `values`, also in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            dtype = value.dtype
            if dtype in _LOW or dtype in _WIDE:
                dtypes.add(dtype)
        elif isinstance(value, (list, tuple)):
            _add_dtypes(value, dtypes)


def _written_dtype(func: Function, args: Args, kwargs: Kwargs) -> torch.dtype | None:
    """The dtype of the tensor that a call writes into; None if it makes a new one."""
    target = kwargs.get("out")
    if target is None and func in _IN_PLACE:
        target = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    return target.dtype if isinstance(target, Tensor) else None


def _reduces_all(x: Tensor, dims: list[Any], kwargs: Kwargs) -> bool:
    """Whether nothing is left but one number."""
    keeps_dims = kwargs.get("keepdim") or any(isinstance(dim, bool) for dim in dims)
    if keeps_dims:
        return False
    dim = kwargs.get("dim", kwargs.get("axis"))
    if dims:
        dim = dims if isinstance(dims[0], int) else dims[0]
    if dim is None:
        return True
    count = 1 if isinstance(dim, int) else len(dim)
    return count in (0, x.dim())


def _cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """`values` with every floating tensor in `dtype`; one that already is stays the same object."""

    def cast_leaf(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.to(dtype) if is_float and leaf.dtype != dtype else leaf

    return tree_map(cast_leaf, values)


def _cast_mask(value: Any, dtype: torch.dtype) -> Any:
    """A floating tensor in `dtype`, where finite numbers stay finite and infinite ones infinite."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    if not is_float or value.dtype == dtype:
        return value
    limits = torch.finfo(dtype)
    if limits.max >= torch.finfo(value.dtype).max:
        return value.to(dtype)
    clamped = value.clamp(limits.min, limits.max)
    return torch.where(value.isinf(), value, clamped).to(dtype)


def _widen_low(values: Any) -> Any:
    """`values` with every low tensor in float32."""

    def widen_leaf(leaf: Any) -> Any:
        is_low = isinstance(leaf, Tensor) and leaf.dtype in _LOW
        return leaf.float() if is_low else leaf

    return tree_map(widen_leaf, values)


def _round_results(values: Any, low: torch.dtype) -> Any:
    """`values` with every float32 tensor of more than one number in the low dtype."""

    def round_leaf(leaf: Any) -> Any:
        is_rounded = isinstance(leaf, Tensor) and leaf.dtype == F32 and leaf.dim() > 0
        return leaf.to(low) if is_rounded else leaf

    return tree_map(round_leaf, values)


# Layers without rules

# Their operands are uniform, once a layer's inputs are cast to the dtype of its weights.
_PRODUCT_LAYERS = frozenset(
    {
        *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.LSTM, nn.GRU, nn.RNN),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    }
)
_BATCH_NORMS = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d})
_OTHER_LAYERS = frozenset(
    {
        *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish),
        *(nn.Sigmoid, nn.Hardsigmoid, nn.Tanh, nn.Softplus, nn.Softmax, nn.Identity),
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Embedding, nn.Flatten),
        *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d),
        *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
        *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    }
)


def needs_no_rules(module: nn.Module, dtype: torch.dtype, *, products_are_torchs: bool) -> bool:
    """Whether it is one of torch's own layers, running in `dtype`, where no rule applies.

    Where products are not torch's, FastHalf has to see those of a layer.
    """
    kind = type(module)
    if "forward" in module.__dict__:
        return False
    if kind in _PRODUCT_LAYERS:
        return products_are_torchs
    if kind in _BATCH_NORMS:
        return dtype not in _LOW  # its statistics are float32
    return kind in _OTHER_LAYERS


def without_rules(forward: Function) -> Function:
    """`forward` without modes of torch functions, so that calls inside it cost what they do."""

    @wraps(forward)
    def forward_without_rules(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # there they cost nothing
            return forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return forward(*args, **kwargs)

    return forward_without_rules


# Which function has which rule


def _functions(names: Iterable[str], *namespaces: Any) -> list[Any]:
    """The functions of these names; not every version of torch has all of them."""
    functions = []
    for name in names:
        for namespace in namespaces:
            function = getattr(namespace, name, None)
            if function is not None:
                functions.append(function)
    return functions


def _public_functions(namespace: Any, *, without: Iterable[str]) -> list[Any]:
    """The functions that a module of torch's documents, except those named."""
    names = [name for name in dir(namespace) if name.islower() and not name.startswith("_")]
    values = [getattr(namespace, name) for name in names if name not in set(without)]
    return [value for value in values if callable(value)]


LOSS_NAMES = [
    name for name in dir(F) if name.endswith(("_loss", "cross_entropy", "kl_div", "_with_logits"))
]
LOSS_FUNCTIONS = [
    *_functions(LOSS_NAMES, F, torch, torch._C._nn),
    *_functions(["cross_entropy_loss", "nll_loss2d", "nll_loss_nd"], torch._C._nn),
]

_SUM_FUNCTIONS = _functions(["sum", "mean", "nansum", "nanmean"], torch, Tensor)
_SPREAD_FUNCTIONS = _functions(["var", "std", "var_mean", "std_mean"], torch, Tensor)
_NUMBER_FUNCTIONS = _functions(["dot", "vdot", "trace", "dist"], torch, Tensor)

_MASKED_PRODUCTS = [
    *(F.scaled_dot_product_attention, F.multi_head_attention_forward),
    *_functions(["baddbmm", "baddbmm_", "addmm", "addmm_"], torch, Tensor),
]
_OTHER_PRODUCTS = [
    *_functions(["addmv_", "addbmm_", "__imatmul__"], Tensor),
    *_functions(["inner", "tensordot", "chain_matmul", "multi_dot", "conv_tbc"], torch, Tensor),
    *_functions(["matmul", "multi_dot", "vecdot"], torch.linalg),
    *_functions(["gru", "rnn_tanh", "rnn_relu"], torch),
    *_functions(["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell", "bilinear"], torch),
    *_functions(["embedding_bag"], F),
]

# They raise for operands of two dtypes, where elementwise functions promote.
_SAME_DTYPE_NAMES = (
    *("allclose", "bucketize", "cartesian_prod", "cross", "diagonal_scatter", "heaviside"),
    *("index_add", "index_copy", "index_put", "index_reduce", "isclose", "lerp"),
    *("masked_scatter", "meshgrid", "prelu", "put", "scatter", "scatter_add", "scatter_reduce"),
    *("searchsorted", "select_scatter", "slice_scatter", "_foreach_lerp"),
)
_SAME_DTYPE_IN_PLACE = [
    *_functions([f"{name}_" for name in _SAME_DTYPE_NAMES], torch, Tensor),
    Tensor.__setitem__,
]
_SAME_DTYPE_FUNCTIONS = [
    *_functions(_SAME_DTYPE_NAMES, torch, Tensor, F),
    torch.linalg.cross,
    *_SAME_DTYPE_IN_PLACE,
]

# torch has no half kernel for them, or one whose results or gradients are wrong: seen by comparing
# every operation with float64 (tests/unit/precision/test_op_table.py).
_FP32_NAMES = (
    # Matrix functions and decompositions.
    *("matrix_exp", "matrix_power", "inverse", "pinverse", "det", "logdet", "slogdet"),
    *("cholesky", "cholesky_inverse", "cholesky_solve", "qr", "geqrf", "orgqr", "ormqr"),
    *("lu", "lu_solve", "lu_unpack", "_lu_with_info", "svd", "svd_lowrank", "pca_lowrank"),
    *("triangular_solve", "lobpcg", "matrix_rank"),
    # Distances and statistics.
    *("cdist", "pdist", "cosine_similarity", "cov", "corrcoef", "quantile", "nanquantile"),
    *("histc", "histogram", "histogramdd", "logcumsumexp", "logaddexp", "logaddexp2"),
    # Fourier transforms and complex numbers.
    *("stft", "istft", "complex", "polar", "view_as_complex", "angle"),
    # Special functions.
    *("erfc", "igamma", "igammac", "polygamma", "mvlgamma", "sinc", "i0"),
    # Coordinates between pixels.
    *("grid_sample", "grid_sampler", "grid_sampler_2d", "grid_sampler_3d"),
    # Their windows begin where random numbers say, which in half say another place.
    *("fractional_max_pool2d", "fractional_max_pool2d_with_indices"),
    *("fractional_max_pool3d", "fractional_max_pool3d_with_indices"),
    # In half, eps is 0, and a row of zeros becomes NaN.
    "normalize",
)
_SOUND_LINALG = ("cross", "diagonal", "matmul", "multi_dot", "vecdot", "vector_norm")
_SOUND_FFT = ("fftfreq", "rfftfreq", "fftshift", "ifftshift", "torch")
_SOUND_SPECIAL = (
    *("entr", "erf", "erfinv", "exp2", "expit", "expm1", "log1p", "logit", "round"),
    *("log_softmax", "logsumexp", "softmax", "xlogy", "digamma", "psi", "gammaln", "torch"),
)
_FP32_IN_PLACE = _functions([f"{name}_" for name in _FP32_NAMES], torch, Tensor)
FP32_FUNCTIONS = [
    *_functions(_FP32_NAMES, torch, Tensor, F),
    *_FP32_IN_PLACE,
    *_public_functions(torch.linalg, without=_SOUND_LINALG),
    *_public_functions(torch.fft, without=_SOUND_FFT),
    *_public_functions(torch.special, without=_SOUND_SPECIAL),
    *_functions(["sampled_addmm"], torch.sparse),
]
_FP32_ON_CPU = [
    *_functions(["avg_pool3d", "local_response_norm", "rrelu", "rrelu_"], F, torch),
    torch._C._nn.avg_pool3d,
]

_IN_PLACE: frozenset[Any] = frozenset(
    [
        *_SAME_DTYPE_IN_PLACE,
        *_FP32_IN_PLACE,
        *_functions(["addmm_", "addmv_", "addbmm_", "baddbmm_", "__imatmul__"], Tensor),
        *_functions(["rrelu_"], F, torch),
    ]
)

# A later line wins: multi_dot is a product, though linalg has it too.
RULES: dict[Any, Rule] = {
    **dict.fromkeys(FP32_FUNCTIONS, _fp32_function),
    **dict.fromkeys(_FP32_ON_CPU, _fp32_on_cpu),
    F.interpolate: _interpolate,
    **dict.fromkeys(_SAME_DTYPE_FUNCTIONS, _same_dtype),
    **dict.fromkeys([*PRODUCTS, *_OTHER_PRODUCTS], _product),
    torch.einsum: _einsum,
    **dict.fromkeys(_MASKED_PRODUCTS, _product_with_mask),
    **dict.fromkeys(_NUMBER_FUNCTIONS, _fp32_number),
    **dict.fromkeys(_SUM_FUNCTIONS, _fp32_sum),
    **dict.fromkeys(_SPREAD_FUNCTIONS, _fp32_spread),
    **dict.fromkeys([torch.norm, Tensor.norm, torch.linalg.vector_norm], _fp32_norm),
    **dict.fromkeys(LOSS_FUNCTIONS, _fp32_loss),
    **dict.fromkeys(
        [F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm],
        _norm_with_statistics,
    ),
    **dict.fromkeys(
        [F.layer_norm, F.group_norm, F.rms_norm, torch.layer_norm, torch.group_norm], _norm
    ),
    **dict.fromkeys([torch.autograd.backward, torch.autograd.grad], _backward),
}
"""The rule of each function that has one."""
