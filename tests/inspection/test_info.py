from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from ragged_cases import NUM_ROWS, varied_file, varied_rows
from small_files import write_foreign

from fastload.cli import app
from fastload.errors import FormatError, MissingFileError
from fastload.format.ragged import Column
from fastload.inspection.info import inspect_file
from fastload.repack import repack_file
from sample_files import write_packed

PACKED = {"rows": 10, "size": (6, 5, 3)}


def test_a_packed_file_is_described_whole(packed_file: Callable[..., Path]) -> None:
    labels = Column(np.array([0, 1, 1, 1, 0, -1, 1, 0, 0, 1]), {"names": ("cat", "dog")})
    path = packed_file(**PACKED, columns={"labels": labels}, splits={"train": 7, "val": 3}, chunk_rows=4)
    info = inspect_file(path)
    assert (info.num_samples, info.version, info.seed, info.shuffled) == (10, 1, 0, True)
    assert info.splits == {"train": (0, 7), "val": (7, 10)}
    assert (info.classes, info.class_counts) == (("cat", "dog"), (4, 5))
    assert next(iter(info.fields)) == "images" and info.fields["images"].linear
    assert info.fields["images"].shape == (10, 6, 5, 3) and info.layout is not None
    assert (info.layout.first_offset, info.layout.chunk_rows, info.layout.num_chunks) == (4096, 4, 3)
    assert info.layout.read_bytes_per_image == info.layout.image_bytes == 90
    assert (info.pixel_bytes, info.file_bytes, info.findings) == (900, path.stat().st_size, ())
    assert info.header_digest and len(info.header_digest) == 32
    value = json.loads(json.dumps(info.to_dict()))
    assert (value["num_samples"], value["splits"]) == (10, {"train": [0, 7], "val": [7, 10]})
    assert (value["fields"]["images"]["dtype"], value["fields"]["images"]["chunks"]) == ("uint8", [4, 6, 5, 3])
    assert value["layout"]["linear"] is True
    attributes = Column(np.array([[1, 0, 1], [1, 0, 0]], dtype=np.uint8), {"names": ("Hat", "Beard", "Smile")})
    assert inspect_file(packed_file(rows=2, columns={"labels": attributes})).class_counts == (2, 0, 1)


def test_a_foreign_file_with_groups_is_walked_and_one_that_is_linear_needs_no_mending(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["train/x"] = np.zeros((30, 6, 5, 3), np.uint8)
        file["train/y"] = np.arange(30)
        file["test/x"] = np.zeros((5, 6, 5, 3), np.uint8)
        file["elsewhere"] = h5py.ExternalLink("other.h5", "/x")
    info = inspect_file(tmp_path / "a.h5")
    assert info.layout is not None and info.layout.dataset == "train/x"
    assert (info.version, info.num_samples, info.seed) == (None, 30, None)
    assert set(info.fields) == {"train/x", "train/y", "test/x"}
    assert "cannot read this file as it is" in info.findings[0]
    assert "fastload pack IMAGES OUT.h5" in info.findings[-1]
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["images"] = np.zeros((10, 6, 5, 3), np.uint8)
    info = inspect_file(tmp_path / "b.h5")
    assert info.layout is not None and info.layout.linear and info.findings == ()


@pytest.mark.parametrize("content", ["nothing", "text", "encoded", "no rows"])
def test_a_foreign_file_without_pixels_is_described_too(tmp_path: Path, content: str) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if content == "text":
            file["words"] = np.array([b"a", b"b"])
        elif content == "encoded":
            file.create_dataset("images", (3,), h5py.vlen_dtype(np.uint8))
        elif content == "no rows":
            file.create_dataset("images", (0, 4, 4, 3), "u1")
    info = inspect_file(tmp_path / "a.h5")
    assert info.layout is None
    assert any("No dataset looks like images" in text for text in info.findings)
    json.dumps(info.to_dict())


def test_what_cannot_be_opened_or_is_newer_is_a_named_error(packed_copy: Path) -> None:
    with pytest.raises(MissingFileError, match="no such file"):
        inspect_file("absent.h5")
    with h5py.File(packed_copy, "r+") as file:
        file.attrs["fastload_version"] = 99
    with pytest.raises(FormatError, match="99"):  # not taken for a foreign file
        inspect_file(packed_copy)
    packed_copy.write_bytes(packed_copy.read_bytes()[:4500])
    with pytest.raises(FormatError, match="truncated"):
        inspect_file(packed_copy)


def test_a_store_is_described(tmp_path: Path) -> None:
    rows = varied_rows()
    found = inspect_file(varied_file(tmp_path / "a.h5", rows, masks=True))
    images, masks = found.stores["images"], found.stores["masks"]
    assert found.layout is None and found.findings == () and list(found.fields)[:2] == ["images", "masks"]
    assert {each.name: each.rows for each in images.encodings} == {"raw": 6, "jpeg": 6}
    assert [(each.name, each.rows, each.share_of_raw) for each in masks.encodings] == [("raw", NUM_ROWS, 1.0)]
    assert (images.num_sizes, images.smallest, images.largest) == (NUM_ROWS, (9, 20), (31, 31))
    assert images.stored_bytes == sum(len(row[0]) if isinstance(row, tuple) else row.nbytes for row in rows)
    assert found.pixel_bytes == images.pixel_bytes == 3 * masks.pixel_bytes
    assert images.allocated_bytes == images.num_chunks * 4096 >= images.stored_bytes
    assert 0 < images.filled <= 1 and images.beyond_chunk == 0 and images.row_bytes == images.stored_bytes // NUM_ROWS
    json.dumps(found.to_dict())
    rows = [np.zeros((4 + 40 * (i == 2), 8, 3), np.uint8) for i in range(6)]
    images = inspect_file(varied_file(tmp_path / "b.h5", rows, chunk_bytes=256)).stores["images"]
    assert images.beyond_chunk == 1 and images.chunk_bytes == 256


@pytest.mark.parametrize("size", [None, (16, 20)])
def test_the_command_shows_it(tmp_path: Path, size: tuple[int, int] | None) -> None:
    path = varied_file(tmp_path / "a.h5", varied_rows(size=size), masks=True)
    shown = CliRunner().invoke(app, ["info", str(path)], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "raw 6 (" in shown.output and "jpeg 6 (" in shown.output and "filled; each row whole in one" in shown.output
    assert ("12 sizes, heights 9 to 31, widths 20 to 31" if size is None else "16 x 20; ") in shown.output
    asked = CliRunner().invoke(app, ["info", str(path), "--json"])
    assert json.loads(asked.output)["stores"]["images"]["num_sizes"] == (NUM_ROWS if size is None else 1)


def test_large_compressed_chunks_are_to_become_small_ones_and_not_plain(tmp_path: Path) -> None:
    pixels = np.zeros((900, 16, 16, 3), np.uint8)
    pixels[:, :8] = np.random.default_rng(0).integers(0, 9, (900, 8, 16, 3))
    large, small, plain = (tmp_path / f"{name}.h5" for name in ("large", "small", "plain"))
    repack_file(write_packed(tmp_path / "a.h5", pixels), large, codec="gzip", chunk_bytes=2**20)
    hint = inspect_file(large).findings[-1]
    assert "`fastload repack FILE OUT.h5 --chunk-bytes 64KiB`, which keeps it compressed, and decodes 64.0 KiB" in hint
    repack_file(large, small, chunk_bytes=64 * 2**10)
    layout, hint = inspect_file(small).layout, inspect_file(small).findings[-1]
    assert layout is not None and layout.compressed and layout.decoded_bytes_per_image <= 64 * 2**10
    assert hint == "To fix this: `fastload repack FILE OUT.h5 --codec none`.", "it is as small as it gets"
    foreign = write_foreign(tmp_path / "b.h5", pixels, chunk_rows=900)
    hint = inspect_file(foreign).findings[-1]
    assert "`fastload repack FILE OUT.h5 --codec gzip`, which makes it compressed" in hint
    repack_file(foreign, plain, codec="gzip")
    layout = inspect_file(plain).layout
    assert layout is not None and layout.compressed and layout.decoded_bytes_per_image <= 64 * 2**10
    noise = np.random.default_rng(0).integers(0, 256, (900, 16, 16, 3), np.uint8)
    noisy = write_foreign(tmp_path / "c.h5", noise, chunk_rows=900)
    assert inspect_file(noisy).findings[-1].endswith("--codec none`."), "nothing is saved by its compression"
