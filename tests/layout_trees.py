"""Small trees of files like those that torchvision's datasets have: the same names and forms, drawn content.

Every photo holds its own number as 4 x 4 blocks, dark or light, which JPEG and binarizing keep: `number_of(pixels)`.
A tree is {path pattern: content}; `{a,b}` and `{1..3}` (`{001..003}`) in a path expand. Content: None = a photo by
its suffix; text; bytes; an array (image, .npy); a dict (.mat, .json, .h5).
"""

from __future__ import annotations

import bz2
import io
import itertools
import json
import re
import struct
from pathlib import Path

import numpy as np
from PIL import Image

_count = itertools.count(1)


def photo(height=48, width=64, channels=3, binary=False):
    """Pixels with the next number in them."""
    n = next(_count)
    assert n < 2**15
    rng = np.random.default_rng(n)
    bits = (n >> np.arange(16)) & 1
    cells = bits.reshape(4, 4)
    out = cells[np.minimum(np.arange(height) * 4 // height, 3)][:, np.minimum(np.arange(width) * 4 // width, 3)]
    if binary:
        return out.astype(np.uint8) * 255
    image = (60 + 130 * out)[..., None] + rng.integers(-25, 26, (height, width, channels))
    image = image.astype(np.uint8)
    return image if channels == 3 else image[..., 0]


def number_of(pixels):
    a = np.asarray(pixels).astype(float)
    if a.ndim == 3:
        a = a[..., :3].mean(-1)
    h, w = a.shape
    n = 0
    for k in range(16):
        r, c = divmod(k, 4)
        y0, y1, x0, x1 = -(-r * h // 4), -(-(r + 1) * h // 4), -(-c * w // 4), -(-(c + 1) * w // 4)
        n |= int(a[y0:y1, x0:x1].mean() > 125) << k
    return n


def encoded(pixels, suffix):
    out = io.BytesIO()
    form = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".ppm": "PPM", ".bmp": "BMP", ".pgm": "PPM"}[suffix]
    image = Image.fromarray(pixels) if not isinstance(pixels, Image.Image) else pixels
    image.save(out, form, **({"quality": 90} if form == "JPEG" else {}))
    return out.getvalue()


def expand(pattern):
    found = re.search(r"\{([^{}]*)\}", pattern)
    if not found:
        return [pattern]
    inner = found.group(1)
    if ".." in inner:
        a, b = inner.split("..")
        values = [str(i).zfill(len(a)) for i in range(int(a), int(b) + 1)]
    else:
        values = inner.split(",")
    return [x for v in values for x in expand(pattern[: found.start()] + v + pattern[found.end() :])]


def write(path, content, i):
    path.parent.mkdir(parents=True, exist_ok=True)
    suffix = path.suffix.lower()
    if callable(content):
        content = content(i, path)
    if content is None:
        h, w = [(48, 64), (60, 48), (52, 52)][i % 3]
        content = photo(h, w)
    if isinstance(content, (np.ndarray, Image.Image)) and suffix in (".jpg", ".jpeg", ".png", ".ppm", ".bmp"):
        content = encoded(content, suffix)
    elif isinstance(content, np.ndarray) and suffix == ".npy":
        np.save(path, content)
        return
    elif isinstance(content, (dict, list)) and suffix == ".json":
        content = json.dumps(content)
    elif isinstance(content, dict) and suffix == ".mat":
        import scipy.io

        scipy.io.savemat(path, content)
        return
    elif isinstance(content, dict) and suffix == ".h5":
        import h5py

        with h5py.File(path, "w") as f:
            for k, v in content.items():
                f[k] = v
        return
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def idx(array):
    kind = {"uint8": 8, "int32": 12}[array.dtype.name]
    head = struct.pack(">HBB", 0, kind, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


def photos(n, h, w, c=1, **kw):
    return np.stack([photo(h, w, c, **kw) for _ in range(n)])


def mask(levels=(0, 1, 2), palette=False, border=None, size=None):
    def make(i, path):
        h, w = size or [(48, 64), (60, 48), (52, 52)][i % 3]
        m = np.full((h, w), levels[0], np.uint8)
        for k, v in enumerate(levels[1:]):
            m[(k + 1) * h // 6 : h - k * 5, (k + 1) * w // 6 : w - k * 5] = v
        if border is not None:
            m[:2] = border
        image = Image.fromarray(m)
        if palette:
            image.putpalette(list(range(256)) * 3)
        return image

    return make


def pfm(i, path):
    return b"Pf\n64 48\n-1.0\n" + np.random.default_rng(i).random((48, 64), np.float32).tobytes()


def flo(i, path):
    return b"PIEH" + struct.pack("<ii", 64, 48) + np.random.default_rng(i).random((48, 64, 2), np.float32).tobytes()


AVI = b"RIFF\x24\0\0\0AVI LIST" + bytes(64)
MP4 = b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + bytes(64)


def fixed(h, w, c=3):
    return lambda i, path: photo(h, w, c)


def png16(i, path):
    """A 16-bit PNG, as KITTI's disparities."""
    return Image.fromarray((np.random.default_rng(i).random((48, 64)) * 60000).astype(np.uint16))


def idx_photos(n):
    return lambda i, path: idx(photos(n, 28, 28))


def pcam_photos(n):
    return lambda i, path: {"x": photos(n, 96, 96, 3)}


def mnist_files(folder, prefix_train="train", prefix_test="t10k", labels="idx1-ubyte", classes=10):
    tree = {}
    for prefix, n in ((prefix_train, 20), (prefix_test, 10)):
        tree[f"{folder}/{prefix}-images-idx3-ubyte"] = idx_photos(n)
        tree[f"{folder}/{prefix}-labels-{labels}"] = idx((np.arange(n) * 3 % classes).astype(np.uint8))
    return tree


def voc_xml(name, shape=(48, 64)):
    h, w = shape
    return (
        f"<annotation><folder>VOC2012</folder><filename>{name}.jpg</filename><size><width>{w}</width><height>{h}"
        f"</height><depth>3</depth></size><segmented>1</segmented><object><name>dog</name><pose>Left</pose>"
        f"<truncated>0</truncated><difficult>0</difficult><bndbox><xmin>5</xmin><ymin>6</ymin><xmax>30</xmax>"
        f"<ymax>40</ymax></bndbox></object><object><name>cat</name><pose>Left</pose><truncated>0</truncated>"
        f"<difficult>1</difficult><bndbox><xmin>2</xmin><ymin>3</ymin><xmax>20</xmax><ymax>20</ymax></bndbox>"
        f"</object></annotation>"
    )


def cityscapes_polygons(i, path):
    return {"imgHeight": 48, "imgWidth": 64, "objects": [{"label": "road", "polygon": [[0, 0], [30, 0], [30, 30]]}]}


def coco(kind):
    images = [
        {"id": 100 + i, "file_name": f"{100 + i:012d}.jpg", "height": [48, 60, 52][i % 3], "width": [64, 48, 52][i % 3]}
        for i in range(6)
    ]
    if kind == "captions":
        notes = [
            {"id": 9 * i + k, "image_id": 100 + i, "caption": f"A photo {k} of thing {i}."}
            for i in range(6)
            for k in range(5)
        ]
        return {"images": images, "annotations": notes}
    notes = [
        {
            "id": i + 1,
            "image_id": 100 + i % 6,
            "category_id": [1, 18][i % 2],
            "bbox": [4, 5, 20, 25],
            "area": 500,
            "iscrowd": 0,
            "segmentation": [[4, 5, 24, 5, 24, 30, 4, 30]],
        }
        for i in range(9)
    ]
    return {
        "images": images,
        "annotations": notes,
        "categories": [{"id": 1, "name": "person"}, {"id": 18, "name": "dog"}],
    }


def pickle_batch(n, label_key, more=None):
    def make(i, path):
        import pickle

        data = photos(n, 32, 32, 3).transpose(0, 3, 1, 2).reshape(n, 3072)
        d = {
            "data": data,
            label_key: [int(k * 3 % 10) for k in range(n)],
            "batch_label": "b",
            "filenames": [f"{path.name}_{k}.png" for k in range(n)],
        }
        if more:
            d[more] = [int(k * 3 % 5) for k in range(n)]
        return pickle.dumps(d, 2)

    return make


def pickled(d):
    import pickle

    return pickle.dumps(d, 2)


def kitti(i, path):
    return (
        "Car 0.00 0 1.55 10.0 12.0 40.0 44.0 1.57 1.73 4.15 1.00 1.75 13.22 1.62\n"
        "DontCare -1 -1 -10 5.0 6.0 9.0 9.0 -1 -1 -1 -1000 -1000 -1000 -10\n"
    )


def usps(n):
    def make(i, path):
        lines = []
        for k in range(n):
            v = photo(16, 16, binary=True).ravel() / 127.5 - 1
            lines.append(f"{k % 10 + 1} " + " ".join(f"{j + 1}:{x:g}" for j, x in enumerate(v)))
        return bz2.compress("\n".join(lines).encode() + b"\n")

    return make


def semeion(i, path):
    rows = []
    for k in range(12):
        v = (photo(16, 16, binary=True).ravel() > 0).astype(int)
        rows.append(" ".join(f"{x:.4f}" for x in v) + " " + " ".join(str(int(k % 10 == j)) for j in range(10)))
    return "\n".join(rows) + "\n"


def fer(header, rows):
    def make(i, path):
        lines = [header]
        for k, usage in enumerate(rows):
            px = " ".join(map(str, photo(48, 48, 1).ravel()))
            lines.append(f"{k % 7},{px},{usage}" if usage else f'{k % 7},"{px}"' if "emotion" in header else f'"{px}"')
        return "\n".join(lines) + "\n"

    return make


def celeba_table(columns, value):
    names = [f"{i:06d}.jpg" for i in range(1, 10)]

    def make(i, path):
        rows = [f"{n} {' '.join(str(v) for v in value(k))}" for k, n in enumerate(names)]
        return "\n".join(([str(len(names)), columns] if columns else []) + rows) + "\n"

    return make


VOC = "VOCdevkit/VOC2012"
VOC_IDS = [f"2007_{i:06d}" for i in range(6)]
VOC_TREE = {
    f"{VOC}/JPEGImages/2007_{{000000..000007}}.jpg": fixed(48, 64),
    f"{VOC}/SegmentationClass/2007_{{000000..000005}}.png": mask((0, 8, 12), palette=True, border=255, size=(48, 64)),
    f"{VOC}/SegmentationObject/2007_{{000000..000005}}.png": mask((0, 1, 2), palette=True, border=255, size=(48, 64)),
    f"{VOC}/Annotations/2007_{{000000..000007}}.xml": lambda i, p: voc_xml(p.stem),
    f"{VOC}/ImageSets/Segmentation/train.txt": "\n".join(VOC_IDS[:3]) + "\n",
    f"{VOC}/ImageSets/Segmentation/val.txt": "\n".join(VOC_IDS[3:]) + "\n",
    f"{VOC}/ImageSets/Segmentation/trainval.txt": "\n".join(VOC_IDS) + "\n",
    f"{VOC}/ImageSets/Main/train.txt": "\n".join([*VOC_IDS[:3], "2007_000006"]) + "\n",
    f"{VOC}/ImageSets/Main/val.txt": "\n".join([*VOC_IDS[3:], "2007_000007"]) + "\n",
    f"{VOC}/ImageSets/Main/trainval.txt": "\n".join([*VOC_IDS, "2007_000006", "2007_000007"]) + "\n",
    f"{VOC}/ImageSets/Main/dog_train.txt": "\n".join(f"{x}  1" for x in VOC_IDS[:3]) + "\n",
}
LANDMARKS = " ".join(f"{part}_{axis}" for part in "lefteye righteye nose leftmouth rightmouth".split() for axis in "xy")
SIGNS = "Filename;Width;Height;Roi.X1;Roi.Y1;Roi.X2;Roi.Y2"
PETS = ["Abyssinian", "beagle", "Bengal", "pug"]


def pets_list(numbers):
    rows = [f"{c}_{n} {k + 1} {1 if c[0].isupper() else 2} 1" for k, c in enumerate(PETS) for n in numbers]
    return "\n".join(rows) + "\n"


AIRCRAFT = ["707-320", "727-200", "A300B4", "Cessna 172"]


def aircraft(level, ids):
    names = {
        "variant": AIRCRAFT,
        "family": ["Boeing 707", "Boeing 727", "A300", "Cessna 172"],
        "manufacturer": ["Boeing", "Boeing", "Airbus", "Cessna"],
    }[level]
    return "\n".join(f"{1000000 + i} {names[i % 4]}" for i in ids) + "\n"


FLICKR8K_HTML = (
    "<html><body><table>"
    + "".join(
        f"<tr><td><a href='http://www.flickr.com/photos/u/{1000 + i}/'>"
        f"http://www.flickr.com/photos/u/{1000 + i}/</a><ul>"
        + "".join(f"<li>caption {k} of {i}</li>" for k in range(5))
        + "</ul></td></tr>"
        for i in range(6)
    )
    + "</table></body></html>"
)
LFW_PEOPLE = {"Aaron_Eckhart": 1, "Bill_Clinton": 4, "George_W_Bush": 4, "Zico": 3}
LFW = {
    "lfw-py/lfw_funneled/Aaron_Eckhart/Aaron_Eckhart_0001.jpg": None,
    "lfw-py/lfw_funneled/{Bill_Clinton,George_W_Bush}/x_{0001..0004}.jpg": None,
    "lfw-py/lfw_funneled/Zico/Zico_{0001..0003}.jpg": None,
    "lfw-py/lfw-names.txt": "".join(f"{n}\t{k}\n" for n, k in LFW_PEOPLE.items()),
    "lfw-py/lfw-funneled.tgz": b"\x1f\x8b" + bytes(40),
    "lfw-py/people.txt": "2\n2\nAaron_Eckhart\t1\nBill_Clinton\t4\n2\nGeorge_W_Bush\t4\nZico\t3\n",
    "lfw-py/peopleDevTrain.txt": "2\nAaron_Eckhart\t1\nBill_Clinton\t4\n",
    "lfw-py/peopleDevTest.txt": "2\nGeorge_W_Bush\t4\nZico\t3\n",
    "lfw-py/pairs.txt": "1\t1\nBill_Clinton\t1\t2\nBill_Clinton\t1\tZico\t2\n",
    "lfw-py/pairsDevTrain.txt": "1\nBill_Clinton\t1\t2\nBill_Clinton\t1\tAaron_Eckhart\t1\n",
    "lfw-py/pairsDevTest.txt": "1\nGeorge_W_Bush\t1\t2\nGeorge_W_Bush\t1\tZico\t1\n",
}
INAT = [f"{k:05d}_Animalia_Chordata_Aves_Ord{k % 2}_Fam{k}_Gen{k}_sp{k}" for k in range(4)]
PLACES = ["/a/airfield", "/b/bridge", "/c/cemetery/indoor", "/c/cemetery/outdoor"]
SUN = ["/a/abbey", "/b/bedroom", "/c/church/indoor", "/c/church/outdoor"]
WIDER = ["0--Parade", "1--Handshaking"]


def wider(split, n):
    lines = []
    for e in WIDER:
        for k in range(n):
            lines += [f"{e}/{e}_{split}_{k}.jpg", "2", "5 6 20 22 0 0 0 0 0 0 ", "30 8 10 12 1 0 0 0 0 0 "]
    return "\n".join(lines) + "\n"


def stl_bin(n):
    return lambda i, p: photos(n, 96, 96, 3).transpose(0, 3, 2, 1).tobytes()


def svhn(n):
    return lambda i, p: {
        "X": photos(n, 32, 32, 3).transpose(1, 2, 3, 0),
        "y": (np.arange(n) % 10 + 1).astype(np.uint8)[:, None],
    }


def sbd(i, p):
    from scipy.sparse import csc_matrix

    m = np.asarray(mask((0, 3, 7))(i, p))
    bounds = np.empty((20, 1), object)
    for k in range(20):
        bounds[k, 0] = csc_matrix((m == k + 1).astype(float))
    return {"GTcls": {"Segmentation": m, "Boundaries": bounds, "CategoriesPresent": [3, 7]}}


CARS = np.array(["AM General Hummer SUV 2000", "Acura RL Sedan 2012", "Audi TT RS Coupe 2012"], object)


def cars(n, labels=True):
    fields = [("bbox_x1", "u1"), ("bbox_y1", "u1"), ("bbox_x2", "u1"), ("bbox_y2", "u1")] + (
        [("class", "u1")] if labels else []
    )
    a = np.zeros((1, n), [*fields, ("fname", object)])
    for k in range(n):
        row = (3, 4, 40, 41, *([k % 3 + 1] if labels else []), f"{k + 1:05d}.jpg")
        a[0, k] = row
    return {"annotations": a}


CITIES = [("train", "bremen"), ("train", "jena"), ("val", "munster"), ("test", "berlin")]
TREES = {
    "LSUN": {
        "{bedroom,church_outdoor,tower}_{train,val}_lmdb/data.mdb": bytes(16) + b"\xde\xc0\xef\xbe" + bytes(8000),
        "{bedroom,church_outdoor,tower}_{train,val}_lmdb/lock.mdb": bytes(8192),
    },
    "LSUNClass": {
        "bedroom_val_lmdb/data.mdb": bytes(16) + b"\xde\xc0\xef\xbe" + bytes(8000),
        "bedroom_val_lmdb/lock.mdb": bytes(8192),
    },
    "ImageFolder": {"{cat,dog,horse}/{1..4}.jpg": None},
    "DatasetFolder": {"{cat,dog,horse}/{1..4}.npy": lambda i, p: photo(32, 32)},
    "FakeData": {},
    "CocoCaptions": {
        "train2017/{000000000100..000000000105}.jpg": None,
        "annotations/captions_train2017.json": coco("captions"),
    },
    "CocoDetection": {
        "train2017/{000000000100..000000000105}.jpg": None,
        "annotations/instances_train2017.json": coco("instances"),
        "annotations/captions_train2017.json": coco("captions"),
    },
    "CIFAR10": {
        "cifar-10-batches-py/data_batch_{1..5}": pickle_batch(10, "labels"),
        "cifar-10-batches-py/test_batch": pickle_batch(10, "labels"),
        "cifar-10-batches-py/batches.meta": pickled(
            {
                "label_names": "airplane automobile bird cat deer dog frog horse ship truck".split(),
                "num_vis": 3072,
                "num_cases_per_batch": 10,
            }
        ),
        "cifar-10-batches-py/readme.html": "<meta>",
    },
    "CIFAR100": {
        "cifar-100-python/{train,test}": pickle_batch(20, "fine_labels", "coarse_labels"),
        "cifar-100-python/meta": pickled(
            {
                "fine_label_names": [f"fine{i}" for i in range(100)],
                "coarse_label_names": [f"coarse{i}" for i in range(20)],
            }
        ),
        "cifar-100-python/file.txt~": "x",
    },
    "EMNIST": {
        k: v
        for s, c in (("letters", 26), ("digits", 10), ("balanced", 47))
        for k, v in mnist_files("EMNIST/raw", f"emnist-{s}-train", f"emnist-{s}-test", classes=c).items()
    },
    "FashionMNIST": mnist_files("FashionMNIST/raw"),
    "QMNIST": {f"QMNIST/raw/qmnist-{s}-images-idx3-ubyte": idx_photos(n) for s, n in (("train", 20), ("test", 10))}
    | {
        f"QMNIST/raw/qmnist-{s}-labels-idx2-int": idx(
            np.stack([np.arange(n) * 3 % 10] + [np.arange(n)] * 7, 1).astype(np.int32)
        )
        for s, n in (("train", 20), ("test", 10))
    },
    "MNIST": mnist_files("MNIST/raw"),
    "KMNIST": mnist_files("KMNIST/raw"),
    "MovingMNIST": {"MovingMNIST/mnist_test_seq.npy": lambda i, p: photos(20 * 6, 64, 64).reshape(20, 6, 64, 64)},
    "StanfordCars": {
        "stanford_cars/cars_{train,test}/{00001..00006}.jpg": None,
        "stanford_cars/devkit/cars_train_annos.mat": cars(6),
        "stanford_cars/devkit/cars_test_annos.mat": cars(6, False),
        "stanford_cars/cars_test_annos_withlabels.mat": cars(6),
        "stanford_cars/devkit/cars_meta.mat": {"class_names": CARS[None]},
        "stanford_cars/devkit/{README.txt,train_perfect_preds.txt}": "1\n2\n",
    },
    "STL10": {
        "stl10_binary/train_X.bin": stl_bin(12),
        "stl10_binary/train_y.bin": bytes([k % 10 + 1 for k in range(12)]),
        "stl10_binary/test_X.bin": stl_bin(8),
        "stl10_binary/test_y.bin": bytes([k % 10 + 1 for k in range(8)]),
        "stl10_binary/unlabeled_X.bin": stl_bin(10),
        "stl10_binary/class_names.txt": "airplane\nbird\ncar\ncat\ndeer\ndog\nhorse\nmonkey\nship\ntruck\n",
        "stl10_binary/fold_indices.txt": "\n".join("0 1 2 3" for _ in range(10)) + "\n",
    },
    "SUN397": {f"SUN397{c}/sun_{{aaa,bbb,ccc}}{k}.jpg": None for k, c in enumerate(SUN)}
    | {"SUN397/ClassName.txt": "\n".join(SUN) + "\n", "SUN397/README.txt": "x"},
    "SVHN": {"train_32x32.mat": svhn(12), "test_32x32.mat": svhn(8), "extra_32x32.mat": svhn(10)},
    "PhotoTour": {
        "notredame/patches{0000..0002}.bmp": lambda i, p: np.concatenate(
            [np.concatenate([photo(64, 64, 1) for _ in range(4)], 1) for _ in range(4)], 0
        ),
        "notredame/info.txt": "".join(f"{k // 2} 0\n" for k in range(48)),
        "notredame/m50_100000_100000_0.txt": "".join(f"{k} {k // 2} 0 {k + 1} {(k + 1) // 2} 0 0\n" for k in range(20)),
        "notredame/interest.txt": "0 0 0 0 0\n" * 48,
    },
    "SEMEION": {"semeion.data": semeion},
    "Omniglot": {
        "omniglot-py/images_background/{Alphabet_of_the_Magi,Greek}/character{01..03}/0709_{01..03}.png": lambda i, p: (
            Image.fromarray(photo(105, 105, 1, binary=True)).convert("1")
        ),
        "omniglot-py/images_evaluation/{Angelic,Tibetan}/character{01..03}/0965_{01..03}.png": lambda i, p: (
            Image.fromarray(photo(105, 105, 1, binary=True)).convert("1")
        ),
        "omniglot-py/images_{background,evaluation}.zip": b"PK\5\6" + bytes(18),
    },
    "SBU": {
        "dataset/{4385058960_b0f291553e,148648940_3f7ff5b5a4,2100_a}_{1..3}.jpg": None,
        "dataset/SBU_captioned_photo_dataset_urls.txt": "".join(
            f"http://static.flickr.com/2723/{a}_{k}.jpg\n"
            for a in ("4385058960_b0f291553e", "148648940_3f7ff5b5a4", "2100_a")
            for k in (1, 2, 3)
        ),
        "dataset/SBU_captioned_photo_dataset_captions.txt": "".join(f"caption {k}\n" for k in range(9)),
        "SBUCaptionedPhotoDataset.tar.gz": b"\x1f\x8b" + bytes(40),
    },
    "Flickr8k": {
        "Flicker8k_Dataset/{1000..1005}_abc.jpg": None,
        "ann.html": FLICKR8K_HTML,
        "Flickr8k.token.txt": "".join(
            f"{1000 + i}_abc.jpg#{k}\tcaption {k} of {i} .\n" for i in range(6) for k in range(5)
        ),
        "Flickr_8k.trainImages.txt": "".join(f"{1000 + i}_abc.jpg\n" for i in range(4)),
    },
    "Flickr30k": {
        "flickr30k-images/{1000..1005}.jpg": None,
        "results_20130124.token": "".join(
            f"{1000 + i}.jpg#{k}\tcaption {k} of {i} .\n" for i in range(6) for k in range(5)
        ),
    },
    "Flowers102": {
        "flowers-102/jpg/image_{00001..00012}.jpg": None,
        "flowers-102/imagelabels.mat": {"labels": np.arange(12)[None] % 4 + 1},
        "flowers-102/setid.mat": {
            "trnid": np.array([[1, 2, 3, 4]]),
            "valid": np.array([[5, 6, 7, 8]]),
            "tstid": np.array([[9, 10, 11, 12]]),
        },
        "flowers-102/102flowers.tgz": b"\x1f\x8b" + bytes(40),
    },
    "VOCSegmentation": VOC_TREE,
    "VOCDetection": VOC_TREE,
    "Cityscapes": {
        f"leftImg8bit/{s}/{c}/{c}_{{000000..000001}}_000019_leftImg8bit.png": fixed(48, 64) for s, c in CITIES
    }
    | {
        f"gtFine/{s}/{c}/{c}_{{000000..000001}}_000019_gtFine_{kind}": content
        for s, c in CITIES
        for kind, content in (
            ("labelIds.png", mask((7, 8, 26), size=(48, 64))),
            ("instanceIds.png", png16),
            ("color.png", lambda i, p: Image.fromarray(np.zeros((48, 64, 4), np.uint8))),
            ("polygons.json", cityscapes_polygons),
        )
    },
    "ImageNet": {
        "{train,val}/{n01440764,n02102040,n02979186}/ILSVRC2012_{1..3}.JPEG": None,
        "meta.bin": b"PK\3\4" + bytes(100),
    },
    "Caltech101": {
        "caltech101/101_ObjectCategories/{BACKGROUND_Google,Faces,accordion,airplanes}/image_{0001..0003}.jpg": None,
        "caltech101/Annotations/{Faces_2,accordion,Airplanes_Side_2}/annotation_{0001..0003}.mat": {
            "obj_contour": np.zeros((2, 5)),
            "box_coord": np.array([[1, 2, 3, 4]]),
        },
    },
    "Caltech256": {
        "caltech256/256_ObjectCategories/001.ak47/001_{0001..0003}.jpg": None,
        "caltech256/256_ObjectCategories/002.american-flag/002_{0001..0003}.jpg": None,
        "caltech256/256_ObjectCategories/257.clutter/003_{0001..0003}.jpg": None,
    },
    "CelebA": {
        "celeba/img_align_celeba/{000001..000009}.jpg": fixed(218, 178),
        "celeba/list_attr_celeba.txt": celeba_table(
            "Male Smiling Young", lambda k: [[-1, 1][k % 2], [-1, 1][k // 2 % 2], 1]
        ),
        "celeba/identity_CelebA.txt": celeba_table("", lambda k: [k % 3 + 1]),
        "celeba/list_bbox_celeba.txt": celeba_table("image_id x_1 y_1 width height", lambda k: [9, 8, 70, 80]),
        "celeba/list_landmarks_align_celeba.txt": celeba_table(LANDMARKS, lambda k: range(69 + k, 79 + k)),
        "celeba/list_eval_partition.txt": celeba_table("", lambda k: [k // 3]),
    },
    "WIDERFace": {
        f"widerface/WIDER_{s}/images/{e}/{e}_{s}_{{0..{n - 1}}}.jpg": None
        for s, n in (("train", 3), ("val", 2), ("test", 2))
        for e in WIDER
    }
    | {
        "widerface/wider_face_split/wider_face_train_bbx_gt.txt": wider("train", 3),
        "widerface/wider_face_split/wider_face_val_bbx_gt.txt": wider("val", 2),
        "widerface/wider_face_split/wider_face_test_filelist.txt": "".join(
            f"{e}/{e}_test_{k}.jpg\n" for e in WIDER for k in range(2)
        ),
        "widerface/wider_face_split.zip": b"PK\5\6" + bytes(18),
    },
    "SBDataset": {
        "img/2008_{000001..000006}.jpg": None,
        "cls/2008_{000001..000006}.mat": sbd,
        "inst/2008_{000001..000006}.mat": sbd,
        "train.txt": "".join(f"2008_{k:06d}\n" for k in (1, 2, 3, 4)),
        "val.txt": "".join(f"2008_{k:06d}\n" for k in (5, 6)),
        "train_noval.txt": "2008_000001\n",
    },
    "USPS": {"usps.bz2": usps(20), "usps.t.bz2": usps(10)},
    "Kinetics": {
        "{train,val}/{abseiling,zumba}/v_{000001..000003}_000010.mp4": MP4,
        "annotations/{train,val}.csv": "label,youtube_id,time_start,time_end,split\nabseiling,v,1,10,train\n",
    },
    "HMDB51": {
        "videos/{brush_hair,wave}/clip_{1..4}.avi": AVI,
        "splits/{brush_hair,wave}_test_split1.txt": "clip_1.avi 1\nclip_2.avi 2\n",
    },
    "UCF101": {
        "UCF-101/{ApplyLipstick,YoYo}/v_X_g{01..04}_c01.avi": AVI,
        "ucfTrainTestlist/{trainlist01,testlist01}.txt": "ApplyLipstick/v_X_g01_c01.avi 1\n",
        "ucfTrainTestlist/classInd.txt": "1 ApplyLipstick\n2 YoYo\n",
    },
    "Places365": {f"data_256_standard{c}/{{00000001..00000003}}.jpg": None for c in PLACES}
    | {
        "val_256/Places365_val_{00000001..00000006}.jpg": None,
        "test_256/Places365_test_{00000001..00000004}.jpg": None,
        "categories_places365.txt": "".join(f"{c} {k}\n" for k, c in enumerate(PLACES)),
        "places365_train_standard.txt": "".join(
            f"{c}/{n:08d}.jpg {k}\n" for k, c in enumerate(PLACES) for n in (1, 2, 3)
        ),
        "places365_val.txt": "".join(f"Places365_val_{n:08d}.jpg {n % 4}\n" for n in range(1, 7)),
        "places365_test.txt": "".join(f"Places365_test_{n:08d}.jpg\n" for n in range(1, 5)),
    },
    "Kitti": {
        "Kitti/raw/training/image_2/{000000..000005}.png": None,
        "Kitti/raw/training/label_2/{000000..000005}.txt": kitti,
        "Kitti/raw/testing/image_2/{000000..000002}.png": None,
    },
    "INaturalist": {f"2021_train_mini/{c}/{{a,b,c}}.jpg": None for c in INAT}
    | {f"2021_valid/{c}/{{d,e}}.jpg": None for c in INAT},
    "LFWPeople": LFW,
    "LFWPairs": LFW,
    "KittiFlow": {
        "KittiFlow/{training,testing}/image_2/{000000..000003}_{10,11}.png": fixed(48, 64),
        "KittiFlow/training/flow_occ/{000000..000003}_10.png": png16,
    },
    "Sintel": {
        "Sintel/training/{clean,final}/{alley_1,bamboo_2}/frame_{0001..0003}.png": fixed(48, 64),
        "Sintel/test/{clean,final}/ambush_1/frame_{0001..0003}.png": fixed(48, 64),
        "Sintel/training/flow/{alley_1,bamboo_2}/frame_{0001..0002}.flo": flo,
    },
    "FlyingChairs": {
        "FlyingChairs/data/{00001..00006}_img{1,2}.ppm": fixed(48, 64),
        "FlyingChairs/data/{00001..00006}_flow.flo": flo,
        "FlyingChairs/FlyingChairs_train_val.txt": "1\n1\n1\n1\n2\n2\n",
    },
    "FlyingThings3D": {
        "FlyingThings3D/frames_{cleanpass,finalpass}/{TRAIN,TEST}/{A,B}/0000/{left,right}/{0006..0008}.png": fixed(
            48, 64
        ),
        "FlyingThings3D/optical_flow/{TRAIN,TEST}/{A,B}/0000/into_future/{left,right}/Into_{0006..0008}_L.pfm": pfm,
    },
    "HD1K": {
        "hd1k/hd1k_input/image_2/{000000..000001}_{0000..0003}.png": fixed(48, 64),
        "hd1k/hd1k_flow_gt/flow_occ/{000000..000001}_{0000..0003}.png": png16,
        "hd1k/hd1k_challenge/image_2/{000000..000001}_{10,11}.png": fixed(48, 64),
    },
    "Food101": {
        "food-101/images/{apple_pie,pizza,waffles}/{1..5}.jpg": None,
        "food-101/meta/train.json": {c: [f"{c}/{k}" for k in (1, 2, 3)] for c in ("apple_pie", "pizza", "waffles")},
        "food-101/meta/test.json": {c: [f"{c}/{k}" for k in (4, 5)] for c in ("apple_pie", "pizza", "waffles")},
        "food-101/meta/{classes,labels}.txt": "apple_pie\npizza\nwaffles\n",
        "food-101/meta/train.txt": "".join(f"{c}/{k}\n" for c in ("apple_pie", "pizza", "waffles") for k in (1, 2, 3)),
        "food-101/meta/test.txt": "".join(f"{c}/{k}\n" for c in ("apple_pie", "pizza", "waffles") for k in (4, 5)),
        "food-101/{README,license_agreement}.txt": "x",
    },
    "DTD": {f"dtd/dtd/images/{c}/{c}_{{0001..0006}}.jpg": None for c in ("banded", "blotchy", "zigzagged")}
    | {
        f"dtd/dtd/labels/{s}{p}.txt": "".join(
            f"{c}/{c}_{(k + p) % 6 + 1:04d}.jpg\n" for c in ("banded", "blotchy", "zigzagged") for k in ks
        )
        for p in range(1, 11)
        for s, ks in (("train", (0, 1)), ("val", (2, 3)), ("test", (4, 5)))
    }
    | {
        "dtd/dtd/labels/labels_joint_anno.txt": "banded/banded_0001.jpg banded\n",
        "dtd/dtd/imdb/imdb.mat": {"images": 1},
    },
    "FER2013": {
        "fer2013/fer2013.csv": fer("emotion,pixels,Usage", ["Training"] * 12 + ["PublicTest"] * 5 + ["PrivateTest"] * 5)
    },
    "GTSRB": {
        "gtsrb/GTSRB/Training/{00000,00001,00002}/00000_{00000..00003}.ppm": None,
        "gtsrb/GTSRB/Final_Test/Images/{00000..00005}.ppm": None,
        "gtsrb/GTSRB/Training/{00000,00001,00002}/GT-x.csv": f"{SIGNS};ClassId\n00000_00000.ppm;64;48;5;6;30;40;0\n",
        "gtsrb/GTSRB/{Readme-Images,Readme-Images-Final-test}.txt": "x",
        "gtsrb/GTSRB/Final_Test/Images/GT-final_test.test.csv": SIGNS
        + "\n"
        + "".join(f"{k:05d}.ppm;64;48;5;6;30;40\n" for k in range(6)),
        "gtsrb/GT-final_test.csv": f"{SIGNS};ClassId\n"
        + "".join(f"{k:05d}.ppm;64;48;5;6;30;40;{k % 3}\n" for k in range(6)),
    },
    "CLEVRClassification": {
        f"clevr/CLEVR_v1.0/images/{s}/CLEVR_{s}_{{000000..000004}}.png": None for s in ("train", "val", "test")
    }
    | {
        f"clevr/CLEVR_v1.0/scenes/CLEVR_{s}_scenes.json": {
            "info": {},
            "scenes": [
                {"image_filename": f"CLEVR_{s}_{k:06d}.png", "image_index": k, "objects": [{}] * (3 + k % 3)}
                for k in range(5)
            ],
        }
        for s in ("train", "val")
    }
    | {
        "clevr/CLEVR_v1.0/questions/CLEVR_{train,val,test}_questions.json": {"questions": []},
        "clevr/CLEVR_v1.0/README.txt": "x",
    },
    "OxfordIIITPet": {f"oxford-iiit-pet/images/{c}_{{1..5}}.jpg": fixed(48, 64) for c in PETS}
    | {f"oxford-iiit-pet/annotations/trimaps/{c}_{{1..5}}.png": mask((2, 3, 1), size=(48, 64)) for c in PETS}
    | {f"oxford-iiit-pet/annotations/xmls/{c}_{{1..3}}.xml": lambda i, p: voc_xml(p.stem) for c in PETS}
    | {"oxford-iiit-pet/annotations/trimaps/._Abyssinian_1.png": b"\0\5\x16\7" + bytes(100)}
    | {
        "oxford-iiit-pet/annotations/trainval.txt": pets_list((1, 2, 3)),
        "oxford-iiit-pet/annotations/test.txt": pets_list((4, 5)),
        "oxford-iiit-pet/annotations/list.txt": "#Image CLASS-ID SPECIES BREED ID\n" + pets_list(range(1, 6)),
        "oxford-iiit-pet/annotations/README": "x",
        "oxford-iiit-pet/images/Abyssinian_1.mat": b"MATLAB 5.0" + bytes(128),
    },
    "PCAM": {
        f"pcam/camelyonpatch_level_2_split_{s}_x.h5": pcam_photos(n)
        for s, n in (("train", 12), ("valid", 6), ("test", 6))
    }
    | {
        f"pcam/camelyonpatch_level_2_split_{s}_y.h5": {"y": (np.arange(n) % 2).astype(np.uint8).reshape(n, 1, 1, 1)}
        for s, n in (("train", 12), ("valid", 6), ("test", 6))
    },
    "Country211": {"country211/{train,valid,test}/{AD,FR,JP}/x{1..3}.jpg": None},
    "FGVCAircraft": {
        "fgvc-aircraft-2013b/data/images/10000{00..23}.jpg": None,
        "fgvc-aircraft-2013b/data/variants.txt": "\n".join(AIRCRAFT) + "\n",
        "fgvc-aircraft-2013b/data/families.txt": "Boeing 707\nBoeing 727\nA300\nCessna 172\n",
        "fgvc-aircraft-2013b/data/manufacturers.txt": "Boeing\nAirbus\nCessna\n",
        "fgvc-aircraft-2013b/data/images_box.txt": "".join(f"{1000000 + i} 3 4 40 41\n" for i in range(24)),
        "fgvc-aircraft-2013b/{README.md,evaluation.m}": "x",
    }
    | {
        f"fgvc-aircraft-2013b/data/images_{level}_{s}.txt": aircraft(level, ids)
        for level in ("variant", "family", "manufacturer")
        for s, ids in (("train", range(8)), ("val", range(8, 16)), ("trainval", range(16)), ("test", range(16, 24)))
    }
    | {
        f"fgvc-aircraft-2013b/data/images_{s}.txt": "".join(f"{1000000 + i}\n" for i in ids)
        for s, ids in (("train", range(8)), ("val", range(8, 16)), ("trainval", range(16)), ("test", range(16, 24)))
    },
    "EuroSAT": {
        "eurosat/2750/{AnnualCrop,Forest,River}/{AnnualCrop,Forest}_{1..2}.jpg": fixed(64, 64),
        "eurosat/EuroSAT.zip": b"PK\5\6" + bytes(18),
    },
    "RenderedSST2": {"rendered-sst2/{train,valid,test}/{negative,positive}/{0..3}.png": None},
    "Kitti2012Stereo": {
        "Kitti2012/{training,testing}/colored_{0,1}/{000000..000003}_10.png": fixed(48, 64),
        "Kitti2012/training/disp_noc/{000000..000003}_10.png": png16,
        "Kitti2012/training/calib/{000000..000003}.txt": "P0: 1 0 0\n",
    },
    "Kitti2015Stereo": {
        "Kitti2015/{training,testing}/image_{2,3}/{000000..000003}_10.png": fixed(48, 64),
        "Kitti2015/training/disp_occ_{0,1}/{000000..000003}_10.png": png16,
        "Kitti2015/training/calib/{000000..000003}.txt": "P0: 1 0 0\n",
    },
    "CarlaStereo": {
        "carla-highres/trainingF/scene_{1..3}/im{0,1}.png": fixed(48, 64),
        "carla-highres/trainingF/scene_{1..3}/disp{0,1}GT.pfm": pfm,
        "carla-highres/trainingF/scene_{1..3}/calib.txt": "cam0\n",
    },
    "Middlebury2014Stereo": {
        "Middlebury2014/{train,additional}/{Bike,Jadeplant}-{perfect,imperfect}/{im0,im1,im1E,im1L}.png": fixed(48, 64),
        "Middlebury2014/{train,additional}/{Bike,Jadeplant}-{perfect,imperfect}/disp{0,1}.pfm": pfm,
        "Middlebury2014/{train,additional}/{Bike,Jadeplant}-{perfect,imperfect}/calib.txt": "cam0\n",
        "Middlebury2014/test/{Australia,Bicycle2}/im{0,1}.png": fixed(48, 64),
    },
    "CREStereo": {
        "CREStereo/{tree,shapenet,reflective,hole}/{1..3}_{left,right}.jpg": fixed(48, 64),
        "CREStereo/{tree,shapenet,reflective,hole}/{1..3}_{left,right}.disp.png": png16,
    },
    "FallingThingsStereo": {
        "FallingThings/single/{002_can,003_box}/{kitchen_0,kitedemo_1}/{000000..000002}.{left,right}.jpg": fixed(
            48, 64
        ),
        "FallingThings/single/{002_can,003_box}/{kitchen_0,kitedemo_1}/{000000..000002}.{left,right}.depth.png": png16,
        "FallingThings/single/{002_can,003_box}/{kitchen_0,kitedemo_1}/{000000..000002}.{left,right}.json": {
            "objects": []
        },
        "FallingThings/single/{002_can,003_box}/{kitchen_0,kitedemo_1}/{_camera_settings,_object_settings}.json": {
            "camera_settings": [{"intrinsic_settings": {"fx": 1}}]
        },
    },
    "SceneFlowStereo": {
        "SceneFlow/Monkaa/frames_{cleanpass,finalpass}/{eating_x2,flower_storm}/{left,right}/{0000..0002}.png": fixed(
            48, 64
        ),
        "SceneFlow/Monkaa/disparity/{eating_x2,flower_storm}/{left,right}/{0000..0002}.pfm": pfm,
    },
    "SintelStereo": {
        "Sintel/training/{clean,final}_{left,right}/{alley_1,bamboo_2}/frame_{0001..0003}.png": fixed(48, 64),
        "Sintel/training/disparities/{alley_1,bamboo_2}/frame_{0001..0003}.png": fixed(48, 64),
        "Sintel/training/{occlusions,outofframe}/{alley_1,bamboo_2}/frame_{0001..0003}.png": mask(
            (0, 255), size=(48, 64)
        ),
    },
    "InStereo2k": {
        "InStereo2k/{train,test}/{000000,000001,000002}/{left,right}.png": fixed(48, 64),
        "InStereo2k/{train,test}/{000000,000001,000002}/{left,right}_disp.png": png16,
    },
    "ETH3DStereo": {
        "ETH3D/two_view_{training,testing}/{delivery_area_1l,forest_2s}/im{0,1}.png": fixed(48, 64),
        "ETH3D/two_view_training_gt/{delivery_area_1l,forest_2s}/disp0GT.pfm": pfm,
        "ETH3D/two_view_training_gt/{delivery_area_1l,forest_2s}/mask0nocc.png": mask((0, 255), size=(48, 64)),
        "ETH3D/two_view_{training,testing}/{delivery_area_1l,forest_2s}/calib.txt": "cam0\n",
    },
    "Imagenette": {
        "imagenette2/{train,val}/{n01440764,n02102040,n02979186}/{n01440764,n02102040}_{1..2}.JPEG": None,
        "imagenette2/noisy_imagenette.csv": "path,noisy_labels_0,noisy_labels_1,noisy_labels_5,is_valid\n"
        + "".join(
            f"{s}/{c}/{d}_{k}.JPEG,{c},{c},n02102040,{v}\n"
            for s, v in (("train", False), ("val", True))
            for c in ("n01440764", "n02102040", "n02979186")
            for d in ("n01440764", "n02102040")
            for k in (1, 2)
        ),
    },
}
# LFW's file names repeat the person.
for person in ("Bill_Clinton", "George_W_Bush"):
    LFW[f"lfw-py/lfw_funneled/{person}/{person}_{{0001..0004}}.jpg"] = None
del LFW["lfw-py/lfw_funneled/{Bill_Clinton,George_W_Bush}/x_{0001..0004}.jpg"]
# The folders below the root that a user would give, the most natural one first ("" is the root itself).
GIVEN = {
    "Flowers102": ["flowers-102", ""],
    "OxfordIIITPet": ["oxford-iiit-pet", ""],
    "FGVCAircraft": ["fgvc-aircraft-2013b", ""],
    "Flickr8k": [""],
    "Flickr30k": [""],
    "VOCSegmentation": ["VOCdevkit/VOC2012", ""],
    "VOCDetection": ["VOCdevkit/VOC2012", ""],
    "MNIST": ["MNIST/raw", ""],
    "QMNIST": ["QMNIST/raw", ""],
    "EMNIST": ["EMNIST/raw", ""],
    "KMNIST": ["KMNIST/raw", ""],
    "FashionMNIST": ["FashionMNIST/raw", ""],
    "DTD": ["dtd/dtd", "", "dtd"],
    "Caltech101": ["caltech101", "caltech101/101_ObjectCategories", ""],
    "INaturalist": [""],
    "LFWPeople": ["lfw-py", ""],
    "LFWPairs": ["lfw-py", ""],
    "Kitti": ["Kitti/raw", "", "Kitti/raw/training"],
    "GTSRB": ["gtsrb", "gtsrb/GTSRB", ""],
    "CLEVRClassification": ["clevr/CLEVR_v1.0", ""],
    "EuroSAT": ["eurosat/2750", "eurosat", ""],
    "LSUNClass": ["bedroom_val_lmdb", ""],
    "PhotoTour": ["notredame", ""],
    "HMDB51": ["", "videos"],
    "UCF101": ["UCF-101", ""],
}


def make(name, root):
    where = Path(root) / name
    where.mkdir(parents=True, exist_ok=True)
    for pattern, content in TREES[name].items():
        for i, path in enumerate(expand(pattern)):
            write(where / path, content, i)
    return where


def given(name, root):
    """The folders that a user would give to `fastload pack`."""
    where = Path(root) / name
    if name in GIVEN:
        return [where / g for g in GIVEN[name]]
    tops = {p.split("/")[0] for pattern in TREES[name] for p in expand(pattern)}
    only = next(iter(tops)) if len(tops) == 1 else None
    return [where / only, where] if only and (where / only).is_dir() else [where]


_THREE = [("train", {"split": "train"}), ("val", {"split": "val"}), ("test", {"split": "test"})]
_TWO = [("train", {"split": "train"}), ("test", {"split": "test"})]
_NO_TEST = [("train", {"split": "train"}), ("val", {"split": "val"})]
_TRAIN = [("train", {"train": True}), ("test", {"train": False})]
_ONE = [("all", {})]
# The arguments with which torchvision's class gives each split of the tree, if it is one of labelled images.
CONFIGS = {
    "CIFAR10": _TRAIN,
    "CIFAR100": _TRAIN,
    "MNIST": _TRAIN,
    "FashionMNIST": _TRAIN,
    "KMNIST": _TRAIN,
    "QMNIST": _TRAIN,
    "USPS": _TRAIN,
    "StanfordCars": _TWO,
    "STL10": [*_TWO, ("unlabeled", {"split": "unlabeled"})],
    "SUN397": _ONE,
    "SVHN": [*_TWO, ("extra", {"split": "extra"})],
    "SEMEION": _ONE,
    "Omniglot": [("background", {"background": True}), ("evaluation", {"background": False})],
    "Flowers102": _THREE,
    "Caltech101": _ONE,
    "Caltech256": _ONE,
    "CelebA": [("train", {"split": "train"}), ("val", {"split": "valid"}), ("test", {"split": "test"})],
    "Places365": [
        ("train", {"split": "train-standard", "small": True}),
        ("val", {"split": "val", "small": True}),
        ("test", {"split": "test", "small": True}),
    ],
    "INaturalist": [("train", {"version": "2021_train_mini"}), ("val", {"version": "2021_valid"})],
    "LFWPeople": [("train", {"split": "train"}), ("test", {"split": "test"})],
    "Food101": _TWO,
    "DTD": _THREE,
    "FER2013": _TWO,
    "GTSRB": _TWO,
    "CLEVRClassification": _THREE,
    "OxfordIIITPet": [("trainval", {"split": "trainval"}), ("test", {"split": "test"})],
    "PCAM": _THREE,
    "Country211": [("train", {"split": "train"}), ("val", {"split": "valid"}), ("test", {"split": "test"})],
    "FGVCAircraft": _THREE,
    "EuroSAT": _ONE,
    "RenderedSST2": _THREE,
    "Imagenette": _NO_TEST,
    "ImageNet": _NO_TEST,
    "ImageFolder": _ONE,
    "Cityscapes": [(s, {"split": s, "target_type": "semantic"}) for s in ("train", "val")],
    "VOCSegmentation": [("train", {"image_set": "train"}), ("val", {"image_set": "val"})],
    "VOCDetection": [("train", {"image_set": "train"}), ("val", {"image_set": "val"})],
    "SBDataset": [
        ("train", {"image_set": "train", "mode": "segmentation"}),
        ("val", {"image_set": "val", "mode": "segmentation"}),
    ],
    "WIDERFace": _THREE,
    "Kitti": _TRAIN,
    "SBU": _ONE,
    "Flickr8k": [("all", {"ann_file": "ann.html"})],
    "Flickr30k": [("all", {"ann_file": "results_20130124.token"})],
    "EMNIST": [("train", {"split": "letters", "train": True}), ("test", {"split": "letters", "train": False})],
}
# What the class gives besides, or instead of, a label.
NEEDS = {
    "CocoCaptions": "caption",
    "CocoDetection": "boxes",
    "SBU": "caption",
    "Flickr8k": "caption",
    "Flickr30k": "caption",
    "VOCSegmentation": "masks",
    "VOCDetection": "boxes",
    "Cityscapes": "masks",
    "SBDataset": "masks",
    "WIDERFace": "boxes",
    "Kitti": "boxes",
}
# What has no image with a meaning that a packed file of images and labels could hold: only a refusal is right.
NO_IMAGES = set(
    "LSUN LSUNClass DatasetFolder FakeData MovingMNIST PhotoTour Kinetics HMDB51 UCF101 LFWPairs KittiFlow Sintel "
    "FlyingChairs FlyingThings3D HD1K Kitti2012Stereo Kitti2015Stereo CarlaStereo Middlebury2014Stereo CREStereo "
    "FallingThingsStereo SceneFlowStereo SintelStereo InStereo2k ETH3DStereo".split()
)
# The root that the class wants, below that of the tree, and further arguments after `torchvision:NAME`.
SUBROOT = {"Flickr8k": "Flicker8k_Dataset", "Flickr30k": "flickr30k-images", "ImageFolder": ""}
FURTHER = {
    "EMNIST": ",split=letters",
    "Flickr8k": ",ann_file={}/ann.html",
    "Flickr30k": ",ann_file={}/results_20130124.token",
}


def import_torchvision():
    """Returns torchvision.datasets, with file sums not compared; raises whatever its import raises.

    A CUDA build beside torch for the CPU misses two operators, which no dataset uses.
    """
    import torch

    try:
        import torchvision.datasets
    except RuntimeError as exc:
        if "operator torchvision::" not in str(exc):
            raise
        library = torch.library.Library("torchvision", "DEF")
        _KEPT.append(library)
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision.datasets
    for module in vars(torchvision.datasets).values():
        if (
            hasattr(module, "check_integrity")
            and hasattr(module, "__file__")
            and module is not torchvision.datasets.utils
        ):
            module.check_integrity = lambda path, md5=None: Path(path).is_file()
    torchvision.datasets.imagenet.load_meta_file = lambda *_: (_Synonyms(), [])
    return torchvision.datasets


_KEPT = []


class _Synonyms(dict):
    def __missing__(self, wnid):
        return (f"the {wnid}", wnid)


def truth_of(datasets, name, where):
    """{number: (split, label or None)} of torchvision's class; None where there is none."""
    if name in NO_IMAGES or name not in CONFIGS:
        return None
    found = {}
    for split, kwargs in CONFIGS[name]:
        kwargs = dict(kwargs)
        if "ann_file" in kwargs:
            kwargs["ann_file"] = str(where / kwargs["ann_file"])
        if name in ("SBU", "SEMEION"):
            kwargs["download"] = False
        data = getattr(datasets, name)(str(where / SUBROOT.get(name, "")), **kwargs)
        for i in range(len(data)):
            image, label = data[i]
            if name in NEEDS or label is None:
                label = None
            elif hasattr(label, "numel") and label.numel() > 1:
                label = tuple(label.tolist())
            elif name == "OxfordIIITPet" and isinstance(label, tuple):
                label = label[0]
            found[number_of(image)] = (split, label if isinstance(label, tuple) or label is None else int(label))
    return found


def truth_of_folder(name, truth):
    """The same of its folder, where files that torchvision does not read say more."""
    if name == "Flickr8k":  # a list names the first four images as those for training
        return {number: ("train" if k < 4 else "all", truth[number][1]) for k, number in enumerate(sorted(truth))}
    return truth


def packed_of(path):
    from fastload import PackedDataset

    data = PackedDataset(path, check=None)
    fields = list(data.file.fields)
    if "images" not in fields:
        return {}, fields, ()
    data = PackedDataset(path, fields=["images", *(["labels"] if "labels" in fields else [])])
    names = {row: name for name, rows in data.file.splits.items() for row in rows}
    found = {}
    for i in range(len(data)):
        sample = data[i]
        pixels = sample[0].permute(1, 2, 0).numpy()
        label = None if len(sample) < 2 else tuple(sample[1].tolist()) if sample[1].ndim else int(sample[1])
        found[number_of(pixels)] = (names.get(i, "all"), label)
    return found, fields, data.classes


def fold(split):
    return {"valid": "val", "trainval": "train"}.get(split, split)


def compare(name, truth, packed, fields, classes):
    """What is wrong, [] if nothing is."""
    if truth is None:
        if name in NO_IMAGES:
            return ["packs what is no set of labelled images"]
        if not packed:
            return ["no images"]
        truth = dict.fromkeys(packed, ("all", None))
    wrong = []
    if missing := set(truth) - set(packed):
        wrong.append(f"{len(missing)} of {len(truth)} images missing")
    # Cityscapes' test frames have no masks for anybody; Caltech101's class BACKGROUND_Google is there as a folder.
    if (more := set(packed) - set(truth)) and name not in ("Cityscapes", "Caltech101"):
        wrong.append(f"{len(more)} images too many")
    both = sorted(set(truth) & set(packed))
    pairs = {(fold(truth[n][0]), fold(packed[n][0])) for n in both}
    a, b = {p[0] for p in pairs}, {p[1] for p in pairs}
    if not (len(pairs) == len(a) == len(b)) or any(x != y and x in ("train", "val", "test") for x, y in pairs):
        wrong.append(f"splits {sorted(a)} as {sorted(b)}")
    with_label = [n for n in both if truth[n][1] not in (None, -1)]
    if with_label:
        labels = {(truth[n][1], packed[n][1]) for n in with_label}
        a, b = {p[0] for p in labels}, {p[1] for p in labels}
        if not (len(labels) == len(a) == len(b)):
            wrong.append(f"labels: {len(a)} classes as {len(b)}")
    elif any(packed[n][1] not in (None, -1) for n in both) and name not in ("CocoCaptions", "CocoDetection"):
        wrong.append(f"labels ({', '.join(map(str, classes[:4]))}) where the set has none")
    elif (
        classes
        and not any(truth[n][1] for n in both)
        and name in NEEDS
        and "boxes" not in fields
        and "masks" not in fields
    ):
        wrong.append(f"classes {classes[:4]}")
    needed = NEEDS.get(name)
    if needed and not any(needed in f or (needed == "boxes" and f in ("bbox", "boxes", "objects")) for f in fields):
        wrong.append(f"no {needed}")
    return wrong
