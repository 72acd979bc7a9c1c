import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from small_trees import make

from fastload.errors import SourceError
from fastload.sources.layouts import list_source
from fastload.sources.listing import first_few, require_unique


def test_take_reorders_every_column_alike(tmp_path: Path) -> None:
    names = ["train/a/1.jpg", "train/b/22.jpg", "train/c/333.jpg", "val/a/4444.jpg", "val/c/55555.jpg"]
    for i, name in enumerate(names):
        os.utime(make(tmp_path, name) / name, ns=(0, 1000 + i))
    (tmp_path / "val/a/gone.jpg").symlink_to("nowhere")
    whole = pickle.loads(pickle.dumps(list_source(tmp_path, on_error="skip")))
    some = whole.take(np.array([4, 0, 2]))
    assert len(some) == 3 and some.keys == (names[4], names[0], names[2])
    assert some.split.tolist() == [1, 0, 0] and some.split_names == whole.split_names
    assert some.columns["labels"].values.tolist() == [2, 0, 2]
    assert some.columns["labels"].attrs == {"names": ("a", "b", "c")}
    assert some.sizes.tolist() == [15, 13, 15] and some.mtimes_ns.tolist() == [1004, 1000, 1002]
    assert [some.files.read(i).decode() for i in range(3)] == list(some.keys)
    assert some.skipped == whole.skipped != () and some.notes == whole.notes
    assert len(whole.take(np.array([], dtype=np.int64))) == 0


def test_first_few_says_how_many_more_and_duplicate_keys_are_named() -> None:
    require_unique(["a", "b"], "here")
    with pytest.raises(SourceError, match="here: 2 names occur more than once: a, b"):
        require_unique(["a", "b", "a", "b", "c"], "here")
    assert first_few(["a", "b"]) == "a, b" and first_few("abcdef") == "a, b, c, d, e and 1 more"
    assert first_few(list("abcdefg")) == "a, b, c, d, e and 2 more"


def test_sources_import_neither_torch_nor_archive_modules() -> None:
    code = "import sys, fastload.sources.tree; print({'torch', 'zipfile', 'tarfile', 'PIL'} & sys.modules.keys())"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
