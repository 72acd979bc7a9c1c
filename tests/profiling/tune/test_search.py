"""Searches over small files, for real."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_files import random_pixels, write_foreign

from fastload import FastLoader, PackedDataset
from fastload.errors import OptionError
from fastload.options.measure import TuneOptions
from fastload.plan import ChunkWindow
from fastload.profiling.bench.training_loop import TouchStep
from fastload.profiling.tune.candidates import Candidate, DataTraits, Row, Trial
from fastload.profiling.tune.search import Runner, Search

PACKED = {"rows": 400, "size": (16, 16, 3), "classes": "abcd", "chunk_rows": 20}
BRIEF = {"seconds": 1.0, "batch_size": 32}


def test_a_packed_file_is_searched_and_the_call_is_that_of_a_loader(packed):
    search = Search(packed, TuneOptions(**BRIEF))
    result = search.run()
    assert result.rows[0].candidate == search.default and not result.interrupted
    assert result.chosen.row.candidate in [row.candidate for row in result.rows]
    for row in result.rows:
        assert row.samples_per_s > 0 and row.cpu_s_per_1000 > 0 and row.first_batch_s > 0 and row.stall_share is None
    loader = eval(result.call, {"FastLoader": FastLoader, "ChunkWindow": ChunkWindow, "PackedDataset": PackedDataset})
    assert next(iter(loader))[0].shape == (32, 3, 16, 16)
    loader.close()


def test_a_compressed_file_has_its_orders_tried_and_judged(tmp_path):
    images = random_pixels(512, (64, 64, 3), below=9)
    compressed = write_foreign(tmp_path / "gzip.h5", images, chunk_rows=32, labels=np.arange(512) % 5)
    result = Search(compressed, TuneOptions(seconds=6.0, batch_size=32)).run()
    orders = {row.candidate.order for row in result.rows}
    assert {"full", "ChunkWindow(1)"} <= {order.strip('"') for order in orders}
    assert all(row.mixing for row in result.rows)
    assert result.default.shuffle == "full" and any("batches of 16" in note for note in result.notes)
    head = result.table.head
    assert "mixing" in head and "shuffle" in head and "stall" not in head


def test_with_a_step_its_stalls_are_measured_and_a_network_on_the_cpu_is_part_of_the_share(packed):
    result = Search(packed, TuneOptions(**BRIEF, step="sim:2000")).run()
    assert result.step.startswith("simulated accelerator")
    # The accelerator's own arithmetic: what it was given cannot be done sooner.
    assert all(row.stall_share is not None and row.samples_per_s < 2000 * 1.001 for row in result.rows)
    assert "stall" in result.table.head and "; loading may take all of " in result.table.title
    result = Search(packed, TuneOptions(**BRIEF, step="tiny", cpu_budget=0.9)).run()
    assert result.step_on_cpu and "; loading and this training together may take 90% of " in result.table.title
    # A part of the loader's own rate, which is measured first.
    result = Search(packed, TuneOptions(**BRIEF, step="sim:0.5x")).run()
    assert result.chosen is not None and "images/s" in result.step


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.zeros(3, 4, 4, dtype=torch.uint8), index


class BusyStep(TouchStep):
    """A step whose accelerator says how busy it was."""

    utilization = 0.75


def test_trials_go_on_from_epoch_to_epoch_and_a_step_stalls_as_long_as_its_accelerator_is_idle():
    made = []

    def make(candidate):
        made.append(FastLoader(Samples(), 16, workers=candidate.workers, shuffle=candidate.shuffle))
        return made[-1]

    traits = DataTraits(processes=True, linear=True, num_chunks=0, cpus=1)
    for step, stall_share in ((None, None), (BusyStep(), 0.25)):
        runner = Runner(Candidate(1, "full"), make, traits, step=step)
        for _ in range(4):
            assert runner.run(0.05).stall_share == stall_share
        assert len(made) == 1 and made.pop().epoch >= 1
        assert len(runner.row().trials) == 4 and len(runner.row(since=3).trials) == 1
        runner.close()


def test_a_subset_is_read_as_its_rows_and_samples_of_python_code_come_as_they_are(packed):
    part = Search(torch.utils.data.Subset(PackedDataset(packed), range(0, 400, 2)), TuneOptions(**BRIEF))
    with closing(part._loader(part.default)) as loader:
        assert len(loader.dataset) == 200 and not part.traits.processes
    samples = Samples()
    code = Search(samples, TuneOptions(**BRIEF, step="sim:2000"))
    with closing(code._loader(code.default)) as loader:
        assert loader.dataset is samples and code.traits == DataTraits(True, False, 0, code.traits.cpus, 2**31)
    assert code.run().name == "Samples"


@pytest.mark.parametrize("trials", [0, 3])
def test_interrupted_it_tells_what_it_knows(packed, trials):
    def interrupting(stage, done, total):
        if done == trials:
            raise KeyboardInterrupt

    result = Search(packed, TuneOptions(seconds=60.0, batch_size=32)).run(interrupting)
    assert result.interrupted and (result.chosen is not None) == (trials > 0)
    assert min(trials, 1) <= len(result.rows) <= trials
    assert (json.loads(json.dumps(result.to_dict()))["chosen"] is not None) == (trials > 0)


def test_what_was_found_goes_into_json_and_reports(packed):
    result = Search(packed, TuneOptions(**BRIEF, cpu_budget=0.0001)).run()
    assert "all take more than" in result.chosen.reason
    value = json.loads(json.dumps(result.to_dict(), default=str))
    assert value["call"] == result.call and all(row["over_budget"] for row in value["rows"])
    assert value["rows"][0]["trials"] and value["gain"] == list(result.gain)
    shown = result.measured("fastload tune")
    assert shown.tables[0].rows and ("to paste", result.call) in shown.facts
    assert all("over" in " ".join(row) for row in shown.tables[0].rows)


def test_a_row_within_the_budget_is_chosen_also_if_only_an_earlier_race_had_it(packed):
    search = Search(packed, TuneOptions(**BRIEF, cpu_budget=0.4))
    trials = {share: (Trial(1000.0 * share, 0.1, share),) for share in (0.49, 0.39)}
    over, within = (Row(Candidate(workers, "full"), trials[share]) for workers, share in ((2, 0.49), (1, 0.39)))
    search._stages, search._rows = lambda on_progress: [over], lambda first=None: [over, within]
    result = search.run()
    assert result.chosen.row == within and "workers=1" in result.call


def test_a_split_is_named_in_the_call_also_from_a_cold_cache(packed_file):
    path = packed_file(rows=100, splits={"train": 80, "val": 20}, chunk_rows=10)
    result = Search(path, TuneOptions(seconds=0.5, split="train", cold=True)).run()
    assert f'FastLoader(PackedDataset("{path}", split="train"), batch_size=10' in result.call


def test_a_way_to_read_is_named_in_the_call_where_it_belongs(packed):
    plain = Search(packed)
    assert f'FastLoader(PackedDataset("{packed}", read="pread"), batch_size=' in plain.call(
        replace(plain.default, read="pread")
    )
    assert "PackedDataset" not in plain.call(plain.default)
    of_dataset = Search(PackedDataset(packed, fields=["images"]).select(range(99)))
    with closing(of_dataset._loader(replace(of_dataset.default, read="pread"))) as loader:
        assert loader.dataset.read == "pread" and len(loader.dataset) == 99


@pytest.mark.parametrize(
    ("options", "why"),
    [({"step": "sim:fast"}, "choose"), ({"batch_size": 500}, "one batch"), ({"split": "none"}, "split")],
)
def test_what_does_not_fit_is_refused_before_anything_is_measured(packed, options, why):
    with pytest.raises(OptionError, match=why):
        Search(packed, TuneOptions(**options))
    with pytest.raises(OptionError, match="dropped"):
        Search(Samples(), TuneOptions(cold=True))
