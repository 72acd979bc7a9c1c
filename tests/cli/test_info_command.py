"""`fastload info` and `fastload preview`."""

from __future__ import annotations

import json

import commands
import h5py
import numpy as np
from commands import refused, said
from PIL import Image

from fastload.format.ragged import Column
from sample_files import write_packed

PACKED = {"classes": ("class_0", "class_1"), "splits": {"train": 15, "val": 5}, "chunk_rows": 6}


def run(*args):
    return commands.run("info", *args).stdout


def test_the_facts_of_a_packed_file_are_shown(packed):
    text = said("info", packed)
    for fact in (
        "samples 20", "train 15, val 5", "2: class_0 10, class_1 10", "4 of 6 images", "20 x 16 x 12 x 3",
        "one linear array from byte 4,096", "shuffled within each split, seed 0",
    ):  # fmt: skip
        assert fact in text


def test_json_is_one_object_and_nothing_else(packed):
    value = json.loads(run(packed, "--json"))
    assert value["num_samples"] == 20
    assert {"fields", "splits", "classes", "layout", "file_bytes", "pixel_bytes", "header_digest"} <= set(value)
    assert value["splits"] == {"train": [0, 15], "val": [15, 20]} and "shuffle_quality" not in value
    value = json.loads(run(packed, "--json", "--shuffle-quality"))["shuffle_quality"]
    assert value["split"] == "train" and value["num_rows"] == 15 and value["batch_size"] == 3
    assert [order["shuffle"] for order in value["orders"]][:2] == ["full", "ChunkWindow(64)"]


def test_what_is_ignored_in_masks_has_a_share_beside_those_of_values(tmp_path):
    masks = np.zeros((4, 10, 10), np.uint8)
    masks[:, :3], masks[:, 3:4] = 1, 255
    pixels = np.zeros((4, 10, 10, 3), np.uint8)
    for ignored, shown in (
        (255, "values: 0 60 %, 1 30 % of the pixels; ignored (255) 10 %"),
        (0, "values: 1 30 %, 255 10 % of the pixels; ignored (0) 60 %"),
        (7, "values: 0 60 %, 1 30 %, 255 10 % of the pixels\n"),
        (None, "values: 0 60 %, 1 30 %, 255 10 % of the pixels\n"),
    ):
        text = said("info", write_packed(tmp_path / "a.h5", pixels, masks=masks, ignore_index=ignored))
        assert shown.strip() in text and ("ignored" in shown) == ("ignored" in text)


def test_twenty_thousand_classes_do_not_flood_the_terminal(packed_file):
    path = packed_file(classes=tuple(f"class_{i}" for i in range(20_000)))
    text = run(path)
    assert len(text) < 3000
    assert "20,000: class_0 1, class_1 1" in text and "and 19,988 more" in text
    assert len(json.loads(run(path, "--json"))["classes"]) == 20_000


def test_a_foreign_file_gets_its_findings_and_its_names_cannot_steer_the_terminal(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", (100, 3, 218, 178), "u1", chunks=(100, 3, 217, 178))[:] = 1
        file["evil\x1b[31m\n[bold]"] = np.zeros(100)
    text = run(tmp_path / "a.h5")
    assert "not packed by fastload" in text
    assert "cut the images" in text and "2 chunks" in text and "fastload repack FILE OUT.h5" in text
    assert "\x1b" not in text and "evil\\x1b[31m\\n[bold]" in text


def test_shuffle_quality_is_a_line_a_shuffle_with_a_star_where_it_is_worse_than_full(tmp_path):
    labels = Column(np.arange(800) // 80)
    images = np.zeros((800, 2, 2, 1), np.uint8)
    path = write_packed(tmp_path / "a.h5", images, {"labels": labels}, chunk_rows=8, shuffled=False)
    text = run(path, "--shuffle-quality", "--batch-size", 20)
    assert "800 samples in batches of 20, chunks of 8" in text
    lines = [line.split() for line in text.splitlines()]
    assert lines[next(i for i, line in enumerate(lines) if line[:1] == ["full"])].count("*") == 0
    assert ["False", "1", "1.000", "*", "20.487", "*", "0.000", "*", "100", "%", "*"] in lines
    assert "shuffle=True means full for this file: as good as full shuffle by every measure." in text
    assert "shuffle quality" not in run(path)
    few = write_packed(tmp_path / "few.h5", np.zeros((5, 2, 2, 1), np.uint8))
    assert "5 rows are too few" in refused("info", few, "--shuffle-quality")


def test_the_stores_are_measured_only_where_that_is_asked(tmp_path):
    path = write_packed(tmp_path / "a.h5", np.zeros((6, 8, 9, 3), np.uint8))
    assert "from this disk" not in run(path)
    assert "pick raw" in said("info", path, "--stores")
    found = json.loads(run(path, "--stores", "--json"))["store_estimates"]
    assert found["pick"] == "raw" and found["sampled"] == 6 and set(found["disk"]) == {"bytes_per_s", "note"}
    assert [store["store"] for store in found["stores"]] == ["raw", "jpeg:90", "mixed:0.5"]
    assert "store_estimates" not in json.loads(run(path, "--json"))


def test_the_sheet_is_drawn_beside_the_file_and_not_over_another(packed_copy, tmp_path):
    assert said("preview", packed_copy, "--count", 7).startswith("7 images of file.h5 drawn in")
    with Image.open(tmp_path / "file.png") as sheet:
        assert sheet.format == "PNG"
    assert "exists" in refused("preview", packed_copy)
    commands.run("preview", packed_copy, "--overwrite")
    commands.run("preview", packed_copy, "-o", tmp_path / "grid.png")
    assert (tmp_path / "grid.png").exists()


def test_a_preview_of_no_rows_or_of_rows_and_a_count_is_refused(packed_copy, tmp_path):
    for words in (["--rows", ""], ["--rows", "a"], ["--rows", "1,2", "--count", "3"]):
        assert "--rows" in commands.run("preview", packed_copy, "-o", tmp_path / "a.png", *words, code=2).stderr
    assert "2 images" in commands.run("preview", packed_copy, "-o", tmp_path / "a.png", "--rows", "1,2").output
