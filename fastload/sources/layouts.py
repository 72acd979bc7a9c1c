"""The layouts that `fastload pack` knows, how the one at hand is told, and its listing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from fastload.errors import OptionError, SourceError
from fastload.sources.ade20k import ade20k_evidence, list_ade20k
from fastload.sources.arrays import arrays_evidence, list_arrays
from fastload.sources.camvid import camvid_evidence, list_camvid
from fastload.sources.celeba import celeba_evidence, list_celeba
from fastload.sources.cifar import cifar_evidence, list_cifar
from fastload.sources.coco import coco_evidence, list_coco
from fastload.sources.exported import exported_evidence, list_exported, why_passed_over
from fastload.sources.folder import folder_evidence, list_folder
from fastload.sources.hdf5 import hdf5_evidence, list_hdf5
from fastload.sources.imagenet import imagenet_evidence, list_imagenet
from fastload.sources.listing import Listing, OnError, first_few
from fastload.sources.manifest import list_manifest, manifest_evidence
from fastload.sources.mask_folders import list_mask_folders, mask_folders_evidence
from fastload.sources.mnist import list_mnist, mnist_evidence
from fastload.sources.options import SourceOptions
from fastload.sources.parquet import list_parquet, parquet_evidence
from fastload.sources.places import with_places
from fastload.sources.tree import Tree, open_tree
from fastload.sources.unread import unread_annotations
from fastload.sources.voc import list_voc, voc_evidence
from fastload.sources.webdataset import list_webdataset, webdataset_evidence


class Source(Protocol):
    """Lists one layout of dataset: a function in this package, one entry in LAYOUTS."""

    def __call__(self, source: str | Path | Tree, *, on_error: OnError, options: SourceOptions) -> Listing:
        """The listing of the dataset at a path, or of its tree when that is at hand already.

        Raises:
            SourceError: the dataset cannot be packed as it is.
        """
        ...


@dataclass(frozen=True)
class Layout:
    """One way in which people keep images.

    Attributes:
        source: makes the listing.
        evidence: the names in a tree by which the layout is told; empty when it is not this one. Cheap: it reads the
            heads of a few files at most.
        kind: "dataset" is told before "format", and that before "folder".
        line: what it is, for `fastload layouts`.
        decodes: its images are files to be decoded, which is worth processes, and not arrays to be copied.
        takes: the fields of SourceOptions that mean something to it. That no masks are wanted may be said to any.
    """

    source: Source
    evidence: Callable[[Tree], list[str]]
    kind: Literal["dataset", "format", "folder"]
    line: str
    decodes: bool = True
    takes: tuple[str, ...] = ()


_OF_TABLES = ("masks", "labels", "image_column", "split_column")

LAYOUTS: dict[str, Layout] = {
    "exported": Layout(list_exported, exported_evidence, "dataset", "What `fastload export` wrote", takes=("masks",)),
    "celeba": Layout(list_celeba, celeba_evidence, "dataset", "CelebA: aligned faces and its text files, or Kaggle's"),
    "imagenet": Layout(
        list_imagenet, imagenet_evidence, "dataset", "ImageNet: class folders, Kaggle's, or the original tars in place"
    ),
    "ade20k": Layout(
        list_ade20k, ade20k_evidence, "dataset", "ADE20K SceneParsing: scenes, masks of 150 classes", takes=("masks",)
    ),
    "voc": Layout(
        list_voc, voc_evidence, "dataset", "Pascal VOC, one year: palette masks, boxes, labels", takes=("masks",)
    ),
    "camvid": Layout(
        list_camvid, camvid_evidence, "dataset", "CamVid as in SegNet's tutorial: frames and masks", takes=("masks",)
    ),
    "coco": Layout(
        list_coco,
        coco_evidence,
        "dataset",
        "COCO: boxes; masks drawn with --masks semantic or instance",
        takes=("masks",),
    ),
    "cifar": Layout(
        list_cifar, cifar_evidence, "dataset", "CIFAR-10 and CIFAR-100: pickles for Python, or binary", decodes=False
    ),
    "mnist": Layout(
        list_mnist,
        mnist_evidence,
        "dataset",
        "MNIST, Fashion-MNIST, EMNIST, ...: idx files, gzipped or not",
        decodes=False,
    ),
    "manifest": Layout(
        list_manifest,
        manifest_evidence,
        "format",
        "A table that names the images: CSV, TSV or JSON lines (Kaggle, Hugging Face)",
        takes=(*_OF_TABLES, "root"),
    ),
    "parquet": Layout(
        list_parquet,
        parquet_evidence,
        "format",
        "Parquet with an image column, as on the Hugging Face Hub",
        takes=_OF_TABLES,
    ),
    "webdataset": Layout(
        list_webdataset,
        webdataset_evidence,
        "format",
        "WebDataset: tar shards, a sample's files by their common name",
        takes=("masks", "labels", "image_column"),
    ),
    "arrays": Layout(
        list_arrays,
        arrays_evidence,
        "format",
        "NumPy's .npy and .npz: images, labels, any named arrays",
        decodes=False,
        takes=("masks",),
    ),
    "hdf5": Layout(
        list_hdf5,
        hdf5_evidence,
        "format",
        "HDF5 of other writers: images and labels, fuel's, PCam's",
        decodes=False,
        takes=("masks",),
    ),
    "mask-folders": Layout(
        list_mask_folders,
        mask_folders_evidence,
        "format",
        "Images and masks of the same names in sibling folders",
        takes=("masks",),
    ),
    "folder": Layout(list_folder, folder_evidence, "folder", "A folder a class, with or without train, val and test"),
}

_KINDS = ("dataset", "format", "folder")


def detect_layout(path: str | Path | Tree) -> tuple[str, list[str]]:
    """The layout of the dataset at path, a key of LAYOUTS, and the evidence for it.

    Datasets known by name are looked for first, then formats, and a folder of images is what remains.

    Raises:
        MissingFileError: there is nothing at path.
        SourceError: it is nothing that can be read, or two layouts fit equally well.
    """
    tree = open_tree(path)
    # Its classes may be called as folders of other datasets are; those do not know more.
    if evidence := exported_evidence(tree):
        return "exported", evidence
    for kind in _KINDS:
        fitting = ((name, layout.evidence(tree)) for name, layout in LAYOUTS.items() if layout.kind == kind)
        found = {name: evidence for name, evidence in fitting if evidence}
        if len(found) > 1:
            fits = "; ".join(f"{name} by {first_few(evidence, 3)}" for name, evidence in found.items())
            raise SourceError(
                f"{tree.given}: more than one layout fits: {fits}. Say which one it is: "
                f"{' or '.join(f'`--layout {name}`' for name in found)}."
            )
        if found:
            return next(iter(found.items()))
    return "folder", []


def list_source(
    path: str | Path | Tree,
    layout: str | None = None,
    on_error: OnError = "fail",
    options: SourceOptions | None = None,
) -> Listing:
    """The listing of the dataset at path.

    Args:
        path: folder, .zip or uncompressed .tar; a table or array file; or a tree.
        layout: a key of LAYOUTS; None: told by `detect_layout`.
        on_error: whether samples that the dataset itself contradicts (an annotated image without a file, a dangling
            link) stop the listing, or are left out and named in `Listing.skipped`.
        options: what the user says about it.

    Raises:
        OptionError: there is no such layout, or an option means nothing to it.
        MissingFileError: there is nothing at path.
        SourceError: the dataset cannot be packed as it is.
    """
    if layout is not None and layout not in LAYOUTS:
        raise OptionError(f"There is no layout {layout!r}. Choose one of {', '.join(LAYOUTS)}, or leave it to be told.")
    tree = open_tree(path)
    name = layout or detect_layout(tree)[0]
    if options is not None:
        _refuse_unused(options, name, str(tree.given))
    listing = LAYOUTS[name].source(tree, on_error=on_error, options=options or SourceOptions())
    if name != "exported" and (why := why_passed_over(tree)):
        listing = replace(listing, notes=(*listing.notes, f"What `fastload export` left was passed over: {why}"))
    if name in ("folder", "mask-folders"):
        listing = replace(listing, notes=(*listing.notes, *unread_annotations(tree)))
    # Datasets known by name say what their boxes are; formats may only call them so.
    return with_places(listing) if LAYOUTS[name].kind == "format" else listing


def _refuse_unused(options: SourceOptions, layout: str, where: str) -> None:
    for option in options.given():
        if option in LAYOUTS[layout].takes or (option == "masks" and options.masks == "none"):
            continue
        flag = "--" + option.replace("_", "-")
        theirs = ", ".join(name for name, other in LAYOUTS.items() if option in other.takes)
        raise OptionError(
            f"{where}: `{flag}` means nothing to the layout {layout}; it is for {theirs}. Leave it out, or name "
            "another layout with `--layout`."
        )
