"""The checksum of TFRecord, compiled and in NumPy, against its definition."""

import random

import pytest

from fastload.sources import records


def test_the_checksum_is_that_of_the_standard() -> None:
    assert records.crc32c(b"123456789") == 0xE3069283  # RFC 3720, B.4, and every catalogue
    assert records.crc32c(bytes(32)) == 0x8A9136AA


@pytest.mark.parametrize("compiled", [True, False])
def test_every_length_gives_the_same_however_it_is_computed(monkeypatch: pytest.MonkeyPatch, compiled: bool) -> None:
    if not compiled:
        monkeypatch.setattr(records, "library", lambda: None)
    for size in (0, 1, 64, 65, 511, 512, 513, 2000):
        data = random.Random(size).randbytes(size)
        crc = 0xFFFFFFFF
        for byte in data:
            crc ^= byte
            for _ in range(8):
                crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
        assert records.crc32c(data) == crc ^ 0xFFFFFFFF, size
