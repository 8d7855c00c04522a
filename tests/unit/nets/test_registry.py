"""Networks by name: the table, the user's own entries, builders by path, and each error."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from halfstep import nets
from halfstep.nets import registry

USER_MODULE = """
from torch import nn

def build(width, depth=1):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

class Wide(nn.Linear):
    def __init__(self, width: int = 3) -> None:
        super().__init__(width, width)

    @classmethod
    def double(cls, width=3):
        return cls(2 * width)

def broken(**options):
    return {}["depth"]

def returns_nothing(): ...
def returns_class(): return nn.Linear

NET = nn.Linear(1, 1)
NUMBER = 3
"""


BUILT_IN = ["mlp", "ffnn", "lenet5", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


@pytest.fixture(autouse=True)
def fresh_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test enters names into a table of its own, whatever the docs registered before."""
    built_in = list(registry._BUILDERS.items())[: len(BUILT_IN)]
    monkeypatch.setattr(registry, "_BUILDERS", dict(built_in))


@pytest.fixture
def user_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A user's package on the path: `good` works, `bad` does not parse, `needy` lacks a package."""
    package = tmp_path / "own_nets"
    package.mkdir()
    for name, text in {
        "__init__": "",
        "good": USER_MODULE,
        "bad": "def (",
        "needy": "import no_such_package_here",
    }.items():
        (package / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "own_nets"]:
        del sys.modules[name]


def assert_raises(kind: type[Exception], provoke: Callable[[], Any], *words: str) -> str:
    with pytest.raises(kind) as caught:
        provoke()
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    return message


def test_names() -> None:
    assert nets.names() == BUILT_IN
    nets.names().clear()
    assert nets.names() == BUILT_IN


def test_load_is_the_function_of_that_name() -> None:
    torch.manual_seed(1)
    net = nets.load("mlp", hidden=[4], classes=2)
    torch.manual_seed(1)
    expected = nets.mlp(hidden=[4], classes=2)
    assert all(map(torch.equal, net.parameters(), expected.parameters()))


def test_register_as_decorator_and_call() -> None:
    @nets.register("tiny")
    def tiny(*, classes: int = 3) -> nn.Module:
        return nn.Linear(2, classes)

    assert nets.load("tiny").out_features == 3  # and the function is still itself:
    assert tiny(classes=4).out_features == nets.load("tiny", classes=4).out_features
    assert nets.register("line", nn.Linear) is nn.Linear
    assert nets.load("line", in_features=2, out_features=5).out_features == 5
    assert nets.names()[-2:] == ["tiny", "line"]


def test_a_taken_name_is_replaced_only_on_request() -> None:
    before = registry._BUILDERS["mlp"]
    for provoke in (
        lambda: nets.register("mlp", nn.Identity),
        lambda: nets.register("mlp")(nn.Identity),
    ):
        assert_raises(ValueError, provoke, "'mlp' is taken", "another name", "replace=True")
    assert registry._BUILDERS["mlp"] is before
    nets.register("mlp", nn.Identity, replace=True)
    assert isinstance(nets.load("mlp"), nn.Identity)
    nets.register("mlp", replace=True)(nn.Flatten)
    assert isinstance(nets.load("mlp"), nn.Flatten)


@pytest.mark.parametrize(
    ("kind", "provoke", "words"),
    [
        (
            TypeError,
            lambda: nets.register(nn.Linear),
            ("expected a name first", "@nets.register('name')"),
        ),
        (ValueError, lambda: nets.register(""), ("expected a name", "received ''")),
        (ValueError, lambda: nets.register("a:b", nn.Linear), ("without ':'", "received 'a:b'")),
        (
            TypeError,
            lambda: nets.register("x", None),
            ("a function or class that makes 'x'", "received None"),
        ),
        (
            TypeError,
            lambda: nets.register("x", nn.Linear(1, 1)),
            ("a value of type Linear", "Pass it, do not call it"),
        ),
        (TypeError, lambda: nets.register("x")(3), ("received a value of type int",)),
    ],
)
def test_register_refuses(
    kind: type[Exception], provoke: Callable[[], Any], words: tuple[str, ...]
) -> None:
    assert_raises(kind, provoke, "nets.register", *words)
    assert "x" not in nets.names()


def test_unknown_name_gets_the_table_and_the_closest() -> None:
    nets.register("mine", lambda width: nn.Linear(width, width))
    message = assert_raises(
        ValueError,
        lambda: nets.load("resnet_50"),
        "'resnet_50'; did you mean 'resnet50'?",
        "'package.mod",
    )
    lines = [line.split(maxsplit=1) for line in message.splitlines() if line.startswith("  ")]
    assert [name for name, _ in lines] == nets.names()
    assert (
        dict(lines)["resnet50"]
        == "classes=1000, channels=3, variant='common', zero_init_residual=None"
    )
    assert dict(lines)["mine"] == "width"
    assert "did you mean" not in assert_raises(
        ValueError, lambda: nets.load("transformer"), "'transformer'"
    )
    assert_raises(TypeError, lambda: nets.load(18), "expected a name, received int", "resnet18")


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        (
            "resnet18",
            {"clases": 10},
            ("'resnet18'", "'clases'", "did you mean 'classes'?", "classes=1000, channels=3"),
        ),
        (
            "mlp",
            {"classes": 2, "dropout": 0.1},
            ("'dropout'", "It accepts: inputs=784, hidden=(512, 512)"),
        ),
        ("needs", {}, ("missing a required argument: 'width'", "It accepts: width, depth=1")),
        ("none", {"width": 1}, ("'width'", "It accepts: no options")),
    ],
)
def test_an_error_about_options_lists_the_accepted_ones(
    name: str, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    nets.register("needs", lambda width, depth=1: nn.Linear(width, depth))
    nets.register("none", lambda: nn.Identity())
    assert_raises(TypeError, lambda: nets.load(name, **options), "nets.load", *words)


def test_builders_python_cannot_read_are_just_called() -> None:
    nets.register("any", lambda **options: nn.Linear(**options))
    assert nets.load("any", in_features=1, out_features=2).out_features == 2
    nets.register("opaque", dict)  # inspect knows no signature for it
    assert_raises(
        TypeError,
        lambda: nets.load("opaque", a=1),
        "to return a torch.nn.Module, received a value of type dict",
    )
    assert "opaque    ..." in assert_raises(ValueError, lambda: nets.load("nothing like it"))


@pytest.mark.parametrize(
    ("build", "options", "words"),
    [
        (nets.mlp, {"inputs": 0}, ("inputs: expected a whole number, 1 or more, received 0",)),
        (nets.mlp, {"classes": True}, ("classes", "received True")),
        (nets.mlp, {"hidden": 512}, ("hidden: expected a sequence", "(512, 512), received 512")),
        (nets.mlp, {"hidden": "512"}, ("hidden: expected a sequence", "received '512'")),
        (nets.mlp, {"hidden": (512, 1.5)}, ("hidden[1]", "received 1.5")),
        (nets.ffnn, {"outputs": -1}, ("outputs", "received -1")),
        (nets.ffnn, {"dropout": 1.0}, ("dropout", "from 0 to below 1, received 1.0")),
        (nets.ffnn, {"dropout": float("nan")}, ("dropout", "received nan")),
        (nets.ffnn, {"dropout": "0.5"}, ("dropout", "received '0.5'")),
        (
            nets.ffnn,
            {"activation": "rleu"},
            ("relu, leaky_relu", "received 'rleu'; did you mean 'relu'?"),
        ),
        (nets.ffnn, {"activation": nn.Mish()}, ("a class such as torch.nn.Mish, received Mish()",)),
        (nets.lenet5, {"classes": 0}, ("classes", "received 0")),
        (nets.lenet5, {"channels": "1"}, ("channels", "received '1'")),
        (nets.resnet18, {"classes": 0}, ("classes", "received 0")),
        (nets.resnet50, {"channels": 0}, ("channels", "received 0")),
        (
            nets.resnet18,
            {"variant": "sed"},
            ("'common' or 'seed', received 'sed'; did you mean 'seed'?",),
        ),
        (nets.resnet18, {"variant": None}, ("'common' or 'seed', received None",)),
        (nets.resnet18, {"zero_init_residual": "no"}, ("True, False or None, received 'no'",)),
    ],
)
def test_values_are_checked_at_construction(
    build: Callable[..., Any], options: Any, words: tuple[str, ...]
) -> None:
    assert_raises(ValueError, lambda: build(**options), *words)


@pytest.mark.usefixtures("user_package")
def test_user_functions_classes_and_methods_by_path() -> None:
    assert len(nets.load("own_nets.good:build", width=3, depth=2)) == 2
    assert nets.load("own_nets.good:Wide", width=4).out_features == 4
    assert nets.load("own_nets.good:Wide.double").out_features == 6


@pytest.mark.usefixtures("user_package")
@pytest.mark.parametrize(
    ("kind", "path", "words"),
    [
        (ValueError, "own_nets.good:", ("expected 'package.module:function'",)),
        (ValueError, ":build", ("expected 'package.module:function'",)),
        (ValueError, ".good:build", ("expected 'package.module:function'",)),
        (ValueError, "own_nets.good:build:x", ("expected 'package.module:function'",)),
        (ValueError, "own_nets/good.py:build", ("expected 'package.module:function'",)),
        (
            ValueError,
            "no_such_nets:build",
            ("No module named 'no_such_nets'", "Put its folder on PYTHONPATH."),
        ),
        (
            ValueError,
            "own_nets.no:build",
            ("No module named 'own_nets.no'", "Put its folder on PYTHONPATH."),
        ),
        (
            ValueError,
            "own_nets.needy:build",
            ("'no_such_package_here'", "`python -c 'import own_nets.needy'` must"),
        ),
        (
            ValueError,
            "own_nets.bad:build",
            ("SyntaxError", "`python -c 'import own_nets.bad'` must work first"),
        ),
        (
            ValueError,
            "own_nets.good:biuld",
            ("found no 'biuld' in the module own_nets.good", "did you mean 'build'?"),
        ),
        (ValueError, "own_nets.good:NUMBER.x", ("found no 'x' in a value of type int",)),
        (
            TypeError,
            "own_nets.good:NUMBER",
            ("to be a function or class, received a value of type int",),
        ),
        (
            TypeError,
            "own_nets.good:NET",
            ("to be a function or class, received a value of type Linear",),
        ),
        (
            TypeError,
            "own_nets.good:build",
            ("missing a required argument: 'width'", "It accepts: width, depth=1"),
        ),
        (
            ValueError,
            "own_nets.good:broken",
            ("raised KeyError: 'depth'; it was called with no options",),
        ),
        (
            TypeError,
            "own_nets.good:returns_nothing",
            ("to return a torch.nn.Module, received None",),
        ),
        (
            TypeError,
            "own_nets.good:returns_class",
            ("to return a torch.nn.Module, received the class Linear",),
        ),
    ],
)
def test_errors_in_user_code_are_named(
    kind: type[Exception], path: str, words: tuple[str, ...]
) -> None:
    assert_raises(kind, lambda: nets.load(path), "nets.load", *words)


@pytest.mark.usefixtures("user_package")
def test_the_cause_is_kept() -> None:
    with pytest.raises(ValueError, match="called with width=3") as caught:
        nets.load("own_nets.good:broken", width=3)
    assert isinstance(caught.value.__cause__, KeyError)
