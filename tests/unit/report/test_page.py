"""The report, read back: every number against one made by hand, every text as text, for 1 run, 20 runs and bad ones."""

import base64
import hashlib
import itertools
import json
import math
import re
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
from halfstep.cli.report import report as command
from halfstep.report import charts, markdown, page, read, series, write
from halfstep.report import number_format as fmt
from halfstep.report.axis import MAX_VALUE, linear_axis, log_axis
from halfstep.report.html_page import embed_json
from halfstep.report.report_data import parse_summary
from tests.support.report_fixtures import HOSTILE, comparison, fail, hostile, result

VOID = {"meta", "link", "input", "br", "path", "rect"}
STYLE = Path(page.__code__.co_filename).with_name("style.css").read_text()


class Tree(HTMLParser):
    """Elements with their attributes and text; a tag that does not close its own is an error."""

    def __init__(self, made: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(made)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif "style" not in self.open:
            self.words.append(data)
            if {"td", "th"} & set(self.open):
                self.cells[-1][-1] += data

    def row(self, name: str) -> dict[str, str]:
        """A row of the table of results by its headings."""
        heads = next(cells for cells in self.cells if cells[0] in ("Precision", "Run"))
        return dict(
            zip(heads, next(cells for cells in self.cells if cells[0] == name), strict=True)
        )

    @property
    def text(self) -> str:
        return " ".join(self.words)


def empty() -> dict[str, Any]:
    """Nothing but nulls where numbers belong."""
    made = comparison(("fp32", "O1"), 2, steps=40)
    for each in [*made["rows"], *made["runs"]]:
        keep = {k: v for k, v in each.items() if isinstance(v, str) or k == "seed"}
        each |= dict.fromkeys(each) | keep
    for run in made["runs"]:
        run["curve"] = {
            "step": [1, 2],
            "loss": [None, None],
            "scale": [None, None],
            "lr": [None, None],
        }
    return made | {
        "spec": {},
        "environment": {},
        "recommendation": {"precision": None, "reason": ""},
    }


def blind() -> dict[str, Any]:
    """A comparison without accuracy."""
    made = comparison(("fp32", "O2"), 3)
    for each in [*made["rows"], *made["runs"]]:
        each |= {"acc": None, "acc_interval": None, "difference": None, "difference_interval": None}
    for run in made["runs"]:
        run["epochs"] = [{**e, "valid_acc": None} for e in run["epochs"]]
    return made


def diverged() -> dict[str, Any]:
    made = comparison()
    fail(
        made,
        "fp16",
        1,
        "NonFiniteError: step 141: the gradients of 0.weight are not finite",
        keep=60,
    )
    made["runs"][3]["curve"]["loss"][200:] = [1e38, None] * 150
    return made


def deep(precisions: tuple[str, ...] = ("fp32", "O2"), seeds: int = 1) -> dict[str, Any]:
    """A network of 160 modules, one of which is kept in float32."""
    made = comparison(precisions, seeds)
    for run in made["runs"]:
        low = "float32" if run["precision"] == "fp32" else "float16"
        run["dtypes"] = [
            {
                "module": f"layer{i}.{k}",
                "kind": k,
                "input": low,
                "weight": "-" if k == "ReLU" else low,
                "output": low,
            }
            for i in range(53)
            for k in ("Conv2d", "BatchNorm2d", "ReLU")
        ] + [
            {
                "module": "fc",
                "kind": "Linear",
                "input": "float32",
                "weight": "float32",
                "output": "float32",
            }
        ]
    return made


PAGES = {
    "one run": lambda: comparison(("fp32",), 1),
    "four by three": comparison,
    "twenty precisions": lambda: comparison(tuple(f"p{i}" for i in range(20)), 1),
    "four by five": lambda: comparison(seeds=5),
    "deep, twenty runs": lambda: deep(tuple(f"p{i}" for i in range(20))),
    "one step": lambda: comparison(("fp32", "O1"), 2, steps=1, epochs=1),
    "nulls": empty,
    "no accuracy": blind,
    "diverged": diverged,
    "hostile": hostile,
    "nothing yet": lambda: {"halfstep_compare": 1},
}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_whole_small_and_asks_for_nothing(name: str) -> None:
    made = page(PAGES[name]())
    tree = Tree(made)
    assert len(made.encode()) < 300_000
    links = [
        v
        for _, attrs in tree.found
        for k, v in attrs.items()
        if k in ("src", "href", "action", "data", "srcset")
    ]
    assert links == ["data:,"]
    assert "url(" not in made
    assert "@import" not in made
    assert not {"None", "nan", "inf", "NaN"} & set(re.findall(r"\w+", tree.text))
    ids = [attrs["id"] for _, attrs in tree.found if "id" in attrs]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", PAGES)
def test_only_the_pages_own_script_may_run(name: str) -> None:
    made = page(PAGES[name]())
    tree = Tree(made)
    policy = next(
        a["content"] for tag, a in tree.found if a.get("http-equiv") == "Content-Security-Policy"
    )
    assert policy is not None
    scripts = re.findall(r"<script>(.*?)</script>", made, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == f"'sha256-{digest}'"
    assert [tag for tag, _ in tree.found].count("script") == 2  # its script, and the data it reads
    assert not any(key.startswith("on") for _, attrs in tree.found for key in attrs)


def test_hostile_names_are_text_everywhere() -> None:
    tree = Tree(page(hostile()))
    assert not {tag for tag, _ in tree.found} & {"img", "iframe", "object", "a", "base"}
    assert (
        tree.text.count(HOSTILE) > 20
    )  # title, command, device, names, verdicts, modules, choices, the error
    assert (
        "\N{REPLACEMENT CHARACTER}" not in tree.text
    )  # half a pair becomes "?", in UTF-8 as any other text
    kinds = {attrs.get("class") for tag, attrs in tree.found if tag == "td"}
    assert "v-unknown" in kinds


@given(
    st.recursive(
        st.text() | st.floats(allow_nan=False, allow_infinity=False),
        lambda x: st.lists(x, max_size=3),
    )
)
@example(["</script><!--<script>&\u2028\u2029"])
def test_embedded_json_comes_back_and_cannot_end_its_element(value: Any) -> None:
    made = embed_json(value)
    assert json.loads(made) == value
    assert not set("<>&\u2028\u2029") & set(made)


def test_the_table_says_the_rows_numbers() -> None:
    made = comparison()
    made["rows"][3] |= {
        "acc": 0.87654, "acc_interval": 0.00213, "difference": -0.0512, "difference_interval": 0.114, "loss": 0.36159,
        "ms_per_step": 2.6049, "s_per_epoch": 0.4884, "samples_per_s": 24569.3, "peak_memory": 315 * 2**20,
        "skipped": 4 / 3, "final_scale": 65536.0,
    }  # fmt: skip
    tree = Tree(page(made))
    assert tree.row("O2") == {
        "Precision": "O2", "Verdict": "= same within 0.5 points", "Accuracy, %": "87.65 ± 0.21",
        "Difference": "−0.05 ± 0.11", "Loss": "0.3616", "ms/step": "2.60", "s/epoch": "0.488", "samples/s": "24,569",
        "Peak memory": "315 MiB", "Skipped": "1.3", "Final scale": "2¹⁶",
    }  # fmt: skip
    first = made["rows"][0]["ms_per_step"] / 2.6049
    assert f"{first:.2f}×" in tree.text
    assert "Use" in tree.text
    assert made["command"] in tree.text


def test_numbers_as_text() -> None:
    short = {
        0: "0",
        0.01234: "0.0123",
        1.5: "1.50",
        12.345: "12.3",
        1234.5: "1,234",
        -2.5: "−2.50",
        1e12: "1.00e12",
    }
    assert {value: fmt.format_number(value) for value in short} == short
    sizes = {0: "0 B", 1023: "1,023 B", 1536: "1.50 KiB", 2**30: "1.00 GiB", 2**60: "1,048,576 TiB"}
    assert {value: fmt.format_bytes(value) for value in sizes} == sizes
    scales = {1.0: "1.00", 65536.0: "2¹⁶", 2.0**-14: "2⁻¹⁴", 49152.0: "49,152", 0.0: "0"}
    assert {value: fmt.format_loss_scale(value) for value in scales} == scales
    assert fmt.format_points(0.125, None) == "+0.12"  # Python rounds halves to even
    assert (
        fmt.format_number(None)
        == fmt.format_bytes(None)
        == fmt.format_loss_scale(None)
        == fmt.format_points(None)
        == "–"
    )


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5), st.booleans(), st.integers(2, 8))
def test_axes_hold_their_values_and_mark_round_ones(
    values: list[float], log: bool, most: int
) -> None:
    axis = log_axis(values) if log else linear_axis(values)
    kept = [min(MAX_VALUE, max(-MAX_VALUE, v)) for v in values if v > 0 or not log]
    assert axis.low < axis.high
    assert all(0 <= axis.fraction(v) <= 1 for v in kept)
    ticks = axis.ticks(most)
    assert len(ticks) <= most
    air = 1e-9 * max(abs(axis.low), abs(axis.high))
    assert all(axis.low - air <= v <= axis.high + air for v in ticks)


def test_short_curves_are_the_mean_and_the_range_of_the_seeds() -> None:
    made = comparison(("fp32", "O1"), 3, steps=90)
    found = series.curves_by_step(parse_summary(made), "loss")
    table = np.array([run["curve"]["loss"] for run in made["runs"] if run["precision"] == "O1"])
    line = found.lines[1]
    assert found.x == list(range(1, 91))
    assert np.allclose(line.mid, table.mean(0), rtol=1e-15)  # sums of three in another order
    assert line.low == table.min(0).tolist()
    assert line.high == table.max(0).tolist()


def test_long_curves_are_averaged_in_even_bins() -> None:
    made = comparison(("fp32",), 1, steps=5000)
    curve = made["runs"][0]["curve"]
    found = series.curves_by_step(parse_summary(made), "loss")
    edges = np.linspace(1, 5000, series.MAX_BINS + 1)
    place = np.clip(np.digitize(curve["step"], edges) - 1, 0, series.MAX_BINS - 1)
    means = [np.array(curve["loss"])[place == i].mean() for i in range(series.MAX_BINS)]
    assert np.allclose(found.lines[0].mid, means, rtol=1e-12)  # sums in another order
    assert np.allclose(found.x, edges[1:])


def test_the_loss_scale_keeps_every_jump_and_invents_no_value() -> None:
    made = comparison(("O1",), 3, steps=5000)
    curves = charts.loss_scale_chart(charts.loss_scale_curves(parse_summary(made))).curves
    seen = [run["curve"] for run in made["runs"]]
    jumps = {
        c["step"][i]
        for c in seen
        for i in range(1, len(c["step"]))
        if c["scale"][i] != c["scale"][i - 1]
    }
    assert jumps <= set(curves.x)
    assert set(curves.lines[0].known_values()) <= {v for c in seen for v in c["scale"]}
    assert curves.lines[0].high[0] == 65536.0


def test_a_loss_scale_that_never_moved_is_said_and_not_drawn() -> None:
    made = comparison(("fp32", "O1"), 2)
    for run in made["runs"]:
        run |= {"skipped_steps": []}
        run["curve"]["scale"] = [65536.0 if run["precision"] == "O1" else 1.0] * 500
    assert "O1: 2¹⁶ at every step. Without loss scaling: fp32." in Tree(page(made)).text
    assert "chart-scale" not in page(made)
    assert "Loss scale" not in Tree(page(comparison(("fp32", "fp16"), 2))).text


def test_failed_runs_stay_out_of_means_unless_there_are_no_others() -> None:
    made = comparison(("fp32", "O1"), 2, steps=90)
    fail(made, "O1", 1, "out of memory", keep=10)
    line = series.curves_by_step(parse_summary(made), "loss").lines[1]
    assert line.mid == made["runs"][2]["curve"]["loss"]
    assert line.seeds == 1
    fail(made, "O1", 0, "out of memory", keep=20)
    line = series.curves_by_step(parse_summary(made), "loss").lines[1]
    assert [v is None for v in line.mid] == [False] * 20 + [True] * 70
    tree = Tree(page(made))
    assert "2 runs failed and are left out of the means" in tree.text
    assert tree.text.count("out of memory") == 2


def test_one_diverged_run_does_not_flatten_the_others() -> None:
    loss = charts.training_charts(parse_summary(diverged()))[0]
    highest = max(max(run["curve"]["loss"]) for run in diverged()["runs"][:3])
    assert loss.y_axis.high < 2 * highest
    assert "fp16 up to 1.00e38" in loss.note


def test_paths_and_read_out_agree() -> None:
    """The line that is drawn is at the height that the script computes for the value it shows."""
    made = page(comparison(("fp32", "O1"), 1))
    tree = Tree(made)
    chart = json.loads(tree.scripts[0])["chart-accuracy"]
    lo, hi, _ = chart["ys"]
    drawn = re.search(r'id="chart-accuracy".*?class="line" d="(M[^"]+)"', made, re.DOTALL)
    assert drawn is not None
    points = [tuple(map(int, p.split())) for p in re.split("[ML]", drawn[1])[1:]]
    wanted = [(1 - (v - lo) / (hi - lo)) * 1000 for v in chart["lines"][0]["mid"]]
    assert [x for x, _ in points] == [0, 200, 400, 600, 800, 1000]
    assert [y for _, y in points] == pytest.approx(
        wanted, abs=1.0
    )  # whole units; values have six digits


def test_without_accuracy_the_validation_loss_is_drawn() -> None:
    tree = Tree(page(blind()))
    ids = {attrs.get("id") for _, attrs in tree.found}
    assert "chart-validation" in ids
    assert not {"chart-accuracy", "differences"} & ids
    assert "Accuracy, %" not in tree.row("O2")


def test_a_reason_becomes_a_sentence() -> None:
    made = comparison(("fp32", "O2"), 1)
    for reason, sentence in (
        ("no other is as accurate", "No other is as accurate."),
        ("fp32 is as fast", "fp32 is as fast."),
        ("Enough.", "Enough."),
        ("", ""),
    ):
        made["recommendation"] = {"precision": "fp32", "reason": reason}
        assert f"<h2>Use <bdi>fp32</bdi></h2><p>{sentence}</p>" in page(made)


def test_notes_before_the_numbers() -> None:
    made = comparison(seeds=1)
    made["runs"] = made["runs"][:3]
    text = Tree(page(made)).text
    assert "Not finished: 3 of 4 runs so far." in text
    assert "One seed only" in text
    assert "Not finished" not in Tree(page(comparison())).text


def test_many_modules_are_gathered_and_the_odd_one_stays_apart() -> None:
    tree = Tree(page(deep()))
    rows = {
        cells[0]: cells[1:] for cells in tree.cells if "×" in cells[0] or cells[0].startswith("fc")
    }
    assert rows == {
        "layer0.Conv2d … layer52.Conv2d Conv2d × 53": ["fp32", "fp16"],
        "layer0.BatchNorm2d … layer52.BatchNorm2d BatchNorm2d × 53": ["fp32", "fp16"],
        "layer0.ReLU … layer52.ReLU ReLU × 53": ["fp32", "fp16"],
        "fc Linear": ["fp32", "fp32"],
    }
    few = Tree(page(comparison(("fp32", "O1"), 1)))
    assert ["1 Linear", "fp32", "fp16→fp32→fp16"] in few.cells


# Machado, Oliveira, Fernandes 2009, severity 1, on linear RGB.
SEEN = {
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
TO_LMS = ((0.4122214708, 0.5363325363, 0.0514459929), (0.2119034982, 0.6806995451, 0.1073969566),
          (0.0883024619, 0.2817188376, 0.6299787005))  # fmt: skip
TO_LAB = ((0.2104542553, 0.793617785, -0.0040720468), (1.9779984951, -2.428592205, 0.4505937099),
          (0.0259040371, 0.7827717662, -0.808675766))  # fmt: skip


def linear(colour: str) -> np.ndarray:
    v = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(v <= 0.04045, v / 12.92, ((v + 0.055) / 1.055) ** 2.4)


def contrast(a: str, b: str) -> float:
    """WCAG 2."""
    light = sorted(float(linear(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b))
    return (light[1] + 0.05) / (light[0] + 0.05)


@pytest.mark.parametrize("dark", [0, 1])
def test_colours_can_be_read_and_told_apart(dark: int) -> None:
    found = re.findall(r"--([\w-]+): light-dark\((#\w{6}), (#\w{6})\)", STYLE)
    colours = {name: pair[dark] for name, *pair in found}
    for name, under in itertools.product(
        ("ink", "quiet", "accent", "good", "bad", "unsure"), ("paper", "card")
    ):
        assert contrast(colours[name], colours[under]) >= 4.5, (name, under)
    marks = re.findall(r"\.d-\w+ \{ background: light-dark\((#\w{6}), (#\w{6})\)", STYLE)
    assert len(marks) == 4
    assert all(contrast(colours["ink"], pair[dark]) >= 4.5 for pair in marks)
    lines = [colours[f"c{i}"] for i in range(8)]
    assert all(contrast(c, colours["card"]) >= 3 for c in lines)
    for name, seen in SEEN.items():
        labs = [
            np.array(TO_LAB) @ np.cbrt(np.array(TO_LMS) @ np.clip(np.array(seen) @ linear(c), 0, 1))
            for c in lines
        ]
        for i, j in itertools.combinations(range(8), 2):
            # OKLab: 0.02 is just noticed side by side; the first five, which most pages show, keep five times that
            assert math.dist(labs[i], labs[j]) > (0.1 if j < 5 else 0.07), (name, i, j)


def test_markdown_is_a_table_with_the_same_numbers() -> None:
    made = markdown(comparison())
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(made)
    cells = [re.sub("<[^>]+>", "", c) for c in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", html)]
    tree = Tree(page(comparison()))
    heads = next(row for row in tree.cells if row[0] == "Precision")
    for name in ("fp32", "fp16", "O1", "O2"):
        at = cells.index(name)
        assert cells[at : at + len(heads)] == list(tree.row(name).values())
    assert "<strong>Use <code>O2</code>.</strong>" in html
    assert comparison()["command"] in html


def test_markdown_keeps_hostile_names_as_text() -> None:
    made = hostile()
    made["rows"][1]["precision"] = "a|b`c``d"
    made["recommendation"]["reason"] = (
        "[x](javascript:alert(1)) **bold** @somebody\n\n# head\n| a | b |\n"
    )
    html = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown(made))
    assert set(re.findall(r"<(\w+)", html)) <= {
        "h2", "p", "strong", "code", "blockquote", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "details",
        "summary", "pre",
    }  # fmt: skip
    assert "<code>a|b`c``d</code>" in html
    assert "@somebody" not in html
    assert "&lt;img src=x onerror=alert(1)&gt;" in html


def test_files_appear_whole_where_asked(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text(json.dumps(comparison(("fp32",), 1)))
    assert write(tmp_path) == [tmp_path / "report.html", tmp_path / "report.md"]
    out = tmp_path / "a" / "b"
    write(tmp_path / "compare.json", out=out, formats=["json", "html"])
    assert sorted(p.name for p in out.iterdir()) == ["report.html", "report.json"]
    assert (out / "report.html").read_text() == (tmp_path / "report.html").read_text()
    assert json.loads((out / "report.json").read_text()) == comparison(("fp32",), 1)


def test_json_has_no_bare_nan(tmp_path: Path) -> None:
    made = comparison(("fp32",), 1)
    made["rows"][0]["loss"] = math.nan
    (tmp_path / "compare.json").write_text(json.dumps(made))
    write(tmp_path, formats=["json"])

    def refuse(name: str) -> None:
        raise AssertionError(name)

    assert (
        json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse)["rows"][0]["loss"]
        is None
    )


def test_a_runs_result_is_a_page_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "O1-s0").mkdir()
    (tmp_path / "O1-s0" / "result.json").write_text(json.dumps(result("O1", 0)))
    tree = Tree(page(read(tmp_path / "O1-s0")))
    assert "Verdict" not in tree.row("O1")
    assert "recommendation" not in tree.text.lower()
    assert "Run" in tree.row("O1")
    assert tree.row("O1")["Final scale"] == "2¹²"


def test_a_log_is_a_page_with_the_numbers_of_the_run(tmp_path: Path) -> None:
    x = torch.randn(200, 8)
    data = hs.data.Dataset((x, x[:, :3].argmax(1))).batch(20)
    net = nn.Linear(8, 3)
    metrics = {"acc": hs.metrics.Accuracy()}
    model = hs.Model(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1), "O2", metrics=metrics
    )
    history = hs.History()
    model.fit(3, data, valid=data, callbacks=[hs.JSONLLog(tmp_path / "log.jsonl"), history])
    report = parse_summary(read(tmp_path))
    curve = report.runs[0].curve
    assert list(curve["loss"]) == history.rows["loss"]
    assert list(curve["scale"]) == history.rows["scale"]
    assert [e["valid_acc"] for e in report.runs[0].epochs] == history.epochs["valid_acc"]
    assert report.rows[0]["skipped"] == sum(history.rows["skipped"])
    tree = Tree(page(read(tmp_path)))
    assert {"chart-loss", "chart-accuracy"} <= {attrs.get("id") for _, attrs in tree.found}
    assert tmp_path.name in tree.text


def test_a_log_that_is_still_written_and_one_that_is_damaged(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = '{"kind": "step", "epoch": 1, "global_step": %d, "loss": %s, "scale": 1.0, "lr": [0.1, 0.2], "skipped": false}'
    log.write_text(f"{line % (1, 0.5)}\n{line % (2, chr(34) + 'NaN' + chr(34))}\n" + '{"kind": "st')
    run = parse_summary(read(log)).runs[0]
    assert run.curve == {"step": (1, 2), "loss": (0.5, None), "scale": (1, 1), "lr": (0.1, 0.1)}
    log.write_text(f"{line % (1, 0.5)}\nbroken\n{line % (2, 0.4)}\n")
    with pytest.raises(ValueError, match=r"line 2 of .*log.jsonl.*Cut that line out"):
        read(tmp_path)
    log.write_text(
        "".join(each for each in log.read_text().splitlines(keepends=True) if each != "broken\n")
    )
    assert parse_summary(read(tmp_path)).runs[0].curve["loss"] == (0.5, 0.4)
    log.write_text(log.read_text() + "broken\n")  # a whole line: nobody is still writing it
    with pytest.raises(ValueError, match="line 3 of"):
        read(tmp_path)
    log.write_text("")
    with pytest.raises(ValueError, match=r"expected the lines of hs.JSONLLog .* got none"):
        read(tmp_path)


def test_long_logs_are_taken_evenly(tmp_path: Path) -> None:
    lines = [
        json.dumps({"kind": "step", "epoch": 1, "global_step": i, "loss": 1 / i})
        for i in range(1, 10_001)
    ]
    (tmp_path / "log.jsonl").write_text("\n".join(lines) + "\n")
    steps = parse_summary(read(tmp_path)).runs[0].curve["step"]
    assert (len(steps), steps[0], steps[-1]) == (500, 1, 10_000)
    assert set(np.diff(steps)) <= {20, 21}


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected compare.json .* found no such folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(
        FileNotFoundError, match=r"found none of them. Name the folder that was given to --out"
    ):
        read(tmp_path)
    (tmp_path / "compare.json").write_text('{"halfstep_compare": 1, "title"')
    with pytest.raises(ValueError, match=r"expected JSON in .*compare.json"):
        read(tmp_path)
    for other, came in (('{"halfstep_compare": 2}', "2"), ("[]", "'list'"), ("{}", "None")):
        (tmp_path / "compare.json").write_text(other)
        with pytest.raises(ValueError, match=f"got {came}"):
            write(tmp_path)
    (tmp_path / "compare.json").write_text(json.dumps(comparison(("fp32",), 1)))
    with pytest.raises(ValueError, match="expected one of the formats html, md, json, got 'pdf'"):
        write(tmp_path, formats=["html", "pdf"])
    assert [p.name for p in tmp_path.iterdir()] == [
        "compare.json"
    ]  # nothing, rather than some of it


def test_the_command(tmp_path: Path) -> None:
    app = typer.Typer()
    app.command()(command)
    (tmp_path / "compare.json").write_text(json.dumps(comparison()))
    done = CliRunner().invoke(app, [str(tmp_path)])
    assert done.output.splitlines() == [str(tmp_path / "report.html"), str(tmp_path / "report.md")]
    done = CliRunner().invoke(app, [str(tmp_path), "--format", "md", "--out", "-"])
    assert done.output == (tmp_path / "report.md").read_text()
    for wrong in (["--out", "-"], ["--format", "md", "--open"]):
        assert isinstance(CliRunner().invoke(app, [str(tmp_path), *wrong]).exception, ValueError)
