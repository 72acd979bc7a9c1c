"""What the cache holds is listed, compared with what came, and cleared, while others may use it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from called import called
from ragged_cases import flip_byte
from small_files import write_random

from fastload import FastLoader, PackedDataset
from fastload.errors import OptionError
from fastload.pack.index import index_files
from fastload.remote.cache import CacheFolder
from fastload.remote.contents import clear_cache, list_cache, verify_cache
from fastload.remote.urls import Remote

if TYPE_CHECKING:
    from running_server import RangeServer

ROW = 16 * 12 * 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, where all of a test keeps chunks."""
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def urls(range_server: RangeServer) -> tuple[str, str]:
    """The URLs of an index of two shards and of one file, of which nothing is in the cache yet."""
    folder = range_server.folder
    shards = [write_random(folder / f"s{i}.h5", rows=40, seed=i, classes="ab", chunk_rows=10) for i in range(2)]
    index_files(shards, folder / "out.h5")
    write_random(folder / "one.h5", rows=60, seed=7, chunk_rows=10)
    return f"{range_server.url}/out.h5", f"{range_server.url}/one.h5"


def read_all(url: str, shard: int | None = None) -> bool:
    """Reads all rows, or those of a shard, which come into the cache; returns whether there were any."""
    dataset = PackedDataset(url)
    shards = dataset.file.shards
    rows = range(len(dataset)) if shard is None else shards.rows_of(shard)[1].tolist()
    found = [dataset[row] for row in rows]
    dataset.file.remote.close()
    return len(found) > 0


def copy_of(cache: Path, name: str) -> Path:
    (found,) = cache.glob(f"1/*/{name}")
    return found


def test_a_cache_that_is_not_there_holds_nothing_and_is_not_made(cache):
    assert list_cache().datasets == () and verify_cache() == [] and clear_cache().removed == ()
    assert not cache.exists()
    assert "holds no dataset" in called("cache", "list").stdout


def test_each_dataset_is_listed_with_what_of_it_is_there(urls, cache):
    out, one = urls
    assert read_all(out, shard=1) and read_all(one)
    found = list_cache()
    assert [(each.name, each.chunks, each.num_chunks, each.in_use) for each in found.datasets] == [
        (one, 7, 7, False),
        (out, 5, 10, False),  # with a header in each shard
    ]
    assert found.bytes >= sum(each.bytes for each in found.datasets) > 100 * ROW and found.limit_bytes > found.bytes
    said = called("cache", "list").stdout
    assert f"{out}" in said and "5 of 10" in said and "7 of 7" in said and "ago" in said
    assert json.loads(called("cache", "list", "--json").stdout)["datasets"][0]["urls"] == [one]
    assert list_cache(Remote(cache=cache.parent / "other")).datasets == ()
    assert "holds no dataset" in called("cache", "list", "--cache", cache.parent / "other").stdout


def test_a_dataset_that_a_process_has_open_is_in_use_and_stays(urls, cache):
    out, one = urls
    assert read_all(out)
    dataset = PackedDataset(one)
    dataset[3]
    assert {each.name: each.in_use for each in list_cache().datasets} == {out: False, one: True}
    words = [sys.executable, "-m", "fastload", "cache", "clear", "--all"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and f"{out}: removed" in done.stdout, done.stderr
    assert f"{one}: left" in done.stdout and "some process has it open" in done.stdout
    assert [each.name for each in list_cache().datasets] == [one]
    called("cache", "clear", one, code=1)
    assert dataset[5][0].shape == (3, 16, 12)
    dataset.file.remote.close()


def test_what_was_cleared_is_fetched_again(urls, range_server, cache):
    out, one = urls
    assert read_all(out) and read_all(one)
    before = list_cache().bytes
    cleared = clear_cache(out)
    assert [each.name for each in cleared.removed] == [out] and cleared.in_use == ()
    assert list_cache().bytes == cleared.bytes < before
    assert [path.name for path in cache.glob("1/*/*.h5")] == ["one.h5"]
    requests = len(range_server.log())
    assert read_all(out)
    assert len(range_server.log()) > requests + 8
    assert len(clear_cache().removed) == 2
    assert [path.name for path in (cache / "1").iterdir()] == ["used"]


def test_a_chunk_that_rotted_is_removed_and_fetched_again(urls, range_server, cache):
    out, one = urls
    assert read_all(out) and read_all(one)
    requests = len(range_server.log())
    assert [(check.name, check.checked, check.ok) for check in verify_cache()] == [(one, 7, True), (out, 10, True)]
    flip_byte(copy_of(cache, "s1.h5"), 4096 + 25 * ROW)
    flip_byte(copy_of(cache, "s1.h5"), 4096 + 36 * ROW)
    (check,) = verify_cache(out)
    assert (check.checked, check.wrong, check.removed, check.skipped, check.ok) == (10, 2, 2, 0, False)
    assert len(range_server.log()) == requests, "without a request"
    assert verify_cache(out)[0].checked == 8
    assert read_all(out)
    assert len(range_server.log()) == requests + 3, "the index is asked for, and two chunks"
    assert verify_cache(out)[0].ok


def test_the_header_of_a_shard_that_rotted_takes_its_chunks_with_it(urls, cache):
    out, _ = urls
    assert read_all(out)
    path = copy_of(cache, "s0.h5")
    flip_byte(path, path.stat().st_size - 100)
    (check,) = verify_cache()
    assert (check.wrong, check.removed) == (1, 1)
    assert list_cache().datasets[0].chunks == 5
    assert read_all(out) and verify_cache()[0].ok


def test_a_file_whose_header_cannot_be_read_any_more_is_fetched_again_or_cleared(urls, cache):
    _, one = urls
    assert read_all(one)
    path = copy_of(cache, "one.h5")
    with open(path, "r+b") as file:
        file.write(bytes(4096))
    (check,) = verify_cache()
    assert check.unreadable and not check.ok
    result = called("cache", "verify", code=1)
    assert f"`fastload cache clear {one}`" in result.stdout
    assert read_all(one) and verify_cache()[0].ok, "it was fetched again"
    os.truncate(path, 5000)
    assert read_all(one) and verify_cache()[0].ok
    path.unlink()
    assert read_all(one) and verify_cache()[0].ok
    called("cache", "clear", one)
    assert read_all(one)


def test_a_wrong_chunk_that_somebody_uses_stays(urls, cache):
    out, _ = urls
    assert read_all(out)
    flip_byte(copy_of(cache, "s0.h5"), 4096 + 5 * ROW)
    dataset = PackedDataset(out, check=None)
    loader = FastLoader(dataset, 20, shuffle=False, workers=1)
    batches = iter(loader)
    next(batches)
    (check,) = verify_cache()
    assert (check.wrong, check.removed) == (1, 0)
    assert "stay for now, being in use" in called("cache", "verify", code=1).stdout
    loader.close()
    dataset.file.remote.close()
    assert [(one.wrong, one.removed) for one in verify_cache()] == [(1, 1)]


def test_the_commands_exit_by_what_was_wrong(urls, cache):
    out, _ = urls
    assert read_all(out)
    assert "all as downloaded" in called("cache", "verify").stdout
    flip_byte(copy_of(cache, "s0.h5"), 4096 + 5 * ROW)
    result = called("cache", "verify", "--json", code=1)
    assert json.loads(result.stdout)["datasets"][0]["wrong"] == 1 and "1 wrong chunk in 1 dataset" in result.stderr
    called("cache", "clear", code=2)
    called("cache", "clear", out, "--all", code=2)
    assert f"{out}: removed" in called("cache", "clear", "--all").stdout
    assert "http://a/b.h5: is not in the cache" in called("cache", "clear", "http://a/b.h5", code=1).stderr


def test_nothing_beyond_the_folder_of_the_version_is_removed(urls, cache, tmp_path):
    out, _ = urls
    assert read_all(out)
    mine = tmp_path / "mine"
    mine.mkdir()
    for name in ("meta.json", "photo.jpg"):
        (mine / name).write_text("{}")
    (cache / "notes.txt").write_text("mine")
    (cache / "1" / "link").symlink_to(mine)
    (cache / "1" / "some.txt").write_text("mine")
    assert [each.name for each in clear_cache().removed] == [out]
    assert {path.name for path in mine.iterdir()} == {"meta.json", "photo.jpg"}
    assert (
        (cache / "notes.txt").exists() and (cache / "1" / "link").is_symlink() and (cache / "1" / "some.txt").exists()
    )


@pytest.mark.parametrize("use", [list_cache, lambda remote: verify_cache(None, remote), lambda r: clear_cache(None, r)])
def test_a_link_in_the_place_of_the_cache_is_refused(tmp_path, use):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "1").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OptionError, match=r"is a link, and nothing is removed through one"):
        use(Remote(cache=tmp_path / "linked"))
    assert os.listdir(tmp_path / "elsewhere") == []


def test_what_killed_processes_left_is_cleared(urls, cache):
    out, _ = urls
    assert read_all(out)
    for name in (".new-x", ".gone-y"):
        (cache / "1" / name).mkdir()
        (cache / "1" / name / "part.h5").write_bytes(bytes(10_000))
    with closing(CacheFolder(cache, None)) as folder, folder.new_dataset() as (living, in_use):
        clear_cache()
        assert {path.name for path in (cache / "1").iterdir()} == {"used", living.name}
        in_use.close()
        clear_cache()
        assert {path.name for path in (cache / "1").iterdir()} == {"used"}
