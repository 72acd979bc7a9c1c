"""tools/train.py on 1, 2 and 3 ranks against plain loops in one process: losses, batch norms, resumed runs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from strategies import (
    CURVES,
    HELD_OUT,
    RESUMED,
    UNEVEN,
    Replicas,
    Run,
    counts_and_answers,
    flat,
    in_default_dtype,
    models,
    norm_and_batches,
    normalize,
    train,
)
from torch import nn
from warm_python import WarmPython

from fastload import FastLoader, PackedDataset

HERE = Path(__file__).resolve().parent
LIMIT_S = 600
LOSS_BOUND = 1e-5
"""Relative error of losses and gradients: the networks compute in float64, but the losses (sums over some ten samples,
and the gradients of the answers) in float32, whose rounding is 6e-8. A row or a factor that is wrong makes over 1e-3.
"""
WORLDS = [pytest.param(run, world, id=f"{run.name}-{world}") for run in CURVES for world in run.worlds]


@pytest.fixture(scope="module")
def folder(warm_python: WarmPython, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where strategies.py has put its files and reports."""
    folder = tmp_path_factory.mktemp("strategies")
    warm_python.finish(HERE / "strategies.py", folder, cwd=folder)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield folder
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reports(folder: Path) -> list[dict]:
    """What each rank saw, by run and world."""
    return [torch.load(folder / f"report.{rank}.pt", weights_only=True) for rank in range(3)]


def of_ranks(reports: list[dict], name: str, world: int) -> list[dict]:
    """Its ranks' reports of a run; what is one process ran on the third."""
    return [report[f"{name}-{world}"] for report in (reports[2:] if world < 2 else reports[:world])]


def logged(folder: Path, name: str, world: int) -> list[dict]:
    return [json.loads(line) for line in (folder / f"{name}-{world}.jsonl").read_text().splitlines()]


@pytest.fixture
def float64() -> Iterator[None]:
    """New networks are of float64 for as long as a test runs, as those of `CURVES` were."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class Step:
    """A step of the optimizer: loss, gradients, and the weights after it."""

    line: dict[str, float]
    samples: int
    gradients: torch.Tensor
    weights: torch.Tensor


def fed_with_all(run: Run, world: int, folder: Path, again: Path, of_rank: dict) -> Iterator[Step]:
    """One process whose batches are those of all ranks, one after the other.

    Each step begins with the weights that the run had there, and its optimizer is given the gradients that the run's
    was given: what differs in one step is not carried into the next.
    """
    options = run.options(again, world)
    dataset = PackedDataset(folder / run.file)
    task = train.task_of(dataset, options)
    loaders = [
        FastLoader(
            PackedDataset(folder / run.file, "train", task.fields), options.batch_size, ends=options.ends, seed=0,
            workers=1, transform=task.transforms, echo=options.echo, share=(rank, max(1, world)),
        )
        for rank in range(max(1, world))
    ]  # fmt: skip
    torch.manual_seed(0)
    network = task.network(4)
    parameters = list(network.parameters())
    assert torch.equal(flat(parameters), of_rank["weights"][0])
    sizes = [p.numel() for p in parameters]
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.02)
    num_batches = len(loaders[0])
    steps = 2 * math.ceil(num_batches / options.accumulate)
    step = 0
    for epoch in range(2):
        for loader in loaders:
            loader.set_epoch(epoch)
        united = [
            [torch.cat(parts) for parts in zip(*((*batch, batch.valid) for batch in batches), strict=True)]
            for batches in zip(*loaders, strict=True)
        ]
        for first in range(0, num_batches, options.accumulate):
            with torch.no_grad():
                for p, values in zip(parameters, of_rank["weights"][step].split(sizes), strict=True):
                    p.copy_(values.view_as(p))
            batches = united[first : first + options.accumulate]
            samples = sum(int(valid.sum()) for *_, valid in batches)
            loss = 0.0
            optimizer.zero_grad()
            for *values, valid in batches:
                fields = dict(zip(task.fields, map(in_default_dtype, values), strict=True))
                losses = task.losses(task.answers(network, fields), fields)[valid]
                (losses.sum() / samples).backward()
                loss += float(losses.detach().sum()) / samples
            gradients = flat(p.grad for p in parameters)
            lr = 0.01 * (step + 1) / 2 if step < 2 else 0.005 * (1 + math.cos(math.pi * (step - 2) / (steps - 2)))
            optimizer.param_groups[0]["lr"] = lr
            for p, values in zip(parameters, of_rank["gradients"][step].split(sizes), strict=True):
                p.grad = values.view_as(p)
            optimizer.step()
            step += 1
            yield Step({"step": step, "epoch": epoch, "lr": lr, "loss": loss}, samples, gradients, flat(parameters))


@pytest.mark.parametrize(("run", "world"), WORLDS)
@pytest.mark.usefixtures("float64")
def test_every_strategy_has_the_losses_and_gradients_of_one_process_that_is_fed_with_all_rows(
    folder, reports, tmp_path, run, world
):
    of_rank = of_ranks(reports, run.name, world)[0]
    expected = list(fed_with_all(run, world, folder, tmp_path, of_rank))
    found = logged(folder, run.name, world)
    assert [(line["step"], line["epoch"]) for line in found] == [(s.line["step"], s.line["epoch"]) for s in expected]
    for name in ("lr", "loss"):
        assert [line[name] for line in found] == pytest.approx([s.line[name] for s in expected], rel=LOSS_BOUND)
    for step, gradients in zip(expected, of_rank["gradients"], strict=True):
        assert float((gradients - step.gradients).norm() / step.gradients.norm()) < LOSS_BOUND
    for step, weights in zip(expected, [*of_rank["weights"][1:], of_rank["parameters"]], strict=True):
        torch.testing.assert_close(step.weights, weights, rtol=1e-9, atol=1e-9)
    # All steps but those at an end are of one size, and the losses move.
    assert len({step.samples for step in expected}) > 1
    losses = [step.line["loss"] for step in expected]
    assert max(losses) > 1.01 * min(losses)


@pytest.mark.parametrize(
    ("run", "world"), [(run, world) for run in (*CURVES, UNEVEN) for world in run.worlds if world > 1]
)
def test_all_ranks_end_with_the_same_network(reports, run, world):
    first, *others = of_ranks(reports, run.name, world)
    assert len(first["parameters"]) > 100 and bool(first["parameters"].isfinite().all())
    assert all(torch.equal(other["parameters"], first["parameters"]) for other in others)
    for other in others:
        assert all(map(torch.equal, other["gradients"], first["gradients"]))


@pytest.mark.parametrize(("run", "world"), WORLDS)
@pytest.mark.usefixtures("float64")
def test_ranks_together_count_each_held_out_row_once_by_the_batch_norms_of_rank_0(
    folder, reports, tmp_path, run, world
):
    options = run.options(tmp_path, world)
    assert HELD_OUT % (options.batch_size * max(1, world)), "no row is padded"
    of_run = of_ranks(reports, run.name, world)
    task = train.task_of(PackedDataset(folder / run.file), options)
    network = task.network(4).eval()
    rows = PackedDataset(folder / run.file, "val", task.fields)
    [batch] = FastLoader(rows, HELD_OUT, shuffle=False, workers=1, share=None, transform=task.steady)
    fields = dict(zip(task.fields, map(in_default_dtype, batch), strict=True))
    every = torch.ones(HELD_OUT, dtype=torch.bool)
    for epoch, (state, _) in enumerate(of_run[0]["evaluated"]):
        network.load_state_dict(state)
        with torch.no_grad():
            answers = task.answers(network, fields)
        *counts, squares = counts_and_answers(type(task).counts, task, answers, fields, every).tolist()
        for of_rank in of_run:
            *found, squares_found = of_rank["evaluated"][epoch][1].tolist()
            assert found == counts and squares_found == pytest.approx(squares, rel=1e-4)
    assert epoch == 1


@pytest.mark.parametrize(("run", "world"), [(run, world) for run in CURVES if run.counted for world in run.worlds])
def test_gradients_are_reduced_once_a_step_in_buckets_of_the_size_that_is_asked_for(tmp_path, reports, run, world):
    options = run.options(tmp_path, world)
    for of_rank in of_ranks(reports, run.name, world):
        of_epoch, buckets = len(of_rank["reduced"]) // 2, max(of_rank["reduced"])
        assert (buckets > 2) if options.bucket_cap_mb else (buckets == 1)
        for epoch in (0, 1):
            reduced = of_rank["reduced"][epoch * of_epoch : (epoch + 1) * of_epoch]
            places = [place for place, found in enumerate(reduced, 1) if found]
            every = [*range(options.accumulate, of_epoch, options.accumulate), of_epoch]
            # The first batch of an epoch, too, where the graph is static.
            assert places == [1] * options.static_graph + every and len(every) < of_epoch


def test_options_that_leave_the_losses_as_they_are_reach_what_they_are_for(tmp_path, reports):
    seen = set()
    for run in CURVES:
        for world in run.worlds:
            options = run.options(tmp_path, world)
            memory = "channels_last" if options.channels_last else "contiguous"
            for of_rank in of_ranks(reports, run.name, world):
                assert of_rank["fused"] == [options.optimizer_fused or None]
                assert of_rank.get("static", False) == options.static_graph
                assert of_rank["formats"] == of_rank["images"] == (set() if options.task == "text" else {memory})
            seen |= {options.optimizer_fused, memory, f"static {options.static_graph}"}
    assert seen == {True, False, "channels_last", "contiguous", "static True", "static False"}


@pytest.mark.parametrize("world", UNEVEN.worlds)
def test_ranks_leave_out_other_layers(reports, world):
    used = [of_rank["layers"] for of_rank in of_ranks(reports, UNEVEN.name, world)]
    assert {layer for of_rank in used for layers in of_rank for layer in layers} == {0, 1, 2}
    assert all(used[a] != used[b] for a in range(world) for b in range(a))


@pytest.mark.parametrize("runs", [RESUMED[i : i + 3] for i in range(0, len(RESUMED), 3)], ids=lambda runs: runs[1].name)
def test_a_resumed_run_has_exactly_the_losses_of_an_unbroken_one(folder, reports, runs):
    [world] = runs[0].worlds
    lines = logged(folder, runs[0].name, world)
    # Each step once, also where the dead run had logged more than its checkpoint holds.
    assert logged(folder, runs[1].name, world) == lines
    for unbroken, killed, rest in zip(*(of_ranks(reports, run.name, world) for run in runs), strict=True):
        done = unbroken["steps"] - rest["steps"]
        assert 0 < done < killed["steps"] < unbroken["steps"] == len(lines)
        assert killed["lines"] > done or "fp16" in runs[0].words
        # What the checkpoint holds is not trained with again, and nothing is left out.
        assert rest["rows"] == unbroken["rows"][-len(rest["rows"]) :]
        assert torch.equal(rest["parameters"], unbroken["parameters"])
        if "fp16" in runs[0].words:
            assert 0 < len(unbroken["gradients"]) < unbroken["steps"], "no step overflowed"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("world", [2, 3])
def test_batch_norm_over_ranks_is_batch_norm_of_the_whole_batch(reports, world, dtype):
    network, inputs, directions = norm_and_batches(world)
    whole = normalize(network, map(torch.cat, inputs), map(torch.cat, directions), dtype)
    found = [report[f"norm-{world}-{dtype}"] for report in reports[:world]]
    near = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 0.02, "atol": 0.05}
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        for of_rank in found:
            torch.testing.assert_close(of_rank[name], whole[name], rtol=1e-5, atol=1e-5)
    for name in ("weight gradient", "bias gradient"):
        torch.testing.assert_close(sum(of_rank[name] for of_rank in found), whole[name], **near)
    for name in ("gradient", "output", "evaluated"):
        assert {of_rank[name].dtype for of_rank in found} == {dtype}
        torch.testing.assert_close(torch.cat([of_rank[name] for of_rank in found], dim=1), whole[name], **near)


def test_dp_gathers_answers_and_dp_loss_a_number_a_replica(reports):
    # The last batch: 2 samples of 3 classes, a part each.
    gathered = {run.name: of_ranks(reports, run.name, run.worlds[0])[0]["gathered"] for run in CURVES}
    assert gathered.pop("alone-dp") == [2 * 3] and gathered.pop("alone-dp-loss") == [2]
    assert all(found == [] for found in gathered.values())


def test_a_synced_batch_norm_has_the_state_of_torchs(folder):
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ModuleList([nn.BatchNorm2d(4, momentum=0.2)]))
    nn.init.normal_(network[1][0].running_mean)
    before = {name: values.clone() for name, values in network.state_dict().items()}
    synced = models.sync_batch_norm(network, torch.device("cpu"))
    assert isinstance(synced[1][0], models.CpuSyncBatchNorm) and synced[1][0].momentum == 0.2
    assert synced.state_dict().keys() == before.keys()
    assert all(torch.equal(values, before[name]) for name, values in synced.state_dict().items())
    nn.BatchNorm2d(4).load_state_dict(synced[1][0].state_dict())
    synced[1][0].load_state_dict(nn.BatchNorm2d(4).state_dict())


class Sides(nn.Module):
    """Two linear layers; remembers in which dtypes it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
        self.dtypes: set[torch.dtype] = set()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        answers = self.layers(values)
        self.dtypes.add(answers.dtype)
        return answers


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, None])
def test_replicas_compute_in_the_dtype_that_is_asked_for(dtype):
    network = Sides()
    values = torch.randn(4, 6)
    Replicas(models.InPrecision(network, "cpu", dtype), parts=2)(values)
    with torch.autocast("cpu", torch.float16):
        models.InPrecision(network, "cpu", dtype)(values)
    assert network.dtypes == {dtype or torch.float32}
    # Why it stands inside: what is entered around the threads is not theirs.
    with torch.autocast("cpu", torch.float16):
        Replicas(network, parts=2)(values)
    assert torch.float32 in network.dtypes


def test_what_ranks_refuse_is_said_without_a_traceback(folder):
    assert (folder / "codes.txt").read_text() == "0 0 0 1"
    said = (folder / "refused.txt").read_text()
    assert "error: " in said and "damaged.h5: truncated" in said and "Traceback" not in said
