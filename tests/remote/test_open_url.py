"""What reads a packed file once takes its URL, too: what is fetched, what is found, and which names messages have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import h5py
import numpy as np
import pytest
from called import called
from child_processes import child_environment
from ragged_cases import flip_byte, varied_file
from remote_files import bytes_on_disk, fetched_bytes
from small_files import write_random
from torch.utils.data import DataLoader

from fastload import PackedDataset
from fastload.errors import DamagedRowError, FormatError, ObjectMissingError, OptionError, SourceError
from fastload.export import export_file
from fastload.format.ragged import Column
from fastload.inspection.info import inspect_file
from fastload.inspection.preview import make_preview
from fastload.inspection.shuffle_quality import measure_shuffles
from fastload.inspection.verify import verify_file
from fastload.options.measure import BenchOptions, TuneOptions
from fastload.pack.index import index_files
from fastload.prefetch.inputs import PackedInput
from fastload.profiling.bench.benchmark import run_bench
from fastload.profiling.tune.search import Search
from fastload.remote.chunks import LARGE_ROW_BYTES
from fastload.remote.open_url import open_packed
from fastload.repack import append_images, merge_files, repack_file

if TYPE_CHECKING:
    from running_server import RangeServer

SIZE, CHUNK_ROWS = (32, 32, 3), 20
IMAGE_BYTES = 32 * 32 * 3


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, where all of a test keeps chunks."""
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def shard(folder: Path, number: int, rows: int = 100, **options: object) -> Path:
    keys = Column(np.array([f"{number}/{row:03}".encode() for row in range(rows)]))
    options = {"size": SIZE, "classes": "abc", "chunk_rows": CHUNK_ROWS, "columns": {"key": keys}} | options
    splits = {"train": rows - 20, "val": 20}
    return write_random(folder / f"s{number}.h5", rows=rows, seed=number, splits=splits, **options)  # type: ignore[arg-type]


@pytest.fixture
def url(range_server: RangeServer) -> str:
    """The URL of an index of three shards."""
    index_files([shard(range_server.folder, number) for number in range(3)], range_server.folder / "out.h5")
    return f"{range_server.url}/out.h5"


@pytest.fixture
def large(range_server: RangeServer) -> Iterator[str]:
    """The URL of a file that is larger than what is fetched whole, 18 MB of images."""
    write_random(range_server.folder / "large.h5", rows=1500, size=(64, 64, 3), classes="abc", chunk_rows=100)
    yield f"{range_server.url}/large.h5"


def pixel_requests(server: RangeServer, first: int = 4096) -> list[str]:
    """The ranges of shards that were asked for and that begin in their pixels."""
    found = []
    for request in server.log():
        if request["range"] and not request["path"].startswith("/out"):
            begin, _, last = request["range"].removeprefix("bytes=").partition("-")
            size = os.stat(server.folder / request["path"][1:]).st_size
            if int(begin) >= first and int(last) < size - 1:
                found.append(f"{request['path']} {request['range']}")
    return found


def test_info_of_an_index_fetches_headers_and_no_pixels(url, range_server):
    found = inspect_file(url)
    here = inspect_file(range_server.folder / "out.h5")
    assert (found.name, found.path, found.num_shards) == (url, url, 3)
    for name in ("num_samples", "fields", "splits", "classes", "class_counts", "file_bytes", "pixel_bytes", "digest"):
        assert getattr(found, name, None) == getattr(here, name, None), name
    assert pixel_requests(range_server) == []
    gets = [one["path"] for one in range_server.log() if one["method"] == "GET"]
    assert {*gets} == {"/out.h5", "/s0.h5", "/s1.h5", "/s2.h5"} and all(gets.count(path) <= 2 for path in gets)
    assert json.loads(json.dumps(found.to_dict()))["path"] == url


def test_whether_there_may_be_jpegs_takes_no_request(url, range_server):
    varied_file(range_server.folder / "v0.h5")
    index_files([range_server.folder / "v0.h5"], range_server.folder / "varied.h5")
    data = PackedInput(PackedDataset(f"{range_server.url}/varied.h5"))
    before = len(range_server.log())
    assert data.seems_to_have_jpegs() and len(range_server.log()) == before
    assert data.has_jpegs() and len(range_server.log()) > before
    assert not PackedInput(PackedDataset(url)).seems_to_have_jpegs(), "images of one size are pixels"


def test_info_of_a_file_shows_its_chunks_by_three_requests(large, range_server):
    found, here = inspect_file(large), inspect_file(range_server.folder / "large.h5")
    assert [request["method"] for request in range_server.log()] == ["HEAD", "GET", "GET"]
    assert pixel_requests(range_server) == []
    assert (found.layout, found.fields, found.file_bytes) == (here.layout, here.fields, here.file_bytes)
    assert found.num_shards is None and found.held_off is False


def test_info_of_ragged_images_and_of_masks_needs_no_pixels(range_server):
    varied_file(range_server.folder / "varied.h5", masks=True)
    found, here = (inspect_file(one) for one in (f"{range_server.url}/varied.h5", range_server.folder / "varied.h5"))
    assert found.stores == here.stores and found.fields == here.fields
    assert found.mask_shares == {} != here.mask_shares, "masks would have to be fetched"


@pytest.mark.parametrize("kind", ["index", "one file", "masks", "ragged", "embeddings"])
def test_verify_reads_every_chunk_and_finds_nothing_wrong(range_server, kind):
    folder = range_server.folder
    if kind == "index":
        index_files([shard(folder, number) for number in range(3)], folder / "out.h5")
    elif kind == "ragged":
        varied_file(folder / "out.h5", masks=True)
    else:
        wide = {"wide": Column(np.random.default_rng(1).random((90, LARGE_ROW_BYTES // 8)))}
        columns = wide if kind == "embeddings" else None
        write_random(folder / "out.h5", rows=90, masks=kind == "masks", chunk_rows=9, columns=columns)
    seen: list[tuple[int, int]] = []
    report = verify_file(f"{range_server.url}/out.h5", progress=lambda done, total: seen.append((done, total)))
    here = verify_file(folder / "out.h5")
    assert report.ok and (report.num_rows, report.pixel_bytes) == (here.num_rows, here.pixel_bytes)
    assert seen[-1] == (report.num_rows, report.num_rows) and report.to_dict()["path"] == f"{range_server.url}/out.h5"


def test_verify_reads_by_many_requests_at_once_and_not_from_the_cache(large, range_server, cache):
    range_server.set(latency_s=0.05)
    assert verify_file(large).ok
    assert range_server.most_at_once() > 4
    before = fetched_bytes(range_server.log())
    assert verify_file(large).ok
    assert fetched_bytes(range_server.log()) > 1.9 * before
    size = (range_server.folder / "large.h5").stat().st_size
    assert bytes_on_disk(cache) < size / 2


def test_verify_finds_what_became_of_an_object_since_it_was_cached(url, range_server):
    assert len(list(DataLoader(PackedDataset(url), 50))) == 6 and verify_file(url).ok
    flip_byte(range_server.folder / "s1.h5", 4096 + 25 * IMAGE_BYTES + 3)
    assert [row.key for row in verify_file(url).damaged] == ["1/025"]
    (range_server.folder / "s2.h5").unlink()
    with pytest.raises(ObjectMissingError, match=f"{range_server.url}/s2.h5"):
        verify_file(url)


def test_one_shard_alone_is_verified(url, range_server):
    report = verify_file(url, shard=1)
    assert report.ok and report.num_rows == 100
    asked = {request["path"] for request in range_server.log()}
    assert asked == {"/out.h5", "/s1.h5"}
    with pytest.raises(OptionError, match=rf"{url}: has no shard 3; they are 0 to 2"):
        verify_file(url, shard=3)


def test_a_damaged_object_is_found_whole_and_named_by_its_url(url, range_server):
    for row in (25, 27, 90):
        flip_byte(range_server.folder / "s1.h5", 4096 + row * IMAGE_BYTES + 3)
    report = verify_file(url)
    # Of 300 rows: the train rows of all shards come first.
    assert [row.key for row in report.damaged] == ["1/025", "1/027", "1/090"]
    assert {row.what for row in report.damaged} == {"pixels"}
    result = called("verify", url, code=1)
    assert f"{url}: 3 of 300 rows damaged" in result.stderr and "(1/025)" in result.stdout
    assert str(range_server.folder) not in result.output and "cache" not in result.output


@pytest.mark.parametrize("kind", ["masks", "ragged"])
def test_damage_is_found_whatever_the_cache_holds(range_server, kind):
    path, url = range_server.folder / "out.h5", f"{range_server.url}/out.h5"
    if kind == "masks":
        write_random(path, rows=40, masks=True, chunk_rows=10)
        place = 4096 + 12 * 16 * 12 * 3
    else:
        varied_file(path)
        with h5py.File(path) as file:
            place = file["images"].id.get_chunk_info(0).byte_offset + int(file["images_offset"][7]) + 9
    assert verify_file(url).ok
    flip_byte(path, place)
    (damaged,) = verify_file(url).damaged
    assert (damaged,) == verify_file(path).damaged and damaged.row == (12 if kind == "masks" else 7)


def test_what_is_drawn_copied_and_exported_from_a_url_is_what_the_file_gives(url, range_server, tmp_path):
    here = range_server.folder / "out.h5"
    rows = make_preview(url, tmp_path / "a.png", count=9)
    assert rows == make_preview(here, tmp_path / "b.png", count=9)
    repack_file(url, tmp_path / "a.h5")
    repack_file(here, tmp_path / "b.h5")
    with h5py.File(tmp_path / "a.h5") as a, h5py.File(tmp_path / "b.h5") as b:
        assert all((a[name][()] == b[name][()]).all() for name in b)
    export_file(url, tmp_path / "a", split="val")
    export_file(here, tmp_path / "b", split="val")
    files = sorted(path.relative_to(tmp_path / "b") for path in (tmp_path / "b").rglob("*.png"))
    assert len(files) == 60
    assert all((tmp_path / "a" / path).read_bytes() == (tmp_path / "b" / path).read_bytes() for path in files)
    found, expected = (measure_shuffles(one, batch_size=16) for one in (url, here))
    assert found == expected


def test_ragged_rows_and_wide_columns_are_copied_from_a_url(range_server, tmp_path):
    varied_file(range_server.folder / "varied.h5", masks=True)
    wide = Column(np.random.default_rng(1).random((60, LARGE_ROW_BYTES // 8)))
    write_random(range_server.folder / "wide.h5", rows=60, chunk_rows=6, columns={"wide": wide})
    for name in ("varied.h5", "wide.h5"):
        repack_file(f"{range_server.url}/{name}", tmp_path / name, codec="zstd" if name == "varied.h5" else "gzip")
        assert verify_file(tmp_path / name).ok
    with h5py.File(tmp_path / "wide.h5") as file:
        assert (file["wide"][()] == wide.values).all()


def test_only_a_damaged_row_is_left_out_where_a_url_is_copied(url, range_server, tmp_path):
    flip_byte(range_server.folder / "s1.h5", 4096 + 25 * IMAGE_BYTES)
    report = repack_file(url, tmp_path / "some.h5", on_error="skip")
    assert report.num_samples == 299 and [key for key, _ in report.skipped] == ["1/025"]
    with pytest.raises(SourceError, match="1/025"):
        export_file(url, tmp_path / "images")
    # Others that read the damaged chunk from the cache compare its rows, too.
    with pytest.raises(DamagedRowError, match="1/025"):
        list(DataLoader(PackedDataset(url), 50))


@pytest.mark.parametrize("content", ["text", "nothing", "half a file"])
def test_an_index_of_what_is_no_packed_file_is_one_error(s3, content, tmp_path):
    data = {"text": b"no HDF5 file" * 100, "nothing": b""}.get(content)
    if data is None:
        data = write_random(tmp_path / "whole.h5", rows=400, size=SIZE).read_bytes()[:600_000]
    s3.put("odd.h5", data)
    words = [sys.executable, "-m", "fastload", "index", f"{s3.url}/odd.h5", "-o", f"{s3.url}/out.h5"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=child_environment())
    assert done.returncode == 1 and f"{s3.url}/odd.h5: not an HDF5 file" in done.stderr, done
    assert done.stderr.count("\n") == 1


def test_a_url_that_ends_with_a_slash_is_said(url):
    assert f"{url}/: ends with a slash" in called("info", f"{url}/", code=1).stderr
    with pytest.raises(OptionError, match=r"remote='cache'"):
        PackedDataset(url, remote="cache")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["chunks", "locks", "meta.json", "chunks/a.h5"])
def test_a_file_or_shard_with_a_name_of_the_cache_s_own_files_is_refused(range_server, cache, name):
    (range_server.folder / name).parent.mkdir(exist_ok=True)
    odd, plain = shard(range_server.folder, 0).rename(range_server.folder / name), shard(range_server.folder, 1)
    index_files([plain, odd], range_server.folder / "out.h5")
    assert PackedDataset(range_server.folder / "out.h5")[199] is not None, "on a disk any name will do"
    with pytest.raises(FormatError, match=rf"out\.h5: has a file .*'{name}'.* another name"):
        PackedDataset(f"{range_server.url}/out.h5")
    assert "0 wrong chunks in 1 dataset" in called("cache", "verify", code=1).stderr, "and its copy is to be removed"
    if "/" not in name:
        with pytest.raises(FormatError, match=rf"/{name}: has a file called '{name}'"):
            PackedDataset(f"{range_server.url}/{name}")


def test_what_cannot_take_a_url_says_so_and_what_to_do(url, tmp_path):
    (tmp_path / "source").mkdir()
    with pytest.raises(OptionError, match=r"--source out.*fastload repack URL OUT\.h5"):
        verify_file(url, source=tmp_path / "source")
    with pytest.raises(OptionError, match=r"only files of this machine are merged.*fastload repack URL"):
        merge_files([url, url], tmp_path / "both.h5")
    with pytest.raises(OptionError, match="are not written to"):
        append_images(url, tmp_path / "source")
    with pytest.raises(OptionError, match="packed files are written to this machine"):
        repack_file(url, "s3://bucket/copy.h5")
    with pytest.raises(OptionError, match="exported to a folder of this machine"):
        export_file(url, "s3://bucket/images")
    for options in ({"cold": True}, {"compare": True}, {"faults": ("slow-disk=5",)}):
        with pytest.raises(OptionError, match="are for files of this machine"):
            run_bench(url, BenchOptions(seconds=0.1, **options))  # type: ignore[arg-type]
    assert "--stores measures encodings of a file of this machine" in called("info", url, "--stores", code=1).stderr


def test_messages_name_the_url_and_no_secret_of_it(range_server, cache):
    (range_server.folder / "notes.h5").write_bytes(b"no HDF5 file" * 100)
    with pytest.raises(FormatError) as caught:
        inspect_file(f"{range_server.url}/notes.h5?X-Signature=secret")
    assert str(cache) not in str(caught.value) and f"{range_server.url}/notes.h5" in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(ObjectMissingError, match=f"{range_server.url}/none.h5: there is no such object"):
        verify_file(f"{range_server.url}/none.h5")


def test_nothing_of_a_url_stays_open(url, cache):
    for use in (inspect_file, verify_file):
        use(url)
    with open_packed(url):
        assert list(cache.glob("1/*/meta.json"))
    shutil.rmtree(cache)
    assert verify_file(url).ok


def test_commands_show_the_url(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = called("info", url).stdout
    assert said.startswith(f"{url} (") and "chunk by chunk over the network" in said and "--stores" not in said
    assert called("verify", url).stdout.startswith(f"{url}: 300 rows, every digest matches")
    assert called("preview", url).stdout == f"40 images of {url} drawn in out.png\n"
    assert (tmp_path / "out.png").exists()


def test_bench_and_tune_take_a_url(large):
    found = run_bench(large, BenchOptions(seconds=0.3, batch_size=32, step="sim:2000"))
    facts = dict(found.facts)
    assert found.title == f"fastload bench {large}" and "over the network" in facts["over np.take"]
    assert f"over the network from {large} came 15 chunks" in facts["network"]
    assert found.loop is not None and found.loop.measured.verdict is not None
    json.dumps(found.to_dict())
    tuned = Search(large, TuneOptions(seconds=1.0, batch_size=32)).run()
    assert tuned.name == large and f'PackedDataset("{large}")' in tuned.call


def test_the_command_reads_a_url_in_a_process_of_its_own(url, cache):
    words = [sys.executable, "-m", "fastload", "verify", url, "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and json.loads(done.stdout)["path"] == url, done.stderr


def test_a_damaged_header_of_an_object_is_named_by_its_url(range_server, cache):
    path = write_random(range_server.folder / "out.h5", rows=40, chunk_rows=10)
    with h5py.File(path, "r+") as file:
        file["digest"][3] += 1
    with pytest.raises(FormatError, match=f"{range_server.url}/out.h5: its header") as caught:
        PackedDataset(f"{range_server.url}/out.h5")[0]
    assert str(cache) not in str(caught.value)
