from __future__ import annotations

import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fastload.errors import ImageError
from fastload.estimate import rates
from fastload.estimate.rates import PASSES, measure_disk, per_second, pixel_rate
from fastload.format.ragged import JPEG, RAW, EncodedRow

UINT8 = np.dtype(np.uint8)


def raw(height: int, width: int, dtype: str = "u1", *, mask: bool = False) -> EncodedRow:
    pixels = np.random.default_rng(height).integers(0, 200, (height, width, 3)).astype(dtype)
    masked = pixels[..., 0].astype("u1").tobytes() if mask else None
    return EncodedRow(pixels.tobytes(), RAW, pixels.shape, 1, 0, masked)


def jpeg(height: int, width: int) -> EncodedRow:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "JPEG")
    return EncodedRow(file.getvalue(), JPEG, (height, width, 3), 1, 0)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([raw(8, 9), raw(8, 9)], "u1"),
        ([raw(8, 9, "u2")], "u2"),
        ([raw(8, 9, mask=True), raw(9, 8, mask=True)], "u1"),
        ([raw(8, 9, "u2"), raw(7, 5, "u2")], "u2"),
        ([jpeg(20, 30), raw(8, 9), jpeg(16, 16)], "u1"),
    ],
)
def test_rows_of_every_kind_have_a_rate(rows, dtype):
    assert pixel_rate(rows, np.dtype(dtype), threads=2, seconds=0.01) > 0
    with pytest.raises(ImageError):
        pixel_rate([EncodedRow(b"\xff\xd8\xff", JPEG, (4, 4, 3), 1, 0)], UINT8, threads=1)


@pytest.mark.parametrize(("seconds", "steps"), [(60.0, PASSES), (0.0, 3)])
def test_each_step_is_done_once_and_at_least_one_a_thread(seconds, steps):
    done: list[int] = []

    def make() -> Callable[[int], int]:
        return lambda turn: done.append(turn) or 1  # type: ignore[func-returns-value]  # append: None

    per_second(make, PASSES, 3, seconds)
    assert sorted(done[1:]) == list(range(steps))


def test_nothing_is_left_in_the_folder_and_files_that_are_memory_cannot_be_measured(tmp_path):
    found = measure_disk(tmp_path, 1, seconds=0.2)
    assert list(tmp_path.iterdir()) == []
    assert found.note.startswith("cannot be measured: " if found.bytes_per_s is None else "measured with ")
    missing = measure_disk(tmp_path / "none", 1)
    assert missing == (None, "cannot be measured: No such file or directory")
    memory = Path("/dev/shm")
    if memory.is_dir() and os.access(memory, os.W_OK):
        with tempfile.TemporaryDirectory(dir=memory) as folder:
            found = measure_disk(Path(folder), 1, seconds=0.2)
            assert found.bytes_per_s is None and found.note.startswith("cannot be measured: ")
            assert list(Path(folder).iterdir()) == []


def test_the_rate_is_what_was_read_over_the_time_that_it_took(tmp_path, monkeypatch):
    file = tmp_path / "a"
    file.write_bytes(bytes(3 * 2**20))
    ticks = iter([10.0, *[10.5] * 3, 12.0])  # begun, after each piece, at the end
    monkeypatch.setattr(rates.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(rates, "_THREADS", 1)
    with open(file, "rb") as opened:
        found = rates._read(opened.fileno(), 3 * 2**20, 1.0)
    assert found == (3 * 2**20 / 2, "measured with 3 MiB in random order, not in memory before")
