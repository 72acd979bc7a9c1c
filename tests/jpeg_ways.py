"""JPEGs of all processes through every way that reads one: each must end in a result or a FastloadError, never a crash.

    python tests/jpeg_ways.py            # all of `jpeg_processes.all_names`, through each of WAYS
    python tests/jpeg_ways.py --files 60 # a sample
    python tests/jpeg_ways.py --under /tmp/asan   # under AddressSanitizer, as `faults/build_asan.py /tmp/asan` made it

A child does the work, and says what it is at; where it dies, another goes on behind that. At the end one line says how
many files and ways there were, and how many crashes; the exit code is 1 if there was any.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from jpeg_processes import HEIGHT, WIDTH, all_names, made, sample

from fastload.errors import FastloadError, ImageError
from fastload.format.ragged import JPEG
from fastload.images import image_header
from fastload.images.decode import decode_image, decode_mask, decode_unturned, read_mask
from fastload.images.decode_part import decode_part, decode_row
from fastload.images.fit import Target
from fastload.images.image_header import large_images, probe_image
from fastload.images.jpeg import libjpeg_warning
from fastload.system import native

_UINT8 = np.dtype(np.uint8)


def survey(data: bytes) -> None:
    probe_image(lambda size: data[:size])


def pack(data: bytes) -> None:
    for channels, size in itertools.product((1, 3, 4), ((HEIGHT, WIDTH), (12, 9))):
        target = Target(*size, channels, _UINT8, None if size[0] == HEIGHT else "crop")
        with suppress(ImageError):
            decode_image(data, target, np.empty((*size, channels), np.uint8))


def pack_large(data: bytes) -> None:
    """As one of those that are decoded smaller: of more pixels than are accepted without being asked for."""
    before, image_header.MAX_PIXELS = image_header.MAX_PIXELS, 100
    try:
        for side in (2, 5, 12, 30):
            with large_images(2**30), suppress(ImageError):
                decode_image(data, Target(side, side, 3, _UINT8, "stretch"), np.empty((side, side, 3), np.uint8))
    finally:
        image_header.MAX_PIXELS = before


def warning(data: bytes) -> None:
    libjpeg_warning(data)


def masks(data: bytes) -> None:
    for decode in (read_mask, lambda data: decode_mask(data, Target(9, 9, 1, _UINT8), np.empty((9, 9), np.uint8))):
        with suppress(ImageError):
            decode(data)


def loader(data: bytes) -> None:
    """As the row of a packed file, whole, in parts, smaller, turned, and by the native code."""
    for channels, orientation, factor in itertools.product((1, 3), (1, 6), (1, 2, 4, 8)):
        shape = (HEIGHT, WIDTH, channels) if orientation == 1 else (WIDTH, HEIGHT, channels)
        for window in ((0, 0, *shape[:2]), (9, 3, 17, 20)):
            with suppress(ImageError):
                decode_part(data, JPEG, shape, orientation, window, factor)
        with suppress(ImageError):
            decode_row(data, JPEG, shape, orientation, _UINT8)
        if not native.decodes_jpeg():
            continue
        memory = np.frombuffer(data, np.uint8)
        sources = np.array([[0, len(data), HEIGHT, WIDTH, factor]])
        high, wide = -(-HEIGHT // factor), -(-WIDTH // factor)
        for top, left, rows, columns in ((0, 0, high, wide), (high // 3, wide // 3, high // 2, wide // 2)):
            window = np.array([[top, left, rows, columns, 8, 8, 0, 0, 0, 0]])
            native.make_images(memory, sources, window, np.empty((1, 8, 8, channels), np.uint8))


def export(data: bytes) -> None:
    with suppress(ImageError):
        decode_unturned(data, 3)


WAYS: dict[str, Callable[[bytes], None]] = {
    one.__name__: one for one in (survey, pack, pack_large, warning, masks, loader, export)
}


def whole_commands(names: list[str], folder: Path) -> Iterator[str]:
    """Packs all files in each form, lists, verifies and loads the results; yields what is done next."""
    import torch
    from late_backend import Device

    from fastload import FastLoader, PackedDataset, pack_images, verify_file
    from fastload.format.ragged import Column
    from fastload.transforms import RandomResizedCrop
    from sample_files import write_ragged

    source = folder / "source"
    source.mkdir()
    names = [*names, "sof0-8-221111"]
    for name in names:
        (source / f"{name}.jpg").write_bytes(made(name))
    for store, strict in (("raw", True), ("jpeg", False), ("source", True)):
        yield f"pack --store {store}"
        path = folder / f"{store}.h5"
        report = pack_images(
            source, path, store=store, mode="rgb", size=32 if store == "raw" else None, on_error="skip", workers=2,
            strict=strict,
        )  # fmt: skip
        assert report.num_samples, "the last one is ordinary"
        yield f"verify of {store}"
        assert verify_file(path).ok
    # Files of which packing keeps few bytes as they are; somebody else may have written them.
    rows = [(made(name), (HEIGHT, WIDTH, 3), 1 + 5 * (at % 2)) for at, name in enumerate(names)]
    rows = [(data, shape if turned == 1 else (WIDTH, HEIGHT, 3), turned) for data, shape, turned in rows]
    keys = Column(np.array([name.encode() for name in names]))
    foreign = write_ragged(folder / "foreign.h5", rows, {"key": keys})
    for path, decode in itertools.product((folder / "source.h5", foreign), ("cpu", "device")):
        yield f"{decode} loader of {path.name}"
        dataset = PackedDataset(path, fields=["images"], decode=decode)
        for row in range(len(dataset)):
            with suppress(FastloadError):
                dataset[row]
        device = Device() if decode == "device" else None
        for rows_of_one in np.arange(len(dataset))[:, None]:
            part = dataset.select(rows_of_one)
            with suppress(FastloadError):
                list(FastLoader(part, 1, transform=[RandomResizedCrop(16)], device=device, workers=1, seed=1))
    yield "verify of foreign"
    verify_file(foreign)
    torch.set_num_threads(1)


def child(report: int, names: list[str], at: int, ways: list[str], *, commands: bool) -> None:
    """Does the work from a place on; writes each place to the descriptor `report` before it begins with it."""

    def tell(*said: object) -> None:
        os.write(report, json.dumps(said).encode() + b"\n")

    warnings.simplefilter("ignore")
    jobs = [(name, way) for name in names for way in ways]
    for place in range(at, len(jobs)):
        name, way = jobs[place]
        tell(place + 1, f"{way} of {name}")
        try:
            WAYS[way](made(name))
        except FastloadError:
            continue
        except Exception:  # noqa: BLE001  # any other is a finding
            tell(place + 1, f"{way} of {name}: {traceback.format_exc()}", "raised")
    if commands and at <= len(jobs):
        with tempfile.TemporaryDirectory() as folder:
            for place, step in enumerate(whole_commands(names, Path(folder)), start=len(jobs) + 1):
                tell(place, step)


def run(names: list[str], under: Path | None, ways: Sequence[str] = tuple(WAYS), *, commands: bool = True) -> list[str]:
    """Returns what went wrong with these files: crashes, with what they were at, and exceptions that are not ours.

    `commands`: whole commands follow, of all files together. `under`: as `--under`.
    """
    here = Path(__file__).resolve()
    folders = [here.parent, here.parents[1] / "tools", here.parents[1]]
    first = [under / "packages"] if under is not None else []
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*first, *folders]))}
    if under is not None:
        around |= json.loads((under / "environment.json").read_text())
    wrong: list[str] = []
    at, jobs = 0, len(names) * len(ways)
    while at <= jobs:
        read, write = os.pipe()
        words = [
            sys.executable,
            str(here),
            "--child",
            str(at),
            "--report",
            str(write),
            "--names",
            *names,
            "--ways",
            *ways,
        ]
        words += ["--commands"] if commands else []
        with tempfile.TemporaryFile() as said:
            process = subprocess.Popen(words, pass_fds=[write], env=around, stdout=said, stderr=said)
            os.close(write)
            with os.fdopen(read) as pipe:
                places = [json.loads(line) for line in pipe]
            process.wait()
            said.seek(0)
            text = said.read().decode(errors="replace")
        wrong += [what for _, what, *raised in places if raised]
        if process.returncode == 0:
            break
        place, what, *_ = places[-1] if places else (jobs + 1, "the start")
        code = process.returncode
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        wrong.append(f"{what}: {how}\n{text[-3000:]}")
        at = place
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=0, help="how many, chosen by a seed; 0: all")
    parser.add_argument("--under", type=Path, help="folder of libraries built with AddressSanitizer")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--report", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--names", nargs="*", help="of files")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--commands", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.names or (list(sample(options.files)) if options.files else all_names())
    if options.child is not None:
        child(options.report, names, options.child, options.ways, commands=options.commands)
        return
    wrong: list[str] = []
    parts = -(-len(names) // 1000)  # words of a command are limited
    for first in range(parts):
        wrong += run(names[first::parts], options.under, options.ways)
    print("\n---\n".join(wrong))
    print(f"{len(names)} files, {len(options.ways)} ways and 11 commands: {len(wrong)} crashes or other findings")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
