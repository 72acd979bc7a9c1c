"""Texts as fields: captions come back exactly, as lists of str, from every way to read a file and to make one of it."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from late_backend import Device
from small_files import rows_by_key, write_random
from torch.utils.data import DataLoader

from fastload import FastLoader, OptionError, PackedDataset
from fastload.errors import DamagedRowError, SourceError
from fastload.export import export_file
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.format.texts import text_arrays, text_lists
from fastload.inspection.info import inspect_file
from fastload.inspection.preview import labels_of
from fastload.inspection.verify import verify_file
from fastload.pack import pack_images
from fastload.pack.index import index_files
from fastload.repack import merge_files, repack_file
from fastload.transforms import Normalize, RandomHorizontalFlip, RandomResizedCrop

N = 41
TEXTS = [[f"{k} dogs of {i} ä 日本 \U0001f415{'y' * (i * 7 % 23)}" for k in range(i % 4)] for i in range(N)]
TEXTS[5], TEXTS[6] = ["", " b ", "line\nand\ttab"], ["a\0b", '"quoted, =1+1"', "[1]"]


def columns_of(texts: list[list[str]]) -> dict[str, Column]:
    values, counts = text_arrays([[text.encode() for text in row] for row in texts])
    return {"caption": Column(values), "num_captions": Column(counts)}


def captioned(path: Path, texts: list[list[str]] = TEXTS, **options: Any) -> Path:
    given = {"rows": len(texts), "classes": "abc", "chunk_rows": 8, **options}
    return write_random(path, columns=columns_of(texts), **given)


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return captioned(tmp_path_factory.mktemp("texts") / "a.h5", masks=True)


FIELDS = ("images", "caption", "key")


def keys_of(path: Path) -> list[str]:
    with h5py.File(path) as file:
        return [key.decode() for key in file["key"][()]]


def assert_texts(batches: Iterable[Any], keys: list[str], *, field: int = 1, texts: list[list[str]] = TEXTS) -> int:
    """Every batch has the texts and the key of each of its rows; returns how many rows are valid."""
    seen = 0
    for batch in batches:
        rows = batch.rows.tolist()
        assert batch[field] == [texts[row] for row in rows] and batch[field + 1] == [keys[row] for row in rows]
        seen += int(batch.valid.sum())
    return seen


# Reading


def test_samples_have_their_texts_exactly(packed: Path) -> None:
    dataset = PackedDataset(packed, fields=FIELDS)
    assert [dataset[row][1] for row in range(N)] == TEXTS and [dataset[row][2] for row in range(N)] == keys_of(packed)
    assert pickle.loads(pickle.dumps(dataset)).select([6, 5])[0][1] == TEXTS[6]
    assert "caption list of str, key str" in repr(dataset)
    assert PackedDataset(packed).fields == ("images", "labels")
    assert PackedDataset(packed, fields=("caption",))[5] == (TEXTS[5],)


_word = st.text(st.characters(exclude_categories=["Cs"]), max_size=9).filter(lambda text: not text.endswith("\0"))


@given(texts=st.lists(st.lists(_word, max_size=4), min_size=1, max_size=7))
def test_any_texts_come_back_from_their_arrays(texts: list[list[str]]) -> None:
    values, counts = text_arrays([[text.encode() for text in row] for row in texts])
    assert text_lists(values, counts) == texts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shuffle": False, "ends": "exact"},
        {"ends": "pad"},
        {"ends": "exact", "share": (1, 3)},
        {"echo": 3},
        {"batch": "list"},
        {"batch": "pad"},
        {"transform": [RandomResizedCrop(8), RandomHorizontalFlip(), Normalize([0.5] * 3, [0.5] * 3)]},
        {"transform": [RandomResizedCrop(8)], "echo": 2},
        {"batch_size": 2, "workers": 2},  # small batches are filled several at a time
    ],
    ids=str,
)
def test_batches_of_threads_have_the_texts_of_their_rows(packed: Path, options: dict[str, Any]) -> None:
    with closing(FastLoader(PackedDataset(packed, fields=FIELDS), **{"batch_size": 8, **options})) as loader:
        seen = assert_texts(loader, keys_of(packed))
        loader.set_epoch(1)
        state = loader.state_dict()
        rest = itertools.islice(loader, 2)
        assert assert_texts(rest, keys_of(packed)) and seen
        loader.load_state_dict(state)
        assert assert_texts(loader, keys_of(packed)) == seen


def test_echoes_of_a_batch_share_no_list(packed: Path) -> None:
    with closing(FastLoader(PackedDataset(packed, fields=FIELDS), 8, echo=2)) as loader:
        batches = iter(loader)
        first = next(batches)
        wanted = [list(row) for row in first[1]]
        first[1][0] = ["changed"]
        for row in first[1]:
            row.append("more")
        assert next(batches)[1] == wanted


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """An index of two files whose texts differ in length, and the texts of its rows."""
    folder = tmp_path_factory.mktemp("shards")
    texts = [*TEXTS, *([text * 3 for text in row] for row in TEXTS)]
    files = [captioned(folder / f"{n}.h5", part, seed=n) for n, part in enumerate((texts[:N], texts[N:]))]
    return index_files(files, folder / "index.h5").path, texts


@pytest.mark.parametrize("cache", [None, "device", "host"])
def test_texts_stay_on_the_cpu_beside_batches_on_a_device(
    packed: Path, sharded: tuple[Path, list[list[str]]], cache: Any
) -> None:
    for path, texts in ((packed, TEXTS), sharded):
        dataset = PackedDataset(path, fields=FIELDS)
        keys = [dataset[row][2] for row in range(len(dataset))]
        for options in ({"echo": 2}, {"transform": [RandomHorizontalFlip()]}):
            with closing(FastLoader(dataset, 8, device=Device(), cache=cache, ends="exact", **options)) as loader:
                assert assert_texts(loader, keys, texts=texts) == len(texts) * options.get("echo", 1)
    with closing(FastLoader(PackedDataset(packed, fields=FIELDS), 8, device=Device(), batch="list")) as loader:
        assert assert_texts(loader, keys_of(packed)) == N // 8 * 8


def _longer(sample: Any) -> Any:
    image, captions, key = sample
    return image.float(), [*captions, "new"], key, len(captions)


def test_batches_of_processes_have_the_texts_of_their_rows(packed: Path) -> None:
    keys = keys_of(packed)
    dataset = PackedDataset(packed, fields=FIELDS, transform=_longer)
    with closing(FastLoader(dataset, 8, workers=1, ends="exact")) as loader:
        assert assert_texts(loader, keys, texts=[[*row, "new"] for row in TEXTS]) == N


def test_a_plain_dataloader_takes_texts_with_the_collate_of_the_dataset(packed: Path) -> None:
    dataset = PackedDataset(packed, fields=("images", "caption", "labels"))
    with pytest.raises(OptionError, match="collate_fn"):
        list(DataLoader(dataset, 8))
    batches = list(DataLoader(dataset, 8, collate_fn=dataset.collate))
    assert [row for batch in batches for row in batch[1]] == TEXTS
    assert batches[0][0].shape == (8, 3, 16, 12) and batches[0][2].dtype == torch.int64


def test_texts_that_rotted_reach_nobody(tmp_path: Path) -> None:
    path = captioned(tmp_path / "a.h5")
    with h5py.File(path) as file:
        offset = file["caption"].id.get_offset()
        width = file["caption"].dtype.itemsize * file["caption"].shape[1]
    data = bytearray(path.read_bytes())
    data[offset + 2 * width] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedRowError, match="row 2"):
        PackedDataset(path, fields=("images", "caption"))[2]
    assert not verify_file(path).ok
    with closing(FastLoader(PackedDataset(path, fields=FIELDS, on_damage="skip"), 8, ends="exact")) as loader:
        assert sum(batch.valid.sum().item() for batch in loader) == N - 1


def test_a_field_of_texts_is_named_among_those_that_can_be_asked_for(packed: Path) -> None:
    with pytest.raises(OptionError, match="caption, key"):
        PackedDataset(packed, fields=("captions",))


def test_h5py_sees_texts_in_utf_8(packed: Path) -> None:
    with h5py.File(packed) as file:
        item = file["caption"]
        assert item.dtype.kind == "S" and h5py.check_string_dtype(item.dtype).encoding == "utf-8"
        assert item.asstr()[5].tolist() == TEXTS[5]


# Files made of others


def texts_by_key(path: Path) -> dict[str, list[str]]:
    dataset = PackedDataset(path, fields=("key", "caption"))
    return dict(dataset[row] for row in range(len(dataset)))


def test_rows_that_are_repacked_keep_their_texts(packed: Path, tmp_path: Path) -> None:
    path = repack_file(packed, tmp_path / "b.h5", label=("b",), shuffle=True, workers=0).path
    known = texts_by_key(packed)
    found = texts_by_key(path)
    assert len(found) == 14 and all(found[key] == known[key] for key in found)


def test_merged_files_have_room_for_the_longest_and_the_most_texts(packed: Path, tmp_path: Path) -> None:
    other = [["one " * 40], [], ["a", "b", "c", "d", "", "e"]]
    more = captioned(tmp_path / "more.h5", other, seed=3, masks=True)
    path = merge_files([packed, more], tmp_path / "both.h5", workers=0).path
    dataset = PackedDataset(path, fields=("caption",))
    assert [dataset[row][0] for row in range(len(dataset))] == [*TEXTS, *other]
    assert verify_file(path).ok
    merged = merge_files([more, packed], tmp_path / "other.h5", workers=0).path
    assert PackedDataset(merged, fields=("caption",))[2][0] == other[2]


def test_a_few_long_texts_do_not_blow_up_a_merge(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastload.repack.merge._LARGE", 10_000)
    more = captioned(tmp_path / "more.h5", [["x" * 20_000]], seed=3, masks=True)
    with pytest.raises(SourceError, match=r"longest text, of .*more.h5. Pack that one again with `--captions BYTES`"):
        merge_files([packed, more], tmp_path / "both.h5", workers=0)


def test_an_index_of_files_takes_texts_of_any_length(sharded: tuple[Path, list[list[str]]]) -> None:
    path, texts = sharded
    dataset = PackedDataset(path, fields=FIELDS)
    assert [dataset[row][1] for row in range(2 * N)] == texts
    with closing(FastLoader(dataset, 8, ends="exact")) as loader:
        assert assert_texts(loader, [dataset[row][2] for row in range(2 * N)], texts=texts) == 2 * N
    assert verify_file(path).ok and inspect_file(path).captions == tuple(texts[0])


@pytest.mark.parametrize("format", ["folder", "hf", "webdataset"])
@pytest.mark.parametrize("single", [False, True])
def test_exports_are_packed_to_the_same_texts(tmp_path: Path, format: Any, single: bool) -> None:
    texts = [[f"a dog, {i} ä"] for i in range(N)] if single else TEXTS
    source = captioned(tmp_path / "a.h5", texts, classes="")
    folder = export_file(source, tmp_path / "out", format=format, workers=1).folder
    if format == "folder":  # without the files that only fastload reads
        (folder / "fastload.json").unlink()
        (folder / "fields.npz").unlink()
    again = pack_images(folder, tmp_path / "b.h5", workers=0).path
    (known, found), (before, after) = map(texts_by_key, (source, again)), map(rows_by_key, (source, again))
    of_pixels = {row["digest"]: known[key] for key, row in before.items()}
    assert {key: of_pixels[row["digest"]] for key, row in after.items()} == found
    if format == "hf":
        line = json.loads((folder / "metadata.jsonl").read_text().splitlines()[7])
        assert line["caption"] == (texts[7][0] if single else texts[7]) and "num_captions" not in line


def test_an_export_is_packed_to_the_same_file_of_texts(packed: Path, tmp_path: Path) -> None:
    folder = export_file(packed, tmp_path / "out", workers=1).folder
    again = pack_images(folder, tmp_path / "b.h5", workers=0, shuffle=False).path
    with h5py.File(packed) as a, h5py.File(again) as b:
        assert (a["caption"][()] == b["caption"][()]).all() and a["caption"].dtype == b["caption"].dtype


def test_info_and_preview_show_a_text(tmp_path: Path) -> None:
    path = captioned(tmp_path / "a.h5", [["two dogs", "dogs"], [], ["a cat"]], classes="")
    assert inspect_file(path).captions == ("two dogs", "dogs")
    with h5py.File(path) as file:
        keys = keys_of(path)
        assert labels_of(file, read_header(path), [0, 1, 2]) == ["two dogs", keys[1].rsplit("/")[-1], "a cat"]
    assert np.array_equal(PackedDataset(path, fields=("num_captions",))[1][0], 0)
