"""Boxes of objects, learnt by a small FCOS (Tian et al., 2019), from images of their own sizes.

Each place of a feature map (8 pixels wide) that lies near the middle of an object answers with its class, the distances
to the four sides of its box, and how central it is. A batch is padded to its largest image, and places that are
padding count for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn

from fastload import FastLoader, PackedDataset, Pad
from fastload.transforms import Normalize, RandomHorizontalFlip, Resize
from models import Block, convolution

STRIDE = 8
NEAR = 1.5  # places from the middle of a box within which a place answers for it
MOST_PLACES, MOST_ANSWERS = 300, 100  # of an image: places that are looked at, and boxes that are kept
BINS = 200  # of scores, in which right and wrong answers are counted

Fields = dict[str, Tensor]


class SmallDetector(nn.Module):
    """(B, C, H, W), sides multiples of 16, to (B, classes + 5, H / 8, W / 8): logits, four distances, centrality."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(channels, width, 3, stride=2), convolution(width, 2 * width, 3, stride=2))
        self.fine = Block(2 * width, 4 * width, 2)
        self.coarse = Block(4 * width, 4 * width, 2)
        self.kinds = nn.Sequential(convolution(4 * width, 4 * width, 3), nn.Conv2d(4 * width, classes, 3, 1, 1))
        self.places = nn.Sequential(convolution(4 * width, 4 * width, 3), nn.Conv2d(4 * width, 5, 3, 1, 1))
        nn.init.constant_(self.kinds[1].bias, -4.6)  # nearly all places are background: 1 % to begin with

    def forward(self, x: Tensor) -> Tensor:
        """Answers of each place."""
        fine = self.fine(self.stem(x))
        fine = fine + F.interpolate(self.coarse(fine), size=fine.shape[2:])
        return torch.cat([self.kinds(fine), self.places(fine)], 1)


class Detection:
    """The boxes of an image and their classes, by mean average precision at half overlap; see `Task`."""

    fields = ("images", "boxes", "box_labels", "num_boxes", "pixel_mask")
    batch_size, lr, width = 8, 2e-3, 16
    loader_options: Mapping[str, Any] = MappingProxyType({"batch": Pad(multiple=16)})

    def __init__(self, dataset: PackedDataset, side: int = 128) -> None:
        fields = dataset.file.fields
        labels = PackedDataset(dataset.path, fields=("box_labels",))
        found = FastLoader(labels, 1024, shuffle=False, ends="exact", share=None)
        most = max(int(batch[0].max()) for batch in found)
        self.names = fields["box_labels"].names or tuple(f"class {i}" for i in range(most + 1))
        if most < 0:
            raise SystemExit(f"{dataset.path} has not one box: there is nothing to learn from it")
        self.channels = fields["images"].shape[2]
        # Boxes as corners, or as a corner and a size, by the names of their numbers.
        self.sized = tuple(fields["boxes"].names)[2:] == ("width", "height")
        self.summary = f"images of their own sizes to find {len(self.names)} classes of objects in"
        normalize = Normalize((0.5,) * self.channels, (0.25,) * self.channels)
        self.sizing: list[object] = [Resize(side, max_size=2 * side)]
        self.steady: list[object] = [*self.sizing, normalize]
        self.transforms: list[object] = [*self.sizing, RandomHorizontalFlip(), normalize]

    def network(self, width: int) -> nn.Module:
        """See `Task.network`."""
        return SmallDetector(self.channels, len(self.names), width)

    def answers(self, model: nn.Module, batch: Fields) -> Tensor:
        """See `Task.answers`."""
        return model(batch["images"])  # type: ignore[no-any-return]

    def losses(self, answers: Tensor, batch: Fields) -> Tensor:
        """See `Task.losses`: of classes (focal), of boxes (1 - overlap) and of centrality, by image."""
        answers = answers.float()
        kinds, distances, central = self._split(answers)
        truth, to_sides, counted = self._targets(answers, batch)
        positive = (truth >= 0) & counted
        number = positive.flatten(1).sum(1).clamp(min=1)
        wanted = F.one_hot(truth.clamp(min=0), len(self.names)).permute(0, 3, 1, 2) * positive[:, None]
        chance = kinds.sigmoid()
        right = torch.where(wanted > 0, chance, 1 - chance)
        weight = torch.where(wanted > 0, 0.25, 0.75) * (1 - right) ** 2
        focal = F.binary_cross_entropy_with_logits(kinds, wanted.float(), reduction="none") * weight * counted[:, None]
        overlap = _overlap_of_distances(distances, to_sides)
        least, most = to_sides.unflatten(1, (2, 2)).aminmax(dim=1)  # left and right, top and bottom
        middle = (least / most.clamp(min=1e-6)).clamp(min=0).prod(1).sqrt()
        of_middle = F.binary_cross_entropy_with_logits(central, middle, reduction="none")
        placed = ((1 - overlap) + of_middle) * positive
        return (focal.flatten(1).sum(1) + placed.flatten(1).sum(1)) / number

    def counts(self, answers: Tensor, batch: Fields, valid: Tensor) -> Tensor:
        """See `Task.counts`: by class right and wrong boxes by score, and boxes there are: (classes, 2 * BINS + 1)."""
        table = torch.zeros(len(self.names), 2 * BINS + 1, dtype=torch.float64)
        corners = self._corners(batch)
        found = self.boxes(answers, batch["pixel_mask"])
        for at in torch.nonzero(valid).flatten().tolist():
            count = int(batch["num_boxes"][at])
            truth, kinds = corners[at, :count].cpu(), batch["box_labels"][at, :count].cpu()
            table[:, -1] += torch.bincount(kinds, minlength=len(self.names))
            boxes, scores, classes = found[at]
            taken = torch.zeros(count, dtype=torch.bool)
            for box, score, kind in zip(boxes, scores.tolist(), classes.tolist(), strict=True):
                overlap = overlaps(box[None], truth)[0] * (kinds == kind) * ~taken
                right = bool(count) and float(overlap.max()) >= 0.5
                if right:
                    taken[int(overlap.argmax())] = True
                table[kind, min(BINS - 1, int(score * BINS)) + (0 if right else BINS)] += 1
        return table.flatten().to(answers.device)

    def precisions(self, counts: Tensor) -> Tensor:
        """Average precision of each class, nan of those that no image has."""
        table = counts.view(len(self.names), -1)
        right, wrong = (table[:, part * BINS : (part + 1) * BINS].flip(1).cumsum(1) for part in range(2))
        recall = right / table[:, -1:].clamp(min=1)
        precision = (right / (right + wrong).clamp(min=1)).flip(1).cummax(1).values.flip(1)
        steps = torch.diff(recall, dim=1, prepend=torch.zeros(len(recall), 1, dtype=recall.dtype))
        return torch.where(table[:, -1] > 0, (precision * steps).sum(1), torch.nan)

    def score(self, counts: Tensor) -> str:
        """See `Task.score`."""
        boxes = int(counts.view(len(self.names), -1)[:, -1].sum())
        if not boxes:
            return "no mean average precision: the held-out images have no box"
        return f"mean average precision {float(self.precisions(counts).nanmean()):.1%} at half overlap, {boxes} boxes"

    def finish(self, counts: Tensor, model: nn.Module, held_out: PackedDataset, picture: Path | None) -> None:
        """The table of classes, and some images with the boxes that are there (white) and those found."""
        print("average precision by class, and boxes of it:")
        for name, precision, number in zip(
            self.names, self.precisions(counts).tolist(), counts.view(len(self.names), -1)[:, -1].tolist(), strict=True
        ):
            if number:
                print(f"  {name:<24} {precision:6.1%}  {number:6.0f}")
        if picture is not None:
            self._sheet(model, held_out).save(picture)
            print(f"wrote {picture}: boxes that are there (white), and those found")

    @torch.no_grad()
    def boxes(self, answers: Tensor, pixel_mask: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of each image: boxes (n, 4) as corners, their scores and classes, best first; on the CPU."""
        kinds, distances, central = self._split(answers.float().cpu())
        scores = (kinds.sigmoid() * central.sigmoid()[:, None]).sqrt() * _places_of(pixel_mask.cpu(), kinds)[:, None]
        middles = _middles(kinds).permute(2, 0, 1)
        corners = torch.cat([middles - distances[:, :2], middles + distances[:, 2:]], 1)  # (B, 4, h, w)
        found = []
        for score, corner in zip(scores, corners, strict=True):
            best, at = score.flatten().topk(min(MOST_PLACES, score.numel()))
            places = score[0].numel()
            box, kind = corner.flatten(1).T[at % places], at // places
            kept = _kept(box, best, kind)
            found.append((box[kept], best[kept], kind[kept]))
        return found

    def _split(self, answers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits (B, classes, h, w), distances in pixels (B, 4, h, w), logit of centrality (B, h, w)."""
        classes = len(self.names)
        distances = STRIDE * F.softplus(answers[:, classes : classes + 4])
        return answers[:, :classes], distances, answers[:, classes + 4]

    def _corners(self, batch: Fields) -> Tensor:
        boxes = batch["boxes"].float()
        return torch.cat([boxes[..., :2], boxes[..., :2] + boxes[..., 2:]], -1) if self.sized else boxes

    def _targets(self, answers: Tensor, batch: Fields) -> tuple[Tensor, Tensor, Tensor]:
        """Class of each place, -1 for background (B, h, w); distances (B, 4, h, w); which places are image."""
        corners, labels = self._corners(batch), batch["box_labels"]
        points = _middles(answers)[None, :, :, None]  # (1, h, w, 1, 2)
        low, high = corners[:, None, None, :, :2], corners[:, None, None, :, 2:]
        sides = torch.cat([points - low, high - points], -1)  # (B, h, w, M, 4)
        near = ((points - (low + high) / 2).abs() <= NEAR * STRIDE).all(-1)
        inside = (sides.amin(-1) > 0) & near & (labels >= 0)[:, None, None]
        area = (high - low).prod(-1).expand(inside.shape).masked_fill(~inside, torch.inf)
        smallest, which = area.min(-1)
        labels = labels[:, None, None].expand(inside.shape).gather(-1, which[..., None])[..., 0]
        truth = torch.where(smallest.isfinite(), labels, -1)
        chosen = sides.gather(3, which[..., None, None].expand(*which.shape, 1, 4))[..., 0, :]
        return truth, chosen.permute(0, 3, 1, 2).clamp(min=0), _places_of(batch["pixel_mask"], answers)

    @torch.no_grad()
    def _sheet(self, model: nn.Module, held_out: PackedDataset, rows: int = 6) -> Image.Image:
        device, spread = next(model.parameters()).device, np.unique(np.linspace(0, len(held_out) - 1, rows).astype(int))
        model.eval()
        some = held_out.select(spread)
        seen, ready = (
            next(
                iter(FastLoader(some, len(spread), shuffle=False, share=None, transform=list_of, **self.loader_options))
            )
            for list_of in (self.sizing, self.steady)
        )
        batch = dict(zip(self.fields, ready, strict=True))
        answers = model(batch["images"].to(device))
        there, found = self._corners(batch), self.boxes(answers, batch["pixel_mask"])
        sheet = Image.new("RGB", (int(seen.sizes[:, 1].max()), int(seen.sizes[:, 0].sum())))
        top = 0
        for at, (height, width) in enumerate(seen.sizes.tolist()):
            pixels = seen[0][at, :, :height, :width].permute(1, 2, 0).numpy()
            image = Image.fromarray(np.ascontiguousarray(pixels[..., :3] if pixels.shape[2] > 1 else pixels[..., 0]))
            image = image.convert("RGB")
            draw = ImageDraw.Draw(image)
            for box in there[at, : int(batch["num_boxes"][at])].tolist():
                draw.rectangle(box, outline="white")
            for box, score, kind in zip(*(part.tolist() for part in found[at]), strict=True):
                if score >= 0.4:
                    draw.rectangle(box, outline=f"hsv({kind * 222 % 360}, 90%, 100%)")
            sheet.paste(image, (0, top))
            top += height
        return sheet


def _middles(like: Tensor) -> Tensor:
    """x and y of the middle of each place of a map (B, C, h, w) in pixels of the image, (h, w, 2)."""
    y, x = (STRIDE * (torch.arange(side, device=like.device) + 0.5) for side in like.shape[2:])
    return torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)


def _places_of(pixel_mask: Tensor, like: Tensor) -> Tensor:
    """Which places of a map are image, bool (B, h, w)."""
    middle = pixel_mask[:, STRIDE // 2 :: STRIDE, STRIDE // 2 :: STRIDE]
    return middle[:, : like.shape[2], : like.shape[3]]


def _overlap_of_distances(found: Tensor, truth: Tensor) -> Tensor:
    """Intersection over union of boxes around the same places, by distances (B, 4, h, w)."""
    both = torch.minimum(found, truth)
    areas = [(one[:, 0] + one[:, 2]) * (one[:, 1] + one[:, 3]) for one in (found, truth, both)]
    return areas[2] / (areas[0] + areas[1] - areas[2]).clamp(min=1e-6)


def overlaps(some: Tensor, others: Tensor) -> Tensor:
    """Intersection over union of boxes as corners, (n, 4) and (m, 4): (n, m)."""
    low, high = (
        torch.maximum(some[:, None, :2], others[None, :, :2]),
        torch.minimum(some[:, None, 2:], others[None, :, 2:]),
    )
    both = (high - low).clamp(min=0).prod(-1)
    areas = [(boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(-1) for boxes in (some, others)]
    return both / (areas[0][:, None] + areas[1][None] - both).clamp(min=1e-9)


def _kept(boxes: Tensor, scores: Tensor, kinds: Tensor) -> Tensor:
    """Which boxes stay, best first, where those of a class that overlap a better one by half are left out."""
    alike = (overlaps(boxes, boxes) > 0.5) & (kinds[:, None] == kinds[None])
    kept: list[int] = []
    left_out = torch.zeros(len(boxes), dtype=torch.bool)
    for at in range(len(boxes)):  # they come best first
        if not left_out[at] and scores[at] > 0.05 and len(kept) < MOST_ANSWERS:
            kept.append(at)
            left_out |= alike[at]
    return torch.tensor(kept, dtype=torch.long)
