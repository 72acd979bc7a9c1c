"""Builds zips, tars, NumPy's files and other binary files out of choices: wrong in places, their checksums right."""

from __future__ import annotations

import io
import json
import struct
import zlib
from typing import Any

import numpy as np
import xxhash
from fuzz_choices import Choices
from PIL import Image

NAMES = (
    *(b"train/cat/0.jpg", b"train/dog/1.jpg", b"a.png", b"x/", b"../a.jpg", b"/a.jpg", b"C:\\a.jpg", b"a\\b.jpg", b""),
    *(
        b"\xff\xfe.jpg",
        b"a/" * 300 + b"b.jpg",
        b"./a.jpg",
        b".hidden.jpg",
        b"a\0b.jpg",
        b"00.cls",
        b"00.json",
        b"n" * 300,
    ),
)


def picture(form: str = "PNG", size: tuple[int, int] = (4, 3), **options: Any) -> bytes:
    """Returns a small image file, whose pixels are the same each time."""
    out, (width, height) = io.BytesIO(), size
    mode = options.pop("mode", "RGB")
    channels = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4, "I;16": 1}[mode]
    dtype = np.uint16 if mode == "I;16" else np.uint8
    pixels = (np.arange(width * height * channels) * 37 % 251).astype(dtype).reshape(height, width, channels)
    image = Image.fromarray(pixels[..., 0]) if channels == 1 else Image.frombytes(mode, size, pixels.tobytes())
    image.save(out, form, **options)
    return out.getvalue()


def zip_of(choices: Choices, members: list[tuple[bytes, bytes]]) -> bytes:
    """Returns a zip of members (name, content), stored or deflated, with zip64 fields where the choices say so."""
    out, directory = bytearray(), bytearray()
    for own_name, own in members:
        name = choices.pick(NAMES) if choices.wrong() else own_name
        method = choices.number(choices.pick((0, 8)), 16)
        packer = zlib.compressobj(9, zlib.DEFLATED, -15)
        stored = packer.compress(own) + packer.flush() if method == 8 else own
        crc, flags = choices.number(zlib.crc32(own)), choices.number(0, 16)
        sizes = choices.number(len(stored)), choices.number(len(own))
        extra = b""
        if choices.wrong():
            extra = struct.pack(
                "<HHQQQ", 1, choices.number(24, 16), *(choices.number(n, 64) for n in (*sizes, len(out)))
            )
            sizes = choices.number(sizes[0]), 2**32 - 1
        version, offset = choices.number(20, 16), choices.number(len(out))
        out += struct.pack("<4s5H3L2H", choices.raw(b"PK\3\4"), version, flags, method, 0, 0, crc, *sizes, len(name), 0)
        out += name + choices.raw(stored)
        fields = (choices.pick((20, 0x0314)), version, flags, method, 0, 0, crc, *sizes, len(name), len(extra), 0, 0, 0)
        attributes = choices.pick((0, 0o100644 << 16, 0o120777 << 16, 0o040755 << 16))
        directory += struct.pack("<4s6H3L5H2L", b"PK\1\2", *fields, attributes, offset) + name + extra
    start, count = len(out), len(members)
    out += choices.raw(bytes(directory))
    if choices.wrong():
        end = choices.number(44, 64), 45, 45, 0, 0, count, count, choices.number(len(directory), 64)
        out += struct.pack("<4sQ2H2L4Q", b"PK\6\6", *end, choices.number(start, 64))
        out += struct.pack("<4sLQL", b"PK\6\7", 0, choices.number(start + len(directory), 64), 1)
    count, size, start = choices.number(count, 16), choices.number(len(directory)), choices.number(start)
    return bytes(out) + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, start, 0)


def _octal(choices: Choices, right: int, width: int) -> bytes:
    value = choices.number(right, 64)
    if value >= 8 ** (width - 1):  # as GNU writes large and negative numbers
        return b"\x80" + value.to_bytes(width - 1, "big") if choices.byte() % 2 else b"\xff" * (width - 1) + b"\1"
    return b"%0*o\0" % (width - 1, value)


def tar_of(choices: Choices, members: list[tuple[bytes, bytes]]) -> bytes:
    """Returns a tar of members (name, content), with pax and GNU headers where the choices say so."""
    out = bytearray()

    def add(name: bytes, kind: bytes, content: bytes, link: bytes = b"") -> None:
        size = _octal(choices, len(content), 12)
        head = bytearray(
            struct.pack(
                "100s8s8s8s12s12s8s1s100s8s",
                name,
                b"0000644",
                b"",
                b"",
                size,
                b"0" * 11,
                b" " * 8,
                kind,
                link,
                choices.pick((b"ustar\00000", b"ustar  \0", b"")),
            )
        )
        head += choices.raw(bytes(512 - len(head)))
        del head[512:]
        head[148:156] = b"%06o\0 " % choices.number(sum(head), 17)
        out.extend(head + content + bytes(-len(content) % 512))

    for own_name, own in members:
        name = choices.pick(NAMES) if choices.wrong() else own_name
        if choices.wrong():
            name = name[:99]
            key = choices.pick((b"path", b"size", b"linkpath", b"hdrcharset", b"GNU.sparse.map", b"GNU.sparse.major",
                                b"GNU.sparse.size", b"GNU.sparse.realsize"))  # fmt: skip
            value = choices.pick((name * 3, b"0", b"-1", b"9" * 40, b"1", b"0,1,2", b"\xff", b"BINARY"))
            text = b" " + key + b"=" + value + b"\n"
            line = b"%d" % choices.number(len(text) + 2, 16) + text
            for _ in range(1 + choices.byte() % 3):
                add(b"pax", choices.pick((b"x", b"g", b"X")), choices.raw(line))
        if choices.wrong():
            for _ in range(1 + choices.byte() * (choices.byte() == 255) * 8):
                add(b"long", choices.pick((b"L", b"K")), choices.raw(name * 3 + b"\0"))
        kind = choices.pick(b"0\x0012345S67") if choices.wrong() else 0x30
        add(name[:100], bytes([kind]), choices.raw(own), choices.pick(NAMES)[:100])
    out += bytes(1024)
    return choices.raw(bytes(out))


DTYPES = (
    "|u1",
    "<i8",
    "|u1",
    "<f4",
    "|b1",
    "<U3",
    "|S3",
    ">u2",
    "<u8",
    "<f8",
    "|i1",
    "<c8",
    "<M8[s]",
    "|O",
    "|V3",
    "<f2",
)


def npy_of(choices: Choices, array: np.ndarray[Any, Any]) -> bytes:
    """Returns an .npy of an array, whose header may say something else."""
    descr: Any = (
        choices.pick((*DTYPES, "|S0", "|S999999999", "(2,)<i4", [["a", "<i4"]])) if choices.wrong() else array.dtype.str
    )
    shape: Any = tuple(choices.number(n, 64) for n in array.shape)
    if choices.wrong():
        shape = choices.pick(
            ((), (0,), (-1,), (-2, -3), (0, 2**62), (0, 10**400), (1,) * 70, (2**40,), "x", None, (1.5,))
        )
    order = choices.pick((False, True, None)) if choices.wrong() else False
    head = choices.raw(repr({"descr": descr, "fortran_order": order, "shape": shape}).encode())
    version = choices.pick(((1, 0), (2, 0), (3, 0), (9, 9))) if choices.wrong() else (1, 0)
    head += b" " * (-(len(head) + 11) % 64) + b"\n"
    wide = version >= (2, 0)
    length = choices.number(len(head), 32 if wide else 16).to_bytes(4 if wide else 2, "little")
    return choices.raw(b"\x93NUMPY") + bytes(version) + length + head + choices.raw(array.tobytes())


def idx_of(choices: Choices, array: np.ndarray[Any, Any], kind: int = 8) -> bytes:
    """Returns an idx file."""
    head = bytes([choices.number(0, 8), 0, choices.number(kind, 8), choices.number(array.ndim, 8)])
    return head + b"".join(choices.number(n).to_bytes(4, "big") for n in array.shape) + choices.raw(array.tobytes())


def records_of(choices: Choices, magic: bytes, bodies: list[tuple[int, Any, bytes]]) -> bytes:
    """Returns a journal: records of number, document and table, most with the right checksum."""
    out = bytearray(choices.raw(magic))
    for own_number, document, table in bodies:
        number, text = (
            choices.number(own_number % 2**64, 64),
            choices.raw(json.dumps(choices.document(document)).encode()),
        )
        body = (
            text
            if own_number == -2
            else choices.number(len(text), 64).to_bytes(8, "little") + text + choices.raw(table)
        )
        number -= 2**64 * (number >= 2**63)
        check = choices.raw(xxhash.xxh3_64_digest(body, seed=number % 2**64))
        out += struct.pack("<8sqq", check, number, choices.number(len(body), 63)) + body
    return bytes(out)
