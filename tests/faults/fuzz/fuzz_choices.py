"""Turns the bytes of a fuzzer into choices, with which valid files and documents are built that are wrong in places.

A field has its right value unless the bytes say otherwise, and behind the last byte everything is right: so no bytes at
all give a valid file, and a mutation of a few bytes a file that is wrong in few places, with right checksums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

_WRONG = 0xE0  # bytes from here on make a field wrong

DEEP: Any = []
for _ in range(200):
    DEEP = [DEEP]

HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63) - 1),
    *(2**64, 10**30, 10**400, 0.5, -0.0, 1e30, 1e308, -1e308, float("nan"), float("inf")),
    *("", " ", "0", "a", "-", "..", "../x.jpg", "/etc/passwd", "a\0b", "\ud800", "\udc80", "é" * 300, "nan", "1_0"),
    *("9" * 5000, "[" * 2000, "=1+1", "a" * 70000, b"\xff\x00".decode("latin-1")),
    *([], {}, [[]], [None], [0], [1, 2, 3, 4], [1e308] * 4, ["a", 1], {"a": 1}, {"": {}}, [[1, 2], [3]], DEEP),
)
"""Values that documents in JSON hold where others are expected."""


class Choices:
    """Reads choices from bytes, from first to last; see the module."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def byte(self) -> int:
        """Returns the next byte; 0 behind the last."""
        self.at += 1
        return self.data[self.at - 1] if self.at <= len(self.data) else 0

    def take(self, size: int) -> bytes:
        """Returns the next bytes, fewer at the end."""
        self.at += size
        return self.data[self.at - size : self.at]

    def rest(self) -> bytes:
        """Returns all bytes that are left."""
        return self.take(max(0, len(self.data) - self.at))

    def wrong(self) -> bool:
        """Whether the next thing is to be wrong."""
        return self.byte() >= _WRONG

    def pick(self, values: Sequence[T]) -> T:
        """Returns one of the values; the first behind the last byte."""
        return values[self.byte() % len(values)]

    def number(self, right: int, bits: int = 32) -> int:
        """Returns the right value of an unsigned field of so many bits, or a wrong one."""
        if not self.wrong():
            return right
        top = 2**bits
        near = (
            0,
            1,
            top - 1,
            top // 2,
            top // 2 - 1,
            top // 2 + 1,
            right + 1,
            max(right - 1, 0),
            right * 2,
            right * 256,
        )
        kind = self.byte() % (len(near) + 2)
        return (near[kind] if kind < len(near) else int.from_bytes(self.take(bits // 8), "little")) % top

    def raw(self, right: bytes) -> bytes:
        """Returns the right bytes, or bytes of which one, all or the end are others."""
        if not self.wrong():
            return right
        match self.byte() % 4:
            case 0:
                return self.take(self.byte())
            case 1:
                return right[: self.byte() % (len(right) + 1)]
            case 2:
                return right + self.take(self.byte())
            case _:
                at, new = self.byte() * 256 + self.byte(), self.take(1 + self.byte() % 8)
                at %= len(right) + 1
                return right[:at] + new + right[at + len(new) :]

    def document(self, value: Any) -> Any:
        """Returns a document of JSON values in which some values, keys or elements are others."""
        if self.wrong():
            return self.pick(HOSTILE)
        if isinstance(value, dict):
            made: dict[str, Any] = {}
            for key, item in value.items():
                new = self.document(item)
                match self.byte():
                    case 255:
                        continue
                    case 254:
                        made[self.pick([text for text in HOSTILE if isinstance(text, str)])] = new
                    case _:
                        made[key] = new
            return made
        if isinstance(value, list):
            items = [self.document(item) for item in value]
            match self.byte():
                case 255:
                    return items[:-1]
                case 254:
                    return items * (2 + self.byte() % 30)
                case _:
                    return items
        return value
