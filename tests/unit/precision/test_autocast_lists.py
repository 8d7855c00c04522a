"""On a CPU, O1 and hs.amp.autocast round what torch's autocast rounds, op by op.

The ops are those that torch registers for AutocastCPU, and the products that it does not.
"""

import itertools
import random
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import halfstep as hs
from halfstep.precision import Applied

F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64
CPU = torch.device("cpu")
KERNELS = ("auto", "torch")
Make = Callable[..., Tensor]  # random values of a shape, in the dtype that is tried
Op = Callable[[Make], Any]


@pytest.fixture(autouse=True)
def without_half_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """kernels="auto" forms products in float32 whatever units this CPU has."""
    for module in ("halfstep.precision.apply", "halfstep.amp.autocast"):
        monkeypatch.setattr(import_module(module), "has_native", lambda dtype: False)


def spd(t: Make, n: int = 4) -> Tensor:
    """A symmetric positive definite matrix, in the dtype of `t`."""
    dtype = t(1).dtype
    a = t(n, n).double()
    return (a @ a.T + n * torch.eye(n, dtype=F64)).to(dtype)


def unit(t: Make, *shape: int) -> Tensor:
    """Values between 0 and 1."""
    return t(*shape).sigmoid()


def ints(*shape: int, below: int = 4) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).reshape(shape) % below


def mha(t: Make) -> Any:
    x = t(2, 3, 8)
    weights = (t(24, 8), t(24), t(8, 8), t(8))
    return torch._native_multi_head_attention(x, x, x, 8, 2, *weights)


def make_recurrent(kind: type[nn.Module], t: Make, **options: Any) -> nn.Module:
    net = kind(4, 5, **options)
    return net.to(F64) if t(1).dtype == F64 else net


def packed(t: Make) -> Any:
    return nn.utils.rnn.pack_padded_sequence(t(3, 2, 4), [3, 2])


# The ops by the name that they are registered with. A value has as many calls as are worth trying.
LISTED: dict[str, list[Op]] = {
    # Lower precision.
    "_addmm_activation": [
        lambda t: torch._addmm_activation(t(3), t(2, 4), t(4, 3), use_gelu=True)
    ],
    "_convolution": [
        lambda t: torch._convolution(
            t(2, 3, 5, 5), t(4, 3, 3, 3), t(4), (1, 1), (0, 0), (1, 1), False, (0, 0), 1,
            False, False, True,
        )
    ],
    "_native_multi_head_attention": [mha],
    "addbmm": [
        lambda t: torch.addbmm(t(3, 5), t(2, 3, 16), t(2, 16, 5)),
        lambda t: t(3, 5).addbmm(t(2, 3, 16), t(2, 16, 5)),
    ],
    "addmm": [
        lambda t: torch.addmm(t(5), t(3, 16), t(16, 5), beta=0.5, alpha=2.0),
        lambda t: t(3, 5).addmm(t(3, 16), t(16, 5)),
        lambda t: t(3, 5).addmm_(t(3, 16), t(16, 5)),
    ],
    "baddbmm": [
        lambda t: torch.baddbmm(t(2, 3, 5), t(2, 3, 16), t(2, 16, 5)),
        lambda t: t(2, 3, 5).baddbmm(t(2, 3, 16), t(2, 16, 5)),
    ],
    "bmm": [
        lambda t: torch.bmm(t(2, 3, 16), t(2, 16, 5)),
        lambda t: t(2, 3, 16).bmm(t(2, 16, 5)),
        lambda t: torch.bmm(t(2, 3, 16), mat2=t(2, 16, 5)),
    ],
    "conv1d": [
        lambda t: F.conv1d(t(2, 4, 9), t(6, 4, 3), t(6), stride=2),
        lambda t: torch.conv1d(t(2, 4, 9), t(6, 4, 3), padding="same"),
    ],
    "conv2d": [
        lambda t: F.conv2d(t(2, 4, 6, 6), t(8, 2, 3, 3), t(8), groups=2),
        lambda t: torch.conv2d(t(2, 4, 6, 6), t(8, 4, 3, 3), padding="same"),
        lambda t: F.conv2d(input=t(2, 4, 6, 6), weight=t(8, 4, 3, 3)),
    ],
    "conv3d": [
        lambda t: F.conv3d(t(1, 3, 4, 4, 4), t(4, 3, 2, 2, 2), t(4)),
        lambda t: torch.conv3d(t(1, 3, 4, 4, 4), t(4, 3, 3, 3, 3), padding="same"),
    ],
    "conv_tbc": [lambda t: torch.conv_tbc(t(10, 7, 3), t(5, 3, 5), t(5), 0)],
    "conv_transpose1d": [lambda t: F.conv_transpose1d(t(2, 4, 5), t(4, 6, 3), t(6))],
    "conv_transpose2d": [lambda t: F.conv_transpose2d(t(2, 4, 4, 4), t(4, 6, 3, 3), stride=2)],
    "conv_transpose3d": [lambda t: F.conv_transpose3d(t(1, 3, 3, 3, 3), t(3, 4, 2, 2, 2))],
    "linalg_vecdot": [lambda t: torch.linalg.vecdot(t(3, 16), t(3, 16))],
    "linear": [
        lambda t: F.linear(t(3, 5, 16), t(7, 16), t(7)),
        lambda t: F.linear(input=t(5, 16), weight=t(7, 16)),
    ],
    "matmul": [
        lambda t: torch.matmul(t(16), t(16)),
        lambda t: torch.matmul(t(16), t(16, 3)),
        lambda t: t(3, 16).matmul(t(16)),
        lambda t: t(3, 16) @ t(16, 5),
        lambda t: t(2, 1, 3, 16) @ t(4, 16, 5),
    ],
    "mkldnn_rnn_layer": [lambda t: make_recurrent(nn.LSTM, t)(t(2, 3, 4))],
    "mm": [lambda t: torch.mm(t(3, 16), t(16, 5)), lambda t: t(3, 16).mm(t(16, 5))],
    "prelu": [lambda t: F.prelu(t(3, 4), t(1)), lambda t: t(3, 4).prelu(t(1))],
    "scaled_dot_product_attention": [
        lambda t: F.scaled_dot_product_attention(t(2, 2, 6, 8), t(2, 2, 6, 8), t(2, 2, 6, 8)),
        lambda t: F.scaled_dot_product_attention(
            t(2, 2, 6, 8), t(2, 2, 6, 8), t(2, 2, 6, 8), attn_mask=t(6, 6)
        ),
    ],
    # float32.
    "_grid_sampler_2d_cpu_fallback": [
        lambda t: torch._grid_sampler_2d_cpu_fallback(t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, True)
    ],
    "_lu_with_info": [lambda t: torch._lu_with_info(spd(t))],
    "adaptive_avg_pool3d": [lambda t: F.adaptive_avg_pool3d(t(1, 2, 4, 4, 4), 2)],
    "adaptive_max_pool3d": [lambda t: F.adaptive_max_pool3d(t(1, 2, 4, 4, 4), 2)],
    "avg_pool3d": [lambda t: F.avg_pool3d(t(1, 2, 4, 4, 4), 2)],
    "binary_cross_entropy": [
        lambda t: F.binary_cross_entropy(unit(t, 3, 4), unit(t, 3, 4))
    ],
    "binary_cross_entropy_with_logits": [
        lambda t: F.binary_cross_entropy_with_logits(t(3, 4), unit(t, 3, 4))
    ],
    "cdist": [lambda t: torch.cdist(t(3, 4), t(5, 4))],
    "cholesky": [lambda t: torch.cholesky(spd(t))],
    "cholesky_inverse": [lambda t: torch.cholesky_inverse(spd(t))],
    "cholesky_solve": [lambda t: torch.cholesky_solve(t(4, 2), spd(t))],
    "cosine_embedding_loss": [
        lambda t: F.cosine_embedding_loss(t(3, 4), t(3, 4), torch.ones(3))
    ],
    "cross_entropy_loss": [lambda t: F.cross_entropy(t(3, 4), ints(3))],
    "ctc_loss": [
        lambda t: F.ctc_loss(t(5, 2, 4).log_softmax(2), ints(2, 3) % 3 + 1, (5, 5), (3, 2)),
        lambda t: F.ctc_loss(
            t(5, 2, 4).log_softmax(2), ints(2, 3) % 3 + 1, torch.tensor([5, 5]),
            torch.tensor([3, 2]),
        ),
    ],
    "fake_quantize_per_tensor_affine": [
        lambda t: torch.fake_quantize_per_tensor_affine(t(3, 4), 0.1, 0, 0, 255)
    ],
    "fft_fft": [lambda t: torch.fft.fft(t(8))],
    "fft_fft2": [lambda t: torch.fft.fft2(t(4, 8))],
    "fft_fftn": [lambda t: torch.fft.fftn(t(4, 8))],
    "fft_hfft": [lambda t: torch.fft.hfft(t(8))],
    "fft_ifft": [lambda t: torch.fft.ifft(t(8))],
    "fft_ifft2": [lambda t: torch.fft.ifft2(t(4, 8))],
    "fft_ifftn": [lambda t: torch.fft.ifftn(t(4, 8))],
    "fft_ihfft": [lambda t: torch.fft.ihfft(t(8))],
    "fft_irfft": [lambda t: torch.fft.irfft(t(8))],
    "fft_irfft2": [lambda t: torch.fft.irfft2(t(4, 8))],
    "fft_irfftn": [lambda t: torch.fft.irfftn(t(4, 8))],
    "fft_rfft": [lambda t: torch.fft.rfft(t(8))],
    "fft_rfft2": [lambda t: torch.fft.rfft2(t(4, 8))],
    "fft_rfftn": [lambda t: torch.fft.rfftn(t(4, 8))],
    "fractional_max_pool2d": [
        lambda t: F.fractional_max_pool2d(
            t(1, 2, 6, 6), 2, output_size=3, _random_samples=t(1, 2, 2)
        )
    ],
    "fractional_max_pool3d": [
        lambda t: F.fractional_max_pool3d(
            t(1, 2, 6, 6, 6), 2, output_size=3, _random_samples=t(1, 2, 3)
        )
    ],
    "geqrf": [lambda t: torch.geqrf(t(4, 4))],
    "grid_sampler": [lambda t: F.grid_sample(t(1, 2, 4, 4), t(1, 3, 3, 2), align_corners=True)],
    "grid_sampler_2d": [lambda t: torch.grid_sampler_2d(t(1, 2, 4, 4), t(1, 3, 3, 2), 0, 0, True)],
    "grid_sampler_3d": [
        lambda t: torch.grid_sampler_3d(t(1, 2, 4, 4, 4), t(1, 3, 3, 3, 3), 0, 0, True)
    ],
    "hinge_embedding_loss": [lambda t: F.hinge_embedding_loss(t(3, 4), torch.ones(3, 4))],
    "huber_loss": [lambda t: F.huber_loss(t(3, 4), t(3, 4))],
    "inverse": [lambda t: torch.inverse(spd(t))],
    "kl_div": [lambda t: F.kl_div(t(3, 4), unit(t, 3, 4), reduction="batchmean")],
    "l1_loss": [lambda t: F.l1_loss(t(3, 4), t(3, 4))],
    "linalg_cholesky": [lambda t: torch.linalg.cholesky(spd(t))],
    "linalg_cholesky_ex": [lambda t: torch.linalg.cholesky_ex(spd(t))],
    "linalg_cond": [
        lambda t: torch.linalg.cond(spd(t)), lambda t: torch.linalg.cond(spd(t), "fro"),
    ],
    "linalg_eig": [lambda t: torch.linalg.eig(spd(t))],
    "linalg_eigh": [lambda t: torch.linalg.eigh(spd(t))],
    "linalg_eigvals": [lambda t: torch.linalg.eigvals(spd(t))],
    "linalg_eigvalsh": [lambda t: torch.linalg.eigvalsh(spd(t))],
    "linalg_householder_product": [lambda t: torch.linalg.householder_product(t(4, 3), t(3))],
    "linalg_inv": [lambda t: torch.linalg.inv(spd(t))],
    "linalg_inv_ex": [lambda t: torch.linalg.inv_ex(spd(t))],
    "linalg_lstsq": [lambda t: torch.linalg.lstsq(spd(t), t(4, 2))],
    "linalg_matrix_rank": [
        lambda t: torch.linalg.matrix_rank(spd(t)),
        lambda t: torch.linalg.matrix_rank(spd(t), atol=1.0, rtol=0.0),
    ],
    "linalg_qr": [lambda t: torch.linalg.qr(t(4, 4))],
    "linalg_solve": [lambda t: torch.linalg.solve(spd(t), t(4, 2))],
    "linalg_svd": [lambda t: torch.linalg.svd(t(4, 4))],
    "linalg_svdvals": [lambda t: torch.linalg.svdvals(t(4, 4))],
    "linalg_tensorinv": [lambda t: torch.linalg.tensorinv(spd(t).reshape(2, 2, 4))],
    "linalg_tensorsolve": [lambda t: torch.linalg.tensorsolve(spd(t).reshape(2, 2, 4), t(2, 2))],
    "lu_solve": [lambda t: torch.lu_solve(t(4, 2), spd(t), ints(4).int() + 1)],
    "margin_ranking_loss": [lambda t: F.margin_ranking_loss(t(3), t(3), torch.ones(3))],
    "max_pool3d": [lambda t: F.max_pool3d(t(1, 2, 4, 4, 4), 2)],
    "max_unpool2d": [lambda t: F.max_unpool2d(t(1, 1, 2, 2), ints(1, 1, 2, 2) * 3, 2)],
    "max_unpool3d": [lambda t: F.max_unpool3d(t(1, 1, 2, 2, 2), ints(1, 1, 2, 2, 2), 2)],
    "mse_loss": [lambda t: F.mse_loss(t(3, 4), t(3, 4))],
    "multi_margin_loss": [lambda t: F.multi_margin_loss(t(3, 4), ints(3))],
    "multilabel_margin_loss": [lambda t: F.multilabel_margin_loss(t(3, 4), ints(3, 4))],
    "multilabel_margin_loss_forward": [
        lambda t: torch.ops.aten.multilabel_margin_loss_forward(t(3, 4), ints(3, 4), 1)
    ],
    "nanquantile": [
        lambda t: torch.nanquantile(t(9), 0.3),
        lambda t: torch.nanquantile(t(9), torch.tensor([0.3])),
    ],
    "nll_loss": [lambda t: F.nll_loss(t(3, 4), ints(3))],
    "nll_loss2d": [lambda t: F.nll_loss(t(2, 4, 3, 3), ints(2, 3, 3))],
    "orgqr": [lambda t: torch.orgqr(t(4, 3), t(3))],
    "ormqr": [lambda t: torch.ormqr(t(4, 4), t(4), t(4, 4))],
    "pinverse": [lambda t: torch.pinverse(t(4, 3))],
    "poisson_nll_loss": [lambda t: F.poisson_nll_loss(t(3, 4), unit(t, 3, 4))],
    "polar": [lambda t: torch.polar(t(3), t(3))],
    "prod": [lambda t: torch.prod(t(3, 4)), lambda t: torch.prod(t(3, 4), 1)],
    "qr": [lambda t: torch.qr(t(4, 4))],
    "quantile": [
        lambda t: torch.quantile(t(9), 0.3), lambda t: torch.quantile(t(9), torch.tensor([0.3])),
    ],
    "reflection_pad1d": [lambda t: F.pad(t(2, 3, 6), (2, 2), "reflect")],
    "reflection_pad2d": [lambda t: F.pad(t(1, 2, 6, 6), (2, 2, 1, 1), "reflect")],
    "replication_pad1d": [lambda t: F.pad(t(2, 3, 6), (2, 2), "replicate")],
    "replication_pad2d": [lambda t: F.pad(t(1, 2, 6, 6), (2, 2, 1, 1), "replicate")],
    "replication_pad3d": [lambda t: F.pad(t(1, 2, 4, 4, 4), (1,) * 6, "replicate")],
    "smooth_l1_loss": [lambda t: F.smooth_l1_loss(t(3, 4), t(3, 4))],
    "soft_margin_loss": [lambda t: F.soft_margin_loss(t(3, 4), torch.ones(3, 4))],
    "stft": [lambda t: torch.stft(t(64), 16, window=unit(t, 16), return_complex=True)],
    "svd": [lambda t: torch.svd(t(4, 4))],
    "trace": [lambda t: torch.trace(t(4, 4)), lambda t: t(4, 4).trace()],
    "triangular_solve": [lambda t: torch.triangular_solve(t(4, 2), spd(t))],
    "triplet_margin_loss": [lambda t: F.triplet_margin_loss(t(3, 4), t(3, 4), t(3, 4))],
    "view_as_complex": [lambda t: torch.view_as_complex(t(3, 2))],
    # Promoted to the widest.
    "cat": [lambda t: torch.cat([t(3), torch.ones(2)])],
    "stack": [lambda t: torch.stack([t(3), torch.ones(3)])],
    "index_copy": [lambda t: torch.index_copy(t(3, 4), 0, ints(2), torch.ones(2, 4))],
}  # fmt: skip

# Products that are in no list, and what is made of listed ones.
UNLISTED: dict[str, list[Op]] = {
    "addmv": [
        lambda t: torch.addmv(t(3), t(3, 16), t(16)), lambda t: t(3).addmv(t(3, 16), t(16)),
    ],
    "addr": [lambda t: torch.addr(t(3, 4), t(3), t(4))],
    "bilinear": [lambda t: F.bilinear(t(3, 4), t(3, 5), t(6, 4, 5), t(6))],
    "chain_matmul": [lambda t: torch.chain_matmul(t(3, 4), t(4, 5), t(5, 6))],
    "dot": [lambda t: torch.dot(t(16), t(16)), lambda t: torch.vdot(t(16), t(16))],
    "inner": [lambda t: torch.inner(t(3, 16), t(5, 16))],
    "kron": [lambda t: torch.kron(t(2, 2), t(2, 2))],
    "mm out": [
        lambda t: torch.mm(t(3, 4), t(4, 5), out=torch.empty(3, 5)),
        lambda t: torch.mm(t(3, 4), t(4, 5), out=torch.empty(3, 5, dtype=F16)),
        lambda t: torch.matmul(t(3, 4), t(4, 5), out=torch.empty(3, 5)),
    ],
    "multi_dot": [lambda t: torch.linalg.multi_dot([t(3, 4), t(4, 5), t(5, 6)])],
    "mv": [lambda t: torch.mv(t(3, 16), t(16)), lambda t: t(3, 16).mv(t(16))],
    "mixed operands": [
        lambda t: torch.mv(t(3, 16), torch.ones(16, dtype=F16)),
        lambda t: torch.mm(t(3, 16), torch.ones(16, 2, dtype=F64)),
        lambda t: torch.mm(t(3, 16), torch.ones(16, 2, dtype=F16)),
        lambda t: torch.mm(t(3, 16), torch.ones(16, 2, dtype=torch.int64)),
        lambda t: torch.mm(t(3, 3), torch.ones(3, 2) + 0j),
        lambda t: F.linear(t(3, 16), torch.ones(2, 16, dtype=BF16)),
        lambda t: torch.einsum("ij,jk->ik", t(3, 4), torch.ones(4, 2, dtype=F16)),
        lambda t: torch.einsum("ij,jk->ik", t(3, 4), torch.ones(4, 2, dtype=F64)),
    ],
    "tensordot": [lambda t: torch.tensordot(t(3, 4), t(4, 5), 1)],
    "gru": [lambda t: make_recurrent(nn.GRU, t)(t(2, 3, 4))],
    "rnn": [lambda t: make_recurrent(nn.RNN, t)(t(2, 3, 4))],
    "cells": [
        lambda t: make_recurrent(nn.LSTMCell, t)(t(2, 4)),
        lambda t: make_recurrent(nn.GRUCell, t)(t(2, 4)),
        lambda t: make_recurrent(nn.RNNCell, t)(t(2, 4)),
    ],
    "lstm variants": [
        lambda t: make_recurrent(nn.LSTM, t)(packed(t)),
        lambda t: make_recurrent(nn.LSTM, t, proj_size=2)(t(2, 3, 4)),
        lambda t: make_recurrent(nn.LSTM, t, proj_size=2, bias=False)(packed(t)),
        lambda t: make_recurrent(nn.LSTM, t, num_layers=2, bidirectional=True)(t(2, 3, 4)),
        lambda t: make_recurrent(nn.LSTM, t, bias=False, batch_first=True)(t(2, 3, 4)),
    ],
    "norms": [
        lambda t: F.layer_norm(t(3, 4), (4,)),
        lambda t: F.group_norm(t(3, 4, 5), 2),
        lambda t: F.batch_norm(t(3, 4), torch.zeros(4), torch.ones(4), training=True),
        lambda t: F.cosine_similarity(t(3, 4), t(3, 4)),
    ],
    "reductions": [
        lambda t: t(300, 300).abs().sum(),
        lambda t: t(300, 300).softmax(1),
        lambda t: t(30).logsumexp(0),
        lambda t: torch.linalg.norm(t(30)),
        lambda t: t(30).exp().cumsum(0),
    ],
}  # fmt: skip

EINSUMS: dict[str, tuple[tuple[int, ...], ...]] = {
    "ij->": ((300, 300),),
    "ii->": ((4, 4),),
    "ii->i": ((4, 4),),
    "ij->ji": ((3, 4),),
    "ij->i": ((3, 4),),
    "ij,jk->ik": ((3, 16), (16, 5)),
    "ij,jk": ((3, 16), (16, 5)),
    "i j, j k -> i k": ((3, 16), (16, 5)),
    "i,i->": ((16,), (16,)),
    "i,j->ij": ((3,), (4,)),
    "ij,j->i": ((3, 16), (16,)),
    "ij,ij->ij": ((3, 4), (3, 4)),
    "ij,ij->": ((3, 4), (3, 4)),
    "bij,bjk->bik": ((2, 3, 16), (2, 16, 5)),
    "bhqd,bhkd->bhqk": ((2, 2, 5, 8), (2, 2, 5, 8)),
    "bij,kj->bik": ((1, 3, 16), (5, 16)),
    "...ij,...jk->...ik": ((2, 3, 4), (1, 4, 5)),
    "...ij,...jk": ((2, 3, 4), (1, 4, 5)),
    "...j,j->...": ((2, 3, 4), (4,)),
    "...j,...j->j": ((2, 3, 4), (2, 3, 4)),
    "ijk,jl->il": ((2, 3, 4), (3, 5)),
    "ij,ik->jk": ((1, 4), (1, 5)),
    "ij,jk->ik ": ((3, 1), (16, 5)),
    "iij,jk->ik": ((3, 3, 4), (4, 5)),
    "ij,jk,kl->il": ((2, 3), (3, 4), (4, 5)),
    "bi,oij,bj->bo": ((2, 3), (5, 3, 4), (2, 4)),
}
for equation, shapes in EINSUMS.items():
    UNLISTED[f"einsum {equation!r}"] = [
        lambda t, e=equation, s=shapes: torch.einsum(e, *[t(*shape).abs() for shape in s]),
        lambda t, e=equation, s=shapes: torch.einsum(e, [t(*shape) for shape in s]),
    ]
UNLISTED["einsum by numbers"] = [
    lambda t: torch.einsum(t(3, 4), [0, 1], t(4, 5), [1, 2], [0, 2]),
    lambda t: torch.einsum(t(300, 300).abs(), [0, 1], []),
]
if hasattr(torch.linalg, "matrix_sqrth"):  # torch 2.15
    LISTED["linalg_matrix_sqrth"] = [lambda t: torch.linalg.matrix_sqrth(spd(t))]
CASES = {**LISTED, **UNLISTED}


def test_every_op_of_torchs_lists_is_here() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    torchs_own = [name for name in registered if name.startswith("aten::")]
    ops = {name.removeprefix("aten::").partition(".")[0] for name in torchs_own}
    assert ops - set(LISTED) == set()
    assert len(ops) > 90


class Result(nn.Module):
    """A network that runs an op, and remembers what came out before anything else saw it."""

    def __init__(self, run: Callable[[], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.run = run
        self.out: Any = None

    def forward(self) -> Tensor:
        self.out = self.run()
        return self.weight * 1.0


def run_in_o1(run: Callable[[], Any], low: torch.dtype, kernels: str) -> Any:
    net = Result(run)
    with Applied(net, hs.Precision("O1", dtype=low, kernels=kernels), CPU):
        net()
    return net.out


def run_in_block(run: Callable[[], Any], low: torch.dtype, kernels: str) -> Any:
    with hs.amp.autocast(low_prec_dtype=low, device_type="cpu", kernels=kernels):
        return run()


def run_in_nested_blocks(run: Callable[[], Any], low: torch.dtype, kernels: str) -> Any:
    """A block inside a disabled one inside a block; no op is low in the disabled one."""
    outer = hs.amp.autocast(low_prec_dtype=low, device_type="cpu", kernels=kernels)
    with outer, hs.amp.autocast(enabled=False), outer:
        return run()


WAYS = {"O1": run_in_o1, "block": run_in_block, "nested blocks": run_in_nested_blocks}


def run_op(op: Op, inputs: torch.dtype) -> Any:
    """What the op returns, from the same random numbers at each call."""
    torch.manual_seed(0)
    return op(lambda *shape: torch.randn(*shape).to(inputs))


def outcome(run: Callable[[], Any]) -> list[Tensor] | type[Exception]:
    """The tensors that come out, or the class of the error."""
    try:
        return [leaf for leaf in tree_leaves(run()) if isinstance(leaf, Tensor)]
    except Exception as error:
        return type(error)


def assert_same(got: Any, expected: Any, *, exactly: bool) -> None:
    """The same error, or the same dtypes and values up to a few roundings of the largest.

    Both round a product once, to nearest. Their float32 sums are taken in another order, which can
    move a value across a rounding boundary. (Least squares is not repeatable in float32 itself.)
    """
    if isinstance(expected, type):
        assert got is expected
        return
    assert not isinstance(got, type)
    assert [value.dtype for value in got] == [value.dtype for value in expected]
    for value, reference in zip(got, expected, strict=True):
        unit = 0.0
        is_number = value.is_floating_point() or value.is_complex()
        if is_number and not (exactly and value.dtype in (F16, BF16)):
            sizes = reference[reference.isfinite()].abs().flatten().tolist()
            unit = 4 * torch.finfo(value.dtype).eps * max(sizes, default=0.0)
        torch.testing.assert_close(value, reference, rtol=0, atol=unit, equal_nan=True)


def assert_rounded_lstm(got: Any, run: Callable[[], Any], low: torch.dtype) -> None:
    """Against the float32 LSTM: torch has no fp16 kernel for it on most CPUs, and raises."""
    assert [value.dtype for value in got] == [low] * 3
    reference = outcome(run)
    if not isinstance(reference, type):  # an error where inputs and weights differ in dtype
        for value, true in zip(got, reference, strict=True):
            # Three steps, whose operands are rounded.
            assert (value.float() - true).abs().max() < 8 * torch.finfo(low).eps


@pytest.mark.filterwarnings("ignore")  # of deprecated ops
@pytest.mark.parametrize("low", [F16, BF16])
@pytest.mark.parametrize("name", CASES)
def test_dtypes_and_values_are_those_of_torchs_autocast(name: str, low: torch.dtype) -> None:
    for op, inputs in itertools.product(CASES[name], (F32, F16, BF16, F64)):

        def run(op: Op = op, inputs: torch.dtype = inputs) -> Any:
            return run_op(op, inputs)

        with torch.autocast("cpu", dtype=low, cache_enabled=False):
            expected = outcome(run)
        for way, kernels in itertools.product(WAYS, KERNELS):
            got = outcome(partial(WAYS[way], run, low, kernels))
            is_lstm = name in ("mkldnn_rnn_layer", "lstm variants")
            if is_lstm and expected is RuntimeError and isinstance(got, list):
                assert kernels == "auto"
                assert_rounded_lstm(got, run, low)
            else:
                assert_same(got, expected, exactly=kernels == "torch")


def random_einsum(rng: random.Random) -> tuple[str, list[Tensor]]:
    """One to three operands of up to three labels each, of sizes 1 to 3, with any output."""
    sizes = {label: rng.choice([1, 2, 3]) for label in "abcd"}
    terms = []
    for _ in range(rng.choice([1, 2, 2, 2, 2, 3])):
        terms.append("".join(rng.choices("abcd", k=rng.randint(1, 3))))
    labels = sorted(set("".join(terms)))
    equation = ",".join(terms)
    if rng.random() < 0.8:
        equation += "->" + "".join(rng.sample(labels, rng.randint(0, len(labels))))
    operands = []
    for term in terms:
        # A size of 1 is stretched to that of the other operands.
        shape = [sizes[label] if rng.random() < 0.9 else 1 for label in term]
        operands.append(torch.randn(shape))
    return equation, operands


@pytest.mark.parametrize("low", [F16, BF16])
def test_any_einsum_has_the_dtype_that_torchs_autocast_gives_it(low: torch.dtype) -> None:
    rng = random.Random(0)
    torch.manual_seed(0)
    dtypes = []
    for _ in range(1000):
        equation, operands = random_einsum(rng)
        run = partial(torch.einsum, equation, *operands)
        with torch.autocast("cpu", dtype=low, cache_enabled=False):
            expected = outcome(run)
        got = outcome(partial(run_in_block, run, low, "auto"))
        if isinstance(expected, type):
            assert got is expected
        else:
            assert not isinstance(got, type)
            assert got[0].dtype == expected[0].dtype, (equation, [t.shape for t in operands])
            dtypes.append(got[0].dtype)
            # Sums of at most 27 products of three values of up to 4, rounded at most three times.
            torch.testing.assert_close(got[0], expected[0], rtol=0.05, atol=0.1)
    assert dtypes.count(low) > 100
    assert dtypes.count(F32) > 100


@pytest.mark.parametrize("equation", ["ij,jk->ik", "bij,bjk->bik", "bhqd,bhkd->bhqk", "i,i->"])
def test_an_einsum_that_is_one_product_is_formed_in_float32(equation: str) -> None:
    operands = [torch.randn(shape) for shape in EINSUMS[equation]]
    got = run_in_block(partial(torch.einsum, equation, *operands), F16, "auto")
    low_operands = [operand.half().float() for operand in operands]
    assert torch.equal(got, torch.einsum(equation, *low_operands).half())


def test_a_large_sum_is_finite() -> None:
    total = run_in_block(lambda: torch.einsum("ij->", torch.ones(300, 300)), F16, "auto")
    assert total.item() == 90_000


class Mixed(nn.Module):
    """What is low and what is not, in one network: spectral norm, mv, einsum, bilinear."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))
        self.old = nn.utils.spectral_norm(nn.Conv1d(1, 2, 3))
        self.pair = nn.Bilinear(8, 8, 4)
        self.v = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h + self.old(h[:, None]).mean()
        attention = torch.einsum("bi,bj->ij", h, h).softmax(-1)
        h = h.float() * (attention.float().mv(self.v) + torch.einsum("ii->", attention.float()))
        out: Tensor = self.pair(h, h)
        return out


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_network_with_such_products_trains_as_under_torchs_autocast(
    kernels: str, low: str
) -> None:
    """One update; gradients of O1 and of torch's autocast, up to what roundings make of them."""
    torch.manual_seed(0)
    net = Mixed()
    twin = Mixed()
    twin.load_state_dict(net.state_dict())
    x = torch.randn(16, 6)
    y = torch.randint(0, 4, (16,))

    scale = 256 if low == "float16" else None  # one that does not overflow, so that it updates
    precision = hs.Precision("O1", dtype=low, kernels=kernels, scale=scale)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision)
    before = [p.detach().clone() for p in net.parameters()]
    model.fit(1, [(x, y)])
    moved = [old - p.detach() for old, p in zip(before, net.parameters(), strict=True)]

    with torch.autocast("cpu", dtype=getattr(torch, low), cache_enabled=False):
        out = twin(x)
    F.cross_entropy(out.float(), y).backward()
    # A few roundings in a row, each of eps / 2, relative to the largest gradient.
    tolerance = 0.0 if kernels == "torch" else 8 * torch.finfo(getattr(torch, low)).eps
    for step, param in zip(moved, twin.parameters(), strict=True):
        assert param.grad is not None
        difference = (step - param.grad).abs().max().item()
        # The parameters are float32: `moved` is their rounded difference.
        assert difference <= tolerance * param.grad.abs().max().item() + 2.0**-20
