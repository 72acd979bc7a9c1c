"""A function mapped over a stream by threads; Python's switch interval, lowered meanwhile and put back afterwards."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from fastload.system.threads import SWITCH_INTERVAL_S, ShortSwitchInterval, in_threads

IN_ORDER = partial(in_threads, ordered=True)


@pytest.fixture(autouse=True)
def interval_as_before():
    before_s = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before_s)


def test_the_interval_is_short_until_the_last_user_ends():
    sys.setswitchinterval(0.005)
    first, second = ShortSwitchInterval(), ShortSwitchInterval()
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    first.end()
    first.end()  # a second time counts for nothing
    assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL_S)
    second.end()
    assert sys.getswitchinterval() == pytest.approx(0.005)


@pytest.mark.parametrize(("before_s", "meanwhile_s"), [(0.00002, 0.00002), (0.005, 0.01)])
def test_an_interval_that_is_shorter_already_stays_and_what_the_user_sets_meanwhile_is_not_undone(
    before_s, meanwhile_s
):
    sys.setswitchinterval(before_s)
    short = ShortSwitchInterval()
    assert sys.getswitchinterval() == pytest.approx(min(before_s, SWITCH_INTERVAL_S))
    sys.setswitchinterval(meanwhile_s)
    short.end()
    assert sys.getswitchinterval() == pytest.approx(meanwhile_s)


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_each_task_is_done_once_and_the_order_kept_where_that_is_asked(threads):
    assert sorted(in_threads(lambda n: n * n, range(50), threads)) == [n * n for n in range(50)]
    assert list(IN_ORDER(lambda n: n * n, iter(range(50)), threads)) == [n * n for n in range(50)]


def test_a_result_waits_for_no_slower_task_unless_in_order():
    fast_is_out = threading.Event()
    results = in_threads(lambda slow: slow and fast_is_out.wait(60), [True, False], 2)
    assert next(results) is False
    fast_is_out.set()
    assert list(results) == [True]


@pytest.mark.parametrize("mapped", [in_threads, IN_ORDER])
def test_two_tasks_a_thread_are_taken_and_an_error_ends_it(mapped):
    taken = []
    results = mapped(lambda n: 1 // (4 - n), (taken.append(n) or n for n in itertools.count()), 2)
    next(results)
    assert taken == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        list(results)  # though there is no end to the tasks


@pytest.mark.parametrize("platform", [sys.platform, "darwin"])
def test_a_process_ends_when_the_other_end_of_a_pipe_is_closed(platform):
    code = f"import sys\nsys.platform = {platform!r}\nfrom fastload.system.threads import end_with\nend_with(0)\n"
    code += "print('on', flush=True)\nimport time\nwhile True: time.sleep(1)"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdout.readline() == b"on\n" and child.poll() is None
        child.stdin.close()
        assert child.wait(60) in (1, -signal.SIGKILL)
