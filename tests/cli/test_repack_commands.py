"""`fastload repack`, `merge` and `export`."""

from __future__ import annotations

import pytest
from commands import refused, run, said

from fastload.format.header import read_header

PACKED = {"size": (8, 6, 3), "classes": ("cat", "dog"), "splits": {"train": 14, "val": 6}}


def test_repack_says_what_it_wrote(packed_copy, tmp_path):
    text = said(
        "repack", packed_copy, tmp_path / "b.h5", "--chunk-bytes", "1K", "--split", "train", "--label", "dog",
        "--shuffle", "--seed", "4",
    )  # fmt: skip
    assert "wrote 7 rows into" in text and "splits train 7" in text
    header = read_header(tmp_path / "b.h5")
    assert (header.seed, header.fields["images"].chunk_rows, header.splits) == (4, 7, {"train": range(7)})
    words = ["--codec", "gzip:1", "--key", "*1?", "--key", "*05"]
    assert "wrote 11 rows" in said("repack", packed_copy, tmp_path / "c.h5", *words)
    assert read_header(tmp_path / "c.h5").fields["images"].filters == ("deflate",)


def test_merge_says_what_it_joined(packed_copy, tmp_path):
    run("repack", packed_copy, tmp_path / "b.h5")
    text = said("merge", packed_copy, tmp_path / "b.h5", "-o", tmp_path / "c.h5")
    assert "wrote 40 rows into" in text and "splits train 28, val 12" in text
    assert "note Merged file.h5 (20 rows), b.h5 (20 rows)." in text


@pytest.mark.parametrize(
    ("format", "made"),
    [
        ("imagefolder", "train/*/*.png"),
        ("webdataset", "train-*.tar"),
        ("hf", "train/metadata.jsonl"),
        ("folder", "train"),
    ],
)
def test_export_writes_each_format(packed_copy, tmp_path, format, made):
    text = said("export", packed_copy, tmp_path / "out", "--format", format)
    assert "exported 20 images into" in text and list((tmp_path / "out").glob(made))
    assert ("fastload.json" in {path.name for path in (tmp_path / "out").iterdir()}) == (format == "folder")


def test_shards_have_at_most_so_many_bytes(packed_copy, tmp_path):
    text = said("export", packed_copy, tmp_path / "out", "--format", "webdataset", "--shard-bytes", "20K")
    shards = list((tmp_path / "out").iterdir())
    assert "layout WebDataset shards" in text and len(shards) > 2
    assert max(shard.stat().st_size for shard in shards) <= 20 * 1024


def test_export_says_what_it_made(packed_copy, tmp_path):
    text = said("export", packed_copy, tmp_path / "out", "--split", "val")
    assert "exported 6 images into" in text and "layout folders" in text
    assert len(list((tmp_path / "out" / "cat").iterdir())) == 3


@pytest.mark.parametrize(
    "words",
    [
        ("repack", "file.h5", "file.h5"), ("repack", "no.h5", "b.h5"), ("repack", "file.h5", "b.h5", "--codec", "zip"),
        ("repack", "file.h5", "b.h5", "--rows", "no.txt"), ("merge", "file.h5", "-o", "b.h5"),
        ("export", "file.h5", "file.h5"), ("export", "file.h5", "out", "--split", "x"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(packed_copy, tmp_path, words):
    paths = {"file.h5", "b.h5", "no.h5", "no.txt", "out"}
    refused(*(tmp_path / word if word in paths else word for word in words))
    assert [path.name for path in tmp_path.iterdir()] == ["file.h5"]
