"""What a source that was surveyed would be in each store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from fastload.codecs import NONE
from fastload.estimate.sample import Encoders
from fastload.estimate.stores import StoreEstimates, estimate_stores, stores_of
from fastload.pack.decided import row_sizes
from fastload.pack.options import Progress
from fastload.pack.store_plan import StoreOption, StorePlan, ways
from fastload.pack.survey import Survey


def estimate_survey(
    survey: Survey, folder: Path, *, threads: int | None = None, progress: Progress | None = None
) -> StoreEstimates | None:
    """What a source that was surveyed would be in each store; takes about 5 seconds.

    Rows of pixels count before gzip, which works on chunks of them.

    Args:
        survey: what packing would do.
        folder: where the file is to lie; a temporary file tells how fast its disk is read.
        threads: that decode at once, by default one per CPU.
        progress: called with (stage, done, total).

    Returns:
        None for a dataset without images, and where no image of the sample can be decoded.
    """
    listing, headers = survey.listing, survey.headers
    if listing.files is None or headers is None:
        return None
    plan = _row_by_row(survey.plan or _plain_plan(survey), masks=listing.masks is not None)
    sizes = row_sizes(plan, headers)[survey.samples]
    own, made = ways(replace(plan, option=StoreOption("source")), survey.samples, headers[survey.samples])
    return estimate_stores(
        Encoders(listing.files, listing.masks, headers, plan),
        survey.samples,
        int(sizes.prod(axis=1).sum()),
        stores_of(plan, source=survey.options.size is None and bool(np.any(own))),
        plan.dtype,
        folder,
        remade=bool(np.any(made)),
        compressed="" if plan.image_codec == NONE else plan.image_codec.name,
        room=survey.disk_free if survey.disk_free >= 0 else None,
        threads=threads,
        progress=progress,
    )


def _plain_plan(survey: Survey) -> StorePlan:
    """The plan of a survey whose images are packed as plain pixels of one size."""
    target = survey.target
    assert target is not None, "a survey with images"
    return StorePlan(target.channels, target.dtype, StoreOption(), target, None, "rows", None)


def _row_by_row(plan: StorePlan, *, masks: bool) -> StorePlan:
    """The plan with each row on its own, as a byte store has it."""
    images, of_masks = (NONE if codec.name == "gzip" else codec for codec in (plan.image_codec, plan.mask_codec))
    return replace(plan, images="store", masks="store" if masks else None, image_codec=images, mask_codec=of_masks)
