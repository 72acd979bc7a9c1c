"""probe_image: what it says of a file equals what Pillow makes of it, from as few bytes as possible."""

from __future__ import annotations

import io
import struct
import tarfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from image_bytes import encode, exif_bytes, photo, png, png_chunk
from PIL import Image, ImageOps, PngImagePlugin, features

from fastload import pack_images
from fastload.errors import ImageError
from fastload.images import image_header
from fastload.images.decode import decode_image
from fastload.images.fit import Target
from fastload.images.image_header import ImageHeader, pillow_silenced, probe_image

Encoded = Callable[..., bytes]


def probe(data: bytes) -> ImageHeader:
    return probe_image(lambda size: data[:size])


RGB = Image.new("RGB", (5, 3), (1, 2, 3))
TRANSPARENT_PALETTE = Image.new("P", (5, 3))
SIXTEEN = Image.fromarray(np.arange(15, dtype=np.uint16).reshape(3, 5) * 4000)
KINDS = {
    "jpeg": (encode(RGB, "JPEG"), 3, 8, "RGB"),
    "jpeg gray": (encode(RGB.convert("L"), "JPEG"), 1, 8, "L"),
    "jpeg cmyk": (encode(RGB.convert("CMYK"), "JPEG"), 3, 8, "CMYK"),
    "png": (encode(RGB, "PNG"), 3, 8, "RGB"),
    "png rgba": (encode(RGB.convert("RGBA"), "PNG"), 4, 8, "RGBA"),
    "png gray": (encode(RGB.convert("L"), "PNG"), 1, 8, "L"),
    "png gray alpha": (encode(RGB.convert("LA"), "PNG"), 4, 8, "LA"),
    "png gray tRNS": (encode(RGB.convert("L"), "PNG", transparency=3), 4, 8, "L+alpha"),
    "png rgb tRNS": (encode(RGB, "PNG", transparency=(1, 2, 3)), 4, 8, "RGB+alpha"),
    "png 1 bit": (encode(RGB.convert("1"), "PNG"), 1, 8, "1"),
    "png 2 bit gray": (png(5, 3, 2, 0, 3 * b"\0\x1b\x1b"), 1, 8, "L"),
    "png palette": (encode(RGB.convert("P"), "PNG"), 3, 8, "P"),
    "png palette tRNS": (encode(TRANSPARENT_PALETTE, "PNG", transparency=0), 4, 8, "P+alpha"),
    "png 16-bit gray": (encode(SIXTEEN, "PNG"), 1, 16, "I;16"),
    "png 16-bit gray tRNS": (png(5, 3, 16, 0, 3 * bytes(11), png_chunk(b"tRNS", b"\0\1")), 4, 16, "I;16+alpha"),
    "png 16-bit rgb": (png(5, 3, 16, 2, 3 * bytes(31)), 3, 16, "RGB;16"),
    "png 16-bit rgb tRNS": (png(5, 3, 16, 2, 3 * bytes(31), png_chunk(b"tRNS", bytes(6))), 4, 16, "RGB;16+alpha"),
    "png 16-bit gray alpha": (png(5, 3, 16, 4, 3 * bytes(21)), 4, 16, "RGBA;16"),
    "png 16-bit rgba": (png(5, 3, 16, 6, 3 * bytes(41)), 4, 16, "RGBA;16"),
    "gif": (encode(RGB.convert("P"), "GIF"), 3, 8, "P"),
    "gif gray": (encode(RGB.convert("L"), "GIF", optimize=False), 1, 8, "L"),
    "gif transparent": (encode(TRANSPARENT_PALETTE, "GIF", transparency=0), 4, 8, "P+alpha"),
    "webp": (encode(RGB, "WEBP"), 3, 8, "RGB"),
    "webp alpha": (encode(Image.new("RGBA", (5, 3), (1, 2, 3, 4)), "WEBP", exact=True), 4, 8, "RGBA"),
    "bmp": (encode(RGB, "BMP"), 3, 8, "RGB"),
    "bmp 1 bit": (encode(RGB.convert("1"), "BMP"), 1, 8, "1"),
    "tiff": (encode(RGB, "TIFF"), 3, 8, "RGB"),
    "tiff gray": (encode(RGB.convert("L"), "TIFF"), 1, 8, "L"),
    "tiff rgba": (encode(RGB.convert("RGBA"), "TIFF"), 4, 8, "RGBA"),
    "tiff cmyk": (encode(RGB.convert("CMYK"), "TIFF"), 3, 8, "CMYK"),
    "tiff lab": (encode(Image.new("LAB", (5, 3)), "TIFF"), 3, 8, "LAB"),
    "tiff ycbcr": (encode(RGB.convert("YCbCr"), "TIFF"), 3, 8, "YCbCr"),
    "tiff 16-bit gray": (encode(SIXTEEN, "TIFF"), 1, 16, "I;16"),
    "ppm": (encode(RGB, "PPM"), 3, 8, "RGB"),
    "ppm 16 bit": (b"P6 5 3 65535\n" + bytes(90), 3, 16, "RGB;16"),
    "pgm 16 bit": (b"P5 5 3 4095\n" + bytes(30), 1, 16, "I;16"),
}


@pytest.mark.parametrize("name", KINDS)
def test_channels_bits_and_kind_are_what_the_file_has(name: str) -> None:
    data, channels, bits, kind = KINDS[name]
    assert probe(data)._replace(jpeg=0) == ImageHeader(3, 5, channels, bits, kind, 1)


def planar_tiff() -> bytes:
    """A 1x1 RGB TIFF of 16 bits, each colour a plane of its own."""
    behind = 8 + 2 + 12 * 10 + 4
    entries = [
        (256, 3, 1, 1), (257, 3, 1, 1), (258, 3, 3, behind), (259, 3, 1, 1), (262, 3, 1, 2),
        (273, 4, 3, behind + 6), (277, 3, 1, 3), (278, 3, 1, 1), (279, 4, 3, behind + 18), (284, 3, 1, 2),
    ]  # fmt: skip
    directory = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    strips = struct.pack("<3H3I3I", 16, 16, 16, behind + 30, behind + 32, behind + 34, 2, 2, 2)
    return b"II*\0\x08\0\0\0\x0a\0" + directory + bytes(4) + strips + bytes(6)


def xmp_text() -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    info.add_itxt("XML:com.adobe.xmp", '<rdf tiff:Orientation="6"/>')
    return info


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(png(5, 3, 8, 0, 3 * bytes(6), tail=png_chunk(b"eXIf", exif_bytes(6)[6:])), id="eXIf behind"),
        pytest.param(encode(Image.new("L", (5, 3)), "PNG", pnginfo=xmp_text()), id="XMP"),
    ],
)
def test_png_orientation_is_found_wherever_it_stands(data: bytes) -> None:
    assert probe(data)[:2] == (5, 3)


@pytest.mark.parametrize("suffix", ["GIF", "PNG", "WEBP", "TIFF", "MPO"])
def test_frames_are_counted(suffix: str) -> None:
    frames = [Image.new("RGB", (5, 3), (80 * i, 255, 9)) for i in range(3)]
    header = probe(encode(frames[0], suffix, save_all=True, append_images=frames[1:]))
    assert header.frames == 3
    assert header[:2] == (3, 5)


def sizes_read(data: bytes) -> list[int]:
    asked: list[int] = []

    def read_head(size: int) -> bytes:
        asked.append(size)
        return data[:size]

    probe_image(read_head)
    return asked


def test_no_more_is_read_than_needed() -> None:
    pixels = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), dtype=np.uint8))
    plain = encode(pixels, "JPEG")
    assert len(plain) > 65536
    assert sizes_read(plain) == [4096]
    assert sizes_read(encode(pixels, "JPEG", icc_profile=bytes(20_000))) == [4096, 65536]
    assert sizes_read(encode(pixels, "JPEG", icc_profile=bytes(200_000)))[-1] >= 200_000
    everything = encode(pixels, "PNG")
    assert len(everything) <= sizes_read(everything)[-1] <= 16 * len(everything)


def test_what_reading_raises_is_passed_on() -> None:
    def read_head(size: int) -> bytes:
        raise PermissionError(13, "Permission denied", "a.jpg")

    with pytest.raises(PermissionError):
        probe_image(read_head)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encode(Image.new("I", (5, 3)), "TIFF"), "32-bit integer pixels are not supported"),
        (encode(Image.new("F", (5, 3)), "TIFF"), "32-bit floating-point pixels are not supported"),
        (planar_tiff(), "plane by plane is not supported"),  # Pillow reads it wrong
        (b"", r"not an image \(0 bytes\)"),
        (b"hello, world", "not an image: starts with b'hello, w'"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image: starts with b'%!PS-Ado'"),
        (b"\xff\xd8\xff\xff\xff\xff", "its JPEG header is damaged"),
        (encode(RGB, "PNG")[:20], "cannot be decoded"),
        (png(5, 0, 8, 0, b""), "claims 5x0 pixels|PNG header is damaged"),
        (png(20_000, 20_000, 8, 0, b""), "claims 20000x20000 pixels|400000000 pixels"),
        (encode(RGB, "JPEG").replace(b"\x08\0\x03\0\x05", b"\x08\xff\xff\xff\xff"), "claims 65535x65535 pixels"),
        (encode(RGB, "JPEG").replace(b"\x08\0\x03\0\x05", b"\x08\0\0\0\x05"), "claims 5x0 pixels"),
    ],
)
def test_failures_name_their_reason(data: bytes, reason: str) -> None:
    with pytest.raises(ImageError, match=reason):
        probe(data)


def test_sizes_that_pillow_only_warns_of_pass_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert probe(png(10_000, 10_000, 1, 0, b""))[:2] == (10_000, 10_000)


def test_only_pillows_warnings_are_silenced() -> None:
    with pillow_silenced(), pytest.warns(UserWarning, match="mine"):
        warnings.warn("mine", UserWarning, stacklevel=1)


def tiff_with_tag(compression: str) -> bytes:
    """Returns a TIFF with a private tag that neither Pillow nor libtiff knows, of a type that libtiff cannot store."""
    data = bytearray(encode(RGB, "TIFF", compression=compression))
    (start,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, start)
    entries = [bytes(data[start + 2 + 12 * n :][:12]) for n in range(count)] + [struct.pack("<HHII", 65000, 99, 1, 5)]
    struct.pack_into("<I", data, 4, len(data))
    return bytes(data) + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)


@pytest.mark.skipif(not features.check("libtiff"), reason="Pillow without libtiff")
def test_libtiff_says_nothing_while_we_read_and_all_it_has_to_say_elsewhere(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    odd, damaged = tiff_with_tag("tiff_lzw"), bytearray(tiff_with_tag("tiff_adobe_deflate"))
    damaged[8:40] = b"\xaa" * 32
    (source := tmp_path / "photos").mkdir()
    (source / "odd.tif").write_bytes(odd)
    (source / "odder.tif").write_bytes(damaged)
    out = np.empty((3, 5, 3), np.uint8)
    assert probe(odd).height == 3
    decode_image(odd, Target(3, 5, 3, np.dtype(np.uint8)), out)
    with pytest.raises(ImageError, match="cannot be decoded"):
        decode_image(bytes(damaged), Target(3, 5, 3, np.dtype(np.uint8)), out)
    report = pack_images(source, tmp_path / "packed.h5", workers=2, on_error="skip")
    assert [key for key, _ in report.skipped] == ["odder.tif"]
    assert capfd.readouterr().err == ""
    with Image.open(io.BytesIO(damaged)) as image, pytest.raises(OSError, match="decoder error"):
        image.load()
    assert "ZIPDecode" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "every"), [("clothing/clothing.tar", 60), ("celeba/img_align_celeba.tar", 100), ("camvid/camvid.tar", 40)]
)
def test_real_photos_are_described_as_by_pillow(shared_data: Path, name: str, every: int) -> None:
    with tarfile.open(shared_data / name) as archive:
        files = [member for member in archive if member.isfile()]
        found = [archive.extractfile(member).read() for member in files[::every]]  # type: ignore[union-attr]
    photos = [data for data in found if data[:1] in (b"\xff", b"\x89")]  # beside them lies a list in text
    assert photos
    for data in photos:
        with Image.open(io.BytesIO(data)) as image:
            shown = ImageOps.exif_transpose(image)
        channels = {"RGB": 3, "L": 1}[shown.mode]
        jpeg = int(data[:1] == b"\xff")
        assert probe(data) == ImageHeader(shown.height, shown.width, channels, 8, shown.mode, 1, jpeg=jpeg)


@pytest.mark.parametrize(
    ("suffix", "options", "kind"),
    [(".jp2", [], "RGB;16"), (".avif", ["IMWRITE_AVIF_DEPTH", 10], "RGB;16"), (".avif", [], "RGB")],
)
def test_what_pillow_cuts_to_8_bits_is_told_by_its_kind(suffix: str, options: list[str | int], kind: str) -> None:
    cv2 = pytest.importorskip("cv2", reason="cv2 is not installed")
    pixels = np.full((64, 64, 3), 900, np.uint16) if kind == "RGB;16" else np.zeros((64, 64, 3), np.uint8)
    try:
        _, data = cv2.imencode(suffix, pixels, [getattr(cv2, str(options[0])), options[1]] if options else [])
        header = probe(data.tobytes())
    except (cv2.error, AttributeError, ImageError):
        pytest.skip(f"this OpenCV or Pillow has no {suffix}")
    assert header == ImageHeader(64, 64, 3, 8, kind, 1)


def test_plain_jpegs_are_told_with_their_orientation() -> None:
    def encoded(mode: str, orientation: int = 1, kind: str = "JPEG") -> bytes:
        return encode(Image.new(mode, (9, 5)), kind, exif=exif_bytes(orientation))

    assert [probe(encoded(mode, n)).jpeg for mode, n in (("RGB", 1), ("L", 3), ("RGB", 8))] == [1, 3, 8]
    arithmetic = encoded("RGB").replace(b"\xff\xc0", b"\xff\xc9", 1)
    assert [probe(data).jpeg for data in (encoded("CMYK"), encoded("RGB", kind="PNG"), arithmetic)] == [0, 0, 0]


def icc(size: int) -> bytes:
    """A profile's chunk that inflates to so many bytes."""
    noise = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8).tobytes()
    return png_chunk(b"iCCP", b"big\0\0" + zlib.compress(noise))


TEXTS = {
    "profile": icc(3 * 2**20),
    "a profile that inflates a thousandfold": png_chunk(b"iCCP", b"big\0\0" + zlib.compress(bytes(2**22))),
    "compressed text": png_chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(2**22))),
    "international text": png_chunk(b"iTXt", b"XML:com.adobe.xmp\0\1\0\0\0" + zlib.compress(b" " * 2**22)),
    "texts without end": b"".join(png_chunk(b"tEXt", b"Comment\0" + bytes([65 + i]) * 2**24) for i in range(5)),
}


@pytest.mark.parametrize("where", ["before", "behind"])
@pytest.mark.parametrize("name", TEXTS)
def test_a_large_profile_or_text_of_a_png_changes_no_pixel(name: str, where: str) -> None:
    rows = b"".join(b"\0" + np.random.default_rng(i).integers(0, 256, 12, dtype=np.uint8).tobytes() for i in range(3))
    trns = png_chunk(b"tRNS", struct.pack(">HHH", *rows[1:4]))
    gamma = png_chunk(b"gAMA", struct.pack(">I", 45455))
    before, tail = ((TEXTS[name],), b"") if where == "before" else ((), TEXTS[name])
    large = png(4, 3, 8, 2, rows, gamma, *before, trns, tail=tail)
    plain = png(4, 3, 8, 2, rows, gamma, trns)
    header = probe_image(lambda size: large[:size])
    assert header == probe_image(lambda size: plain[:size]) and header.channels == 4
    out = [np.empty((3, 4, 4), np.uint8) for _ in range(2)]
    for data, pixels in zip((large, plain), out, strict=True):
        decode_image(data, Target(3, 4, 4, pixels.dtype), pixels)
    assert np.array_equal(*out) and np.array_equal(out[1], np.asarray(Image.open(io.BytesIO(plain)).convert("RGBA")))


def test_a_png_without_its_large_profile_keeps_its_orientation() -> None:
    exif = exif_bytes(6).removeprefix(b"Exif\0\0")
    text = b"\nexif\n%8d\n%s\n" % (len(exif) + 6, (b"Exif\0\0" + exif).hex().encode())
    for turned in (png_chunk(b"eXIf", exif), png_chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text))):
        data = png(4, 3, 8, 0, b"".join(b"\0" + bytes([i] * 4) for i in range(3)), icc(2**21), turned)
        header = probe_image(lambda size, data=data: data[:size])
        assert header.orientation > 1 and (header.height, header.width) == (4, 3)
        out = np.empty((4, 3, 1), np.uint8)
        decode_image(data, Target(4, 3, 1, out.dtype), out)
        assert out[0, :, 0].tolist() == [2, 1, 0]


def test_a_png_whose_pixels_are_damaged_stays_an_error_beside_a_large_profile() -> None:
    data = png(4, 3, 8, 0, b"\0\1\2\3\4" * 3, icc(2**21))
    at = data.index(b"IDAT") + 6
    damaged = data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]
    with pytest.raises(ImageError):
        decode_image(damaged, Target(3, 4, 1, np.dtype(np.uint8)), np.empty((3, 4, 1), np.uint8))


@pytest.mark.parametrize("suffix", ["avif", "jp2", "qoi"])
def test_files_of_newer_formats_are_packed_where_pillow_decodes_them(tmp_path: Path, suffix: str) -> None:
    if not features.check({"avif": "avif", "jp2": "jpg_2000"}.get(suffix, "zlib")):
        pytest.skip(f"this Pillow has no {suffix}")
    for i, of in enumerate(("cat", "dog")):
        (tmp_path / "in" / of).mkdir(parents=True)
        photo(32, 48).save(tmp_path / "in" / of / f"{i}.{suffix}")
    report = pack_images(tmp_path / "in", tmp_path / "o.h5", workers=0)
    assert report.num_samples == 2 and report.image_shape == (32, 48, 3) and report.fields == ("labels",)


def test_heic_is_packed_where_pillow_heif_is_installed(tmp_path: Path) -> None:
    heif = pytest.importorskip("pillow_heif", reason="pillow_heif is not installed")
    heif.register_heif_opener()
    (tmp_path / "in").mkdir()
    photo(32, 48).save(tmp_path / "in" / "a.heic", quality=90)
    report = pack_images(tmp_path / "in", tmp_path / "o.h5", workers=0)
    assert report.num_samples == 1 and report.image_shape == (32, 48, 3)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC by its content.*pip install pillow-heif"),
        (b"\0\0\0\x18ftypmp42\0\0\0\0", "a video"),
        (b"\xff\x0a\xfa\x1f\x01", "JPEG XL"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (b"<!DOCTYPE html><html>404</html>", "a web page"),
        (b'<?xml version="1.0"?>\n<svg xmlns="a"/>', "SVG"),
        (b'{"error": "quota exceeded"}', "JSON"),
        (b"%PDF-1.7", "a PDF"),
        (bytes(128) + b"DICM" + bytes(9), "DICOM"),
        (b"PK\x03\x04abcdefgh", "an archive"),
        (bytes(999), "zeros alone"),
    ],
)
def test_files_called_like_images_that_are_something_else_are_named(
    data: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    formats = tuple(name for name in image_header._formats() if name != "HEIF")  # as where pillow-heif is not installed
    monkeypatch.setattr(image_header, "_formats", lambda: formats)
    with pytest.raises(ImageError, match=f"not an image that is read: .*{said}"):
        probe_image(lambda size: data[:size])
