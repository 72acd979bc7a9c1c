"""The layouts that `fastload pack` knows: a table of them, which one a path has, the listing of its
samples, and notes about annotations that are not read.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from fastload.errors import ImageError, OptionError, SourceError
from fastload.sources import (
    ade20k,
    camvid,
    celeba,
    cifar,
    cityscapes,
    cub,
    exported,
    folder,
    mask_folders,
    mnist,
    voc,
    yolo,
)
from fastload.sources.arrays import hdf5, npy
from fastload.sources.arrow import parquet
from fastload.sources.assemble import Draft, Samples, assemble
from fastload.sources.box_forms import with_box_forms
from fastload.sources.coco import coco
from fastload.sources.imagenet import imagenet
from fastload.sources.listing import Listing, OnError, SourceOptions, first_few
from fastload.sources.open_tree import open_tree
from fastload.sources.tables import image_tables, manifest
from fastload.sources.tables.frame import plain_name
from fastload.sources.tables.image_index import ImageIndex
from fastload.sources.tables.read_table import read_rows
from fastload.sources.tree import Tree, key_of
from fastload.sources.webdataset import webdataset

Source = Callable[[Draft, Tree, SourceOptions], Samples]
"""Returns the samples of a tree of one layout, and notes in the draft what is to be said and what is left out.

Raises SourceError if the dataset cannot be packed as it is.
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
    takes: tuple[str, ...] = ()  # the fields of SourceOptions that it uses; masks="none" is accepted by all


_MASKS = ("masks",)
_OF_TABLES = ("masks", "labels", "image_column", "split_column")

LAYOUTS: dict[str, Layout] = {
    "exported": Layout(exported.list_exported, exported.exported_evidence, "export",
        "What `fastload export` wrote", takes=_MASKS),
    "celeba": Layout(celeba.list_celeba, celeba.celeba_evidence, "dataset",
        "CelebA: aligned faces and its text files, or Kaggle's"),
    "imagenet": Layout(imagenet.list_imagenet, imagenet.imagenet_evidence, "dataset",
        "ImageNet: class folders, Kaggle's, or the original tars in place"),
    "ade20k": Layout(ade20k.list_ade20k, ade20k.ade20k_evidence, "dataset",
        "ADE20K SceneParsing: scenes, masks of 150 classes", takes=_MASKS),
    "voc": Layout(voc.list_voc, voc.voc_evidence, "dataset",
        "Pascal VOC, one year: palette masks, boxes, labels", takes=_MASKS),
    "camvid": Layout(camvid.list_camvid, camvid.camvid_evidence, "dataset",
        "CamVid as in SegNet's tutorial: frames and masks", takes=_MASKS),
    "cityscapes": Layout(cityscapes.list_cityscapes, cityscapes.cityscapes_evidence, "dataset",
        "Cityscapes: frames, and fine or coarse masks of 19 classes, or of instances", takes=_MASKS),
    "coco": Layout(coco.list_coco, coco.coco_evidence, "dataset",
        "COCO, or Roboflow's export: boxes; --masks semantic, instance (drawn) or panoptic", takes=_MASKS),
    "cub": Layout(cub.list_cub, cub.cub_evidence, "dataset",
        "CUB-200-2011: birds, their species and boxes"),
    "cifar": Layout(cifar.list_cifar, cifar.cifar_evidence, "dataset",
        "CIFAR-10 and CIFAR-100: pickles for Python, or binary", decodes=False),
    "mnist": Layout(mnist.list_mnist, mnist.mnist_evidence, "dataset",
        "MNIST, Fashion-MNIST, EMNIST, ...: idx files, gzipped or not", decodes=False),
    "manifest": Layout(manifest.list_manifest, image_tables.manifest_evidence, "format",
        "A table that names the images: CSV, TSV or JSON lines (Kaggle, Hugging Face)", takes=(*_OF_TABLES, "root")),
    "parquet": Layout(parquet.list_parquet, parquet.parquet_evidence, "format",
        "Parquet with an image column, as on the Hugging Face Hub", takes=_OF_TABLES),
    "webdataset": Layout(webdataset.list_webdataset, webdataset.webdataset_evidence, "format",
        "WebDataset: tar shards, a sample's files by their common name", takes=("masks", "labels", "image_column")),
    "arrays": Layout(npy.list_arrays, npy.arrays_evidence, "format",
        "NumPy's .npy and .npz: images, labels, any named arrays", decodes=False, takes=_MASKS),
    "hdf5": Layout(hdf5.list_hdf5, hdf5.hdf5_evidence, "format",
        "HDF5 of other writers: images and labels, fuel's, PCam's", decodes=False, takes=_MASKS),
    "yolo": Layout(yolo.list_yolo, yolo.yolo_evidence, "dataset",
        "YOLO: images/ and labels/ of boxes (or polygons), names in data.yaml"),
    "mask-folders": Layout(mask_folders.list_mask_folders, mask_folders.mask_folders_evidence, "format",
        "Images and masks of the same names in sibling folders", takes=_MASKS),
    "folder": Layout(folder.list_folder, folder.folder_evidence, "folder",
        "A folder a class, with or without train, val and test"),
}  # fmt: skip

_NO_INSTANCES = {
    "ade20k": "ADE20K SceneParsing has no instance masks. Accepted here: masks auto, semantic or none.",
    "camvid": "CamVid has no instance masks. Accepted here: masks auto, semantic or none.",
    "mask-folders": "Masks in a folder do not say of which kind they are. Accepted here: masks auto or none.",
}


def detect_layout(path: str | Path | Tree) -> tuple[str, list[str]]:
    """Returns the layout of the dataset at path, a key of LAYOUTS, and the names that show it.

    Exports and datasets known by name are looked for first, then formats; what remains is a folder of images.

    Raises:
        MissingFileError: there is nothing at path.
        SourceError: path cannot be read, or two layouts of one kind fit.
    """
    tree = open_tree(path)
    for kind in get_args(Kind):
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
    """Returns the listing of the dataset at path.

    Args:
        path: folder, .zip or uncompressed .tar; a table or array file; or a tree.
        layout: a key of LAYOUTS; None: found by `detect_layout`.
        on_error: whether contradictory samples (an annotated image without a file, a dangling link) are an error, or
            are left out and named in `Listing.skipped`.
        options: what the user says about the dataset.

    Raises:
        OptionError: there is no such layout, or it does not use one of the options.
        MissingFileError: there is nothing at path.
        SourceError: the dataset cannot be packed as it is.
    """
    if layout is not None and layout not in LAYOUTS:
        raise OptionError(f"There is no layout {layout!r}. Choose one of {', '.join(LAYOUTS)}, or leave it out.")
    tree = open_tree(path)
    name = layout or detect_layout(tree)[0]
    options = options or SourceOptions()
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
        draft.notes += unread_annotations(tree)
    listing = assemble(draft, samples)
    # Layouts of known datasets give the form of their boxes; formats may only name a column so.
    return with_box_forms(listing) if LAYOUTS[name].kind == "format" else listing


# Notes about annotations that a folder of images holds but its layout does not read, as users expect them packed.
_BY_NAME = (
    (re.compile(r"captions_\w+\.json"), "COCO's captions"),
    (re.compile(r"(person_keypoints|panoptic|instances|stuff|image_info)_\w+\.json"), "COCO's annotations"),
    (re.compile(r"(image_class_labels|train_test_split|bounding_boxes)\.txt"), "CUB-200's tables"),
    (re.compile(r".+_gt(Fine|Coarse)_\w+\.(json|png)"), "Cityscapes' annotations"),
)
_BY_HEAD = (
    (".txt", re.compile(rb"\A\s*\d+(\s+-?[\d.eE+-]+){4,}\s*(\n|$)"), "YOLO's boxes"),
    (".xml", re.compile(rb"<annotation"), "VOC's annotations"),
    (".json", re.compile(rb'"shapes"'), "LabelMe's annotations"),
    (".json", re.compile(rb'"annotations"'), "annotations as COCO's"),
)
_HEAD = 2**14
_MOST_TABLES = 4


def unread_annotations(tree: Tree) -> list[str]:
    """Returns a note for each kind of annotations in a tree of images that its layout does not read."""
    found: dict[str, list[str]] = {}
    read: Counter[tuple[str, str]] = Counter()
    for i, name in enumerate(tree.names):
        folder, _, base = name.rpartition("/")
        # The suffix rules most names out quickly: there may be a million images.
        if not base.endswith((".txt", ".json", ".xml", ".png")):
            continue
        form = next((form for pattern, form in _BY_NAME if pattern.fullmatch(base)), "")
        if not form and base.endswith((".txt", ".json", ".xml")) and read[folder, base[-5:]] < 2:
            read[folder, base[-5:]] += 1
            with suppress(ImageError):
                head = tree.files.read_head(i, _HEAD)
                form = next((form for of, sign, form in _BY_HEAD if base.endswith(of) and sign.search(head)), "")
        if form:
            found.setdefault(form, []).append(key_of(name))
    notes = [
        f"NOT READ: {first_few(names, 2)} look{'s' if len(names) == 1 else ''} like {form}. The packed file has none "
        "of it; convert it to COCO's layout, or to a table that names the images (see `fastload layouts`)."
        for form, names in found.items()
    ]
    return notes + _unread_tables(tree)


def _unread_tables(tree: Tree) -> list[str]:
    """Returns a note for each table with a column called like one of images; it says whether this names any."""
    tables = [i for i, name in tree.not_images if image_tables.is_table(name) and name.count("/") <= 1]
    if not tables:
        return []
    index, notes = ImageIndex(tree), []
    for i in tables[:_MOST_TABLES]:
        name = key_of(tree.names[i])
        try:
            head = tree.files.read_head(i, _HEAD)
            rows = read_rows(head, name, head=len(head) < int(tree.sizes[i]))
        except (SourceError, ImageError):
            continue
        names = rows.names or tuple(str(column[0]) for column in rows.columns if column)
        at = next((at for at, one in enumerate(names) if plain_name(one) in image_tables.IMAGE_COLUMNS), None)
        if at is None or len(names) < 2 or not rows.lines:
            continue
        cell = next((str(cell) for cell in rows.columns[at][0 if rows.names else 1 :] if cell), "")
        column = f"NOT READ: the table {name}. Its column {names[at]!r} (e.g. {cell!r}) names"
        if image_tables.read_head(tree, i, index):
            notes.append(f"{column} images: to pack what it says, give the table itself, or `--layout manifest`.")
            continue
        images = [key_of(tree.names[k]) for k in tree.images()[:1].tolist()]
        notes.append(
            f"{column} none, or few, of the images, which are called like {first_few(images)}. If it holds their "
            "labels, write their names as the files have them, and give the table itself."
        )
    return notes
