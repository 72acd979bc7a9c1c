"""The FastLoader call that would replace a `DataLoader`: its transforms, commands to type, and caveats."""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import PurePath

# Transforms that fastload.transforms has by the same name, and those that FastLoader does without being asked.
_OURS = frozenset({
    "CenterCrop", "ColorJitter", "Grayscale", "Normalize", "RandAugment", "RandomCrop", "RandomErasing",
    "RandomGrayscale", "RandomHorizontalFlip", "RandomResizedCrop", "RandomVerticalFlip", "Resize",
})  # fmt: skip
_NOT_NEEDED = frozenset({
    "ConvertImageDtype", "MaybePILToTensor", "MaybeToTensor", "PILToTensor", "ToDtype", "ToImage", "ToNumpy",
    "ToPureTensor", "ToTensor", "ToTensorV2",
})  # fmt: skip
_ALIASES = {"RandomResizedCropAndInterpolation": "RandomResizedCrop"}
_MAKE_A_SIZE = frozenset({"CenterCrop", "RandomCrop", "RandomResizedCrop", "Resize"})
_USUAL_JITTER = "ColorJitter(0.4, 0.4, 0.4)"  # where the dataset's is not known


@dataclass(frozen=True)
class PlainLoader:
    """A loader that a FastLoader might replace, and its dataset, as far as what to type depends on them.

    Attributes:
        root: folder of the dataset's files; empty: not known.
        split: the part of them that it takes, such as `train`; empty: all, or not known.
        is_part: whether it takes only some of the dataset's samples, as a `Subset` does.
        num_samples: that it takes; 0: not known.
        same_labels: whether its labels are known to be those that `fastload pack` finds.
        masks: whether its images have masks.
        batch_size: 0: not known.
        sampler: the class that orders its samples.
        drop_last: whether it drops a last batch that is not full; None: not known.
        transforms: by which a FastLoader makes such batches, in order, and others that the dataset has.
        added: transforms among these that the dataset lacks, but batches of that shape and type need.
        own_transforms: names of the transforms whose classes come from no known library.
        lists_transforms: whether the dataset says what its transforms are.
    """

    root: str = ""
    split: str = ""
    is_part: bool = False
    num_samples: int = 0
    same_labels: bool = False
    masks: bool = False
    batch_size: int = 0
    sampler: str = ""
    drop_last: bool | None = None
    transforms: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    own_transforms: tuple[str, ...] = ()
    lists_transforms: bool = False

    @property
    def known(self) -> tuple[str, ...]:
        """The transforms that fastload has, and that FastLoader runs only when asked."""
        return tuple(one for one in self.transforms if is_known(one) and _name(one) not in _NOT_NEEDED)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the transforms that fastload has not."""
        return tuple(_name(one) for one in self.transforms if not is_known(one))


def _name(transform: str) -> str:
    return transform.partition("(")[0]


def our_name(transform: str) -> str:
    """Returns a transform of other libraries, such as `CenterCrop(224)`, by the name that it has in fastload."""
    name, parenthesis, words = transform.partition("(")
    return _ALIASES.get(name, name) + parenthesis + words


def is_known(transform: str) -> bool:
    """Returns whether a FastLoader can do what a transform of other libraries does, such as `CenterCrop(224)`."""
    return _name(transform) in _OURS | _NOT_NEEDED


def completed(
    listed: Sequence[str],
    *,
    channels: int,
    size: tuple[int, int],
    floating: bool,
    resized: bool,
    calls: Collection[str] = (),
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the transforms by which a FastLoader makes batches like a dataset's, and which of them it added.

    Args:
        listed: the dataset's, by our names; without arguments where these are not known.
        channels: of the images in a batch.
        size: height and width of the images in a batch.
        floating: whether the dataset makes floating-point numbers of them.
        resized: whether they had other sizes before.
        calls: of the dataset's code, such as `PIL.Image.crop`.
    """
    normalize = f"Normalize({[0.0] * channels}, {[1.0] * channels})"
    bare = {f"{name}()": f"{name}({size})" for name in _MAKE_A_SIZE}
    bare |= {"Normalize()": normalize, "ColorJitter()": _USUAL_JITTER}
    names, begin, end = {_name(one) for one in listed}, list[str](), list[str]()
    if names & _MAKE_A_SIZE == {"Resize"}:  # one number keeps proportions, which other images may not have
        bare |= {one: f"Resize({size})" for one in listed if _name(one) == "Resize"}
    found = [bare.get(one, one) for one in listed]
    if resized and not names & _MAKE_A_SIZE:
        crops, flips = (any(word in call for call in calls) for word in ("crop", "flip"))
        begin = [f"{'RandomResizedCrop' if crops else 'Resize'}({size})"]
        begin += ["RandomHorizontalFlip()"] if flips and "RandomHorizontalFlip" not in names else []
    if floating and "Normalize" not in names:
        end = [normalize]
    return (*begin, *found, *end), (*begin, *end)


def to_type(plain: PlainLoader, *, keeps_transform: bool) -> str:
    """Returns the lines that pack a dataset's images and load them with FastLoader, with what has to be minded.

    With `keeps_transform` the dataset's own transforms stay, as a function of one sample.
    """
    packed = f"{PurePath(plain.root).name or 'packed'}.h5"
    known = () if keeps_transform else plain.known
    count = f"  # has to find the dataset's {plain.num_samples:,} images"
    whole = plain.num_samples and not plain.is_part and not plain.split
    lines = [
        f"fastload pack {shlex.quote(plain.root) if plain.root else 'FOLDER'} {shlex.quote(packed)}" + count * whole
    ]
    parts = [f'split="{plain.split}"'] if plain.split and not plain.is_part else []
    parts += ['fields=("images", "masks")'] if plain.masks else []
    parts += ["transform=own"] if keeps_transform else []
    words = [json.dumps(packed, ensure_ascii=False)]
    if parts or plain.is_part:
        words = [f"PackedDataset({', '.join(words + parts)})" + ".select(rows)" * plain.is_part]
    lines.append("from fastload import FastLoader" + ", PackedDataset" * bool(parts or plain.is_part))
    if known:
        lines.append(f"from fastload.transforms import {', '.join(sorted({_name(one) for one in known}))}")
    words += [f"batch_size={plain.batch_size}"] * bool(plain.batch_size)
    in_order = plain.sampler == "SequentialSampler"
    words += ["shuffle=False"] * in_order
    words += ['ends="drop"'] * (in_order and plain.drop_last is True)
    words += ['ends="exact"'] * (not in_order and plain.drop_last is False)
    words += [f"transform=[{', '.join(known)}]"] * bool(known)
    lines.append(f"loader = FastLoader({', '.join(words)})")
    return "\n".join([*lines, *(f"# {note}" for note in _notes(plain, keeps_transform=keeps_transform))])


_ORDERS = frozenset({"", "DistributedSampler", "RandomSampler", "SeedableRandomSampler", "SequentialSampler"})


def _notes(plain: PlainLoader, *, keeps_transform: bool) -> list[str]:
    """Returns where such a FastLoader differs from the loader, and what the lines leave to be written."""
    notes = []
    if plain.is_part:
        notes.append(
            "rows: numbers of the rows of this part's images, since the file holds all of them; its dataset `key` has "
            "the path of each row's image"
        )
    if not plain.same_labels:
        notes.append(
            "labels: as fastload pack finds them (class folders by name, or tables); compare them with the dataset's"
        )
    if plain.sampler == "SequentialSampler":
        notes.append("rows come in the file's order, which is shuffled unless it is packed with --no-shuffle")
    if plain.own_transforms and not keeps_transform:
        names = ", ".join(plain.own_transforms)
        notes.append(f"{names}: of the script itself, taken for fastload's of the same name: compare them")
    if keeps_transform:
        names = f" ({', '.join(plain.unknown)} and the like)" if plain.unknown else ""
        notes.append(
            f"own: a function of a sample, a tuple with a uint8 tensor (C, H, W), which does the dataset's own "
            f"transforms{names}"
        )
    elif plain.added:
        notes.append(
            f"{', '.join(plain.added)}: for batches of the same shape and type, in place of the dataset's own code; "
            f"what else that does has to be added"
        )
    if plain.sampler not in _ORDERS:
        notes.append(f"the order is an even shuffle, not that by {plain.sampler}")
    return notes
