"""Datasets behind a URL read as the same files on a disk do, and fetch no more than that takes."""

from __future__ import annotations

import gc
import itertools
import logging
import multiprocessing
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from PIL import Image
from remote_files import CHUNK_ROWS, KINDS, SIZE, bytes_on_disk, fetched_bytes, serve, spans, watched, write_kind
from small_files import random_pixels, write_foreign, write_random
from small_loaders import apart
from torch.utils.data import DataLoader

from fastload import ChunkWindow, FastLoader, PackedDataset, Weighted, inspect_file, pack_images
from fastload.errors import (
    CacheError,
    DamagedRowError,
    ForkError,
    FormatError,
    ObjectMissingError,
    OptionError,
    RemoteError,
    ReplacedError,
    SourceError,
)
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.remote.open_url import open_remote
from fastload.remote.urls import Remote
from fastload.repack import repack_file

WINDOW = ChunkWindow(4)


class Served:
    """A dataset on a disk of this machine, and behind a URL."""

    def __init__(self, server: Any, local: Path, cache: Path) -> None:
        self.server, self.local, self.cache = server, local, cache
        self.url = f"{server.url}/{serve(local, server.folder)}"
        self.folder = server.folder / "data"  # that is served
        self._opened: list[PackedDataset] = []

    def open(self, *, url: Any = "", remote: dict[str, Any] | None = None, **options: Any) -> PackedDataset:
        """A dataset of the URL, with a cache of its own for each test."""
        given = Remote(**{"cache": self.cache, "max_bytes": "64MB", **(remote or {})})
        dataset = PackedDataset(url or self.url, remote=given, **options)
        self._opened.append(dataset)
        return dataset

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.iterdir())

    def log(self) -> list[dict[str, Any]]:
        return self.server.log()

    def close(self) -> None:
        for dataset in self._opened:
            dataset.file.remote.close()


@pytest.fixture
def served(range_server: Any, kinds: Callable[[str], Path], tmp_path: Path) -> Iterator[Callable[[str], Served]]:
    """Serves a kind of dataset, or the folder of a file."""
    found: list[Served] = []

    def make(kind: str | Path) -> Served:
        found.append(Served(range_server, kinds(kind) if isinstance(kind, str) else kind, tmp_path / "cache"))
        return found[-1]

    yield make
    for one in found:
        one.close()


def epochs(source: Any, number: int = 1, **options: Any) -> list[list[list[torch.Tensor]]]:
    """The batches of some epochs of a loader."""
    with closing(FastLoader(source, **{"batch_size": 16, "seed": 3, "shuffle": WINDOW, "workers": 2, **options})) as it:
        return [[[one.clone() for one in batch] for batch in it] for _ in range(number)]


def assert_same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert len(one) == len(other)
        for batch, wanted in zip(one, other, strict=True):
            assert len(batch) == len(wanted)
            assert all(torch.equal(a, b) for a, b in zip(batch, wanted, strict=True))


WAYS = {
    "windows": {"shuffle": WINDOW, "read": "map", "check": "always"},
    "full": {"shuffle": "full", "read": "pread", "check": "first"},
    "in order": {"shuffle": False, "read": "map", "check": None},
    "drawn": {"shuffle": Weighted.balanced("labels"), "check": "first"},
}


FULL = ("linear", "jpeg", "shards", "shards of masks")


@pytest.mark.parametrize(
    "kind, way",
    [(kind, "windows") for kind in KINDS]
    + [(kind, "full" if kind in FULL else "in order") for kind in KINDS]
    + [(kind, "drawn") for kind in FULL],
)
def test_batches_of_two_epochs_are_those_of_the_local_file(kind, way, served):
    data = served(kind)
    options = WAYS[way] | ({"check": "auto"} if kind == "foreign" else {})
    own, options = apart(options)
    assert_same(epochs(data.open(**own), 2, **options), epochs(PackedDataset(data.local, **own), 2, **options))


@pytest.mark.parametrize("kind", KINDS)
def test_each_chunk_is_fetched_once_and_the_second_epoch_asks_for_nothing(kind, served):
    data = served(kind)
    dataset = data.open()
    opened = len(data.log())
    with closing(FastLoader(dataset, 16, shuffle=WINDOW, workers=2)) as loader:
        for _ in loader:
            pass
        first = data.log()[opened:]
        for _ in loader:
            pass
        assert len(data.log()) == opened + len(first)
    ranges = spans(first)
    table = dataset.file.remote.table
    assert len(ranges) <= 2 * table.num_chunks and all(one["method"] == "GET" for one in first)
    assert len(set(ranges)) == len(ranges)
    chunks = [number for number in range(table.num_chunks) if table.chunk(number).field]
    counts = dataset.file.remote.cache.current().counts
    assert counts.chunks >= len(chunks) and counts.again == 0
    assert counts.bytes <= 1.02 * data.num_bytes
    # A new dataset over the same cache, too; it asks whether the object is the same.
    with closing(FastLoader(data.open(), 16, shuffle=False, workers=2)) as loader:
        for _ in loader:
            pass
    assert [one["method"] for one in data.log()[opened + len(first) :]] == ["HEAD"]


@pytest.mark.parametrize("kind", ["shards", "shards of jpeg"])
def test_the_server_sends_little_more_than_the_bytes_of_the_files(kind, served):
    data = served(kind)
    dataset = data.open()
    assert_same(epochs(dataset), epochs(data.local))
    assert dataset.file.remote.table.num_chunks >= 100
    assert fetched_bytes(data.log()) <= 1.02 * data.num_bytes


def test_a_shard_whose_rows_nobody_reads_is_not_fetched(served):
    data = served("shards")
    dataset = data.open()
    first = read_header(data.local).shards.names[0]
    rows = range(130)  # of the first shard
    [*DataLoader(dataset.select(rows), 10, collate_fn=list)]
    assert {path for path, _, _ in spans(data.log())} == {"/data/data.h5", f"/data/{first}"}


def test_a_replaced_object_is_an_error_that_names_its_url(served):
    data = served("shards")
    dataset = data.open(remote={"give_up_after": 5})
    dataset[0]
    data.server.set(etag="-other")
    with pytest.raises(ReplacedError, match=re.escape(f"{data.server.url}/data/part-0.h5")):
        for row in range(len(dataset)):
            dataset[row]


def test_a_file_without_digests_that_was_replaced_is_not_read_from_the_cache(served, tmp_path):
    pixels = [random_pixels(64, (16, 16, 3), seed=seed) for seed in range(2)]
    labels = np.arange(64) % 3
    (tmp_path / "foreign").mkdir()
    data = served(write_foreign(tmp_path / "foreign" / "data.h5", pixels[0], chunk_rows=4, labels=labels))
    assert_same(epochs(data.open(check=None)), epochs(PackedDataset(data.local, check=None)))
    new = write_foreign(tmp_path / "new.h5", pixels[1], chunk_rows=4, labels=labels)
    shutil.copy(new, data.folder / "data.h5")
    assert_same(epochs(data.open(check=None)), epochs(PackedDataset(new, check=None)))


def test_of_first_answers_with_two_etags_only_one_is_used(served, monkeypatch):
    data = served("shards")
    shards = data.open().file.remote
    read_range, asked = shards._client.read_range, []

    def read_slowly(key: str, first: int, stop: int, **options: Any) -> Any:
        answer = read_range(key, first, stop, **options)
        asked.append((first, options["etag"]))
        if len(asked) == 1:  # the object is replaced, and another thread is answered, before this answer is there
            data.server.set(etag="-other")
            shards._objects.read(1, 4096, 8192)
        return answer

    monkeypatch.setattr(shards._client, "read_range", read_slowly)
    assert len(shards._objects.read(1, 0, 4096)) == 4096
    assert [first for first, _ in asked] == [0, 4096, 0]
    assert [etag is None for _, etag in asked] == [True, True, False] and asked[2][1].endswith('-other"')


@pytest.mark.parametrize("change", [-4096, 512], ids=["shorter", "longer"])
def test_a_shard_of_another_size_than_the_index_says_is_an_error_with_both_sizes(change, served):
    data = served("shards")
    shard, dataset = data.folder / "part-1.h5", data.open()
    size = shard.stat().st_size
    with open(shard, "r+b") as file:
        file.truncate(size + change)
    with pytest.raises(RemoteError, match=rf"part-1.h5: has {size + change:,} bytes, and {size:,} when the index"):
        epochs(dataset)


def test_a_replaced_file_is_fetched_anew_by_the_next_run(served, tmp_path):
    data = served("linear")
    assert_same(epochs(data.open()), epochs(data.local))
    other = write_random(tmp_path / "other.h5", rows=400, seed=9, chunk_rows=4)
    shutil.copy(other, data.folder / "data.h5")
    assert_same(epochs(data.open()), epochs(other))


def damage(path: Path, row: int) -> str:
    """Flips a bit of a row of images that lie back to back, and returns its key."""
    with h5py.File(path) as file:
        place = file["images"].id.get_chunk_info(0).byte_offset + row * int(np.prod(file["images"].shape[1:])) + 100
        key = file["key"][row].decode()
    with open(path, "r+b") as out:
        out.seek(place)
        byte = out.read(1)[0]
        out.seek(place)
        out.write(bytes([byte ^ 1]))
    return key


@pytest.mark.parametrize("check", ["auto", None])
def test_a_damaged_object_names_its_url_and_sample_and_its_chunk_is_not_kept(check, served):
    data = served("shards")
    key = damage(data.folder / "part-2.h5", 37)
    dataset = data.open(check=check)
    with pytest.raises(DamagedRowError) as caught:
        epochs(dataset)
    assert f"{data.server.url}/data/part-2.h5" in str(caught.value) and repr(key) in str(caught.value)
    remote = dataset.file.remote
    (chunk,) = remote.table.of_rows("images", np.array([2]), np.array([37])).tolist()
    assert not remote.cache.cached.presence(chunk).complete
    assert dataset[0] is not None  # others are read


@pytest.mark.parametrize("kind", ["jpeg", "masks", "zstd"])
def test_rows_that_are_compared_when_they_are_read_name_url_and_sample(kind, served):
    data = served(kind)
    path, header = data.folder / "data.h5", read_header(data.folder / "data.h5")
    with h5py.File(path) as file:
        key = file["key"][50].decode()
        item = file["images"]
        if kind == "jpeg":
            place = header.fields["images"].ragged.base + int(file["images_offset"][50]) + 300
        else:
            info = item.id.get_chunk_info(50 // item.chunks[0])
            place = info.byte_offset + info.size // 2
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)
    with pytest.raises(DamagedRowError) as caught:
        epochs(data.open(check="always"), shuffle=False)
    first = key if kind == "jpeg" else f"{key[:-2]}48"  # the chunk of this row cannot be decoded, and begins with 48
    assert f"{data.url}: sample {first!r}" in str(caught.value)


@pytest.mark.parametrize("encoding", ["jpeg", "raw", "zstd"])
def test_damaged_rows_of_varying_length_are_found_before_their_chunk_counts_as_there(encoding, range_server, tmp_path):
    rng = np.random.default_rng(5)
    path = range_server.folder / "data.h5"
    if encoding == "jpeg":
        shutil.copy(write_kind("jpeg", tmp_path / "made"), path)
    else:
        (tmp_path / "a").mkdir()
        for n in range(60):
            pixels = np.repeat(rng.integers(0, 4, (8 + n % 5, 3, 3), np.uint8), 4, axis=1)
            Image.fromarray(pixels).save(tmp_path / "a" / f"{n:02}.png")
        pack_images(tmp_path / "a", path, codec="none" if encoding == "raw" else "zstd", chunk_bytes=4096, workers=0)
    ragged = read_header(path).fields["images"].ragged
    with h5py.File(path) as file:
        assert file["images_encoding"].attrs["names"][file["images_encoding"][20]].decode() == encoding
        place = ragged.base + int(file["images_offset"][20]) + int(file["images_bytes"][20]) // 2
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)
    file = open_remote(f"{range_server.url}/data.h5", Remote(cache=tmp_path / "cache"))
    remote = file.remote
    chunks = remote.table.of_bytes("images", 0, np.array([place - ragged.base]), np.array([1])).tolist()
    with pytest.raises(DamagedRowError, match=r"\(row 20\)") as caught:
        remote.cache.current().hold(chunks)
    assert caught.value.rows == (20,) and not remote.cache.cached.presence(chunks[0]).complete
    remote.close()


@pytest.mark.parametrize("kind", ["shards", "jpeg"])
def test_damaged_rows_are_replaced_and_listed_as_those_of_a_file_are(kind, served, tmp_path):
    data = served(kind)
    path = data.folder / ("part-2.h5" if kind == "shards" else "data.h5")
    if kind == "shards":
        damage(path, 37)
    else:
        ragged = read_header(path).fields["images"].ragged
        with h5py.File(path) as file:
            place = ragged.base + int(file["images_offset"][50]) + 300
        content = bytearray(path.read_bytes())
        content[place] ^= 0x10
        path.write_bytes(content)
    shutil.copytree(data.folder, tmp_path / "same")
    found = []
    for dataset in (data.open(on_damage="skip"), PackedDataset(tmp_path / "same" / "data.h5", on_damage="skip")):
        loader = FastLoader(dataset, 8, seed=4)
        found.append([(batch.rows.tolist(), batch.valid.tolist()) for batch in loader])
        found.append(loader.stats.damaged_rows)
        loader.close()
    assert found[:2] == found[2:] and len(found[1]) == 1


def test_a_shard_that_was_copied_there_again_is_read_by_the_next_run(served):
    data = served("shards")
    damage(data.folder / "part-2.h5", 37)
    with pytest.raises(DamagedRowError):
        epochs(data.open())
    shutil.copy(data.local.parent / "part-2.h5", data.folder)
    assert_same(epochs(data.open()), epochs(data.local))
    assert_same(epochs(data.open(), shuffle=False), epochs(data.local, shuffle=False))


def test_a_shard_in_whose_place_another_was_copied_is_an_error_also_of_the_next_run(served, tmp_path):
    data = served("shards")
    data.open()[140]  # the second of the third shard
    keys = Column(np.array([f"part-2/{i:04}".encode() for i in range(200)]))
    options = {"rows": 200, "size": SIZE, "seed": 77, "classes": "abc", "chunk_rows": CHUNK_ROWS}
    other = write_random(tmp_path / "other.h5", columns={"key": keys}, **options)
    assert other.stat().st_size == (data.folder / "part-2.h5").stat().st_size
    shutil.copy(other, data.folder / "part-2.h5")
    with pytest.raises(ReplacedError, match=re.escape(f"{data.server.url}/data/part-2.h5")):
        epochs(data.open(check=None, remote={"check": False}))


def test_a_missing_shard_is_named(served):
    data = served("shards")
    (data.folder / "part-1.h5").unlink()
    with pytest.raises(ObjectMissingError, match=re.escape(f"{data.server.url}/data/part-1.h5")):
        epochs(data.open())


def test_a_file_that_is_no_dataset_is_named_by_its_url(served):
    data = served("linear")
    (data.folder / "text.h5").write_bytes(b"no dataset" * 100)
    with pytest.raises(FormatError, match=re.escape(f"{data.server.url}/data/text.h5")):
        data.open(url=f"{data.server.url}/data/text.h5?signature=hidden")
    assert not list(data.cache.glob("1/.*"))


@pytest.mark.parametrize("kind", ["shards", "masks"])
def test_rows_are_right_where_requests_are_refused_cut_and_stalled(kind, served):
    data = served(kind)
    data.server.set(refused=0.2, cut=0.1, stalled=0.02)
    dataset = data.open(remote={"timeout": 2, "give_up_after": 120})
    assert_same(epochs(dataset), epochs(data.local))
    assert {one["status"] for one in data.log()} >= {206, 503}


@pytest.mark.parametrize("kind", ["shards", "shards of jpeg", "masks"])
@pytest.mark.parametrize("shuffle", [ChunkWindow(2), False, "full"])
def test_a_cache_that_is_too_small_says_how_much_is_needed_and_that_is_enough(kind, shuffle, served):
    data = served(kind)
    options = {"shuffle": shuffle, "workers": 1, "batch_size": 8}
    dataset = data.open(remote={"max_bytes": 60_000, "give_up_after": 20})
    with pytest.raises(CacheError, match=r"too small: reading") as caught:
        FastLoader(dataset, **options)
    dataset.file.remote.close()
    needed = re.search(r"Remote\(max_bytes=([\d_]+)\)", str(caught.value))
    assert needed is not None, str(caught.value)
    limit = int(needed[1])
    with watched(data.cache) as most:
        dataset = data.open(remote={"max_bytes": limit, "give_up_after": 20})
        assert_same(epochs(dataset, 2, **options), epochs(data.local, 2, **options))
    assert most.num_bytes <= limit


def test_half_a_cache_serves_half_of_each_later_epoch(served, tmp_path):
    (tmp_path / "made").mkdir()
    plain = write_random(tmp_path / "plain.h5", rows=1200, size=(64, 64, 1), chunk_rows=4)  # chunks of 16 KiB
    # Small batches of uncompressed rows are read some tens at a time, an eighth of an epoch.
    repack_file(plain, local := tmp_path / "made" / "data.h5", codec="zstd", chunk_bytes=4 * 64 * 64, workers=0)
    data = served(local)
    with h5py.File(local) as file:
        pixels = file["images"].id.get_storage_size()
    # A chunk of 16,398 bytes takes five blocks, or four and those of a neighbour; and the header, and records.
    limit = 150 * 18_400 + 200_000
    # What is fetched ahead takes room of what is kept: few requests, and small windows.
    dataset = data.open(remote={"max_bytes": limit, "in_flight": 1})
    options = {"batch_size": 4, "shuffle": ChunkWindow(2), "workers": 1}
    expected = epochs(local, 4, **options)
    fetched = []
    with watched(data.cache) as most, closing(FastLoader(dataset, seed=3, **options)) as loader:
        for wanted in expected:
            before = dataset.file.remote.cache.current().counts.bytes
            found = [[one.clone() for one in batch] for batch in loader]
            assert_same([found], [wanted])
            fetched.append((dataset.file.remote.cache.current().counts.bytes - before) / pixels)
    assert dataset.file.remote.table.num_chunks >= 150
    assert most.num_bytes <= limit and most.looks > 10
    assert all(share <= 0.52 for share in fetched[1:]), fetched


def test_two_datasets_of_one_process_share_a_cache_that_holds_neither(served, tmp_path):
    (tmp_path / "made").mkdir()
    for name, seed in (("a", 1), ("b", 2)):
        write_random(tmp_path / "made" / f"{name}.h5", rows=400, size=(32, 32, 3), chunk_rows=4, seed=seed)
    data = served(tmp_path / "made" / "a.h5")
    limit = 800_000
    options = {"batch_size": 8, "shuffle": ChunkWindow(2), "workers": 1}
    with watched(data.cache) as most:
        opened = []
        for name in "ab":
            remote = {"max_bytes": limit, "give_up_after": 20}
            opened.append(data.open(url=f"{data.server.url}/data/{name}.h5", remote=remote))
            assert_same(epochs(opened[-1], **options), epochs(tmp_path / "made" / f"{name}.h5", **options))
        assert_same(epochs(opened[0], **options), epochs(tmp_path / "made" / "a.h5", **options))
    assert most.num_bytes <= limit


def test_a_saved_state_goes_on_over_the_local_file_and_back(served):
    data = served("shards")
    expected = epochs(data.local, 2)
    sources = {"remote": data.open(), "local": data.local}
    for first, second in itertools.permutations(sources):
        with closing(FastLoader(sources[first], 16, seed=3, shuffle=WINDOW)) as loader:
            begun = [[one.clone() for one in batch] for batch in itertools.islice(loader, 7)]
            state = pickle.loads(pickle.dumps(loader.state_dict()))
        with closing(FastLoader(sources[second], 16, seed=3, shuffle=WINDOW)) as loader:
            loader.load_state_dict(state)
            rest = [[[one.clone() for one in batch] for batch in loader] for _ in range(2)]
        assert_same([begun + rest[0], rest[1]], expected)


def read_all(dataset: PackedDataset) -> tuple[list[np.ndarray], int]:
    """The images of a dataset, and the bytes that this process fetched; run in another process."""
    images = [dataset[row][0].numpy() for row in range(len(dataset))]
    return images, dataset.file.remote.cache.current().counts.bytes


def test_a_dataset_in_a_bucket_reads_the_same_and_holds_no_credentials(s3, kinds, tmp_path):
    local = kinds("shards")
    for path in local.parent.iterdir():
        s3.put(f"some/folder/{path.name}", path.read_bytes())
    dataset = PackedDataset("s3://bucket/some/folder/data.h5", remote=Remote(cache=tmp_path / "cache"))
    with closing(dataset.file.remote):
        assert_same(epochs(dataset), epochs(local))
        kept = pickle.dumps(dataset) + b"".join(path.read_bytes() for path in tmp_path.rglob("meta.json"))
        assert b"bucket" in kept and b"a-test-secret" not in kept and b"a-test-key" not in kept


SECRETS = ("hunter2", "0123456789abcdef")


def test_no_secret_of_a_url_is_kept_or_shown(served, caplog):
    data = served("shards")
    url = f"{data.url.replace('://', '://anna:hunter2@')}?X-Amz-Signature=0123456789abcdef"
    with caplog.at_level(logging.DEBUG, "fastload"):
        dataset = data.open(url=url, remote={"give_up_after": 1})
        with closing(FastLoader(dataset, 16, shuffle=WINDOW)) as loader:
            assert len([*loader]) == 30
            shown = [repr(dataset), repr(loader), str(loader.state_dict()), repr(dataset.file.remote)]
            shown += [dataset.file.name, repr(dataset.file)]
        (data.folder / "part-1.h5").unlink()
        data.server.set(etag="-2")
        errors = []
        shutil.rmtree(data.cache / "1", ignore_errors=True)
        for ask in (lambda: data.open(url=f"{url}&more=1")[0], lambda: data.open(url=url.replace("data.h5", "no.h5"))):
            try:
                ask()
            except Exception as error:  # noqa: BLE001
                errors.append(str(error))
        assert errors
    kept = [path.read_bytes().decode("latin-1") for path in data.cache.rglob("*") if path.is_file()]
    for text in [*shown, *errors, *kept, *map(str, data.cache.rglob("*")), caplog.text]:
        assert not any(secret in text for secret in SECRETS), text


def test_a_pickled_dataset_reads_in_another_process_what_is_cached(served):
    data = served("shards")
    dataset = data.open()
    expected = read_all(dataset)[0]
    before = len(data.log())
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found, num_bytes = pool.apply(read_all, (dataset,))
    assert num_bytes == 0 and all(one["method"] == "HEAD" for one in data.log()[before:])
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def doubled(sample: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A transform in Python."""
    return (sample[0] * 2, *sample[1:])


def images_of(batches: Any) -> torch.Tensor:
    return torch.cat([batch[0] for batch in batches])


def test_a_forked_worker_that_has_to_fetch_says_how_to_start_it_and_others_read(served):
    data = served("shards")
    expected = images_of(DataLoader(PackedDataset(data.local), 40))
    dataset = data.open()
    dataset[0]
    with pytest.raises(ForkError, match="forkserver"):
        images_of(DataLoader(dataset, 40, num_workers=1, multiprocessing_context="fork"))
    gc.collect()  # ends the worker, which the error's frames keep: it has the server's pipe open, so that could not end
    for method in ("forkserver", "fork"):  # for the second one all is cached
        loader = DataLoader(dataset, 40, num_workers=1, multiprocessing_context=method)
        assert torch.equal(images_of(loader), expected)
    before = len(data.log())
    assert torch.equal(images_of(DataLoader(dataset, 40, num_workers=2, multiprocessing_context="fork")), expected)
    assert len(data.log()) == before


@pytest.mark.parametrize("kind, method", [("shards", "fork"), ("jpeg", "fork"), ("shards", "forkserver")])
def test_processes_of_a_loader_wait_for_what_its_own_process_fetches(kind, method, served):
    data = served(kind)
    start = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method(method, force=True)
    try:
        dataset = data.open(transform=doubled)
        local = PackedDataset(data.local, transform=doubled)
        assert_same(epochs(dataset, 2, workers=1), epochs(local, 2, workers=1))
        table = dataset.file.remote.table
        # All chunks were fetched by this process: a worker would have counted its own.
        assert dataset.file.remote.cache.current().counts.chunks >= table.num_chunks - len(table.headers)
        ranges = spans(data.log())
        assert len(set(ranges)) == len(ranges)
    finally:
        multiprocessing.set_start_method(start, force=True)


def test_a_cache_needs_a_folder_that_can_be_made(served, tmp_path):
    data = served("linear")
    (tmp_path / "file").write_text("")
    with pytest.raises(OptionError, match=r"no cache of remote files can be made there .*FASTLOAD_CACHE"):
        data.open(remote={"cache": tmp_path / "file"})
    assert bytes_on_disk(tmp_path / "file") == 0


@pytest.mark.parametrize("kind", ["shards", "shards of jpeg"])
def test_a_list_of_urls_is_read_as_the_index_of_the_files(kind, served, monkeypatch):
    data = served(kind)
    names = read_header(data.local).shards.names
    urls = [f"{data.server.url}/data/{name}" for name in names]
    dataset = data.open(url=urls)
    assert_same(epochs(dataset), epochs(PackedDataset([data.local.parent / name for name in names])))
    monkeypatch.setenv("FASTLOAD_CACHE", str(data.cache))
    found = inspect_file(urls)
    assert (found.num_samples, found.num_shards) == (len(dataset), len(names))
    before = len(data.log())
    again = pickle.loads(pickle.dumps(dataset))
    assert again.data_identity() == dataset.data_identity()
    assert {request["method"] for request in data.log()[before:]} == {"HEAD"}, "the index of them is in the cache"
    with pytest.raises(OptionError, match=r"part-0.h5: is a file of this machine, and .* is behind a URL"):
        data.open(url=[data.local.parent / names[0], *urls[1:]])
    with pytest.raises(SourceError, match=r"is given twice"):
        data.open(url=[urls[0], urls[0]])
    whole = data.open(url=[data.url])
    assert len(whole) == len(dataset) and torch.equal(whole[3][0], dataset[3][0])
