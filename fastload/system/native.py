"""The compiled loops of native.c, where they were built: rows copied, images made, values permuted, numbers drawn.

Optional: `library` is None where the package was installed without a C compiler, or FASTLOAD_NATIVE=0 is set, and every
caller uses NumPy, simplejpeg and torch instead then. A checkout has it after `python tools/build_native.py`. No
torch here.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import logging
import multiprocessing
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.system.advice import advice

_VERSION = 9  # of native.c's functions
_PATH = Path(__file__).with_name("libfastload.so")
_KINDS = {np.dtype(np.uint8): 0, np.dtype(np.float32): 1, np.dtype(np.uint16): 2}

STREAMED_BYTES = 1 << 22
"""Batches of so many bytes are written past the CPU's cache, which they would push themselves out of."""

HELD_BYTES = 1 << 21
"""Bytes in memory up to which hashing, of some 100 us a MiB, keeps the GIL."""

HELD_VALUES = 1 << 14
"""Values up to which a permutation, of some 20 ns each, keeps the GIL: to get it back could take 5 ms."""

HELD_SAMPLES = 1 << 11
"""Samples up to which drawing a placement, of some 100 ns each, keeps the GIL."""

SHORT_BYTES = 240
"""Rows up to which `digests` does not hash."""

_MOST_COPIED = 4  # pieces of a row: images and masks

_log = logging.getLogger("fastload")


@functools.cache
def library() -> Any:
    """Returns the compiled functions, which release the GIL; None where they were not built, or are not wanted."""
    if _is_unwanted() or not _PATH.exists():
        return None
    try:
        found = ctypes.CDLL(str(_PATH))
        version = found.fastload_native_version()
    except (OSError, AttributeError) as exc:
        _log.warning("%s cannot be used (%s): fastload is slower without it. Install fastload again.", _PATH, exc)
        return None
    if version != _VERSION:
        _log.warning("%s is of another release: fastload is slower without it. Install fastload again.", _PATH)
        return None
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    found.fastload_gather.argtypes = (pointer, number, number, pointer, small)
    found.fastload_gather.restype = None
    found.fastload_read.argtypes, found.fastload_read.restype = (small, *[pointer] * 2, number, *[pointer] * 2), None
    numbers = (number, number, number, small)
    # Once as a function that keeps the GIL, and once as one that releases it.
    for permute in (found.fastload_permute, _keeping_the_gil().fastload_permute):
        permute.argtypes = (pointer, *[ctypes.c_uint64] * 4, pointer, small, pointer, small, ctypes.c_uint64, small)
        permute.restype = None
    word = ctypes.c_uint64
    for functions in (found, _keeping_the_gil()):
        functions.fastload_window_rows.argtypes = (
            pointer, *[number] * 2, *[word] * 4, pointer, small, word, pointer, *[number] * 3, *[pointer] * 2
        )  # fmt: skip
        functions.fastload_window_rows.restype = number
        functions.fastload_digest.argtypes = (*[pointer] * 3, number, number, small, pointer)
        functions.fastload_digest.restype = None
        functions.fastload_draw_keys.argtypes = (word, word, pointer, pointer, number, word, number, pointer)
        functions.fastload_draw_keys.restype = None
        functions.fastload_draw_mixed.argtypes = (pointer, number, word, pointer)
        functions.fastload_draw_mixed.restype = None
        functions.fastload_draw_sides.argtypes = (
            pointer, number, pointer, number, ctypes.c_char_p, number, pointer, number, *[pointer] * 2
        )  # fmt: skip
        functions.fastload_draw_placement.argtypes = (
            pointer, number, pointer, number, ctypes.c_char_p, number, *[pointer] * 3
        )  # fmt: skip
    found.fastload_crc32c.argtypes, found.fastload_crc32c.restype = (ctypes.c_char_p, number, pointer), ctypes.c_uint32
    found.fastload_place.argtypes = (pointer, pointer, number, pointer, *numbers, *[pointer] * 2, small, *[pointer] * 2)
    return found


@functools.cache
def _keeping_the_gil() -> ctypes.PyDLL:
    return ctypes.PyDLL(str(_PATH))


# libjpeg's functions that native.c uses, in its order.
_JPEG_FUNCTIONS = (
    "jpeg_std_error", "jpeg_CreateDecompress", "jpeg_destroy_decompress", "jpeg_mem_src", "jpeg_read_header",
    "jpeg_start_decompress", "jpeg_read_scanlines", "jpeg_skip_scanlines", "jpeg_crop_scanline",
    "jpeg_finish_decompress", "jpeg_abort_decompress",
)  # fmt: skip


@functools.cache
def decodes_jpeg() -> bool:
    """Whether images are decoded here, too: Pillow or the system has a shared libjpeg-turbo, 2.1.5 or newer."""
    # Of threads that ask at once, one looks: a library must not be taken while another thread decodes already.
    with _looking:
        return _finds_jpeg()


_looking = threading.Lock()


@functools.cache
def _finds_jpeg() -> bool:
    return library() is not None and any(map(_uses_jpeg, _libjpegs()))


def _uses_jpeg(path: str) -> bool:
    """Whether the loops take a libjpeg: it can be loaded, is new enough, and has an interface that they know."""
    try:
        libjpeg = ctypes.CDLL(path)  # never unloaded
        found = [ctypes.cast(getattr(libjpeg, name), ctypes.c_void_p) for name in _JPEG_FUNCTIONS]
    except (OSError, AttributeError):
        return False
    return bool(library().fastload_use_jpeg((ctypes.c_void_p * len(found))(*found)))


def _is_unwanted() -> bool:
    return os.environ.get("FASTLOAD_NATIVE") == "0"


def described() -> str:
    """Returns in a few words which parts of it are there."""
    if library() is None:
        return "none: FASTLOAD_NATIVE=0 is set" if _is_unwanted() else "none: installed without a C compiler"
    if decodes_jpeg():
        return "built"
    return "built, without JPEG decoding: neither Pillow nor the system has a shared libjpeg-turbo from 2.1.5 on"


def why_slow(has_jpegs: Callable[[], bool]) -> str:
    """Returns why images are decoded or cropped slowly here, and what to do; empty where nothing is missing.

    `has_jpegs` says whether JPEGs are among them, and is asked only where that matters. The rates were measured by
    `benchmarks/bench_native.py`.
    """
    if library() is None and _is_unwanted():
        return (
            "FASTLOAD_NATIVE=0 is set: without its compiled loops fastload decodes and crops images on the CPU at half "
            "to two thirds of the rate."
        )
    if library() is None:
        return advice("compiled loops")
    return advice("JPEG decoding") if not decodes_jpeg() and has_jpegs() else ""


_said = False


def say_once(why: Callable[[], str]) -> None:
    """Logs why images are made slowly, as a warning: once a process, and not in processes that it starts.

    `why` returns it, "" where they are not, and is not called where nothing would be logged.
    """
    global _said
    if _said or multiprocessing.parent_process() is not None:
        return
    if text := why():
        _said = True
        _log.warning("%s", text)


@contextmanager
def said_elsewhere() -> Iterator[None]:
    """Within it `say_once` logs nothing, since somebody shows `why_slow` in a place of its own."""
    global _said
    before, _said = _said, True
    try:
        yield
    finally:
        _said = before


def _libjpegs() -> Iterable[str]:
    """Yields where libjpeg-turbo may be: what Pillow's wheel brings, and the system's by its usual names."""
    try:
        files = importlib.metadata.files("pillow") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libjpeg"):
            yield str(file.locate())
    yield from ("libjpeg.so.62", "libjpeg.so.8", "libjpeg.62.dylib", "libjpeg.8.dylib")


def gather(addresses: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
    """Copies the rows at these addresses, int64 (B,), to `out` (B, row_bytes), C-contiguous."""
    library().fastload_gather(
        addresses.ctypes.data, len(addresses), out.shape[1], out.ctypes.data, out.nbytes >= STREAMED_BYTES
    )


def read_ranges(
    fd: int, offsets: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """Reads ranges of an open file, int64 (n,), one after another into `out`, uint8 (bytes of all of them,).

    Returns the bytes that came of each, int64 (n,): fewer at the file's end, and after an error.
    """
    assert out.flags.c_contiguous and out.nbytes == int(lengths.sum()), "memory for all of them"
    tables = [np.ascontiguousarray(table, np.int64) for table in (offsets, lengths)]
    done = np.empty(len(offsets), np.int64)
    pointers = (table.ctypes.data for table in tables)
    library().fastload_read(fd, *pointers, len(done), out.ctypes.data, done.ctypes.data)
    return done


def digests(
    addresses: Sequence[NDArray[np.int64]],
    lengths: Sequence[int | NDArray[np.int64]],
    outs: Sequence[NDArray[np.uint8]] | None = None,
) -> NDArray[np.uint64]:
    """Returns XXH3-64 of rows of one or more pieces each, uint64 (B,), and copies them, if it is said where to.

    Args:
        addresses: of each piece, int64 (B,).
        lengths: of each piece, bytes of all rows, or int64 (B,); of a row's pieces together more than `SHORT_BYTES`.
        outs: of each piece, whose rows are then of one length, (B, length), C-contiguous.
    """
    return _digests(library(), addresses, lengths, outs)


def digests_in_memory(pieces: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint64]:
    """Returns XXH3-64 of rows of one or more pieces each, (B, length), C-contiguous; uint64 (B,).

    Few of them are hashed without releasing the GIL: not for what is mapped, and may have to be read.
    """
    functions = _keeping_the_gil() if sum(piece.nbytes for piece in pieces) <= HELD_BYTES else library()
    return _digests(functions, [_starts(piece) for piece in pieces], [piece.shape[1] for piece in pieces], None)


def _starts(rows: NDArray[np.uint8]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = rows.ctypes.data + rows.shape[1] * np.arange(len(rows))
    return found


def _digests(
    functions: Any,
    addresses: Sequence[NDArray[np.int64]],
    lengths: Sequence[int | NDArray[np.int64]],
    outs: Sequence[NDArray[np.uint8]] | None,
) -> NDArray[np.uint64]:
    starts = np.stack(addresses)
    sizes = np.stack([np.broadcast_to(np.asarray(length, np.int64), starts.shape[1]) for length in lengths])
    pieces, count = starts.shape
    assert outs is None or pieces <= _MOST_COPIED, "native.c copies no more"
    targets = None if outs is None else np.array([out.ctypes.data for out in outs], np.int64)
    assert not count or sizes.sum(axis=0).min() > SHORT_BYTES, "shorter rows are hashed in another way"
    found = np.empty(count, np.uint64)
    streams = outs is not None and int(sizes.sum()) >= STREAMED_BYTES
    functions.fastload_digest(
        starts.ctypes.data, sizes.ctypes.data, None if targets is None else targets.ctypes.data, pieces, count, streams,
        found.ctypes.data,
    )  # fmt: skip
    return found


def permute(
    values: NDArray[np.uint64],
    n: int,
    bases: tuple[int, int],
    keys: NDArray[np.uint64],
    round_words: NDArray[np.uint64],
    final_word: int,
    *,
    backwards: bool,
) -> None:
    """Replaces each value by where a keyed permutation of range(n) takes it, or by what it takes there.

    The rounds of `plan.permutation`, one for each of the words.

    Args:
        values: uint64, C-contiguous, each below n.
        bases: of the two digits; their product is n or more.
        keys: uint64, C-contiguous: () for all values, or as many as they are.
    """
    function = library() if values.size > HELD_VALUES else _keeping_the_gil()
    function.fastload_permute(
        values.ctypes.data, values.size, n, *bases, keys.ctypes.data, not keys.ndim, round_words.ctypes.data,
        len(round_words), final_word, backwards,
    )  # fmt: skip


def window_rows(
    positions: NDArray[np.int64],
    out: NDArray[np.int64],
    window: tuple[int, int],
    bases: tuple[int, int],
    key: int,
    round_words: NDArray[np.uint64],
    final_word: int,
    gaps: NDArray[np.int64],
    chunk_rows: int,
    first_chunk: int,
    begins: NDArray[np.int64],
) -> int:
    """Writes the rows at positions of a window to `out`, as `plan.ChunkOrder` mixes them, up to one of another window.

    Args:
        positions, out: int64 (P,), C-contiguous.
        window: its first position, and its length.
        bases, key, round_words, final_word: of the permutation of the window, as in `permute`.
        gaps: int64 (G, 2), C-contiguous: the slot at which empty ones begin, and how many.
        first_chunk, begins: the index in the sequence of the chunk that the window begins with, and the first row of
            each of its chunks, int64 (C,), C-contiguous.

    Returns:
        How many positions were of the window.
    """
    function = library() if positions.size > HELD_VALUES else _keeping_the_gil()
    found: int = function.fastload_window_rows(
        positions.ctypes.data, positions.size, *window, *bases, key, round_words.ctypes.data, len(round_words),
        final_word, gaps.ctypes.data, len(gaps), chunk_rows, first_chunk, begins.ctypes.data, out.ctypes.data,
    )  # fmt: skip
    return found


def draw_keys(
    seed: int, epoch: int, rows: NDArray[np.int64], times: NDArray[np.int64] | None, echo: int, echoes: int
) -> NDArray[np.uint64]:
    """Returns the keys of samples for so many uses from `echo` on, uint64 (echoes * B,), as `Draws` makes them.

    Numbers are below 2**64; rows and times (B,), C-contiguous.
    """
    keys = np.empty(echoes * len(rows), np.uint64)
    times_at = None if times is None else times.ctypes.data
    _drawing(keys.size).fastload_draw_keys(
        seed, epoch, rows.ctypes.data, times_at, len(rows), echo, echoes, keys.ctypes.data
    )
    return keys


def draw_mixed(words: NDArray[np.uint64], word: int) -> NDArray[np.uint64]:
    """Returns the mix of `words ^ word`, as `transforms.draws` has it: uint64 of the same shape, C-contiguous both."""
    mixed = np.empty(words.shape, np.uint64)
    _drawing(words.size).fastload_draw_mixed(words.ctypes.data, words.size, word, mixed.ctypes.data)
    return mixed


_SHAPE = struct.Struct("2d 2d")


def draw_sides(
    keys: NDArray[np.uint64],
    areas: NDArray[np.int64],
    scale: tuple[float, float],
    log_ratio: tuple[float, float],
    least: int,
    most: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]] | None:
    """Returns what `transforms.draws.rectangle_sides` does; None where NumPy has to draw it, as in `draw_placement`.

    Args:
        keys: uint64 (B,), C-contiguous.
        areas: int64 (B,), or of all rectangles one number.
        scale, log_ratio, least: bounds.
        most: int64 (B or 1, 2), or (2,).
    """
    count, areas, most = len(keys), np.ascontiguousarray(areas, np.int64), np.ascontiguousarray(most, np.int64)
    sides, found = np.empty((count, 2), np.int64), np.empty(count, np.bool_)
    done = _drawing(count).fastload_draw_sides(
        keys.ctypes.data, count, areas.ctypes.data, areas.size > 1, _SHAPE.pack(*scale, *log_ratio), least,
        most.ctypes.data, 2 * (most.size > 2), sides.ctypes.data, found.ctypes.data,
    )  # fmt: skip
    return (sides, found) if done else None


MOVE = struct.Struct("q Q 2q 4q q d 2d 2d 2d")
"""A transform that moves pixels, as `draw_placement` takes it: native.c has the names of the numbers."""

MOVES = ("flip", "random crop", "center crop", "resize", "random resized crop")
"""Their kinds, by number."""


def draw_placement(
    keys: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    moves: Sequence[bytes],
    table: NDArray[np.int32] | None = None,
) -> tuple[NDArray[np.int64], NDArray[np.bool_]] | None:
    """Returns where pixels of B samples come from, as moves draw it one after another, of which one resizes at most.

    Args:
        keys: uint64 (B,), C-contiguous.
        sizes: int64 (B or 1, 2), of the images.
        moves: each as MOVE packs it.
        table: int32 (B * 10,), C-contiguous, for the same numbers side by side; None: they are not wanted.

    Returns:
        int64 (4, B, 2), `first`, `window`, `scaled` and `offset` of a placement, and bool (B, 2), `turned`.
        None where NumPy has to draw it: a number lies so close to where it is rounded up that the exponential functions
        of two libraries need not agree, or an image is too small.
    """
    count, sizes = len(keys), np.ascontiguousarray(sizes, np.int64)
    placed, turned = np.empty((4, count, 2), np.int64), np.empty((count, 2), np.bool_)
    done = _drawing(count).fastload_draw_placement(
        keys.ctypes.data, count, sizes.ctypes.data, 2 * (len(sizes) > 1), b"".join(moves), len(moves),
        placed.ctypes.data, turned.ctypes.data, None if table is None else table.ctypes.data,
    )  # fmt: skip
    return (placed, turned) if done else None


def _drawing(count: int) -> Any:
    return library() if count > HELD_SAMPLES else _keeping_the_gil()


def can_make(dtype: np.dtype[Any]) -> bool:
    """Whether `make_images` fills arrays of a dtype: uint8, float32, or uint16 for bfloat16's bits."""
    return library() is not None and dtype in _KINDS


def make_images(
    memory: NDArray[np.uint8] | None,
    sources: NDArray[np.int64],
    windows: NDArray[np.int64],
    output: NDArray[Any],
    constants: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
) -> tuple[NDArray[np.bool_], float]:
    """Makes a batch of images, each from a window of pixels or of a JPEG: cut, resized, turned, normalized.

    Args:
        memory: (T,), C-contiguous; not written to. None: `sources` has addresses.
        sources: int64 (B, 5): the byte at which an image begins, how many it has (of a JPEG), its height (of a JPEG)
            and width, and 0 for pixels (H, W, C), or by how much the JPEG is to be decoded smaller, 1, 2, 4 or 8; -1
            passes over it.
        windows: int64 (B, 10): first, window, scaled, offset and turned of a placement, in pixels of the image as it is
            decoded; every window lies within its image.
        output: (B, h, w, C), C-contiguous; uint8, or with constants float32, or uint16 for the bits of bfloat16.
        constants: scale and shift, (C,) each: level * scale + shift; with outputs of uint8 None.

    Returns:
        Which images were made, bool (B,): not those passed over, and those that libjpeg refuses or warns of. And how
        many seconds decoding took.

    Raises:
        MemoryError: there is too little memory.
    """
    assert (constants is None) == (output.dtype == np.uint8), "levels are normalized on their way into other dtypes"
    count, height, width, channels = output.shape
    table = np.concatenate([sources, windows], axis=1, dtype=np.int64)
    base = int(sources[:, 0].min(initial=2**62)) if memory is None else memory.ctypes.data
    if memory is None:
        table[:, 0] -= base
    made, decoding_ns = np.zeros(count, np.bool_), ctypes.c_int64(0)
    scale, shift = (None, None) if constants is None else (np.tile(values, width) for values in constants)
    scale_at, shift_at = (None if values is None else values.ctypes.data for values in (scale, shift))
    if count and output.size and not library().fastload_place(
        base, table.ctypes.data, count, output.ctypes.data, channels, height, width,
        _KINDS[output.dtype], scale_at, shift_at, output.nbytes >= STREAMED_BYTES, made.ctypes.data,
        ctypes.byref(decoding_ns),
    ):  # fmt: skip
        raise MemoryError("too little memory to make images")
    return made, decoding_ns.value / 1e9
