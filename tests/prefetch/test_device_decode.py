"""Stored JPEGs that a device decodes: Pillow stands in for nvJPEG, the CPU for a GPU, unless there is one."""

from __future__ import annotations

import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from alone import augmentation, opened, run_alone
from late_backend import Device
from PIL import Image
from ragged_cases import flip, jpeg_row, varied_file, varied_rows
from small_loaders import apart

from fastload import FastLoader, FormatError, Meter, OptionError, PackedDataset
from fastload.format.ragged import Column
from fastload.images.decode import upright
from fastload.images.decode_part import decode_row
from fastload.images.jpeg import scan_jpeg
from fastload.prefetch.stages import device_decode
from fastload.prefetch.stages.gather import GatherRows
from fastload.read.reader import Rows
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    Draws,
    Normalize,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
    apply_transforms,
)
from fastload.transforms.engine.decode_time_resize import find_decode_time_resize
from fastload.transforms.engine.placement import PlacedImages
from sample_files import write_ragged

RGB = ([0.5, 0.4, 0.3], [0.2, 0.25, 0.3])
TRAINING = [RandomResizedCrop(20), RandomHorizontalFlip(), Normalize(*RGB)]
LISTS = {
    "training": TRAINING,
    "evaluation": [Resize(24), CenterCrop(16), Normalize(*RGB, dtype=torch.bfloat16)],
    "crop alone": [RandomVerticalFlip(), RandomCrop(8)],
    "resized twice": [RandomResizedCrop(20), RandomHorizontalFlip(), Resize(11)],
    "padded behind": [CenterCrop(8), RandomCrop(8, padding=2), Normalize(*RGB)],
    "colour": [RandomResizedCrop(16), ColorJitter(0.3, 0.3, 0.3, 0.1), RandomErasing(value=(1, 2, 3)), Normalize(*RGB)],
    "a function": [Resize((12, 16)), lambda images: 255 - images],
}


@pytest.fixture(scope="module")
def varied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every second row a JPEG, one of them turned, one gray; of several sizes."""
    return varied_file(tmp_path_factory.mktemp("device") / "varied.h5")


def dataset(path: Path, decode: str = "device", **options: object) -> PackedDataset:
    return PackedDataset(path, fields=["images", "labels", "row"], decode=decode, **options)


def batches(
    path: Path, transform: list[object], decode: str = "device", *, device: object = None, epochs: int = 2, **options
):
    own, options = apart(options)
    data = dataset(path, decode, **own)
    with closing(FastLoader(data, 4, seed=3, transform=transform, device=device or Device(), **options)) as loader:
        return [tuple(field.clone() for field in batch) for _ in range(epochs) for batch in loader]


def assert_alike(found: list, expected: list, levels: float = 0.0) -> None:
    assert len(found) == len(expected) > 0
    for (images, *others), (images_there, *others_there) in zip(found, expected, strict=True):
        assert images.dtype == images_there.dtype and images.is_contiguous(memory_format=torch.channels_last)
        assert (images.float() - images_there.float()).abs().max() <= levels
        assert all(torch.equal(one, other) for one, other in zip(others, others_there, strict=True))


@pytest.mark.parametrize("options", [{}, {"read": "pread", "workers": 3}, {"echo": 2}, {"shuffle": False}], ids=str)
@pytest.mark.parametrize("name", LISTS)
def test_batches_are_those_that_the_cpu_decodes(varied, name, options):
    backend = Device()
    found = batches(varied, LISTS[name], device=backend, **options)
    assert sum(backend.decoded) >= 12, "the device decoded"
    assert_alike(found, batches(varied, LISTS[name], "cpu", **options))


@pytest.mark.parametrize("transform", [[], [Normalize(*RGB)], TRAINING, [ColorJitter(0.2), RandomResizedCrop(9)]])
@pytest.mark.parametrize("echo", [1, 2])
def test_jpegs_of_one_size_need_no_transform(tmp_path, transform, echo):
    path = varied_file(tmp_path / "same.h5", varied_rows(size=(22, 26)))
    found = batches(path, transform, echo=echo)
    assert_alike(found, batches(path, transform, "cpu", echo=echo))


def file_of(image: Image.Image, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=90, **options)
    return out.getvalue()


def test_windows_are_those_drawn_where_the_cpu_would_decode_at_half_the_size(tmp_path):
    rows = [jpeg_row(60 + 9 * i, 90 - 5 * i, seed=i) for i in range(6)]
    path = varied_file(tmp_path / "large.h5", rows)
    transform = [RandomResizedCrop(9, scale=(0.5, 1.0))]
    found = batches(path, transform, epochs=1)
    for images, _, numbers in found:
        for image, row in zip(images, numbers.tolist(), strict=True):
            data, shape, orientation = rows[row]
            pixels = decode_row(data, 1, shape, orientation, np.dtype(np.uint8))
            whole = {"images": torch.from_numpy(pixels).permute(2, 0, 1)[None]}
            alone = apply_transforms(transform, whole, Draws(3, 0, np.array([row])))["images"][0]
            assert (image.int() - alone.int()).abs().max() <= 1


class Seeing(Device):
    """Remembers the files that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.files = set[bytes]()

    def decode_jpegs(self, files, channels):
        self.files |= {file.numpy().tobytes() for file in files}
        return super().decode_jpegs(files, channels)


ODD = {
    "progressive": ({"progressive": True}, "RGB", True),
    "without subsampling": ({"subsampling": 0}, "RGB", True),
    "restart markers": ({"restart_marker_rows": 1}, "RGB", True),
    "stored as RGB": ({"keep_rgb": True}, "RGB", False),
    "CMYK": ({}, "CMYK", False),
}


@pytest.mark.parametrize("name", ODD)
def test_what_the_device_may_give_other_colours_is_decoded_by_the_cpu(tmp_path, name):
    options, mode, by_device = ODD[name]
    pixels = np.random.default_rng(1).integers(0, 256, (4, 4, 3), np.uint8)
    image = Image.fromarray(pixels).resize((31, 23), Image.Resampling.BICUBIC)
    odd = (file_of(image.convert(mode), **options), (23, 31, 3), 1)
    head = scan_jpeg(odd[0])
    assert head is not None and head.plain_colours == by_device
    path = varied_file(tmp_path / "odd.h5", [odd, jpeg_row(20, 30), odd, jpeg_row(30, 20)] * 2)
    backend = Seeing()
    found = batches(path, TRAINING, device=backend)
    assert (odd[0] in backend.files) == by_device and jpeg_row(20, 30)[0] in backend.files
    assert_alike(found, batches(path, TRAINING, "cpu"))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_colours_in_a_gray_file_are_decoded_by_the_cpu(tmp_path, mode):
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (20, 17, 3), np.uint8))
    row = (file_of(image.convert(mode)), (20, 17, 1), 1)
    path = write_ragged(tmp_path / "gray.h5", [row] * 8, {"labels": Column(np.arange(8))})
    backend, transform = Seeing(), [CenterCrop(12), Normalize([0.5], [0.2])]
    found = batches(path, transform, device=backend)
    assert (row[0] in backend.files) == (mode == "L")
    assert_alike(found, batches(path, transform, "cpu"))


def test_boxes_move_with_their_images(tmp_path):
    rows = varied_rows()
    boxes = np.array([[1, 2, 5, 7]] * len(rows), np.float32)
    names = {"names": ("xmin", "ymin", "xmax", "ymax")}
    path = write_ragged(tmp_path / "boxes.h5", rows, {"bbox": Column(boxes, names)})
    found, expected = (
        [
            tuple(field.clone() for field in batch)
            for batch in FastLoader(
                PackedDataset(path, fields=["images", "bbox"], decode=decode), 4, seed=1, device=Device(),
                transform=TRAINING,
            )
        ]
        for decode in ("device", "cpu")
    )  # fmt: skip
    assert_alike(found, expected)


class Picky(Device):
    """Refuses a file, as nvJPEG may one that others decode."""

    def __init__(self, refused: bytes) -> None:
        super().__init__()
        self.refused = refused

    def decode_jpegs(self, files, channels):
        images = super().decode_jpegs(files, channels)
        if any(file.numpy().tobytes() == self.refused for file in files):
            raise RuntimeError("Error while decoding JPEG images: unknown chroma subsampling")
        return images


def test_a_file_that_the_device_refuses_is_decoded_by_the_cpu_and_not_tried_again(tmp_path):
    rows = [jpeg_row(20 + i, 30 - i, seed=i) for i in range(12)]
    raw = np.random.default_rng(0).integers(0, 256, (23, 29, 3), np.uint8)
    path = varied_file(tmp_path / "refused.h5", [*rows, raw])
    backend = Picky(rows[5][0])
    loader = FastLoader(dataset(path), 13, shuffle=False, transform=TRAINING, device=backend, workers=1)
    found = [tuple(field.clone() for field in batch) for _ in range(2) for batch in loader]
    loader.close()
    trial, whole, *halves = backend.decoded
    assert (trial, whole) == (2, 12) and halves.count(1) == 3 and 12 not in halves and 11 in halves
    on_cpu = FastLoader(dataset(path, "cpu"), 13, shuffle=False, transform=TRAINING, device=Device())
    assert_alike(found, [tuple(field.clone() for field in batch) for _ in range(2) for batch in on_cpu])


class Misjudging(Device):
    """Makes images of another size, as a decoder might of a file whose header lies."""

    def decode_jpegs(self, files, channels):
        return [image[:, :-1] if len(files) > 2 else image for image in super().decode_jpegs(files, channels)]


def test_an_image_of_another_size_than_the_index_says_is_decoded_by_the_cpu(tmp_path):
    path = varied_file(tmp_path / "size.h5", [jpeg_row(20 + i, 30 - i, seed=i) for i in range(12)])
    assert_alike(batches(path, TRAINING, device=Misjudging()), batches(path, TRAINING, "cpu"))


@pytest.mark.parametrize("at", [10, 30, -1], ids=["header", "tables", "end marker"])
def test_a_damaged_sample_is_named(tmp_path, at):
    path = varied_file(tmp_path / "damaged.h5", [jpeg_row(20 + i, 30 - i, seed=i) for i in range(12)])
    flip(path, "images", 7, at)

    def message(decode: str) -> str:
        try:
            batches(path, TRAINING, decode)
        except FormatError as error:
            return str(error)
        return ""

    assert message("device") == message("cpu")
    assert "007.jpg" in message("device") or at == 10


class Lenient(Device):
    """Makes black images of files that are cut short, as nvJPEG may."""

    def decode_jpegs(self, files, channels):
        images = []
        for file in files:
            try:
                images += super().decode_jpegs([file], channels)
            except RuntimeError:
                head = scan_jpeg(file.numpy().tobytes())
                images.append(torch.zeros(channels, head.height, head.width, dtype=torch.uint8))
        return images


def test_a_file_that_was_cut_short_is_no_image_for_a_lenient_decoder_either(tmp_path):
    whole, shape, orientation = jpeg_row(80, 90)
    rows = [jpeg_row(80 + i, 90 - i, seed=i) for i in range(7)]
    path = varied_file(tmp_path / "short.h5", [*rows, (whole[: -len(whole) // 8], shape, orientation)])
    with pytest.raises(FormatError, match=r"007\.jpg"):
        batches(path, TRAINING, device=Lenient())


def test_bytes_beyond_what_is_kept_pinned_have_memory_of_their_own(varied, monkeypatch):
    expected = batches(varied, TRAINING, "cpu")
    monkeypatch.setattr(device_decode, "PINNED_BYTES", 700)  # some batches' bytes are more, some less
    assert_alike(batches(varied, TRAINING), expected)


class Counting(Device):
    """Notes the sizes of what is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def pin(self, memory):
        self.sizes.append(memory.nbytes)
        return super().pin(memory)


def test_a_batch_larger_than_all_before_it_gets_more_pinned_memory(tmp_path):
    rows = [jpeg_row(10 + 30 * i, 10 + 40 * i, seed=i) for i in range(12)]
    path = varied_file(tmp_path / "growing.h5", rows)
    backend = Counting()
    batches(path, [Resize((8, 8))], device=backend, shuffle=False, workers=1)
    needed = [sum(len(row[0]) for row in rows[at : at + 4]) for at in (0, 4, 8)]
    of_files = [size for size in backend.sizes if size % 4096]  # slots are whole pages
    assert len(of_files) >= 2 and needed[0] < of_files[0] < needed[2] <= of_files[-1]


def test_a_loader_that_ends_gives_back_what_its_threads_pinned(varied):
    backend = Counting()
    loader = FastLoader(dataset(varied), 2, transform=TRAINING, device=backend, workers=3)
    assert len(list(loader)) > 3
    slots = [slot.memory.nbytes for slot in loader._producer.pool.ring.slots]
    assert sum(slots) < backend.pinned == sum(backend.sizes), "the memory of files is pinned too"
    loader.close()
    assert backend.pinned == 0


def test_threads_that_begin_anew_use_memory_that_is_pinned_already(varied):
    backend = Counting()
    loader = FastLoader(dataset(varied), 12, shuffle=False, transform=TRAINING, device=backend, workers=1)
    list(loader)
    sizes = list(backend.sizes)
    for _ in range(3):
        threads = loader._producer.pool.threads
        with Meter(device="cpu") as meter:
            list(meter.watch(loader))
        assert loader._producer.pool.threads is not threads
        list(loader)
    assert backend.sizes == sizes
    loader.close()


def test_an_epoch_goes_on_where_its_state_was_saved(varied):
    whole = batches(varied, TRAINING, epochs=1)
    first, second = (FastLoader(dataset(varied), 4, seed=3, transform=TRAINING, device=Device()) for _ in range(2))
    next(iter(first))
    second.load_state_dict(first.state_dict())
    first.close()
    assert_alike([tuple(field.clone() for field in batch) for batch in second], whole[1:])


@pytest.fixture
def alive(monkeypatch) -> weakref.WeakSet[PlacedImages]:
    """The decoded batches that something refers to."""
    made: weakref.WeakSet[PlacedImages] = weakref.WeakSet()

    def noted(*args):
        images = PlacedImages(*args)
        made.add(images)
        return images

    monkeypatch.setattr(device_decode, "PlacedImages", noted)
    return made


def test_epochs_broken_off_leave_neither_images_nor_a_locked_decoder(varied, alive):
    backend = Device()
    loader = FastLoader(dataset(varied), 2, seed=3, transform=TRAINING, device=backend, workers=3)
    for epoch in range(6):
        for step, _ in enumerate(loader):
            if step == epoch % 3:
                break
    loader.close()
    gc.collect()
    assert not backend.in_decoding.locked() and not len(alive) and not backend.pinned
    assert_alike(batches(varied, TRAINING, device=backend), batches(varied, TRAINING, "cpu"))


def test_a_thread_that_gathers_files_leaves_those_alone_that_another_decodes(varied):
    backend, seen, turn = Device(), dict[int, None](), threading.Lock()
    decoding, second, both = backend.decoding, threading.Event(), threading.Event()

    def after_another_gathered():
        this, is_main = threading.get_ident(), threading.current_thread() is threading.main_thread()
        with turn:
            # The first thread waits with its next files until the second has gathered, and that one for the first.
            again = this == next(iter(seen), None)
            if not is_main:  # which tries whether the device decodes
                seen[this] = None
            waits = len(seen) == 2 and not both.is_set() and not again and not is_main
        if again:
            assert second.wait(600), "two threads read"
            both.set()
        if waits:
            second.set()
            assert both.wait(600), "the first goes on"
        return decoding()

    def whole(files, channels):
        ends = [bytes(file[[0, 1, -2, -1]].tolist()) for file in files]
        assert ends == len(files) * [b"\xff\xd8\xff\xd9"], "the bytes of other files"
        return decode(files, channels)

    backend.decoding, decode, backend.decode_jpegs = after_another_gathered, backend.decode_jpegs, whole
    found = batches(varied, TRAINING, device=backend, workers=2)
    assert both.is_set()
    assert_alike(found, batches(varied, TRAINING, "cpu"))


def test_the_stream_that_cuts_decoded_images_is_noted_as_their_reader(varied, monkeypatch):
    made = []  # and kept, so that no two have the same address

    def noted(*args):
        made.append(PlacedImages(*args))
        return made[-1]

    monkeypatch.setattr(device_decode, "PlacedImages", noted)
    backend = Device()
    batches(varied, TRAINING, epochs=1, device=backend)
    for name in ("pixels", "layout"):
        read = [getattr(one, name).untyped_storage().data_ptr() in backend.readers for one in made]
        assert sum(read) >= 3, name  # more may have been read ahead


def test_no_more_batches_are_decoded_than_have_a_slot(varied, alive):
    loader = FastLoader(dataset(varied), 1, seed=3, transform=TRAINING, device=Device(), workers=2)
    most = [len(alive) for _ in range(3) for _ in loader]
    loader.close()
    assert 0 < max(most) <= 2 + 2 + 1 + 2  # two copies, two ready, the loop's, two threads


def test_no_memory_for_the_images_says_what_to_do(varied):
    class Full(Device):
        def decode_jpegs(self, files, channels):
            if len(self.decoded) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().decode_jpegs(files, channels)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        batches(varied, TRAINING, device=Full())
    assert "smaller batch_size" in caught.value.__notes__[0]


class NoTorchvision(Device):
    def decode_jpegs(self, files, channels):
        raise ImportError("No module named 'torchvision'")


class NoNvjpeg(Device):
    def decode_jpegs(self, files, channels):
        raise RuntimeError("torchvision not compiled with nvJPEG support")


class OneAtATime(Device):
    def decode_jpegs(self, files, channels):
        return super().decode_jpegs(files[:1], channels)


def same(sample):
    return sample


REASONS: dict[str, tuple[str, Callable[[], dict[str, object]]]] = {
    "no device": ("no device", lambda: {"device": "cpu"}),
    "no torchvision": ("cannot be imported", lambda: {"device": NoTorchvision()}),
    "no nvJPEG": ("not compiled with nvJPEG", lambda: {"device": NoNvjpeg()}),
    "no lists": (r"made \[\(3, 8, 16\)\] of two", lambda: {"device": OneAtATime()}),
    "padding": ("pad them", lambda: {"transform": [RandomCrop(12, pad_if_needed=True)]}),
    "two resizes": ("resize them twice", lambda: {"transform": [Resize(40), RandomResizedCrop(9)]}),
}


@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_be_decoded_by_the_device_is_by_the_cpu_and_one_warning_says_why(varied, name):
    reason, made = REASONS[name]
    given = {"device": Device(), "transform": TRAINING} | made()
    with pytest.warns(UserWarning, match=rf'varied.h5: decode="device".*{reason}') as caught:
        found = batches(varied, given["transform"], device=given["device"])
    assert len(caught) == 1
    here = given["device"] if isinstance(given["device"], str) else Device()
    assert_alike(found, batches(varied, given["transform"], "cpu", device=here))


def test_masks_caches_and_python_transforms_keep_decoding_on_the_cpu(tmp_path):
    path = varied_file(tmp_path / "masked.h5", varied_rows(size=(22, 26)), masks=True)
    masked = PackedDataset(path, fields=["images", "masks"], decode="device")
    with pytest.warns(UserWarning, match="masks are cut"):
        FastLoader(masked, 4, transform=TRAINING, device=Device())
    with pytest.warns(UserWarning, match="keeps decoded images"):
        FastLoader(dataset(path), 4, transform=TRAINING, device=Device(), cache="device")
    with pytest.warns(UserWarning, match="Python"):
        FastLoader(dataset(path, transform=same), 4, device=Device())


def test_rows_without_jpegs_and_samples_one_by_one_know_nothing_of_it(tmp_path):
    path = varied_file(tmp_path / "raw.h5", varied_rows(jpeg=False))
    backend = Device()
    assert_alike(batches(path, TRAINING, device=backend), batches(path, TRAINING, "cpu"))
    assert not backend.decoded
    on_device, on_cpu = dataset(path), dataset(path, "cpu")
    assert torch.equal(on_device[3][0], on_cpu[3][0])
    assert pickle.loads(pickle.dumps(on_device.select([1, 2]))).decode == "device"
    with pytest.raises(OptionError, match="decode='gpu'"):
        dataset(path, "gpu")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_jpegs_that_exif_turns_are_turned_on_the_device(tmp_path, monkeypatch, orientation):
    rows = []
    for seed in range(8):
        data, (height, width, _), _ = jpeg_row(20, 30, seed=seed)
        rows.append((data, (width, height, 3) if orientation >= 5 else (height, width, 3), orientation))
    path = varied_file(tmp_path / "turned.h5", rows)
    expected = batches(path, TRAINING, "cpu")

    def refuse(*args):
        raise AssertionError("decoded by the CPU")

    monkeypatch.setattr(Rows, "decoded", refuse)
    assert_alike(batches(path, TRAINING), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_on_the_device_are_turned_as_those_of_the_cpu(orientation):
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    turned = device_decode.upright(torch.from_numpy(pixels).permute(2, 0, 1), orientation)
    assert np.array_equal(turned.permute(1, 2, 0).numpy(), upright(pixels, orientation))


def test_the_kernel_cuts_decoded_images_in_the_interpreter(run_interpreted):
    pytest.importorskip("triton", reason="Triton is not installed")
    found = run_interpreted(Path(__file__).with_name("decoded_by_kernel.py"))
    assert found.split() == ["training", "evaluation", "colour"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["training", "evaluation", "crop alone"])
def test_nvjpeg_gives_the_images_of_the_cpu(tmp_path, name):
    pytest.importorskip("torchvision", reason="torchvision is not installed, which calls nvJPEG")
    path = varied_file(
        tmp_path / "smooth.h5", [jpeg_row(200 + i, 230 - i, turned=i == 5, gray=i == 7, seed=i) for i in range(24)]
    )
    transform = [one for one in LISTS[name] if not isinstance(one, Normalize)]
    found = batches(path, transform, device="cuda", workers=2)
    expected = batches(path, transform, "cpu", device="cuda")
    assert len(found) == len(expected) > 0
    for (images, labels, rows), (images_there, labels_there, rows_there) in zip(found, expected, strict=True):
        assert torch.equal(labels, labels_there) and torch.equal(rows, rows_there)
        # As torchvision's own tests of this decoder: libjpeg interpolates colours that have fewer pixels, nvJPEG does
        # not unless it is told to. The CPU shrinks some while it decodes, in windows that are rounded.
        assert (images.float() - images_there.float()).abs().mean() < 4


# The stage alone


@pytest.mark.parametrize("transform", [[Resize((9, 9))], [RandomResizedCrop(9)]])
def test_alone_it_adds_whole_images_on_the_device_and_the_window_that_each_will_show(varied, transform):
    backend, rows = Device(), [5, 0, 7, 11]
    with opened(dataset(varied), device=backend, transform=transform) as shared:
        data = shared.options.packed
        head = find_decode_time_resize(tuple(transform), 3, torch.uint8, name="it")
        every = augmentation(shared, transform)
        stage = device_decode.DecodeOnDevice(data, backend, every, head)
        gather = GatherRows(data.dataset, ["labels"], into_slot=False)
        backend.decoded.clear()  # of the trial whether it decodes
        work = run_alone(shared, [gather, stage], rows, epoch=2)
        assert list(work.arrays) == ["labels"], "images lie in no slot"
        assert work.bytes_read >= sum(len(row[0]) for row in map(varied_rows().__getitem__, (5, 7, 11)))
        images = work.fields["images"]
        whole = [PackedDataset(varied, fields=["images"])[row][0] for row in rows]
        assert images.sizes.tolist() == [list(one.shape[1:]) for one in whole]
        parts = torch.split(images.pixels, [one.numel() for one in whole])
        for found, one in zip(parts, whole, strict=True):
            assert (found.view(one.shape).int() - one.int()).abs().max() <= 2  # two decoders
        assert backend.decoded[-1] == 3, "a raw row is none of its business"
        placed = head.placement(images.sizes, every.draws(2, work.whole))
        for name in ("first", "window"):
            assert np.array_equal(getattr(images.placement, name), getattr(placed, name))
    assert backend.pinned == 0
