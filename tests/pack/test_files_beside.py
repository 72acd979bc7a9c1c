"""Files beside an output: those of others stay as they are, and what cannot be written is an error."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from interrupted import full_disk, leftovers, stop_at
from small_trees import picture

from fastload import pack_images
from fastload.errors import OutputError, ResumeError
from fastload.export import export_file
from fastload.format.ragged import Column
from fastload.format.writer import PixelSpec, create_file, scratch_file
from fastload.repack import repack_file
from fastload.system.files import save_bytes

IMAGES = [(np.full((8, 8, 3), value, np.uint8), value % 2) for value in range(40)]
OPTIONS: dict[str, Any] = {"workers": 0, "chunk_bytes": 400}


def interrupted(output: Path, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack_images(IMAGES, output, **OPTIONS, **options, progress=stop_at(2, "packing"))


@pytest.mark.parametrize("content", [b"my diary", b"\0" * 100 + b"x", b"SQLite format 3\0" + bytes(4096)])
def test_a_file_of_the_users_under_the_journals_name_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    journal = tmp_path / "o.h5.journal"
    journal.write_bytes(content)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=r"o.h5.journal: exists, and is not the journal of a pack.*Move it away"):
            pack_images(IMAGES, tmp_path / "o.h5", overwrite=overwrite, **OPTIONS)
    assert journal.read_bytes() == content and [path.name for path in tmp_path.iterdir()] == ["o.h5.journal"]


@pytest.mark.parametrize("name", ["journal", "part", "meta"])
@pytest.mark.parametrize("target", [b"mine", b"", None])
def test_links_beside_an_output_are_not_followed(tmp_path: Path, name: str, target: bytes | None) -> None:
    (tmp_path / "out").mkdir()
    victim, link = tmp_path / "victim", tmp_path / f"out/o.h5.{name}"
    if target is not None:
        victim.write_bytes(target)
    link.symlink_to(victim)
    with pytest.raises((OutputError, ResumeError), match=f"o.h5.{name}: "):
        pack_images(IMAGES, tmp_path / "out/o.h5", **OPTIONS)
    assert link.is_symlink() and leftovers(tmp_path / "out/o.h5") == [link.name]
    assert (victim.read_bytes() if victim.exists() else None) == target


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_links_put_there_while_a_pack_is_interrupted_are_not_followed(tmp_path: Path, codec: str) -> None:
    output, victim = tmp_path / "o.h5", tmp_path / "victim"
    whole = pack_images(IMAGES, tmp_path / "whole.h5", codec=codec, **OPTIONS).path.read_bytes()
    interrupted(output, codec=codec)
    part = tmp_path / "o.h5.part"
    victim.write_bytes(part.read_bytes())
    before = victim.read_bytes()
    part.rename(tmp_path / "aside")
    part.symlink_to(victim)
    (tmp_path / "o.h5.meta").symlink_to(victim)
    with pytest.raises(OutputError, match=r"o.h5.part: is a symbolic link. It is not followed"):
        pack_images(IMAGES, output, codec=codec, **OPTIONS)
    assert victim.read_bytes() == before and part.is_symlink()
    (tmp_path / "aside").replace(part)
    # Beside a journal the link is no longer somebody's: it is removed, and what it leads to stays.
    assert pack_images(IMAGES, output, codec=codec, **OPTIONS).chunks_kept >= 1
    assert victim.read_bytes() == before and output.read_bytes() == whole and leftovers(output) == []


def test_a_meta_file_of_the_users_is_refused_and_one_of_an_interrupted_pack_is_replaced(tmp_path: Path) -> None:
    output, meta = tmp_path / "o.h5", tmp_path / "o.h5.meta"
    meta.write_bytes(b"mine")
    for overwrite in (False, True):
        with pytest.raises(ResumeError, match=r"o.h5.meta: exists, and is of no unfinished pack.*Move it away or"):
            pack_images(IMAGES, output, overwrite=overwrite, codec="gzip", **OPTIONS)
        assert meta.read_bytes() == b"mine" and leftovers(output) == ["o.h5.meta"]
    meta.unlink()
    interrupted(output, codec="gzip")
    meta.write_bytes(b"of the pack")
    pack_images(IMAGES, output, codec="gzip", **OPTIONS)
    assert leftovers(output) == []


def test_a_pipe_under_the_journals_name_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "o.h5.journal")
    with pytest.raises(OutputError, match=r"o.h5.journal: is a folder, device or pipe"):
        pack_images(IMAGES, tmp_path / "o.h5", **OPTIONS)


def test_an_export_does_not_follow_a_link_under_its_journals_name(tmp_path: Path) -> None:
    pack_images(IMAGES, tmp_path / "o.h5", **OPTIONS)
    folder, victim = tmp_path / "folder", tmp_path / "victim"
    folder.mkdir()
    victim.write_bytes(b"")
    (folder / ".fastload-export").symlink_to(victim)
    with pytest.raises(OutputError, match=r".fastload-export: is a symbolic link"):
        export_file(tmp_path / "o.h5", folder)
    assert victim.read_bytes() == b"" and list(folder.iterdir()) == [folder / ".fastload-export"]


@pytest.mark.parametrize("mode", [0o640, 0o444, 0o600, 0o666])
@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_an_output_that_is_replaced_keeps_its_permissions(tmp_path: Path, mode: int, codec: str) -> None:
    output, seen = tmp_path / "o.h5", set[int]()

    def look(*_: object) -> None:
        seen.update(stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("o.h5.[pm]*"))

    output.write_bytes(b"old")
    output.chmod(mode)
    pack_images(IMAGES, output, overwrite=True, codec=codec, progress=look, **OPTIONS)
    assert stat.S_IMODE(output.stat().st_mode) == mode
    assert seen and all(each & ~(mode | 0o600) == 0 for each in seen), "nobody else may read it meanwhile"
    (tmp_path / "b.h5").write_bytes(b"old")
    (tmp_path / "b.h5").chmod(mode)
    repack_file(output, tmp_path / "b.h5", overwrite=True)
    assert stat.S_IMODE((tmp_path / "b.h5").stat().st_mode) == mode


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_new_files_have_the_permissions_that_the_umask_leaves(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        pack_images(IMAGES, tmp_path / "o.h5", codec="gzip", **OPTIONS)
        save_bytes(b"", tmp_path / "a.png", force=False)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~umask}
    (tmp_path / "a.png").chmod(0o640)
    save_bytes(b"new", tmp_path / "a.png", force=True)
    assert stat.S_IMODE((tmp_path / "a.png").stat().st_mode) == 0o640


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_metadata_that_cannot_be_written_is_an_error_with_path_and_bytes_and_no_crash(
    tmp_path: Path, codec: str
) -> None:
    """libhdf5 would crash while it closes the file: in a process of its own, so that this one survives."""
    output = tmp_path / "o.h5"
    script = (
        "import resource, sys; sys.path[:0] = sys.argv[2].split(':')\n"
        "from test_files_beside import IMAGES, OPTIONS, pack_images, limited\n"
        "from fastload.errors import OutputError\n"
        "try: pack_images(IMAGES, sys.argv[1], codec=sys.argv[3], progress=limited, **OPTIONS)\n"
        "except OutputError as exc: print(exc, exc.errno)\n"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", script, str(output), f"{here}:{here.parent}", codec]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "o.h5" in done.stdout and "bytes" in done.stdout and "ulimit -f" in done.stdout
    whole = pack_images(IMAGES, tmp_path / "whole.h5", codec=codec, **OPTIONS).path.read_bytes()
    assert pack_images(IMAGES, output, codec=codec, **OPTIONS).chunks_kept >= 1
    assert output.read_bytes() == whole and leftovers(output) == []


def limited(stage: str, done: int, total: int) -> None:
    """Lets no file become larger once all rows are packed."""
    if stage == "packing" and done == total:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))


def test_hdf5_writes_the_same_bytes_into_memory(tmp_path: Path) -> None:
    pixels = {"images": PixelSpec((8, 8, 3), np.dtype("u1"), 10)}
    columns = {
        "split": Column(np.zeros(100, np.uint8), {"names": ("all",)}),
        "key": Column(np.array([f"{i}" for i in range(100)], "S")),
        "digest": Column(np.arange(100, dtype=np.uint64)),
    }
    options: dict[str, Any] = {"num_rows": 100, "pixels": pixels, "columns": columns, "attrs": {"seed": 1}}
    offsets = create_file(tmp_path / "a.h5", **options)
    with scratch_file() as (fd, path):
        assert create_file(path, **options) == offsets == {"images": 4096}
        assert os.pread(fd, 1 << 20, 0) == (tmp_path / "a.h5").read_bytes()
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["key"][7] == b"7"
    with (
        full_disk(10_000),
        scratch_file() as (_, path),
        pytest.raises(OSError, match=r"needs up to .* bytes, `ulimit -f`"),
    ):
        create_file(path, **options)


def test_a_limit_on_the_size_of_files_is_named_before_packing_begins(tmp_path: Path) -> None:
    for value in (1, 2):
        picture(tmp_path / "photos" / "images" / f"{value}.png", value)
        picture(tmp_path / "photos" / "masks" / f"{value}.png", value)
    with full_disk(100_000), pytest.raises(OutputError, match=r"o\.h5: cannot be packed .*`ulimit -f` allows 100,000"):
        pack_images(tmp_path / "photos", tmp_path / "o.h5", workers=0)
    assert leftovers(tmp_path / "o.h5") == []
