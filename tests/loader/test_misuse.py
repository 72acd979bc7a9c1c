"""Arguments that are misspelt, belong to another object, or are far too large: the error says what to type."""

from __future__ import annotations

import threading
import time
from contextlib import closing

import numpy as np
import pytest
import torch
from small_files import write_random

import fastload.prefetch.ring
from fastload import ClassBatches, FastLoader, List, MixedEcho, PackedDataset, Pad, Weighted, Workers
from fastload.errors import OptionError

ROWS = 12


class Own(torch.utils.data.Dataset):
    """A dataset of the user's."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return np.full((3, 4, 4), index, np.uint8), index


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_random(tmp_path_factory.mktemp("misuse") / "a.h5", rows=ROWS, size=(4, 4, 3), classes="abc")


@pytest.mark.parametrize(
    ("make", "words", "said"),
    [
        (Workers, {"n": 2}, r"Workers has no argument n=. Say number=, or the number alone: Workers\(4\)"),
        (Workers, {"timeuot": 2}, r"Workers has no argument timeuot=. Did you mean timeout=\?"),
        (Workers, {"zzz": 2}, r"Workers has no argument zzz=. It has number=, timeout=\."),
        (Pad, {"pad_to": 32}, "Pad has no argument pad_to=. Say multiple="),
        (Pad, {"padto": 32}, r"no argument padto=. Did you mean pad_to=\? Say multiple="),
        (Pad, {"n": 1, "m": 2}, "Pad has no argument n=.* Pad has no argument m=."),
        (List, {"multiple": 32}, r"List has no argument multiple=.*Pad\(multiple=\.\.\.\)"),
    ],
)
def test_objects_of_options_say_what_they_have_instead(make, words, said):
    with pytest.raises(OptionError, match=said):
        make(**words)


def test_objects_of_options_are_made_compared_and_copied_as_before():
    assert Workers(4, timeout=2) == Workers(number=4, timeout=2.0) and Pad(group_by="aspect").multiple == 1
    assert repr(Pad(32)) == "Pad(multiple=32, group_by=None)"


def test_a_dataset_says_where_its_unknown_arguments_belong(path, tmp_path):
    for words, said in (
        ({"timeout": 3}, r"PackedDataset has no argument timeout=.*workers=Workers\(timeout=\.\.\.\)"),
        ({"shuffle": True}, r"no argument shuffle=. It is FastLoader's: FastLoader\(PackedDataset\(\.\.\.\), batch"),
        ({"chek": None}, r"no argument chek=. Did you mean check=\?"),
        ({"chek": None, "cache_dir": "x"}, r"argument chek=.*argument cache_dir=.*from_folder\(folder, cache_dir="),
    ):
        with pytest.raises(OptionError, match=said):
            PackedDataset(path, **words)
    for words, said in (
        ({"split": "train"}, r"PackedDataset.from_folder has no argument split=.*PackedDataset\(file, split="),
        ({"cachedir": "x"}, r"Did you mean cache_dir=\?"),
        ({"transform": list}, r"no argument transform=.*FastLoader\(transform="),
    ):
        with pytest.raises(OptionError, match=said):
            PackedDataset.from_folder(tmp_path, **words)


def test_misspelt_arguments_of_other_objects_get_a_guess_and_the_line_to_type(path):
    for words, said in (
        ({"raed": "map"}, r"no argument raed=. Did you mean read=: give FastLoader\(PackedDataset\('.*', read='map'\)"),
        ({"timout": 3}, r"no argument timout=. Did you mean timeout=: give workers=Workers\(timeout=3\)"),
        ({"pad_too": 3}, r"Did you mean pad_to=: give batch=Pad\(multiple=3\)"),
        ({"drop_lst": True}, r'no argument drop_lst=. Did you mean drop_last=\? `ends="drop"`'),
    ):
        with pytest.raises(OptionError, match=said):
            FastLoader(str(path), 4, **words)


def test_all_unknown_arguments_are_named_at_once(path):
    words = {"shufle": True, "num_workers": 2, "read": "map", "zzz": 1, "qqq": 2}
    with pytest.raises(OptionError) as caught:
        FastLoader(path, 4, **words)
    assert all(f"{word}=" in str(caught.value) for word in words)
    with closing(FastLoader(path, 4)) as loader, pytest.raises(OptionError, match=r"timeout=: .*no argument zzz="):
        loader.with_(zzz=1, timeout=3)


def test_hints_for_a_dataset_of_the_users_can_be_followed(path):
    for words in ({"read": "map"}, {"check": None, "split": "train"}, {"pad_to": 32}):
        with pytest.raises(OptionError, match=r"Own (reads its own|makes samples of one size); leave it out\."):
            FastLoader(Own(), 4, **words)
    with pytest.raises(OptionError, match=r"Own runs Python code for each sample.*fastload pack"):
        FastLoader(Own(), 4, cache="host")  # a device would not help
    part = torch.utils.data.Subset(PackedDataset(path), [0, 1])
    with pytest.raises(OptionError, match=r"give FastLoader\(PackedDataset\(\.\.\., read='map'\)"):
        FastLoader(part, 4, read="map")


@pytest.mark.parametrize(
    ("name", "given"),
    [("batch", Pad), ("batch", List), ("workers", Workers), ("shuffle", Weighted), ("shuffle", ClassBatches),
     ("echo", MixedEcho), ("source", PackedDataset)],
)  # fmt: skip
def test_a_class_in_place_of_an_object_is_named(path, name, given):
    with pytest.raises(OptionError, match=rf"{name}={given.__name__} is a class.*{given.__name__}\(\.\.\.\)"):
        FastLoader(**{"source": path, "batch_size": 4, name: given})


def test_so_many_workers_are_refused(path):
    for workers in (100_000, Workers):
        with pytest.raises(OptionError, match=r"workers=.*(1024 threads or processes at most|is a class)"):
            FastLoader(path, 4, workers=workers)
    with closing(FastLoader(path, 4, workers=1024)) as loader:
        assert len(loader) == ROWS // 4


@pytest.mark.parametrize("source", ["packed", "python"])
def test_a_batch_larger_than_the_data_takes_no_more_memory_than_they(path, source):
    data = path if source == "packed" else Own()
    for share, rows in ((None, [ROWS]), ((1, 5), [3])):
        with closing(FastLoader(data, 10**9, shuffle=False, workers=1, share=share)) as loader:
            assert [len(batch.rows) for batch in loader] == rows == [len(batch[0]) for batch in loader]


def test_where_there_is_no_memory_for_batches_the_error_says_how_much(path, monkeypatch):
    def refused(num_bytes):
        raise MemoryError("of the test")

    monkeypatch.setattr(fastload.prefetch.ring, "allocate_aligned", refused)
    with (
        closing(FastLoader(path, 4, workers=2)) as loader,
        pytest.raises(OptionError, match=r"batch_size=4: 5 batches of [\d,]+ bytes.*Choose a smaller batch_size"),
    ):
        next(iter(loader))


def test_a_with_statement_closes_the_loader_also_after_an_error(path):
    before = threading.active_count()
    with FastLoader(path, 4, workers=2) as loader:
        batches = iter(loader)
        kept = next(batches)
    assert len(kept.rows) == 4
    with pytest.raises(OptionError, match="ended by a newer iter"):
        next(batches)
    with pytest.raises(RuntimeError, match="of the user"), FastLoader(path, 4, workers=2) as loader:
        next(iter(loader))
        raise RuntimeError("of the user")
    end_s = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < end_s:
        time.sleep(0.01)
    assert threading.active_count() <= before
