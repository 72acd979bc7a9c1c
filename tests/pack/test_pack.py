from __future__ import annotations

import contextlib
import errno
import os
import pickle
import re
import shutil
import subprocess
import sys
import types
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
from child_processes import child_environment
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupted import full_disk, leftovers, packer, stop_at
from PIL import Image, ImageOps

from fastload.errors import OptionError, OutputError, PackError, ResumeError, SourceError
from fastload.format.header import read_header
from fastload.pack import pack_images
from fastload.pack.journal import Journal
from fastload.pack.pool import refers_to_main


def _assert_holds(packed: Path, source: Path, keys: set[str] | None = None) -> None:
    """Every row is its key's image, gray or RGB, and every image has a row."""
    with h5py.File(packed) as file:
        found = [key.decode() for key in file["key"][()]]
        for row, key in enumerate(found):
            with Image.open(source / key) as image:
                expected = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
            np.testing.assert_array_equal(np.broadcast_to(file["images"][row], expected.shape), expected)
    wanted = {str(p.relative_to(source)) for p in source.rglob("*.*") if p.is_file()} if keys is None else keys
    assert sorted(found) == sorted(wanted)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    modes=st.lists(st.sampled_from(["L", "RGB"]), min_size=1, max_size=6),
    suffix=st.sampled_from([".jpg", ".png", ".webp", ".bmp"]),
    shuffle=st.booleans(),
)
def test_packing_then_reading_gives_the_decoders_pixels(tmp_path, sizes, modes, suffix, shuffle):
    source = tmp_path / "photos"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    rng = np.random.default_rng(1)
    for i, mode in enumerate(modes):
        image = Image.fromarray(rng.integers(0, 256, (*sizes, 3), dtype=np.uint8)).convert(mode)
        image.save(source / f"{i}{suffix}")
    _assert_holds(pack_images(source, tmp_path / "o.h5", workers=0, shuffle=shuffle, overwrite=True).path, source)


@pytest.mark.parametrize("bad", [(), (0, 30, 31)])  # the first: other workers have rows behind it already
def test_same_bytes_whatever_the_number_of_workers(tmp_path, image_folder, bad):
    source = image_folder(per_class=50)
    for number in bad:
        path = source / f"cat/{number:04d}.jpg"
        path.write_bytes(path.read_bytes()[:-30])
    options = {"chunk_bytes": 1200, "shuffle": False, "on_error": "skip"}
    outputs = [pack_images(source, tmp_path / f"{n}.h5", workers=n, **options).path.read_bytes() for n in (0, 1, 3)]
    assert outputs[0] == outputs[1] == outputs[2]


def test_rows_are_pillows_pixels_with_their_labels_and_each_split_is_one_run_shuffled_by_itself(tmp_path, image_folder):
    for name, count in (("train", 12), ("val", 5)):
        image_folder(per_class=count, name=f"data/{name}", seed=count)
    report = pack_images(tmp_path / "data", tmp_path / "o.h5", workers=0, chunk_bytes=3000)
    _assert_holds(report.path, tmp_path / "data")
    first, second = repr(report).splitlines()
    assert first.startswith(f"PackReport({report.path}, 34 samples, uint8 (12, 16, 3), ")
    assert second.startswith("  layout folder, labels, train 24, val 10, ")
    assert read_header(report.path).splits == {"train": range(24), "val": range(24, 34)}
    with h5py.File(report.path) as file:
        keys = [key.decode().split("/") for key in file["key"][()]]
        names = file["labels"].attrs["names"].astype(str)
        assert {key[0] for key in keys[:24]} == {"train"}
        assert [key[1] for key in keys] == names[file["labels"][()]].tolist()
    assert report.num_samples == 34 and report.chunks == 7 == report.chunks_decoded
    assert leftovers(report.path) == []


def _spoil(source: Path, names: list[str]) -> None:
    for at, name in enumerate(names):
        data = (source / name).read_bytes()
        (source / name).write_bytes([b"", b"not an image", data[: len(data) * 2 // 3]][at % 3])


@pytest.mark.parametrize("shuffle", [True, False])
def test_bad_images_are_named_or_skipped_and_the_good_ones_all_packed(tmp_path, image_folder, shuffle):
    source = image_folder(per_class=30)
    bad = [f"cat/{i:04d}.jpg" for i in (0, 7, 8, 29)] + [f"dog/{i:04d}.jpg" for i in (3, 28, 29)]
    _spoil(source, bad)
    output = tmp_path / "o.h5"
    with pytest.raises(SourceError, match=r"cat/0000.jpg.*--on-error skip"):
        pack_images(source, output, workers=0, shuffle=shuffle, chunk_bytes=4000)
    assert not output.exists()
    report = pack_images(source, output, workers=0, shuffle=shuffle, chunk_bytes=4000, on_error="skip")
    assert sorted(key for key, _ in report.skipped) == sorted(bad)
    assert all(reason for _, reason in report.skipped)
    good = {f"{c}/{i:04d}.jpg" for c in ("cat", "dog") for i in range(30)} - set(bad)
    _assert_holds(output, source, good)
    with h5py.File(output) as file:
        keys = file["key"][()].tolist()
    assert shuffle or keys == sorted(keys)
    assert report.num_samples == len(good) and leftovers(output) == []


@pytest.mark.parametrize("end", [300, -30])
def test_all_images_bad_is_an_error_even_when_skipping(tmp_path, image_folder, end):
    """Headers that cannot be read are found by the survey, pixels by the workers."""
    source = image_folder(per_class=2)
    for path in source.rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(SourceError, match="4 of 4 images"):
        pack_images(source, tmp_path / "o.h5", workers=0, on_error="skip")
    assert not (tmp_path / "o.h5").exists()


def _save(path: Path, mode: str, size: tuple[int, int] = (8, 8)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).resize(size).convert(mode).save(path)


def test_gray_stays_gray_colour_wins_and_alpha_and_16_bits_must_be_everywhere(tmp_path):
    def packed(folder: str, **options):
        report = pack_images(tmp_path / folder, tmp_path / "o.h5", workers=0, overwrite=True, **options)
        return (report.image_shape[2], report.dtype), report.converted

    _save(tmp_path / "gray/a.png", "L")
    _save(tmp_path / "gray/b.png", "1")
    assert packed("gray") == ((1, "uint8"), {"1 -> gray of 8 bits": 1})
    for name, mode in (("a", "L"), ("b", "RGB"), ("c", "P")):
        _save(tmp_path / f"mixed/{name}.png", mode)
    kind, converted = packed("mixed")
    assert kind == (3, "uint8") and converted["L -> RGB of 8 bits"] == 1
    _save(tmp_path / "mixed/d.png", "RGBA")
    with pytest.raises(SourceError, match=r"1 of 4 images have an alpha channel \(d.png\).*--mode rgb"):
        packed("mixed")
    assert [packed("mixed", mode=mode)[0][0] for mode in ("rgb", "rgba", "gray")] == [3, 4, 1]
    values = (np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8)
    (tmp_path / "deep").mkdir()
    Image.fromarray(values).save(tmp_path / "deep/a.png")
    assert packed("deep") == ((1, "uint16"), {})
    with h5py.File(tmp_path / "o.h5") as file:
        np.testing.assert_array_equal(file["images"][0, :, :, 0], values)
    _save(tmp_path / "deep/b.png", "L")
    _save(tmp_path / "deep/c.png", "RGBA")
    with pytest.raises(SourceError, match=r"16 bits a channel \(a.png\).*Besides, 1 of 3 images have an alpha"):
        packed("deep")
    (tmp_path / "deep/c.png").unlink()
    for options, said in (
        ({}, r"1 of 2 images have 16 bits a channel \(a.png\).*--bits 8"),
        ({"mode": "gray"}, r"1 of 2 images have 16 bits a channel \(a.png\).*--bits 8"),
        ({"bits": 16}, r"1 of 2 images have 8 bits a channel \(b.png\)"),
    ):
        with pytest.raises(SourceError, match=said):
            packed("deep", **options)
    assert packed("deep", bits=8) == ((1, "uint8"), {"I;16 -> gray of 8 bits": 1})


def test_outputs_that_cannot_be_are_refused_before_any_work_and_links_are_followed(tmp_path, image_folder):
    source = image_folder(per_class=2)
    taken = tmp_path / "taken.h5"
    taken.write_bytes(b"precious")
    cases = [
        (taken, "exists.*--overwrite"),
        (tmp_path / "no" / "o.h5", "does not exist"),
        (source / "o.h5", "inside the source"),
        (tmp_path, "a folder"),
        (tmp_path / "a.part", "ending is kept for unfinished packs"),
        (tmp_path / "a.h5.masks", "ending is kept for unfinished packs"),
    ]
    for output, message in cases:
        with pytest.raises(OutputError, match=message):
            pack_images(source, output, workers=0)
    assert taken.read_bytes() == b"precious"
    assert pack_images(source, taken, workers=0, overwrite=True).num_samples == 4
    with pytest.raises(OptionError, match=r"fit='cut'.*crop, pad, stretch"):
        pack_images(source, tmp_path / "o.h5", fit="cut")  # type: ignore[arg-type]
    (tmp_path / "link.h5").symlink_to(tmp_path / "real.h5")
    pack_images(source, tmp_path / "link.h5", workers=0)
    assert (tmp_path / "link.h5").is_symlink() and read_header(tmp_path / "real.h5").num_rows == 4
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(OutputError, match="device or pipe"):
        pack_images(source, tmp_path / "pipe.h5", workers=0, overwrite=True)


@pytest.mark.parametrize("store", [None, "jpeg"])
def test_a_full_disk_is_refused_with_every_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str | None):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    images = [np.zeros((2, 2, 3), np.uint8)] * 1200
    message = r"needs up to [0-9]+,[0-9]+ bytes while 1,200 images .* 1,000 are free"
    with pytest.raises(OutputError, match=message) as found:
        pack_images(images, tmp_path / "a.h5", store=store, workers=0)
    assert found.value.errno == errno.ENOSPC and str(found.value).startswith(f"{tmp_path / 'a.h5'}: needs")
    assert all(mend in str(found.value) for mend in ("`--size`", "`--max-size`", "`--store source`"))
    assert list(tmp_path.iterdir()) == []


def test_space_that_cannot_be_reserved_is_an_error_and_leaves_nothing(tmp_path, image_folder):
    source = image_folder(per_class=40)
    with full_disk(30_000), pytest.raises(OutputError, match="bytes cannot be reserved"):
        pack_images(source, tmp_path / "o.h5", workers=0)
    assert list(tmp_path.glob("o.h5*")) == []


def _interrupt(source: Path, output: Path, chunks: int = 3, **options) -> None:
    with pytest.raises(KeyboardInterrupt):
        pack_images(source, output, workers=0, chunk_bytes=4000, progress=stop_at(chunks, "packing"), **options)


@pytest.mark.parametrize(("meanwhile", "kept"), [("nothing", 3), ("rows are lost", 2), ("an image changes", 2)])
def test_an_interrupted_pack_continues_and_decodes_only_what_is_missing(tmp_path, image_folder, meanwhile, kept):
    source, output = image_folder(per_class=40), tmp_path / "o.h5"
    whole = pack_images(source, tmp_path / "whole.h5", workers=0, chunk_bytes=4000)
    _interrupt(source, output)
    assert not output.exists() and leftovers(output) == ["o.h5.journal", "o.h5.part"]
    if meanwhile == "rows are lost":  # as a power failure leaves them
        with open(tmp_path / "o.h5.part", "r+b") as file:
            file.seek(4096 + 4000)
            file.write(b"\0" * 200)
    elif meanwhile == "an image changes":
        with h5py.File(whole.path) as file:
            first = file["key"][0].decode()
        Image.fromarray(np.full((12, 16, 3), 77, np.uint8)).save(source / first)
        whole = pack_images(source, tmp_path / "whole.h5", workers=0, chunk_bytes=4000, overwrite=True)
    report = pack_images(source, output, workers=0, chunk_bytes=4000)
    assert (report.chunks_kept, report.chunks_decoded) == (kept, whole.chunks - kept)
    assert output.read_bytes() == whole.path.read_bytes() and leftovers(output) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda source, options: (source / "cat/0003.jpg").unlink(), "had 80 images, of which 1 are gone"),
        (lambda source, options: shutil.copy(source / "cat/0003.jpg", source / "cat/new.jpg"), "cat/new.jpg"),
        (lambda source, options: (source / "cat").rename(source / "lynx"), "lynx"),
        (lambda source, options: options.update(seed=9), "option seed was 0, now it is 9"),
        (lambda source, options: options.update(size=8), "option size was None"),
        (lambda source, options: options.update(store="source"), "option store was None, now it is source"),
    ],
)
def test_a_changed_source_or_option_is_named_and_nothing_is_lost(tmp_path, image_folder, change, message):
    source, output, options = image_folder(per_class=40), tmp_path / "o.h5", {}
    _interrupt(source, output)
    before = (tmp_path / "o.h5.part").read_bytes()
    change(source, options)
    with pytest.raises(ResumeError, match=message):
        pack_images(source, output, workers=0, chunk_bytes=4000, **options)
    assert (tmp_path / "o.h5.part").read_bytes() == before
    report = pack_images(source, output, workers=0, chunk_bytes=4000, overwrite=True, **options)
    assert report.chunks_kept == 0 and leftovers(output) == []


def test_a_dead_worker_is_a_named_error_and_the_same_call_continues(tmp_path, image_folder):
    source, output = image_folder(per_class=60), tmp_path / "o.h5"

    def kill_workers(stage: str, done: int, total: int) -> None:
        if stage == "packing":
            for child in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # It may be gone already.
                    if "resource_tracker" not in " ".join(child.cmdline()):
                        child.kill()

    with pytest.raises(PackError, match="a worker process died"):
        pack_images(source, output, workers=1, chunk_bytes=1200, progress=kill_workers)
    report = pack_images(source, output, workers=0, chunk_bytes=1200)
    assert report.chunks_kept >= 1 and not leftovers(output)
    _assert_holds(output, source)


@pytest.mark.parametrize("shuffle", [True, False])
def test_killed_at_any_step_the_same_command_gives_the_same_bytes(tmp_path, image_folder, shuffle):
    """Kills the packer at file operations and after chunks, at the finish too, and runs it again.

    Of all these moments a quarter is tried: one of each four, by a seed of its own for each of the two runs.
    """
    source = image_folder(per_class=25)
    _spoil(source, ["cat/0002.jpg", "dog/0004.jpg"])
    for name in ("cat/0010.jpg", "cat/0011.jpg", "dog/0003.jpg", "dog/0019.jpg"):
        data = (source / name).read_bytes()
        (source / name).write_bytes(data[: len(data) * 2 // 3])
    with packer(source, tmp_path / "scratch.h5", workers=0, chunk_bytes=4000, shuffle=shuffle) as pack:
        chunks, _, _, events = pack(tmp_path / "whole.h5")
        expected = (tmp_path / "whole.h5").read_bytes()
        assert events > chunks + 8  # each chunk, and the file operations
        rng = np.random.default_rng(11 + shuffle)
        for first in range(1, events + 1, 4):
            kill_at = min(events, first + int(rng.integers(4)))
            output = tmp_path / f"{kill_at}.h5"
            assert pack(output, kill_at) is None
            claimed = _claimed_chunks(output)
            assert not output.exists() or output.read_bytes() == expected
            _, kept, decoded, _ = pack(output)
            assert output.read_bytes() == expected and leftovers(output) == []
            assert kept == claimed and decoded in (0, chunks - claimed)
            output.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("meanwhile", ["nothing", "another seed", "an image changes"])
def test_killed_after_the_rename_the_report_names_what_was_skipped_and_another_pack_is_not_taken_for_it(
    tmp_path, image_folder, meanwhile
):
    source, output = image_folder(per_class=25), tmp_path / "o.h5"
    data = (source / "cat/0010.jpg").read_bytes()
    (source / "cat/0010.jpg").write_bytes(data[:-30])
    with packer(source, tmp_path / "scratch.h5", workers=0, chunk_bytes=4000) as pack:
        events = pack(tmp_path / "whole.h5")[3]
        assert pack(output, events) is None
    before = output.read_bytes()
    assert leftovers(output) == ["o.h5.journal"]
    options = {"workers": 0, "chunk_bytes": 4000, "on_error": "skip", "seed": 5 * (meanwhile == "another seed")}
    if meanwhile == "an image changes":
        Image.fromarray(np.full((12, 16, 3), 77, np.uint8)).save(source / "cat/0003.jpg")
    if meanwhile != "nothing":
        with pytest.raises(OutputError, match="exists"):
            pack_images(source, output, **options)
    report = pack_images(source, output, overwrite=meanwhile != "nothing", **options)
    assert [key for key, _ in report.skipped] == ["cat/0010.jpg"] and leftovers(output) == []
    assert (output.read_bytes() == before) == (meanwhile == "nothing")


def _claimed_chunks(output: Path) -> int:
    """Chunks that the journal left by a kill says are done."""
    path = output.with_name(output.name + ".journal")
    if not path.exists():
        return 0
    with contextlib.closing(Journal(path)) as journal:
        found = journal.read()
    return 0 if found is None else len(found.tasks)


def test_an_output_under_way_is_locked_against_a_second_packer(tmp_path, image_folder):
    source, output = image_folder(per_class=2), tmp_path / "o.h5"
    journal = Journal(tmp_path / "o.h5.journal")
    with pytest.raises(PackError, match="another process is packing"):
        pack_images(source, output, workers=0)
    journal.close()


def test_the_odd_files_of_the_nasty_set_are_skipped_by_name_and_the_rest_packed(tmp_path, shared_data):
    source = shared_data / "nasty" / "files"
    with pytest.raises(SourceError, match=r"images cannot be read: .*--on-error skip"):
        pack_images(source, tmp_path / "o.h5", size=64, mode="rgb", bits=8, workers=0)
    report = pack_images(source, tmp_path / "o.h5", size=64, mode="rgb", bits=8, workers=0, on_error="skip")
    listed = sum(1 for _ in source.iterdir()) - 1  # .DS_Store is no image
    assert report.num_samples + len(report.skipped) == listed
    assert report.num_samples >= 48 and all(reason for _, reason in report.skipped)
    assert any(".DS_Store" in note or "hidden" in note for note in report.notes)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="workers are forks on Linux only")


@on_linux
def test_a_forked_worker_holds_no_file_that_the_parent_has_open():
    code = """
import os
from fastload.pack.pool import PackPool
from fastload.system.threads import forked_workers

ours, theirs = os.pipe()
with forked_workers(), PackPool(1) as pool:
    pool.start_early()
    os.close(theirs)
    print(os.read(ours, 1) == b"")  # at once, and not when the worker ends
"""
    # In a process of its own: this one may have threads.
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize("forked", [False, pytest.param(True, marks=on_linux)])
def test_a_dataset_of_the_script_itself_is_packed_by_a_process_that_has_it(tmp_path, forked):
    (tmp_path / "script.py").write_text(
        "import numpy as np\n"
        "from fastload import pack_images\n"
        "from fastload.system.threads import forked_workers\n"
        "class Own:\n"
        "    def __len__(self): return 80\n"
        "    def __getitem__(self, i): return np.full((4, 5, 3), i, np.uint8), i % 2\n"
        "def pack():\n"
        "    pack_images(Own(), 'own.h5', workers=2, shuffle=False)\n"
        f"if {forked}:\n"
        "    with forked_workers(): pack()\n"
        "else: pack()\n"
    )
    command = [sys.executable, "script.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"script\.py:8: UserWarning: .*classes or functions of the script itself", done.stderr)
    assert len(said) == (not forked) and (said or not done.stderr), done.stderr
    with h5py.File(tmp_path / "own.h5") as file:
        assert file["images"][:, 0, 0, 0].tolist() == list(range(80))


def test_what_a_pickle_has_of_the_script_is_told_from_texts(monkeypatch):
    module = types.ModuleType("__main__")
    exec("class One:\n    class Two: pass\ndef three(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "__main__", module)
    own = module.One.Two, module.three
    for protocol in (4, 5):
        for one in (*own, own[0](), partial(own[1]), ["__main__", {"a": [Path("__main__"), own[0]]}]):
            assert refers_to_main(pickle.dumps(one, protocol)), one
        for one in ("__main__", [Path("__main__/a.jpg"), "__main__", partial(len), "One"], b"__main__", len):
            assert not refers_to_main(pickle.dumps(one, protocol)), one
