"""Bytes, sizes and counts as text for people."""

from __future__ import annotations


def text_of(value: bytes | str) -> str:
    """Returns bytes as text; what is not UTF-8, and lone surrogates of a text, as escapes such as `\\xff`."""
    if isinstance(value, str):
        value = value.encode("utf-8", errors="backslashreplace")
    return value.decode("utf-8", errors="backslashreplace")


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
