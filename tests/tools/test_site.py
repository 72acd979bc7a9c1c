"""The site that tools/docs.sh builds, as a reader sees it: pages fit, are dark in the dark, and the search answers."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from chromium import Browser
from PIL import Image

import fastload
import fastload.transforms

pytestmark = pytest.mark.slow  # a browser says the same on every Python

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = (390, 768, 1280, 1440, 1920)
SEARCHES = {
    "install": "install",
    "validation": "validation",
    "FAQ": "troubleshooting",
    "resume": "resume",
    "s3": "object-storage",
    "ddp": "several-gpus",
    "FastLoader": "api/loader",
    "errors": "api/errors",
    "webdataset": "coming-from-webdataset",
}
"""What is typed -> the page that answers it."""

OVERFLOWS = """
  (async (pages, widths) => {
    const frame = document.createElement("iframe"), found = [];
    frame.style = "visibility: hidden; border: 0; height: 800px";  // laid out, but never painted
    document.body.append(frame);
    for (const page of pages) {
      frame.style.width = `${widths[0]}px`;
      await new Promise(loaded => { frame.onload = loaded; frame.src = page; });
      for (const width of widths) {
        frame.style.width = `${width}px`;
        for (const name of ["html", ".main", ".content"]) {
          const part = frame.contentDocument.querySelector(name);
          if (name === "html" && part.clientWidth !== width) throw new Error(`${page} is not laid out for ${width}`);
          if (part && part.scrollWidth > part.clientWidth)
            found.push(`${page} at ${width}: ${name} is ${part.scrollWidth} px in ${part.clientWidth}`);
        }
      }
    }
    return found;
  })
"""
FIRST_RESULT = """
  new Promise(resolve => {
    const look = () => {
      const first = document.querySelector("#search-results ul.search li a");
      const over = /did not match|Search finished/.test(document.querySelector("#search-results")?.innerText ?? "");
      if (first || over) resolve(first && first.getAttribute("href")); else setTimeout(look, 20);
    };
    look();
  })
"""
DRAWN_SCALES = """
  Array.from(document.querySelectorAll('article img[src$=".svg"]')).filter(image => image.offsetWidth)
    .map(image => image.getBoundingClientRect().width / image.naturalWidth)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages: tools/test.sh says where they are; else they are built here."""
    if built := os.environ.get("FASTLOAD_SITE"):
        return Path(built)
    if not all(map(find_spec, ("sphinx", "myst_parser", "furo"))):
        pytest.skip("needs the packages of the dependency group docs")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-d", folder / "read"]
    command += [ROOT / "docs", folder / "html"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    return folder / "html"


def pages(site: Path) -> list[Path]:
    found = sorted(path for path in site.rglob("*.html") if "_static" not in path.parts)
    assert {"index.html", "training.html", "search.html", "loader.html"} <= {path.name for path in found}
    return found


def test_no_page_is_wider_than_its_window(browser: Browser, site: Path, tmp_path: Path) -> None:
    """Each page in a frame of each width: a frame is a page's window, for its CSS as well."""
    shown = [page.resolve().as_uri() for page in pages(site)]
    (tmp_path / "frames.html").write_text("<!doctype html><title>frames</title>")
    browser.open(tmp_path / "frames.html", width=max(WIDTHS))
    assert browser.evaluate(f"{OVERFLOWS}({json.dumps(shown)}, {json.dumps(WIDTHS)})") == []


@pytest.mark.parametrize("name", ["index", "figures", "measuring"])
def test_a_page_is_dark_in_the_dark_and_light_else(browser: Browser, site: Path, tmp_path: Path, name: str) -> None:
    shares = {}
    for dark in (True, False):
        browser.open(site / f"{name}.html", dark=dark)
        browser.screenshot(tmp_path / "page.png")
        with Image.open(tmp_path / "page.png") as picture:
            gray = np.asarray(picture.convert("L"))
        shares[dark] = (gray > 235).mean(), (gray < 60).mean()
    assert shares[True][0] < 1e-4  # the text is 208 bright, white that is turned around 26, black 230
    assert shares[True][1] > 0.8 and shares[False][0] > 0.8


@pytest.mark.parametrize("name", ["index", "architecture"])
def test_letters_of_drawings_can_be_read_on_a_phone(browser: Browser, site: Path, name: str) -> None:
    browser.open(site / f"{name}.html", width=390)
    scales = browser.evaluate(DRAWN_SCALES)
    assert scales and all(12 * scale >= 9 for scale in scales), scales  # their smallest letters are of 12 px


@pytest.mark.parametrize("words", SEARCHES)
def test_the_search_gives_the_page_that_answers_first(browser: Browser, site: Path, words: str) -> None:
    browser.open(f"{(site / 'search.html').as_uri()}?q={words}")
    first = browser.evaluate(FIRST_RESULT)
    assert first is not None, "nothing was found"
    assert first.partition("#")[0] == f"{SEARCHES[words]}.html"


def test_words_of_the_search_lead_to_one_page_that_is_there() -> None:
    pytest.importorskip("sphinx")
    words = runpy.run_path(str(ROOT / "docs" / "conf.py"))["SEARCH_WORDS"]
    assert all((ROOT / "docs" / f"{page}.md").exists() for page in words)
    of_all = [word for of_page in words.values() for word in of_page]
    assert len(of_all) == len(set(of_all)) and all(word == word.lower() for word in of_all)


def test_every_public_name_has_one_place_in_the_api() -> None:
    text = "\n".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    written = re.findall(r"\.\. auto(?:class|function|exception):: fastload\.([\w.]+)", text)
    names = set(fastload.__all__) - {"transforms"} | {f"transforms.{name}" for name in fastload.transforms.__all__}
    assert sorted(written) == sorted(names)
