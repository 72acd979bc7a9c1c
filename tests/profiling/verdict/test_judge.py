"""What a verdict names, and the laws that its predictions keep."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastload.profiling.verdict import CAUSES, Demands, judge
from fastload.timing.results import BatchWork, Step, Work

STAGES = ("reading", "decoding", "transform", "collate", "hand-over")
MS = 1e-3


def demands(
    *, wait=0.0, compute=5.0, copy=0.0, workers=2, cpus=2, lock=0.0, slow=0.0, startups=(),
    **stages: tuple[float, float],
) -> Demands:  # fmt: skip
    """A loop of 50 equal steps; milliseconds, of stages (running, blocked)."""
    works = {name.replace("_", "-"): Work(running * MS, blocked * MS) for name, (running, blocked) in stages.items()}
    step = Step(0.0, wait * MS, copy * MS, 0.0, compute * MS, 16)
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
    ("copy to the device", demands(wait=1, copy=40, transform=(3, 0))),
    ("too few workers", demands(wait=45, workers=1, reading=(1, 2), decoding=(24, 0), transform=(23, 0), compute=20)),
    ("too few workers", demands(wait=30, workers=0, reading=(1, 2), decoding=(13, 0), transform=(14, 0), compute=30)),
    ("worker start-up", demands(wait=45, transform=(3, 0), startups=(600, 600, 600, 600))),
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
    waited, ready = base.steps[0], Step(0.0, 0.0001, 0.0, 0.0, 0.030, 16)
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
    decoding = (BatchWork({"decoding": Work(90 * MS)}),) * 50  # of rows that fastload decodes itself
    verdict = judge(replace(base, batches=decoding, compression_ratio=21.6))
    assert verdict.cause == "decoding" and "--store raw" in verdict.sentence and "about 22 times" in verdict.sentence
    assert not any(words in verdict.sentence for words in ("decode once", "not needed", "more workers"))


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


def test_beside_other_programs_no_gain_is_promised_unless_the_loop_is_fed_all_the_same():
    base = replace(demands(wait=45, decoding=(90, 0), compute=5), step_running_s=5 * MS)
    assert judge(base).cause == judge(replace(base, others_cpus=0.4)).cause == "decoding"
    verdict = judge(replace(base, others_cpus=1.2))
    assert verdict.cause == "other programs" and not verdict.cures and not verdict.worth_making
    assert "they use 1.2 of its 2 CPUs" in verdict.sentence and "1.1" not in verdict.sentence
    # CPUs are left, or nothing is waited for.
    assert judge(replace(base, cpus=16, others_cpus=5.0)).cause == "too few workers"
    assert judge(replace(demands(wait=1, compute=50, transform=(30, 0)), others_cpus=1.2)).cause == "compute"


def test_a_run_so_short_that_it_is_the_loaders_start_is_not_called_compute():
    base = demands(compute=5, workers=2, reading=(1, 0), startups=(400,))
    first, *later = (replace(step, wait_s=0.0002) for step in base.steps)
    short = replace(base, is_fastload=True, by_threads=True, steps=(replace(first, wait_s=0.401), *later[:9]))
    verdict = judge(short)
    assert verdict.cause == "worker start-up" and not verdict.worth_making and not verdict.fastload_helps
    assert "judge one of 100 steps" in verdict.sentence and "400 ms" in verdict.sentence
    fed = replace(short, steps=(first, *later), epochs=())
    assert judge(fed).cause == "compute"
