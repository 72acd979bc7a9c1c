"""Parses ImageNet's tables: the words of each class, and the class of each validation image.

    ILSVRC2012_devkit_t12.tar.gz    the devkit, packed or unpacked: data/meta.mat, data/..._ground_truth.txt
    LOC_synset_mapping.txt          Kaggle: `n01440764 tench, Tinca tinca`; Caffe's synset_words.txt is the same
    LOC_val_solution.csv            Kaggle: `ILSVRC2012_val_00000001,n01751748 111 108 441 193`
    val_annotations.txt             Tiny ImageNet: `val_0.JPEG n03444034 0 32 44 62`, with tabs

The devkit's ground truth holds ILSVRC2012_IDs, 1 to 1000, which follow no order of names; only meta.mat maps them to
wnids (WordNet ids such as n01440764).
"""

from __future__ import annotations

import csv
import io
import re
import zlib
from collections.abc import Iterable
from functools import cached_property

from fastload.errors import MissingExtraError, SourceError
from fastload.sources.assemble import Draft, stem_of
from fastload.sources.tree import Line, Tree, key_of

WNID = re.compile(r"n\d{8}")
DEVKIT = re.compile(r"ILSVRC2012_devkit_t12\.(tar\.gz|tgz|tar)", re.IGNORECASE)
GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
META = "meta.mat"
SYNSETS = ("LOC_synset_mapping.txt", "synset_words.txt")
SOLUTION = "LOC_val_solution.csv"
TINY = "val_annotations.txt"
WORDS = "words.txt"
TABLES = (*SYNSETS, SOLUTION, TINY, WORDS, META, GROUND_TRUTH)

_MAX_DEVKIT = 2**26  # bytes when unpacked; the real devkit has 8 million
_MAX_SECONDS = 120  # to start SciPy and read meta.mat, which takes a few seconds

_READ_META = """
import io, json, sys
from scipy.io import loadmat
synsets = loadmat(io.BytesIO(sys.stdin.buffer.read()), variable_names=["synsets"], squeeze_me=True)["synsets"]
leaves = [synset for synset in synsets.reshape(-1) if int(synset["num_children"]) == 0]
print(json.dumps([[int(one["ILSVRC2012_ID"]), str(one["WNID"]), str(one["words"])] for one in leaves]))
"""


class GroundTruth:
    """The tables and the devkit of a tree that hold words and classes, each read when it is needed."""

    def __init__(self, draft: Draft, tree: Tree) -> None:
        self.tree = tree
        self.at = {name.rpartition("/")[2]: i for i, name in tree.not_images}
        devkit = next((i for base, i in self.at.items() if DEVKIT.fullmatch(base)), None)
        self.devkit = {} if devkit is None else read_devkit(tree, devkit)
        self.devkit |= {base: tree.read_text(self.at[base]) for base in (META, GROUND_TRUTH) if base in self.at}
        self.words: dict[str, str] = {}  # wnid -> words of the classes of ImageNet; empty if unknown
        if table := next((base for base in SYNSETS if base in self.at), ""):
            for line in tree.lines(self.at[table]):
                wnid, _, words = line.text.partition(" ")
                if not WNID.fullmatch(wnid) or wnid in self.words:
                    why = "occurs twice" if wnid in self.words else "is no wnid such as n01440764"
                    raise line.error(f"{key_of(wnid)[:40]!r} {why}. Fix the line or remove the file.")
                self.words[wnid] = key_of(words.strip())
        elif META in self.devkit:
            try:
                self.words = dict(self.meta.values())
            except MissingExtraError as exc:
                draft.notes.append(f"The words of the classes stay unknown. {exc}")
        # Tiny ImageNet's table lists all synsets of WordNet: it has the words, but not which classes there are.
        lines = tree.lines(self.at[WORDS]) if WORDS in self.at and not self.words else []
        parts = (line.text.partition("\t") for line in lines)
        self.more_words = {wnid: key_of(words.strip()) for wnid, _, words in parts if WNID.fullmatch(wnid)}
        if not self.words and not self.more_words:
            draft.notes.append(
                f"There is no {SYNSETS[0]} and no readable devkit: classes have only their wnids as names."
            )

    def where(self, base: str) -> str:
        """Returns the path of a file, which may lie in the packed devkit, for messages."""
        return self.tree.where(self.at[base]) if base in self.at else f"{self.tree.path}: {base}"

    @cached_property
    def meta(self) -> dict[int, tuple[str, str]]:
        """ILSVRC2012_ID -> (wnid, words)."""
        return parse_meta(self.devkit[META], self.where(META))

    def by_stem(self) -> dict[str, str]:
        """Returns stem of each validation image -> wnid; empty without a table or devkit."""
        if SOLUTION in self.at:
            lines = self.tree.lines(self.at[SOLUTION])
            return parse_solution([(line, _cells(line)) for line in lines])
        if TINY in self.at:
            rows = [(line, line.text.split("\t")) for line in self.tree.lines(self.at[TINY])]
            return parse_solution([(line, [stem_of(row[0]), row[1]]) for line, row in rows if len(row) > 1])
        if GROUND_TRUTH in self.devkit and META in self.devkit:
            return parse_ground_truth(self.devkit[GROUND_TRUTH], self.meta, self.where(GROUND_TRUTH))
        return {}


def _cells(line: Line) -> list[str]:
    """Returns the cells of a line, which may be quoted."""
    try:
        return next(csv.reader([line.text]))
    except (csv.Error, StopIteration) as exc:
        raise line.error(f"{key_of(line.text)[:60]!r} is no line of a table ({exc}). Fetch the file again.") from exc


def read_devkit(tree: Tree, position: int) -> dict[str, bytes]:
    """Returns base name -> content of meta.mat and the ground truth in a packed devkit, as far as they are in it."""
    import gzip

    from fastload.sources.archives.tar import headers

    where = f"{tree.path}: {key_of(tree.names[position])}"
    data = tree.read_text(position)
    try:
        if data.startswith(b"\x1f\x8b"):
            with gzip.open(io.BytesIO(data)) as packed:
                data = packed.read(_MAX_DEVKIT + 1)
        if len(data) > _MAX_DEVKIT:
            raise SourceError(f"{where} holds more than {_MAX_DEVKIT} bytes: this is not the devkit. Fetch it again.")
    except (OSError, EOFError, zlib.error) as exc:
        raise SourceError(f"{where} is damaged or cut short ({exc}). Copy or download it again.") from exc
    found = {}
    for info, _ in headers(io.BytesIO(data), where):
        base, end = info.name.rpartition("/")[2], info.offset_data + info.size
        if base in (META, GROUND_TRUTH) and info.isfile() and not info.issparse():
            if end > len(data):
                raise SourceError(f"{where} is cut short within {base}. Copy or download it again.")
            found[base] = data[info.offset_data : end]
    return found


def parse_meta(data: bytes, where: str) -> dict[int, tuple[str, str]]:
    """Returns ILSVRC2012_ID -> (wnid, words) of the 1000 classes, from meta.mat; needs SciPy (MissingExtraError)."""
    import importlib.util
    import json
    import subprocess
    import sys

    if importlib.util.find_spec("scipy") is None:
        raise MissingExtraError(
            f"{where}: SciPy reads this file, which holds the classes of the validation images, and is not installed. "
            "Install it with `pip install scipy`."
        )
    try:
        # In a process of its own: a damaged file makes SciPy crash (segmentation fault in SciPy 1.17).
        read = subprocess.run(
            [sys.executable, "-P", "-c", _READ_META], input=data, capture_output=True, timeout=_MAX_SECONDS, check=False
        )
        rows = json.loads(read.stdout) if read.returncode == 0 else []
        said = read.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
    except subprocess.TimeoutExpired:
        rows, said = [], f"not read within {_MAX_SECONDS} seconds"
    found = {number: (wnid, words) for number, wnid, words in rows}
    if not found or not all(WNID.fullmatch(wnid) for wnid, _ in found.values()):
        raise SourceError(
            f"{where} is not the devkit's table of classes: no wnids such as n01440764 in it"
            f"{f' ({said})' if said else ''}. Fetch the devkit again."
        )
    return found


def parse_ground_truth(data: bytes, meta: dict[int, tuple[str, str]], where: str) -> dict[str, str]:
    """Returns stem of each validation image -> wnid; refuses a line that is no ID of `meta`."""
    wnids: dict[str, str] = {}
    for number, line in enumerate(data.split(), 1):
        known = meta.get(int(line)) if line.isdigit() and len(line) < 9 else None
        if known is None:
            shown = line[:40].decode("utf-8", "backslashreplace")
            raise SourceError(
                f"{where}, line {number}: {shown!r} is not an ILSVRC2012_ID of {META} ({min(meta)} to {max(meta)}). "
                "Fetch the devkit again."
            )
        wnids[f"ILSVRC2012_val_{number:08d}"] = known[0]
    return wnids


def parse_solution(rows: Iterable[tuple[Line, list[str]]]) -> dict[str, str]:
    """Returns stem of each image -> wnid, from the lines of a table and their cells: the image, then its boxes."""
    wnids: dict[str, str] = {}
    for line, cells in rows:
        image, *boxes = cells or [""]
        if image == "ImageId":
            continue
        # Each wnid is followed by the four numbers of a box.
        found = set(boxes[0].split()[::5]) if len(boxes) == 1 else set()
        (wnid,) = found if len(found) == 1 else ("",)
        if not WNID.fullmatch(wnid) or image in wnids:
            why = "occurs twice" if image in wnids else "has not one wnid such as n01440764 before its boxes"
            raise line.error(f"{key_of(image)[:60]!r} {why}. Fix the line or fetch the file again.")
        wnids[image] = wnid
    return wnids
