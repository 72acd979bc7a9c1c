from __future__ import annotations

import pytest
import torch

from fastload import OptionError
from fastload.profiling.bench.steps import NETWORKS, StepChoice, make_step, network, parse_step


@pytest.mark.parametrize(
    ("text", "choice"),
    [
        ("tiny", StepChoice("tiny")),
        (" resnet50 ", StepChoice("resnet50")),
        ("sim:20000", StepChoice("sim", 20000.0)),
        ("sim:0.8x", StepChoice("sim", 0.8, relative=True)),
    ],
)
def test_a_step_is_parsed_and_says_itself(text, choice):
    assert parse_step(text) == choice
    assert parse_step(str(choice)) == choice


@pytest.mark.parametrize(
    "text", ["", "resnet", "sim", "sim:", "sim:fast", "sim:0", "sim:-3", "sim:nan", "sim:inf", "sim:x", "tiny:3"]
)
def test_what_is_no_step_is_refused_with_a_list_of_those_there_are(text):
    with pytest.raises(OptionError, match="choose resnet18, resnet50, tiny, sim:RATE"):
        parse_step(text)


def test_a_part_of_the_loaders_rate_needs_that_rate():
    with pytest.raises(OptionError, match="was not measured"):
        make_step("sim:0.5x")
    assert make_step("sim:0.5x", loader_samples_per_s=3000.0).name == "simulated accelerator, 1,500 images/s"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_published_size_and_learns_from_a_batch(name):
    count = sum(p.numel() for p in network(name, channels=3, num_classes=1000).parameters())
    assert count == {"resnet18": 11_689_512, "resnet50": 25_557_032}.get(name, count)
    step = make_step(name, channels=3, num_classes=4)
    net = step._net  # type: ignore[attr-defined]
    before = [p.detach().clone() for p in net.parameters()]
    step.begin()
    step((torch.randint(0, 256, (2, 3, 40, 36), dtype=torch.uint8), torch.tensor([0, 3])))
    step.finish()
    assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert step.utilization is None


@pytest.mark.parametrize(
    "labels", [None, torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8), torch.tensor([-1, 99]), torch.rand(2)]
)
def test_whatever_labels_a_file_has_can_be_trained_on(labels):
    step = make_step("tiny", channels=1, num_classes=2)
    images = torch.zeros(2, 1, 9, 9, dtype=torch.uint8)
    step((images,) if labels is None else (images, labels))  # raises nothing, also where it has to make labels up


def test_sixteen_bits_are_scaled_by_their_own_top():
    step = make_step("tiny", channels=1, num_classes=2)
    seen = []
    step._net.register_forward_pre_hook(lambda net, given: seen.append(given[0].max().item()))  # type: ignore[attr-defined]
    step((torch.full((2, 1, 9, 9), 65535, dtype=torch.uint16),))
    step((torch.full((2, 1, 9, 9), 255, dtype=torch.uint8),))
    assert seen == [1.0, 1.0]


def test_making_a_network_leaves_the_random_numbers_of_the_caller_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    make_step("tiny")
    assert torch.equal(torch.rand(1), expected)
