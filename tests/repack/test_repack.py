from __future__ import annotations

import json
import os
from pathlib import Path

import h5py
import hdf5plugin  # noqa: F401  # h5py reads zstd with it, as users do
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interrupted import killed_at, stop_at
from small_files import rows_by_key, write_tokens

from fastload.errors import FormatError, OptionError, OutputError, ResumeError, SourceError
from fastload.export import export_file
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.inspection.verify import verify_file
from fastload.pack import pack_images
from fastload.repack import merge_files, repack_file
from sample_files import write_packed


def make(path: Path, num_rows: int = 60, *, seed: int = 0, masks: bool = True, **options) -> Path:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num_rows, 8, 6, 3), dtype=np.uint8)
    images[:, ::2] = 7
    labels = Column(np.arange(num_rows) % 3, {"names": ("cat", "ant", "bee")})
    boxes = Column(rng.random((num_rows, 4), dtype=np.float32), {"names": ("x", "y", "width", "height")})
    options.setdefault("splits", {"train": num_rows - 20, "val": 20})
    return write_packed(
        path, images, {"labels": labels, "bbox": boxes}, seed=5, chunk_rows=7, ignore_index=255 if masks else None,
        masks=rng.integers(0, 5, (num_rows, 8, 6), dtype=np.uint8) if masks else None, **options,
    )  # fmt: skip


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_rows=st.integers(22, 60),
    chunk_bytes=st.integers(1, 9000),
    shuffle=st.booleans(),
    codec=st.sampled_from(["none", "gzip:1", "zstd:1"]),
    masks=st.booleans(),
)
def test_whatever_the_options_rows_stay_the_same(tmp_path, num_rows, chunk_bytes, shuffle, codec, masks):
    source = make(tmp_path / "a.h5", num_rows, masks=masks)
    options = {"chunk_bytes": chunk_bytes, "shuffle": shuffle, "codec": codec, "seed": 9, "workers": 1}
    report = repack_file(source, tmp_path / "b.h5", overwrite=True, **options)
    assert rows_by_key(source) == rows_by_key(tmp_path / "b.h5")
    before, header = read_header(source), read_header(tmp_path / "b.h5")
    assert report.chunks == -(-num_rows // header.fields["images"].chunk_rows)
    assert (header.shuffled, header.seed) == (True, 9 if shuffle else 5)
    for name in ("decoder", "source_layout"):
        assert before.attrs[name] == header.attrs[name]
    assert "repacked" not in header.attrs and header.fields["labels"].names == ("cat", "ant", "bee")
    assert verify_file(tmp_path / "b.h5", workers=0).ok
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "b.h5"]


def test_what_is_compressed_stays_so_unless_it_is_said(tmp_path):
    source = make(tmp_path / "a.h5")
    repack_file(source, tmp_path / "z.h5", codec="gzip:7", chunk_bytes=1440, workers=1)
    repack_file(tmp_path / "z.h5", tmp_path / "b.h5", workers=1)
    assert (tmp_path / "b.h5").read_bytes() == (tmp_path / "z.h5").read_bytes()
    merge_files([tmp_path / "z.h5", tmp_path / "b.h5"], tmp_path / "m.h5", workers=1)
    assert read_header(tmp_path / "m.h5").fields["images"].filters == ("deflate",)
    report = merge_files([tmp_path / "z.h5", source], tmp_path / "n.h5", workers=1)
    assert read_header(tmp_path / "n.h5").fields["images"].offset is not None
    assert "z.h5, a.h5: images are compressed differently" in " ".join(report.notes)
    repack_file(tmp_path / "z.h5", tmp_path / "c.h5", on_error="skip")
    assert (tmp_path / "c.h5").read_bytes() == (tmp_path / "z.h5").read_bytes()


def test_a_foreign_file_becomes_linear(tmp_path):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (25, 3, 9, 5), dtype=np.uint8)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("images", data=images, chunks=(4, 3, 9, 5), compression="gzip")
        file["labels"] = np.arange(25, dtype=np.int32)[:, None]
    repack_file(tmp_path / "a.h5", tmp_path / "b.h5")
    header = read_header(tmp_path / "b.h5")
    assert header.fields["images"].offset == 4096 and header.fields["images"].shape == (9, 5, 3)
    with h5py.File(tmp_path / "b.h5") as file:
        assert np.array_equal(file["images"][()], images.transpose(0, 2, 3, 1))
        assert np.array_equal(file["labels"][()], np.arange(25)) and file["labels"].dtype == np.int64
    assert header.splits == {"all": range(25)} and verify_file(tmp_path / "b.h5").ok and not header.shuffled


def test_a_file_without_images_keeps_its_arrays(tmp_path):
    repack_file(write_tokens(tmp_path / "a.h5"), tmp_path / "b.h5", key=("1?",))
    with h5py.File(tmp_path / "b.h5") as file:
        assert np.array_equal(file["tokens"][()], np.arange(30, 60).reshape(10, 3))
    with pytest.raises(OptionError, match="holds no images"):
        repack_file(tmp_path / "a.h5", tmp_path / "c.h5", codec="gzip")


def test_rows_are_chosen_by_all_conditions_together(tmp_path):
    source = make(tmp_path / "a.h5")
    choice = {"split": ("val",), "label": ("ant", "2"), "key": ("0000004*", "0000005[0-4]")}
    repack_file(source, tmp_path / "b.h5", **choice)
    with h5py.File(tmp_path / "b.h5") as file:
        kept = [int(key) for key in file["key"][()]]
        assert kept == [row for row in range(40, 55) if row % 3 in (1, 2)]
        assert file["labels"].attrs["names"].astype(str).tolist() == ["cat", "ant", "bee"]
    header = read_header(tmp_path / "b.h5")
    assert header.splits == {"val": range(10)} and header.shuffled
    assert json.loads(header.attrs["repacked"]) == {
        "splits": ["val"], "labels": ["ant", "2"], "keys": ["0000004*", "0000005[0-4]"], "rows": 10, "of": 60,
    }  # fmt: skip


@pytest.mark.parametrize("suffix", [".txt", ".npy"])
def test_an_index_file_chooses_rows_and_their_order(tmp_path, suffix):
    rows = [50, 3, 41, 17]
    index = tmp_path / f"rows{suffix}"
    if suffix == ".npy":
        np.save(index, np.array(rows, np.uint16))
    else:
        index.write_text("# rows\n" + "\n".join(map(str, rows)))
    repack_file(make(tmp_path / "a.h5"), tmp_path / "b.h5", rows=index)
    with h5py.File(tmp_path / "b.h5") as file:
        assert [int(key) for key in file["key"][()]] == [3, 17, 50, 41]
    assert not read_header(tmp_path / "b.h5").shuffled


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"split": ("test",)}, "no split 'test'; it has 'train', 'val'"),
        ({"label": ("dog",)}, "no label 'dog'.*cat, ant, bee"),
        ({"label": ("3",)}, "no label '3'"),
        ({"key": ("x*",)}, "no key fits 'x\\*'; keys look like 00000000"),
        ({"split": ("val",), "key": ("00000001",)}, "no row fits all"),
        ("1\n2\n1\n", "rows stand there more than once: 1"),
        ("1\n60\n", "row 60 is not in .*0 to 59"),
        ("-1\n", "row -1 is not in"),
        ("1\n2.5\n", "line 2: '2.5' is not a row number"),
        ("\n", "holds no row number"),
        (np.ones(60, bool), "give row numbers"),
        (np.ones(3), "one dimension of integers"),
        (np.zeros((2, 2), int), "one dimension of integers"),
    ],
)
def test_a_choice_that_means_nothing_is_named(tmp_path, choice, message):
    if not isinstance(choice, dict):
        index = tmp_path / ("rows.txt" if isinstance(choice, str) else "rows.npy")
        index.write_text(choice) if isinstance(choice, str) else np.save(index, choice)
        choice = {"rows": index}
    with pytest.raises(OptionError, match=message):
        repack_file(make(tmp_path / "a.h5"), tmp_path / "b.h5", **choice)
    assert not (tmp_path / "b.h5").exists()


def test_outputs_and_codecs_that_cannot_be_are_refused_before_work(tmp_path):
    source = make(tmp_path / "a.h5")
    (tmp_path / "link.h5").symlink_to(source)
    for output in (source, tmp_path / "link.h5"):
        for overwrite in (False, True):
            with pytest.raises(OutputError, match="is the file to be read"):
                repack_file(source, output, overwrite=overwrite)
    (tmp_path / "old.h5").write_bytes(b"mine")
    for name, said in (("old.h5", r"old\.h5: exists"), ("no/b.h5", "does not exist"), ("", "a folder")):
        with pytest.raises(OutputError, match=said):
            repack_file(source, tmp_path / name)
    with pytest.raises(FormatError, match="not an HDF5 file"):
        repack_file(tmp_path / "old.h5", tmp_path / "b.h5")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "link.h5", "old.h5"]
    repack_file(source, tmp_path / "old.h5", codec="gzip", overwrite=True)
    assert rows_by_key(tmp_path / "old.h5") == rows_by_key(source)
    for codec, said in (
        ("lzf", r"accepted: keep, none, gzip\[:0-9\], zstd\[:1-19\]"), ("gzip:", "accepted: keep"),
        ("", "accepted: keep"), ("GZIP", "accepted: keep"), ("none:1", "accepted: keep"), ("gzip:10", "0 to 9"),
        ("zstd:20", "1 to 19"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=said):
            repack_file(source, tmp_path / "b.h5", codec=codec)


def _damage(path: Path, row: int) -> None:
    with open(path, "r+b") as file:
        file.seek(4096 + row * 8 * 6 * 3 + 5)
        file.write(b"\x00\xff")


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_a_damaged_row_is_named_and_can_be_left_out(tmp_path, codec):
    source = make(tmp_path / "a.h5")
    _damage(source, 11)
    with pytest.raises(SourceError, match=r"1 of 60 .*00000011: its pixels changed since packing"):
        repack_file(source, tmp_path / "b.h5", codec=codec, chunk_bytes=700)
    assert not (tmp_path / "b.h5").exists()
    report = repack_file(source, tmp_path / "b.h5", codec=codec, chunk_bytes=700, on_error="skip")
    assert [key for key, _ in report.skipped] == ["00000011"] and report.num_samples == 59
    assert verify_file(tmp_path / "b.h5").ok


@pytest.mark.parametrize(("name", "codec"), [("images", "gzip"), ("masks", "gzip"), ("images", "zstd")])
def test_a_damaged_compressed_chunk_costs_its_rows_alone(tmp_path, name, codec):
    source = make(tmp_path / "a.h5")
    repack_file(source, tmp_path / "z.h5", codec=codec, chunk_bytes=1000)
    with h5py.File(tmp_path / "z.h5") as file:
        chunk = file[name].id.get_chunk_info(2)
        first, rows = chunk.chunk_offset[0], file[name].chunks[0]
    with open(tmp_path / "z.h5", "r+b") as file:
        file.seek(chunk.byte_offset)
        file.write(b"\xff" * 60)
    bad = [f"{row:08d}" for row in range(first, first + rows)]
    with pytest.raises(SourceError, match=rf"`{name}` cannot be read.*\(rows {first}, {first + 1}, .*on-error skip"):
        repack_file(tmp_path / "z.h5", tmp_path / "b.h5", chunk_bytes=10_000)
    report = repack_file(tmp_path / "z.h5", tmp_path / "b.h5", chunk_bytes=10_000, on_error="skip")
    assert sorted(key for key, _ in report.skipped) == bad
    assert all("cannot be read" in reason for _, reason in report.skipped)
    assert rows_by_key(tmp_path / "b.h5") == {k: v for k, v in rows_by_key(source).items() if k not in bad}


def _stopped(source: Path, output: Path, at: int, codec: str, chunk_bytes: int = 1000) -> None:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("fastload.pack.engine.COPY_TASK_BYTES", 0)
        repack_file(source, output, chunk_bytes=chunk_bytes, codec=codec, workers=1, progress=stop_at(at))


@pytest.mark.parametrize("codec", ["none", "gzip"])
def test_killed_the_same_call_continues_and_gives_the_same_bytes(tmp_path, monkeypatch, codec):
    monkeypatch.setattr("fastload.pack.engine.COPY_TASK_BYTES", 0)  # as the calls that are stopped
    source = make(tmp_path / "a.h5")
    options = {"chunk_bytes": 1000, "codec": codec, "workers": 1}
    repack_file(source, tmp_path / "whole.h5", **options)
    for kill_at in (1, 6, 10):
        output = tmp_path / f"{kill_at}.h5"
        if kill_at == 6:  # once in earnest
            task_bytes = {"fastload.pack.engine.COPY_TASK_BYTES": 0}
            killed_at(kill_at, "fastload.repack.repack_file", source, output, settings=task_bytes, **options)
        else:
            _stopped(source, output, kill_at, codec)
        assert not output.exists() and output.with_name(output.name + ".part").exists()
        report = repack_file(source, output, **options)
        # What was reported done is not done again.
        assert report.chunks_kept >= kill_at - 1 and report.chunks_kept + report.chunks_decoded == 10
        assert output.read_bytes() == (tmp_path / "whole.h5").read_bytes()
    assert [path.name for path in tmp_path.iterdir() if ".h5." in path.name] == []


def test_unfinished_work_on_something_else_is_not_overwritten(tmp_path):
    source = make(tmp_path / "a.h5")
    for first, second, chunk_bytes in (
        ("none", "gzip", 1000), ("gzip", "none", 1000), ("gzip", "gzip:9", 1000), ("gzip", "zstd", 1000),
        ("gzip", "gzip", 5000),
    ):  # fmt: skip
        _stopped(source, tmp_path / "b.h5", 5, first)
        with pytest.raises(ResumeError, match="--overwrite"):
            repack_file(source, tmp_path / "b.h5", codec=second, chunk_bytes=chunk_bytes)
        repack_file(source, tmp_path / "b.h5", codec=second, chunk_bytes=chunk_bytes, overwrite=True)
        assert rows_by_key(tmp_path / "b.h5") == rows_by_key(source)
        (tmp_path / "b.h5").unlink()
    assert [path.name for path in tmp_path.iterdir()] == ["a.h5"]


def test_killed_after_the_rename_the_call_ends_well(tmp_path, monkeypatch):
    source, output = make(tmp_path / "a.h5"), tmp_path / "b.h5"
    real = os.replace

    def rename_and_stop(*paths: Path) -> None:
        real(*paths)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", rename_and_stop)
    with pytest.raises(KeyboardInterrupt):
        repack_file(source, output, codec="gzip", chunk_bytes=1000, workers=1)
    assert output.exists() and (tmp_path / "b.h5.journal").exists()
    monkeypatch.undo()
    report = repack_file(source, output, codec="gzip", chunk_bytes=1000, workers=1)
    assert report.chunks_kept == 10 and sorted(path.name for path in tmp_path.iterdir()) == ["a.h5", "b.h5"]
    with pytest.raises(OutputError, match="exists"):
        repack_file(source, output, codec="gzip", chunk_bytes=1000, workers=1)


def foreign(path: Path, num_rows: int = 9, **datasets) -> Path:
    with h5py.File(path, "w") as file:
        file["images"] = np.random.default_rng(0).integers(0, 256, (num_rows, 4, 5, 3), dtype=np.uint8)
        for name, values in datasets.items():
            file[name] = values
    return path


@pytest.mark.parametrize("dtype", ["int64", ">i4", "int16", "bool"])
@pytest.mark.parametrize("chunked", [False, True])
def test_masks_of_other_integers_keep_their_values_or_are_refused(tmp_path, dtype, chunked):
    masks = (np.arange(9 * 20) % 2 * (1 if dtype == "bool" else 255)).reshape(9, 4, 5).astype(dtype)
    source = foreign(tmp_path / "a.h5", masks=masks)
    if chunked:
        with h5py.File(source, "r+") as file:
            del file["masks"]
            file.create_dataset("masks", data=masks[..., None], chunks=(2, 4, 5, 1), compression="gzip")
    repack_file(source, tmp_path / "b.h5")
    export_file(source, tmp_path / "out")
    pack_images(tmp_path / "out", tmp_path / "c.h5", workers=0)
    for name in ("b", "c"):
        with h5py.File(tmp_path / f"{name}.h5") as file:
            order = np.argsort(file["key"][()])
            assert file["masks"].dtype == np.uint8 and np.array_equal(file["masks"][()][order], masks)
    if dtype == "bool":
        return
    with h5py.File(source, "r+") as file:
        file["masks"][7, 1, 2] = -1
    for attempt in (
        lambda: repack_file(source, tmp_path / "d.h5"), lambda: export_file(source, tmp_path / "no")
    ):  # fmt: skip
        with pytest.raises(SourceError, match=r"`masks` holds -1 \(rows 7\)"):
            attempt()


def test_masks_and_labels_that_are_none_are_refused(tmp_path):
    for masks in (np.zeros((9, 4, 5), np.float32), np.zeros((9, 4, 5, 3), np.uint8)):
        with pytest.raises(FormatError, match="expected one class number a pixel"):
            repack_file(foreign(tmp_path / "a.h5", masks=masks), tmp_path / "b.h5")
    for labels in (np.full(9, 0.5), np.array([[b"a", b"b"]] * 9)):
        with pytest.raises(FormatError, match="expected whole numbers, or one text a row"):
            repack_file(foreign(tmp_path / "a.h5", labels=labels), tmp_path / "b.h5")


def test_labels_that_are_texts_become_classes(tmp_path):
    texts = np.array([b"bee", b"ant", b""] * 3)
    source = foreign(tmp_path / "a.h5", labels=texts)
    repack_file(source, tmp_path / "b.h5")
    with h5py.File(tmp_path / "b.h5") as file:
        assert file["labels"][()].tolist() == [1, 0, -1] * 3 and file["labels"].dtype == np.int64
        assert file["labels"].attrs["names"].astype(str).tolist() == ["ant", "bee"]
    assert export_file(source, tmp_path / "out").layout == "csv"
    any_length = foreign(tmp_path / "v.h5", labels=texts.astype(str).tolist(), titles=["x"] * 9)
    with pytest.raises(FormatError, match=r"`labels` is of a kind .* `fastload pack "):
        repack_file(any_length, tmp_path / "w.h5")
    with h5py.File(any_length, "r+") as file:
        del file["labels"]
    assert "v.h5: left out, being no numbers by row: titles." in repack_file(any_length, tmp_path / "w.h5").notes
    repack_file(foreign(tmp_path / "c.h5", labels=np.arange(9.0)), tmp_path / "d.h5")
    with h5py.File(tmp_path / "d.h5") as file:
        assert file["labels"][()].tolist() == list(range(9)) and file["labels"].dtype == np.int64


def test_a_header_or_labels_that_were_changed_are_not_laundered(tmp_path):
    good, source = make(tmp_path / "good.h5"), make(tmp_path / "a.h5", seed=1)
    with h5py.File(source, "r+") as file:
        file["labels"][33] = 1
    with pytest.raises(SourceError, match=r"values of 1 rows .*row 33 \(00000033\)"):
        repack_file(source, tmp_path / "b.h5")
    with h5py.File(source, "r+") as file:
        file["labels"].attrs["names"] = ["ant", "cat", "bee"]
    assert not verify_file(source).header_ok
    for attempt in (
        lambda: repack_file(source, tmp_path / "b.h5"),
        lambda: repack_file(source, tmp_path / "b.h5", on_error="skip"),
        lambda: merge_files([good, source], tmp_path / "b.h5"),
        lambda: export_file(source, tmp_path / "out"),
    ):
        with pytest.raises(FormatError, match=r"a\.h5: its header .* is not as it was written"):
            attempt()
    assert not (tmp_path / "b.h5").exists() and not (tmp_path / "out").exists()
