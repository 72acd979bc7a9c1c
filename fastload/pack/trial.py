"""Whether masks are worth compressing: some of them are, and it is seen how much that saves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fastload.codecs import CODEC_CHUNK_BYTES, NONE, Codec, has_zstd, parse_codec
from fastload.errors import ImageError
from fastload.pack.decided import row_sizes
from fastload.pack.encode import RowEncoder
from fastload.pack.store_plan import StorePlan
from fastload.sources.listing import Listing

_MASKS = 64
_TRIAL_BYTES = 64 * 2**20
_WORTH_BYTES = 2**20
"""All masks of a file together; fewer are read in no time, however they are stored."""


def choose_mask_codec(
    listing: Listing, plan: StorePlan, samples: NDArray[np.int64], headers: NDArray[np.void]
) -> tuple[Codec, str]:
    """The codec of masks for `--codec auto`, and a sentence for the user, "" where there is nothing to say.

    zstd, if it makes a sample of them at least half as large; none where they are few bytes anyway.

    Args:
        plan: what becomes of them otherwise.
        samples: int64, those to pack.
        headers: HEADERS (N,), one for each sample of the listing.
    """
    if listing.masks is None or listing.files is None:
        return NONE, ""
    sizes = np.prod(row_sizes(plan, headers[samples]), axis=1)
    total = int(sizes.sum())
    if total < _WORTH_BYTES:
        return NONE, ""
    if not has_zstd():
        return NONE, (
            "Masks are stored as they are: to see whether zstd would make them smaller needs zstandard. Install it "
            "with: pip install 'fastload[zstd]'."
        )
    count = max(1, min(_MASKS, len(samples), _TRIAL_BYTES * len(samples) // total))
    some = samples[np.arange(count) * len(samples) // count]
    codec = parse_codec("zstd")
    before, after = _compressed(_masks_of(listing, plan, some, headers), codec)
    share = after / max(before, 1)
    if share <= 0.5:
        return codec, f"Masks are compressed with {codec}: {count} of them came to {share:.1%} of their size."
    return NONE, f"Masks are stored as they are: {codec} made {count} of them no smaller than {share:.0%}."


def _masks_of(
    listing: Listing, plan: StorePlan, samples: NDArray[np.int64], headers: NDArray[np.void]
) -> list[NDArray[np.uint8]]:
    """Masks as they will be stored; those that cannot be read are left to packing, which says so."""
    assert listing.files is not None, "masks belong to images"
    encoder = RowEncoder(listing.files, listing.masks, plan)
    found = []
    for sample in samples.tolist():
        try:
            found.append(encoder.mask(sample, headers[sample]))
        except (ImageError, OSError):
            continue
    return found


def _compressed(masks: list[NDArray[np.uint8]], codec: Codec) -> tuple[int, int]:
    """Bytes of the masks, and compressed in pieces of about the size that they are stored in."""
    before = after = size = 0
    piece: list[bytes] = []
    for at, mask in enumerate(masks):
        piece.append(mask.tobytes())
        size += mask.nbytes
        if size >= CODEC_CHUNK_BYTES or at == len(masks) - 1:
            before, after = before + size, after + len(codec.compress(b"".join(piece)))
            piece, size = [], 0
    return before, after
