"""Float buffers and named inputs in low networks: never rounded, and nothing raises because of it.

Every case runs in O2 and O3, float16 and bfloat16, with torch's kernels and with the CPU's own. The
reference is the same network in float64. Before, buffers were rounded to the low dtype for each
forward pass and written back.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

import halfstep as hs

F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32


class Setting(NamedTuple):
    name: str
    low: torch.dtype
    kernels: str

    def precision(self, **choices: Any) -> hs.Precision:
        return hs.Precision(self.name, dtype=self.low, kernels=self.kernels, **choices)

    def __str__(self) -> str:
        return f"{self.name}-{str(self.low).removeprefix('torch.')}-{self.kernels}"

    @property
    def eps(self) -> float:
        return torch.finfo(self.low).eps


SETTINGS = [
    Setting(name, low, kernels)
    for name in ("O2", "O3")
    for low in (F16, BF16)
    for kernels in ("torch", "auto")
]
every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=Setting.__str__)


def relative_error(value: Tensor, exact: Tensor) -> float:
    error = (value.double() - exact.double()).norm() / exact.double().norm()
    return error.item()


def make_step(net: nn.Module, precision: hs.Precision, **options: Any) -> hs.TrainStep:
    """Returns a step whose weights hardly move, so that buffers can be compared after many."""
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    return hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision, **options)


# --- Tables that are read ---


class Rotary(nn.Module):
    """Angles from a table of frequencies and positions: large numbers whose sine matters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000.0 ** (torch.arange(0, 8, 2) / 8)))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(2041, 2041 + x.shape[1], device=x.device)
        angles = positions[:, None] * self.inv_freq
        table = torch.cat([angles.sin(), angles.cos()], dim=-1)
        out: Tensor = self.linear(x * table)
        return out


class Sinusoidal(nn.Module):
    """Attention is all you need: a table that is added to embeddings."""

    def __init__(self) -> None:
        super().__init__()
        positions = torch.arange(64)[:, None] / 10000.0 ** (torch.arange(0, 8, 2) / 8)
        table = torch.cat([positions.sin(), positions.cos()], dim=-1)
        self.register_buffer("pe", table)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.encoder(x + self.pe[: x.shape[1]])
        return out


class FixedBasis(nn.Module):
    """A product with a table: random features, a mel filter bank, a wavelet basis."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", torch.randn(8, 12) / 3)
        self.register_buffer("kernel", torch.randn(12, 1, 3))
        self.register_buffer("bias", torch.randn(12))
        self.head = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        features = torch.einsum("bti,ij->btj", x, self.basis) + x @ self.basis
        features = F.linear(features, self.basis.T @ self.basis, self.bias)
        features = F.conv1d(features.transpose(1, 2), self.kernel, groups=12, padding=1)
        out: Tensor = self.head(features.transpose(1, 2))
        return out


class CausalAttention(nn.Module):
    """A mask as a buffer, in each form in which networks have it, in each form of attention."""

    def __init__(self, masked: float) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((6, 6), masked).triu(1))
        self.qkv = nn.Linear(8, 24)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        first = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        second = (q @ k.transpose(1, 2) + self.mask).softmax(-1) @ v
        third = torch.baddbmm(self.mask.expand(len(x), 6, 6), q, k.transpose(1, 2)).softmax(-1) @ v
        fourth, weights = self.attention(x, x, x, attn_mask=self.mask)
        assert weights.shape == (len(x), 6, 6)
        out: Tensor = first + second + third + fourth
        return out


class RelativeBias(nn.Module):
    """T5's bias by distance, from a table of buckets that is a float buffer here."""

    def __init__(self) -> None:
        super().__init__()
        distance = torch.arange(6)[:, None] - torch.arange(6)
        self.register_buffer("distance", distance.float())
        self.scale = nn.Parameter(torch.tensor([0.3]))
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        bias = -self.distance.abs() * self.scale
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Scaled(nn.Module):
    """Statistics of the data as buffers: inputs of a few thousand, normalised first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((8,), 0.1234567))
        self.register_buffer("std", torch.full((8,), 3.1415926))
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net((x - self.mean) / self.std)
        return out


# The largest error, in eps of the low dtype: a few roundings. Before, Rotary had 260 in float16
# and 160 in bfloat16.
TABLES: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "rotary": (Rotary, 2),
    "sinusoidal": (Sinusoidal, 4),
    "fixed basis": (FixedBasis, 4),
    "mask of -inf": (lambda: CausalAttention(float("-inf")), 4),
    "mask of finfo.min": (lambda: CausalAttention(torch.finfo(F32).min), 4),
    "relative bias": (RelativeBias, 2),
    "data statistics": (Scaled, 2),
    "spectral norm": (lambda: spectral_norm(nn.Linear(8, 8)), 4),
    "spectral norm as parametrization": (
        lambda: parametrizations.spectral_norm(nn.Linear(8, 8)),
        2,
    ),
    "weight norm": (lambda: weight_norm(nn.Linear(8, 8)), 4),
    "weight norm as parametrization": (lambda: parametrizations.weight_norm(nn.Linear(8, 8)), 2),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(8, 8)), 2),
    "orthogonal by matrix_exp": (
        lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="matrix_exp"),
        2,
    ),
    "orthogonal by cayley": (
        lambda: parametrizations.orthogonal(nn.Linear(8, 8), orthogonal_map="cayley"),
        2,
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
@every_setting
@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_not_rounded(name: str, setting: Setting) -> None:
    check_table(name, setting, "cpu")


def check_table(name: str, setting: Setting, device: str) -> None:
    """Asserts that loss, gradients, outputs and buffers are those of float64, but for rounding."""
    make_net, tolerance_eps = TABLES[name]
    torch.manual_seed(0)
    exact_net = make_net().double().to(device)
    torch.manual_seed(0)
    net = make_net().to(device)
    x = torch.randn(3, 6, 8).to(device)
    y = torch.randn(3, 6, 8).to(device)
    exact = exact_net(x.double())
    F.mse_loss(exact, y.double()).backward()
    buffers = {key: buffer.clone() for key, buffer in net.named_buffers()}

    # Training: the loss, its gradients, and the buffers.
    net.train()
    step = hs.TrainStep(
        net,
        nn.MSELoss(),
        torch.optim.SGD(net.parameters(), lr=1.0),
        precision=setting.precision(scale=1.0),
    )
    weights = {key: p.detach().clone() for key, p in net.named_parameters()}
    record = step(x, y)
    expected_loss = F.mse_loss(exact, y.double()).item()
    assert record.loss.item() == pytest.approx(expected_loss, rel=2 * tolerance_eps * setting.eps)
    norm = torch.stack([p.grad.norm() for p in exact_net.parameters()]).norm().item()
    for key, p in net.named_parameters():
        grad = weights[key] - p.detach()
        error = (grad.double() - exact_net.get_parameter(key).grad).norm().item()
        assert error <= 4 * tolerance_eps * setting.eps * norm, key
    for key, buffer in net.named_buffers():
        assert buffer.dtype == F32
        if "u" not in key.rpartition(".")[2] and "v" not in key.rpartition(".")[2]:
            assert torch.equal(buffer, buffers[key]), key

    # Evaluation.
    exact_net.eval()
    torch.nn.utils.vector_to_parameters(
        torch.cat([p.detach().double().flatten() for p in net.parameters()]),
        exact_net.parameters(),
    )
    for key, buffer in net.named_buffers():
        exact_net.get_buffer(key).copy_(buffer)
    with torch.no_grad():
        exact = exact_net(x.double())
    out = step.evaluator().predict(x)
    assert relative_error(out, exact) <= tolerance_eps * setting.eps


class SeesItsWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.weight.detach()
        return super().forward(x)


@every_setting
@pytest.mark.parametrize("parametrize", [parametrizations.orthogonal, parametrizations.weight_norm])
def test_a_parametrized_weight_is_that_of_the_masters_rounded_once(
    parametrize: Callable[[nn.Module], nn.Module], setting: Setting
) -> None:
    net = nn.Sequential(parametrize(SeesItsWeight(8, 8)))
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p) / 3)
    expected = net[0].weight.detach().to(setting.low)
    hs.EvalStep(net, precision=setting.precision()).predict(torch.randn(3, 8))
    assert torch.equal(net[0].seen, expected)


@every_setting
def test_a_row_masked_as_a_whole_stays_finite(setting: Setting) -> None:
    """With finfo.min, as in Hugging Face's masks. As -inf in the low dtype, it would be NaN."""
    net = CausalAttention(torch.finfo(F32).min)
    net.mask[2] = torch.finfo(F32).min
    out = hs.EvalStep(net, precision=setting.precision()).predict(torch.randn(3, 6, 8))
    assert out.isfinite().all()


# --- Buffers that forward updates ---

Update = Callable[["Updated", Tensor], None]


class Updated(nn.Module):
    """A layer beside buffers that one function updates."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.update = update
        self.register_buffer("count", torch.tensor(4096.0))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("cov", torch.zeros(8, 8))
        self.register_buffer("table", torch.full((20, 8), 4096.0))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.update(self, x)
        out: Tensor = self.linear(x)
        return out


def count_in_place(net: Updated, x: Tensor) -> None:
    net.count += 1


def count_by_assignment(net: Updated, x: Tensor) -> None:
    net.count = net.count + 1


def average_in_place(net: Updated, x: Tensor) -> None:
    net.mean.mul_(0.999).add_(x.mean(0), alpha=0.001)


def average_by_lerp(net: Updated, x: Tensor) -> None:
    net.mean.lerp_(x.mean(0), 0.001)


def average_by_foreach(net: Updated, x: Tensor) -> None:
    torch._foreach_lerp_([net.mean], [x.mean(0)], 0.001)


def average_by_assignment(net: Updated, x: Tensor) -> None:
    net.mean = 0.999 * net.mean + 0.001 * x.mean(0)


def average_by_copy(net: Updated, x: Tensor) -> None:
    net.mean.copy_(torch.lerp(net.mean, x.mean(0), 0.001))


def covariance_in_place(net: Updated, x: Tensor) -> None:
    net.cov.mul_(0.999).addmm_(x.T, x, alpha=0.001)


def covariance_by_assignment(net: Updated, x: Tensor) -> None:
    net.cov = torch.addmm(net.cov, x.T, x, beta=0.999, alpha=0.001)


def rows_by_index_add(net: Updated, x: Tensor) -> None:
    net.table.index_add_(0, torch.arange(4, device=x.device), x)


def rows_by_scatter_add(net: Updated, x: Tensor) -> None:
    net.table.scatter_add_(0, torch.arange(4, device=x.device)[:, None].expand(4, 8), x)


def rows_by_assignment(net: Updated, x: Tensor) -> None:
    rows = torch.arange(4, device=x.device)
    net.table[rows] = net.table[rows] + x
    net.table[5:9] += x
    net.table[torch.arange(9, 13, device=x.device)] = x


def rows_by_index_copy(net: Updated, x: Tensor) -> None:
    net.table.index_copy_(0, torch.arange(4, device=x.device), x)
    net.table.index_put_((torch.arange(4, 8, device=x.device),), x, accumulate=True)


UPDATES: dict[str, Update] = {
    function.__name__: function
    for function in (
        count_in_place,
        count_by_assignment,
        average_in_place,
        average_by_lerp,
        average_by_foreach,
        average_by_assignment,
        average_by_copy,
        covariance_in_place,
        rows_by_index_add,
        rows_by_scatter_add,
        rows_by_assignment,
        rows_by_index_copy,
    )
}
UPDATE_STEPS = 300


@every_setting
@pytest.mark.parametrize("name", UPDATES)
def test_a_buffer_is_updated_in_float32(name: str, setting: Setting) -> None:
    """Before: a counter stopped at 2,048 or 256, and a running mean stalled."""
    check_update(name, setting, "cpu")


def check_update(name: str, setting: Setting, device: str) -> None:
    """Asserts that buffers after many steps are those of float64."""
    torch.manual_seed(0)
    net = Updated(UPDATES[name]).to(device)
    exact_net = copy.deepcopy(net).double()
    step = make_step(net, setting.precision(scale=1.0))
    x = torch.rand(4, 8).to(device) + 0.5
    for _ in range(UPDATE_STEPS):
        step(x, torch.zeros_like(x))
        exact_net(x.to(setting.low).double())  # inputs are rounded once, as in every low network
    for key, buffer in net.named_buffers():
        assert buffer.dtype == F32
        exact = exact_net.get_buffer(key)
        # What is added, a mean or a product of low tensors, may itself be rounded to low.
        scale = (exact - 4096).abs().max() if key in ("table", "count") else exact.abs().max()
        assert (buffer.double() - exact).abs().max() <= 2 * setting.eps * scale + 1e-6 * scale, key


@every_setting
def test_a_product_into_a_buffer_by_assignment_keeps_its_dtype(setting: Setting) -> None:
    """addmm of a buffer and low tensors is a product: low, and stored in float32."""
    net = Updated(covariance_by_assignment)
    make_step(net, setting.precision(scale=1.0))(torch.rand(4, 8), torch.zeros(4, 8))
    assert net.cov.dtype == F32


class Teacher(nn.Module):
    """A momentum encoder, stored in buffers: an average of the student's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(8, 8)
        self.register_buffer("weight", self.student.weight.detach().clone())
        self.register_buffer("bias", self.student.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.lerp_(self.student.weight, 0.01)
            self.bias.lerp_(self.student.bias, 0.01)
            target = F.linear(x, self.weight, self.bias)
        out: Tensor = self.student(x) - target
        return out


@every_setting
def test_a_teacher_in_buffers_follows_its_student(setting: Setting) -> None:
    torch.manual_seed(0)
    net = Teacher()
    with torch.no_grad():
        net.student.weight += 1
    weight = net.weight.double().clone()
    student = net.student.weight.detach().to(setting.low).double()
    step = make_step(net, setting.precision(scale=1.0))
    x = torch.randn(4, 8)
    for _ in range(200):
        step(x, torch.zeros(4, 8))
        weight = weight.lerp(student, 0.01)
    # The student moves by 1e-6 · its gradient a step: at most to the next number.
    assert (net.weight.double() - weight).abs().max() <= setting.eps


TRACKED = {"track_running_stats": True}


@every_setting
@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_statistics_of_norm_layers_do_not_stall(kind: type[nn.Module], setting: Setting) -> None:
    check_statistics(kind, setting, "cpu")


def check_statistics(kind: type[nn.Module], setting: Setting, device: str) -> None:
    """Asserts that a norm layer's running statistics, and what it makes of them, are right."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), kind(8, momentum=0.001, affine=True, **TRACKED))
    net.to(device)
    exact_net = copy.deepcopy(net).double()
    step = make_step(net, setting.precision(scale=1.0))
    x = torch.randn(16, 8, 8).to(device) + 3
    for _ in range(UPDATE_STEPS):
        step(x, torch.zeros_like(x))
        exact_net(x.double())
    mean, exact_mean = net[1].running_mean, exact_net[1].running_mean
    assert mean.dtype == F32
    assert (mean.double() - exact_mean).abs().max() <= 4 * setting.eps * exact_mean.abs().max()
    exact_net.eval()
    with torch.no_grad():
        exact = exact_net(x.double())
    assert relative_error(step.evaluator().predict(x), exact) <= 4 * setting.eps


# --- Inputs that are not rounded ---


class ByIndex(nn.Module):
    """Rows of a table, by indices that come as floats, beside an input that is rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4000, 8)
        self.linear = nn.Linear(8, 8)
        self.rows: list[list[int]] = []

    def forward(self, x: Tensor, index: Tensor, *, time: Tensor | None = None) -> Tensor:
        self.rows.append(index.long().tolist())
        embedded = self.embed(index.long())
        if time is not None:
            self.rows.append(time.long().tolist())
        out: Tensor = self.linear(x + embedded)
        return out


INDICES = [2049.0, 3001.0, 257.0]


@every_setting
def test_an_input_that_is_named_is_not_rounded(setting: Setting) -> None:
    index = torch.tensor(INDICES)
    x = torch.randn(3, 8)
    for kept in ((), ("index", "time")):
        net = ByIndex()
        step = hs.EvalStep(net, precision=setting.precision(keep_inputs=kept))
        step.predict(x, index)
        step.predict({"x": x, "index": index, "time": index})
        assert net.rows[0] == net.rows[1] == net.rows[2]
        assert (net.rows[0] == [int(i) for i in INDICES]) == bool(kept)


class OfDictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ByIndex()

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = self.inner(batch["x"], batch["index"])
        return out


def test_a_key_of_a_dictionary_is_named_behind_its_argument() -> None:
    net = OfDictionary()
    precision = hs.Precision("O2", keep_inputs=["batch.index"])
    step = hs.TrainStep(
        net,
        nn.MSELoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        precision=precision,
        forward=lambda net, batch, y: (net(batch), y),
    )
    batch = {"x": torch.randn(3, 8), "index": torch.tensor(INDICES)}
    step(batch, torch.zeros(3, 8))
    assert net.inner.rows == [[int(i) for i in INDICES]]
    assert step.report().choices["kept inputs"] == "batch.index: not cast"


# --- What is told ---


def test_the_report_names_outputs_that_a_buffer_widens() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Shift(), nn.ReLU(), nn.Linear(8, 8))
    step = make_step(net, hs.Precision("O2"))
    step(torch.randn(4, 8), torch.zeros(4, 8))
    report = step.report()
    assert report.choices["float32 outputs"].startswith("1, 2:")
    assert report.modules["1"] == ("Shift", "float16", "-", "float32")
    # A layer with weights casts what comes in.
    assert report.modules["3"] == ("Linear", "float16", "float16", "float16")


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.shift
        return out


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_stored_low_a_buffer_is_rounded_as_half_does_and_the_user_is_told(name: str) -> None:
    net = nn.Sequential(nn.Linear(8, 8), Shift(), nn.BatchNorm1d(8))
    twin = copy.deepcopy(net).to(hs.Precision(name).params)
    with pytest.warns(hs.Notice, match=r"lose digits.*1\.shift"):
        step = make_step(net, hs.Precision(name))
    assert torch.equal(net[1].shift, twin[1].shift)
    assert "1.shift" in step.report().choices["rounded buffers"]

    # Nothing to tell: exact in the low dtype, statistics of a norm, or kept.
    exact = nn.Sequential(nn.Linear(8, 8), Shift(), nn.BatchNorm1d(8))
    exact[1].shift.copy_(torch.arange(8) / 8)
    kept = nn.Sequential(nn.Linear(8, 8), Shift())
    with warnings.catch_warnings(action="error"):
        make_step(exact, hs.Precision(name))
        make_step(kept, hs.Precision(name, keep={"1": "fp32"}))
    assert kept[1].shift.dtype == F32


def test_a_buffer_that_modules_share_stays_one_in_fp16() -> None:
    net = nn.Sequential(nn.Linear(8, 8), Shift(), Shift())
    net[2].shift = net[1].shift
    with pytest.warns(hs.Notice, match="lose digits"):
        make_step(net, hs.Precision("fp16"))
    assert net[2].shift is net[1].shift
    assert net[1].shift.dtype == F16


# --- Activation checkpointing, compiled forward ---


class Checkpointed(Sinusoidal):
    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        def block(x: Tensor) -> Tensor:
            out: Tensor = self.encoder(x + self.pe[: x.shape[1]]) @ self.pe[:8, :8]
            return out

        out: Tensor = checkpoint(block, x, use_reentrant=False)
        return out


@every_setting
def test_a_repeated_forward_follows_the_same_rules(setting: Setting) -> None:
    net = Checkpointed()
    twin = copy.deepcopy(net)
    x, y = torch.randn(3, 6, 8), torch.zeros(3, 6, 8)
    make_step(net, setting.precision(scale=1.0))(x, y)
    twin.forward = lambda x: twin.encoder(x + twin.pe[: x.shape[1]]) @ twin.pe[:8, :8]
    make_step(twin, setting.precision(scale=1.0))(x, y)
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
