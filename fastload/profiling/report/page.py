"""Fills the template `page.html`, which escapes all strings that come from outside."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from fastload.profiling.report.sections import key_figures, sections, shares
from fastload.system.text import number_text, seconds_text, share_text
from fastload.timing.results import Measured, Table, with_schema

LONG = 110
"""Number of characters from which a sentence is set in a smaller font."""


def make_page(runs: Sequence[Measured]) -> str:
    """Returns the HTML of a report: one run after another, and a table of all at the top if there are several."""
    css, script, template = (
        resources.files("fastload.profiling.report").joinpath(name).read_text(encoding="utf-8")
        for name in ("page.css", "page.js", "page.html")
    )
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "share": share_text, "number": number_text, "seconds": seconds_text, "numeric": _is_number, "code": _with_code,
        "capital": _capital,
    }  # fmt: skip
    data = with_schema(runs[0].to_dict() if len(runs) == 1 else {"runs": [run.to_dict() for run in runs]})
    return environment.from_string(template).render(
        title=" · ".join(run.title for run in runs[:3]) or "nothing measured",
        long=LONG,
        css=Markup(css),
        script=Markup(script),
        # The page's policy lets only this script run, whatever a string in the page contains.
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        runs=[
            {
                "prefix": "" if len(runs) == 1 else f"run{number}-",  # makes ids unique in the page
                "measured": run,
                "figures": key_figures(run),
                "shares": shares(run) if run.steps else {},
                "sections": sections(run),
            }
            for number, run in enumerate(runs, 1)
        ],
        overview=_overview(runs) if len(runs) > 1 else None,
        data=Markup(_json(data)),
    )


def _overview(runs: Sequence[Measured]) -> Table:
    """Returns the table that compares several runs."""
    rows = []
    for run in runs:
        share = run.verdict.stall_share if run.verdict else shares(run)["wait"] if run.steps else None
        waits = "no steps" if share is None else share_text(share)
        headspace = number_text(run.headspace_samples_per_s) if run.headspace_samples_per_s else "not measured"
        cause = run.verdict.cause if run.verdict else "no verdict"
        rows.append((run.title, number_text(run.samples_per_s), waits, headspace, cause))
    return Table("Side by side", ("Run", "samples/s", "waiting for data", "headspace", "what binds"), tuple(rows))


def _json(data: Any) -> str:
    """Returns JSON that is safe inside a script element."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"), default=str)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _is_number(text: str) -> bool:
    """Whether a table cell is a number, to be right-aligned."""
    return text[:1].isdigit() or (text[:1] in "-−" and text[1:2].isdigit())


def _capital(text: str) -> str:
    """Returns the text with a capital, unless it begins with a name such as `num_workers`."""
    return text[:1].upper() + text[1:] if text.split(" ")[0].isalpha() else text


def _with_code(text: str) -> Markup:
    """Returns the text escaped, with the parts between backquotes as code."""
    escaped = str(Markup.escape(text))
    paired = text.count("`") % 2 == 0
    return Markup(re.sub("`([^`]*)`", r"<code>\1</code>", escaped) if paired else escaped)
