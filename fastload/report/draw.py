"""Matplotlib figures as inline SVG that takes its colours and its font from the page around it."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDE, NARROW = 820, 330
"""Width of the two drawings of each plot in CSS pixels: for screens and paper, and for a phone held upright."""

FONT_SIZE = 12

# A colour that nobody would choose stands for each of the page's: page.css says what it is in light and dark mode.
COLOURS = {
    name: f"#01fe{number:02x}"
    for number, name in enumerate(
        "ink faint grid paper wait copy transform compute slowest running blocked rate headspace "
        "line0 line1 line2 line3 line4 line5 line6 line7".split()
    )
}

_STYLE: dict[Any, Any] = {  # matplotlib types the keys as Literals
    "svg.fonttype": "none",  # text stays text: it is searched, read aloud, and shown in the page's font
    "svg.hashsalt": "fastload",  # the same figures give the same file
    "text.parse_math": False,  # a dollar sign in a name is one
    "font.family": "DejaVu Sans",
    "font.size": FONT_SIZE,
    "axes.edgecolor": COLOURS["faint"],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.labelcolor": COLOURS["faint"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlecolor": COLOURS["ink"],
    "axes.titlesize": FONT_SIZE,
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "grid.color": COLOURS["grid"],
    "grid.linewidth": 0.8,
    "text.color": COLOURS["ink"],
    "xtick.color": COLOURS["faint"],
    "ytick.color": COLOURS["faint"],
    "ytick.left": False,
    "figure.facecolor": "none",
    "figure.dpi": 72,
}

Painter = Callable[[list[Axes], int], None]
"""Draws on the axes of a figure; told how many columns there is room for."""


@dataclass(frozen=True)
class Plot:
    """One plot, drawn twice.

    Attributes:
        wide: SVG for screens and paper.
        narrow: SVG for a phone.
        label: what is to be seen, in words.
        legend: colour and name of what is drawn, in the order of the drawing.
    """

    wide: Markup
    narrow: Markup
    label: str
    legend: tuple[tuple[str, str], ...] = ()


def draw(
    name: str,
    paint: Painter,
    label: str,
    *,
    panel_heights: tuple[int, ...],
    legend: tuple[tuple[str, str], ...] = (),
    left: int = 58,
    above: int = 28,
) -> Plot:
    """Draw a plot of panels one above the other, for a wide and for a narrow place.

    Args:
        name: unique in the page; ids in the SVG begin with it.
        panel_heights: of each panel in CSS pixels, without title and tick labels.
        above: room for the title.
        left: room for the labels of the y axis, the same in all plots whose x axes show the same.
    """
    wide = _svg(f"{name}-w", paint, label, WIDE, panel_heights, (left, above))
    narrow = _svg(f"{name}-n", paint, label, NARROW, panel_heights, (min(left, 122), above))
    return Plot(wide, narrow, label, legend)


def _svg(name: str, paint: Painter, label: str, width: int, heights: tuple[int, ...], room: tuple[int, int]) -> Markup:
    (left, above), below, between = room, 30, 52
    height = above + sum(heights) + between * (len(heights) - 1) + below
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # The font of the layout lacks a letter of a name; the page's own font shows it.
        warnings.filterwarnings("ignore", message="Glyph")
        figure = Figure(figsize=(width / 72, height / 72))
        axes, top = [], height - above
        for panel in heights:
            box = (left / width, (top - panel) / height, (width - left - 14) / width, panel / height)
            axes.append(figure.add_axes(box))
            top -= panel + between
        paint(axes, (width - left) // 3)
        text = io.StringIO()
        no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=no_metadata)
    return _inline(text.getvalue(), name, label, width, height)


def _inline(svg: str, name: str, label: str, width: int, height: int) -> Markup:
    """The drawing without the XML around it, its ids unique in the page, its colours the page's."""
    body = svg[svg.index(">", svg.index("<svg")) + 1 : svg.rindex("</svg>")]
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'xlink:href="#', f'href="#{name}-', body)
    body = re.sub(r"url\(#", f"url(#{name}-", body)
    body = re.sub(r"#01fe([0-9a-f]{2})", lambda found: f"var(--{_NAMES[found[0]]})", body)
    # Matplotlib names its own font in each text; without it, the page's is inherited.
    # It writes `font: 12px 'DejaVu Sans'` or, since 3.11, font-size and font-family.
    body = re.sub(r"\bfont: ([\d.]+px) [^;\"]*", r"font-size: \1", body)
    body = re.sub(r"\bfont-family: [^;\"]*;? ?", "", body)
    body = re.sub(r"\n\s*", "\n", body)
    # A hundredth of a pixel is enough for a path; matplotlib writes millionths.
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), body)
    head = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(label)}">'
    return Markup(head + body + "</svg>")


_NAMES = {value: name for name, value in COLOURS.items()}
