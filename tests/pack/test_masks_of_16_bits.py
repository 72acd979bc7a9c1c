"""Masks with numbers above 255, from their files through packing, copies and exports to the batches of a loader."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from golden_sources import png, write
from numpy.typing import NDArray
from small_loaders import loader_of

import fastload
from fastload import transforms
from fastload.errors import SourceError
from fastload.export import export_file
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.inspection.info import inspect_file
from fastload.inspection.preview import make_preview
from fastload.options.pack import PackOptions, SourceOptions
from fastload.pack import PackJob, pack_listing
from fastload.pack.index import index_files
from fastload.repack import append_images, merge_files, repack_file
from fastload.sources.layouts import list_source

COUNT, HEIGHT, WIDTH = 8, 24, 32
CODECS = {"rows": "none", "gzip": "gzip", "ragged": "none", "zstd": "zstd"}
"""How masks are stored: rows of one size, plain or in chunks; rows of several sizes, plain or compressed."""


def pixels_of(at: int, height: int = HEIGHT, width: int = WIDTH) -> tuple[NDArray[np.uint8], NDArray[np.uint16]]:
    """An image that says in its first two channels what the third, and so the mask, holds in each place."""
    row, column = np.mgrid[:height, :width]
    mask = (1000 * at + 40 * row + column // 4 * 4).astype(np.uint16)  # regions, as masks have
    return np.stack([mask >> 8, mask & 255, mask * 0 + 7], axis=-1).astype(np.uint8), mask


def folder_of(root: Path, *, varied: bool = False, first: int = 1, count: int = COUNT) -> Path:
    for at in range(first, first + count):
        image, mask = pixels_of(at, HEIGHT + (at % 3) * varied, WIDTH)
        write(root / f"images/{at}.png", png(image))
        write(root / f"masks/{at}.png", png(mask))
    return root


def packed_in(tmp_path: Path, form: str) -> Path:
    source = folder_of(tmp_path / "in", varied=form in ("ragged", "zstd"))
    fastload.pack_images(source, tmp_path / "a.h5", codec=CODECS[form], workers=0)
    return tmp_path / "a.h5"


def expected(images: NDArray[Any]) -> NDArray[np.uint16]:
    """The masks of images (..., 3) whose pixels were moved and not mixed."""
    return images[..., 0].astype(np.uint16) << 8 | images[..., 1]


@pytest.mark.parametrize("form", ["gzip", "ragged"])
def test_masks_above_255_are_packed_as_uint16_and_pass_a_check_against_their_source(tmp_path: Path, form: str) -> None:
    path = packed_in(tmp_path, form)
    file = read_header(path)
    assert file.fields["masks"].dtype == np.uint16 and file.version == 2
    assert fastload.verify_file(path, source=tmp_path / "in", workers=0).ok
    assert 1000 < max(inspect_file(path).mask_shares) < 65_535
    with h5py.File(path) as hdf5:
        if form == "gzip":
            assert hdf5["masks"].dtype == np.uint16 and (hdf5["masks"][()] == expected(hdf5["images"][()])).all()
        write(tmp_path / "in/masks/1.png", png(pixels_of(2, HEIGHT + (form in ("ragged", "zstd")), WIDTH)[1]))
    assert len(fastload.verify_file(path, source=tmp_path / "in", workers=0).source.changed) == 1


def test_masks_of_16_bits_that_hold_small_numbers_stay_uint8_and_format_1(tmp_path: Path) -> None:
    for at in range(3):
        write(tmp_path / f"in/images/{at}.png", png(pixels_of(at)[0]))
        write(tmp_path / f"in/masks/{at}.png", png(np.full((HEIGHT, WIDTH), 253 + at, np.uint16)))
    fastload.pack_images(tmp_path / "in", tmp_path / "a.h5", workers=0)
    file = read_header(tmp_path / "a.h5")
    assert (file.fields["masks"].dtype, file.version) == (np.uint8, 1)
    with pytest.raises(SourceError, match=r"its mask holds the value 9948, where masks of this dataset hold 0 to 255"):
        append_images(tmp_path / "a.h5", folder_of(tmp_path / "more", first=9, count=1), workers=0)


MOVES: dict[str, list[Any]] = {
    "none": [],
    "flips": [transforms.RandomHorizontalFlip(), transforms.RandomVerticalFlip(0.5)],
    "crop": [transforms.CenterCrop((16, 20))],
    "pad": [transforms.RandomCrop((16, 20), padding=6)],
    "resized crop": [transforms.RandomResizedCrop(16)],
    "resize, crop, flip": [transforms.Resize(20), transforms.CenterCrop(16), transforms.RandomHorizontalFlip()],
    "two resizes": [transforms.Resize((18, 22)), transforms.RandomResizedCrop(16)],
    "crop, policy": [transforms.CenterCrop((16, 20)), transforms.RandAugment(3, 20)],
    "crop, cutmix": [transforms.CenterCrop((16, 20)), transforms.CutMix(num_classes=COUNT)],
}


def written(path: Path, dtype: Any, shift: int, ignored: int, form: str) -> Path:
    """A file of images with the low or the high byte of each mask, or the whole, in rows of one size or of several."""
    source = path.with_suffix("")
    for at in range(1, COUNT + 1):
        image, mask = pixels_of(at, HEIGHT + (at % 3) * (form in ("ragged", "zstd")), WIDTH)
        write(source / f"train/images/{at}.png", png(image))
        write(source / f"train/masks/{at}.png", png((mask >> shift & np.iinfo(dtype).max).astype(dtype)))
    listing = list_source(source, "mask-folders", options=SourceOptions(mask_files="train/masks/*"))
    masks = replace(listing.masks, ignore_index=ignored)
    labels = Column(np.arange(COUNT) % 3)
    job = PackJob("S", path, replace(listing, masks=masks, columns={"labels": labels}), PackOptions(codec=CODECS[form]))
    pack_listing(job, workers=0)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Callable[[str], list[Path]]:
    """Returns files in a form: of the masks, and of their low and their high bytes as masks of 8 bits."""
    kinds = {"whole": (np.uint16, 0, 65_535), "low": (np.uint8, 0, 255), "high": (np.uint8, 8, 255)}

    @functools.cache
    def made(form: str) -> list[Path]:
        root = tmp_path_factory.mktemp("masks")
        return [written(root / f"{name}.h5", *kind, form) for name, kind in kinds.items()]

    return made


CASES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("rows", {}, ["flips", "pad", "resized crop", "crop, policy", "crop, cutmix"]),
    ("rows", {"batch": "pad"}, ["none"]),
    ("gzip", {"read": "pread"}, ["none", "crop"]),
    ("ragged", {}, ["resized crop", "two resizes"]),
    ("ragged", {"batch": "list"}, ["flips", "resized crop"]),
    ("zstd", {"read": "pread"}, ["resize, crop, flip", "pad"]),
    ("zstd", {"batch": "pad"}, ["none"]),
]
"""How masks are stored, read and moved: every reader and every way to a batch is among them."""


def batches(path: Path, moves: list[Any], options: dict[str, Any]) -> list[Any]:
    loader = loader_of(path, 3, fields=("images", "masks", "labels"), seed=5, ends="exact", transform=moves, **options)
    return [[mask.numpy().copy() for mask in batch[1]] for batch in loader]


@pytest.mark.parametrize(("form", "options", "names"), CASES)
def test_both_bytes_of_a_mask_are_moved_as_masks_of_8_bits_are(
    files, form: str, options: dict[str, Any], names: list[str]
) -> None:
    for name in names:
        whole, low, high = (batches(path, MOVES[name], options) for path in files(form))
        assert len(whole) == 3 and any((mask > 255).any() for batch in whole for mask in batch)
        for batch, *halves in zip(whole, low, high, strict=True):
            for mask, one, other in zip(batch, *halves, strict=True):
                assert mask.dtype == np.uint16 and one.dtype == np.uint8, name
                assert np.array_equal(mask, one.astype(np.uint16) | other.astype(np.uint16) << 8), name
        if name == "pad" or (form == "zstd" and name == "none"):
            assert any((mask == 65_535).any() for batch in whole for mask in batch), "what is ignored fills the border"


@pytest.mark.parametrize("form", ["rows", "zstd"])
def test_copies_and_exports_hold_the_same_masks(tmp_path: Path, form: str) -> None:
    path = packed_in(tmp_path, form)
    repack_file(path, tmp_path / "again.h5", shuffle=True, workers=0)
    folder_of(tmp_path / "other", varied=form in ("ragged", "zstd"), first=COUNT + 1, count=3)
    options: dict[str, Any] = {"codec": CODECS[form], "workers": 0}
    fastload.pack_images(tmp_path / "other", tmp_path / "b.h5", **options)
    merge_files([path, tmp_path / "b.h5"], tmp_path / "both.h5", workers=0)
    export_file(tmp_path / "both.h5", tmp_path / "files", workers=1)
    fastload.pack_images(tmp_path / "files", tmp_path / "back.h5", **options)
    append_images(path, tmp_path / "other", workers=0)
    for name, count in (("again.h5", COUNT), ("both.h5", COUNT + 3), ("back.h5", COUNT + 3), ("a.h5", COUNT + 3)):
        file = read_header(tmp_path / name)
        assert (file.fields["masks"].dtype, file.version, file.num_rows) == (np.uint16, 2, count)
        assert fastload.verify_file(tmp_path / name, workers=0).ok
        dataset = fastload.PackedDataset(tmp_path / name, fields=("images", "masks"))
        for row in range(count):
            image, mask = dataset[row]
            assert (mask.numpy() == expected(image.permute(1, 2, 0).numpy())).all()
    if form == "rows":
        make_preview(tmp_path / "both.h5", tmp_path / "sheet.png", count=4)
        index_files([tmp_path / "both.h5"], tmp_path / "index.h5")
        assert read_header(tmp_path / "index.h5").version == 2


def test_more_than_255_classes_are_named_by_values_and_have_65535_for_none(tmp_path: Path) -> None:
    codes = [7 * value for value in range(300)]
    for at in range(2):
        write(tmp_path / f"in/images/{at}.png", png(np.zeros((20, 30, 3), np.uint8)))
        write(tmp_path / f"in/masks/{at}.png", png(np.resize(np.array([*codes, 9_999], np.uint16), (20, 30))))
    values = ",".join(map(str, [*codes, 9_999]))
    fastload.pack_images(tmp_path / "in", tmp_path / "a.h5", mask_values=values, ignore_index=9_999, workers=0)
    field = read_header(tmp_path / "a.h5").fields["masks"]
    assert field.dtype == np.uint16 and len(field.names) == 300 and field.attrs["ignore_index"] == 65_535
    with h5py.File(tmp_path / "a.h5") as file:
        assert (file["masks"][0].reshape(-1)[:301] == [*range(300), 65_535]).all()


def test_masks_of_objects_and_arrays_may_have_16_bits(tmp_path: Path) -> None:
    image, mask = pixels_of(3)
    samples = [{"image": image, "mask": mask}, {"image": image, "mask": None}]
    fastload.pack_images(samples, tmp_path / "a.h5", shuffle=False, workers=0)
    np.savez(tmp_path / "b.npz", images=np.stack([image] * 2), masks=np.stack([mask] * 2).astype(np.int32))
    fastload.pack_images(tmp_path / "b.npz", tmp_path / "b.h5", shuffle=False, workers=0)
    for name in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / name) as file:
            assert file["masks"].dtype == np.uint16 and (file["masks"][0] == mask).all()
            if name == "a.h5":
                assert file["masks"].attrs["ignore_index"] == 65_535 and (file["masks"][1] == 65_535).all()


def test_masks_of_another_program_become_uint16_where_their_numbers_need_it(tmp_path: Path) -> None:
    image, mask = pixels_of(3)
    for name, masks, dtype in (("deep", mask, np.uint16), ("small", mask % 200, np.uint8)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["images"], file["masks"] = np.stack([image] * 2), np.stack([masks] * 2).astype(np.int32)
        repack_file(tmp_path / f"{name}.h5", tmp_path / f"{name}-packed.h5", workers=0)
        with h5py.File(tmp_path / f"{name}-packed.h5") as file:
            assert file["masks"].dtype == dtype and (file["masks"][1] == masks).all()
