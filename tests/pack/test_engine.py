"""Tasks, and rows of varying length and compressed ones from real files, interrupted anywhere, by any workers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from interrupted import full_disk, leftovers, packer
from numpy.typing import NDArray
from PIL import Image

from fastload.errors import OutputError, ResumeError, SourceError
from fastload.format.codecs import has_zstd
from fastload.format.ragged import JPEG, RAW
from fastload.format.writer import PixelSpec
from fastload.options.pack import PackOptions, parse_encoding
from fastload.pack import PackJob, PackReport, pack_images, pack_listing
from fastload.pack.engine import task_bounds
from fastload.pack.pack_worker import RowStream
from fastload.sources.listing import Arrays, Listing
from fastload.sources.raw_rows import MemoryRows

CHUNK = 6000
needs_zstd = pytest.mark.skipif(not has_zstd(), reason="needs the extra [zstd]")


def photos(root: Path, count: int = 24, *, masks: bool = False, side: int | None = None, names: str = "{}.jpg") -> Path:
    """Photos of several sizes, or of one, with masks of their sizes on request."""
    for i in range(count):
        rng = np.random.default_rng(i)
        height, width = (side, side) if side else (int(rng.integers(20, 60)), int(rng.integers(20, 60)))
        path = root / ("images" if masks else f"class{i % 2}") / names.format(f"{i:02d}")
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 255, (height, width, 3), np.uint8)
        Image.fromarray(pixels).save(path, quality=80)
        if masks:
            (root / "masks").mkdir(exist_ok=True)
            Image.fromarray(np.full((height, width), i, np.uint8)).save(root / "masks" / f"{i:02d}.png")
    return root


def pack(source: Path, output: Path, **options: Any) -> PackReport:
    return pack_images(source, output, **{"workers": 0, "chunk_bytes": CHUNK, **options})


def stored_rows(path: Path, field: str = "images") -> list[bytes]:
    """The bytes of each row of a store, each known to lie in one chunk and not to overlap another."""
    with h5py.File(path) as file:
        offsets, lengths = file[f"{field}_offset"][()], file[f"{field}_bytes"][()]
        chunk = file[field].chunks[0]
        assert ((offsets // chunk == (offsets + lengths - 1) // chunk) | (offsets % chunk == 0)).all()
        assert (offsets[1:] >= (offsets + lengths)[:-1]).all()
        data = file[field][()]
        return [data[a : a + n].tobytes() for a, n in zip(offsets, lengths, strict=True)]


def keys_of(path: Path) -> list[str]:
    with h5py.File(path) as file:
        return [key.decode() for key in file["key"][()]]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=80), st.integers(1, 120))
def test_tasks_hold_all_rows_once_and_few_bytes_each(lengths: list[int], task_bytes: int) -> None:
    bounds = task_bounds(np.array(lengths), task_bytes)
    assert bounds[0] == 0 and bounds[-1] == len(lengths)
    assert len(bounds) - 1 >= min(16, len(lengths))
    for start, stop in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        assert stop - start == 1 or (stop > start and sum(lengths[start:stop]) <= task_bytes)


@given(st.lists(st.integers(0, 40), max_size=40), st.integers(1, 30), st.booleans(), st.data())
def test_offsets_of_rows_as_they_come_are_those_of_all_at_once(lengths, chunk_bytes, one_size, data) -> None:
    rows = np.array(lengths, np.int64)
    spec = PixelSpec((1,), np.dtype(np.uint8), 1) if one_size else None
    stream = RowStream("images", "x", 4096, chunk_bytes, spec)
    cut = data.draw(st.integers(0, len(lengths)))
    first, middle = stream.offsets(rows[:cut], 0)
    second, end = stream.offsets(rows[cut:], middle)
    whole, whole_end = stream.offsets(rows, 0)
    assert np.concatenate((first, second)).tolist() == whole.tolist() and end == whole_end


def listing_of(files: Arrays, count: int) -> Listing:
    keys = tuple(f"{i:05d}" for i in range(count))
    zeros = np.zeros(count, np.int64)
    return Listing("arrays", keys, zeros.astype(np.uint8), ("all",), {}, (), zeros, zeros, files)


@dataclass(frozen=True)
class Counted:
    """Rows of noise that remember how many were asked for at once."""

    shape: tuple[int, ...] = (300, 300, 3)
    dtype: np.dtype[Any] = np.dtype(np.uint8)  # noqa: RUF009 - a dtype is not mutable
    asked: list[int] = field(default_factory=list)

    def read_rows(self, indices: NDArray[np.int64], out: NDArray[Any]) -> None:
        self.asked.append(len(indices))
        out[...] = indices.reshape(-1, 1, 1, 1)

    def take(self, indices: NDArray[np.integer[Any]]) -> Counted:
        raise AssertionError("not asked for")


def test_large_arrays_are_made_small_a_few_at_a_time(tmp_path: Path) -> None:
    files = Counted()
    pack_listing(PackJob("S", tmp_path / "a.h5", listing_of(files, 50), PackOptions((8, 8))), workers=0)
    assert max(files.asked) * 300 * 300 * 3 <= 2 * 2**20 and sum(files.asked) == 50


def test_large_arrays_in_memory_are_shared_by_threads_and_not_copied_to_processes(tmp_path: Path) -> None:
    values = np.zeros((80, 600, 500, 3), np.uint8)
    values[:, 100, 100] = np.arange(80).reshape(-1, 1)
    children: list[int] = []

    def count(stage: str, done: int, total: int) -> None:
        children.append(len(psutil.Process().children()))

    before = len(psutil.Process().children())
    for workers in (0, 2):
        listing, options = listing_of(MemoryRows.of(values), 80), PackOptions((60, 50), chunk_bytes=9000)
        pack_listing(PackJob("S", tmp_path / f"{workers}.h5", listing, options, on_progress=count), workers)
    assert max(children) == before
    assert (tmp_path / "0.h5").read_bytes() == (tmp_path / "2.h5").read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_source_keeps_the_bytes_of_each_file_whoever_packs(tmp_path: Path, workers: int) -> None:
    source = photos(tmp_path / "s", 70)
    report = pack(source, tmp_path / "o.h5", store="source", workers=workers)
    rows = stored_rows(report.path)
    assert rows == [(source / key).read_bytes() for key in keys_of(report.path)]
    with h5py.File(report.path) as file:
        assert file["digest"][()].tolist() == [xxhash.xxh3_64_intdigest(row) for row in rows]
        assert set(file["images_encoding"][()]) == {JPEG}
    assert (report.store, report.encodings, report.image_shape) == ("source", {"jpeg": 70}, (0, 0, 3))
    assert report.chunks >= 16 and leftovers(report.path) == [] and report.fields == ("labels",)
    if workers:
        assert report.path.read_bytes() == pack(source, tmp_path / "0.h5", store="source").path.read_bytes()


def test_images_and_masks_of_several_sizes_are_stores_and_those_larger_than_a_chunk_are_counted(tmp_path: Path) -> None:
    source = photos(tmp_path / "s", masks=True, names="{}.png")
    report = pack(source, tmp_path / "o.h5", chunk_bytes=4000)
    with h5py.File(report.path) as file:
        shapes = file["images_shape"][()]
        assert (file["masks_encoding"][()] == RAW).all() and file["masks"].attrs["row_shape"].tolist() == [0, 0]
    images, masks = stored_rows(report.path), stored_rows(report.path, "masks")
    for key, shape, image, mask in zip(keys_of(report.path), shapes, images, masks, strict=True):
        assert np.array_equal(np.frombuffer(image, np.uint8).reshape(shape), np.asarray(Image.open(source / key)))
        assert mask == bytes([int(Path(key).stem)]) * (shape[0] * shape[1])
    large = sum(len(row) > 4000 for row in images)
    said = f"{large} images or masks are larger than a chunk (4,000 bytes)"
    assert 0 < large < len(images) and said in report.notes[-1]
    assert report.pixel_bytes == sum(map(len, images + masks))


def test_an_error_keeps_what_was_done_before_it_and_a_repaired_source_continues(tmp_path: Path) -> None:
    source = photos(tmp_path / "s", 80)
    bad = source / "class0/40.jpg"
    whole = bad.read_bytes()
    expected = pack(source, tmp_path / "whole.h5", store="source", shuffle=False).path
    output = tmp_path / "o.h5"
    bad.write_bytes(whole[: len(whole) // 2])
    stages: list[list[str]] = []
    for workers in (2, 0):
        stages.append([])
        with pytest.raises(SourceError, match=r"1 of 80 images.*class0/40.jpg.*the same command continues"):
            pack(
                source, output, store="source", shuffle=False, workers=workers,
                progress=lambda stage, done, total: stages[-1].append(stage),
            )  # fmt: skip
    # All that comes before the bad task is written the first time, whichever worker was faster.
    assert "packing" in stages[0] and "packing" not in stages[1]
    assert leftovers(output) == ["o.h5.journal", "o.h5.part"]
    bad.write_bytes(whole)
    report = pack(source, output, store="source", shuffle=False)
    row = keys_of(expected).index("class0/40.jpg")
    assert 1 <= report.chunks_kept <= row and report.chunks_kept + report.chunks_decoded == report.chunks
    assert output.read_bytes() == expected.read_bytes() and leftovers(output) == []


def test_only_tasks_whose_bytes_and_sources_are_as_they_were_are_kept(tmp_path: Path) -> None:
    source = photos(tmp_path / "s", 32)
    last = source / "class1/31.jpg"
    whole = last.read_bytes()
    output = tmp_path / "o.h5"

    def stop() -> None:
        last.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(SourceError):
            pack(source, output, shuffle=False, store="source")
        last.write_bytes(whole)

    order = keys_of(pack(source, tmp_path / "a.h5", shuffle=False, store="source").path)
    stop()
    with open(output.with_name("o.h5.part"), "r+b") as file:  # as a power failure may leave it
        file.seek(4096 + sum((source / key).stat().st_size for key in order[:7]))
        file.write(b"other bytes")
    fresh = pack(source, output, shuffle=False, store="source")
    assert fresh.chunks_kept <= 7 and output.read_bytes() == (tmp_path / "a.h5").read_bytes()
    output.unlink()
    stop()
    Image.fromarray(np.zeros((33, 44, 3), np.uint8)).save(source / order[3])
    assert pack(source, output, shuffle=False, store="source").chunks_kept <= 3
    assert stored_rows(output)[3] == (source / order[3]).read_bytes()


def test_a_file_of_the_users_own_keeps_the_name_that_masks_would_have(tmp_path: Path) -> None:
    """`.masks` is removed only where the journal says that it is of the pack, or the user does."""
    source, output = photos(tmp_path / "s", masks=True), tmp_path / "o.h5"
    own = tmp_path / "o.h5.masks"
    own.write_bytes(b"mine")
    with pytest.raises(ResumeError, match=r"o.h5.masks: exists.*--overwrite"):
        pack(source, output)
    assert leftovers(output) == ["o.h5.masks"]
    for options in ({"size": 20, "codec": "none"}, {"masks": "none"}):  # neither needs the name
        pack(source, output, overwrite=True, **options)
        assert own.read_bytes() == b"mine" and leftovers(output) == ["o.h5.masks"]
    pack(source, output, overwrite=True)
    assert leftovers(output) == []
    cut = source / "images" / "20.jpg"
    whole = cut.read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError):
        pack(source, output, overwrite=True)
    assert leftovers(output) == ["o.h5.journal", "o.h5.masks", "o.h5.part"]
    Path(f"{output}.journal").write_bytes(b"fastload journal 1\n")  # of another release, which nobody can read
    cut.write_bytes(whole)
    pack(source, output, overwrite=True, masks="none")
    assert leftovers(output) == []
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError):
        pack(source, output, overwrite=True)
    pack(source, output, overwrite=True, size=20, codec="none", on_error="skip")
    assert leftovers(output) == []


def test_arrays_are_encoded_by_threads_to_the_same_bytes(tmp_path: Path) -> None:
    values = np.random.default_rng(0).integers(0, 2**16, (50, 9, 7, 3), np.uint16)
    listing = listing_of(MemoryRows.of(values), 50)
    jpeg, gzip = PackOptions(bits=8, store=parse_encoding("jpeg:95")), PackOptions(codec="gzip:1", chunk_bytes=1000)
    for name, options in (("jpeg", jpeg), ("gzip", gzip)):
        for workers in (0, 2):
            output = tmp_path / f"{name}{workers}.h5"
            pack_listing(PackJob("S", output, listing, options), workers)
        assert (tmp_path / f"{name}0.h5").read_bytes() == (tmp_path / f"{name}2.h5").read_bytes()
    with h5py.File(tmp_path / "gzip2.h5") as file:
        assert np.array_equal(file["images"][()], values[file["key"][()].astype(int)])


def test_a_disk_that_is_full_stops_and_the_same_command_continues(tmp_path: Path) -> None:
    source, output = photos(tmp_path / "s"), tmp_path / "o.h5"
    expected = pack(source, tmp_path / "whole.h5", store="source").path
    with full_disk(20_000), pytest.raises(OutputError, match="is kept: make room, then run the same command again"):
        pack(source, output, store="source")
    report = pack(source, output, store="source")
    assert report.chunks_kept >= 1 and output.read_bytes() == expected.read_bytes() and leftovers(output) == []


def test_the_report_names_files_without_an_end_marker_and_counts_only_rows_made(tmp_path: Path) -> None:
    source = photos(tmp_path / "s", 8)
    half = source / "class0" / "02.jpg"
    data = half.read_bytes()
    half.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    for name in ("a.png", "b.png"):
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8)).save(source / "class0" / name)
    cut = source / "class0" / "b.png"
    cut.write_bytes(cut.read_bytes()[:900])
    report = pack(source, tmp_path / "o.h5", store="source", on_error="skip")
    assert [key for key, _ in report.skipped] == ["class0/b.png"]
    assert report.converted["no plain JPEG -> stored as pixels"] == 1
    assert report.warned == (("class0/02.jpg", "Premature end of JPEG file"),)
    assert half.read_bytes() in stored_rows(report.path)


@needs_zstd
@pytest.mark.parametrize("options", [{"codec": "zstd"}, {"codec": "gzip"}, {"codec": "none", "store": "jpeg"}])
def test_compressed_chunks_need_extra_space_also_when_continued(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = photos(tmp_path / "s", masks=True, side=40, names="{}.png"), tmp_path / "o.h5"
    pixels = 24 * 40 * 40 * 3
    free = 10**9
    monkeypatch.setattr("fastload.pack.begin.free_bytes", lambda path: free)
    bad = source / "images" / "23.png"
    whole = bad.read_bytes()
    bad.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError):
        pack(source, output, shuffle=False, **options)
    bad.write_bytes(whole)
    free = 100
    with pytest.raises(OutputError, match=r"needs .* are free"):
        pack(source, output, shuffle=False, **options)
    assert "o.h5.part" in leftovers(output)
    # Noise does not shrink: a codec needs the pixels once more, less what is there.
    free = pixels * 3 // 2
    report = pack(source, output, shuffle=False, **options)
    assert report.chunks_kept > 1 and leftovers(output) == []
    if options.get("codec") != "none":
        with pytest.raises(OutputError, match=r"needs .* are free"):
            pack(source, output, shuffle=False, overwrite=True, **options)
        assert leftovers(output) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "tried"),
    [
        ({"store": "jpeg", "workers": 0}, 6),
        ({"codec": "gzip", "size": 30, "workers": 0}, 6),
        ({"store": "source", "workers": 2}, 1),
        pytest.param({"codec": "zstd", "workers": 2}, 1, marks=needs_zstd),
        pytest.param({"codec": "zstd", "size": 30, "workers": 2}, 2, marks=needs_zstd),
    ],
)
def test_killed_at_any_step_other_encodings_are_continued_to_the_same_bytes(
    tmp_path: Path, options: dict[str, Any], tried: int
) -> None:
    """Kills the packer after tasks, at file operations and in its last steps; tasks that are done stay done."""
    masks = options.get("store") != "source"
    source = photos(tmp_path / "s", 64 if options["workers"] else 16, masks=masks)
    cut = sorted(source.rglob("*10.jpg"))[0]
    cut.write_bytes(cut.read_bytes()[:-500])
    with packer(source, tmp_path / "scratch.h5", chunk_bytes=CHUNK, **options) as pack:
        tasks, _, _, events = pack(tmp_path / "whole.h5", workers=0)
        expected = (tmp_path / "whole.h5").read_bytes()
        kills = [events, *random.Random(str(options)).sample(range(1, events), 5)]
        if options["workers"]:  # some operations are theirs then
            kills = [events // 2, events * 19 // 20]
        for kill_at in kills[:tried]:
            output = tmp_path / f"{kill_at}.h5"
            assert pack(output, kill_at) is None
            assert not output.exists() or output.read_bytes() == expected
            _, kept, decoded, _ = pack(output)
            assert output.read_bytes() == expected and leftovers(output) == []
            # Some operations come before the first task's end.
            assert kept + decoded == tasks and (kept or kill_at < 20)
