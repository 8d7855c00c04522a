"""hs.summary: its figures against independent counts, and the network as it was afterwards."""

import json
import os
import pty
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from tests.support.equal_tensors import assert_equal_tensors, copy_tensors

MLP_PARAMETERS = 784 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
MLP_PRODUCTS = 784 * 512 + 512 * 512 + 512 * 10  # of one sample


class TiedNet(nn.Module):
    """An embedding whose weight is the head's too, statistics, a counter, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight
        self.calls = 0

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.calls += 1
        hidden = self.dropout(self.norm(self.embed(tokens).transpose(1, 2)).transpose(1, 2))
        return {"logits": self.head(hidden) * scale, "hidden": hidden}


def quiet(net: Any, data: Any = None, **options: Any) -> Any:
    return hs.summary(net, data, show=False, **options)


def make_model(precision: Any = "fp32", **options: Any) -> hs.Model:
    hs.seed_everything(0)
    net = hs.nets.mlp()
    if precision == "fp64":
        net.double()
    optimizer = torch.optim.Adam(net.parameters())
    return hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, **options)


# --- Figures ---


def test_an_mlp_in_closed_form() -> None:
    result = quiet(hs.nets.mlp(), (64, 784))
    assert result.parameters == result.trainable == MLP_PARAMETERS
    assert result.batch_size == 64
    assert result.flops == 2 * 64 * MLP_PRODUCTS  # biases are not counted
    linears = [layer for layer in result.layers if layer.kind == "Linear"]
    assert [layer.parameters for layer in linears] == [784 * 512 + 512, 512 * 512 + 512, 5130]
    assert [layer.output_shapes for layer in linears] == [((64, 512),), ((64, 512),), ((64, 10),)]
    assert [layer.flops for layer in linears] == [
        2 * 64 * products for products in (784 * 512, 512 * 512, 5120)
    ]
    assert result.layers[0].flops == result.flops
    memory = result.memory
    assert memory.parameters == memory.gradients == 4 * MLP_PARAMETERS
    # Kept for backward: the input, and what each of the two ReLUs returned (the next layer's
    # input is the same memory).
    assert memory.activations == 4 * 64 * (784 + 512 + 512)
    assert memory.optimizer is None
    assert memory.total == 8 * MLP_PARAMETERS + memory.activations


def conv_flops(net: nn.Module, shape: tuple[int, ...]) -> int:
    """Counted by hooks: 2 · outputs · (inputs of each output)."""
    total = 0

    def add(module: Any, _: Any, out: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            per_output = module.weight[0].numel()
        else:
            per_output = module.in_features
        total += 2 * out.numel() * per_output

    handles = [
        module.register_forward_hook(add)
        for module in net.modules()
        if isinstance(module, nn.Conv2d | nn.Linear)
    ]
    with torch.no_grad():
        net(torch.zeros(shape))
    for handle in handles:
        handle.remove()
    return total


def test_a_resnet_against_hooks() -> None:
    net = hs.nets.load("resnet18")
    result = quiet(net, (2, 3, 64, 64))
    assert result.flops == conv_flops(net.eval(), (2, 3, 64, 64))
    assert result.parameters == sum(p.numel() for p in net.parameters()) == 11_689_512
    assert result.memory.buffers == sum(b.numel() * b.itemsize for b in net.buffers())
    assert sum(layer.parameters for layer in result.layers) == result.parameters
    relu = next(layer for layer in result.layers if layer.name == "layer1.0.relu")
    assert relu.calls == 2


def test_kept_activations_are_what_a_training_step_holds() -> None:
    """Freed memory after the graph is dropped, measured by torch's own accounting of storages."""
    net = hs.nets.load("resnet18")
    x = torch.randn(2, 3, 64, 64)
    result = quiet(net, x)
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    net.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(x)
    for own in (*net.parameters(), *net.buffers()):
        sizes.pop(own.untyped_storage().data_ptr(), None)
    assert result.memory.activations == sum(sizes.values())


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.Adam(p), 2),
        (lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True), 3),
        (lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.1), 3),
        (lambda p: torch.optim.Adagrad(p), 1),
    ],
)
def test_optimizer_state_before_and_after_its_first_step(make: Any, tensors: int) -> None:
    net = hs.nets.mlp()
    optimizer = make(net.parameters())
    groups = [dict(group) for group in optimizer.param_groups]
    estimate = quiet(net, optimizer=optimizer).memory.optimizer
    assert optimizer.param_groups == groups
    if not isinstance(optimizer, torch.optim.Adagrad):  # has its state from the start
        assert not optimizer.state
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    real = quiet(net, optimizer=optimizer).memory.optimizer
    counters = real - tensors * 4 * MLP_PARAMETERS
    assert 0 <= counters <= 6 * 4  # "step" of each parameter
    assert estimate == real


def test_a_factored_optimizer_has_its_own_size() -> None:
    net = nn.Linear(300, 200)
    optimizer = torch.optim.Adafactor(net.parameters())
    estimate = quiet(net, optimizer=optimizer).memory.optimizer
    net(torch.randn(4, 300)).sum().backward()
    optimizer.step()
    assert estimate == quiet(net, optimizer=optimizer).memory.optimizer
    assert estimate < 4 * net.weight.numel()


MODEL_MEMORY = {
    # precision: bytes of a parameter, of its low copies, of its gradient, of Adam's state
    "fp32": (4, 0, 4, 8),
    "fp64": (8, 0, 8, 16),
    "O1": (4, 0, 4, 8),
    "O2": (4, 2, 4, 8),
    "O3": (4, 2, 4, 8),
    "bf16": (2, 0, 2, 4),
}


@pytest.mark.parametrize("precision", MODEL_MEMORY)
def test_the_memory_of_a_model_in_its_precision(precision: str) -> None:
    model = make_model(precision)
    x = torch.randn(8, 784, dtype=torch.float64 if precision == "fp64" else torch.float32)
    y = torch.arange(8)
    memory = quiet(model, (x, y)).memory
    expected = [size * MLP_PARAMETERS for size in MODEL_MEMORY[precision]]
    assert [memory.parameters, memory.low_copies, memory.gradients] == expected[:3]
    assert 0 <= memory.optimizer - expected[3] <= 6 * 4


def test_averages_and_sums_of_a_model() -> None:
    memory = quiet(make_model("bf16", ema=0.9, accumulate=2)).memory
    assert memory.gradients == 4 * MLP_PARAMETERS
    assert memory.averages == sum(
        t.numel() * t.itemsize for t in make_model("bf16", ema=0.9).step.state.ema
    )


def test_low_activations_take_half_of_float32() -> None:
    """With torch's own half kernels, as on a GPU; the input of the first layer is cast too."""
    precision = hs.Precision("O2", dtype="bfloat16", kernels="torch")
    x, y = torch.randn(64, 784), torch.arange(64) % 10
    low = quiet(make_model(precision), x).memory.activations
    assert low == 2 * 64 * (784 + 512 + 512)
    assert quiet(make_model("fp32"), x).memory.activations == 2 * low
    # The loss keeps its float32 logits (log-softmax), the targets and its weight sum.
    with_loss = quiet(make_model(precision), (x, y)).memory.activations
    assert with_loss - low == 4 * 64 * 10 + 8 * 64 + 4


def test_dtypes_are_those_that_are_used() -> None:
    result = quiet(make_model("O2+bf16"), torch.randn(4, 784))
    linear = next(layer for layer in result.layers if layer.kind == "Linear")
    assert (linear.weight_dtype, linear.output_dtype) == ("bfloat16", "bfloat16")
    assert result.layers[0].output_dtype == "float32"
    assert result.precision == "O2: parameters float32, compute bfloat16"
    result = quiet(hs.nets.mlp(), torch.randn(4, 784), precision="O1")
    linear = next(layer for layer in result.layers if layer.kind == "Linear")
    assert (linear.weight_dtype, linear.output_dtype) == ("float32", "float16")
    half = hs.nets.mlp().to(torch.bfloat16)
    result = quiet(half, (4, 784))
    assert {layer.output_dtype for layer in result.layers} == {"bfloat16"}


def test_frozen_and_tied_parameters() -> None:
    net = TiedNet()
    net.norm.requires_grad_(False)
    result = quiet(net, torch.randint(0, 50, (4, 6)))
    assert result.parameters == 50 * 8 + 16
    assert result.trainable == 50 * 8
    head = next(layer for layer in result.layers if layer.name == "head")
    assert (head.parameters, head.tied_to) == (0, "embed.weight")
    assert result.layers[0].output_shapes == ((4, 6, 50), (4, 6, 8))
    assert "tied" in str(result)
    assert "416, of which 16 frozen" in str(result)


# --- What it takes ---


def test_batches_of_every_kind_give_the_same() -> None:
    x, y = torch.randn(32, 784), torch.arange(32) % 10
    net = hs.nets.mlp()
    data = [
        (32, 784),
        torch.Size((32, 784)),
        x,
        (x, y),  # the target is left out: forward takes one
        [x, y],
        hs.data.Dataset((x, y)).batch(32),
        DataLoader(TensorDataset(x, y), batch_size=32),
        [(x, y)],
    ]
    results = [quiet(net, batch) for batch in data]
    assert all(result == results[0] for result in results)
    model = make_model()
    with_loss = [quiet(model, batch) for batch in data[3:]]
    assert all(result == with_loss[0] for result in with_loss)
    assert with_loss[0].layers == results[0].layers


def test_a_dict_goes_to_forward_by_name() -> None:
    tokens = torch.randint(0, 50, (4, 6))
    for batch in ({"tokens": tokens}, {"tokens": tokens, "labels": tokens, "scale": 2.0}):
        result = quiet(TiedNet(), batch)
        assert result.batch_size == 4
        assert result.layers[0].output_shapes[0] == (4, 6, 50)


def test_a_forward_of_the_user_is_used() -> None:
    net = hs.nets.mlp()
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=0.1),
        forward=lambda net, batch: (net(batch["x"]), batch["y"]),
    )
    batch = {"x": torch.randn(8, 784), "y": torch.arange(8)}
    assert quiet(model, batch).flops == 2 * 8 * MLP_PRODUCTS


def test_a_hugging_face_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=60, n_positions=32, n_embd=16, n_layer=2, n_head=2, use_cache=False
    )
    net = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(0, 60, (3, 12))
    batch = {"input_ids": tokens, "labels": tokens}
    model = hs.Model(net, None, torch.optim.AdamW(net.parameters()), "O2")
    for result in (quiet(net, batch), quiet(model, batch)):
        assert result.parameters == net.num_parameters()
        head = next(layer for layer in result.layers if layer.name == "lm_head")
        assert head.tied_to == "transformer.wte.weight"
        assert head.output_shapes == ((3, 12, 60),)
        assert (3, 12, 60) in result.layers[0].output_shapes
        assert head.flops == 2 * 3 * 12 * 16 * 60
    # Projections of a block: 12 · width² products; attention adds two products of scores.
    block = next(layer for layer in result.layers if layer.name == "transformer.h.0")
    attention = 2 * 2 * 3 * 12 * 12 * 16
    assert block.flops == 2 * 3 * 12 * 12 * 16**2 + attention


def test_attention_is_counted_in_every_form() -> None:
    """torch has one operation for a whole layer in eval mode, and one for attention on a CPU."""
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, batch_first=True)
    result = quiet(layer.eval(), (3, 12, 16))
    projections = 4 * 16 * 16 + 2 * 16 * 32
    attention = 2 * 12 * 16  # scores and values, of one query
    assert result.flops == 2 * 3 * 12 * (projections + attention)
    assert torch.backends.mha.get_fastpath_enabled()


def test_without_data_only_parameters_are_counted() -> None:
    result = quiet(hs.nets.mlp())
    assert result.parameters == MLP_PARAMETERS
    assert (result.flops, result.batch_size, result.memory.activations) == (None, None, None)
    assert "operations" not in str(result)


def test_a_network_on_the_meta_device_is_counted_without_memory() -> None:
    with torch.device("meta"):
        net = hs.nets.load("resnet18")
    expected = quiet(hs.nets.load("resnet18"), (2, 3, 64, 64))
    result = quiet(net, (2, 3, 64, 64))
    assert result == expected
    with pytest.raises(ValueError, match="on the meta device; give it some"):
        quiet(net, (2, 3, 64, 64), precision="O2")


@pytest.mark.gpu
def test_a_network_on_cuda() -> None:
    net = hs.nets.mlp()
    expected = quiet(net, (8, 784))
    assert quiet(net.cuda(), (8, 784)).flops == expected.flops


def test_a_lazy_module_is_refused_until_it_has_a_shape() -> None:
    net = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"'0\.weight' has no shape yet .*run one batch first"):
        quiet(net, (2, 3))
    net(torch.zeros(2, 3))
    assert quiet(net, (2, 3)).parameters == 16


def test_batch_norm_on_one_sample_says_so() -> None:
    result = quiet(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (1, 4))
    assert "eval mode" in result.notes[0]
    assert result.memory.activations > 0


@pytest.mark.parametrize(
    ("net", "data", "error", "message"),
    [
        ("resnet", None, TypeError, r"expected a network \(nn\.Module\) or a hs\.Model, got str"),
        (nn.Linear(2, 2), (4, 0), ValueError, "a shape of positive lengths"),
        (nn.Linear(2, 2), [], ValueError, "at least one batch"),
    ],
)
def test_what_it_cannot_take(net: Any, data: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        quiet(net, data)


def test_a_model_has_its_own_precision() -> None:
    with pytest.raises(ValueError, match="has its own precision and optimizer"):
        quiet(make_model(), precision="O2")


# --- The network afterwards ---


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_network_and_random_states_are_as_they_were(training: bool, fails: bool) -> None:
    net = TiedNet().train(training)
    net.dropout.train(not training)
    before = copy_tensors([*net.parameters(), *net.buffers()])
    modes = [module.training for module in net.modules()]
    state = torch.get_rng_state()
    tokens = torch.randint(0, 50, (4, 6), generator=torch.Generator().manual_seed(0))
    if fails:
        with pytest.raises(IndexError):
            quiet(net, tokens + 50)
    else:
        quiet(net, tokens)
    assert_equal_tensors([*net.parameters(), *net.buffers()], before)
    assert [module.training for module in net.modules()] == modes
    assert net.calls == 0
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks for module in net.modules())
    assert "forward" not in vars(net)


@pytest.mark.parametrize("precision", ["fp32", "O1", "O2", "bf16"])
def test_a_model_trains_on_equally(precision: str) -> None:
    x, y = torch.randn(64, 784), torch.arange(64) % 10
    weights = []
    for looks in (False, True):
        model = make_model(precision)
        generator = torch.Generator().manual_seed(3)
        loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=generator)
        hs.seed_everything(1)
        if looks:
            quiet(model, loader)
        model.fit(1, loader)
        if looks:
            quiet(model, loader)
        model.fit(1, loader)
        weights.append(copy_tensors(model.net.parameters()))
    assert_equal_tensors(*weights)


# --- What it prints ---

PROGRAM = """
import halfstep as hs
result = hs.summary(hs.nets.mlp(), (64, 784))
assert repr(result) == "<NetSummary: 669,706 parameters, 7 modules>"
"""


def test_it_prints_plain_text_into_a_pipe() -> None:
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    ).stdout
    lines = out.splitlines()
    assert lines[0].split() == [
        "layer",
        "output",
        "shape",
        "parameters",
        "weights",
        "output",
        "FLOPs",
    ]
    assert "  1 (Linear)   [64, 512]        401,920  float32  float32  51.4 M" in lines
    assert "parameters  669,706" in lines
    assert "operations  85.6 MFLOP in a forward pass of 64 samples" in lines
    assert out.isascii()


def test_it_draws_a_table_in_a_terminal() -> None:
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=child, stderr=child, env=environment
    )
    os.close(child)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 4096)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    os.close(parent)
    assert process.wait() == 0, shown.decode()
    text = shown.decode()
    assert "┃" in text
    assert "401,920" in text
    assert "parameters  669,706" in text


def test_deep_modules_are_counted_where_the_table_ends() -> None:
    net = nn.Sequential(nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(2, 2)))))
    result = quiet(net, (1, 2))
    assert len(result.layers) == 5
    assert [row[2] for row in result.rows()] == ["-", "-", "-", "6"]
    assert [row[2] for row in result.rows(depth=9)] == ["-", "-", "-", "-", "6"]


def test_the_fields_are_plain_values() -> None:
    from dataclasses import asdict

    result = quiet(make_model("O2"), (4, 784))
    assert json.loads(json.dumps(asdict(result)))["parameters"] == MLP_PARAMETERS
