"""The pinned packages: every file of them has a hash, torch alone stands apart."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements.lock"
TORCH_LOCK = ROOT / "requirements-torch.lock"
REQUIREMENT = re.compile(r"([A-Za-z0-9_.-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})*)$")


def requirements(path: Path) -> dict[str, tuple[str, int]]:
    """Name → version and number of hashes. Anything but a pinned name is an error."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    entries = {}
    for line in lines:
        if line.strip() and not line.startswith("#"):
            match = REQUIREMENT.match(re.sub(" +", " ", line.strip()))
            assert match, f"{path.name}: {line!r}"
            entries[match[1]] = (match[2], match[3].count("--hash"))
    return entries


def test_every_package_is_pinned_with_its_hashes() -> None:
    pinned = requirements(LOCK)
    assert len(pinned) > 50
    assert [name for name, (_, hashes) in pinned.items() if not hashes] == []
    assert "torch" not in pinned


def test_torch_is_pinned_to_one_version_of_any_build() -> None:
    torch_version, hashes = requirements(TORCH_LOCK)["torch"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", torch_version)
    assert hashes == 0
    assert list(requirements(TORCH_LOCK)) == ["torch"]


def test_what_halfstep_needs_is_among_them() -> None:
    """Every package that pyproject.toml asks for, at a version that it allows."""
    import tomllib

    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = {
        canonicalize_name(name): entry[0]
        for name, entry in (requirements(LOCK) | requirements(TORCH_LOCK)).items()
    }
    for text in project["dependencies"]:
        requirement = Requirement(text)
        assert pinned[canonicalize_name(requirement.name)] in requirement.specifier, text


def test_these_tests_run_with_the_pinned_packages() -> None:
    if not Path(sys.prefix).is_relative_to(ROOT):
        pytest.skip("not in the environment of make")
    different = {}
    for name, (pin, _) in (requirements(LOCK) | requirements(TORCH_LOCK)).items():
        installed = version(name).partition("+")[0]
        if installed != pin:
            different[name] = (installed, pin)
    if "-torch-" in sys.prefix:
        different.pop("torch", None)
    assert different == {}


@pytest.mark.parametrize("torch_version", ["", "2.11.0"])
def test_make_checks_hashes_and_takes_another_torch(torch_version: str) -> None:
    """What make would run; nothing is installed."""
    words = ["make", "--dry-run", "--always-make", "setup"]
    if torch_version:
        words.append(f"TORCH={torch_version}")
    process = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    folder = f".venv-torch-{torch_version}" if torch_version else ".venv"
    installs = [line for line in process.stdout.splitlines() if " install " in line]
    assert len(installs) == 3
    assert all(line.startswith(f"{folder}/bin/python -m pip") for line in installs)
    assert "--require-hashes --no-deps -r requirements.lock" in installs[0]
    wanted = f"torch=={torch_version}" if torch_version else "-r requirements-torch.lock"
    assert installs[1].endswith(f" install {wanted}")
