"""The page as a reader sees it, in headless Chromium: on a phone, in dark mode, on paper. Skips where there is none."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import pytest
from chromium import Browser
from made_up import hostile, usual
from PIL import Image

from fastload.profiling.report import write_report
from fastload.timing.results import Measured, with_schema

pytestmark = pytest.mark.slow  # a browser says the same on every Python

RUNS = {
    "usual": usual(300, gpus=2, spike_at=150),
    "hostile": hostile(),
    "empty": Measured(""),
    "two": [usual(), usual(title="the other")],
}
VISIBLE_TEXTS = """
  Array.from(document.querySelectorAll(".axis, .panel span, .bars .name")).filter(text => text.getClientRects().length)
    .map(text => {
      const box = text.getBoundingClientRect();
      return [text.textContent, box.left, box.right, parseFloat(getComputedStyle(text).fontSize)];
    })
"""
A4_HEIGHT_PX, A4_WIDTH_PX = (297 - 2 * 15) / 25.4 * 96, (210 - 2 * 14) / 25.4 * 96
"""What the margins of page.css leave."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("reports")
    for name, run in RUNS.items():
        write_report(run, folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in RUNS}


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(…)`, as the Web Content Accessibility Guidelines define it."""
    parts = [int(part) / 255 for part in colour.strip("rgb()").split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def colour(browser: Browser, selector: str, what: str = "color") -> str:
    return browser.evaluate(f"getComputedStyle(document.querySelector({selector!r})).{what}")


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("width", [320, 360, 700, 1280])
def test_it_is_as_wide_as_the_window_loads_nothing_and_its_letters_are_large_enough(browser, reports, name, width):
    browser.open(reports[name], width=width)
    assert browser.complaints() == []
    assert browser.evaluate("document.scrollingElement.scrollWidth") <= width
    assert browser.evaluate("document.title") != "broken"
    if width > 320 and name in ("usual", "two"):
        texts = browser.evaluate(VISIBLE_TEXTS)
        assert len(texts) > 20
        for text, left, right, size in texts:
            assert size >= 9.5 and left >= 0 and right <= width, (text, left, right, size)


def test_a_drawing_is_stretched_to_the_page_and_its_numbers_stand_apart(browser, reports):
    boxes = """Array.from(document.querySelectorAll(".panel")).map(panel => [
        panel.clientWidth, panel.querySelector("svg").clientWidth, panel.parentNode.clientWidth,
        Array.from(panel.querySelectorAll(".x")).map(text => text.getBoundingClientRect()).filter(box => box.width)
            .map(box => [box.left, box.right])])"""
    for width in (360, 1280):
        browser.open(reports["usual"], width=width)
        found = browser.evaluate(boxes)
        assert len(found) == 7
        for inside, drawn, around, numbers in found:
            assert drawn == inside > 0.75 * around
            assert all(one[1] < other[0] for one, other in itertools.pairwise(numbers))


def test_text_stands_out_by_day_and_by_night(browser, reports):
    backgrounds = []
    for dark in (False, True):
        browser.open(reports["usual"], dark=dark)
        paper, card = (colour(browser, selector, "backgroundColor") for selector in ("body", ".verdict"))
        backgrounds.append(luminance(paper))
        for selector, under in ((".sentence", card), (".cause", card), (".label", card), ("td", paper), ("dt", card)):
            assert contrast(colour(browser, selector), under) >= 4.5, (selector, dark)
        for part in ("wait", "compute", "transform", "copy"):
            assert contrast(colour(browser, f".swatch.{part}", "backgroundColor"), paper) >= 2.2, (part, dark)
        assert contrast(colour(browser, ".panel .y"), paper) >= 4.5
    assert backgrounds[0] > 0.9 and backgrounds[1] < 0.02


def test_the_drawings_are_to_be_seen(browser, reports, tmp_path):
    browser.open(reports["usual"], width=360)
    browser.screenshot(tmp_path / "phone.png")
    with Image.open(tmp_path / "phone.png") as image:
        assert image.width == 360 and image.height > 2000
        counts = {pixel: count for count, pixel in image.convert("RGB").getcolors(1 << 24)}
    assert counts[(0xD5, 0x5E, 0x00)] > 2000 and counts[(0x00, 0x72, 0xB2)] > 2000


def test_on_paper_it_is_light_and_no_plot_is_cut(browser, reports, tmp_path):
    browser.open(reports["usual"], width=round(A4_WIDTH_PX), dark=True)
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert luminance(colour(browser, "body", "backgroundColor")) == 1 and luminance(colour(browser, "body")) < 0.05
    figures = browser.evaluate(
        """Array.from(document.querySelectorAll("figure")).map(figure =>
            [figure.getBoundingClientRect().height, getComputedStyle(figure).breakInside])"""
    )
    assert len(figures) == 6
    assert all(height < A4_HEIGHT_PX and inside == "avoid" for height, inside in figures)
    assert all(right <= A4_WIDTH_PX and size >= 8 for _, _, right, size in browser.evaluate(VISIBLE_TEXTS))
    browser.call("Emulation.setEmulatedMedia", media="")
    browser.print_pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")


def test_the_button_saves_what_was_measured(browser, reports, tmp_path):
    browser.open(reports["usual"])
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.evaluate("document.getElementById('save').click()")
    saved = tmp_path / "fastload-report.json"
    deadline = time.monotonic() + 600
    while not saved.exists():
        assert time.monotonic() < deadline, "nothing was saved"
        browser.evaluate("new Promise(done => setTimeout(done, 50))")
    assert json.loads(saved.read_text()) == json.loads(json.dumps(with_schema(RUNS["usual"].to_dict())))
    assert browser.complaints() == []
    # A keyboard reaches every wide table and the button.
    reached = browser.evaluate(
        """Array.from(document.querySelectorAll(".scroll")).every(box => box.tabIndex == 0 && box.ariaLabel)"""
    )
    assert reached and not browser.evaluate("document.getElementById('save').hidden")
