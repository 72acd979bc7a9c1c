"""What verdicts advise: a loop whose cost is gone is not told it again, and what the words name is there.

Most of it is modelled: the loops are figures, as in `test_judge`, and the change is made to the figures. What is typed
for a change (arguments, calls, options of commands) is typed here, and does what it promises. How much a change gains
in time is looked at in `test_judge` and `test_predictions`, and on real scripts in tests/profiling/doctor.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from advised import given, hear, modelled, models, tries
from click.testing import CliRunner
from test_judge import MS, demands
from torch.utils.data import DataLoader, TensorDataset

import fastload
from fastload import FastLoader, Meter, PackedDataset, Remote
from fastload.cli import app
from fastload.profiling.doctor import examine
from fastload.profiling.doctor.loop_demands import unseen
from fastload.profiling.verdict import judge
from fastload.profiling.verdict.judge import WORTH
from fastload.profiling.verdict.loop_model import FastLoaderCosts, FormatCosts, WorkerCosts
from fastload.profiling.verdict.replacement import PlainLoader
from fastload.profiling.verdict.sentences import network_changes
from fastload.system.advice import ADVICE
from fastload.timing.results import NETWORK, WAITING, NetworkUse, WorkTime

MIB = 2**20
PACKED = {"rows": 40, "size": (16, 16, 3), "classes": "ab"}


def said(loop) -> str:
    """Everything that a verdict says, and each change that is worth making."""
    verdict = judge(loop)
    changes = [f"{one.change}\n{one.how}" for one in verdict.cures if one.gain >= WORTH]
    return "\n".join([verdict.sentence, *verdict.evidence, *changes])


def fed(loop):
    """The loop once its batches cost nothing more and lie ready."""
    quick = demands(compute=20, transform=(0.01, 0))
    return replace(loop, batches=quick.batches, steps=quick.steps, epochs=(), by_format=None)


def waits(**stages):
    return demands(wait=45, **stages)


# --- causes and their changes -----------------------------------------------------------------------------------------


READING, DECODING, TRANSFORM = waits(reading=(1, 90)), waits(decoding=(90, 0)), waits(transform=(90, 0))
COLLATE, HANDED, COPIED = waits(collate=(90, 0)), waits(hand_over=(90, 0)), demands(wait=1, copy=40, transform=(3, 0))
LOCKED = waits(reading=(1, 92), transform=(4, 0), lock=80)
SLEEPING = waits(transform=(4, 0), **{WAITING: (0, 96)})
FEW = demands(wait=30, workers=0, reading=(1, 2), decoding=(13, 0), transform=(14, 0), compute=30)
STARTED = demands(wait=45, transform=(3, 0), startups=(600,) * 4)
COMPUTING = replace(demands(wait=1, compute=50, transform=(1, 0)), step_running_s=0.08)
SLOW_IN_ITS_FORMAT = replace(COMPUTING, by_format=FormatCosts(0.040, 0.025, 0.002))
LISTED = PlainLoader(transforms=("Resize(8)",), lists_transforms=True)


def without_images(loop):
    return replace(loop, images=False)


def of_fastloader(workers=8, **stages):
    return replace(demands(workers=workers, cpus=8, **stages), is_fastload=True, by_threads=True)


@pytest.mark.parametrize(
    ("names", "loop"),
    [
        modelled("reading", of=READING),
        modelled("decoding", of=DECODING),
        modelled("transform", of=TRANSFORM),
        modelled("transform on the CPU", of=replace(TRANSFORM, step_running_s=5 * MS)),
        modelled(
            "transform by FastLoader",
            of=replace(TRANSFORM, by_fastloader=FastLoaderCosts(WorkTime(MS)), keeps_transform=False, plain=LISTED),
        ),
        modelled("collate", of=COLLATE),
        modelled("hand-over", of=HANDED),
        modelled(
            "hand-over as one", of=replace(HANDED, tensors=40, as_one_tensor=WorkerCosts(WorkTime(20 * MS), 2 * MS))
        ),
        modelled("copy to the device", of=COPIED),
        modelled("worker start-up", "type persistent workers", of=STARTED),
        modelled("worker start-up once", of=demands(wait=45, transform=(3, 0), startups=(2400,))),
        modelled("a slow sample now and then", of=waits(transform=(92, 0), slow=88)),
        modelled("lock contention", of=LOCKED),
        modelled("number of workers", "type number of workers", of=FEW),
        modelled("type workers that wait", of=SLEEPING),
        modelled("keep a copy", of=replace(SLEEPING, waits_shared=True)),
        modelled("channels_last", "type channels_last", of=SLOW_IN_ITS_FORMAT),
        modelled("reading without images", of=without_images(READING)),
        modelled("decoding without images", of=without_images(DECODING)),
        modelled("transform without images", of=without_images(TRANSFORM)),
        modelled("collate without images", of=without_images(COLLATE)),
        modelled("hand-over without images", of=without_images(HANDED)),
        modelled("copy to the device without images", of=without_images(COPIED)),
        modelled("lock contention without images", of=without_images(LOCKED)),
        modelled("reading of FastLoader", of=of_fastloader(wait=45, reading=(1, 90))),
        modelled("transform of FastLoader", of=of_fastloader(wait=45, transform=(90, 0))),
        modelled("copy to the device of FastLoader", of=of_fastloader(wait=1, copy=40, transform=(3, 0))),
        modelled("hand-over of FastLoader", of=replace(HANDED, is_fastload=True)),
        modelled(
            "decoding of FastLoader",
            of=replace(of_fastloader(4, wait=45, decoding=(90, 0)), compression_ratio=5.0),
        ),
    ],
)
def test_a_loop_without_the_cost_is_not_advised_the_change_again(names, loop):
    for name in names:
        hear(name, said(loop))
        accepted(ADVICE[name])
        assert given(name, said(fed(loop))) is None


USE = NetworkUse(
    elapsed_s=10.0, bytes=400 * MIB, chunks=50, hits=5, requests=52, busy_s=300.0, waited_s=12.0, url="s3://b/out.h5",
    in_flight=32, allowed=32.0, dataset_bytes=900 * MIB, room_bytes=2000 * MIB,
)  # fmt: skip
SMALL = {"busy_s": 50.0, "room_bytes": 500 * MIB}


@pytest.mark.parametrize(
    ("names", "case"),
    [
        # what was measured, and what it is once the advice is followed
        modelled("more requests", of=({}, {"in_flight": 512, "allowed": 512.0})),
        modelled("fewer requests", of=({"refused": 10}, {"refused": 0})),
        modelled("share of a node", of=({"nodes": 4}, {"nodes": 4, "by_node": True})),
        modelled("more room", of=({**SMALL, "again": 40}, {**SMALL, "again": 0, "room_bytes": 901 * MIB})),
        modelled("room for all", of=(SMALL, {**SMALL, "room_bytes": 901 * MIB})),
        modelled("nearer", "train on", of=({"busy_s": 50.0}, {"chunks": 0, "hits": 55, "busy_s": 0.0})),
    ],
)
def test_a_network_on_which_the_advice_was_followed_is_not_given_it_again(names, case):
    before, after = (replace(USE, **use) for use in case)
    # In a loop over a FastLoader whose batches wait for the network; nothing comes over it in the second case's last.
    loop = of_fastloader(2, wait=45, reading=(2, 0), **{NETWORK: (0, 90)})
    for name in names:
        hear(name, "; ".join(network_changes(replace(loop, network=before))))
        accepted(ADVICE[name])
        verdict = judge(replace(loop, network=after))
        changes = (
            network_changes(replace(loop, network=after)) if after.chunks else [one.change for one in verdict.cures]
        )
        assert given(name, "; ".join(changes)) is None


@models("keep on this machine")
def test_data_on_this_machine_have_no_network_to_wait_for():
    loop = waits(reading=(2, 0), **{NETWORK: (0, 90)})
    hear("keep on this machine", said(loop))
    assert given("keep on this machine", said(waits(reading=(92, 0)))) is None


# --- what the words name ----------------------------------------------------------------------------------------------

CALLS = {"FastLoader": FastLoader, "DataLoader": DataLoader, "Remote": Remote}


def accepted(text: str) -> None:
    """Requires that commands have the options that a text names for them, and calls their arguments."""
    for command, options in re.findall(rf"fastload ({'|'.join(app.functions)})\b((?:[^`,;()]*--[a-z-]+)*)", text):
        help = CliRunner().invoke(app, [command, "--help"])
        assert help.exit_code == 0, command
        for option in re.findall(r"--[a-z-]+", options):
            assert option in help.output, f"fastload {command} {option}"
    for call, words in re.findall(r"(\w+)\(([^()]*)\)", text):
        for word in re.findall(r"(\w+)=", words if call in CALLS else ""):
            assert word in inspect.signature(CALLS[call]).parameters, f"{call}({word}=)"


@pytest.fixture(scope="module")
def samples():
    return TensorDataset(torch.arange(24.0).reshape(8, 3, 1, 1), torch.arange(8))


@tries("type number of workers", "type workers that wait", "type persistent workers", "worker start-up")
def test_arguments_of_a_dataloader_are_taken_as_advised(samples):
    plain = [batch[1].tolist() for batch in DataLoader(samples, 4)]
    how = [
        hear("type number of workers", said(FEW)), hear("type workers that wait", said(SLEEPING)), {"count": "1"}
    ]  # fmt: skip
    for found in how:
        count = min(2, int(found["count"]))  # of sixteen
        typed = ADVICE["type number of workers"].format(count=count).replace("...", "samples, 4")
        assert [batch[1].tolist() for batch in eval(typed)] == plain
    for name in ("type persistent workers", "worker start-up"):
        hear(name, said(STARTED))
    typed = ADVICE["type persistent workers"].replace("...", "samples, 4, num_workers=1")
    loader = eval(typed)
    epochs = [[batch[1].tolist() for batch in loader] for _ in range(2)]
    assert epochs == [plain, plain] and loader.persistent_workers
    # "copy to the device": where there is no device, torch pins nothing, and says so.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loader = DataLoader(samples, 4, pin_memory=device == "cuda")
    assert [batch[1].to(device, non_blocking=True).tolist() for batch in loader] == plain
    assert {"pin_memory", "persistent_workers", "num_workers"} <= inspect.signature(DataLoader).parameters.keys()


@tries("type channels_last", "channels_last")
def test_images_come_into_channels_last_memory_as_advised():
    for name in ("type channels_last", "channels_last"):
        hear(name, said(SLOW_IN_ITS_FORMAT))
    images = torch.zeros(4, 3, 8, 8)
    names = {"images": images, "torch": torch}
    exec(ADVICE["type channels_last"].partition(",")[0], names)
    assert names["images"].is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous(
        memory_format=torch.channels_last
    )


def test_a_fastloader_gives_images_in_channels_last_memory_and_takes_the_arguments_that_are_advised(packed):
    images, _ = next(iter(FastLoader(packed, 8)))
    assert images.is_contiguous(memory_format=torch.channels_last)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = [batch.rows.tolist() for batch in FastLoader(packed, 8)]
    for words in ({"device": device}, {"workers": 3}, {"share": "node"}):
        assert [batch.rows.tolist() for batch in FastLoader(packed, 8, **words)] == rows
    assert "cache" in inspect.signature(FastLoader).parameters  # "device" needs one
    transforms = {"crops": "RandomResizedCrop", "flips": "RandomHorizontalFlip", "colour": "ColorJitter"}
    for word, name in {**transforms, "erasing": "RandomErasing"}.items():
        assert word in ADVICE["transform"] and hasattr(fastload.transforms, name)
    Remote(in_flight=64, max_bytes="10GiB")


def test_batches_are_made_in_the_forms_that_are_advised(samples):
    # "hand each batch over as one tensor, and split it in the loop"
    one = DataLoader([torch.cat([images.flatten(), label[None]]) for images, label in samples], 4)
    apart = [(batch[:, :3].reshape(4, 3, 1, 1), batch[:, 3]) for batch in one]
    for (images, labels), (ours, numbers) in zip(DataLoader(samples, 4), apart, strict=True):
        assert torch.equal(images, ours) and torch.equal(labels, numbers.long())
    # "return tensors of one shape and let torch's default_collate stack them", and "a few tensors ... not arrays"
    assert torch.utils.data.default_collate([torch.zeros(3)] * 4).shape == (4, 3)


def test_images_are_packed_smaller_as_advised(tmp_path, image_folder):
    source = image_folder(size=(40, 60))

    def packed_with(*words):
        path = tmp_path / f"{words[1]}.h5"
        done = CliRunner().invoke(app, ["pack", str(source), str(path), *words, "--workers", "0"])
        assert done.exit_code == 0, done.output
        return path

    for option, smaller in (("--size", 16), ("--max-size", 20)):
        assert PackedDataset(packed_with(option, str(smaller)))[0][0].shape[1] == smaller
    kept, raw = packed_with("--store", "source"), packed_with("--store", "raw")
    assert fastload.inspect_file(kept).stores["images"].encodings[0].name == "jpeg"
    assert fastload.inspect_file(raw).stores == {}, "rows that are copied, and not decoded"
    assert "\n  raw " in CliRunner().invoke(app, ["info", str(kept), "--stores"]).output


# --- no verdict, or one without a cause -------------------------------------------------------------------------------


@models("end other programs", "slowed down", "few steps")
def test_a_loop_that_is_measured_again_alone_and_longer_gets_its_verdict():
    held = replace(waits(decoding=(90, 0)), others_cpus=1.9, step_runnable_s=0.04, step_running_s=0.01)
    hear("end other programs", said(held))
    alone = replace(held, others_cpus=0.0, step_runnable_s=0.0)
    assert judge(alone).cause == "decoding" and given("end other programs", said(alone)) is None
    slower = replace(READING, alone_s=1.0)
    hear("slowed down", said(slower))
    assert given("slowed down", said(replace(slower, alone_s=5 * MS))) is None
    short = replace(READING, steps=READING.steps[:9], batches=READING.batches[:9])
    assert hear("few steps", said(short)) == {"count": "9"}
    assert given("few steps", said(READING)) is None


@models("clock changed")
def test_a_step_on_a_device_that_is_measured_again_does_not_contradict_itself():
    loop = replace(demands(wait=1, compute=50), timed_device=True, device_s=0.05, host_s=0.01, alone_s=0.02)
    hear("clock changed", said(loop))
    assert given("clock changed", said(replace(loop, alone_s=0.05))) is None


@models("longer run")
def test_a_run_that_is_as_long_as_advised_is_not_dominated_by_its_start():
    short = replace(demands(wait=20, transform=(1, 0), compute=40, startups=(1000, 0, 0)), persistent=True)
    count = int(hear("longer run", said(short))["count"].replace(",", ""))
    steps = replace(demands(wait=0.5, compute=40)).steps * (count // 50)
    long = replace(short, steps=steps, batches=short.batches[:1] * len(steps), num_steps=count)
    assert given("longer run", said(long)) is None


@tries("find out", "diagnose")
def test_a_loader_that_does_not_say_what_it_waits_for_is_looked_into_as_advised(samples):
    class Slow(TensorDataset):
        def __getitem__(self, index):
            np.random.default_rng(0).random(20_000).sort()
            return super().__getitem__(index)

    loader = DataLoader(Slow(*samples.tensors), 2)
    with Meter() as meter:
        for _ in meter.watch(loader):
            pass
    verdict = meter.verdict
    hear("diagnose", verdict.sentence)
    hear("find out", "\n".join(one.change for one in verdict.cures))
    found = fastload.diagnose(loader, seconds=0.2)
    assert given("diagnose", found.verdict.sentence) is None and found.verdict.cause


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        modelled("DALI", of="nvidia.dali"),
        modelled("FFCV", of="ffcv.loader"),
        modelled("torchdata", of="torchdata.nodes"),
    ],
)
def test_other_loaders_have_the_arguments_that_are_advised(names, kind):
    """They are not installed here: benchmarks/peers runs them with these arguments, in environments of their own."""
    (name,) = names
    text = hear_unseen(name, kind)
    adapters = Path(__file__).parents[3] / "benchmarks" / "peers" / "adapters"
    if not adapters.is_dir():
        pytest.skip("the tests run without benchmarks/ beside them")
    source = (adapters / {"DALI": "dali.py", "FFCV": "ffcv.py", "torchdata": "torchdata_nodes.py"}[name]).read_text()
    words = re.findall(r"\b(\w+_\w+)\b|\b(ParallelMapper)\b", text)
    assert words and all(word in source for pair in words for word in pair if word)


def hear_unseen(name, kind):
    text = unseen(SimpleNamespace(fetches=[], facts={"kind": f"{kind}.Loader"}))
    hear(name, text)
    return text


def why(**facts):
    return examine._why_no_verdict(
        SimpleNamespace(num_processes=facts.get("processes", 1), saw_torch=facts.get("saw_torch", True)),
        ["python", "train.py"],
        SimpleNamespace(code=0, interrupted=facts.get("interrupted", False), elapsed_s=facts.get("elapsed_s", 1.0)),
        facts.get("seconds"),
    )


@models("more seconds", "without isolation", "no DataLoader", "no steps")
def test_a_script_that_follows_what_is_advised_is_measured(samples):
    hear("more seconds", why(interrupted=True, seconds=1.0, elapsed_s=1.1))
    assert "--seconds" not in why(interrupted=True, seconds=60.0, elapsed_s=1.1), "it has the time"
    hear("without isolation", why(processes=0))
    hear("no DataLoader", why(saw_torch=False))
    hear("no steps", why())
    with fastload.Meter() as meter:  # of data that are loaded in another way
        for _ in meter.watch([np.zeros((4, 3, 8, 8))] * 30):
            pass
    assert meter.verdict.step_s > 0
    assert fastload.diagnose(DataLoader(samples, 2), seconds=0.1).verdict.step_s > 0
