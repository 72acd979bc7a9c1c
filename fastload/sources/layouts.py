"""The layouts that `fastload pack` knows: a table of them, which one a path has, and the listing of its samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np

from fastload.errors import OptionError, SourceError
from fastload.options.pack import OnError, SourceOptions
from fastload.sources import (
    arrays,
    captions,
    celeba,
    coco,
    cub,
    exported,
    folder,
    foreign,
    imagenet,
    library,
    manifest,
    mask_folders,
    paired,
    parquet,
    records,
    voc,
    webdataset,
    yolo,
)
from fastload.sources.assemble import Draft, Samples, assemble
from fastload.sources.boxes import with_box_forms
from fastload.sources.listing import Listing, first_few
from fastload.sources.open_tree import open_tree
from fastload.sources.signs import around_source, passed_over, refuse_by_signs
from fastload.sources.tree import Tree, key_of

Source = Callable[[Draft, Tree, SourceOptions], Samples]
"""Returns the samples of a tree of one layout, and adds notes and left-out samples to the draft.

Raises SourceError if the dataset cannot be packed as it is, MissingExtraError if a package that reads it is not
there, and OptionError for an option that does not fit it.
"""


# In the order in which they are looked for: the classes of an export may be named like the folders of other layouts.
Kind = Literal["export", "dataset", "format", "folder"]


@dataclass(frozen=True)
class Layout:
    """One way of keeping a dataset of images."""

    source: Source  # lists a dataset of this layout
    # Returns the names in a tree that show this layout, none if it is another; reads a few first bytes at most.
    evidence: Callable[[Tree], list[str]]
    kind: Kind
    line: str  # description for `fastload layouts`
    decodes: bool = True  # whether images are files to decode, which pays for worker processes, not arrays to copy
    own: str = "(?!)"  # pattern of the beginning of paths whose left-out files it notes itself
    takes: tuple[str, ...] = ()  # the fields of SourceOptions that it uses; masks="none" is accepted by all


_MASKS = ("masks", "boxes_of")
_OF_TABLES = (*_MASKS, "labels", "image_column", "split_column", "captions", "boxes")

LAYOUTS: dict[str, Layout] = {
    "exported": Layout(exported.list_exported, exported.exported_evidence, "export",
        "What `fastload export` wrote", takes=("masks",)),
    "celeba": Layout(celeba.list_celeba, celeba.celeba_evidence, "dataset",
        "CelebA: aligned faces and its text files, or Kaggle's"),
    "imagenet": Layout(imagenet.list_imagenet, imagenet.imagenet_evidence, "dataset",
        "ImageNet: class folders, Kaggle's, or the original tars in place", own=r"(.*/)?ImageSets/|.*\.tar$"),
    "ade20k": Layout(partial(paired.list_paired, spec=paired.ADE20K), paired.ade20k_evidence, "dataset",
        "ADE20K SceneParsing: scenes, masks of 150 classes", takes=_MASKS),
    "voc": Layout(voc.list_voc, voc.voc_evidence, "dataset",
        "Pascal VOC, one year: palette masks, boxes, labels", takes=_MASKS,
        own=r"(.*/)?(JPEGImages|Annotations|ImageSets|Segmentation(Object|Class|ClassAug))/"),
    "camvid": Layout(partial(paired.list_paired, spec=paired.CAMVID), paired.camvid_evidence, "dataset",
        "CamVid as in SegNet's tutorial: frames and masks", takes=_MASKS),
    "cityscapes": Layout(partial(paired.list_paired, spec=paired.CITYSCAPES), paired.cityscapes_evidence, "dataset",
        "Cityscapes: frames, and fine or coarse masks of 19 classes, or of instances", takes=_MASKS,
        own=r"(.*/)?gt(Fine|Coarse)/"),
    "coco": Layout(coco.list_coco, coco.coco_evidence, "dataset",
        "COCO, or Roboflow's export: boxes; --masks semantic, instance (drawn) or panoptic",
        takes=(*_MASKS, "boxes", "captions"),
        own=r"(.*/)?(image_info|person_keypoints|instances|captions|stuff|panoptic)_[^/]*\.json$"),
    "captions": Layout(captions.list_captions, captions.captions_evidence, "dataset",
        "Images with texts: COCO's captions, Flickr8k, Flickr30k, SBU", takes=("captions",)),
    "cub": Layout(cub.list_cub, cub.cub_evidence, "dataset",
        "CUB-200-2011: birds, their species and boxes"),
    "mnist": Layout(arrays.list_mnist, arrays.mnist_evidence, "dataset",
        "MNIST, Fashion-MNIST, EMNIST, ...: idx files, gzipped or not", decodes=False),
    "manifest": Layout(manifest.list_manifest, manifest.manifest_evidence, "format",
        "A table that names the images: CSV, TSV or JSON lines (Kaggle, Hugging Face)", takes=(*_OF_TABLES, "root")),
    "parquet": Layout(parquet.list_parquet, parquet.parquet_evidence, "format",
        "Parquet with an image column, as on the Hugging Face Hub", takes=(*_OF_TABLES, "root")),
    "webdataset": Layout(webdataset.list_webdataset, webdataset.webdataset_evidence, "format",
        "WebDataset: tar shards, a sample's files by their common name",
        takes=(*_MASKS, "labels", "image_column", "captions", "boxes")),
    "mds": Layout(records.list_mds, records.mds_evidence, "format",
        "MosaicML's MDS shards, by their index.json", takes=(*_MASKS, "labels", "image_column", "captions")),
    "tfrecord": Layout(records.list_tfrecord, records.tfrecord_evidence, "format",
        "TFRecord of images and labels, also tensorflow-datasets' folders",
        takes=(*_MASKS, "labels", "image_column", "captions", "boxes")),
    "arrays": Layout(arrays.list_arrays, arrays.arrays_evidence, "format",
        "NumPy's .npy and .npz: images, labels, any named arrays", decodes=False, takes=(*_MASKS, "boxes")),
    "hdf5": Layout(arrays.list_hdf5, arrays.hdf5_evidence, "format",
        "HDF5 of other writers: images and labels, fuel's, PCam's", decodes=False, takes=(*_MASKS, "boxes")),
    "yolo": Layout(yolo.list_yolo, yolo.yolo_evidence, "dataset",
        "YOLO, also Darknet's: images and text files of boxes, polygons or keypoints; data.yaml", takes=("boxes",)),
    "mask-folders": Layout(mask_folders.list_mask_folders, mask_folders.mask_folders_evidence, "format",
        "Images and masks of the same names in sibling folders, or side by side", takes=(*_MASKS, "mask_files")),
    "folder": Layout(folder.list_folder, folder.folder_evidence, "folder",
        "A folder a class, with or without train, val and test", takes=("labels",)),
    "torchvision": Layout(library.list_torchvision, library.torchvision_evidence, "export",
        "A dataset of torchvision: `torchvision:Flowers102 --root FOLDER`", takes=(*_MASKS, "root", "download")),
}  # fmt: skip

_NO_INSTANCES = {
    "ade20k": "ADE20K SceneParsing has no instance masks. Accepted here: masks auto, semantic or none.",
    "camvid": "CamVid has no instance masks. Accepted here: masks auto, semantic or none.",
    "mask-folders": "Masks in a folder do not say of which kind they are. Accepted here: masks auto or none.",
}


_DETECTED: WeakKeyDictionary[Tree, tuple[str, list[str]]] = WeakKeyDictionary()  # who lists a tree asks again


def detect_layout(path: str | Path | Tree) -> tuple[str, list[str]]:
    """Returns the layout of the dataset at path, a key of LAYOUTS, and the names that show it.

    Exports and datasets known by name are looked for first, then formats; any other tree is a folder of images.

    Raises:
        MissingFileError: there is nothing at path.
        SourceError: path cannot be read, or two layouts of one kind fit, or it is known as something that none reads.
    """
    tree = open_tree(path)
    if tree not in _DETECTED:
        _DETECTED[tree] = _detected(tree)
    return _DETECTED[tree]


def _detected(tree: Tree) -> tuple[str, list[str]]:
    for kind in get_args(Kind):
        if kind == "format":  # next to class folders, these would be taken for what they are not
            library.refuse_known(tree)
        fitting = ((name, layout.evidence(tree)) for name, layout in LAYOUTS.items() if layout.kind == kind)
        found = {name: evidence for name, evidence in fitting if evidence}
        if len(found) > 1:
            fits = "; ".join(f"{name} by {first_few(evidence, 3)}" for name, evidence in found.items())
            fix = f"Say which one it is: {' or '.join(f'`--layout {name}`' for name in found)}."
            raise SourceError(f"{tree.given}: more than one layout fits: {fits}. {fix}")
        if found:
            return next(iter(found.items()))
        if kind == "format" and (why := foreign.foreign_format(tree)):
            raise SourceError(why)
    return "folder", []


def list_source(
    path: str | Path | Tree,
    layout: str | None = None,
    on_error: OnError = "fail",
    options: SourceOptions | None = None,
    classes: Collection[str] = (),
) -> Listing:
    """Returns the listing of the dataset at path.

    Args:
        path: folder, .zip or uncompressed .tar; a table or array file; or a tree.
        layout: a key of LAYOUTS; None: found by `detect_layout`.
        on_error: whether contradictory samples (an annotated image without a file, a dangling link) are an error, or
            are left out and named in `Listing.skipped`.
        options: what the user says about the dataset.
        classes: names of the classes of a packed file, of which a folder that is added to it may hold one alone.

    Raises:
        OptionError: there is no such layout, or it does not use one of the options.
        MissingFileError: there is nothing at path.
        SourceError: the dataset cannot be packed as it is; or no layout is recognised, and something in it speaks
            against a folder of images.
    """
    if layout is not None and layout not in LAYOUTS:
        raise OptionError(f"There is no layout {layout!r}. Choose one of {', '.join(LAYOUTS)}, or leave it out.")
    tree = open_tree(path)
    options = options or SourceOptions()
    name = layout or ("mask-folders" if options.mask_files else detect_layout(tree)[0])
    if layout is None and name == "folder" and len(tree.images):
        refuse_by_signs(tree, mask_folders.doubtful_pairs(tree), classes=classes, level=bool(options.labels))
    for option in options.given():
        if option not in LAYOUTS[name].takes and (option != "masks" or options.masks != "none"):
            theirs = ", ".join(name for name, other in LAYOUTS.items() if option in other.takes)
            raise OptionError(
                f"{tree.given}: `--{option.replace('_', '-')}` means nothing to the layout {name}; it is for {theirs}. "
                "Leave it out, or name another layout with `--layout`."
            )
    if options.masks == "instance" and name in _NO_INSTANCES:
        raise OptionError(_NO_INSTANCES[name])
    if options.masks == "panoptic" and name != "coco":
        raise OptionError(f"{tree.given}: `--masks panoptic` is for COCO's panoptic files, this is layout {name}.")
    draft = Draft(name, tree, on_error)
    samples = LAYOUTS[name].source(draft, tree, options)
    if not draft.title:
        evidence = LAYOUTS[name].evidence(tree)
        how = f"recognised by {first_few(evidence, 3)}" if evidence else "as asked for"
        draft.title = f"Layout {name}, {how}."
    if name != "exported" and (why := exported.why_ignored(tree)):
        draft.notes.append(f"What `fastload export` left was passed over: {why}")
    if name in ("folder", "mask-folders"):
        draft.notes += foreign.foreign_notes(tree) + around_source(tree)
    draft.notes += _passed_over(draft, tree)
    listing = assemble(draft, samples)
    # Layouts of known datasets give the form of their boxes; formats may only name a column so.
    listing = with_box_forms(listing, options.boxes) if LAYOUTS[name].kind == "format" else listing
    if options.boxes != "auto" and not any(column.moves in ("xywh", "xyxy") for column in listing.columns.values()):
        raise OptionError(f"{tree.given}: `--boxes {options.boxes}`, but nothing here holds boxes in pixels.")
    return listing


def _passed_over(draft: Draft, tree: Tree) -> list[str]:
    """Returns notes on what a layout has neither read nor spoken of, in the tree and in others that it has read."""
    notes, left_out, own = [], {key for key, _ in draft.skipped}, re.compile(LAYOUTS[draft.layout].own)
    for read in dict.fromkeys((tree, *draft.trees)):
        if read is tree or read.known.any():
            known, table = read.known.copy(), tree.file if read.path == tree.path else ""
            for i in np.flatnonzero(~known).tolist():
                name = read.names[i]
                known[i] = bool(own.match(name)) or bool(left_out and key_of(name) in left_out) or name == table
            notes += passed_over(read, draft.layout, known)
    if not tree.known[tree.images].any():  # samples are no files of it
        draft.note("Ignored other files", [key_of(name) for i, name in tree.not_images if not tree.known[i]])
    return notes
