"""Compiled forward and loss: the same step, no graph breaks, no recompiles, and honest failures.

Most tests run the traced program by torch's own kernels (backend aot_eager). What is compiled is
then exactly what would have run, so that results are compared bit for bit. The tests of generated
code state their tolerance.
"""

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import halfstep as hs
from halfstep.compiler.backend import _pass_settings
from halfstep.step.fast.compiled_forward import (
    ASSUMED_SPEEDUP,
    COMPILE_COST_S,
    MAX_COMPILED_SHAPES,
    compiling_pays,
    count_leaf_modules,
)

COMPILE_FX = "torch._inductor.compile_fx.compile_fx"
X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
Y = torch.arange(8) % 3
BATCH = (X, Y)


@pytest.fixture(autouse=True)
def reset_compiler() -> None:
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def runs_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs are really traced and differentiated, and then run by torch's own kernels."""
    backend = torch._dynamo.lookup_backend("aot_eager")

    def compile_fx(graph: Any, inputs: Any, config_patches: Any) -> Any:
        return backend(graph, inputs)

    monkeypatch.setattr(COMPILE_FX, compile_fx)


def count_programs() -> int:
    """Returns the number of compiled graphs; a graph break or a recompile adds one."""
    return int(counters["stats"]["unique_graphs"])


def norm_net() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3)
    )


def make_seeded(make_net: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make_net()


def build(net: nn.Module, loss: Any = None, **options: Any) -> hs.TrainStep:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    return hs.TrainStep(net, loss, optimizer, **options)


def train(
    net: nn.Module, loss: Any, batches: list[Any], **options: Any
) -> tuple[list[float], list[Tensor]]:
    """Returns the losses, and the parameters and buffers after the batches.

    Every run draws the same random numbers.
    """
    torch.manual_seed(2)
    step = build(net, loss, **options)
    losses = [float(step(*batch).loss) for batch in batches]
    step.flush()
    return losses, copy_tensors(net)


def copy_tensors(net: nn.Module) -> list[Tensor]:
    """Returns copies of all parameters and buffers."""
    return [tensor.clone() for tensor in (*net.parameters(), *net.buffers())]


def all_equal(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def assert_same_run(
    make_net: Callable[[], nn.Module], loss: Any, batches: list[Any], **options: Any
) -> None:
    """Asserts that the run is the same compiled and not, and was compiled to one program."""
    plain_losses, plain_tensors = train(
        make_seeded(make_net), loss, batches, compile=False, **options
    )
    losses, tensors = train(make_seeded(make_net), loss, batches, compile=True, **options)
    assert count_programs() == 1
    assert losses == plain_losses
    assert all_equal(tensors, plain_tensors)


PRECISIONS = {
    name: hs.Precision(name.split()[0], **settings)
    for name, settings in {
        "fp32": {},
        "fp64": {},
        "O1": {},
        "O2": {},
        "O3": {},
        "fp16": {},
        "bf16": {},
        "O1 torch's kernels": {"kernels": "torch"},
        "O2 torch's kernels": {"kernels": "torch"},
        "O1 bfloat16": {"dtype": "bfloat16"},
        "O1 keep": {"keep": {"4": "fp32"}},
        "fp16 kahan": {"rounding": "kahan"},
    }.items()
}


@pytest.mark.usefixtures("runs_torch_kernels")
@pytest.mark.parametrize("name", PRECISIONS)
def test_every_precision_compiles_to_the_same_step(name: str) -> None:
    assert_same_run(norm_net, nn.CrossEntropyLoss(), [BATCH] * 4, precision=PRECISIONS[name])


class TiedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 6)
        self.out = nn.Linear(6, 6)
        self.out.weight = self.into.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.into(x).relu())[..., :3]


class OwnLossNet(nn.Module):
    """Takes the items of a dict and returns its own loss beside the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.linear(x)
        return {"loss": F.cross_entropy(out.float(), labels), "logits": out}


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Dropout(0.2), nn.Linear(5, 3))


def frozen_net() -> nn.Module:
    net = norm_net()
    net[0].weight.requires_grad_(False)
    return net


def hooked_net() -> nn.Module:
    net = norm_net()
    net[4].weight.register_hook(lambda g: g * 2)
    return net


IGNORED = torch.where(Y == 1, -100, Y)
CASES: dict[str, tuple[Callable[[], nn.Module], Any, list[Any], dict[str, Any]]] = {
    "tied weights": (TiedNet, nn.CrossEntropyLoss(), [BATCH] * 4, {}),
    "frozen parameter": (frozen_net, nn.CrossEntropyLoss(), [BATCH] * 4, {}),
    "hook on a parameter": (hooked_net, nn.CrossEntropyLoss(), [BATCH] * 4, {}),
    "dict batch, own loss": (OwnLossNet, None, [({"x": X, "labels": Y},)] * 4, {}),
    "forward=": (
        norm_net,
        nn.MSELoss(),
        [(X,)] * 4,
        {"forward": lambda net, x: (net(x), x[:, :3])},
    ),
    "count=": (
        dropout_net,
        lambda out, y: F.cross_entropy(out, y),
        [BATCH] * 4,
        {"accumulate": 2, "count": lambda b: len(b[1])},
    ),
    "masked, a cycle of two": (
        dropout_net,
        nn.CrossEntropyLoss(),
        [(X, IGNORED), (X, Y)] * 2,
        {"accumulate": 2},
    ),
    "a function, a cycle of two": (
        dropout_net,
        F.cross_entropy,
        [(X, IGNORED), (X, Y)] * 2,
        {"accumulate": 2},
    ),
    "class weights": (
        norm_net,
        nn.CrossEntropyLoss(torch.tensor([0.0, 1.0, 2.0])),
        [BATCH] * 4,
        {},
    ),
    "smoothed": (norm_net, hs.losses.CrossEntropy(0.1), [BATCH] * 4, {}),
    "clip": (norm_net, nn.CrossEntropyLoss(), [BATCH] * 4, {"clip_norm": 0.1, "ema": 0.9}),
    "a sum": (
        dropout_net,
        nn.CrossEntropyLoss(reduction="sum"),
        [BATCH] * 4,
        {"accumulate": 2, "clip_value": 0.1},
    ),
}


@pytest.mark.usefixtures("runs_torch_kernels")
@pytest.mark.parametrize("name", CASES)
def test_networks_losses_and_options_give_the_same_step(name: str) -> None:
    make_net, loss, batches, options = CASES[name]
    assert_same_run(make_net, loss, batches, precision="O2", **options)


@pytest.mark.usefixtures("runs_torch_kernels")
def test_a_loss_of_the_users_own_reads_the_masters() -> None:
    """Inside the program the network has low copies: such a loss stays outside."""
    weight_dtypes = set()

    def penalised_loss(out: Tensor, y: Tensor) -> Tensor:
        weight_dtypes.add(net[0].weight.dtype)
        return F.cross_entropy(out, y) + net[0].weight.square().sum()

    net = norm_net()
    step = build(net, penalised_loss, precision="O2", compile=True)
    for _ in range(3):
        step(X, Y)
    assert weight_dtypes == {torch.float32}
    assert count_programs() == 1


@pytest.mark.usefixtures("runs_torch_kernels")
def test_a_hugging_face_model_with_its_own_loss_gives_the_same_losses() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        vocab_size=16,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        max_position_embeddings=8,
    )
    batch = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.tensor([0, 2])}
    model = transformers.BertForSequenceClassification(config)
    plain_losses, _ = train(copy.deepcopy(model), None, [(batch,)] * 3, compile=False)
    losses, _ = train(model, None, [(batch,)] * 3, compile=True)
    assert count_programs() >= 1
    assert losses == plain_losses


@pytest.mark.usefixtures("runs_torch_kernels")
@pytest.mark.parametrize("precision", ["fp32", "O1", "O2"])
def test_twenty_steps_make_one_program_and_an_odd_batch_one_more(precision: str) -> None:
    step = build(norm_net(), nn.CrossEntropyLoss(), precision=precision, compile=True)
    for _ in range(20):
        step(X, Y)
    assert count_programs() == 1
    for _ in range(2):
        step(X[:5], Y[:5])
        step(X, Y)
    assert count_programs() == 2


def count_identity_reads(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> int:
    """Returns how often a step calls id() on a value.

    torch 2.11 compiles three programs instead of one where a step does that.
    """
    values: list[Any] = []

    def record_id(value: Any) -> int:
        values.append(value)
        return id(value)

    monkeypatch.setattr("halfstep.precision.casting.id", record_id, raising=False)
    step = build(norm_net(), nn.CrossEntropyLoss(), precision=hs.Precision(**settings))
    step(X, Y)
    return len(values)


@pytest.mark.parametrize("precision", ["O1", "O2", "O3", "fp16", "bf16"])
def test_only_modules_in_keep_need_the_identity_of_a_tensor(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert count_identity_reads(monkeypatch, name=precision) == 0
    if precision == "O2":
        assert count_identity_reads(monkeypatch, name=precision, keep={"4": "fp32"}) > 0


NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: hs.nets.mlp(inputs=16, hidden=(8, 8)), (2, 16)),
    "lenet5": (hs.nets.lenet5, (2, 1, 32, 32)),
    "resnet18": (hs.nets.resnet18, (2, 3, 32, 32)),
}


def assert_one_program(net: str, precision: str) -> None:
    """Asserts that this network compiles to one program, without graph breaks."""
    make_net, shape = NETS[net]
    step = build(make_net(), nn.CrossEntropyLoss(), precision=precision, compile=True)
    for _ in range(3):
        step(torch.randn(shape), torch.randint(10, (2,)))
    assert count_programs() == 1


@pytest.mark.usefixtures("runs_torch_kernels")
@pytest.mark.parametrize("precision", ["fp32", "O1", "O2"])
@pytest.mark.parametrize("net", ["mlp", "lenet5"])
def test_our_networks_are_compiled_in_one_piece(net: str, precision: str) -> None:
    assert_one_program(net, precision)


@pytest.mark.slow
@pytest.mark.usefixtures("runs_torch_kernels")
@pytest.mark.parametrize("precision", ["fp32", "O1", "O2"])
def test_a_residual_network_is_compiled_in_one_piece(precision: str) -> None:
    assert_one_program("resnet18", precision)


@pytest.mark.usefixtures("runs_torch_kernels")
def test_auto_compiles_on_request_and_can_be_switched_off_again() -> None:
    step = build(norm_net(), nn.CrossEntropyLoss())
    for _ in range(2):
        step(X, Y)
    assert count_programs() == 0
    assert step.report().choices["compiled"].startswith("no: 'auto' compiles in a fit")
    assert step.compiled(True, "the run is long") is True
    for _ in range(3):
        step(X, Y)
    assert count_programs() == 1
    assert step.report().choices["compiled"] == "yes: the run is long"
    assert step.compiled(False) is False
    step(X[:4], Y[:4])
    assert count_programs() == 1


@pytest.mark.usefixtures("runs_torch_kernels")
def test_the_users_choice_overrides_later_requests() -> None:
    assert build(norm_net(), nn.CrossEntropyLoss(), compile=False).compiled(True) is False
    assert build(norm_net(), nn.CrossEntropyLoss(), compile=True).compiled(False) is True
    deterministic = build(norm_net(), nn.CrossEntropyLoss(), deterministic=True)
    assert deterministic.compiled(True) is False
    assert "deterministic=True" in deterministic.report().choices["compiled"]
    step = build(norm_net(), nn.CrossEntropyLoss(), deterministic=True, compile=True)
    for _ in range(2):
        step(X, Y)
    assert count_programs() == 1


@pytest.mark.usefixtures("runs_torch_kernels")
def test_another_precision_gets_a_program_of_its_own() -> None:
    step = build(norm_net(), nn.CrossEntropyLoss(), precision="O2", compile=True)
    for precision in ("O2", "fp32"):
        step.switch(precision)
        for _ in range(3):
            step(X, Y)
    assert count_programs() == 2
    # The report watches the first batch of each precision.
    assert step.report().modules["0"].output == "float32"


@pytest.mark.usefixtures("runs_torch_kernels")
def test_evaluation_is_not_compiled() -> None:
    step = build(norm_net(), nn.CrossEntropyLoss(), compile=True)
    evaluate = step.evaluator()
    for _ in range(3):
        evaluate(X, Y)
    assert count_programs() == 0


@pytest.mark.usefixtures("runs_torch_kernels")
def test_many_shapes_run_uncompiled_with_one_notice() -> None:
    step = build(nn.Linear(6, 3), nn.CrossEntropyLoss(), compile=True)
    for n in range(1, 9):
        step(X[:n], Y[:n])
    assert count_programs() == 0  # a shape is compiled when it comes again
    for n in range(1, MAX_COMPILED_SHAPES + 1):
        step(X[:n], Y[:n])
    assert count_programs() == MAX_COMPILED_SHAPES
    with pytest.warns(hs.Notice, match=f"more than {MAX_COMPILED_SHAPES} shapes"):
        step(X[:7], Y[:7])
    step(X[:8], Y[:8])  # a second warning would be an error
    assert count_programs() == MAX_COMPILED_SHAPES
    assert step.report().choices["compiled"].endswith(f"beyond {MAX_COMPILED_SHAPES} batch shapes")


@pytest.mark.usefixtures("runs_torch_kernels")
def test_an_error_of_the_users_own_stays_what_it_is() -> None:
    step = build(hs.nets.lenet5(), nn.CrossEntropyLoss(), compile=True)
    for _ in range(2):
        step(torch.randn(2, 1, 32, 32), Y[:2])
    with pytest.raises(ValueError, match="lenet5: expected images of 32×32"):
        step(torch.randn(2, 1, 28, 28), Y[:2])
    step(torch.randn(2, 1, 32, 32), Y[:2])
    assert step.compiled.on


@pytest.mark.usefixtures("runs_torch_kernels")
def test_a_failed_compilation_does_not_change_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout's draws and BatchNorm's statistics are those of a run that never tried."""
    plain_losses, plain_tensors = train(
        make_seeded(norm_net), nn.CrossEntropyLoss(), [BATCH] * 4, compile=False
    )
    monkeypatch.setattr(COMPILE_FX, failing_backend)
    net = make_seeded(norm_net)
    torch.manual_seed(2)
    step = build(net, nn.CrossEntropyLoss())
    step.compiled(True)
    losses = [float(step(X, Y).loss)]
    with pytest.warns(hs.Notice, match="not compiled: .*this backend makes nothing"):
        losses.append(float(step(X, Y).loss))
    for _ in range(2):
        losses.append(float(step(X, Y).loss))
    assert losses == plain_losses
    assert all_equal(copy_tensors(net), plain_tensors)
    assert step.compiled(True) is False


@pytest.mark.usefixtures("runs_torch_kernels")
def test_a_failed_compilation_is_an_error_under_compile_true(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(COMPILE_FX, failing_backend)
    net = norm_net()
    step = build(net, nn.CrossEntropyLoss(), compile=True)
    step(X, Y)
    tensors_before = copy_tensors(net)
    message = r"compile=True: .*this backend makes nothing.*compile=False"
    with pytest.raises(RuntimeError, match=message):
        step(X, Y)
    assert all_equal(copy_tensors(net), tensors_before)


def failing_backend(graph: Any, inputs: Any, config_patches: Any) -> Any:
    raise RuntimeError("this backend makes nothing")


@pytest.mark.usefixtures("runs_torch_kernels")
def test_keep_under_o2_is_not_compiled() -> None:
    precision = hs.Precision("O2", keep={"4": "fp32"})
    with pytest.raises(RuntimeError, match="compile=True: keep= under 'O2'"):
        build(norm_net(), nn.CrossEntropyLoss(), precision=precision, compile=True)(X, Y)
    step = build(norm_net(), nn.CrossEntropyLoss(), precision=precision)
    step.compiled(True)
    with pytest.warns(hs.Notice, match="keep= under 'O2'"):
        step(X, Y)
    step(X, Y)
    assert count_programs() == 0
    assert not step.compiled.on


NO_COMPILER = """
import warnings
import torch
import torch._inductor.config
from torch import nn
import halfstep as hs

warnings.simplefilter("error")

def build(**options):
    net = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, **options)

def train_with(compiler):
    torch._inductor.config.cpp.cxx = (None, compiler)
    x = torch.randn(4, 3)
    y = torch.tensor([0, 1, 0, 1])
    errors = []
    try:
        step = build(compile=True)
        step(x, y)
        step(x, y)
    except RuntimeError as error:
        errors.append(str(error))
    with warnings.catch_warnings(record=True, action="always") as caught:
        step = build()
        step.compiled(True)
        step(x, y)
        step(x, y)
    notices = [str(w.message) for w in caught if w.category is hs.Notice]
    return errors[0], notices, step.compiled.on

error, notices, is_compiled = train_with("/nonexistent/g++")
assert "compile=True: torch finds no C++ compiler" in error, error
assert "compile=False" in error, error
assert len(notices) == 1, notices
assert "torch finds no C++ compiler" in notices[0], notices
assert not is_compiled

error, notices, is_compiled = train_with(FAILING)
assert "compile=True: torch could not compile forward and loss" in error, error
assert "CppCompileError" in error or "C++ compile error" in error, error
assert len(notices) == 1, notices
assert "training goes on uncompiled" in notices[0], notices
assert not is_compiled
"""
FAILING_COMPILER = """#!/bin/sh
case "$1" in --version) exec g++ --version;; esac
echo out of order >&2
exit 1
"""


def test_a_missing_and_a_failing_compiler_give_an_error_or_one_notice(tmp_path: Path) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(FAILING_COMPILER)
    compiler.chmod(0o755)
    code = NO_COMPILER.replace("FAILING", repr(str(compiler)))
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=environment,
        cwd=Path(hs.__file__).parent.parent,
    )
    assert done.returncode == 0, done.stderr


def generated_code_error(precision: str | hs.Precision) -> float:
    """Returns the largest difference of two compiled steps' changes from the uncompiled ones.

    It is relative to the largest change of a weight.
    """
    # Without dropout, which draws from another generator when compiled.
    start = make_seeded(norm_net)[:3]
    start_weights = flatten_weights(start)
    changes = {}
    for compile in (False, True):
        net = copy.deepcopy(start)
        step = hs.TrainStep(
            net,
            nn.CrossEntropyLoss(),
            torch.optim.SGD(net.parameters(), lr=1.0),
            precision=precision,
            compile=compile,
        )
        for _ in range(2):
            step(X, Y)
        assert step.compiled.on is compile
        changes[compile] = flatten_weights(net) - start_weights
    difference = (changes[True] - changes[False]).abs().max()
    return float(difference / changes[False].abs().max())


def flatten_weights(net: nn.Module) -> Tensor:
    """Returns all parameters as one vector of float64."""
    return torch.cat([p.detach().double().flatten() for p in net.parameters()])


def test_generated_code_differs_from_torchs_kernels_by_rounding() -> None:
    # Sums of 8 terms in another order, twice over: a few ulp of float32 (2⁻²³ ≈ 1.2e-7),
    # amplified by BatchNorm's division; 16 ulp is the limit set.
    assert generated_code_error("fp32") <= 16 * 2.0**-23


# One ulp of each low dtype.
LOW_ULP = {"O1": 2.0**-10, "O2": 2.0**-10, "O3": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7}


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("precision", LOW_ULP)
def test_generated_half_code_rounds_where_single_operations_do(
    precision: str, kernels: Any
) -> None:
    # Every rounding of the precision stays, so that only sums in another order differ: by 1 ulp of
    # the low dtype per rounded intermediate, of which there are 4 on each way; 8 ulp is the limit.
    error = generated_code_error(hs.Precision(precision, kernels=kernels))
    assert error <= 8 * LOW_ULP[precision]


class OverflowingLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu() * 1e3 * 1e-4


@pytest.mark.slow
@pytest.mark.xfail(
    torch.__version__ < "2.12",
    reason="vector code of torch 2.11 does not round between",
    strict=True,
)
def test_generated_code_overflows_where_half_does() -> None:
    """1.3e5 is inf in float16; fused vector code computes in float32, where it stays finite."""
    net = OverflowingLinear(64, 32)
    x = torch.randn(64, 64)
    y = torch.arange(64) % 32
    step = build(net, nn.CrossEntropyLoss(), precision="O2", compile=True)
    for _ in range(2):
        assert step(x, y).updated
    with torch.no_grad():
        net.weight.fill_(0.1)
    assert step(torch.full_like(x, 20.0), y).skipped  # 64 · 20 · 0.1 · 1e3
    assert step(torch.full_like(x, 5.0), y).updated


@pytest.mark.slow
def test_generated_code_computes_a_module_of_keep_in_fp32() -> None:
    # The limit of fp32: no product is low.
    assert generated_code_error(hs.Precision("O1", keep={"0": "fp32"})) <= 16 * 2.0**-23


@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_on_a_cpu_torch_gets_the_option_for_roundings_of_half_and_nothing_else(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = torch._dynamo.lookup_backend("aot_eager")
    received_options = []

    def compile_fx(graph: Any, inputs: Any, config_patches: Any) -> Any:
        received_options.append(config_patches)
        return backend(graph, inputs)

    monkeypatch.setattr(COMPILE_FX, compile_fx)
    step = build(norm_net(), nn.CrossEntropyLoss(), precision=precision, compile=True)
    for _ in range(3):
        step(X, Y)
    expected = {"emulate_precision_casts": True} if precision == "O2" else None
    assert received_options == [expected]


def test_a_pass_of_the_users_own_is_not_replaced() -> None:
    from torch._inductor import config

    graph = torch.fx.symbolic_trace(nn.Identity())
    for low, kind in ((False, "SplitK"), (True, "JoinCasts")):
        options, _ = _pass_settings(graph, "cuda", low)
        (graph_pass,) = options.values()
        assert type(graph_pass).__name__ == kind
        assert graph_pass.device == "cuda"
        with config.patch(post_grad_custom_pre_pass=lambda graph: None):
            assert _pass_settings(graph, "cuda", low) == ({}, {})
        assert _pass_settings(graph, None, low) == ({}, {})


def test_compiling_pays_when_a_sixth_of_the_run_is_more_than_it_costs() -> None:
    fixed_cost, cost_per_module = COMPILE_COST_S["cuda"]
    cost = fixed_cost + cost_per_module * 100
    break_even = cost / (1 - 1 / ASSUMED_SPEEDUP)

    pays, reason = compiling_pays(break_even * 1.01, 100, "cuda")
    assert pays
    assert f"{cost:.0f} s" in reason
    assert "saves" in reason

    pays, reason = compiling_pays(break_even * 0.99, 100, "cuda")
    assert not pays
    assert "would save" in reason
    assert not compiling_pays(-1.0, 1)[0]
    assert count_leaf_modules(hs.nets.lenet5()) == 5
