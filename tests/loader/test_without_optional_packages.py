"""Without simplejpeg, hdf5plugin and zstandard everything that does not need them works; Pillow decodes JPEGs."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

SCRIPT = """
import sys

for name in ("simplejpeg", "hdf5plugin", "zstandard"):
    sys.modules[name] = None  # an import of it is an ImportError
import h5py
import numpy as np
from PIL import Image

import fastload
from fastload.transforms import CenterCrop, RandomResizedCrop

source, out, store = sys.argv[1:]
fastload.pack_images(source, out, store=store or None, shuffle=False)
with h5py.File(out) as file:
    assert file.attrs["decoder"].startswith(b"Pillow")
for transform in ([], [CenterCrop(20)], [RandomResizedCrop(16)]):
    loader = fastload.FastLoader(out, 4, shuffle=False, transform=transform)
    for batch in loader:
        for row, image in zip(batch.rows.tolist(), batch[0].permute(0, 2, 3, 1).numpy()):
            truth = np.asarray(Image.open(f"{source}/{row}.jpg").convert("RGB"))
            if not transform:
                assert np.array_equal(image, truth)
            elif transform[0].__class__ is CenterCrop:
                top, left = (truth.shape[0] - 20) // 2, (truth.shape[1] - 20) // 2
                assert np.array_equal(image, truth[top : top + 20, left : left + 20])
    loader.close()
print("as Pillow has it")
"""


@pytest.mark.parametrize("store", ["", "source"])
def test_packing_and_loading(warm_python, tmp_path, store):
    random, folder = np.random.default_rng(0), tmp_path / "photos"
    folder.mkdir()
    for number in range(8):
        small = Image.fromarray(random.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        small.resize((40, 32), Image.Resampling.BICUBIC).save(folder / f"{number}.jpg", quality=92)
    (tmp_path / "script.py").write_text(SCRIPT)
    done = warm_python.run(tmp_path / "script.py", folder, tmp_path / "out.h5", store, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "as Pillow has it"
