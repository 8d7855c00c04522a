"""A pytest plugin: the folders that hold only speed cannot be imported, as if they were deleted.

python -m pytest -p tests.support.block_fast_paths tests/parity
"""

import sys

FAST_FOLDERS = (
    "halfstep.step.fast",
    "halfstep.engine.captured",
    "halfstep.compiler",
    "halfstep.kernels",
    "halfstep.cuda_graphs",
)

for folder in FAST_FOLDERS:
    sys.modules[folder] = None  # type: ignore[assignment]  # an import of it raises ImportError
