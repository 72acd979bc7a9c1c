from __future__ import annotations

import pytest

from fastload.system.text import counted, format_bytes, text_of


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (2**23, "8.0 MiB"), (2**40 - 1, "1.0 TiB"), (2**30, "1.0 GiB")]
)
def test_sizes_are_written_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 rows"), (1, "1 row"), (2000, "2,000 rows")])
def test_only_one_is_singular(count: int, text: str) -> None:
    assert counted(count, "row") == text


@pytest.mark.parametrize("value", [b"caf\xc3\xa9 \xff", "caf\xe9 \\xff"])
def test_what_is_no_text_is_escaped(value: bytes | str) -> None:
    assert text_of(value) == "caf\xe9 \\xff"
    assert text_of("\udcff") == "\\udcff"
