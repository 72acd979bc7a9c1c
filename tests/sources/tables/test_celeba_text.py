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
        (b"\n2\n\nx y\na.jpg 1 -2\n\nb.jpg 3 4\n", "t.txt", None, ("x", "y")),
        (b'image_id,x,y\n"a.jpg", 1,-2\nb.jpg,3,4\n', "T.CSV", None, ("x", "y")),
    ],
)
def test_every_head_and_separator_gives_the_same_rows(
    data: bytes, path: str, num_values: int | None, header: tuple
) -> None:
    table = parse_table(data, path, num_values)
    assert table.images == ["a.jpg", "b.jpg"] and table.values.tolist() == [[1, -2], [3, 4]]
    assert table.header == header
    assert [data.splitlines()[line - 1].strip(b'"')[:5] for line in table.lines] == [b"a.jpg", b"b.jpg"]
    with pytest.raises(SourceError, match=r"t.txt, line 1: a.jpg has 0 values, expected 1"):
        parse_table(b"a.jpg\nb.jpg\n", "t.txt")
    with pytest.raises(SourceError, match=r"t.txt, line 2: b.jpg has the value 'one', expected an integer"):
        parse_table(b"a.jpg 1 2\nb.jpg 1 one\n", "t.txt")
