"""The scripts that README.md begins with, and those before its diffs, on four shapes of folder, in one process."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image
from readme_diffs import ROOT, file_diffs
from warm_python import WarmPython

from fastload import pack_images

EXAMPLES = ("folder.py", "dataloader.py", "own_dataset.py", "classify.py")
SEVERAL = ((24, 32), (40, 30), (36, 36))
TORCHVISION = Path(sys.prefix, "torchvision")  # tools/test.sh puts it apart


class Shape(NamedTuple):
    """A folder of images: what differs from one user's to another's."""

    splits: bool
    classes: int
    sizes: tuple[tuple[int, int], ...]


SHAPES = {
    "splits-2-classes-one-size": Shape(True, 2, SEVERAL[:1]),
    "splits-10-classes-several-sizes": Shape(True, 10, SEVERAL),
    "no-splits-2-classes-several-sizes": Shape(False, 2, SEVERAL),
    "no-splits-10-classes-one-size": Shape(False, 10, SEVERAL[:1]),
}
BEFORE_ON = tuple(name for name in SHAPES if "several" in name)
IMAGES = {"train": 40, "val": 10, "": 80}
"""Images of a split; of a folder without splits."""

# An end between the second checkpoint's `torch.save` and its name.
STOP = """
import torch
save, calls = torch.save, []
def stopping(*given):
    save(*given)
    calls.append(given)
    if len(calls) == 2:
        torch.save = save
        raise KeyboardInterrupt
torch.save = stopping
"""
# The scripts before start their workers by fork, as torch does on Linux where nothing else is said before Python 3.14.
FORKED = "import multiprocessing; multiprocessing.set_start_method('fork', force=True)"
TORCHVISION_THERE = f"""
import sys
sys.path += {[str(ROOT / "tests"), str(TORCHVISION)]}
import layout_trees
layout_trees.import_torchvision()
"""


def draw(folder: Path, shape: Shape) -> Path:
    rng = np.random.default_rng(0)
    for split in ("train", "val") if shape.splits else ("",):
        for number in range(IMAGES[split]):
            path = folder / split / f"class{number % shape.classes}" / f"{number:03d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            size = shape.sizes[number // shape.classes % len(shape.sizes)]
            Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(path)
    return folder


class Said(NamedTuple):
    """The end of a run."""

    code: int
    text: str

    def finite_losses(self, epochs: int) -> bool:
        losses = [float(loss) for loss in re.findall(r"loss ([\w.]+)", self.text)]
        return self.code == 0 and len(losses) == epochs and all(map(math.isfinite, losses))


@pytest.fixture(scope="module")
def said(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Said]:
    """What each run says, by its example and shape, and what else it is about."""
    place = tmp_path_factory.mktemp("beginnings")
    runs: dict[tuple[str, ...], tuple[list[object], str]] = {}
    befores = {found.path.name: place / f"before_{found.path.name}" for found in file_diffs()}
    for found in file_diffs():
        befores[found.path.name].write_text(found.before)
    last: dict[tuple[str, ...], tuple[list[object], str]] = {}
    for name, shape in SHAPES.items():
        folder = draw(place / name, shape)
        packed = pack_images(folder, place / f"packed-{name}.h5", workers=1).path
        train = folder / "train" if shape.splits else folder
        for example in EXAMPLES:
            given = packed if example in ("folder.py", "dataloader.py") else folder
            words = ["--epochs", 1] if example == "classify.py" else []
            runs[example, name] = [ROOT / "tools/examples" / example, given, *words], ""
            if example in befores and name in BEFORE_ON:
                first = FORKED if example == "own_dataset.py" else FORKED + TORCHVISION_THERE
                last[example, name, "before"] = [befores[example], train], first
        classify = [ROOT / "tools/examples/classify.py"]
        runs[name, "resumed"] = [*classify, folder, "--epochs", 2], ""
        images = sorted(train.glob("*/*.jpg"))[:2]
        runs[name, "predicted"] = [*classify, folder, "--predict", *images], ""
    again = place / "again"
    again.symlink_to(folder)
    runs["whole",] = [*classify, again, "--epochs", 2, "--save-every", 1], ""
    (third := place / "third").symlink_to(folder)
    runs["stopped",] = [*classify, third, "--epochs", 2, "--save-every", 1], STOP
    runs["continued",] = [*classify, third, "--epochs", 2, "--save-every", 1], ""
    runs |= last
    listed = [{"words": list(map(str, words)), "first": first} for words, first in runs.values()]
    (place / "runs.json").write_text(json.dumps(listed))
    warm_python.finish(Path(__file__).with_name("run_in_turn.py"), place / "runs.json", cwd=place)
    results = json.loads((place / "runs.out.json").read_text())
    return {key: Said(*result) for key, result in zip(runs, results, strict=True)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_on_every_shape_of_folder(said, example, shape):
    run = said[example, shape]
    assert run.finite_losses(1 if example == "classify.py" else 2), run.text


@pytest.mark.parametrize("shape", SHAPES)
def test_the_whole_classification_counts_each_held_out_image_once_goes_on_and_predicts(said, shape):
    held_out = IMAGES["val"] if SHAPES[shape].splits else IMAGES[""] // 10
    for run, epoch in ((said["classify.py", shape], 1), (said[shape, "resumed"], 2)):
        assert re.fullmatch(rf"epoch {epoch}: loss [\d.]+, \d+ of {held_out} right\n", run.text), run.text
    named = re.findall(r"^\S+\.jpg: class(\d+) \((\d+)%\)$", said[shape, "predicted"].text, re.MULTILINE)
    assert len(named) == 2 and all(int(number) < SHAPES[shape].classes for number, _ in named), said[shape, "predicted"]


def test_a_classification_that_was_stopped_in_an_epoch_ends_as_one_that_was_not(said):
    assert said["stopped",].code == 1 and "epoch" not in said["stopped",].text.replace("--epochs", "")
    assert said["whole",].finite_losses(2) and said["continued",] == said["whole",], said["continued",].text


@pytest.mark.parametrize("shape", BEFORE_ON)
@pytest.mark.parametrize("example", EXAMPLES[:3])
def test_the_script_before_a_diff_of_the_readme_trains_too(said, example, shape):
    if example != "own_dataset.py" and not (TORCHVISION.exists() or importlib.util.find_spec("torchvision")):
        pytest.skip("torchvision is not installed")
    run = said[example, shape, "before"]
    assert run.finite_losses(2), run.text


def test_the_whole_classification_is_short():
    assert len((ROOT / "tools/examples/classify.py").read_text().splitlines()) < 80
