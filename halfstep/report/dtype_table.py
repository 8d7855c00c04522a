"""The dtypes that each module really used, with one column for each precision."""

from typing import NamedTuple

from halfstep.report.report_data import Report, Row

SHORT_NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

# A table of more modules is grouped: the 160 modules of a ResNet-50 have 5 kinds.
MAX_UNGROUPED_MODULES = 24

ModuleDtypes = tuple[str, str, str]  # of input, weight and output; "-" where there is none


class Dtype(NamedTuple):
    """A dtype under its short name. `colour` is the end of its class in the style sheet."""

    name: str
    colour: str


class Line(NamedTuple):
    """One module, or `module_count` modules that are alike.

    A cell holds one dtype if input, weight and output agree, else the dtype of each; it is empty
    where nothing is known.
    """

    name: str
    kind: str
    module_count: int
    cells: list[list[Dtype]]


class DtypeTable(NamedTuple):
    rows: list[Row]  # the precisions: one column each
    lines: list[Line]


def build_dtype_table(report: Report) -> DtypeTable | None:
    """The dtypes of all modules, in the network's order; None where no run has recorded them."""
    # The first run of each precision that has recorded its dtypes.
    rows = []
    modules_of_rows = []
    for row in report.rows:
        recorded = [run.dtypes for run in report.runs_of(row.precision) if run.dtypes]
        if recorded:
            rows.append(row)
            modules_of_rows.append(recorded[0])
    if not rows:
        return None

    # Kind and dtypes of each module by its name, the dtypes in a list with one entry per column.
    kinds: dict[str, str] = {}
    dtypes: dict[str, list[ModuleDtypes | None]] = {}
    for column, modules in enumerate(modules_of_rows):
        for module in modules:
            name = module.get("module", "")
            kinds.setdefault(name, module.get("kind", ""))
            columns = dtypes.setdefault(name, [None] * len(rows))
            columns[column] = (
                module.get("input", "-"),
                module.get("weight", "-"),
                module.get("output", "-"),
            )

    # Groups of modules, by their names. Many modules that are alike share a line.
    if len(kinds) <= MAX_UNGROUPED_MODULES:
        groups = [[name] for name in kinds]
    else:
        groups_by_content: dict[object, list[str]] = {}
        for name in kinds:
            content = (kinds[name], tuple(dtypes[name]))
            groups_by_content.setdefault(content, []).append(name)
        groups = list(groups_by_content.values())

    lines = []
    for names in groups:
        cells = [_cell(module_dtypes) for module_dtypes in dtypes[names[0]]]
        lines.append(Line(_group_name(names), kinds[names[0]], len(names), cells))
    return DtypeTable(rows, lines)


def _group_name(names: list[str]) -> str:
    first = names[0] or "(network)"
    last = names[-1] or "(network)"
    return first if len(names) == 1 else f"{first} … {last}"


def _cell(module_dtypes: ModuleDtypes | None) -> list[Dtype]:
    if module_dtypes is None:
        return []
    names = [name for name in module_dtypes if name not in ("", "-")]
    if len(set(names)) == 1:
        names = names[:1]
    return [_short_dtype(name) for name in names]


def _short_dtype(name: str) -> Dtype:
    """float16/float32 → fp16/fp32; names that are no floats stay as they are."""
    short = "/".join(SHORT_NAMES.get(part, part) for part in name.split("/"))
    colour = short if short in SHORT_NAMES.values() else "other"
    return Dtype(short, colour)
