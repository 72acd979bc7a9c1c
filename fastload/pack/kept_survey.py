"""A survey as the journal keeps it, so that a call that continues need not read every header again."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.decode import Target
from fastload.pack.journal import Claims
from fastload.pack.options import PackOptions
from fastload.pack.survey import Survey, all_but, move_to, row_order
from fastload.pack.tasks import HEADERS
from fastload.sources.listing import Listing


def survey_to_json(survey: Survey) -> dict[str, Any]:
    """All of a survey that listing the source does not tell, as plain JSON values."""
    target = survey.target
    left_out = all_but(len(survey.listing), survey.samples)
    return {
        "left_out": left_out.tolist(),
        "target": target and [target.height, target.width, target.channels, target.dtype.str, target.fit],
        "headers": "" if survey.headers is None else _headers_to_text(survey.headers),
        "sizes": [[h, w, n] for (h, w), n in survey.sizes.items()],
        "converted": survey.converted,
        "skipped": [list(pair) for pair in survey.skipped],
        **({"said": survey.said} if survey.said else {}),
    }


def _headers_to_text(headers: NDArray[np.void]) -> str:
    """The headers, or the one that all have in common, compressed."""
    data, first = headers.tobytes(), headers[:1].tobytes()
    return base64.b64encode(zlib.compress(first if data == first * len(headers) else data, 1)).decode()


def _headers_of_text(text: str, count: int) -> NDArray[np.void]:
    headers = np.empty(count, HEADERS)
    headers[:] = np.frombuffer(zlib.decompress(base64.b64decode(text)), HEADERS)
    return headers


def survey_of(kept: Mapping[str, Any], listing: Listing, options: PackOptions, claims: Claims) -> Survey:
    """The survey as a journal keeps it, with the headers that changed since.

    Args:
        kept: what `survey_to_json` made.
        listing: of the source as it is now.
    """
    target = headers = None
    if kept["target"]:
        height, width, channels, dtype, fit = kept["target"]
        target = Target(height=height, width=width, channels=channels, dtype=np.dtype(dtype), fit=fit)
    if kept["headers"]:
        headers = _headers_of_text(kept["headers"], len(listing))
    survey = Survey(
        listing=listing,
        samples=all_but(len(listing), kept["left_out"]),
        options=options,
        target=target,
        headers=headers,
        sizes={(h, w): n for h, w, n in kept["sizes"]},
        converted=kept["converted"],
        skipped=tuple((key, reason) for key, reason in kept["skipped"]),
        said=tuple(kept.get("said", ())),
    )
    if headers is None or target is None:
        return survey
    rows = row_order(survey)
    for row, (_, header) in claims.changed.items():
        headers[rows[row]] = header
    return replace(survey, listing=move_to(listing, headers, target))
