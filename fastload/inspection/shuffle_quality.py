"""Measures how well each shuffle mixes a file (`plan.randomness`), compared with uniformly random permutations.

For the batches that `EpochPlan` makes on one rank, each measure is taken for full shuffle, chunk windows and no
shuffle, and for `REFERENCE_EPOCHS` uniformly random permutations of the same number of rows, drawn with NumPy's
generator: their mean and spread. An order counts as good as full shuffle by a measure if it is at most 3 spreads worse
than that mean.

Large files are sampled: `SAMPLED_ROWS` positions, as many samples in whole batches, fewer epochs, the next epoch of at
most `SCANNED_ROWS` rows. The random permutations are sampled in the same way, so sampling widens spreads and shifts
nothing. NumPy only; no pixels are read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from fastload.errors import OptionError
from fastload.format.header import PackedFile
from fastload.plan import ChunkWindow, EpochPlan, ResolvedShuffle, randomness, resolve_shuffle
from fastload.plan.randomness import Ints, LabelMix
from fastload.read.reader import open_columns
from fastload.remote.open_url import open_packed
from fastload.remote.urls import FileName

WINDOWS = (1, 4, 16, 64)
EPOCHS = (4, 16)
"""Smallest and largest number of epochs measured; fewer for large files."""
REFERENCE_EPOCHS = 32
SAMPLED_ROWS = 200_000
SCANNED_ROWS = 1_000_000
LEAST_ROWS = 8
SPREADS = 3.0

_PLANNED_ROWS = 1_000_000
_MAX_LABEL_BYTES = 512 * 2**20

MeasureName = Literal["file_order", "label_mix", "epoch_distance", "mates_again"]
MEASURES: tuple[MeasureName, ...] = ("file_order", "label_mix", "epoch_distance", "mates_again")
Values = dict[MeasureName, float | None]

_WORSE = {
    "file_order": "correlation with file order {one.value:.2g} (full shuffle {one.full:.2g})",
    "label_mix": "the labels of batches differ {one.times} as much as under full shuffle",
    "epoch_distance": "samples move {one.times} as far from epoch to epoch as under full shuffle",
    "mates_again": "{part} of batch-mates meet again in the next epoch ({full_part} under full shuffle, {one.times})",
}


@dataclass(frozen=True)
class Measure:
    """One measure of one order, and the same of uniformly random orders."""

    value: float  # mean over the epochs measured
    full: float  # mean of uniformly random permutations
    # Standard deviation of one random epoch, combined with the standard deviation of `value`, the mean of the epochs
    # measured (not for `file_order`). The former does not shrink with more epochs: where chunks stay together, all
    # epochs share the luck of the file
    spread: float
    as_good: bool  # whether it is at most 3 spreads worse than `full`

    @property
    def times(self) -> str:
        """The value as a multiple of full shuffle's: `1.04x`, `7.7x`, `4,100x`; `-` if that is 0."""
        if not self.full:
            return "-"
        times = self.value / self.full
        return f"{times:.2f}x" if times < 2 else f"{times:.1f}x" if times < 10 else f"{times:,.0f}x"


@dataclass(frozen=True)
class OrderQuality:
    """The measures of one shuffle."""

    shuffle: str  # `full`, `ChunkWindow(16)`, `False`
    window_chunks: int | None  # chunks mixed with each other; None for full and no shuffle
    window_rows: int  # rows mixed with each other: all for full shuffle, 1 for none
    # By name; None if a measure does not apply, as `label_mix` without labels
    measures: dict[MeasureName, Measure | None]

    @property
    def as_good(self) -> bool:
        """Whether it is as good as full shuffle by every measure that applies."""
        return all(measure.as_good for measure in self.measures.values() if measure)

    @property
    def verdict(self) -> str:
        """A sentence: as good as full shuffle, or by which measures it is worse, and how much."""
        if self.as_good:
            return "as good as full shuffle by every measure"
        mix = self.measures["label_mix"]
        parts = ["labels mix as under full shuffle"] if mix and mix.as_good else []
        for name, measure in self.measures.items():
            if measure and not measure.as_good:
                part, full_part = format_percent(measure.value), format_percent(measure.full)
                parts.append(_WORSE[name].format(one=measure, part=part, full_part=full_part))
        return "; ".join(parts)


@dataclass(frozen=True)
class ShuffleQuality:
    """Result of `measure_shuffles`; `to_dict` returns it as values for JSON."""

    split: str | None  # name of the split measured; None for all rows
    num_rows: int  # rows of an epoch, N
    chunk_rows: int  # rows of a chunk; 0: the file has no chunks
    batch_size: int  # samples of a batch
    labels: str | None  # what `label_mix` uses: `classes`, `attributes`, or None
    default: str  # the shuffle that shuffle=True means for this file
    sampled_rows: int  # samples looked at in an epoch; num_rows if all were
    epochs: int  # epochs measured, each with the one after it
    orders: tuple[OrderQuality, ...]  # full shuffle, chunk windows from large to small, no shuffle
    notes: tuple[str, ...]  # sentences on what was left out, sampled or adapted

    def to_dict(self) -> dict[str, Any]:
        """Returns plain dicts, lists, strings and numbers, for `json.dumps`."""
        orders = [{**asdict(order), "as_good": order.as_good, "verdict": order.verdict} for order in self.orders]
        return {**asdict(self), "orders": orders}


def measure_shuffles(
    path: FileName, *, batch_size: int = 256, windows: tuple[int, ...] = WINDOWS, seed: int = 0
) -> ShuffleQuality:
    """Measures full shuffle, chunk windows and no shuffle on a file: on its split `train`, else on all rows.

    Takes one second for 20,000 rows and about eight at most, also for 10 million; labels are read, pixels are not.

    Args:
        path: a packed file or its URL, or another HDF5 file with a dataset `images`.
        batch_size: B, 2 or more; at most a quarter of the rows is used.
        windows: chunks of each window to measure.

    Raises:
        MissingFileError, FormatError, RemoteError: as `open_packed`.
        OptionError: fewer than `LEAST_ROWS` rows, or a batch of fewer than 2.
    """
    with open_packed(path) as file:
        return _measure_shuffles(file, batch_size, windows, seed)


def _measure_shuffles(file: PackedFile, batch_size: int, windows: tuple[int, ...], seed: int) -> ShuffleQuality:
    split = "train" if "train" in file.splits else None
    rows = file.splits[split] if split else range(file.num_rows)
    if len(rows) < LEAST_ROWS:
        raise OptionError(f"{file.name}: {len(rows)} rows are too few to judge an order by; at least {LEAST_ROWS}.")
    if batch_size < 2:
        raise OptionError(f"batch_size={batch_size}: give 2 or more.")
    main = file.fields["images" if "images" in file.fields else next(iter(file.fields))]
    kind, mix_of, notes = _labels(file, rows, min(batch_size, len(rows) // 4))
    if batch_size > len(rows) // 4:
        batch_size = len(rows) // 4
        notes.append(f"Batches of {batch_size}, a quarter of the {len(rows):,} rows.")
    default = resolve_shuffle(True, file.shuffled) if main.chunk_rows else "full"
    shuffles: list[ResolvedShuffle] = ["full", False]
    if main.chunk_rows:
        shuffles[1:1] = [ChunkWindow(chunks) for chunks in sorted(windows, reverse=True)]
    else:
        notes.append("The file is stored without chunks, so there are no chunk windows; shuffle=True means full.")
    sampling = _Sampling(len(rows), batch_size, seed, mix_of)
    if len(sampling.batches) < len(rows) // batch_size:
        part = f"{sampling.batches.size:,} of {len(rows):,} samples"
        notes.append(f"Sampled: {part} in whole batches, of {sampling.epochs} epochs.")
    if sampling.scanned < len(rows):
        notes.append(f"epoch_distance and mates_again: of a plan of the first {sampling.scanned:,} rows.")
    random = sampling.random()
    orders = []
    for shuffle in shuffles:
        found = [sampling.planned(rows, main.chunk_rows, shuffle, epoch) for epoch in range(sampling.epochs)]
        measures = {name: _measure(name, [v[name] for v in found], [v[name] for v in random]) for name in MEASURES}
        chunks = shuffle.chunks if isinstance(shuffle, ChunkWindow) else None
        window = len(rows) if shuffle == "full" else min(len(rows), chunks * main.chunk_rows) if chunks else 1
        orders.append(OrderQuality(_name(shuffle), chunks, window, measures))
    return ShuffleQuality(
        split=split,
        num_rows=len(rows),
        chunk_rows=main.chunk_rows,
        batch_size=batch_size,
        labels=kind,
        default=_name(default),
        sampled_rows=sampling.batches.size,
        epochs=sampling.epochs,
        orders=tuple(orders),
        notes=tuple(notes),
    )


class _Sampling:
    """The positions and batches that are measured, the same for every order and for the random ones."""

    def __init__(self, num_rows: int, batch_size: int, seed: int, mix_of: LabelMix | None) -> None:
        self.num_rows, self.seed, self.mix_of = num_rows, seed, mix_of
        # Rows of the plan whose batches are followed into the next epoch; all unless there are too many.
        self.scanned = min(num_rows, SCANNED_ROWS)
        self.epochs = min(max(_PLANNED_ROWS // self.scanned, EPOCHS[0]), EPOCHS[1])
        rng = np.random.default_rng(seed)
        most, within = max(1, SAMPLED_ROWS // batch_size), np.arange(batch_size)
        # For `file_order`, (P,), sorted, over the whole plan; then of the samples of batches, (K, B): those for
        # `label_mix`, and those that are followed.
        self.positions = one_from_each_part(rng, num_rows, SAMPLED_ROWS)
        self.batches = one_from_each_part(rng, num_rows // batch_size, most)[:, None] * batch_size + within
        self.followed = one_from_each_part(rng, self.scanned // batch_size, most)[:, None] * batch_size + within

    def planned(self, rows: range, chunk_rows: int, shuffle: ResolvedShuffle, epoch: int) -> Values:
        """Returns the measures of one planned epoch and the one after it."""

        def rows_at(epoch: int, positions: Ints, num_rows: int) -> Ints:
            part = rows[:num_rows]
            plan = EpochPlan(part, chunk_rows=chunk_rows, seed=self.seed, epoch=epoch, shuffle=shuffle)
            return plan.rows_at(0, positions.ravel()).reshape(positions.shape) - rows.start

        # The position of a row is found only by planning the whole next epoch.
        every, position = np.arange(self.scanned), np.empty(self.scanned, np.int64)
        position[rows_at(epoch + 1, every, self.scanned)] = every
        return self._values(
            rows_at(epoch, self.positions, self.num_rows),
            rows_at(epoch, self.batches, self.num_rows),
            position[rows_at(epoch, self.followed, self.scanned)],
        )

    def random(self) -> list[Values]:
        """Returns the measures of random permutations: at fixed positions these are draws without repeats."""
        rng = np.random.default_rng([self.seed, 1])
        found = []
        for _ in range(REFERENCE_EPOCHS):
            # One draw serves all measures, because each is judged by itself.
            drawn = rng.choice(self.num_rows, max(self.positions.size, self.batches.size, self.followed.size), False)
            later = drawn if self.scanned == self.num_rows else rng.choice(self.scanned, self.followed.size, False)
            batches = drawn[: self.batches.size].reshape(self.batches.shape)
            followed = later[: self.followed.size].reshape(self.followed.shape)
            found.append(self._values(drawn[: self.positions.size], batches, followed))
        return found

    def _values(self, rows: Ints, batches: Ints, next_positions: Ints) -> Values:
        return {
            "file_order": abs(randomness.file_order(self.positions, rows)),
            "label_mix": self.mix_of(batches) if self.mix_of else None,
            "epoch_distance": randomness.epoch_distance(self.followed, next_positions, self.scanned),
            "mates_again": randomness.batchmate_reuse(next_positions, self.followed.shape[1]),
        }


def one_from_each_part(rng: np.random.Generator, count: int, most: int) -> Ints:
    """Returns all numbers below `count`, or one random number from each of `most` equal parts of that range."""
    if count <= most:
        return np.arange(count)
    edges = np.arange(most + 1) * count // most
    return rng.integers(edges[:-1], edges[1:])


def _measure(name: MeasureName, found: list[float | None], random: list[float | None]) -> Measure | None:
    values, others = [v for v in found if v is not None], [v for v in random if v is not None]
    if not values or not others:
        return None
    value, full = float(np.mean(values)), float(np.mean(others))
    # `file_order` measures how far correlations are from 0, so their spread is not an uncertainty of it.
    own = 0.0 if name == "file_order" else np.std(values, ddof=1) / np.sqrt(len(values))
    spread = float(np.hypot(np.std(others, ddof=1), own))
    worse = full - value if name == "epoch_distance" else value - full
    return Measure(value, full, spread, bool(worse <= SPREADS * spread + 1e-9))


def _name(shuffle: ResolvedShuffle) -> str:
    return f"ChunkWindow({shuffle.chunks})" if isinstance(shuffle, ChunkWindow) else str(shuffle)


def format_percent(part: float) -> str:
    """Returns a share of 1 as text: `100 %`, `2.66 %`, `0.00255 %`."""
    return f"{100 * part:.3g} %"


def _labels(file: PackedFile, rows: range, batch_size: int) -> tuple[str | None, LabelMix | None, list[str]]:
    """Returns the kind of labels, `label_mix` for them, and notes about them."""
    field = file.fields.get("labels")
    if field is None:
        return None, None, ["label_mix does not apply: the file has no labels."]
    if field.dtype.kind not in "biu" or len(field.shape) > 1 or 0 in field.shape:
        found = f"labels are {field.dtype} {('N', *field.shape)}, neither classes nor attributes."
        return None, None, [f"label_mix does not apply: {found}"]
    width = field.shape[0] if field.shape else 1
    # Only every n-th attribute if all of them would need too much memory.
    step = -(-width * len(rows) * field.dtype.itemsize // _MAX_LABEL_BYTES) if width > 1 else 1
    with open_columns(file) as handle:
        values = handle["labels"][(slice(rows.start, rows.stop), *[slice(None, None, step)] * len(field.shape))]
    if width > 1:
        kind, alike = "attributes", "every sample has the same attributes"
        mix = randomness.attribute_mix(values != 0, batch_size)
        notes = [f"label_mix: of every {step}th of {width} attributes."] if step > 1 else []
    else:
        kind, alike = "classes", "all samples are of one class"
        mix = randomness.class_mix(values.reshape(-1), batch_size)
        num_classes = len(np.unique(values))
        few = num_classes * 2 <= len(rows)
        notes = [] if few else [f"label_mix says little: {num_classes:,} classes among {len(rows):,} samples."]
    return (kind, mix, notes) if mix else (None, None, [f"label_mix does not apply: {alike}."])
