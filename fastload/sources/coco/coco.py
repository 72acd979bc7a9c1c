"""COCO: folders of images, and in `annotations/` the objects in them.

    train2017/000000000009.jpg, val2017/
    annotations/instances_train2017.json, instances_val2017.json      boxes, polygons and run lengths
    annotations/person_keypoints_train2017.json                        persons with keypoints, where it stands alone
    train/a.jpg, train/_annotations.coco.json                          the same as Roboflow exports it
    annotations/panoptic_train2017.json, panoptic_train2017/*.png      segments of things and stuff
    test2017/                                                          images without annotations

Boxes are packed as they are; masks are drawn from the polygons only if they are asked for. Panoptic masks are files:
they are packed where there is no instances file, else if they are asked for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fastload.errors import ImageError, SourceError
from fastload.format.ragged import Column
from fastload.images.decode import upright
from fastload.images.fit import Target, resample_mask
from fastload.images.image_header import ImageHeader, check_size, header_of_pixels, probe_image
from fastload.sources.assemble import Draft, Samples, Splits, split_path
from fastload.sources.box_forms import BoxSlots
from fastload.sources.captions import captions_of
from fastload.sources.coco.instances import INSTANCES, PANOPTIC, Instances, join_instances, read_instances
from fastload.sources.coco.panoptic import Panoptic, join_panoptic, panoptic_masks, read_panoptic, segment_columns
from fastload.sources.keypoints import keypoints_column
from fastload.sources.listing import SPLITS, BoxesOf, BoxForm, Files, Masks, SourceOptions, first_few
from fastload.sources.mask_classes import type_of_numbers
from fastload.sources.tree import Tree, key_of
from fastload.system.advice import advice

_OTHERS = re.compile(r"(?:^|/)((?:stuff|image_info)_[^/]+\.json)$")
_YEAR = re.compile(r"_?\d{4}$")

_MANY_CROSSINGS = 2**22  # of polygon and row; more take memory as no object's do


class _Segments(NamedTuple):
    """A panoptic file, and the segments of the images of an instances file."""

    content: Instances  # its images and categories
    found: Panoptic
    pngs: NDArray[np.int64]  # position in the tree of each image's PNG, -1 for none
    position: int  # of the file itself in the tree


class _InstancesFile(NamedTuple):
    """One instances file and the images it is about."""

    split: str  # of its images
    json: str  # its name
    instances: Instances  # its content
    rows: NDArray[np.int64]  # position in the tree of each image that it lists, -1 if that is absent
    keep: NDArray[np.bool_]  # whether that image is there, and no annotation of it is bad
    position: int  # of the file itself in the tree
    segments: _Segments | None = None  # of these images, if they are asked for


def coco_evidence(tree: Tree) -> list[str]:
    """Returns the files instances_*.json, person_keypoints_*.json or _annotations.coco.json; else panoptic_*.json."""
    jsons = [name for _, name in tree.not_images if name.endswith(".json")]
    found = list(filter(INSTANCES.search, jsons)) or list(filter(PANOPTIC.search, jsons))
    return [key_of(name) for name in found]


def list_coco(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns COCO's images, with or without annotations, split by split, in the order of their names.

    Columns: `image_id` int64 (N,), -1 if no file lists the image; `boxes` float32 (N, M, 4) as x, y, width, height from
    0, in the order of the file, also those without area; `box_labels` int64 (N, M), category ids mapped to 0, 1, ... in
    ascending order (attributes `names` and, with the original ids, `category_ids`), -1 behind the last box;
    `box_crowd` uint8 (N, M); `num_boxes` int64 (N,). Where annotations have keypoints: `keypoints` float32
    (N, M, K, 3), see `keypoints_column`. `caption` and `num_captions`, if there are captions_*.json.

    Masks, if asked for, have `ignore_index` 255, or for more than 254 classes or instances, as uint16, 65,535. Smaller
    annotations (by `area`) are drawn over larger ones, crowds below all others:
      "semantic": 0 = background, box label + 1 = class, also of crowds.
      "instance": 0 = background, k = the k-th box of the image, counted from 1; crowds are ignored, as they are many.

    Panoptic masks ("panoptic", or by default where there is no instances file; "semantic" then has categories 0 to
    K - 1 of things and stuff, and void is `ignore_index`): 0 = in no segment, which is `ignore_index`, k = segment k,
    whose category is `segment_labels` at k - 1, see `segment_columns`.

    Raises:
        SourceError: there is no instances or panoptic file, or it is damaged or contradicts itself; there are no
            images; an image is not listed, a listed image has no file, an annotation has a bad box, region or category
            (these leave out the image if skipped); more classes or instances than a mask can hold.
    """
    only_panoptic = not any(map(INSTANCES.search, tree.names)) and any(map(PANOPTIC.search, tree.names))
    if only_panoptic and options.masks == "instance":
        raise SourceError(
            f"{tree.given}: has panoptic files and no instances file. Say `--masks panoptic` (each pixel's segment) or "
            "`--masks semantic` (its category)."
        )
    drawn = of_segments = ""  # the kind of masks
    if options.masks == "panoptic" or (only_panoptic and options.masks != "none"):
        of_segments = "semantic" if options.masks == "semantic" else "panoptic"
    elif options.masks in ("semantic", "instance"):
        drawn = options.masks
    draft.leave_out_broken(tree)
    notes = draft.notes
    if of_segments:
        notes.append("Masks come from panoptic_*.json.")
    elif any(map(PANOPTIC.search, tree.names)):
        notes.append(advice("panoptic"))
    if ignored := [key_of(name) for _, name in tree.not_images if name.endswith(".json") and _OTHERS.search(name)]:
        notes.append(f"NOT READ: {first_few(ignored)}; only objects are packed.")
    parts = _read_parts(
        tree, bool(drawn), draft, options.boxes, panoptic=bool(of_segments), only_panoptic=only_panoptic
    )
    first = parts[0].instances
    _check_categories(draft, [(part.json, part.instances) for part in parts])
    tests = _unlisted(tree, parts, draft)
    rows = [part.rows[part.keep] for part in parts]
    images = [*np.concatenate(rows).tolist(), *tests]
    said = [part.split for part, kept in zip(parts, rows, strict=True) for _ in kept] + ["test"] * len(tests)
    all_files = join_instances([part.instances for part in parts], [part.keep for part in parts])
    slots = BoxSlots.of(all_files.image, len(images), draft.where)
    about = {"names": first.category_names, "category_ids": first.category_ids}
    columns = {"image_id": Column(np.concatenate([all_files.image_ids, np.full(len(tests), -1, np.int64)]))}
    if not only_panoptic:
        boxes = all_files.boxes.astype(np.float32)
        columns |= slots.columns(boxes, all_files.category, about, box_crowd=all_files.crowd)
        outside = {
            key_of(tree.names[part.rows[i]]): f"{name} in {part.json}"
            for part in parts
            for i, name in part.instances.outside.items()
        }
        columns["boxes"] = replace(columns["boxes"], origins=outside)
    _check_meaning(draft, all_files, drawn)
    if all_files.keypoints.shape[1]:
        columns["keypoints"] = _keypoints(draft, all_files, slots)
    columns |= captions_of(draft, tree, images, options)
    if not only_panoptic and (empty := int((slots.counts == 0).sum()) - len(tests)):
        notes.append(f"Images without an annotation were kept ({empty}).")
    if thin := int((all_files.boxes[:, 2:] == 0).any(axis=1).sum()):
        notes.append(f"Boxes without area were kept as they are ({thin}).")
    draft.refuse_left_out()
    samples = Samples.in_tree(tree, images, Splits.of(said), columns, by_name=True)
    samples = replace(samples, declared=np.pad(all_files.sizes, ((0, len(tests)), (0, 0))))
    if of_segments:
        return _with_segments(draft, tree, samples, of_segments, parts, len(tests))
    if options.masks == "auto":
        notes.append(advice("masks of objects"))
    if not drawn or not images:
        return samples
    if without := int((all_files.rings + all_files.runs == 0).sum()):
        notes.append(f"Annotations without a region have a box, and are not in the masks ({without}).")
    jsons = [part.position for part in parts]  # from which the masks are drawn
    samples = samples.made_also_of(tree.sizes[jsons].sum(), tree.mtimes_ns[jsons].max())
    masks = replace(_drawn_masks(tree, drawn, all_files, slots, images), drawn=True)
    if options.boxes_of != "auto":
        assert isinstance(masks.files, DrawnMasks), "they have just been made"
        masks = replace(masks, files=UprightMasks(masks.files, tree.files.take(np.array(images)), options.boxes_of))
    return replace(samples, masks=masks)


def _with_segments(
    draft: Draft, tree: Tree, samples: Samples, kind: str, parts: list[_InstancesFile], others: int
) -> Samples:
    """Returns the samples with panoptic masks of a kind ("panoptic" or "semantic") and the columns of their segments.

    The last `others` of them are in no file.
    """
    of_parts = [part.segments for part in parts if part.segments is not None]
    _check_categories(draft, [(key_of(tree.names[part.position]), part.content) for part in of_parts])
    found = join_panoptic([part.found for part in of_parts], [part.keep for part in parts], others)
    pngs = [part.pngs[keep.keep] for part, keep in zip(of_parts, parts, strict=True)]
    at = np.concatenate([*pngs, np.full(others, -1, np.int64)])
    if without := int((at < 0).sum()) - others:
        draft.notes.append(f"Images without a panoptic annotation were kept, their masks are void ({without}).")
    first = of_parts[0].content
    about = {"names": first.category_names, "category_ids": first.category_ids}
    kind_of_mask: Literal["semantic", "panoptic"] = "semantic" if kind == "semantic" else "panoptic"
    masks = panoptic_masks(kind_of_mask, found, tree.files.take(np.maximum(at, 0)), at >= 0, about)
    columns = {} if kind == "semantic" else segment_columns(found, about)
    for part in of_parts:
        samples = samples.made_also_of(tree.sizes[part.position], tree.mtimes_ns[part.position])
    further = (np.where(at >= 0, of[at], 0) for of in (tree.sizes, tree.mtimes_ns))
    return replace(samples.made_also_of(*further), columns=samples.columns | columns, masks=masks)


def _check_categories(draft: Draft, files: list[tuple[str, Instances]]) -> None:
    """Raises SourceError for files, by name and content, whose categories differ."""
    (name, first), *others = files
    for other, content in others:
        if content.categories != first.categories:
            raise SourceError(
                f"{draft.where}: {name} and {other} have different categories. Pack each by itself, or fix the files."
            )


def _drawn_masks(tree: Tree, kind: str, found: Instances, slots: BoxSlots, images: list[int]) -> Masks:
    """Returns the masks of a kind ("semantic" or "instance"), which are drawn when they are read.

    `images` are the positions in the tree of all samples; first `found`'s, then samples without a mask.
    """
    sample, slot, crowd = slots.sample, slots.slot, found.crowd
    numbered = (sample >= 0) & (crowd == 0)
    most = len(found.category_names) if kind == "semantic" else int(slot[numbered].max(initial=-1)) + 1
    dtype, void = type_of_numbers(most, f"{tree.given}: {'categories' if kind == 'semantic' else 'instances'}")
    if (unknown := (found.sizes == 0).any(axis=1)).any():
        name = key_of(tree.names[images[int(np.argmax(unknown))]])
        raise SourceError(f"{tree.given}: height and width of {name} are not said, so its mask cannot be drawn.")
    values = found.category + 1 if kind == "semantic" else np.where(crowd == 1, void, slot + 1)
    # Order of drawing: by sample; in it crowds first, then larger before smaller areas, then as in the file.
    order = np.lexsort((-found.areas, 1 - crowd, sample)).astype(np.int64)
    rows, every, without = sample[order], np.arange(len(images)), len(images) - len(found.sizes)
    spans = [np.searchsorted(rows, every, "left"), np.searchsorted(rows, every, "right")]
    return Masks(
        files=DrawnMasks(
            sizes=np.pad(found.sizes, ((0, without), (0, 0))),
            spans=np.stack(spans, axis=1).astype(np.int64),
            drawn=order,
            values=np.where(sample < 0, 0, values).astype(dtype),
            ends=np.cumsum(found.rings),
            ring_ends=np.cumsum(found.ring_sizes),
            points=found.points,
            run_ends=np.cumsum(found.runs),
            lengths=found.lengths,
        ),
        present=every < len(found.sizes),
        names=("background", *found.category_names) if kind == "semantic" else (),
        ignore_index=void,
        dtype=dtype,
        attrs={"kind": kind, "category_ids": found.category_ids} if kind == "semantic" else {"kind": kind},
    )


def _read_parts(
    tree: Tree, drawn: bool, draft: Draft, boxes: BoxForm, *, panoptic: bool, only_panoptic: bool
) -> list[_InstancesFile]:
    """Returns the instances files of which images are there; refuses none, and files that contradict each other.

    `panoptic`: with the segments of their images; `only_panoptic`: in place of instances files there are panoptic ones.
    """
    position_of = {tree.names[i]: i for i in tree.images().tolist()}
    folders = {split_path(name)[0] for name in position_of}
    parts: list[_InstancesFile] = []
    owner: dict[int, str] = {}
    pattern = PANOPTIC if only_panoptic else INSTANCES
    jsons = [(i, match) for i, name in enumerate(tree.names) if (match := pattern.search(name))]
    of_keypoints = [key_of(tree.names[i]) for i, match in jsons if match.groupdict().get("keypoints")]
    if 0 < len(of_keypoints) < len(jsons):
        jsons = [(i, match) for i, match in jsons if not match["keypoints"]]
        draft.notes.append(
            f"NOT READ: {first_few(of_keypoints)}, as {first_few([key_of(tree.names[i]) for i, _ in jsons], 2)} hold "
            "all objects of these images. To pack persons with their keypoints instead, move the latter away."
        )
    if not jsons:
        raise SourceError(
            f"{tree.given}: there is no instances_*.json or person_keypoints_*.json. Unpack COCO's annotations into a "
            "folder annotations next to the folders of images."
        )
    for position, match in jsons:
        json = key_of(tree.names[position])
        # Likeliest first. Images may lie anywhere below these; for the last two only directly in them.
        folder = split_path(tree.names[position])[0]
        above, base = split_path(folder[:-1])
        root = above if base == "annotations" else folder
        name = match[match.lastindex] if match.lastindex else "all"
        stems = dict.fromkeys((name, _YEAR.sub("", name)))
        candidates = [f"{root}{at}{stem}/" for stem in stems for at in ("", "images/")] + [f"{root}images/", root]
        if not folders.intersection(candidates[-2:]) and not any(
            at.startswith(tuple(candidates[:-2])) for at in folders
        ):
            draft.notes.append(f"{json} was ignored: its images are not there (no {key_of(candidates[0])}).")
            continue
        bare = _YEAR.sub("", name)
        split = SPLITS.get(bare.lower(), key_of(bare))
        if other := next((part.json for part in parts if part.split == split), ""):
            raise SourceError(f"{tree.given}: {other} and {json} are both the split {split!r}. Move one of them away.")
        segments = _read_segments(tree, split_path(tree.names[position])[0], name, position_of) if panoptic else None
        if only_panoptic and segments is not None:
            instances = segments.content
        elif only_panoptic:
            instances = read_panoptic(tree.read_text(position), f"{tree.path / json}")[0]
        else:
            instances = read_instances(tree.read_text(position), f"{tree.path / json}", drawn, boxes)
        folder, names = _found_names(draft, json, instances.names, candidates, position_of)
        rows = np.array([position_of.get(folder + name, -1) for name in names], np.int64)
        keys = [key_of(folder + name) for name in names]
        if not keys:
            raise SourceError(f"{tree.path / json} lists no images. Fetch it again, or move it away.")
        for i, row in enumerate(rows.tolist()):
            if row < 0:
                draft.leave_out(keys[i], f"is listed in {json}, but has no file")
            elif row in owner:
                raise SourceError(
                    f"{tree.path / json}: {keys[i]} is listed a second time (first in {owner[row]}). "
                    "Fix the file: an image is one sample of one split."
                )
            else:
                owner[row] = json
        for at, reason in instances.bad:
            if at < 0:
                draft.leave_out(f"{json}: {reason.partition(' has ')[0]}", f"has {reason.partition(' has ')[2]}")
            else:
                draft.leave_out(keys[at], f"is contradicted by {json}: {reason}")
        keep = rows >= 0
        keep[[at for at, _ in instances.bad if at >= 0]] = False
        if segments is not None:
            segments = _for_images(draft, tree, segments, instances, keys, keep)
        draft.notes.append(f"Split {split}: {len(rows)} images of {json} in {key_of(folder) or 'the folder itself'}.")
        parts.append(_InstancesFile(split, json, instances, rows, keep, position, segments))
    if not parts:
        raise SourceError(
            f"{tree.given}: there are no images of {first_few([key_of(tree.names[i]) for i, _ in jsons])}. Unpack them "
            "next to the folder annotations, as train2017/ and val2017/."
        )
    return parts


def _read_segments(tree: Tree, folder: str, name: str, position_of: dict[str, int]) -> _Segments:
    """Returns the content of panoptic_NAME.json in a folder, and the positions of the PNGs of its images."""
    json = f"{folder}panoptic_{name}.json"
    position = next((i for i, other in tree.not_images if other == json), -1)
    if position < 0:
        raise SourceError(f"{tree.given}: there is no {key_of(json)}, which `--masks panoptic` packs. Put it there.")
    content, found = read_panoptic(tree.read_text(position), f"{tree.path / key_of(json)}")
    above = split_path(folder[:-1])[0] if folder else ""
    folders = dict.fromkeys(f"{root}panoptic_{name}/" for root in (folder, above))
    there = max(folders, key=lambda at: sum(at + file in position_of for file in found.files))
    pngs = [position_of.get(there + file, -1) for file in found.files]
    if max(pngs, default=-1) < 0:
        raise SourceError(
            f"{tree.given}: {key_of(json)} has no PNGs in {' or '.join(map(key_of, folders))}. Unpack "
            f"panoptic_{name}.zip next to it."
        )
    return _Segments(content, found, np.array(pngs, np.int64), position)


def _for_images(
    draft: Draft, tree: Tree, segments: _Segments, instances: Instances, keys: list[str], keep: NDArray[np.bool_]
) -> _Segments:
    """Returns the segments of the images of a file, by their ids; those that contradict are left out of `keep`, too."""
    at = {number: i for i, number in enumerate(segments.content.image_ids.tolist())}
    rows = np.array([at.get(number, -1) for number in instances.image_ids.tolist()], np.int64)
    found, pngs = segments.found.of_images(rows), np.where(rows < 0, -1, segments.pngs[rows])
    bad = dict(segments.content.bad) if segments.content is not instances else {}
    json = key_of(tree.names[segments.position])
    for i, row in enumerate(rows.tolist()):
        reason = f"is contradicted by {json}: {bad[row]}" if row in bad else ""
        if found.files[i] and pngs[i] < 0:
            reason = reason or f"has no mask: {found.files[i]}, which {json} names, is not there"
        if reason:
            draft.leave_out(keys[i], reason)
            keep[i] = False
    return segments._replace(found=found, pngs=pngs)


def _found_names(
    draft: Draft, json: str, names: list[str], folders: list[str], position_of: Mapping[str, int]
) -> tuple[str, list[str]]:
    """Returns the folder that holds most of the images with these names, and the names as it has them.

    If not all are there, `\\` counts as `/` in the others, and as many of their first parts are left out as finds most,
    such as folders of the machine where the file was written.
    """

    def spelled(folder: str, cut: int) -> list[str]:
        return [name if folder + name in position_of else _without_first(name, cut) for name in names]

    def there(folder: str, names: list[str]) -> int:
        return sum(folder + name in position_of for name in names)

    best = max(folders, key=lambda folder: there(folder, names))
    found, plain = there(best, names), names
    deepest = max((name.count("/") + name.count("\\") for name in names), default=0)
    for cut, folder in itertools.product(range(deepest + 1 if found < len(names) else 0), folders):
        tried = spelled(folder, cut)
        if (count := there(folder, tried)) > found:
            best, plain, found = folder, tried, count
    if changed := [(old, new) for old, new in zip(names, plain, strict=True) if old != new]:
        old, new = changed[0]
        draft.notes.append(f"Names in {json} that no image has were read as names of images: {old} as {new}.")
    return best, plain


def _without_first(name: str, count: int) -> str:
    """Returns a path with `/` for `\\`, without `./` and so many first parts, as far as it has them; none with `..`."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
    return name if ".." in parts or not parts else "/".join(parts[min(count, len(parts) - 1) :])


def _check_meaning(draft: Draft, found: Instances, drawn: str) -> None:
    """Notes or refuses annotations that are well formed and yet cannot mean what they say."""
    here = found.image >= 0
    if found.made_boxes:
        draft.notes.append(f"Annotations without a bbox got the one around their segmentation ({found.made_boxes}).")
    if here.any() and found.crowd[here].all():
        draft.notes.append(f"Every annotation is a crowd (iscrowd 1), of several objects ({int(here.sum())}).")
        if drawn == "instance":
            raise SourceError(
                f"{draft.where}: every annotation is a crowd (iscrowd 1), and those are no instances: masks would be "
                "void throughout. Write iscrowd 0 for single objects, or say `--masks semantic`."
            )
    boxes, sizes = found.boxes[here], found.sizes[found.image[here]]
    if len(boxes) and boxes.any() and (boxes >= 0).all() and (boxes <= 1).all() and not (sizes == 1).any():
        raise SourceError(
            f"{draft.where}: all boxes lie between 0 and 1, as fractions of the image do; COCO's are pixels (first: "
            f"{', '.join(f'{number:g}' for number in boxes[0].tolist())}). Multiply them by width and height."
        )


def _keypoints(draft: Draft, found: Instances, slots: BoxSlots) -> Column:
    """Returns the column of keypoints; their names only if all categories have the same."""
    kinds = found.kinds_of_keypoints
    names, skeleton = kinds[0] if len(kinds) == 1 else ((), ())
    column = keypoints_column(slots, found.keypoints, names, skeleton)
    which = (
        first_few(names) if names else f"{len(kinds)} categories name them differently" if kinds else "without names"
    )
    mirrored = "" if "flip_pairs" in column.attrs else "; which are left and right is not known, so mirrors swap none"
    draft.notes.append(f"Keypoints of each object: {found.keypoints.shape[1]} ({which}){mirrored}.")
    return column


def _unlisted(tree: Tree, parts: list[_InstancesFile], draft: Draft) -> list[int]:
    """Returns the positions of images in folders such as test2017/; unlisted images next to listed ones are noted."""
    listed = {row for part in parts for row in part.rows.tolist()}
    pngs = {png for part in parts if part.segments for png in part.segments.pngs.tolist()}
    folders = {split_path(tree.names[i])[0] for i in listed if i >= 0}
    jsons = " or ".join(part.json for part in parts)
    tests = []
    for i in [i for i in tree.images().tolist() if i not in listed and i not in pngs]:
        folder = split_path(tree.names[i])[0]
        if folder in folders:
            draft.leave_out(key_of(tree.names[i]), f"is not listed in {jsons}")
        elif SPLITS.get(_YEAR.sub("", split_path(folder[:-1])[1]).lower()) == "test":
            tests.append(i)
    if tests:
        draft.notes.append(f"Split test: {len(tests)} images without annotations; num_boxes is 0 and image_id -1.")
    return tests


@dataclass(frozen=True, eq=False)
class DrawnMasks:
    """Draws the mask of an image, (H, W), when it is read: 0 = background, later annotations over earlier ones."""

    sizes: NDArray[np.int64]  # (N, 2), height and width of each image
    spans: NDArray[np.int64]  # (N, 2), where the annotations of each image begin and end in `drawn`
    drawn: NDArray[np.int64]  # annotations in the order of drawing
    values: NDArray[np.uint8 | np.uint16]  # (A,), value in the mask of each annotation, whose type the mask has
    ends: NDArray[np.int64]  # (A,), where the polygons (rings) of each annotation end in `ring_ends`
    ring_ends: NDArray[np.int64]  # where the numbers of each ring end in `points`
    points: NDArray[np.float32]  # x, y, x, y, ...
    run_ends: NDArray[np.int64]  # (A,), where the runs of each annotation end in `lengths`
    lengths: NDArray[np.uint32]  # pixels of background and region in turn, down the columns

    def header(self, i: int) -> ImageHeader:
        """Returns the header of mask i: height and width of the image by the annotations, 1 channel."""
        height, width = self.sizes[i].tolist()
        check_size(height, width)
        return header_of_pixels((height, width), self.values.dtype)

    def read(self, i: int) -> NDArray[Any]:
        """Returns the mask of image i, uint8 or uint16 (H, W).

        ImageError says if its size is unknown, too large or another.
        """
        header, (first, last) = self.header(i), self.spans[i].tolist()
        mask = np.zeros((header.height, header.width), self.values.dtype)
        for a in self.drawn[first:last].tolist():
            value = self.values[a]
            lengths = self.lengths[self.run_ends[a - 1] if a else 0 : self.run_ends[a]]
            if len(lengths):
                if int(lengths.sum(dtype=np.int64)) != mask.size:
                    raise ImageError("has runs of another size than its image")
                inside = np.repeat(np.arange(len(lengths)) % 2 == 1, lengths)
                mask[inside.reshape(mask.shape[::-1]).T] = value
            for ring in range(self.ends[a - 1] if a else 0, self.ends[a]):
                start = self.ring_ends[ring - 1] if ring else 0
                fill_polygon(mask, self.points[start : self.ring_ends[ring]].reshape(-1, 2), value)
        return mask

    def take(self, indices: NDArray[np.integer[Any]]) -> DrawnMasks:
        return replace(self, sizes=self.sizes[indices], spans=self.spans[indices])

    def compact(self) -> DrawnMasks:
        """Returns the same masks without the annotations of others."""
        counts = self.spans[:, 1] - self.spans[:, 0]
        drawn = self.drawn[_ranges(self.spans[:, 0], counts)]
        stops = np.cumsum(counts)
        ends, rings = _cut(self.ends, drawn)
        ring_ends, points = _cut(self.ring_ends, rings)
        run_ends, runs = _cut(self.run_ends, drawn)
        return replace(
            self,
            spans=np.stack([stops - counts, stops], axis=1),
            drawn=np.arange(len(drawn)),
            values=self.values[drawn],
            ends=ends,
            ring_ends=ring_ends,
            points=self.points[points],
            run_ends=run_ends,
            lengths=self.lengths[runs],
        )


def _ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the numbers start, start + 1, ..., `count` of them, of each pair, one range after another."""
    before = np.cumsum(counts) - counts
    shift: NDArray[np.int64] = np.repeat(starts - before, counts)
    return shift + np.arange(len(shift))


def _cut(ends: NDArray[np.int64], chosen: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the ends of the chosen lists among lists that lie one behind another, and where their items lay."""
    starts = np.append(0, ends)[chosen]
    counts = ends[chosen] - starts
    return np.cumsum(counts), _ranges(starts, counts)


def fill_polygon(mask: NDArray[Any], points: NDArray[np.floating[Any]], value: int | np.integer[Any]) -> None:
    """Sets the pixels of a mask whose centres lie inside a polygon, by the even-odd rule.

    Like cocoapi, but without its rounding to a fifth of a pixel. Pixels outside of the mask are left out.

    Args:
        mask: uint8 or uint16 (H, W); pixel (0, 0) is the square from 0 to 1.
        points: (P, 2), x and y of the corners; fewer than 3 cover nothing.
        value: the value to set.
    """
    height, width = mask.shape
    if len(points) < 3:
        return
    x0, y0 = points.T.astype(np.float64)
    x1, y1 = np.roll(x0, -1), np.roll(y0, -1)
    # The rows whose centre line an edge crosses; the upper end counts, the lower does not.
    first = np.clip(np.ceil(np.minimum(y0, y1) - 0.5), 0, height).astype(np.int64)
    counts = np.clip(np.ceil(np.maximum(y0, y1) - 0.5), 0, height).astype(np.int64) - first
    total = int(counts.sum())
    if total == 0:
        return
    if total > _MANY_CROSSINGS + 64 * mask.size:
        raise ImageError(f"has a polygon of {len(points)} corners that crosses its rows {total} times")
    edge = np.repeat(np.arange(len(points)), counts)
    row = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + first[edge]
    x = x0[edge] + (row + 0.5 - y0[edge]) * ((x1 - x0)[edge] / (y1 - y0)[edge])
    # The first pixel whose centre is not left of the crossing: from it on, inside and outside change.
    column = np.clip(np.ceil(x - 0.5), 0, width).astype(np.int64)
    top, left = int(row.min()), int(column.min())
    size = int(row.max()) + 1 - top, int(column.max()) + 1 - left
    crossings = np.bincount((row - top) * size[1] + column - left, minlength=size[0] * size[1])
    # Only odd or even matters, which 8 bits keep: four times as fast as sums of 64 bits.
    odd = np.cumsum(crossings.astype(np.uint8).reshape(size), axis=1, dtype=np.uint8)[:, :-1] & 1
    np.copyto(mask[top : top + size[0], left : left + size[1] - 1], value, where=odd.view(np.bool_), casting="unsafe")


@dataclass(frozen=True, eq=False)
class UprightMasks:
    """Draws the masks of images that have another size than their annotations declare, at the size that they have."""

    masks: DrawnMasks  # at the sizes that the annotations declare
    images: Files
    drawn_on: BoxesOf  # "upright": the declared size is wrong; "stored": masks are turned; "declared": resized

    def header(self, i: int) -> ImageHeader:
        """Returns the header of mask i: height and width of the image, and what its masks have."""
        header = self._image(i)
        return self.masks.header(i)._replace(height=header.height, width=header.width)

    def read(self, i: int) -> NDArray[Any]:
        """Returns the mask of image i, (H, W); raises as `DrawnMasks`."""
        image = self._image(i)
        if self.drawn_on == "upright":
            size = np.array([[image.height, image.width]])
            return replace(self.masks.take(np.array([i])), sizes=size).read(0)
        mask = self.masks.read(i)
        if self.drawn_on == "stored":
            mask = np.ascontiguousarray(upright(mask[..., None], image.orientation)[..., 0])
        if mask.shape == (image.height, image.width):
            return mask
        out = np.empty((image.height, image.width), mask.dtype)
        resample_mask(mask, Target(image.height, image.width, 1, mask.dtype, "stretch"), out)
        return out

    def take(self, indices: NDArray[np.integer[Any]]) -> UprightMasks:
        return replace(self, masks=self.masks.take(indices), images=self.images.take(indices))

    def compact(self) -> UprightMasks:
        """Returns the same masks without the annotations of others."""
        return replace(self, masks=self.masks.compact())

    def _image(self, i: int) -> ImageHeader:
        return probe_image(lambda size: self.images.read_head(i, size))
