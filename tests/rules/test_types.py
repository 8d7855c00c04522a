"""What editors and type checkers know of halfstep: every option, and every mistake in one."""

import ast
import inspect
import io
import os
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack, get_args, get_overloads, get_type_hints

import pytest
from torch import nn

import halfstep as hs
from halfstep.model.call_forms import FitOptions
from halfstep.precision.policy import ALIASES, ROUNDINGS, TABLE, PrecisionName
from halfstep.step.options import StepOptions

ROOT = Path(hs.__file__).parents[1]
PROGRAMS = Path(__file__).parent / "typed_programs"
# Signatures of torch's, which hand everything on to an optimizer.
TORCHS_OWN = ("GradScaler.step",)

MYPY_CONFIG = """
[mypy]
strict = true
[mypy-halfstep.*]
ignore_errors = true
"""


@pytest.fixture(scope="module")
def mypy_errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, str]]:
    """Program → line → what mypy says of it; outside the repository, as a user runs it."""
    folder = tmp_path_factory.mktemp("mypy")
    config = folder / "mypy.ini"
    config.write_text(MYPY_CONFIG)
    paths = [str(path) for path in sorted(PROGRAMS.glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--config-file", str(config)]
    command += ["--cache-dir", str(ROOT / ".mypy_cache" / "programs"), *paths]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        timeout=280,
        check=False,
    )
    assert "checked 2 source files" in result.stdout, result.stdout + result.stderr
    errors: dict[str, dict[int, str]] = {"right.py": {}, "wrong.py": {}}
    for match in re.finditer(r"^(.+?\.py):(\d+): error: (.+)$", result.stdout, re.MULTILINE):
        lines = errors[Path(match[1]).name]
        lines[int(match[2])] = f"{lines.get(int(match[2]), '')} {match[3]}"
    return errors


def test_mypy_finds_nothing_in_programs_that_are_right(
    mypy_errors: dict[str, dict[int, str]],
) -> None:
    assert mypy_errors["right.py"] == {}


def test_mypy_finds_every_mistake_and_says_what_was_expected(
    mypy_errors: dict[str, dict[int, str]],
) -> None:
    errors = mypy_errors["wrong.py"]
    marked = {}
    for number, line in enumerate((PROGRAMS / "wrong.py").read_text().splitlines(), 1):
        if "# wrong: " in line:
            marked[number] = line.partition("# wrong: ")[2]
    assert errors.keys() == marked.keys()
    assert {n: text for n, text in marked.items() if text not in errors[n]} == {}
    assert len(marked) > 20


def keywords_of_calls(name: str) -> set[str]:
    """The keywords that the right programs pass to `hs.<name>(…)`."""
    tree = ast.parse((PROGRAMS / "right.py").read_text())
    keywords = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
            keywords |= {keyword.arg for keyword in node.keywords if keyword.arg}
    return keywords


@pytest.mark.parametrize("name", ["Model", "TrainStep"])
def test_the_right_programs_use_every_option(name: str) -> None:
    parameters = set(inspect.signature(getattr(hs, name)).parameters)
    assert keywords_of_calls(f"hs.{name}") == parameters - {"net"}


def own_parameters(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Name → type and default."""
    hints = get_type_hints(inspect.unwrap(function))
    parameters = inspect.signature(function).parameters
    return {name: (hints.get(name), p.default) for name, p in parameters.items() if name != "self"}


@pytest.mark.parametrize("owner", [hs.Model, hs.TrainStep])
def test_the_options_are_those_of_step_options(owner: Any) -> None:
    """In names, types and defaults, and in the same order behind the owner's own."""
    hints = get_type_hints(StepOptions)
    expected = {field.name: (hints[field.name], field.default) for field in fields(StepOptions)}
    parameters = own_parameters(owner.__init__)
    assert {name: parameters.get(name) for name in expected} == expected
    assert list(parameters)[-len(expected) :] == list(expected)
    assert parameters["precision"][0] == PrecisionName | hs.Precision
    for value in parameters.values():
        assert value[0] is not None


def test_the_forms_of_fit_have_the_same_options() -> None:
    ours = own_parameters(hs.Model.fit)
    options = {name: hint for name, (hint, _) in ours.items() if name not in ("epochs", "data")}
    assert get_type_hints(FitOptions) == options
    forms = get_overloads(inspect.unwrap(hs.Model.fit))
    assert len(forms) == 3
    for form in forms:
        assert get_type_hints(form)["options"] == Unpack[FitOptions]


def test_no_public_signature_hides_its_options() -> None:
    hidden = []
    for name in hs.__all__:
        value = getattr(hs, name)
        if inspect.ismodule(value):
            members = {n: getattr(value, n) for n in getattr(value, "__all__", ())}
        else:
            members = {name: value}
        methods = {}
        for member_name, member in members.items():
            if isinstance(member, type):
                functions = inspect.getmembers(member, inspect.isfunction)
                methods |= {f"{member_name}.{n}": f for n, f in functions if n[0] != "_"}
        for member_name, member in {**members, **methods}.items():
            is_error = isinstance(member, type) and issubclass(member, Exception)
            if not callable(member) or is_error or member_name in TORCHS_OWN:
                continue
            try:
                parameters = inspect.signature(member).parameters.values()
            except ValueError:
                continue
            for parameter in parameters:
                is_open = parameter.kind is parameter.VAR_KEYWORD
                if is_open and parameter.annotation in (Any, "Any"):
                    hidden.append(f"{member_name}(**{parameter.name})")
    assert hidden == []


def test_help_shows_every_option() -> None:
    for owner in (hs.Model, hs.TrainStep):
        text = pydoc.render_doc(owner, renderer=pydoc.plaintext)
        for field in fields(StepOptions):
            assert f"{field.name}: " in text
    shown = io.StringIO()
    pydoc.doc(hs.Model.fit, output=shown)
    assert "valid_every_steps: int = 0" in shown.getvalue()
    assert "-> halfstep.engine.run.Run" in shown.getvalue()


def precision_words() -> set[str]:
    return {word for part in get_args(PrecisionName) for word in get_args(part) or [part]}


def test_every_word_of_the_type_is_a_precision() -> None:
    for word in precision_words():
        assert hs.Precision(word).name == ALIASES.get(word.split("+")[0], word.split("+")[0])


def test_every_precision_that_a_word_can_say_is_in_the_type() -> None:
    words = precision_words()
    for name in [*TABLE, *ALIASES]:
        assert name in words
        for addition in ("fp16", "bf16", "float16", "bfloat16", *ROUNDINGS):
            combined = f"{name}+{addition}"
            try:
                precision = hs.Precision(combined)
            except ValueError:
                assert combined not in words
                continue
            says_more = precision != hs.Precision(name) or name in ("O1", "O2", "O3", "mixed")
            if says_more and addition != "nearest":
                assert combined in words, combined


def test_an_option_at_its_default_is_as_if_it_was_not_given() -> None:
    """A model without an optimizer takes it, as the settings of a program pass all of them."""
    hs.Model(nn.Linear(2, 2), accumulate=1, clip_norm=None, sens=1.0, compile="auto")
    with pytest.raises(ValueError, match="accumulate, compile: these are about training"):
        hs.Model(nn.Linear(2, 2), accumulate=2, clip_norm=None, compile=False)
