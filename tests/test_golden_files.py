"""Files packed by earlier releases are read by this one: kept files of every store, by every reader.

`tests/data/format_v1.h5` and `v1_*.h5` were written once and never change; `golden_rows.json` says what is in them. A
test that fails here means that files people have packed are no longer read as they were written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray
from PIL import Image

from fastload import FastLoader, PackedDataset, inspect_file, pack_images, verify_file
from fastload.export import export_file
from fastload.format.header import read_header
from fastload.format.ragged import ENCODINGS
from fastload.repack import repack_file
from fastload.transforms import CenterCrop

DATA = Path(__file__).parent / "data"
TABLE = DATA / "golden_rows.json"
GZIP, ZSTD = 1, 32015  # HDF5's numbers of these filters


def pixels(seed: int, height: int, width: int, channels: int = 3, dtype: str = "u1") -> NDArray[Any]:
    """An image whose every value tells its place and its number."""
    values = np.arange(height * width * channels) * 7 + seed * 11
    return (values % (251 if dtype == "u1" else 65521)).astype(dtype).reshape(height, width, channels)


def flat(seed: int, height: int, width: int) -> NDArray[np.uint8]:
    """An image of one colour, which every JPEG decoder gives back within a level or two."""
    return np.full((height, width, 3), (seed * 37 % 200 + 20, seed * 59 % 200 + 20, 90), np.uint8)


def saved(path: Path, image: NDArray[Any], **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(path, **options)


def several_sizes(folder: Path, output: Path, codec: str) -> None:
    """JPEGs of one colour and PNGs, all of different sizes, with masks."""
    for i in range(6):
        height, width = 8 + 2 * i, 20 - 2 * i
        if i % 2:
            saved(folder / f"images/{i}.jpg", flat(i, height, width), quality=92)
        else:
            saved(folder / f"images/{i}.png", pixels(i, height, width))
        saved(folder / f"masks/{i}.png", pixels(i, height, width, 1) % 5)
    pack_images(folder, output, workers=0, store="source", codec=codec, chunk_bytes=2048, seed=3)


def of_16_bits(folder: Path, output: Path) -> None:
    arrays = np.stack([pixels(i, 6, 7, 1, "u2") for i in range(5)])
    np.savez(folder / "a.npz", images=arrays, labels=np.array([2, 0, -1, 1, 2]))
    pack_images(folder / "a.npz", output, workers=0, codec="gzip", chunk_bytes=200)


def in_zstd_chunks(folder: Path, output: Path) -> None:
    arrays = np.stack([pixels(i, 8, 9) for i in range(7)])
    np.savez(folder / "a.npz", images=arrays, labels=np.eye(7, 4, dtype=np.uint8))
    pack_images(folder / "a.npz", output, workers=0, codec="zstd", chunk_bytes=500, shuffle=False)


def in_shards(folder: Path, output: Path) -> None:
    arrays = np.stack([pixels(i, 8, 9) for i in range(7)])
    np.savez(folder / "a.npz", images=arrays, labels=np.arange(7) % 3)
    pack_images(folder / "a.npz", output, workers=0, chunk_bytes=500, shards=2, seed=5)


def tokens_alone(folder: Path, output: Path) -> None:
    np.savez(folder / "a.npz", tokens=np.arange(24, dtype=np.int32).reshape(6, 4), labels=np.arange(6) % 2)
    pack_images(folder / "a.npz", output, workers=0)


def masks_of_16_bits(folder: Path, output: Path) -> None:
    arrays = np.stack([pixels(i, 8, 9) for i in range(5)])
    masks = np.stack([pixels(i, 8, 9, 1, "u2")[..., 0] for i in range(5)])
    np.savez(folder / "a.npz", images=arrays, masks=masks)
    pack_images(folder / "a.npz", output, workers=0, codec="none", seed=2)


STORES: dict[str, Callable[[Path, Path], None]] = {
    "v1_source.h5": lambda folder, output: several_sizes(folder, output, "none"),
    "v1_sizes_zstd.h5": lambda folder, output: several_sizes(folder, output, "zstd"),
    "v1_16_bits_gzip.h5": of_16_bits,
    "v1_zstd.h5": in_zstd_chunks,
    "v1_tokens.h5": tokens_alone,
    "v1_index.h5": in_shards,
    "v2_masks.h5": masks_of_16_bits,
}
"""Name of a kept file -> how it was made; `tools/refresh_golden.py stores` makes those that are absent."""

NAMES = ("format_v1.h5", *STORES)


def needs(name: str) -> None:
    if "zstd" in name:
        for module in ("zstandard", "hdf5plugin"):
            pytest.importorskip(module)


def decoded(name: str) -> Iterator[tuple[str, NDArray[Any], int]]:
    """Key, pixels (H, W, C) and by how many levels a decoder may differ, for each row in the order of the file."""
    with h5py.File(DATA / name) as file:
        keys = [key.decode() for key in file["key"][()]]
    for row, key in enumerate(keys):
        number = int("".join(filter(str.isdigit, key)))
        if name == "format_v1.h5":
            yield key, (np.arange(10 * 60) * 7 % 251).astype(np.uint8).reshape(10, 5, 4, 3)[row], 0
        elif name == "v1_16_bits_gzip.h5":
            yield key, pixels(number, 6, 7, 1, "u2"), 0
        elif name in ("v1_zstd.h5", "v1_index.h5", "v2_masks.h5"):
            yield key, pixels(number, 8, 9), 0
        else:
            size = 8 + 2 * number, 20 - 2 * number
            yield key, (flat if number % 2 else pixels)(number, *size), 3 if number % 2 else 0


def kept_rows(path: Path) -> dict[str, Any]:
    """What a kept file holds, by h5py alone: its identity, and the XXH3-64 of the file and of each dataset's bytes."""
    if "zstd" in path.name:
        import hdf5plugin  # noqa: F401
    with h5py.File(path) as file:
        found: list[str] = []
        file.visit(found.append)
        digests = {
            name: f"{file[name].dtype.str} {list(file[name].shape)} "
            f"{xxhash.xxh3_64_hexdigest(np.asarray(file[name][()]).astype(file[name].dtype).tobytes())}"
            for name in sorted(found)
            if isinstance(file[name], h5py.Dataset)
        }
        whole = xxhash.xxh3_64_hexdigest(path.read_bytes())
        return {"file": whole, "header_digest": file.attrs["header_digest"].decode(), "datasets": digests}


def assert_alike(found: NDArray[Any], wanted: NDArray[Any], levels: int) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found.astype(np.int64) - wanted.astype(np.int64)).max() <= levels


@pytest.mark.parametrize("name", NAMES)
def test_a_kept_file_is_what_was_written_and_no_tool_of_ours_is_needed_to_see_it(name: str) -> None:
    needs(name)
    assert kept_rows(DATA / name) == json.loads(TABLE.read_text(encoding="utf-8"))[name]


def test_the_kept_files_are_small_and_of_every_store() -> None:
    assert set(json.loads(TABLE.read_text(encoding="utf-8"))) == set(NAMES)
    assert sum((DATA / name).stat().st_size for name in STORES) < 70_000
    stored: set[str | int] = set()
    for name in STORES:
        with h5py.File(DATA / name) as file:
            for field in file.keys() & {"images", "masks"}:
                plan = file[field].id.get_create_plist()
                stored |= {plan.get_filter(at)[0] for at in range(plan.get_nfilters())}
            if "images_encoding" in file:
                stored |= {ENCODINGS[number] for number in file["images_encoding"][()].tolist()}
    assert stored == {"raw", "jpeg", "zstd", GZIP, ZSTD}


@pytest.mark.parametrize("name", NAMES)
def test_header_digests_and_info_of_a_kept_file_are_right(name: str) -> None:
    needs(name)
    table = json.loads(TABLE.read_text(encoding="utf-8"))[name]
    header = read_header(DATA / name)
    version = 2 if name.startswith("v2") else 1
    assert (header.version, header.header_digest) == (version, table["header_digest"])
    assert verify_file(DATA / name, workers=0).ok
    info = inspect_file(DATA / name)
    assert (info.num_samples, info.header_digest) == (header.num_rows, header.header_digest)


@pytest.mark.parametrize("read", ["map", "pread"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "v1_tokens.h5"])
def test_dataset_and_loader_give_every_pixel_of_a_kept_file(name: str, read: Any) -> None:
    needs(name)
    wanted = list(decoded(name))
    dataset = PackedDataset(DATA / name, fields=("images",))
    for (_, image, levels), (found,) in zip(wanted, dataset, strict=True):
        assert_alike(found.permute(1, 2, 0).numpy(), image, levels)
    varied = dataset.file.fields["images"].varied
    loader = FastLoader(
        dataset.reading(read),
        4,
        shuffle=False,
        ends="exact",
        share=None,
        transform=[CenterCrop((8, 10))] if varied else (),
    )
    seen = []
    for batch in loader:
        for row, image in zip(batch.rows[batch.valid].tolist(), batch[0][batch.valid], strict=True):
            _, pixels_of_row, levels = wanted[row]
            if varied:
                top, left = (pixels_of_row.shape[0] - 8) // 2, (pixels_of_row.shape[1] - 10) // 2
                pixels_of_row = pixels_of_row[top : top + 8, left : left + 10]
            assert_alike(image.permute(1, 2, 0).numpy(), pixels_of_row, levels)
            seen.append(row)
    assert seen == list(range(len(wanted)))


def test_masks_of_16_bits_of_a_kept_file_are_read() -> None:
    with h5py.File(DATA / "v2_masks.h5") as file:
        numbers = [int(key) for key in file["key"][()]]
    for (mask,), number in zip(PackedDataset(DATA / "v2_masks.h5", fields=("masks",)), numbers, strict=True):
        np.testing.assert_array_equal(mask.numpy(), pixels(number, 8, 9, 1, "u2")[..., 0])


def test_tokens_and_masks_of_kept_files_are_read() -> None:
    tokens = [tuple(map(np.asarray, sample)) for sample in PackedDataset(DATA / "v1_tokens.h5", fields=("tokens",))]
    assert sorted(int(row[0][0]) for row in tokens) == [0, 4, 8, 12, 16, 20]
    with h5py.File(DATA / "v1_source.h5") as file:
        keys = file["key"].asstr()[()].tolist()
    for (mask,), key in zip(PackedDataset(DATA / "v1_source.h5", fields=("masks",)), keys, strict=True):
        number = int("".join(filter(str.isdigit, key)))
        np.testing.assert_array_equal(mask.numpy(), pixels(number, 8 + 2 * number, 20 - 2 * number, 1)[..., 0] % 5)


@pytest.mark.parametrize("name", NAMES)
def test_a_kept_file_can_be_copied_and_exported(name: str, tmp_path: Path) -> None:
    needs(name)
    repack_file(DATA / name, tmp_path / "again.h5", workers=0)
    with h5py.File(DATA / name) as then, h5py.File(tmp_path / "again.h5") as now:
        rows = [then["key"][()].tolist().index(key) for key in now["key"][()].tolist()]
        assert then["digest"][()][rows].tolist() == now["digest"][()].tolist()
    if name == "v1_tokens.h5":
        return
    export_file(DATA / name, tmp_path / "out", workers=1)
    rows_of = json.loads((tmp_path / "out" / "fastload.json").read_text(encoding="utf-8"))["rows"]
    wanted = {key: (image, levels) for key, image, levels in decoded(name)}
    for key, path, _ in rows_of:
        with Image.open(tmp_path / "out" / path) as found:
            image = np.asarray(found)
        assert_alike(image if image.ndim == 3 else image[..., None], *wanted[key])
