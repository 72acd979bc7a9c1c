from __future__ import annotations

import io
import pickle

import h5py
import numpy as np
import pytest
from PIL import Image

from fastload import pack_images
from fastload.errors import ImageError, SourceError
from fastload.format.header import read_header
from fastload.read.checked import CheckedSamples
from fastload.sources.listing import Files, Pictures
from fastload.sources.objects import list_objects


def refused(message, samples):
    with pytest.raises(SourceError, match=message):
        list_objects(samples)


RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (7, 5, 3), dtype=np.uint8)
GRAY, PALETTE = PIXELS[..., 0], Image.fromarray(PIXELS).convert("P")


def encoded(pixels=PIXELS, kind="PNG", **more):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **more)
    return file.getvalue()


class Tensor:
    """What of a torch tensor is used, so that the test needs no torch."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def detach(self):
        return self

    cpu = detach

    def numpy(self):
        return self.values


IMAGES = {
    "an array": (PIXELS, PIXELS),
    "a gray array": (PIXELS[..., 0], PIXELS[..., 0]),
    "16 bits": (PIXELS[..., 0].astype(">u2") * 257, PIXELS[..., 0].astype("u2") * 257),
    "channels first": (PIXELS.transpose(2, 0, 1), PIXELS),
    "a tensor": (Tensor(PIXELS.transpose(2, 0, 1)), PIXELS),
    "a tensor three pixels wide": (Tensor(PIXELS.transpose(2, 0, 1)[:, :, :3]), PIXELS[:, :3]),
    "PNG bytes": (encoded(), PIXELS),
    "PNG in a dict": ({"bytes": encoded(), "path": "x"}, PIXELS),
    "a Pillow image": (Image.fromarray(PIXELS), PIXELS),
    "a lazy Pillow image": (Image.open(io.BytesIO(encoded())), PIXELS),
    "a black and white one": (Image.fromarray(PIXELS[..., 0] > 99), np.where(PIXELS[..., 0] > 99, 255, 0)),
    "a palette": (PALETTE, np.asarray(PALETTE.convert("RGB"))),
    "gray with alpha": (Image.fromarray(GRAY).convert("LA"), np.dstack([GRAY, GRAY, GRAY, np.full_like(GRAY, 255)])),
    "a 16-bit Pillow image": (Image.fromarray(GRAY.astype("u2") * 257), GRAY.astype("u2") * 257),
}


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("way", ["alone", "in a pair", "in a dict"])
def test_images_of_every_kind_are_read(kind, way):
    image, expected = IMAGES[kind]
    sample = (image, 3) if way == "in a pair" else {"image": image, "label": 3} if way == "in a dict" else image
    listing = list_objects([(image,) if isinstance(sample, dict) and way == "alone" else sample])
    assert isinstance(listing.files, Files if "PNG" in kind else Pictures) and listing.layout == "objects"
    pictures = getattr(listing.files, "pictures", listing.files)
    pixels, header = pictures.read(0), pictures.header(0)
    assert np.array_equal(pixels.reshape(expected.shape), expected) and pixels.dtype.isnative
    assert (header.height, header.width, header.bits) == (*expected.shape[:2], 8 * pixels.itemsize)
    assert header.channels == (*pixels.shape, 1)[2]
    assert listing.keys == ("000000",)


def test_bytes_of_jpegs_are_kept_as_they_are_but_become_pixels_among_pixels(tmp_path):
    given = [(encoded(kind="JPEG", quality=60 + i), i) for i in range(6)] + [(encoded(), 6)]
    report = pack_images(given, tmp_path / "a.h5", store="source", shuffle=False, workers=0)
    assert report.encodings == {"raw": 1, "jpeg": 6}
    samples = CheckedSamples(read_header(tmp_path / "a.h5"))
    assert [samples.encoded_bytes("images", row).data for row in range(6)] == [data for data, _ in given[:6]]
    assert np.array_equal(samples.pixels("images", 6), PIXELS)
    samples.close()
    given = [encoded(kind="JPEG"), PIXELS, PIXELS]
    report = pack_images(given, tmp_path / "b.h5", store="source", workers=0)
    assert report.encodings == {"raw": 3}
    assert "Bytes of files (1) and pixels (2): all are taken as pixels." in report.notes


def test_orientation_is_applied_as_to_files():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(kind="JPEG", exif=exif.tobytes(), quality=95)
    listing = list_objects([(data, 0), (Image.open(io.BytesIO(data)), 1)])
    assert [listing.files.header(i).height for i in range(2)] == [5, 5]
    assert listing.files.read(0).shape == listing.files.read(1).shape == (5, 7, 3)


LABELS = {
    "ints": ([1, 0, None], [1, 0, -1]),
    "numpy ints": ([np.int32(1), np.uint8(0), np.int64(5)], [1, 0, 5]),
    "tensors": ([Tensor(1), Tensor(0), Tensor(2)], [1, 0, 2]),
    "arrays of no dimension": ([np.array(4), np.array(0), np.array(2)], [4, 0, 2]),
    "whole floats": ([1.0, 0.0, 2.0], [1, 0, 2]),
    "truth values": ([True, False, True], [1, 0, 1]),
    "texts": (["dog", "cat", None], [1, 0, -1]),
    "vectors": ([[0, 1], np.array([1, 1]), Tensor([0.0, 0.0])], [[0, 1], [1, 1], [0, 0]]),
}


@pytest.mark.parametrize("kind", LABELS)
def test_labels_of_every_kind_are_kept(kind):
    given, expected = LABELS[kind]
    column = list_objects([(PIXELS, label) for label in given]).columns["labels"]
    assert column.values.tolist() == expected
    assert column.values.dtype == (np.uint8 if kind == "vectors" else np.int64)
    assert column.attrs == ({"names": ("cat", "dog")} if kind == "texts" else {})


class Photos:
    classes = ("cat", "dog")

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, i):
        return self.samples[i]


def test_names_of_classes_come_from_the_object_or_what_it_is_a_part_of_and_rows_are_taken_and_pickled():
    photos = Photos([(PIXELS, 1), (PIXELS, 0)])
    assert list_objects(photos).columns["labels"].attrs == {"names": ("cat", "dog")}
    subset = Photos([(PIXELS, 1)])
    subset.classes, subset.dataset = None, photos
    assert list_objects(subset).columns["labels"].attrs == {"names": ("cat", "dog")}
    assert list_objects(Photos([(PIXELS, 2)])).columns["labels"].attrs == {}
    listing = list_objects([PIXELS[:3], PIXELS[:4], PIXELS])
    assert listing.columns == {}
    taken = pickle.loads(pickle.dumps(listing)).take(np.array([2, 0]))
    assert [taken.files.read(i).shape[0] for i in range(2)] == [7, 3]
    assert [taken.files.header(i).height for i in range(2)] == [7, 3] and taken.keys == ("000002", "000000")


REFUSED = {
    "a float array": (PIXELS / 255, r"sample 1 of 2 is float64 \(7, 5, 3\); expected uint8 or uint16: convert it"),
    "a float tensor": (Tensor(PIXELS / 255), "leave ToTensor and Normalize out"),
    "ints": (PIXELS.astype(int), "is int64"),
    "two channels": (PIXELS[..., :2], r"has the shape \(7, 5, 2\)"),
    "a batch": (PIXELS[None], r"has the shape \(1, 7, 5, 3\)"),
    "no pixel": (PIXELS[:0], "claims 5x0 pixels"),
    "a path": ("photo.jpg", "is a str; expected a Pillow image"),
    "nothing": ((), r"is empty; expected \(image, label\)"),
    "a dict without image": ({"text": "a"}, "a dict without an image: it has text"),
    "bytes of no image": (b"hello", "not an image: starts with b'hello'"),
    "a damaged image": (encoded()[:60], "cannot be decoded|damaged|truncated|broken"),
    "32-bit pixels": (Image.fromarray(PIXELS[..., 0].astype("i4")), "has 32 bits a pixel, which are not supported"),
    "a label that is a dict": ((PIXELS, {"boxes": []}), "has a label that is no class"),
    "a label that is half a class": ((PIXELS, 0.5), r"has a label that is no class: 0.5 \(float\)"),
    "NaN": ((PIXELS, float("nan")), "has a label that is no class: nan"),
    "a number to be predicted": ((PIXELS, np.float32(21.5)), r"21.5 \(float\).*`targets`: pack a table"),
    "numbers to be predicted": ((PIXELS, Tensor([0.25, 2.0])), "no class.*are `targets`: pack a table"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_sample_that_is_none_is_named_or_skipped(case):
    sample, reason = REFUSED[case]
    samples = [(PIXELS, 0), sample]
    if case == "a damaged image":
        with pytest.raises(ImageError, match=reason):
            list_objects(samples).files.read(1)
        return
    refused(f"list: sample 1 of 2 .*{reason.removeprefix('sample 1 of 2 ')}", samples)
    listing = list_objects(samples, on_error="skip")
    assert len(listing) == 1 and listing.skipped[0][0] == "000001"


def test_bytes_or_a_mask_that_are_others_when_read_again_are_an_error():
    images = [encoded(kind="JPEG"), encoded(kind="JPEG")]
    files = list_objects(images).files
    images[1] = encoded(kind="JPEG", quality=20)
    assert files.read_head(0, 3) == images[0][:3] and files.take(np.array([0])).read(0) == images[0]
    with pytest.raises(ImageError, match="has other bytes now"):
        files.read(1)
    samples = [{"image": PIXELS, "mask": np.zeros((7, 5), int)}]
    masks = list_objects(samples).masks.files
    assert masks.read(0).shape == (7, 5) and (masks.header(0).height, masks.header(0).width) == (7, 5)
    others = {"no mask": None, "other pixels": PIXELS[..., 0], r"is uint8 \(7, 4\)": PIXELS[:, :4, 0]}
    for message, samples[0]["mask"] in others.items():
        with pytest.raises(ImageError, match=f"{message} now"):
            masks.read(0)


def test_a_sample_of_another_size_or_other_pixels_when_read_again_is_an_error():
    class Random(Photos):
        calls = 0

        def __getitem__(self, i):
            self.calls += 1
            return self.samples[self.calls > self.after], 0

        def __len__(self):
            return 1

    Random.after = 1
    refused(r"Random: sample 0 has other pixels .*random transforms out", Random([PIXELS, PIXELS * 0]))
    Random.after = 2
    smaller = r"is uint8 \(6, 5, 3\) now and was 7x5 .*Leave random transforms out"
    for other, message in ((PIXELS * 0, "has other pixels now"), (PIXELS[:6], smaller)):
        with pytest.raises(ImageError, match=message):
            list_objects(Random([PIXELS, other])).files.read(0)


def test_masks_are_packed_and_other_parts_are_said_or_refused(tmp_path):
    mask = np.full(PIXELS.shape[:2], 255)
    listing = list_objects([{"image": PIXELS, "mask": mask, "text": "a"}, {"image": PIXELS, "mask": None, "text": "b"}])
    assert listing.masks.present.tolist() == [True, False] and listing.masks.ignore_index == 254
    assert any("not packed (1): text" in note for note in listing.notes)
    pack_images([{"image": PIXELS, "mask": mask}, {"image": PIXELS, "mask": mask * 0}], tmp_path / "a.h5", workers=0)
    with h5py.File(tmp_path / "a.h5") as file:
        assert sorted(file["masks"][:, 0, 0].tolist()) == [0, 255]
    refused("sample 0 of 1 has boxes, which is not packed", [{"image": PIXELS, "boxes": [[1, 2, 3, 4]]}])
    refused("has 3 parts", [(PIXELS, 0, mask)])
    refused(r"has a mask that is float64 \(7, 5\); expected integers", [{"image": PIXELS, "mask": mask / 2}])


def test_what_has_no_samples_by_number_raises_or_has_labels_of_several_kinds_is_refused():
    class Raises(Photos):
        def __getitem__(self, i):
            return (PIXELS, self.samples[i])

    refused("Raises: sample 2 of 3 cannot be read: KeyError: 2", Raises({0: 0, 1: 0, 3: 0}))
    for source in (iter([PIXELS]), {"a": PIXELS}, 7, "folder", None):
        refused("has no length or no indexing", source)
    refused("list: has no sample", [])
    refused("labels of several kinds: 1 of sample 0, 'cat' of sample 2", [(PIXELS, 1), (PIXELS, None), (PIXELS, "cat")])
    refused(r"labels of several kinds: \(0, 1\) of sample 0, \(1,\) of sample 1", [(PIXELS, [0, 1]), (PIXELS, [1])])
    refused("sample 1 has no label, where others have vectors", [(PIXELS, [0, 1]), (PIXELS, None)])
    refused("beyond what int64 holds", [(PIXELS, 2**63)])
