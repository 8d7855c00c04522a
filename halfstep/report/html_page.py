"""The page: one HTML file that loads nothing, made by the template page.html.j2.

Charts are drawn here and in the template. The page's script only shows values under the pointer
and copies the command. Jinja2 escapes every text; the three files of this package and the JSON for
the script, which is escaped by `embed_json`, are marked as safe.
"""

import base64
import hashlib
import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from markupsafe import Markup

from halfstep.report import results_table, sections, sentences
from halfstep.report.charts import loss_scale_chart, loss_scale_curves, training_charts
from halfstep.report.dtype_table import build_dtype_table
from halfstep.report.lane_charts import difference_chart, skip_chart
from halfstep.report.line_chart import DRAWING_SIZE
from halfstep.report.report_data import parse_summary


def page(summary: Mapping[str, Any]) -> str:
    """compare.json as HTML. Nothing in it can run but the page's own script."""
    report = parse_summary(summary)
    charts = training_charts(report)
    scale_curves = loss_scale_curves(report)
    scale_chart = loss_scale_chart(scale_curves)
    scale_note = sections.loss_scale_note(report, scale_curves, has_chart=scale_chart is not None)

    # The values behind the charts, for the script.
    interactive = [*charts, scale_chart] if scale_chart is not None else charts
    chart_data = {chart.id: chart.script_data() for chart in interactive}
    script = _package_file("page.js")

    return _page_template().render(
        report=report,
        # Head.
        content_security_policy=_content_security_policy(script),
        style=Markup(_package_file("style.css")),
        # The answer.
        kind_and_date=sentences.kind_and_date(report),
        headline=sentences.headline(report),
        reason=sentences.recommendation_reason(report),
        figures=sections.advice_figures(report),
        notes=sentences.status_notes(report),
        # Results.
        first_heading=results_table.first_heading(report),
        columns=results_table.visible_columns(report),
        verdict_text=results_table.verdict_text,
        verdict_kind=results_table.verdict_kind,
        how_to_read="" if report.alone else sentences.how_to_read(report),
        differences=difference_chart(report),
        # Training, cost, loss scale.
        view_box=f"0 0 {DRAWING_SIZE} {DRAWING_SIZE}",
        training_charts=charts,
        cost_charts=sections.cost_charts(report),
        memory_note=sentences.memory_note(report),
        scale_curves=scale_curves,
        scale_chart=scale_chart,
        scale_note=scale_note,
        skips=skip_chart(report),
        # Dtypes.
        dtype_table=build_dtype_table(report),
        choices=sections.automatic_choices(report),
        # Every run, and what is needed to repeat them.
        run_headings=sections.RUN_HEADINGS,
        run_cells=sections.run_cells,
        setup=sentences.setup_facts(report),
        environment=sentences.environment_facts(report),
        # Foot.
        author=f"halfstep {report.environment.get('halfstep', '')}".strip(),
        chart_data=Markup(embed_json(chart_data)),
        script=Markup(script),
    )


def embed_json(value: Any) -> str:
    """JSON that cannot end its script element: without a bare <, > or &.

    It is ASCII, so that the line separators U+2028 and U+2029 are escaped too.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _content_security_policy(script: str) -> str:
    """No requests at all; inline styles, and the one script by its hash."""
    digest = hashlib.sha256(script.encode()).digest()
    rules = [
        "default-src 'none'",
        f"script-src 'sha256-{base64.b64encode(digest).decode()}'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    return "; ".join(rules)


@cache
def _page_template() -> Template:
    environment = Environment(
        autoescape=True,  # every text, whatever the template's file is called
        undefined=StrictUndefined,  # a misspelt name is an error, not an empty text
        trim_blocks=True,  # lines that hold only a statement leave no empty line
        lstrip_blocks=True,
    )
    return environment.from_string(_package_file("page.html.j2"))


@cache
def _package_file(name: str) -> str:
    return files("halfstep.report").joinpath(name).read_text("utf-8")
