"""Gray, alpha and 16 bits, from the file of an image to the batch on the device: what is there stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from small_loaders import loader_of

import fastload.transforms as T
from fastload import FastLoader, PackedDataset, pack_images
from fastload.errors import OptionError
from fastload.format.header import read_header

SHAPE = (12, 10)


def write_images(folder: Path, channels: int, dtype: str, count: int = 10) -> NDArray[np.uint8 | np.uint16]:
    """Images of random values as PNG (16-bit colour as PPM, which has no alpha), by name."""
    folder.mkdir()
    top = np.iinfo(dtype).max + 1
    images = np.random.default_rng(0).integers(0, top, (count, *SHAPE, channels)).astype(dtype)
    for i, image in enumerate(images):
        name = folder / f"{i:02d}"
        if dtype == "uint16" and channels == 3:
            head = b"P6 %d %d 65535\n" % (SHAPE[1], SHAPE[0])
            name.with_suffix(".ppm").write_bytes(head + image.astype(">u2").tobytes())
        else:
            Image.fromarray(image.squeeze()).save(name.with_suffix(".png"))
    return images


@pytest.fixture(params=[(1, "uint8"), (4, "uint8"), (1, "uint16"), (3, "uint16")], ids=str, scope="module")
def kind(request, tmp_path_factory):
    """Images of one kind, and the file that they are packed to."""
    channels, dtype = request.param
    folder = tmp_path_factory.mktemp("kind")
    images = write_images(folder / "src", channels, dtype)
    report = pack_images(folder / "src", folder / "o.h5", workers=0, shuffle=False)
    assert report.image_shape == (*SHAPE, channels) and report.dtype == dtype and report.converted == {}
    return images, report.path


def test_batches_hold_the_values_of_the_files(kind):
    images, path = kind
    expected = torch.from_numpy(images).permute(0, 3, 1, 2)
    sample = PackedDataset(path)[3][0]
    assert sample.dtype == expected.dtype and torch.equal(sample, expected[3])
    for options in ({}, {"workers": 2}, {"read": "pread"}):
        loader = loader_of(path, batch_size=5, shuffle=False, device="cpu", **options)
        for _ in range(2):
            found = [batch[0].clone() for batch in loader]
            assert torch.equal(torch.cat(found), expected) and found[0].dtype == expected.dtype


def transformed(path: Path, *transforms: object) -> torch.Tensor:
    loader = FastLoader(path, batch_size=5, shuffle=False, device="cpu", transform=list(transforms), seed=3)
    return torch.cat([batch[0].clone() for batch in loader])


def test_normalize_divides_by_the_largest_value_of_the_depth(kind):
    images, path = kind
    channels = images.shape[-1]
    expected = (images.astype(np.float64) / np.iinfo(images.dtype).max - 0.4) / 0.2
    found = transformed(path, T.Normalize([0.4] * channels, [0.2] * channels)).numpy().transpose(0, 2, 3, 1)
    np.testing.assert_allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize(
    "transform",
    [T.RandomHorizontalFlip(), T.RandomCrop(8), T.CenterCrop(8), T.Resize((6, 5)), T.RandomResizedCrop(8), T.Cutout(4)],
    ids=lambda transform: type(transform).__name__,
)
def test_geometry_and_erasing_do_the_same_with_any_depth(kind, transform):
    images, path = kind
    found = transformed(path, transform)
    assert found.dtype == torch.from_numpy(images).dtype
    # The same draws on floats: torch resizes those with the same weights, unrounded.
    levels = torch.from_numpy(images.astype(np.float32)).permute(0, 3, 1, 2)
    if not isinstance(transform, (T.Resize, T.RandomResizedCrop, T.Cutout)):
        values = set(levels.to(torch.int64).flatten().tolist())
        assert set(found.to(torch.int64).flatten().tolist()) <= values
    elif isinstance(transform, T.Resize):
        expected = torch.nn.functional.interpolate(levels, (6, 5), mode="bilinear", antialias=True)
        assert (found.to(torch.float32) - expected).abs().max() <= (1.5 if images.dtype == "uint8" else 1)
    else:
        assert found.to(torch.float32).mean() > 0.2 * np.iinfo(images.dtype).max


@pytest.mark.parametrize(
    ("channels", "dtype", "transform", "reason"),
    [
        (1, "uint16", T.RandAugment(), "images are torch.uint16, and its operations are defined for uint8"),
        (4, "uint8", T.RandAugment(), "channels"),
        (4, "uint8", T.ColorJitter(brightness=0.4), "channels"),
        (4, "uint8", T.Grayscale(), "channels"),
        (1, "uint16", T.Normalize([0.5] * 3, [0.5] * 3), "3 values, the images 1 channels"),
    ],
)
def test_what_a_transform_cannot_do_is_said_before_the_first_batch(tmp_path, channels, dtype, transform, reason):
    write_images(tmp_path / "src", channels, dtype)
    path = pack_images(tmp_path / "src", tmp_path / "o.h5", workers=0).path
    with pytest.raises(OptionError, match=reason):
        FastLoader(path, batch_size=5, device="cpu", transform=[transform])


def test_mode_says_the_channels_and_bits_the_depth(tmp_path):
    write_images(tmp_path / "deep", 3, "uint16")
    for mode, channels in (("gray", 1), ("rgb", 3), ("rgba", 4)):
        for bits, dtype in ((None, "uint16"), (8, "uint8"), (16, "uint16")):
            report = pack_images(
                tmp_path / "deep", tmp_path / f"{mode}{bits}.h5", workers=0, mode=mode, bits=bits, size=6
            )
            assert report.image_shape == (6, 6, channels) and report.dtype == dtype
    assert "bits" not in str(read_header(tmp_path / "rgbNone.h5").attrs["pack_options"])
    with pytest.raises(OptionError, match="bits=12 is not known; accepted: 8, 16"):
        pack_images(tmp_path / "deep", tmp_path / "x.h5", bits=12)
