"""The kernels write every field of a row. Checked without Triton, which only some machines have."""

import ast
from pathlib import Path

import halfstep as hs
from halfstep.step.state import ROW_FIELDS

KERNELS = Path(hs.__file__).parent / "kernels" / "update_triton.py"


def test_the_kernels_write_all_fields_of_a_row() -> None:
    for node in ast.parse(KERNELS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "RECORD_FIELDS":
            assert sorted(ast.literal_eval(node.value)) == sorted(ROW_FIELDS)
            return
    raise AssertionError("RECORD_FIELDS is not in kernels/update_triton.py")
