from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.export import plan
from fastload.export.plan import MAX_DEPTH, Names, class_folders, safe_name, safe_parts

# What breaks names, often; and any text at all.
_TEXT = st.one_of(
    st.text(max_size=40), st.text("./\\ aA:*?\0\n~éß", max_size=12), st.text("x", min_size=190, max_size=400)
)


@given(_TEXT)
def test_a_name_is_one_part_of_a_path_and_fits_every_file_system(text):
    name = safe_name(text)
    assert name and name not in (".", "..") and not name.startswith(".") and not set(name) & set('<>:"|?*\\/\0\n')
    assert len(name.encode()) <= 201 and name == name.rstrip(". ") and Path(name).name == name
    assert safe_name(name) == name


@given(_TEXT)
def test_parts_of_a_key_stay_below_the_folder(key):
    parts = safe_parts(key)
    assert 1 <= len(parts) <= MAX_DEPTH
    assert (Path("/out").joinpath(*parts)).resolve().is_relative_to("/out") and str(Path("/out", *parts)) != "/out"


@given(st.lists(_TEXT, max_size=20))
def test_paths_are_unique_where_cases_are_ignored(keys):
    given_names = Names()
    paths = [given_names.path(parts[:-1], parts[-1], ".png") for parts in map(safe_parts, keys)]
    folded = {unicodedata.normalize("NFC", path.casefold()) for path in paths}
    assert len(folded) == len(keys)
    # No file stands where a folder has to be.
    assert not {str(above) for path in paths for above in Path(path).parents} & set(paths)


def test_equal_names_do_not_take_squared_time(monkeypatch):
    calls, folded = [], plan._folded
    monkeypatch.setattr(plan, "_folded", lambda path: calls.append(path) or folded(path))
    given_names = Names()
    paths = [given_names.path([], "image", ".png") for _ in range(200)]
    assert paths[:2] == ["image.png", "image_2.png"] and paths[-1] == "image_200.png"
    assert len(calls) <= 2 * len(paths)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("a/b", "a_b"),
        ("..", "_"),
        ("CON", "_CON"),
        ("nul.txt", "_nul.txt"),
        ("x\0y", "x_y"),
        (".git", "_git"),
        ("", "_"),
    ],
)
def test_names_resemble_what_they_stand_for(text, name):
    assert safe_name(text) == name


def test_classes_get_folders_of_their_own():
    assert class_folders(["a/b", "A_B", "a_b"]) == ["a_b", "A_B_2", "a_b_3"]
