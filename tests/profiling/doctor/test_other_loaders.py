"""Loaders that are not torch's own class: what the doctor records of a loop over them is what the loop itself saw."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import replace

import pytest

from fastload.profiling.doctor.command import environment_for
from fastload.profiling.doctor.loader_records import LoaderRecord, RecordedEvents
from fastload.profiling.doctor.loop_demands import demands_of, unseen
from fastload.profiling.verdict import judge

# Modules of libraries that are not installed here, with loaders that are built as theirs are.
STAND_INS = {
    "timm/data/loader.py": """
        class PrefetchLoader:
            def __init__(self, loader):
                self.loader = loader
            def __iter__(self):  # one batch ahead
                ahead = None
                for batch in self.loader:
                    if ahead is not None:
                        yield ahead
                    ahead = batch
                yield ahead
    """,
    "webdataset/pipeline.py": """
        from torch.utils.data import IterableDataset
        class DataPipeline(IterableDataset):
            def __init__(self, source, change=iter, batches=None):
                self.source, self.change, self.batches = source, change, batches
            def iterator(self):
                yield from self.change(self.source)
            def __iter__(self):
                return itertools.islice(self.iterator(), self.batches) if self.batches else self.iterator()
        class WebLoader(DataPipeline):
            pass
        import itertools
    """,
    "fastai/data/load.py": """
        import torch.utils.data.dataloader as torchs
        class DataLoader:
            num_workers = 1
            def __init__(self, data):
                self.inner = torchs.DataLoader(data, 8, num_workers=1)
            def __iter__(self):
                for batch in torchs._MultiProcessingDataLoaderIter(self.inner):
                    yield batch
    """,
    "nvidia/dali/plugin/pytorch/__init__.py": """
        class DALIGenericIterator:
            batch_size = 8
            def __init__(self, batches):
                self.batches, self.left = batches, batches
            def __iter__(self):
                return self
            def __next__(self):
                if not self.left:
                    self.left = self.batches
                    raise StopIteration
                self.left -= 1
                return [{"data": torch.zeros(8, 3)}]
        import torch
    """,
    "ffcv/loader/epoch_iterator.py": """
        import threading, torch
        class EpochIterator(threading.Thread):
            def __init__(self, batches):
                super().__init__()
                self.left = batches
            def __iter__(self):
                return self
            def __next__(self):
                if not self.left:
                    raise StopIteration
                self.left -= 1
                return torch.zeros(8, 3), torch.zeros(8)
    """,
    "ffcv/loader/loader.py": """
        from .epoch_iterator import EpochIterator
        class Loader:
            batch_size = 8
            def __init__(self, batches):
                self.batches = batches
            def __iter__(self):
                return EpochIterator(self.batches)
    """,
}

SCRIPT = """
    import itertools, sys, time
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

    class Numbers(Dataset):
        def __len__(self):
            return 64
        def __getitem__(self, index):
            return torch.full((4,), float(index))

    class Stream(IterableDataset):
        def __iter__(self):
            info = get_worker_info()
            first, step = (info.id, info.num_workers) if info else (0, 1)
            for index in range(first, 64, step):
                yield torch.full((4,), float(index))

    class Ahead(DataLoader):              # reads one batch ahead, as Accelerate's does
        def __iter__(self):
            batches = super().__iter__()
            current = next(batches)
            for following in batches:
                yield current
                current = following
            yield current

    class Endless(DataLoader):            # one iterator for all epochs
        def __iter__(self):
            self.endless = getattr(self, "endless", None) or super().__iter__()
            for _ in range(4):
                yield next(self.endless)

    class Mine(DataLoader):               # makes its iterator itself, as StatefulDataLoader does
        def _get_iterator(self):
            return super()._get_iterator()
        def __iter__(self):
            return self._get_iterator()

    class Handing(DataLoader):            # an iterator that nothing is known of, around torch's
        def __iter__(self):
            return map(torch.neg, super().__iter__())

    def anew(loader):
        rows = [row for batch in loader for row in batch]
        return [torch.stack(rows[begin : begin + 16]) for begin in range(0, len(rows), 16)]

    def whole(loader):
        for batch in loader:
            yield torch.stack(list(batch))

    def loop(loader, seconds=0.005):
        steps = 0
        for batch in loader:
            begin = time.perf_counter()
            while time.perf_counter() - begin < seconds:
                pass
            steps += 1
        return steps

    if __name__ == "__main__":
        sys.path.insert(0, ".")
        from fastai.data.load import DataLoader as Fastais
        from ffcv.loader.loader import Loader
        from nvidia.dali.plugin.pytorch import DALIGenericIterator
        from timm.data.loader import PrefetchLoader
        from webdataset.pipeline import DataPipeline, WebLoader
        for loader in LOADERS:
            for epoch in range(2):
                print(loop(loader))
"""

# Loaders, with the steps of an epoch, and the most batches that are made in two epochs: each of several workers of a
# stream finds out by one more that it has come to its end.
LOADERS = {
    "Ahead(Numbers(), 8)": (8, 16),
    "Ahead(Numbers(), 8, num_workers=2)": (8, 16),
    "Ahead(Numbers(), 16, num_workers=1, multiprocessing_context='spawn')": (4, 8),
    "Ahead(Numbers(), 32, num_workers=1, multiprocessing_context='forkserver')": (2, 4),
    "Mine(Numbers(), 8, num_workers=1)": (8, 16),
    "Handing(Numbers(), 8)": (8, 16),
    "Endless(Numbers(), 8, num_workers=1)": (4, 12),
    "DataLoader(Stream(), 8)": (8, 18),
    "DataLoader(Stream(), None)": (64, 130),
    "DataLoader(Stream(), 8, num_workers=2)": (8, 20),
    "PrefetchLoader(Ahead(Numbers(), 8, num_workers=1))": (8, 16),
    "DataLoader(DataPipeline(Stream()), 8)": (8, 18),
    "DataPipeline(DataLoader(Stream(), 4, num_workers=1), anew)": (4, 36),
    "WebLoader(DataLoader(Stream(), 8, num_workers=1), whole, 5)": (5, 18),
    "Fastais(Numbers())": (8, 16),
    "DALIGenericIterator(6)": (6, 0),
    "Loader(6)": (6, 0),
}


def run(folder, script):
    """What was recorded of a script."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    (folder / "records").mkdir()
    environ = environment_for(folder / "records", os.environ)
    command = [sys.executable, "-W", "ignore", "train.py"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr
    records = RecordedEvents(folder / "records").read()
    assert records.faults == ()
    for found in records.loaders:
        records.read_making(found)
    return done.stdout, records.loaders


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> dict[str, LoaderRecord]:
    """What was recorded of two epochs over each loader."""
    folder = tmp_path_factory.mktemp("loaders")
    for name, text in STAND_INS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    output, loaders = run(folder, SCRIPT.replace("LOADERS", f"({', '.join(LOADERS)})"))
    assert list(map(int, output.split())) == [steps for steps, _ in LOADERS.values() for _ in range(2)]
    return dict(zip(LOADERS, loaders, strict=True))


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loaders_steps_are_those_of_the_loop_over_it(recorded, loader):
    found, (steps, fetches) = recorded[loader], LOADERS[loader]

    assert found.steps.count == 2 * steps and len(found.epochs) == len(found.passes) == 2
    # No step does nothing, and none is two bodies of the loop: its work is that of one body.
    assert all(record.host_s > 0.0045 for record in found.steps.kept)
    assert min(2 * steps, fetches) <= len(found.fetches) <= fetches
    assert bool(unseen(found)) == (fetches == 0)


@pytest.mark.parametrize("loader", [name for name in LOADERS if "num_workers" in name])
def test_workers_are_seen_inside_whoever_started_them(recorded, loader):
    found = recorded[loader]
    makers = {fetch.pid for fetch in found.fetches}
    assert found.facts["workers"] in (1, 2) and makers and found.process["pid"] not in makers


def test_batches_that_are_cut_anew_cost_as_many_of_those_that_were_made(recorded):
    found = recorded["DataPipeline(DataLoader(Stream(), 4, num_workers=1), anew)"]
    assert found.inner_per_batch == pytest.approx(4, rel=0.1)
    demands = demands_of(found, cpus=2)
    made_s = [found.inner_per_batch * fetch.work.total_s for fetch in found.fetches]
    firsts = {
        number for number, one in enumerate(found.fetches) if one.pid not in {f.pid for f in found.fetches[:number]}
    }
    for number, batch in enumerate(demands.batches):  # of workers' first ones, a part may count as their start
        assert number in firsts or batch.total_s == pytest.approx(made_s[number])
    assert demands.ahead < 2


@pytest.mark.parametrize("loader, name", [("DALIGenericIterator(6)", "DALI"), ("Loader(6)", "FFCV")])
def test_of_loaders_that_work_outside_of_python_the_waits_are_judged(recorded, loader, name):
    found = recorded[loader]
    assert found.samples == 96 and name in unseen(found)
    demands = demands_of(found, cpus=2)
    assert judge(demands).cause == "compute"
    starved = replace(demands, steps=tuple(replace(step, wait_s=9 * step.compute_s) for step in demands.steps))
    verdict = judge(starved)
    assert verdict.cause == "" and verdict.cures[0].gain == pytest.approx(10, rel=0.1)
    assert name in verdict.sentence and "diagnose" not in verdict.sentence


def test_workers_are_seen_where_python_forks_from_a_server_as_3_14_does(tmp_path):
    script = """
        import torch
        from torch.utils.data import DataLoader
        if __name__ == "__main__":
            torch.multiprocessing.set_start_method("forkserver")
            for batch in DataLoader(torch.zeros(64, 4), 8, num_workers=2):
                pass
    """
    _, [found] = run(tmp_path, script)
    assert len(found.fetches) == 8 and len({fetch.pid for fetch in found.fetches}) == 2


GATHERED = """
    import itertools, time
    import torch
    from torch.utils.data import DataLoader

    weight = torch.ones(4, requires_grad=True)
    for epoch in range(2):
        batches = iter(DataLoader(torch.zeros(64, 4), 4))
        while gathered := list(itertools.islice(batches, 4)):
            for batch in gathered:
                (batch * weight).sum().backward()
                time.sleep(0.005)
"""


def test_batches_that_are_taken_in_a_row_share_the_work_on_them(tmp_path):
    _, [found] = run(tmp_path, GATHERED)
    own_s = [record.host_s for record in found.steps.kept]
    # Of four taken in a row, three would else have none of it.
    assert found.trains and len(own_s) == 32 and min(own_s) > 0.001
    begins = [record.step.begin_s for record in found.steps.kept]
    assert begins == sorted(begins)


HANDED_OVER = """
    import time
    import torch
    from torch.utils.data import DataLoader

    def as_they_are(samples):  # a thread of the worker copies them into shared memory
        return samples

    for batch in DataLoader(torch.ones(40, 1 << 20), 2, num_workers=2, collate_fn=as_they_are):
        time.sleep(0.05)  # the workers wait to be asked for the next batch
"""


def test_what_a_worker_takes_to_hand_a_batch_over_counts_also_where_it_is_idle_meanwhile(tmp_path):
    _, [found] = run(tmp_path, HANDED_OVER)
    later = [one for number, one in enumerate(found.fetches) if one.pid in {f.pid for f in found.fetches[:number]}]
    handed_over_s = [fetch.work.stages["hand-over"].running_s for fetch in later]
    assert len(later) == 18
    # Copying 8 MB takes far longer than to pick two rows.
    assert sum(handed_over_s) > sum(sum(w.running_s for w in one.work.stages.values()) for one in later) / 2


LEFT = """
    import torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode
    from torch.utils.data import DataLoader

    weight = torch.ones(1, requires_grad=True)
    for step, images in enumerate(DataLoader(torch.ones(64, 3, 4, 4), 4)):
        (images * weight).sum().backward()
        if step == 1:
            print(_get_current_dispatch_mode() is not None)
            break
    for images in DataLoader(torch.ones(8, 3, 4, 4), 4):
        print(_get_current_dispatch_mode() is not None)
"""


TWO_IN_A_STEP = """
    import time, torch
    from torch.utils._python_dispatch import _get_current_dispatch_mode
    from torch.utils.data import DataLoader, Dataset

    def recording():
        return _get_current_dispatch_mode() is not None

    class Images(Dataset):
        def __len__(self):
            return 80
        def __getitem__(self, index):
            assert not recording()
            time.sleep(0.001)
            return torch.ones(3, 4, 4).mul(2)

    weight, recorded = torch.ones(1, requires_grad=True), 0
    loader, other = DataLoader(Images(), 4), DataLoader(Images(), 4)
    for epoch in range(2):
        others = iter(other)
        for images in loader:
            (images * weight).sum().backward()
            recorded += recording()
            (next(others) * weight).sum().backward()
    print(recorded, recording())
"""


def test_of_two_loaders_in_a_step_each_is_known_and_what_makes_a_batch_is_not_recorded(tmp_path):
    output, loaders = run(tmp_path, TWO_IN_A_STEP)
    recorded, still = output.split()
    assert int(recorded) <= 8 and still == "False"
    assert len(loaders) == 2
    for found in loaders:
        assert found.num_nexts == 40 and found.trains and found.recordings
        names = [name for name, *_ in found.recordings[0].operations]
        assert names.count("aten.mul.Tensor") >= 2  # the work on both batches; of what makes them, nothing
        assert "aten.stack.default" not in names
        # Each waits for the other's four samples, which is a part of the step, and said.
        assert all(record.others_s >= 0.004 for record in found.steps.kept[1:-1])
        demands = demands_of(found, cpus=2)
        assert demands.other_loaders_s >= 0.004
        assert any("batches of other loaders" in line for line in judge(demands).evidence)


def test_the_recording_of_a_step_that_was_left_by_break_ends_when_the_next_loop_begins(tmp_path):
    output, _ = run(tmp_path, LEFT)
    assert output.split() == ["True", "False", "False"]
