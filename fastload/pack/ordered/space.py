"""Space for a pack in order: that of its rows, and what lies beside them until it is complete."""

from __future__ import annotations

from fastload.codecs import NONE
from fastload.errors import ImageError
from fastload.pack.encode import RowEncoder
from fastload.pack.ordered.tasks import OrderedPack

_SAMPLED_CHUNKS = 4


def bytes_beside(pack: OrderedPack) -> int:
    """Bytes needed beside those of all rows until the file is complete; what is compressed as a whole by a sample.

    Compressed chunks are made in `OUT.h5.meta` while the rows still lie in their own files. Masks lie in two files for
    a moment, also compressed ones where images are in place.
    """
    needed, compressed = 0, compressed_bytes(pack)
    in_place = "images" not in compressed
    for stream in pack.streams:
        if stream.name in compressed:
            needed += compressed[stream.name] * (2 if in_place else 1)
        elif stream.name == "masks":
            needed += pack.masks_bytes
    return needed


def compressed_bytes(pack: OrderedPack) -> dict[str, int]:
    """Of each dataset that is compressed as a whole, about its bytes then, as some of its chunks tell."""
    survey, plan, num_rows = pack.survey, pack.plan, len(pack.samples)
    codecs = {"images": plan.image_codec, "masks": plan.mask_codec}
    specs = survey.pixels(num_rows)
    whole = [stream.name for stream in pack.streams if stream.form == "rows" and codecs[stream.name] != NONE]
    assert survey.headers is not None and survey.listing.files is not None, "a plan is of images"
    encoder = RowEncoder(survey.listing.files, survey.listing.masks, plan)
    found = {}
    for name in whole:
        before = after = 0
        for chunk in range(_SAMPLED_CHUNKS):
            first = chunk * num_rows // _SAMPLED_CHUNKS
            rows = []
            for sample in pack.samples[first : first + specs[name].chunk_rows].tolist():
                try:
                    row = encoder.encode(sample, survey.headers[sample])
                except (ImageError, OSError):
                    continue  # packing it says so
                rows.append(bytes((row.image if name == "images" else row.mask) or b""))
            data = b"".join(rows)
            before, after = before + len(data), after + len(codecs[name].compress(data))
        found[name] = int(num_rows * specs[name].row_bytes * after / before) if before else 0
    return found
