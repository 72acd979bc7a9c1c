"""Each stage that fills a cache of rows, or makes batches of it, run alone."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from alone import opened, run_alone
from late_backend import Device

from fastload import FormatError
from fastload.prefetch.producer import load_cache
from fastload.prefetch.recipe import make_recipe
from fastload.prefetch.row_cache import empty_cache
from fastload.prefetch.stages.from_cache import FetchCached, FillCache, WriteIndex
from fastload.prefetch.stages.gather import GatherRows
from fastload.prefetch.stages.to_device import CopySlot
from fastload.transforms.engine.placement import ImageRows

PACKED = {"rows": 20, "size": (16, 12, 3), "seed": 5, "classes": "abc"}
ROWS = [7, 3, 19, 3]
INDEX = "fastload/index"


def storages(tensors):
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


@pytest.fixture(params=[("device", 1), ("device", 2), ("host", 1)], ids=str)
def cached(request, packed):
    """What stages share of a loader whose rows are cached; its cache is a part of the rows."""
    location, echo = request.param
    with opened(packed, device=Device(patience=1), cache=location, echo=echo) as shared:
        shared.cache = load_cache(shared.options)
        yield shared


def test_a_batch_is_the_places_of_its_rows_in_the_cache(cached):
    cached.cache = replace(cached.cache, rows=np.array([3, 7, 8, 19]))
    work = run_alone(cached, [WriteIndex(cached.options.packed.dataset, cached.options.cache)], ROWS)
    assert work.arrays[INDEX].tolist() == [1, 0, 3, 0]
    with pytest.raises(IndexError, match="row 4 is not among the 4 rows"):
        run_alone(cached, [WriteIndex(cached.options.packed.dataset, cached.options.cache)], [3, 4])


def test_a_row_that_could_not_be_cached_is_an_error_that_says_which_so_that_another_takes_its_place(cached):
    cached.cache = replace(cached.cache, damaged=frozenset([19, 2]))
    stage = WriteIndex(cached.options.packed.dataset, cached.options.cache)
    with pytest.raises(FormatError, match=r"row 19\b") as caught:
        run_alone(cached, [stage], ROWS)
    assert caught.value.rows == (19,)
    assert run_alone(cached, [stage], [3, 7]).arrays[INDEX].tolist() == [3, 7]


def test_rows_are_filled_in_where_they_belong_part_by_part(packed, pixels):
    for location in ("device", "host"):
        with opened(packed, device=Device(patience=1), cache=location) as shared:
            dataset, backend = shared.options.packed.dataset, shared.options.backend
            cache = empty_cache(dataset, range(20), location, backend)
            fill = FillCache(dataset, cache, backend, 8)
            gather = GatherRows(dataset, ["images", "labels"], into_slot=True)
            for number, rows in enumerate((range(8), range(8, 16), range(16, 20))):

                def prepare(work, number=number):
                    work.plan(0, [work.whole._replace(step=number, damaged=(3,) if number == 0 else ())])

                run_alone(shared, [gather, fill], rows, prepare=prepare)
            backend.drain()
            assert np.array_equal(cache.tensors["images"].numpy(), pixels) and fill.damaged == {3}
            assert cache.tensors["labels"].dtype == torch.int64
            if cache.pins is not None:
                cache.pins.close()


def test_a_batch_has_the_rows_of_the_file_wherever_they_are_cached(cached, pixels):
    """Stages as the recipe has them, up to transforms of each use: the kernel that runs these gathers images, too."""
    backend = cached.options.backend
    stages = [one for one in make_recipe(cached.options).stages if not type(one).__name__.startswith("Transform")]
    work = run_alone(cached, stages, ROWS)
    backend.drain()
    images = work.fields["images"]
    held = storages(cached.cache.tensors.values()) <= set(backend.readers)
    if cached.options.cache == "device" and cached.options.echo == 2:
        assert isinstance(images, ImageRows), "they are not copied twice"
        images = images.gather()
    else:
        assert storages(work.memory) >= storages(work.fields.values())
    assert held == (cached.options.cache == "device" and cached.options.echo == 2), (
        "what the loop's stream reads of it is not freed meanwhile"
    )
    assert torch.equal(images, torch.from_numpy(pixels[ROWS]).permute(0, 3, 1, 2))
    assert work.fields["labels"].tolist() == [row % 3 for row in ROWS] and work.fields["row"].tolist() == ROWS


def test_a_stage_that_is_closed_lets_go_of_the_rows(cached):
    if cached.options.cache == "host":
        stages = [WriteIndex(cached.options.packed.dataset, "host"), FetchCached(cached.options.backend)]
    else:
        stages = [one for one in make_recipe(cached.options).stages if not isinstance(one, CopySlot)]
    for stage in stages:
        stage.open(cached)
    held = weakref.ref(cached.cache)
    cached.cache = None
    gc.collect()
    assert held() is not None
    for stage in stages:
        stage.close()
    gc.collect()
    assert held() is None
