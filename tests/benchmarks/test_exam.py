"""The changes that benchmarks/exam/sitecustomize.py makes to scripts by others, and how it times their loops."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fastload

HOOK = Path(__file__).resolve().parents[2] / "benchmarks" / "exam" / "sitecustomize.py"

SCRIPT = """
import importlib.util, json, sys
import torch
from torch.utils.data import DataLoader, Dataset

spec = importlib.util.spec_from_file_location("hook", sys.argv[1])
hook = importlib.util.module_from_spec(spec)
sys.modules["hook"] = hook
spec.loader.exec_module(hook)
hook.install(sys.argv[2], sys.argv[3], sys.argv[4])

class Images(Dataset):
    made = 0
    def __len__(self):
        return 12
    def __getitem__(self, index):
        Images.made += 1
        return torch.full((3, 4, 4), float(index)), index

seen = []
network = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.Flatten(), torch.nn.Linear(20, 1))
network[0].register_forward_pre_hook(lambda _, given: seen.append(given[0].is_contiguous()))
loader = DataLoader(Images(), batch_size=2, num_workers=int(sys.argv[5]))
labels = []
for _ in range(2):
    for images, numbers in loader:
        assert (images == numbers[:, None, None, None]).all()
        labels += numbers.tolist()
        network(images.float()).sum().backward()
sizes = [len(numbers) for _, numbers in loader]
print(json.dumps({"kind": type(loader).__name__, "workers": getattr(loader, "num_workers", None),
    "persistent": getattr(loader, "persistent_workers", None), "contiguous": all(seen), "labels": sorted(labels),
    "made": Images.made, "collate": type(getattr(loader, "collate_fn", Images.__len__)).__name__, "sizes": sizes}))
"""

PACK = """
import fastload

def replace(arguments):
    assert len(arguments["dataset"]) == 12
    return fastload.FastLoader("packed.h5", arguments["batch_size"], shuffle=False)
"""


@pytest.mark.parametrize(
    ("change", "workers", "differs"),
    [
        ("", 0, {}),
        ("workers=1", 0, {"workers": 1, "made": 0}),
        ("persistent", 1, {"workers": 1, "made": 0, "persistent": True}),
        ("cheaper", 0, {"made": 13}),  # each once, and the first before to know its size
        ("one tensor", 1, {"workers": 1, "made": 0, "collate": "AsOneTensor"}),
        ("channels_last", 0, {"contiguous": False}),
        ("pack", 0, {"kind": "FastLoader", "made": 0, "contiguous": False} | dict.fromkeys(("workers", "persistent"))),
    ],
)
def test_each_change_is_made_and_the_loop_gets_the_same_batches(warm_python, tmp_path, change, workers, differs):
    script, pack, out = (tmp_path / name for name in ("script.py", "pack.py", "loops.jsonl"))
    script.write_text(SCRIPT)
    pack.write_text(PACK)
    numbers = np.arange(12)
    np.savez(
        tmp_path / "images.npz",
        images=np.tile(numbers[:, None, None, None], (4, 4, 3)).astype(np.uint8),
        labels=numbers,
    )
    fastload.pack_images(tmp_path / "images.npz", tmp_path / "packed.h5")
    ran = warm_python.run(script, HOOK, change, pack, out, workers, cwd=tmp_path)
    assert not ran.returncode, ran.stderr
    plain = {"kind": "DataLoader", "workers": 0, "persistent": False, "contiguous": True, "made": 36}
    told = json.loads(ran.stdout)
    assert told == plain | {"labels": sorted([*range(12)] * 2), "collate": "function", "sizes": [2] * 6} | differs
    (loop,) = map(json.loads, out.read_text().splitlines())
    counts = {name: loop[name] for name in ("passes", "steps", "timed_steps", "backward")}
    assert counts == {"passes": 3, "steps": 18, "timed_steps": 16, "backward": 12}
    assert loop["seconds"] > 0
