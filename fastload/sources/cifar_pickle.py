"""Reads CIFAR's pickles of plain values and NumPy arrays; they can neither execute anything nor take memory at will.

A pickle is a program, here run by the standard library's unpickler, in its form in Python: that in C takes 2 GB for
nine bytes with a large index in the memo. Of its instructions only those remain that make numbers, texts, lists,
tuples, dicts and NumPy arrays. Names of functions are never looked up: what NumPy's would do is done here. Memory
stays in proportion to the file: a size read from it reserves nothing, strings of bytes are not copied, and what the
functions make is counted.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError

_TYPE = re.compile(r"[<>|=]?([biuf][1248]|[SU][0-9]{1,6})")

_SMALL_INTS = re.compile(rb"(?:K.)+", re.DOTALL)

_DAMAGES = (
    *(pickle.UnpicklingError, struct.error, EOFError, LookupError, ValueError, TypeError, AttributeError),
    *(OverflowError, MemoryError),
)


class RefusedError(Exception):
    """Raised for what a pickle must not contain; the message continues "the pickle ..."."""


def read_pickle(data: bytes, where: str) -> Any:
    """Returns the value that a pickle of protocol 0 to 5 describes; arrays in it are PickledArray.

    Texts of Python 2 remain bytes.

    Raises:
        SourceError: the pickle is damaged, or asks for more than plain values and NumPy arrays of numbers, which the
            message names.
    """
    unpickler = _ArrayUnpickler(data)
    try:
        return unpickler.load()
    except RefusedError as exc:
        raise SourceError(
            f"{where}: the pickle {exc}. Only plain values and NumPy arrays of numbers are read, nothing is executed. "
            "Fetch the file again from where the dataset is published."
        ) from exc
    except _DAMAGES as exc:
        raise SourceError(
            f"{where}: not a pickle, or a damaged one (at byte {unpickler.content.tell():,} of {len(data):,}: "
            f"{type(exc).__name__}). Fetch the file again."
        ) from exc


@dataclass
class PickledArray:
    """A NumPy array in a pickle.

    Attributes:
        shape: shape of the array.
        dtype: its dtype, with the byte order of the file.
        data: its bytes.
        offset: byte of the pickle at which `data` lies; -1 if the pickle holds it in another form.
        fortran: whether the first axis varies fastest.
    """

    shape: tuple[int, ...] = (0,)
    dtype: np.dtype[Any] = np.dtype(np.uint8)  # noqa: RUF009 - a dtype is immutable
    data: bytes | memoryview = b""
    offset: int = -1
    fortran: bool = False

    def values(self) -> NDArray[Any]:
        """Returns the array, read-only, over the bytes of the pickle."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape, order="F" if self.fortran else "C")

    def fill(self, shape: object, kind: object, data: object, fortran: object) -> PickledArray:
        """Sets what the array is, once that is checked, and returns it.

        Raises:
            RefusedError: shape, dtype and bytes do not fit together, or are not allowed.
        """
        data, offset = data if isinstance(data, _Blob) else (data, -1)
        shape = (shape,) if isinstance(shape, int) else shape
        if not isinstance(kind, _Type) or not isinstance(shape, tuple):
            raise RefusedError("holds an array without a shape or type")
        dtype = kind.dtype()
        if not isinstance(data, (bytes, memoryview)) or not all(type(n) is int and n >= 0 for n in shape):
            raise RefusedError("holds an array that is not made of bytes")
        if math.prod(shape) * dtype.itemsize != len(data) or dtype.itemsize == 0:
            raise RefusedError(f"holds an array {dtype} {shape} of {len(data)} bytes")
        self.shape, self.dtype, self.data = shape, dtype, data
        self.offset, self.fortran = offset, bool(fortran)
        return self


@dataclass
class _Type:
    """A NumPy dtype as far as the pickle has described it."""

    code: str
    order: str = "="

    def dtype(self) -> np.dtype[Any]:
        if not _TYPE.fullmatch(self.code):
            what = "Python objects, which would be unpickled" if "O" in self.code else f"type {self.code[:20]!r}"
            raise RefusedError(f"holds an array of {what}")
        return np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]  # one of < > | =


class _Blob(NamedTuple):
    """A slice of the pickle's bytes, and where it begins."""

    data: memoryview
    offset: int


@dataclass(frozen=True)
class _Name:
    """The name of a function, which is not looked up."""

    name: str


_NAMES = (
    "builtins.bytes __builtin__.bytes _codecs.encode numpy.ndarray numpy.dtype numpy.core.multiarray._reconstruct "
    "numpy.core.multiarray.scalar numpy.core.numeric._frombuffer"
).split()


class _ArrayUnpickler(pickle._Unpickler):
    """The standard unpickler with the instructions of `_steps`. Nothing that they make can be called."""

    stack: list[Any]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]

    def __init__(self, data: bytes) -> None:
        self.content, self.view = io.BytesIO(data), memoryview(data)
        self.unspent = len(data)  # bytes that `call` may still return
        super().__init__(self.content, encoding="bytes")

    def find_class(self, module: str, name: str) -> _Name:
        full = f"{_printable(module)}.{_printable(name)}"
        known = full.replace("numpy._core.", "numpy.core.")
        if known not in _NAMES:
            raise RefusedError(f"asks for {full}")
        return _Name(known)

    def load_proto(self) -> None:
        super().load_proto()  # type: ignore[misc]  # undocumented
        # Frames mean nothing here, so that their reader is passed by: that takes a third of the time.
        self.read, self.readline = self.content.read, self.content.readline

    def load_small_ints(self) -> None:
        # A list of labels is a run of these instructions, read in one go.
        found = _SMALL_INTS.match(self.view, self.content.tell() - 1)
        if found is None:
            raise EOFError
        self.stack.extend(found[0][1::2])
        self.content.seek(found.end())

    def load_reduce(self) -> None:
        args = self.stack.pop()
        if not isinstance(self.stack[-1], _Name) or not isinstance(args, tuple):
            raise RefusedError("asks to call a value")
        self.stack[-1] = self.call(self.stack[-1].name, args)

    def call(self, name: str, args: tuple[Any, ...]) -> Any:
        """Returns what a function would return for these arguments, if NumPy writes such a call."""
        match name, args:
            case "numpy.core.multiarray._reconstruct", (_Name("numpy.ndarray"), *_):
                return PickledArray()
            case "numpy.dtype", (str() | bytes() as code, *_):
                return _Type(_printable(code))
            case "numpy.core.numeric._frombuffer", (data, kind, shape, order):
                return PickledArray().fill(shape, kind, data, order == "F")
            case "numpy.core.multiarray.scalar", (kind, data):
                array = PickledArray().fill((), kind, data, False)
                self.spend(len(array.data))
                return array.values().item()
            case "_codecs.encode", (str() as text, "latin1" | "latin-1"):
                self.spend(len(text))
                return text.encode("latin1")
            case (("builtins.bytes" | "__builtin__.bytes"), ()):
                return b""
        raise RefusedError(f"asks for {name} in a way that NumPy does not write")

    def spend(self, size: int) -> None:
        # The memo can repeat a text, which is encoded each time: memory would grow with the square of the file.
        self.unspent -= size
        if self.unspent < 0:
            raise RefusedError("would make more bytes than it has")

    def load_build(self) -> None:
        state = self.stack.pop()
        match self.stack[-1], state:
            case PickledArray() as array, (_, shape, kind, fortran, data):
                array.fill(shape, kind, data, fortran)
            case _Type() as kind, (_, "<" | ">" | "|" | "=" | b"<" | b">" | b"|" | b"=" as order, None, None, None, *_):
                kind.order = _printable(order)
            case _Type(), tuple():
                raise RefusedError("holds an array of records")
            case _:
                raise RefusedError("asks to set the state of an object")

    def load_blob(self, layout: str) -> None:
        (size,) = struct.unpack(layout, self.read(struct.calcsize(layout)))
        start = self.content.tell()
        if not 0 <= size <= len(self.view) - start:
            raise EOFError
        self.content.seek(start + size)
        self.stack.append(_Blob(self.view[start : start + size], start))

    def load_decimal(self) -> None:
        line = self.readline().rstrip(b"L\n")
        self.stack.append(line == b"01" if line in (b"00", b"01") else int(line))

    def load_plain_keys(self, code: int) -> None:
        # Only keys with a cheap hash: that of nested tuples recurses as deeply as the pickle likes.
        for key in self.stack[-2:-1] if code == pickle.SETITEM[0] else self.stack[::2]:
            if not isinstance(key, (str, bytes, int)):
                raise RefusedError(f"has a {type(key).__name__} as a key")
        step: Any = pickle._Unpickler.dispatch[code]
        step(self)

    def _instantiate(self, *_: object) -> None:
        self.refuse("asks to make an object")

    def refuse(self, what: str) -> None:
        raise RefusedError(what)


_STANDARD = (
    "MARK STOP POP POP_MARK DUP NONE NEWTRUE NEWFALSE BININT BININT2 LONG1 FLOAT BINFLOAT STRING UNICODE "
    "SHORT_BINSTRING SHORT_BINBYTES SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 "
    "EMPTY_LIST LIST EMPTY_DICT APPEND APPENDS PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL "
    "STACK_GLOBAL INST"
)
_REFUSED = {
    "asks to make an object": "NEWOBJ NEWOBJ_EX OBJ",
    "asks to fetch an object": "PERSID BINPERSID",
    "asks to call an extension": "EXT1 EXT2 EXT4",
}


def _steps() -> dict[int, Callable[[Any], None]]:
    """Returns opcode -> the function that performs or refuses it."""

    def codes(names: str) -> list[int]:
        return [getattr(pickle, name)[0] for name in names.split()]

    ours, standard = _ArrayUnpickler, pickle._Unpickler.dispatch
    steps: dict[int, Any] = {}
    for code in range(256):
        steps[code] = partial(ours.refuse, what=f"has an instruction {bytes([code])!r}, not known here")
    for what, names in _REFUSED.items():
        steps |= dict.fromkeys(codes(names), partial(ours.refuse, what=what))
    steps |= {code: standard[code] for code in codes(_STANDARD)}
    steps |= {code: partial(ours.load_plain_keys, code=code) for code in codes("SETITEM SETITEMS DICT")}
    steps |= dict.fromkeys(codes("BINBYTES8 BYTEARRAY8"), partial(ours.load_blob, layout="<Q"))
    steps |= dict.fromkeys(codes("BINSTRING"), partial(ours.load_blob, layout="<i"))
    steps |= dict.fromkeys(codes("BINBYTES"), partial(ours.load_blob, layout="<I"))
    steps |= dict.fromkeys(codes("FRAME"), lambda unpickler: unpickler.read(8))  # its size says nothing that is needed
    steps |= dict.fromkeys(codes("INT LONG"), ours.load_decimal)
    steps |= zip(codes("PROTO BININT1"), (ours.load_proto, ours.load_small_ints), strict=True)
    steps |= zip(codes("REDUCE BUILD"), (ours.load_reduce, ours.load_build), strict=True)
    return steps


_ArrayUnpickler.dispatch = _steps()


def _printable(value: bytes | str) -> str:
    """Returns a text for messages, short and in ASCII."""
    text = value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")
    return text[:100].encode("ascii", "backslashreplace").decode()
