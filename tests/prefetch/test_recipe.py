"""Which stages a loader has for its data and options, and what `describe` says of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from late_backend import Device
from ragged_cases import varied_file

from fastload import FastLoader, PackedDataset, Pad
from fastload.prefetch.work import Stage, Where
from fastload.transforms import ColorJitter, MixUp, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize

PACKED = {"rows": 20, "size": (16, 12, 3), "seed": 5, "classes": "abc", "masks": True}
TRAINING = [RandomResizedCrop(8), RandomHorizontalFlip(), Normalize((0.5,) * 3, (0.25,) * 3)]
LATER = [RandomHorizontalFlip(), ColorJitter(0.1)]


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, index):
        return torch.zeros(3, 4, 4), index


def as_it_is(sample):
    return sample


class Slow:
    """A user's transform, which is not marked as safe in threads."""

    def __call__(self, images, draws):
        return images


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory):
    return varied_file(tmp_path_factory.mktemp("recipe") / "jpegs.h5")


@dataclass
class Case:
    """Stages by where they run, in order; those that another one runs count by themselves."""

    options: dict[str, Any]
    thread: str = ""
    process: str = ""
    side_stream: str = ""
    use: str = ""
    data: str = "raw"
    fields: tuple[str, ...] | None = None
    decode: str = "cpu"
    transform: Any = None


CASES = {
    "raw": Case({}, "GatherRows ToUserLayout"),
    "raw, transformed": Case({"transform": TRAINING}, "GatherRows TransformInThread StoreInSlot ToUserLayout"),
    "raw, mixed": Case({"transform": [MixUp(num_classes=3)]}, "GatherRows TransformInThread StoreInSlot ToUserLayout"),
    "raw, echoed": Case({"echo": 2}, "GatherRows ToUserLayout"),
    "raw, echoed and transformed": Case({"transform": TRAINING, "echo": 2}, "GatherRows ToUserLayout", use="Transform"),
    "raw, a transform that is not safe in threads": Case(
        {"transform": [*TRAINING, Slow()]}, "GatherRows ToUserLayout", use="Transform"
    ),
    "raw, texts": Case({}, "GatherRows ReadTexts ToUserLayout", fields=("images", "key")),
    "raw, device": Case({"device": True}, "WriteFacts GatherRows", side_stream="CopySlot"),
    "raw, device, echoed and transformed": Case(
        {"device": True, "transform": TRAINING, "echo": 2}, "WriteFacts GatherRows DrawNumbers",
        side_stream="CopySlot", use="Transform",
    ),
    "raw, cached on the device, echoed": Case(
        {"device": True, "transform": TRAINING, "cache": "device", "echo": 2}, "WriteFacts WriteIndex DrawNumbers",
        side_stream="CopySlot", use="GatherCached Transform",
    ),
    "raw, cached on the host, echoed": Case(
        {"device": True, "transform": TRAINING, "cache": "host", "echo": 2}, "WriteFacts WriteIndex DrawNumbers",
        side_stream="CopySlot FetchCached", use="Transform",
    ),
    "raw, cached with texts": Case(
        {"device": True, "cache": "device", "echo": 2}, "WriteFacts WriteIndex ReadTexts DrawNumbers",
        side_stream="CopySlot", use="GatherCached Transform", fields=("images", "key"),
    ),
    "raw, device, transformed": Case(
        {"device": True, "transform": TRAINING}, "WriteFacts GatherRows DrawNumbers",
        side_stream="CopySlot Transform",
    ),
    "raw, device, mixed": Case(
        {"device": True, "transform": [MixUp(num_classes=3)]}, "WriteFacts GatherRows DrawNumbers",
        side_stream="CopySlot", use="Transform",
    ),
    "raw, cached on the device": Case(
        {"device": True, "transform": TRAINING, "cache": "device"}, "WriteFacts WriteIndex DrawNumbers",
        side_stream="CopySlot GatherCached Transform",
    ),
    "raw, cached on the host": Case(
        {"device": True, "transform": TRAINING, "cache": "host"}, "WriteFacts WriteIndex DrawNumbers",
        side_stream="CopySlot FetchCached Transform",
    ),
    "JPEGs, device": Case(
        {"transform": TRAINING, "device": True}, "WriteFacts GatherRows CutRows StoreInSlot DrawNumbers",
        side_stream="CopySlot Transform", data="jpegs",
    ),
    "JPEGs": Case(
        {"transform": TRAINING}, "GatherRows CutRows TransformInThread StoreInSlot ToUserLayout", data="jpegs"
    ),
    "JPEGs, no more than cut": Case(
        {"transform": [Resize((9, 9))]}, "GatherRows CutRows StoreInSlot ToUserLayout", data="jpegs"
    ),
    "JPEGs, echoed": Case(
        {"transform": TRAINING, "echo": 2}, "GatherRows CutRows StoreInSlot ToUserLayout", use="Transform", data="jpegs"
    ),
    "JPEGs, device, echoed": Case(
        {"transform": TRAINING, "device": True, "echo": 2}, "WriteFacts GatherRows CutRows StoreInSlot DrawNumbers",
        side_stream="CopySlot", use="Transform", data="jpegs",
    ),
    "JPEGs, decoded by the device, echoed": Case(
        {"transform": TRAINING, "device": True, "echo": 2},
        "WriteFacts GatherRows DecodeOnDevice StoreInSlot DrawNumbers",
        side_stream="CopySlot", use="JoinPixels Transform", data="jpegs", decode="device",
    ),
    "a list": Case(
        {"batch": "list"}, "GatherRows DecodeVariableSize StoreInSlot ToUserLayout",
        use="JoinPixels SaySizes", data="jpegs",
    ),
    "a list, transformed": Case(
        {"batch": "list", "transform": LATER},
        "GatherRows DecodeVariableSize TransformEach StoreInSlot ToUserLayout",
        use="JoinPixels SaySizes", data="jpegs",
    ),
    "a list, echoed": Case(
        {"batch": "list", "transform": LATER, "echo": 2},
        "GatherRows DecodeVariableSize StoreInSlot ToUserLayout",
        use="JoinPixels TransformEach SaySizes", data="jpegs",
    ),
    "padded": Case(
        {"batch": Pad(16)}, "GatherRows DecodeVariableSize PadImages StoreInSlot ToUserLayout",
        use="JoinPixels SaySizes", data="jpegs",
    ),
    "padded, device": Case(
        {"batch": "pad", "transform": LATER, "device": True},
        "WriteFacts GatherRows DecodeVariableSize SendPixels StoreInSlot",
        side_stream="CopySlot JoinPixels TransformEach PadImages", use="SaySizes", data="jpegs",
    ),
    "padded, device, echoed": Case(
        {"batch": "pad", "transform": LATER, "device": True, "echo": 2},
        "WriteFacts GatherRows DecodeVariableSize SendPixels StoreInSlot",
        side_stream="CopySlot", use="JoinPixels TransformEach PadImages SaySizes", data="jpegs",
    ),
    "padded, device, not transformed": Case(
        {"batch": "pad", "device": True}, "WriteFacts GatherRows DecodeVariableSize SendPixels StoreInSlot",
        side_stream="CopySlot JoinPixels", use="SaySizes", data="jpegs",
    ),
    "JPEGs, decoded by the device": Case(
        {"transform": TRAINING, "device": True}, "WriteFacts GatherRows DecodeOnDevice StoreInSlot DrawNumbers",
        side_stream="CopySlot JoinPixels Transform", data="jpegs", decode="device",
    ),
    "a Python dataset": Case({}, process="MakeSamples", data="python"),
    "a Python dataset, transformed": Case(
        {"transform": [Slow()]}, process="MakeSamples", use="Transform", data="python"
    ),
    "a Python dataset, device, echoed": Case(
        {"transform": TRAINING[1:], "device": True, "echo": 2}, "DrawNumbers", process="MakeSamples",
        side_stream="CopySlot", use="Transform", data="python",
    ),
    "a packed dataset's own transform": Case({}, process="MakeSamples", transform=as_it_is),
}  # fmt: skip


def loader_of(case, packed, jpegs):
    options = case.options | ({"device": Device()} if case.options.get("device") else {})
    if case.data == "python":
        return FastLoader(Numbers(), 4, **options)
    path = {"raw": packed, "jpegs": jpegs}[case.data]
    data = PackedDataset(path, fields=case.fields, decode=case.decode, transform=case.transform)
    return FastLoader(data, 4, **options)


def name_of(stage: Stage) -> str:
    name = type(stage).__name__
    return "Transform" if name == "TransformBatch" else name


@pytest.mark.parametrize("name", CASES)
def test_stages_run_where_the_data_and_the_options_ask_for_them_and_describe_says_so(packed, jpegs, name):
    case = CASES[name]
    loader = loader_of(case, packed, jpegs)
    steps = [(step, stage.where) for stage in loader._recipe.stages for step in stage.steps()]
    found = {where: " ".join(name_of(step) for step, here in steps if here is where) for where in Where}
    assert found == {
        Where.THREAD: case.thread, Where.PROCESS: case.process, Where.SIDE_STREAM: case.side_stream,
        Where.USE: case.use,
    }  # fmt: skip
    lines = loader.describe().splitlines()
    assert len(lines) == len(steps)
    for line, (step, where) in zip(lines, steps, strict=True):
        assert line.split()[0] == type(step).__name__ and f"  {where.value}  " in line
        assert step.why and line.endswith(f"  {step.why}")
        assert len(line) <= 170


def line_of(loader, stage):
    (line,) = [line for line in loader.describe().splitlines() if line.startswith(stage)]
    return line


def test_what_stands_behind_a_stage_is_true_of_this_loader(packed, jpegs):
    slow = FastLoader(packed, 4, transform=[*TRAINING, Slow()])
    assert "as Slow has to run there" in line_of(slow, "Transform")
    mixed = line_of(FastLoader(packed, 4, transform=[*TRAINING, MixUp(num_classes=3)], device=Device()), "Transform")
    assert "as MixUp has to run there" in mixed
    assert "Normalize: drawn anew for each use" in line_of(
        FastLoader(packed, 4, transform=TRAINING, echo=2), "Transform"
    )
    in_threads = line_of(FastLoader(packed, 4, transform=TRAINING), "TransformInThread")
    assert "RandomResizedCrop, RandomHorizontalFlip, Normalize" in in_threads
    stored = FastLoader(jpegs, 4, transform=TRAINING)
    assert "RandomResizedCrop, RandomHorizontalFlip:" in line_of(stored, "CutRows")
    assert "  Normalize:" in line_of(stored, "TransformInThread")
    assert "  labels:" in line_of(stored, "GatherRows"), "images go another way"
    assert "  images, key:" not in line_of(loader_of(CASES["raw, texts"], packed, jpegs), "GatherRows")
    assert "  key:" in line_of(loader_of(CASES["raw, texts"], packed, jpegs), "ReadTexts")
    assert "multiples of 16" in line_of(FastLoader(jpegs, 4, batch=Pad(16)), "PadImages")
    assert "Numbers" in line_of(FastLoader(Numbers(), 4), "MakeSamples")
    assert "in device memory" in line_of(FastLoader(packed, 4, device=Device(), cache="device"), "WriteIndex")
    assert "in host memory" in line_of(FastLoader(packed, 4, device=Device(), cache="host"), "WriteIndex")


def test_the_page_on_training_shows_what_is_printed(packed):
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    shown = page.partition("`print(loader.describe())`")[2].partition("```text\n")[2].partition("```")[0]
    normalize = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    assert shown == FastLoader(packed, 4, transform=[RandomHorizontalFlip(), normalize]).describe() + "\n"
