"""The README's examples, run as they stand: `python` blocks in one namespace, `console` blocks as commands.

A `python` block that begins with a file's name, as `# my_data.py`, is that file.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import fastload

README = Path(__file__).resolve().parents[1] / "README.md"
FILE_NAME = re.compile(r"# (\w+\.py)\n")
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def draw(folder: Path, count: int, sizes: list[tuple[int, int]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    for i in range(count):
        pixels = rng.integers(0, 256, (*sizes[i % len(sizes)], 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:03d}.jpg")


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the examples speak of: photos/ with splits, phone/ of several sizes, cells/ with masks, birds.csv."""
    for split, count in (("train", 48), ("val", 20)):
        for seed, label in enumerate(("cat", "dog")):
            draw(tmp_path / "photos" / split / label, count, [(24, 32)], seed)
    for seed, label in enumerate(("inside", "outside")):
        draw(tmp_path / "phone" / label, 15, [(40, 60), (60, 40), (50, 50)], seed)
    draw(tmp_path / "cells" / "images", 6, [(40, 40)], 5)
    (tmp_path / "cells" / "masks").mkdir()
    for image in (tmp_path / "cells" / "images").iterdir():
        Image.new("L", (40, 40), 1).save(tmp_path / "cells" / "masks" / f"{image.stem}.png")
    draw(tmp_path / "birds", 4, [(40, 60)], 6)
    rows = [f"birds/{i:03d}.jpg,{species},{i}" for i, species in enumerate(("owl", "wren", "owl", "kite"))]
    (tmp_path / "birds.csv").write_text("\n".join(["file,species,age", *rows]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_command(line: str) -> None:
    words = shlex.split(line)
    assert words[0] == "fastload", f"a console block runs fastload only, not {words[0]}"
    script = Path(sys.executable).with_name("fastload")
    start = [str(script)] if script.exists() else [sys.executable, "-c", "from fastload.cli import main; main()"]
    # The very package under test, also when it comes from a checkout by a relative PYTHONPATH.
    here = str(Path(sys.executable).parent)  # the `python` of the examples is this one
    env = os.environ | {"PYTHONPATH": str(Path(fastload.__file__).parents[1])}
    env["PATH"] = os.pathsep.join([here, os.environ.get("PATH", "")])
    env.pop("PYTHONSAFEPATH", None)  # of tools/test.sh: a user's script finds what lies beside it
    done = subprocess.run([*start, *words[1:]], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


def test_every_example_runs(photos, monkeypatch):
    blocks = BLOCK.findall(README.read_text())
    assert sum(kind == "python" for kind, _ in blocks) >= 4, "the README has lost its examples"
    namespace: dict[str, object] = {"__name__": "readme"}
    monkeypatch.syspath_prepend(photos)  # for the files, as where a script lies
    for kind, text in blocks:
        if kind == "python" and (name := FILE_NAME.match(text)):
            (photos / name[1]).write_text(text)
        elif kind == "python":
            exec(compile(text, "README.md", "exec"), namespace)
        else:
            for line in text.splitlines():
                if line.startswith("$ "):
                    run_command(line[2:])
    assert (photos / "grid.png").exists()


def test_python_blocks_do_not_hide_behind_other_names():
    marks = set(re.findall(r"^```(\w*)$", README.read_text(), re.MULTILINE)) - {""}
    assert marks <= {"python", "console", "sh", "text"}
    shells = re.findall(r"^```sh\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    assert not any(re.search(r"^fastload ", text, re.MULTILINE) for text in shells), "use a console block: it is run"
