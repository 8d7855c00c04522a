"""What pip installs: the wheel and the source distribution, built from the files of the repository.

The build runs without the network, by the setuptools that is installed here.
"""

import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
SOURCE = PROJECT["urls"]["Source"]

# What the build is made from. A clone has more: caches, a .venv, runs.
BUILD_FILES = (
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"),
    *("CONTRIBUTING.md", "Makefile", "requirements.lock", "requirements-torch.lock"),
    *(".ci", "halfstep", "tests", "tools", "docs", "examples", "benchmarks"),
)

# Files of the package that are no modules.
DATA_FILES = {
    "halfstep/py.typed",
    "halfstep/data/sample/LICENSE",
    "halfstep/data/sample/README.md",
    "halfstep/data/sample/t10k-images-idx3-ubyte.gz",
    "halfstep/data/sample/t10k-labels-idx1-ubyte.gz",
    "halfstep/data/sample/train-images-idx3-ubyte.gz",
    "halfstep/data/sample/train-labels-idx1-ubyte.gz",
    "halfstep/report/page.html.j2",
    "halfstep/report/page.js",
    "halfstep/report/style.css",
}

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("setuptools") is None, reason="setuptools builds the package"
)

# Builds a wheel and a source distribution as pip does, in the folder that it is started in.
BUILD = """
import sys
from setuptools import build_meta
out = sys.argv[1]  # setuptools sets arguments of its own
build_meta.build_sdist(out)
build_meta.build_wheel(out)
"""


def copy_tree(source: Path, target: Path, names: tuple[str, ...]) -> None:
    """Copies files and folders, with the caches that a used clone has in them."""
    for name in names:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        else:
            shutil.copy2(source / name, target / name)


def build(folder: Path, out: Path) -> str:
    """Builds both into `out`. Returns what the build has said."""
    out.mkdir()
    result = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning", "-c", BUILD, str(out)],
        cwd=folder,
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
        capture_output=True,
        text=True,
        check=False,
    )
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("clone")
    copy_tree(ROOT, folder, BUILD_FILES)
    cache = folder / "halfstep" / "__pycache__"
    cache.mkdir(exist_ok=True)
    (cache / "old.cpython-311.pyc").write_bytes(b"")
    (folder / "tests" / "__pycache__").mkdir(exist_ok=True)
    (folder / "tests" / "__pycache__" / "old.cpython-311.pyc").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def built(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of both distributions, and what the build has said."""
    out = tmp_path_factory.mktemp("build") / "dist"
    said = build(clone, out)
    return out, said


def names_in_wheel(folder: Path) -> set[str]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def names_in_sdist(folder: Path) -> set[str]:
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = [member.name for member in archive.getmembers() if member.isfile()]
    return {name.partition("/")[2] for name in names}


def metadata(folder: Path) -> email.message.Message:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return email.message_from_bytes(archive.read(name))


def test_the_build_warns_of_nothing(built: tuple[Path, str]) -> None:
    _, said = built
    lines = [line for line in said.splitlines() if re.search("warn|deprecat", line, re.IGNORECASE)]
    # Files that are copied may have these words in their names.
    assert [line for line in lines if ".py" not in line] == []


def test_the_wheel_holds_the_package_and_nothing_else(built: tuple[Path, str]) -> None:
    names = {name for name in names_in_wheel(built[0]) if ".dist-info/" not in name}
    modules = {p.relative_to(ROOT).as_posix() for p in (ROOT / "halfstep").rglob("*.py")}
    assert names == modules | DATA_FILES
    licences = {name for name in names_in_wheel(built[0]) if "/licenses/" in name}
    assert {name.partition("/licenses/")[2] for name in licences} == set(PROJECT["license-files"])


def test_the_source_distribution_builds_and_tests(built: tuple[Path, str]) -> None:
    names = names_in_sdist(built[0])
    expected = set()
    for top in BUILD_FILES:
        paths = [ROOT / top] if (ROOT / top).is_file() else (ROOT / top).rglob("*")
        expected |= {p.relative_to(ROOT).as_posix() for p in paths if p.is_file()}
    expected = {name for name in expected if "__pycache__" not in name}
    assert expected <= names
    generated = {"PKG-INFO", "setup.cfg"}
    assert {n for n in names - expected if not n.startswith("halfstep.egg-info/")} == generated


def test_the_wheel_built_from_the_source_distribution_is_the_same(
    built: tuple[Path, str], tmp_path: Path
) -> None:
    (sdist,) = built[0].glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    build(folder, tmp_path / "dist")
    assert names_in_wheel(tmp_path / "dist") == names_in_wheel(built[0])


def test_the_page_on_pypi_has_no_relative_link(built: tuple[Path, str]) -> None:
    page = metadata(built[0])
    assert page["Description-Content-Type"] == "text/markdown"
    body = page.get_payload(decode=True)
    assert isinstance(body, bytes)
    text = body.decode("utf-8")
    readme = (ROOT / "README.md").read_text("utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == len(re.findall(r"\]\(([^)]+)\)", readme)) > 10
    assert [link for link in links if not re.match(r"https?://|#", link)] == []

    # The rest of the page is the README, and each link of ours leads to a file of the repository.
    assert text.replace(f"{SOURCE}/blob/main/", "").strip() == readme.strip()
    for link in links:
        if link.startswith(f"{SOURCE}/blob/main/"):
            path = link.removeprefix(f"{SOURCE}/blob/main/").partition("#")[0]
            assert (ROOT / path).exists(), path


def test_the_metadata_says_who_and_where(built: tuple[Path, str]) -> None:
    page = metadata(built[0])
    assert page["Author"]
    assert page["Keywords"]
    assert page["License-Expression"] == "Apache-2.0"
    urls = dict(entry.split(", ", 1) for entry in page.get_all("Project-URL", []))
    assert set(urls) == {"Source", "Documentation", "Changelog", "Issues"}
    assert all(url.startswith(SOURCE) for url in urls.values())
    assert "Typing :: Typed" in page.get_all("Classifier", [])


# Run from another folder, so that the wheel is what is imported.
USE_INSTALLED = """
import importlib.metadata
import halfstep as hs
assert "site-packages" in hs.__file__, hs.__file__
assert hs.__version__ == importlib.metadata.version("halfstep")
images, labels = hs.data.sample()
assert len(images) == 11_000
"""


def test_the_wheel_installs_offline_and_works(built: tuple[Path, str], tmp_path: Path) -> None:
    """Its dependencies are those of the tests; pip may look nothing up."""
    (wheel,) = built[0].glob("*.whl")
    environment = tmp_path / "venv"
    venv.create(environment, with_pip=False)
    python = environment / "bin" / "python"
    (packages,) = (environment / "lib").glob("python*/site-packages")
    here = [path for path in sys.path if path.endswith("-packages")]
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_"))}

    # --no-deps: they come from this environment by a .pth file, in which no halfstep is looked up.
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"),
            *("--no-index", "--no-deps", str(wheel)),
        ],
        check=True,
        env=variables,
        capture_output=True,
    )
    (packages / "dependencies.pth").write_text("\n".join(here))
    subprocess.run([python, "-c", USE_INSTALLED], check=True, cwd=tmp_path, env=variables)
    result = subprocess.run(
        [environment / "bin" / "halfstep", "--help"],
        check=True,
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
    )
    assert "compare" in result.stdout
