"""decode_image: the pixels are Pillow's, upright, in the channels and size asked for, or an ImageError."""

from __future__ import annotations

import io
import struct
import subprocess
import sys
import textwrap
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import PIL
import pytest
import simplejpeg
from hypothesis import given, settings
from hypothesis import strategies as st
from image_bytes import encode, exif_bytes, png, png_chunk
from numpy.typing import NDArray
from PIL import Image, ImageOps

from fastload.errors import ImageError
from fastload.images.decode import decode_image, decode_mask, decoder_versions
from fastload.images.fit import Fit, Target
from fastload.images.image_header import probe_image

RNG = np.random.default_rng(7)
COLOUR = Image.fromarray(RNG.integers(0, 256, (6, 5, 3), dtype=np.uint8)).resize((31, 23))
GRAY16 = RNG.integers(0, 65536, (23, 31), dtype=np.uint16)


def reference(data: bytes, mode: str = "RGB") -> NDArray[np.uint8]:
    """Pillow's own way, which ours must equal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
        except SyntaxError:  # EXIF that Pillow cannot parse; the pixels are good
            image = Image.open(io.BytesIO(data))
        return np.asarray(image.convert(mode))


def decode(
    data: bytes,
    channels: int = 3,
    size: tuple[int, int] | None = None,
    *,
    fit: Fit | None = None,
    dtype: str = "uint8",
) -> NDArray[np.uint8 | np.uint16]:
    """Decoded pixels (H, W, C); the size (H, W) is the header's when not given."""
    height, width = size or probe_image(lambda count: data[:count])[:2]
    out = np.full((height, width, channels), 99, dtype)
    decode_image(data, Target(height, width, channels, out.dtype, fit), out)
    return out


def alpha_image() -> Image.Image:
    return Image.merge("RGBA", (*COLOUR.split(), Image.fromarray(GRAY16.astype(np.uint8))))


JPEGS = {
    f"{name} {'progressive' if progressive else 'baseline'}": encode(image, "JPEG", progressive=progressive, **options)
    for progressive in (False, True)
    for name, image, options in [
        ("4:4:4", COLOUR, {"subsampling": "4:4:4"}),
        ("4:2:2", COLOUR, {"subsampling": "4:2:2"}),
        ("4:2:0", COLOUR, {"subsampling": "4:2:0"}),
        ("4:1:1", COLOUR, {"subsampling": "4:1:1"}),
        ("stored as RGB", COLOUR, {"subsampling": "4:4:4", "keep_rgb": True}),
        ("restarts", COLOUR, {"restart_marker_blocks": 1}),
        ("gray", COLOUR.convert("L"), {}),
        ("cmyk", COLOUR.convert("CMYK"), {}),
    ]
}
OTHERS = {
    **{f"png {mode}": encode(COLOUR.convert(mode), "PNG") for mode in ("RGB", "L", "1", "P")},
    "png RGBA": encode(alpha_image(), "PNG"),
    "png LA": encode(alpha_image().convert("LA"), "PNG"),
    "png P tRNS": encode(COLOUR.convert("P"), "PNG", transparency=bytes(range(200))),
    "png P tRNS index": encode(COLOUR.convert("P"), "PNG", transparency=3),
    "png L tRNS": encode(COLOUR.convert("L"), "PNG", transparency=100),
    "png RGB tRNS": encode(COLOUR, "PNG", transparency=(1, 2, 3)),
    "png 1 tRNS": encode(COLOUR.convert("1"), "PNG", transparency=0),
    "png 16-bit rgb": png(5, 3, 16, 2, 3 * (b"\0" + RNG.bytes(30))),
    "png 16-bit rgba": png(5, 3, 16, 6, 3 * (b"\0" + RNG.bytes(40))),
    "png 16-bit gray alpha": png(5, 3, 16, 4, 3 * (b"\0" + RNG.bytes(20))),
    "gif": encode(COLOUR.convert("P"), "GIF"),
    "gif transparent": encode(COLOUR.convert("P"), "GIF", transparency=3),
    "webp": encode(COLOUR, "WEBP"),
    "webp alpha": encode(alpha_image(), "WEBP"),
    "bmp": encode(COLOUR, "BMP"),
    "bmp 1": encode(COLOUR.convert("1"), "BMP"),
    **{f"tiff {mode}": encode(COLOUR.convert(mode), "TIFF") for mode in ("RGB", "L", "1", "P", "CMYK", "YCbCr")},
    "tiff RGBA": encode(alpha_image(), "TIFF"),
    "tiff lzw": encode(COLOUR, "TIFF", compression="tiff_lzw"),
    "tiff jpeg": encode(COLOUR, "TIFF", compression="jpeg"),
    "ppm": encode(COLOUR, "PPM"),
    "animation": encode(COLOUR, "GIF", save_all=True, append_images=[ImageOps.flip(COLOUR)]),
    "pages": encode(COLOUR, "TIFF", save_all=True, append_images=[ImageOps.flip(COLOUR)]),
    "mpo": encode(COLOUR, "MPO", save_all=True, append_images=[ImageOps.flip(COLOUR)]),
}
FILES = JPEGS | OTHERS


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("channels", "mode"), [(3, "RGB"), (4, "RGBA"), (1, "L")])
def test_pixels_are_pillows(name: str, channels: int, mode: str) -> None:
    data = FILES[name]
    if channels == 1 and "gray" not in name:
        expected = np.asarray(Image.fromarray(reference(data)).convert("L"))
    else:
        expected = reference(data, mode)
    np.testing.assert_array_equal(decode(data, channels).squeeze(), expected)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    suffix=st.sampled_from(["JPEG", "PNG", "TIFF", "WEBP"]),
    orientation=st.integers(1, 8),
    width=st.integers(1, 40),
    height=st.integers(1, 40),
    gray=st.booleans(),
)
def test_images_come_out_upright(suffix: str, orientation: int, width: int, height: int, gray: bool) -> None:
    image = COLOUR.resize((width, height)).convert("L" if gray else "RGB")
    data = encode(image, suffix, exif=exif_bytes(orientation))
    np.testing.assert_array_equal(decode(data), reference(data))


def test_jpeg_is_written_into_its_row_and_nowhere_else_by_the_decoders_that_are_named() -> None:
    assert decoder_versions().startswith(f"simplejpeg {simplejpeg.__version__}; Pillow {PIL.__version__}")
    rows = np.full((3, 23, 31, 3), 99, np.uint8)
    decode_image(JPEGS["4:2:0 baseline"], Target(23, 31, 3, rows.dtype), rows[1])
    np.testing.assert_array_equal(rows[1], simplejpeg.decode_jpeg(JPEGS["4:2:0 baseline"]))
    assert (rows[[0, 2]] == 99).all()


@pytest.mark.parametrize("data", [JPEGS["gray baseline"], OTHERS["png L"], OTHERS["png RGB"]])
def test_8_bits_are_never_passed_off_as_16(data: bytes) -> None:
    with pytest.raises(ImageError, match="8 bits a channel where the dataset has 16"):
        decode(data, 1, dtype="uint16")


@pytest.mark.parametrize("data", [JPEGS["4:2:0 baseline"], OTHERS["png RGB"], encode(Image.fromarray(GRAY16), "PNG")])
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_another_size_without_fit_names_both(data: bytes, dtype: str) -> None:
    with pytest.raises(ImageError, match=r"31x23 pixels \(width x height\) where the dataset is 23x31"):
        decode(data, size=(31, 23), dtype=dtype)


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
@pytest.mark.parametrize("name", ["4:2:0 baseline", "png RGB", "png RGBA", "webp"])
def test_an_image_of_the_right_size_is_not_resampled(name: str, fit: Fit) -> None:
    np.testing.assert_array_equal(decode(FILES[name], size=(23, 31), fit=fit), reference(FILES[name]))


SIDES = st.integers(1, 60) | st.just(900)
SIZES = st.tuples(SIDES, SIDES)


@settings(max_examples=2 * settings.default.max_examples)
@given(
    source=SIZES,
    size=SIZES,
    channels=st.sampled_from([1, 3, 4]),
    suffix=st.sampled_from(["JPEG", "PNG"]),
    fit=st.sampled_from(["crop", "stretch"]),
)
def test_crop_resizes_the_largest_centred_part_of_the_targets_aspect_and_stretch_all(
    source: tuple[int, int], size: tuple[int, int], channels: int, suffix: str, fit: Fit
) -> None:
    data = encode(COLOUR.resize(source), suffix)
    (width, height), aspect = source, size[1] / size[0] if fit == "crop" else source[0] / source[1]
    part = (min(width, height * aspect), min(height, width / aspect))
    box = ((width - part[0]) / 2, (height - part[1]) / 2, (width + part[0]) / 2, (height + part[1]) / 2)
    image = Image.fromarray(reference(data)).convert({1: "L", 3: "RGB", 4: "RGBA"}[channels])
    expected = np.asarray(image.resize((size[1], size[0]), Image.Resampling.BILINEAR, box))
    found = decode(data, channels, size, fit=fit).squeeze()
    assert np.abs(found.astype(int) - expected.squeeze()).max() <= 1  # a box may differ in its last bit


@settings(max_examples=2 * settings.default.max_examples)
@given(source=SIZES, size=SIZES, suffix=st.sampled_from(["JPEG", "PNG"]))
def test_pad_keeps_the_whole_image_in_the_middle_of_zeros(
    source: tuple[int, int], size: tuple[int, int], suffix: str
) -> None:
    data = encode(COLOUR.resize(source).point(lambda value: 55 + value // 2), suffix, quality=100)
    found = decode(data, 3, size, fit="pad")
    rows, columns = np.nonzero(found.any(axis=2))
    height, width = int(np.ptp(rows)) + 1, int(np.ptp(columns)) + 1
    assert height == size[0] or width == size[1]
    assert abs(rows.min() - (size[0] - 1 - rows.max())) <= 1
    assert abs(columns.min() - (size[1] - 1 - columns.max())) <= 1
    inner = found[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
    expected = Image.fromarray(reference(data)).resize((width, height), Image.Resampling.BILINEAR)
    np.testing.assert_array_equal(inner, np.asarray(expected))


@pytest.mark.parametrize("fit", ["crop", "pad", "stretch"])
def test_16_bit_gray_is_resized_in_16_bits(fit: Fit) -> None:
    ramp = np.linspace(0, 65535, 60 * 40).reshape(60, 40).astype(np.uint16)
    found = decode(encode(Image.fromarray(ramp), "PNG"), 1, (30, 20), fit=fit, dtype="uint16")[..., 0]
    expected = Image.fromarray(ramp.astype(np.float32)).resize((20, 30), Image.Resampling.BILINEAR)
    assert np.abs(found.astype(float) - np.asarray(expected)).max() <= 0.5


def test_oriented_images_are_fitted_upright() -> None:
    for suffix in ("JPEG", "PNG", "TIFF"):
        data = encode(COLOUR, suffix, exif=exif_bytes(6))
        upright = Image.fromarray(reference(data))
        assert upright.size == (23, 31)
        expected = np.asarray(upright.resize((46, 62), Image.Resampling.BILINEAR))
        np.testing.assert_array_equal(decode(data, 3, (62, 46), fit="crop"), expected)


@settings(max_examples=3 * settings.default.max_examples)
@given(name=st.sampled_from(sorted(JPEGS)), cut=st.integers(1, 1200))
def test_a_truncated_jpeg_is_an_error(name: str, cut: int) -> None:
    data = JPEGS[name][:-cut]
    with pytest.raises(ImageError):
        decode(data, size=(23, 31))


@settings(max_examples=3 * settings.default.max_examples)
@given(cut=st.integers(1, 3000), chunk=st.sampled_from([100, 100_000]))
def test_a_truncated_png_is_an_error_unless_all_its_pixels_are_there(cut: int, chunk: int) -> None:
    whole = OTHERS["png RGB"]
    start = whole.index(b"IDAT") - 4
    (length,) = struct.unpack_from(">I", whole, start)
    payload = whole[start + 8 : start + 8 + length]
    pieces = [payload[at : at + chunk] for at in range(0, length, chunk)]
    data = whole[:start] + b"".join(png_chunk(b"IDAT", piece) for piece in pieces)
    complete = len(data)
    data = (data + whole[start + 12 + length :])[:-cut]
    try:
        found = decode(data, size=(23, 31))
    except ImageError:
        assert len(data) < complete
    else:
        np.testing.assert_array_equal(found, reference(whole))


@settings(max_examples=8 * settings.default.max_examples)
@given(
    name=st.sampled_from(sorted(FILES)),
    changes=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 255)), max_size=5),
    cut=st.integers(0, 999),
    fit=st.sampled_from([None, None, "crop"]),
)
def test_damaged_files_raise_nothing_but_image_errors(
    name: str, changes: list[tuple[int, int]], cut: int, fit: Fit | None
) -> None:
    data = bytearray(FILES[name])
    for position, value in changes:
        data[position % len(data)] = value
    data = data[: max(1, len(data) - cut)] if cut < 300 else data
    try:
        header = probe_image(lambda size: bytes(data[:size]))
        assert header.height * header.width > 0
        if header.height * header.width > 1_000_000:
            return  # a damaged size field; decoding it is right, only slow
        decode(bytes(data), size=(23, 31), fit=fit)
    except ImageError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (OTHERS["png RGB"][:200], "truncated"),
        (JPEGS["gray baseline"][:-30], "truncated"),
        (encode(Image.new("F", (31, 23)), "TIFF"), "32-bit floating-point pixels are not supported"),
    ],
)
def test_failures_name_their_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason) as caught:
        decode(data, size=(23, 31))
    assert reason != "truncated" or isinstance(caught.value.__cause__, OSError)


def test_running_out_of_memory_is_an_image_error_with_the_size() -> None:
    pytest.importorskip("resource", reason="memory limits are set through the resource module")
    script = """
        import io, resource
        import numpy as np
        from PIL import Image
        from fastload.images.decode import Target, decode_image
        from fastload.errors import ImageError
        buffer = io.BytesIO()
        Image.new("1", (13_000, 13_000)).save(buffer, "PNG")
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, resource.RLIM_INFINITY))
        try:
            decode_image(buffer.getvalue(), Target(8, 8, 3, np.dtype("uint8"), "crop"), np.empty((8, 8, 3), np.uint8))
        except ImageError as error:
            print(error)
    """
    if not Path("/proc/self/statm").exists():
        pytest.skip("the size of the address space is read from /proc")
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=600
    )
    assert "not enough memory" in result.stdout
    assert "13000x13000 pixels" in result.stdout


def test_threads_decode_alike_and_leave_the_warning_filters_alone() -> None:
    names = sorted(FILES)
    expected = [decode(FILES[name]) for name in names]
    before = list(warnings.filters)
    with ThreadPoolExecutor(8) as pool:
        for found in [pool.map(decode, [FILES[name] for name in names]) for _ in range(3)]:
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_array_equal(one, other)
    assert warnings.filters == before


MASK = np.random.default_rng(3).integers(0, 21, (23, 31), dtype=np.uint8)


def decoded_mask(data: bytes, size: tuple[int, int] = (23, 31), fit: Fit | None = None, **options) -> NDArray[np.uint8]:
    out = np.full(size, 99, np.uint8)
    decode_mask(data, Target(*size, 3, np.dtype(np.uint8), fit), out, **options)
    return out


def palette_mask() -> Image.Image:
    image = Image.fromarray(MASK).convert("L")
    image = Image.frombytes("P", image.size, image.tobytes())
    image.putpalette([value for index in range(256) for value in (index * 7 % 256, index * 31 % 256, 200)])
    return image


def packed_rows(values: NDArray[np.uint8], depth: int) -> bytes:
    bits = np.unpackbits(values[..., None], axis=2)[..., 8 - depth :].reshape(len(values), -1)
    return b"".join(b"\0" + np.packbits(row).tobytes() for row in bits)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encode(Image.fromarray(MASK), "PNG"), MASK),
        (encode(Image.fromarray(MASK), "TIFF", compression="tiff_lzw"), MASK),
        (encode(palette_mask(), "PNG"), MASK),
        (encode(palette_mask(), "PNG", transparency=0), MASK),
        (encode(palette_mask(), "BMP"), MASK),
        (encode(Image.fromarray(MASK.astype(np.uint16)), "PNG"), MASK),
        (encode(Image.fromarray(MASK.astype(np.uint16)), "PPM"), MASK),
        (png(31, 23, 1, 0, packed_rows(MASK % 2, 1)), MASK % 2),
        (png(31, 23, 2, 0, packed_rows(MASK % 4, 2)), MASK % 4),
        (png(31, 23, 4, 0, packed_rows(MASK % 16, 4)), MASK % 16),
        (b"P5 31 23 20\n" + MASK.tobytes(), MASK),
        (b"P1 31 23\n" + b" ".join(b"%d" % (1 - value % 2) for value in MASK.flat), MASK % 2),
        (b"P5 31 23 1000\n" + MASK.astype(">u2").tobytes(), MASK),
    ],
)
def test_masks_give_the_numbers_that_are_stored(data: bytes, expected: NDArray[np.uint8]) -> None:
    np.testing.assert_array_equal(decoded_mask(data), expected)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode(COLOUR, "PNG"), "holds colours .Pillow mode 'RGB'., not the numbers of"),
        (encode(alpha_image(), "PNG"), "holds colours .Pillow mode 'RGBA'"),
        (encode(COLOUR.convert("LA"), "PNG"), "holds colours .Pillow mode 'LA'"),
        (encode(COLOUR.convert("L"), "JPEG"), "a mask in JPEG, which blends"),
        (encode(COLOUR.convert("L"), "TIFF", compression="jpeg"), "a mask in TIFF, which blends"),
        (encode(COLOUR, "WEBP", lossless=True), "a mask in WEBP"),
        (encode(Image.fromarray(GRAY16), "PNG"), "holds the value 65[0-9]+, where masks of this dataset hold 0 to 255"),
        (encode(Image.fromarray(MASK.astype(np.int32)), "TIFF"), "32-bit integer pixels are not supported"),
        (encode(Image.fromarray(MASK), "PNG")[:200], "truncated"),
        (b"", "not an image"),
    ],
)
def test_what_is_no_mask_is_refused_with_its_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        decoded_mask(data)


def test_a_mask_of_another_size_than_its_image_names_both() -> None:
    data = encode(Image.fromarray(MASK), "PNG")
    with pytest.raises(ImageError, match=r"the mask is 31x23 pixels .*, its image 23x31"):
        decoded_mask(data, (9, 9), "crop", image_size=(31, 23))
    assert decoded_mask(data, (9, 9), "crop", image_size=(23, 31)).max() <= 20


@pytest.mark.parametrize("suffix", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_mask_is_turned_upright_as_an_image_is(suffix: str, orientation: int) -> None:
    data = encode(Image.fromarray(MASK), suffix, exif=exif_bytes(orientation))
    expected = reference(data, "L")
    np.testing.assert_array_equal(decoded_mask(data, expected.shape), expected)
