"""NumPy's arrays and dtypes as a pickle describes them. The names that a pickle mentions are never looked up."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTES = ("builtins.bytes", "__builtin__.bytes")
_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")
_SCALAR = ("numpy.core.multiarray.scalar", "numpy._core.multiarray.scalar")
_FROM_BUFFER = ("numpy.core.numeric._frombuffer", "numpy._core.numeric._frombuffer")
KNOWN = {*_BYTES, *_RECONSTRUCT, *_SCALAR, *_FROM_BUFFER, "numpy.ndarray", "numpy.dtype", "_codecs.encode"}
"""Names that a pickle may mention. `imitate` does what they would do; they are not looked up either."""

_TYPE = re.compile(r"[<>|=]?([biuf][1248]|[SU][0-9]{1,6})")


class RefusedError(Exception):
    """Raised for what a pickle must not contain; the message continues "the pickle ..."."""


@dataclass(frozen=True)
class PickledName:
    """A name that a pickle mentions, one of KNOWN."""

    name: str


@dataclass
class PickledType:
    """A NumPy dtype as far as the pickle has described it."""

    code: str
    order: str = "="

    def dtype(self) -> np.dtype[Any]:
        """Returns the dtype.

        Raises:
            RefusedError: its elements are neither numbers nor texts of fixed length.
        """
        if not _TYPE.fullmatch(self.code):
            what = "Python objects, which would be unpickled" if "O" in self.code else f"type {self.code[:20]!r}"
            raise RefusedError(f"holds an array of {what}")
        return np.dtype(self.code).newbyteorder(self.order)  # type: ignore[arg-type]  # one of < > | =


@dataclass(frozen=True)
class Blob:
    """A slice of the pickle's bytes, and where it begins."""

    data: memoryview
    offset: int


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

    def fill(self, shape: object, kind: object, data: object, fortran: object) -> None:
        """Sets what the array is, once that is checked.

        Raises:
            RefusedError: shape, dtype and bytes do not fit together, or are not allowed.
        """
        data, offset = (data.data, data.offset) if isinstance(data, Blob) else (data, -1)
        if isinstance(shape, int):
            shape = (shape,)
        if not isinstance(kind, PickledType) or not isinstance(shape, tuple):
            raise RefusedError("holds an array without a shape or type")
        dtype = kind.dtype()
        if not isinstance(data, (bytes, memoryview)) or not all(type(n) is int and n >= 0 for n in shape):
            raise RefusedError("holds an array that is not made of bytes")
        if math.prod(shape) * dtype.itemsize != len(data) or dtype.itemsize == 0:
            raise RefusedError(f"holds an array {dtype} {shape} of {len(data)} bytes")
        self.shape, self.dtype, self.data = shape, dtype, data
        self.offset, self.fortran = offset, bool(fortran)


def printable(value: bytes | str) -> str:
    """Returns a text for messages, short and in ASCII."""
    text = value if isinstance(value, str) else value.decode("utf-8", "backslashreplace")
    return text[:100].encode("ascii", "backslashreplace").decode()


def imitate(name: str, args: tuple[Any, ...]) -> Any:
    """Returns what calling one of the KNOWN names with these arguments would return.

    Raises:
        RefusedError: NumPy does not write such a call.
    """
    if name in _RECONSTRUCT and args[:1] == (PickledName("numpy.ndarray"),):
        return PickledArray()
    if name == "numpy.dtype" and args and isinstance(args[0], (str, bytes)):
        return PickledType(printable(args[0]))
    if name == "_codecs.encode" and len(args) == 2 and isinstance(args[0], str) and args[1] in ("latin1", "latin-1"):
        return args[0].encode("latin1")
    if name in _BYTES and not args:
        return b""
    array = PickledArray()
    if name in _SCALAR and len(args) == 2:
        array.fill((), *args, False)
        return array.values().item()
    if name in _FROM_BUFFER and len(args) == 4:
        array.fill(args[2], args[1], args[0], args[3] == "F")
        return array
    raise RefusedError(f"asks for {name} in a way that NumPy does not write")
