from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fastload.inspection.compare
import fastload.pack.encode
from fastload.errors import FormatError, MissingFileError, OptionError
from fastload.inspection.verify import VerifyReport, verify_file
from fastload.pack import pack_images
from sample_files import write_packed

ImageFolder = Callable[..., Path]


def packed(source: Path, **options: object) -> Path:
    output = source.parent / "photos.h5"
    pack_images(source, output, workers=0, **options)  # type: ignore[arg-type]
    return output


def verify(path: Path, source: Path, workers: int = 0) -> VerifyReport:
    return verify_file(path, source=source, workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unchanged_source_gives_the_packed_pixels(image_folder: ImageFolder, workers: int) -> None:
    source = image_folder(per_class=40)
    report = verify(packed(source), source, workers)
    assert report.ok and report.source is not None
    assert (report.source.compared, report.source.changed, report.source.missing) == (80, (), ())
    assert report.source.same_decoder and report.source.inexact == 0


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_resized_and_converted_images_are_decoded_as_they_were_packed(image_folder: ImageFolder, fit: str) -> None:
    source = image_folder(size=(20, 33))
    assert verify(packed(source, size=(8, 9), fit=fit, mode="gray"), source).ok


def test_a_changed_image_is_named(image_folder: ImageFolder) -> None:
    source = image_folder()
    path = packed(source)
    Image.fromarray(np.zeros((12, 16, 3), np.uint8)).save(source / "cat" / "0003.jpg")
    report = verify(path, source)
    assert not report.ok and report.damaged == () and report.source is not None
    (changed,) = report.source.changed
    assert changed.key == "cat/0003.jpg" and "pixels differ by up to" in changed.reason


def test_an_image_that_no_longer_decodes_is_named(image_folder: ImageFolder) -> None:
    source = image_folder()
    path = packed(source)
    (source / "dog" / "0001.jpg").write_bytes(b"not an image")
    report = verify(path, source)
    assert report.source is not None
    assert [row.key for row in report.source.changed] == ["dog/0001.jpg"]
    assert "can no longer be decoded" in report.source.changed[0].reason


def test_missing_and_extra_images_are_named_and_only_missing_ones_fail(image_folder: ImageFolder) -> None:
    source = image_folder()
    path = packed(source)
    (source / "cat" / "0000.jpg").rename(source / "cat" / "new.jpg")
    report = verify(path, source)
    assert report.source is not None and not report.ok
    assert (report.source.missing, report.source.extra) == (("cat/0000.jpg",), ("cat/new.jpg",))
    limited = packed(source, limit=6, overwrite=True)
    report = verify(limited, source)
    assert report.ok and report.source is not None and len(report.source.extra) == 14


def test_a_sample_of_another_class_is_named(image_folder: ImageFolder) -> None:
    """An image moved to another folder has another key; a class that vanishes shifts the labels of the others."""
    source = image_folder(classes=("ape", "cat", "dog"))
    path = packed(source)
    for image in (source / "ape").iterdir():
        image.unlink()
    (source / "ape").rmdir()
    report = verify(path, source)
    assert report.source is not None and len(report.source.missing) == 10
    assert {row.reason for row in report.source.changed} == {"`labels` differs"}


def test_another_decoder_may_differ_by_three_levels(image_folder: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    source = image_folder()
    path = packed(source)
    real = fastload.pack.encode.decode_image

    def brighter(by: int) -> Callable[..., None]:
        def decode(data: bytes, target: object, out: np.ndarray) -> None:
            real(data, target, out)  # type: ignore[arg-type]
            np.minimum(out, 255 - by, out=out)
            out += by

        return decode

    monkeypatch.setattr(fastload.inspection.compare, "decoder_versions", lambda: "another decoder 9.0")
    monkeypatch.setattr(fastload.pack.encode, "decode_image", brighter(3))
    report = verify(path, source)
    assert report.ok and report.source is not None
    assert (report.source.inexact, report.source.max_levels) == (20, 3.0)
    monkeypatch.setattr(fastload.pack.encode, "decode_image", brighter(4))
    assert not verify(path, source).ok
    monkeypatch.setattr(fastload.inspection.compare, "decoder_versions", real_versions)
    monkeypatch.setattr(fastload.pack.encode, "decode_image", brighter(1))
    report = verify(path, source)
    assert report.source is not None and len(report.source.changed) == 20


real_versions = fastload.inspection.compare.decoder_versions


def test_a_source_that_has_nothing_of_the_file_is_refused(image_folder: ImageFolder) -> None:
    path = packed(image_folder())
    with pytest.raises(OptionError, match="none of its 20 samples"):
        verify(path, image_folder(classes=("car", "bus"), name="others"))
    with pytest.raises(MissingFileError):
        verify(path, path.parent / "nowhere")


def test_a_file_that_was_not_packed_from_files_is_refused(tmp_path: Path, image_folder: ImageFolder) -> None:
    path = write_packed(tmp_path / "a.h5", np.zeros((4, 12, 16, 3), np.uint8))
    with pytest.raises(FormatError, match="its pack_options cannot be read"):
        verify(path, image_folder())


def test_columns_with_absent_numbers_and_files_without_images_are_compared(tmp_path: Path) -> None:
    source, path = tmp_path / "tokens.npz", tmp_path / "tokens.h5"
    age = np.array([1.5, np.nan, 3.0])
    np.savez(source, input_ids=np.arange(12).reshape(3, 4), age=age)
    pack_images(source, path)
    assert verify(path, source).ok
    np.savez(source, input_ids=np.arange(12).reshape(3, 4), age=np.nan_to_num(age))
    report = verify(path, source)
    assert report.source is not None and [row.reason for row in report.source.changed] == ["`age` differs"]


def test_a_table_is_found_again_below_its_root(tmp_path: Path, image_folder: ImageFolder) -> None:
    folder, table, path = image_folder(), tmp_path / "list.csv", tmp_path / "a.h5"
    names = sorted(image.relative_to(folder).as_posix() for image in folder.rglob("*.*"))
    table.write_text("file,label\n" + "".join(f"{name},ape\n" for name in names))
    pack_images(table, path, root=folder)
    assert verify_file(path, source=table, root=folder, workers=0).ok
