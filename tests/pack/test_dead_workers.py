"""A worker of the packer that dies: the image that ended it is named, or left out, and the rest goes on.

Images end their process by a signal here, as a decoder does that writes past its memory.
"""

from __future__ import annotations

import ctypes
import io
import os
import platform
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from interrupted import leftovers
from numpy.typing import NDArray
from PIL import Image

from fastload import verify_file
from fastload.errors import ImageError, PackError, SourceError
from fastload.options.pack import PackOptions, parse_encoding
from fastload.pack import pack_listing, pool
from fastload.pack.pack_options import PackJob
from fastload.sources.listing import Listing
from fastload.system.threads import forked_workers

COUNT = 70
KEYS = tuple(f"{'ab'[i % 2]}/{i:03d}.jpg" for i in range(COUNT))
CHUNK = 4 * 24 * 24 * 3


def picture(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((24, 24)).save(file, "JPEG")
    return file.getvalue()


PICTURES = [picture(seed) for seed in range(COUNT)]


@dataclass(frozen=True)
class Files:
    """Files of which some end the process that reads them, or their header; sample -> signal, 0: an error instead."""

    reads: dict[int, int] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)
    once: str = ""  # a file; where it is, nothing ends a process, and who does so makes it
    slow_s: float = 0.0  # that sample 3 takes

    def _meet(self, i: int, ends: dict[int, int]) -> None:
        if i in ends and not (self.once and os.path.exists(self.once)):
            if self.once:
                Path(self.once).touch()
            if not ends[i]:
                raise ImageError("an error")
            os.kill(os.getpid(), ends[i])

    def read(self, i: int) -> bytes:
        self._meet(i, self.reads)
        time.sleep(self.slow_s if i == 3 else 0)
        return PICTURES[i]

    def read_head(self, i: int, size: int) -> bytes:
        self._meet(i, self.heads)
        return PICTURES[i][:size]

    def take(self, indices: NDArray[Any]) -> Files:
        raise AssertionError("not asked for")


def pack(output: Path, files: Files, workers: int, on_error: Any = "skip", **options: Any) -> Any:
    zeros = np.zeros(COUNT, np.int64)
    listing = Listing("folder", KEYS, zeros.astype(np.uint8), ("all",), {}, (), zeros, zeros, files)
    job = PackJob("S", output, listing, PackOptions(chunk_bytes=CHUNK, **options), on_error)
    with forked_workers():  # which start in less time
        return pack_listing(job, workers)


FORMS: dict[str, dict[str, Any]] = {
    "pixels": {},
    "source": {"store": parse_encoding("source"), "strict": True},
    "gzip": {"codec": "gzip"},
}


@pytest.mark.parametrize("form", FORMS)
def test_images_that_end_a_worker_are_left_out_and_named_and_the_rest_is_as_without_them(tmp_path, form):
    before = psutil.Process().children(recursive=True)
    ends = {5: signal.SIGSEGV, 40: signal.SIGABRT}
    report = pack(tmp_path / "o.h5", Files(ends), 2, **FORMS[form])
    reference = pack(tmp_path / "r.h5", Files(dict.fromkeys(ends, 0)), 2, **FORMS[form])
    assert {key: reason.split()[-1] for key, reason in report.skipped} == {KEYS[5]: "SIGSEGV", KEYS[40]: "SIGABRT"}
    assert [key for key, _ in report.skipped] == [key for key, _ in reference.skipped]
    assert report.path.read_bytes() == reference.path.read_bytes()
    assert verify_file(report.path, workers=0).ok and leftovers(report.path) == []
    assert psutil.Process().children(recursive=True) == before


@pytest.mark.parametrize(("reads", "heads"), [({33: signal.SIGSEGV}, {}), ({}, {33: signal.SIGSEGV})])
def test_without_skip_the_error_names_the_image_and_how_its_process_ended(tmp_path, reads, heads):
    with pytest.raises(SourceError, match=rf"S: 1 of 70 .* {KEYS[33]}: ends the process .*SIGSEGV.*--on-error skip"):
        pack(tmp_path / "o.h5", Files(reads, heads), 1, "fail")


def test_a_worker_that_no_image_ended_is_an_error_that_says_what_it_was_at_and_the_same_call_continues(tmp_path):
    files = Files({33: signal.SIGKILL}, once=str(tmp_path / "killed"))
    with pytest.raises(PackError, match=r"was killed by SIGKILL .*It was at .*jpg.*none of these ends a process"):
        pack(tmp_path / "o.h5", files, 2)
    assert pack(tmp_path / "o.h5", files, 2).num_samples == COUNT


_written_past: list[int] = []


@dataclass(frozen=True)
class Overflowing(Files):
    """Sample 20 writes past memory, which ends the process only at a later one, as a heap that was damaged does."""

    def read(self, i: int) -> bytes:
        if _written_past:
            os.kill(os.getpid(), signal.SIGSEGV)
        if i == 20:
            # Of 2,008 bytes that malloc gives, so that nothing comes of it here. glibc's check misses 1 in 128.
            for memory in [ctypes.create_string_buffer(2001) for _ in range(8)]:
                ctypes.memset(ctypes.addressof(memory) + 2001, 0x5A, 7)
            _written_past.append(i)
        return PICTURES[i]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc says where memory was written past")
def test_an_image_is_named_that_damages_memory_and_so_ends_the_process_later(tmp_path):
    with pytest.raises((SourceError, PackError), match=rf"{KEYS[20]}.*ends the process that reads it.*SIGABRT"):
        pack(tmp_path / "o.h5", Overflowing(), 1, "fail")


def test_an_image_that_takes_long_is_named_while_it_does(tmp_path, monkeypatch):
    monkeypatch.setattr(pool, "LONG_S", 0.1)
    monkeypatch.setattr(pool, "_LOOK_S", 0.05)
    with pytest.warns(UserWarning, match=rf"^{KEYS[3]} has been read for 0 s and is not done"):
        pack(tmp_path / "o.h5", Files(slow_s=0.6), 1)
