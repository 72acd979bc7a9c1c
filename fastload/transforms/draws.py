"""Random numbers for the samples of a batch: the same for a sample wherever, and in whatever batch, it is processed.

A number is a hash of (seed, epoch, row, echo, stream...), so nothing is carried from one batch to the next: neither
batch composition, nor worker count, world size or device changes how a sample is augmented. They are drawn on the
host for every device (integers are bit-equal everywhere); a device gets them as a tensor of B numbers.

The hash is SplitMix64's finalizer, applied once per part: Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014, with the constants of Stafford's variant 13. It is not meant for cryptography.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from fastload.system import native

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: SplitMix64's increment
_OUTPUT = 0xD1B54A32D192ED03  # a number drawn from a key, and a stream's key derived from it, never share an input

_TIMES = 0xA0761D6478BD642F  # odd, so that no time and echo share an input
_BATCH = 0x5DEECE66D1CE4E5B  # a stream that no transform's index reaches
_ATTEMPTS = 10  # at a rectangle that fits; torchvision's


class Draws:
    """Draws random numbers for B samples, as a pure function of its arguments.

    It has no state: the same method returns the same numbers each time, which is how masks follow images. A second,
    independent number comes from another stream: `draws.stream(0)`, `draws.stream(1)`.

    Args:
        seed: any integer (taken modulo 2**64).
        epoch: number of the epoch, from 0.
        rows: int64 (B,), each sample's row in its file; not written to while the draws are in use.
        echo: number of the batch's use, from 0.
        echoes: draws for so many uses, from `echo` on, one after another: of B * echoes samples.
        times: int64 (B,), how many times each row came before in the epoch, so that it is another picture each time;
            None: none did.
    """

    __slots__ = ("_given", "_made")

    def __init__(
        self,
        seed: int,
        epoch: int,
        rows: NDArray[np.int64],
        echo: int = 0,
        *,
        echoes: int = 1,
        times: NDArray[np.int64] | None = None,
    ) -> None:
        self._given = (seed, epoch, rows, echo, echoes, times)
        self._made: NDArray[np.uint64] | None = None

    @property
    def keys(self) -> NDArray[np.uint64]:
        """The samples' keys, uint64 (B * echoes,), from which all their numbers are drawn."""
        # Not before they are asked for: a batch whose numbers were drawn beforehand needs none.
        if self._made is None:
            seed, epoch, rows, echo, echoes, times = self._given
            rows = np.ascontiguousarray(rows, np.int64)
            if native.library() is not None:
                times = None if times is None else np.ascontiguousarray(times, np.int64)
                self._made = native.draw_keys(
                    int(seed) & _WORD, int(epoch) & _WORD, rows, times, int(echo) & _WORD, echoes
                )
                return self._made
            key = _mix(np.array([int(seed) & _WORD], np.uint64))
            key = _mix(key ^ np.uint64(int(epoch) & _WORD))
            keys = _mix(rows.view(np.uint64) ^ key)
            if times is not None:
                again = times.view(np.uint64)
                keys = np.where(times > 0, _mix(keys ^ (again * np.uint64(_TIMES))), keys)
            uses = np.array([number & _WORD for number in range(echo, echo + echoes)], np.uint64)
            self._made = _mix(keys ^ uses[:, None]).reshape(-1)
        return self._made

    @classmethod
    def of_batch(cls, seed: int, epoch: int, step: int, rank: int, echo: int = 0) -> Draws:
        """Returns draws for one batch as a whole, as if it were one sample: for transforms that mix samples."""
        of_step = cls(seed, epoch, np.array([step]), echo)
        return of_step.stream(_BATCH).stream(rank)

    def __len__(self) -> int:
        return len(self._given[2]) * self._given[4] if self._made is None else len(self._made)

    def stream(self, index: int) -> Draws:
        """Returns draws for the same samples, independent of all other and nested streams; index 0 to 2**64 - 1."""
        return self._with(_mix_with(self.keys, index))

    def of_samples(self, some: slice) -> Draws:
        """Returns the draws of some samples of the batch: as `Draws` of their rows alone."""
        return self._with(np.ascontiguousarray(self.keys[some]))

    def _with(self, keys: NDArray[np.uint64]) -> Draws:
        draws = object.__new__(Draws)
        draws._made = keys
        return draws

    def integers(self, low: int | NDArray[np.int64], high: int | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns integers with low <= x < high, int64 (B,); both bounds may differ by sample.

        Multiply-shift (Lemire, 2019) on 64 random bits: each value's probability is within 2**-32 of even, relatively.
        A range is at most 2**32 - 1 wide, and not empty: the caller ensures it.
        """
        span = np.asarray(high, dtype=np.int64) - np.asarray(low, dtype=np.int64)
        assert span.size == 0 or (span.min() > 0 and span.max() < 1 << 32), "an empty or too wide range of integers"
        bits, wide = self._bits(), span.astype(np.uint64)
        # The upper half of a 64 x 64 bit product, by halves: NumPy has no 128-bit integers.
        lower = ((bits & np.uint64(0xFFFFFFFF)) * wide) >> np.uint64(32)
        product = ((bits >> np.uint64(32)) * wide + lower) >> np.uint64(32)
        return product.astype(np.int64) + low

    def uniform(self) -> NDArray[np.float64]:
        """Returns numbers with 0 <= x < 1, float64 (B,): multiples of 2**-53, all equally likely."""
        return (self._bits() >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def _bits(self) -> NDArray[np.uint64]:
        return _mix_with(self.keys, _OUTPUT)


def rectangle_sides(
    draws: Draws,
    area: NDArray[np.int64],
    scale: tuple[float, float],
    ratio: tuple[float, float],
    *,
    least: int,
    most: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Returns two sides of a rectangle for each sample, int64 (B, 2), and whether one was found; else they are 0.

    Its part of the area, (B,) or one, is drawn evenly from `scale`, the logarithm of first / second side evenly from
    `ratio`. Of ten attempts the first counts whose sides are from `least` to `most`, (B, 2) or (2,).
    """
    count, (low, high) = len(draws), map(math.log, ratio)
    if native.library() is not None and count:
        drawn = native.draw_sides(draws.keys, area, scale, (low, high), least, most)
        if drawn is not None:
            return drawn
    sides, found = np.zeros((count, 2), np.int64), np.zeros(count, np.bool_)
    area, most = np.broadcast_to(area, (count,)), np.broadcast_to(most, (count, 2))
    left = np.arange(count)
    # A call of NumPy costs more than these few numbers: all attempts after the first are made at once, 2.5 times as
    # fast for 256 samples.
    for attempts in (range(1), range(1, _ATTEMPTS)):
        streams = np.array([[2 * attempt for attempt in attempts], [2 * attempt + 1 for attempt in attempts]])
        # Each (attempts, samples that are left).
        scales, ratios = draws._with(_mix(draws.keys[left] ^ streams.astype(np.uint64)[:, :, None])).uniform()
        part = area[left] * (scale[0] + (scale[1] - scale[0]) * scales)
        # IEEE 754 does not promise the same logarithms and square roots on every machine: NumPy's differ by one
        # unit in the last place between processors, which only counts at a rounding tie.
        quotient = np.exp(low + (high - low) * ratios)
        tried = np.rint(np.sqrt(np.stack([part * quotient, part / quotient])))
        fits = ((tried >= least) & (tried <= most[left].T[:, None])).all(axis=0)
        (fitting,) = fits.any(axis=0).nonzero()
        found[left[fitting]] = True
        sides[left[fitting]] = tried[:, fits.argmax(axis=0)[fitting], fitting].T
        left = left[~found[left]]
        if not len(left):
            break
    return sides, found


def _mix_with(words: NDArray[np.uint64], word: int) -> NDArray[np.uint64]:
    if native.library() is not None:
        return native.draw_mixed(words, int(word))
    return _mix(words ^ np.uint64(word))


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # A bijection of 64-bit words: distinct rows have distinct keys. Arrays wrap modulo 2**64 without a warning.
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))
