"""Some 300 files that are damaged, or made to harm whoever reads them, each by a function that writes it.

`FILES` maps a name to its maker; a name's first word is its family, so that a sample can have some of each. Every maker
is deterministic. `hostile_commands.py` lets every command loose on them.
"""

from __future__ import annotations

import gzip
import io
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from PIL import Image

from fastload.format.ragged import Column
from sample_files import write_packed, write_ragged

Maker = Callable[[Path], None]
"""Writes a file to a path; other files may be made beside it."""

_ROWS = 12
_TEXT, _LONG = "not what it should be", "x" * 60_000
SECRET = "/etc/passwd"


def packed(path: Path) -> None:
    """A good packed file: images, masks, labels, boxes, two splits."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (_ROWS, 10, 8, 3), dtype=np.uint8)
    columns = {
        "labels": Column(np.arange(_ROWS) % 3, {"names": ("a", "b", "c")}),
        "boxes": Column(np.zeros((_ROWS, 2, 4), np.float32)),
        "landmarks": Column(np.ones((_ROWS, 5, 2), np.float32)),
        "tokens": Column(np.arange(_ROWS * 3).reshape(_ROWS, 3)),
    }
    splits = {"train": _ROWS - 4, "val": 4}
    write_packed(path, images, columns, masks=images[..., 0] % 3, splits=splits, chunk_rows=5, ignore_index=255)


def ragged(path: Path) -> None:
    """A good packed file with images of several sizes: raw, JPEG and zstd."""
    rng = np.random.default_rng(1)
    rows: list[Any] = []
    for i in range(_ROWS):
        height, width = 8 + i, 30 - i
        pixels = np.full((height, width, 3), 20 * i, np.uint8)
        if i % 3 == 1:
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, "JPEG")
            rows.append((buffer.getvalue(), pixels.shape, 1))
        else:
            rows.append(rng.integers(0, 256, pixels.shape, dtype=np.uint8))
    masks = [np.zeros((8 + i, 30 - i), np.uint8) for i in range(_ROWS)]
    write_ragged(path, rows, {"labels": Column(np.arange(_ROWS) % 3)}, masks=masks, chunk_bytes=4096)


def foreign(path: Path, **options: Any) -> None:
    """A good file of another program, in HDF5's oldest layout: version 1 B-trees, no checksums."""
    with h5py.File(path, "w", libver="earliest") as file:
        images = np.random.default_rng(2).integers(0, 9, (_ROWS, 10, 8, 3), dtype=np.uint8)
        options = {"chunks": (4, 10, 8, 3), "compression": "gzip"} | options
        file.create_dataset("images", data=images, **options)
        file["labels"] = np.arange(_ROWS)
        file["key"] = np.array([b"%d" % i for i in range(_ROWS)])


def _changed(base: Maker, change: Callable[[h5py.File], Any], path: Path) -> None:
    base(path)
    with h5py.File(path, "r+") as file:
        change(file)


def _values() -> dict[str, Any]:
    """Values that no attribute should have."""
    return {
        "text": _TEXT,
        "nan": float("nan"),
        "negative": -5,
        "huge": np.uint64(2**64 - 1),
        "array": np.arange(4),
        "nested": np.zeros((2, 2), "S3"),
        "empty": h5py.Empty("f4"),
        "bytes": np.bytes_(b"\xff\xfe\x00z"),
        "long": _LONG,
        "deep": "[" * 30_000,
        "json": "[1, 2]",
        "compound": np.zeros(1, [("a", "i4"), ("b", "S2")])[0],
        "strings": np.array(["p", "q"], dtype=h5py.string_dtype()),
        "bool": True,
        "complex": 1j,
    }


def _set(owner: str, name: str, value: Any, file: h5py.File) -> None:
    attrs = file[owner].attrs
    if name in attrs:
        del attrs[name]
    if value is not None:
        attrs[name] = value


def _reference(owner: str, name: str, file: h5py.File) -> None:
    del file[owner].attrs[name]
    file[owner].attrs.create(name, file["/"].ref, dtype=h5py.ref_dtype)


def _attributes() -> Iterator[tuple[str, Maker]]:
    root = ("fastload_version", "fastload_writer", "decoder", "source_layout", "pack_options", "header_digest")
    for name in (*root, "seed", "shuffled", "repacked"):
        few = ("text", "nan", "array", "empty", "bytes", "deep")
        for kind, value in {**_values(), "missing": None}.items():
            if kind in few or name in ("seed", "pack_options", "fastload_version"):
                yield f"root {name} {kind}", partial(_changed, packed, partial(_set, "/", name, value))
    yield "root seed reference", partial(_changed, packed, partial(_reference, "/", "seed"))
    fields = [(packed, "labels", "names"), (packed, "split", "names"), (packed, "masks", "ignore_index")]
    fields += [(ragged, "images", "row_shape"), (ragged, "images", "row_dtype"), (ragged, "images_encoding", "names")]
    for base, owner, name in fields:
        for kind, value in {**_values(), "missing": None}.items():
            yield f"attribute {owner} {name} {kind}", partial(_changed, base, partial(_set, owner, name, value))
    for shape in ([0, 0, 5], [-1, 8, 3], [2**40, 2**40, 3], [96076792050570582, 64, 3], [0, 0, 0], [1, 1, 3]):
        value = np.array(shape, np.int64)
        name = "x".join(map(str, shape))
        yield (
            f"attribute images row_shape {name}",
            partial(_changed, ragged, partial(_set, "images", "row_shape", value)),
        )
    yield "attribute boxes coordinates", partial(_changed, packed, partial(_set, "boxes", "coordinates", np.arange(3)))


def _replaced(name: str, make: Callable[[h5py.File, str], Any], file: h5py.File) -> None:
    attrs = dict(file[name].attrs) if name in file else {}
    if name in file:
        del file[name]
    made = make(file, name)
    if isinstance(made, h5py.Dataset):
        for key, value in attrs.items():
            made.attrs[key] = value


def _as_links(file: h5py.File, name: str, path: str) -> None:
    file[name] = h5py.SoftLink(path)
    file["zz_loop"] = h5py.SoftLink(f"/{name}")


def _virtual(file: h5py.File, name: str, source: str = "other.h5") -> h5py.Dataset:
    layout = h5py.VirtualLayout(shape=(_ROWS,), dtype="u1")
    layout[:] = h5py.VirtualSource(source, name, shape=(_ROWS,))
    return file.create_virtual_dataset(name, layout)


def _early(file: h5py.File, name: str, shape: tuple[int, ...], dtype: Any, chunks: tuple[int, ...]) -> h5py.Dataset:
    """Creates a dataset whose space is not in the file: allocated late, never written."""
    return file.create_dataset(name, shape, dtype, chunks=chunks)


def _typed(dtype: Any, shape: tuple[int, ...] = ()) -> Callable[[h5py.File, str], h5py.Dataset]:
    return lambda file, name: file.create_dataset(name, data=np.zeros((_ROWS, *shape), dtype))


def _replacements() -> dict[str, Callable[[h5py.File, str], Any]]:
    vlen = h5py.vlen_dtype(np.int32)
    return {
        "group": lambda file, name: file.create_group(name),
        "group of itself": lambda file, name: file.__setitem__(name, file["/"]),
        "committed type": lambda file, name: file.__setitem__(name, np.dtype("f8")),
        "soft loop": lambda file, name: _as_links(file, name, "/zz_loop"),
        "soft dangling": lambda file, name: file.__setitem__(name, h5py.SoftLink("/nowhere")),
        "soft to another": lambda file, name: file.__setitem__(name, h5py.SoftLink("/tokens")),
        "external link": lambda file, name: file.__setitem__(name, h5py.ExternalLink("other.h5", f"/{name}")),
        "external to a secret": lambda file, name: file.__setitem__(name, h5py.ExternalLink(SECRET, "/")),
        "external storage": lambda file, name: file.create_dataset(name, (_ROWS,), "u1", external=[(SECRET, 0, _ROWS)]),
        "virtual": _virtual,
        "virtual of a secret": lambda file, name: _virtual(file, name, SECRET),
        "compound": _typed([("a", "i4"), ("b", "S2")]),
        "array type": lambda file, name: file.create_dataset(name, (_ROWS,), np.dtype(("f4", (3,)))),
        "vlen": lambda file, name: file.create_dataset(name, (_ROWS,), vlen),
        "vlen text": lambda file, name: file.create_dataset(name, data=["a"] * _ROWS, dtype=h5py.string_dtype()),
        "references": lambda file, name: file.create_dataset(name, (_ROWS,), h5py.ref_dtype),
        "opaque": _typed("V16"),
        "complex": _typed("c8"),
        "float nan": lambda file, name: file.create_dataset(name, data=np.full((_ROWS, 10, 8, 3), np.nan)),
        "text": lambda file, name: file.create_dataset(name, data=np.array([b"caf\xe9"] * _ROWS)),
        "negative": lambda file, name: file.create_dataset(name, data=np.full(_ROWS, -3, np.int8)),
        "huge numbers": lambda file, name: file.create_dataset(name, data=np.full(_ROWS, 2**64 - 1, np.uint64)),
        "alternating": lambda file, name: file.create_dataset(name, data=np.arange(_ROWS, dtype=np.uint8) % 2),
        "big endian": _typed(">i8"),
        "bool": _typed("?"),
        "half": _typed("f2"),
        "quad": _typed("g"),
        "no bytes a row": _typed("u1", (0,)),
        "no rows": lambda file, name: file.create_dataset(name, (0, 10, 8, 3), "u1"),
        "one row fewer": lambda file, name: file.create_dataset(name, data=np.zeros((_ROWS - 1, 10, 8, 3), "u1")),
        "scalar": lambda file, name: file.create_dataset(name, data=3),
        "null": lambda file, name: file.create_dataset(name, data=h5py.Empty("u1")),
        "2^62 rows": lambda file, name: _early(file, name, (2**62,), "u1", (2**20,)),
        "2^63 rows": lambda file, name: file.create_dataset(name, (2**63 - 1,), "u1"),
        "2^60 bytes a row": lambda file, name: _early(file, name, (_ROWS, 2**60), "u1", (1, 2**20)),
        "wraps": lambda file, name: _early(file, name, (8, 96076792050570582, 64, 3), "u1", (1, 64, 64, 3)),
        "chunk of 2^32 - 1": lambda file, name: file.create_dataset(
            name, (_ROWS,), "u1", chunks=(2**32 - 1,), maxshape=(None,), compression="gzip"
        ),
        "unwritten": lambda file, name: _early(file, name, (_ROWS, 10, 8, 3), "u1", (5, 10, 8, 3)),
        "16 dimensions": _typed("u1", (1,) * 16),
        "missing": lambda file, name: None,
    }  # fmt: skip


def _datasets() -> Iterator[tuple[str, Maker]]:
    for kind, make in _replacements().items():
        yield f"images {kind}", partial(_changed, packed, partial(_replaced, "images", make))
        yield f"foreign {kind}", partial(_changed, foreign, partial(_replaced, "images", make))
    for name in ("masks", "labels", "boxes", "split", "key", "digest"):
        for i, (kind, make) in enumerate(_replacements().items()):
            # Each kind with some of the fields; split and key with all.
            if name in ("split", "key") or i % 4 == len(name) % 4:
                yield f"field {name} {kind}", partial(_changed, packed, partial(_replaced, name, make))
    for name in ("labels", "key", "digest", "split"):
        for kind in ("external link", "virtual", "vlen text", "float nan", "2^62 rows", "references"):
            make = _replacements()[kind]
            yield f"foreign {name} {kind}", partial(_changed, foreign, partial(_replaced, name, make))


def _index() -> Iterator[tuple[str, Maker]]:
    """Indices of ragged images that lie."""
    wrong = {
        "images_offset": [-1, 2**40, 2**63 - 1, -(2**63), 7],
        "images_bytes": [-1, 0, 2**40, 2**63 - 1, 1],
        "images_shape": [[0, 5, 3], [-4, 5, 3], [2**31 - 1] * 3, [46_000, 46_000, 3], [1, 1, 4]],
        "images_encoding": [1, 2, 200],
        "images_orientation": [0, 6, 200],
        "masks_offset": [-9, 2**50],
        "masks_encoding": [1, 2, 9],
    }
    for name, values in wrong.items():
        for value in values:
            yield f"index {name} {value}", partial(_changed, ragged, lambda file, n=name, v=value: _put(file[n], v))
        for kind in ("missing", "float nan", "big endian", "2^62 rows", "external link"):
            make = _replacements()[kind]
            yield f"index {name} {kind}", partial(_changed, ragged, partial(_replaced, name, make))


def _put(item: h5py.Dataset, value: Any) -> None:
    item[3] = value


def _patched(base: Maker, patch: Callable[[bytearray], Any], path: Path) -> None:
    base(path)
    data = bytearray(path.read_bytes())
    data = patch(data) or data
    path.write_bytes(data)


def _flipped(seed: int, data: bytearray) -> None:
    """Changes bytes of metadata: around the signatures of its blocks, and in the superblock."""
    rng = random.Random(seed)
    signs = [b"TREE", b"HEAP", b"SNOD", b"OHDR", b"OCHK", b"FADB", b"FAHD", b"BTHD", b"BTLF", b"FRHP", b"FHDB", b"FHIB"]
    places = [at for sign in signs for at in range(len(data)) if data.startswith(sign, at)] or [0]
    for _ in range(1 + seed % 3):
        at = min(rng.choice([*places, 0]) + rng.randrange(120), len(data) - 1)
        data[at] = rng.choice([0, 0xFF, data[at] ^ 1 << rng.randrange(8), rng.randrange(256)])


def _binary() -> Iterator[tuple[str, Maker]]:
    for seed in range(24):
        yield f"flips packed {seed}", partial(_patched, packed, partial(_flipped, seed))
        yield f"flips ragged {seed}", partial(_patched, ragged, partial(_flipped, 100 + seed))
        yield f"flips foreign {seed}", partial(_patched, foreign, partial(_flipped, 200 + seed))
    for share in (0.01, 0.2, 0.5, 0.8, 0.99):
        for base in (packed, ragged, foreign):
            yield (
                f"cut {base.__name__} {share}",
                partial(_patched, base, lambda data, s=share: data[: int(len(data) * s)]),
            )
    for at in range(8, 44, 6):
        # Sizes of addresses, base address, end of file: 0xFF everywhere. Of version 2 and 3 a checksum follows.
        yield f"superblock foreign {at}", partial(_patched, foreign, lambda data, a=at: _fill(data, a, 8))
        yield f"superblock packed {at}", partial(_patched, packed, lambda data, a=at: _fill(data, a, 8))
    for size in (512, 4096):
        yield f"zeros foreign {size}", partial(_patched, foreign, lambda data, n=size: _zero(data, n))
        yield f"user block {size}", partial(_patched, packed, lambda data, n=size: bytearray(n) + data)
    yield "garbage behind", partial(_patched, packed, lambda data: data + bytearray(b"\x89HDF\r\n\x1a\n" * 99))


def _fill(data: bytearray, at: int, count: int) -> None:
    data[at : at + count] = b"\xff" * count


def _zero(data: bytearray, count: int) -> None:
    data[len(data) // 2 : len(data) // 2 + count] = bytes(count)


def _bomb(path: Path, *, rows: int, shape: tuple[int, ...], chunk_rows: int) -> None:
    """Images of zeros: all chunks are written by the same compressed bytes, a thousandth of what they stand for."""
    with h5py.File(path, "w") as file:
        chunks = (chunk_rows, *shape)
        item = file.create_dataset("images", (rows, *shape), "u1", chunks=chunks, compression="gzip")
        data = _deflated(int(np.prod(chunks)))
        for first in range(0, rows, chunk_rows):
            item.id.write_direct_chunk((first, 0, 0, 0), data)


def _deflated(num_bytes: int) -> bytes:
    import zlib

    deflating, block = zlib.compressobj(), bytes(min(num_bytes, 2**20))
    whole = [deflating.compress(block) for _ in range(num_bytes // len(block))]
    return b"".join([*whole, deflating.compress(bytes(num_bytes % len(block))), deflating.flush()])


def _longer(file: h5py.File) -> None:
    """A chunk that holds more than it should."""
    file["images"].id.write_direct_chunk((0, 0, 0, 0), _deflated(50 * 2**20))


def _zstd_rows(path: Path, data: bytes, says: tuple[int, int, int]) -> None:
    ragged(path)
    with h5py.File(path, "r+") as file:
        file["images"][: len(data)] = np.frombuffer(data, np.uint8)
        file["images_offset"][0], file["images_bytes"][0] = 0, len(data)
        file["images_shape"][0], file["images_encoding"][0] = says, 2


def _zstd_bomb(path: Path) -> None:
    from fastload.format.codecs import Codec, has_zstd

    data = Codec("zstd", 3).compress(bytes(60 * 2**20)) if has_zstd() else b"\x28\xb5\x2f\xfd"
    _zstd_rows(path, data, (8, 30, 3))


def many_attributes(path: Path, count: int, base: Maker = foreign) -> None:
    """Writes a file with so many attributes on its root group and on its images."""
    base(path)
    with h5py.File(path, "r+", libver="latest") as file:
        space, kind = h5py.h5s.create(h5py.h5s.SCALAR), h5py.h5t.NATIVE_INT32
        for owner in (file, file["images"]):
            for i in range(count):
                h5py.h5a.create(owner.id, b"attribute %06d" % i, kind, space)


def many_datasets(path: Path, count: int, base: Maker = foreign) -> None:
    """Writes a file with so many datasets beside its images."""
    base(path)
    with h5py.File(path, "r+") as file:
        space, kind = h5py.h5s.create_simple((_ROWS,)), h5py.h5t.NATIVE_UINT8
        for i in range(count):
            h5py.h5d.create(file.id, b"dataset %06d" % i, kind, space)


def _large() -> Iterator[tuple[str, Maker]]:
    yield "bomb rows", partial(_bomb, rows=64, shape=(1024, 1024, 3), chunk_rows=1)
    yield "bomb chunk", partial(_bomb, rows=1024, shape=(16, 16, 3), chunk_rows=1024)
    yield "bomb large chunk", partial(_bomb, rows=300, shape=(512, 512, 4), chunk_rows=300)
    yield "bomb gigabytes", partial(_bomb, rows=4095, shape=(512, 512, 4), chunk_rows=4095)
    yield "bomb longer than it says", partial(_changed, foreign, _longer)
    yield "bomb zstd", _zstd_bomb
    yield "bomb pixels", partial(_zstd_rows, data=b"\x28\xb5\x2f\xfd", says=(30_000, 5_000, 3))
    for base in (foreign, packed):
        yield f"many attributes {base.__name__}", partial(many_attributes, count=3000, base=base)
        yield f"many datasets {base.__name__}", partial(many_datasets, count=2500, base=base)
    yield "many groups", partial(_changed, foreign, _nested)
    yield "names of a million", partial(_changed, packed, lambda file: _names(file, 200_000))
    yield "names of one", partial(_changed, packed, lambda file: _set("labels", "names", _LONG, file))
    yield "name of bytes", partial(_changed, foreign, lambda file: _raw_name(file, b"caf\xe9\n\x1b[31m"))
    yield "name of a thousand", partial(_changed, foreign, lambda file: _raw_name(file, b"n" * 50_000))


def _raw_name(file: h5py.File, name: bytes) -> None:
    h5py.h5d.create(file.id, name, h5py.h5t.NATIVE_UINT8, h5py.h5s.create_simple((_ROWS,)))


def _names(file: h5py.File, count: int) -> None:
    del file["labels"].attrs["names"]
    names = np.array([b"%d" % i for i in range(count)])
    item = file["labels"]
    access = h5py.h5a.create(item.id, b"names", h5py.h5t.py_create(names.dtype), h5py.h5s.create_simple((count,)))
    access.write(names)


def _nested(file: h5py.File) -> None:
    group = file
    for i in range(400):
        group = group.create_group("g")
        group["back"] = file["/"]
        group[f"d{i}"] = h5py.SoftLink("/images")


def _others() -> Iterator[tuple[str, Maker]]:
    """Files of other programs that are not wrong, only unusual."""
    for filters in ("lzf", "szip"):
        yield f"unusual {filters}", partial(_maybe, compression=filters)
    yield "unusual shuffle", partial(foreign, shuffle=True, fletcher32=True)
    yield "unusual scale", partial(foreign, compression=None, scaleoffset=4)
    yield "unusual cut images", partial(foreign, chunks=(4, 3, 3, 2))
    yield "unusual growing", partial(foreign, maxshape=(None, 10, 8, 3))
    yield "unusual contiguous", partial(foreign, chunks=None, compression=None)
    for name, shape in {"HW": (10, 8), "CHW": (3, 10, 8), "5D": (2, 10, 8, 3), "C7": (10, 8, 7), "1D": ()}.items():
        make = _typed("u1", shape)
        yield f"unusual {name}", partial(_changed, foreign, partial(_replaced, "images", make))
    for name, dtype in {"u2": "u2", "u4": "<u4", "i1": "i1", "f4": "f4", "big": ">u2", "bool": "?"}.items():
        make = _typed(dtype, (10, 8, 3))
        yield f"unusual {name}", partial(_changed, foreign, partial(_replaced, "images", make))
    yield "unusual filter", partial(_patched, foreign, lambda data: data.replace(b"deflate", b"d\xffflate"))
    yield (
        "unusual masks",
        partial(_changed, foreign, lambda file: file.create_dataset("masks", data=np.zeros((_ROWS, 3)))),
    )
    yield "unusual keys", partial(_changed, foreign, partial(_replaced, "key", _typed("i4")))


def _maybe(path: Path, compression: str) -> None:
    try:
        foreign(path, compression=compression)
    except ValueError:  # this HDF5 lacks the filter
        foreign(path)


def _no_hdf5() -> Iterator[tuple[str, Maker]]:
    yield "no empty", lambda path: path.write_bytes(b"")
    yield "no text", lambda path: path.write_text("a,b\n1,2\n")
    yield "no gzip", lambda path: path.write_bytes(gzip.compress(b"x" * 999))
    yield "no signature only", lambda path: path.write_bytes(b"\x89HDF\r\n\x1a\n")
    yield "no zeros", lambda path: path.write_bytes(bytes(10_000))
    yield "no sparse", lambda path: (path.touch(), os.truncate(path, 2**40))
    yield "no folder", lambda path: path.mkdir()
    yield "no pipe", lambda path: os.mkfifo(path)
    yield "no device", lambda path: path.symlink_to("/dev/zero")
    yield "no loop", lambda path: path.symlink_to(path)
    yield "no target", lambda path: path.symlink_to("nowhere")
    yield "no permission", lambda path: (packed(path), path.chmod(0))
    yield "no process", lambda path: path.symlink_to("/proc/self/mem")


FILES: dict[str, Maker] = {
    name: maker
    for family in (_attributes, _datasets, _index, _binary, _large, _others, _no_hdf5)
    for name, maker in family()
}


def sample(count: int) -> list[str]:
    """Returns so many names, the same ones each time: some of every family, those that take seconds last."""
    families: dict[str, list[str]] = {}
    for name in FILES:
        families.setdefault(name.split()[0], []).append(name)
    slow = [name for family in ("bomb", "many") for name in families.pop(family)]
    order = random.Random(7)
    lists = [order.sample(names, len(names)) for names in families.values()]
    mixed = [names[i] for i in range(max(map(len, lists))) for names in lists if i < len(names)]
    return sorted([*mixed, *slow][:count])
