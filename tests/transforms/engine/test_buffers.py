from __future__ import annotations

import copy
import pickle

import numpy as np
import torch

from fastload.transforms.engine.buffers import OutputPool


def test_memory_is_used_again_once_nobody_refers_to_it():
    pool = OutputPool()
    first = pool.empty((4, 5), torch.float32)
    address = first.data_ptr()
    del first
    assert pool.empty((4, 5), torch.float32).data_ptr() == address


def test_views_arrays_and_storages_keep_the_memory():
    pool = OutputPool()
    for keep in (
        lambda t: t[1:],
        lambda t: t.numpy(),
        lambda t: t.untyped_storage(),
        lambda t: t.permute(1, 0).view(-1),
    ):
        kept = keep(pool.empty((1, 6), torch.float32))
        address = kept.data_ptr() if not isinstance(kept, np.ndarray) else kept.ctypes.data
        assert abs(pool.empty((1, 6), torch.float32).data_ptr() - address) >= 24
        del kept


def test_autograd_keeps_the_memory():
    pool = OutputPool()
    weight = torch.ones(3, requires_grad=True)
    loss = (pool.empty((3,), torch.float32).fill_(2.0) * weight).sum()
    pool.empty((3,), torch.float32).fill_(9.0)
    loss.backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def test_beyond_the_limit_tensors_are_ordinary_allocations():
    pool = OutputPool(limit=2)
    tensors = [pool.empty((3,), torch.int64).fill_(value) for value in range(7)]
    assert [tensor.tolist() for tensor in tensors] == [[value] * 3 for value in range(7)]


def test_shapes_and_dtypes_share_memory_of_like_size():
    pool = OutputPool(limit=1)
    address = pool.empty((8, 2), torch.bfloat16).data_ptr()
    again = pool.empty((4, 4), torch.uint16)
    assert (again.data_ptr(), again.dtype, again.shape) == (address, torch.uint16, (4, 4))
    del again
    assert pool.empty((3, 3), torch.uint8).shape == (3, 3)  # a quarter of the size: the old memory is given back
    larger = pool.empty((100,), torch.float32)
    assert larger.shape == (100,)


def test_memory_is_aligned_for_vector_registers():
    pool = OutputPool()
    assert [pool.empty((size,), torch.uint8).data_ptr() % 64 for size in (1, 63, 1000)] == [0, 0, 0]


def test_copies_and_pickles_are_empty_pools():
    pool = OutputPool(limit=5)
    held = pool.empty((3,), torch.uint8)
    for other in (copy.deepcopy(pool), pickle.loads(pickle.dumps(pool))):
        assert other.limit == 5
        assert other.empty((3,), torch.uint8).data_ptr() != held.data_ptr()
