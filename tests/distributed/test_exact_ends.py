"""Ranks of a real process group against one process: metrics, gradients, steps, and checkpoints that change worlds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from three_ranks import EVALUATED, SPLITS, TRAINED, descend, losses_of, make_loader, make_model, metric_of, write_file

SCRIPT = Path(__file__).with_name("three_ranks.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    write_file(folder / "sizes.h5")
    return folder


@pytest.fixture(scope="module")
def ranks(warm_python, folder) -> list[dict]:
    """What each of three processes reports; see three_ranks.py."""
    warm_python.finish(SCRIPT, folder, cwd=folder)
    return [torch.load(folder / f"result.{rank}.pt", weights_only=True) for rank in range(3)]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(("split", "batch_size"), EVALUATED)
def test_exact_ends_give_the_metric_of_one_process(folder, ranks, split, batch_size, world_size):
    alone, _, _ = metric_of(make_loader(folder, split, batch_size, shuffle=False))
    for rank in range(world_size):
        found = ranks[rank][f"evaluated on {world_size}"][split, batch_size]
        correct, counted, margins, entropies = found["sums"].tolist()
        assert counted == alone[1].item() == SPLITS[split]
        # Sums of whole numbers in float64: equal to the last bit, and so are accuracy and mean.
        assert correct / counted == (alone[0] / alone[1]).item()
        assert margins / counted == (alone[2] / alone[1]).item()
        assert entropies / counted == pytest.approx((alone[3] / alone[1]).item(), rel=1e-13)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_loop_that_does_not_know_valid_counts_at_most_a_row_a_rank_too_many(ranks, world_size):
    for split, batch_size in EVALUATED:
        found = [ranks[rank][f"evaluated on {world_size}"][split, batch_size] for rank in range(world_size)]
        assert len({of_rank["steps"] for of_rank in found}) == 1
        taken = sum(of_rank["without_valid"] for of_rank in found)
        assert SPLITS[split] <= taken < SPLITS[split] + world_size


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("case", range(len(TRAINED)))
def test_the_loss_with_global_valid_has_the_gradient_of_the_whole_batch(folder, ranks, case, world_size):
    split, batch_size, shuffle = TRAINED[case]
    [(images, labels)] = make_loader(folder, "all", sum(SPLITS.values()), shuffle=False)
    trained = [ranks[rank][f"trained on {world_size}"][split, batch_size, str(shuffle)] for rank in range(world_size)]
    assert len({len(steps) for steps in trained}) == 1 and trained[0]
    model, seen = make_model(), []
    for step in zip(*trained, strict=True):
        rows = torch.cat([of_rank["rows"][of_rank["valid"]] for of_rank in step])
        assert {of_rank["global_valid"] for of_rank in step} == {len(rows)}
        seen += rows.tolist()
        losses_of(model, images[rows], labels[rows]).mean().backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert gradient.abs().max() > 1e-3
        for of_rank in step:
            torch.testing.assert_close(of_rank["gradient"], gradient, rtol=1e-10, atol=1e-13)
        descend(model)
    assert len(seen) == len(set(seen)) == SPLITS[split]


def test_the_cases_hold_the_ends_they_are_meant_to_hold(ranks):
    kinds = set()
    for world_size in (2, 3):
        trained = [ranks[rank][f"trained on {world_size}"] for rank in range(world_size)]
        for steps in (steps for of_rank in trained for steps in of_rank.values()):
            counts = [int(step["valid"].sum()) for step in steps]
            kinds.add("short" if 0 < counts[-1] < counts[0] else "whole" if counts[-1] else "none")
            if not any(counts):
                kinds.add(f"nothing at all on {world_size}")
    assert kinds == {"short", "whole", "none", "nothing at all on 2", "nothing at all on 3"}


@pytest.mark.parametrize("whole", [False, True])
def test_a_checkpoint_goes_from_2_ranks_to_3_and_back_and_every_row_counts_once(ranks, whole):
    parts = {
        "first": [ranks[rank][f"first {whole}"] for rank in range(2)],
        "second": [ranks[rank][f"second {whole}"] for rank in range(3)],
        "third": [ranks[rank][f"third {whole}"] for rank in range(2)],
    }
    rows = [row for part in parts.values() for of_rank in part for row in of_rank["rows"]]
    assert sorted(rows) == list(range(sum(SPLITS.values())))
    for name, part in parts.items():
        assert len({of_rank["steps"] for of_rank in part}) == 1 and part[0]["steps"] >= 2, name
        assert all(of_rank["state"] == part[0]["state"] for of_rank in part), name
        # What was done before is not read again.
        assert [of_rank["fresh"] for of_rank in part] == [len(of_rank["rows"]) for of_rank in part], name
    segments = parts["third"][0]["state"]["segments"]
    assert segments == [[2, 4, 3], [3, 3, 2], [2, 4, parts["third"][0]["steps"]]]
