"""JPEGs of every process of ITU-T T.81, SOF0 to SOF15, of any precision, number of components and sampling factors.

They are made here, since no encoder makes them all: the image data of Huffman coded ones are differences chosen by a
seed, with tables of codes of one length; of arithmetic coded ones bytes, of which any decode to something.
"""

from __future__ import annotations

import itertools
import random
import struct
from collections.abc import Iterator, Sequence
from functools import cache

BASELINE, EXTENDED, PROGRESSIVE, LOSSLESS = 0xC0, 0xC1, 0xC2, 0xC3
PROCESSES = {number: f"sof{number - 0xC0}" for number in range(0xC0, 0xD0) if number not in (0xC4, 0xCC)}
PRECISIONS = range(2, 17)
HEIGHT, WIDTH = 45, 71

SAMPLINGS: tuple[tuple[int, ...], ...] = (
    (0x11,), (0x22,), (0x41,), (0x33,), (0x00,), (0x11, 0x11), (0x21, 0x12), (0x11, 0x11, 0x11), (0x22, 0x11, 0x11),
    (0x21, 0x11, 0x11), (0x12, 0x11, 0x11), (0x41, 0x11, 0x11), (0x14, 0x11, 0x11), (0x42, 0x21, 0x11),
    (0x11, 0x22, 0x22), (0x31, 0x11, 0x11), (0x44, 0x11, 0x11), (0x22, 0x12, 0x21), (0x51, 0x11, 0x11),
    (0x11, 0x11, 0x11, 0x11), (0x22, 0x11, 0x11, 0x22), (0x44, 0x44, 0x44, 0x44), (0x11,) * 5, (0x11,) * 10,
)  # fmt: skip
"""Sampling factors of each component, across and down in a byte: usual, odd, too large and impossible ones."""


def _with_zeros(bits: list[str]) -> bytes:
    """Returns bits as entropy-coded data: filled up with ones, and with a 0 behind each byte of ones."""
    text = "".join(bits)
    text += "1" * (-len(text) % 8)
    return int("0" + text, 2).to_bytes(len(text) // 8, "big").replace(b"\xff", b"\xff\0")


def segment(marker: int, content: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(content) + 2) + content


def jpeg(
    process: int, precision: int, factors: Sequence[int], *, size: tuple[int, int] = (HEIGHT, WIDTH), seed: int = 0
) -> bytes:
    """Returns a JPEG; one whose values are impossible has image data as if they were the next possible ones."""
    rng, (height, width) = random.Random(seed), size
    lossless, arithmetic, progressive = process & 3 == 3, process >= 0xC8, process & 3 == 2
    parts = [b"\xff\xd8"]
    if not lossless:
        parts.append(segment(0xDB, b"\0" + bytes([9] * 64)))
    components = b"".join(bytes([at + 1, factor, 0]) for at, factor in enumerate(factors))
    parts.append(segment(process, struct.pack(">BHHB", precision, height, width, len(factors)) + components))
    if not arithmetic:
        # Codes of 5 bits, by their category, in both tables; the end of a block is category 0 of the second.
        most = 17 if lossless else 16
        codes = bytes([0] * 4 + [most] + [0] * 11) + bytes(range(most))
        parts.append(segment(0xC4, b"\0" + codes) + segment(0xC4, b"\x10" + codes))
    else:
        parts.append(segment(0xCC, b"\0\x10\x10\x05"))
    names = bytes(range(1, len(factors) + 1))
    scans = [(names, 1 if lossless else 0, 0 if lossless or progressive else 63)]
    if progressive:
        scans += [(bytes([name]), 1, 63) for name in names]
    for which, first, last in scans:
        parts.append(
            segment(0xDA, bytes([len(which)]) + b"".join(bytes([n, 0]) for n in which) + bytes([first, last, 0]))
        )
        units = _units(factors, which, height, width, 1 if lossless else 8)
        if arithmetic:
            parts.append(rng.randbytes(2 * units).replace(b"\xff", b"\xfe"))
            continue
        bits = []
        for _ in range(units):
            # A difference of a few bits; of a scan of high frequencies each block is empty.
            category = 0 if progressive and first else rng.choice((0, 0, 0, 1, 2, min(precision, 5)))
            bits.append(f"{category:05b}")
            bits.append(f"{rng.getrandbits(category):0{category}b}" if category else "")
            if not (lossless or progressive):
                bits.append("00000")
        parts.append(_with_zeros(bits))
    return b"".join(parts) + b"\xff\xd9"


def _units(factors: Sequence[int], which: bytes, height: int, width: int, side: int) -> int:
    """Returns how many blocks (of lossless ones: samples) a scan of these components has."""
    across, down = [max(1, factor >> 4) for factor in factors], [max(1, factor & 15) for factor in factors]
    if len(which) == 1:
        at = which[0] - 1
        wide, high = -(-width * across[at] // max(across)), -(-height * down[at] // max(down))
        return -(-wide // side) * -(-high // side)
    in_one = sum(a * d for a, d in zip(across, down, strict=True))
    return -(-width // (side * max(across))) * -(-height // (side * max(down))) * in_one


def all_names() -> list[str]:
    """Returns the names of all files: process, precision and factors."""
    return [
        f"{process}-{precision}-{''.join(f'{factor:02x}' for factor in factors)}"
        for process, precision, factors in itertools.product(PROCESSES.values(), PRECISIONS, SAMPLINGS)
    ]


@cache
def made(name: str) -> bytes:
    """Returns the file of a name of `all_names`."""
    process, precision, factors = name.split("-")
    return jpeg(0xC0 + int(process[3:]), int(precision), bytes.fromhex(factors), seed=len(factors))


def with_scans(scans: int, size: tuple[int, int] = (16, 16)) -> bytes:
    """Returns a progressive gray JPEG of so many scans."""
    data = jpeg(PROGRESSIVE, 8, (0x11,), size=size)
    begin = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    return data[:begin] + data[begin:-2] * (scans - 1) + data[-2:]


def sample(count: int) -> Iterator[str]:
    """Yields some names, of each process some: always those of 8 bits that decoders read most."""
    names = all_names()
    always = [name for name in names if name.split("-")[1:] in (["8", "11"], ["8", "221111"])]
    yield from sorted({*always, *random.Random(0).sample(names, min(count, len(names)))})
