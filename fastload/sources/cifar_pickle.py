"""Reads CIFAR's pickles of plain values and NumPy arrays; they can neither execute anything nor take memory at will.

A pickle is a program, here run by the standard library's unpickler, in its form in Python: that in C takes 2 GB for
nine bytes with a large index in the memo. Of its instructions only those remain that make numbers, texts, lists,
tuples, dicts and NumPy arrays. Names of functions are never looked up: what NumPy's would do is done here. Memory
stays in proportion to the file: a size read from it reserves nothing, and what the functions make is counted.
"""

from __future__ import annotations

import io
import math
import pickle
import re
import struct
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError

_TYPE = re.compile(r"[<>|=]?([biuf][1248]|[SU][0-9]{1,6})")

_DAMAGES = (
    *(pickle.UnpicklingError, struct.error, EOFError, LookupError, ValueError, TypeError, AttributeError),
    *(OverflowError, MemoryError),
)


class RefusedError(Exception):
    """Raised for what a pickle must not contain; the message continues "the pickle ..."."""


def read_pickle(data: bytes, where: str) -> Any:
    """Returns the value that a pickle of protocol 0 to 5 describes, with NumPy arrays in it.

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


class _Name(str):
    """The name of a function, which is not looked up."""


_NAMES = (
    "builtins.bytes __builtin__.bytes _codecs.encode numpy.ndarray numpy.dtype numpy.core.multiarray._reconstruct "
    "numpy.core.multiarray.scalar numpy.core.numeric._frombuffer"
).split()


class _ArrayUnpickler(pickle._Unpickler):
    """The standard unpickler with the instructions of `_steps`. Nothing that they make can be called."""

    stack: list[Any]

    def __init__(self, data: bytes) -> None:
        self.content = io.BytesIO(data)
        self.unspent = 2 * len(data)  # bytes that may still be copied: those of an array may first be encoded
        super().__init__(self.content, encoding="bytes")

    def find_class(self, module: str, name: str) -> _Name:
        full = f"{_printable(module)}.{_printable(name)}"
        known = full.replace("numpy._core.", "numpy.core.")
        if known not in _NAMES:
            raise RefusedError(f"asks for {full}")
        return _Name(known)

    def load_reduce(self) -> None:
        """Puts on the stack what a function would return for its arguments, if NumPy writes such a call."""
        args, name = self.stack.pop(), self.stack[-1]
        if not isinstance(name, _Name) or not isinstance(args, tuple):
            raise RefusedError("asks to call a value")
        match str(name), args:
            case "numpy.core.multiarray._reconstruct", (_Name("numpy.ndarray"), *_):
                made: Any = np.empty(0, np.uint8)
            case "numpy.dtype", (str() | bytes() as code, *_):
                code = _printable(code)
                if not _TYPE.fullmatch(code):
                    what = "Python objects, which would be unpickled" if "O" in code else f"type {code[:20]!r}"
                    raise RefusedError(f"holds an array of {what}")
                made = np.dtype(code, copy=True)  # a copy, as `load_build` changes it
            case "numpy.core.numeric._frombuffer", (data, kind, shape, order):
                made = self.fill(np.empty(0), shape, kind, data, order == "F")
            case "numpy.core.multiarray.scalar", (kind, data):
                made = self.fill(np.empty(0), (), kind, data).item()
            case "_codecs.encode", (str() as text, "latin1" | "latin-1"):
                self.spend(len(text))
                made = text.encode("latin1")
            case (("builtins.bytes" | "__builtin__.bytes"), ()):
                made = b""
            case _:
                raise RefusedError(f"asks for {name} in a way that NumPy does not write")
        self.stack[-1] = made

    def fill(self, array: Any, shape: object, kind: object, data: object, fortran: bool = False) -> NDArray[Any]:
        """Makes an array one of this shape, type and bytes, once these are checked, and returns it."""
        shape = (shape,) if isinstance(shape, int) else shape
        if not isinstance(kind, np.dtype) or not isinstance(shape, tuple):
            raise RefusedError("holds an array without a shape or type")
        if not isinstance(data, bytes) or not all(type(n) is int and n >= 0 for n in shape):
            raise RefusedError("holds an array that is not made of bytes")
        if math.prod(shape) * kind.itemsize != len(data) or kind.itemsize == 0:
            raise RefusedError(f"holds an array {kind} {shape} of {len(data)} bytes")
        self.spend(len(data))
        array.__setstate__((1, shape, kind, fortran, data))
        array.flags.writeable = False
        filled: NDArray[Any] = array
        return filled

    def spend(self, size: int) -> None:
        # The memo can repeat a text or bytes, copied each time: memory would grow with the square of the file.
        self.unspent -= size
        if self.unspent < 0:
            raise RefusedError("would make more bytes than it has")

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        match made, state:
            case np.ndarray(), (_, shape, of, fortran, data):
                self.fill(made, shape, of, data, bool(fortran))
            case np.dtype(), (_, str() | bytes() as order, None, None, None, *_) if _printable(order) in tuple("<>|="):
                kind: Any = made
                kind.__setstate__((3, _printable(order), None, None, None, kind.itemsize, kind.alignment, 0))
            case np.dtype(), tuple():
                raise RefusedError("holds an array of records")
            case _:
                raise RefusedError("asks to set the state of an object")

    def load_plain_keys(self, code: int) -> None:
        # Only keys with a cheap hash: that of nested tuples recurses as deeply as the pickle likes.
        for key in self.stack[-2:-1] if code == pickle.SETITEM[0] else self.stack[::2]:
            if not isinstance(key, (str, bytes, int)):
                raise RefusedError(f"has a {type(key).__name__} as a key")
        step: Any = pickle._Unpickler.dispatch[code]
        step(self)

    def _instantiate(self, *_: object) -> None:
        raise RefusedError("asks to make an object")


_STANDARD = (
    "PROTO MARK STOP POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 FLOAT BINFLOAT "
    "STRING BINSTRING UNICODE SHORT_BINSTRING SHORT_BINBYTES BINBYTES BINBYTES8 SHORT_BINUNICODE BINUNICODE "
    "BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST EMPTY_DICT APPEND APPENDS PUT BINPUT "
    "LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET GLOBAL STACK_GLOBAL INST"
)
_REFUSED = (
    dict.fromkeys(pickle.NEWOBJ + pickle.NEWOBJ_EX + pickle.OBJ, "asks to make an object")
    | dict.fromkeys(pickle.PERSID + pickle.BINPERSID, "asks to fetch an object")
    | dict.fromkeys(pickle.EXT1 + pickle.EXT2 + pickle.EXT4, "asks to call an extension")
)


class _Steps(dict[int, Any]):
    """Opcode -> the method that performs it; all other opcodes are refused."""

    def __missing__(self, code: int) -> None:
        raise RefusedError(_REFUSED.get(code, f"has an instruction {bytes([code])!r}, not known here"))


_OURS, _THEIRS = _ArrayUnpickler, dict[int, Any](pickle._Unpickler.dispatch)
_ArrayUnpickler.dispatch = _Steps(
    {code: _THEIRS[code] for code in (getattr(pickle, name)[0] for name in _STANDARD.split())}
    | {code: partial(_OURS.load_plain_keys, code=code) for code in pickle.SETITEM + pickle.SETITEMS + pickle.DICT}
    | {
        pickle.BYTEARRAY8[0]: _THEIRS[pickle.BINBYTES8[0]],  # the standard's own reserves a size that it reads
        pickle.FRAME[0]: lambda unpickler: unpickler.read(8),  # its size says nothing that is needed
        pickle.REDUCE[0]: _OURS.load_reduce,
        pickle.BUILD[0]: _OURS.load_build,
    }
)


def _printable(value: bytes | str) -> str:
    """Returns a text for messages, short and in ASCII."""
    text = value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")
    return text[:100].encode("ascii", "backslashreplace").decode()
