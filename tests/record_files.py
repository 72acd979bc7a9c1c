"""Shards of records, built byte by byte as MosaicML's Streaming and TensorFlow write them, for tests of sources."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_SIZES = {"int": 8, "uint8": 1, "uint16": 2, "float32": 4, "float64": 8}


def image_file(seed: int = 0, size: tuple[int, ...] = (4, 6, 3), form: str = "PNG", **options: Any) -> bytes:
    """The file of a random image, (H, W) or (H, W, C)."""
    out = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    Image.fromarray(pixels).save(out, form, **options)
    return out.getvalue()


def write_mds(
    folder: Path, fields: dict[str, str], samples: Sequence[Sequence[bytes]], *, shards: int = 1, pack: Any = None
) -> Path:
    """A folder of MDS shards; a sample is its encoded fields. `pack`: name of a compression, and what compresses."""
    folder.mkdir(parents=True, exist_ok=True)
    index = []
    sizes = [_SIZES.get(encoding.partition(":")[0]) for encoding in fields.values()]
    for number, part in enumerate(np.array_split(np.arange(len(samples)), shards)):
        records = []
        for row in part.tolist():
            lengths = [len(cell) for cell, size in zip(samples[row], sizes, strict=True) if size is None]
            records.append(struct.pack(f"<{len(lengths)}I", *lengths) + b"".join(samples[row]))
        about = json.dumps({"column_names": list(fields)}).encode()
        begins = np.cumsum([4 * (len(records) + 2) + len(about), *map(len, records)])
        data = struct.pack(f"<{len(begins) + 1}I", len(records), *begins) + about + b"".join(records)
        name = f"shard.{number:05d}.mds"
        (folder / name).write_bytes(data)
        zipped = None
        if pack:
            (folder / name).rename(folder / f"{name}.{pack[0]}")
            (folder / f"{name}.{pack[0]}").write_bytes(pack[1](data))
            zipped = {"basename": f"{name}.{pack[0]}", "bytes": 0, "hashes": {}}
        index.append(
            {
                "column_encodings": list(fields.values()),
                "column_names": list(fields),
                "column_sizes": sizes,
                "compression": pack[0] if pack else None,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(records),
                "size_limit": 2**26,
                "version": 2,
                "zip_data": zipped,
            }
        )
    (folder / "index.json").write_text(json.dumps({"shards": index, "version": 2}, sort_keys=True))
    return folder


def _crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _message(number: int, data: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def feature(value: Any) -> bytes:
    """A tf.train.Feature of bytes, floats or integers, one or a list."""
    every = value if isinstance(value, list) else [value]
    if any(isinstance(one, bytes) for one in every):
        return _message(1, b"".join(_message(1, one) for one in every))
    if any(isinstance(one, float) for one in every):
        return _message(2, _message(1, struct.pack(f"<{len(every)}f", *every)))
    return _message(3, _message(1, b"".join(map(_varint, every))))


def example(features: dict[str, Any]) -> bytes:
    """A tf.train.Example."""
    entries = [_message(1, name.encode()) + _message(2, feature(value)) for name, value in features.items()]
    return _message(1, b"".join(_message(1, entry) for entry in entries))


def record(data: bytes) -> bytes:
    """A record of a TFRecord file."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _crc32c(length)) + data + struct.pack("<I", _crc32c(data))


def write_tfrecord(path: Path, *examples: dict[str, Any]) -> Path:
    """A TFRecord file of these Examples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(record(example(features)) for features in examples))
    return path
