"""Masks of other values, colours or sizes: what the user says of them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from click.testing import CliRunner
from golden_sources import png, write
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from fastload.cli import app
from fastload.errors import OptionError, SourceError
from fastload.format.header import read_header
from fastload.inspection.info import inspect_file
from fastload.inspection.verify import verify_file
from fastload.options.masks import Classes, read_palette
from fastload.pack import pack_images
from fastload.sources import mask_classes
from fastload.sources.mask_classes import MappedMasks, same_shape

COUNT, HEIGHT, WIDTH = 6, 40, 60
CLASSES = np.arange(HEIGHT * WIDTH).reshape(HEIGHT, WIDTH) // 600  # 0 to 3


def pairs(root: Path, mask: NDArray[Any], **others: NDArray[Any]) -> Path:
    """Images and masks in folders; `others` are the masks of some of them, such as m2."""
    for i in range(COUNT):
        write(root / f"images/{i}.png", png(np.full((HEIGHT, WIDTH, 3), i, np.uint8)))
        write(root / f"masks/{i}.png", png(others.get(f"m{i}", mask)))
    return root


def packed(root: Path, **options: Any) -> tuple[NDArray[np.uint8], dict[str, Any], Path]:
    """Packs; returns the first mask, attributes of the masks and the file."""
    out = root.with_suffix(".h5")
    report = pack_images(root, out, workers=0, shuffle=False, overwrite=True, **options)
    with h5py.File(out) as file:
        attrs = dict(file["masks"].attrs) | {"notes": report.notes}
        mask = file["masks"][0]
    assert verify_file(out, source=root, workers=0).ok, "the source, decoded again, is the same"
    return mask, attrs, out


def test_masks_of_0_and_255_are_two_classes_unless_they_are_to_be_kept(tmp_path):
    root = pairs(tmp_path / "a", (CLASSES % 2 * 255).astype(np.uint8))
    mask, attrs, out = packed(root)
    assert (mask == CLASSES % 2).all() and "packed as classes 0 and 1" in " ".join(attrs["notes"])
    assert read_header(out).fields["masks"].names == ("0", "255")
    assert inspect_file(out).mask_shares == {0: 0.5, 1: 0.5}
    mask, attrs, out = packed(root, mask_values="keep")
    assert (mask == CLASSES % 2 * 255).all() and read_header(out).fields["masks"].names == ()
    mask, attrs, _ = packed(pairs(tmp_path / "b", (CLASSES % 2).astype(np.uint8)))
    assert (mask == CLASSES % 2).all() and "two classes" in " ".join(attrs["notes"])
    mask, _, _ = packed(pairs(tmp_path / "c", (CLASSES * 50).astype(np.uint8)))
    assert (mask == CLASSES * 50).all(), "of which nothing is known"


def test_values_become_classes_in_the_order_in_which_they_are_named(tmp_path):
    values = np.array([7, 200, 9, 255], np.uint8)
    root = pairs(tmp_path / "a", values[CLASSES])
    mask, attrs, out = packed(root, mask_values="200=sky, 7,9=tree", ignore_index=255)
    assert (mask == np.array([1, 0, 2, 255])[CLASSES]).all() and attrs["ignore_index"] == 255
    assert read_header(out).fields["masks"].names == ("sky", "7", "tree")
    assert read_header(out).fields["masks"].attrs["source_values"] == ("200", "7", "9")
    gray = np.repeat(values[CLASSES][..., None], 3, axis=2)
    assert (
        packed(pairs(tmp_path / "gray", gray), mask_values="200,7,9,255")[0] == np.array([1, 0, 2, 3])[CLASSES]
    ).all()
    deep = (np.array([0, 300, 40_000, 65_535])[CLASSES]).astype(np.uint16)
    assert (packed(pairs(tmp_path / "deep", deep), mask_values="0,300,40000,65535")[0] == CLASSES).all()


def test_colours_become_classes_by_a_palette(tmp_path):
    colours = np.array([[128, 0, 0], [0, 128, 0], [0, 0, 128], [0, 0, 0]], np.uint8)
    root = pairs(tmp_path / "a", colours[CLASSES])
    palette = tmp_path / "classes.csv"
    palette.write_text("name,r,g,b\nsky,0,128,0\nRoad marking,128,0,0\ntree,0,0,128\nvoid,0,0,0\n")
    mask, attrs, out = packed(root, palette=palette, ignore_index="void")
    assert (mask == np.array([1, 0, 2, 255])[CLASSES]).all() and attrs["ignore_index"] == 255
    assert read_header(out).fields["masks"].names == ("sky", "Road marking", "tree")
    shares = "3 classes: sky 25 %, Road marking 25 %, tree 25 % of the pixels; ignored (255) 25 %"
    shown = CliRunner().invoke(app, ["info", str(out)]).stdout
    assert shares in " ".join(shown.split())
    indexed = Image.fromarray(CLASSES.astype(np.uint8), "P")
    indexed.putpalette(colours.tobytes())
    for i in range(COUNT):
        indexed.save(root / f"masks/{i}.png")
    assert (packed(root, palette=palette)[0] == np.array([1, 0, 2, 3])[CLASSES]).all(), "a palette image has colours"


@pytest.mark.parametrize(
    "text",
    [
        "128 0 0\tRoad marking\n64,64,0,tree\n",  # as CamVid's label_colors.txt
        "Road marking;128;0;0\n\n# a comment\ntree;64;64;0\n",
        "id,name,red,green,blue\n7,Road marking,128,0,0\n8,tree,64,64,0\n",
        "# label:color_rgb:parts:actions\nRoad marking:128,0,0::\ntree:64,64,0:leaf,trunk:grow\n",  # CVAT's
        "\ufeffr\tg\tb\tclass\n128\t0\t0\tRoad marking\n64\t64\t0\ttree\n",
    ],
)
def test_palettes_come_in_many_forms(tmp_path, text):
    path = tmp_path / "palette.txt"
    path.write_text(text, encoding="utf-8")
    assert read_palette(path) == ((128, 0, 0, "Road marking"), (64, 64, 0, "tree"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("1,2,3\n", r"palette.txt:1: '1,2,3'.*expected red, green and blue"),
        ("sky:1,2,3::\ntree:1,2,300::\n", r"palette.txt:2: 'tree:1,2,300::': expected red, green and blue"),
        ("1,2,300,sky\n", "expected red, green and blue"),
        ("1,2,3,sky\n1,2,3,tree\n", r"palette.txt:2: .* 'sky' already has its colour or name"),
        ("name,r,g\nsky,1,2\n", "a palette's columns are r, g, b and name"),
        ("", "0 classes"),
    ],
)
def test_a_palette_that_says_nothing_clear_is_refused_with_its_line(tmp_path, text, error):
    path = tmp_path / "palette.txt"
    path.write_text(text)
    with pytest.raises(OptionError, match=error):
        read_palette(path)
    with pytest.raises(OptionError, match="cannot be read"):
        read_palette(tmp_path / "absent.csv")


def test_a_value_or_colour_without_a_class_names_the_sample_and_the_option(tmp_path, monkeypatch):
    plain, odd = (CLASSES % 2 * 255).astype(np.uint8), (CLASSES * 60).astype(np.uint8)
    root = pairs(tmp_path / "a", plain, m4=odd)
    with pytest.raises(
        SourceError, match=r"1 of 6 masks cannot be used: .*4\.png: its mask holds the value 60 in .*which `--mask-v"
    ):
        packed(root, mask_values="0,255")
    assert not root.with_suffix(".h5").exists()
    palette = tmp_path / "classes.csv"
    palette.write_text("0,0,0,sky\n255,255,255,tree\n")
    with pytest.raises(SourceError, match=r"images/4\.png: its mask holds the colour 60,60,60 .*which `--palette`"):
        packed(root, palette=palette)
    monkeypatch.setattr(mask_classes, "_LOOKED_AT", 2)  # the first and the fourth
    with pytest.raises(SourceError, match=r"images/4\.png: .*other masks hold 0 and 255 only: `--mask-values keep`"):
        packed(root)
    report = pack_images(root, root.with_suffix(".h5"), workers=0, on_error="skip", overwrite=True)
    assert report.num_samples == COUNT - 1 and "images/4.png" in str(report.skipped)


def test_what_is_wrong_with_every_mask_is_said_once_and_none_is_advised_to_be_left_out(tmp_path):
    root = pairs(tmp_path / "a", np.stack([CLASSES % 2 * 255, *[CLASSES * 0] * 2], axis=2).astype(np.uint8))
    with pytest.raises(SourceError, match="6 of 6 masks cannot be used") as raised:
        packed(root)
    said = str(raised.value)
    assert said.count("its mask holds colours") == 1 and "and 3 more: its mask" in said and "--palette" in said
    assert "--on-error skip" not in said and "Repair" not in said
    palette = tmp_path / "classes.csv"
    palette.write_text("0,0,0,sky\n255,0,0,tree\n")
    report = pack_images(root, root.with_suffix(".h5"), workers=0, palette=palette, overwrite=True)
    assert report.num_samples == COUNT and "Masks are colours" not in " ".join(report.notes)


def test_messages_say_whether_images_or_masks_are_at_fault(tmp_path):
    root = pairs(tmp_path / "a", (CLASSES % 2).astype(np.uint8))
    (root / "masks/1.png").write_bytes(b"no picture")
    with pytest.raises(SourceError, match=r"1 of 6 masks cannot be used: images/1\.png: its mask"):
        packed(root)
    (root / "images/2.png").write_bytes(b"no picture")
    with pytest.raises(SourceError, match="2 of 6 images or masks cannot be used: "):
        packed(root)
    (root / "masks/1.png").write_bytes((root / "masks/0.png").read_bytes())
    with pytest.raises(SourceError, match=r"1 of 6 images cannot be read: images/2\.png"):
        packed(root)


def test_a_mask_of_another_size_is_brought_to_its_image(tmp_path):
    smaller = np.array([0, 255], np.uint8)[CLASSES[::2, ::2] % 2]
    root = pairs(tmp_path / "a", np.array([0, 255], np.uint8)[CLASSES % 2], m2=smaller, m3=smaller[:, :-8])
    with pytest.raises(SourceError, match="1 of these masks to their images") as refused:
        packed(root)
    assert "images/2.png: its mask is 30x20, the image 60x40" in str(refused.value)
    assert "another size of the same shape" in str(refused.value) and "cannot belong together" in str(refused.value)
    with pytest.raises(SourceError, match=r"images/3\.png: its mask is 22x20, the image 60x40.*another shape"):
        packed(root, mask_size="image")
    (root / "images/3.png").unlink()
    (root / "masks/3.png").unlink()
    with pytest.raises(SourceError, match=r"do not have the size of their masks.*`--mask-size image`"):
        packed(root)
    _, _, out = packed(root, mask_size="image")
    with h5py.File(out) as file:
        # every second row and column was left out, and stands for two
        assert (file["masks"][2] == np.repeat(np.repeat(smaller > 0, 2, 0), 2, 1)).all()
        assert (file["masks"][0] == CLASSES % 2).all()
    _, _, out = packed(root, mask_size="image", size=(20, 30))
    with h5py.File(out) as file:
        assert (file["masks"][2] == (smaller > 0)).all()


def test_shapes_agree_within_a_hundredth():
    assert same_shape((454, 551), (1055, 1280)) and same_shape((100, 100), (100, 101))
    assert not same_shape((100, 100), (100, 102)) and not same_shape((30, 40), (40, 30))


def test_padding_is_no_class_where_classes_are_known_and_else_a_note_says_what_it_is(tmp_path):
    root = pairs(tmp_path / "a", (CLASSES % 2 * 255).astype(np.uint8))
    mask, attrs, _ = packed(root, size=60, fit="pad")
    assert attrs["ignore_index"] == 255 and (mask[0] == 255).all() and set(np.unique(mask)) == {0, 1, 255}
    mask, attrs, _ = packed(root, size=60, fit="pad", mask_values="keep")
    assert "ignore_index" not in attrs and "Padding is 0 in masks" in " ".join(attrs["notes"])


def test_masks_that_are_nearly_binary_stay_and_a_note_says_so(tmp_path):
    mask = (CLASSES % 2 * 255).astype(np.uint8)
    mask[0, 0] = 254
    found, attrs, _ = packed(pairs(tmp_path / "a", mask))
    assert (found == mask).all() and "Masks hold 0, 255 and 254" in " ".join(attrs["notes"])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"mask_values": "0,1,1"}, "1 stands for two classes"),
        ({"mask_values": "0,person"}, "'person' is no value of a mask"),
        ({"mask_values": "70000"}, "no value of a mask"),
        ({"mask_values": "0", "ignore_index": 0}, "0 classes"),
        (
            {"mask_values": "0", "ignore_index": "void"},
            "is neither a value, such as 255, nor a name in `--mask-values`",
        ),
        ({"mask_values": "0=a,1=a"}, "two classes have one name"),
        ({"ignore_index": 255}, "belongs to `--mask-values` or `--palette`"),
        ({"mask_size": "other"}, "accepted: same, image"),
    ],
)
def test_options_that_contradict_themselves_are_refused_before_anything_is_read(tmp_path, options, error):
    with pytest.raises(OptionError, match=error):
        pack_images(tmp_path / "absent", tmp_path / "a.h5", **options)


def test_options_about_masks_are_refused_where_there_are_none(tmp_path):
    for i, name in enumerate(("cat", "dog")):
        write(tmp_path / f"photos/{name}/{i}.png", png(np.full((8, 8, 3), i, np.uint8)))
    with pytest.raises(OptionError, match=r"packed without masks .*`--mask-values`"):
        pack_images(tmp_path / "photos", tmp_path / "a.h5", mask_values="0,255")
    palette = tmp_path / "classes.csv"
    palette.write_text("0,0,0,sky\n")
    root = pairs(tmp_path / "pairs", np.zeros((HEIGHT, WIDTH), np.uint8))
    with pytest.raises(OptionError, match="the palette names sky"):
        packed(root, palette=palette, ignore_index="void")
    with pytest.raises(OptionError, match="Give one of them"):
        packed(root, palette=palette, mask_values="0,255")


class Numbers:
    """Masks that lie in memory."""

    def __init__(self, mask):
        self.mask, self.shape, self.dtype = mask, mask.shape, mask.dtype

    def read_rows(self, indices, out):
        out[...] = self.mask

    def take(self, indices):
        return self


@given(
    codes=st.lists(st.integers(0, 65_535), min_size=1, max_size=20, unique=True),
    drawn=st.lists(st.integers(0, 19), min_size=1, max_size=40),
    ignored=st.integers(0, 65_535),
)
def test_each_pixel_gets_the_number_of_its_value(codes, drawn, ignored):
    codes = [code for code in codes if code != ignored]
    names = tuple(map(str, codes))
    indices = [at % (len(codes) + 1) for at in drawn]
    values = np.array([*codes, ignored], np.uint16)[indices][None]
    masks = MappedMasks(Numbers(values), None, Classes(tuple(codes), names, (ignored,)), None, 255)
    wanted = [255 if at == len(codes) else at for at in indices]
    assert masks.read(0).tolist() == [wanted]
