"""Batches of some samples of each of some classes, for losses that compare samples with one another."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fastload.errors import OptionError, is_whole
from fastload.plan.permutation import derive_key, permute, subkeys
from fastload.plan.weighted import DrawnOrder, checked_labels

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
