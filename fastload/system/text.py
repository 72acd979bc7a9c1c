"""Bytes, sizes, times, counts and objects as text for people; values out of JSON, with texts that UTF-8 can hold."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()

# dd's units: K, M, G and KiB, MiB, GiB count in 1024, KB, MB, GB in 1000.
_UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", 1)
    for suffix, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def text_of(value: bytes | str) -> str:
    """Returns bytes as text; bytes that are not UTF-8, and lone surrogates of a text, as escapes such as `\\xff`."""
    if isinstance(value, str):
        value = value.encode("utf-8", errors="backslashreplace")
    return value.decode("utf-8", errors="backslashreplace")


def read_json(data: bytes | str) -> Any:
    """Returns the value that JSON says. Lone surrogates, which no file could hold, become escapes as in `text_of`.

    Raises:
        ValueError: it is not JSON, or nested too deeply.
    """
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data))
    try:
        value = json.loads(text)
        return _writable(value) if _SURROGATE.search(text) else value
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _writable(value: Any) -> Any:
    if isinstance(value, str):
        return text_of(value)
    if isinstance(value, list):
        return [_writable(item) for item in value]
    return {text_of(name): _writable(item) for name, item in value.items()} if isinstance(value, dict) else value


def walk_json(text: str) -> Iterator[tuple[str, int, Any]]:
    """Yields (name, number, element) of the lists in a JSON object, and first (name, -1, None) for each name.

    ValueError names the malformed part.
    """

    def skip(at: int, wanted: str) -> tuple[str, int]:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing at all too
        if at >= len(text) or text[at] not in wanted:
            raise ValueError(f"it is cut short at character {at}" if at >= len(text) else f"damaged at character {at}")
        return text[at], at + 1

    _, at = skip(0, "{")
    mark, at = skip(at, '"}')
    while mark != "}":
        name, at = _DECODER.raw_decode(text, at - 1)
        yield name, -1, None
        _, at = skip(at, ":")
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if text[at : at + 1] == "[":
            number, mark = 0, ","
            at = _SPACE.match(text, at + 1).end()  # type: ignore[union-attr]
            if text[at : at + 1] == "]":
                mark, at = "]", at + 1
            while mark == ",":
                at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
                item, at = _DECODER.raw_decode(text, at)
                yield name, number, item
                number += 1
                mark, at = skip(at, ",]")
        else:
            _, at = _DECODER.raw_decode(text, at)
        mark, at = skip(at, ",}")
        if mark == ",":
            _, at = skip(at, '"')
    if text[at:].strip():
        raise ValueError(f"there is more behind its end at character {at}")


def bytes_of(text: str) -> int | None:
    """Returns the bytes that `8MiB`, `8M`, `1.5 TB` or `8388608` says; None where it is none of these."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    return int(float(found[1]) * _UNITS[found[2]]) if found and found[2] in _UNITS else None


def format_bytes(count: float) -> str:
    """Returns a size as text: `900 B`, `8.0 MiB`, `23.6 GiB`."""
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1023.95:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def counted(count: int, noun: str) -> str:
    """Returns `1 row`, `2,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def first_few(names: Iterable[str], count: int = 5) -> str:
    """Returns the first names as text for a message, and how many more there are."""
    every = list(names)
    shown = ", ".join(every[:count])
    return f"{shown} and {len(every) - count} more" if len(every) > count else shown


def seconds_text(seconds: float) -> str:
    """Returns a time: `0 s`, `830 µs`, `12.3 ms`, `4.2 s`, `3 min 20 s`, `2 h 5 min`."""
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
    """Returns a number: `12,345`, `123`, `12.3`, `1.23`, `0`."""
    if not math.isfinite(value):
        return "not known"
    size = abs(value)
    digits = 0 if size >= 99.95 or size == 0 else 1 if size >= 9.995 else 2
    return f"{value:,.{digits}f}"


def share_text(share: float) -> str:
    """Returns a share of 1 in per cent: `62 %`, `0.4 %`."""
    if not math.isfinite(share):
        return "not known"
    percent = 100 * share
    return f"{percent:.0f} %" if percent >= 9.5 or percent == 0 else f"{percent:.1f} %"


def object_text(name: str, what: Sequence[str], how: Sequence[str]) -> str:
    """Returns an object's `repr` in two lines: its content, and below its options."""
    return f"{name}({', '.join(what)})\n  {', '.join(how)}"


def object_html(name: str, what: Sequence[str], how: Sequence[str]) -> str:
    """Returns the same as a small table for notebooks."""
    cells = "".join(
        f"<tr><th style='text-align: left'>{head}</th>{''.join(f'<td>{html.escape(part)}</td>' for part in parts)}</tr>"
        for head, parts in ((name, what), ("how", how))
    )
    return f"<table>{cells}</table>"
