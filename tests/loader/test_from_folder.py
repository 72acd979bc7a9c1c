"""A folder of images as a loader's source: read as it is while it is packed, then from the packed file."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from interrupted import stop_at
from PIL import Image
from small_trees import archived

from fastload import (
    FastLoader,
    FileChangedError,
    MissingFileError,
    OptionError,
    OutputError,
    PackedDataset,
    SourceError,
    pack_images,
)
from fastload.dataset import UnpackedDataset
from fastload.errors import StateError
from fastload.pack.pool import BackgroundPack
from fastload.pack.unpacked import packed_path
from fastload.transforms import RandomHorizontalFlip, RandomResizedCrop

TRAINING = [RandomResizedCrop(16), RandomHorizontalFlip()]
IMAGES = 30


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Photos of several sizes: JPEGs, some of them turned by EXIF, and some PNGs."""
    rng = np.random.default_rng(0)
    root = tmp_path / "photos"
    for number in range(IMAGES):
        height, width = rng.integers(20, 60, 2).tolist()
        small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8))
        image = small.resize((width, height), Image.Resampling.BICUBIC)
        path = root / f"class {number % 3}" / f"{number:02}.{'png' if number % 5 == 0 else 'jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        if number % 7 == 0:
            exif[0x0112] = 6
        image.save(path, **({"exif": exif, "quality": 90} if path.suffix == ".jpg" else {}))
    return root


def until_packed(loader: FastLoader) -> None:
    """Waits until the packed file is there."""
    until = time.monotonic() + 120
    output = loader.dataset.output
    while not output.exists() or output.with_name(f"{output.name}.journal").exists():
        assert time.monotonic() < until, "it is not packed"
        time.sleep(0.05)


def epoch(loader: FastLoader) -> list[tuple[list[int], torch.Tensor, torch.Tensor]]:
    return [(batch.rows.tolist(), batch[0].clone(), batch[1].clone()) for batch in loader]


def test_a_selection_of_a_folder_is_the_same_rows_once_it_is_packed(photos, tmp_path):
    whole = PackedDataset.from_folder(photos, cache_dir=tmp_path / "cache")
    parts = [whole.select(range(0, 30, 2)), whole.only(["class 2", "class 0"])]
    loaders = [FastLoader(part, 4, transform=TRAINING, ends="exact", workers=1) for part in parts]
    before = [epoch(loader) for loader in loaders]
    states = [loader.state_dict() for loader in loaders]
    until_packed(loaders[0])
    for loader, first, part in zip(loaders, before, parts, strict=True):
        rows = sorted(row for batch in first for row in batch[0])
        assert rows == part.rows.tolist()
        loader.set_epoch(0)
        assert same(first, epoch(loader)) and type(loader.dataset) is PackedDataset
        assert loader.dataset.classes == part.classes
    again = PackedDataset.from_folder(photos, cache_dir=tmp_path / "cache")
    loader = FastLoader(again.select(range(0, 30, 2)), 4, transform=TRAINING, ends="exact", workers=1)
    loader.load_state_dict(states[0])
    for other in (again.select(range(1, 30, 2)), again, again.only(["class 0", "class 2"])):
        with pytest.raises(StateError, match="belongs to other data"):
            FastLoader(other, 4, transform=TRAINING, ends="exact", workers=1).load_state_dict(states[0])


def same(some: list, others: list) -> bool:
    return all(
        a[0] == b[0] and torch.equal(a[1], b[1]) and torch.equal(a[2], b[2]) for a, b in zip(some, others, strict=True)
    )


@pytest.mark.parametrize("how", ["folder", "zip"])
def test_batches_are_those_of_the_packed_file_before_and_after_it_is_there(photos, tmp_path, caplog, how):
    source = photos if how == "folder" else archived(photos, tmp_path / "photos.zip")
    with caplog.at_level(logging.WARNING, "fastload"):
        loader = FastLoader(str(source), 4, transform=TRAINING, ends="exact")
        first = epoch(loader)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "30 images, read as they are while they are packed into" in said and "\n" not in said
    until_packed(loader)
    second = epoch(loader)
    assert type(loader.dataset) is PackedDataset
    output = packed_path(source, None)
    assert output.parent == tmp_path and not list(tmp_path.glob("*.part"))
    pack_images(source, tmp_path / "beforehand.h5", store="source")
    assert (tmp_path / "beforehand.h5").read_bytes() == output.read_bytes()
    packed = FastLoader(tmp_path / "beforehand.h5", 4, transform=TRAINING, ends="exact")
    assert same(first, epoch(packed)) and same(second, epoch(packed))
    # A later run finds it.
    again = FastLoader(source, 4, transform=TRAINING, ends="exact")
    assert type(again.dataset) is PackedDataset and same(epoch(again), first)


def test_samples_and_batches_of_their_own_sizes(photos, tmp_path):
    folder = PackedDataset.from_folder(photos, cache_dir=tmp_path / "cache")
    loader = FastLoader(folder, 4, shuffle=False, batch="list", ends="exact")
    dataset = loader.dataset
    assert isinstance(dataset, UnpackedDataset) and dataset.output.parent == tmp_path / "cache"
    elsewhere = pickle.loads(pickle.dumps(dataset))
    for batch in loader:
        for at, row in enumerate(batch.rows.tolist()):
            assert torch.equal(batch[0][at], dataset[row][0]) and batch[1][at] == dataset[row][1]
            assert torch.equal(batch[0][at], elsewhere[row][0])
            assert (photos / batch.names[at]).is_file()
    names = {row: name for batch in loader for row, name in zip(batch.rows.tolist(), batch.names, strict=True)}
    until_packed(loader)
    for batch in loader:
        assert [names[row] for row in batch.rows.tolist()] == list(batch.names)
        for at, row in enumerate(batch.rows.tolist()):
            assert torch.equal(batch[0][at], dataset[row][0])


def test_the_packed_file_is_read_as_was_asked_for(photos, tmp_path):
    asked = {"check": "always", "read": "pread", "on_damage": "skip"}
    folder = PackedDataset.from_folder(photos, **asked)
    loader = FastLoader(folder.select(range(20)), 4, transform=TRAINING, workers=1)
    assert len(epoch(loader)) == 5 and not loader._options.skip_damaged, "an image that cannot be decoded is an error"
    until_packed(loader)
    assert len(epoch(loader)) == 5 and loader._options.skip_damaged and loader.stats.read == "pread"
    for dataset in (loader.dataset, PackedDataset.from_folder(photos, **asked)):
        assert {name: getattr(dataset, name) for name in asked} == asked


def test_what_was_interrupted_goes_on(photos, tmp_path):
    loader = FastLoader(photos, 4, transform=TRAINING)
    state = None
    for batch in loader:
        state = state or loader.state_dict()
        rows = batch.rows.tolist() if state is None else None
    dataset = loader.dataset
    process = dataset._folder._packing._process
    process.kill()
    process.wait()
    assert rows is None
    if not dataset.output.exists():
        # What a killed packer leaves is continued by the next run.
        loader = FastLoader(photos, 4, transform=TRAINING)
        whole = epoch(loader)
        until_packed(loader)
        assert not list(tmp_path.glob("*.journal"))
    else:
        whole = epoch(FastLoader(photos, 4, transform=TRAINING))
    # A state of the folder's epoch goes on in the packed file.
    packed = FastLoader(photos, 4, transform=TRAINING)
    assert type(packed.dataset) is PackedDataset
    packed.load_state_dict(state)
    assert same(epoch(packed), whole[1:])


def test_an_unfinished_pack_is_continued_and_its_file_is_that_of_one_call(photos, tmp_path):
    output = packed_path(photos, None)
    with pytest.raises(KeyboardInterrupt):
        pack_images(photos, output, store="source", workers=0, progress=stop_at(4, "packing"))
    assert output.with_name(f"{output.name}.part").exists() and not output.exists()
    loader = FastLoader(photos, 4, transform=TRAINING)
    epoch(loader)
    until_packed(loader)
    pack_images(photos, tmp_path / "whole.h5", store="source")
    assert output.read_bytes() == (tmp_path / "whole.h5").read_bytes()


def test_a_folder_that_changed_is_an_error_that_names_the_sample(photos):
    loader = FastLoader(photos, 4, transform=TRAINING)
    for _ in loader:
        pass
    until_packed(loader)
    output = loader.dataset.output
    before = os.stat(output).st_mtime_ns
    extra = photos / "class 0" / "99.jpg"
    extra.write_bytes((photos / "class 1" / "01.jpg").read_bytes())
    with pytest.raises(FileChangedError, match=r"class 0/99\.jpg is not in the packed file.*Remove that file"):
        FastLoader(photos, 4, transform=TRAINING)
    extra.unlink()
    gone = photos / "class 1" / "01.jpg"
    content = gone.read_bytes()
    gone.unlink()
    with pytest.raises(FileChangedError, match=r"class 1/01\.jpg is gone"):
        FastLoader(photos, 4, transform=TRAINING)
    gone.write_bytes(content)
    os.utime(gone, ns=(before + 10**9,) * 2)
    with pytest.raises(FileChangedError, match=r"01\.jpg was written to later"):
        FastLoader(photos, 4, transform=TRAINING)


def test_a_file_that_changes_or_cannot_be_decoded_is_named(photos, monkeypatch):
    monkeypatch.setattr("fastload.pack.unpacked.local_rank", lambda: 1)  # nothing is packed here
    loader = FastLoader(photos, 4, transform=TRAINING, ends="exact")
    path = photos / "class 1" / "01.jpg"
    content = path.read_bytes()
    path.write_bytes(content[:-9] + b"x" * 20)
    with pytest.raises(SourceError, match=r"class 1/01\.jpg' was written to or replaced since it was listed"):
        epoch(loader)
    # Its header is right, the rest of it is not.
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(
        SourceError, match=r"class 1/01\.jpg' .*(cannot be decoded|is another file|truncated).*on-error skip"
    ):
        epoch(FastLoader(photos, 4, transform=TRAINING, ends="exact"))


def test_the_folder_may_be_relative_and_the_script_go_elsewhere(photos, tmp_path, monkeypatch):
    monkeypatch.chdir(photos.parent)
    for cache in (None, "cache"):
        loader = FastLoader(PackedDataset.from_folder("photos", cache_dir=cache), 4, transform=TRAINING)
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        os.chdir(tmp_path / "elsewhere")
        epoch(loader)
        until_packed(loader)
        os.chdir(photos.parent)
    assert sorted(path.name.partition("-")[0] for path in tmp_path.rglob("*.h5")) == ["photos", "photos.fastload.h5"]


def test_packing_ends_with_a_script_that_is_killed(photos, tmp_path):
    """By the pipe to it that closes: here the only one who holds the other end closes it."""
    pack = BackgroundPack(photos, tmp_path / "never.h5")
    process = pack._process
    os.kill(process.pid, signal.SIGSTOP)  # as if packing took long
    process.stdin.close()
    os.kill(process.pid, signal.SIGCONT)
    assert process.wait(60) in (1, -signal.SIGKILL, 0)


def test_what_cannot_be(photos, tmp_path):
    with pytest.raises(MissingFileError, match="no such file or folder"):
        FastLoader(tmp_path / "photo", 4)
    bad = tmp_path / "bad"
    bad.mkdir()
    (bad / "1.jpg").write_bytes(b"no image")
    with pytest.raises(SourceError, match=r"1\.jpg.*from_folder has no such options: pack it with them"):
        FastLoader(bad, 4)
    with pytest.raises(MissingFileError, match="no such folder or archive"):
        PackedDataset.from_folder(tmp_path / "photo")
    (tmp_path / "some.h5").touch()
    with pytest.raises(OptionError, match=r"is no folder, \.zip or \.tar"):
        PackedDataset.from_folder(tmp_path / "some.h5")
    for options in ({"check": "sometimes"}, {"read": "mmap"}, {"on_damage": "skip", "check": None}):
        with pytest.raises(OptionError, match=f"{next(iter(options))}="):
            PackedDataset.from_folder(photos, **options)
    with pytest.raises(OptionError, match="lies inside the source"):
        PackedDataset.from_folder(photos, cache_dir=photos / "cache")
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match="no image"):
        FastLoader(tmp_path / "empty", 4)
    locked = tmp_path / "locked"
    locked.mkdir()
    (photos).rename(locked / "photos")
    locked.chmod(0o500)
    try:
        if not os.access(locked, os.W_OK):  # as root everything can be written
            with pytest.raises(OutputError, match="cache_dir="):
                FastLoader(locked / "photos", 4, transform=TRAINING)
    finally:
        locked.chmod(0o700)
