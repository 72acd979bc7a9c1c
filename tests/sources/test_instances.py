import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.errors import SourceError
from fastload.sources.coco import bounds_of, read_instances

CONTENT: dict[str, Any] = {
    "info": {"year": 2017, "nested": [[], {}, [1, {"a": "]"}]]},
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 3, "bbox": [1, 2, 3.5, 4], "segmentation": [[1, 2, 3, 2, 3, 4]]},
        {"id": 2, "image_id": 5, "category_id": 90, "bbox": [0, 0, 0, 0], "area": 9.5, "iscrowd": 1,
         "segmentation": {"counts": [0, 4, 2], "size": [2, 3]}},
    ],
    "categories": [{"id": 90, "name": "ü \" { ["}, {"id": 3, "name": "b"}],
    "images": [
        {"id": 5, "file_name": "a.jpg", "height": 2, "width": 3}, {"id": 7, "file_name": "b.jpg"},
    ],
    "licenses": [],
}  # fmt: skip


@pytest.mark.parametrize("written", [{}, {"indent": 3}, {"separators": (",", ":")}, {"ensure_ascii": False}])
def test_the_arrays_hold_what_the_json_says_in_any_order_of_names(written: dict[str, Any]) -> None:
    for content in (CONTENT, dict(reversed(CONTENT.items()))):
        found = read_instances(json.dumps(content, **written).encode(), "x.json", True)
        assert found.names == ["a.jpg", "b.jpg"] and found.image_ids.tolist() == [5, 7]
        assert found.sizes.tolist() == [[2, 3], [0, 0]]
        assert found.category_ids == (3, 90) and found.category_names == ("b", 'ü " { [')
        assert found.image.tolist() == [1, 0] and found.category.tolist() == [0, 1]
        assert found.boxes.tolist() == [[1, 2, 3.5, 4], [0, 0, 0, 0]] and found.areas.tolist() == [14, 9.5]
        assert found.crowd.tolist() == [0, 1] and found.bad == []
        assert found.points.tolist() == [1, 2, 3, 2, 3, 4] and found.ring_sizes.tolist() == [6]
        assert found.rings.tolist() == [1, 0] and found.runs.tolist() == [0, 3] and found.lengths.tolist() == [0, 4, 2]
    without = read_instances(json.dumps(CONTENT).encode("utf-8-sig"), "x.json", False)
    assert not without.rings.any() and not without.runs.any() and not len(without.points)


def test_names_that_no_file_can_hold_are_written_out() -> None:
    text = json.dumps(CONTENT).replace("a.jpg", "\\ud800.jpg")
    assert read_instances(text.encode(), "x.json", False).names == ["\\ud800.jpg", "b.jpg"]


def test_a_file_cut_anywhere_is_named() -> None:
    text = json.dumps(CONTENT, ensure_ascii=False).encode()
    for end in range(len(text)):
        with pytest.raises(SourceError, match=r"x\.json is not well-formed JSON"):
            read_instances(text[:end], "x.json", True)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["id", "image_id", "category_id", "bbox", "area", "iscrowd", "segmentation"]), anything)
def test_whatever_stands_in_an_annotation_it_is_taken_or_named(name: str, value: Any) -> None:
    first = CONTENT["annotations"][0] | {name: value}
    content = CONTENT | {"annotations": [first, CONTENT["annotations"][1]]}
    found = read_instances(json.dumps(content).encode(), "x.json", True)
    assert np.isfinite(found.boxes).all() and np.isfinite(found.points).all()
    assert len(found.bad) == 2 - np.count_nonzero(found.image >= 0)


@given(st.sampled_from(["images", "categories"]), st.sampled_from(["id", "file_name", "name", "height"]), anything)
def test_whatever_stands_in_an_image_or_category_it_is_taken_or_named(part: str, name: str, value: Any) -> None:
    content = CONTENT | {part: [CONTENT[part][0] | {name: value}, CONTENT[part][1]]}
    try:
        read_instances(json.dumps(content).encode(), "x.json", True)
    except SourceError as exc:
        assert part in str(exc)


@given(st.integers(1, 6), st.integers(1, 6), st.data())
def test_the_box_around_runs_is_that_of_their_pixels(height: int, width: int, data: st.DataObject) -> None:
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width)))
    changes = np.flatnonzero(np.diff(mask.astype(int), prepend=0))
    lengths = np.diff([0, *changes.tolist(), len(mask)]).tolist()
    columns, rows = np.nonzero(mask.reshape(width, height))
    box = [0, 0, 0, 0]
    if len(rows):
        left, top = columns.min(), rows.min()
        box = [left, top, columns.max() + 1 - left, rows.max() + 1 - top]
    assert bounds_of([], lengths, (height, width)) == box
