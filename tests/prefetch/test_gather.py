"""Each stage that copies rows, or hands their slot over, run on a batch by itself."""

from __future__ import annotations

import gc
import threading

import h5py
import numpy as np
import pytest
import torch
from alone import opened, run_alone, untouched
from late_backend import Device
from small_files import write_foreign

from fastload import FormatError, PackedDataset
from fastload.format.ragged import Column
from fastload.format.texts import text_arrays
from fastload.prefetch.stages.gather import (
    GatherRows,
    MappedImages,
    ReadTexts,
    StoreInSlot,
    ToUserLayout,
    WhileHeld,
    WriteFacts,
    use_one_torch_thread,
)
from fastload.prefetch.work import Stage, Where
from sample_files import write_packed

N, ROWS, SHAPE = 20, [7, 3, 19, 3], (150, 160, 3)  # too large to be copied when it is lent


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(1).integers(0, 256, (N, *SHAPE), np.uint8)


@pytest.fixture(scope="module")
def file(images, tmp_path_factory):
    columns = {"labels": Column(np.arange(N, dtype=np.int16) - 4)}
    return write_packed(tmp_path_factory.mktemp("rows") / "a.h5", images, columns, masks=images[..., 0] // 64)


@pytest.fixture
def planar(images, tmp_path):
    """A file of others, images (C, H, W)."""
    path = tmp_path / "planar.h5"
    with h5py.File(path, "w") as file:
        file["images"] = images.transpose(0, 3, 1, 2)
    return path


def test_rows_are_gathered_into_the_slot_as_the_file_has_them(file, planar, images):
    with opened(file) as shared:
        dataset = shared.options.packed.dataset
        work = run_alone(shared, [GatherRows(dataset, ["images", "labels"], into_slot=True)], ROWS)
        assert np.array_equal(work.arrays["images"], images[ROWS]) and not work.fields
        assert work.arrays["labels"].dtype == np.int16 and work.arrays["labels"].tolist() == [3, -1, 15, -1]
        assert work.bytes_read == 4 * (150 * 160 * 3 + 2)
    with opened(planar) as shared:
        work = run_alone(shared, [GatherRows(shared.options.packed.dataset, ["images"], into_slot=True)], ROWS)
        assert np.array_equal(work.arrays["images"], images[ROWS].transpose(0, 3, 1, 2))


def test_rows_for_stages_that_change_them_are_gathered_beside_the_slot_as_they_are_handed_over(file, planar, images):
    expected = torch.from_numpy(images[ROWS]).permute(0, 3, 1, 2)
    for path, names in ((file, ["images", "labels"]), (planar, ["images"])):
        with opened(path) as shared:
            work = run_alone(shared, [GatherRows(shared.options.packed.dataset, names, into_slot=False)], ROWS)
            assert torch.equal(work.fields["images"], expected)
            assert work.arrays["images"].shape[1:] == SHAPE
            assert all(untouched(array) for array in work.arrays.values())
            if path == file:
                labels = work.fields["labels"]
                assert labels.dtype == torch.int64 and labels.tolist() == [3, -1, 15, -1]


def test_images_in_a_mapping_are_left_where_they_lie_and_others_are_gathered(file, planar, images):
    for path, mapped in ((file, True), (planar, False)):
        with opened(path) as shared:
            dataset = shared.options.packed.dataset
            source, names = MappedImages(dataset.file), [name for name, _, _ in dataset.layout()]
            gather = GatherRows(dataset, names, into_slot=False, mapped=source)
            work = run_alone(shared, [gather], ROWS)
            assert ("images" not in work.fields) == mapped == ("images" not in work.arrays)
            if mapped:
                assert np.array_equal(source.rows.numpy(), images)
    with opened(PackedDataset(file, read="pread")) as shared:
        dataset = shared.options.packed.dataset
        source = MappedImages(dataset.file)
        work = run_alone(shared, [GatherRows(dataset, ["images"], into_slot=False, mapped=source)], ROWS)
        assert source.rows is None and "images" in work.fields


def test_a_row_outside_of_the_file_and_a_damaged_one_are_errors_that_name_it(file, tmp_path, images):
    with opened(file) as shared, pytest.raises(IndexError, match="20"):
        run_alone(shared, [GatherRows(shared.options.packed.dataset, ["images"], into_slot=True)], [3, 20])
    path = write_packed(tmp_path / "b.h5", images)
    with h5py.File(path, "r+") as changed:
        changed["images"][5, 0, 0, 0] ^= 1
    with opened(PackedDataset(path, check="always")) as shared, pytest.raises(FormatError, match=r"row 5\b"):
        run_alone(shared, [GatherRows(shared.options.packed.dataset, ["images"], into_slot=True)], [4, 5])


class Noting(Stage):
    """Notes the rows, and what was there before it."""

    where = Where.THREAD

    def __init__(self, act=lambda: None, *, divisible=True, alone=False, views=()):
        self.seen, self.act, self.divisible, self.alone, self.views = [], act, divisible, alone, dict(views)

    def output(self, given):
        return given | {f"field {len(given)}": ((), np.dtype(np.uint8))}

    def run(self, work):
        self.seen.append((work.rows.tolist(), len(work.fields), len(work.copied)))
        self.act()
        work.fields[len(work.fields)] = self
        work.copied.append(1)


def test_stages_in_a_hold_run_in_order_and_are_one_stage_for_the_pool(file):
    first, second = Noting(views={"a": torch.bfloat16}), Noting(divisible=False, alone=True)
    held = WhileHeld([first, second])
    with opened(file) as shared:
        work = run_alone(shared, [held], ROWS)
    assert first.seen == [(ROWS, 0, 0)] and second.seen == [(ROWS, 1, 1)] and work.bytes_read == 2
    assert list(work.arrays) == ["field 0", "field 1"] and held.steps() == [first, second]
    assert (held.divisible, held.alone, held.views) == (False, True, {"a": torch.bfloat16})
    assert WhileHeld([first]).divisible and not WhileHeld([first]).alone


class Twice:
    """A reader whose first hold was in vain, as of a file that somebody touched meanwhile."""

    def within(self, rows, work):
        work()
        return work()

    def close(self):
        pass


def test_they_run_again_from_the_beginning_where_the_file_was_touched_meanwhile(file):
    first, second = Noting(), Noting()
    with opened(file) as shared:
        shared.reader = Twice()
        work = run_alone(shared, [WhileHeld([first, second])], ROWS)
    assert first.seen == 2 * [(ROWS, 0, 0)] and second.seen == 2 * [(ROWS, 1, 1)] and work.bytes_read == 2


def test_what_lies_beside_the_slot_is_stored_in_it_and_what_has_no_place_travels_with_it(file):
    labels, images = torch.arange(4), torch.arange(4 * 150 * 160 * 3).to(torch.uint8).view(4, 3, 150, 160)
    given = {"images": (SHAPE, np.dtype(np.uint8)), "labels": ((), np.dtype(np.int64))}

    def prepare(work):
        work.fields = {"images": images, "labels": work.targets["labels"], "other": [1]}
        work.targets["labels"][:] = labels

    with opened(file) as shared:
        work = run_alone(shared, [StoreInSlot()], ROWS, given=given, prepare=prepare)
    assert np.array_equal(work.arrays["images"], images.permute(0, 2, 3, 1).numpy())
    assert work.arrays["labels"].tolist() == [0, 1, 2, 3] and work.extra == {"other": [1]} and not work.fields


def test_rows_and_valid_flags_lie_in_the_slot(file):
    def prepare(work):
        work.whole.valid[1] = False

    with opened(file, device=Device()) as shared:
        work = run_alone(shared, [WriteFacts()], ROWS, prepare=prepare)
    assert work.arrays["row"].tolist() == ROWS and work.arrays["valid"].tolist() == [True, False, True, True]


@pytest.mark.parametrize("alone", [False, True])
def test_texts_of_the_rows_are_read_by_the_reader_of_the_others_or_by_one_of_their_own(tmp_path, images, alone):
    texts = [[f"{k} of {row}" for k in range(row % 3)] for row in range(N)]
    values, counts = text_arrays([[text.encode() for text in row] for row in texts])
    columns = {"caption": Column(values), "num_captions": Column(counts)}
    path = write_packed(tmp_path / "texts.h5", images, columns)
    with opened(PackedDataset(path, fields=["images", "caption", "key"], check="always")) as shared:
        dataset = shared.options.packed.dataset
        stage = ReadTexts(dataset, dataset.read, alone=alone)
        work = run_alone(shared, [stage], ROWS)
        keys = [f"{row:08d}" for row in ROWS]
        assert work.texts == {"caption": [texts[row] for row in ROWS], "key": keys} and not work.arrays
        stage.close()
        assert shared.reader.gather(work.rows, {}) == 0, "the reader of the others stays open"


def test_a_slot_is_lent_as_tensors_a_part_for_each_member_and_comes_back_with_the_last_of_them(file, images):
    def prepare(work):
        work.texts, work.copied = {"names": list("abcd")}, [70, 30]

    with opened(PackedDataset(file, fields=["images", "labels", "masks"])) as shared:
        dataset = shared.options.packed.dataset
        present = ToUserLayout(dataset.file)
        stages = [GatherRows(dataset, ["images", "labels", "masks"], into_slot=True), present]
        work = run_alone(shared, stages, ROWS, members=2, prepare=prepare)
    first, second = work.split
    assert (first.rows.tolist(), second.rows.tolist()) == (ROWS[:2], ROWS[2:])
    assert first.texts == {"names": ["a", "b"]} and second.texts == {"names": ["c", "d"]}
    assert first.bytes_read == second.bytes_read == work.bytes_read // 2
    for one in (first, second):
        expected = torch.from_numpy(images[one.rows]).permute(0, 3, 1, 2)
        assert torch.equal(one.fields["images"], expected) and one.fields["labels"].dtype == torch.int64
        assert one.fields["images"].is_contiguous(memory_format=torch.channels_last)
    ring = present.ring
    held = second.fields["images"][:1]
    del first, second, one, expected
    work.split = work.lent = None
    gc.collect()
    returned = ring._returned
    assert returned.empty(), "a view holds the slot"
    del held
    assert not returned.empty()


def test_a_slot_whose_batch_cannot_be_presented_is_not_lent(tmp_path, images):
    path = write_foreign(tmp_path / "a.h5", images, chunk_rows=4, labels=np.full(N, 2**64 - 1, np.uint64))
    with opened(path) as shared:
        dataset = shared.options.packed.dataset
        present = ToUserLayout(dataset.file)
        with pytest.raises(FormatError, match="more than int64 holds"):
            run_alone(shared, [GatherRows(dataset, ["labels"], into_slot=True), present], ROWS)
    assert all(slot.loan is None for slot in present.ring.slots)


def test_a_thread_computes_alone_and_all_others_keep_their_number():
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for alone in (True, False):

            def note(alone=alone):
                for _ in range(2 * alone):
                    use_one_torch_thread()
                found.append(torch.get_num_threads())

            thread = threading.Thread(target=note)
            thread.start()
            thread.join()
        assert found == [1, 3] and torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
