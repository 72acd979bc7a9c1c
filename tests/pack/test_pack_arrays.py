"""Each layout of arrays, and Python objects, from what is given to the rows of a packed file."""

from __future__ import annotations

import gzip
import struct

import h5py
import numpy as np
import pytest
from PIL import Image

from fastload.errors import ImageError, SourceError
from fastload.inspection.verify import verify_file
from fastload.pack import pack_images

RNG = np.random.default_rng(0)
N = 40
PIXELS = RNG.integers(0, 256, (N, 6, 8, 3), dtype=np.uint8)
LABELS = (np.arange(N) % 10).astype(np.int64)


def mnist(root):
    root.mkdir()
    gray = np.ascontiguousarray(PIXELS[..., 0])
    (root / "train-images-idx3-ubyte").write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, *gray.shape) + gray.tobytes())
    labels = struct.pack(">4BI", 0, 0, 8, 1, N) + LABELS.astype(np.uint8).tobytes()
    (root / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return root, PIXELS[..., :1]


def cifar(root):
    root.mkdir()
    pixels = RNG.integers(0, 256, (N, 3, 32, 32), dtype=np.uint8)
    records = np.concatenate([LABELS[:, None].astype(np.uint8), pixels.reshape(N, -1)], 1)
    (root / "test_batch.bin").write_bytes(records.tobytes())
    return root, pixels.transpose(0, 2, 3, 1)


def npz(root):
    np.savez_compressed(root.with_suffix(".npz"), x=PIXELS.transpose(0, 3, 1, 2), y=LABELS)
    return root.with_suffix(".npz"), PIXELS


def npy(root):
    root.mkdir()
    np.save(root / "images.npy", PIXELS.astype(">u2") * 257)
    np.save(root / "labels.npy", LABELS)
    return root, PIXELS.astype(np.uint16) * 257


def hdf5(root):
    with h5py.File(root.with_suffix(".h5"), "w") as file:
        file.create_dataset("images", data=PIXELS, chunks=(7, 6, 8, 3), compression="gzip")
        file["labels"] = LABELS
    return root.with_suffix(".h5"), PIXELS


def objects(root):
    return [(Image.fromarray(image), label) for image, label in zip(PIXELS, LABELS, strict=True)], PIXELS


@pytest.mark.parametrize("make", [mnist, cifar, npz, npy, hdf5, objects])
def test_every_row_arrives_with_its_label(tmp_path, make):
    source, expected = make(tmp_path / "source")
    report = pack_images(source, tmp_path / "out.h5", chunk_bytes=4096)
    assert report.num_samples == N and verify_file(tmp_path / "out.h5").ok
    with h5py.File(tmp_path / "out.h5") as file:
        rows = np.array([int(key.decode().rpartition("/")[2]) for key in file["key"][:]])
        assert sorted(rows) == list(range(N)) and (rows != np.arange(N)).any()
        assert file["images"].dtype == expected.dtype and np.array_equal(file["images"][:], expected[rows])
        assert np.array_equal(file["labels"][:], LABELS[rows])


@pytest.mark.parametrize("make", [npz, objects])
def test_arrays_are_resized_and_their_order_kept(tmp_path, make):
    source, _ = make(tmp_path / "source")
    pack_images(source, tmp_path / "out.h5", size=(3, 4), mode="gray", shuffle=False)
    with h5py.File(tmp_path / "out.h5") as file:
        assert file["images"].shape == (N, 3, 4, 1) and np.array_equal(file["labels"][:], LABELS)
        means = file["images"][:].mean(axis=(1, 2, 3))
    assert np.corrcoef(means, (PIXELS @ [0.299, 0.587, 0.114]).mean(axis=(1, 2)))[0, 1] > 0.9


def test_tokens_are_packed_without_images(tmp_path):
    tokens = RNG.integers(0, 5000, (N, 16))
    np.savez(tmp_path / "text.npz", train_tokens=tokens[:30], train_labels=LABELS[:30] % 2, test_tokens=tokens[30:],
             test_labels=LABELS[30:] % 2)  # fmt: skip
    report = pack_images(tmp_path / "text.npz", tmp_path / "out.h5")
    assert report.splits == {"train": 30, "test": 10}
    with h5py.File(tmp_path / "out.h5") as file:
        keys = [key.decode().split("/") for key in file["key"][:]]
        rows = [int(row) + 30 * (split == "test") for split, row in keys]
        assert "images" not in file and np.array_equal(file["tokens"][:], tokens[rows])
        assert np.array_equal(file["labels"][:], LABELS[rows] % 2)


def test_an_object_that_changes_its_images_is_named(tmp_path):
    class Random:
        calls = 0

        def __len__(self):
            return N

        def __getitem__(self, i):
            self.calls += 1
            return PIXELS[i, : 6 if self.calls <= N + 8 else 5], 0

    with pytest.raises((SourceError, ImageError), match=r"0000\d\d: is uint8 .*Leave random transforms out"):
        pack_images(Random(), tmp_path / "out.h5")
