"""What commands advise is tried: on a file that provokes it, it is done as it says, and then it is gone, or better."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import nullcontext
from importlib.metadata import packages_distributions
from pathlib import Path

import h5py
import numpy as np
import pytest
from advised import given, hear, models, tries
from commands import run
from PIL import Image
from running_server import serving
from small_files import random_pixels, write_random

import fastload
from fastload.errors import FastloadError
from fastload.pack import survey
from fastload.system import native
from fastload.system.advice import ADVICE
from sample_files import write_ragged

TESTS, PACKAGE = Path(__file__).resolve().parents[1], Path(fastload.__file__).parent


# --- there is a test for each, and no advice elsewhere ----------------------------------------------------------------


_MARKS = ("tries", "models", "modelled")


def test_every_advice_is_tried_by_a_test_or_modelled():
    found = set[str]()
    for path in TESTS.rglob("test_*advice.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _MARKS:
                found |= {ast.literal_eval(name) for name in node.args}
    assert found == ADVICE.keys()


ELSEWHERE = {
    "rivals.py": "the name of what is compared",
    "chunk_layout.py": "options that fit the file, for the advice `repack`",
    "replacement.py": "the lines to type, which tests/profiling/doctor/test_what_to_type.py types",
    "search.py": "the call to paste, which tests/profiling/tune/test_search.py evaluates",
}
_TO_TYPE = re.compile(
    r"`fastload \w|`--\w|(?<!\w)--[a-z]{2}|(?:Remote|FastLoader|DataLoader)\(|pip install|\brun it again"
)
_NOT_SHOWN = (
    "Option",
    "Argument",
    "Commands",
    "UsageError",
    "BadParameter",
    "local_path",
    "of_file_options",
)  # help, and errors


def shown_texts(path: Path) -> list[str]:
    """Texts of a module that are no docstring, no help and no part of an error."""
    tree = ast.parse(path.read_text())
    left_out = set[ast.AST]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(node.value)
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Raise) or name.endswith("Error") or name in (*_NOT_SHOWN, "print_error", "advice"):
            left_out |= set(ast.walk(node))
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out
    ]


def test_what_is_to_be_typed_stands_in_the_table_of_advice():
    for package in ("cli", "inspection", "profiling", "estimate"):
        for path in sorted((PACKAGE / package).rglob("*.py")):
            names = [text for text in shown_texts(path) if _TO_TYPE.search(text)]
            if path.parent.name != "cli" or path.name not in ("__init__.py", "command_line.py", "arguments.py"):
                assert not names or path.name in ELSEWHERE, f"{path}: {names}"


def test_notes_of_the_packer_that_name_options_stand_in_the_table_of_advice():
    for package in ("pack", "sources"):
        for path in sorted((PACKAGE / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
                if name.endswith(("notes.append", ".note")):
                    assert not re.search(r"`--|`fastload (?!export` left)", ast.unparse(node)), (
                        f"{path}: {ast.unparse(node)}"
                    )


# --- fastload info ----------------------------------------------------------------------------------------------------


def pack(*words, code=0):
    return run("pack", *words, "--workers", 0, code=code).output


def verify(*words, code=0):
    return run("verify", *words, "--workers", 0, code=code)


def info(path, *words):
    return run("info", path, *words).stdout


def layout(path):
    return json.loads(info(path, "--json"))["layout"]


def findings(path):
    return json.loads(info(path, "--json"))["findings"]


def foreign(path, images, **options):
    with h5py.File(path, "w") as file:
        file.create_dataset("images", data=images, **options)
        file["labels"] = np.arange(len(images)) % 3
    return path


def noise(rows, *shape):
    return random_pixels(rows, shape)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda path: foreign(path, noise(40, 32, 24, 3), chunks=(8, 31, 24, 3)), id="cut"),
        pytest.param(lambda path: foreign(path, noise(40, 3, 32, 24), chunks=(8, 3, 31, 24)), id="channels first"),
        pytest.param(
            lambda path: foreign(path, noise(40, 32, 24, 3), chunks=(8, 32, 24, 3), compression="gzip"), id="gzip"
        ),
        pytest.param(lambda path: foreign(path, noise(1200, 8, 8, 3), chunks=(1, 8, 8, 3)), id="tiny"),
        pytest.param(lambda path: write_random(path, rows=1200, size=(8, 8, 3), chunk_rows=1), id="tiny, packed"),
        pytest.param(lambda path: foreign(path, noise(33, 512, 512, 3), chunks=(32, 512, 512, 3)), id="large, padded"),
    ],
)  # fmt: skip
@tries("repack")
def test_a_file_that_is_repacked_as_advised_has_no_findings(make, tmp_path):
    path = make(tmp_path / "a.h5")
    words = shlex.split(hear("repack", info(path))["options"])
    run("repack", path, tmp_path / "b.h5", *words)
    assert findings(tmp_path / "b.h5") == []


@tries("repack compressed")
def test_a_compressed_file_that_is_repacked_as_advised_decodes_less_for_an_image(tmp_path):
    images = np.repeat(noise(512, 16, 1, 3), 16, axis=2)
    own, packed = foreign(tmp_path / "a.h5", images, chunks=(256, 16, 16, 3), compression="gzip"), tmp_path / "p.h5"
    run("repack", own, packed, "--codec", "gzip", "--chunk-bytes", "192K")
    for path in (own, packed):
        before, found = layout(path), hear("repack compressed", info(path))
        run("repack", path, tmp_path / "less.h5", *shlex.split(found["options"]), "--overwrite")
        after = layout(tmp_path / "less.h5")
        assert after["compressed"] and after["decoded_bytes_per_image"] < before["decoded_bytes_per_image"] / 2
        run("repack", path, tmp_path / "plain.h5", "--codec", "none", "--overwrite")
        assert findings(tmp_path / "plain.h5") == []
        grown = layout(tmp_path / "plain.h5")["stored_bytes"] / before["stored_bytes"]
        assert grown == pytest.approx(float(found["growth"]), rel=0.1)


@tries("pack images again", "uint8")
def test_images_that_are_packed_again_as_advised_are_uint8_without_findings(image_folder, tmp_path):
    source, path = image_folder(), tmp_path / "a.h5"
    images = np.stack([np.asarray(Image.open(file)) for file in sorted(source.rglob("*.jpg"))])
    foreign(path, images.astype(np.float32) / 255)
    text = info(path)
    hear("uint8", text)
    hear("pack images again", text)
    pack(source, tmp_path / "b.h5", "--no-shuffle")
    assert (
        findings(tmp_path / "b.h5") == []
        and layout(path)["pixel_bytes"] == 4 * layout(tmp_path / "b.h5")["pixel_bytes"]
    )
    pytest.importorskip("torch")
    loader = fastload.FastLoader(
        tmp_path / "b.h5", 20, shuffle=False, transform=[fastload.transforms.Normalize([0.0] * 3, [1.0] * 3)]
    )
    assert np.allclose(next(iter(loader))[0].permute(0, 2, 3, 1), images / 255, atol=1e-6)


def test_what_packing_again_would_not_change_is_explained_and_no_finding(tmp_path):
    path = write_random(tmp_path / "a.h5", rows=4300, size=(32, 32, 3), below=2)  # a chunk and a half
    text = " ".join(info(path).split())
    assert layout(path)["stored_bytes"] > 1.2 * layout(path)["pixel_bytes"] and findings(path) == []
    assert "2 of 2,730 images (8.0 MiB), each stored in full, the last 58% filled" in text and "repack" not in text
    run("repack", path, tmp_path / "b.h5", "--codec", "none")
    assert layout(tmp_path / "b.h5")["stored_bytes"] == layout(path)["stored_bytes"]


@tries("stores")
def test_size_and_rate_of_other_stores_are_shown_as_advised(packed):
    hear("stores", info(packed))
    text = info(packed, "--stores")
    assert given("stores", text) is None and "jpeg:90" in text and "pick" in text


@tries("verify shards")
def test_a_missing_shard_is_found_as_advised(image_folder, tmp_path):
    pack(image_folder(), tmp_path / "a.h5", "--shards", 2)
    hear("verify shards", info(tmp_path / "a.h5"))
    assert "every digest matches" in verify(tmp_path / "a.h5").stdout
    sorted(tmp_path.glob("a-*.h5"))[0].unlink()
    assert "is missing" in verify(tmp_path / "a.h5", code=1).stderr


@tries("pread")
def test_a_loader_that_reads_as_advised_survives_a_truncated_file(packed_copy):
    pytest.importorskip("torch")
    with open(packed_copy, "r+b"):  # who writes to it keeps us from holding writers off
        hear("pread", info(packed_copy))
    loader = fastload.FastLoader(fastload.PackedDataset(packed_copy, read="pread"), 4)
    os.truncate(packed_copy, 4096)
    with pytest.raises(FastloadError):
        list(loader)


@tries("cache list")
def test_what_the_cache_has_of_a_url_is_listed_as_advised(packed_copy, tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "served").mkdir()
    packed_copy.rename(tmp_path / "served" / "a.h5")
    with serving(tmp_path / "served") as server:
        hear("cache list", info(f"{server.url}/a.h5"))
        assert f"{server.url}/a.h5" in run("cache", "list").stdout


@tries("clear cache", "room of the cache")
def test_the_cache_is_cleared_and_bounded_as_advised(packed_copy, tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "served").mkdir()
    packed_copy.rename(tmp_path / "served" / "a.h5")
    with serving(tmp_path / "served") as server:
        url = f"{server.url}/a.h5"
        dataset = fastload.PackedDataset(url, remote=fastload.Remote(max_bytes="64MiB"))
        dataset[0]
        dataset.file.remote.close()
        hear("room of the cache", run("cache", "list").stdout)
        for header in (tmp_path / "cache").glob("1/*/a.h5"):
            header.write_bytes(bytes(header.stat().st_size))
        found = hear("clear cache", run("cache", "verify", code=1).stdout)
        run("cache", "clear", found["url"])
        assert "holds no dataset" in run("cache", "verify").stdout + run("cache", "list").stdout
        again = fastload.PackedDataset(url)
        assert again[0] is not None
        again.file.remote.close()


READ = "import sys, h5py; print(h5py.File(sys.argv[1])['images'][0].sum())"


@tries("hdf5plugin", "zstandard")
def test_other_programs_read_compressed_rows_with_the_advised_packages(packed_copy, tmp_path):
    pytest.importorskip("hdf5plugin")
    zstandard = pytest.importorskip("zstandard")
    run("repack", packed_copy, tmp_path / "b.h5", "--codec", "zstd")
    hear("hdf5plugin", info(tmp_path / "b.h5"))
    for code, works in ((READ, False), (f"import hdf5plugin; {READ}", True)):
        done = subprocess.run([sys.executable, "-c", code, tmp_path / "b.h5"], capture_output=True, text=True)
        assert (done.returncode == 0) == works, done.stderr
    sizes = [(40, 50), (30, 60)]
    for number, size in enumerate(sizes):
        (tmp_path / "photos" / "a").mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, number * 99).save(tmp_path / "photos" / "a" / f"{number}.png")
    pack(tmp_path / "photos", tmp_path / "c.h5", "--codec", "zstd", "--layout", "folder", "--no-shuffle")
    hear("zstandard", info(tmp_path / "c.h5"))
    with h5py.File(tmp_path / "c.h5") as file:
        first, length = int(file["images_offset"][0]), int(file["images_bytes"][0])
        row = zstandard.ZstdDecompressor().decompress(file["images"][first : first + length].tobytes())
    assert len(row) == 40 * 50 * 3 and set(row) == {0}


@tries("more fields")
def test_all_fields_are_listed_as_advised(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for number in range(50):
            file[f"field{number}"] = np.zeros(3)
    assert hear("more fields", info(tmp_path / "a.h5")) == {"count": "10"}
    assert len(json.loads(info(tmp_path / "a.h5", "--json"))["fields"]) == 50


# --- fastload verify --------------------------------------------------------------------------------------------------


@tries("damaged", "more damage")
def test_a_damaged_file_is_whole_when_it_is_copied_or_packed_again_as_advised(image_folder, tmp_path):
    source, path, kept = image_folder(per_class=60), tmp_path / "a.h5", tmp_path / "kept.h5"
    pack(source, path)
    kept.write_bytes(path.read_bytes())
    with h5py.File(path, "r+") as file:
        file["images"][:] ^= 1
    result = verify(path, code=1)
    hear("damaged", result.stderr)
    assert hear("more damage", result.stdout) == {"count": "20"}
    assert len(json.loads(verify(path, "--json", code=1).stdout)["damaged"]) == 120
    path.write_bytes(kept.read_bytes())
    verify(path)
    pack(source, path, "--overwrite")
    verify(path, "--source", source)


@tries("source changed")
def test_a_file_is_as_its_changed_source_when_it_is_packed_again_as_advised(image_folder, tmp_path):
    source = image_folder()
    pack(source, tmp_path / "a.h5")
    first, *_, last = sorted(source.rglob("*.jpg"))
    first.write_bytes(last.read_bytes())
    hear("source changed", verify(tmp_path / "a.h5", "--source", source, code=1).stderr)
    pack(source, tmp_path / "a.h5", "--overwrite")
    verify(tmp_path / "a.h5", "--source", source)


@tries("joined")
def test_the_rows_of_each_source_are_compared_as_advised(image_folder, tmp_path):
    sources = [image_folder(name=name, classes=(name,), seed=seed) for seed, name in enumerate("ab")]
    for source in sources:
        pack(source, f"{source}.h5", "--layout", "folder")
    run("merge", *(f"{source}.h5" for source in sources), "-o", tmp_path / "both.h5")
    for source in sources:
        text = verify(tmp_path / "both.h5", "--source", source).stdout
        hear("joined", text)
        assert "10 of 10 images decode to exactly the packed pixels" in text


# --- fastload bench and fastload tune ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def varied(tmp_path_factory):
    """A packed file of images that differ in size."""
    rows = [np.full((40 + i % 3, 50, 3), i, np.uint8) for i in range(64)]
    return write_ragged(tmp_path_factory.mktemp("varied") / "a.h5", rows)


def bench(*words):
    pytest.importorskip("torch")
    return run("bench", *words).stdout


def tune(*words):
    pytest.importorskip("torch")
    return run("tune", *words).stdout


@tries("another size")
def test_images_are_cropped_to_the_size_that_was_given_as_advised(varied):
    hear("another size", bench(varied, "--seconds", 0.1))
    text = bench(varied, "--seconds", 0.1, "--size", 32)
    assert given("another size", text) is None and "RandomResizedCrop(32) makes them 32 x 32" in text


@tries("seconds for faults")
def test_reads_are_delayed_when_there_are_more_seconds_as_advised(packed):
    words = [packed, "--inject", "stall=1@100", "--batch-size", 4]
    seconds, text = 0.01, bench(*words, "--seconds", 0.01)
    hear("seconds for faults", text)
    while given("seconds for faults", text) is not None and seconds < 60:
        seconds *= 4
        text = bench(*words, "--seconds", seconds)
    assert "reads delayed by" in text


@tries("nvidia-ml-py")
def test_the_advised_package_is_the_one_that_reads_gpus(monkeypatch):
    from fastload.profiling.meter.sampler import Gpus

    with monkeypatch.context() as without:
        without.setitem(sys.modules, "pynvml", None)
        hear("nvidia-ml-py", Gpus().absent["gpu"])
    pytest.importorskip("pynvml")
    assert "nvidia-ml-py" in packages_distributions()["pynvml"]
    assert given("nvidia-ml-py", Gpus().absent.get("gpu", "")) is None


@tries("import crop")
def test_the_call_to_paste_works_with_the_import_that_is_advised(varied):
    text = tune(varied, "--seconds", 0.3)
    hear("import crop", text)
    names: dict[str, object] = {"FastLoader": fastload.FastLoader, "PackedDataset": fastload.PackedDataset}
    exec("from fastload.transforms import RandomResizedCrop", names)
    loader = eval(text.splitlines()[-1].strip(), names)
    assert next(iter(loader))[0].shape[2:] == (224, 224)


@tries("seconds for candidates")
def test_all_candidates_run_when_there_are_more_seconds_as_advised(packed):
    seconds, text = 0.01, tune(packed, "--seconds", 0.01)
    hear("seconds for candidates", text)
    while given("seconds for candidates", text) is not None and seconds < 120:
        seconds *= 6
        text = tune(packed, "--seconds", seconds)
    assert given("seconds for candidates", text) is None


@models("other programs")
def test_rows_without_other_programs_are_the_machines_figures(packed, monkeypatch):
    pytest.importorskip("torch")
    from fastload.profiling.tune import search

    class Others:
        """What other programs use, which this machine decides otherwise."""

        cpus: float | None = None
        measured = nullcontext

    monkeypatch.setattr(search, "OthersCpus", Others)
    for Others.cpus in (1.0, 0.0):
        text = tune(packed, "--seconds", 0.3)
        if Others.cpus:
            hear("other programs", text)
    assert given("other programs", text) is None


@tries("tune again")
def test_a_search_that_is_run_again_as_advised_reads_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FASTLOAD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "served").mkdir()
    write_random(tmp_path / "served" / "a.h5", rows=96)
    with serving(tmp_path / "served") as server:
        url = f"{server.url}/a.h5"
        assert hear("tune again", tune(url, "--seconds", 0.3))["url"] == url
        assert given("tune again", tune(url, "--seconds", 0.3)) is None
        assert "\n  network " in bench(url, "--seconds", 0.1)


# --- fastload pack ----------------------------------------------------------------------------------------------------


def save(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(pixels)).save(path, **options)


def pairs(root, masks, side):
    """A folder of images and these masks."""
    for number, mask in enumerate(masks):
        save(root / "images" / f"{number:02}.png", np.full((*side, 3), number, np.uint8))
        save(root / "masks" / f"{number:02}.png", mask)
    return root


@pytest.fixture
def warned(tmp_path):
    """A folder of three JPEGs, of which libjpeg warns of the last."""
    for number in range(3):
        save(tmp_path / "photos" / "a" / f"{number}.jpg", noise(120, 120, 3)[:, :], quality=95)
    last = tmp_path / "photos" / "a" / "2.jpg"
    data = last.read_bytes()
    last.write_bytes(data[: len(data) // 2] + bytes(4096) + data[len(data) // 2 + 4096 :])
    return tmp_path / "photos"


@tries("strict", "strict for kept JPEGs")
def test_jpegs_that_libjpeg_warns_of_are_left_out_as_advised(warned, tmp_path):
    for name, words in (("strict", []), ("strict for kept JPEGs", ["--store", "source"])):
        asked = (warned, tmp_path / "a.h5", "--layout", "folder", "--overwrite", *words)
        hear(name, pack(*asked))
        text = pack(*asked, *shlex.split(re.search(r"`(--strict[^`]*)`", ADVICE[name])[1]))
        assert given(name, text) is None and "packed 2 images" in text and "skipped" in text


@tries("overwrite")
def test_an_output_is_replaced_as_advised(image_folder, tmp_path):
    asked = (image_folder(), tmp_path / "a.h5")
    pack(*asked)
    hear("overwrite", pack(*asked, "--dry-run"))
    pack(*asked, code=1)
    assert given("overwrite", pack(*asked, "--dry-run", "--overwrite")) is None
    pack(*asked, "--overwrite")


@tries("store source")
def test_jpegs_take_less_room_when_they_are_kept_as_advised(tmp_path):
    for number in range(8):
        save(tmp_path / "photos" / "ab"[number % 2] / f"{number}.jpg", np.full((200, 200, 3), number * 9, np.uint8))
    text = pack(tmp_path / "photos", tmp_path / "a.h5")
    times = float(hear("store source", text)["times"])
    assert given("store source", pack(tmp_path / "photos", tmp_path / "b.h5", "--store", "source")) is None
    ours, theirs = (json.loads(info(tmp_path / name, "--json")) for name in ("b.h5", "a.h5"))
    assert theirs["pixel_bytes"] / ours["stores"]["images"]["stored_bytes"] == pytest.approx(times, rel=0.05)
    text = pack(tmp_path / "photos", "--dry-run")
    assert re.search(r"^  source .* 8 jpeg$", text, re.MULTILINE) and re.search(r"^  raw ", text, re.MULTILINE)


@tries("undecodable")
def test_images_that_could_not_be_decoded_are_named_as_advised(image_folder, tmp_path):
    source = image_folder(size=(60, 60))
    for path in sorted(source.rglob("*.jpg"))[3:15]:
        path.write_bytes(path.read_bytes()[:700])
    hear("undecodable", pack(source, "--dry-run"))
    assert "12 of 20 images cannot be read: " in pack(source, tmp_path / "a.h5", code=1)
    pack(source, tmp_path / "a.h5", "--on-error", "skip")
    assert len((tmp_path / "a.h5.skipped.csv").read_text().splitlines()) == 1 + 12


def regions(side, count=20):
    mask = np.repeat(np.arange(side, dtype=np.uint8)[:, None] // 16, side, axis=1)
    return [np.roll(mask, number, axis=0) for number in range(count)]


@tries("zlib-ng")
def test_zlib_ng_is_used_where_it_is_installed_as_advised(tmp_path, monkeypatch):
    source = pairs(tmp_path / "s", regions(300), (300, 300))
    for has in (False, True):  # tests/format/test_chunk_filters.py has it inflate
        monkeypatch.setattr(survey, "has_zlib_ng", lambda has=has: has)
        text = pack(source, tmp_path / "a.h5", "--overwrite")
        assert "compressed with gzip" in text
        assert has or hear("zlib-ng", text) == {}
    assert given("zlib-ng", text) is None


@tries("zstandard for masks", "zstandard to read")
def test_masks_of_several_sizes_are_compressed_and_read_with_zstandard_as_advised(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    masks = [mask[: 280 + number] for number, mask in enumerate(regions(300))]
    for number, mask in enumerate(masks):
        save(tmp_path / "s" / "images" / f"{number:02}.png", np.zeros((*mask.shape, 3), np.uint8))
        save(tmp_path / "s" / "masks" / f"{number:02}.png", mask)
    with monkeypatch.context() as without:
        without.setattr(survey, "has_zstd", lambda: False)
        hear("zstandard for masks", pack(tmp_path / "s", tmp_path / "a.h5"))
    text = pack(tmp_path / "s", tmp_path / "a.h5", "--overwrite", "--no-shuffle")
    hear("zstandard to read", text)
    assert given("zstandard for masks", text) is None
    with h5py.File(tmp_path / "a.h5") as file:
        first, length = int(file["masks_offset"][0]), int(file["masks_bytes"][0])
        row = zstandard.ZstdDecompressor().decompress(file["masks"][first : first + length].tobytes())
    assert row == masks[0].tobytes()


@tries("gzip for masks")
def test_masks_that_are_compressed_with_gzip_as_advised_need_no_other_package(tmp_path):
    pytest.importorskip("zstandard")
    # What comes again after more than 32 KiB, zstd finds and gzip does not.
    masks = [np.tile(np.random.default_rng(n).integers(0, 200, (100, 400), np.uint8), (4, 1)) for n in range(8)]
    source = pairs(tmp_path / "s", masks, (400, 400))
    hear("gzip for masks", pack(source, tmp_path / "a.h5"))
    text = pack(source, tmp_path / "b.h5", "--codec", "gzip")
    assert given("gzip for masks", text) is None
    needs = [json.loads(info(tmp_path / name, "--json"))["needs"] for name in ("a.h5", "b.h5")]
    assert "masks" in needs[0] and needs[1] == {}


@tries("long")
def test_masks_of_many_numbers_are_taken_by_a_loss_as_advised(tmp_path):
    torch = pytest.importorskip("torch")
    masks = [np.full((8, 8), 300 + number, np.uint16) for number in range(4)]
    hear("long", pack(pairs(tmp_path / "s", masks, (8, 8)), tmp_path / "a.h5"))
    dataset = fastload.PackedDataset(tmp_path / "a.h5", fields=("images", "masks"))
    _, masks = next(iter(fastload.FastLoader(dataset, 4)))
    scores = torch.zeros(4, 400, 8, 8)
    with pytest.raises(RuntimeError):
        torch.nn.functional.cross_entropy(scores, masks)
    assert torch.nn.functional.cross_entropy(scores, masks.long()) > 0


@tries("shards of a plan")
def test_the_shards_of_a_plan_are_packed_as_advised(image_folder, tmp_path):
    text = pack(image_folder(), tmp_path / "out a.h5", "--shards", 2, "--plan")
    last = int(hear("shards of a plan", text)["last"])
    lines = [line.strip() for line in text.splitlines() if line.startswith("  fastload ")]
    for number in range(last + 1):
        run(*shlex.split(re.sub(r"\bI$", str(number), lines[0]))[1:])
    run(*shlex.split(lines[1])[1:])
    assert "20 rows" in verify(tmp_path / "out a.h5").stdout


def fields_of(path):
    return json.loads(info(path, "--json"))["fields"]


@tries("labels", "image column")
def test_columns_of_a_table_are_taken_as_advised(tmp_path):
    for number, name in enumerate(("a.png", "b.png", "c.png", "d.png")):
        save(tmp_path / "s" / name, np.full((8, 8, 3), number, np.uint8))
    table = tmp_path / "s" / "t.csv"
    table.write_text("image,x,y\na.png,3,5\nb.png,4,6\n")
    hear("labels", pack(table, tmp_path / "a.h5"))
    assert given("labels", pack(table, tmp_path / "b.h5", "--labels", "y")) is None
    assert ["labels" in fields_of(tmp_path / name) for name in ("a.h5", "b.h5")] == [False, True]
    table.write_text("image,other,label\na.png,c.png,0\nb.png,d.png,1\n")
    hear("image column", pack(table, tmp_path / "c.h5"))
    pack(table, tmp_path / "d.h5", "--image-column", "other", "--no-shuffle")
    with h5py.File(tmp_path / "d.h5") as file:
        assert file["images"][:, 0, 0, 0].tolist() == [2, 3]


@tries("labels of their own", "boxes in a cell")
def test_labels_and_boxes_of_a_table_are_read_as_advised(tmp_path):
    for number in range(30):
        save(tmp_path / "s" / f"{number}.png", np.full((8, 16, 3), number, np.uint8))
    table = tmp_path / "s" / "t.csv"
    table.write_text("image,label,kind\n" + "".join(f"{n}.png,{n + 7},{n % 2}\n" for n in range(30)))
    hear("labels of their own", pack(table, tmp_path / "a.h5", "--no-shuffle"))
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["labels"].dtype == np.int64 and file["labels"][:].tolist() == list(range(7, 37))
    assert given("labels of their own", pack(table, tmp_path / "b.h5", "--labels", "kind")) is None
    table.write_text("image_id,bbox\n" + "".join(f'{n},"[2, 1, 4, 5]"\n' for n in range(30)))
    boxes = []
    for words in ([], ["--boxes", "xyxy"]):
        hear("boxes in a cell", pack(table, tmp_path / "c.h5", "--overwrite", *words))
        with h5py.File(tmp_path / "c.h5") as file:
            boxes.append(file["bbox"].attrs["names"].tolist())
    assert boxes == [[b"x", b"y", b"width", b"height"], [b"xmin", b"ymin", b"xmax", b"ymax"]]


@tries("masks of VOC")
def test_all_images_of_voc_are_listed_as_advised(tmp_path):
    year = tmp_path / "VOCdevkit" / "VOC2012"
    for stem in ("2007_1", "2007_2"):
        save(year / "JPEGImages" / f"{stem}.jpg", np.zeros((6, 8, 3), np.uint8))
    save(year / "SegmentationClass" / "2007_1.png", np.ones((6, 8), np.uint8))
    for name, text in {"Segmentation/train": "2007_1", "Main/train": "2007_1\n2007_2"}.items():
        path = year / "ImageSets" / f"{name}.txt"
        path.parent.mkdir(parents=True)
        path.write_text(f"{text}\n")
    hear("masks of VOC", pack(tmp_path / "VOCdevkit", tmp_path / "a.h5"))
    assert given("masks of VOC", pack(tmp_path / "VOCdevkit", tmp_path / "b.h5", "--masks", "none")) is None
    counts = [json.loads(info(tmp_path / name, "--json"))["num_samples"] for name in ("a.h5", "b.h5")]
    assert counts == [1, 2]


@tries("image column of Parquet")
def test_the_column_of_a_parquet_file_is_packed_as_advised(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    def images(*values):
        files = []
        for value in values:
            file = io.BytesIO()
            Image.new("RGB", (8, 8), value).save(file, "PNG")
            files.append({"bytes": file.getvalue(), "path": f"{value}.png"})
        return pa.array(files, pa.struct({"bytes": pa.binary(), "path": pa.string()}))

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"left": images(1, 2), "right": images(3, 4), "label": [0, 1]}), path)
    hear("image column of Parquet", pack(path, tmp_path / "a.h5"))
    pack(path, tmp_path / "b.h5", "--image-column", "right", "--no-shuffle")
    with h5py.File(tmp_path / "b.h5") as file:
        assert file["images"][:, 0, 0, 0].tolist() == [3, 4]


@tries("mask files")
def test_the_masks_of_a_folder_are_chosen_as_advised(tmp_path):
    for number in range(4):
        save(tmp_path / "s" / "images" / f"{number}.png", np.zeros((8, 8, 3), np.uint8))
        for value, kind in enumerate(("semantic_masks", "instance_masks"), 1):
            save(tmp_path / "s" / kind / f"{number}.png", np.full((8, 8), value, np.uint8))
    hear("mask files", pack(tmp_path / "s", tmp_path / "a.h5"))
    pack(tmp_path / "s", tmp_path / "b.h5", "--mask-files", "instance_masks/*")
    values = []
    for name in ("a.h5", "b.h5"):
        with h5py.File(tmp_path / name) as file:
            values.append(np.unique(file["masks"][()]).tolist())
    assert values == [[1], [2]]


@tries("palette", "other palette")
def test_masks_of_colours_are_packed_by_a_palette_as_advised(tmp_path):
    colours = np.zeros((8, 8, 3), np.uint8)
    colours[:4] = (128, 0, 0)
    source = pairs(tmp_path / "s", [colours] * 4, (8, 8))
    hear("palette", pack(source, "--dry-run"))
    palette = tmp_path / "classes.txt"
    palette.write_text("128,0,0,building\n0,0,0,void\n")
    pack(source, tmp_path / "a.h5", "--palette", palette)
    (source / "class_dict.csv").write_text("name,r,g,b\nhouse,128,0,0\nnothing,0,0,0\n")
    text = pack(source, tmp_path / "b.h5")
    hear("other palette", text)
    pack(source, tmp_path / "c.h5", "--palette", palette, "--ignore-index", "void")
    names = [json.loads(info(tmp_path / name, "--json"))["mask_names"] for name in ("a.h5", "b.h5", "c.h5")]
    assert names[:2] == [["building", "void"], ["house", "nothing"]] and "building" in names[2]
    assert json.loads(info(tmp_path / "c.h5", "--json"))["mask_ignored"] is not None


@tries("panoptic", "masks of objects")
def test_masks_of_coco_are_packed_as_advised(tmp_path):
    root, name = tmp_path / "coco", "000000000009"
    save(root / "train2017" / f"{name}.jpg", np.zeros((10, 16, 3), np.uint8))
    save(root / "annotations" / "panoptic_train2017" / f"{name}.png", np.full((10, 16, 3), (7, 0, 0), np.uint8))
    said = {
        "images": [{"id": 9, "file_name": f"{name}.jpg", "height": 10, "width": 16}],
        "categories": [{"id": 18, "name": "dog", "isthing": 1}],
    }
    common = {"category_id": 18, "iscrowd": 0, "area": 16, "bbox": [2, 2, 4, 4]}
    drawn = {**common, "id": 1, "image_id": 9, "segmentation": [[2, 2, 6, 2, 6, 6, 2, 6]]}
    (root / "annotations" / "instances_train2017.json").write_text(json.dumps({**said, "annotations": [drawn]}))
    shown = {"image_id": 9, "file_name": f"{name}.png", "segments_info": [{**common, "id": 7}]}
    (root / "annotations" / "panoptic_train2017.json").write_text(json.dumps({**said, "annotations": [shown]}))
    text = pack(root, tmp_path / "a.h5")
    hear("panoptic", text)
    hear("masks of objects", text)
    assert "masks" not in fields_of(tmp_path / "a.h5")
    for masks in ("panoptic", "semantic", "instance"):
        text = pack(root, tmp_path / f"{masks}.h5", "--masks", masks)
        assert "masks" in fields_of(tmp_path / f"{masks}.h5") and given("masks of objects", text) is None


# --- the machine ------------------------------------------------------------------------------------------------------


@pytest.fixture
def unbuilt(monkeypatch):
    """Fastload as it is installed without a C compiler, and nothing was said yet."""
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "decodes_jpeg", lambda: False)
    monkeypatch.setattr(native, "_said", False)
    monkeypatch.delenv("FASTLOAD_NATIVE", raising=False)


def kept_jpegs(image_folder, path):
    pack(image_folder(size=(40, 50)), path, "--store", "source")
    return path


@tries("compiled loops")
def test_the_slow_path_is_said_once_by_the_first_loader_that_is_slow_and_by_bench_and_version(
    unbuilt, packed, varied, caplog, monkeypatch
):
    pytest.importorskip("torch")
    fastload.FastLoader(packed, 4)  # copies rows
    assert caplog.text == ""
    crop = [fastload.transforms.RandomResizedCrop(8)]
    for _ in range(2):
        fastload.FastLoader(varied, 4, transform=crop)
        fastload.FastLoader(packed, 4, transform=crop)
    [record] = caplog.records
    hear("compiled loops", record.getMessage())
    assert record.levelname == "WARNING"
    hear("compiled loops", bench(varied, "--seconds", 0.1))
    assert len(caplog.records) == 1
    # The results of a benchmark say it for themselves; a loader that is made after it is told of.
    monkeypatch.setattr(native, "_said", False)
    bench(varied, "--seconds", 0.1)
    assert len(caplog.records) == 1
    fastload.FastLoader(varied, 4, transform=crop)
    assert caplog.records.pop().getMessage() == record.getMessage()
    assert "compiled loops none: installed without a C compiler" in run("--version").output
    # Where somebody left them out on purpose, nothing is to be installed.
    monkeypatch.setenv("FASTLOAD_NATIVE", "0")
    monkeypatch.setattr(native, "_said", False)
    fastload.FastLoader(varied, 4, transform=crop)
    assert (
        "FASTLOAD_NATIVE=0 is set" in caplog.records[1].getMessage() and "install" not in caplog.records[1].getMessage()
    )
    assert "compiled loops none: FASTLOAD_NATIVE=0 is set" in run("--version").output


def test_why_images_are_made_slowly_is_not_looked_for_once_it_was_said(monkeypatch, caplog):
    monkeypatch.setattr(native, "_said", False)
    native.say_once(lambda: "because")
    native.say_once(lambda: pytest.fail("asked again"))
    assert caplog.messages == ["because"]


@tries("JPEG decoding")
def test_loops_without_jpegs_are_said_where_jpegs_are_decoded(
    unbuilt, image_folder, varied, tmp_path, caplog, monkeypatch
):
    pytest.importorskip("torch")
    monkeypatch.undo()
    monkeypatch.setattr(native, "_said", False)
    monkeypatch.setattr(native, "library", lambda: object())
    monkeypatch.setattr(native, "decodes_jpeg", lambda: False)
    crop = [fastload.transforms.RandomResizedCrop(8)]
    fastload.FastLoader(varied, 4, transform=crop)  # pixels
    assert caplog.text == ""
    path = kept_jpegs(image_folder, tmp_path / "a.h5")
    fastload.FastLoader(path, 4, transform=crop)
    hear("JPEG decoding", caplog.text)
    monkeypatch.undo()
    native.decodes_jpeg.cache_clear()
    wheel = [name for name in native._libjpegs() if "pillow" in name]
    if native.library() is not None and wheel:  # what the wheel brings
        assert any(map(native._uses_jpeg, wheel)) and native.decodes_jpeg()


@pytest.mark.skipif(native.library() is None, reason="fastload was installed without its compiled loops")
def test_loops_that_are_there_are_used_unless_somebody_leaves_them_out():
    code = "from fastload.system import native; print(native.described())"
    for asked, said in (("1", "built"), ("0", "none: FASTLOAD_NATIVE=0 is set")):
        env = {**os.environ, "FASTLOAD_NATIVE": asked}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
        assert done.stdout.startswith(said)
