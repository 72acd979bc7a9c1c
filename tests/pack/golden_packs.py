"""Packs of small sources by every layout and option that changes bytes, and what of each must never change.

Only what a user can call is used here, so that a move of modules cannot change this file together with what it guards.
The table is `tests/data/golden_bytes.json`; `test_golden_bytes` compares with it, `tools/refresh_golden.py` writes it.
"""

from __future__ import annotations

import hashlib
import io
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import golden_sources as sources
import h5py
import numpy as np
from click.testing import CliRunner
from h5py import h5d
from PIL import Image

from fastload import pack_images
from fastload.cli import app

TABLE = Path(__file__).parents[1] / "data" / "golden_bytes.json"

VERSIONS = ("decoder", "fastload_writer", "header_digest")
"""Root attributes that tell versions of libraries, or are a digest over these."""

Make = Callable[[Path], Path]


@dataclass(frozen=True)
class Case:
    """One packed file.

    Attributes:
        make: packs into an empty folder and returns the file.
        needs: modules without which it cannot be made.
        encodes: images become JPEG on the way: their bytes, and so their lengths and digests, are up to libjpeg.
    """

    make: Make
    needs: tuple[str, ...] = ()
    encodes: bool = False


def command(*words: object) -> str:
    """What the command line prints; it must succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exit_code:
        raise AssertionError(f"fastload {' '.join(map(str, words))}: {result.output}") from result.exception
    return result.output


def _packed(source: Make, **options: Any) -> Make:
    def make(folder: Path) -> Path:
        return pack_images(source(folder / "source"), folder / "packed.h5", workers=0, **options).path

    return make


def _exported(folder: Path) -> Path:
    first = pack_images(sources.manifest(folder / "source"), folder / "first.h5", workers=0).path
    command("export", first, folder / "exported", "--workers", 1)
    return pack_images(folder / "exported", folder / "packed.h5", workers=0, seed=2).path


def _sequence(*items: Any, **options: Any) -> Make:
    return lambda folder: pack_images(items, folder / "packed.h5", workers=0, **options).path


def _by_command(folder: Path) -> Path:
    source = sources.manifest(folder / "source")
    command(
        "pack", source, folder / "packed.h5", "--size", "8x8", "--fit", "crop", "--seed", 3, "--chunk-bytes", "1K",
        "--labels", "label", "--image-column", "image", "--split-column", "split", "--workers", 0,
    )  # fmt: skip
    return folder / "packed.h5"


def _repacked(source: Make, *words: object, **options: Any) -> Make:
    def make(folder: Path) -> Path:
        first = _packed(source, **options)(folder)
        command("repack", first, folder / "again.h5", "--workers", 1, *words)
        return folder / "again.h5"

    return make


def _repacked_rows(folder: Path) -> Path:
    rows = sources.write(folder / "rows.txt", "5\n0\n3 # out of order\n")
    return _repacked(sources.folder, "--rows", rows)(folder)


def _repacked_foreign(folder: Path) -> Path:
    """A file of images of another writer is taken as it is."""
    with h5py.File(folder / "other.h5", "w") as file:
        file.create_dataset("images", data=sources.noise("other", 7, 6, 5, 3), chunks=(2, 6, 5, 3), compression="gzip")
        file["labels"] = np.arange(7) % 3
    command("repack", folder / "other.h5", folder / "again.h5", "--workers", 1)
    return folder / "again.h5"


def _merged(first: Make, second: Make, *words: object, **options: Any) -> Make:
    def make(folder: Path) -> Path:
        files = []
        for name, source in (("a", first), ("b", second)):
            path = source(folder / name)
            files.append(pack_images(path, folder / f"{name}.h5", workers=0, **options).path)
        command("merge", *files, "-o", folder / "both.h5", "--workers", 1, *words)
        return folder / "both.h5"

    return make


def _other_classes(root: Path) -> Path:
    """As `sources.folder`, but with a class between those, and no split val."""
    for name in ("train/cow/1", "train/dog/9", "train/cow/3"):
        sources.image(root / f"{name}.png")
    return root


def _one_colour(root: Path) -> Path:
    """Images without structure: of one colour they stay, however a version of Pillow resizes."""
    for n, size in enumerate([(6, 8), (9, 5), (20, 30)]):
        colour = sources.noise(f"colour {n}", 1, 1, 3)
        sources.write(root / f"images/{n}.png", sources.png(np.broadcast_to(colour, (*size, 3)).copy()))
        sources.mask(root / f"masks/{n}.png", 0, 1, 7, size=size)
    return root


_PIXELS = [(sources.noise(f"item {n}", 6, 8, 3), n % 3) for n in range(7)]
_DEEP = [(sources.noise(f"item {n}", 6, 8, 1, dtype="u2"), n % 3) for n in range(5)]
_FILES = [*((sources.COLOUR_JPEG, n) for n in range(3)), (sources.png(sources.noise("png", 5, 9, 3)), 3)]
_ZSTD = ("zstandard",)
_SKIP: dict[str, Any] = {"on_error": "skip", "chunk_bytes": 500}
_BROKEN_MASKS = partial(sources.broken_folder, masks=True)
_BROKEN_SIZES = partial(sources.broken_folder, sizes=True)

CASES: dict[str, Case] = {
    **{name: Case(_packed(source)) for name, source in sources.SOURCES.items() if name != "parquet"},
    "parquet": Case(_packed(sources.parquet), ("pyarrow",)),
    "exported": Case(_exported),
    "voc, --masks none": Case(_packed(sources.voc, masks="none")),
    "coco, --masks semantic": Case(_packed(sources.coco, masks="semantic")),
    "coco, --masks instance": Case(_packed(sources.coco, masks="instance")),
    "sequence of arrays": Case(_sequence(*_PIXELS)),
    "sequence of Pillow images": Case(_sequence(*((Image.fromarray(pixels), label) for pixels, label in _PIXELS))),
    "sequence of 16 bits": Case(_sequence(*_DEEP)),
    "sequence of files, --store source": Case(_sequence(*_FILES, store="source")),
    "the command line": Case(_by_command),
    # Where the crop needs no scaling, and the pad none, no resampling of Pillow's is part of the bytes.
    "--size --fit crop": Case(_packed(sources.manifest, size=(8, 8), fit="crop")),
    "--size --fit pad": Case(_packed(sources.mask_folders, size=(12, 12), fit="pad")),
    "--size --fit stretch": Case(_packed(_one_colour, size=(4, 6), fit="stretch")),
    "--size of boxes": Case(_packed(sources.manifest_of_objects, size=(8, 8))),
    "--no-shuffle": Case(_packed(sources.folder, shuffle=False)),
    "--seed": Case(_packed(sources.folder, seed=7)),
    "--limit": Case(_packed(sources.folder, limit=5)),
    "--chunk-bytes": Case(_packed(sources.manifest, chunk_bytes=600)),
    "--mode gray": Case(_packed(sources.folder, mode="gray")),
    "--mode rgba": Case(_packed(sources.folder, mode="rgba")),
    "16 bits": Case(_packed(sources.deep_folder)),
    "16 bits, --bits 8": Case(_packed(sources.deep_folder, bits=8)),
    "alpha, --mode rgba": Case(_packed(sources.alpha_folder, mode="rgba")),
    "alpha, --mode rgb": Case(_packed(sources.alpha_folder, mode="rgb")),
    "sizes vary": Case(_packed(sources.sized_folder)),
    "sizes vary, small chunks": Case(_packed(sources.sized_folder, chunk_bytes=400)),
    "sizes vary, --no-shuffle": Case(_packed(sources.sized_folder, shuffle=False)),
    "sizes vary, masks": Case(_packed(sources.sized_mask_folders, chunk_bytes=700)),
    "sizes vary, --codec zstd": Case(_packed(sources.sized_folder, codec="zstd"), _ZSTD),
    "sizes vary, masks, --codec zstd": Case(_packed(sources.sized_mask_folders, codec="zstd:5"), _ZSTD),
    "--store source": Case(_packed(sources.jpeg_folder, store="source")),
    "--store source --no-shuffle": Case(_packed(sources.jpeg_folder, store="source", shuffle=False, chunk_bytes=700)),
    "--store source --max-size": Case(_packed(sources.jpeg_folder, store="source", max_size=10), encodes=True),
    "--store jpeg": Case(_packed(sources.folder, store="jpeg"), encodes=True),
    "--store jpeg, masks": Case(_packed(sources.mask_folders, store="jpeg:70", size=8), encodes=True),
    "--store mixed": Case(_packed(sources.folder, store="mixed:0.5"), encodes=True),
    "--codec gzip": Case(_packed(sources.folder, codec="gzip", chunk_bytes=500)),
    "--codec gzip, masks": Case(_packed(sources.mask_folders, codec="gzip:9")),
    "--codec zstd": Case(_packed(sources.folder, codec="zstd"), _ZSTD),
    "--codec zstd, 16 bits": Case(_packed(sources.deep_arrays, codec="zstd:1", chunk_bytes=500), _ZSTD),
    "masks that compress": Case(_packed(partial(sources.large_mask_folders, noisy=False)), _ZSTD),
    "masks that do not compress": Case(_packed(partial(sources.large_mask_folders, noisy=True)), _ZSTD),
    "skipped": Case(_packed(sources.broken_folder, **_SKIP)),
    "skipped, --no-shuffle": Case(_packed(sources.broken_folder, **_SKIP, shuffle=False)),
    "skipped, masks": Case(_packed(_BROKEN_MASKS, **_SKIP)),
    "skipped, sizes vary": Case(_packed(_BROKEN_SIZES, **_SKIP)),
    "skipped, sizes vary, --no-shuffle": Case(_packed(_BROKEN_SIZES, **_SKIP, shuffle=False)),
    "skipped, --codec gzip": Case(_packed(_BROKEN_MASKS, **_SKIP, codec="gzip")),
    "repack --chunk-bytes": Case(_repacked(sources.mask_folders, "--chunk-bytes", 700)),
    "repack --shuffle": Case(_repacked(sources.folder, "--shuffle", "--seed", 5, shuffle=False)),
    "repack --codec gzip": Case(_repacked(sources.mask_folders, "--codec", "gzip:6")),
    "repack --codec zstd": Case(_repacked(sources.folder, "--codec", "zstd"), _ZSTD),
    "repack --codec none": Case(_repacked(sources.mask_folders, "--codec", "none", codec="gzip")),
    "repack of gzip": Case(_repacked(sources.mask_folders, "--split", "train", codec="gzip")),
    "repack --split": Case(_repacked(sources.folder, "--split", "val", "--split", "train")),
    "repack --label": Case(_repacked(sources.folder, "--label", "dog")),
    "repack --key": Case(_repacked(sources.folder, "--key", "*/cat/*")),
    "repack --rows": Case(_repacked_rows),
    "repack of sizes that vary": Case(_repacked(sources.sized_mask_folders, "--chunk-bytes", 2000, chunk_bytes=700)),
    "repack of sizes that vary, --codec zstd": Case(_repacked(sources.sized_folder, "--codec", "zstd"), _ZSTD),
    "repack of --store source": Case(_repacked(sources.jpeg_folder, "--label", "a", store="source")),
    "repack of another writer's file": Case(_repacked_foreign),
    "merge": Case(_merged(sources.folder, _other_classes)),
    "merge --shuffle": Case(_merged(sources.folder, sources.folder, "--shuffle", "--seed", 4, chunk_bytes=500)),
    "merge --codec gzip": Case(_merged(sources.mask_folders, sources.mask_folders, "--codec", "gzip")),
    "merge of --store source": Case(_merged(sources.jpeg_folder, sources.jpeg_folder, store="source")),
}  # fmt: skip


def described(path: Path, *, encodes: bool) -> dict[str, str]:
    """One line on each dataset of a packed file, and one on its root attributes, all the same with any version.

    A line tells dtype, shape, chunks, filters, attributes and the SHA-256 (its first 16 digits) of the bytes of all
    chunks, decompressed. Of a byte store it tells the SHA-256 of its rows one after another, too; a JPEG that was
    encoded while packing counts there by its size and mode only, as its bytes depend on libjpeg.

    Args:
        path: the file.
        encodes: see `Case`.
    """
    with h5py.File(path) as file:
        found = {"(file)": _attributes(file, leave_out=VERSIONS).removeprefix("; ")}
        stores = {name for name in ("images", "masks") if name in file and "row_shape" in file[name].attrs}
        # How long their rows are depends on the version of zstd or libjpeg, and with it all that tells of lengths.
        unstable = {name for name in stores if (file[f"{name}_encoding"][()] == 2).any()}
        unstable |= {"images"} if encodes else set()
        shape_only = {f"{name}_{part}" for name in unstable for part in ("offset", "bytes")}
        shape_only |= {"digest_fields"} if unstable else set()
        shape_only |= {"digest"} if encodes else set()  # of a JPEG's bytes; elsewhere it is of pixels
        for name, item in file.items():
            if name in stores:
                found[name] = _store(file, name, encodes=encodes, unstable=name in unstable)
            else:
                data = "" if name in shape_only else f"; data {_sha(_bytes_of(item))}"
                found[name] = f"{_layout(item)}{_attributes(item)}{data}"
        return found


def _layout(item: h5py.Dataset) -> str:
    plist = item.id.get_create_plist()
    words = [_type_name(item.dtype), str(item.shape)]
    if item.shape != item.maxshape:
        words.append(f"grows to {item.maxshape}")
    if item.chunks:
        words.append(f"chunks {item.chunks}")
        words += [f"filter {plist.get_filter(i)[0]} {plist.get_filter(i)[2]}" for i in range(plist.get_nfilters())]
        if not plist.get_nfilters():
            words.append(_place(item))
        words += [_ALLOCATED[plist.get_alloc_time()], _FILLED[plist.get_fill_time()]]
    return ", ".join(words)


_ALLOCATED = {h5d.ALLOC_TIME_EARLY: "allocated early", h5d.ALLOC_TIME_INCR: "allocated as written"}
_FILLED = {h5d.FILL_TIME_NEVER: "never filled"}


def _place(item: h5py.Dataset) -> str:
    """Whether the chunks lie one behind the other; of images, which lie first, also where."""
    chunks = _chunks(item)
    begins = [chunk.byte_offset for chunk in chunks]
    size = chunks[0].size
    assert begins == list(range(begins[0], begins[0] + len(begins) * size, size)), f"{item.name}: not in one piece"
    return f"in one piece at {begins[0]}" if item.name == "/images" else "in one piece"


def _chunks(item: h5py.Dataset) -> list[Any]:
    return sorted(map(item.id.get_chunk_info, range(item.id.get_num_chunks())), key=lambda chunk: chunk.chunk_offset)


def _bytes_of(item: h5py.Dataset) -> bytes:
    """All bytes of a dataset; where it is chunked those of whole chunks, with what lies behind the last row."""
    if not item.chunks:
        return item[()].tobytes()
    plist = item.id.get_create_plist()
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    parts = []
    for chunk in _chunks(item):
        left_out, data = item.id.read_direct_chunk(chunk.chunk_offset)
        for at, number in reversed(list(enumerate(filters))):
            if not left_out >> at & 1:
                data = {1: zlib.decompress, 32015: _from_zstd}[number](data)
        parts.append(data)
    return b"".join(parts)


def _from_zstd(data: bytes) -> bytes:
    import zstandard

    return zstandard.ZstdDecompressor().decompress(data)


def _store(file: h5py.File, name: str, *, encodes: bool, unstable: bool) -> str:
    item = file[name]
    whole = item[()].tobytes()
    digest = hashlib.sha256()
    rows = (file[f"{name}_{part}"][()].tolist() for part in ("offset", "bytes", "encoding"))
    for offset, length, encoding in zip(*rows, strict=True):
        data = whole[offset : offset + length]
        if encoding == 1 and encodes:
            with Image.open(io.BytesIO(data)) as image:
                data = f"JPEG {image.size} {image.mode}".encode()
        digest.update(_from_zstd(data) if encoding == 2 else data)
    layout = f"{_type_name(item.dtype)}, {_place(item)}" if unstable else _layout(item)
    data = "" if unstable else f"; data {_sha(_bytes_of(item))}"
    return f"{layout}{_attributes(item)}; rows {digest.hexdigest()[:16]}{data}"


def _attributes(item: Any, leave_out: tuple[str, ...] = ()) -> str:
    """Each attribute with its type and value, the digest of it where that is long."""
    parts = []
    for name in sorted(item.attrs):
        if name in leave_out:
            continue
        value = np.asarray(item.attrs[name])
        plain = np.char.decode(value, "utf-8").tolist() if value.dtype.kind == "S" else value.tolist()
        text = json.dumps(plain, ensure_ascii=False)
        text = text if len(text) <= 240 else _sha(text.encode())
        parts.append(f"; {name} {_type_name(item.attrs.get_id(name).dtype)} {text}")
    return "".join(parts)


def _type_name(dtype: np.dtype[Any]) -> str:
    text = h5py.check_string_dtype(dtype)
    return dtype.str if text is None else f"{text.encoding}[{text.length}]"


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
