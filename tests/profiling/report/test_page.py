"""The page as text: well-formed, escaped, self-contained, and saying what is missing."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from made_up import IMG, SCRIPT, hostile, usual

from fastload.profiling.report import write_report
from fastload.profiling.report.page import make_page
from fastload.profiling.report.plots import plot_steps
from fastload.timing.results import Measured, WorkTime, with_schema

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that every element is closed in order; collects ids, attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data):
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)
        if not {"script", "style"} & set(self.open):
            self.words += data.split()

    def text(self) -> str:
        return " ".join(self.words)

    def data(self):
        return json.loads(next(text for text in self.texts["script"] if text.lstrip().startswith("{")))


RUNS = {
    "usual": [usual()],
    "long": [usual(3000, spike_at=1700)],
    "one step": [usual(1)],
    "eight GPUs": [usual(gpus=8)],
    "hostile": [hostile()],
    "empty": [Measured("")],
    "two": [usual(), usual(title="the other")],
    "none": [],
}


@pytest.fixture(scope="module")
def pages():
    return {name: make_page(runs) for name, runs in RUNS.items()}


@pytest.mark.parametrize("name", RUNS)
def test_every_element_is_closed_every_id_is_there_once_nothing_is_loaded_and_only_our_script_may_run(pages, name):
    page = Page(pages[name])
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    named = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("aria-labelledby", "for")]
    named += [attrs["href"][1:] for tag, attrs in page.tags if tag == "use"]
    named += re.findall(r"url\(#([^)]*)\)", pages[name])
    assert set(named) <= set(ids)
    assert [tag for tag, _ in page.tags].count("h1") == 1
    for tag, attrs in page.tags:
        assert tag not in ("iframe", "object", "embed", "img", "base") and not any(
            key.startswith("on") for key in attrs
        )
        for key in ("src", "href", "xlink:href", "action"):
            assert (attrs.get(key) or "#").startswith(("#", "data:")), (tag, attrs)
    style = " ".join(page.texts["style"])
    assert "@import" not in style and "url(" not in style
    if name != "hostile":
        assert "://" not in pages[name]
    (policy,) = (attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert [attrs for tag, attrs in page.tags if tag == "script"] == [{"type": "application/json", "id": "data"}, {}]
    digest = base64.b64encode(hashlib.sha256(page.texts["script"][-1].encode()).digest()).decode()
    assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy


def test_what_comes_from_outside_stays_text_and_the_raw_data_is_what_was_measured_with_null_for_nan(pages):
    page = Page(pages["hostile"])
    assert IMG in page.text() and SCRIPT in page.text()
    assert "<img" not in pages["hostile"].split("<script")[0] and SCRIPT not in pages["hostile"]
    data = page.data()
    assert data["title"] == IMG and data["command"] == SCRIPT
    assert data["steps"][1]["copy_s"] is None and data["readings"][0]["gpu0.power_w"] is None
    assert Page(pages["usual"]).data() == json.loads(json.dumps(with_schema(usual().to_dict())))
    two = Page(pages["two"]).data()
    assert two["schema"] == 1 and [one["title"] for one in two["runs"]] == ["bench photos.h5", "the other"]


def test_the_verdict_stands_on_top_with_its_change_and_evidence(pages):
    text = Page(pages["usual"]).text()
    parts = [
        "Verdict: decoding", "Decoding binds: the loop waits 35 % of its time", "Change first", "Pack the images with",
        "At most 1.50 times as fast", "takes this cause away", "Evidence", "2 workers were on a CPU",
        "Steps over time", "Other changes considered", "Use num_workers=4 : 1.20 times as fast",
    ]  # fmt: skip
    places = [text.index(part) for part in parts]
    assert places == sorted(places)


def test_a_change_that_is_not_worth_making_is_said_to_be_so():
    run = usual()
    verdict = replace(run.verdict, worth_making=False, fastload_helps=False)
    text = Page(make_page([replace(run, verdict=verdict)])).text()
    assert (
        "That is not worth making." in text and "would not take this cause away" in text and "Change first" not in text
    )
    text = Page(make_page([replace(run, verdict=replace(verdict, cures=()))])).text()
    assert "No change was found that would make a step faster." in text


def test_what_was_not_measured_is_said_with_its_reason(pages):
    text = Page(pages["empty"]).text()
    for part in (
        "No verdict", "No step of a training loop was measured", "No GPU was read", "Neither CPU nor disk was read",
        "The stages of this loader could not be measured separately", "Machine and versions were not recorded",
    ):  # fmt: skip
        assert part in text
    assert "Nothing was measured" in Page(pages["none"]).text()
    no_headspace = Page(make_page([replace(usual(), headspace_samples_per_s=None)])).text()
    assert "was not measured in this run" in no_headspace
    run = replace(usual(gpus=0), readings=({"at_s": 0.1, "gpu0.memory_bytes": 2.0**30},))
    text = Page(make_page([run])).text()
    assert "a slice of a GPU (MIG) has none" in text and "1.0 GiB" in text


def test_each_plot_has_its_figures_as_text_and_utilization_never_stands_without_what_it_means(pages):
    page = Page(pages["usual"])
    labels = [attrs["aria-label"] or "" for _, attrs in page.tags if attrs.get("class") == "plot"]
    assert len(labels) == 6
    assert all(re.search(r"\d", label) for label in labels)
    assert "process 71 0.80 cores" in page.text() and "GPU 0 utilization 70.0 %" in page.text()
    for name in ("usual", "eight GPUs"):
        text = Page(pages[name]).text()
        assert "NVML's utilization is a duty cycle" in text and "a duty cycle" in text[: text.index("Steps over time")]
    # A spike in a long run is named where it leaves the plot.
    assert re.search(r'<span class="mark centre above" style="left:5\d\.\d+%">3.00 s</span>', pages["long"])


def test_colours_come_from_the_page_and_text_is_the_pages_own(pages):
    drawings = "".join(re.findall(r"<svg.*?</svg>", pages["long"], flags=re.DOTALL))
    assert "var(--wait)" in drawings and "<text" not in drawings
    assert re.findall(r"#[0-9a-f]{3,6}", drawings) == []
    assert " -" not in "".join(re.findall(r' d="([^"]*)"', pages["usual"]))  # nothing is drawn above its panel
    style = " ".join(Page(pages["long"]).texts["style"])
    for name in set(re.findall(r"var\(--([a-z0-9]+)\)", pages["long"])):
        assert f"--{name}:" in style


def test_the_same_run_gives_the_same_page_and_a_long_one_is_thinned(pages):
    assert make_page([usual()]) == pages["usual"]

    # The raw data is as long as the run; what is drawn is not.
    def drawn(steps):
        page = make_page([only_steps(usual(steps))])
        return len("".join(re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)))

    assert drawn(20_000) < 1.5 * drawn(2_000)


def only_steps(run):
    return replace(run, readings=(), stages={})


def test_odd_runs_give_a_page_and_no_warning_and_names_that_are_not_utf8_are_written_out(tmp_path):
    write_report(hostile(), tmp_path / "report.html")
    assert r"photo\udcff.h5" in (tmp_path / "report.html").read_text(encoding="utf-8")
    steps = usual(3).steps
    none = replace(steps[0], wait_s=0, copy_s=0, transform_s=0, compute_s=0)
    run = only_steps(usual())
    strange = [
        replace(run, samples_per_s=0.0, elapsed_s=0.0),
        replace(run, steps=(none,) * 3),
        replace(run, steps=steps[:1] * 2),
        replace(run, steps=steps[::-1], headspace_samples_per_s=math.nan, num_steps=10**6),
        Measured("", stages={"reading": WorkTime()}),
        Measured("", readings=({"at_s": 0.0, "cpu_percent": 0.0}, {"cpu_percent": 3.0}, {})),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for run in strange:
            assert Page(make_page([run])).data()


def test_epochs_are_marked_in_the_plot_as_long_as_they_can_be_told_apart():
    run = replace(usual(), epochs_s=(0.0, 0.4, 0.8))
    plot = plot_steps(run)
    assert ("epoch", "an epoch begins") in plot.legend and plot.panels[0].shapes.count("V1000") == 2
    for epochs_s in ((0.0,), tuple(0.01 * number for number in range(100))):
        plot = plot_steps(replace(run, epochs_s=epochs_s))
        assert "V1000" not in plot.panels[0].shapes and "epoch" not in dict(plot.legend)


def test_a_run_of_several_loops_is_drawn_and_one_loop_that_is_all_of_it_is_not(pages):
    whole = "When each went on in a run of"
    labels = [attributes.get("aria-label") or "" for _, attributes in Page(pages["usual"]).tags]
    assert any(re.fullmatch(whole + r" 3.\d+ s: train, judged 1.\d+ s; validate 200 ms\.", label) for label in labels)
    assert whole not in pages["empty"]
    run = usual()
    assert whole not in make_page([replace(run, lanes=run.lanes[:1], run_s=run.elapsed_s)])
