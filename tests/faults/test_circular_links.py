"""Links that lead back to themselves, wherever a path is given or found: an error that names them, or a note first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_trees import picture

from fastload import PackedDataset
from fastload.errors import FastloadError
from fastload.export import export_file
from fastload.inspection.verify import verify_file
from fastload.pack import pack_images, survey_source
from fastload.pack.index import index_files
from fastload.pack.unpacked import packed_path
from fastload.repack import append_images, merge_files, repack_file


def circle(path: Path) -> Path:
    """Makes two links that lead to each other, and returns the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(path.name + ".2", path)
    os.symlink(path.name, path.with_name(path.name + ".2"))
    return path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("circles")
    for number in range(4):
        picture(root / f"photos/c{number % 2}/{number}.png")
    pack_images(root / "photos", root / "a.h5", workers=0)
    shutil.copytree(root / "photos", root / "holed")
    circle(root / "holed/c0/9.png")
    circle(root / "tables/metadata.csv")
    circle(root / "shards/train-000.tar")
    circle(root / "link.h5")
    (root / "indexed").mkdir()
    for seed, name in enumerate(("s.h5", "t.h5")):
        pack_images(root / "photos", root / "indexed" / name, seed=seed, workers=0)
    index_files([root / "indexed/s.h5", root / "indexed/t.h5"], root / "indexed/i.h5")
    (root / "indexed/t.h5").unlink()
    circle(root / "indexed/t.h5")
    return root


CALLS: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "source": (lambda root, out: pack_images(root / "link.h5", out), r"link\.h5 cannot be read: Too many levels"),
    "image": (lambda root, out: pack_images(root / "holed", out), r"c0/9\.png is a link that leads back to itself"),
    "table": (lambda root, out: pack_images(root / "tables", out), r"metadata\.csv is a link that leads back to"),
    "tar": (lambda root, out: pack_images(root / "shards", out), r"train-000\.tar is a link that leads back to itself"),
    "pack": (
        lambda root, out: pack_images(root / "photos", circle(out), overwrite=True),
        r"out\.h5: is a link that leads back to itself",
    ),
    "repack": (lambda root, out: repack_file(root / "a.h5", circle(out)), r"out\.h5: is a link that leads back to"),
    "merge": (
        lambda root, out: merge_files([root / "a.h5", root / "indexed/s.h5"], circle(out)),
        r"out\.h5: is a link that leads back to itself",
    ),
    "append": (lambda root, out: append_images(circle(out), root / "photos"), r"out\.h5: no such file"),
    "journal": (
        lambda root, out: pack_images(root / "photos", (circle(Path(f"{out}.journal")), out)[1]),
        r"out\.h5\.journal: is a symbolic link",
    ),
    "shard of an index": (lambda root, out: verify_file(root / "indexed/i.h5"), r"i\.h5: its shard t\.h5 is missing"),
    "dataset": (lambda root, out: PackedDataset(root / "indexed/i.h5")[7], r"i\.h5: its shard t\.h5 is missing"),
    "index": (
        lambda root, out: index_files([root / "a.h5", circle(root / "x.h5")], root / "j.h5"), r"x\.h5: no such file",
    ),
    "export": (lambda root, out: export_file(root / "a.h5", circle(out)), r"out\.h5: cannot be written"),
    "cache of a folder": (lambda root, out: packed_path(root / "photos", circle(out)), r"out\.h5': is no folder"),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_link_that_leads_back_to_itself_is_named(made: Path, tmp_path: Path, call: str) -> None:
    work, message = CALLS[call]
    with pytest.raises(FastloadError, match=message):
        work(made, tmp_path / "out.h5")


@pytest.mark.parametrize("target", ["metadata.csv", "nowhere"])
def test_a_table_or_folder_that_is_a_broken_link_is_said_first(made: Path, tmp_path: Path, target: str) -> None:
    source = shutil.copytree(made / "photos", tmp_path / "photos")
    os.symlink(target, source / "metadata.csv")
    os.symlink(target, source / "c2")
    why = (
        "is a link that leads back to itself" if target == "metadata.csv" else "is a link to a file that does not exist"
    )
    notes = survey_source(source).notes
    assert [note for note in notes if note.startswith("NOT READ")] == [f"NOT READ: c2 {why}, metadata.csv {why}."]
