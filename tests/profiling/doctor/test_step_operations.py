"""What a training step does is recorded as operations of torch, and played again with other tensors."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from fastload.profiling.doctor import injected, trials
from fastload.profiling.doctor.injected import step_operations
from fastload.profiling.doctor.injected.step_operations import StepRecorder, _Tensors
from fastload.profiling.doctor.injected.timed_calls import thread
from fastload.profiling.doctor.trials import Recorded, Replay, TrialStep, measure_formats, torch_threads


class Shuffling(nn.Module):
    """Rearranges channels, as ShuffleNet does: what comes of it lies in no memory format."""

    def forward(self, images):
        batch, channels, height, width = images.shape
        return images.view(batch, 2, channels // 2, height, width).transpose(1, 2).reshape(images.shape)


NETWORK = nn.Sequential(
    nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), Shuffling(),
    nn.Conv2d(8, 8, 3, padding="same", groups=2), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1),
    nn.Flatten(), nn.Linear(8, 2),
)  # fmt: skip
IMAGES = torch.rand(4, 3, 16, 16)


def train(images=IMAGES):
    optimizer = torch.optim.AdamW(NETWORK.parameters(), lr=1e-3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(NETWORK((images - 0.5) / 0.25), torch.tensor([0, 1, 0, 1]))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def events_of(folder, kind="operations"):
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return [line for line in lines if line["e"] == kind]


@pytest.fixture
def recorded(tmp_path):
    """Runs a step, and returns what was recorded of it, None if nothing was."""
    before = injected.record_into(str(tmp_path))

    def record(step, images=IMAGES, *, whole=True):
        StepRecorder.begin(7, [] if images is None else [images])
        if thread.recorder is None:
            return None
        step()
        StepRecorder.end(7 if whole else None)
        found = events_of(tmp_path)
        names = ("tensors", "operations", "images", "between", "threads")
        return Recorded(*(found[-1][name] for name in names)) if found else None

    yield record
    injected.record_into(before)


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.seen.append((str(function), [list(one.shape) for one in args if isinstance(one, torch.Tensor)]))
        return result


def test_a_step_is_played_again_operation_by_operation(recorded):
    found = recorded(train)
    assert _get_current_dispatch_mode() is None and found.tensors[found.images][0] == [4, 3, 16, 16]
    replay = Replay(found)
    with Names() as script:
        train()
    with Names() as trial:
        replay()
    replay()  # again and again
    assert [one for one in script.seen if not one[0].startswith("profiler")] == trial.seen
    assert {"aten.convolution.default", "aten.convolution_backward.default"} <= {name for name, _ in trial.seen}


def test_the_images_of_a_loader_that_reads_ahead_are_those_of_the_batch_before(recorded):
    before = IMAGES.clone()
    found = recorded(lambda: train(before))
    assert found.images in {
        one.get("tensor") for _, args, _, _ in found.operations for one in args if isinstance(one, dict)
    }


@pytest.mark.parametrize("channels_last", [False, True])
def test_the_images_memory_format_goes_as_far_as_in_the_script(recorded, channels_last):
    images = IMAGES.contiguous(memory_format=torch.channels_last) if channels_last else IMAGES

    class Formats(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "convolution" in str(function) or "batch_norm" in str(function):
                given = [one for one in args if isinstance(one, torch.Tensor) and one.ndim == 4]
                self.seen.append((str(function), [one.is_contiguous() for one in given]))
            return function(*args, **(kwargs or {}))

    replay = Replay(recorded(train), channels_last=channels_last)
    with Formats() as script:
        train(images)
    with Formats() as trial:
        replay()
    assert script.seen == trial.seen


def test_what_a_step_does_between_operations_is_timed_apart(recorded, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(step_operations, "clock", lambda: float(next(clock)))
    monkeypatch.setattr(step_operations, "_DISPATCH_S", 0.25)
    waited = iter(range(1000))
    monkeypatch.setattr(step_operations, "waited_s", lambda: 0.5 * next(waited))

    def step():
        IMAGES + 1
        [next(clock) for _ in range(7)]  # something else
        IMAGES * 2

    # Begun at 0; two operations of a second each, from 1 and from 10; ended at 12. Half a second of each was no work.
    assert recorded(step).between_s == 12 - 5 * 0.5 - 2 * (1 - 0.5) - 2 * 0.25


def test_an_operation_that_fails_or_is_not_known_here_is_left_out(recorded):
    found = recorded(train)
    operations = [
        [{"aten.relu.default": "other.relu.default"}.get(one[0], one[0]), *one[1:]] for one in found.operations
    ]
    operations[0] = [operations[0][0], ["a word"], {"dtype": {"dtype": "float32"}}, operations[0][3]]
    broken = Replay(Recorded(found.tensors, operations, found.images))
    broken()
    left_out = [one[0] for one, call in zip(operations, broken._calls, strict=True) if not call.functions]
    assert left_out == [operations[0][0], "other.relu.default", "other.relu.default"] and broken.left_out == 3


def test_an_operation_that_fails_only_later_is_left_out_then(recorded):
    """As a loss that takes probabilities only, once the random network has come to have none."""
    weight = torch.full((4,), 0.5, requires_grad=True)

    def step():
        shares = (IMAGES.mean((1, 2, 3)) * weight).clamp(0, 1)
        nn.functional.binary_cross_entropy(shares, torch.ones(4)).backward()
        weight.data.div_(torch.zeros(4)).mul_(0)  # not a number from now on

    found = recorded(step)
    weight.data.fill_(0.5)
    replay = Replay(found)
    at = [one[0] for one in found.operations].index("aten.binary_cross_entropy.default")
    assert replay._calls[at].functions
    replay()
    assert not replay._calls[at].functions and replay._calls[at].made
    replay()


@pytest.mark.parametrize("images", [
    np.zeros((4, 3, 8, 8)),
    torch.rand(4, 16, 16, 3).permute(0, 3, 1, 2), torch.rand(4, 5), torch.rand(4, 3, 8, 8, device="meta"), None,
])  # fmt: skip
def test_images_that_lie_otherwise_or_elsewhere_are_left_alone(recorded, images):
    assert recorded(lambda: None, images) is None


def test_a_step_that_was_left_or_has_too_many_operations_is_dropped(recorded, monkeypatch):
    assert recorded(train, whole=False) is None
    monkeypatch.setattr(step_operations, "_MOST", 10)
    assert recorded(train) is None and _get_current_dispatch_mode() is None


@pytest.mark.parametrize("odd", [
    lambda: torch.rand(3, generator=torch.Generator().manual_seed(1)),
    lambda: torch.rand(3, device="meta") + 1,
])  # fmt: skip
def test_a_step_with_what_is_not_written_down_goes_on_and_is_not_recorded(recorded, tmp_path, odd):
    def step():
        odd()
        assert train() > 0

    assert recorded(step) is None and events_of(tmp_path, "fault") == []


def test_a_step_goes_on_where_recording_fails(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(_Tensors, "plain", lambda self, value: 1 // 0)
    assert recorded(train) is None
    assert events_of(tmp_path, "fault")[0]["what"].startswith("operations: ZeroDivisionError")


def test_a_mode_of_the_script_that_is_still_entered_is_left_to_it(recorded):
    mode = Names()
    assert recorded(mode.__enter__) is None
    assert _get_current_dispatch_mode() is mode
    mode.__exit__(None, None, None)
    _get_current_dispatch_mode().__exit__(None, None, None)  # the recorder's, which takes nothing any more


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_recorded_step_has_the_results_of_one_that_is_not(recorded, mode):
    results = []

    def step():
        torch.manual_seed(3)
        with mode():
            results.append(NETWORK.eval()(IMAGES))
        NETWORK.train()

    recorded(step)
    step()
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_formats_are_tried_with_as_many_threads_as_the_step(recorded, monkeypatch):
    seen, before = [], torch.get_num_threads()
    with torch_threads(3):
        found = recorded(train)

    def least_of_each_s(calls, pause_s=0.0):
        begun = len(seen)
        for call in calls:
            call()
            seen.append(torch.get_num_threads())
        return [float(number + 1) for number in range(begun, len(seen))]

    monkeypatch.setattr(trials, "_least_of_each_s", least_of_each_s)
    costs = measure_formats(found, own_s=0.1)
    assert (costs.contiguous_s, costs.channels_last_s, costs.convert_s) == (1.0, 2.0, 3.0)
    assert costs.between_s == found.between_s
    assert seen == [3, 3, 3] and torch.get_num_threads() == before
    assert measure_formats(found, own_s=2 * trials._LONGEST_S) is None


def test_a_long_step_is_played_once_after_one_that_warms_up(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    calls = []
    assert trials._least_s(lambda: calls.append(1)) == 1.0 and len(calls) == 2
    monkeypatch.setattr(trials, "time", SimpleNamespace(perf_counter=lambda: 0.01 * next(clock)))
    assert trials._least_s(lambda: calls.append(1)) == pytest.approx(0.01) and len(calls) == 2 + 4
    del calls[:]
    trials._least_of_each_s([lambda: calls.append("one"), lambda: calls.append("other")])
    assert calls == ["one", "other"] * 4


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seconds", [10.0, 2.6, 0.25])
def test_a_trial_step_takes_about_so_long(recorded, monkeypatch, known, seconds):
    """Where all that it may consist of takes a second."""
    found, pauses = recorded(train) if known else None, []
    monkeypatch.setattr(trials, "_least_s", lambda call, pause_s=0.0: (call(), pauses.append(pause_s), 1.0)[2])
    step = TrialStep(found, seconds, (4, 3, 16, 16), 0.003)
    step()
    replayed = known and seconds < trials._LONGEST_S
    assert isinstance(step._step, Replay) == replayed
    assert (step._rounds, step._more) == (
        (1, round(max(0.0, seconds - 1))) if replayed else (max(1, round(seconds)), 0)
    )
    assert pauses == [0.003, 0.0][: 1 + replayed], "a small step comes right after the others"


def test_what_a_loader_around_another_one_does_is_played_as_arithmetic_on_its_images(monkeypatch):
    monkeypatch.setattr(trials, "_least_s", lambda *_: 0.01)
    step = TrialStep(None, 0.035, (4, 3, 16, 16), around_s=0.025)
    with Names() as trial:
        step()
    # In 25 ms as many images as in two batches and a half; the other 10 ms are one step of a small network.
    assert trial.seen.count(("aten.add_.Tensor", [[3, 16, 16]])) == 10
    assert sum(name == "aten.convolution.default" for name, _ in trial.seen) == 2
