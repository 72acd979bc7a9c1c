from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

import fastload.inspection.verify
import fastload.pack.encode
from fastload.errors import FormatError, MissingFileError, OptionError
from fastload.format.ragged import JPEG
from fastload.inspection.verify import SourceReport, VerifyReport, verify_file
from fastload.pack import pack_images
from sample_files import write_packed

ImageFolder = Callable[..., Path]


def packed(source: Path, **options: object) -> Path:
    output = source.parent / "photos.h5"
    pack_images(source, output, workers=0, **options)  # type: ignore[arg-type]
    return output


def verify(path: Path, source: Path, workers: int = 0) -> VerifyReport:
    return verify_file(path, source=source, workers=workers)


def compared(path: Path, source: Path, workers: int = 0) -> tuple[bool, SourceReport]:
    """Whether all is well, and the comparison with the source."""
    report = verify(path, source, workers)
    assert report.source is not None
    return report.ok, report.source


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unchanged_source_gives_the_packed_pixels(image_folder: ImageFolder, workers: int) -> None:
    source = image_folder(per_class=40)
    ok, found = compared(packed(source), source, workers)
    assert ok and (found.compared, found.changed, found.missing) == (80, (), ())
    assert found.same_decoder and found.inexact == 0


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_resized_and_converted_images_are_decoded_as_they_were_packed(image_folder: ImageFolder, fit: str) -> None:
    source = image_folder(size=(20, 33))
    assert verify(packed(source, size=(8, 9), fit=fit, mode="gray"), source).ok


def test_changed_missing_and_extra_images_are_named_and_only_extra_ones_are_fine(image_folder: ImageFolder) -> None:
    source = image_folder()
    path = packed(source)
    (source / "cat" / "0000.jpg").rename(source / "cat" / "new.jpg")
    Image.fromarray(np.zeros((12, 16, 3), np.uint8)).save(source / "cat" / "0003.jpg")
    (source / "dog" / "0001.jpg").write_bytes(b"not an image")
    ok, found = compared(path, source)
    assert not ok and (found.missing, found.extra) == (("cat/0000.jpg",), ("cat/new.jpg",))
    black, broken = sorted(found.changed, key=lambda changed: changed.key)
    assert black.key == "cat/0003.jpg" and "pixels differ by up to" in black.reason
    assert broken.key == "dog/0001.jpg" and "can no longer be decoded" in broken.reason
    (source / "dog" / "0001.jpg").unlink()
    ok, found = compared(packed(source, limit=6, overwrite=True), source)
    assert ok and len(found.extra) == 13


def test_a_sample_of_another_class_is_named(image_folder: ImageFolder) -> None:
    """An image moved to another folder has another key; a class that vanishes shifts the labels of the others."""
    source = image_folder(classes=("ape", "cat", "dog"))
    path = packed(source)
    for image in (source / "ape").iterdir():
        image.unlink()
    (source / "ape").rmdir()
    _, found = compared(path, source)
    assert len(found.missing) == 10 and {row.reason for row in found.changed} == {"`labels` differs"}


def test_another_decoder_may_differ_by_three_levels(image_folder: ImageFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    source = image_folder()
    path = packed(source)
    real, real_versions = fastload.pack.encode.decode_image, fastload.inspection.verify.decoder_versions

    def brighter(by: int) -> Callable[..., None]:
        def decode(data: bytes, target: object, out: np.ndarray) -> None:
            real(data, target, out)  # type: ignore[arg-type]
            np.minimum(out, 255 - by, out=out)
            out += by

        return decode

    monkeypatch.setattr(fastload.inspection.verify, "decoder_versions", lambda: "another decoder 9.0")
    monkeypatch.setattr(fastload.pack.encode, "decode_image", brighter(3))
    ok, found = compared(path, source)
    assert ok and (found.inexact, found.max_levels) == (20, 3.0)
    monkeypatch.setattr(fastload.pack.encode, "decode_image", brighter(4))
    assert not verify(path, source).ok
    monkeypatch.setattr(fastload.inspection.verify, "decoder_versions", real_versions)
    monkeypatch.setattr(fastload.pack.encode, "decode_image", brighter(1))
    assert len(compared(path, source)[1].changed) == 20


def test_a_source_without_its_samples_and_a_file_without_its_options_are_refused(
    tmp_path: Path, image_folder: ImageFolder
) -> None:
    source = image_folder()
    path = packed(source)
    with pytest.raises(OptionError, match="none of its 20 samples"):
        verify(path, image_folder(classes=("car", "bus"), name="others"))
    with pytest.raises(MissingFileError):
        verify(path, path.parent / "nowhere")
    with h5py.File(path, "r+") as file:  # of another release
        file.attrs["pack_options"] = '{"size": null, "store": "webp"}'
    for no_options in (path, write_packed(tmp_path / "a.h5", np.zeros((4, 12, 16, 3), np.uint8))):
        with pytest.raises(FormatError, match="its pack_options cannot be read"):
            verify(no_options, source)


def test_columns_with_absent_numbers_files_without_images_and_tables_with_a_root_are_compared(
    tmp_path: Path, image_folder: ImageFolder
) -> None:
    source, path = tmp_path / "tokens.npz", tmp_path / "tokens.h5"
    age = np.array([1.5, np.nan, 3.0])
    np.savez(source, input_ids=np.arange(12).reshape(3, 4), age=age)
    pack_images(source, path)
    assert verify(path, source).ok
    np.savez(source, input_ids=np.arange(12).reshape(3, 4), age=np.nan_to_num(age))
    assert [row.reason for row in compared(path, source)[1].changed] == ["`age` differs"]
    folder, table, path = image_folder(), tmp_path / "list.csv", tmp_path / "a.h5"
    names = sorted(image.relative_to(folder).as_posix() for image in folder.rglob("*.*"))
    table.write_text("file,label\n" + "".join(f"{name},ape\n" for name in names))
    pack_images(table, path, root=folder)
    assert verify_file(path, source=table, root=folder, workers=0).ok


KEYS = ("cat/0.jpg", "cat/1.jpg", "dog/2.png", "dog/3.jpg", "dog/4.jpg")


def photos(folder: Path) -> Path:
    """Images of several sizes: JPEGs, one of them gray and one to be turned, and a PNG."""
    rng = np.random.default_rng(5)
    for i, key in enumerate(KEYS):
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
        image = small.resize((40 + 3 * i, 50 - 4 * i), Image.Resampling.BICUBIC)
        exif = Image.Exif()
        if i == 3:
            exif[0x0112] = 6
        image.convert("L" if i == 1 else "RGB").save(path, **({"exif": exif} if i == 3 else {}))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"store": "source"},
        {"store": "jpeg:80"},
        {"store": "mixed:0.5"},
        {"store": "source", "max_size": 30},
        {"store": "jpeg", "size": 24},
        {"max_size": 30},
        {"codec": "zstd"},
        {"store": "source", "mode": "gray"},
    ],
    ids=str,
)
def test_an_unchanged_source_of_several_sizes_is_what_was_packed(tmp_path: Path, options: dict) -> None:
    folder = photos(tmp_path / "photos")
    path = packed(folder, **options)
    ok, found = compared(path, folder)
    assert ok and (found.compared, found.changed, found.inexact) == (len(KEYS), (), 0)


@pytest.mark.parametrize(("store", "workers"), [("raw", 0), ("source", 1), ("jpeg", 0)])
def test_changed_and_missing_images_of_several_sizes_are_named(tmp_path: Path, store: str, workers: int) -> None:
    folder = photos(tmp_path / "photos")
    path = packed(folder, store=store)
    Image.open(folder / KEYS[0]).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(folder / KEYS[0])
    data = (folder / KEYS[1]).read_bytes()
    (folder / KEYS[1]).write_bytes(data[:2] + b"\xff\xfe\x00\x07hello" + data[2:])  # a comment
    (folder / KEYS[2]).unlink()
    (folder / KEYS[3]).write_bytes((folder / KEYS[3]).read_bytes()[:300])
    Image.open(folder / KEYS[4]).resize((20, 20)).save(folder / KEYS[4])
    ok, report = compared(path, folder, workers)
    assert not ok and report.missing == (KEYS[2],)
    found = {row.key: row.reason for row in report.changed}
    assert found.pop(KEYS[1], None) == ("its JPEG has other bytes" if store == "source" else None)
    assert set(found) == {KEYS[0], KEYS[3], KEYS[4]}
    assert "differ by up to" in found[KEYS[0]] and "no longer be decoded" in found[KEYS[3]]
    assert "20x20 (width x height), packed was 52x34" in found[KEYS[4]]


def test_a_jpeg_made_from_a_source_that_is_none_is_made_again(tmp_path: Path) -> None:
    folder = photos(tmp_path / "photos")
    path = packed(folder, store="mixed:0.9")
    with h5py.File(path) as file:
        row = file["key"][()].tolist().index(KEYS[2].encode())
        assert file["images_encoding"][row] == JPEG
    assert verify(path, folder).ok
    Image.open(folder / KEYS[2]).transpose(Image.Transpose.FLIP_TOP_BOTTOM).save(folder / KEYS[2])
    (changed,) = compared(path, folder)[1].changed
    assert changed.key == KEYS[2] and "pixels differ by up to" in changed.reason


def test_masks_are_compared(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for i in range(4):
        for name, image in (
            ("images", Image.new("RGB", (20 + i, 16), (9 * i, 3, 1))), ("masks", Image.new("L", (20 + i, 16), i)),
        ):  # fmt: skip
            (root / name).mkdir(parents=True, exist_ok=True)
            image.save(root / name / f"{i}.png")
    path = packed(root)
    assert verify(path, root).ok
    Image.new("L", (22, 16), 7).save(root / "masks/2.png")
    assert [row.reason for row in compared(path, root)[1].changed] == ["its mask differs"]
