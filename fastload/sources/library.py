"""Datasets that a library keeps, as sources: `torchvision:Flowers102` with `--root`, `hf:NAME` from the local cache.

torchvision's class lists the samples of each split, as it does in training. What it opens with Pillow and only converts
is packed as the file that it is; anything else as the pixels that it gives. `torchvision:DTD,partition=2` passes
arguments on. torchvision, and torch with it, is imported only if a source asks for it. What Hugging Face's `datasets`
and hub cached on this machine are Arrow and Parquet files, which are read as such.
"""

from __future__ import annotations

import inspect
import os
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from fastload.errors import FastloadError, ImageError, MissingExtraError, MissingFileError, OptionError, SourceError
from fastload.options.pack import SourceOptions
from fastload.sources.assemble import Draft, Samples
from fastload.sources.foreign import IN_PYTHON, PAIRS, Known, arrays_in, last_part, marked_in
from fastload.sources.listing import SPLITS, first_few
from fastload.sources.objects import object_samples
from fastload.sources.spans import Paths
from fastload.sources.tree import HUGGING_FACE, TORCHVISION, FolderFiles, Tree, is_library, key_of

_SPLITS = ("train", "trainval", "val", "valid", "test", "extra", "unlabeled")
"""Values of an argument `split` that are tried; `trainval` only where there is no `train`."""

_CHOICES: dict[str, tuple[str, dict[Any, str]]] = {
    "EMNIST": ("train", {True: "train", False: "test"}),  # its `split` names one of six sets
    "INaturalist": ("version", {"2021_train": "train", "2021_train_mini": "train", "2021_valid": "val",
                                "2017": "all", "2018": "all", "2019": "all"}),
    "LSUN": ("classes", {"train": "train", "val": "val", "test": "test"}),
    "Omniglot": ("background", {True: "background", False: "evaluation"}),
    "Places365": ("split", {"train-standard": "train", "train-challenge": "train", "val": "val", "test": "test"}),
    "QMNIST": ("what", {"train": "train", "test": "test", "nist": "nist"}),
    "SBDataset": ("image_set", {"train": "train", "val": "val"}),
}  # fmt: skip
"""Class -> the argument that chooses a split, and the split of each of its values; of others `_choice_of` knows it.

Of two values that are one split, the first that is there counts.
"""

_DEFAULTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "Imagenette": lambda root: {"size": next(
        (size for size, name in (("full", "imagenette2"), ("320px", "imagenette2-320"), ("160px", "imagenette2-160"))
         if (root / name).is_dir()), "full")},
    "OxfordIIITPet": lambda root: {"target_types": ["category", "segmentation"]},
    "Places365": lambda root: {"small": not any(root.glob("*_large*"))},
    "SBDataset": lambda root: {"mode": "segmentation"},
}  # fmt: skip
"""Class -> arguments other than its own defaults, given the root folder."""

_VIDEOS = "It holds videos, not images: write the frames that you want as images, a folder a class"
_OURS = "Its folder is read without torchvision, with all annotations: `fastload pack FOLDER OUT.h5`"
_MADE = f"Make it in Python: {IN_PYTHON.format('DATASET')[13:]}"
REFUSED = {
    **dict.fromkeys(("CelebA", "Cityscapes", "CocoCaptions", "CocoDetection"), _OURS),
    **dict.fromkeys(("VOCDetection", "VOCSegmentation"), _OURS),
    **dict.fromkeys(("HMDB51", "Kinetics", "UCF101", "MovingMNIST"), _VIDEOS),
    **dict.fromkeys(("FlyingChairs", "FlyingThings3D", "HD1K", "KittiFlow", "Sintel"),
                    f"It gives pairs of frames and optical flow. {PAIRS}"),
    **dict.fromkeys(("CREStereo", "CarlaStereo", "ETH3DStereo", "FallingThingsStereo", "InStereo2k", "Kitti2012Stereo",
                     "Kitti2015Stereo", "Middlebury2014Stereo", "SceneFlowStereo", "SintelStereo"),
                    f"It gives pairs of images and disparities. {PAIRS}"),
    "DatasetFolder": f"It needs a function that loads a sample. {_MADE}",
    "FakeData": f"It makes random images. {_MADE}",
    "LFWPairs": "It gives two faces a sample. `torchvision:LFWPeople` has the faces, and whose they are",
    "PhotoTour": f"It gives patches without labels, as arrays. {IN_PYTHON.format('[one.numpy() for one in DATASET]')}",
}  # fmt: skip
"""Class of torchvision -> what it gives that is no image with a label, a mask or boxes, and what to do."""


def library_tree(path: str | Path) -> Path | Tree:
    """Returns the folder in which Hugging Face cached a dataset; for one of torchvision a tree without files."""
    text = str(path)
    if text.startswith(HUGGING_FACE):
        return _cached_dataset(text.removeprefix(HUGGING_FACE))
    nothing = np.zeros(0, np.int64)
    files = FolderFiles(b"", Paths.of([]), nothing, nothing)
    return Tree(path=Path(path), names=[], sizes=nothing, mtimes_ns=nothing, files=files)


def torchvision_evidence(tree: Tree) -> list[str]:
    """Returns the source's name, if it is a dataset of torchvision."""
    return [str(tree.path)] if not tree.names and is_library(tree.path) else []


def list_torchvision(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the samples of a dataset of torchvision, split by split; its targets are labels, masks, or boxes.

    Files are sorted by name within a split, other samples as the class has them.
    """
    if not torchvision_evidence(tree):
        fix = "Write `torchvision:NAME` in its place, and give the folder as `--root`."
        raise SourceError(f"{tree.given}: no dataset of torchvision by its name. {fix}")
    name, *given = str(tree.path).removeprefix(TORCHVISION).split(",")
    dataset = _dataset_class(name, draft.where)
    accepted = _parameters(dataset)
    arguments = _parsed(given, accepted, draft.where)
    root = options.root
    if root is None:
        raise OptionError(f"{draft.where}: say which folder it lies in, or is to be downloaded to: `--root FOLDER`.")
    if not (root.is_dir() or options.download):
        raise MissingFileError(f"{root}: there is no such folder, where {draft.where} would lie. Check `--root`.")
    fixed = (_DEFAULTS[name](root) if name in _DEFAULTS else {}) | arguments
    if options.masks == "none":
        fixed.pop("target_types", None)
    if options.download:
        if "download" not in accepted:
            raise OptionError(f"{draft.where}: torchvision does not download it. Fetch it, and leave `--download` out.")
        draft.notes.append(f"torchvision was to download what was not there, into {root}.")
    absent: dict[str, str] = {}
    parts: dict[str, Any] = {}
    for value, split in _choice_of(name, accepted, fixed):
        if value == "trainval" and "train" in parts:
            continue
        chosen = {} if value is None else {_chooser(name, accepted): value}
        part = TorchvisionSplit(dataset, os.path.abspath(root), fixed | chosen)
        shown = split or name
        try:
            part.open(download=options.download)
        except FastloadError:
            raise
        except ImportError as exc:
            raise MissingExtraError(f"{draft.where}: torchvision needs another package: {exc}.") from exc
        except Exception as exc:  # noqa: BLE001  # absent or damaged data raise any error, by class
            if value is None or "Unknown value" not in str(exc):
                absent[shown if value in (split, None) else f"{shown} ({value})"] = " ".join(str(exc).split())
            continue
        if split in parts:
            draft.notes.append(f"NOT READ: {_chooser(name, accepted)}={value}, as {split} is read already.")
        parts.setdefault(split, part)
    if not parts:
        why = next(iter(absent.values()), "no split is known")
        raise MissingFileError(
            f"{draft.where}: torchvision does not find it in {root}: {why[:400]} Its folder is named as torchvision "
            f"names it: see `help(torchvision.datasets.{name})`. `--download` has torchvision fetch it."
        )
    if absent:
        said = "; ".join(f"{split}: {why[:200]}" for split, why in absent.items())
        draft.notes.append(f"Splits that are not there: {said}")
    counts = ", ".join(f"{split or 'samples'} {len(part):,}" for split, part in parts.items())
    draft.title = f"Layout torchvision: {name} in {root}: {counts}."
    as_files = all(part.is_of_files() for part in parts.values())
    for part in parts.values():
        part.paths = as_files
    samples = object_samples(draft, parts, root)
    if not as_files:
        return samples
    order = list(zip(samples.splits.index.tolist(), samples.keys, strict=True))
    return replace(samples, rows=np.array(sorted(range(len(order)), key=order.__getitem__), np.int64))


def _dataset_class(name: str, where: str) -> type[Any]:
    """Returns a class of torchvision.datasets by its name."""
    try:
        from torchvision import datasets
    except ModuleNotFoundError as exc:
        if exc.name not in ("torch", "torchvision"):
            raise
        raise MissingExtraError(f"{where}: {exc.name} is not installed: `pip install torchvision`.") from exc
    except Exception as exc:
        raise MissingExtraError(
            f"{where}: torchvision is installed, but cannot be imported: {exc}. It was probably built for another "
            "torch. Install both together: pip install --force-reinstall torch torchvision."
        ) from exc
    known = [one for one in datasets.__all__ if isinstance(getattr(datasets, one), type) and one != "VisionDataset"]
    if name not in known:
        alike = {one.lower(): one for one in known}
        close = [alike[one] for one in get_close_matches(name.lower(), alike, 4, 0.5)]
        fix = f"{f'Is it {first_few(close)}? ' if close else ''}It has {', '.join(known)}."
        raise OptionError(f"{where}: torchvision has no dataset {name!r}. {fix}")
    if reason := REFUSED.get(name):
        raise SourceError(f"{where}: not packed by its name. {reason}.")
    found: type[Any] = getattr(datasets, name)
    return found


def _parameters(dataset: type[Any]) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a class, with those that it passes on to the class that it derives from."""
    found: dict[str, inspect.Parameter] = {}
    for owner in dataset.__mro__[:-1]:
        here = inspect.signature(owner).parameters
        found = {**here, **found}
        if "__init__" in vars(owner) and all(one.kind is not one.VAR_KEYWORD for one in here.values()):
            break
    return {name: one for name, one in found.items() if one.kind is not one.VAR_KEYWORD}


def _parsed(given: list[str], accepted: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns the arguments after the name of a class, `partition=2`."""
    ours = ("root", "transform", "target_transform", "transforms", "download", "loader")
    usable = [name for name in accepted if name not in ours and not name.startswith("_")]
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or name not in usable:
            raise OptionError(f"{where}: {text!r} is no argument: write NAME=VALUE, of {', '.join(usable) or 'none'}.")
        plain = {"true": True, "false": False, "none": None}
        whole = value.removeprefix("-").isdecimal() and accepted[name].annotation not in (str, "str")
        found[name] = plain[value.lower()] if value.lower() in plain else int(value) if whole else value
    return found


def _chooser(name: str, accepted: Mapping[str, Any]) -> str:
    """Returns the argument that chooses the split of a class; "" if it has no splits."""
    if name in _CHOICES:
        return _CHOICES[name][0]
    return "train" if "train" in accepted else "split" if "split" in accepted else ""


def _choice_of(name: str, accepted: Mapping[str, Any], fixed: Mapping[str, Any]) -> list[tuple[Any, str]]:
    """Returns the values of the argument that chooses the split, with the name of the split of each."""
    chooser = _chooser(name, accepted)
    values = _CHOICES[name][1] if name in _CHOICES else {one: one for one in _SPLITS}
    if chooser == "train":
        values = {True: "train", False: "test"}
    if not chooser:
        return [(None, "")]
    if chooser in fixed:
        return [(fixed[chooser], values.get(fixed[chooser], str(fixed[chooser])))]
    return list(values.items())


class TorchvisionSplit:
    """The samples of one split, which each process opens anew; images are paths if `paths`."""

    def __init__(self, dataset: type[Any], root: str, arguments: dict[str, Any]) -> None:
        self.dataset, self.root, self.arguments = dataset, root, arguments
        self.paths = False

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "samples"}

    def open(self, *, download: bool = False) -> None:
        """Opens it; raises whatever the class raises."""
        # Some download unless download=False.
        more = {"download": download} if "download" in _parameters(self.dataset) else {}
        self.samples = self.dataset(self.root, **self.arguments, **more)

    @cached_property
    def samples(self) -> Any:
        self.open()
        return self.samples

    @property
    def classes(self) -> Any:
        return getattr(self.samples, "classes", None)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        if not self.paths:
            return _as_sample(self.samples[i])
        with _opened_as_paths():
            return _as_sample(self.samples[i])

    def is_of_files(self) -> bool:
        """Whether the images, and masks, are files that the class only opens and converts, judged by a few samples."""
        for i in np.unique(np.linspace(0, max(0, len(self) - 1), 4).astype(int)).tolist()[: len(self)]:
            try:
                with _opened_as_paths():
                    shown = _as_sample(self.samples[i])["image"]
                if not isinstance(shown, _Opened):
                    return False
                given = _as_sample(self.samples[i])
                image = given["image"]
                with Image.open(shown) as file:
                    same = np.array_equal(np.asarray(file.convert(image.mode)), np.asarray(image))
                if isinstance(given.get("mask"), Image.Image):
                    given["mask"].close()
            except Exception:  # noqa: BLE001  # the class does more than that, or the image is damaged, which listing says
                return False
            if not same:
                return False
        return True


class _Opened:
    """Stands for a Pillow image as long as it is only converted: the path of its file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return self.path

    def convert(self, *_: object, **__: object) -> Self:
        return self


@contextmanager
def _opened_as_paths() -> Iterator[None]:
    """Within the block, `PIL.Image.open` gives this thread the path of the file, which is not read."""
    here, opened = threading.get_ident(), Image.open

    def path_of(file: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != here:
            return opened(file, *arguments, **options)
        given = file if isinstance(file, (str, bytes, os.PathLike)) else file.name
        return _Opened(os.path.abspath(os.fsdecode(given)))

    Image.open = path_of  # type: ignore[assignment]  # what torchvision's classes call
    try:
        yield
    finally:
        Image.open = opened


def _as_sample(given: Any) -> Any:
    """Returns a sample of torchvision as `list_objects` takes it: what its target is shows in its type."""
    if not isinstance(given, tuple) or len(given) != 2:
        return given
    image, target = given
    sample: dict[str, Any] = {"image": image, "label": None}
    for part in target if isinstance(target, tuple) else (target,):
        if isinstance(part, (Image.Image, _Opened)):
            sample["mask"] = part
        elif isinstance(part, str) or (isinstance(part, list) and part and all(isinstance(one, str) for one in part)):
            sample["caption"] = part
        elif isinstance(part, dict) and "bbox" in part:  # WIDERFace: x, y, width, height
            sample |= {"objects": {"bbox": part["bbox"].tolist()}} | {key: None for key in part if key != "bbox"}
        elif isinstance(part, list) and all(isinstance(one, dict) and "bbox" in one for one in part):  # Kitti: corners
            boxes = [[x, y, right - x, bottom - y] for x, y, right, bottom in (one["bbox"] for one in part)]
            sample["objects"] = {"bbox": boxes, "category": [one["type"] for one in part]}
            sample |= {key: None for one in part for key in one if key not in ("bbox", "type")}
        elif sample["label"] is not None:
            raise ImageError("has two labels. Ask for one kind of target")
        else:
            sample["label"] = part
    return sample


_FOLDERS = {
    "CIFAR10": ("cifar-10-batches-py", "test_batch batches.meta"),
    "CIFAR100": ("cifar-100-python", "train test meta"),
    "Caltech101": ("caltech101", "101_ObjectCategories/ Annotations/"),
    "CLEVRClassification": ("clevr/CLEVR_v1.0", "scenes/CLEVR_train_scenes.json images/"),
    "DTD": ("dtd/dtd", "labels/train1.txt labels/test1.txt images/"),
    "FER2013": ("fer2013", "fer2013.csv"),
    "FGVCAircraft": ("fgvc-aircraft-2013b", "data/images_variant_train.txt data/variants.txt"),
    "Flowers102": ("flowers-102", "imagelabels.mat setid.mat"),
    "Food101": ("food-101", "meta/train.json meta/test.json images/"),
    "GTSRB": ("gtsrb", "GT-final_test.csv GTSRB/"),
    "Kitti": ("Kitti/raw", "training/image_2/ training/label_2/"),
    "LFWPeople": ("lfw-py", "people.txt pairs.txt"),
    "Omniglot": ("omniglot-py", "images_background/ images_evaluation/"),
    "OxfordIIITPet": ("oxford-iiit-pet", "annotations/trimaps/ annotations/trainval.txt images/"),
    "Places365": ("", "categories_places365.txt places365_val.txt"),
    "SBDataset": ("", "cls/ inst/ img/ train.txt"),
    "SEMEION": ("", "semeion.data"),
    "STL10": ("stl10_binary", "train_X.bin train_y.bin"),
    "SUN397": ("SUN397", "ClassName.txt a/abbey/"),
    "SVHN": ("", "train_32x32.mat test_32x32.mat"),
    "StanfordCars": ("stanford_cars", "devkit/cars_meta.mat"),
    "USPS": ("", "usps.bz2 usps.t.bz2"),
    "WIDERFace": ("widerface", "wider_face_split/wider_face_train_bbx_gt.txt"),
}
"""Class of torchvision -> its folder below the root, and the files and folders (ending in `/`) in it that show it.

Classes whose folder is read correctly as it is are not here.
"""


def torchvision_in(tree: Tree, paths: Mapping[str, list[str]]) -> Iterator[Known]:
    """Yields the datasets of torchvision that a tree holds; `paths`: last part -> whole paths that end in it."""
    for name, (folder, shown) in _FOLDERS.items():
        marks = shown.split()
        at = [{path.removesuffix(mark) for path in paths.get(last_part(mark), []) if f"/{path}".endswith(f"/{mark}")}
              for mark in marks]  # fmt: skip
        # SVHN, USPS and LSUN may be there in part.
        found = set.union(*at) if not folder and name in ("SVHN", "USPS") else set.intersection(*at)
        for place in sorted(found)[:1]:
            here, root, once = os.path.abspath(tree.path / place), "FOLDER", ""
            if not tree.in_place:
                once = f", once it lies unpacked on this machine{f' as FOLDER/{folder}' * bool(folder)}"
            elif f"{here}/".endswith(f"/{folder}/".replace("//", "/")):
                root = f"{here}/".removesuffix(f"{folder}/").rstrip("/") if folder else here
            else:
                once = f", once its folder {here} is called FOLDER/{folder}, as torchvision expects it"
            command = f"`fastload pack torchvision:{name} OUT.h5 --root {shlex.quote(root or '/')}`"
            seen = tuple(
                f"{key_of(place)}{mark}" for mark in marks if f"{place}{mark}" in paths.get(last_part(mark), [])
            )
            yield Known(f"torchvision's {name}", seen, f"{command} reads it{once} (torchvision has to be installed).")


def known_as(tree: Tree) -> list[Known]:
    """Returns the datasets of torchvision that a tree holds, and other kinds that class folders cannot express."""
    paths: dict[str, list[str]] = {}
    for name in [*(name for _, name in tree.not_images), *(f"{folder}/" for folder in tree.folders)]:
        paths.setdefault(last_part(name), []).append(name)
    return [*torchvision_in(tree, paths), *arrays_in(tree), *marked_in(tree, paths)][:3]


def refuse_known(tree: Tree) -> None:
    """Raises SourceError for a tree that is known by its names as a dataset that none of the layouts reads right."""
    if not (found := known_as(tree)):
        return
    said = " ".join(
        f"{first_few(seen, 2)} {'show' if seen[1:] else 'shows'} {what}. {way}" for what, seen, way in found
    )
    folder = " To pack its images by their folders all the same: `--layout folder`." if len(tree.images) else ""
    raise SourceError(f"{tree.given}: not packed as it lies here: {said}{folder}")


def _cached_dataset(given: str) -> Path:
    """Returns the folder in which Hugging Face keeps a dataset: one that is given, or that it cached by a name.

    `NAME,CONFIG` names one of several configurations. Nothing is downloaded.

    Raises:
        MissingFileError: there is none.
        SourceError: there are several, or it cached nothing that is Arrow or Parquet.
    """
    if os.path.exists(given):
        return Path(given)
    name, _, config = given.partition(",")
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    infos = [path for path in prepared.glob(f"{name.replace('/', '___')}/*/*/*/dataset_info.json")
             if any(path.parent.glob("*.arrow"))]  # fmt: skip
    configs = {path.parts[-4] for path in infos}
    snapshots: list[Path] = []
    for snapshot in hub.glob(f"datasets--{name.replace('/', '--')}/snapshots/*"):
        inside = [path.relative_to(snapshot) for path in snapshot.rglob("*.parquet")]
        tops = {path.parts[0] for path in inside if len(path.parts) > 1 and path.parts[0].lower() not in SPLITS}
        configs |= tops if len(tops) > 1 else set()
        snapshots += [snapshot] * bool(inside)
    if len(configs) > 1 and not config:
        raise SourceError(
            f"hf:{name}: there are several configurations of it in {prepared} or {hub}: {first_few(sorted(configs))}. "
            f"Say which one: `hf:{name},{min(configs)}`."
        )
    # What `datasets` prepared is the whole dataset; a snapshot of the hub may be a part, which the names of files show.
    of_config = [path.parent for path in infos if config in ("", path.parts[-4])]
    of_hub = [path / config for path in snapshots if (path / config).is_dir()]
    if found := of_config or of_hub:
        return max(found, key=lambda path: path.stat().st_mtime_ns)
    lines = f'from datasets import load_dataset; load_dataset("{name}").save_to_disk("{name.rpartition("/")[2]}")'
    raise MissingFileError(
        f"hf:{given}: neither a folder, nor Arrow or Parquet files of a dataset of this name in {prepared} or {hub}. "
        f"Hugging Face's library fetches and saves it: `python -c {shlex.quote(lines)}`; then give that folder."
    )
