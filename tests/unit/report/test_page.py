"""The report, read back: every number against one made by hand, every text as text.

For one run, for 20 runs, and for damaged ones.
"""

import base64
import hashlib
import itertools
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from hypothesis import example, given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from torch import nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli.report import report as report_command
from halfstep.report import charts, line_chart, markdown, page, read, series, write
from halfstep.report import number_format as fmt
from halfstep.report.axis import MAX_VALUE, linear_axis, log_axis
from halfstep.report.html_page import embed_json
from halfstep.report.report_data import parse_summary
from tests.support.report_fixtures import (
    HOSTILE,
    comparison,
    fail_run,
    hostile_comparison,
    run_result,
)

VOID_TAGS = {"meta", "link", "input", "br", "path", "rect"}
STYLE_SHEET = Path(page.__code__.co_filename).with_name("style.css").read_text()


class HtmlTree(HTMLParser):
    """Elements with their attributes and text; a tag that does not close its own is an error."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.table_rows: list[list[str]] = []
        self.feed(html)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "tr":
            self.table_rows.append([])
        if tag in ("td", "th"):
            self.table_rows[-1].append("")
        if tag not in VOID_TAGS:
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] == "script":
            self.scripts.append(data)
        elif "style" not in self.open_tags:
            self.texts.append(data)
            if {"td", "th"} & set(self.open_tags):
                self.table_rows[-1][-1] += data

    def result(self, name: str) -> dict[str, str]:
        """A row of the table of results, by its headings."""
        headings = next(cells for cells in self.table_rows if cells[0] in ("Precision", "Run"))
        row = next(cells for cells in self.table_rows if cells[0] == name)
        return dict(zip(headings, row, strict=True))

    def ids(self) -> list[str | None]:
        return [attrs["id"] for _, attrs in self.elements if "id" in attrs]

    @property
    def text(self) -> str:
        return " ".join(self.texts)


def comparison_of_nulls() -> dict[str, Any]:
    """Nothing but nulls where numbers belong."""
    summary = comparison(("fp32", "O1"), 2, steps=40)
    for entry in [*summary["rows"], *summary["runs"]]:
        texts = {k: v for k, v in entry.items() if isinstance(v, str) or k == "seed"}
        entry |= dict.fromkeys(entry) | texts
    for run in summary["runs"]:
        run["curve"] = {"step": [1, 2]}
        for name in ("loss", "scale", "lr"):
            run["curve"][name] = [None, None]
    return summary | {
        "spec": {},
        "environment": {},
        "recommendation": {"precision": None, "reason": ""},
    }


def comparison_without_accuracy() -> dict[str, Any]:
    summary = comparison(("fp32", "O2"), 3)
    accuracies = ("acc", "acc_interval", "difference", "difference_interval")
    for entry in [*summary["rows"], *summary["runs"]]:
        entry |= dict.fromkeys(accuracies)
    for run in summary["runs"]:
        run["epochs"] = [{**epoch, "valid_acc": None} for epoch in run["epochs"]]
    return summary


def diverged_comparison() -> dict[str, Any]:
    """One run has failed, and another one's loss has left all bounds."""
    summary = comparison()
    error = "NonFiniteError: step 141: the gradients of 0.weight are not finite"
    fail_run(summary, "fp16", 1, error, points=60)
    summary["runs"][3]["curve"]["loss"][200:] = [1e38, None] * 150
    return summary


def deep_comparison(precisions: tuple[str, ...] = ("fp32", "O2"), seeds: int = 1) -> dict[str, Any]:
    """A network of 160 modules, one of which is kept in float32."""
    summary = comparison(precisions, seeds)
    for run in summary["runs"]:
        low = "float32" if run["precision"] == "fp32" else "float16"
        modules = []
        for i in range(53):
            for kind in ("Conv2d", "BatchNorm2d", "ReLU"):
                weight = "-" if kind == "ReLU" else low
                dtypes = {"input": low, "weight": weight, "output": low}
                modules.append({"module": f"layer{i}.{kind}", "kind": kind, **dtypes})
        dtypes = dict.fromkeys(("input", "weight", "output"), "float32")
        modules.append({"module": "fc", "kind": "Linear", **dtypes})
        run["dtypes"] = modules
    return summary


TWENTY = tuple(f"p{i}" for i in range(20))
PAGES = {
    "one run": lambda: comparison(("fp32",), 1),
    "four by three": comparison,
    "twenty precisions": lambda: comparison(TWENTY, 1),
    "four by five": lambda: comparison(seeds=5),
    "deep, twenty runs": lambda: deep_comparison(TWENTY),
    "one step": lambda: comparison(("fp32", "O1"), 2, steps=1, epochs=1),
    "nulls": comparison_of_nulls,
    "no accuracy": comparison_without_accuracy,
    "diverged": diverged_comparison,
    "hostile": hostile_comparison,
    "nothing yet": lambda: {"halfstep_compare": 1},
}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole_small_and_asks_for_nothing(name: str) -> None:
    html = page(PAGES[name]())
    tree = HtmlTree(html)
    assert len(html.encode()) < 300_000
    links = []
    for _, attrs in tree.elements:
        links += [attrs[k] for k in ("src", "href", "action", "data", "srcset") if k in attrs]
    assert links == ["data:,"]
    assert "url(" not in html
    assert "@import" not in html
    assert not {"None", "nan", "inf", "NaN"} & set(re.findall(r"\w+", tree.text))
    assert len(tree.ids()) == len(set(tree.ids()))


@pytest.mark.parametrize("name", PAGES)
def test_only_the_pages_own_script_may_run(name: str) -> None:
    html = page(PAGES[name]())
    tree = HtmlTree(html)
    policies = [
        attrs["content"]
        for _, attrs in tree.elements
        if attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies[0] is not None
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policies[0].split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    tags = [tag for tag, _ in tree.elements]
    assert tags.count("script") == 2  # its script, and the data it reads
    assert not any(name.startswith("on") for _, attrs in tree.elements for name in attrs)


def test_hostile_names_are_text_everywhere() -> None:
    tree = HtmlTree(page(hostile_comparison()))
    assert not {tag for tag, _ in tree.elements} & {"img", "iframe", "object", "a", "base"}
    # title, command, device, names, verdicts, modules, choices, the error
    assert tree.text.count(HOSTILE) > 20
    # half a surrogate pair becomes "?", which UTF-8 can hold
    assert "\N{REPLACEMENT CHARACTER}" not in tree.text
    classes = {attrs.get("class") for tag, attrs in tree.elements if tag == "td"}
    assert "v-unknown" in classes


@given(
    st.recursive(
        st.text() | st.floats(allow_nan=False, allow_infinity=False),
        lambda children: st.lists(children, max_size=3),
    )
)
@example(["</script><!--<script>&\u2028\u2029"])
def test_embedded_json_comes_back_and_cannot_end_its_element(value: Any) -> None:
    text = embed_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)


def test_the_table_says_the_rows_numbers() -> None:
    summary = comparison()
    summary["rows"][3] |= {
        "acc": 0.87654,
        "acc_interval": 0.00213,
        "difference": -0.0512,
        "difference_interval": 0.114,
        "loss": 0.36159,
        "ms_per_step": 2.6049,
        "s_per_epoch": 0.4884,
        "samples_per_s": 24569.3,
        "peak_memory": 315 * 2**20,
        "skipped": 4 / 3,
        "final_scale": 65536.0,
    }
    tree = HtmlTree(page(summary))
    assert tree.result("O2") == {
        "Precision": "O2",
        "Verdict": "= same within 0.5 points",
        "Accuracy, %": "87.65 ± 0.21",
        "Difference": "−0.05 ± 0.11",
        "Loss": "0.3616",
        "ms/step": "2.60",
        "s/epoch": "0.488",
        "samples/s": "24,569",
        "Peak memory": "315 MiB",
        "Skipped": "1.3",
        "Final scale": "2¹⁶",
    }
    speedup = summary["rows"][0]["ms_per_step"] / 2.6049
    assert f"{speedup:.2f}×" in tree.text
    assert "Use" in tree.text
    assert summary["command"] in " ".join(tree.text.split())


def test_numbers_as_text() -> None:
    numbers = {
        0: "0",
        0.01234: "0.0123",
        1.5: "1.50",
        12.345: "12.3",
        1234.5: "1,234",
        -2.5: "−2.50",
        1e12: "1.00e12",
    }
    assert {value: fmt.format_number(value) for value in numbers} == numbers
    sizes = {
        0: "0 B",
        1023: "1,023 B",
        1536: "1.50 KiB",
        2**30: "1.00 GiB",
        2**60: "1,048,576 TiB",
    }
    assert {value: fmt.format_bytes(value) for value in sizes} == sizes
    scales = {1.0: "1.00", 65536.0: "2¹⁶", 2.0**-14: "2⁻¹⁴", 49152.0: "49,152", 0.0: "0"}
    assert {value: fmt.format_loss_scale(value) for value in scales} == scales
    assert fmt.format_points(0.125, None) == "+0.12"  # Python rounds halves to even
    for format_value in (
        fmt.format_number,
        fmt.format_bytes,
        fmt.format_loss_scale,
        fmt.format_points,
    ):
        assert format_value(None) == "–"


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5), st.booleans(), st.integers(2, 8))
def test_axes_hold_their_values_and_mark_round_ones(
    values: list[float], log: bool, limit: int
) -> None:
    axis = log_axis(values) if log else linear_axis(values)
    clipped = [min(MAX_VALUE, max(-MAX_VALUE, v)) for v in values if v > 0 or not log]
    assert axis.low < axis.high
    assert all(0 <= axis.fraction(value) <= 1 for value in clipped)
    ticks = axis.ticks(limit)
    assert len(ticks) <= limit
    tolerance = 1e-9 * max(abs(axis.low), abs(axis.high))
    assert all(axis.low - tolerance <= tick <= axis.high + tolerance for tick in ticks)


def test_short_curves_are_the_mean_and_the_range_of_the_seeds() -> None:
    summary = comparison(("fp32", "O1"), 3, steps=90)
    curves = series.curves_by_step(parse_summary(summary), "loss")
    runs = [run for run in summary["runs"] if run["precision"] == "O1"]
    losses = np.array([run["curve"]["loss"] for run in runs])
    line = curves.lines[1]
    assert curves.x == list(range(1, 91))
    assert np.allclose(line.mid, losses.mean(0), rtol=1e-15)  # sums of three in another order
    assert line.low == losses.min(0).tolist()
    assert line.high == losses.max(0).tolist()


def test_long_curves_are_averaged_in_even_bins() -> None:
    summary = comparison(("fp32",), 1, steps=5000)
    curve = summary["runs"][0]["curve"]
    curves = series.curves_by_step(parse_summary(summary), "loss")
    edges = np.linspace(1, 5000, series.MAX_BINS + 1)
    bins = np.clip(np.digitize(curve["step"], edges) - 1, 0, series.MAX_BINS - 1)
    means = [np.array(curve["loss"])[bins == i].mean() for i in range(series.MAX_BINS)]
    assert np.allclose(curves.lines[0].mid, means, rtol=1e-12)  # sums in another order
    assert np.allclose(curves.x, edges[1:])


def test_the_loss_scale_keeps_every_jump_and_invents_no_value() -> None:
    summary = comparison(("O1",), 3, steps=5000)
    scale_curves = charts.loss_scale_curves(parse_summary(summary))
    chart = charts.loss_scale_chart(scale_curves)
    assert chart is not None
    jumps = set()
    scales = set()
    for run in summary["runs"]:
        curve = run["curve"]
        scales |= set(curve["scale"])
        for i in range(1, len(curve["step"])):
            if curve["scale"][i] != curve["scale"][i - 1]:
                jumps.add(curve["step"][i])
    line = chart.curves.lines[0]
    assert jumps <= set(chart.curves.x)
    assert set(line.known_values()) <= scales
    assert line.high[0] == 65536.0


def test_a_loss_scale_that_never_moved_is_said_and_not_drawn() -> None:
    summary = comparison(("fp32", "O1"), 2)
    for run in summary["runs"]:
        run["skipped_steps"] = []
        scale = 65536.0 if run["precision"] == "O1" else 1.0
        run["curve"]["scale"] = [scale] * 500
    html = page(summary)
    assert "O1: 2¹⁶ at every step. Without loss scaling: fp32." in HtmlTree(html).text
    assert "chart-scale" not in html
    assert "Loss scale" not in HtmlTree(page(comparison(("fp32", "fp16"), 2))).text


def test_failed_runs_stay_out_of_means_unless_there_are_no_others() -> None:
    summary = comparison(("fp32", "O1"), 2, steps=90)
    fail_run(summary, "O1", 1, "out of memory", points=10)
    line = series.curves_by_step(parse_summary(summary), "loss").lines[1]
    assert line.mid == summary["runs"][2]["curve"]["loss"]
    assert line.seeds == 1
    fail_run(summary, "O1", 0, "out of memory", points=20)
    line = series.curves_by_step(parse_summary(summary), "loss").lines[1]
    assert [value is None for value in line.mid] == [False] * 20 + [True] * 70
    tree = HtmlTree(page(summary))
    assert "2 runs failed and are left out of the means" in tree.text
    assert tree.text.count("out of memory") == 2


def test_one_diverged_run_does_not_flatten_the_others() -> None:
    summary = diverged_comparison()
    loss_chart = charts.training_charts(parse_summary(summary))[0]
    highest = max(max(run["curve"]["loss"]) for run in summary["runs"][:3])
    assert loss_chart.y_axis.high < 2 * highest
    assert "fp16 up to 1.00e38" in loss_chart.note


def test_paths_and_read_out_agree() -> None:
    """The line that is drawn is at the height that the script computes for the value it shows."""
    html = page(comparison(("fp32", "O1"), 1))
    chart = json.loads(HtmlTree(html).scripts[0])["chart-accuracy"]
    low, high, _ = chart["ys"]
    path = re.search(r'id="chart-accuracy".*?class="line" d="(M[^"]+)"', html, re.DOTALL)
    assert path is not None
    points = [tuple(map(int, point.split())) for point in re.split("[ML]", path[1])[1:]]
    heights = [(1 - (value - low) / (high - low)) * 1000 for value in chart["lines"][0]["mid"]]
    assert [x for x, _ in points] == [0, 200, 400, 600, 800, 1000]
    # whole units; values have six digits
    assert [y for _, y in points] == pytest.approx(heights, abs=1.0)


def test_without_accuracy_the_validation_loss_is_drawn() -> None:
    tree = HtmlTree(page(comparison_without_accuracy()))
    assert "chart-validation" in tree.ids()
    assert not {"chart-accuracy", "differences"} & set(tree.ids())
    assert "Accuracy, %" not in tree.result("O2")


def test_a_reason_becomes_a_sentence() -> None:
    summary = comparison(("fp32", "O2"), 1)
    for reason, sentence in (
        ("no other is as accurate", "No other is as accurate."),
        ("fp32 is as fast", "fp32 is as fast."),
        ("Enough.", "Enough."),
        ("", ""),
    ):
        summary["recommendation"] = {"precision": "fp32", "reason": reason}
        assert f"<h2>Use <bdi>fp32</bdi></h2><p>{sentence}</p>" in page(summary)


def test_notes_before_the_numbers() -> None:
    summary = comparison(seeds=1)
    summary["runs"] = summary["runs"][:3]
    text = HtmlTree(page(summary)).text
    assert "Not finished: 3 of 4 runs so far." in text
    assert "One seed only" in text
    assert "Not finished" not in HtmlTree(page(comparison())).text


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8))
@example([50.0] * 8)
@example([0.0, 0.0, 100.0, 100.0])
def test_names_are_spread_in_their_order_and_no_farther_than_needed(heights: list[float]) -> None:
    heights = sorted(heights)
    result = line_chart.spread(heights, 9.0)
    assert len(result) == len(heights)
    assert all(b - a >= 9.0 - 1e-9 for a, b in itertools.pairwise(result))
    assert result[0] >= -1e-9
    assert result[-1] <= 100 + 1e-9
    if all(b - a >= 9.0 for a, b in itertools.pairwise(heights)):
        assert result == heights


def test_marks_of_different_lines_never_share_a_place() -> None:
    summary = comparison(("fp32", "fp16", "O1", "O2", "bf16", "O1+bf16", "O2+bf16"))
    for chart in charts.training_charts(parse_summary(summary)):
        lines = chart.drawn_lines()
        places = [place.left for line in lines for place in line.marks]
        assert len(set(places)) == len(places) >= 14
        assert lines[0].stroke_width > lines[1].stroke_width
    one = charts.training_charts(parse_summary(comparison(("fp32",), 1)))
    assert not any(line.marks for chart in one for line in chart.drawn_lines())
    assert not any(chart.end_names() for chart in one)


def test_names_stand_beside_the_lines_unless_there_are_too_many() -> None:
    tree = HtmlTree(page(comparison()))
    ends = [attrs for tag, attrs in tree.elements if (attrs.get("class") or "").startswith("end ")]
    assert len(ends) == 4 + 4 + 2  # loss, accuracy; the scale of O1 and O2
    assert "plot named" in page(comparison())
    assert "plot named" not in page(comparison(TWENTY, 1))


def test_twenty_precisions_differ_in_colour_dash_or_mark() -> None:
    html = page(comparison(TWENTY, 1))
    looks = re.findall(r'<g class="s (s\d) (dash\d) k\d+"', html)
    assert len(looks) == 2 * 20
    assert len(set(looks)) == 20


def test_memory_is_explained() -> None:
    summary = comparison()
    for row, mib in zip(summary["rows"], (100, 90, 160, 150), strict=True):
        row["peak_memory"] = mib * 2**20
    text = HtmlTree(page(summary)).text
    assert "O1, O2 take more than fp32 here. O1, O2 and O3 keep the float32 weights" in text
    for run in summary["runs"]:
        run["memory_kind"] = "device"
    on_device = HtmlTree(page(summary)).text
    assert "Peak memory counts weights, gradients, optimizer state and activations" in on_device
    assert "allocator take in the process" in text
    assert "allocator take in the process" not in on_device
    less = HtmlTree(page(comparison())).text
    assert "more than fp32 here" not in less
    for row in summary["rows"]:
        row["peak_memory"] = None
    assert "Peak memory counts" not in HtmlTree(page(summary)).text


def test_many_modules_are_grouped_and_the_odd_one_stays_apart() -> None:
    tree = HtmlTree(page(deep_comparison()))
    lines = {}
    for name, *cells in tree.table_rows:
        if "×" in name or name.startswith("fc"):
            lines[name] = cells
    assert lines == {
        "layer0.Conv2d … layer52.Conv2d Conv2d × 53": ["fp32", "fp16"],
        "layer0.BatchNorm2d … layer52.BatchNorm2d BatchNorm2d × 53": ["fp32", "fp16"],
        "layer0.ReLU … layer52.ReLU ReLU × 53": ["fp32", "fp16"],
        "fc Linear": ["fp32", "fp32"],
    }
    small = HtmlTree(page(comparison(("fp32", "O1"), 1)))
    assert ["1 Linear", "fp32", "fp16→fp32→fp16"] in small.table_rows


# How colours look without one kind of cones: Machado, Oliveira, Fernandes 2009, severity 1, on
# linear RGB.
COLOUR_VISION = {
    "all cones": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "no red": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "no green": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.01182, 0.04294, 0.968881),
    ),
    "no blue": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.3039),
    ),
}

# OKLab: linear RGB to cone responses, and their cube roots to lightness and two colour axes.
TO_LMS = (
    (0.4122214708, 0.5363325363, 0.0514459929),
    (0.2119034982, 0.6806995451, 0.1073969566),
    (0.0883024619, 0.2817188376, 0.6299787005),
)
TO_LAB = (
    (0.2104542553, 0.793617785, -0.0040720468),
    (1.9779984951, -2.428592205, 0.4505937099),
    (0.0259040371, 0.7827717662, -0.808675766),
)


def linear_rgb(colour: str) -> np.ndarray:
    values = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def oklab(colour: str, vision: tuple[tuple[float, ...], ...]) -> np.ndarray:
    seen = np.clip(np.array(vision) @ linear_rgb(colour), 0, 1)
    return np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ seen)


def contrast(a: str, b: str) -> float:
    """The contrast ratio of WCAG 2."""
    luminances = [float(linear_rgb(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (a, b)]
    return (max(luminances) + 0.05) / (min(luminances) + 0.05)


@pytest.mark.parametrize("dark", [0, 1])
def test_colours_can_be_read_and_told_apart(dark: int) -> None:
    variables = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", STYLE_SHEET)
    colours = {name: pair[dark] for name, *pair in variables}
    texts = ("ink", "quiet", "accent", "good", "bad", "unsure")
    for text, background in itertools.product(texts, ("paper", "card")):
        assert contrast(colours[text], colours[background]) >= 4.5, (text, background)
    dtype_rule = r"\.d-\w+ \{ background: light-dark\((#\w{6}), (#\w{6})\)"
    dtype_colours = re.findall(dtype_rule, STYLE_SHEET)
    assert len(dtype_colours) == 4
    assert all(contrast(colours["ink"], pair[dark]) >= 4.5 for pair in dtype_colours)
    lines = [colours[f"c{i}"] for i in range(8)]
    assert all(contrast(line, colours["card"]) >= 3 for line in lines)
    for name, vision in COLOUR_VISION.items():
        labs = [oklab(line, vision) for line in lines]
        for i, j in itertools.combinations(range(8), 2):
            # In OKLab, 0.02 is just noticed side by side. The first five, which most pages show,
            # differ by five times that.
            assert math.dist(labs[i], labs[j]) > (0.1 if j < 5 else 0.07), (name, i, j)


def rendered_markdown(summary: dict[str, Any]) -> str:
    parser = MarkdownIt("commonmark", {"html": True}).enable("table")
    return str(parser.render(markdown(summary)))


def test_markdown_is_a_table_with_the_same_numbers() -> None:
    html = rendered_markdown(comparison())
    cells = []
    for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html):
        cells.append(re.sub("<[^>]+>", "", cell))
    tree = HtmlTree(page(comparison()))
    for name in ("fp32", "fp16", "O1", "O2"):
        expected = list(tree.result(name).values())
        start = cells.index(name)
        assert cells[start : start + len(expected)] == expected
    assert "<strong>Use <code>O2</code>.</strong>" in html
    assert comparison()["command"] in html


def test_markdown_keeps_hostile_names_as_text() -> None:
    summary = hostile_comparison()
    summary["rows"][1]["precision"] = "a|b`c``d"
    summary["recommendation"]["reason"] = (
        "[x](javascript:alert(1)) **bold** @somebody\n\n# head\n| a | b |\n"
    )
    html = rendered_markdown(summary)
    allowed = {"h2", "p", "strong", "code", "pre", "blockquote", "ul", "li", "details", "summary"}
    allowed |= {"table", "thead", "tbody", "tr", "th", "td"}
    assert set(re.findall(r"<(\w+)", html)) <= allowed
    assert "<code>a|b`c``d</code>" in html
    assert "@somebody" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html


def test_files_appear_whole_where_requested(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text(json.dumps(comparison(("fp32",), 1)))
    assert write(tmp_path) == [tmp_path / "report.html", tmp_path / "report.md"]
    out = tmp_path / "a" / "b"
    write(tmp_path / "compare.json", out=out, formats=["json", "html"])
    assert sorted(path.name for path in out.iterdir()) == ["report.html", "report.json"]
    assert (out / "report.html").read_text() == (tmp_path / "report.html").read_text()
    assert json.loads((out / "report.json").read_text()) == comparison(("fp32",), 1)


def test_json_has_no_bare_nan(tmp_path: Path) -> None:
    summary = comparison(("fp32",), 1)
    summary["rows"][0]["loss"] = math.nan
    (tmp_path / "compare.json").write_text(json.dumps(summary))
    write(tmp_path, formats=["json"])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    written = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)
    assert written["rows"][0]["loss"] is None


def test_a_runs_result_is_a_page_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "O1-s0"
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(run_result("O1", 0)))
    tree = HtmlTree(page(read(folder)))
    assert "Verdict" not in tree.result("O1")
    assert "recommendation" not in tree.text.lower()
    assert "Run" in tree.result("O1")
    assert tree.result("O1")["Final scale"] == "2¹²"


def test_a_log_is_a_page_with_the_numbers_of_the_run(tmp_path: Path) -> None:
    x = torch.randn(200, 8)
    data = hs.data.Dataset((x, x[:, :3].argmax(1))).batch(20)
    net = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    metrics = {"acc": hs.metrics.Accuracy()}
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, "O2", metrics=metrics)
    history = hs.History()
    model.fit(3, data, valid=data, callbacks=[hs.JSONLLog(tmp_path / "log.jsonl"), history])

    report = parse_summary(read(tmp_path))
    run = report.runs[0]
    assert list(run.curve["loss"]) == history.rows["loss"]
    assert list(run.curve["scale"]) == history.rows["scale"]
    assert [epoch["valid_acc"] for epoch in run.epochs] == history.epochs["valid_acc"]
    assert report.rows[0]["skipped"] == sum(history.rows["skipped"])
    tree = HtmlTree(page(read(tmp_path)))
    assert {"chart-loss", "chart-accuracy"} <= set(tree.ids())
    assert tmp_path.name in tree.text


def log_line(step: int, loss: str) -> str:
    """A line of hs.JSONLLog; `loss` as it stands in the file."""
    return (
        f'{{"kind": "step", "epoch": 1, "global_step": {step}, "loss": {loss}, "scale": 1.0, '
        '"lr": [0.1, 0.2], "skipped": false}\n'
    )


def test_a_log_that_is_still_written_and_one_that_is_damaged(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(log_line(1, "0.5") + log_line(2, '"NaN"') + '{"kind": "st')
    run = parse_summary(read(log)).runs[0]
    assert run.curve == {"step": (1, 2), "loss": (0.5, None), "scale": (1, 1), "lr": (0.1, 0.1)}

    log.write_text(log_line(1, "0.5") + "broken\n" + log_line(2, "0.4"))
    with pytest.raises(ValueError, match=r"line 2 of .*log.jsonl.*Cut that line out"):
        read(tmp_path)
    log.write_text(log_line(1, "0.5") + log_line(2, "0.4"))
    assert parse_summary(read(tmp_path)).runs[0].curve["loss"] == (0.5, 0.4)

    log.write_text(log.read_text() + "broken\n")  # a whole line: nobody is still writing it
    with pytest.raises(ValueError, match="line 3 of"):
        read(tmp_path)
    log.write_text("")
    with pytest.raises(ValueError, match=r"expected the lines of hs.JSONLLog .* got none"):
        read(tmp_path)


def test_steps_of_long_logs_are_evenly_spaced(tmp_path: Path) -> None:
    with (tmp_path / "log.jsonl").open("w") as log:
        for i in range(1, 10_001):
            line = {"kind": "step", "epoch": 1, "global_step": i, "loss": 1 / i}
            log.write(json.dumps(line) + "\n")
    steps = parse_summary(read(tmp_path)).runs[0].curve["step"]
    assert (len(steps), steps[0], steps[-1]) == (500, 1, 10_000)
    assert set(np.diff(steps)) <= {20, 21}


def test_an_error_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected compare.json .* found no such folder"):
        read(tmp_path / "nowhere")
    message = r"found none of them. Name the folder that was given to --out"
    with pytest.raises(FileNotFoundError, match=message):
        read(tmp_path)

    summary_file = tmp_path / "compare.json"
    summary_file.write_text('{"halfstep_compare": 1, "title"')
    with pytest.raises(ValueError, match=r"expected JSON in .*compare.json"):
        read(tmp_path)
    for text, received in (('{"halfstep_compare": 2}', "2"), ("[]", "'list'"), ("{}", "None")):
        summary_file.write_text(text)
        with pytest.raises(ValueError, match=f"got {received}"):
            write(tmp_path)

    summary_file.write_text(json.dumps(comparison(("fp32",), 1)))
    with pytest.raises(ValueError, match="expected one of the formats html, md, json, got 'pdf'"):
        write(tmp_path, formats=["html", "pdf"])
    # nothing is written, rather than some of it
    assert [path.name for path in tmp_path.iterdir()] == ["compare.json"]


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(report_command)
    (tmp_path / "compare.json").write_text(json.dumps(comparison()))
    result = CliRunner().invoke(app, [str(tmp_path)])
    paths = [str(tmp_path / "report.html"), str(tmp_path / "report.md")]
    assert result.output.splitlines() == paths
    result = CliRunner().invoke(app, [str(tmp_path), "--format", "md", "--out", "-"])
    assert result.output == (tmp_path / "report.md").read_text()
    for options in (["--out", "-"], ["--format", "md", "--open"]):
        result = CliRunner().invoke(app, [str(tmp_path), *options])
        assert isinstance(result.exception, ValueError)


def test_a_report_needs_neither_torch_nor_the_rest_of_halfstep() -> None:
    code = "import sys, halfstep.report; print(*sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    modules = set(process.stdout.split())
    packages = {name.split(".")[1] for name in modules if name.startswith("halfstep.")}
    assert "torch" not in modules
    assert packages == {"report", "utils"}
