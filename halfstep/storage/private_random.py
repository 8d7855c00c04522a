"""The random numbers of a store's libraries, apart from those of the run.

Libraries draw how long to wait before they try again, from the generators of Python's module
`random`. In a thread, that would move the generators of a run which draws from them too, and the
run would end with other bits. So they get a copy of the module, with generators of its own.
"""

import importlib.util
import random
import sys
from collections.abc import Collection
from types import ModuleType

# Those of the file systems that are used most. Not the one of any file system: it may be the user's
# own, whose draws belong to the run.
STORE_PACKAGES = frozenset(
    {
        *("fsspec", "s3fs", "botocore", "aiobotocore", "aiohttp", "urllib3", "requests"),
        *("gcsfs", "google", "adlfs", "azure", "msal", "ossfs", "oss2"),
    }
)


def _copy_of_random() -> ModuleType:
    spec = importlib.util.find_spec("random")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class PrivateRandom:
    """Hands the copy of `random` to the modules of some packages, also those imported later."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = frozenset(packages)
        self._module_count = 0

    def apply(self) -> None:
        """Looks for modules that are new; costs next to nothing where none was imported."""
        if len(sys.modules) == self._module_count:
            return
        self._module_count = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] in self._packages and isinstance(module, ModuleType):
                _replace_random(module)


_COPY = _copy_of_random()


def _replace_random(module: ModuleType) -> None:
    """`import random`, and `from random import uniform`."""
    for name, value in list(vars(module).items()):
        if value is random:
            setattr(module, name, _COPY)
        elif getattr(value, "__self__", None) is random._inst:
            setattr(module, name, getattr(_COPY, value.__name__))
