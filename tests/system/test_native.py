"""The compiled loops against NumPy and simplejpeg; skipped where they are not built."""

from __future__ import annotations

import ctypes
import io
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash
from child_processes import child_environment
from hypothesis import assume, example, given
from hypothesis import strategies as st
from jpeg_processes import made, with_scans
from PIL import Image

from fastload.format.ragged import JPEG
from fastload.images.decode_part import decode_part
from fastload.images.jpeg import MAX_SCANS
from fastload.plan.permutation import permute, unpermute
from fastload.system import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs the compiled loops")
needs_jpeg = pytest.mark.skipif(not native.decodes_jpeg(), reason="neither Pillow nor the system brings libjpeg-turbo")


@given(row_bytes=st.integers(1, 700), seed=st.integers(0, 1000), streamed_bytes=st.sampled_from([0, 1 << 62]))
def test_rows_are_copied_as_numpy_copies_them(row_bytes, seed, streamed_bytes):
    rng = np.random.default_rng(seed)
    source = rng.integers(0, 256, (9, row_bytes), np.uint8)
    rows = rng.integers(0, 9, rng.integers(0, 14))
    around = np.full(len(rows) * row_bytes + 80, 7, np.uint8)
    first = int(rng.integers(0, 40))
    out = around[first : first + len(rows) * row_bytes].reshape(len(rows), row_bytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "STREAMED_BYTES", streamed_bytes)
        native.gather(source.ctypes.data + rows * row_bytes, out)
    assert np.array_equal(out, source[rows])
    assert (around[:first] == 7).all() and (around[first + out.size :] == 7).all()


LENGTHS = st.lists(st.integers(0, 3000), min_size=1, max_size=3).filter(lambda some: sum(some) > native.SHORT_BYTES)


@given(LENGTHS, st.integers(0, 4), st.sampled_from([0, 1 << 62]), st.integers(0, 1000))
@example([257], 3, 0, 0)
@example([1024, 1], 2, 0, 0)
def test_rows_of_pieces_are_copied_and_hashed_as_xxhash_hashes_them(lengths, count, streamed_bytes, seed):
    rng = np.random.default_rng(seed)
    pieces = [rng.integers(0, 256, (6, length), np.uint8) for length in lengths]
    rows = rng.integers(0, 6, count)
    around = [np.full(count * length + 80, 7, np.uint8) for length in lengths]
    first = int(rng.integers(0, 40))
    outs = [
        memory[first : first + count * length].reshape(count, length)
        for memory, length in zip(around, lengths, strict=True)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "STREAMED_BYTES", streamed_bytes)
        found = native.digests([piece.ctypes.data + rows * piece.shape[1] for piece in pieces], lengths, outs)
    assert found.tolist() == digests_of(pieces, rows)
    for piece, out, memory in zip(pieces, outs, around, strict=True):
        assert np.array_equal(out, piece[rows])
        assert (memory[:first] == 7).all() and (memory[first + out.size :] == 7).all()


@given(LENGTHS, st.integers(0, 4), st.integers(0, 1000))
@example([1025], 2, 0)
def test_rows_that_differ_in_length_are_hashed_as_xxhash_hashes_them(lengths, count, seed):
    rng = np.random.default_rng(seed)
    sizes = [length + rng.integers(0, 3, count) for length in lengths]
    memory = rng.integers(0, 256, 4000, np.uint8)
    starts = [rng.integers(0, 900, count) for _ in lengths]
    found = native.digests([memory.ctypes.data + start for start in starts], sizes)
    rows = [[memory[a[i] : a[i] + n[i]] for a, n in zip(starts, sizes, strict=True)] for i in range(count)]
    assert found.tolist() == [xxhash.xxh3_64_intdigest(np.concatenate(row).tobytes()) for row in rows]


@pytest.mark.parametrize("num_bytes", [1000, 2 * native.HELD_BYTES])
def test_rows_in_memory_are_hashed_as_xxhash_hashes_them(num_bytes):
    rows = np.random.default_rng(0).integers(0, 256, (num_bytes // 500, 500), np.uint8)
    assert native.digests_in_memory([rows, rows[:, :0]]).tolist() == digests_of([rows], np.arange(len(rows)))


def test_a_cpu_without_vectors_hashes_as_one_that_has_them(tmp_path, monkeypatch):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    command = ["cc", "-DFASTLOAD_PLAIN", "-O1", "-std=gnu11", "-fPIC", "-shared", "-o", tmp_path / "plain.so"]
    subprocess.run([*command, Path(native.__file__).with_name("native.c"), "-ldl"], check=True)
    plain = ctypes.CDLL(str(tmp_path / "plain.so"))
    plain.fastload_digest.argtypes = native.library().fastload_digest.argtypes
    monkeypatch.setattr(native, "library", lambda: plain)
    for length in (241, 256, 257, 1023, 1024, 1025, 1088, 5000):
        rows = np.random.default_rng(length).integers(0, 256, (3, length), np.uint8)
        out = np.empty_like(rows)
        starts = rows.ctypes.data + length * np.arange(3)
        assert native.digests([starts], [length], [out]).tolist() == digests_of([rows], np.arange(3))
        assert np.array_equal(out, rows)


def digests_of(pieces: list[np.ndarray], rows: np.ndarray) -> list[int]:
    return [xxhash.xxh3_64_intdigest(b"".join(piece[row].tobytes() for piece in pieces)) for row in rows]


@given(
    n=st.one_of(st.integers(1, 2000), st.integers(1, 2**48)),
    size=st.sampled_from([0, 1, 7, 3 * native.HELD_VALUES]),
    seed=st.integers(0, 1000),
    function=st.sampled_from([permute, unpermute]),
    own_keys=st.booleans(),
)
def test_values_are_permuted_as_numpy_permutes_them(n, size, seed, function, own_keys):
    rng = np.random.default_rng(seed)
    positions, keys = rng.integers(0, n, size), rng.integers(0, 2**64, size, np.uint64)
    key = keys[::-1] if own_keys else int(rng.integers(0, 2**64, dtype=np.uint64))
    compiled = function(positions, n, key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "library", lambda: None)
        assert np.array_equal(compiled, function(positions, n, key))


def photo(height: int, width: int, channels: int, seed: int) -> np.ndarray:
    small = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    image = Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image if channels == 3 else image.convert("L")).reshape(height, width, channels)


def jpeg(pixels: np.ndarray, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0]).save(file, "JPEG", **options)
    return file.getvalue()


def shown(data: bytes, shape, window, factor: int = 1) -> tuple[np.ndarray, bool]:
    """The window of a JPEG, (h, w, C), and whether it was made; the window is in pixels shrunk by the factor."""
    output = np.zeros((1, *window[2:], shape[2]), np.uint8)
    sources = np.array([[0, len(data), *shape[:2], factor]])
    placed = np.array([[*window, *window[2:], 0, 0, 0, 0]])
    made, _ = native.make_images(np.frombuffer(data, np.uint8), sources, placed, output)
    return output[0], bool(made[0])


@needs_jpeg
@given(
    height=st.integers(1, 130),
    width=st.integers(1, 130),
    channels=st.sampled_from([1, 3]),
    subsampling=st.sampled_from([0, 1, 2]),
    progressive=st.booleans(),
    restarts=st.sampled_from([0, 1, 3]),
    factor=st.sampled_from([1, 1, 2, 4, 8]),
    data=st.data(),
)
def test_a_window_of_a_jpeg_has_the_pixels_of_the_whole(
    height, width, channels, subsampling, progressive, restarts, factor, data
):
    options = {"restart_marker_rows": restarts} if restarts else {}
    options |= {"subsampling": subsampling} if channels == 3 else {}
    encoded = jpeg(photo(height, width, channels, height), quality=88, progressive=progressive, **options)
    small = -(-height // factor), -(-width // factor)
    assume(factor == 1 or min(height, width) >= 16)  # simplejpeg may shrink small ones by another one of the same size
    top, left = data.draw(st.integers(0, small[0] - 1)), data.draw(st.integers(0, small[1] - 1))
    window = top, left, data.draw(st.integers(1, small[0] - top)), data.draw(st.integers(1, small[1] - left))
    pixels, made = shown(encoded, (height, width, channels), window, factor)
    whole = decode_part(encoded, JPEG, (height, width, channels), 1, (0, 0, height, width), factor)
    assert made and whole.factor == factor
    assert np.array_equal(pixels, whole.pixels[top : top + window[2], left : left + window[3]])


@needs_jpeg
@pytest.mark.parametrize("damage", ["truncated", "no end", "other size", "four colours", "no jpeg", "corrupt"])
def test_what_libjpeg_refuses_or_warns_of_is_not_made(damage):
    shape, encoded = (40, 50, 3), jpeg(photo(40, 50, 3, 0), quality=90)
    if damage == "truncated":
        encoded = encoded[: len(encoded) // 2]
    elif damage == "no end":
        encoded = encoded[:-2]
    elif damage == "other size":
        shape = (41, 50, 3)
    elif damage == "four colours":
        file = io.BytesIO()
        Image.fromarray(photo(40, 50, 3, 0)).convert("CMYK").save(file, "JPEG")
        encoded = file.getvalue()
    elif damage == "no jpeg":
        encoded = b"\x89PNG" + encoded[4:]
    else:
        middle = len(encoded) // 2
        encoded = encoded[:middle] + b"\xff\xd8" * 20 + encoded[middle + 40 :]
    assert not shown(encoded, shape, (0, 0, *shape[:2]))[1]


@needs_jpeg
def test_what_would_be_of_another_size_or_has_too_many_scans_is_not_made():
    for factor in (1, 2, 4, 8):
        size = -(-45 // factor), -(-71 // factor)
        for name, expected in (("sof0-8-11", True), ("sof2-8-221111", True), ("sof3-8-11", factor == 1)):
            assert shown(made(name), (45, 71, 1 if name.endswith("-11") else 3), (0, 0, *size), factor)[1] == expected
    for scans, expected in ((MAX_SCANS, True), (MAX_SCANS + 1, False)):
        assert shown(with_scans(scans), (16, 16, 1), (0, 0, 16, 16))[1] == expected


@needs_jpeg
def test_images_around_one_that_is_refused_are_made():
    images = [photo(30, 40, 3, seed) for seed in range(3)]
    good = [jpeg(image, quality=95, subsampling=0) for image in images]
    files = [good[0], good[1][:200], good[2]]
    begins = np.cumsum([0, *map(len, files[:-1])])
    sources = np.array([[begin, len(file), 30, 40, 1] for begin, file in zip(begins, files, strict=True)])
    sources = np.concatenate([sources, [[0, len(files[0]), 30, 40, -1]]])
    output = np.zeros((4, 30, 40, 3), np.uint8)
    windows = np.array([[0, 0, 30, 40, 30, 40, 0, 0, 0, 0]] * 4)
    made, decoding_s = native.make_images(np.frombuffer(b"".join(files), np.uint8), sources, windows, output)
    assert made.tolist() == [True, False, True, False] and decoding_s > 0
    for at in (0, 2):
        expected = decode_part(files[at], JPEG, (30, 40, 3), 1, (0, 0, 30, 40), 1).pixels
        assert np.array_equal(output[at], expected)


# Prints what of libjpeg's interface native.c has otherwise than jpeglib.h.
COMPARED = r"""
#include <stddef.h>
#include <stdio.h>
#include <jpeglib.h>
#include NATIVE

typedef struct jpeg_decompress_struct Theirs;
typedef struct jpeg_error_mgr TheirErrors;
typedef struct jpeg_progress_mgr TheirProgress;

static void equal(const char *what, size_t ours, size_t theirs)
{
    if (ours != theirs)
        printf("%s is %zu, not %zu\n", what, ours, theirs);
}

#define FIELD(ours, our, theirs, their) \
    equal("the place of " #their, offsetof(ours, our), offsetof(theirs, their)); \
    equal("the size of " #their, sizeof ((ours *)0)->our, sizeof ((theirs *)0)->their)
#define DECODER(name) FIELD(Decoder, name, Theirs, name)
#define ERRORS(name) FIELD(Errors, manager.name, TheirErrors, name)

int main(void)
{
    const Layout *expected = LAYOUTS;
    while (expected->version != JPEG_LIB_VERSION)
        expected++;
    equal("the decoder's size", expected->size, sizeof(Theirs));
    equal("progressive_mode", offsetof(Decoder, frame) + 4 * expected->progressive, offsetof(Theirs, progressive_mode));
    DECODER(err); DECODER(mem); DECODER(progress); DECODER(client_data); DECODER(src); DECODER(image_width);
    DECODER(image_height); DECODER(num_components); DECODER(jpeg_color_space); DECODER(out_color_space);
    DECODER(scale_num); DECODER(scale_denom); DECODER(output_gamma); DECODER(dct_method); DECODER(output_width);
    DECODER(output_height); DECODER(output_components); DECODER(colormap); DECODER(output_scanline);
    DECODER(input_scan_number); DECODER(data_precision); DECODER(comp_info);
    ERRORS(error_exit); ERRORS(emit_message); ERRORS(output_message); ERRORS(num_warnings); ERRORS(jpeg_message_table);
    ERRORS(last_jpeg_message); ERRORS(addon_message_table);
    equal("the errors' size", sizeof ((Errors *)0)->manager, sizeof(TheirErrors));
    equal("progress_monitor", offsetof(TheirProgress, progress_monitor), 0);
    equal("the progress's size", sizeof ((Errors *)0)->progress, sizeof(TheirProgress));
    equal("JCS_GRAYSCALE", GRAYSCALE, JCS_GRAYSCALE);
    equal("JCS_RGB", RGB, JCS_RGB);
    equal("JDCT_ISLOW", ISLOW, JDCT_ISLOW);
    equal("JPEG_HEADER_OK", HEADER_OK, JPEG_HEADER_OK);
    printf("compared version %d\n", JPEG_LIB_VERSION);
}
"""


@pytest.mark.parametrize("version", [62, 80])
def test_the_interface_of_libjpeg_is_as_its_header_has_it(version, tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler (cc) to read jpeglib.h with")
    # Found before the system's, which is of one version.
    settings = {"JPEG_LIB_VERSION": version, "BITS_IN_JSAMPLE": 8, "MEM_SRCDST_SUPPORTED": 1}
    (tmp_path / "jconfig.h").write_text("".join(f"#define {name} {value}\n" for name, value in settings.items()))
    (tmp_path / "compared.c").write_text(COMPARED)
    source = Path(native.__file__).with_name("native.c")
    words = [
        compiler,
        f'-DNATIVE="{source}"',
        "-I",
        tmp_path,
        "-o",
        tmp_path / "compared",
        tmp_path / "compared.c",
        "-lm",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if "jpeglib.h" in done.stderr:
        pytest.skip("needs jpeglib.h (Debian's libjpeg-dev) to compare with")
    assert done.returncode == 0, done.stderr
    said = subprocess.run([tmp_path / "compared"], capture_output=True, text=True, check=True).stdout
    assert said == f"compared version {version}\n"


# Refuses all versions but one, as jpeg_CreateDecompress does, and says in a message of what year it is.
OTHER_LIBJPEG = """
#include <stddef.h>
typedef struct { void (*error_exit)(void *); char skipped[128]; const char *const *messages; int last; } Errors;
static const char *const MESSAGES[] = {"no code", NULL, "Copyright (C) 1991-" YEAR " The libjpeg-turbo Project"};
void *jpeg_std_error(Errors *errors) { errors->messages = MESSAGES; errors->last = 2; return errors; }
void jpeg_CreateDecompress(void **info, int version, size_t size)
{
    if (version != VERSION || size != SIZE)
        (*(Errors **)info)->error_exit(info);
}
void jpeg_destroy_decompress(void) {}
void jpeg_mem_src(void) {} void jpeg_read_header(void) {} void jpeg_start_decompress(void) {}
void jpeg_read_scanlines(void) {} void jpeg_skip_scanlines(void) {} void jpeg_crop_scanline(void) {}
void jpeg_finish_decompress(void) {} void jpeg_abort_decompress(void) {}
"""


def test_a_libjpeg_of_another_interface_or_too_old_is_not_used(tmp_path):
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler (cc) to build other libraries with")
    (tmp_path / "other.c").write_text(OTHER_LIBJPEG)
    expected = {
        (62, 632, 2023): True,
        (80, 656, 2024): True,
        (62, 632, 2022): False,
        (62, 656, 2026): False,
        (70, 632, 2026): False,
        (90, 656, 2026): False,
    }
    paths = [tmp_path / f"{version}-{size}-{year}.so" for version, size, year in expected]
    for path, (version, size, year) in zip(paths, expected, strict=True):
        words = [f"-DVERSION={version}", f"-DSIZE={size}", f'-DYEAR="{year}"', "-shared", "-fPIC", "-o", path]
        subprocess.run(["cc", *words, tmp_path / "other.c"], check=True)
    # In a process of its own, since a library that is used stays in use.
    code = "import sys; from fastload.system import native; print([native._uses_jpeg(path) for path in sys.argv[1:]])"
    words = [sys.executable, "-c", code, *map(str, paths), "libm.so.6", str(tmp_path / "none.so")]
    said = subprocess.run(words, env=child_environment(), capture_output=True, text=True, check=True).stdout
    assert said.strip() == str([*expected.values(), False, False])
    if native.decodes_jpeg():  # here none is taken that is refused, in the place of the one in use
        assert not any(native._uses_jpeg(str(paths[number])) for number in (2, 3))
        assert shown(jpeg(photo(40, 50, 3, 0), quality=90), (40, 50, 3), (0, 0, 40, 50))[1]


def test_a_library_of_another_release_is_not_used(monkeypatch, caplog):
    native.library.cache_clear()
    monkeypatch.setattr(native, "_VERSION", 0)
    try:
        assert native.library() is None
        assert "another release" in caplog.text
    finally:
        native.library.cache_clear()


def test_what_is_there_is_said_in_words(monkeypatch):
    assert native.described().startswith("built")
    monkeypatch.setattr(native, "decodes_jpeg", lambda: False)
    assert "without JPEG decoding" in native.described()
    monkeypatch.setattr(native, "library", lambda: None)
    assert native.described().startswith("none: ")
