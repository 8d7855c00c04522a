"""The dtypes that each module really used, a column per precision."""

from html import escape

from halfstep.report import html as markup
from halfstep.report.load__values import Report, Run

SHORT = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_MANY = 24  # modules beyond this are gathered by kind and dtypes: a ResNet-50 has 160 of them and 5 kinds
Cell = tuple[str, str, str]


def dtype_map(report: Report) -> str:
    """A table, module by precision; "" where no run says."""
    shown = [
        (row, run) for row in report.rows if (run := _first(report.of(row.precision))) is not None
    ]
    if not shown:
        return ""
    heads = ["Module", *(markup.key(row.index) + markup.name(row.precision) for row, _ in shown)]
    rows = (
        markup.row(label, map(_cell, cells))
        for label, cells in _gathered([run for _, run in shown])
    )
    return markup.table("Dtypes of each module", heads, rows, kind="dtypes")


def short(name: str) -> str:
    """float16/float32 → fp16/fp32; names that are not floats stay."""
    return "/".join(SHORT.get(part, part) for part in name.split("/"))


def _first(runs: list[Run]) -> Run | None:
    return next((run for run in runs if run.dtypes), None)


def _gathered(runs: list[Run]) -> list[tuple[str, list[Cell | None]]]:
    """(label, a cell per run) in the network's order; many modules alike become one line."""
    modules: dict[str, tuple[str, list[Cell | None]]] = {}
    for i, run in enumerate(runs):
        for each in run.dtypes:
            kind, cells = modules.setdefault(
                each.get("module", ""), (each.get("kind", ""), [None] * len(runs))
            )
            cells[i] = (each.get("input", "-"), each.get("weight", "-"), each.get("output", "-"))
    if len(modules) <= _MANY:
        return [(_label(kind, [name]), cells) for name, (kind, cells) in modules.items()]
    groups: dict[tuple[str, tuple[Cell | None, ...]], list[str]] = {}
    for name, (kind, cells) in modules.items():
        groups.setdefault((kind, tuple(cells)), []).append(name)
    return [(_label(kind, names), list(cells)) for (kind, cells), names in groups.items()]


def _label(kind: str, names: list[str]) -> str:
    first, last = names[0] or "(network)", names[-1] or "(network)"
    name = first if len(names) == 1 else f"{first} … {last}"
    times = f" × {len(names)}" if len(names) > 1 else ""
    return f"{markup.name(name)} <small>{escape(kind)}{times}</small>"


def _cell(cell: Cell | None) -> str:
    """One name where input, weight and output agree (or there is no weight), else the three of them."""
    if cell is None:
        return "<td>–</td>"
    there = [part for part in cell if part not in ("", "-")]
    if len(set(there)) <= 1:
        return f"<td>{_mark(there[0]) if there else '–'}</td>"
    return f"<td>{'<span>→</span>'.join(_mark(part) for part in there)}</td>"


def _mark(name: str) -> str:
    made = short(name)
    return f'<b class="d-{made if made in SHORT.values() else "other"}">{escape(made)}</b>'
