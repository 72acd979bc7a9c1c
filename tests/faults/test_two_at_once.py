"""Two commands that write to the same output at once: one of them is refused, by name, and the other one's is whole."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_commands import content
from PIL import Image

from fastload.errors import OutputError, PackError, ResumeError
from fastload.export import export_file
from fastload.pack import pack_images
from fastload.pack.index import index_files
from fastload.repack import append_images, merge_files, repack_file

_FEW = {"workers": 0, "chunk_bytes": 400}
STRANGER = ".out.h5.append-0123456789abcdef"

CALLS: dict[str, Callable[..., Any]] = {
    "pack": lambda root, out, **more: pack_images(root / "photos", out, overwrite=True, **_FEW, **more),
    "repack": lambda root, out, **more: repack_file(root / "b.h5", out, overwrite=True, **_FEW, **more),
    "merge": lambda root, out, **more: merge_files([root / "a.h5", root / "b.h5"], out, overwrite=True, **_FEW, **more),
    "append": lambda root, out, **more: append_images(out, root / "more", workers=0, **more),
    "append others": lambda root, out, **more: append_images(out, root / "others", workers=0, **more),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("at_once")
    rng = np.random.default_rng(5)
    for source, number in itertools.product(("photos", "more", "others"), range(6)):
        path = root / source / f"class{number % 2}" / f"{source}{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(path)
    pack_images(root / "photos", root / "a.h5", **_FEW)
    pack_images(root / "more", root / "b.h5", **_FEW)
    return root


@pytest.fixture
def output(root: Path, tmp_path: Path) -> Iterator[Path]:
    """A packed file, and beside it one that somebody else gave a name as of a part of it."""
    (tmp_path / STRANGER).write_bytes(b"of somebody else")
    shutil.copy(root / "a.h5", tmp_path / "out.h5")
    yield tmp_path / "out.h5"
    left = {"out.h5", STRANGER, *(path.name for path in tmp_path.iterdir() if path.is_dir())}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert (tmp_path / STRANGER).read_bytes() == b"of somebody else"


@pytest.mark.parametrize(("first", "second"), list(itertools.product(CALLS, repeat=2)))
def test_of_two_packers_of_one_output_the_second_is_refused(root: Path, output: Path, first: str, second: str) -> None:
    alone = output.parent / "alone"
    alone.mkdir()
    shutil.copy(output, alone / "out.h5")
    CALLS[first](root, alone / "out.h5")
    refused = []

    def meanwhile(*_: object) -> None:
        with pytest.raises(PackError, match=r"out\.h5\.journal: another process is packing to this output"):
            CALLS[second](root, output)
        refused.append(second)

    CALLS[first](root, output, progress=meanwhile)
    assert refused and output.read_bytes() == (alone / "out.h5").read_bytes()
    if {first, second} == {"append", "append others"}:
        assert CALLS[second](root, output).num_samples == 18


def test_an_index_that_was_made_meanwhile_is_not_replaced_by_a_pack(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "a.h5", tmp_path / "shard.h5")
    output = tmp_path / "out.h5"

    def meanwhile(*_: object) -> None:
        if not output.exists():
            index_files([tmp_path / "shard.h5"], output)

    with pytest.raises(OutputError, match=r"out\.h5: exists"):
        pack_images(root / "photos", output, progress=meanwhile, **_FEW)
    assert output.read_bytes() != (root / "a.h5").read_bytes()


def test_of_two_exports_into_one_folder_the_second_is_refused(root: Path, tmp_path: Path) -> None:
    refused = []

    def meanwhile(*_: object) -> None:
        for name, why in (("a", "another process is exporting"), ("b", "unfinished .* of another file.* in progress")):
            with pytest.raises(OutputError, match=rf"out: .*{why}"):
                export_file(root / f"{name}.h5", tmp_path / "out")
        refused.append(True)

    export_file(root / "a.h5", tmp_path / "out", progress=meanwhile)
    export_file(root / "a.h5", tmp_path / "alone")
    assert refused and content(tmp_path / "out") == content(tmp_path / "alone")


def test_an_append_leaves_the_unfinished_pack_of_something_else(root: Path, output: Path) -> None:
    class Stop(Exception):
        pass

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "packing":
            raise Stop

    with pytest.raises(Stop):
        pack_images(root / "others", output, overwrite=True, progress=stop, **_FEW)
    with pytest.raises(ResumeError, match=r"out\.h5\.part: left by an unfinished pack of something else"):
        append_images(output, root / "more", workers=0)
    report = pack_images(root / "others", output, overwrite=True, **_FEW)
    assert report.chunks_kept == 1
