"""Another whole file is written in place over one that is read, with the same size and time of modification.

Nothing that is compared by name, size and mtime sees it. No row of the other file is delivered as valid, whatever reads
the file, and whenever that happens. Each moment once; more of them, at random, by FASTLOAD_REPLACED=25.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flipped_files import flip, rows_of
from PIL import Image
from ragged_cases import varied_file
from small_files import labels_in_turn, random_pixels, rows_by_key, write_foreign
from small_loaders import apart

from fastload import FastLoader, PackedDataset, index_files, pack_images
from fastload.errors import DamagedRowError, FileChangedError, FormatError, SourceError
from fastload.export import export_file
from fastload.format import digests
from fastload.format.header import read_header, with_digests
from fastload.format.ragged import Column
from fastload.format.valid import Hdf5File
from fastload.inspection.preview import make_preview
from fastload.read import row_check
from fastload.read.linear import MappedRows, PreadRows
from fastload.read.reader import open_rows
from fastload.repack import append_images, repack_file
from fastload.transforms import RandomResizedCrop
from sample_files import write_packed

ROWS, BATCH, SHARDS = 240, 8, 3
MORE = int(os.environ.get("FASTLOAD_REPLACED", "0"))

Moments = Callable[[str], None]
"""Called with the names of moments, in order."""


def inverted(sample: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A transform in Python, for worker processes."""
    return (255 - sample[0][:, :8, :8], *sample[1:])


WAYS: dict[str, dict[str, Any]] = {
    "mapped": {"read": "map", "workers": 1},
    "pread": {"read": "pread", "workers": 1},
    "threads": {"workers": 3, "transform": [RandomResizedCrop(8)]},
    "processes": {"workers": 2},
}
MOMENTS = ["when it was opened", "after some batches", "after an epoch"]


def folder_of(path: Path, rows: int, *, first: int, seed: int) -> Path:
    """A folder of images in three classes."""
    for i in range(rows):
        image = path / "abc"[i % 3] / f"{first + i:03d}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random_pixels(1, (12, 10, 3), seed=seed + i)[0]).save(image)
    return path


def one(path: Path, *, other: bool, form: str = "raw", rows: int = ROWS, first: int = 0) -> Path:
    """A file of images and labels; the other one has others, and the same size."""
    if form == "packed":
        pack_images(folder_of(path.with_suffix(""), rows, first=0, seed=1000 * other), path, workers=0)
        return path
    if form == "ragged":
        images = [random_pixels(1, (9 + i % 5, 20 - i % 7, 3), seed=i + first + 1000 * other)[0] for i in range(rows)]
        return varied_file(path, images)
    pixels = random_pixels(rows, (12, 10, 3), seed=first + 1000 * other)
    labels = labels_in_turn(rows, "abc")
    columns = {
        "labels": Column((labels.values + other) % 3, labels.attrs),
        "key": Column(np.array([b"%03d.png" % (first + i) for i in range(rows)])),
    }
    return write_packed(path, pixels, columns, chunk_rows=5)


def made(folder: Path, form: str, *, sharded: bool, rows: int = ROWS) -> tuple[Path, list[tuple[Path, bytes]]]:
    """A file, or an index of shards, and of each file that has rows what is to be written over it."""
    if not sharded:
        path = one(folder / "a.h5", other=False, form=form, rows=rows)
        return path, [(path, one(folder / "b.h5", other=True, form=form, rows=rows).read_bytes())]
    each = rows // SHARDS
    shards = [one(folder / f"{i}.h5", other=False, form=form, rows=each, first=i * each) for i in range(SHARDS)]
    index_files(shards, folder / "a.h5")
    others = [
        one(folder / "b.h5", other=True, form=form, rows=each, first=i * each).read_bytes() for i in range(SHARDS)
    ]
    return folder / "a.h5", list(zip(shards, others, strict=True))


def write_over(files: list[tuple[Path, bytes]]) -> None:
    for path, data in files:
        before = path.stat()
        assert before.st_size == len(data)
        with open(path, "r+b") as file:
            file.write(data)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert path.stat().st_mtime_ns == before.st_mtime_ns


def batches(path: Path, way: str, moment: Moments) -> Iterator[tuple[torch.Tensor, ...]]:
    """Three epochs of a file, read in one way."""
    own, options = apart(WAYS[way])
    dataset = PackedDataset(path, fields=["images", "labels", "row", "valid"], **own)
    dataset.transform = inverted if way == "processes" else None
    if dataset.file.fields["images"].varied:
        options["transform"] = [RandomResizedCrop(8)]
    with closing(FastLoader(dataset, BATCH, share=None, ends="exact", seed=4, **options)) as loader:
        moment("when it was opened")
        for epoch in range(3):
            for number, batch in enumerate(loader):
                yield tuple(field.clone() for field in batch)
                if number + 1 == BATCH * (epoch == 0):
                    moment("after some batches")
                moment("after a batch")
            if epoch == 0:
                moment("after an epoch")


def wrong_rows(path: Path, way: str, files: list[tuple[Path, bytes]], when: Moments | str) -> tuple[int, str]:
    """How many rows of another file were delivered as valid, and how that ended, if files were written over `when`."""
    names, whole = ["images", "labels", "row", "valid"], path.with_name("whole")
    shutil.copytree(path.parent, whole)
    expected = list(batches(whole / path.name, way, lambda _: None))

    def moment(name: str) -> None:
        if callable(when):
            when(name)
        elif name == when:
            write_over(files)

    wrong, ended = 0, "whole"
    found = batches(path, way, moment)
    try:
        for then, now in zip(expected, found, strict=True):
            good, got = rows_of(names, [then]), rows_of(names, [now])
            wrong += sum(good.get(row) != values for row, values in got.items())
    except (FileChangedError, DamagedRowError) as error:
        ended = type(error).__name__
    found.close()
    return wrong, ended


def cases() -> list[tuple[str, bool, bool, str]]:
    """Way, whether in shards, whether of several sizes, moment."""
    every = [(way, sharded, moment) for way in WAYS for sharded in (False, True) for moment in MOMENTS]
    # Processes take a second to start.
    some = [case for case in every if MORE or case[0] != "processes" or case[2] == MOMENTS[case[1] + 1]]
    return [(way, sharded, sharded and way == "threads", moment) for way, sharded, moment in some]


@pytest.mark.parametrize(("way", "sharded", "ragged", "moment"), cases())
def test_no_row_of_a_file_that_was_written_over_is_delivered(tmp_path, way, sharded, ragged, moment) -> None:
    path, files = made(tmp_path, "ragged" if ragged else "raw", sharded=sharded)
    wrong, ended = wrong_rows(path, way, files, moment)
    # Whoever has a batch that was made before gets it; whoever opens or reads the file then does not.
    assert wrong == 0 and ended != "whole"


@pytest.mark.parametrize("way", [*WAYS] if MORE else ["pread"])
@pytest.mark.parametrize("trial", range(MORE or 1))
def test_at_random_moments_neither(tmp_path, way, trial) -> None:
    rng = np.random.default_rng(trial)
    path, files = made(tmp_path, "ragged" if trial % 4 > 1 else "raw", sharded=trial % 2 == 1)
    left = int(rng.integers(0, 2 * ROWS // BATCH))

    def moment(name: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            write_over(files)

    assert wrong_rows(path, way, files, moment)[0] == 0


@pytest.mark.parametrize("sharded", [False, True])
def test_rows_that_were_read_before_are_not_taken_from_what_is_written_while_they_are_copied(
    tmp_path, sharded, monkeypatch
) -> None:
    path, files = made(tmp_path, "raw", sharded=sharded, rows=12)
    dataset = PackedDataset(path, fields=["images"]).reading("pread")
    first = dataset.samples(np.arange(12))
    gather = PreadRows.gather

    def written_over(*arguments: Any) -> None:
        monkeypatch.undo()
        write_over(files)
        gather(*arguments)

    monkeypatch.setattr(PreadRows, "gather", written_over)
    with pytest.raises(FileChangedError, match=r"its mtime set back"):
        dataset.samples(np.arange(12))
    assert len(first) == 12


def test_a_writer_who_has_the_file_open_already_is_seen_when_the_mapping_was_copied(tmp_path, monkeypatch) -> None:
    path, files = made(tmp_path, "raw", sharded=False, rows=12)
    with open(path, "r+b") as writer:  # so that nobody can hold it off
        dataset = PackedDataset(path, fields=["images"]).reading("map")
        dataset.samples(np.arange(12))
        gather = MappedRows.gather

        def written_over(*arguments: Any) -> None:
            monkeypatch.undo()
            writer.write(files[0][1])
            writer.flush()
            gather(*arguments)

        monkeypatch.setattr(MappedRows, "gather", written_over)
        with pytest.raises(FileChangedError):
            dataset.samples(np.arange(12))


@pytest.mark.filterwarnings("ignore:.*touched or copied anew")
def test_a_shard_that_is_opened_again_is_compared_again(tmp_path) -> None:
    """Its header is the same, and of a pixel that was compared before another value was written."""
    path, files = made(tmp_path, "raw", sharded=True, rows=12)
    dataset = PackedDataset(path, fields=["images", "row"])
    reader = dataset._open()
    dataset.samples(np.arange(12))
    reader.store.files.drain(lambda: None)  # as where more shards are read than are kept open
    before = files[0][0].stat()
    flip(files[0][0], 4096 + 3, 1)
    os.utime(files[0][0], ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(DamagedRowError, match=r"0\.h5.*\(row 0\)"):
        dataset.samples(np.arange(12))


def _linked(path: Path) -> None:
    os.link(path, path.with_name("link"))


def _renamed(path: Path) -> None:
    path.rename(path.with_name("renamed"))
    path.with_name("renamed").rename(path)


def _replaced(path: Path) -> None:
    """As `append` does."""
    other = write_packed(path.with_name("new"), random_pixels(7, (12, 10, 3)))
    os.replace(other, path)


CHANGES = {"chmod": lambda path: path.chmod(0o400), "link": _linked, "rename": _renamed, "replace": _replaced}


@pytest.mark.filterwarnings("ignore:.*another name, link or permissions")
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("read", ["map", "pread"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_ctime_alone_ends_nothing(tmp_path, change, read, sharded) -> None:
    path, files = made(tmp_path, "raw", sharded=sharded, rows=12)
    dataset = PackedDataset(path, fields=["images", "labels"]).reading(read)
    before, pickled = [[one.tolist() for one in sample] for sample in dataset], pickle.dumps(dataset)
    CHANGES[change](files[0][0])
    assert [[one.tolist() for one in sample] for sample in dataset] == before
    if change != "replace":  # which leaves who has it open as it was
        assert [[one.tolist() for one in sample] for sample in pickle.loads(pickled)] == before
    else:
        with pytest.raises(FileChangedError):
            list(pickle.loads(pickled))


@pytest.mark.filterwarnings("ignore:.*touched or copied anew")
def test_rows_are_copied_again_where_the_file_was_touched_meanwhile_and_not_for_ever(tmp_path, monkeypatch) -> None:
    path, _ = made(tmp_path, "raw", sharded=False, rows=12)
    dataset, gather, times, most = PackedDataset(path, fields=["images"]).reading("pread"), PreadRows.gather, [0], [2]
    expected = dataset.samples(np.arange(12))

    def touching(*arguments: Any) -> None:
        gather(*arguments)
        if times[0] < most[0]:
            times[0] += 1
            os.utime(path, ns=(1, times[0]))

    monkeypatch.setattr(PreadRows, "gather", touching)
    again = dataset.samples(np.arange(12))
    assert times == [2] and all(torch.equal(now[0], then[0]) for now, then in zip(again, expected, strict=True))
    most[0] = 1000
    with pytest.raises(FileChangedError, match="was touched while rows were copied"):
        dataset.samples(np.arange(12))


def test_a_file_without_digests_cannot_be_told_from_one_that_was_written_over(tmp_path) -> None:
    path = tmp_path / "foreign.h5"
    write_foreign(path, random_pixels(4, (12, 10, 3)), chunk_rows=2)
    dataset = PackedDataset(path, fields=["images"])
    assert len(list(dataset)) == 4
    path.chmod(0o400)
    with pytest.raises(FileChangedError, match=r"`chmod` and hard links.*`fastload repack`"):
        dataset[0]


def test_digests_are_read_in_blocks_that_are_what_they_were(tmp_path, monkeypatch) -> None:
    for module in (row_check, digests):
        monkeypatch.setattr(module, "BLOCK_ROWS", 8)
    monkeypatch.setattr(row_check, "_MOST_BLOCKS", 2)
    path = one(tmp_path / "a.h5", other=False, rows=60)
    expected, sparse = random_pixels(60, (12, 10, 3)), tmp_path / "sparse.h5"
    dataset = PackedDataset(path, fields=["images"])
    for row in np.random.default_rng(0).permutation(60).tolist():
        assert (dataset[row][0].permute(1, 2, 0).numpy() == expected[row]).all()
    # Where a file is filled while it is read its times say nothing: its digests are compared all the same.
    shutil.copyfile(path, sparse)
    file = with_digests(read_header(sparse))
    file = replace(file, identity=file.identity._replace(mtime_ns=-1))
    with closing(open_rows(file, ["images"], check="always")) as reader:
        out = {"images": np.empty((8, 12, 10, 3), np.uint8)}
        reader.gather(np.arange(8), out)
        write_over([(sparse, one(tmp_path / "b.h5", other=True, rows=60).read_bytes())])
        for rows in (np.arange(8), np.arange(40, 48)):  # whose digests were read before, and were not
            with pytest.raises(DamagedRowError, match="the digest differs"):
                reader.gather(rows, out)


class _WrittenOverAt:
    """Writes over files right before the one of this number of the openings of one of them, in this process."""

    def __init__(self, files: list[tuple[Path, bytes]], number: int) -> None:
        self.files, self.number, self.seen = files, number, 0

    def __call__(self, path: object) -> None:
        if str(path) in {str(path) for path, _ in self.files}:
            self.seen += 1
            if self.seen == self.number:
                files, self.files = self.files, []
                write_over([one for one in files if one[0].stat().st_size == len(one[1])])  # else it is made by now


_opening: list[_WrittenOverAt] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and _opening:
        _opening[0](arguments[0])


@pytest.fixture(scope="module")
def watched_openings() -> Iterator[None]:
    """Calls what is in `_opening` before a file is opened, by Python or by HDF5."""
    sys.addaudithook(_audit)  # for good
    make = Hdf5File.__init__

    def init(self: Hdf5File, path: Path, *arguments: Any, **options: Any) -> None:
        if _opening:
            _opening[0](path)
        make(self, path, *arguments, **options)

    Hdf5File.__init__ = init
    yield
    Hdf5File.__init__ = make


def _read(path: Path) -> object:
    dataset = PackedDataset(path, fields=["images", "labels", "row"])
    names = dataset.keys_of(np.arange(len(dataset)))
    found = [[field.tolist() for field in sample] for sample in pickle.loads(pickle.dumps(dataset))]
    return found, names, dataset.class_numbers().tolist(), [sample[1].item() for sample in dataset]


def _repacked(path: Path) -> object:
    repack_file(path, path.with_name("out.h5"), workers=0)
    dataset = PackedDataset(path.with_name("out.h5"))
    return [[field.tolist() for field in sample] for sample in dataset]


def _exported(path: Path) -> object:
    export_file(path, path.with_name("out"), workers=1)
    found = sorted(file for file in path.with_name("out").rglob("*") if file.is_file())
    return [(str(file.relative_to(path.parent)), file.read_bytes()) for file in found]


def _previewed(path: Path) -> object:
    make_preview(path, path.with_name("out.png"), count=6)
    return path.with_name("out.png").read_bytes()


def _appended(path: Path) -> object:
    append_images(path, folder_of(path.parent / "more", 2, first=50, seed=50), workers=0)
    return rows_by_key(path)


COMMANDS: dict[str, Callable[[Path], object]] = {
    "read": _read, "repack": _repacked, "export": _exported, "preview": _previewed, "append": _appended,
}  # fmt: skip


FORMS = {name: ["packed"] if name == "append" else ["raw", "ragged", "shards"] for name in COMMANDS}


@pytest.mark.parametrize(("name", "form"), [(name, form) for name, forms in FORMS.items() for form in forms])
def test_a_command_reads_one_file_or_says_that_it_changed(tmp_path, watched_openings, name, form) -> None:
    """Written over before one of its openings: what comes of it is of one of the two files, or an error."""
    command, results, openings = COMMANDS[name], [], 0

    def run(number: int, *, other: bool = False) -> object:
        """What the command makes of a file that is written over before an opening, or of the other one."""
        nonlocal openings
        folder = tmp_path / f"{number}{other}"
        folder.mkdir()
        path, files = made(folder, "raw" if form == "shards" else form, sharded=form == "shards", rows=9)
        if other:
            write_over(files)
        watch = _WrittenOverAt(files, number)
        _opening[:] = [watch]
        try:
            return command(path)
        finally:
            _opening.clear()
            openings = watch.seen

    results = [run(0)]
    tried = openings if MORE or name == "append" else 4  # an append has few, and not all of them can go wrong
    numbers = sorted({2, *np.linspace(1, openings, tried).astype(int).tolist()})
    if form != "shards":  # the others are none of the index
        results.append(run(0, other=True))
        assert results[1] != results[0]
    errors = list[str]()
    for number in numbers:
        try:
            assert run(number) in results, f"written over before opening {number} of {openings}"
        except (FileChangedError, DamagedRowError, SourceError, FormatError) as error:
            errors.append(str(error))
    assert errors and all("a.h5" in error or ".h5: " in error for error in errors)
