import pytest

from fastload.sources.voc_objects import Objects, box_columns, parse_annotation

CAT = "<object><name> cat </name>{}<bndbox><xmin>{}</xmin><ymin>1</ymin><xmax>8</xmax><ymax>6</ymax></bndbox></object>"


def test_the_whole_image_is_0_0_width_height() -> None:
    found = parse_annotation(f"<annotation>{CAT.format('', 1)}</annotation>".encode())
    assert found == Objects(("cat",), (False,), ((0, 0, 8, 6),))
    assert parse_annotation(f"<a>{CAT.format('<difficult>1</difficult>', 1)}</a>".encode()).difficult == (True,)
    assert parse_annotation(b"<annotation/>") == Objects((), (), ())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<a",
        b"\xff\xfe<a/>",
        b"<a>&b;</a>",
        b"<?xml version='1.0' encoding='nonsense'?><a/>",
        b"\x00",
        "<a>é".encode(),
    ],
)
def test_damaged_text_is_a_named_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not well formed|is not in UTF-8"):
        parse_annotation(data)


@pytest.mark.parametrize("left", ["", "inf", "-inf", "9", "1e999"])
def test_a_box_that_is_none_is_named(left: str) -> None:
    with pytest.raises(ValueError, match=r"an object \(cat\) with"):
        parse_annotation(f"<a>{CAT.format('', left)}</a>".encode())


def test_columns_are_padded_and_hold_one_box_at_least() -> None:
    columns = box_columns([Objects((), (), ())], ())
    assert columns["boxes"].values.shape == (1, 1, 4) and columns["box_labels"].values.tolist() == [[-1]]
    both = Objects(("b", "a"), (True, False), ((0, 0, 1, 1), (2, 2, 3, 3)))
    columns = box_columns([Objects((), (), ()), both], ("a", "b"))
    assert columns["box_labels"].values.tolist() == [[-1, -1], [1, 0]]
    assert columns["box_difficult"].values.tolist() == [[0, 0], [1, 0]]
    assert columns["boxes"].values[1].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]
    assert columns["num_boxes"].values.tolist() == [0, 2]
