"""FFCV: one file of pages, numba code compiled for the pipeline, threads in one process.

As its tuning guide advises for data that fits in memory: `os_cache=True` and OrderOption.RANDOM, a full shuffle. Crop
and decoding are its fused RandomResizedCropRGBImageDecoder, which decodes the whole JPEG and shrinks by area averaging
(OpenCV's INTER_AREA), so that what it shrinks is antialiased. NormalizeImage is its table look-up for the CPU.

Its RGBImageField encodes every JPEG anew, at quality 90. Here a field of ours stores the files' own bytes in the same
layout, so that all loaders decode the same JPEGs; reading is FFCV's own.

`pip install` compiles a C++ module, and needs pkg-config with opencv4 and libturbojpeg: on Debian
`apt-get install g++ pkg-config libopencv-dev libturbojpeg0-dev`. Where those are absent, `environments.py` unpacks the
same packages, as Debian 12 names them, into a folder of its own and builds with that.

It cannot be stopped and resumed within an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers.adapters import _torch
from peers.work import MEAN, RATIO, SCALE, STD, Data, Work

REQUIREMENTS = ("ffcv==1.0.2", "pillow==13.0.0")
# The headers and libraries of OpenCV's core and imgproc, of libturbojpeg, and of what these link to.
DEBIAN_PACKAGES = (
    "libopencv-core-dev", "libopencv-imgproc-dev", "libopencv-core406", "libopencv-imgproc406", "libturbojpeg0-dev",
    "libturbojpeg0", "libjpeg62-turbo", "libtbb12", "libtbbmalloc2", "libblas3", "liblapack3", "libgfortran5",
    "libquadmath0", "zlib1g",
)  # fmt: skip
PKG_CONFIG = {"opencv4": "-lopencv_imgproc -lopencv_core", "libturbojpeg": "-lturbojpeg"}  # what links to them
PACKS = True
ANTIALIASED = True


def versions() -> dict[str, str]:
    """Versions of FFCV and of the compiler behind it."""
    import ffcv  # noqa: F401  # else its compiled part would first be missed when it is measured

    return _torch.versions_of("ffcv", "numba")


def supports(work: Work) -> str:
    """All works."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Threads, of which numba allows no more than cores, and batches ready ahead."""
    return [
        {"num_workers": 2, "batches_ahead": 3},
        {"num_workers": 1, "batches_ahead": 3},
        {"num_workers": 2, "batches_ahead": 1},
        {"num_workers": 2, "batches_ahead": 6},
    ]


class Rows:
    """What the writer's processes index: (pixels, label)."""

    def __init__(self, rows: Path, labels: Path) -> None:
        self.rows, self.labels = np.load(rows, mmap_mode="r"), np.load(labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[NDArray[np.uint8], int]:
        return self.rows[row], int(self.labels[row])


class Files:
    """The same with image files: their pixels, or the files as they are."""

    def __init__(self, data: Data, *, decoded: bool) -> None:
        (self.files, self.labels), self.decoded = _torch.image_files(data), decoded

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, row: int) -> tuple[Any, int]:
        from PIL import Image

        if not self.decoded:
            return self.files[row], int(self.labels[row])
        with Image.open(self.files[row]) as image:
            return np.asarray(image.convert("RGB")), int(self.labels[row])


def jpeg_field() -> Any:
    """The class of a field that stores a JPEG file as RGBImageField would, but does not encode it anew."""
    from ffcv.fields import RGBImageField
    from PIL import Image

    class JpegField(RGBImageField):  # type: ignore[misc]
        def encode(self, destination: Any, image: Path, malloc: Any) -> None:
            data = np.fromfile(image, np.uint8)
            with Image.open(image) as header:
                destination["width"], destination["height"] = header.size
            destination["mode"] = 0
            destination["data_ptr"], storage = malloc(data.nbytes)
            storage[:] = data

    return JpegField


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """Its DatasetWriter, in processes; it does not fsync."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    dataset: Any = Rows(data.rows, data.labels) if data.rows is not None else Files(data, decoded=True)
    field = RGBImageField(write_mode="raw")
    if encoding == "jpeg":
        dataset, field = Files(data, decoded=False), jpeg_field()()
    writer = DatasetWriter(str(out), {"image": field, "label": IntField()}, num_workers=workers)
    writer.from_indexed_dataset(dataset)


class Loader:
    """Its Loader; each epoch's order follows from the seed and the epoch."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        from ffcv.fields.basics import IntDecoder
        from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
        from ffcv.loader import Loader as FfcvLoader
        from ffcv.loader import OrderOption
        from ffcv.transforms import NormalizeImage, RandomHorizontalFlip, ToTensor

        images: list[Any] = [SimpleRGBImageDecoder()]
        if work.crop is not None:
            images = [RandomResizedCropRGBImageDecoder((work.crop, work.crop), SCALE, RATIO)]
        if work.transform == "random_resized_crop_flip_normalize":
            mean, std = 255 * np.array(MEAN), 255 * np.array(STD)
            images += [RandomHorizontalFlip(), NormalizeImage(mean, std, np.dtype(np.float32))]
        self.loader = FfcvLoader(
            str(path),
            batch_size=work.batch_size,
            os_cache=True,
            order=OrderOption.RANDOM,
            drop_last=True,
            seed=1000 * seed,
            pipelines={"image": [*images, ToTensor()], "label": [IntDecoder(), ToTensor()]},
            custom_fields={"image": jpeg_field()} if work.encoding == "jpeg" else {},
            **settings,
        )

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """One epoch; a batch's memory is used again some batches later."""
        self.loader.next_epoch = number
        for images, labels in self.loader:
            yield images.numpy(), labels.numpy().reshape(-1)

    def close(self) -> None:
        """Its threads end with their epoch."""
        del self.loader
