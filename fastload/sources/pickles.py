"""Pickles of plain values and NumPy arrays, through an unpickler that admits nothing else.

A pickle is a program that may import and call anything. Here the names by which NumPy's arrays are pickled lead to the
stand-ins below, which accept bytes of a size that fits and refuse the rest; every other name is refused and not looked
up. So not even NumPy's own constructors are reached, and arrays of Python objects are out of the question.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError

_TYPE = re.compile(r"[<>|=]?([biuf][1248]|[SU][0-9]{1,6})")


def read_pickle(data: bytes, where: str) -> Any:
    """The value that a pickle describes; its arrays are PickledArray, its texts of Python 2 bytes, as they were there.

    Raises:
        SourceError: it is damaged, or asks for anything but plain values and NumPy arrays of numbers; names that.
    """
    try:
        return _Unpickler(io.BytesIO(data), encoding="bytes").load()
    except _RefusedError as exc:
        raise SourceError(
            f"{where}: the pickle {exc}. Only plain values and NumPy arrays of numbers are read, nothing is executed. "
            "Fetch the file again from where the dataset is published."
        ) from exc
    except Exception as exc:  # whatever damaged bytes make pickle raise
        raise SourceError(
            f"{where}: not a pickle, or a damaged one ({type(exc).__name__}: {str(exc)[:100]}). Fetch the file again."
        ) from exc


class PickledArray:
    """A NumPy array of numbers or texts of fixed length, as a pickle describes it."""

    def __init__(self) -> None:
        self._values: NDArray[Any] = np.zeros(0, np.uint8)

    def values(self) -> NDArray[Any]:
        """The array, read-only."""
        return self._values

    def fill(self, shape: object, kind: object, data: object, order: Any) -> PickledArray:
        """Take over what a pickle says the array is."""
        shape = (shape,) if isinstance(shape, int) else shape
        if not isinstance(kind, _Type) or not isinstance(shape, tuple):
            raise _RefusedError("holds an array without a shape or type")
        dtype = kind.dtype()
        if not isinstance(data, (bytes, bytearray)) or not all(type(n) is int and n >= 0 for n in shape):
            raise _RefusedError("holds an array that is not made of bytes")
        if math.prod(shape) * dtype.itemsize != len(data) or dtype.itemsize == 0:
            raise _RefusedError(f"holds an array {dtype} {shape} of {len(data)} bytes")
        self._values = np.frombuffer(data, dtype).reshape(shape, order=order)
        return self

    def __setstate__(self, state: object) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise _RefusedError("asks to set the state of an object")
        _, shape, kind, fortran, data = state
        self.fill(shape, kind, data, "F" if fortran else "C")


class _RefusedError(Exception):
    """What the pickle asks for, as the rest of a sentence."""


class _Type:
    """A NumPy dtype in the making."""

    def __init__(self, code: str) -> None:
        self._code, self._order = code, "="

    def dtype(self) -> np.dtype[Any]:
        """It, if its elements are numbers or texts of fixed length."""
        if not _TYPE.fullmatch(self._code):
            what = "Python objects, which would be unpickled" if "O" in self._code else f"type {self._code[:20]!r}"
            raise _RefusedError(f"holds an array of {what}")
        return np.dtype(self._code).newbyteorder(self._order)  # type: ignore[arg-type]  # one of < > | =

    def __setstate__(self, state: object) -> None:
        parts = state if isinstance(state, tuple) and len(state) >= 5 else (0, "", None, None, None)
        order = _text(parts[1])
        if any(part is not None for part in parts[2:5]) or order not in ("<", ">", "|", "="):
            raise _RefusedError("holds an array of records")
        self._order = order


class _Name:
    """A name that a pickle may mention: what NumPy would do when it is called, done by the stand-ins."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any) -> Any:
        """An array, a type, a number or bytes."""
        if self._name == "_reconstruct" and args[:1] == (_NAMES["numpy.ndarray"],):
            return PickledArray()
        if self._name == "dtype" and args and isinstance(args[0], (str, bytes)):
            return _Type(_text(args[0]))
        if self._name == "encode" and len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", b"latin1"):
            return args[0].encode("latin1")
        if self._name == "bytes" and not args:
            return b""
        if self._name == "scalar" and len(args) == 2:
            return PickledArray().fill((), *args, "C").values().item()
        if self._name == "_frombuffer" and len(args) == 4:
            return PickledArray().fill(args[2], args[1], args[0], "F" if args[3] == "F" else "C")
        raise _RefusedError(f"asks for {self._name} in a way that NumPy does not write")

    def __setstate__(self, state: object) -> NoReturn:
        raise _RefusedError("asks to set the state of an object")


_NAMES = {
    name: _Name(name.rpartition(".")[2])
    for name in (
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in ("_reconstruct", "scalar")),
        *(f"numpy.{core}.numeric._frombuffer" for core in ("core", "_core")),
        "numpy.ndarray",
        "numpy.dtype",
        "_codecs.encode",
        "builtins.bytes",
        "__builtin__.bytes",  # Python 2's name of it
    )
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _NAMES:
            raise _RefusedError(f"asks for {_text(module)}.{_text(name)}")
        return _NAMES[f"{module}.{name}"]

    def persistent_load(self, pid: object) -> NoReturn:
        raise _RefusedError("asks to fetch an object")


def _text(value: object) -> str:
    """A short text in ASCII."""
    text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
    return text[:100].encode("ascii", "backslashreplace").decode()
