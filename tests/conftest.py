"""Fixtures that several test modules share."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import pickle
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from child_processes import LAUNCHER, child_environment
from chromium import Browser, start_chromium
from layout_trees import import_torchvision
from numpy.typing import NDArray
from skips import pytest_make_collect_report, pytest_runtest_makereport  # noqa: F401  hooks
from small_files import write_foreign, write_random
from warm_python import WarmPython

try:
    from hypothesis import settings
except ModuleNotFoundError:  # no test that needs a GPU needs it: see `pytest_ignore_collect`
    settings = None

# Enough for every run, within the minutes that CI has; FASTLOAD_EXAMPLES=1000 looks longer, and tools/test.sh looks for
# less long on Pythons that are not its first. No deadline: neighbours on the machine decide how long an example takes.
if settings is not None:
    settings.register_profile("fastload", max_examples=int(os.environ.get("FASTLOAD_EXAMPLES", "8")), deadline=None)
    settings.load_profile("fastload")

# A shell starts what runs behind `&` with Ctrl-C ignored, and children inherit that: tests that send one would hang.
signal.signal(signal.SIGINT, signal.default_int_handler)

# While modules are imported there is hardly any garbage, and to look for it takes a fifth of the time.
gc.disable()

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

ImageFolder = Callable[..., Path]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu` no module without such a test is imported: it may need what a machine with a GPU does not have."""
    if config.getoption("markexpr") != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "mark.gpu" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_finish() -> None:
    """What was imported until now stays: no garbage collection, and no fork, looks through it again.

    That took a tenth of a second each time, and some tests collect garbage a hundred times.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The real datasets kept beside the checkout; absent on a user's machine."""
    if not SHARED_DATA.is_dir():
        pytest.skip("no ../shared/data beside the checkout: this test needs its real images")
    return SHARED_DATA


@pytest.fixture(scope="session")
def torchvision_datasets() -> Any:
    """torchvision.datasets, which believes every file to be whole: the tests draw files of their own."""
    # tools/test.sh puts it apart: others look for torchvision, and fail with a build for CUDA beside torch for CPUs.
    if importlib.util.find_spec("torchvision") is None:
        sys.path.append(str(Path(sys.prefix, "torchvision")))
    for package in ("torch", "torchvision", "scipy"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    return import_torchvision()


@pytest.fixture
def image_folder(tmp_path: Path) -> ImageFolder:
    """Makes a class folder of small, distinct JPEG (or PNG) images and returns its path."""

    from PIL import Image

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


@pytest.fixture(scope="session")
def packed_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a packed file of random images, named file.h5, and returns its path: `packed_file(rows=20, masks=True)`.

    Keywords are those of `small_files.write_random`. Equal keywords give the same file, so tests only read it; one
    that is to be changed is written by `write_random` itself.
    """
    written: dict[bytes, Path] = {}

    def write(**options: object) -> Path:
        key = pickle.dumps(sorted(options.items()))
        if key not in written:
            written[key] = write_random(tmp_path_factory.mktemp("packed") / "file.h5", **options)  # type: ignore[arg-type]
        return written[key]

    return write


@pytest.fixture(scope="module")
def packed(request: pytest.FixtureRequest, packed_file: Callable[..., Path]) -> Iterator[Path]:
    """The packed file that a module describes by `PACKED`, keywords of `packed_file`; to be read, not changed.

    Without `PACKED`: 20 images, uint8 (16, 12, 3), no labels, one split.
    """
    path = packed_file(**getattr(request.module, "PACKED", {}))
    before = path.stat()
    yield path
    after = path.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size), (
        f"a test of {request.module.__name__} changed the file that all share: let it take packed_copy"
    )


@pytest.fixture
def packed_copy(packed: Path, tmp_path: Path) -> Path:
    """A copy of `packed` for one test, alone in tmp_path: it may be damaged, and others be written beside it."""
    return Path(shutil.copy(packed, tmp_path))


@pytest.fixture(scope="module")
def pixels(packed: Path) -> NDArray[np.uint8]:
    """The images of `packed`, uint8 (N, H, W, C), in the order of the file."""
    with h5py.File(packed) as file:
        return file["images"][()]


@pytest.fixture(scope="module")
def compressed(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images and labels of `packed` in a file that fastload did not write: gzip, in chunks of as many rows."""
    with h5py.File(packed) as file:
        labels = {"labels": file["labels"][()]} if "labels" in file else {}
        path = tmp_path_factory.mktemp("compressed") / "gzip.h5"
        return write_foreign(path, file["images"][()], chunk_rows=file["images"].chunks[0], **labels)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """A page in a headless Chromium, for all tests: each opens a page first, since it finds what another has left."""
    with start_chromium() as running:
        yield running


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Runs scripts, in the environment of `child_environment`, that need not import torch first."""
    with WarmPython(child_environment(), tmp_path_factory.mktemp("warm")) as python:
        yield python


@pytest.fixture(scope="session")
def run_interpreted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path], str]]:
    """Returns what a script prints whose kernels Triton's interpreter runs; it has to end with 0.

    Torch and Triton are imported once for all of them, before the first.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def python() -> WarmPython:
            environment = child_environment(TRITON_INTERPRET="1", PYTHONWARNINGS="error")
            first = "import numpy, torch, triton, fastload.transforms, fastload.loader.loader"
            return stack.enter_context(WarmPython(environment, tmp_path_factory.mktemp("interpreted"), first))

        def run(script: Path) -> str:
            done = python().run(Path(__file__).with_name("interpreted.py"), script, cwd=script.parent)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        yield run


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this process nobody's rank: what a launcher around the run has said is taken away for one test."""
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
