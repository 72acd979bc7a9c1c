from __future__ import annotations

import json

import h5py
import numpy as np
from commands import run

from fastload.pack import pack_images
from sample_files import write_packed


def test_an_undamaged_file_is_one_line_and_damaged_rows_are_named_with_their_keys(packed_copy, tmp_path):
    result = run("verify", packed_copy)
    assert result.stdout.startswith("file.h5: 20 rows, every digest matches")
    assert result.stderr == ""
    with h5py.File(packed_copy, "r+") as file:
        file["images"][7, 0, 0, 0] ^= 1
        file["images"][11] = 0
    result = run("verify", packed_copy, code=1)
    assert "row 7 (00000007): its pixels changed since packing" in result.stdout
    assert "row 11 (00000011)" in result.stdout
    assert "2 of 20 rows damaged" in result.stderr and result.stderr.count("\n") == 1
    value = json.loads(run("verify", packed_copy, "--json", code=1).stdout)
    assert value["ok"] is False
    assert value["damaged"] == [{"row": row, "key": f"{row:08}", "what": "pixels"} for row in (7, 11)]
    with h5py.File(packed_copy, "r+") as file:
        file.attrs["seed"] = 5
    assert "its header is damaged" in run("verify", packed_copy, code=1).stderr
    # A long list of damage is counted.
    path = write_packed(tmp_path / "long.h5", np.ones((150, 4, 4, 1), np.uint8))
    with h5py.File(path, "r+") as file:
        file["images"][:130] = 0
    result = run("verify", path, code=1)
    assert result.stdout.count("row ") == 100
    assert "and 30 more" in result.stdout
    assert "130 of 150 rows damaged" in result.stderr


def test_what_cannot_be_decoded_does_not_count_as_equal_to_its_source(image_folder, tmp_path):
    source = image_folder()
    first = sorted(source.rglob("*.jpg"))[0]
    data = first.read_bytes()
    table = data.index(b"\xff\xc4")
    first.write_bytes(data[: table + 5] + b"\xff" * 16 + data[table + 21 :])
    pack_images(source, tmp_path / "a.h5", store="source", workers=0)
    result = run("verify", tmp_path / "a.h5", "--source", source, "--workers", 0, code=1)
    assert "source: 19 of 20 images decode to exactly the packed pixels" in result.stdout
    assert "it was damaged before it was packed" in result.stdout


def test_what_is_no_longer_as_in_the_source_is_named(image_folder, tmp_path):
    source = image_folder()
    pack_images(source, tmp_path / "a.h5", workers=0)
    changed, gone, *_, last = sorted(source.rglob("*.jpg"))
    changed.write_bytes(last.read_bytes())
    gone.unlink()
    result = run("verify", tmp_path / "a.h5", "--source", source, "--workers", 0, code=1)
    assert "missing from the source: cat/0001.jpg" in result.stdout and "(cat/0000.jpg): " in result.stdout
    said = "1 of 20 rows no longer as in the source, 1 of 20 rows missing from the source. The file is what was packed."
    assert said in result.stderr
