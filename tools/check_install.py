"""Checks an installed fastload: packs faces that it draws, reads them back, and compares each pixel with Pillow's.

    python tools/check_install.py                 packs, verifies, reads; with torch also loads
    python tools/check_install.py --compiled      fails without the compiled loops and their JPEG decoding
    python tools/check_install.py --packing       fails with torch or pydantic, or more than twelve packages

Run it with the Python that fastload was installed for, outside a checkout. tools/wheels.sh does so with each wheel.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
from numpy.typing import NDArray
from PIL import Image

import fastload
from fastload.system import native

COUNT = 24
MOST_PACKAGES = 12
INSTALLERS = {"pip", "setuptools", "wheel", "uv"}  # come with the environment
WINDOW = (10, 25, 90, 120)  # top, left, height, width


def fail_unless(true: bool, said: str) -> None:
    """Ends with code 1 and what is wrong."""
    if not true:
        sys.exit(f"FAILED: {said}")


def run(*words: object, code: int = 0) -> str:
    """Returns what the installed command says; it has to end with this code."""
    command = [sys.executable, "-m", "fastload", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    fail_unless(done.returncode == code, f"fastload {words[0]} ended with {done.returncode}, not {code}:\n{said}")
    return said


def check_packages() -> None:
    """What packs images is there, and no more."""
    found = {distribution.name.lower() for distribution in importlib.metadata.distributions()} - INSTALLERS
    print(f"{len(found)} packages: {', '.join(sorted(found))}")
    fail_unless(len(found) <= MOST_PACKAGES, f"there are more than {MOST_PACKAGES} packages")
    unwanted = [name for name in ("torch", "pydantic") if importlib.util.find_spec(name) is not None]
    fail_unless(not unwanted, f"{' and '.join(unwanted)} can be imported")
    try:
        said = str(fastload.FastLoader)
    except fastload.MissingExtraError as exc:
        said = str(exc)
    said_by_command = run("bench", __file__, code=1)
    fail_unless("pip install torch" in said, f"FastLoader does not say how to install torch: {said}")
    fail_unless("pip install torch" in said_by_command, f"bench does not say how to install torch: {said_by_command}")


def check_packed(faces: Path, packed: Path) -> list[NDArray[np.uint8]]:
    """Packs the folder; returns Pillow's pixels of each row of the file, (218, 178, 3)."""
    run("pack", faces, packed)
    run("verify", packed, "--source", faces)
    run("info", packed)
    with h5py.File(packed) as file:
        keys, images = file["key"].asstr()[()], file["images"][()]
    fail_unless(len(keys) == COUNT, f"{packed} holds {len(keys)} images, not {COUNT}")
    truth = [np.asarray(Image.open(faces / "img_align_celeba" / Path(key).name).convert("RGB")) for key in keys]
    fail_unless(np.array_equal(images, truth), "packed pixels differ from Pillow's")
    return truth


def check_loops(faces: Path) -> None:
    """The compiled loops decode a part of a JPEG, as Pillow does."""
    fail_unless(native.library() is not None, f"the compiled loops: {native.described()}")
    fail_unless(native.decodes_jpeg(), f"the compiled loops: {native.described()}")
    top, left, height, width = WINDOW
    for path in sorted(faces.glob("img_align_celeba/*.jpg")):
        data, output = np.frombuffer(path.read_bytes(), np.uint8), np.zeros((1, height, width, 3), np.uint8)
        truth = np.asarray(Image.open(path).convert("RGB"))
        sources = np.array([[0, len(data), *truth.shape[:2], 1]])
        made, _ = native.make_images(data, sources, np.array([[*WINDOW, height, width, 0, 0, 0, 0]]), output)
        fail_unless(bool(made[0]), f"the compiled loops did not decode {path}")
        same = np.array_equal(output[0], truth[top : top + height, left : left + width])
        fail_unless(same, f"pixels that the compiled loops decoded of {path} differ from Pillow's")


def check_loader(packed: Path, truth: list[NDArray[np.uint8]]) -> None:
    """Every row comes once, as it was packed, or the middle of it."""
    from fastload.transforms import CenterCrop

    for transform in ([], [CenterCrop(100)]):
        top, left = ((218 - 100) // 2, (178 - 100) // 2) if transform else (0, 0)
        seen = []
        with closing(fastload.FastLoader(packed, 5, transform=transform, ends="exact")) as loader:
            for batch in loader:
                pixels = batch[0].permute(0, 2, 3, 1).numpy()
                for row, image in zip(batch.rows.tolist(), pixels, strict=True):
                    expected = truth[row][top : top + len(image), left : left + image.shape[1]]
                    fail_unless(np.array_equal(image, expected), f"row {row} is not loaded as it was packed")
                    seen.append(row)
        fail_unless(sorted(seen) == list(range(COUNT)), f"an epoch has the rows {sorted(seen)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--compiled", action="store_true", help="the compiled loops and their JPEG decoding must be there"
    )
    parser.add_argument("--packing", action="store_true", help="no torch, no pydantic, at most twelve packages")
    options = parser.parse_args()
    print(f"fastload in {Path(fastload.__file__).parent}, compiled loops {native.described()}")
    if options.packing:
        check_packages()
    with tempfile.TemporaryDirectory() as folder:
        faces, packed, jpegs = Path(folder) / "faces", Path(folder) / "faces.h5", Path(folder) / "jpegs.h5"
        draw = [
            sys.executable,
            Path(__file__).with_name("make_faces.py"),
            faces,
            "--count",
            str(COUNT),
            "--workers",
            "1",
        ]
        subprocess.run(draw, check=True, stdout=subprocess.DEVNULL)
        truth = check_packed(faces, packed)
        run("pack", faces, jpegs, "--store", "source")
        run("verify", jpegs, "--source", faces)
        if options.compiled:
            check_loops(faces)
        loads = importlib.util.find_spec("torch") is not None
        if loads:
            check_loader(packed, truth)
            check_loader(jpegs, truth)
    ways = [
        "packed",
        "verified",
        *(["decoded by the compiled loops"] if options.compiled else []),
        *(["loaded"] if loads else []),
    ]
    print(f"{COUNT} faces: {', '.join(ways)}; each pixel as Pillow has it")


if __name__ == "__main__":
    main()
