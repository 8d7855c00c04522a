"""O2 and O3 change nothing of the user's: low inside the context, untouched outside it.

Dtypes are read by hooks.
"""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import halfstep as hs
from halfstep.precision import Applied

F16 = torch.float16
BF16 = torch.bfloat16
F32 = torch.float32
F64 = torch.float64
Snapshot = list[tuple[str, int, torch.dtype, Tensor]]
"""Name, id, dtype and value of each tensor."""


def make_mlp(device: torch.device) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).to(device)


def apply_precision(
    net: nn.Module, device: torch.device, name: str = "O2", **choices: Any
) -> Applied:
    return Applied(net, hs.Precision(name, kernels="torch", **choices), device)


def make_step(
    net: nn.Module, name: str = "O2", *, lr: float = 0.1, forward: Any = None, **choices: Any
) -> hs.TrainStep:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    precision = hs.Precision(name, kernels="torch", **choices)
    return hs.TrainStep(net, nn.MSELoss(), optimizer, precision=precision, forward=forward)


def record_dtypes(*modules: nn.Module) -> list[tuple[torch.dtype, torch.dtype, torch.dtype]]:
    """(input, weight, output) dtypes of each call, read by forward hooks."""
    dtypes: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []
    for module in modules:
        module.register_forward_hook(
            lambda m, args, out: dtypes.append((args[0].dtype, m.weight.dtype, out.dtype))
        )
    return dtypes


def take_snapshot(net: nn.Module) -> Snapshot:
    """The identity, dtype and value of everything that parameters() and state_dict() show."""
    tensors = [*net.named_parameters(), *net.named_buffers()]
    return [(name, id(t), t.dtype, t.detach().clone()) for name, t in tensors]


def is_same(first: Snapshot, second: Snapshot) -> bool:
    if [entry[:3] for entry in first] != [entry[:3] for entry in second]:
        return False
    return all(torch.equal(a[3], b[3]) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.parametrize("low", [F16, BF16])
def test_modules_see_low_weights_and_low_inputs_inside(
    name: str, low: torch.dtype, device: torch.device
) -> None:
    net = make_mlp(device)
    dtypes = record_dtypes(net[0], net[2])
    with apply_precision(net, device, name, dtype=low):
        out = net(torch.randn(2, 4, device=device))
    assert dtypes == [(low, low, low)] * 2
    assert out.dtype == F32


@pytest.mark.parametrize("name", ["O2", "O3"])
@pytest.mark.parametrize("fails", [False, True])
def test_outside_everything_is_as_before_also_after_an_exception(
    name: str, fails: bool, device: torch.device
) -> None:
    net = make_mlp(device)
    x = torch.randn(2, 4, device=device)
    before = take_snapshot(net)
    keys = [set(vars(m)) for m in net.modules()]
    out = net(x)
    applied = apply_precision(net, device, name)
    second_batch = torch.randn(2, 5, device=device) if fails else x  # five features do not fit
    for batch in (x, second_batch):
        try:
            with applied:
                net(batch)
        except RuntimeError:
            assert fails
    assert is_same(take_snapshot(net), before)
    assert [set(vars(m)) for m in net.modules()] == keys
    assert torch.equal(net(x), out)
    assert torch.equal(copy.deepcopy(net)(x), out)
    assert torch.equal(pickle.loads(pickle.dumps(net))(x), out)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), out)


def test_training_moves_the_masters_and_nothing_else(device: torch.device) -> None:
    net = make_mlp(device)
    x = torch.randn(8, 4, device=device)
    before = take_snapshot(net)
    step = make_step(net)
    step(x, torch.zeros(8, 3, device=device))
    after = take_snapshot(net)
    assert [b[:3] for b in before] == [a[:3] for a in after]
    assert not any(torch.equal(b[3], a[3]) for b, a in zip(before, after, strict=True))
    assert all(p.grad is None for p in net.parameters())
    by_hand = F.linear(F.relu(F.linear(x, net[0].weight, net[0].bias)), net[2].weight, net[2].bias)
    assert torch.equal(net(x), by_hand)  # a plain fp32 forward of the masters


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens))
        return out


def test_tied_weights_share_one_low_copy_and_sum_their_gradients(device: torch.device) -> None:
    net = Tied().to(device)
    tokens = torch.randint(7, (5,), device=device)
    with apply_precision(net, device):
        assert net.head.weight is net.embed.weight
        assert net.head.weight.dtype == F16
        net(tokens).square().sum().backward()
    w = net.embed.weight.detach().clone().requires_grad_()
    low = w.half()
    F.linear(F.embedding(tokens, low), low).float().square().sum().backward()
    assert net.embed.weight.grad is not None
    assert w.grad is not None
    assert torch.equal(net.embed.weight.grad, w.grad)
    assert len(list(net.parameters())) == 1


@pytest.mark.parametrize("name", ["fp32", "O2"])
def test_every_kind_of_hook_fires_once_a_step(name: str, device: torch.device) -> None:
    net = make_mlp(device)
    fired = []
    p = net[2].weight
    net.register_forward_pre_hook(lambda m, args: fired.append("forward pre"))
    net[0].register_forward_hook(lambda m, args, out: fired.append("forward"))
    net[2].register_full_backward_hook(lambda m, gin, gout: fired.append("backward"))
    p.register_hook(lambda grad: fired.append(f"parameter {grad.dtype}"))
    p.register_post_accumulate_grad_hook(lambda p: fired.append(f"accumulated {p.grad.dtype}"))
    step = make_step(net, name)
    for _ in range(2):
        fired.clear()
        step(torch.randn(2, 4, device=device), torch.zeros(2, 3, device=device))
        expected = [
            "forward pre",
            "forward",
            "parameter torch.float32",
            "accumulated torch.float32",
            "backward",
        ]
        assert sorted(fired) == sorted(expected)


@pytest.mark.parametrize("name", ["fp32", "O1", "O2"])
def test_hooks_that_edit_a_gradient_edit_the_update(name: str, device: torch.device) -> None:
    net = make_mlp(device)
    first = net[0].weight
    last = net[2].weight
    before = take_snapshot(net)
    first.register_hook(torch.zeros_like)
    scale = 1.0 if name == "fp32" else 1024.0

    def fill(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.fill_(scale)  # hooks see scaled gradients, as under torch's own scaler

    last.register_post_accumulate_grad_hook(fill)
    step = make_step(net, name, lr=1.0, scale=None if name == "fp32" else scale)
    step(torch.randn(2, 4, device=device), torch.zeros(2, 3, device=device))
    assert torch.equal(first, before[0][3])
    assert torch.equal(last, before[2][3] - 1.0)


@pytest.mark.parametrize("norm", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized_layers_train_in_o2(norm: Any, device: torch.device) -> None:
    torch.manual_seed(1)
    net = nn.Sequential(norm(nn.Linear(4, 6)), nn.ReLU(), norm(nn.Linear(6, 3, bias=False))).to(
        device
    )
    names = [n for n, _ in net.named_parameters()]
    dtypes = []
    before = take_snapshot(net)
    net[0].register_forward_hook(lambda m, args, out: dtypes.append((m.weight.dtype, out.dtype)))
    step = make_step(net)
    x = torch.randn(16, 4, device=device)
    y = torch.zeros(16, 3, device=device)
    losses = [step(x, y).loss.item() for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]
    assert dtypes[0] == (F16, F16)
    assert [n for n, _ in net.named_parameters()] == names
    assert all(t.dtype == F32 for *_, t in take_snapshot(net))
    is_changed = [
        not torch.equal(a[3], b[3]) for a, b in zip(before, take_snapshot(net), strict=True)
    ]
    assert all(is_changed)  # weights, and the power iteration's vectors in float32
    assert net[0].weight.dtype == F32


def test_a_frozen_parameter_stays_and_its_layers_take_no_backward(device: torch.device) -> None:
    net = make_mlp(device)
    net[0].requires_grad_(False)
    before = take_snapshot(net)
    x = torch.randn(2, 4, device=device)
    with apply_precision(net, device):
        assert not net[0].weight.requires_grad
        assert not net[0](x).requires_grad
        assert net[2].weight.requires_grad
    make_step(net)(x, torch.zeros(2, 3, device=device))
    is_unchanged = [
        torch.equal(a[3], b[3]) for a, b in zip(before, take_snapshot(net), strict=True)
    ]
    assert is_unchanged == [True, True, False, False]


def test_an_unused_parameter_keeps_its_value_under_weight_decay(device: torch.device) -> None:
    net = nn.ModuleDict({"used": nn.Linear(4, 3), "unused": nn.Linear(4, 3)}).to(device)
    before = copy.deepcopy(net.unused)
    grads = []
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.5)
    optimizer.register_step_pre_hook(lambda opt, args, kwargs: grads.append(net.unused.weight.grad))
    step = hs.TrainStep(
        net, nn.MSELoss(), optimizer, precision="O2", forward=lambda net, x, y: (net.used(x), y)
    )
    step(torch.randn(2, 4, device=device), torch.zeros(2, 3, device=device))
    assert grads == [None]
    assert torch.equal(net.unused.weight, before.weight)
    assert net.unused.weight not in optimizer.state


@pytest.mark.parametrize("name", ["O2", "O3"])
def test_low_copies_are_never_stale(name: str, device: torch.device) -> None:
    net = make_mlp(device)
    twin = make_mlp(device)
    x = torch.randn(2, 4, device=device)
    applied = apply_precision(net, device, name)
    fresh = apply_precision(twin, device, name)

    def fill_bias() -> None:
        twin[2].bias.data = torch.full((3,), 2.0, device=device)
        net[2].bias.data.fill_(2.0)

    for edit in (
        lambda: net[0].weight.data.copy_(twin[0].weight),
        lambda: net.load_state_dict(twin.state_dict()),
        fill_bias,
    ):
        with applied:
            net(x)
        edit()
    with applied, fresh:
        assert torch.equal(net(x), twin(x))


class Buffered(nn.Module):
    """Buffers of all kinds, and a low product.

    A table that is read, a mean that is written in place, one that is replaced, and a counter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.linspace(0, 1, 4))
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.dtypes += [self.table.dtype, self.count.dtype]
        self.written.add_(1)
        self.replaced = self.replaced + 1
        self.count += 1
        out: Tensor = self.linear(x + self.table)
        return out


@pytest.mark.parametrize("name", ["fp32", "O1", "O2", "O3"])
def test_buffers_stay_float32_and_keep_what_forward_wrote(name: str, device: torch.device) -> None:
    net = Buffered().to(device)
    table = net.table
    step = make_step(net, name, scale=1)  # no skip, which would rightly take the buffers back
    for _ in range(3):
        step(torch.randn(2, 4, device=device), torch.zeros(2, 4, device=device))
    assert set(net.dtypes) == {F32, torch.int64}
    assert net.table is table
    assert torch.equal(table, torch.linspace(0, 1, 4, device=device))
    assert (net.count.item(), net.written.item(), net.replaced.item()) == (3, 3.0, 3.0)
    assert all(
        b.dtype == (torch.int64 if key == "count" else F32) for key, b in net.named_buffers()
    )


def low_then_high(net: nn.Sequential, x: Tensor) -> Tensor:
    """By hand: the first layer in half precision, the second in fp32 with the masters."""
    low = F.linear(x.half(), net[0].weight.half(), net[0].bias.half())
    return F.linear(low.float(), net[1].weight, net[1].bias).detach()


def test_a_kept_head_is_not_rounded_through_half(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(device)
    x = torch.randn(6, 4, device=device)
    with apply_precision(net, device, keep={"1": "fp32"}):
        out = net(x)
    exact = low_then_high(net, x)
    assert torch.equal(out, exact)
    assert not torch.equal(exact, exact.half().float())


def test_a_kept_head_called_from_forward_is_not_rounded_through_half(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).to(device)
    x = torch.randn(6, 4, device=device)
    step = make_step(net, keep={"1": "fp32"}, forward=lambda n, x, y: (n[1](n[0](x)), y))
    y = torch.zeros(6, 3).to(device)
    exact = F.mse_loss(low_then_high(net, x), y)
    assert torch.equal(step(x, y).loss, exact)


def test_an_output_edited_in_place_after_a_kept_module_stays_edited(device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3), nn.ReLU(inplace=True)).to(device)
    with apply_precision(net, device, keep={"1": "fp32"}):
        out = net(torch.randn(64, 4, device=device))
    assert out.min().item() == 0.0


def test_a_kept_middle_block_runs_high_between_low_neighbours(device: torch.device) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ModuleDict({"in": nn.Linear(4, 4)}))
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": block, "c": nn.Linear(4, 3)}).to(device)
    dtypes = record_dtypes(net.a, net.b[0], net.b[1]["in"], net.c)
    rules = {"b": "fp32", "b.1.in": "float16"}
    step = make_step(
        net, keep=rules, forward=lambda n, x, y: (n.c(n.b[1]["in"](n.b[0](n.a(x)))), y)
    )
    step(torch.randn(2, 4, device=device), torch.zeros(2, 3, device=device))
    assert [weight for _, weight, _ in dtypes] == [F16, F32, F16, F16]


def test_o1_keeps_a_module_out_of_autocast(device: torch.device) -> None:
    net = make_mlp(device)
    dtypes = record_dtypes(net[0], net[2])
    x = torch.randn(2, 4, device=device)
    with apply_precision(net, device, "O1", keep={"2": "fp32"}):
        out = net(x)
    # weights stay fp32 under O1; the output tells where it ran
    assert dtypes == [
        (F32, F32, F16),
        (F16, F32, F32),
    ]
    low = F.relu(F.linear(x.half(), net[0].weight.half(), net[0].bias.half()))
    assert torch.equal(out, F.linear(low.float(), net[2].weight, net[2].bias))
    with apply_precision(net, device, "O1"):
        net(x)
    assert dtypes[-1] == (F16, F32, F16)


def test_a_glob_that_matches_nothing_is_refused_with_the_names(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"(?s)haed.*0, 1, 2"):
        apply_precision(make_mlp(device), device, keep={"haed*": "fp32"})


class FooRMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, size))

    def forward(self, x: Tensor) -> Tensor:
        self.inside = x.dtype
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


NORMS = [
    nn.BatchNorm1d(6),
    nn.LayerNorm(6),
    nn.GroupNorm(2, 6),
    nn.InstanceNorm1d(6, affine=True),
    nn.RMSNorm(6),
    FooRMSNorm(6),
]


@pytest.mark.parametrize("norm_layer", NORMS, ids=lambda norm: type(norm).__name__)
def test_norms_compute_in_fp32_under_o2_and_low_under_o3(
    norm_layer: nn.Module, device: torch.device
) -> None:
    norm = copy.deepcopy(norm_layer)
    nn.init.uniform_(norm.weight, 0.5, 2.0)
    net = nn.Sequential(nn.Identity(), norm).to(device)
    x = torch.randn(8, 6, 6, device=device)
    exact = copy.deepcopy(norm)(x.half().float())  # before anything moves its statistics
    dtypes = record_dtypes(norm)
    with apply_precision(net, device, "O2"):
        out = net(x)
    # fp32 weights; the network around it goes on in half
    assert (dtypes[-1][1], dtypes[-1][2]) == (
        F32,
        F16,
    )
    # One rounding of an fp32 result: half a unit of float16 (2**-11 relative), and 1e-6 for another
    # order of summation.
    assert torch.allclose(out, exact, rtol=2.0**-11, atol=1e-6)
    with apply_precision(net, device, "O3"):
        net(x)
    assert (dtypes[-1][1], dtypes[-1][2]) == (F16, F16)
    with apply_precision(net, device, "O2", keep_batchnorm_fp32=False):
        net(x)
    assert (dtypes[-1][1], dtypes[-1][2]) == (F16, F16)
    assert {t.dtype for t in net.state_dict().values() if t.is_floating_point()} == {F32}


@pytest.mark.parametrize("name", ["fp32", "O1", "O2", "O3"])
def test_batchnorms_statistics_move_in_every_precision_and_stay_fp32(
    name: str, device: torch.device
) -> None:
    net = nn.Sequential(nn.Identity(), nn.BatchNorm1d(6)).to(device)
    x = torch.randn(32, 6, device=device) + 1.0
    with apply_precision(net, device, name):
        net(x)
        net(x)
    mean = x.double().mean(0)
    var = x.double().var(0)
    # Momentum 0.1, twice: 0.19 of the batch's own. Under O3 input and statistics are rounded to
    # float16, twice.
    expected = [0.19 * mean, 0.81 + 0.19 * var]
    for got, want in zip((net[1].running_mean, net[1].running_var), expected, strict=True):
        assert got.dtype == F32
        assert torch.allclose(got.double(), want, rtol=4 * 2.0**-11, atol=1e-4)
    assert net[1].num_batches_tracked == 2


class Structured(nn.Module):
    """Takes keywords and nested structures; remembers the dtypes that it received."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, *, extra: dict[str, Any], flag: bool) -> dict[str, Any]:
        self.received = [
            x.dtype,
            extra["pair"][0].dtype,
            extra["pair"][1].dtype,
            extra["mask"].dtype,
            type(extra["n"]),
        ]
        return {"out": [x * self.weight * extra["pair"][0]], "flag": flag, "ids": extra["pair"][1]}


def test_keywords_and_nested_structures_are_cast_leaf_by_leaf(device: torch.device) -> None:
    net = Structured().to(device)
    x = torch.ones(2, 4, device=device)
    extra = {"pair": (x.clone(), torch.arange(4, device=device)), "mask": x > 0, "n": 3}
    with apply_precision(net, device):
        out = net(x, extra=extra, flag=True)
    assert net.received == [F16, F16, torch.int64, torch.bool, int]
    assert (out["out"][0].dtype, out["flag"], out["ids"].dtype) == (F32, True, torch.int64)
    assert extra["pair"][0].dtype == F32  # the caller's structure is not edited


def test_submodules_called_from_forward_take_fp32_inputs_low(device: torch.device) -> None:
    net = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 3)}).to(device)
    dtypes = record_dtypes(net.a, net.b)
    step = make_step(net, forward=lambda n, x, y: (n.b(n.a(x).float().tanh()), y))
    record = step(torch.randn(2, 4, device=device), torch.zeros(2, 3, device=device))
    # hooks see the caller's fp32; the product is low
    assert dtypes == [
        (F32, F16, F16),
        (F32, F16, F16),
    ]
    assert record.loss.dtype == F32
