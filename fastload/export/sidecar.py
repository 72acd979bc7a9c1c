"""What files and tables cannot say of the rows: `fastload.json` and `fields.npz`, which `sources/exported.py` reads."""

from __future__ import annotations

import io
import json
import zipfile
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from fastload.export.plan import ExportPlan
from fastload.fitting import axis_letter
from fastload.layout import writer_name
from fastload.sources.exported import FORMAT, VERSION
from fastload.sources.listing import Column, Listing, Moves
from fastload.sources.places import BOXES, POINTS

_LONG_AGO = (1980, 1, 1, 0, 0, 0)  # no time stamps: the same rows give the same bytes


def sidecar_text(listing: Listing, plan: ExportPlan, table: bytes | None) -> bytes:
    """fastload.json.

    Args:
        table: manifest.csv, where one is written.
    """
    masks = listing.masks
    about = None
    if masks is not None and plan.masks:
        about = {"names": list(masks.names), "ignore_index": masks.ignore_index, "attrs": masks.attrs}
    present = [] if masks is None else masks.present.tolist()
    paths = [path if there else "" for path, there in zip(plan.masks, present, strict=True)] or [""] * len(listing)
    said = {
        "format": FORMAT,
        "version": VERSION,
        "writer": writer_name(),
        "manifest": None if table is None else xxhash.xxh3_128_hexdigest(table),
        "split_names": list(listing.split_names),
        "masks": about,
        "columns": [
            {
                "name": name,
                "dtype": column.values.dtype.str,
                "shape": list(column.values.shape[1:]),
                "attrs": column.attrs,
                "moves": _moves(name, column),
            }
            for name, column in listing.columns.items()
        ],
        "rows": [list(row) for row in zip(listing.keys, plan.images, paths, strict=True)],
    }
    return json.dumps(said, separators=(",", ":")).encode()


def fields_bytes(listing: Listing) -> bytes:
    """fields.npz: `split` and every column, for `np.load`."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, values in {"split": listing.split, **_values(listing)}.items():
            with archive.open(zipfile.ZipInfo(f"{name}.npy", _LONG_AGO), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, _bare(values), allow_pickle=False)
    return out.getvalue()


def _values(listing: Listing) -> dict[str, NDArray[Any]]:
    return {name: column.values for name, column in listing.columns.items()}


def _bare(values: NDArray[Any]) -> NDArray[Any]:
    """The values without what h5py adds to the dtype of texts."""
    return np.ascontiguousarray(values).view(values.dtype.str)


def _moves(name: str, column: Column) -> Moves:
    """What a packed file's columns of these names are, when they are pixels of its images and say so."""
    values = column.values
    if "coordinates" in column.attrs or values.dtype.kind not in "iuf" or values.ndim < 2 or values.shape[-1] % 2:
        return ""
    if name.lower() in BOXES and values.shape[-1] == 4:
        forms: dict[str, Moves] = {"xyxy": "xyxy", "xywh": "xywh"}
        return forms.get("".join(map(axis_letter, column.attrs.get("names", ()))), "")
    return "points" if name.lower() in POINTS else ""
