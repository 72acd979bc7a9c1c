import pickle
import subprocess
import sys

import numpy as np
import pytest

from fastload.errors import SourceError
from fastload.format.column import Column
from fastload.sources.listing import Listing, first_few, require_unique
from fastload.sources.tree import FolderFiles


def listing_of(count: int) -> Listing:
    keys = [f"{i}.jpg" for i in range(count)]
    return Listing(
        layout="folder",
        keys=tuple(keys),
        split=(np.arange(count) % 2).astype(np.uint8),
        split_names=("train", "val"),
        columns={
            "labels": Column(np.arange(count) * 10, {"names": ("a",)}),
            "bbox": Column(np.arange(count * 4).reshape(-1, 4)),
        },
        notes=("a note",),
        sizes=np.arange(count) + 100,
        mtimes_ns=np.arange(count) + 1000,
        files=FolderFiles.of(b"/data", [key.encode() for key in keys]),
        skipped=(("x.jpg", "gone"),),
    )


def test_take_reorders_every_column_alike() -> None:
    whole = pickle.loads(pickle.dumps(listing_of(6)))
    some = whole.take(np.array([5, 0, 2]))
    assert len(some) == 3 and some.keys == ("5.jpg", "0.jpg", "2.jpg")
    assert some.split.tolist() == [1, 0, 0] and some.split_names == whole.split_names
    assert some.columns["labels"].values.tolist() == [50, 0, 20] and some.columns["labels"].attrs == {"names": ("a",)}
    assert some.columns["bbox"].values[0].tolist() == [20, 21, 22, 23]
    assert some.sizes.tolist() == [105, 100, 102] and some.mtimes_ns.tolist() == [1005, 1000, 1002]
    assert some.skipped == whole.skipped and some.notes == whole.notes
    assert len(whole.take(np.array([], dtype=np.int64))) == 0


def test_first_few_says_how_many_more_and_duplicate_keys_are_named() -> None:
    require_unique(["a", "b"], "here")
    with pytest.raises(SourceError, match="here: 2 names occur more than once: a, b"):
        require_unique(["a", "b", "a", "b", "c"], "here")
    assert first_few(["a", "b"]) == "a, b"
    assert first_few(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_sources_import_neither_torch_nor_archive_modules() -> None:
    code = "import sys, fastload.sources; print({'torch', 'zipfile', 'tarfile', 'PIL'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
