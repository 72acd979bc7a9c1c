import pytest

from fastload.errors import SourceError
from fastload.sources.tables.celeba_text import parse_table


@pytest.mark.parametrize(
    ("data", "path", "num_values", "header"),
    [
        (b"a.jpg 1 -2\nb.jpg  3   4\n", "t.txt", None, ()),
        (b"2\r\nx y \r\na.jpg 1 -2\r\nb.jpg 3 4", "t.txt", None, ("x", "y")),
        (b"2\nimage_id x y\na.jpg 1 -2\nb.jpg 3 4\n", "t.txt", None, ("x", "y")),
        (b"number x y\na.jpg 1 -2\n\nb.jpg 3 4\n\n", "t.txt", 2, ("x", "y")),
        (b"\xef\xbb\xbfx y\na.jpg\t1\t-2\nb.jpg\t3\t4\n", "t.txt", 2, ("x", "y")),
        (b'image_id,x,y\n"a.jpg", 1,-2\nb.jpg,3,4\n', "T.CSV", None, ("x", "y")),
    ],
)
def test_every_head_and_separator_gives_the_same_rows(
    data: bytes, path: str, num_values: int | None, header: tuple
) -> None:
    table = parse_table(data, path, num_values)
    assert table.images == ["a.jpg", "b.jpg"] and table.values.tolist() == [[1, -2], [3, 4]]
    assert table.header == header


def test_lines_are_counted_with_the_blank_ones() -> None:
    assert parse_table(b"\n2\n\nx y\na.jpg 1 2\n\nb.jpg 3 4\n", "t.txt").lines.tolist() == [5, 7]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"a.jpg\nb.jpg\n", "line 1: a.jpg has 0 values, expected 1"),
        (b"2\nx y\n", "holds no rows"),
        (b"a.jpg 1 2\nb.jpg 1 one\n", "line 2: b.jpg has the value 'one'"),
        (b"a.jpg 1\nb.jpg 2147483648\n", "line 2: .* integer of 32 bits"),
        (b"a.jpg 1\na.jpg 1\nb.jpg 1\na.jpg 2\n", r"\(2\): a.jpg \(lines 1 and 2\), a.jpg \(lines 1 and 4\)"),
    ],
)
def test_a_bad_table_is_named(data: bytes, message: str) -> None:
    with pytest.raises(SourceError, match=f"t.txt.*{message}"):
        parse_table(data, "t.txt")


def test_rows_are_found_by_name_and_else_without_suffix() -> None:
    table = parse_table(b"a.jpg 1\nb.jpg 2\nc.jpg 3\n", "t.txt")
    rows, absent = table.rows_of(["c.jpg", "x.jpg", "a.jpg"])
    assert rows.tolist() == [2, -1, 0] and absent == ["b.jpg"]
    rows, absent = table.rows_of(["a.png", "b.png"])
    assert rows.tolist() == [0, 1] and absent == ["c.jpg"]
