"""Measures how far an order of samples is from a uniformly random one: four figures, from order and labels alone.

N rows, cut into batches of B, with labels of C classes:

`file_order`: size of Spearman's rank correlation between a sample's position in the epoch and its row in the file
    (Spearman, 1904), mean over epochs. 1: the order of the file. Full shuffle of N rows: 0.8 / sqrt(N - 1). Chunk
    windows move whole chunks, so they cannot get below about 0.8 / sqrt(chunks). It describes the epoch as a whole, not
    batches, which the next figure does: in a file whose rows were shuffled when packed, the order of the file is a
    random order.
`label_mix`: how much the labels of a batch differ from all rows' labels, as a multiple of full shuffle's: Pearson's
    chi-square of a batch's label counts, mean over batches, over its expectation (C - 1)(N - B) / (N - 1) for B
    samples drawn from N without replacement. 1: full shuffle. Survey statistics know it as the design effect (Kish,
    "Survey Sampling", 1965): a batch of B tells as much about the label mix as B / label_mix samples drawn at random,
    and with one class in each batch it is about B. For attribute vectors each attribute counts as two classes, and
    the figure is the mean over attributes.
`epoch_distance`: mean distance between a sample's positions in successive epochs, over (N * N - 1) / (3 N), which is
    full shuffle's. 0: every epoch has the same order. 1: full shuffle.
`mates_again`: of the pairs of samples that share a batch, the part that shares one again in the next epoch, 0 to 1.
    1: the same batches each epoch. Full shuffle: (B - 1) / (N - 1). Chunk windows: two samples of one chunk are in one
    window in every epoch, so up to (1 / window chunks) * (B / window rows) more, however large N is.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
LabelMix = Callable[[Ints], float]
"""Returns `label_mix` of rows in batches, int64 (K, B)."""


def file_order(positions: Ints, rows: Ints) -> float:
    """Returns `file_order`, signed, from positions of an epoch and the rows there, (P,) each, P >= 2; -1 to 1.

    The positions may be a sample: both are ranks already, so the result is an estimate.
    """
    return float(np.corrcoef(positions, rows)[0, 1])


def class_mix(classes: Ints, batch_size: int) -> LabelMix | None:
    """Returns `label_mix` for class numbers, int64 (N,), of any value; None if all rows are of one class."""
    classes = np.unique(classes, return_inverse=True)[1].reshape(-1)
    counts = np.bincount(classes)
    num_rows, num_classes = classes.size, int(np.count_nonzero(counts))
    expected = (num_classes - 1) * (num_rows - batch_size) / (num_rows - 1)
    if num_classes < 2:
        return None

    def mix(batches: Ints) -> float:
        # sum over classes of (O - E)^2 / E is sum of O^2 / E - B, where only classes in the batch count.
        keys = np.arange(len(batches))[:, None] * counts.size + classes[batches]
        cells, observed = np.unique(keys, return_counts=True)
        weights = observed**2 * (num_rows / batch_size) / counts[cells % counts.size]
        return float((weights.sum() / len(batches) - batch_size) / expected)

    return mix


def attribute_mix(attributes: NDArray[np.bool_], batch_size: int) -> LabelMix | None:
    """Returns `label_mix` for attribute vectors, bool (N, A): mean over attributes that differ; None if none does."""
    share = attributes.mean(axis=0)
    differing = np.flatnonzero((share > 0) & (share < 1))
    if not differing.size:
        return None
    attributes, share = np.ascontiguousarray(attributes[:, differing]), share[differing]
    num_rows = len(attributes)
    expected = share * (1 - share) * batch_size * (num_rows - batch_size) / (num_rows - 1)

    def mix(batches: Ints) -> float:
        total = 0.0
        for batch in batches:  # one at a time: a (K, B, A) array of 200,000 samples would not stay in a cache
            total += float(np.mean((attributes[batch].sum(axis=0) - batch_size * share) ** 2 / expected))
        return total / len(batches)

    return mix


def epoch_distance(positions: Ints, next_positions: Ints, num_rows: int) -> float:
    """Returns `epoch_distance`, from positions of the same samples in two epochs, (...) each."""
    return float(np.abs(positions - next_positions).mean() / ((num_rows**2 - 1) / (3 * num_rows)))


def batchmate_reuse(next_positions: Ints, batch_size: int) -> float:
    """Returns `mates_again`, from (K, B): the positions in the next epoch of the samples of K batches."""
    next_batches = np.sort(next_positions // batch_size, axis=1)
    # Runs of equal numbers in a sorted batch: a run of n is n (n - 1) / 2 pairs.
    begins = np.ones(next_batches.shape, np.bool_)
    begins[:, 1:] = next_batches[:, 1:] != next_batches[:, :-1]
    runs = np.diff(np.append(np.flatnonzero(begins), begins.size))
    return float((runs * (runs - 1)).sum() / (len(next_batches) * batch_size * (batch_size - 1)))
