"""The scripts for people, run as people run them."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from warm_python import WarmPython

import fastload
import make_reviews as reviews
import run_files
import tasks
import train
from fastload import pack_images
from fastload.format.ragged import Column
from sample_files import write_packed

ROOT = Path(__file__).resolve().parents[2]


class Run(Protocol):
    """What a script prints that ends well."""

    def __call__(self, *words: object, cwd: Path) -> str: ...


@pytest.fixture(scope="module")
def run(warm_python: WarmPython) -> Run:
    def run(*words: object, cwd: Path) -> str:
        done = warm_python.run(Path(__file__).with_name("in_forks.py"), *words, cwd=cwd)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def faces(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools") / "faces"
    run(ROOT / "tools/make_faces.py", folder, "--count", 160, cwd=folder.parent)
    return folder


@pytest.fixture(scope="module")
def packed_faces(faces: Path) -> Path:
    return pack_images(faces, faces.parent / "faces.h5", size=(54, 44), workers=1).path


@pytest.fixture(scope="module")
def packed_classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes that anything can tell apart, 80 images of 32x32 each, no splits."""
    labels = np.arange(160) % 2
    levels = np.array([60, 190])[labels].reshape(-1, 1, 1, 1)
    pixels = np.clip(np.random.default_rng(0).normal(levels, 40, (160, 32, 32, 3)), 0, 255).astype(np.uint8)
    columns = {"labels": Column(labels, {"names": ("dark", "light")})}
    return write_packed(tmp_path_factory.mktemp("classes") / "photos.h5", pixels, columns)


def test_faces_are_in_the_official_layout_the_same_for_a_seed_and_a_complete_folder_is_kept(run, faces, tmp_path):
    lines = (faces / "list_attr_celeba.txt").read_text().splitlines()
    assert lines[0] == "160"
    assert lines[1].endswith("Young ") and len(lines[1].split()) == 40
    values = np.array([line.split()[1:] for line in lines[2:]], dtype=int)
    assert values.shape == (160, 40) and set(np.unique(values)) == {-1, 1}
    with Image.open(faces / "img_align_celeba" / "000160.jpg") as image:
        assert image.size == (178, 218)
    partition = (faces / "list_eval_partition.txt").read_text().split()[1::2]
    assert [partition.count(part) for part in "012"] == [128, 16, 16]
    run(ROOT / "tools/make_faces.py", tmp_path / "again", "--count", 160, "--workers", 1, cwd=tmp_path)
    for name in ("img_align_celeba/000007.jpg", "list_attr_celeba.txt", "identity_CelebA.txt"):
        assert (tmp_path / "again" / name).read_bytes() == (faces / name).read_bytes()
    assert "there already" in run(ROOT / "tools/make_faces.py", faces, "--count", 160, cwd=tmp_path)


def accuracies(said: str) -> list[tuple[float, float]]:
    found = re.findall(r"accuracy ([\d.]+)% \(commonest answer: ([\d.]+)%\)", said)
    return [(float(accuracy), float(baseline)) for accuracy, baseline in found]


@pytest.fixture
def trained(no_launcher: None, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """Runs tools/train.py in this process, as nobody's rank and with one thread, and tells what it says."""

    def run(*words: object) -> str:
        train.run(train.parse_options([*map(str, words), "--device", "cpu"]))
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield run
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_training_learns_classes_on_two_ranks_that_it_starts(run, packed_classes, tmp_path):
    words = [packed_classes, "--spawn", 2, "--device", "cpu", "--ends", "exact"]
    sizes = ["--epochs", 2, "--batch-size", 8, "--width", 8]
    said = run(ROOT / "tools/train.py", *words, *sizes, cwd=tmp_path)
    assert "2 process(es) on cpu, parallel ddp" in said
    assert len(accuracies(said)) == 2 and accuracies(said)[-1][0] > accuracies(said)[-1][1] + 20


@pytest.mark.slow
def test_what_two_ranks_of_torchrun_began_one_process_ends(run, packed_classes, tmp_path, trained):
    launcher = [Path(__file__).with_name("elastic.py")]
    words = [packed_classes, "--batch-size", 8, "--width", 8, "--checkpoint", tmp_path / "run.pt"]
    kept = [*words, "--loss-log", tmp_path / "run.jsonl"]
    said = run(*launcher, ROOT / "tools/train.py", *kept, "--device", "cpu", "--max-steps", 13, cwd=tmp_path)
    assert "2 process(es) on cpu, parallel ddp" in said and "stopped after step 13" in said
    said = trained(*kept, "--resume")
    assert "1 process(es) on cpu, parallel none, precision fp32; from step 13" in said and "epoch 2/2" in said
    steps = [json.loads(line)["step"] for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    # 144 rows: 9 steps of two ranks, 4 more in the second epoch, then what is left of it for one.
    assert steps == list(range(1, 13 + (144 - 4 * 16) // 8 + 1))
    assert torch.load(tmp_path / "run.pt", weights_only=True)["step"] == steps[-1]
    with pytest.raises(SystemExit, match="the checkpoint is of another network"):
        trained(*words, "--resume", "--width", 4)


@pytest.mark.slow
def test_training_learns_attributes(packed_faces, trained):
    words = ["--epochs", 3, "--batch-size", 16, "--width", 8, "--echo", 2, "--task", "attributes"]
    said = trained(packed_faces, *words, "--precision", "bf16")
    assert len(accuracies(said)) == 3
    assert "with echoes" in said


@pytest.mark.slow
def test_training_starts_compiled_fused_and_in_lower_precision(tmp_path, trained, monkeypatch):
    calls = []

    def counting(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        return lambda *values: calls.append(graph) or graph(*values)

    torch._dynamo.register_backend(counting, name="counting")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    labels = Column(np.arange(24) % 2, {"names": ("a", "b")})
    path = write_packed(tmp_path / "a.h5", np.zeros((24, 8, 8, 3), np.uint8), {"labels": labels})
    words = "--compile counting --precision bf16 --optimizer-fused --no-channels-last --accumulate 2 --cudnn-benchmark"
    said = trained(path, *words.split(), "--epochs", 1, "--batch-size", 4, "--width", 2, "--loss-log", tmp_path / "log")
    assert "precision bf16" in said
    assert len((tmp_path / "log").read_text().splitlines()) == 3
    # 5 batches of training and one of evaluation, of one graph each.
    assert len(calls) == 5 + 1 and torch.backends.cudnn.benchmark


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--static-graph", "--static-graph is for --parallel ddp, not none"),
        ("--parallel dp --sync-bn", "--sync-bn is for --parallel ddp, not dp"),
        ("--parallel none --spawn 2", "--spawn is for --parallel ddp, not none"),
        ("--spawn 2 --static-graph --find-unused-parameters", "leave out --find-unused-parameters"),
        ("--spawn 2 --output-device 1", "--output-device is for --parallel dp and dp-loss, not ddp"),
        ("--parallel dp-loss --compile", "--compile does not work with nn.DataParallel"),
        ("--accumulate 0", "--accumulate: must be at least 1"),
        ("--max-steps -1", "--max-steps: must be at least 1"),
        ("--resume", "--resume needs --checkpoint FILE"),
        ("--checkpoint nowhere/run.pt", "nowhere/run.pt: its folder does not exist"),
        ("--picture nowhere/sheet.png", "nowhere/sheet.png: its folder does not exist"),
        ("--checkpoint there", "there exists. Give another name"),
        ("--loss-log there", "there exists. Give another name"),
        ("--picture a.h5", "--picture a.h5: give a name that ends in .png"),
        ("--checkpoint a.h5", "--checkpoint a.h5: give each file a name of its own"),
        ("--lr nan", "--lr: must be at least"),
        ("--layer-drop 1", "--layer-drop: must be at least 0.0, below 1.0"),
        ("--parallel ddp --static-graph --layer-drop 0.5", "not with --static-graph"),
    ],
)
def test_options_that_do_not_go_together_are_refused(no_launcher, tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").touch()
    with pytest.raises(SystemExit, match="2"):
        train.parse_options(["a.h5", *words.split()])
    assert said in capsys.readouterr().err


def test_one_process_is_refused_where_torchrun_starts_two(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["train.py", "a.h5", "--parallel", "dp"])
    with pytest.raises(SystemExit, match="2"):
        train.parse_options()
    assert "--parallel dp is one process, and 2 were started" in capsys.readouterr().err


def blobs(path: Path, count: int = 48) -> Path:
    """Bright squares on dark noise; the mask has them as 2, the rest as 1, and 0 (ignored) around the edge."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 90, (count, 36, 44, 3)).astype(np.uint8)
    masks = np.ones((count, 36, 44), np.uint8)
    for image, mask, (top, left) in zip(images, masks, rng.integers(4, 18, (count, 2)).tolist(), strict=True):
        image[top : top + 14, left : left + 14] += 120
        mask[top : top + 14, left : left + 14] = 2
    masks[:, [0, -1]] = masks[:, :, [0, -1]] = 0
    return write_packed(path, images, masks=masks, ignore_index=0, splits={"train": count - 12, "val": 12})


@pytest.mark.slow
def test_training_segments_and_shows_what_it_answers(tmp_path, trained):
    words = ["--epochs", 4, "--width", 8, "--batch-size", 6, "--picture", tmp_path / "sheet.png"]
    said = trained(blobs(tmp_path / "blobs.h5"), *words)
    assert "to learn 2 classes of pixels from, 12 held out" in said
    mean, trivial = re.findall(r"mean IoU ([\d.]+)% \(commonest class everywhere: ([\d.]+)%\)", said)[-1]
    assert float(mean) > float(trivial) + 20 and float(trivial) < 50
    assert re.search(r"class 2 +[\d.]+% +[\d.]+%", said) and "class 0" not in said
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (3 * 44, 6 * 36)
        pixels = np.asarray(sheet)
    truth, answer = pixels[:, 44:88], pixels[:, 88:]
    assert len(np.unique(truth.reshape(-1, 3), axis=0)) == 3 and not truth[0].any()
    assert len(np.unique(answer.reshape(-1, 3), axis=0)) == 2


def test_masks_with_more_classes_than_the_file_names_are_refused(tmp_path):
    images, masks = np.zeros((4, 8, 8, 3), np.uint8), np.zeros((4, 8, 8), np.uint8)
    masks[1, 0, 0] = 2
    path = write_packed(tmp_path / "a.h5", images, masks=masks)
    assert tasks.Segmentation(fastload.PackedDataset(path)).names == ("class 0", "class 1", "class 2")
    with h5py.File(path, "a") as file:
        for name in [name for name in file.attrs if name.startswith("fastload")]:
            del file.attrs[name]
        file["masks"].attrs["names"] = ["sky", "tree"]
    with pytest.raises(SystemExit, match="masks hold class 2, and the file names 2 classes"):
        tasks.Segmentation(fastload.PackedDataset(path))


def test_pixels_that_are_ignored_have_no_loss(tmp_path):
    task = tasks.Segmentation(fastload.PackedDataset(blobs(tmp_path / "blobs.h5", 14)))
    batch = {"masks": torch.tensor([[[0, 1, 1, 2]], [[0, 2, 2, 2]]], dtype=torch.uint8)}
    answers = torch.zeros(2, 3, 1, 4)
    answers[:, 1] = 5.0
    losses = task.losses(answers, batch)
    assert losses.shape == (2,)
    answers[:, :, 0, 0] = torch.tensor([50.0, -50.0, 7.0])
    assert torch.equal(task.losses(answers, batch), losses)


@given(
    classes=st.integers(2, 4),
    ignored=st.sampled_from([None, 0, 1, 255]),
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    seed=st.integers(0, 2**32),
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_mean_iou_is_that_of_sets_of_pixels(tmp_path, classes, ignored, counts, shape, seed):
    values = [*range(classes), *([] if ignored is None else [ignored])]
    path = tmp_path / f"{classes}-{ignored}.h5"
    if not path.exists():
        masks = np.resize(values, (4, 6, 6)).astype(np.uint8)
        write_packed(path, np.zeros((4, 6, 6, 3), np.uint8), masks=masks, ignore_index=ignored)
    task = tasks.Segmentation(fastload.PackedDataset(path))
    number, rng = len(task.names), np.random.default_rng(seed)
    summed, seen = torch.zeros(number * number, dtype=torch.float64), []
    for count in counts:
        truth, answer = rng.choice(values, (count, *shape)), rng.integers(0, number, (count, *shape))
        valid = rng.random(count) < 0.7
        logits = torch.from_numpy(rng.random((count, number, *shape)))
        logits.scatter_(1, torch.from_numpy(answer)[:, None], 2.0)
        batch = {"masks": torch.from_numpy(truth.astype(np.uint8))}
        summed += task.counts(logits, batch, torch.from_numpy(valid))
        seen.append((truth[valid].ravel(), answer[valid].ravel()))
    truth, answer = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    truth, answer = truth[truth != ignored], answer[truth != ignored]

    def mean_iou(answer: np.ndarray) -> float:
        of_each = [((truth == c) & (answer == c)).sum() / ((truth == c) | (answer == c)).sum() for c in set(truth)]
        return 100 * float(np.mean(of_each))

    said = task.score(summed)
    if not len(truth):
        assert said == "no mean IoU: not one pixel of the held-out masks counts"
        return
    commonest = np.full_like(truth, np.bincount(truth).argmax())
    found = re.fullmatch(r"mean IoU (.+)% \(commonest class everywhere: (.+)%\), (.+)% of pixels right", said)
    expected = (mean_iou(answer), mean_iou(commonest), 100 * float(np.mean(truth == answer)))
    # Tenths of a percent are said.
    assert [float(number) for number in found.groups()] == pytest.approx(expected, abs=0.0501)


@pytest.mark.slow
def test_training_reads_texts(run, tmp_path, trained):
    said = run(ROOT / "tools/make_reviews.py", tmp_path / "reviews.npz", "--count", 300, cwd=tmp_path)
    assert "300 reviews" in said and "50 of them test" in said
    packed = pack_images(tmp_path / "reviews.npz", tmp_path / "reviews.h5").path
    words = ["--layers", 1, "--epochs", 2, "--batch-size", 32, "--width", 16]
    said = trained(packed, *words)
    assert "250 texts of" in said and "50 held out" in said
    assert len(accuracies(said)) == 2


def test_what_is_no_checkpoint_is_refused_and_what_cannot_be_written_leaves_what_was_there(tmp_path):
    path = tmp_path / "old.pt"
    path.write_text("x")
    with pytest.raises(SystemExit, match="damaged, or no checkpoint"):
        train.load_checkpoint(path)
    torch.save({"model": {}}, path)
    with pytest.raises(SystemExit, match="it lacks optimizer, scaler"):
        train.load_checkpoint(path)
    (tmp_path / "run.pt").mkdir()
    with pytest.raises(SystemExit, match=r"run\.pt: the checkpoint could not be written; the one before it is kept"):
        run_files.save_checkpoint(tmp_path / "run.pt", {"step": 1})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.pt", "run.pt"]
    for text in ("a thesis\n", '{"epoch": 1}\n', "[]\n"):
        (tmp_path / "log").write_text(text)
        with pytest.raises(SystemExit, match="log: is no loss log of this script"):
            run_files.begin_log(tmp_path / "log", 3)
        assert (tmp_path / "log").read_text() == text
    for name in ("sheet.png", "sheet-2.png", "sheet-3.png"):
        assert run_files.free_name(tmp_path / "sheet.png") == tmp_path / name
        (tmp_path / name).touch()


def test_a_file_without_what_a_task_needs_is_refused(tmp_path):
    dataset = fastload.PackedDataset(blobs(tmp_path / "blobs.h5", 14))
    for task, missing in (("text", "tokens or input_ids"), ("classify", "labels")):
        with pytest.raises(SystemExit, match=f"has no {missing}: there is nothing to learn from it"):
            tasks.task_of(dataset, argparse.Namespace(task=task, layers=1, size=32, dropout=0.1, layer_drop=0.0))
    np.savez(tmp_path / "a.npz", tokens=np.arange(-2, 22).reshape(6, 4), labels=np.arange(6) % 2)
    path = pack_images(tmp_path / "a.npz", tmp_path / "a.h5").path
    with pytest.raises(SystemExit, match="tokens holds -2: numbers from 0 on are wanted"):
        tasks.TextLabels(fastload.PackedDataset(path), 1)
    labels = Column(np.array([2_000_000_000, 1], np.int64))
    path = write_packed(tmp_path / "ids.h5", np.zeros((2, 4, 4, 3), np.uint8), {"labels": labels})
    with pytest.raises(SystemExit, match="labels go up to 2,000,000,000, for 2 rows: that is no class"):
        tasks.ImageLabels(fastload.PackedDataset(path))
    labels = Column(np.r_[np.arange(6) % 2, -np.ones(2, int)], {"names": ("a", "b")})
    path = write_packed(tmp_path / "b.h5", np.zeros((8, 4, 4, 3), np.uint8), {"labels": labels})
    task = tasks.ImageLabels(fastload.PackedDataset(path))
    counts = task.counts(torch.zeros(2, 2), {"labels": torch.tensor([-1, -1])}, torch.tensor([True, True]))
    assert task.score(counts) == "no accuracy: not one held-out row has a label"


def test_padding_says_nothing():
    network = tasks.SmallTransformer(words=20, outputs=2, width=8, layers=2).eval()
    tokens = torch.tensor([[3, 4, 5, 0, 0, 0], [3, 4, 5, 9, 9, 9], [0, 0, 0, 0, 0, 0]])
    mask = torch.tensor([[True] * 3 + [False] * 3] * 2 + [[False] * 6])
    answers = network(tokens, mask)
    assert torch.allclose(answers[0], answers[1], atol=1e-6) and torch.isfinite(answers).all()
    turned = torch.tensor([[5, 4, 3, 0, 0, 0]])
    assert not torch.allclose(answers[:1], network(turned, mask[:1]))
    bag = tasks.SmallTransformer(words=20, outputs=2, width=8, layers=0).eval()
    assert torch.allclose(bag(tokens[:1], mask[:1]), bag(turned, mask[:1]))


def opinions(review: str) -> list[tuple[str, bool]]:
    """Of each clause of a review: the thing, and whether it is praised."""
    found = []
    for clause in re.split(r"(?=the \w+ was )", review)[1:]:
        kind = any(word in reviews.GOOD for word in clause.split()[-4:])
        turned = any(f" was {word} " in clause for word in reviews.NEGATIONS)
        found.append((clause.split()[1], kind != turned))
    return found


def test_a_review_is_labelled_as_it_reads_and_a_claim_as_it_follows_from_its_review(tmp_path):
    rng, seen = np.random.default_rng(3), set()
    for _ in range(200):
        text, label = reviews.review(rng)
        assert label == (sum(praised for _, praised in opinions(text)) >= 2), text
        text, label = reviews.pair(rng)
        review, claim = text.split(f" {reviews.BETWEEN} ")
        said, thing, claimed = dict(opinions(review)), claim.split()[1], claim.split()[-2] in reviews.GOOD
        assert label == (1 if thing not in said else 0 if said[thing] == claimed else 2), text
        seen.add(label)
    assert seen == {0, 1, 2}
    arrays, words = reviews.arrays(60, 10, 0, pairs=True)
    tokens, types = arrays["train_tokens"], arrays["train_token_type_ids"]
    # From the word between on, and not in what is padding.
    first = np.argmax(tokens == words.index(reviews.BETWEEN), axis=1)
    places = np.arange(tokens.shape[1])
    assert (types == ((places >= first[:, None]) & (tokens != 0))).all() and types.any()
    np.savez(tmp_path / "pairs.npz", **arrays)
    dataset = fastload.PackedDataset(pack_images(tmp_path / "pairs.npz", tmp_path / "pairs.h5").path)
    task = tasks.TextLabels(dataset, 1)
    assert task.fields == ("tokens", "attention_mask", "token_type_ids", "labels") and task.outputs == 3
    network = task.network(8).eval()
    batch = {name: torch.from_numpy(arrays[f"train_{name}"][:4]) for name in task.fields}
    other = batch | {"token_type_ids": 1 - batch["token_type_ids"]}
    assert not torch.allclose(task.answers(network, batch), task.answers(network, other))


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for the data of benchmarks: several ask for the same faces."""
    return tmp_path_factory.mktemp("drawn")


# Of figures that the same method takes beside something else, one.
ONE_OF_EACH = {
    "workers": ("workers", "folder", "cold", "elastic", "state-dict"),
    "loader": ("take", "between", "check", "opening", "h5py", "jpeg", "first-batch", "info", "plan", "memory"),
    "next": ("echo",),
    "scale": ("scale", "shards"),  # a cluster takes half a minute to start
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", "loader pack sources shuffle workers augment echo accelerator meter next scale".split()
)
def test_benchmarks_run_and_write_records(run, drawn, tmp_path, what):
    out = tmp_path / "out.jsonl"
    words = ["--quick", "--out", out]
    if what != "echo":  # it draws what it needs as it goes
        words += ["--data", drawn]
    if what == "pack":
        words += ["--tmpfs", tmp_path]
    if what in ONE_OF_EACH:
        words += ["--only", *ONE_OF_EACH[what]]
    run(ROOT / f"benchmarks/bench_{what}.py", *words, cwd=tmp_path)
    assert '"figure"' in out.read_text()


@pytest.mark.slow
def test_all_that_bench_parallel_answers_is_drawn(run, tmp_path):
    tried, out, picture = (tmp_path / name for name in ("tried.jsonl", "out.jsonl", "out.png"))
    words = ["--quick", "--devices", "cpu", "--out", tried, "--data", tmp_path / "data"]
    run(ROOT / "benchmarks/bench_parallel.py", *words, cwd=tmp_path)
    records = [json.loads(line) for line in tried.read_text().splitlines()]
    memory = next(record for record in records if record["figure"] == "memory-ddp-2-cpu")
    records.append({**memory, "figure": "memory-none-1-cpu"})  # takes a process of its own, which a trial leaves out
    for record in records:
        record["options"]["quick"] = False  # trials are not drawn
    out.write_text("".join(json.dumps(record) + "\n" for record in records))
    said = run(ROOT / "benchmarks/plot_parallel.py", out, picture, cwd=tmp_path).splitlines()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(said) == 13 and said[-1] == str(picture)  # the answers of twelve panels
