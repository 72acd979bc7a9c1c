"""Caches that somebody else made or can write to: refused, unless `Remote(shared=True)` says that they are trusted."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from child_processes import in_a_fork
from remote_files import serve, write_kind

from fastload import FastLoader, PackedDataset
from fastload.errors import CacheError, DamagedRowError, FormatError, OptionError
from fastload.remote.contents import clear_cache, list_cache, verify_cache
from fastload.remote.urls import Remote

ANOTHER = 12345  # a user
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kind("shards", tmp_path_factory.mktemp("kind"))


@pytest.fixture
def opened(range_server: Any, local: Path, tmp_path: Path) -> Iterator[Callable[..., PackedDataset]]:
    url, found = f"{range_server.url}/{serve(local, range_server.folder)}", list[PackedDataset]()

    def make(check: Any = "auto", **remote: Any) -> PackedDataset:
        given = Remote(**({"cache": tmp_path / "cache", "max_bytes": "64MB", "give_up_after": 5} | remote))
        found.append(PackedDataset(url, remote=given, check=check))
        return found[-1]

    yield make
    for dataset in found:
        dataset.file.remote.close()


def filled(opened: Callable[..., PackedDataset], cache: Path, **remote: Any) -> Path:
    """Reads all rows through a cache; returns the folder of the dataset there."""
    dataset = opened(**remote)
    for _ in FastLoader(dataset, 16, workers=1):
        pass
    dataset.file.remote.close()
    (folder,) = [one.parent for one in cache.glob("1/*/meta.json")]
    return folder


def owned_by_another(cache: Path, *names: str) -> None:
    for name in names:
        os.chown(cache / name, ANOTHER, ANOTHER)


WAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "mode 777": (lambda cache: cache.chmod(0o777), r"can be written to by others \(mode 777\)"),
    "mode 777 inside": (lambda cache: (cache / "1").chmod(0o777), r"can be written to by others \(mode 777\)"),
    "mode 770 inside": (lambda cache: (cache / "1").chmod(0o770), r"can be written to by others \(mode 770\)"),
    "mode 1777 inside": (lambda cache: (cache / "1").chmod(0o1777), r"can be written to by others \(mode 1777\)"),
    "another's": (lambda cache: owned_by_another(cache, "."), f"belongs to user {ANOTHER}"),
    "another's inside": (lambda cache: owned_by_another(cache, "1"), f"belongs to user {ANOTHER}"),
    "another's file": (lambda cache: owned_by_another(cache, "1/used"), f"used: belongs to user {ANOTHER}"),
}


@AS_ROOT
@pytest.mark.parametrize("way", WAYS)
def test_a_cache_of_others_is_refused_with_the_way_out(way, opened, tmp_path):
    filled(opened, tmp_path / "cache")
    change, why = WAYS[way]
    change(tmp_path / "cache")
    remote = Remote(cache=tmp_path / "cache")
    for use in (
        opened,
        lambda: list_cache(remote),
        lambda: verify_cache(None, remote),
        lambda: clear_cache(None, remote),
    ):
        with pytest.raises(CacheError, match=rf"{why}.*name another folder: Remote\(cache=\.\.\.\), FASTLOAD_CACHE"):
            use()


def test_a_folder_as_tmp_is_one_in_which_a_cache_may_lie(opened, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o1777)
    filled(opened, tmp_path / "cache")
    assert stat.S_IMODE((tmp_path / "cache" / "1").stat().st_mode) == 0o700


@AS_ROOT
@pytest.mark.parametrize("kind, name, shared", [
    (kind, name, shared)
    for kind, names in {
        "link": ("data.h5", "part-1.h5", "chunks", "locks"),
        "hard link": ("part-1.h5", "chunks"),
        "another's": ("part-1.h5", "locks"),
    }.items()
    for name in names
    for shared in (False, True)
    if shared or kind != "hard link"  # only the user could make one in a folder of their own
])  # fmt: skip
def test_nothing_is_written_through_what_somebody_else_put_there(name, shared, kind, opened, tmp_path):
    folder = filled(opened, tmp_path / "cache", shared=shared)
    mine = tmp_path / "precious"
    mine.write_bytes(b"mine")
    (folder / name).unlink()
    if kind == "link":
        (folder / name).symlink_to(mine)
    elif kind == "hard link":
        (folder / name).hardlink_to(mine)
    else:
        (folder / name).touch()
        os.chown(folder / name, ANOTHER, ANOTHER)
    try:
        dataset = opened(shared=shared)
        for _ in FastLoader(dataset, 16, workers=1):
            pass
    except CacheError as error:
        assert "Remove it, or name another folder" in str(error)
    assert mine.read_bytes() == b"mine"


def test_a_folder_that_is_a_link_is_not_followed(opened, tmp_path):
    folder = filled(opened, tmp_path / "cache")
    (tmp_path / "mine").mkdir()
    folder.rename(tmp_path / "moved")
    folder.symlink_to(tmp_path / "mine")
    with pytest.raises(CacheError, match=r"is a link.*Remove it"):
        filled(opened, tmp_path / "cache")
    assert not [*(tmp_path / "mine").iterdir()]


def rewrite(path: Path, name: str, values: Any, *, digests: bool) -> None:
    """Writes other values into a copy; with digests as whoever knows the format would."""
    from fastload.format.digests import row_digests

    with h5py.File(path, "r+") as file:
        file[name][...] = values
        if digests:
            columns = {one: file[one][()] for one in file if one not in ("images", "digest", "digest_fields")}
            file["digest_fields"][...] = row_digests(columns)


@pytest.mark.parametrize("digests", [False, True])
def test_labels_that_somebody_rewrote_in_a_shared_cache_are_not_trained_on(digests, opened, local, tmp_path):
    folder = filled(opened, tmp_path / "cache", shared=True)
    expected = [PackedDataset(local)[row][1] for row in range(8)]
    rewrite(folder / "part-0.h5", "labels", 2, digests=digests)
    dataset = opened(shared=True)
    assert dataset.check == "always"
    try:
        found = [dataset[row][1] for row in range(8)]
    except (FormatError, DamagedRowError):
        return
    assert found == expected


def test_rows_of_a_shared_cache_are_compared_each_time(opened, local, tmp_path):
    folder = filled(opened, tmp_path / "cache", shared=True)
    dataset = opened(check="first", shared=True)
    expected = PackedDataset(local)[3][0]
    assert torch.equal(dataset[3][0], expected)
    with h5py.File(folder / "part-0.h5", "r+") as file:
        file["images"][...] = 0
    assert torch.equal(dataset[3][0], expected)  # fetched again
    with pytest.raises(OptionError, match=r"check=None does not go with Remote\(shared=True\)"):
        opened(check=None, shared=True)
    with pytest.raises(OptionError, match="always compared"):
        Remote(shared=True, check=False)


@AS_ROOT
def test_users_of_a_group_share_a_cache(opened, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o2770)
    os.chown(cache, 0, ANOTHER)
    folder = filled(opened, cache, shared=True)
    for path in (cache / "1", folder, folder / "chunks", folder / "part-0.h5", cache / "1" / "used"):
        status = path.stat()
        assert status.st_gid == ANOTHER and status.st_mode & 0o660 == 0o660, path
    for above in [tmp_path, *tmp_path.parents][:4]:
        above.chmod(above.stat().st_mode | 0o011)

    def as_another_user() -> None:
        os.setgroups([])
        os.setgid(ANOTHER)
        os.setuid(ANOTHER)
        remote = Remote(cache=cache, shared=True)
        assert len(list_cache(remote).datasets) == 1
        (check,) = verify_cache(None, remote)
        assert check.ok and check.checked > 10
        with pytest.raises(CacheError, match="can be written to by others"):
            list_cache(Remote(cache=cache))

    in_a_fork(as_another_user)
