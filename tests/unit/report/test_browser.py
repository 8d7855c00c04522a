"""The report in a real Chromium: it renders, responds, fits a phone, follows the colours, and fetches and runs nothing.

A browser is looked for in HALFSTEP_CHROMIUM, among playwright's own, and on the PATH.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from halfstep.report import page as render
from tests.support.report_fixtures import HOSTILE, comparison, fail, hostile

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install playwright"
)

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
LONG = (
    "O2 with every rule that anybody has ever thought of, kept.in.one.very.long.name.without.a.single.space"
    * 2
)
Show = Callable[..., Any]


def found(own: str) -> str | None:
    """A browser's program: the one asked for, playwright's own, or the system's."""
    asked = os.environ.get("HALFSTEP_CHROMIUM")
    return asked or (
        own if Path(own).exists() else next(filter(None, map(shutil.which, NAMES)), None)
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        program = found(p.chromium.executable_path)
        if program is None:
            assert "HALFSTEP_NEEDS_BROWSER" not in os.environ, "no browser was installed"
            pytest.skip(
                "needs a Chromium: playwright install chromium, or HALFSTEP_CHROMIUM=/path/to/chromium"
            )
        started = p.chromium.launch(
            executable_path=program, args=["--no-sandbox"]
        )  # root has no sandbox
        yield started
        started.close()


class Server(ThreadingHTTPServer):
    """Hands out one page, and remembers every path that it was asked for."""

    body, asked = b"", list[str]()


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        self.send_response(200 if self.path == "/report.html" else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.server.body if self.path == "/report.html" else b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    served = Server(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=partial(served.serve_forever, poll_interval=0.02))
    thread.start()
    yield served
    served.shutdown()
    thread.join()
    served.server_close()


@pytest.fixture
def show(browser: Any, server: Server) -> Iterator[Show]:
    """Opens a summary's page; afterwards nothing may have been complained about, asked for or popped up."""
    contexts, trouble = [], list[str]()

    def opened(summary: dict[str, Any], *, width: int = 1280, **options: Any) -> Any:
        server.body, server.asked = render(summary).encode(), []
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, **options))
        shown = contexts[-1].new_page()
        shown.on("console", lambda message: trouble.append(message.text))
        shown.on("pageerror", lambda error: trouble.append(str(error)))
        shown.on("dialog", lambda dialog: (trouble.append(dialog.message), dialog.dismiss()))
        shown.goto(f"http://127.0.0.1:{server.server_port}/report.html")
        return shown

    yield opened
    for context in contexts:
        context.close()
    assert trouble == []
    assert server.asked == ["/report.html"]


def overflow(shown: Any) -> int:
    """Pixels by which the page is wider than the screen."""
    wide: int = shown.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return wide


def long() -> dict[str, Any]:
    made = comparison(("fp32", LONG), 2, steps=60)
    return made | {"title": LONG, "command": f"halfstep compare --precisions {LONG}"}


def failed() -> dict[str, Any]:
    made = comparison()
    fail(made, "fp16", 1, "NonFiniteError: " + "0.weight, " * 40, keep=60)
    return made


PAGES = {
    "one run": lambda: comparison(("fp32",), 1),
    "four by three": comparison,
    "twenty": lambda: comparison(tuple(f"p{i}" for i in range(20)), 1),
    "failed": failed,
    "long names": long,
    "hostile": hostile,
    "nothing yet": lambda: {"halfstep_compare": 1},
}


@pytest.mark.parametrize("name", PAGES)
def test_renders_on_a_phone_without_scrolling_sideways(show: Show, name: str) -> None:
    shown = show(PAGES[name](), width=360, has_touch=True, is_mobile=True)
    assert overflow(shown) == 0
    shown.locator("details").evaluate_all("all => all.forEach(each => { each.open = true })")
    assert overflow(shown) == 0
    # what is wider than its box would be cut or lie over its neighbour; the boxes of tables scroll instead
    outside = """[...document.querySelectorAll("body *")].filter(e => !e.closest(".wide, svg") &&
        e.getClientRects().length && e.getBoundingClientRect().right > 361).map(e => e.outerHTML)"""
    assert shown.evaluate(outside) == []
    small = """[...document.querySelectorAll("body *")].filter(e => e.innerText && !e.children.length &&
        parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.outerHTML)"""
    assert shown.evaluate(small) == []


def test_wide_tables_scroll_in_their_own_box(show: Show) -> None:
    shown = show(comparison(), width=360)
    box = shown.locator(".wide").first
    assert box.evaluate("e => e.scrollWidth > e.clientWidth + 100")
    box.focus()
    shown.keyboard.press("ArrowRight")
    shown.wait_for_timeout(300)  # it scrolls smoothly
    assert box.evaluate("e => e.scrollLeft") > 0
    assert shown.evaluate("scrollX") == 0


def test_boxes_of_the_legend_hide_and_show_a_precision_everywhere(show: Show) -> None:
    shown = show(comparison())
    lines = shown.locator(".k2")
    assert lines.count() == 7  # loss, accuracy, scale; the lanes of difference, time, memory, skips
    drawn = shown.locator("g.k2 .line")
    assert all(drawn.nth(i).is_visible() for i in range(3))
    shown.locator(".legend label", has_text="O1").click()
    assert all(
        lines.nth(i).evaluate("e => getComputedStyle(e).display") == "none" for i in range(7)
    )
    assert shown.locator("g.k1 .line").first.is_visible()
    shown.locator("#chart-loss .plot").hover()
    assert shown.locator("#chart-loss .tip bdi").all_inner_texts() == ["fp32", "fp16", "O2"]
    shown.locator("#show-2").focus()
    shown.keyboard.press("Space")  # the keyboard does it too
    assert drawn.first.is_visible()


def test_hovering_reads_the_values_out(show: Show) -> None:
    made = comparison(("fp32", "O1"), 3)
    shown = show(made)
    plot = shown.locator("#chart-accuracy .plot")
    tip = shown.locator("#chart-accuracy .tip")
    assert tip.is_hidden()
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] * 0.41, "y": 60})  # epochs 1 to 6: the third is at 0.4
    accuracy = np.array([[e["valid_acc"] for e in run["epochs"]] for run in made["runs"]]).reshape(
        2, 3, 6
    )[:, :, 2]
    wanted: list[Any] = ["epoch 3"]
    for name, seeds in zip(("fp32", "O1"), accuracy * 100, strict=True):
        wanted += [name, seeds.mean(), seeds.min(), seeds.max()]
    said = [part for line in tip.inner_text().split("\n") for part in line.split(" to ")]
    shown_values = [float(part.removesuffix(" %")) if part.endswith("%") else part for part in said]
    assert shown_values == [
        v if isinstance(v, str) else pytest.approx(v, abs=0.006) for v in wanted
    ]  # two decimals
    spot = shown.locator("#chart-accuracy .spot").first.bounding_box()
    assert spot["x"] + spot["width"] / 2 == pytest.approx(
        box["x"] + 0.4 * box["width"], abs=1.5
    )  # whole pixels
    shown.mouse.move(5, 5)
    assert tip.is_hidden()


def test_arrow_keys_read_the_values_out(show: Show) -> None:
    shown = show(comparison(("fp32",), 1))
    tip = shown.locator("#chart-accuracy .tip")
    shown.locator("#chart-accuracy .plot").focus()
    for key, epoch in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("End", 6),
        ("ArrowRight", 6),
        ("ArrowLeft", 5),
    ):
        shown.keyboard.press(key)
        assert tip.locator("b").inner_text() == f"epoch {epoch}"
    shown.keyboard.press("Escape")
    assert tip.is_hidden()


def test_a_finger_reads_the_values_out(show: Show) -> None:
    shown = show(comparison(), width=360, has_touch=True, is_mobile=True)
    for side in (0.05, 0.95):
        plot = shown.locator("#chart-loss .plot")
        plot.tap(position={"x": plot.bounding_box()["width"] * side, "y": 50})
        tip = shown.locator("#chart-loss .tip")
        assert tip.locator("bdi").count() == 4
        box = tip.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    assert overflow(shown) == 0


def test_colours_follow_the_system_and_the_switch(show: Show) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('g.k1 .line')).stroke"
    light, dark = show(comparison(), color_scheme="light"), show(comparison(), color_scheme="dark")
    seen = {
        name: (each.evaluate(back), each.evaluate(line))
        for name, each in (("light", light), ("dark", dark))
    }
    assert seen["light"][0] == "rgb(250, 249, 246)"
    assert seen["dark"][0] == "rgb(18, 21, 26)"
    assert seen["light"][1] != seen["dark"][1]
    light.get_by_text("Dark", exact=True).click()
    dark.get_by_text("Light", exact=True).click()
    assert (light.evaluate(back), light.evaluate(line)) == seen["dark"]
    assert (dark.evaluate(back), dark.evaluate(line)) == seen["light"]
    dark.get_by_text("Auto", exact=True).click()
    assert (dark.evaluate(back), dark.evaluate(line)) == seen["dark"]


def test_hostile_names_are_shown_and_run_nothing(show: Show) -> None:
    shown = show(hostile())
    assert shown.locator("h1").inner_text() == HOSTILE
    assert shown.title() == HOSTILE
    assert shown.locator("img, iframe, svg[onload], [onerror], [onmouseover]").count() == 0
    shown.locator("#chart-loss .plot").hover()
    assert shown.locator("#chart-loss .tip bdi").first.inner_text() == HOSTILE
    shown.locator(".legend label").first.click()
    assert not shown.locator("g.k0").first.is_visible()


def test_without_a_script_the_page_still_draws_and_hides(show: Show) -> None:
    shown = show(comparison(), java_script_enabled=False)
    box = shown.locator("#chart-loss g.k1 .line").bounding_box()
    assert box["width"] > 300
    assert box["height"] > 100
    assert shown.locator("[data-copy]").is_hidden()
    shown.locator(".legend label", has_text="fp16").click()
    assert shown.locator("#chart-loss g.k1 .line").is_hidden()


def test_the_command_is_copied(show: Show) -> None:
    shown = show(comparison(), permissions=["clipboard-read", "clipboard-write"])
    shown.get_by_role("button", name="Copy").click()
    shown.get_by_role("button", name="Copied").wait_for()
    assert shown.evaluate("navigator.clipboard.readText()") == comparison()["command"]


def test_whoever_cannot_see_the_charts_hears_them(show: Show) -> None:
    shown = show(comparison())
    names = [each.get_attribute("aria-label") for each in shown.get_by_role("img").all()]
    assert len(names) == 3
    assert names[0].startswith("Training loss by step: fp32 from ")
    assert shown.get_by_role("checkbox", name="O1").is_checked()
    assert shown.get_by_role("radio", name="Auto").is_checked()
    assert shown.get_by_role("table").count() >= 2
    levels = [
        int(each.evaluate("e => e.tagName[1]")) for each in shown.get_by_role("heading").all()
    ]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


def test_print_is_light_and_without_controls(show: Show) -> None:
    shown = show(comparison(), color_scheme="dark")
    shown.emulate_media(media="print")
    assert shown.locator(".colours").is_hidden()
    assert shown.get_by_role("button", name="Copy").is_hidden()
    assert shown.evaluate("getComputedStyle(document.body).color") == "rgb(28, 31, 36)"
    assert shown.pdf(format="A4").startswith(b"%PDF")
