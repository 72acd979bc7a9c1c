"""Numbers as people read them: three digits that count, and a unit."""

from __future__ import annotations

import math


def seconds_text(seconds: float) -> str:
    """`0 s`, `830 µs`, `12.3 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
    if not math.isfinite(seconds):
        return "not known"
    if seconds == 0:
        return "0 s"
    if seconds >= 60:
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours:,} h {minutes} min" if hours else f"{minutes} min {rest} s"
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 0.9995 or unit == "µs":
            return f"{number_text(seconds * factor)} {unit}"
    raise AssertionError


def number_text(value: float) -> str:
    """`12,345`, `123`, `12.3`, `1.23`, `0`."""
    if not math.isfinite(value):
        return "not known"
    size = abs(value)
    digits = 0 if size >= 99.95 or size == 0 else 1 if size >= 9.995 else 2
    return f"{value:,.{digits}f}"


def share_text(share: float) -> str:
    """`62 %`, `0.4 %`."""
    if not math.isfinite(share):
        return "not known"
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.5 or percent == 0 else f"{percent:.1f} %"


def bytes_text(count: float) -> str:
    """`812 bytes`, `1.5 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{number_text(count)} {unit}"
        count /= 1024
    return f"{number_text(count)} TiB"
