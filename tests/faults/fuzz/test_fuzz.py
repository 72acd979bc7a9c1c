"""Every parser ends with a result or a FastloadError: for the kept inputs, and for some thousand mutations of them.

`run.py` beside this file looks for hours, with coverage; inputs that it found are in `corpus/`, a folder a target.
"""

from __future__ import annotations

import os
import random
import tracemalloc
import warnings
from collections.abc import Iterator
from pathlib import Path

import h5py
import pytest
from targets import PIXELS, TARGETS, clean_up

from fastload.errors import FastloadError, FormatError
from fastload.format.header import read_header
from sample_files import write_packed

CORPUS = Path(__file__).parent / "corpus"
MUTATIONS = int(os.environ.get("FASTLOAD_MUTATIONS", "40"))
MOST_BYTES = 2**27  # that a parser may take for an input of some kilobytes; a devkit is read into 2**26

# libhdf5, pyarrow and Pillow may crash on bytes that were changed at random, and then pytest ends: `run.py` does that.
IN_PROCESS = sorted(set(TARGETS) - {"header-bytes"})


@pytest.fixture(autouse=True, scope="module")
def scratch() -> Iterator[None]:
    yield
    clean_up()


def kept(name: str) -> list[bytes]:
    return [*TARGETS[name].seeds, *(path.read_bytes() for path in sorted((CORPUS / name).glob("*")))]


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes with a few changes of the kinds that fuzzers make."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 8))):
        at, size = rng.randrange(len(changed) + 1), rng.choice((1, 1, 2, 4, 16))
        match rng.randrange(6):
            case 0:
                changed[at : at + size] = rng.randbytes(size)
            case 1:
                changed[at:at] = rng.randbytes(size)
            case 2:
                del changed[at : at + size]
            case 3:
                changed[at:at] = changed[max(0, at - size) : at] * rng.choice((1, 3))
            case 4:
                changed[at : at + size] = bytes([rng.choice((0, 1, 0x7F, 0x80, 0xE0, 0xFE, 0xFF))]) * size
            case _:
                changed[at : at + 1] = rng.choice(
                    (b"-", b"9" * 20, b'"', b"\n", b",", b"{", b"[", b"\\ud800", b"nan", b" ")
                )
    return bytes(changed)


def run(name: str, data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's about numbers too large, csv's, ...
        try:
            TARGETS[name].run(data)
        except FastloadError:
            return
        except Exception as error:
            error.add_note(f"input of {name}: {data!r}")
            raise


@pytest.mark.parametrize("name", IN_PROCESS)
def test_parsers_end_well_in_little_memory_for_inputs_that_once_were_findings(name: str) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    run(name, TARGETS[name].seeds[0])  # imports
    for data in kept(name):
        tracemalloc.start()
        try:
            run(name, data)
            assert tracemalloc.get_traced_memory()[1] < MOST_BYTES, data
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize("name", IN_PROCESS)
def test_parsers_end_with_a_result_or_an_error_of_ours_for_mutated_inputs(name: str) -> None:
    if name == "parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    rng, inputs = random.Random(name), kept(name)
    for _ in range(MUTATIONS):
        run(name, mutated(rng.choice(inputs), rng))


def test_no_bytes_at_all_are_a_valid_file_of_each_target_whose_bytes_are_choices() -> None:
    """Otherwise a mutation would be stopped by the first check, and nothing behind it be tried."""
    for name, target in TARGETS.items():
        if target.seeds[0] == b"" and name != "parquet":
            target.run(b"")


def test_the_kept_inputs_are_few_and_each_belongs_to_a_target() -> None:
    paths = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in paths} <= set(TARGETS)
    assert sum(path.stat().st_size for path in paths) < 200_000


@pytest.mark.parametrize("seed", [" ", float("nan"), [1, 2], float("inf")])
def test_a_seed_of_another_kind_in_a_header_is_an_error_of_ours(tmp_path: Path, seed: object) -> None:
    path = write_packed(tmp_path / "a.h5", PIXELS[..., None])
    with h5py.File(path, "r+") as file:
        file.attrs["seed"] = seed
    with pytest.raises(FormatError):
        read_header(path)
