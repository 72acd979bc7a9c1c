"""Sources that are not read (files of other loaders, split archives, odd images, whole datasets), and the way out.

One table, `FOREIGN`, of the names (and first bytes) by which each is known and the lines that bring it into a form
that is read. `marked_in` and `arrays_in` find datasets by their marks, whatever else is there. `foreign_format` refuses
a dataset that is mostly such files; `foreign_notes` says what else was not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from fastload.errors import ImageError, typed
from fastload.sources.listing import first_few, split_of_parts
from fastload.sources.tree import Tree, key_of

SHARD_NAME = re.compile(
    r".*(\.tf_?rec(ord)?s?|\.records?|\.tfr)(-\d+-of-\d+|-\d+)?(\.gz)?|.*-\d{5}-of-\d{5}(\.gz)?", re.DOTALL
)
"""Names of TFRecord files, in lower case; their content decides."""

_HEAD = 4096
_LOOKED_AT = 2000  # images by whose names a dataset is recognised


class Foreign(NamedTuple):
    """A kind of files that is not read."""

    what: str  # in the plural
    # Pattern of a file's path, in lower case, after its dataset's folder's path; matched to its end; or "".
    name: str
    # How to go on. {path}: the file; {folder}: the folder that holds it, or the dataset; {stem}: the file without the
    # part that the name matched in its group `part`; each quoted for a shell, and with !r for Python.
    way: str
    head: bytes = b""  # a pattern that the first bytes match
    image: bool = False  # whether each file is an image
    outermost: bool = False  # whether it is opened by the dataset's folder, not by the folder that holds the file
    whole: bool = False  # whether it is an archive, of which `archives` says more where it is given itself
    # Names of files and folders (ending in `/`) that are all there, or `*` and the end of one name.
    marks: str = ""


class Known(NamedTuple):
    """A dataset that a tree is, by names that only it has."""

    what: str
    seen: tuple[str, ...]  # names in the tree, at least one
    way: str  # the command, or the lines of Python, that read it


def in_python(lines: str) -> str:
    """Returns the sentence that gives lines of Python, where `pack_images` is imported."""
    return f"In Python: `from fastload import pack_images; {lines}`."


IN_PYTHON = "It is packed from Python: `pack_images({}, 'OUT.h5')`"
PAIRS = f"fastload packs one image a sample. The images alone: {IN_PYTHON.format('[Path(...), ...]')[13:]}"
_CIFAR = (
    "It is packed from Python: `rows = numpy.fromfile(FILE, 'u1').reshape(-1, {n})`, then `pack_images([(row[{m}:]"
    ".reshape(3, 32, 32).transpose(1, 2, 0), int(row[{m} - 1])) for row in rows], 'OUT.h5')`; or take the version for "
    "Python, which `fastload pack torchvision:{name} OUT.h5 --root FOLDER` reads."
)
_ARRAYS = "[(numpy.load(one), one.parent.name) for one in sorted(Path(FOLDER).glob('*/*.npy'))]"
_FIELD = re.compile(r"image|img|label|mask|target|class|data|box|name|split|key|^[xyz](_|$)", re.IGNORECASE)
"""In the name of an array that holds a field of all samples."""

FOREIGN = (
    Foreign("LitData's chunks", r"/index\.json",
        in_python("from litdata import StreamingDataset; pack_images(StreamingDataset({folder!r}), 'out.h5')")
        + " Samples are (image, label), or dicts with `image` and `label` or `class`.",
        rb'(?s)\A\s*\{.*"(chunks|data_format)"'),
    Foreign("shards of MosaicML's Streaming in CSV or JSON", r"/index\.json",
        in_python("from streaming import StreamingDataset; pack_images(StreamingDataset(local={folder!r}, "
        "shuffle=False, batch_size=1), 'out.h5')"), rb'(?s)\A\s*\{.*"format": *"(csv|tsv|xsv|jsonl?)"'),
    Foreign("MDS shards without their index.json", r"\.mds(\.(zstd|gz|bz2|br|snappy))?",
        "Fetch that file too. If it is lost: the head of each shard holds its fields as JSON, of which it can be "
        "written anew (github.com/mosaicml/streaming, issue 335)."),
    Foreign("FFCV's files", r"\.beton",
        in_python("from ffcv.loader import Loader, OrderOption; from ffcv.fields.decoders import IntDecoder, "
        "SimpleRGBImageDecoder; loader = Loader({path!r}, batch_size=1, num_workers=1, order=OrderOption.SEQUENTIAL, "
        "pipelines={{'image': [SimpleRGBImageDecoder()], 'label': [IntDecoder()]}}); pack_images([(image[0].copy(), "
        "int(label[0, 0])) for image, label in loader], 'out.h5')") + " Or pack the folder that the file was made of."),
    Foreign("Deep Lake's tensors", r"_deeplake_log/(.*/)?next_base|/(dataset_meta|tensor_meta)\.json",
        in_python("import deeplake, numpy; rows = deeplake.open_read_only({folder!r}); pack_images([(numpy.asarray("
        "row['images']), int(row['labels'])) for row in rows], 'out.h5')")
        + " Datasets of Deep Lake 3 are opened by `deeplake<4` as `deeplake.load`.", outermost=True),
    Foreign("LMDB databases, as LSUN's", r"\.mdb|\.lmdb",
        in_python("import lmdb; values = lmdb.open({folder!r}, readonly=True, lock=False).begin().cursor(); "
        "pack_images([bytes(value) for _, value in values], 'out.h5')")
        + " That is for LSUN, whose values are image files; of others, unpack each value as it was packed.",
        rb"(?s)\A.{16}\xde\xc0\xef\xbe"),
    Foreign("records of MXNet", r"\.rec",
        in_python("import mxnet; from mxnet.recordio import MXIndexedRecordIO, unpack; file = MXIndexedRecordIO("
        "{stem!r} + '.idx', {path!r}, 'r'); records = [unpack(file.read_idx(key)) for key in file.keys]; pack_images("
        "[(data, int(head.label)) for head, data in records], 'out.h5')"), rb"(?s)\A\x0a\x23\xd7\xce"),
    Foreign("ArrayRecord files of tensorflow-datasets", r"\.(array_record|riegeli)(-\d+-of-\d+)?",
        in_python("import tensorflow_datasets; builder = tensorflow_datasets.builder_from_directory({folder!r}); "
        "pack_images(builder.as_data_source('train'), 'out.h5')")
        + " Where samples have boxes, write it as TFRecord: `tfds convert_format --out_file_format=tfrecord`."),
    Foreign("arrays of Zarr", r"/zarr\.json|/\d+(\.\d+){2,3}|\.zarr",
        in_python("import zarr; group = zarr.open({folder!r}, mode='r'); pack_images(list(zip(group['images'][:], "
        "group['labels'][:].tolist())), 'out.h5')"), outermost=True),
    Foreign("tables of Lance", r"\.lance",
        in_python("import lance, pyarrow.parquet; pyarrow.parquet.write_table(lance.dataset({folder!r}).to_table(), "
        "'out.parquet')") + " Then `fastload pack out.parquet out.h5`.", outermost=True),
    Foreign("Arrow files without their state.json", r"\.arrow|\.feather",
        in_python("from datasets import Dataset; pack_images(Dataset.from_file({path!r}), 'out.h5')")),
    Foreign("pickles", r"\.(pt|pth|pkl|pickle|joblib)",
        "A pickle can run any program when it is read, so that fastload never does. Load it yourself if you trust it: "
        + in_python("pack_images(list(zip(images, labels)), 'out.h5')")),
    Foreign("videos", r"\.(mp4|avi|mov|mkv|webm|mpe?g|m4v)",
        "Take the images out: `mkdir -p frames && ffmpeg -i {path} frames/%06d.png`."),
    Foreign("parts of a split archive", r"\.(zip|7z|rar)(?P<part>\.\d{2,3})",
        "Join them: `cat {stem}.* > {stem}`, then give or unpack that."),
    Foreign("parts of a split archive", r"(?P<part>\.z\d\d)",
        "Join them: `zip -s 0 {stem}.zip --out joined.zip`, then give joined.zip."),
    Foreign("parts of a split archive", r"(?P<part>\.part0*\d+)\.rar", "Unpack them: `unrar x {path}`."),
    Foreign("parts of a split archive",
        r"\.(zip|tar|tgz|tar\.(gz|bz2|xz|zst))(?P<part>[._-](part[._-]?)?(?!gz|xz|md)([a-z]{2}|\d{1,3}))",
        "Join them: `cat {stem}* > joined`, and unpack what comes out: `tar -xf joined`, or `unzip joined`."),
    Foreign("archives that are compressed as a whole", r"\.(tgz|tbz2?|txz|tar\.(gz|bz2|xz|zst|lz4))",
        "Unpack them: `tar -xf {path}`.", whole=True),
    Foreign("archives that are not read in place", r"\.7z", "Unpack them: `7z x {path}`.", whole=True),
    Foreign("archives that are not read in place", r"\.rar", "Unpack them: `unrar x {path}`.", whole=True),
    Foreign("HEIC images", r"\.(heic|heif|hif)", "Install what reads them: `pip install pillow-heif`.", image=True),
    Foreign("AVIF images", r"\.avifs?", "Install what reads them: `pip install 'pillow>=11.3'`.", image=True),
    Foreign("JPEG XL images", r"\.jxl", "Turn each into PNG: `djxl a.jxl a.png`.", image=True),
    Foreign("DICOM images", r"\.(dcm|dicom)",
        in_python("import glob, pydicom; files = sorted(glob.glob({folder!r} + '/**/*.dcm', recursive=True)); "
        "pack_images([pydicom.dcmread(file).pixel_array.astype('uint16') for file in files], 'out.h5')")
        + " Add the labels; window the values as your task needs it.", image=True),
    Foreign("volumes of NIfTI", r"\.nii(\.gz)?",
        in_python("import nibabel; volume = nibabel.load({path!r}).get_fdata(); slices = ((volume - volume.min()) / "
        "(volume.max() - volume.min()) * 65535).astype('uint16'); pack_images([slices[:, :, i] for i in range("
        "slices.shape[2])], 'out.h5')"), image=True),
    Foreign("vector drawings", r"\.svgz?", "Draw each as PNG: `rsvg-convert -h 512 a.svg -o a.png`.", image=True),
    Foreign("a camera's raw images", r"\.(cr2|cr3|nef|nrw|arw|dng|orf|rw2|raf|pef|srw)",
        "Develop each, with rawpy: `imageio.imwrite('a.png', rawpy.imread('a.nef').postprocess())`.", image=True),
    Foreign("images of formats that are not read", r"\.(tga|psd|exr|hdr|jls|pcx|ico|xcf|svs|ndpi|mrxs)",
        "Turn each into PNG: `magick mogrify -format png *` in their folder.", image=True),
    Foreign("arrays", r"\.np[yz]", "Give the array file itself (layout arrays), or "
        + in_python("pack_images([numpy.load(file) for file in files], 'out.h5')")),
    Foreign("CIFAR-10's binary version", "", _CIFAR.format(n=3073, m=1, name="CIFAR10"),
        marks="data_batch_1.bin test_batch.bin"),
    Foreign("CIFAR-100's binary version", "", _CIFAR.format(n=3074, m=2, name="CIFAR100"),
        marks="train.bin test.bin fine_label_names.txt"),
    Foreign("Moving MNIST, sequences of frames", "",
        f"{IN_PYTHON.format('list(numpy.load(FILE).reshape(-1, 64, 64))')}, frame by frame.",
        marks="mnist_test_seq.npy"),
    Foreign("PhotoTour, patches within larger images", "",
        f"{IN_PYTHON.format('[one.numpy() for one in torchvision.datasets.PhotoTour(ROOT, NAME)]')}.",
        marks="info.txt m50_100000_100000_0.txt"),
    Foreign("optical flow", "", f"{PAIRS}.", marks="*.flo"),
    *(Foreign("disparities, depth or optical flow", "", f"{PAIRS}.", marks=mark) for mark in
      "*.pfm flow_occ/ disp_noc/ disp_occ_0/ disparities/ *.disp.png *_disp.png *.depth.png".split()),
)  # fmt: skip
"""The kinds that are not read, the first that fits."""

_BY_NAME = tuple(row for row in FOREIGN if row.name)
_ANY = re.compile("|".join(f"(?:{row.name.replace('?P<part>', '?:')})$" for row in _BY_NAME), re.DOTALL)
_ORDINARY = (".txt", ".xml", ".csv", ".md", ".html")
_WHOLE = frozenset("index.json zarr.json dataset_meta.json tensor_meta.json next_base".split())


@lru_cache(2**14)
def _may_be_foreign(end: str) -> bool:
    return _ANY.search(end) is not None


def _kind_of(tree: Tree, i: int, name: str) -> Foreign | None:
    """Returns the kind of a file, by its name and, where that is not enough, its first bytes."""
    # There may be a million files, most of one suffix.
    if name.endswith(_ORDINARY):
        return None
    base = name.rpartition("/")[2].lower()
    whole = base in _WHOLE or base.replace(".", "").isdigit()
    if not whole and (base.endswith(".json") or not _may_be_foreign(base[base.find(".") :])):
        return None
    path = f"/{tree.given.name}/{name}".lower()
    for row in _BY_NAME:
        if re.search(f"(?:{row.name})$", path, re.DOTALL):
            with suppress(ImageError):
                if not row.head or re.match(row.head, tree.files.read_head(i, _HEAD)):
                    return row
    return None


def _found(tree: Tree) -> dict[Foreign, list[int]]:
    found: dict[Foreign, list[int]] = {}
    for i, name in tree.not_images:
        if row := _kind_of(tree, i, name):
            found.setdefault(row, []).append(i)
    return found


def arrays_in(tree: Tree) -> Iterator[Known]:
    """Yields that class folders hold arrays, if they do."""
    of_class: dict[str, list[str]] = {}
    for _, name in tree.not_images:
        if name.lower().endswith(".npy"):
            of_class.setdefault(name.rpartition("/")[0], []).append(name)
    are_classes = len(of_class) > 1 and not split_of_parts(part for folder in of_class for part in folder.split("/"))
    fields = any(_FIELD.search(Path(name).stem) for of in of_class.values() for name in of)
    if are_classes and "" not in of_class and not fields:
        first = tuple([key_of(of[0]) for of in of_class.values()][:2])
        yield Known("arrays, one image each, in a folder a class", first, f"{IN_PYTHON.format(_ARRAYS)}.")


def marked_in(tree: Tree, paths: Mapping[str, list[str]]) -> Iterator[Known]:
    """Yields the kinds that marks in a tree show; `paths`: last part -> whole paths that end in it."""
    images = [tree.names[i] for i in tree.images[:_LOOKED_AT].tolist()]
    named = set[str]()
    for row in (row for row in FOREIGN if row.marks):
        if row.marks.startswith("*"):
            end = row.marks[1:]
            seen = [path for base, of in paths.items() if base.lower().endswith(end) for path in of[:1]]
            seen += [image for image in images if image.endswith(end)]
        else:
            of_each = [paths.get(mark, []) for mark in row.marks.split()]
            seen = [of[0] for of in of_each] if all(of_each) else []
        if seen and row.way not in named:
            named.add(row.way)
            yield Known(row.what, tuple(map(key_of, seen[:2])), row.way)


def last_part(path: str) -> str:
    """Returns the last part of a path, with the `/` of a folder."""
    return path.rstrip("/").rpartition("/")[2] + "/" * path.endswith("/")


def foreign_format(tree: Tree) -> str | None:
    """Returns why a dataset of files that are not read is refused, and the way out; None if it is not.

    It is if it has no images, or if more of its images are of a kind that is not read.
    """
    images = len(tree.images)
    for row, at in _found(tree).items():
        if not images or (row.image and len(at) > images):
            besides = f", and there are only {images} images that it reads" if images else ""
            found = f"{row.what} ({_named(tree, at)})"
            return f"{tree.given}: fastload does not read {found}{besides}. {_way(tree, row, at[0])}"
    return None


def foreign_notes(tree: Tree) -> list[str]:
    """Returns a note for each kind of files in a tree of images that is not read."""
    images = len(tree.images)
    # A few files of no images may be a model, a cache, an index; they are among those ignored.
    found = [(row, at) for row, at in _found(tree).items() if row.image or 10 * len(at) >= images]
    return [f"NOT READ: {row.what} ({_named(tree, at)}). {_way(tree, row, at[0])}" for row, at in found]


def why_foreign(path: Path, head: bytes) -> str | None:
    """Returns why a single file is refused that is of a kind that is not read; None for any other."""
    for row in (row for row in _BY_NAME if not row.whole):
        if re.search(f"(?:{row.name})$", f"/{path.name}".lower(), re.DOTALL) and (
            not row.head or re.match(row.head, head)
        ):
            return f"{path}: fastload does not read {row.what}. {_told(row, path, path.parent)}"
    return None


def _named(tree: Tree, at: list[int]) -> str:
    return f"{len(at)}: {first_few([key_of(tree.names[i]) for i in at], 2)}"


def _way(tree: Tree, row: Foreign, i: int) -> str:
    path = Path(key_of(tree.names[i]))
    if tree.archive:
        return f"Unpack {tree.path} first. {_told(row, path, path.parent)}"
    path = tree.path / path
    return _told(row, path, tree.given if row.outermost or row.image else path.parent)


class _Place(str):
    """A path, as it is typed in a shell; `!r` gives it as it is written in Python."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return typed(str(self))


def _told(row: Foreign, path: Path, folder: Path) -> str:
    """Returns how to go on with a file, with its path filled in."""
    found = re.search(f"(?:{row.name})$", str(path).lower(), re.DOTALL)
    part = "part" in row.name and found is not None
    stem = str(path)[: found.start("part")] if found and part else str(path.with_suffix(""))
    return row.way.format(path=_Place(path), folder=_Place(folder), stem=_Place(stem))
