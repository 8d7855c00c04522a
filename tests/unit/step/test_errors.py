"""Every ValueError and TypeError of precision/ and step/: provoked, checked for what it names, and its advice taken."""

import ast
import os
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.precision.backend_flags import check_deterministic, check_supported

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROOT = Path(hs.__file__).parent
X, Y = (
    torch.full((2, 3), 0.1, device=DEVICE),
    torch.zeros(2, 2, device=DEVICE),
)  # far from overflow at scale 2**16


mse = nn.functional.mse_loss


class Case(NamedTuple):
    """How to provoke an error, the words it must hold (expected, received, what to do), and its advice, taken."""

    provoke: Callable[[], Any]
    says: tuple[str, ...]
    advice: Callable[[], Any]


def linear() -> nn.Module:
    return nn.Linear(3, 2).to(DEVICE)


def step(
    net: nn.Module | None = None, make: Any = torch.optim.SGD, loss: Any = None, **options: Any
) -> hs.TrainStep:
    net = linear() if net is None else net
    return hs.TrainStep(net, loss or nn.MSELoss(), make(net.parameters(), lr=0.1), **options)


def grouped(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [p]} for p in params], lr=lr)


def grown(*, anew: bool = False) -> None:
    net = linear()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    made = hs.TrainStep(net, nn.MSELoss(), optimizer)
    net.register_parameter("more", nn.Parameter(torch.zeros(1, device=DEVICE)))
    optimizer.add_param_group({"params": [net.more]})
    runs(hs.TrainStep(net, nn.MSELoss(), optimizer) if anew else made)


def runs(made: hs.TrainStep, *batch: Any) -> None:
    assert made(*(batch or (X, Y))).updated


def option(good: Any, bad: Any, name: str, *says: str) -> Case:
    return Case(
        lambda: step(**{name: bad}),
        (name, "expected", *says, "received", repr(bad)),
        lambda: runs(step(**{name: good})),
    )


def scale(good: Any, bad: Any, name: str, kind: Any = hs.DynamicScale, **rest: Any) -> Case:
    given = {"value": 8.0, **rest} if kind is hs.FixedScale else rest
    return Case(
        lambda: kind(**{**given, name: bad}),
        (name, "expected", "received", repr(bad)),
        lambda: runs(step(precision=hs.Precision("fp32", scale=kind(**{**given, name: good})))),
    )


def precision(says: str, bad: dict[str, Any], *good: dict[str, Any]) -> Case:
    def advice() -> None:
        for settings in good:
            runs(step(nn.Sequential(linear()), precision=hs.Precision(**settings)))

    return Case(lambda: hs.Precision(**bad), tuple(says.split(";")), advice)


def half() -> nn.Module:
    return linear().half()


def switched(was: str, to: str, *, open_cycle: bool = False, flush: bool = False) -> None:
    made = step(precision=was, accumulate=2)
    if open_cycle:
        made(X, Y)
    if flush:
        made.flush()
    made.switch(to)
    runs(made) if made.options.accumulate == 1 else made(X, Y)


def carried(scale: float, *, flush: bool = False) -> None:
    """An open cycle saved at loss scale 8, loaded into a step of another one."""
    one, other = (step(precision=hs.Precision("O2", scale=s), accumulate=2) for s in (8.0, scale))
    one(X, Y)
    if flush:
        one.flush()
    other.load_state_dict(one.state_dict())
    other(X, Y)


def opened() -> hs.TrainStep:
    made = step(accumulate=2)
    made(X, Y)
    return made


def lazy(*, forward: bool) -> None:
    net = nn.LazyLinear(2).to(DEVICE)
    if forward:
        net(X)
    runs(step(net))


def on_two_devices(*, moved: bool) -> None:
    net = nn.Sequential(linear(), nn.Linear(2, 2, device="meta" if DEVICE == "cpu" else "cpu"))
    if moved:
        net = (
            nn.Sequential(net[0], nn.Linear(2, 2).to(DEVICE)) if DEVICE == "cpu" else net.to(DEVICE)
        )
    runs(step(net))


def frozen(*, thawed: bool) -> None:
    net = linear().requires_grad_(False)
    made = step(net)
    net.requires_grad_(thawed)
    runs(made)


def others_parameters(source: nn.Module | None) -> None:
    net = linear()
    runs(hs.TrainStep(net, nn.MSELoss(), torch.optim.SGD((source or net).parameters(), lr=0.1)))


class Dict(nn.Linear):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        out = super().forward(x)
        return {"out": out} if y is None else {"loss": nn.functional.mse_loss(out, y)}


def own_loss(*batch: Any, loss: Any = None, **options: Any) -> None:
    net = Dict(3, 2).to(DEVICE)
    runs(hs.TrainStep(net, loss, torch.optim.SGD(net.parameters(), lr=0.1), **options), *batch)


def edited(change: Callable[[dict[str, Any]], Any]) -> None:
    saved = step().state_dict()
    change(saved)
    step().load_state_dict(saved)


def averaged(*, train: bool = False, **options: Any) -> None:
    made = step(**options)
    with made.averaged():
        runs(made) if train else None


def cublas(value: str | None) -> None:
    before = os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    try:
        if value is not None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = value
        check_deterministic(torch.device("cuda"))
    finally:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
        if before is not None:
            os.environ["CUBLAS_WORKSPACE_CONFIG"] = before


def mine(out: Tensor, y: Tensor) -> Tensor:
    return (out - y).abs().mean()


def counted(**options: Any) -> None:
    made = step(loss=mine, accumulate=2, **options)
    made(X, Y)
    runs(made)


CPU, MPS = torch.device("cpu"), torch.device("mps")
O1, O2 = {"name": "O1"}, {"name": "O2"}
OPTIONS = {
    "accumulate": option(1, 0, "accumulate", "1 or more"),
    "clip_norm": option(1.0, -1.0, "clip_norm", "positive"),
    "clip_value": option(None, 0, "clip_value", "positive"),
    "ema": option(0.5, 1.0, "ema", "between 0 and 1"),
    "sens": option(-1.0, 0, "sens", "other than 0"),
    "nonfinite": option("skip", "explode", "nonfinite", "'raise', 'skip', 'ignore'"),
    "fingerprint_every": option(0, -1, "fingerprint_every", "0 (never)"),
    "decide": option("host", "gpu", "decide", "'auto', 'host' or 'device'"),
    "count": option(len, 3, "count", "a function"),
    "forward": option(None, 3, "forward", "a function"),
    "unknown": Case(lambda: step(clip=1.0), ("'clip'", "did you mean 'clip_norm'"), lambda: runs(step(clip_norm=1.0))),
    "rates": Case(
        lambda: step(lr=[[0.1], [0.1]]), ("lr", "one row of rates, or 1 rows", "received shape (2, 1)"),
        lambda: (runs(step(lr=[0.1])), runs(step(lr=[[0.1]]))),
    ),
    "a schedule": Case(
        lambda: step(lr=hs.schedules.cosine(0.1, 10)), ("lr: expected a table", "Schedule", "hs.schedules.tables("),
        lambda: runs(step(lr=hs.schedules.tables([hs.schedules.cosine(0.1, 10)], 10))),
    ),
    "a rate": Case(lambda: step(lr=0.05), ("lr", "received shape ()", "the optimizer's own"), lambda: runs(step())),
    "schedule=": Case(lambda: step(schedule=[0.1]), ("'schedule'", "did you mean 'lr'"), lambda: runs(step(lr=[0.1]))),
    "no rates": Case(lambda: step(lr=[]), ("lr", "one row", "received shape (0,)"), lambda: runs(step(lr=[0.1]))),
    "bad rates": Case(lambda: step(lr=[0.1, -0.5]), ("0 or more", "received", "-0.5"), lambda: runs(step(lr=[0.1, 0]))),
}  # fmt: skip
SCALES = {
    "init": scale(1.0, float("inf"), "init"),
    "growth": scale(1.5, 1.0, "growth"),
    "backoff": scale(0.9, 1.0, "backoff"),
    "interval": scale(1, 0, "interval"),
    "floor": scale(0.0, -1.0, "floor"),
    "cap": scale(None, 1.0, "cap"),
    "max_skips": scale(1, 0, "max_skips"),
    "on_skips": scale("fp32", "fp8", "on_skips"),
    "fixed": scale(1.0, 0.0, "value", hs.FixedScale),
    "fixed max_skips": scale(1, 0, "max_skips", hs.FixedScale),
}
PRECISIONS = {
    "scale": precision("scale;'dynamic';received 'big'", {"scale": "big"}, {"scale": "dynamic"}, {"scale": 8}),
    "name": precision("expected one of;O2 ;received 'fp7'", {"name": "fp7"}, O2),
    "plus": precision("'O2+bf61';expected fp16, bf16;Did you mean 'O2+bf16'", {"name": "O2+bf61"}, {"name": "O2+bf16"}),
    "plus twice": precision(
        "received 'O2+bf16';'fp16' too;leave one of them out", {"name": "O2+bf16", "dtype": "fp16"},
        {"name": "O2+bf16"}, {**O2, "dtype": "fp16"},
    ),
    "planned": precision("'fp8';planned;O2 ", {"name": "fp8"}, {"name": "bf16"}),
    "kind": Case(
        lambda: step(precision=16), ("a name or a Precision", "received int"), lambda: runs(step(precision="O1"))
    ),
    "dtype": precision("expected one of;bfloat16;received 'half'", {**O1, "dtype": "half"}, {**O1, "dtype": "fp16"}),
    "low dtype": precision("'float16' or 'bfloat16';received 'fp32'", {**O2, "dtype": "fp32"}, {**O2, "dtype": "bf16"}),
    "no dtype": precision("'bf16';received 'fp16';O1, O2", {"name": "bf16", "dtype": "fp16"}, {**O1, "dtype": "fp16"}),
    "rounding": precision("'nearest', 'stochastic', 'kahan';received 'up'", {"rounding": "up"}, {"rounding": "nearest"}),
    "kernels": precision("one of 'auto', 'torch';received 'fast'", {"kernels": "fast"}, {"kernels": "torch"}),
    "wide": precision("'kahan';'O2';'fp16'", {**O2, "rounding": "kahan"}, {"name": "fp16", "rounding": "kahan"}),
    "norms": precision(
        "keep_batchnorm_fp32;None;'fp32';O2, O3", {"keep_batchnorm_fp32": True}, {}, {**O2, "keep_batchnorm_fp32": True}
    ),
    "keep": precision("keep;'fp32';O1", {"keep": {"0": "fp32"}}, {**O2, "keep": {"0": "fp32"}}),
    "keep O1": precision("keep;'fp32';O1", {**O1, "keep": {"0": "bf16"}}, {**O1, "keep": {"0": "fp32"}}),
    "glob": Case(
        lambda: step(nn.Sequential(linear()), precision=hs.Precision("O2", keep={"head*": "fp32"})),
        ("'head*'", "matches no module", "its modules are: 0"),
        lambda: runs(step(nn.Sequential(linear()), precision=hs.Precision("O2", keep={"0": "fp32"}))),
    ),
    "tf32": Case(
        lambda: check_supported(hs.Precision("tf32"), CPU), ("CUDA", "cpu", "'fp32'", "'O1'"),
        lambda: (check_supported(hs.Precision("fp32"), CPU), check_supported(hs.Precision("O1"), CPU)),
    ),
    "mps": Case(
        lambda: check_supported(hs.Precision("fp64"), MPS), ("float64", "'fp32'", "'cpu'"),
        lambda: (check_supported(hs.Precision("fp32"), MPS), check_supported(hs.Precision("fp64"), CPU)),
    ),
    "cublas": Case(lambda: cublas(None), ("expected CUBLAS", "received None", ":4096:8"), lambda: cublas(":4096:8")),
    "lazy": Case(lambda: lazy(forward=False), ("'weight'", "run one forward"), lambda: lazy(forward=True)),
    "stored": Case(
        lambda: step(half()), ("torch.float32", "'weight' is torch.float16", "net.float()", "'fp16'"),
        lambda: (runs(step(half().float())), runs(step(half(), precision="fp16"))),
    ),
    "switch": Case(
        lambda: switched("O2", "fp16"), ("'fp16'", "'O2'", "new TrainStep"), lambda: runs(step(precision="fp16"))
    ),
    "fallback": Case(
        lambda: step(precision=hs.Precision("fp16", scale=hs.DynamicScale(on_skips="bf16"))),
        ("on_skips", "expected 'raise' for 'fp16'", "received 'bf16'", "O1, O2 and O3"),
        lambda: runs(step(precision=hs.Precision("O2", scale=hs.DynamicScale(on_skips="bf16")))),
    ),
    "open cycle": Case(
        lambda: switched("O2", "fp32", open_cycle=True), ("cycle is open", "flush()"),
        lambda: switched("O2", "fp32", open_cycle=True, flush=True),
    ),
}  # fmt: skip
STEPS = {
    "net": Case(
        lambda: hs.TrainStep(mine, mine, torch.optim.SGD(linear().parameters())),
        ("expected a torch.nn.Module", "received function"), lambda: runs(step()),
    ),
    "optimizer": Case(
        lambda: step(make=lambda p, lr: lr), ("a torch.optim.Optimizer", "received float"), lambda: runs(step())
    ),
    "closure": Case(
        lambda: step(make=torch.optim.LBFGS), ("LBFGS", "closure", "AdamW"), lambda: runs(step(make=torch.optim.AdamW))
    ),
    "foreign": Case(
        lambda: others_parameters(linear()), ("none of the network's", "net.parameters()"),
        lambda: others_parameters(None),
    ),
    "devices": Case(
        lambda: on_two_devices(moved=False), ("one device", "cpu", "net.to(device)"), lambda: on_two_devices(moved=True)
    ),
    "cycle": Case(
        counted, ("accumulate=2", "mine", "count=lambda batch: len(batch[1])"),
        lambda: counted(count=lambda batch: len(batch[1])),
    ),
    "host": Case(
        lambda: step(make=torch.optim.Adam, decide="device"), ("decide='device'", "fused=True", "decide='host'"),
        lambda: (
            runs(step(make=partial(torch.optim.Adam, fused=True), decide="device")),
            runs(step(make=torch.optim.Adam, decide="host")),
        ),
    ),
    "frozen": Case(
        lambda: frozen(thawed=False), ("no trainable parameter", "requires_grad"), lambda: frozen(thawed=True)
    ),
    "loss": Case(
        lambda: step(loss="mse"), ("expected a loss module", "received 'mse'"), lambda: runs(step(loss=nn.MSELoss()))
    ),
    "one item": Case(
        lambda: step()({"x": X, "y": Y}),
        ("inputs and a target", "received one dict", "forward=lambda net, b: (net(b['x']), b['y'])"),
        lambda: runs(step(forward=lambda net, b: (net(b["x"]), b["y"])), {"x": X, "y": Y}),
    ),
    "no item": Case(lambda: step()(), ("inputs and a target", "received nothing"), lambda: runs(step())),
    "arguments": Case(
        lambda: runs(step(forward=lambda net, x, y: net(x))),
        ("expected a tuple", "received Tensor", "(outputs, target)", "loss=None"),
        lambda: (
            runs(step(forward=lambda net, x, y: (net(x), y))),
            own_loss(X, Y, forward=lambda net, x, y: mine(nn.Linear.forward(net, x), y)),
        ),
    ),
    "own loss": Case(
        lambda: own_loss(X), ("loss=None", "received dict", "give loss=", "labels in the batch"),
        lambda: (own_loss(X, Y), own_loss(X, Y, loss=lambda out, y: mine(out["out"], y))),
    ),
    "saved keys": Case(
        lambda: edited(lambda s: s.pop("net")), ("expected net", "optimizer, state", "received"),
        lambda: edited(lambda s: None),
    ),
    "saved fields": Case(
        lambda: edited(lambda s: s["state"].pop("skips")), ("expected the fields", "skips", "received steps"),
        lambda: edited(lambda s: None),
    ),
    "saved scale": Case(lambda: carried(2.0), ("cycle is open", "same scale"), lambda: carried(8.0)),
    "saved cycle": Case(
        lambda: step().load_state_dict(opened().state_dict()), ("1 batches", "accumulate=1", "flush()"),
        lambda: step(accumulate=2).load_state_dict(opened().state_dict()),
    ),
    "saved average": Case(
        lambda: step(ema=0.9).load_state_dict(step().state_dict()), ("expected 2", "received 0", "ema="),
        lambda: step(ema=0.9).load_state_dict(step(ema=0.9).state_dict()),
    ),
    "loss type": Case(
        lambda: step(loss=lambda out, y: (mse(out, y), out))(X, Y),
        ("expected it to return a tensor", "received tuple", "return the tensor alone"),
        lambda: runs(step(loss=lambda out, y: mse(out, y))),
    ),
    "groups": Case(grown, ("expected the 2 parameters", "received 3", "build a new step"), lambda: grown(anew=True)),
    "saved network": Case(
        lambda: step().load_state_dict(step(nn.Linear(3, 5).to(DEVICE)).state_dict()),
        ("weight", "expected shape [2, 3]", "received shape [5, 3]", "as they were", "Nothing was loaded"),
        lambda: step().load_state_dict(step().state_dict()),
    ),
    "saved optimizer": Case(
        lambda: step().load_state_dict(step(make=grouped).state_dict()),
        ("expected an optimizer with [2]", "received [1, 1]", "Nothing was loaded"),
        lambda: step(make=grouped).load_state_dict(step(make=grouped).state_dict()),
    ),
    "saved kind": Case(
        lambda: step(make=torch.optim.AdamW).load_state_dict(step().state_dict()),
        ("expected the state of AdamW", "without betas, eps, amsgrad", "with momentum", "Nothing was loaded"),
        lambda: step(make=torch.optim.AdamW).load_state_dict(step(make=torch.optim.Adam).state_dict()),
    ),
    "in averaged": Case(
        lambda: averaged(train=True, ema=0.9), ("to evaluate", "leave the block"), lambda: runs(step(ema=0.9))
    ),
    "averaged": Case(averaged, ("no moving average", "ema=0.999"), lambda: averaged(ema=0.999)),
}  # fmt: skip
CASES: dict[str, Case] = {**OPTIONS, **SCALES, **PRECISIONS, **STEPS}
# Errors that cannot be provoked here: the file, and words of the message.
UNREACHED = {
    ("backend_flags.py", "has no bfloat16 units"),  # needs a GPU before compute capability 8.0
    ("options.py", "fused SGD does not update"),  # see tests/parity/test_optimizers.py
    ("plain_paths.py", "compile=True"),  # needs step/fast deleted: tests/rules/test_layers.py
    ("plain_paths.py", "channels_last=True"),
}


def provoked(case: Case) -> BaseException:
    with pytest.raises((ValueError, TypeError)) as caught:
        case.provoke()
    return caught.value


@pytest.mark.parametrize("name", CASES)
def test_the_error_names_what_was_expected_and_what_came(name: str) -> None:
    said = str(provoked(CASES[name]))
    assert [words for words in CASES[name].says if words not in said] == [], said


@pytest.mark.parametrize("name", CASES)
def test_the_advice_works(name: str) -> None:
    CASES[name].advice()


def test_a_scale_that_never_grows_is_written_as_the_error_says() -> None:
    said = str(provoked(CASES["interval"]))
    form = said[said.index("FixedScale(") : said.index(")") + 1]
    assert eval(
        form.replace("value)", "8.0)").replace("…", "8.0"), {"FixedScale": hs.FixedScale}
    ) == hs.FixedScale(value=8.0)


@pytest.mark.parametrize(
    ("name", "bad"), [("accumulate", 2.5), ("accumulate", "4"), ("clip_norm", "1"), ("ema", "0.9")]
)
def test_a_value_of_the_wrong_kind_gets_the_same_kind_of_error(name: str, bad: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=rf"{name}.*expected.*received {bad!r}"):
        step(**{name: bad})


def find_raise_sites() -> dict[tuple[str, int], str]:
    """Where precision/ and step/ raise ValueError or TypeError, or call expect(); with its code."""
    sites = {}
    for path in [*ROOT.glob("precision/*.py"), *ROOT.glob("step/*.py")]:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Raise):
                call = node.exc
                names = ("ValueError", "TypeError")
            elif isinstance(node, ast.Expr):
                call = node.value
                names = ("expect",)
            else:
                continue
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                continue
            if call.func.id in names:
                sites[str(path), node.lineno] = ast.get_source_segment(source, node) or ""
    return sites


def test_every_error_of_precision_and_step_is_provoked_here() -> None:
    """A new error needs a case above, with its words and its advice."""
    reached = set()
    for case in CASES.values():
        frames = traceback.extract_tb(provoked(case).__traceback__)
        reached |= {(frame.filename, frame.lineno) for frame in frames}
    missed = []
    for (path, line), code in find_raise_sites().items():
        is_excused = any(Path(path).name == name and words in code for name, words in UNREACHED)
        if (path, line) not in reached and not is_excused:
            missed.append((Path(path).name, line, code))
    assert missed == []
