from __future__ import annotations

import pytest
import torch

from fastload import OptionError
from fastload.profiling.bench.training_loop import NETWORKS, StepChoice, make_step, network, parse_step


def test_a_step_is_parsed_and_says_itself_and_what_is_none_is_refused_with_a_list_of_those_there_are():
    choices = {
        "tiny": StepChoice("tiny"), " resnet50 ": StepChoice("resnet50"), "sim:20000": StepChoice("sim", 20000.0),
        "sim:0.8x": StepChoice("sim", 0.8, relative=True),
    }  # fmt: skip
    for text, choice in choices.items():
        assert parse_step(text) == parse_step(str(choice)) == choice
    for text in ("", "resnet", "sim", "sim:", "sim:fast", "sim:0", "sim:-3", "sim:nan", "sim:inf", "sim:x", "tiny:3"):
        with pytest.raises(OptionError, match="choose resnet18, resnet50, tiny, sim:RATE"):
            parse_step(text)
    with pytest.raises(OptionError, match="was not measured"):
        make_step("sim:0.5x")
    assert make_step("sim:0.5x", loader_samples_per_s=3000.0).name == "simulated accelerator, 1,500 images/s"


@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_has_the_published_size_and_learns_from_a_batch(name):
    count = sum(p.numel() for p in network(name, channels=3, num_classes=1000).parameters())
    assert count == {"resnet18": 11_689_512, "resnet50": 25_557_032}.get(name, count)
    step = make_step(name, channels=3, num_classes=4)
    net = step._net
    before = [p.detach().clone() for p in net.parameters()]
    step.begin()
    step((torch.randint(0, 256, (2, 3, 40, 36), dtype=torch.uint8), torch.tensor([0, 3])))
    step.finish()
    assert any(not torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert step.utilization is None


def test_whatever_labels_a_file_has_can_be_trained_on_and_sixteen_bits_are_scaled_by_their_own_top():
    step, seen = make_step("tiny", channels=1, num_classes=2), []
    step._net.register_forward_pre_hook(lambda net, given: seen.append(given[0].max().item()))
    step((torch.full((2, 1, 9, 9), 65535, dtype=torch.uint16),))
    images = torch.full((2, 1, 9, 9), 255, dtype=torch.uint8)
    for labels in (torch.tensor([[0, 1], [1, 0]], dtype=torch.uint8), torch.tensor([-1, 99]), torch.rand(2)):
        step((images, labels))  # raises nothing
    assert seen == [1.0] * 4


def test_making_a_network_leaves_the_random_numbers_of_the_caller_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    make_step("tiny")
    assert torch.equal(torch.rand(1), expected)
