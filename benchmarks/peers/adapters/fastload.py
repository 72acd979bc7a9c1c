"""fastload itself, as it comes: its defaults, and what else a user would try who reads its page on training."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from peers.work import MEAN, STD, Data, Work

REQUIREMENTS = ()  # those of pyproject.toml
PACKS = True
ANTIALIASED = True


def versions() -> dict[str, str]:
    """Versions of what it rests on."""
    from importlib.metadata import version

    from fastload.format.writer import writer_name

    packages = {name: version(name) for name in ("numpy", "torch", "h5py", "simplejpeg")}
    return {"fastload": writer_name().removeprefix("fastload "), **packages}


def supports(work: Work) -> str:
    """Everything here is its own trade."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Its defaults alone."""
    return [{}]


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """What the command line runs; it syncs what it wrote."""
    from fastload.cli import main

    source = data.folder
    out.mkdir(exist_ok=True)
    if encoding == "raw" and data.rows is not None:
        source = out / "arrays"
        source.mkdir(exist_ok=True)
        for name, path in (("images", data.rows), ("labels", data.labels)):
            link = source / f"{name}.npy"
            if not link.exists():
                link.symlink_to(path)
    store = "source" if encoding == "jpeg" else "raw"
    words = ["fastload", "pack", str(source), str(out / "images.h5"), "--store", store, "--workers", str(workers)]
    before, sys.argv = sys.argv, words
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"fastload pack ended with {end.code}") from end
    finally:
        sys.argv = before


class Loader:
    """FastLoader of the packed file."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        from fastload import FastLoader, PackedDataset
        from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop

        transform: list[Any] = []
        if work.crop is not None:
            transform.append(RandomResizedCrop(work.crop))
        if work.transform == "random_resized_crop_flip_normalize":
            transform += [RandomHorizontalFlip(), Normalize(MEAN, STD)]
        data = PackedDataset(path / "images.h5", fields=("images", "labels"))
        self.loader = FastLoader(data, work.batch_size, seed=seed, transform=transform, **settings)

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """Batches of channels_last memory."""
        self.loader.set_epoch(number)
        for images, labels in self.loader:
            yield images.numpy(), labels.numpy()

    def state(self) -> object:
        """Three numbers."""
        return self.loader.state_dict()

    def load_state(self, state: Any) -> None:
        """Goes on after the batch at which it was taken."""
        self.loader.load_state_dict(state)

    def close(self) -> None:
        """Ends its threads."""
        self.loader.close()
