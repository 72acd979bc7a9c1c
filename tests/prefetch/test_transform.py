"""Transforms of a batch, by each stage that runs them, or draws for them, alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from alone import augmentation, opened, run_alone, untouched
from late_backend import Device

from fastload import PackedDataset
from fastload.prefetch.recipe import make_recipe
from fastload.prefetch.stages.gather import GatherRows, MappedImages, StoreInSlot
from fastload.prefetch.stages.transform import DrawNumbers, TransformInThread
from fastload.prefetch.work import TRANSFORM_PARAMETERS, Where
from fastload.transforms import (
    Draws,
    ImageSpec,
    MixUp,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    apply_transforms,
)

PACKED = {"rows": 20, "size": (16, 12, 3), "seed": 5, "classes": "abc", "masks": True}
ROWS = [7, 3, 19, 3]
NORMALIZE = Normalize((0.5,) * 3, (0.25,) * 3)
FLOATS = [RandomResizedCrop(9), RandomHorizontalFlip(), NORMALIZE]
HALVES = [RandomCrop((8, 10)), Normalize((0.5,) * 3, (0.25,) * 3, dtype=torch.bfloat16)]


def as_they_are(path, rows=ROWS):
    dataset = PackedDataset(path, fields=["images", "labels", "masks"])
    samples = [dataset[row] for row in rows]
    names = ("images", "labels", "masks")
    return {name: torch.stack([torch.as_tensor(one[at]) for one in samples]) for at, name in enumerate(names)}


def expected(path, transforms, *, epoch=0, echo=0, rows=ROWS):
    return apply_transforms(transforms, as_they_are(path, rows), Draws(0, epoch, np.array(rows), echo))


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("transforms", [FLOATS, HALVES, [RandomHorizontalFlip()], [Resize((20, 20))]])
def test_in_a_thread_batches_get_slots_of_the_size_and_dtype_that_their_images_have_then(packed, transforms, mapped):
    with opened(PackedDataset(packed, fields=["images", "labels", "masks"]), transform=transforms) as shared:
        dataset = shared.options.packed.dataset
        source = MappedImages(dataset.file) if mapped else None
        gather = GatherRows(dataset, ["images", "labels", "masks"], into_slot=False, mapped=source)
        stage = TransformInThread(augmentation(shared, transforms), source)
        work = run_alone(shared, [gather, stage, StoreInSlot()], ROWS, epoch=3)
    right = expected(packed, transforms, epoch=3)
    assert not work.fields and work.targets.keys() == right.keys()
    assert all(found.dtype == right[name].dtype for name, found in work.targets.items())
    assert all(torch.equal(found, right[name]) for name, found in work.targets.items())
    assert stage.views == ({"images": torch.bfloat16} if transforms is HALVES else {})
    if mapped:
        assert work.bytes_read >= 4 * 16 * 12 * 3, "what lies in the mapping counts as read"


def test_a_thread_does_not_transform_what_was_done_with_the_decoding(packed):
    def prepare(work):
        work.arrays["images"][:] = 77
        work.fields = {"images": work.targets["images"], "labels": torch.arange(4)}

    given = {"images": ((16, 12, 3), np.dtype(np.uint8)), "labels": ((), np.dtype(np.int64))}
    with opened(packed) as shared:
        stage = TransformInThread(augmentation(shared, [RandomHorizontalFlip(p=1)]), None)
        work = run_alone(shared, [stage], ROWS, given=given, prepare=prepare)
    assert (work.arrays["images"] == 77).all()


def test_batches_whose_samples_are_mixed_are_made_one_at_a_time_and_whole(packed):
    with opened(packed) as shared:
        plain, mixed = (
            TransformInThread(augmentation(shared, list_), None) for list_ in ([NORMALIZE], [MixUp(num_classes=3)])
        )
    assert (plain.alone, plain.divisible) == (False, True) and (mixed.alone, mixed.divisible) == (True, False)


def test_for_each_use_a_batch_is_transformed_anew_and_the_next_use_sees_nothing_of_it(packed):
    fields = ["images", "labels", "masks"]
    with opened(PackedDataset(packed, fields=fields), transform=FLOATS, echo=3) as shared:
        (stage,) = make_recipe(shared.options).at(Where.USE)
        dataset = shared.options.packed.dataset
        work = run_alone(shared, [GatherRows(dataset, fields, into_slot=False)], ROWS, epoch=2)
    before = {name: tensor.clone() for name, tensor in work.fields.items()}
    without = work.for_use(0, last=False)
    for echo in range(3):
        used = work.for_use(echo, last=echo == 2)
        stage.run(used)
        right = expected(packed, FLOATS, epoch=2, echo=echo)
        assert all(torch.equal(used.fields[name], right[name]) for name in fields)
        used.fields["images"].zero_()
        if used is not work:
            assert all(torch.equal(work.fields[name], tensor) for name, tensor in before.items())
    del without.fields["images"]
    stage.run(without)
    assert torch.equal(without.fields["masks"], before["masks"]), "without images nothing is drawn for the others"


@pytest.mark.parametrize("transforms", [FLOATS, [RandomHorizontalFlip(p=0)]])
def test_on_the_side_stream_a_batch_gets_memory_of_its_own_and_nothing_else_of_it_is_kept(packed, transforms):
    backend = Device(patience=1)
    with opened(
        PackedDataset(packed, fields=["images", "labels", "masks"]), device=backend, transform=transforms
    ) as shared:
        recipe = make_recipe(shared.options)
        work = run_alone(shared, recipe.stages, ROWS, epoch=1)
        backend.drain()
        assert not recipe.at(Where.USE)
        raw = work.raw.untyped_storage().data_ptr()
    right = expected(packed, transforms, epoch=1)
    for name in ("images", "labels", "masks"):
        assert torch.equal(work.fields[name], right[name]) and work.fields[name].dtype == right[name].dtype
    assert work.fields["images"].is_contiguous(memory_format=torch.channels_last)
    of_user = {one.untyped_storage().data_ptr() for one in work.fields.values()}
    assert raw not in of_user, "the next batch is copied there"
    assert of_user == {one.untyped_storage().data_ptr() for one in work.memory} and not work.inner


@pytest.mark.parametrize("uses", [1, 3])
def test_numbers_of_all_uses_are_drawn_into_the_slot_and_are_those_of_the_hand_over(packed, uses):
    with opened(PackedDataset(packed, fields=["images"]), device=Device(), transform=FLOATS, echo=uses) as shared:
        every = augmentation(shared, FLOATS)
        stage = DrawNumbers(every, uses, ImageSpec(3, 16, 12, torch.uint8))
        work = run_alone(shared, [stage], ROWS, epoch=4)
        per_batch = every.pipeline(stage.spec).num_words(uses * len(ROWS))
        assert [(field.name, field.shape) for field in stage.own_fields(len(ROWS))] == [
            (TRANSFORM_PARAMETERS, (per_batch,))
        ]
        assert per_batch > 0 and not untouched(work.slot.arrays[TRANSFORM_PARAMETERS]) and work.drawn.uses == uses
    images = as_they_are(packed)["images"]
    words = torch.from_numpy(work.slot.arrays[TRANSFORM_PARAMETERS])
    for echo in range(uses):
        by_words = every.apply({"images": images}, work.whole, epoch=4, echo=echo, drawn=work.drawn, words=words)
        anew = every.apply({"images": images}, work.whole, epoch=4, echo=echo)
        assert torch.equal(by_words["images"], anew["images"])


def test_a_short_batch_draws_for_its_own_rows_and_where_nothing_is_drawn_there_is_no_room_for_it(packed):
    def shortened(work):
        work.plan(0, [work.whole.part(slice(0, 3))])

    with opened(packed, device=Device(), transform=FLOATS) as shared:
        every = augmentation(shared, FLOATS)
        stage = DrawNumbers(every, 1, ImageSpec(3, 16, 12, torch.uint8))
        words = run_alone(shared, [stage], ROWS, prepare=shortened).slot.arrays[TRANSFORM_PARAMETERS]
        count = every.pipeline(stage.spec).num_words(3)
        assert count < len(words) and untouched(words[count:]) and not untouched(words[:count])
    with opened(packed, device=Device()) as shared:
        stage = DrawNumbers(augmentation(shared, ()), 1, ImageSpec(3, 16, 12, torch.uint8))
        assert stage.own_fields(4) == [] and run_alone(shared, [stage], ROWS).drawn is None
