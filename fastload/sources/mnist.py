"""MNIST and its relatives as idx files, gzipped or not: Fashion-MNIST, KMNIST, EMNIST, QMNIST and the like.

    train-images-idx3-ubyte[.gz]  train-labels-idx1-ubyte[.gz]  t10k-images-...  t10k-labels-...
    train-images.idx3-ubyte                           with a dot, as on Kaggle
    emnist-letters-train-images-idx3-ubyte            transposed images
    qmnist-train-labels-idx2-int                      eight numbers an image, the first its label

MNIST, Fashion-MNIST and KMNIST have the same file names, so they are recognised by the md5 of a file. Unpacked files
are read in place; gzipped ones are unpacked to memory.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import math
import re
import zlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fastload.errors import SourceError
from fastload.sources.arrays.named import NamedArray, samples_of_arrays
from fastload.sources.assemble import Draft, Samples, split_path
from fastload.sources.listing import SPLITS, SourceOptions, first_few, in_split_order
from fastload.sources.tree import Tree, key_of
from fastload.system.machine import available_memory

_NAME = re.compile(r"(?P<set>.*?)[-_.]?(?P<what>images|labels)[-.]idx[1-4][-.](ubyte|int)(?P<gz>\.gz)?", re.IGNORECASE)
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

_DIGITS = tuple("0123456789")
_FASHION = tuple("T-shirt/top|Trouser|Pullover|Dress|Coat|Sandal|Shirt|Sneaker|Bag|Ankle boot".split("|"))
_KUZUSHIJI = tuple("o ki su tsu na ha ma ya re wo".split())
_MOST_CLASSES = 1000  # EMNIST has 62
_QMNIST = ("hsf_series", "writer", "image_of_writer", "class_code", "image_of_nist", "duplicate", "reserved")

# md5 of the files of labels. Hashing the images would take far longer and say no more.
_MD5 = {
    "MNIST": "d53e105ee54ea40749a09fcbcd1e9432 ec29112dd5afa0611ce80d1b7f02629c "  # gzipped
    "a25bea736e30d166cdddb491f175f624 27ae3e4e09519cfbb04c629615203637",  # unpacked
    "Fashion-MNIST": "25c81989df183df01b3e8a0aad5dffbe bb300cfdad3c16e7a12a480ee83cd310 "
    "9018921c3c673c538a1fc5bad174d6f9 15d484375f8d13e6eb1aabb0c3f46965",
    "KMNIST": "e144d726b3acfaa3e44228e80efcd344 7320c461ea6c1c855c0b718fb2a4b134",
}
_TITLES = {md5: title for title, sums in _MD5.items() for md5 in sums.split()}
_CLASSES = {"MNIST": _DIGITS, "Fashion-MNIST": _FASHION, "KMNIST": _KUZUSHIJI, "QMNIST": _DIGITS}


def mnist_evidence(tree: Tree) -> list[str]:
    """Returns the files of a tree that are idx files of images or labels by their names."""
    return [key_of(name) for _, name in tree.not_images if _NAME.fullmatch(name.rpartition("/")[2])]


def list_mnist(draft: Draft, tree: Tree, options: SourceOptions) -> Samples:
    """Returns the images of idx files, (H, W, 1), in the order of the files; splits by file names.

    Columns: `labels` int64 (N,), -1 for the images of a file without labels; for QMNIST also `qmnist` int32 (N, 7).
    """
    family, sets = _find(draft, tree)
    title = _title(draft, tree, family, [there["labels"] for there in sets.values() if "labels" in there])
    arrays, keys = list[NamedArray](), list[str]()
    for split, there in sets.items():
        if "images" not in there:
            continue
        images, name = _read(tree, there["images"]), key_of(tree.names[there["images"]])
        if len(images.shape) != 3 or images.dtype != np.uint8 or 0 in images.shape:
            raise SourceError(f"{images.where}: holds {_kind_of(images)}; expected images, uint8 (n, height, width).")
        arrays.append(replace(images, name="images", split=split, axes="WHC" if "EMNIST" in title else "HWC"))
        keys += [f"{name}/{row:05d}" for row in range(images.shape[0])]
        if "labels" in there:
            arrays += _labels(replace(_read(tree, there["labels"]), split=split), images.shape[0], name)
    if "EMNIST" in title:
        draft.notes.append("EMNIST's images lie transposed in the files; they are packed upright.")
    largest = max([int(array.values().max(initial=0)) for array in arrays if array.name == "labels"], default=0)
    classes = _class_names(tree, family, title, largest)
    arrays = [replace(array, names=classes) if array.name == "labels" else array for array in arrays]
    used = sorted({i for there in sets.values() for i in there.values()})
    tree.known[used] = True
    samples = samples_of_arrays(draft, arrays, options)
    draft.title = f"Layout mnist: {title}, recognised by {first_few([key_of(tree.names[i]) for i in used])}."
    return replace(samples, keys=keys)


def _labels(file: NamedArray, count: int, images: str) -> list[NamedArray]:
    """Returns the label of each image, and its further numbers if it has QMNIST's."""
    if len(file.shape) not in (1, 2) or file.dtype.kind not in "iu" or 0 in file.shape[1:]:
        raise SourceError(f"{file.where}: holds {_kind_of(file)}; expected labels, integers (n,). Is it the file?")
    if file.shape[0] != count:
        raise SourceError(f"{file.where}: {file.shape[0]} labels for the {count} images of {images}. Fetch both again.")
    numbers = file.values().reshape(count, -1)
    labels, more = numbers[:, 0], numbers[:, 1:].astype(np.int32)
    found = [replace(file, name="labels", shape=labels.shape, values=lambda: labels)]
    if more.shape[1] == len(_QMNIST):
        found.append(replace(file, name="qmnist", shape=more.shape, values=lambda: more, names=_QMNIST))
    return found


def _kind_of(file: NamedArray) -> str:
    return f"{file.dtype} {file.shape}"


def _find(draft: Draft, tree: Tree) -> tuple[str, dict[str, dict[str, int]]]:
    """Returns the family, such as `emnist-letters`; and split -> positions of its `images` and `labels`."""
    families: dict[str, dict[str, dict[str, int]]] = {}
    doubled = []
    # Unpacked files first, so that they are preferred to gzipped ones of the same name.
    for i in sorted(range(len(tree.names)), key=lambda i: tree.names[i].lower().endswith(".gz")):
        folder, base = split_path(tree.names[i])
        if match := _NAME.fullmatch(base):
            family, _, part = match["set"].rpartition("-")
            there = families.setdefault(folder + family, {}).setdefault(part or "all", {})
            if there.setdefault(match["what"].lower(), i) != i:
                doubled.append(key_of(tree.names[i]))
    if doubled:
        draft.notes.append(f"Read the unpacked files, not {first_few(doubled)}.")
    with_images = [path for path, sets in families.items() if any("images" in there for there in sets.values())]
    if not with_images:
        raise SourceError(
            f"{tree.given}: no idx file with images, such as train-images-idx3-ubyte or train-images-idx3-ubyte.gz. "
            "Labels alone are no dataset; fetch the images."
        )
    if len(with_images) > 1:
        datasets = [key_of(path.strip("/")) or "the folder itself" for path in with_images]
        raise SourceError(
            f"{tree.given} holds more than one dataset of idx files: {first_few(sorted(datasets))}. Give the folder of "
            "one of them, or move its files to a folder of their own."
        )
    found: dict[str, dict[str, int]] = {}
    for part, there in families[with_images[0]].items():
        found["test" if part.lower() == "t10k" else SPLITS.get(part.lower(), part)] = there
        if "images" not in there:
            labels = key_of(tree.names[there["labels"]])
            draft.notes.append(f"Ignored {labels}: the images that its labels belong to are not there.")
    return split_path(with_images[0])[1], {split: found[split] for split in in_split_order(found)}


def _title(draft: Draft, tree: Tree, family: str, labels: list[int]) -> str:
    if "emnist" in family.lower():
        return f"EMNIST ({family})"
    if "qmnist" in family.lower():
        return "QMNIST"
    for i in labels:
        for content in (tree.read_text(i), _content(tree, i)[3]):
            if title := _TITLES.get(hashlib.md5(content, usedforsecurity=False).hexdigest()):
                draft.notes.insert(0, f"{key_of(tree.names[i])} has the md5 of {title}'s.")
                return title
    draft.notes.insert(0, "No file has the md5 of MNIST's, Fashion-MNIST's or KMNIST's: the classes have no names.")
    return "idx files like MNIST's"


def _read(tree: Tree, i: int) -> NamedArray:
    """Returns an idx file, whose values are in place if it is not packed."""
    dtype, shape, start, content = _content(tree, i)

    def values() -> NDArray[Any]:
        return np.frombuffer(content or tree.read_text(i), dtype, offset=start).reshape(shape)

    at = None if content else (tree.path / tree.names[i], start)
    return NamedArray("", tree.where(i), shape, dtype, values, int(tree.mtimes_ns[i]), at)


def _content(tree: Tree, i: int) -> tuple[np.dtype[Any], tuple[int, ...], int, bytes]:
    """Returns dtype, shape and first byte of the values of an idx file, and all of it, b"" if it can be read in place.

    A gzipped one is unpacked no further than one byte behind what its header promises.
    """
    where, packed = tree.where(i), tree.files.read_head(i, 2) == b"\x1f\x8b"
    in_place = not packed and tree.in_place
    data = io.BytesIO(tree.files.read_head(i, 32) if in_place else tree.read_text(i))
    try:
        with gzip.GzipFile(fileobj=data) if packed else data as file:
            head = file.read(32)
            kind, rank = head[2:4] if len(head) >= 4 else (0, 0)
            if head[:2] != b"\0\0" or kind not in _TYPES or not 1 <= rank <= 4 or len(head) < 4 + 4 * rank:
                raise SourceError(
                    f"{where}: not an idx file: it begins with {head[:4]!r}, where two zero bytes, a type and a number "
                    "of dimensions are expected. Fetch it again."
                )
            shape = tuple(int(n) for n in np.frombuffer(head, ">u4", rank, 4))
            dtype, start = np.dtype(_TYPES[kind]), 4 + 4 * rank
            promised = start + math.prod(shape) * dtype.itemsize
            if packed and promised > available_memory():
                raise SourceError(
                    f"{where}: unpacks to {promised:,} bytes by its header, more than the memory there is. "
                    "Unpack it with gunzip: an unpacked file is read in place."
                )
            pieces, left = [head], 0 if in_place else promised + 1 - len(head)
            # In pieces: file.read(n) reserves n bytes before it knows whether the file has as many.
            while left > 0 and (piece := file.read(min(left, 1 << 26))):
                pieces.append(piece)
                left -= len(piece)
    except (OSError, EOFError, zlib.error) as exc:
        raise SourceError(f"{where}: damaged gzip ({exc}). Fetch it again.") from exc
    content = b"" if in_place else b"".join(pieces)
    if (found := len(content) if packed else int(tree.sizes[i])) != promised:
        raise SourceError(
            f"{where}: holds {found:,} bytes, its header promises {promised:,} ({shape}). "
            f"{'The copy was probably cut short; fetch' if found < promised else 'Fetch'} it again."
        )
    return dtype, shape, start, content


def _class_names(tree: Tree, family: str, title: str, largest: int) -> tuple[str, ...]:
    """Returns the names of the classes; EMNIST's from its mapping file, lines of a label and character codes."""
    mapping = next((i for i, name in enumerate(tree.names) if name.endswith(f"{family}-mapping.txt")), -1)
    if not title.startswith("EMNIST") or mapping < 0:
        return _CLASSES.get(title, ())
    names: dict[int, str] = {}
    for line in tree.read_text(mapping).split(b"\n"):
        numbers = line.split()
        if len(numbers) >= 2 and all(number.isdigit() and len(number) < 10 for number in numbers):
            names[int(numbers[0])] = "".join(chr(int(code)) for code in numbers[1:] if 32 < int(code) < 127)
    # A label far beyond all others is none of EMNIST's, and would take a name for each number below it.
    if largest not in names or largest >= _MOST_CLASSES:
        return ()
    return tuple(names.get(label, "") for label in range(largest + 1))
