"""The report in a real Chromium.

It renders, responds, fits a phone, follows the colours, and fetches and runs nothing.
A browser is looked for in HALFSTEP_CHROMIUM, among playwright's own, and on the PATH.
"""

import io
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image

from halfstep.report import page as render_page
from tests.support.report_fixtures import HOSTILE, comparison, fail_run, hostile_comparison

playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs playwright: pip install playwright"
)

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SEVEN = ("fp32", "fp16", "O1", "O2", "bf16", "O1+bf16", "O2+bf16")
LONG_NAME = 2 * (
    "O2 with every rule that anybody has ever thought of, "
    "kept.in.one.very.long.name.without.a.single.space"
)
OpenPage = Callable[..., Any]


def find_browser(playwrights_own: str) -> str | None:
    """A browser's program: the one asked for, playwright's own, or the system's."""
    requested = os.environ.get("HALFSTEP_CHROMIUM")
    if requested:
        return requested
    if Path(playwrights_own).exists():
        return playwrights_own
    for program in PROGRAMS:
        path = shutil.which(program)
        if path:
            return path
    return None


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as p:
        program = find_browser(p.chromium.executable_path)
        if program is None:
            assert "HALFSTEP_NEEDS_BROWSER" not in os.environ, "no browser was installed"
            pytest.skip(
                "needs a Chromium: playwright install chromium, or "
                "HALFSTEP_CHROMIUM=/path/to/chromium"
            )
        # root has no sandbox
        chromium = p.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium
        chromium.close()


class PageServer(ThreadingHTTPServer):
    """Serves one page, and remembers every path that was requested."""

    body = b""
    requested_paths: ClassVar[list[str]] = []


class PageHandler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        self.server.requested_paths.append(self.path)
        exists = self.path == "/report.html"
        self.send_response(200 if exists else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(self.server.body if exists else b"")

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    page_server = PageServer(("127.0.0.1", 0), PageHandler)
    thread = threading.Thread(target=partial(page_server.serve_forever, poll_interval=0.02))
    thread.start()
    yield page_server
    page_server.shutdown()
    thread.join()
    page_server.server_close()


@pytest.fixture
def open_page(browser: Any, server: PageServer) -> Iterator[OpenPage]:
    """Opens a summary's page. Afterwards there may be no message, no request and no dialog."""
    contexts: list[Any] = []
    problems: list[str] = []

    def on_dialog(dialog: Any) -> None:
        problems.append(dialog.message)
        dialog.dismiss()

    def open_summary(summary: dict[str, Any], *, width: int = 1280, **options: Any) -> Any:
        server.body = render_page(summary).encode()
        server.requested_paths = []
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        tab = context.new_page()
        tab.on("console", lambda message: problems.append(message.text))
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("dialog", on_dialog)
        tab.goto(f"http://127.0.0.1:{server.server_port}/report.html")
        return tab

    yield open_summary
    for context in contexts:
        context.close()
    assert problems == []
    assert server.requested_paths == ["/report.html"]


def overflow_pixels(tab: Any) -> int:
    """Pixels by which the page is wider than the screen."""
    pixels: int = tab.evaluate(
        "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    )
    return pixels


def comparison_with_long_names() -> dict[str, Any]:
    summary = comparison(("fp32", LONG_NAME), 2, steps=60)
    command = f"halfstep compare --precisions {LONG_NAME}"
    return summary | {"title": LONG_NAME, "command": command}


def comparison_with_failed_run() -> dict[str, Any]:
    summary = comparison()
    fail_run(summary, "fp16", 1, "NonFiniteError: " + "0.weight, " * 40, points=60)
    return summary


PAGES = {
    "one run": lambda: comparison(("fp32",), 1),
    "four by three": comparison,
    "twenty": lambda: comparison(tuple(f"p{i}" for i in range(20)), 1),
    "failed": comparison_with_failed_run,
    "long names": comparison_with_long_names,
    "hostile": hostile_comparison,
    "nothing yet": lambda: {"halfstep_compare": 1},
}


@pytest.mark.parametrize("name", PAGES)
def test_renders_on_a_phone_without_scrolling_sideways(open_page: OpenPage, name: str) -> None:
    tab = open_page(PAGES[name](), width=360, has_touch=True, is_mobile=True)
    assert overflow_pixels(tab) == 0
    tab.locator("details").evaluate_all("all => all.forEach(details => { details.open = true })")
    assert overflow_pixels(tab) == 0
    # What is wider than its box would be cut off or cover its neighbour; tables scroll instead.
    outside = """[...document.querySelectorAll("body *")].filter(
        e => !e.closest(".wide, svg") && e.getClientRects().length &&
             e.getBoundingClientRect().right > 361
    ).map(e => e.outerHTML)"""
    assert tab.evaluate(outside) == []
    small_text = """[...document.querySelectorAll("body *")].filter(
        e => e.innerText && !e.children.length && parseFloat(getComputedStyle(e).fontSize) < 12
    ).map(e => e.outerHTML)"""
    assert tab.evaluate(small_text) == []


def test_wide_tables_scroll_in_their_own_box(open_page: OpenPage) -> None:
    tab = open_page(comparison(), width=360)
    box = tab.locator(".wide:has(.dtypes)")
    assert box.evaluate("e => e.scrollWidth > e.clientWidth + 100")
    box.focus()
    tab.keyboard.press("ArrowRight")
    tab.wait_for_timeout(300)  # it scrolls smoothly
    assert box.evaluate("e => e.scrollLeft") > 0
    assert tab.evaluate("scrollX") == 0


def right_edge_brightness(box: Any) -> float:
    """The mean brightness of the last pixels of a box, below its heading."""
    image = Image.open(io.BytesIO(box.screenshot())).convert("L")
    pixels = np.asarray(image, dtype=float)
    return float(pixels[-12:-6, -6:-3].mean())


def test_a_shadow_shows_where_a_table_goes_on(open_page: OpenPage) -> None:
    tab = open_page(comparison(), width=390, color_scheme="light")
    box = tab.locator(".wide:has(.dtypes)")
    assert right_edge_brightness(box) < 240
    box.evaluate("e => { e.scrollLeft = e.scrollWidth }")
    assert right_edge_brightness(box) > 250
    wide = open_page(comparison(), width=1280, color_scheme="light")
    assert right_edge_brightness(wide.locator(".wide:has(.dtypes)")) > 250


@pytest.mark.parametrize("width", [360, 390, 500, 768, 1180])
def test_results_are_cards_where_the_table_would_be_cut(open_page: OpenPage, width: int) -> None:
    summary = comparison(SEVEN)
    tab = open_page(summary, width=width)
    cards = tab.locator(".results.judged tbody tr")
    assert cards.count() == 7
    for i in range(7):
        box = cards.nth(i).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    # Nothing is cut inside a card, and every number stands under its name.
    cells = tab.locator(".results.judged td")
    assert cells.evaluate_all("all => all.every(e => e.scrollWidth <= e.clientWidth + 1)")
    label = "e => getComputedStyle(e, '::before').content"
    assert cells.nth(1).evaluate(label) == '"Accuracy, %"'
    # It is still a table for whoever cannot see it.
    table = tab.get_by_role("table").first
    assert table.get_by_role("row").count() == 8
    assert table.get_by_role("columnheader").count() == 11
    assert table.get_by_role("rowheader").all_inner_texts() == list(SEVEN)


@pytest.mark.parametrize("width", [1190, 1280])
def test_results_are_a_table_where_there_is_room(open_page: OpenPage, width: int) -> None:
    summary = comparison(SEVEN)
    fail_run(summary, "fp16", 1, "NonFiniteError", points=60)  # which adds a column
    tab = open_page(summary, width=width)
    box = tab.locator(".wide").first
    assert box.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert tab.locator("thead").first.bounding_box()["height"] > 20
    tops = (
        tab.locator(".results tbody tr")
        .first.locator("td")
        .evaluate_all("all => all.map(e => e.getBoundingClientRect().top)")
    )
    assert len(set(tops)) == 1


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_that_coincide_are_all_visible(open_page: OpenPage, scheme: str) -> None:
    """Every precision has the very same curves; each colour must still cover some pixels."""
    summary = comparison(seeds=1)
    first = summary["runs"][0]
    for run in summary["runs"]:
        run |= {"curve": first["curve"], "epochs": first["epochs"]}
    tab = open_page(summary, color_scheme=scheme)
    for chart in ("chart-loss", "chart-accuracy"):
        area = tab.locator(f"#{chart} .area")
        image = Image.open(io.BytesIO(area.screenshot())).convert("RGB")
        pixels = np.asarray(image, dtype=int).reshape(-1, 3)
        for i in range(4):
            stroke = tab.locator(f"#{chart} g.k{i} .line").evaluate(
                "e => getComputedStyle(e).stroke"
            )
            colour = [int(value) for value in re.findall(r"\d+", stroke)]
            distance = np.abs(pixels - colour).sum(axis=1)
            assert (distance < 30).sum() > 100, (chart, i)


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_names_at_the_ends_of_lines_do_not_touch(open_page: OpenPage, width: int) -> None:
    tab = open_page(comparison(SEVEN), width=width)
    for chart in ("chart-loss", "chart-accuracy"):
        names = tab.locator(f"#{chart} .end")
        assert sorted(names.all_inner_texts()) == sorted(SEVEN)
        boxes = sorted((name.bounding_box() for name in names.all()), key=lambda box: box["y"])
        for upper, lower in pairwise(boxes):
            assert upper["y"] + 14 <= lower["y"]  # letters of 13 pixels
        figure = tab.locator(f"#{chart}").bounding_box()
        plot = tab.locator(f"#{chart} .area").bounding_box()
        for box in boxes:
            assert box["x"] >= plot["x"] + plot["width"]
            assert box["x"] + box["width"] <= figure["x"] + figure["width"]
            assert box["y"] >= figure["y"]
        # A name that is cut would end in dots.
        cut = names.locator("bdi").evaluate_all(
            "all => all.some(e => e.scrollWidth > e.clientWidth)"
        )
        assert not cut


def test_boxes_of_the_legend_hide_and_show_a_precision_everywhere(open_page: OpenPage) -> None:
    tab = open_page(comparison())
    lines = tab.locator(".k2")
    # Loss, accuracy and scale have a line, a leader and a name; loss and accuracy have marks. Lanes
    # of difference, time, memory, skips.
    assert lines.count() == 15
    drawn = tab.locator("g.k2 .line")
    assert all(drawn.nth(i).is_visible() for i in range(3))
    tab.locator(".legend label", has_text="O1").click()
    for i in range(15):
        assert lines.nth(i).evaluate("e => getComputedStyle(e).display") == "none"
    assert tab.locator("g.k1 .line").first.is_visible()
    tab.locator("#chart-loss .plot").hover()
    assert tab.locator("#chart-loss .tip bdi").all_inner_texts() == ["fp32", "fp16", "O2"]
    tab.locator("#show-2").focus()
    tab.keyboard.press("Space")  # the keyboard does it too
    assert drawn.first.is_visible()


def test_hovering_reads_the_values_out(open_page: OpenPage) -> None:
    summary = comparison(("fp32", "O1"), 3)
    tab = open_page(summary)
    plot = tab.locator("#chart-accuracy .plot")
    tip = tab.locator("#chart-accuracy .tip")
    assert tip.is_hidden()
    box = plot.bounding_box()
    plot.hover(position={"x": box["width"] * 0.41, "y": 60})  # epochs 1 to 6: the third is at 0.4

    # Mean, lowest and highest accuracy after the third epoch, in percent with two decimals.
    expected: list[Any] = ["epoch 3"]
    for precision in ("fp32", "O1"):
        runs = [run for run in summary["runs"] if run["precision"] == precision]
        accuracies = 100 * np.array([run["epochs"][2]["valid_acc"] for run in runs])
        expected.append(precision)
        for value in (accuracies.mean(), accuracies.min(), accuracies.max()):
            expected.append(pytest.approx(value, abs=0.006))
    received: list[Any] = []
    for line in tip.inner_text().split("\n"):
        for part in line.split(" to "):
            received.append(float(part.removesuffix(" %")) if part.endswith("%") else part)
    assert received == expected

    spot = tab.locator("#chart-accuracy .spot").first.bounding_box()
    spot_middle = spot["x"] + spot["width"] / 2
    third_epoch = box["x"] + 0.4 * box["width"]
    assert spot_middle == pytest.approx(third_epoch, abs=1.5)  # whole pixels
    tab.mouse.move(5, 5)
    assert tip.is_hidden()


def test_arrow_keys_read_the_values_out(open_page: OpenPage) -> None:
    tab = open_page(comparison(("fp32",), 1))
    tip = tab.locator("#chart-accuracy .tip")
    tab.locator("#chart-accuracy .plot").focus()
    for key, epoch in (
        ("ArrowRight", 1),
        ("ArrowRight", 2),
        ("End", 6),
        ("ArrowRight", 6),
        ("ArrowLeft", 5),
    ):
        tab.keyboard.press(key)
        assert tip.locator("b").inner_text() == f"epoch {epoch}"
    tab.keyboard.press("Escape")
    assert tip.is_hidden()


def test_a_finger_reads_the_values_out(open_page: OpenPage) -> None:
    tab = open_page(comparison(), width=360, has_touch=True, is_mobile=True)
    for side in (0.05, 0.95):
        plot = tab.locator("#chart-loss .plot")
        plot.tap(position={"x": plot.bounding_box()["width"] * side, "y": 50})
        tip = tab.locator("#chart-loss .tip")
        assert tip.locator("bdi").count() == 4
        box = tip.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    assert overflow_pixels(tab) == 0


def test_colours_follow_the_system_and_the_switch(open_page: OpenPage) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    line = "getComputedStyle(document.querySelector('g.k1 .line')).stroke"

    def colours(tab: Any) -> tuple[str, str]:
        return tab.evaluate(background), tab.evaluate(line)

    light = open_page(comparison(), color_scheme="light")
    dark = open_page(comparison(), color_scheme="dark")
    light_colours = colours(light)
    dark_colours = colours(dark)
    assert light_colours[0] == "rgb(250, 249, 246)"
    assert dark_colours[0] == "rgb(18, 21, 26)"
    assert light_colours[1] != dark_colours[1]
    light.get_by_text("Dark", exact=True).click()
    dark.get_by_text("Light", exact=True).click()
    assert colours(light) == dark_colours
    assert colours(dark) == light_colours
    dark.get_by_text("Auto", exact=True).click()
    assert colours(dark) == dark_colours


def test_hostile_names_are_shown_and_run_nothing(open_page: OpenPage) -> None:
    tab = open_page(hostile_comparison())
    assert tab.locator("h1").inner_text() == HOSTILE
    assert tab.title() == HOSTILE
    assert tab.locator("img, iframe, svg[onload], [onerror], [onmouseover]").count() == 0
    tab.locator("#chart-loss .plot").hover()
    assert tab.locator("#chart-loss .tip bdi").first.inner_text() == HOSTILE
    tab.locator(".legend label").first.click()
    assert not tab.locator("g.k0").first.is_visible()


def test_without_a_script_the_page_still_draws_and_hides(open_page: OpenPage) -> None:
    tab = open_page(comparison(), java_script_enabled=False)
    box = tab.locator("#chart-loss g.k1 .line").bounding_box()
    assert box["width"] > 300
    assert box["height"] > 100
    assert tab.locator("[data-copy]").is_hidden()
    tab.locator(".legend label", has_text="fp16").click()
    assert tab.locator("#chart-loss g.k1 .line").is_hidden()


def test_the_command_is_copied(open_page: OpenPage) -> None:
    tab = open_page(comparison(), permissions=["clipboard-read", "clipboard-write"])
    tab.get_by_role("button", name="Copy").click()
    tab.get_by_role("button", name="Copied").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == comparison()["command"]


def test_the_command_breaks_between_words_only(open_page: OpenPage) -> None:
    tab = open_page(comparison(), width=360)
    words = tab.locator("pre code span")
    assert words.all_inner_texts() == comparison()["command"].split()
    boxes = words.evaluate_all("all => all.map(e => e.getBoundingClientRect())")
    heights = {round(box["height"]) for box in boxes}
    assert len(heights) == 1  # no word takes two lines
    assert len({box["top"] for box in boxes}) > 1


def test_whoever_cannot_see_the_charts_hears_them(open_page: OpenPage) -> None:
    tab = open_page(comparison())
    labels = [image.get_attribute("aria-label") for image in tab.get_by_role("img").all()]
    assert len(labels) == 3
    assert labels[0].startswith("Training loss by step: fp32 from ")
    assert tab.get_by_role("checkbox", name="O1").is_checked()
    assert tab.get_by_role("radio", name="Auto").is_checked()
    assert tab.get_by_role("table").count() >= 2
    headings = tab.get_by_role("heading").all()
    levels = [int(heading.evaluate("e => e.tagName[1]")) for heading in headings]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))


def test_print_is_light_and_without_controls(open_page: OpenPage) -> None:
    tab = open_page(comparison(), color_scheme="dark")
    tab.emulate_media(media="print")
    assert tab.locator(".colours").is_hidden()
    assert tab.get_by_role("button", name="Copy").is_hidden()
    assert tab.evaluate("getComputedStyle(document.body).color") == "rgb(28, 31, 36)"
    assert tab.pdf(format="A4").startswith(b"%PDF")
