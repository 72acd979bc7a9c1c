"""Rows drawn anew in each epoch: by weight, or some samples of each of some classes in every batch.

By weight, with replacement a position's 63-bit number is looked up among the sums of the weights, scaled to whole
numbers; an epoch needs nothing but its key. Weights 1, 0, 3 of three rows make the thresholds 2**61, 2**61 and 2**63:
numbers below the first give row 0, others row 2.

Without replacement each row has the number -log(u) / weight, u uniform in (0, 1), and rows come by ascending numbers:
each next row is then drawn by weight from those that are left (Efraimidis and Spirakis, "Weighted random sampling with
a reservoir", 2006). The logarithm is worked out here, by operations that IEEE 754 rounds the same on every machine.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from dataclasses import dataclass, replace
from decimal import Context, Decimal
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastload.errors import OptionError, is_whole
from fastload.plan.permutation import MAX_POSITIONS, blockwise, derive_key, numbers_at, permute, subkeys

_WEIGHTED = 7  # number of this use of keys; `order` has the others
_SLICE = 2**16  # rows whose numbers are worked out at a time
_RUN = 64  # thresholds that are compared with a number at once
_COUNTED = 2**20  # numbers of classes below it are counted in an array
_SUM = 2.0**63  # of all weights, scaled
# Its powers are the same on every machine, unlike powers of floats.
_DECIMAL = Context(prec=30, traps=[])
_LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # with 20 zero bits, so that products with exponents are exact
_LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")


@dataclass(frozen=True)
class ClassWeights:
    """Weights that follow from the classes of a field of the dataset, which are read when the loader is made."""

    field: str
    power: float


@dataclass(frozen=True, eq=False, repr=False)
class Weighted:
    """A shuffle that draws each epoch's rows by weight: a row of weight 2 comes twice as often as a row of weight 1.

    With replacement a row may come several times in an epoch, with other random transforms each time, or not at all.
    Without it a row comes at most once, and rows of large weight sooner, which matters where num_samples is less than
    the rows. A row of weight 0 never comes. An epoch's rows depend on seed and epoch alone; ranks share them.

    >>> Weighted([1, 0, 3]), Weighted.balanced("labels")
    (Weighted(3 weights), Weighted.balanced('labels', 1.0))

    Attributes:
        weights: float64 (N,), one for each sample of the given dataset, in its order. Finite, none negative, not all
            zero. Kept as a copy.
        num_samples: samples of an epoch, over all ranks; None: as many as the dataset has, or without replacement as
            many as have a weight over 0.
        replacement: whether a row may come several times.

    Raises:
        OptionError: an argument is invalid; (later) there is not one weight for each sample.
    """

    weights: ArrayLike | ClassWeights
    num_samples: int | None = None
    replacement: bool = True

    def __post_init__(self) -> None:
        if self.replacement not in (True, False):
            raise OptionError(f"Weighted(replacement={self.replacement!r}): give True or False")
        if self.num_samples is not None:
            if not is_whole(self.num_samples) or not 1 <= self.num_samples <= MAX_POSITIONS:
                raise OptionError(
                    f"Weighted(num_samples={self.num_samples!r}): an epoch has a whole number of samples, 1 or more; "
                    f"None for as many as the dataset has"
                )
            object.__setattr__(self, "num_samples", int(self.num_samples))
        if isinstance(self.weights, ClassWeights):
            return
        weights = _checked_weights(self.weights)
        object.__setattr__(self, "weights", weights)
        if not self.replacement and (self.num_samples or 0) > len(self._possible):
            raise OptionError(
                f"Weighted(num_samples={self.num_samples}): without replacement each row comes at most once, and "
                f"{len(self._possible):,} rows have a weight over 0. Ask for that many at most, or replacement=True."
            )

    @classmethod
    def balanced(
        cls,
        labels: str | ArrayLike = "labels",
        power: float = 1.0,
        *,
        num_samples: int | None = None,
        replacement: bool = True,
    ) -> Weighted:
        """Returns weights that make rare classes come as often as frequent ones, or part of the way.

        A sample's weight is the number of samples of its class to the power of -power: 1 makes all classes equally
        likely, 0 leaves them as in the data, 0.5 is the square root of their frequencies. Samples without a class, of a
        negative number, never come.

        Args:
            labels: whole numbers, (N,), the class of each sample of the dataset; or the name of a field of classes,
                which the loader or sampler reads from its dataset.
            power: 0 or more.

        Raises:
            OptionError: an argument is invalid; (later) the dataset has no such field, or it holds no classes.
        """
        given: object = power
        if isinstance(given, bool) or not isinstance(given, numbers.Real) or not 0 <= power < math.inf:
            raise OptionError(
                f"Weighted.balanced(power={power!r}): give a number of 0 or more; 1 makes all classes equally likely, "
                f"0 leaves them as in the data"
            )
        named = cls(ClassWeights(labels if isinstance(labels, str) else "", float(power)), num_samples, replacement)
        return named if isinstance(labels, str) else named.of_labels(checked_labels(labels, "Weighted.balanced"))

    @property
    def field(self) -> str | None:
        """The field of classes that the weights are yet to be made of; None: they are there."""
        return self.weights.field if isinstance(self.weights, ClassWeights) else None

    def of_labels(self, labels: NDArray[np.int64], names: tuple[str, ...] = ()) -> Weighted:
        """Returns the same shuffle with weights for samples of these classes, int64 (N,), negative for none."""
        assert isinstance(self.weights, ClassWeights), "other weights do not depend on classes"
        known = labels >= 0
        if not known.any():
            raise OptionError(f"Weighted.balanced({self.weights.field or 'labels'}): no sample has a class")
        classes = labels[known]
        if classes.max() >= max(len(labels), _COUNTED):
            _, classes = np.unique(classes, return_inverse=True)  # sorts: of 10 million samples in 5 s
        counts = np.bincount(classes)
        power, fewest = Decimal(self.weights.power), int(counts[counts > 0].min())
        of_count = {
            count: float(_DECIMAL.power(_DECIMAL.divide(Decimal(fewest), Decimal(count)), power)) if count else 0.0
            for count in set(counts.tolist())
        }
        weights = np.zeros(len(labels))
        weights[known] = np.array([of_count[count] for count in counts.tolist()])[classes]
        return replace(self, weights=weights)

    @property
    def _numbers(self) -> NDArray[np.float64]:
        assert isinstance(self.weights, np.ndarray), "a plan takes weights, not the name of a field"
        return self.weights

    @property
    def unit(self) -> int:
        """Positions that stay together on one rank."""
        return 1

    @property
    def repeats(self) -> bool:
        """Whether a row may come several times in an epoch."""
        return bool(self.replacement)

    @property
    def kind(self) -> Literal["weighted"]:
        """The name of this kind of shuffle in saved states."""
        return "weighted"

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that follow from all weights and options."""
        options = f"{self.num_samples} {bool(self.replacement)} {len(self._numbers)} "
        hashed = hashlib.sha256(options.encode())
        hashed.update(np.ascontiguousarray(self._numbers, "<f8").data)
        return hashed.hexdigest()[:16]

    def check(self, num_rows: int) -> None:
        """Raises OptionError unless there is a weight for each of a dataset's samples."""
        if len(self._numbers) != num_rows:
            raise OptionError(
                f"shuffle=Weighted(weights): {len(self._numbers):,} weights, and the dataset has {num_rows:,} samples. "
                f"Give one for each sample of the split or selection that is loaded, in its order."
            )

    def num_positions(self, num_rows: int) -> int:
        """Returns the samples of an epoch."""
        return self.num_samples or (num_rows if self.replacement else len(self._possible))

    def order(self, rows: range, seed: int, epoch: int) -> WithReplacement | WithoutReplacement:
        """Returns the order of one epoch of a range of rows, which has a weight for each."""
        key = derive_key(seed, epoch, _WEIGHTED)
        if self.replacement:
            return WithReplacement(rows.start, *self._thresholds, key)
        return WithoutReplacement(rows.start, self._scaled(), self._possible, key, self.num_positions(len(rows)))

    @cached_property
    def _possible(self) -> NDArray[np.int64]:
        """The rows of a weight over 0, from 0 on, ascending."""
        return np.flatnonzero(self._numbers)

    def _scaled(self, out: NDArray[np.float64] | None = None) -> NDArray[np.float64]:
        """Returns weights times a power of two, the largest in [0.5, 1): neither sums nor quotients overflow."""
        exponent = -math.frexp(float(self._numbers.max()))[1]
        scaled: NDArray[np.float64] = np.ldexp(self._numbers, exponent, out=out)
        return scaled

    @cached_property
    def _thresholds(self) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """The sum of the weights up to each row, scaled to 2**63 for all, ascending, and the last of each 64.

        Two uint64 arrays, (n, 64), filled up at the end, and (n,). One and the same memory holds sums and thresholds.
        """
        memory = np.empty((-(-len(self._numbers) // _RUN), _RUN))
        sums = self._scaled(memory.reshape(-1)[: len(self._numbers)])
        np.add.accumulate(sums, out=sums)  # one after another, so that each machine rounds alike
        total = float(sums[-1])
        runs = memory.view(np.uint64)
        thresholds = runs.reshape(-1)
        thresholds[len(sums) :] = int(_SUM)
        for first in range(0, len(sums), _SLICE):
            part = slice(first, min(first + _SLICE, len(sums)))
            thresholds[part] = (sums[part] / total * _SUM).astype(np.uint64)
        return runs, runs[:, -1].copy()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Weighted):
            return NotImplemented
        if self.field is not None or other.field is not None:
            mine, theirs = ((one.weights, one.num_samples, one.replacement) for one in (self, other))
            return type(self.weights) is type(other.weights) and mine == theirs
        return self is other or self.digest == other.digest

    def __hash__(self) -> int:
        return hash((self.num_samples, self.replacement, self.field or len(self._numbers)))

    def __repr__(self) -> str:
        options = [] if self.num_samples is None else [f"num_samples={self.num_samples}"]
        options += [] if self.replacement else ["replacement=False"]
        if isinstance(self.weights, ClassWeights):
            return f"Weighted.balanced({', '.join([repr(self.weights.field), repr(self.weights.power), *options])})"
        return f"Weighted({', '.join([f'{len(self._numbers):,} weights', *options])})"


def _checked_weights(given: object) -> NDArray[np.float64]:
    """Returns weights as float64 (N,), read-only and a copy; raises OptionError unless they can be drawn by."""
    what = "Weighted(weights=...)"
    try:
        weights = np.array(given, np.float64)
    except (TypeError, ValueError, RuntimeError) as exc:  # the last of a tensor that has a gradient
        raise OptionError(f"{what}: expected a number for each sample, got {type(given).__name__}: {exc}") from exc
    if weights.ndim != 1 or not weights.size:
        raise OptionError(
            f"{what}: expected a number for each sample, (N,), got an array of shape {weights.shape}. For classes, "
            f'Weighted.balanced("labels").'
        )
    for said, bad in (("NaN", np.isnan), ("infinite", np.isinf), ("negative", lambda values: values < 0)):
        if (found := bad(weights)).any():
            at = int(np.argmax(found))
            raise OptionError(f"{what}: weight {at} is {weights[at]}. Weights are finite and 0 or more, none {said}.")
    if not weights.any():
        raise OptionError(f"{what}: all {len(weights):,} weights are 0, so there is no sample to draw.")
    weights += 0.0  # no -0.0, which would be other weights by their digest
    weights.flags.writeable = False
    return weights


def checked_labels(given: Any, what: str) -> NDArray[np.int64]:
    """Returns the classes of samples as int64 (N,); raises OptionError unless they are whole numbers, one a sample."""
    labels = np.asarray(given)
    if labels.ndim != 1 or not labels.size or labels.dtype.kind not in "iu":
        raise OptionError(
            f"{what}: expected the name of a field of classes, or whole numbers (N,), the class of each sample; got "
            f"{labels.dtype} {labels.shape}"
        )
    return labels.astype(np.int64)


class DrawnOrder:
    """Base of orders in which rows may come several times or not at all."""

    def positions_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Raises OptionError: a row has no position of its own."""
        raise OptionError("rows that are drawn by weight or class have no places of their own in an epoch")

    def first_positions(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns 0 for each row: it may come anywhere."""
        return np.zeros_like(rows)


@dataclass(frozen=True, eq=False)
class WithReplacement(DrawnOrder):
    """Each position has a row of its own drawing."""

    first_row: int
    thresholds: NDArray[np.uint64]  # uint64 (n, 64), of all rows one after another, at the end filled up
    lasts: NDArray[np.uint64]  # uint64 (n,), the last of each 64
    key: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return blockwise(self._drawn, positions)

    def _drawn(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        # The first threshold above the number, in two steps: of 10 million rows in a row, NumPy's search misses the
        # caches so often that it takes 4.2 us a number.
        numbers = numbers_at(self.key, positions) >> np.uint64(1)
        run = np.searchsorted(self.lasts, numbers, "right")
        within = np.count_nonzero(self.thresholds[run] <= numbers[:, None], axis=1)
        rows: NDArray[np.int64] = run * _RUN + within + self.first_row
        return rows


@dataclass(frozen=True, eq=False)
class WithoutReplacement(DrawnOrder):
    """The rows of a weight over 0 in a weighted order, which is worked out when it is first asked for."""

    first_row: int
    weights: NDArray[np.float64]
    possible: NDArray[np.int64]
    key: int
    num_positions: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._rows[positions]

    @cached_property
    def _rows(self) -> NDArray[np.int64]:
        waits = np.empty(len(self.possible))
        for first in range(0, len(waits), _SLICE):
            rows = self.possible[first : first + _SLICE]
            # 52 bits and a half: exact, and neither 0 nor 1.
            uniform = ((numbers_at(self.key, rows) >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
            with np.errstate(over="ignore", divide="ignore"):  # weights negligible against the largest: the last
                waits[first : first + _SLICE] = minus_log(uniform) / self.weights[rows]
        return self.possible[np.argsort(waits, kind="stable")[: self.num_positions]] + self.first_row


def minus_log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns -log(x) of numbers in (0, 1), to some 1e-16 of its size, and bit for bit the same on every machine.

    With x = m * 2**e and m near 1, log m is the series 2 (s + s**3 / 3 + s**5 / 5 + ...) in s = (m - 1) / (m + 1).
    """
    mantissa, exponent = np.frexp(values)
    low = mantissa < 0.7071067811865476
    mantissa, exponent = np.where(low, 2 * mantissa, mantissa), exponent - low
    ratio = (mantissa - 1) / (mantissa + 1)
    square = ratio * ratio
    series = np.full_like(square, 1 / 25)
    for odd in range(23, 0, -2):
        series = series * square + 1 / odd
    result: NDArray[np.float64] = -(exponent * _LN2_HIGH + (2 * ratio * series + exponent * _LN2_LOW))
    return result


_CLASSES, _SAMPLES = 8, 9  # numbers of these uses of keys; `order` has the others
_NAMED = 5  # classes that a message names


@dataclass(frozen=True, eq=False, repr=False)
class ClassBatches:
    """A shuffle whose batches hold `samples` samples of each of `classes` classes, class by class.

    Classes come in rounds: each round is a new random order of all classes, cut into batches; classes that do not fill
    the last batch are left out of the round. A class that comes again continues with its next samples, in a random
    order of its own, which is drawn anew when fewer than `samples` are left. So samples of rare classes come several
    times in an epoch, with other random transforms each time. An epoch has as many batches as the dataset's samples
    with a class fill. Ranks get whole batches.

    >>> ClassBatches(classes=8, samples=4)
    ClassBatches(classes=8, samples=4, field='labels')

    Attributes:
        classes: classes of a batch, 1 or more.
        samples: samples of each of them, 1 or more. The batch_size is classes * samples.
        field: name of a field of classes, which the loader or sampler reads from its dataset; or whole numbers, (N,),
            the class of each of its samples. Samples of a negative number have no class, and never come.
        names: names of the classes, for messages; the dataset's, if the field is named.

    Raises:
        OptionError: an argument is invalid; (later) the dataset has no such field, fewer classes, or a class has
            fewer samples.
    """

    classes: int
    samples: int
    field: str | ArrayLike = "labels"
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("classes", "samples"):
            value = getattr(self, name)
            if not is_whole(value) or not 1 <= value < 2**31:
                raise OptionError(f"ClassBatches({name}={value!r}): give a whole number, 1 or more")
            object.__setattr__(self, name, int(value))
        if not isinstance(self.field, str):
            labels = checked_labels(self.field, "ClassBatches(field=...)")
            object.__setattr__(self, "field", labels)
            self._check_classes(labels)

    def of_labels(self, labels: NDArray[np.int64], names: tuple[str, ...] = ()) -> ClassBatches:
        """Returns the same shuffle for samples of these classes, int64 (N,), negative for none; messages name them."""
        return replace(self, field=labels, names=names)

    def _check_classes(self, labels: NDArray[np.int64]) -> None:
        numbers, counts = np.unique(labels[labels >= 0], return_counts=True)
        if len(numbers) < self.classes:
            raise OptionError(
                f"ClassBatches(classes={self.classes}): the samples are of {len(numbers):,} classes. Ask for that many "
                f"at most."
            )
        few = np.flatnonzero(counts < self.samples)
        if few.size:
            said = [f"{self._name(int(numbers[at]))} has {counts[at]}" for at in few[:_NAMED].tolist()]
            more = f" and {few.size - _NAMED:,} more classes" if few.size > _NAMED else ""
            least = int(counts.min())
            raise OptionError(
                f"ClassBatches(samples={self.samples}): {', '.join(said)}{more}, fewer than a batch takes of a class. "
                f"Ask for {least} sample{'s' * (least != 1)} at most, or leave these classes out: "
                f"dataset.select(positions)."
            )

    def _name(self, number: int) -> str:
        return repr(self.names[number]) if number < len(self.names) else f"class {number}"

    @property
    def unit(self) -> int:
        """Positions that stay together on one rank: a batch."""
        return self.classes * self.samples

    @property
    def repeats(self) -> bool:
        """Whether a row may come several times in an epoch."""
        return True

    @property
    def kind(self) -> Literal["classes"]:
        """The name of this kind of shuffle in saved states."""
        return "classes"

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits that follow from all classes and options."""
        options = f"{self.classes} {self.samples} {len(self._labels)} "
        hashed = hashlib.sha256(options.encode())
        hashed.update(np.ascontiguousarray(self._labels, "<i8").data)
        return hashed.hexdigest()[:16]

    def check(self, num_rows: int) -> None:
        """Raises OptionError unless there is a class for each of a dataset's samples."""
        if len(self._labels) != num_rows:
            raise OptionError(
                f"shuffle=ClassBatches(field=...): classes of {len(self._labels):,} samples, and the dataset has "
                f"{num_rows:,}. Give one for each sample of the split or selection that is loaded, in its order."
            )

    def num_positions(self, num_rows: int) -> int:
        """Returns the samples of an epoch, in whole batches."""
        return len(self._by_class.rows) // self.unit * self.unit

    def order(self, rows: range, seed: int, epoch: int) -> ClassOrder:
        """Returns the order of one epoch of a range of rows, which has a class for each."""
        keys = derive_key(seed, epoch, _CLASSES), derive_key(seed, epoch, _SAMPLES)
        return ClassOrder(rows.start, self._by_class, self.classes, self.samples, *keys)

    @property
    def _labels(self) -> NDArray[np.int64]:
        assert isinstance(self.field, np.ndarray), "a plan takes classes, not the name of a field"
        return self.field

    @cached_property
    def _by_class(self) -> ByClass:
        rows = np.argsort(self._labels, kind="stable")
        rows = rows[np.count_nonzero(self._labels < 0) :]
        _, firsts, counts = np.unique(self._labels[rows], return_index=True, return_counts=True)
        return ByClass(rows, firsts, counts)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ClassBatches):
            return NotImplemented
        if isinstance(self.field, str) or isinstance(other.field, str):
            mine, theirs = ((one.classes, one.samples, one.field) for one in (self, other))
            return type(self.field) is type(other.field) and mine == theirs
        return self is other or self.digest == other.digest

    def __hash__(self) -> int:
        return hash((self.classes, self.samples))

    def __repr__(self) -> str:
        field: Any = repr(self.field) if isinstance(self.field, str) else f"<{len(self._labels):,} numbers>"
        return f"ClassBatches(classes={self.classes}, samples={self.samples}, field={field})"


@dataclass(frozen=True, eq=False)
class ByClass:
    """Rows, from 0 on, of one class after another."""

    rows: NDArray[np.int64]  # int64 (N,)
    firsts: NDArray[np.int64]  # int64 (C,): where the rows of each class begin
    counts: NDArray[np.int64]  # int64 (C,)


@dataclass(frozen=True, eq=False)
class ClassOrder(DrawnOrder):
    """Batches of classes: rounds of all classes in a random order, of each its next samples.

    Each round takes the next samples of each class, also of those it leaves out, so that a batch can be worked out
    alone. With classes a, b, c of 4, 4 and 2 rows, and batches of 2 classes and 2 samples, a round is one batch:

        round     0                   1                   2
        batch     b b a a             c c a a             a a c c
        samples   the first two of    the last two of a;  the first two of a's second
                  both                c's second order    order; c's third order
    """

    first_row: int
    by_class: ByClass
    classes: int
    samples: int
    class_key: int
    sample_key: int

    def __call__(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        of_class, sample = np.divmod(positions, self.samples)
        batch, place = np.divmod(of_class, self.classes)
        num_classes = len(self.by_class.counts)
        rounds, batch = np.divmod(batch, num_classes // self.classes)
        number = permute(batch * self.classes + place, num_classes, subkeys(self.class_key, rounds))
        counts = self.by_class.counts[number]
        orders, part = np.divmod(rounds, counts // self.samples)
        # A key for each order of each class.
        keys = subkeys(0, (subkeys(self.sample_key, number) + orders.view(np.uint64)).view(np.int64))
        rows = part * self.samples + sample
        for count in set(counts.tolist()):
            here = np.flatnonzero(counts == count)
            rows[here] = permute(rows[here], count, keys[here])
        found: NDArray[np.int64] = self.by_class.rows[self.by_class.firsts[number] + rows] + self.first_row
        return found
