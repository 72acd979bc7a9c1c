"""Batches of two loaders are the same, whatever memory they lie in."""

from __future__ import annotations

import torch


def facts(batch):
    return [tensor.clone() for tensor in batch], batch.rows.tolist(), batch.valid.tolist(), batch.global_valid


def assert_same(batches, expected):
    """Each given as `facts`."""
    assert len(batches) == len(expected)
    for (tensors, *here), (others, *there) in zip(batches, expected, strict=True):
        assert here == there
        for tensor, other in zip(tensors, others, strict=True):
            assert tensor.dtype == other.dtype and torch.equal(tensor, other)
