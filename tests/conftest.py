"""Every test starts from the same seed, on one thread.

Tensors in tests are tiny: a second thread would only wait for the first.
"""

import signal
import sys
from collections.abc import Iterator

import hypothesis
import pytest
import torch

# No deadline: the first call of a kernel is slow, and a busy machine is not a failure. `make test`
# draws the same cases every time, so that a failure comes from the change; `make test-full`
# searches for new cases.
hypothesis.settings.register_profile("halfstep", deadline=None, derandomize=True)
hypothesis.settings.register_profile("search", deadline=None, max_examples=1000)
hypothesis.settings.load_profile("halfstep")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    # A background job ignores SIGINT, and processes that tests start would inherit this.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def state_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The key that seals runs is not the user's own, also in processes that tests start."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module", autouse=True)
def user_modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What a command imports for its user, and the path to it, is gone before the next file."""
    path_before = list(sys.path)
    yield
    sys.path[:] = path_before
    written_by_tests = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(written_by_tests):
            del sys.modules[name]
    for folder in list(sys.path_importer_cache):
        if folder.startswith(written_by_tests):
            del sys.path_importer_cache[folder]


@pytest.fixture
def device() -> torch.device:
    """The device that this machine's tests run on."""
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
