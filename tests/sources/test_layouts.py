"""How a layout is recognised by what lies in a folder, and what is said where that is not enough."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_trees import picture

from fastload.errors import OptionError, SourceError
from fastload.sources import LAYOUTS, SourceOptions, detect_layout, list_source


def test_two_formats_that_fit_equally_well_are_left_to_the_user(tmp_path: Path) -> None:
    picture(tmp_path / "images" / "1.png")
    picture(tmp_path / "masks" / "1.png")
    (tmp_path / "train.csv").write_text("file,label\nimages/1.png,cat\n")
    with pytest.raises(SourceError, match=r"more than one layout fits: .*Say which one it is: `--layout") as error:
        list_source(tmp_path)
    assert "train.csv" in str(error.value) and "masks" in str(error.value)
    assert list_source(tmp_path, "manifest").layout == "manifest"
    assert list_source(tmp_path, "mask-folders").layout == "mask-folders"


def test_a_dataset_known_by_name_comes_before_a_format_and_that_before_a_folder(tmp_path: Path) -> None:
    picture(tmp_path / "img_align_celeba" / "000001.jpg")
    assert detect_layout(tmp_path) == ("celeba", ["img_align_celeba/"])
    assert list_source(tmp_path).notes[0] == "Layout celeba, recognised by img_align_celeba/."
    (tmp_path / "list_eval_partition.csv").write_text("image_id,partition\n000001.jpg,0\n")
    assert detect_layout(tmp_path)[0] == "celeba"
    picture(tmp_path / "other" / "a" / "1.jpg")
    assert detect_layout(tmp_path / "other")[0] == "folder"


@pytest.mark.parametrize("name", LAYOUTS)
def test_nothing_of_a_layout_is_a_named_error_and_no_evidence(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.md").write_text("nothing to see")
    with pytest.raises(SourceError):
        list_source(tmp_path, name)
    assert detect_layout(tmp_path) == ("folder", [])


def test_every_layout_has_a_line_and_an_unknown_one_names_them_all(tmp_path: Path) -> None:
    assert all(layout.line and len(layout.line) < 100 for layout in LAYOUTS.values())
    with pytest.raises(OptionError, match=", ".join(LAYOUTS)):
        list_source(tmp_path, "imagenat")


def test_an_option_that_a_layout_does_not_use_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "cat" / "1.png")
    given: dict[str, Any] = {"labels": ("a",), "image_column": "a", "split_column": "a", "root": Path()}
    for name, value in (given | {"masks": "semantic"}).items():
        flag = name.replace("_", "-")
        with pytest.raises(OptionError, match=f"`--{flag}` means nothing to the layout folder; it is for .*manifest"):
            list_source(tmp_path, options=SourceOptions(**{name: value}))
    assert len(list_source(tmp_path, options=SourceOptions(masks="none"))) == 1
