from __future__ import annotations

import ast
import copy
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import fastload.transforms
from fastload.transforms.engine.buffers import OutputPool, sent


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


class OnHost:
    """A tensor of the host that notes how it is sent."""

    def __init__(self, *ways):
        self.ways = ways

    def pin_memory(self):
        return OnHost(*self.ways, "pinned")

    def to(self, device, *, non_blocking):
        return (*self.ways, str(device), non_blocking)


def test_what_is_sent_to_cuda_is_pinned_and_on_the_cpu_it_is_the_same_memory():
    assert sent(OnHost(), torch.device("cuda", 1)) == ("pinned", "cuda:1", True)
    assert sent(OnHost(), torch.device("cpu")) == ("cpu", True)
    numbers = np.arange(5)
    assert sent(numbers, torch.device("cpu")).data_ptr() == numbers.ctypes.data
    assert sent(torch.ones(3), torch.device("meta")).is_meta


def sends(tree):
    """Names of functions with calls that may copy from the host to a device, apart from `sent`."""
    found = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef) or function.name == "sent":
            continue
        for call in ast.walk(function):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            name, where = call.func.attr, ast.unparse(call.func.value)
            keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            moves = name == "to" and (
                any("device" in ast.unparse(one) for one in call.args) or {"device", "non_blocking"} & keywords.keys()
            )
            # Made of Python's or NumPy's numbers, on a device; functions like torch.zeros fill there.
            made = where == "torch" and name in ("tensor", "as_tensor", "asarray") and keywords.get("device") != "'cpu'"
            if moves or made or name == "new_tensor" or (name in ("cuda", "pin_memory") and where != "torch"):
                found.append(function.name)
    return found


MODULES = sorted(Path(fastload.transforms.__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_one_function_sends_what_transforms_send(path):
    # The kernel is tried out before the first batch.
    assert set(sends(ast.parse(path.read_text()))) <= {"kernel_runs"}


def test_other_sends_would_be_found():
    for line in (
        "x.to(device)",
        "x.to(images.device, non_blocking=True)",
        "x.to(device=there)",
        "torch.tensor([1], device=device)",
        "torch.as_tensor(x)",
        "x.cuda()",
        "x.pin_memory()",
    ):
        assert sends(ast.parse(f"def f():\n    {line}")) == ["f"], line
    for line in ("x.to(torch.uint8)", "x.to(wide, copy=True)", "torch.tensor(1, device='cpu')", "sent(x, device)"):
        assert not sends(ast.parse(f"def f():\n    {line}")), line
