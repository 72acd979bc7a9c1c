"""FastLoader from file to batch, against what the plan says and what the file holds."""

from __future__ import annotations

import copy
import gc
import inspect
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import fields

import h5py
import numpy as np
import pytest
import torch
from child_processes import in_a_fork
from late_backend import LateBackend
from small_files import write_random
from small_loaders import loader_of

from fastload.dataset import PackedDataset
from fastload.distributed import ranks
from fastload.errors import FileChangedError, FormatError, MissingFileError, OptionError, ShareError, StateError
from fastload.loader import loader as loader_module
from fastload.loader.batch import Batch
from fastload.loader.loader import FastLoader
from fastload.loader.loader_options import List, LoaderOptions, Pad, Workers
from fastload.plan import ChunkWindow
from fastload.transforms import CenterCrop, Normalize, RandomHorizontalFlip

N, SHAPE = 60, (32, 24, 3)
ROW_BYTES = 32 * 24 * 3
WHOLE = {"rows": N, "size": SHAPE, "seed": 5, "classes": "abcdefg", "boxes": True, "masks": True, "chunk_rows": 8}
PACKED = WHOLE | {"splits": {"train": 40, "val": 20}}


@pytest.fixture(scope="module")
def pixels(pixels):
    """The images of the file as a loader hands them over, (N, C, H, W)."""
    return torch.from_numpy(pixels).permute(0, 3, 1, 2)


def rows_of(loader):
    return [batch.rows.tolist() for batch in loader]


def flat(lists):
    return [row for rows in lists for row in rows]


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fastload")]


def test_a_batch_is_what_the_file_holds_at_its_rows(packed, pixels):
    loader = FastLoader(packed, 8, shuffle=True, seed=3)
    seen = []
    for batch in loader:
        images, labels = batch
        assert isinstance(batch, Batch) and images.dtype == torch.uint8 and labels.dtype == torch.int64
        assert images.shape == (8, 3, 32, 24) and images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images, pixels[batch.rows]) and torch.equal(labels, batch.rows % 7)
        assert batch.rows.dtype == torch.int64 and batch.valid.dtype == torch.bool and batch.valid.all()
        assert batch.global_valid == 8
        seen += batch.rows.tolist()
    assert len(seen) == len(set(seen)) == 56 and len(loader) == 7
    # In the order of the file the last batch is short, or filled with repeats, which do not count.
    loader = FastLoader(packed, 8, shuffle=False)
    *_, last = batches = list(loader)
    assert last.valid.tolist() == [True] * 4 and last.global_valid == 4 and len(last[0]) == 4
    *_, filled = FastLoader(packed, 8, shuffle=False, ends="pad")
    assert filled.valid.tolist() == [True] * 4 + [False] * 4 and filled.global_valid == 4 and len(filled[0]) == 8
    assert torch.cat([batch.rows[batch.valid] for batch in batches]).tolist() == list(range(N))
    assert len(batches) == len(loader) == 8 and loader.stats.fresh_samples == N


def test_the_dataset_tells_the_number_of_samples_as_that_of_a_dataloader_does(packed):
    dataset = PackedDataset(packed)
    assert len(FastLoader(packed, 4).dataset) == len(FastLoader(dataset, 4).dataset) == len(dataset)
    others = [(torch.zeros(3, 4, 4, dtype=torch.uint8), 0)] * 9
    assert FastLoader(others, 4).dataset is others


@pytest.mark.parametrize("read", ["map", "pread"])
@pytest.mark.parametrize("shuffle", [True, False, "full", "chunk", ChunkWindow(2)])
def test_order_is_the_plans_whatever_the_workers(packed, shuffle, read):
    orders = [rows_of(loader_of(packed, 7, shuffle=shuffle, workers=workers, read=read)) for workers in (1, 2, 4)]
    assert orders[0] == orders[1] == orders[2]
    plan = FastLoader(packed, 7, shuffle=shuffle)._epochs.plan
    assert orders[0] == [batch.rows.tolist() for batch in plan.batches(0)]


def test_epochs_follow_one_another_and_set_epoch_chooses(packed):
    loader = FastLoader(packed, 8, seed=1)
    assert loader.epoch == 0
    first, second = rows_of(loader), rows_of(loader)
    assert loader.epoch == 1 and first != second
    loader.set_epoch(0)
    assert rows_of(loader) == first
    assert rows_of(loader) == second
    with pytest.raises(OptionError, match="epoch=-1"):
        loader.set_epoch(-1)


def test_list_of_a_loader_keeps_every_batch_as_it_was(packed, pixels):
    # More than 64 KiB of pixels in a batch, so that they lie in the ring.
    loader = FastLoader(packed, 30, shuffle=False)
    loader_batches = [batch for _ in range(6) for batch in loader]
    assert 30 * ROW_BYTES > 64 * 1024
    for batch in loader_batches:
        assert torch.equal(batch[0], pixels[batch.rows])
        batch[0][0].zero_()  # it may be written to
    views = [batch[0][3:5].permute(0, 2, 3, 1).numpy() for batch in loader_batches]
    rows = [batch.rows[3:5] for batch in loader_batches]
    del loader_batches, batch
    for _ in range(4):
        list(loader)
    for view, row in zip(views, rows, strict=True):
        assert np.array_equal(view, pixels[row].permute(0, 2, 3, 1).numpy())


@pytest.mark.parametrize("how", ["break", "close", "forget", "error", "exhaust"])
def test_threads_stay_with_the_loader_until_it_is_closed_or_gone(packed, pixels, how):
    loader = FastLoader(packed, 8)
    with suppress(KeyError):
        for batch in loader:
            kept = batch
            assert threads()
            if how == "close":
                loader.close()
            if how == "forget":
                del loader
            if how == "error":
                raise KeyError("mine")
            if how != "exhaust":
                break
    if how in ("break", "error", "exhaust"):
        assert threads()
        del loader
    gc.collect()
    assert not threads() and torch.equal(kept[0], pixels[kept.rows])


def test_a_second_iterator_ends_the_first(packed):
    loader = FastLoader(packed, 8)
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(OptionError, match=r"ended by a newer iter\(\)"):
        next(first)
    next(second)
    loader.close()
    loader.close()
    with pytest.raises(OptionError, match=r"or its close\(\)"):
        next(second)
    assert len(list(loader)) == 7


def wait_until_read_ahead(loader):
    """Until the threads have filled every slot that they were given."""
    run = loader._producer.pool._run
    while not all(work.done for work in run.under_way):
        time.sleep(0.001)


@pytest.mark.parametrize("options", [{"read": "map"}, {"read": "pread"}, {"transform": [RandomHorizontalFlip()]}])
def test_a_file_truncated_or_written_while_training_is_an_error(tmp_path, options):
    loader = loader_of(write_random(tmp_path / "a.h5", **WHOLE), 4, **options)
    iterator = iter(loader)
    next(iterator)
    wait_until_read_ahead(loader)  # truncated in the middle of a copy, a mapped file kills the process (SIGBUS)
    os.truncate(tmp_path / "a.h5", 10_000)
    with pytest.raises(FileChangedError, match="truncated"):
        list(iterator)


def test_a_file_replaced_while_training_is_read_on_as_it_was_and_refused_at_the_next_epoch(tmp_path):
    loader = FastLoader(write_random(tmp_path / "a.h5", **WHOLE), 4, seed=2)
    expected = [batch[0].clone() for batch in FastLoader(tmp_path / "a.h5", 4, seed=2)]
    iterator = iter(loader)
    got = [next(iterator)[0].clone()]
    write_random(tmp_path / "b.h5", **WHOLE | {"rows": 30})
    os.replace(tmp_path / "b.h5", tmp_path / "a.h5")
    got += [images.clone() for images, _ in iterator]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    with pytest.raises(FileChangedError, match="another file"):
        iter(loader)
    os.unlink(tmp_path / "a.h5")
    with pytest.raises(MissingFileError, match="gone"):
        iter(loader)


# Options and sources


def test_splits_fields_and_subsets_come_from_a_dataset(packed, pixels):
    dataset = PackedDataset(packed, split="val", fields=["valid", "masks", "row", "images", "bbox"])
    loader = FastLoader(dataset, 6, ends="exact")
    rows = []
    for valid, masks, row, images, bbox in loader:
        assert torch.equal(images, pixels[row]) and torch.equal(masks, pixels[row][:, 0])
        assert torch.equal(bbox[:, 0], row.int() * 4) and bbox.dtype == torch.int32
        rows += row[valid].tolist()
    assert sorted(rows) == list(range(40, 60))
    subset = dataset.select([3, 1, 4, 1, 5])
    assert rows_of(FastLoader(subset, 5, shuffle=False)) == [[43, 41, 44, 41, 45]]
    with pytest.raises(OptionError, match="chunk"):
        FastLoader(subset, 5, shuffle="chunk")


def test_stats_count_fresh_and_consumed_samples_apart(packed):
    loader = FastLoader(packed, 20, echo=2)
    assert loader.stats.steps == 0 and loader.stats.stall_share == 0
    list(loader)
    stats = loader.stats
    assert (stats.fresh_samples, stats.consumed_samples, stats.steps) == (60, 120, 6)
    assert stats.bytes_read == 60 * (ROW_BYTES + 8)
    assert 0 < stats.stall_s <= stats.elapsed_s
    assert stats.consumed_samples_per_s == 2 * stats.fresh_samples_per_s > 0


def test_transforms_run_late_and_their_draws_depend_on_the_sample_alone(packed, pixels):
    options = {
        "transform": [RandomHorizontalFlip(), CenterCrop(16), Normalize([0.5] * 3, [0.25] * 3)],
        "shuffle": "full",
    }
    by_row = {}
    for share, batch_size in (((0, 1), 20), ((0, 2), 10), ((1, 2), 6)):
        for batch in FastLoader(packed, batch_size, share=share, ends="exact", **options):
            assert batch[0].dtype == torch.float32 and batch[0].shape[1:] == (3, 16, 16)
            for row, image in zip(batch.rows.tolist(), batch[0], strict=True):
                assert torch.equal(by_row.setdefault(row, image.clone()), image)
    assert len(by_row) == N
    plain = (pixels[:, :, 8:24, 4:20].float() / 255 - 0.5) / 0.25
    same = sum(torch.allclose(by_row[row], plain[row], atol=1e-5) for row in range(N))
    assert 10 < same < 50
    with pytest.raises(OptionError, match="bbox"):
        FastLoader(PackedDataset(packed, fields=["images", "bbox"]), 8, transform=[RandomHorizontalFlip()])
    with pytest.raises(OptionError, match="no images"):
        FastLoader(PackedDataset(packed, fields=["labels"]), 8, transform=[RandomHorizontalFlip()])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": "rows"}, r"""batch='rows' is not known; choose "stack", "list", "pad", List"""),
        ({"workers": "fast"}, """workers='fast': give a whole number, 1 or more, "auto" or None"""),
        ({"workers": 0}, "workers=0: give a whole number"),
        ({"workers": 1.5}, "workers=1.5: give"),
        ({"workers": True}, "workers=True: give"),
        ({"echo": 0}, "echo=0"),
        ({"echo": 1.5}, "echo=1.5"),
        ({"echo": True}, "echo=True"),
        ({"echo": "automatic"}, r"echo='automatic': give a whole number, 1 or more, MixedEcho.* or \"auto\""),
        ({"echo": "auto", "share": (0, 2)}, 'echo="auto".*rank 0 of 2.*init_process_group'),
        ({"shuffle": "random"}, "shuffle='random'"),
        ({"cache": True}, 'cache=True is not known; choose "device", "host", "auto" or None'),
        ({"cache": ("device",)}, r"cache=\('device',\) is not known"),
        ({"ends": "keep"}, "ends='keep'"),
        ({"share": (2, 2)}, r"share=\(2, 2\)"),
        ({"device": "tpu9000"}, "device='tpu9000'"),
        ({"transform": RandomHorizontalFlip()}, "list"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 61}, "60 samples do not make one batch of 61 with ends='drop'"),
        ({"batch_size": 31, "share": (0, 2)}, "60 samples over 2 ranks"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_options_without_meaning_are_refused_at_once(packed, options, message):
    with pytest.raises(OptionError, match=message):
        FastLoader(packed, **{"batch_size": 8, **options})


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


def test_sources_that_cannot_be_planned_say_what_to_use(packed, tmp_path):
    for source, message in (
        (Endless(), "Endless is an IterableDataset"),
        (torch.utils.data.TensorDataset, "source=TensorDataset is a class"),
        (7, "got int"),
    ):
        with pytest.raises(OptionError, match=message):
            FastLoader(source, 8)
    with pytest.raises(MissingFileError, match="no such file"):
        FastLoader(tmp_path / "none.h5", 8)
    (tmp_path / "text.h5").write_text("not at all")
    with pytest.raises(FormatError):
        FastLoader(tmp_path / "text.h5", 8)


def test_a_rebuilt_batch_says_how_to_keep_its_facts(packed):
    batch = next(iter(FastLoader(packed, 8)))
    assert copy.copy(batch).global_valid == 8
    rebuilt = type(batch)(tensor.clone() for tensor in batch)
    assert torch.equal(rebuilt[0], batch[0])
    with pytest.raises(AttributeError, match="'row' or 'valid'"):
        _ = rebuilt.rows
    assert not hasattr(rebuilt, "nonsense")


# Processes and threads


def test_loaders_in_many_threads_do_not_meet(packed):
    expected = rows_of(FastLoader(packed, 8, seed=1))
    with ThreadPoolExecutor(4) as pool:
        assert all(rows == expected for rows in pool.map(lambda _: rows_of(FastLoader(packed, 8, seed=1)), range(8)))


def test_a_process_group_decides_also_over_an_environment_and_loaders_made_before_it(packed, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.warns(UserWarning, match="rank 1 of 3"):
        loader, iterated = FastLoader(packed, 8), FastLoader(packed, 8)
    next(iter(iterated))
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ShareError, match=r"rank 1 of 3.*rank 0 of 1"):
            iter(iterated)
        assert len(loader) == N // 8 and len(rows_of(loader)) == N // 8, "it was not asked for anything before"
        exact = FastLoader(packed, 8, ends="exact")
        assert sorted(flat(batch.rows[batch.valid].tolist() for batch in exact)) == list(range(N))
        assert len(rows_of(FastLoader(packed, 8, share=(2, 3)))) == 2
    finally:
        torch.distributed.destroy_process_group()


def test_a_loader_made_before_its_process_group_is_that_of_its_rank_with_its_epoch_or_state(packed, monkeypatch):
    expected, begun = (FastLoader(packed, 4, seed=3, share=(1, 2)) for _ in range(2))
    expected.set_epoch(2)
    batches = iter(begun)
    next(batches)
    state = begun.state_dict()
    rest = [batch.rows.tolist() for batch in batches]
    moved, resumed, given = (FastLoader(packed, 4, seed=3, **words) for words in ({}, {}, {"share": None}))
    monkeypatch.setenv("WORLD_SIZE", "2")  # and no RANK, as where a launcher sets only some
    unknown, nowhere = FastLoader(packed, 4, seed=3), FastLoader(packed, 4)
    for loader in (moved, unknown):
        loader.set_epoch(2)
    resumed.load_state_dict(state)
    with pytest.raises(ShareError, match="name no rank"):
        iter(nowhere)
    for module in (ranks, loader_module):
        monkeypatch.setattr(module, "process_group", lambda: ranks.Share(1, 2))
    assert len(moved) == len(unknown) == len(expected) == len(given) // 2
    assert rows_of(moved) == rows_of(unknown) == rows_of(expected)
    assert rows_of(resumed) == rest


def test_arguments_of_a_dataloader_are_answered(packed):
    for words, answer in (
        ({"num_workers": 4}, "`workers=`"), ({"drop_last": True}, 'ends="drop"'), ({"collate_fn": list}, "transform"),
        ({"pin_memory": True, "persistent_workers": True}, 'device="cuda".*until `close'),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=answer):
            FastLoader(packed, 8, **words)


@pytest.mark.parametrize(
    ("words", "names", "instead"),
    [
        ({"read": "pread"}, "read=", "FastLoader(PackedDataset({file!r}, read='pread'), ...)"),
        ({"check": None, "on_damage": "skip"}, "check=, on_damage=", "({file!r}, check=None, on_damage='skip'), ...)"),
        ({"cache_dir": "there"}, "cache_dir=", "PackedDataset.from_folder({file!r}, cache_dir='there')"),
        (
            {"batch": "pad", "pad_to": 32, "group_by": "aspect"},
            "pad_to=, group_by=",
            "Pad(multiple=32, group_by='aspect')",
        ),
        ({"batch": "list", "group_by": "aspect"}, "group_by=", "batch=List(group_by='aspect')"),
        ({"batch": List(), "pad_to": 8}, "pad_to=", "batch=Pad(multiple=8)"),
        ({"batch": Pad(group_by="aspect"), "pad_to": 8}, "pad_to=", "batch=Pad(multiple=8, group_by='aspect')"),
        ({"split": "train", "fields": ("images",)}, "split=, fields=", "split='train', fields=('images',)), ...)"),
        ({"timeout": 30}, "timeout=", "workers=Workers(timeout=30)"),
        ({"timeout": 30, "workers": "auto"}, "timeout=", "workers=Workers('auto', timeout=30)"),
        ({"timeout": 30, "workers": Workers(4)}, "timeout=", "workers=Workers(4, timeout=30)"),
        (
            {"read": "map", "timeout": 1, "num_workers": 2},
            "read=",
            "no argument timeout=: give workers=Workers(timeout=1)",
        ),
    ],
)
def test_arguments_of_other_objects_are_answered_with_the_line_to_type(packed, words, names, instead):
    with pytest.raises(OptionError) as caught:
        FastLoader(str(packed), 8, **words)
    said = str(caught.value)
    assert said.startswith(f"FastLoader has no argument {names}: give ") and instead.format(file=str(packed)) in said


def test_what_says_nothing_is_left_out(packed):
    with pytest.raises(OptionError, match="no argument cache_dir=, pad_to=, timeout=: leave it out"):
        FastLoader(packed, 8, cache_dir=None, pad_to=None, timeout=None)
    with pytest.raises(OptionError, match='source="": give the path'):
        FastLoader("", 8)


def test_such_arguments_are_answered_also_where_they_are_changed_or_set(packed):
    with closing(FastLoader(packed, 8, workers=3, batch="list")) as loader:
        with pytest.raises(OptionError, match=r"timeout=: give workers=Workers\(3, timeout=9\)"):
            loader.with_(timeout=9)
        with pytest.raises(OptionError, match=r"group_by=: give batch=List\(group_by='aspect'\)"):
            loader.group_by = "aspect"
        with pytest.raises(
            OptionError, match=r"read=: give FastLoader\(PackedDataset\(\.\.\., read='pread'\), \.\.\.\)"
        ):
            loader.read = "pread"


def test_of_a_folder_the_line_to_type_is_that_of_a_folder(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(OptionError, match=r"PackedDataset\.from_folder\('.*photos', check=None\)"):
        FastLoader(tmp_path / "photos", 8, check=None)


def test_misspelt_arguments_are_told_the_nearest_one(packed):
    for words, message in (
        ({"batchsize": 8}, r"no argument batchsize=. Did you mean batch_size=\?$"),
        ({"Shuffle": True, "batch_size": 8}, r"no argument Shuffle=. Did you mean shuffle=\?$"),
        ({"batch_size": 8, "nonsense": 1}, r"no argument nonsense=. `help\(fastload.FastLoader\)` lists"),
    ):
        with pytest.raises(OptionError, match=message):
            FastLoader(packed, **words)


def test_signatures_are_those_of_init_also_of_subclasses(packed):
    twelve = "source batch_size shuffle ends seed share workers device transform echo cache batch".split()
    assert list(inspect.signature(FastLoader).parameters) == twelve == [field.name for field in fields(LoaderOptions)]

    class Named(FastLoader):
        def __init__(self, source, *, name):
            super().__init__(source, 8)
            self.name = name

    assert list(inspect.signature(Named).parameters) == ["source", "name"]
    assert Named(packed, name="first").name == "first"
    with pytest.raises(OptionError, match=r"names=\. Did you mean name="):
        Named(packed, names="first")


def test_a_loader_says_what_it_loads_and_how(packed):
    loader = FastLoader(packed, 8, seed=3, workers=1)
    first, second = repr(loader).split("\n")
    assert first == f"FastLoader({packed.name}, {N} rows, {N // 8} batches of 8)"
    assert "ends drop, seed 3, 1 thread (map), to host memory" in second
    assert "<table>" in loader._repr_html_() and packed.name in loader._repr_html_()
    part = FastLoader(PackedDataset(packed).select([0, 1, 2]), 2, shuffle=False, share=(1, 2), echo=2)
    assert "some of its rows, 3 rows, 1 batch of 2, rank 1 of 2" in repr(part) and "in order" in repr(part)
    assert "echo 2" in repr(part)


def test_two_threads_share_out_one_iteration(packed):
    loader = FastLoader(packed, 8, ends="exact")
    batches, errors = iter(loader), []
    seen: list[list[int]] = [[], []]

    def consume(at: int) -> None:
        try:
            for batch in batches:
                seen[at] += batch.rows[batch.valid].tolist()
        except BaseException as error:  # noqa: BLE001 - looked at below, in the main thread
            errors.append(error)

    threads = [threading.Thread(target=consume, args=(at,), daemon=True) for at in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not errors and not any(thread.is_alive() for thread in threads)
    assert sorted(seen[0] + seen[1]) == list(range(len(PackedDataset(packed))))


def test_a_state_of_another_file_or_a_newer_release_is_refused_and_changes_nothing(packed, tmp_path):
    other = FastLoader(write_random(tmp_path / "b.h5", **WHOLE | {"rows": 61}), 7)
    loader, expected = FastLoader(packed, 7), rows_of(FastLoader(packed, 7))
    batches = iter(loader)
    seen = [next(batches).rows.tolist() for _ in range(2)]
    here = loader.state_dict()
    for state, message in (
        (other.state_dict(), "header_digest is .* here and .* in the state"),
        (here | {"version": 2}, "version 2, this fastload reads version 1: install the release"),
        (here | {"epoch": -1}, "epoch is -1"),
        (FastLoader(packed, 7, seed=9).state_dict(), "seed"),
        (FastLoader(packed, 7, shuffle="full").state_dict(), "shuffle"),
        (FastLoader(PackedDataset(packed, split="train"), 7).state_dict(), "header_digest"),
        ([here], "a dict of state_dict.., got list"),
        (None, "a dict of state_dict.., got NoneType"),
    ):
        for begun_or_not in (loader, FastLoader(packed, 7)):
            with pytest.raises(StateError, match=message):
                begun_or_not.load_state_dict(state)
    assert loader.state_dict() == here
    assert seen + [batch.rows.tolist() for batch in batches] == expected
    with pytest.raises(StateError, match="does not fit this epoch"):
        loader.load_state_dict(here | {"segments": [[1, 7, 900]]})


def test_full_shuffle_over_large_compressed_chunks_says_what_it_costs(tmp_path):
    with h5py.File(tmp_path / "a.h5", "w") as file:  # all zeros: 600 MB decoded, next to nothing stored
        file.create_dataset("images", (200, 1000, 1000, 3), np.uint8, chunks=(4, 1000, 1000, 3), compression="gzip")
    with pytest.warns(
        UserWarning, match='a.h5: images is compressed.*decodes a chunk for nearly every.*shuffle="chunk"'
    ):
        FastLoader(tmp_path / "a.h5", 8)
    for options in ({"shuffle": "chunk"}, {"shuffle": False}, {"cache": "device", "device": LateBackend(1)}):
        FastLoader(tmp_path / "a.h5", 8, **options)


def test_an_iteration_carried_over_a_fork_is_an_error_and_no_hang(packed):
    loader, other = FastLoader(packed, 8), FastLoader(packed, 8)
    other.set_epoch(1)
    second = rows_of(other)
    batches = iter(loader)
    next(batches)

    def go_on():
        with pytest.raises(OptionError, match="begun in process"):
            next(batches)
        assert rows_of(loader) == second

    in_a_fork(go_on)
    assert len(list(batches)) == 6 and rows_of(loader) == second


def add_to_a_digest(path, number):
    """Changes the header of a file in use, but not its size."""
    with h5py.File(path, "r+", locking=False) as file:
        file["digest"][0] = int(file["digest"][0]) + number
    os.utime(path, ns=(1, 1))


@pytest.mark.filterwarnings("ignore:.*touched or copied anew")
def test_an_iteration_that_failed_does_not_pass_for_a_finished_one(tmp_path):
    path = write_random(tmp_path / "a.h5", **WHOLE)
    loader, expected = FastLoader(path, 8, seed=2), rows_of(FastLoader(path, 8, seed=2))
    batches = iter(loader)
    seen = [next(batches).rows.tolist()]
    stat = os.stat(path)
    add_to_a_digest(path, 1)
    with pytest.raises(FileChangedError):
        seen += [batch.rows.tolist() for batch in batches]
    with pytest.raises(OptionError, match="ended by FileChangedError before the end"):
        next(batches)
    add_to_a_digest(path, -1)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    loader.load_state_dict(loader.state_dict())
    # Batches that had been read before the change were handed over after it.
    done = len(expected) - len(loader)
    assert rows_of(loader) == expected[done:] and done >= 1


def test_a_loader_is_neither_pickled_nor_copied(packed):
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=r"a FastLoader holds open files.*state_dict"):
            attempt(FastLoader(packed, 8))
