"""Bytes, sizes and counts as text for people; values out of JSON, with texts that UTF-8 can hold."""

from __future__ import annotations

import json
import re
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def text_of(value: bytes | str) -> str:
    """Returns bytes as text; what is not UTF-8, and lone surrogates of a text, as escapes such as `\\xff`."""
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
