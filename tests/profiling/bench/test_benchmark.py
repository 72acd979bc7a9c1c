from __future__ import annotations

import json
import os
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from small_files import write_foreign

from fastload import FormatError, MissingFileError, OptionError, SourceError, pack_images
from fastload.format.header import read_header
from fastload.format.ragged import Column
from fastload.format.writer import create_file
from fastload.options.measure import BenchOptions
from fastload.profiling.bench.benchmark import BareTake, fault_facts, rival_table, run_bench
from fastload.profiling.bench.passes import repeat_epochs, run_for
from fastload.profiling.bench.rivals import plain_loaders
from fastload.profiling.bench.subject import Subject
from fastload.profiling.bench.training_loop import make_step, run_loop
from fastload.profiling.meter import environment
from fastload.profiling.verdict.sentences import others_text

PACKED = {"rows": 96, "classes": "abc", "splits": {"train": 64, "val": 32}}


def quick(**more):
    return BenchOptions(**{"seconds": 0.2, **more})


def test_the_loader_alone_is_measured_beside_the_bare_copy(packed, tmp_path):
    found = run_bench(packed, quick())
    assert found.batch_size == 96 // 8 and found.image_shape == (3, 16, 12)
    alone = found.alone
    assert alone.samples_per_s["lowest"] > 0 and alone.over_take["count"] == alone.samples_per_s["count"]
    assert alone.bytes_per_s == pytest.approx(alone.samples_per_s["median"] * (16 * 12 * 3 + 8))
    assert found.loop is None
    (run,) = found.runs
    assert run.samples_per_s == alone.samples_per_s["median"] and dict(run.facts)["over np.take"]
    text = json.dumps(found.to_dict())
    assert json.loads(text)["alone"]["samples_per_s"] == alone.samples_per_s
    # It names nobody.
    assert str(packed.parent) not in text and os.uname().nodename not in json.dumps(environment())

    # Compressed rows cannot be copied.
    path = write_foreign(tmp_path / "a.h5", np.zeros((64, 8, 8, 3), np.uint8), chunk_rows=8)
    found = run_bench(path, quick(shuffle="chunk"))
    assert found.alone.over_take is None and "compressed" in found.alone.why_no_take


def test_a_simulated_accelerator_gets_what_the_loader_hands_over(packed):
    subject = Subject(packed, quick(batch_size=8))
    step = make_step("sim:4000")
    loop = run_loop(subject.shared_loader(), step, 0.2, title="t")
    subject.close()
    assert step.samples == 8 * loop.measured.num_steps and 0 < loop.utilization <= 1
    steps = loop.measured.steps
    assert steps[0].begin_s == steps[0].wait_s == loop.measured.epochs_s[0] == 0, "its start-up is left out"
    waited_s, all_s = (sum(getattr(one, name) for one in steps) for name in ("wait_s", "duration_s"))
    verdict = loop.measured.verdict
    assert waited_s / all_s <= loop.stall_share + 1e-9 and loop.stall_share == verdict.stall_share
    assert loop.samples_per_s <= 4000 * 1.001


def test_training_has_headspace_a_verdict_and_the_utilization_of_a_simulated_accelerator(packed):
    found = run_bench(packed, quick(batch_size=8, step="sim:0.5x"))
    rate = 0.5 * found.alone.samples_per_s["median"]
    assert f"{rate:,.0f} images/s" in found.loop.step
    (run,) = found.runs
    assert run.headspace_samples_per_s == found.headspace["base"]["median"] <= rate * 1.001
    assert run.verdict is not None and run.title == "fastload bench file.h5"
    found = run_bench(packed, quick(batch_size=8, step="tiny"))
    assert found.loop.step == "tiny on cpu" and found.loop.utilization is None  # of a real network, without a GPU


def test_slow_reads_are_counted_and_leave_the_loader_as_it_was(packed):
    found = run_bench(packed, quick(batch_size=8, faults=("slow-disk=5", "stall=10@4")))
    slow, stall = found.faults
    assert slow.delays >= slow.loop.measured.num_steps
    assert slow.delayed_s == pytest.approx(0.005 * slow.delays)
    assert stall.delays * 4 <= stall.loop.measured.num_steps + 4 * 16  # read ahead of the loop, never more
    titles = [run.title for run in found.runs[1:]]
    assert titles == ["fastload bench file.h5, slow-disk=5", "fastload bench file.h5, stall=10@4"]


def test_a_killed_worker_is_named_and_no_sample_is_lost_or_doubled(packed):
    found = run_bench(packed, quick(batch_size=4, split="train", faults=("kill-worker",)))
    (kill,) = found.faults
    assert kill.names_worker and f"process {kill.pid} was killed by SIGKILL" in kill.error
    assert kill.each_once and kill.samples == 64
    assert kill.steps_before + kill.steps_after == 16 and kill.steps_after > 0


@pytest.fixture
def photos(tmp_path, image_folder):
    """A folder of PNG files, and the file that it was packed into."""
    folder = image_folder(per_class=16, suffix=".png")
    return folder, pack_images(folder, tmp_path / "photos.h5").path


def test_plain_ways_are_measured_and_trained_with(photos):
    folder, path = photos
    found = run_bench(path, quick(batch_size=4, compare=True, source=folder, workers=1, step="sim:2000"))
    names = [rival.name for rival in found.rivals]
    assert names == ["DataLoader(num_workers=1), the packed file", "DataLoader(num_workers=1), image files, Pillow"]
    for rival in found.rivals:
        assert rival.ratio["count"] == 3 and rival.cpu_s_per_1000 > 0
        assert rival.loop is not None and rival.loop.utilization is not None
    assert len(found.runs) == 3


def test_plain_ways_read_the_same_samples_also_of_a_split(photos, packed):
    folder, path = photos
    subject = Subject(path, quick(batch_size=4, compare=True, source=folder, workers=1))
    rows = subject.rows(8, 10)
    of_file, of_images = plain_loaders(subject, rows).values()
    compared = list(zip(rows, of_file, of_images, strict=False))
    assert len(compared) == len(rows) > 1
    for expected, a, b in compared:
        assert len(expected) == len(a[0])
        assert np.array_equal(a[0].numpy(), b[0].numpy()) and a[1].tolist() == b[1].tolist()
    subject.close()
    subject = Subject(packed, quick(batch_size=4, split="val", workers=1))
    rows = subject.rows(2, 10)
    (way,) = plain_loaders(subject, rows).values()
    with h5py.File(packed) as file:
        assert np.array_equal(next(iter(way))[0].permute(0, 2, 3, 1), file["images"][:][rows[0]])
    subject.close()


def test_cold_goes_with_everything_else_and_says_what_stayed_in_memory(packed):
    options = {"compare": True, "workers": 1, "step": "sim:2000", "faults": ("slow-disk=1",)}
    found = run_bench(packed, quick(batch_size=8, cold=True, **options))
    assert found.alone is not None and found.alone.samples_per_s["count"] == 3
    assert found.rivals and found.faults and found.headspace is not None
    assert found.left_in_cache and all(0 <= share <= 1 for share in found.left_in_cache)
    if found.left_in_cache[0] == 0:
        assert max(found.left_in_cache) == 0, "nobody had the file mapped when it was dropped"


def test_ctrl_c_leaves_what_was_measured_so_far(packed):
    def show(figures: object) -> None:
        if "training" in str(figures):
            raise KeyboardInterrupt

    found = run_bench(packed, quick(batch_size=8, step="sim:2000"), show=show)
    assert found.interrupted and found.headspace is not None and found.loop is None
    assert json.loads(json.dumps(found.to_dict()))["interrupted"] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 97}, "do not make one batch of 97"),
        ({"split": "test"}, "no split 'test'"),
        ({"device": "cuda:99"}, "cuda"),
        ({"device": "gpu"}, "knows no such device"),
        ({"seconds": 0}, "above 0"),
        ({"seconds": float("nan")}, "above 0"),
        ({"source": Path()}, "--compare"),
        ({"step": "sim:fast"}, "choose"),
        ({"faults": ("fire",)}, "choose"),
    ],
)
def test_bad_options_are_refused_before_anything_is_measured(packed, options, message):
    shown: list[object] = []
    with pytest.raises(OptionError, match=message):
        run_bench(packed, quick(**options), show=shown.append)
    assert not shown


def test_a_file_that_is_not_there_or_has_no_images_or_no_such_source_is_refused(tmp_path, packed_copy, image_folder):
    folder, shown = image_folder(per_class=2), []
    with pytest.raises(SourceError, match=r"which is in file\.h5"):
        run_bench(packed_copy, quick(compare=True, source=folder), show=shown.append)
    with pytest.raises(SourceError, match="does not say which file each row came from"):
        with h5py.File(tmp_path / "a.h5", "w") as file:
            file["images"] = np.zeros((64, 8, 8, 3), np.uint8)
        run_bench(tmp_path / "a.h5", quick(compare=True, source=folder), show=shown.append)
    assert not shown
    with pytest.raises(MissingFileError):
        run_bench(tmp_path / "absent.h5", quick())
    with h5py.File(tmp_path / "numbers.h5", "w") as file:
        file["numbers"] = np.arange(10)
    with pytest.raises(FormatError, match="no dataset `images`"):
        run_bench(tmp_path / "numbers.h5", quick())
    columns = {
        "labels": Column(np.arange(64)),
        "key": Column(np.array([f"{i:02d}".encode() for i in range(64)])),
        "digest": Column(np.zeros(64, np.uint64)),
    }
    attrs = {"decoder": "none", "source_layout": "arrays", "pack_options": "{}", "seed": 0, "shuffled": True}
    create_file(tmp_path / "tokens.h5", num_rows=64, pixels={}, columns=columns, attrs=attrs)
    with pytest.raises(OptionError, match="has no dataset `images`, only labels"):
        run_bench(tmp_path / "tokens.h5", quick())


def test_the_bare_copy_is_that_of_the_rows(packed):
    file = read_header(packed)
    rows = np.array([5, 0, 95, 5])
    (copied,) = BareTake(file, ["images", "labels"], 8).fill([rows])
    with h5py.File(packed) as opened:
        assert np.array_equal(copied, opened["images"][:][rows])


def test_a_pass_counts_what_comes_after_the_clock_begins():
    settled = []
    found = run_for(
        repeat_epochs([3, 4, 5], epochs=2), 0.0, lambda batch: batch, enough=lambda batches, *_: batches >= 5,
        synchronize=lambda: settled.append(1),
    )  # fmt: skip
    assert found.samples == 4 + 5 + 3 + 4 + 5
    assert len(settled) == 2


def test_what_other_programs_use_stands_beside_every_figure(packed, monkeypatch):
    # As if they kept a CPU and a half busy all the time.
    monkeypatch.setattr("fastload.profiling.meter.sampler.others_cpu_seconds", lambda family: 1.5 * time.perf_counter())
    monkeypatch.setattr("fastload.profiling.meter.sampler.taken_cpus", lambda others: others)
    faults = ("slow-disk=1", "kill-worker")
    found = run_bench(packed, quick(batch_size=4, compare=True, workers=1, step="sim:2000", faults=faults))
    found.cpus = 2
    beside = "of 2 CPUs: not the machine's figure"
    assert {name for name, text in found.facts if beside not in text} == {"memory"}, "which nobody else uses"
    for table in (fault_facts(found.faults[0], 2), fault_facts(found.faults[1], 2), rival_table(found.rivals, 2).rows):
        assert beside in " ".join(table[0])
    assert all(beside in dict(run.facts)["CPUs"] for run in found.runs[1:])
    figures = found.to_dict()
    spreads = [figures["alone"]["samples_per_s"], figures["headspace"]["base"], figures["rivals"][0]["ratio"]]
    assert [one["others_cpus"] for one in (*spreads, figures["loop"])] == pytest.approx([1.5] * 4, rel=0.05)
    assert "CPUs" in found.loop.measured.verdict.sentence + " ".join(found.loop.measured.verdict.evidence)
    assert others_text(0.01, 2) == "others 0.01 CPUs" and others_text(None, 2) == ""


def test_utilization_stall_and_headspace_of_a_loop_are_those_of_its_verdict(packed):
    found = run_bench(packed, quick(batch_size=8, step="sim:0.8x"))
    loop, verdict = found.loop, found.loop.measured.verdict
    assert loop.stall_share == verdict.stall_share and loop.samples_per_s == loop.measured.samples_per_s
    samples = sum(one.samples for one in loop.measured.steps) / len(loop.measured.steps)
    headspace = found.headspace["base"]["median"]
    own_s = sum(one.compute_s for one in loop.measured.steps) / len(loop.measured.steps)
    assert verdict.free_step_s == pytest.approx(min(verdict.step_s, own_s, samples / headspace))
    assert loop.measured.headspace_samples_per_s == headspace
