"""A keyed permutation of range(n) that is computed, not stored: any position alone, in O(1) memory.

A Feistel network over two digits: a position p in range(n) is written as (p // b, p % b) with a * b >= n, then each
round adds a keyed hash of one digit to the other, modulo that digit's base. Every round can be undone, so the whole
is a bijection of range(a * b); a result at or above n is sent through again until it falls below
(cycle walking; Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). Bases are chosen so that a * b
exceeds n by little or nothing, so this is rare. Only integer arithmetic of 64 bits is used: the order depends on
no library's random generator, on no version of NumPy and on no machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from fastload.errors import OptionError
from fastload.system import native

MAX_POSITIONS = 2**48

# NumPy releases the GIL in a loop over more than 500 elements. With pure Python running in another thread, getting it
# back may cost the 5 ms of the interpreter's switch interval each time, and a permutation is some 75 such loops.
# Measured: slices of 500 cost 57 ns a position alone and 70 to 250 ns with pure Python in another thread, slices of
# 1,000 40 ns and 5,000 to 10,000 ns, slices of 16,384 14 ns and 100 to 3,000 ns.
BLOCK = 500

# From about 100 positions on, 400,000 keys showed no bias after six rounds. With fewer positions the digits are so
# small that rounds repeat each other: at 9 positions, pairs were uniform from 12 rounds on. So small n, which are
# cheap, get more rounds.
_FEW_POSITIONS = 1024
_ROUNDS_FEW = 16
_ROUNDS = 6
_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB

Words = NDArray[np.uint64]


def _word(value: int) -> Words:
    # A 0-d array: as an operand it costs half of a NumPy scalar, and the promotion rules of all releases keep it
    # uint64.
    return np.array(value, dtype=np.uint64)


def mix64(value: int) -> int:
    """Returns a 64-bit word whose every bit depends on every bit of another: SplitMix64's finalizer (Steele, 2014)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def derive_key(*parts: int) -> int:
    """Returns a 64-bit key made from whole numbers, each modulo 2**64; their order matters."""
    key = 0
    for part in parts:
        key = mix64(key + _GOLDEN + part)
    return key


def subkeys(key: int, index: NDArray[np.int64]) -> Words:
    """Returns `mix64(key + index)` of each index, uint64 of the same shape: an independent key for each."""
    word = index.view(np.uint64) + _word(key & _MASK)
    word = (word ^ (word >> _word(30))) * _word(_MIX_1)
    word = (word ^ (word >> _word(27))) * _word(_MIX_2)
    return word ^ (word >> _word(31))


def numbers_at(key: int, index: NDArray[np.int64]) -> Words:
    """Returns a random 64-bit number for each index, uint64 of the same shape: SplitMix64's sequence from a key on."""
    return subkeys(key, (index.view(np.uint64) * _word(_GOLDEN)).view(np.int64))


_ROUND_WORDS = tuple(_word(derive_key(round_number) | 1) for round_number in range(_ROUNDS_FEW))
_ROUND_TABLE = np.array(_ROUND_WORDS, np.uint64)  # the same in one piece of memory
_FINAL_WORD = _word(_MIX_2)
_HALF = _word(32)


@lru_cache(maxsize=1024)
def _bases(n: int) -> tuple[int, int]:
    """Returns bases (a, b) of the two digits: a * b >= n with the least excess, b <= a <= about 4 b.

    The second base is at least 2 from n = 3 on: with b = 1 a round could only rotate.
    """
    if n <= 2:
        return n, 1
    root = math.isqrt(n - 1) + 1
    candidates = [(a, -(-n // a)) for a in range(root, 2 * root if root < 64 else root + 64)]
    return min(((a, b) for a, b in candidates if b >= 2), key=lambda bases: bases[0] * bases[1] - n)


def _network(words: Words, n: int, key: Words, *, backwards: bool) -> Words:
    """Applies all rounds, or undoes them; takes and returns values in [0, a * b)."""
    a, b = (_word(base) for base in _bases(n))
    high = words // b
    low = words - high * b
    step, spare = np.empty_like(words), np.empty_like(words)
    rounds = range(_ROUNDS_FEW if n < _FEW_POSITIONS else _ROUNDS)
    for round_number in reversed(rounds) if backwards else rounds:
        moved, other, base = (low, high, b) if round_number % 2 else (high, low, a)
        # A hash of the other digit, in [0, base), base <= 2**25.
        np.bitwise_xor(other, key, step)
        np.multiply(step, _ROUND_WORDS[round_number], step)
        np.right_shift(step, _HALF, spare)
        np.bitwise_xor(step, spare, step)
        np.multiply(step, _FINAL_WORD, step)
        np.right_shift(step, _HALF, step)
        np.multiply(step, base, step)  # 32 bits times base, over 2**32: a division-free way into [0, base)
        np.right_shift(step, _HALF, step)
        # Unsigned wrap-around makes the value outside [0, base) the larger of the two, whichever way it left.
        if backwards:
            np.subtract(moved, step, moved)
            np.add(moved, base, step)
        else:
            np.add(moved, step, moved)
            np.subtract(moved, base, step)
        np.minimum(moved, step, out=moved)
    np.multiply(high, b, high)
    np.add(high, low, high)
    return high


def _rounds(n: int) -> Words:
    """Returns the words of the rounds, one each, for the compiled loops."""
    return _ROUND_TABLE[: _ROUNDS_FEW if n < _FEW_POSITIONS else _ROUNDS]


def _walk(positions: NDArray[np.int64], n: int, key: int | Words, *, backwards: bool) -> NDArray[np.int64]:
    if not 1 <= n <= MAX_POSITIONS:
        raise OptionError(f"a permutation of {n} positions is not possible: fastload permutes 1 to 2**48 of them")
    keys = _word(key & _MASK) if isinstance(key, int) else key
    if native.library() is not None:
        words = np.array(positions, np.int64).view(np.uint64)
        native.permute(words, n, _bases(n), np.asarray(keys, order="C"), _rounds(n), _MIX_2, backwards=backwards)
        return words.view(np.int64)
    words = _network(np.asarray(positions, dtype=np.int64).view(np.uint64), n, keys, backwards=backwards)
    if math.prod(_bases(n)) > n:
        limit = _word(n)
        while (outside := np.flatnonzero(words >= limit)).size:
            again = keys[outside] if keys.ndim else keys
            words[outside] = _network(words[outside], n, again, backwards=backwards)
    return words.view(np.int64)


def window_rows(
    positions: NDArray[np.int64],
    out: NDArray[np.int64],
    window: tuple[int, int],
    key: int,
    gaps: NDArray[np.int64],
    chunk_rows: int,
    first_chunk: int,
    begins: NDArray[np.int64],
) -> int:
    """Returns what `native.window_rows` does, which permutes the window as `permute` does."""
    return native.window_rows(
        positions, out, window, _bases(window[1]), key & _MASK, _rounds(window[1]), _MIX_2, gaps, chunk_rows,
        first_chunk, begins,
    )  # fmt: skip


def permute(positions: NDArray[np.int64], n: int, key: int | Words) -> NDArray[np.int64]:
    """Applies a keyed bijection of range(n) to positions; returns a new array. Pure, and the same on every machine.

    Costs 20 to 30 ns a position with the compiled loops. Without them 50 ns in slices of `BLOCK` (see `blockwise`);
    with a longer array NumPy releases the GIL some 75 times on the way.

    Args:
        positions: int64, (P,), each in [0, n); not checked, values outside have no meaning.
        n: 1 to 2**48; OptionError if it is not.
        key: 64 bits for all positions, or uint64 (P,), one key per position.
    """
    return _walk(positions, n, key, backwards=False)


def unpermute(positions: NDArray[np.int64], n: int, key: int | Words) -> NDArray[np.int64]:
    """Inverts `permute`: `unpermute(permute(p, n, key), n, key)` is p. Same arguments, same errors."""
    return _walk(positions, n, key, backwards=True)


def blockwise(
    function: Callable[[NDArray[np.int64]], NDArray[np.int64]], values: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns `function(values)`, int64 (P,), in slices of `BLOCK`; the function must work element by element."""
    if values.size <= BLOCK:
        return function(values)
    out = np.empty(values.size, dtype=np.int64)
    for first in range(0, values.size, BLOCK):
        out[first : first + BLOCK] = function(values[first : first + BLOCK])
    return out
