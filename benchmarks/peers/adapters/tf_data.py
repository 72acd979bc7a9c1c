"""tf.data: its graph of native operators, with parallelism that it tunes itself.

As its guide to performance advises: `map` with AUTOTUNE, `batch` in parallel, `prefetch`, `deterministic=False`. Raw
images are read in three ways: from a tensor that holds them all, gathered by shuffled row numbers (a full shuffle; the
images are in memory twice); from the memory-mapped array, by tf.numpy_function (likewise); and from files of records of
one length, interleaved, with a shuffle buffer of 1,000 records. JPEGs are in TFRecords, with a buffer of all of them,
and are decoded by tf.io.decode_and_crop_jpeg, no more of them than the crop needs. tf.image.resize is not antialiased
unless asked.

An iterator can be saved in a tf.train.Checkpoint, buffers and all; that is not measured.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peers.work import MEAN, RATIO, SCALE, STD, Data, Work

REQUIREMENTS = ("tensorflow-cpu==2.21.0", "pillow==13.0.0")
PACKS = True
ANTIALIASED = False
SHARDS, BUFFER = 8, 1000
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")


def versions() -> dict[str, str]:
    """Versions of TensorFlow and NumPy."""
    return {"tensorflow": version("tensorflow-cpu"), "numpy": version("numpy")}


def supports(work: Work) -> str:
    """All works."""
    return ""


def settings(work: Work) -> list[dict[str, Any]]:
    """Where images come from, and the threads of its private pool (0: as many as cores)."""
    sources = ["tensor", "mapped", "records"] if work.encoding == "raw" else ["records"]
    tried: list[dict[str, Any]] = [{"source": source, "threads": 0} for source in sources]
    return [*tried, *({"source": sources[0], "threads": count} for count in (1, 4) if len(tried) + count < 8)]


def pack(data: Data, out: Path, *, encoding: str, workers: int) -> None:
    """Files of records: an int64 label and the pixels, or TFRecords with an Example each; by one process."""
    import tensorflow as tf
    from PIL import Image

    out.mkdir()
    labels = np.load(data.labels)
    rows = np.load(data.rows, mmap_mode="r") if data.rows is not None and encoding == "raw" else None
    files = sorted(data.folder.glob("*/*")) if rows is None else []
    edges = np.linspace(0, data.num_images, SHARDS + 1).astype(int)
    for shard, (first, last) in enumerate(itertools.pairwise(edges)):
        if encoding == "jpeg":
            with tf.io.TFRecordWriter(str(out / f"{shard:03}.tfrecord")) as writer:
                for at in range(first, last):
                    image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[files[at].read_bytes()]))
                    label = tf.train.Feature(int64_list=tf.train.Int64List(value=[int(labels[at])]))
                    features = tf.train.Features(feature={"image": image, "label": label})
                    writer.write(tf.train.Example(features=features).SerializeToString())
            continue
        with open(out / f"{shard:03}.records", "wb") as file:
            for at in range(first, last):
                if rows is not None:
                    pixels = np.ascontiguousarray(rows[at])
                else:
                    with Image.open(files[at]) as opened:
                        pixels = np.asarray(opened.convert("RGB"))
                file.write(labels[at].astype("<i8").tobytes() + pixels.tobytes())


class Loader:
    """One tf.data.Dataset, iterated once an epoch; `reshuffle_each_iteration` is its default."""

    def __init__(self, work: Work, path: Path, settings: dict[str, Any], seed: int) -> None:
        import tensorflow as tf

        self.tf, self.work, self.path = tf, work, path
        tf.random.set_seed(seed)
        threads, source = settings["threads"], settings["source"]
        tune, size = tf.data.AUTOTUNE, work.batch_size
        dataset: Any
        if source == "records":
            dataset = self.records(seed)
            dataset = dataset.map(self.parsed, tune, deterministic=False)
            if work.transform is not None:
                dataset = dataset.map(self.augmented, tune, deterministic=False)
            dataset = dataset.batch(size, drop_remainder=True, num_parallel_calls=tune, deterministic=False)
        else:
            rows, labels = np.load(work.data.rows, mmap_mode="r"), np.load(work.data.labels)
            dataset = tf.data.Dataset.range(len(labels)).shuffle(len(labels), seed=seed)
            whole = tf.constant(rows) if source == "tensor" else None
            classes = tf.constant(labels)

            def gathered(at: Any) -> Any:
                if whole is not None:
                    return tf.gather(whole, at), tf.gather(classes, at)
                images = tf.numpy_function(lambda some: np.take(rows, some, axis=0), [at], tf.uint8, stateful=False)
                images.set_shape((None, *rows.shape[1:]))
                return images, tf.gather(classes, at)

            if work.transform is None:
                dataset = dataset.batch(size, drop_remainder=True).map(gathered, tune, deterministic=False)
            else:
                dataset = dataset.map(gathered_one(tf, whole, rows, classes), tune, deterministic=False)
                dataset = dataset.map(self.augmented, tune, deterministic=False)
                dataset = dataset.batch(size, drop_remainder=True, num_parallel_calls=tune, deterministic=False)
        options = tf.data.Options()
        options.deterministic = False
        if threads:
            options.threading.private_threadpool_size = threads
        self.dataset = dataset.prefetch(tune).with_options(options)

    def records(self, seed: int) -> Any:
        """The records of all files, in a new order each epoch."""
        tf, tune = self.tf, self.tf.data.AUTOTUNE
        suffix = "tfrecord" if self.work.encoding == "jpeg" else "records"
        names = sorted(str(file) for file in self.path.glob(f"*.{suffix}"))
        files = tf.data.Dataset.from_tensor_slices(names).shuffle(len(names), seed=seed)
        if self.work.encoding == "jpeg":
            opened, buffer = tf.data.TFRecordDataset, self.work.data.num_images
        else:
            length = 8 + int(np.prod(self.work.data.shape or ()))
            buffer = BUFFER

            def opened(name: Any) -> Any:
                return tf.data.FixedLengthRecordDataset(name, length, buffer_size=1 << 22)

        read = files.interleave(opened, cycle_length=SHARDS, num_parallel_calls=tune, deterministic=False)
        return read.shuffle(buffer, seed=seed)

    def parsed(self, record: Any) -> Any:
        """The image, pixels or bytes of a JPEG, and the label of a record."""
        tf = self.tf
        if self.work.encoding == "jpeg":
            features = {"image": tf.io.FixedLenFeature([], tf.string), "label": tf.io.FixedLenFeature([], tf.int64)}
            read = tf.io.parse_single_example(record, features)
            return read["image"], read["label"]
        both = tf.io.decode_raw(record, tf.uint8)
        return tf.reshape(both[8:], self.work.data.shape), tf.bitcast(both[:8], tf.int64)

    def augmented(self, image: Any, label: Any) -> Any:
        """A random part of an image, resized, flipped and normalized if asked for."""
        tf, work = self.tf, self.work
        jpeg = work.encoding == "jpeg"
        shape = tf.io.extract_jpeg_shape(image) if jpeg else tf.shape(image)
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            shape,
            tf.zeros((1, 0, 4)),
            area_range=SCALE,
            aspect_ratio_range=RATIO,
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        if jpeg:
            image = tf.io.decode_and_crop_jpeg(image, tf.concat((begin[:2], size[:2]), 0), channels=3)
        else:
            image = tf.slice(image, begin, size)
        image = tf.image.resize(image, (work.crop, work.crop))
        if work.dtype == "uint8":
            return tf.cast(tf.round(image), tf.uint8), label
        image = tf.image.random_flip_left_right(image)
        return (image - 255 * np.array(MEAN, np.float32)) / (255 * np.array(STD, np.float32)), label

    def epoch(self, number: int) -> Iterator[tuple[NDArray[Any], NDArray[Any]]]:
        """The dataset once."""
        yield from self.dataset.as_numpy_iterator()

    def close(self) -> None:
        """Its threads end with the iterator."""
        del self.dataset


def gathered_one(tf: Any, whole: Any, rows: NDArray[np.uint8], classes: Any) -> Any:
    """The map from the number of a row to its image and label."""

    def gathered(at: Any) -> Any:
        if whole is not None:
            return whole[at], classes[at]
        image = tf.numpy_function(lambda row: rows[row], [at], tf.uint8, stateful=False)
        image.set_shape(rows.shape[1:])
        return image, classes[at]

    return gathered
