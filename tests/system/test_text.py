from __future__ import annotations

import pytest

from fastload.system.text import bytes_of, counted, format_bytes, read_json, text_of


def test_sizes_and_counts_are_written_for_people_and_what_is_no_text_is_escaped() -> None:
    sizes = {0: "0 B", 1023: "1023 B", 2**23: "8.0 MiB", 2**40 - 1: "1.0 TiB", 2**30: "1.0 GiB"}
    assert {count: format_bytes(count) for count in sizes} == sizes
    assert [counted(count, "row") for count in (0, 1, 2000)] == ["0 rows", "1 row", "2,000 rows"]
    assert text_of(b"caf\xc3\xa9 \xff") == text_of("caf\xe9 \\xff") == "caf\xe9 \\xff"
    assert text_of("\udcff") == "\\udcff"


def test_texts_out_of_json_are_texts_that_a_file_can_hold() -> None:
    found = read_json(r'{"a\ud800": ["\udfff", {"b": "\ud83d\ude00 \u00e9"}], "c": 1.5}')
    assert found == {r"a\ud800": [r"\udfff", {"b": "\U0001f600 é"}], "c": 1.5}
    assert read_json("[1]".encode("utf-16")) == [1]
    for broken in ("{", b"\xff", "[" * 100_000, r'"\ud800"' + "]", b'"\xed\xa0\x80"'):
        with pytest.raises(ValueError):
            read_json(broken)


@pytest.mark.parametrize(
    ("text", "count"),
    [("8388608", 8388608), ("8MiB", 2**23), (" 8m ", 2**23), ("1.5 KB", 1500), ("2TB", 2 * 10**12), ("1TiB", 2**40)],
)
def test_bytes_are_counted_by_the_unit(text, count) -> None:
    assert bytes_of(text) == count


@pytest.mark.parametrize("text", ["", "much", "8 XB", "-1", "1e6", "8 MiB/s"])
def test_what_is_no_number_of_bytes_is_none(text) -> None:
    assert bytes_of(text) is None
