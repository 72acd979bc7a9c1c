from __future__ import annotations

import errno
import shutil
from pathlib import Path

import numpy as np
import pytest

from fastload.errors import OutputError
from fastload.pack import pack_images


@pytest.mark.parametrize("store", [None, "jpeg"])
def test_a_full_disk_is_refused_with_every_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str | None):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    images = [np.zeros((2, 2, 3), np.uint8)] * 1200
    with pytest.raises(OutputError, match=r"needs [0-9]+,[0-9]+ bytes for 1,200 images, 1,000 are free") as found:
        pack_images(images, tmp_path / "a.h5", store=store, workers=0)
    assert found.value.errno == errno.ENOSPC and str(found.value).startswith(f"{tmp_path / 'a.h5'}: needs")
    assert all(mend in str(found.value) for mend in ("`--size`", "`--max-size`", "`--store source`"))
    assert list(tmp_path.iterdir()) == []
