"""Which layers a step calls with a batch's images, and what they cost by memory format."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from fastload.profiling.doctor import injected, network_trial
from fastload.profiling.doctor.injected.network_layers import LayerRecorder
from fastload.profiling.doctor.network_trial import Layer, LayersStep, has_format, measure_formats

NETWORK = nn.Sequential(
    nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding="same", groups=2),
    nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2),
)  # fmt: skip


@pytest.fixture
def recorded(tmp_path):
    """Runs a step, and returns the layers that were recorded of it."""
    before = injected.record_into(str(tmp_path))

    def record(images, step):
        recorder = LayerRecorder.of(7, images)
        if recorder is None:
            return None
        step()
        recorder.end()
        lines = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text().splitlines()]
        event = [line for line in lines if line["e"] == "layers"][-1]
        assert event["id"] == 7
        return sorted((Layer(**layer) for layer in event["layers"]), key=lambda layer: (layer.kind, layer.shape))

    yield record
    injected.record_into(before)


class Named(nn.Module):
    """A network that is told its images by name, and normalizes them."""

    def __init__(self) -> None:
        super().__init__()
        self.network = NETWORK

    def forward(self, *, pixel_values):
        return self.network(pixel_values)


def test_layers_are_recorded_with_their_arguments_shapes_and_calls(recorded):
    images = torch.rand(4, 3, 16, 16)
    layers = recorded(images, lambda: NETWORK(images).sum().backward())
    assert [(layer.kind, layer.shape, layer.backward, layer.count) for layer in layers] == [
        ("AdaptiveAvgPool2d", [4, 8, 4, 4], True, 1), ("BatchNorm2d", [4, 8, 8, 8], True, 1),
        ("Conv2d", [4, 3, 16, 16], False, 1), ("Conv2d", [4, 8, 8, 8], True, 1),
        ("Linear", [4, 8], True, 1), ("MaxPool2d", [4, 8, 8, 8], True, 1), ("ReLU", [4, 8, 8, 8], True, 2),
    ]  # fmt: skip
    convolution = layers[3].arguments
    assert convolution["groups"] == 2 and convolution["padding"] == "same" and convolution["bias"] is True
    assert not torch.nn.modules.module._global_forward_hooks, "they are taken away"
    named = recorded(images, lambda: Named()(pixel_values=images).sum().backward())
    assert named == layers
    twice = recorded(images, lambda: (NETWORK(images) + NETWORK((images - 0.5) / 0.5)).sum().backward())
    assert [layer.count for layer in twice] == [2 * layer.count for layer in layers]


def test_images_that_a_network_made_of_something_else_and_steps_without_gradients_do_not_count(recorded):
    images, generator = torch.rand(4, 3, 16, 16), nn.ConvTranspose2d(5, 3, 16)

    def step():
        made = generator(torch.rand(4, 5, 1, 1))
        NETWORK(made.detach()).sum().backward()
        NETWORK(made).sum().backward()
        with torch.no_grad():
            NETWORK(images)

    assert recorded(images, step) == []


def test_whatever_a_module_is_given_the_step_goes_on(recorded, tmp_path):
    images = torch.rand(4, 3, 16, 16)

    class Odd(nn.LayerNorm):
        def __init__(self):
            super().__init__(16)
            self.normalized_shape = {}  # cannot be counted

        def forward(self, images, other):
            return images

    assert recorded(images, lambda: Odd()(images, images.numpy())) == []
    assert '"e":"fault","what":"layers: ' in "".join(path.read_text() for path in tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("images", [
    np.zeros((4, 3, 8, 8)),
    torch.rand(4, 16, 16, 3).permute(0, 3, 1, 2), torch.rand(4, 5), torch.rand(4, 3, 8, 8, device="meta"), None,
])  # fmt: skip
def test_images_that_lie_otherwise_or_elsewhere_are_left_alone(recorded, images):
    assert recorded(images, lambda: None) is None


def test_layers_are_tried_in_both_formats_with_as_many_threads_as_the_step(recorded, monkeypatch):
    images, seen, before = torch.rand(4, 3, 16, 16), [], torch.get_num_threads()
    layers = recorded(images, lambda: NETWORK(images).sum().backward())

    def least_s(call, pause_s=0.0):
        call()
        seen.append(torch.get_num_threads())
        return 1.0

    monkeypatch.setattr(network_trial, "_least_s", least_s)
    costs = measure_formats(layers, own_s=2 * network_trial._MOST_S, own_cpus=1.2)
    of_images = [layer for layer in layers if layer.kind != "Linear"]
    assert has_format(layers) and not has_format([one for one in layers if one not in of_images])
    assert costs.contiguous_s == costs.channels_last_s == 2 * sum(layer.count for layer in of_images), "half the batch"
    assert costs.convert_s == 1.0 and {*seen} == {1} and torch.get_num_threads() == before
    for channels in (1, 3):
        lasts = network_trial._images((2, channels, 4, 4), last=True)
        assert nn.Conv2d(channels, 4, 3)(lasts).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("seconds", [10.0, 2.0, 0.25])
def test_a_step_of_layers_takes_about_so_long(recorded, monkeypatch, known, seconds):
    """Of layers that take a second: again and again, with steps of a small network after, or of a part of the batch."""
    images = torch.rand(4, 3, 16, 16)
    layers = recorded(images, lambda: NETWORK(images).sum().backward()) if known else ()
    batches = []
    called = network_trial._called
    monkeypatch.setattr(network_trial, "_called", lambda one, made: (batches.append(len(made)), called(one, made))[1])
    monkeypatch.setattr(network_trial, "_MOST_S", 5.0)
    pauses = []
    monkeypatch.setattr(network_trial, "_least_s", lambda call, pause_s=0.0: (call(), pauses.append(pause_s), 1.0)[2])
    step = LayersStep(layers, seconds, tuple(images.shape), 0.003)
    step()
    assert batches[-1] == {10.0: 2, 2.0: 4, 0.25: 1}[seconds]
    more = 1 if known and seconds == 2.0 else 0
    assert (step._rounds, step._more) == (1 if more or seconds < 1 else round(seconds), more)
    assert pauses == [0.003, 0.0][: 1 + more], "a small step comes right after the layers"
