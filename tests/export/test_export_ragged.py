"""Export of files with rows of varying length."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from interrupted import stop_at
from PIL import Image
from ragged_cases import NUM_ROWS, flip, varied_file, varied_rows

from fastload.errors import OutputError, SourceError
from fastload.export import JOURNAL, export_file, unfinished
from fastload.format.header import read_header
from fastload.read.checked import CheckedSamples
from fastload.sources.layouts import list_source


def exported_masks(path: Path) -> list[np.ndarray]:
    samples = CheckedSamples(read_header(path))
    found = [samples.pixels("masks", row) for row in range(NUM_ROWS)]
    samples.close()
    return found


@pytest.mark.parametrize("masks", [False, True])
def test_jpegs_stay_what_they_are_and_the_others_become_png(tmp_path: Path, masks: bool) -> None:
    rows = varied_rows()
    path = varied_file(tmp_path / "a.h5", rows, masks=masks)
    report = export_file(path, tmp_path / "out", layout="csv", workers=2)
    assert (report.num_images, report.num_masks, report.kept) == (NUM_ROWS, NUM_ROWS * masks, 0)
    assert report.notes[-1].startswith("6 images are stored as JPEG, and written as they are")
    for i, row in enumerate(rows):
        if isinstance(row, tuple):
            assert (tmp_path / f"out/images/{i:03d}.jpg").read_bytes() == row[0]
        else:
            assert np.array_equal(np.asarray(Image.open(tmp_path / f"out/images/{i:03d}.png")), row)
    if masks:
        for i, mask in enumerate(exported_masks(path)):
            assert np.array_equal(np.asarray(Image.open(tmp_path / f"out/mask_images/{i:03d}.png")), mask)
    listing = list_source(tmp_path / "out", "exported")
    assert listing.keys == tuple(f"{i:03d}.jpg" for i in range(NUM_ROWS)) and (listing.masks is not None) == masks


def test_class_folders_and_names_that_meet(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.h5", splits={"all": NUM_ROWS})
    export_file(path, tmp_path / "out")
    found = sorted(str(each.relative_to(tmp_path / "out")) for each in (tmp_path / "out").rglob("*.*g"))
    assert len(found) == NUM_ROWS and found[:4] == ["ant/000.png", "ant/003.jpg", "ant/006.png", "ant/009.jpg"]


def test_an_interrupted_export_goes_on_and_overwrites_no_jpeg_that_was_changed_meanwhile(tmp_path: Path) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    export_file(path, tmp_path / "whole", layout="csv")
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        export_file(path, out, layout="csv", workers=0, progress=stop_at(1))
    jpeg, other = out / "images/003.jpg", io.BytesIO()
    assert (out / JOURNAL).exists() and jpeg.exists()
    part = jpeg.read_bytes()[:90]
    Image.new("RGB", (28, 15)).save(other, "JPEG")
    jpeg.write_bytes(other.getvalue())
    with pytest.raises(OutputError, match=r"003\.jpg: was changed since"):
        export_file(path, out, layout="csv")
    jpeg.write_bytes(part)  # as a power cut leaves it
    holed = (tmp_path / "whole/images/009.jpg").read_bytes()
    (out / "images/009.jpg").write_bytes(holed[: len(holed) // 2].ljust(len(holed), b"\0"))  # which libjpeg decodes
    assert 0 < export_file(path, out, layout="csv").kept < NUM_ROWS
    for each in (tmp_path / "whole").rglob("*.*"):
        assert each.read_bytes() == (out / each.relative_to(tmp_path / "whole")).read_bytes()
    assert not unfinished(jpeg).exists()


@pytest.mark.parametrize(("field", "row"), [("images", 3), ("images", 4), ("masks", 5)])
def test_a_damaged_row_is_named(tmp_path: Path, field: str, row: int) -> None:
    path = varied_file(tmp_path / "a.h5", masks=True)
    flip(path, field, row, -5)
    with pytest.raises(SourceError, match=rf"00{row}\.jpg is damaged: its pixels changed since packing"):
        export_file(path, tmp_path / "out")
