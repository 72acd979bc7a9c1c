"""The parsers that are fuzzed: TARGETS is name -> a function of bytes, and the bytes to begin with.

A target may end with a result or a FastloadError; anything else is a finding. Where a file has structure, the bytes are
choices (`fuzz_choices`, `fuzz_files`), of which none at all make a valid file; otherwise they are a file's content.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_choices import Choices
from fuzz_files import idx_of, npy_of, picture, records_of, tar_of, zip_of
from jpeg_processes import SAMPLINGS, made
from jpeg_processes import jpeg as jpeg_of
from jpeg_ways import WAYS

from fastload.errors import ImageError
from fastload.format.ragged import Column
from fastload.images.decode_part import decode_part
from fastload.images.image_header import probe_image
from fastload.images.jpeg import cut_rows, scan_jpeg
from fastload.options.pack import SourceOptions
from fastload.pack.journal import MAGIC, SOURCE, Journal, TaskRecord, headers_from_json, headers_to_json
from fastload.plan.cursor import EpochCursor, resumed
from fastload.plan.echo_schedule import EchoSchedule
from fastload.plan.epoch import EpochPlan
from fastload.profiling.doctor.loader_records import RecordedEvents
from fastload.sources.imagenet import parse_ground_truth, read_devkit
from fastload.sources.layouts import list_source
from fastload.sources.listing import Arrays, Files, Listing
from fastload.sources.open_tree import open_tree
from fastload.sources.tables import read_rows
from sample_files import write_packed


@dataclass(frozen=True)
class Target:
    """A parser that is fuzzed."""

    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]  # to begin with, besides the kept corpus


TARGETS: dict[str, Target] = {}

CHOSEN = (b"", bytes(range(256)), b"\xe0\x02" * 60, b"\x07\xe1\xff\x01" * 40)
"""Seeds of targets whose bytes are choices."""


def target(*seeds: bytes) -> Callable[[Callable[[bytes], object]], Callable[[bytes], object]]:
    """Adds a function to TARGETS, by its name with `-` for `_`."""

    def add(run: Callable[[bytes], object]) -> Callable[[bytes], object]:
        TARGETS[run.__name__.replace("_", "-")] = Target(run, seeds or CHOSEN)
        return run

    return add


@cache
def _scratch(pid: int) -> Path:
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    return Path(tempfile.mkdtemp(prefix="fastload-fuzz-", dir=os.environ.get("FASTLOAD_FUZZ_SCRATCH", memory)))


def clean_up() -> None:
    """Removes the folder that the targets of this process write to."""
    shutil.rmtree(_scratch(os.getpid()), ignore_errors=True)
    _scratch.cache_clear()


def folder(files: dict[str, bytes]) -> Path:
    """Returns a folder that holds these files alone."""
    root = _scratch(os.getpid()) / "d"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def list_and_read(path: Path, layout: str | None, masks: Any = "auto", on_error: Any = "skip") -> Listing:
    """Returns the listing of a dataset, of which some images and masks are read."""
    listing = list_source(path, layout, on_error, SourceOptions(masks=masks))
    for reader in (listing.files, listing.masks.files if listing.masks else None):
        rows = range(min(3, len(listing.keys)))
        if isinstance(reader, Arrays):
            out = np.empty((len(rows), *reader.shape), reader.dtype)
            reader.read_rows(np.array(rows[::-1], np.int64), out)
            continue
        for row in rows if reader is not None else ():
            try:
                if isinstance(reader, Files):
                    reader.read_head(row, 20)
                reader.read(row)
            except ImageError:
                continue
    for name, column in listing.columns.items():
        assert len(column.values) == len(listing.keys) and column.values.dtype.kind in "biufS"
        str((name, column.attrs)).encode("utf-8")  # as they are written
    "".join((*listing.keys, *listing.split_names)).encode("utf-8")
    return listing


PIXELS = (np.arange(6 * 5 * 4) % 251).astype(np.uint8).reshape(6, 5, 4)
JPEG, PNG = picture("JPEG", (16, 16)), picture()


# Arrays: idx, NumPy's


@target(*CHOSEN, b"\1\0\0", b"\1\0\0\x08\x03\0\0")
def idx(data: bytes) -> None:
    """Files of images and labels, as they are or gzipped, and the mapping of EMNIST."""
    c = Choices(data)
    images = c.rest() if c.pick((False, True)) else idx_of(c, PIXELS)
    kind, labels = c.pick(((8, PIXELS[:, 0, 0]), (12, np.arange(6, dtype=">i4")), (12, np.ones((6, 8), ">i4"))))
    files = {"a-train-images-idx3-ubyte": images, "a-train-labels-idx1-ubyte": idx_of(c, labels, kind)}
    if c.byte() % 2:
        files = {f"{name}.gz": c.raw(gzip.compress(content, 1)) for name, content in files.items()}
    if c.byte() % 2:
        files = {f"em{name}"[2:].replace("a-", "emnist-x-", 1): content for name, content in files.items()}
        files["emnist-x-mapping.txt"] = c.raw(b"0 48\n1 49\n2 50\n250 60 61\n2000000000 62\n")
    list_and_read(folder(files), "mnist")


@target()
def npy(data: bytes) -> None:
    c = Choices(data)
    files = {"images.npy": npy_of(c, PIXELS), "labels.npy": npy_of(c, c.pick((np.arange(6), np.arange(6) / 3)))}
    extra = c.pick(
        (np.array([f"é{i}" for i in range(6)]), np.array([b"a"] * 6), np.ones((6, 5, 4), bool), np.ones((6, 2), ">f4"))
    )
    files[f"{c.pick(('filenames', 'split', 'masks', 'boxes', 'class_names', 'y', 'key'))}.npy"] = npy_of(c, extra)
    list_and_read(folder(files), "arrays", c.pick(("auto", "none")))


@target()
def npz(data: bytes) -> None:
    c = Choices(data)
    members = [(b"images.npy", npy_of(c, PIXELS)), (b"labels.npy", npy_of(c, np.arange(6)))]
    members.append((c.pick((b"split.npy", b"\xff.npy", b"a/b.npy", b"x")), npy_of(c, np.array(["train"] * 6))))
    list_and_read(folder({"a.npz": zip_of(c, members)}), "arrays")


# Archives

MEMBERS = [(b"train/cat/0.png", PNG), (b"train/dog/1.png", PNG), (b"val/cat/2.png", PNG)]


@target()
def zip_archive(data: bytes) -> None:
    c = Choices(data)
    list_and_read(folder({"a.zip": zip_of(c, MEMBERS)}) / "a.zip", c.pick((None, "folder")))


@target(zip_of(Choices(b""), MEMBERS))
def zip_bytes(data: bytes) -> None:
    list_and_read(folder({"a.zip": data}) / "a.zip", "folder")


@target()
def tar_archive(data: bytes) -> None:
    c = Choices(data)
    list_and_read(folder({"a.tar": tar_of(c, MEMBERS)}) / "a.tar", c.pick((None, "folder")))


@target(tar_of(Choices(b""), MEMBERS))
def tar_bytes(data: bytes) -> None:
    list_and_read(folder({"a.tar": data}) / "a.tar", "folder")


@target()
def web_dataset(data: bytes) -> None:
    c = Choices(data)
    members = []
    for i in range(1 + c.byte() % 4):
        about = json.dumps(c.document({"label": 1, "width": 4, "name": "a", "score": 0.5})).encode()
        fields = {b"png": PNG, b"cls": c.raw(b"%d" % i), b"json": c.raw(about), b"npy": npy_of(c, np.arange(3))}
        members += [(b"%03d.%s" % (i, name), content) for name, content in fields.items() if c.byte() < 240]
    files = {f"{c.pick(('a', '0', 'x-000000', 'x-9'))}.tar": tar_of(c, members), "x-000001.tar": tar_of(c, members)}
    list_and_read(folder(files), "webdataset")


# Tables

TABLE = b"file_name,label,split,x,y,w,h\n0.png,cat,train,1,2,3,4\n1.png,dog,val,0,0,1,1\n0.png,cat,train,1,1,2,2\n"
IMAGES = {"0.png": PNG, "1.png": PNG}


@target(
    TABLE, TABLE.replace(b",", b"\t"), b'a;b\n"0.png";"x|y"\n1.png;z', TABLE.decode().encode("utf-16"), b"0.png a\n"
)
def csv(data: bytes) -> None:
    list_and_read(folder({**IMAGES, f"t{('.csv', '.tsv', '.txt')[len(data) % 3]}": data}), "manifest")


@target(TABLE)
def csv_given(data: bytes) -> None:
    name = ("t.csv", "t.tsv", "t.txt")[len(data) % 3]
    list_and_read(folder({**IMAGES, name: data}) / name, "manifest")
    read_rows(data, name, head=True)


ROWS = [
    {"file_name": "0.png", "label": "cat", "objects": {"bbox": [[0, 0, 1, 1]], "category": [1]}, "n": 1.5, "t": [1, 2]},
    {"file_name": "1.png", "label": "dog", "objects": {"bbox": [], "category": []}, "n": None, "t": [3, 4]},
]


@target(*CHOSEN, b"\1" + b"\n".join(json.dumps(row).encode() for row in ROWS))
def json_lines(data: bytes) -> None:
    c = Choices(data)
    lines = c.rest() if c.pick((False, True)) else b"\n".join(json.dumps(c.document(row)).encode() for row in ROWS)
    list_and_read(folder({**IMAGES, "metadata.jsonl": lines}), "manifest")


@target()
def parquet(data: bytes) -> None:
    """Tables that pyarrow reads well, with images and classes as `datasets` says; damaged files are pyarrow's."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    c = Choices(data)
    images = [{"bytes": PNG if c.byte() < 200 else None, "path": str(c.document("0.png"))[:50]} for _ in range(3)]
    columns: dict[str, Any] = {"image": images}
    for name in ("label", "objects", "split", "tokens"):
        columns[name] = c.pick(
            (
                [0, 1, 5],
                ["a", "b", None],
                [[1], [2], []],
                [1.5, None, 2.0],
                [True, False, None],
                [{"bbox": [[0, 0, 1, 1]], "category": [0]}] * 3,
                [b"x"] * 3,
                [None] * 3,
                [[[1, 2]], [[3, 4]], [[5, 6]]],
                [2**63, 0, 1],
                [["a"], ["b"], ["a", "b"]],
            )
        )
    about = {"info": {"features": {"label": {"names": ["a", "b"], "_type": "ClassLabel"}, "image": {"_type": "Image"}}}}
    try:
        table = pa.table(columns).replace_schema_metadata(
            {"huggingface": c.raw(json.dumps(c.document(about)).encode())}
        )
        root = folder({"0.png": PNG, "1.png": PNG})
        pq.write_table(table, root / "train-00000-of-00001.parquet")
    except (pa.ArrowException, UnicodeEncodeError, OverflowError):
        return
    list_and_read(root, "parquet")


# Datasets with files of their own

COCO = {
    "images": [{"id": i, "file_name": f"{i}.png", "height": 3, "width": 4} for i in range(3)],
    "annotations": [
        {
            "id": 1,
            "image_id": 0,
            "category_id": 3,
            "bbox": [1, 2, 3.5, 4],
            "segmentation": [[1, 0, 3, 2, 3, 4]],
            "area": 3,
        },
        {
            "id": 2,
            "image_id": 1,
            "category_id": 9,
            "bbox": [0, 0, 1, 1],
            "iscrowd": 1,
            "segmentation": {"counts": [1, 4, 7], "size": [3, 4]},
        },
        {
            "id": 3,
            "image_id": 2,
            "category_id": 9,
            "bbox": [0, 0, 1, 1],
            "segmentation": {"counts": "147", "size": [3, 4]},
        },
    ],
    "categories": [{"id": 9, "name": "a"}, {"id": 3, "name": "b"}],
}


@target(*CHOSEN, b"\1" + json.dumps(COCO).encode())
def coco(data: bytes) -> None:
    c = Choices(data)
    masks = c.pick(("semantic", "instance", "auto"))
    content = c.rest() if c.pick((False, True)) else c.raw(json.dumps(c.document(COCO)).encode())
    files = {f"val2017/{i}.png": PNG for i in range(3)} | {"annotations/instances_val2017.json": content}
    list_and_read(folder(files), "coco", masks)


XML = (
    b"<annotation><object><name>cat</name><difficult>1</difficult><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>3</xmax>"
    b"<ymax>3</ymax></bndbox></object></annotation>"
)


@target(*CHOSEN, b"\1" + XML)
def voc(data: bytes) -> None:
    c = Choices(data)
    xml = c.rest() if c.pick((False, True)) else c.raw(XML)
    files = {f"JPEGImages/{i}.jpg": JPEG for i in range(2)} | {f"Annotations/{i}.xml": xml for i in range(2)}
    for name, text in (("train", b"0\n1\n"), ("cat_train", b"0 1\n1 -1\n"), ("val", b"2\n")):
        files[f"ImageSets/Main/{name}.txt"] = c.raw(text)
    list_and_read(folder(files), "voc", "none")


@target(
    *CHOSEN, b"\x01" + b"2\ncat dog\n000001.jpg -1 1\n000002.jpg 1 1\n", b"\x03" + b"image_id,a,b\n000001.jpg,1,2\n"
)
def celeba(data: bytes) -> None:
    c = Choices(data)
    how = c.byte()
    if how % 2:
        base = ("list_attr_celeba", "identity_celeba", "list_eval_partition", "list_bbox_celeba")[how // 4 % 4]
        files = {f"{base}.{'csv' if how & 2 else 'txt'}": c.rest()}
    else:
        files = {
            "list_attr_celeba.txt": c.raw(b"2\ncat dog\n000001.jpg -1 1\n000002.jpg  1 1\n"),
            "identity_celeba.txt": c.raw(b"000001.jpg 7\n000002.jpg 9\n"),
            "list_eval_partition.csv": c.raw(b"image_id,partition\n000001.jpg,0\n000002.jpg,2\n"),
            "list_bbox_celeba.txt": c.raw(
                b"2\nimage_id x_1 y_1 width height\n000001.jpg 1 2 3 4\n000002.jpg 1 2 3 4\n"
            ),
        }
    images = {f"img_align_celeba/00000{i}.jpg": JPEG for i in (1, 2)}
    list_and_read(folder(files | images), "celeba")


@target()
def ade20k(data: bytes) -> None:
    c = Choices(data)
    rows = b"Idx\tRatio\tTrain\tVal\tName\n" + b"".join(b"%d\t0.1\t1\t1\tname %d\n" % (i, i) for i in range(1, 151))
    mask = picture("PNG", (2, 2), mode="L")
    files = {
        "images/training/ADE_train_00000001.jpg": picture("JPEG", (2, 2)),
        "annotations/training/ADE_train_00000001.png": c.raw(mask),
        "objectInfo150.txt": c.raw(c.raw(rows)),
        "sceneCategories.txt": c.raw(b"ADE_train_00000001 zoo\n"),
    }
    list_and_read(folder(files), "ade20k", c.pick(("auto", "none")))


@target(*CHOSEN, b"\1" + b'ImageId,P\nILSVRC2012_val_00000001,"n01751748 1 2 3 4"\n', b"\2" + b"a.JPEG\tn01751748\t1\n")
def imagenet(data: bytes) -> None:
    c = Choices(data)
    files = {"val/ILSVRC2012_val_00000001.JPEG": JPEG, "train/n01751748/n01751748_1.JPEG": JPEG}
    match c.byte() % 4:
        case 1:
            files["LOC_val_solution.csv"] = c.rest()
        case 2:
            files["val_annotations.txt"], files["words.txt"] = c.data[1:], c.data[1:]
        case 3:
            files["LOC_synset_mapping.txt"] = c.rest()
        case _:
            inner = [(b"d/data/ILSVRC2012_validation_ground_truth.txt", c.raw(b"1\n2\n")), (b"d/data/meta.mat", b"x")]
            devkit = tar_of(c, inner)
            root = folder({"ILSVRC2012_devkit_t12.tar.gz": c.raw(gzip.compress(devkit, 1)) if c.byte() % 2 else devkit})
            found = read_devkit(open_tree(root), 0)
            known = {1: ("n01440764", "tench"), 2: ("n01751748", "snake")}
            parse_ground_truth(found.get("ILSVRC2012_validation_ground_truth.txt", b""), known, "truth")
            return
    list_and_read(folder(files), "imagenet")


EXPORT = {
    "format": "fastload-export",
    "version": 1,
    "writer": "fastload",
    "split_names": ["train", "val"],
    "rows": [[f"k{i}", f"{i}.png", f"m{i}.png"] for i in range(3)],
    "manifest": None,
    "columns": [
        {"name": "labels", "dtype": "int64", "shape": [], "attrs": {"names": ["a", "b"]}, "moves": ""},
        {"name": "bbox", "dtype": "float32", "shape": [4], "attrs": {"v": [1, 2.5]}, "moves": "xywh"},
    ],
    "masks": {"names": ["x"], "ignore_index": 255, "attrs": {"kind": "semantic"}},
}


@target(*CHOSEN, b"\1" + json.dumps(EXPORT).encode())
def exported(data: bytes) -> None:
    c = Choices(data)
    arrays = {
        b"labels.npy": np.arange(3),
        b"bbox.npy": np.ones((3, 4), np.float32),
        b"split.npy": np.zeros(3, np.uint8),
    }
    text = c.rest() if c.pick((False, True)) else c.raw(json.dumps(c.document(EXPORT)).encode())
    fields = zip_of(c, [(name, npy_of(c, array)) for name, array in arrays.items()])
    files = {f"{m}{i}.png": PNG for i in range(3) for m in ("", "m")} | {"fastload.json": text, "fields.npz": fields}
    list_and_read(folder(files), "exported")


# Images


def _seen(data: bytes, size: int) -> bytes:
    return data[:size]


@target(
    JPEG,
    picture("JPEG", (40, 24), progressive=True),
    picture("JPEG", (20, 9), mode="L"),
    picture("JPEG", (64, 48), restart_marker_rows=1),
    picture("JPEG", (8, 8), mode="CMYK"),
)
def jpeg(data: bytes) -> None:
    """The markers of a JPEG, and what is cut out of it."""
    head = scan_jpeg(data)
    for size in (20, 200):
        scan_jpeg(data[:size])
    if head is not None:
        for top, stop in ((0, 1), (8, 17), (head.height - 1, head.height)):
            cut_rows(data, head, head.height, head.width, top, stop)
        if 0 < head.height * head.width < 10_000:
            shape = head.height, head.width, 1 if head.components == 1 else 3
            decode_part(data, 1, shape, 1, (0, 0, min(8, head.height), head.width), 2)


@target(*(made(name) for name in ("sof0-8-11", "sof2-8-221111", "sof3-8-11", "sof3-12-111111", "sof9-8-221111")))
def jpeg_ways(data: bytes) -> None:
    """A JPEG of any process, through every way that reads one."""
    for way in WAYS.values():
        with suppress(ImageError):
            way(data)


@target()
def jpeg_processes(data: bytes) -> None:
    """The same of a file that is well but for its process, precision, factors or some bytes."""
    c = Choices(data)
    factors = c.pick(SAMPLINGS[::-1])
    jpeg_ways(
        c.raw(jpeg_of(c.pick((0xC0, 0xC2, 0xC3, 0xC1, 0xC9, 0xCA, 0xCB)), 8 if not c.wrong() else c.byte(), factors))
    )


@target(
    PNG,
    picture("PNG", mode="I;16"),
    picture("GIF"),
    picture("BMP"),
    picture("TIFF"),
    picture("WEBP"),
    picture("PPM"),
    picture("JPEG2000", (32, 32)),
    picture("TIFF", mode="I;16"),
    JPEG,
)
def image_header(data: bytes) -> None:
    probe_image(lambda size: data[:size])


# States and records


def _journal_bodies() -> list[tuple[int, Any, bytes]]:
    rows = np.zeros(2, np.dtype(TaskRecord.of_bytes.__func__.__globals__["ROW"]))
    head = {"release": "x", "plan": "p", "streams": [["images", "o.h5.part", 0]], "headers": headers_to_json(None)}
    task = {"first": 0, "count": 2, "sources": 5, "starts": [1], "checks": [2], "reasons": [[1, "broken"]]}
    return [(-1, head, np.ones(3, SOURCE).tobytes()), (0, task, rows.tobytes()), (-2, {"header_digest": "a"}, b"")]


@target()
def journal(data: bytes) -> None:
    c = Choices(data)
    path = folder({"o.h5.journal": records_of(c, MAGIC, _journal_bodies())}) / "o.h5.journal"
    with closing(Journal(path)) as opened:
        found = opened.read()
    if found is not None:
        for record in found.tasks.values():
            record.to_bytes()


@target()
def journal_headers(data: bytes) -> None:
    import base64
    import zlib

    from fastload.pack.encode import HEADERS

    c = Choices(data)
    table = base64.b64encode(c.raw(zlib.compress(np.zeros(2, HEADERS).tobytes()))).decode()
    headers_from_json(c.document({"table": table, "kinds": {"RGB": 2}, "reasons": [[1, "why"]]}))


STATE = {
    "version": 1,
    "header_digest": "ab",
    "seed": 3,
    "epoch": 2,
    "shuffle": ["window", 4],
    "ends": "exact",
    "echo": ["mixed", 3, 2],
    "echo_position": 1,
    "segments": [[2, 3, 1], [1, 4, 2], [2, 3, 0]],
}


@target()
def state(data: bytes) -> None:
    """A state that a loader is told to go on from, with arrays among the values."""
    c = Choices(data)
    plan = EpochPlan(
        range(40), chunk_rows=4, seed=3, shuffle=c.pick(("chunk", "full", False)), world_size=2, batch_size=3
    )
    given = STATE | {"shuffle": {"full": "full", False: False}.get(plan.shuffle, ["window", 16])}  # type: ignore[call-overload]
    if c.byte() % 2:
        given |= {"echo": c.pick((1, 4, ["auto", 2, 3])), "echo_position": 0, "segments": [[2, 3, 1]]}
    made = c.document(given)
    if isinstance(made, dict) and c.wrong():
        made = dict(made)
        made[c.pick(list(STATE))] = c.pick((np.arange(3), np.int64(2), np.float32(1), {1}, b"a", np.array("full")))
    cursor = EpochCursor(plan, lambda: "ab")
    found = cursor.checked(made)
    position = resumed(plan, found, lambda batches, echo: EchoSchedule(batches, echo), on_device=False)
    for batch in islice(position.plan.batches(0), 3):
        assert batch.rows.max(initial=0) < 40
    list(islice(position.uses.uses(position.steps), 3))


EVENTS: list[Any] = [
    {"e": "process", "pid": 1, "rank": "", "local_world": "", "cpus": 2, "python": "3.11", "t": 0.0},
    {"e": "torch"},
    {"e": "loader", "id": 1, "workers": 2, "batch": 4, "t": 0.5},
    {"e": "iter", "id": 1, "t": 1.0, "pids": [1]},
    {"e": "next", "id": 1, "t": 1.1, "wait": 0.1, "n": 4, "cpu": 0.1, "into": [0.2, 0.1], "step": None},
    {
        "e": "next",
        "id": 1,
        "t": 1.4,
        "wait": 0.1,
        "n": 4,
        "cpu": 0.1,
        "into": [0.2, 0.1],
        "step": {
            "wall": 0.2,
            "copy": 0.1,
            "gpu": None,
            "process_cpu": 0.1,
            "delay": 0.0,
            "copy_delay": 0.0,
            "others": 0.0,
        },
    },
    {
        "e": "fetch",
        "id": 1,
        "t": 1.0,
        "wall": 0.3,
        "delay": 0.1,
        "parts": {"reading": [0.1, 0.05], "rest": [0.2, 0.1]},
        "out": [0.1, 0.1],
        "others": {"decoding": [0.1, 0.1]},
        "h5": [0.1, 0.1, 2],
        "slow": [0.1],
        "samples": [4, 0.1, 0.1],
    },
    {"e": "line", "places": [["a.py:3", 2]]},
    {"e": "fault", "what": "x"},
    {"e": "end", "id": 1, "t": 2.0, "wait": 0.1, "step": None},
]


@target()
def doctor_events(data: bytes) -> None:
    c = Choices(data)
    lines = [json.dumps(c.document(event), separators=(",", ":")).encode() for event in EVENTS]
    root = folder({"1-1.jsonl": b"".join(c.raw(line) + b"\n" for line in lines)})
    records = RecordedEvents(root).read()
    for loader in records.loaders:
        records.read_making(loader)


# The header of a packed file


@target()
def header(data: bytes) -> None:
    """A packed file whose datasets and attributes, made by libhdf5 itself, are of other kinds than a packer writes."""
    import h5py

    from fastload.format.header import read_header

    c = Choices(data)
    path = folder({"x": b""}) / "p.h5"
    kinds = ("u1", "<u2", "<i8", "<f4", "S9", "<i4", "u8", "c8", h5py.string_dtype(), "V3")

    def attrs(of: Any, right: dict[str, Any]) -> None:
        for name, value in right.items():
            if (
                new := c.document(value) if c.byte() < 250 else c.pick((np.arange(4), b"\xff", np.float32(np.nan)))
            ) is None:
                continue
            try:
                of.attrs[name] = new
            except (TypeError, ValueError, OverflowError, OSError, RuntimeError):
                continue

    with h5py.File(path, "w", libver=("v110", "v110")) as file:
        attrs(
            file,
            {
                "fastload_version": 1,
                "fastload_writer": "fastload 0",
                "seed": 3,
                "shuffled": True,
                "header_digest": "ab",
                "pack_options": "{}",
                "source_layout": "folder",
                "decoder": "x",
            },
        )
        ragged = c.byte() % 3 == 1
        sets: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
            "images": ("u1", (8, 4, 3, 3), {"kind": "x"}),
            "labels": ("<i8", (8,), {"names": ["a", "b"]}),
            "split": ("u1", (8,), {"names": ["train"]}),
            "key": ("S9", (8,), {}),
            "digest": ("<u8", (8,), {}),
            "digest_fields": ("<u8", (8,), {}),
            "masks": ("u1", (8, 4, 3), {"ignore_index": 255, "names": ["a"]}),
        }
        if ragged:
            sets["images"] = "u1", (300,), {"row_shape": [0, 0, 3], "row_dtype": "uint8"}
            sets |= {
                "images_offset": ("<u8", (8,), {}),
                "images_length": ("<u4", (8,), {}),
                "images_encoding": ("u1", (8,), {}),
                "images_size": ("<u4", (8, 2), {}),
                "images_orientation": ("u1", (8,), {}),
            }
        for name, (kind, shape, about) in sets.items():
            match c.byte():
                case 255:
                    continue
                case 254:
                    file[name] = h5py.SoftLink(c.pick(("/labels", "/absent", "/", "/images")))
                    continue
                case 253:
                    file[name] = h5py.ExternalLink("p.h5", "/labels")
                    continue
                case 252:
                    file.create_group(name)
                    continue
            new = (
                tuple(c.number(n, 5) for n in shape)
                if not c.wrong()
                else c.pick(((), (0,), (8,), (1, 1), (8, 0, 0, 3), (2,) * 9))
            )
            chunks = tuple(max(1, n) for n in new) if c.byte() % 2 and new else None
            try:
                made = file.create_dataset(
                    name,
                    new,
                    c.pick(kinds) if c.wrong() else kind,
                    chunks=chunks,
                    compression=c.pick((None, None, "gzip", "lzf")) if chunks else None,
                )
                if new and new[0] and made.dtype.kind in "iuf" and c.byte() % 2:
                    made[...] = c.pick((0, 1, 200)) if c.wrong() else 0
            except (ValueError, TypeError, OSError, RuntimeError):
                continue
            attrs(made, about)
    read_header(path)


@target(b"", *(bytes([at, at, 255, 7]) for at in range(8)))
def header_bytes(data: bytes) -> None:
    """A packed file of which some bytes of HDF5's own are others: four bytes of data each say where and what."""
    from fastload.format.header import read_header

    c, content = Choices(data), bytearray(_packed())
    while c.at + 4 <= len(data):
        content[(c.byte() * 256 + c.byte()) % len(content)] = c.byte() ^ (c.byte() & 1)
    read_header(folder({"p.h5": bytes(content)}) / "p.h5")


@cache
def _packed() -> bytes:
    labels = Column(np.arange(6) % 2, {"names": ("a", "b")})
    return write_packed(folder({}) / "packed.h5", PIXELS[..., None], {"labels": labels}).read_bytes()
