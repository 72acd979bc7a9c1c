"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image

# Enough for every run, within the minutes that CI has; FASTLOAD_EXAMPLES=1000 looks longer, and tools/test.sh looks for
# less long on Pythons that are not its first. No deadline: neighbours on the machine decide how long an example takes.
settings.register_profile("fastload", max_examples=int(os.environ.get("FASTLOAD_EXAMPLES", "40")), deadline=None)
settings.load_profile("fastload")

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

ImageFolder = Callable[..., Path]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real datasets kept beside the checkout; absent on a user's machine."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no ../shared/data beside the checkout: this test needs its real images")
    return SHARED_DATA


@pytest.fixture
def image_folder(tmp_path: Path) -> ImageFolder:
    """Makes a class folder of small, distinct JPEG (or PNG) images and returns its path."""

    def make(
        per_class: int = 10,
        classes: tuple[str, ...] = ("cat", "dog"),
        size: tuple[int, int] = (12, 16),
        suffix: str = ".jpg",
        name: str = "photos",
        seed: int = 0,
    ) -> Path:
        rng = np.random.default_rng(seed)
        root = tmp_path / name
        for label in classes:
            (root / label).mkdir(parents=True)
            for i in range(per_class):
                pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / label / f"{i:04d}{suffix}")
        return root

    return make
