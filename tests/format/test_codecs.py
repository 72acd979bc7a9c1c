"""What a file's filters are called, and what is said where one is missing."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t, h5z

from fastload.errors import MissingExtraError
from fastload.format.codecs import load_filters, pipeline, why_unreadable


def test_filters_are_named_in_order_and_one_that_nobody_has_by_number_with_a_way_out(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        plist = h5p.create(h5p.DATASET_CREATE)
        plist.set_chunk((4, 3))
        plist.set_deflate(2)
        plist.set_filter(300, h5z.FLAG_OPTIONAL, (1, 2))  # that nobody has
        h5d.create(file.id, b"images", h5t.NATIVE_UINT8, h5s.create_simple((8, 3)), plist)
        labels = file.create_dataset("labels", data=np.arange(8), chunks=(4,), compression="gzip", shuffle=True)
        assert pipeline(file["images"]) == ((1, (2,), "deflate"), (300, (1, 2), "300"))
        assert [one.name for one in pipeline(labels)] == ["shuffle", "deflate"]
        message = r"a.h5: `images` is compressed with 300 .*neither HDF5 nor.*h5repack"
        with pytest.raises(MissingExtraError, match=message):
            load_filters(path, "images", file["images"])
        assert "h5repack" in str(why_unreadable(path, "images", file["images"]))
        load_filters(path, "labels", labels)
        assert why_unreadable(path, "labels", labels) is None
