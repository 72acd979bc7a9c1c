"""What `train.py` can learn from a packed file: labels of images, labels of texts, classes of pixels, boxes of objects.

A task names the fields of a batch, makes the transforms and the network, and says how wrong and how right answers are.
"""

from __future__ import annotations

import argparse
import colorsys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from detection import Detection
from fastload import FastLoader, PackedDataset, inspect_file
from fastload.transforms import (
    CenterCrop,
    ColorJitter,
    Normalize,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
)
from models import SmallDeepLab, SmallResNet, SmallTransformer

MOST_UNNAMED = 10_000
"""Classes without names that a network is made for; more only if there are as many rows."""

TOKENS = ("tokens", "input_ids")
"""Names under which a file without images holds its token ids, int (N, L)."""

Fields = dict[str, Tensor]


class Task(Protocol):
    """One kind of learning.

    Attributes:
        fields: of a batch, in this order.
        summary: what is learnt, for people.
        batch_size, lr, width: good values where none are asked for.
        transforms: of training batches.
        steady: of those that answers are judged by.
        loader_options: how `FastLoader` makes batches of them.
    """

    fields: tuple[str, ...]
    summary: str
    batch_size: int
    lr: float
    width: int
    transforms: list[object]
    steady: list[object]
    loader_options: Mapping[str, Any]

    def network(self, width: int) -> nn.Module:
        """A new network, of so many channels."""
        ...

    def answers(self, model: nn.Module, batch: Fields) -> Tensor:
        """Logits (B, ...)."""
        ...

    def losses(self, answers: Tensor, batch: Fields) -> Tensor:
        """Loss of each sample, (B,)."""
        ...

    def counts(self, answers: Tensor, batch: Fields, valid: Tensor) -> Tensor:
        """What `score` needs of a batch, as numbers to be summed over batches and ranks; rows count where valid."""
        ...

    def score(self, counts: Tensor) -> str:
        """How good the answers are, beside the best that needs no look at a sample."""
        ...

    def finish(self, counts: Tensor, model: nn.Module, held_out: PackedDataset, picture: Path | None) -> None:
        """What is shown at the end, by rank 0."""
        ...


class _Labels:
    """Shared by images and texts: labels int64 (N,) are classes, uint8 (N, A) yes-or-no attributes."""

    loader_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, dataset: PackedDataset) -> None:
        if "labels" not in dataset.file.fields:
            raise SystemExit(f"{dataset.path} has no labels: there is nothing to learn from it")
        shape = dataset.file.fields["labels"].shape
        self.attributes = len(shape) == 1
        self.outputs = shape[0] if self.attributes else _num_classes(dataset)
        if self.outputs < 2 and not self.attributes:
            raise SystemExit(f"{dataset.path} names {self.outputs} class: there is nothing to tell apart")
        self.kind = "attributes" if self.attributes else "classes"

    def losses(self, answers: Tensor, batch: Fields) -> Tensor:
        """See `Task.losses`; 0 where a class label is -1 (none)."""
        labels = batch["labels"]
        if not self.attributes:
            return F.cross_entropy(answers.float(), labels, ignore_index=-1, reduction="none", label_smoothing=0.05)
        return F.binary_cross_entropy_with_logits(answers.float(), labels.float(), reduction="none").mean(1)

    def counts(self, answers: Tensor, batch: Fields, valid: Tensor) -> Tensor:
        """See `Task.counts`: right answers, answers, then how often each class or attribute occurs."""
        labels = batch["labels"]
        if not self.attributes:
            counted = valid & (labels >= 0)
            right = ((answers.argmax(1) == labels) & counted).sum()
            occurs, number = torch.bincount(labels[counted], minlength=answers.shape[1]), counted.sum()
        else:
            right = (((answers > 0) == labels.bool()) & valid[:, None]).sum()
            occurs, number = (labels * valid[:, None]).sum(0), valid.sum() * labels.shape[1]
        return torch.cat([torch.stack([right, number]), occurs]).double()

    def score(self, counts: Tensor) -> str:
        """See `Task.score`."""
        right, number, occurs = counts[0], counts[1], counts[2:]
        if not number:
            return "no accuracy: not one held-out row has a label"
        best = occurs.max()
        if self.attributes:
            rows = number / len(occurs)
            best = torch.maximum(occurs, rows - occurs).sum()
        name = "mean accuracy" if self.attributes else "accuracy"
        return f"{name} {float(right / number):.1%} (commonest answer: {float(best / number):.1%})"

    def finish(self, counts: Tensor, model: nn.Module, held_out: PackedDataset, picture: Path | None) -> None:
        """Nothing more to show."""


class ImageLabels(_Labels):
    """Classes or attributes of images."""

    fields = ("images", "labels")
    batch_size, lr, width = 64, 3e-3, 16

    def __init__(self, dataset: PackedDataset, side: int = 128) -> None:
        super().__init__(dataset)
        varied, self.channels = _sizes(dataset)
        self.summary = f"images of {varied or _said(dataset)} to learn {self.outputs} {self.kind} from"
        # Images of several sizes: an eighth is left around the middle, as usual where answers are judged.
        cut = [Resize(side * 8 // 7), CenterCrop(side)] if varied else []
        drawn = [RandomResizedCrop(side, scale=(0.25, 1.0))] if varied else []
        self.steady: list[object] = [*cut, _normalize(self.channels)]
        self.transforms: list[object] = [*drawn, RandomHorizontalFlip(), _normalize(self.channels)]

    def network(self, width: int) -> nn.Module:
        """See `Task.network`."""
        return SmallResNet(self.channels, self.outputs, width)

    def answers(self, model: nn.Module, batch: Fields) -> Tensor:
        """See `Task.answers`."""
        return model(batch["images"])  # type: ignore[no-any-return]


class TextLabels(_Labels):
    """Classes or attributes of texts, or of pairs of them.

    Fields: token ids; where the file has them `attention_mask`, not 0 for what is no padding, and `token_type_ids`,
    which tell the sentences of a pair apart.
    """

    batch_size, lr, width = 128, 2e-3, 64

    def __init__(self, dataset: PackedDataset, layers: int, dropout: float = 0.1, layer_drop: float = 0.0) -> None:
        super().__init__(dataset)
        self.dropout, self.layer_drop = dropout, layer_drop
        fields = dataset.file.fields
        self.tokens = next(name for name in TOKENS if name in fields)
        self.layers, length = layers, fields[self.tokens].shape[0]
        self.masked = "attention_mask" in fields
        self.steady: list[object] = []
        self.transforms: list[object] = []
        self.paired = "token_type_ids" in fields
        extra = {"attention_mask": self.masked, "token_type_ids": self.paired}
        self.fields = (self.tokens, *(name for name, there in extra.items() if there), "labels")
        self.words = _largest(dataset.path, self.tokens) + 1
        self.types = _largest(dataset.path, "token_type_ids") + 1 if self.paired else 0
        what = "pairs of texts" if self.paired else "texts"
        self.summary = (
            f"{what} of {length} tokens out of {self.words} to learn {self.outputs} {self.kind} from, "
            f"by {layers} layers of attention" + ("" if layers else " (a bag of words)")
        )

    def network(self, width: int) -> nn.Module:
        """See `Task.network`."""
        if width % 4:
            raise SystemExit(f"--width {width}: 4 heads of attention share it: give a multiple of 4")
        return SmallTransformer(
            self.words, self.outputs, width, self.layers, self.types, dropout=self.dropout, layer_drop=self.layer_drop
        )

    def answers(self, model: nn.Module, batch: Fields) -> Tensor:
        """See `Task.answers`."""
        tokens = batch[self.tokens].long()
        mask = batch["attention_mask"] != 0 if self.masked else tokens != 0
        types = [batch["token_type_ids"].long()] if self.paired else []
        return model(tokens, mask, *types)  # type: ignore[no-any-return]


class Segmentation:
    """The class of each pixel, by mean intersection over union; pixels of the masks' `ignore_index` do not count."""

    fields = ("images", "masks")
    batch_size, lr, width = 8, 4e-3, 24
    loader_options: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, dataset: PackedDataset, side: int = 128, dropout: float = 0.1) -> None:
        self.dropout = dropout
        masks = dataset.file.fields["masks"]
        found = masks.attrs.get("ignore_index")
        self.ignored = None if found is None else int(found)
        shares = _shares(dataset, ignored=self.ignored)
        if masks.names and len(shares) > len(masks.names):
            raise SystemExit(
                f"{dataset.path}: masks hold class {len(shares) - 1}, and the file names {len(masks.names)} classes, 0 "
                f"to {len(masks.names) - 1}. Name all of them with `fastload pack --mask-values`"
            )
        self.names = masks.names or tuple(f"class {i}" for i in range(len(shares)))
        shares = np.pad(shares, (0, len(self.names) - len(shares)))
        # Rare classes, poles and pedestrians, count for more, as in ENet (Paszke et al., 2016): without, none is found.
        self.weights = torch.from_numpy(1 / np.log(1.02 + shares)).float()
        varied, self.channels = _sizes(dataset)
        told = [name for index, name in enumerate(self.names) if index != self.ignored]
        self.summary = f"images of {varied or _said(dataset)} to learn {len(told)} classes of pixels from"
        if len(shares) == 256:
            self.summary += " (255 is one: the file names no ignore_index)"
        self.sizing: list[object] = [Resize((side, side))] if varied else []
        self.steady: list[object] = [*self.sizing, _normalize(self.channels)]
        height, width = dataset.file.fields["images"].shape[:2]
        window = (max(1, height * 4 // 5), max(1, width * 4 // 5))
        drawn = RandomResizedCrop(side, scale=(0.25, 1.0)) if varied else RandomCrop(window)
        colour = [ColorJitter(0.3, 0.3, 0.3)] if self.channels in (1, 3) else []
        self.transforms: list[object] = [drawn, RandomHorizontalFlip(), *colour, _normalize(self.channels)]

    def network(self, width: int) -> nn.Module:
        """See `Task.network`."""
        return SmallDeepLab(self.channels, len(self.names), width, self.dropout)

    def answers(self, model: nn.Module, batch: Fields) -> Tensor:
        """See `Task.answers`: (B, classes, H, W)."""
        return model(batch["images"])  # type: ignore[no-any-return]

    def losses(self, answers: Tensor, batch: Fields) -> Tensor:
        """See `Task.losses`: of each image, the weighted mean over its pixels that count."""
        truth = batch["masks"].long()
        ignored = -100 if self.ignored is None else self.ignored
        weights = self.weights.to(answers.device)
        pixels = F.cross_entropy(answers.float(), truth, weights, ignore_index=ignored, reduction="none")
        counted = weights[truth.clamp(0, len(weights) - 1)] * (truth != ignored)
        return pixels.sum((1, 2)) / counted.sum((1, 2)).clamp(min=1e-6)

    def counts(self, answers: Tensor, batch: Fields, valid: Tensor) -> Tensor:
        """See `Task.counts`: pixels by truth and answer, (classes * classes,)."""
        truth, number = batch["masks"].long(), len(self.names)
        counted = valid[:, None, None] & (truth < number)
        if self.ignored is not None:
            counted &= truth != self.ignored
        pairs = truth[counted] * number + answers.argmax(1)[counted]
        return torch.bincount(pairs, minlength=number * number).double()

    def score(self, counts: Tensor) -> str:
        """See `Task.score`."""
        table = counts.view(len(self.names), -1)
        if not table.any():
            return "no mean IoU: not one pixel of the held-out masks counts"
        guess = torch.zeros_like(table)
        guess[:, table.sum(1).argmax()] = table.sum(1)
        mean, trivial = (float(self._unions(part).nanmean()) for part in (table, guess))
        right = float(table.diagonal().sum() / table.sum().clamp(min=1))
        return f"mean IoU {mean:.1%} (commonest class everywhere: {trivial:.1%}), {right:.1%} of pixels right"

    def _unions(self, table: Tensor) -> Tensor:
        """Intersection over union of each class; nan where no pixel is of it."""
        both = table.diagonal()
        unions = both / (table.sum(0) + table.sum(1) - both)
        # A class that no truth holds says nothing, however often it was answered.
        return torch.where(table.sum(1) > 0, unions, torch.nan)

    def finish(self, counts: Tensor, model: nn.Module, held_out: PackedDataset, picture: Path | None) -> None:
        """The table of classes, and a sheet of images, truths and answers."""
        table = counts.view(len(self.names), -1)
        share = table.sum(1) / table.sum().clamp(min=1)
        print("intersection over union by class, and its share of the pixels:")
        for name, union, part in zip(self.names, self._unions(table).tolist(), share.tolist(), strict=True):
            if part:
                print(f"  {name:<24} {union:6.1%}  {part:6.1%}")
        if picture is not None:
            self._sheet(model, held_out).save(picture)
            print(f"wrote {picture}: image, truth and answer, side by side")

    @torch.no_grad()
    def _sheet(self, model: nn.Module, held_out: PackedDataset, rows: int = 6) -> Image.Image:
        """Samples spread over the held-out rows, one below the other; pixels that do not count are black."""
        device = next(model.parameters()).device
        spread = np.unique(np.linspace(0, len(held_out) - 1, rows).astype(np.int64))
        model.eval()
        colours = _colours(len(self.names), self.ignored)
        lines = []
        loader = FastLoader(held_out.select(spread), len(spread), shuffle=False, share=None, transform=self.sizing)
        normalized = FastLoader(held_out.select(spread), len(spread), shuffle=False, share=None, transform=self.steady)
        for (images, masks), (ready, _) in zip(loader, normalized, strict=True):
            answers = model(ready.to(device)).argmax(1).cpu().numpy()
            for image, mask, answer in zip(images, masks.numpy(), answers, strict=True):
                pixels = _as_rgb(image)
                lines.append(np.concatenate([pixels, colours[mask], colours[answer]], axis=1))
        return Image.fromarray(np.concatenate(lines, axis=0))


def task_of(dataset: PackedDataset, options: argparse.Namespace) -> Task:
    """The task that is asked for, or the one that the file's fields suggest."""
    fields = dataset.file.fields
    boxed = "box_labels" in fields and "labels" not in fields
    of_images = "segment" if "masks" in fields else "detect" if boxed else "classify"
    asked: str = options.task or (of_images if "images" in fields else "text")
    if asked == "text":
        _require(dataset, " or ".join(TOKENS), any(name in fields and len(fields[name].shape) == 1 for name in TOKENS))
        return TextLabels(dataset, options.layers, options.dropout, options.layer_drop)
    _require(dataset, "images", "images" in fields)
    if asked == "detect":
        _require(dataset, "boxes with labels", {"boxes", "box_labels", "num_boxes"} <= fields.keys())
        return Detection(dataset, options.size)
    if asked == "segment":
        _require(dataset, "masks", "masks" in fields)
        return Segmentation(dataset, options.size, options.dropout)
    task = ImageLabels(dataset, options.size)
    if options.task and (options.task == "attributes") != task.attributes:
        shape = (dataset.file.num_rows, *fields["labels"].shape)
        raise SystemExit(f"--task {options.task}: the labels of {dataset.path} have shape {shape}")
    return task


def open_splits(path: Path, fields: tuple[str, ...], seed: int) -> tuple[PackedDataset, PackedDataset]:
    """Training and validation rows: the file's own splits, or a fixed tenth held out where it has none."""
    names = list(inspect_file(path).splits)
    if "train" in names and len(names) > 1:
        held_out = next((name for name in ("valid", "val", "validation", "test") if name in names), names[-1])
        return PackedDataset(path, "train", fields), PackedDataset(path, held_out, fields)
    whole = PackedDataset(path, fields=fields)
    order = np.random.default_rng(seed).permutation(len(whole))
    tenth = max(1, len(whole) // 10)
    return whole.select(np.sort(order[tenth:])), whole.select(np.sort(order[:tenth]))


def _require(dataset: PackedDataset, name: str, there: bool) -> None:
    if not there:
        raise SystemExit(f"{dataset.path} has no {name}: there is nothing to learn from it")


def _normalize(channels: int) -> Normalize:
    return Normalize((0.5,) * channels, (0.25,) * channels)


def _sizes(dataset: PackedDataset) -> tuple[str, int]:
    """What is said of images that differ in size, "" of others; and their channels."""
    images = dataset.file.fields["images"]
    return f"several sizes, {images.shape[2]} channels," if images.varied else "", images.shape[2]


def _said(dataset: PackedDataset) -> str:
    return "x".join(map(str, dataset.file.fields["images"].shape))


def _num_classes(dataset: PackedDataset) -> int:
    """As many as the file names; without names one more than the largest label, unless that is an id."""
    if dataset.classes:
        return len(dataset.classes)
    largest = _largest(dataset.path, "labels")
    if largest >= max(MOST_UNNAMED, dataset.file.num_rows):
        raise SystemExit(
            f"{dataset.path}: labels go up to {largest:,}, for {dataset.file.num_rows:,} rows: that is no class, and a "
            f"network would need an output for each number below it. Pack the labels by their names, or numbered from 0"
        )
    return largest + 1


def _largest(path: Path, name: str) -> int:
    """The largest number in a field of the whole file; ends the script at one below 0, but for -1 among labels."""
    loader = FastLoader(PackedDataset(path, fields=(name,)), 1024, shuffle=False, ends="exact", share=None)
    ends = [(int(values.min()), int(values.max())) for (values,) in loader]
    least, largest = min(low for low, _ in ends), max(high for _, high in ends)
    if least < (-1 if name == "labels" else 0):
        raise SystemExit(f"{path}: {name} holds {least}: numbers from 0 on are wanted")
    return largest


def _shares(dataset: PackedDataset, *, ignored: int | None) -> np.ndarray:
    """Share of each class among the training pixels that count, float64 (classes used,)."""
    split = "train" if "train" in dataset.file.splits else None
    masks = PackedDataset(dataset.path, split, fields=("masks",))
    counts = np.zeros(256, np.int64)
    if dataset.file.fields["masks"].varied:
        for index in range(len(masks)):
            counts += np.bincount(masks[index][0].numpy().ravel(), minlength=256)
    else:
        for batch in FastLoader(masks, 64, shuffle=False, ends="exact", share=None):
            counts += np.bincount(batch[0][batch.valid].numpy().ravel(), minlength=256)
    if ignored is not None:
        counts[ignored] = 0
    if not counts.any():
        raise SystemExit(f"{dataset.path}: no pixel of its training masks counts: there is nothing to learn from it")
    return counts[: np.flatnonzero(counts)[-1] + 1] / counts.sum()


def _colours(count: int, ignored: int | None) -> np.ndarray:
    """uint8 (256, 3): colours that differ, by the golden ratio around the wheel; black for what is no class."""
    colours = np.zeros((256, 3), np.uint8)
    for index in range(count):
        hue, level = index * 0.618034 % 1, (1.0, 0.75, 0.9)[index % 3]
        colours[index] = np.round(np.array(colorsys.hsv_to_rgb(hue, (0.65, 0.9)[index % 2], level)) * 255)
    if ignored is not None:
        colours[ignored] = 0
    return colours


def _as_rgb(image: Tensor) -> np.ndarray:
    """An image (C, H, W) of a batch, without transforms, as uint8 (H, W, 3)."""
    pixels = image.permute(1, 2, 0).numpy()
    if pixels.dtype == np.uint16:
        pixels = (pixels >> 8).astype(np.uint8)
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else np.ascontiguousarray(pixels[:, :, :3])
