"""Reads CIFAR's pickles of plain values and NumPy arrays without unpickling, so that they cannot execute anything.

A pickle is a program. This interpreter knows only the instructions that build numbers, texts, lists, tuples, dicts and
NumPy arrays. Anything else is named in an error and never looked up: no import, attribute or call is possible, and
memory stays in proportion to the file. The instructions are documented in the standard library's pickletools. The
standard unpickler, with a find_class that admits as little, is as fast; but nine bytes can make it take 2 GB of memory
(a large index in the memo), and a key of deeply nested tuples ends the process.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

from fastload.errors import SourceError
from fastload.sources.pickled_arrays import (
    KNOWN,
    Blob,
    PickledArray,
    PickledName,
    PickledType,
    RefusedError,
    imitate,
    printable,
)

__all__ = ["PickledArray", "read_pickle"]

_SMALL_INTS = re.compile(rb"(?:K.)+", re.DOTALL)
_BLOB_BYTES = 256
_OBJECTS = {0x81: "make an object", 0x92: "make an object", 0x6F: "make an object"}
_OBJECTS |= {0x50: "fetch an object", 0x51: "fetch an object"}
_OBJECTS |= {0x82: "call an extension", 0x83: "call an extension", 0x84: "call an extension"}


def read_pickle(data: bytes, where: str) -> Any:
    """Returns the value that a pickle of protocol 0 to 5 describes; arrays in it are PickledArray.

    Texts of Python 2 remain bytes.

    Raises:
        SourceError: the pickle is damaged, or asks for more than plain values and NumPy arrays of numbers, which the
            message names.
    """
    machine = _Machine(data)
    try:
        return machine.run()
    except RefusedError as exc:
        raise SourceError(
            f"{where}: the pickle {exc}. Only plain values and NumPy arrays of numbers are read, nothing is executed. "
            "Fetch the file again from where the dataset is published."
        ) from exc
    except (LookupError, ValueError, TypeError, AttributeError, struct.error, OverflowError, MemoryError) as exc:
        raise SourceError(
            f"{where}: not a pickle, or a damaged one (at byte {machine.at:,} of {len(data):,}: "
            f"{type(exc).__name__}). Fetch the file again."
        ) from exc


class _Machine:
    """The interpreter's state: position, stack, marks and memo, as pickletools describes them."""

    def __init__(self, data: bytes) -> None:
        self.data, self.view = data, memoryview(data)
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        data, steps = self.data, _STEPS
        while (code := data[self.at]) != 0x2E:  # STOP
            self.at += 1
            step = steps.get(code)
            if step is None:
                raise RefusedError(_asked_for(self, code))
            step(self)
        return self.stack.pop()

    def take(self, size: int) -> bytes:
        """Returns the next `size` bytes."""
        start = self.at
        if size < 0 or start + size > len(self.data):
            raise ValueError("beyond the end")
        self.at += size
        return self.data[start : self.at]

    def number(self, layout: str) -> Any:
        """Returns the next number, stored in a layout of `struct`."""
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> bytes:
        """Returns the bytes up to the next line feed."""
        start, end = self.at, self.data.index(b"\n", self.at)
        self.at = end + 1
        return self.data[start:end]

    def raw(self, size: int) -> bytes | Blob:
        """Returns the next `size` bytes; many are not copied."""
        if size < _BLOB_BYTES:
            return self.take(size)
        start = self.at
        if start + size > len(self.data):
            raise ValueError("beyond the end")
        self.at += size
        return Blob(self.view[start : self.at], start)

    def since_mark(self) -> list[Any]:
        """Pops and returns the values pushed since the last mark."""
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def last(self, count: int) -> tuple[Any, ...]:
        """Pops and returns the last `count` values."""
        items = tuple(self.stack[len(self.stack) - count :])
        if len(items) != count or (self.marks and self.marks[-1] > len(self.stack) - count):
            raise IndexError("the stack is too short")
        del self.stack[len(self.stack) - count :]
        return items


def _asked_for(machine: _Machine, code: int) -> str:
    if code == 0x69:  # INST
        return f"asks for {printable(machine.line())}.{printable(machine.line())}"
    return f"asks to {_OBJECTS[code]}" if code in _OBJECTS else f"has an instruction {bytes([code])!r}, not known here"


def _name(module: bytes | str, name: bytes | str) -> PickledName:
    full = f"{printable(module)}.{printable(name)}"
    if full not in KNOWN:
        raise RefusedError(f"asks for {full}")
    return PickledName(full)


def _small_ints(machine: _Machine) -> None:
    # A list of labels is a run of these instructions, read in one go.
    found = _SMALL_INTS.match(machine.data, machine.at - 1)
    if found is None:
        raise ValueError("beyond the end")
    machine.at = found.end()
    machine.stack.extend(found.group()[1::2])


def _short_string(machine: _Machine) -> None:
    # A list of file names is a run of these instructions, each put into the memo: read in one go.
    data, stack, memo, at = machine.data, machine.stack, machine.memo, machine.at - 1
    while data[at] == 0x55:
        start = at + 2
        at = start + data[at + 1]
        stack.append(data[start:at])
        if data[at] == 0x72:
            memo[int.from_bytes(data[at + 1 : at + 5], "little")] = stack[-1]
            at += 5
        elif data[at] == 0x71:
            memo[data[at + 1]] = stack[-1]
            at += 2
    machine.at = at


def _short_put(machine: _Machine) -> None:
    machine.memo[machine.data[machine.at]] = machine.stack[-1]
    machine.at += 1


def _long_put(machine: _Machine) -> None:
    at, machine.at = machine.at, machine.at + 4
    machine.memo[int.from_bytes(machine.data[at : at + 4], "little")] = machine.stack[-1]


def _integer(machine: _Machine) -> None:
    line = machine.line()
    machine.stack.append({b"00": False, b"01": True}.get(line) if line in (b"00", b"01") else int(line))


def _string(machine: _Machine) -> None:
    line = machine.line()
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise ValueError("a text without quotes")
    machine.stack.append(codecs.escape_decode(line[1:-1])[0])


def _global(machine: _Machine) -> None:
    module = machine.line()
    machine.stack.append(_name(module, machine.line()))


def _stack_global(machine: _Machine) -> None:
    module, name = machine.last(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a global without a name")
    machine.stack.append(_name(module, name))


def _reduce(machine: _Machine) -> None:
    target, args = machine.last(2)
    if not isinstance(target, PickledName) or not isinstance(args, tuple):
        raise RefusedError("asks to call a value")
    machine.stack.append(imitate(target.name, args))


def _build(machine: _Machine) -> None:
    (state,) = machine.last(1)
    target = machine.stack[-1]
    if isinstance(target, PickledType) and isinstance(state, tuple) and len(state) >= 5:
        order = printable(state[1])
        if any(part is not None for part in state[2:5]) or order not in ("<", ">", "|", "="):
            raise RefusedError("holds an array of records")
        target.order = order
    elif isinstance(target, PickledArray) and isinstance(state, tuple) and len(state) == 5:
        target.fill(state[1], state[2], state[4], state[3])
    else:
        raise RefusedError("asks to set the state of an object")


def _append(machine: _Machine, items: Sequence[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, list):
        raise RefusedError("asks to append to what is no list")
    target.extend(items)


def _set_items(machine: _Machine, items: Sequence[Any]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, dict):
        raise RefusedError("asks to set items of what is no dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # Only keys with a cheap hash: that of nested tuples recurses as deeply as the pickle likes.
        if not isinstance(key, (str, bytes, int)):
            raise RefusedError(f"has a {type(key).__name__} as a key")
        target[key] = value


def _pop(machine: _Machine) -> None:
    if machine.marks and machine.marks[-1] == len(machine.stack):
        machine.marks.pop()
    else:
        machine.stack.pop()


def _pop_mark(machine: _Machine) -> None:
    machine.since_mark()


def _dict(machine: _Machine) -> None:
    items = machine.since_mark()
    machine.stack.append({})
    _set_items(machine, items)


def _put(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


def _long(machine: _Machine, size: int) -> None:
    if size > _BLOB_BYTES:
        raise ValueError("a number beyond all bounds")
    machine.stack.append(int.from_bytes(machine.take(size), "little", signed=True))


def _pushes(value: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value(machine))


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_STEPS: dict[int, Callable[[_Machine], None]] = {
    code[0]: step
    for code, step in {
        b"K": _small_ints,
        b"U": _short_string,
        b"q": _short_put,
        b"r": _long_put,
        b"\x94": lambda m: _put(m, len(m.memo)),
        b"p": lambda m: _put(m, int(m.line())),
        b"h": _pushes(lambda m: m.memo[m.number("B")]),
        b"j": _pushes(lambda m: m.memo[m.number("<I")]),
        b"g": _pushes(lambda m: m.memo[int(m.line())]),
        b"\x80": lambda m: m.take(1),  # PROTO
        b"\x95": lambda m: m.take(8),  # FRAME: its size says nothing that is needed
        b"(": lambda m: m.marks.append(len(m.stack)),
        b"}": _pushes(lambda _: {}),
        b"]": _pushes(lambda _: []),
        b")": _pushes(lambda _: ()),
        b"d": _dict,
        b"l": _pushes(lambda m: m.since_mark()),
        b"t": _pushes(lambda m: tuple(m.since_mark())),
        b"\x85": _pushes(lambda m: m.last(1)),
        b"\x86": _pushes(lambda m: m.last(2)),
        b"\x87": _pushes(lambda m: m.last(3)),
        b"a": lambda m: _append(m, m.last(1)),
        b"e": lambda m: _append(m, m.since_mark()),
        b"s": lambda m: _set_items(m, m.last(2)),
        b"u": lambda m: _set_items(m, m.since_mark()),
        b"0": _pop,
        b"1": _pop_mark,
        b"2": _pushes(lambda m: m.stack[-1]),
        b"N": _pushes(lambda _: None),
        b"\x88": _pushes(lambda _: True),
        b"\x89": _pushes(lambda _: False),
        b"I": _integer,
        b"J": _pushes(lambda m: m.number("<i")),
        b"M": _pushes(lambda m: m.number("<H")),
        b"L": _pushes(lambda m: int(m.line().rstrip(b"L"))),
        b"\x8a": lambda m: _long(m, m.number("B")),
        b"\x8b": lambda m: _long(m, m.number("<i")),
        b"F": _pushes(lambda m: float(m.line())),
        b"G": _pushes(lambda m: m.number(">d")),
        b"S": _string,
        b"T": _pushes(lambda m: m.raw(m.number("<i"))),
        b"C": _pushes(lambda m: m.raw(m.number("B"))),
        b"B": _pushes(lambda m: m.raw(m.number("<I"))),
        b"\x8e": _pushes(lambda m: m.raw(m.number("<Q"))),
        b"\x96": _pushes(lambda m: m.raw(m.number("<Q"))),
        b"V": _pushes(lambda m: m.line().decode("raw-unicode-escape")),
        b"\x8c": _pushes(lambda m: _utf8(m.take(m.number("B")))),
        b"X": _pushes(lambda m: _utf8(m.take(m.number("<I")))),
        b"\x8d": _pushes(lambda m: _utf8(m.take(m.number("<Q")))),
        b"c": _global,
        b"\x93": _stack_global,
        b"R": _reduce,
        b"b": _build,
    }.items()
}
"""Opcode -> the function that performs it."""
