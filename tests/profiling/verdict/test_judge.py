"""What a verdict names, and the laws that its predictions keep."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.profiling.verdict import CAUSES, Demands, judge
from fastload.profiling.verdict.demands import costs_of, loop_packed
from fastload.profiling.verdict.loop_model import FastLoaderCosts, FormatCosts, WorkerCosts
from fastload.profiling.verdict.replacement import PlainLoader, to_type
from fastload.profiling.verdict.sentences import OTHER_PROGRAMS, change_for
from fastload.timing.results import WAITING, BatchWork, LoopStep, WorkTime

STAGES = ("reading", WAITING, "decoding", "transform", "collate", "hand-over")
MS = 1e-3


def demands(
    *, wait=0.0, compute=5.0, copy=0.0, workers=2, cpus=2, lock=0.0, slow=0.0, startups=(),
    **stages: tuple[float, float],
) -> Demands:  # fmt: skip
    """A loop of 50 equal steps; milliseconds, of stages (running, blocked)."""
    works = {
        name.replace("_", "-"): WorkTime(running * MS, blocked * MS) for name, (running, blocked) in stages.items()
    }
    step = LoopStep(0.0, wait * MS, copy * MS, 0.0, compute * MS, 16)
    usual_s = sum(work.running_s + work.blocked_s for work in works.values())
    return Demands(
        batches=(BatchWork(works, lock_s=lock * MS, slow_s=slow * MS),) * 50,
        steps=(step,) * 50,
        workers=workers,
        ahead=2 * workers,
        cpus=cpus,
        epochs=tuple((usual_s + s * MS, 0.0) for s in startups),
    )


@pytest.mark.parametrize("cause, given_demands", [
    ("reading", demands(wait=45, reading=(1, 90), decoding=(3, 0), transform=(4, 0))),
    ("decoding", demands(wait=45, reading=(1, 2), decoding=(90, 0), transform=(4, 0))),
    ("transform", demands(wait=45, reading=(1, 2), decoding=(3, 0), transform=(90, 0))),
    ("collate", demands(wait=45, reading=(1, 2), transform=(3, 0), collate=(90, 0))),
    ("hand-over", demands(wait=45, transform=(3, 0), hand_over=(90, 0))),
    ("hand-over", demands(wait=45, reading=(2, 1), transform=(3, 0), collate=(4, 0), hand_over=(86, 0))),
    ("copy to the device", demands(wait=1, copy=40, transform=(3, 0))),
    (WAITING, demands(wait=45, reading=(1, 2), decoding=(3, 0), transform=(4, 0), compute=5, **{WAITING: (0, 85)})),
    (WAITING, demands(wait=50, workers=0, transform=(4, 0), compute=20, **{WAITING: (0, 46)})),
    ("too few workers", demands(wait=45, workers=1, transform=(25, 0), compute=20, **{WAITING: (0, 25)})),
    ("a slow sample now and then", demands(wait=45, transform=(4, 0), slow=88, **{WAITING: (1, 92)})),
    ("too few workers", demands(wait=45, workers=1, reading=(1, 2), decoding=(24, 0), transform=(23, 0), compute=20)),
    ("too few workers", demands(wait=30, workers=0, reading=(1, 2), decoding=(13, 0), transform=(14, 0), compute=30)),
    ("worker start-up", demands(wait=45, transform=(3, 0), startups=(600, 600, 600, 600))),
    ("worker start-up", demands(wait=45, reading=(1, 1), collate=(2, 0), startups=(600, 600, 600, 600))),
    ("a slow sample now and then", demands(wait=45, reading=(1, 92), transform=(4, 0), slow=88)),
    ("a slow sample now and then", demands(wait=45, reading=(1, 2), transform=(92, 0), slow=88)),
    ("lock contention", demands(wait=45, reading=(1, 92), transform=(4, 0), lock=80)),
    ("compute", demands(wait=1, compute=50, transform=(30, 0))),
])  # fmt: skip
def test_the_cost_that_binds_is_named_and_no_other(cause, given_demands):
    verdict = judge(given_demands)
    assert verdict.cause == cause
    assert [name for name in CAUSES if name in verdict.sentence] == [cause]
    assert verdict.worth_making == (cause != "compute")


def test_a_network_that_is_faster_on_images_in_channels_last_memory_is_offered_them():
    base = replace(demands(wait=1, compute=50, transform=(1, 0)), step_running_s=0.08)
    assert not judge(base).worth_making
    verdict = judge(replace(base, by_format=FormatCosts(0.040, 0.025, 0.002)))
    assert verdict.cause == verdict.cures[0].cause == "compute" and verdict.worth_making
    assert verdict.cures[0].step_s == pytest.approx(0.051 - 0.015 + 0.002, rel=0.05)
    assert verdict.cures[0].how == "images = images.contiguous(memory_format=torch.channels_last), first in the loop"
    assert [name for name in CAUSES if name in verdict.sentence] == ["compute"]
    assert "1.3 times as fast; FastLoader's images lie there already" in verdict.sentence
    # Layers one by one that take longer than the step: their ratio counts.
    longer = judge(replace(base, by_format=FormatCosts(0.400, 0.250, 0.0)))
    assert longer.cures[0].step_s == pytest.approx(0.051 - 0.050 * 0.15 / 0.4, rel=0.05)
    for costs in (FormatCosts(0.040, 0.050, 0.0), FormatCosts(0.040, 0.039, 0.002), FormatCosts(0.0, 0.0, 0.0)):
        assert not judge(replace(base, by_format=costs)).worth_making
    # A FastLoader brings both: its batches lie so.
    waits = replace(demands(wait=45, compute=45, decoding=(90, 0), transform=(4, 0)), step_running_s=0.06)
    after_s = [judge(replace(waits, by_format=one)).cures[0] for one in (None, FormatCosts(0.040, 0.020, 0.001))]
    assert {one.cause for one in after_s} == {"decoding"}
    assert after_s[0].step_s - after_s[1].step_s == pytest.approx(0.020, rel=0.1)


def test_workers_beyond_the_cpus_are_too_many_when_their_starts_are_what_costs():
    verdict = judge(demands(wait=45, workers=16, transform=(3, 0), startups=(600, 600, 600, 600)))
    assert verdict.cause == "too many workers" and "num_workers=2 instead of 16" in verdict.sentence


def test_a_cure_predicts_the_step_without_its_cost_or_what_binds_then():
    # Two workers need 90 + 10 ms a batch, so a batch comes every 50 ms; without the 90 the 20 ms of the step bind.
    verdict = judge(demands(wait=30, reading=(0, 90), transform=(10, 0), compute=20))
    assert verdict.step_s == pytest.approx(0.050)
    assert verdict.cures[0].step_s == pytest.approx(0.020, rel=0.02) and verdict.cures[0].gain == pytest.approx(
        2.5, rel=0.02
    )
    # Without a step to speak of, the 10 ms of the transform do, on two workers.
    verdict = judge(demands(wait=49, reading=(0, 90), transform=(10, 0), compute=1))
    assert verdict.cures[0].step_s == pytest.approx(0.005, rel=0.02)


def test_what_brings_less_than_a_tenth_is_not_worth_making_also_of_a_device_that_works_by_itself():
    assert "compute binds: only 2% of the time" in judge(demands(wait=1, compute=50)).sentence
    # A long wait that nothing shortens is not called "only": of a device that works by itself, the loop waits for data
    # while that is busy, or for the device when batches lie ready.
    steps = demands(wait=10, compute=0).steps + demands(compute=10).steps
    verdict = judge(replace(demands(transform=(1, 0)), steps=steps))
    assert "compute binds: though 50% of the time" in verdict.sentence
    verdict = judge(demands(wait=4, compute=50, transform=(90, 0)))
    assert not verdict.worth_making and "not worth making" in verdict.sentence and "would not help" in verdict.sentence
    # The loop only launches the step when it had to wait, and waits for the device when two batches lay ready.
    base = demands(wait=60, compute=0.1, transform=(120, 0))
    waited, ready = base.steps[0], LoopStep(0.0, 0.0001, 0.0, 0.0, 0.030, 16)
    verdict = judge(replace(base, steps=(waited, ready, ready, waited) * 12))
    assert verdict.cures[0].step_s >= 0.029
    # Where nobody saw what batches cost, no cause is made up.
    verdict = judge(replace(demands(wait=45), batches=()))
    assert verdict.cause == "" and "was not seen" in verdict.sentence and not verdict.worth_making
    assert judge(replace(demands(wait=1, compute=50), batches=())).cause == "compute"


def test_a_start_is_what_an_epochs_first_batch_takes_beyond_a_usual_one_and_its_end_unless_workers_live_on():
    base = demands(wait=45, transform=(3, 0), startups=(600, 600, 600, 600))
    assert "worker start-up" in [cure.cause for cure in judge(base).cures]
    assert "worker start-up" not in [cure.cause for cure in judge(replace(base, persistent=True)).cures]
    base = replace(demands(wait=10, transform=(3, 4)), epochs=((0.1, 0.0), (0.05, 0.02)), receive_s=0.003)
    assert base.startups_s == pytest.approx((0.09, 0.06)) and base.ended_s == 0.02
    unseen = replace(base, batches=())  # then a batch takes the median wait
    assert unseen.startups_s == pytest.approx((0.09, 0.06))
    assert replace(base, workers=0).startups_s == ()


def test_a_long_run_is_judged_alike_whether_all_steps_were_kept_or_a_part():
    base = demands(wait=45, transform=(3, 0), startups=(600, 600))
    part = replace(base, steps=base.steps[::10], batches=base.batches[::10], num_steps=50)
    gains = [[cure.gain for cure in judge(one).cures] for one in (base, part)]
    assert gains[0] == pytest.approx(gains[1]) and judge(part).step_s == pytest.approx(judge(base).step_s)


def test_a_fastloader_is_not_told_to_use_fastload():
    base = demands(wait=45, reading=(1, 90), decoding=(0, 0), workers=8, cpus=8)
    base = replace(base, by_threads=True, is_fastload=True)
    verdict = judge(base)
    assert verdict.cause == "reading" and "fastload pack (" not in verdict.sentence and not verdict.fastload_helps
    decoding = (BatchWork({"decoding": WorkTime(90 * MS)}),) * 50  # of rows that fastload decodes itself
    verdict = judge(replace(base, batches=decoding, compression_ratio=21.6))
    assert verdict.cause == "decoding" and "--store raw" in verdict.sentence and "about 22 times" in verdict.sentence
    assert not any(words in verdict.sentence for words in ("decode once", "not needed", "more workers"))


def test_a_fastloader_starts_no_processes_unless_it_runs_the_datasets_own_transforms():
    base = demands(wait=45, decoding=(90, 0), transform=(4, 0), startups=(600, 600))
    base = replace(base, by_fastloader=FastLoaderCosts(WorkTime(MS)), keeps_transform=False)
    model = loop_packed(costs_of(base), base)
    assert (model.startup_s, model.restart_s, model.end_s) == (0.0, 0.0, 0.0)
    kept = loop_packed(costs_of(base), replace(base, keeps_transform=True))
    assert kept.startup_s > 0 and kept.restart_s == 0.0


def test_batches_that_hold_no_images_are_not_to_be_packed():
    base = replace(demands(wait=45, workers=2, reading=(1, 90), decoding=(30, 0)), plain=PlainLoader(root="text"))
    assert "fastload pack" in judge(base).sentence and judge(base).fastload_helps
    verdict = judge(replace(base, images=False))
    assert verdict.cause == "reading" and not verdict.fastload_helps and verdict.cures[0].how == ""
    assert "pack" not in verdict.sentence and verdict.sentence.endswith("fastload is not needed for that")
    assert verdict.cures[0].gain < judge(base).cures[0].gain, "the decoding stays"


def test_a_batch_of_many_tensors_is_to_be_handed_over_as_one_at_the_costs_that_were_tried():
    base = replace(demands(wait=50, transform=(10, 0), hand_over=(90, 0)), receive_s=10 * MS, tensors=40)
    free = judge(base).cures[0]
    assert free.cause == "hand-over" and "a few tensors" in free.change
    tried = judge(replace(base, as_one_tensor=WorkerCosts(WorkTime(20 * MS), 2 * MS, 0.0, 0.0))).cures[0]
    assert tried.change == "hand each batch over as one tensor, and split it in the loop: it has 40 now"
    # Two workers take 10 + 20 ms a batch.
    assert tried.step_s == pytest.approx(0.015, rel=0.1) and tried.step_s > free.step_s
    # As many tensors as now take 60 ms in a trial, and one of them 20: 90 ms become 30. The loop has 5 ms left.
    one, several = WorkerCosts(WorkTime(20 * MS), 2 * MS), WorkerCosts(WorkTime(60 * MS), 4 * MS)
    both = replace(base, as_one_tensor=one, by_a_worker=several)
    assert judge(both).cures[0].step_s == pytest.approx((2 * 40 + 5) / 4 * MS, rel=0.1)
    # What is pickled costs far more than that, and is left.
    pickled = replace(both, by_a_worker=WorkerCosts(WorkTime(6 * MS), 4 * MS))
    assert judge(pickled).cures[0].step_s == pytest.approx(tried.step_s)
    # Or is taken over at far more.
    unpickled = replace(both, by_a_worker=WorkerCosts(WorkTime(60 * MS), 2 * MS), usual_receive_s=10 * MS)
    assert judge(unpickled).cures[0].step_s == pytest.approx(tried.step_s)


def test_code_that_waits_gets_the_workers_that_hide_it_and_is_named_with_its_line():
    base = demands(wait=45, transform=(4, 0), compute=5, **{WAITING: (0, 96)})
    verdict = judge(replace(base, waits_at="fetch (train.py:9)", num_steps=5000))
    assert verdict.sentence.startswith("waiting in the dataset's code binds, at fetch (train.py:9): 90% of the time")
    assert len(verdict.sentence.split()) <= 50 and not verdict.fastload_helps and "pack" not in verdict.sentence
    # 100 ms a batch beside 5 ms of a step: as many workers as may be.
    number = int(re.search(r"num_workers=(\d+) instead of 2", verdict.sentence)[1])
    assert number == 16 and verdict.cures[0].step_s == pytest.approx(0.1 / 16, rel=0.1)
    assert verdict.cures[0].how.startswith("DataLoader(..., num_workers=16)")
    # Where each start of a worker costs, fewer of them hide more of the wait in short epochs.
    short = replace(base, num_steps=200, epochs=((0.2, 0.0),) * 5)
    assert 2 < int(re.search(r"num_workers=(\d+) instead", judge(short).sentence)[1]) < 16
    # They need no CPU of those that other programs take.
    assert judge(replace(base, others_cpus=1.9)).cause == WAITING
    assert "keep a copy on this machine" in judge(replace(base, waits_shared=True)).sentence
    # A run of few steps, in which their start takes as long as they save.
    slow_start = WorkerCosts(WorkTime(0.001, 0.0), 0.001, 0.0, start_s=60.0)
    brief = demands(wait=100, workers=0, transform=(1, 0), compute=1, **{WAITING: (0, 99)})
    verdict = judge(replace(brief, by_a_worker=slow_start))
    assert verdict.cause == WAITING and not verdict.worth_making
    # More of them were tried, and got no more: what they wait for serves one at a time.
    crowd = replace(demands(wait=45, workers=4, transform=(4, 0), **{WAITING: (0, 196)}))
    for few_s, many in ((0.051, False), (0.099, True)):
        verdict = judge(replace(crowd, fewer_workers=(2, few_s, 0.05)))
        assert verdict.cause == WAITING and ("num_workers=" in verdict.sentence) == many
        assert ("keep a copy on this machine" in verdict.sentence) == (not many)


def test_the_change_offered_first_brings_most_but_for_a_number_of_workers_that_brings_nearly_as_much():
    verdict = judge(demands(wait=45, decoding=(50, 0), transform=(40, 0), compute=20, workers=2))
    assert [cure.cause for cure in verdict.cures] == ["decoding", "transform"]
    assert verdict.cures[0].gain > verdict.cures[1].gain > 1.1
    verdict = judge(demands(wait=45, decoding=(40, 0), transform=(50, 0), compute=20, workers=2))
    assert [cure.cause for cure in verdict.cures][:2] == ["transform", "decoding"]
    # Two workers more save three quarters of what no decoding would: they come first, by little more work.
    verdict = judge(demands(wait=45, decoding=(50, 0), transform=(15, 0), compute=20, workers=1, cpus=4))
    assert verdict.cures[0].cause == "too few workers"
    assert max(cure.gain for cure in verdict.cures) >= verdict.cures[0].gain


def test_each_change_says_what_to_type():
    plain = PlainLoader(root="my data/train", batch_size=32, transforms=("RandomResizedCrop(224)", "ToTensor()"))
    blurs = replace(plain, transforms=(*plain.transforms, "GaussianBlur()"))
    base = replace(demands(wait=45, decoding=(90, 0), transform=(4, 0), workers=2), plain=plain)
    assert judge(base).cures[0].how == to_type(plain, keeps_transform=False)
    assert judge(replace(base, plain=blurs)).cures[0].how == to_type(blurs, keeps_transform=True)
    assert judge(replace(base, is_fastload=True)).cures[0].how == ""
    slow = replace(base, batches=demands(decoding=(4, 0), transform=(90, 0)).batches)
    assert judge(slow).cause == "transform" and "transform=[RandomResizedCrop(224)]" in judge(slow).cures[0].how
    assert judge(replace(slow, plain=blurs)).cures[0].how == "", "it would be another change than is promised"
    on_cpus = judge(replace(slow, step_running_s=5 * MS)).cures[0]
    assert on_cpus.change.startswith("make this Python code cheaper") and on_cpus.how == ""
    # The dataset's own code was tried in another form, or was left.
    for keeps in (False, True):
        tried = replace(base, plain=plain, by_fastloader=FastLoaderCosts(WorkTime(MS)), keeps_transform=keeps)
        assert judge(tried).cures[0].how == to_type(plain, keeps_transform=keeps)
    few = judge(demands(wait=45, workers=1, decoding=(24, 0), transform=(23, 0), compute=20))
    assert few.cures[0].how == "DataLoader(..., num_workers=2)"
    starts = judge(demands(wait=45, transform=(3, 0), startups=(600, 600, 600, 600)))
    assert starts.cures[0].how == "DataLoader(..., persistent_workers=True)"


def test_a_step_takes_at_most_what_its_operations_took_by_themselves_once_nothing_is_waited_for():
    base = replace(demands(wait=45, decoding=(90, 0), compute=20, workers=2), step_running_s=20 * MS)
    tried = replace(base, by_fastloader=FastLoaderCosts(WorkTime(MS)), keeps_transform=False)
    costs = FormatCosts(6 * MS, 6 * MS, MS, between_s=2 * MS)
    slower = replace(costs, channels_last_s=9 * MS)
    before, after, last = (judge(replace(tried, by_format=one)) for one in (None, costs, slower))
    assert before.free_step_s == pytest.approx(20 * MS, rel=0.02) and after.free_step_s == pytest.approx(8 * MS)
    assert [one.cures[0].step_s for one in (before, after, last)] == pytest.approx([20 * MS, 8 * MS, 11 * MS], rel=0.05)
    assert "with a loader that costs nothing it would take 8.00 ms" in after.evidence[0]
    # Memory that is mapped anew for each batch is given back between operations.
    mapped = judge(replace(tried, by_format=costs, by_a_worker=WorkerCosts(WorkTime(), unmap_s=1.5 * MS)))
    assert mapped.free_step_s == pytest.approx(6.5 * MS)


def test_what_a_loader_around_it_does_with_each_batch_is_left_when_fastloader_takes_the_place_of_the_inner_one():
    base = replace(
        demands(wait=45, decoding=(90, 0), workers=2), receive_s=9 * MS, usual_receive_s=9 * MS, step_running_s=5 * MS
    )
    base = replace(
        base, by_fastloader=FastLoaderCosts(WorkTime(MS)), keeps_transform=False,
        by_a_worker=WorkerCosts(WorkTime(), receive_s=2 * MS),
    )  # fmt: skip
    alone, within = (judge(replace(base, wrapped=wrapped)).cures[0].step_s for wrapped in (False, True))
    assert within == pytest.approx(alone + 7 * MS, rel=0.02)
    # It maps the batch's memory and gives it back: FastLoader's stays.
    mapping = WorkerCosts(WorkTime(), receive_s=2 * MS, touch_s=MS, unmap_s=4 * MS)
    again = judge(replace(base, wrapped=True, by_a_worker=mapping)).cures[0].step_s
    assert again == pytest.approx(within - 5 * MS, rel=0.02)


def test_what_the_model_does_not_explain_is_not_left_where_the_step_was_played_again_without_workers():
    base = demands(wait=20, compute=40, decoding=(2, 0))  # batches of 2 ms, and yet waits
    base = replace(base, by_fastloader=FastLoaderCosts(WorkTime(MS)), keeps_transform=False, step_running_s=40 * MS)
    left, gone = (judge(replace(base, by_format=one)) for one in (None, FormatCosts(36 * MS, 36 * MS, 0.0, 4 * MS)))
    assert left.cures[0].step_s == pytest.approx(60 * MS, rel=0.01)
    assert gone.cures[0].step_s == pytest.approx(40 * MS, rel=0.02) and gone.cures[0].cause == "decoding"


def test_where_nothing_is_known_of_the_transforms_a_gain_is_said_for_either_case():
    base = replace(
        demands(wait=45, decoding=(60, 0), transform=(30, 0)),
        by_fastloader=FastLoaderCosts(WorkTime(4 * MS)), keeps_transform=False,
    )  # fmt: skip
    verdict = judge(base)
    kept = judge(replace(base, keeps_transform=True)).cures[0].gain
    assert verdict.cures[0].least_gain == pytest.approx(kept) and 1.1 * kept < verdict.cures[0].gain
    assert f"({kept:.1f} times if the dataset's own transforms are kept)" in verdict.sentence
    known = judge(replace(base, plain=PlainLoader(transforms=("Resize(224)",), lists_transforms=True)))
    assert known.cures[0].least_gain == 0 and "are kept" not in known.sentence
    cheap = replace(base, batches=demands(decoding=(90, 0), transform=(0, 0)).batches)
    assert "are kept" not in judge(cheap).sentence


times = st.floats(0, 100)
works = st.tuples(times, times)


@given(
    stages=st.fixed_dictionaries({name.replace("-", "_"): works for name in STAGES}),
    wait=times, compute=st.floats(0.01, 100), copy=times, workers=st.integers(0, 32), cpus=st.integers(1, 64),
    lock=times, slow=times, startups=st.lists(times, max_size=5),
)  # fmt: skip
def test_any_loop_gets_one_cause_and_no_cure_makes_it_slower(stages, wait, compute, copy, workers, cpus, **others):
    verdict = judge(demands(wait=wait, compute=compute, copy=copy, workers=workers, cpus=cpus, **others, **stages))
    assert [name for name in CAUSES if name in verdict.sentence] == [verdict.cause]
    assert 0 <= verdict.stall_share <= 1
    assert all(0 <= cure.step_s <= verdict.step_s * (1 + 1e-9) for cure in verdict.cures)
    assert verdict.cause != "compute" or not verdict.worth_making
    assert verdict.worth_making == (bool(verdict.cures) and verdict.cures[0].gain >= 1.1)
    assert verdict.worth_making == ("not worth making" not in verdict.sentence)
    if workers >= cpus:
        assert verdict.cause != "too few workers"
    if workers <= cpus:
        assert verdict.cause != "too many workers"


def test_without_python_in_its_transform_a_fastloader_has_no_processes_that_start():
    base = replace(demands(wait=85, transform=(180, 0)), is_fastload=True, epochs=((2.0, 0.0),), num_steps=40)
    first, other = (judge(replace(base, is_fastload=one)).cures[0] for one in (True, False))
    assert first.cause == "transform" and first.step_s < 6 * MS
    assert other.cause == "transform" and other.step_s > 4 * first.step_s
    threads = judge(replace(base, is_fastload=True, by_threads=True)).cures[0]  # which start as before
    assert threads.cause == "transform" and threads.step_s > 4 * first.step_s


def test_beside_other_programs_no_gain_is_promised_unless_the_loop_is_fed_all_the_same():
    base = replace(demands(wait=45, decoding=(90, 0), compute=5), step_running_s=5 * MS, step_runnable_s=10 * MS)
    assert judge(base).cause == judge(replace(base, others_cpus=0.4)).cause == "decoding"
    verdict = judge(replace(base, others_cpus=1.2))
    assert verdict.cause == "other programs" and not verdict.cures and not verdict.worth_making
    assert "they use 1.2 of its 2 CPUs" in verdict.sentence and "1.1" not in verdict.sentence
    # What batches and steps are seen to use is not all that the job does.
    less = replace(base, batches=demands(decoding=(30, 0)).batches, others_cpus=0.8)
    assert judge(less).cause == "decoding" and judge(replace(less, job_cpus=1.1)).cause == "other programs"
    # No thread lacked a CPU, CPUs are left, or nothing is waited for.
    assert judge(replace(base, others_cpus=1.2, step_runnable_s=MS)).cause == "decoding"
    assert judge(replace(base, cpus=16, others_cpus=5.0)).cause == "too few workers"
    works = replace(demands(wait=1, compute=50, transform=(30, 0)), others_cpus=1.2, step_running_s=45 * MS)
    batches = tuple(replace(batch, runnable_s=10 * MS) for batch in works.batches)
    assert judge(works).cause == judge(replace(works, batches=batches)).cause == "compute"
    slowed = judge(replace(works, step_runnable_s=20 * MS))  # a step that lacks a CPU would be shorter without them
    assert slowed.cause == "other programs" and "2% of the time" in slowed.sentence and not slowed.cures


def test_a_run_so_short_that_it_is_the_loaders_start_is_not_called_compute():
    base = demands(compute=5, workers=2, reading=(1, 0), startups=(400,))
    first, *later = (replace(step, wait_s=0.0002) for step in base.steps)
    short = replace(base, is_fastload=True, by_threads=True, steps=(replace(first, wait_s=0.401), *later[:9]))
    verdict = judge(short)
    assert verdict.cause == "worker start-up" and not verdict.worth_making and not verdict.fastload_helps
    assert "judge one of 100 steps" in verdict.sentence and "400 ms" in verdict.sentence
    fed = replace(short, steps=(first, *later), epochs=())
    assert judge(fed).cause == "compute"


def test_a_cause_that_no_change_removes_has_none():
    with pytest.raises(KeyError, match=OTHER_PROGRAMS):
        change_for(OTHER_PROGRAMS, demands(wait=45), 0)
