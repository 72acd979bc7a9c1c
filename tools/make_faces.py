"""Draw faces in the official CelebA layout: a dataset to try fastload on where no real one is at hand.

    python tools/make_faces.py OUT_DIR [--count 5000] [--seed 0]

Writes `img_align_celeba/000001.jpg` ... (178 wide x 218 high, 5 to 10 kB each) with `list_attr_celeba.txt`,
`identity_CelebA.txt`, `list_eval_partition.txt` and `list_landmarks_align_celeba.txt` beside it. The same seed draws
the same faces. Each attribute that is ever 1 can be seen in the pixels, so a network can learn it; those that are a
matter of opinion (Attractive, ...) are -1 throughout. A folder that is already complete is left as it is.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

WIDTH, HEIGHT = 178, 218
SCALE = 2  # drawn twice as large and averaged down: smooth edges
FACES_PER_IDENTITY = 10

# The 40 names of list_attr_celeba.txt, in its order.
NAMES = (
    "5_o_Clock_Shadow Arched_Eyebrows Attractive Bags_Under_Eyes Bald Bangs Big_Lips Big_Nose Black_Hair Blond_Hair "
    "Blurry Brown_Hair Bushy_Eyebrows Chubby Double_Chin Eyeglasses Goatee Gray_Hair Heavy_Makeup High_Cheekbones Male "
    "Mouth_Slightly_Open Mustache Narrow_Eyes No_Beard Oval_Face Pale_Skin Pointy_Nose Receding_Hairline Rosy_Cheeks "
    "Sideburns Smiling Straight_Hair Wavy_Hair Wearing_Earrings Wearing_Hat Wearing_Lipstick Wearing_Necklace "
    "Wearing_Necktie Young"
).split()
LANDMARKS = "lefteye_x lefteye_y righteye_x righteye_y nose_x nose_y leftmouth_x leftmouth_y rightmouth_x rightmouth_y"

Color = tuple[int, int, int]
HAIR: dict[str, Color] = {
    "Black_Hair": (30, 26, 28),
    "Brown_Hair": (104, 66, 38),
    "Blond_Hair": (214, 178, 104),
    "Gray_Hair": (168, 168, 172),
}
SKIN: list[Color] = [(224, 176, 144), (205, 150, 115), (170, 116, 84), (130, 86, 62), (98, 64, 48)]
PALE_SKIN: Color = (244, 224, 212)


@dataclass(frozen=True)
class Face:
    """One drawn face: what the text files say of it."""

    identity: int
    attributes: frozenset[str]
    landmarks: tuple[int, ...]  # five points, x then y, in pixels of the image


def face_rng(seed: int, kind: int, number: int) -> np.random.Generator:
    """A generator of its own for each face (kind 0) and identity (kind 1): the order of drawing does not matter."""
    return np.random.default_rng([seed, kind, number])


def identity_traits(seed: int, identity: int) -> tuple[set[str], Color]:
    """What all faces of one identity share: its lasting attributes and the colour of its skin."""
    rng = face_rng(seed, 1, identity)
    male = rng.random() < 0.45
    has: set[str] = {"Male"} if male else set()

    def maybe(name: str, chance: float) -> None:
        if rng.random() < chance:
            has.add(name)

    maybe("Pale_Skin", 0.15)
    skin = PALE_SKIN if "Pale_Skin" in has else SKIN[rng.integers(len(SKIN))]
    maybe("Bald", 0.12 if male else 0.0)
    if "Bald" not in has:
        has.add(str(rng.choice(list(HAIR), p=[0.35, 0.3, 0.2, 0.15])))
        maybe("Receding_Hairline", 0.15 if male else 0.03)
        has.add("Wavy_Hair" if rng.random() < 0.4 else "Straight_Hair")
        if "Receding_Hairline" not in has:
            maybe("Bangs", 0.15 if male else 0.35)
    if "Gray_Hair" not in has and "Bald" not in has:
        has.add("Young")
    for name, chance in (("Big_Nose", 0.25), ("Big_Lips", 0.25), ("Narrow_Eyes", 0.2), ("Bushy_Eyebrows", 0.25)):
        maybe(name, chance)
    if "Bushy_Eyebrows" not in has:
        maybe("Arched_Eyebrows", 0.1 if male else 0.45)
    shape = rng.random()
    has |= {"Chubby"} if shape < 0.15 else {"Oval_Face"} if shape < 0.45 else set()
    if "Chubby" in has:
        maybe("Double_Chin", 0.6)
    if male:
        for name, chance in (("Mustache", 0.25), ("Goatee", 0.2), ("Sideburns", 0.2), ("5_o_Clock_Shadow", 0.25)):
            maybe(name, chance)
    return has, skin


def face_traits(rng: np.random.Generator, lasting: set[str]) -> frozenset[str]:
    """The lasting attributes and those of the moment: expression, make-up, what is worn."""
    has = set(lasting)
    male = "Male" in has
    chances = {
        "Smiling": 0.5,
        "Mouth_Slightly_Open": 0.4,
        "Eyeglasses": 0.2,
        "Wearing_Hat": 0.12,
        "Bags_Under_Eyes": 0.2,
        "Rosy_Cheeks": 0.03 if male else 0.25,
        "Wearing_Lipstick": 0.01 if male else 0.65,
        "Heavy_Makeup": 0.0 if male else 0.35,
        "Wearing_Earrings": 0.03 if male else 0.35,
        "Wearing_Necklace": 0.02 if male else 0.25,
        "Wearing_Necktie": 0.3 if male else 0.0,
        "Blurry": 0.04,
    }
    for name, chance in chances.items():
        if rng.random() < chance:
            has.add(name)
    if "Heavy_Makeup" in has:
        has.add("Wearing_Lipstick")
    if not has & {"Mustache", "Goatee", "Sideburns", "5_o_Clock_Shadow"}:
        has.add("No_Beard")
    return frozenset(has)


def mix(a: Color, b: Color, share: float) -> Color:
    """The colour `share` of the way from a to b."""
    r, g, b_ = (round(x + (y - x) * share) for x, y in zip(a, b, strict=True))
    return r, g, b_


def draw_face(seed: int, number: int, identities: int) -> tuple[Image.Image, Face]:
    """Face `number` of the dataset: its picture, RGB, 178 x 218, and what is to be said of it."""
    rng = face_rng(seed, 0, number)
    identity = int(rng.integers(1, identities + 1))
    lasting, skin = identity_traits(seed, identity)
    has = face_traits(rng, lasting)
    black: Color = (20, 16, 18)
    shade = mix(skin, black, 0.28)
    hair = next((color for name, color in HAIR.items() if name in has), shade)
    hair = mix(hair, black, float(rng.random()) * 0.15)
    cloth: Color = tuple(int(v) for v in rng.integers(30, 220, 3))  # type: ignore[assignment]  # three values
    background: Color = tuple(int(v) for v in rng.integers(70, 200, 3))  # type: ignore[assignment]  # likewise

    image = Image.new("RGB", (WIDTH * SCALE, HEIGHT * SCALE), background)
    pen = ImageDraw.Draw(image)
    cx = 89 + float(rng.normal(0, 2.5))
    cy = 122 + float(rng.normal(0, 2.5))
    half_w = 47 + float(rng.normal(0, 1.5)) + (7 if "Chubby" in has else -3 if "Oval_Face" in has else 0)
    half_h = 62 + float(rng.normal(0, 1.5)) + (6 if "Oval_Face" in has else -2 if "Chubby" in has else 0)

    def at(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        return [((cx + x) * SCALE, (cy + y) * SCALE) for x, y in points]

    def ellipse(x: float, y: float, w: float, h: float, fill: Color) -> None:
        pen.ellipse(at([(x - w, y - h), (x + w, y + h)]), fill=fill)

    def line(points: Iterable[tuple[float, float]], fill: Color, width: float) -> None:
        pen.line(at(points), fill=fill, width=max(1, round(width * SCALE)), joint="curve")

    def polygon(points: Iterable[tuple[float, float]], fill: Color) -> None:
        pen.polygon(at(points), fill=fill)

    # Behind the face: long hair, shoulders, neck.
    long_hair = "Male" not in has and "Bald" not in has
    if long_hair:
        polygon([(-half_w - 12, -20), (half_w + 12, -20), (half_w + 18, 75), (-half_w - 18, 75)], hair)
        if "Wavy_Hair" in has:
            for y in range(-20, 80, 14):
                for side in (-1, 1):
                    ellipse(side * (half_w + 13), y, 11, 9, hair)
    ellipse(0, half_h + 50, 78, 40, cloth)
    polygon([(-20, 40), (20, 40), (24, half_h + 24), (-24, half_h + 24)], mix(skin, black, 0.12))
    if "Wearing_Necktie" in has:
        tie = mix(cloth, (170, 20, 40), 0.8)
        polygon([(-20, half_h + 14), (20, half_h + 14), (0, half_h + 40)], (245, 245, 245))
        polygon([(-6, half_h + 14), (6, half_h + 14), (10, half_h + 60), (-10, half_h + 60)], tie)
    if "Wearing_Necklace" in has:
        for step in range(-6, 7):
            ellipse(step * 4, half_h + 20 - abs(step) * 1.6, 2.4, 2.4, (238, 206, 90))

    # The head.
    for side in (-1, 1):
        ellipse(side * half_w, 2, 7, 12, mix(skin, black, 0.1))
        if "Wearing_Earrings" in has:
            ellipse(side * (half_w + 1), 19, 4.5, 6, (250, 220, 110))
    if "Double_Chin" in has:
        ellipse(0, half_h - 6, half_w * 0.7, 18, mix(skin, black, 0.14))
    if "Bald" not in has:
        ellipse(0, -half_h * 0.38, half_w + 8, half_h * 0.78, hair)
        if "Wavy_Hair" in has:
            for angle in np.linspace(math.pi, 2 * math.pi, 11):
                ellipse(math.cos(angle) * (half_w + 7), -30 + math.sin(angle) * half_h * 0.7, 10, 10, hair)
    ellipse(0, 0, half_w, half_h, skin)
    if "Sideburns" in has:
        for side in (-1, 1):
            polygon(
                [(side * half_w, -14), (side * (half_w - 9), -14), (side * (half_w - 14), 30)], mix(hair, black, 0.2)
            )
    if "Bald" not in has:
        hairline = -half_h * (0.86 if "Receding_Hairline" in has else 0.5)
        if "Bangs" in has:
            hairline = -half_h * 0.28
        top = [
            (math.cos(a) * (half_w + 1.5), math.sin(a) * (half_h + 1.5))
            for a in np.linspace(math.pi * 1.05, math.pi * 1.95, 15)
        ]
        top = [(x, y) for x, y in top if y < hairline + 6]
        if len(top) > 1:
            polygon(
                [*top, (top[-1][0], hairline), (0, hairline - (0 if "Bangs" in has else 7)), (top[0][0], hairline)],
                hair,
            )
        if "Bangs" in has:
            for x in range(-32, 33, 8):
                polygon([(x - 5, hairline - 1), (x + 5, hairline - 1), (x, hairline + 7)], hair)
    if "Rosy_Cheeks" in has:
        for side in (-1, 1):
            ellipse(side * 27, 24, 10, 7, mix(skin, (230, 70, 90), 0.45))

    # Eyes and brows.
    eye_y = -10 + float(rng.normal(0, 1))
    eye_x = 20 + float(rng.normal(0, 0.7))
    iris: Color = [(70, 45, 25), (60, 90, 130), (70, 110, 70)][identity % 3]
    gaze = float(rng.normal(0, 1.2))
    brow = mix(mix(hair, black, 0.4), skin, 0.0 if "Bushy_Eyebrows" in has else 0.25)
    for side in (-1, 1):
        x = side * eye_x
        if "Bags_Under_Eyes" in has:
            line([(x - 9, eye_y + 9), (x, eye_y + 12), (x + 9, eye_y + 9)], shade, 2.4)
        if "Heavy_Makeup" in has:
            ellipse(x, eye_y - 3, 12, 7, (96, 60, 120))
        ellipse(x, eye_y, 10, 2.6 if "Narrow_Eyes" in has else 5.5, (250, 250, 248))
        ellipse(x + gaze, eye_y, 2.6 if "Narrow_Eyes" in has else 4.6, 2.6 if "Narrow_Eyes" in has else 4.6, iris)
        ellipse(x + gaze, eye_y, 1.8, 1.8, black)
        line([(x - 10, eye_y - 2), (x, eye_y - 6), (x + 10, eye_y - 2)], black, 2.2 if "Heavy_Makeup" in has else 1)
        arch = 6 if "Arched_Eyebrows" in has else 1.5
        thick = 5 if "Bushy_Eyebrows" in has else 2
        line([(x - 11, eye_y - 12), (x, eye_y - 13 - arch), (x + 11, eye_y - 12)], brow, thick)

    # Nose and mouth.
    nose_y = 16 + float(rng.normal(0, 1))
    nose_w = 13 if "Big_Nose" in has else 7
    line([(-2, eye_y + 2), (-nose_w * 0.6, nose_y - 2), (nose_w * 0.5, nose_y + 2)], shade, 1.5)
    ellipse(0, nose_y, nose_w, nose_w * 0.55, mix(skin, (200, 90, 80), 0.18))
    for side in (-1, 1):
        ellipse(side * nose_w * 0.5, nose_y + 2.5, 2, 1.4, mix(shade, black, 0.4))
    mouth_y = 36 + float(rng.normal(0, 1))
    mouth_w = 21 if "Smiling" in has else 15
    lift = 8 if "Smiling" in has else -1  # how far the corners rise above the middle
    thick = 6.5 if "Big_Lips" in has else 3.5
    lips = (196, 24, 52) if "Wearing_Lipstick" in has else mix(skin, (150, 70, 70), 0.5)
    gap = 7 if "Mouth_Slightly_Open" in has else 0

    def mouth_curve(offset: float) -> list[tuple[float, float]]:
        xs = np.linspace(-1, 1, 9)
        return [(float(x) * mouth_w, mouth_y + offset * (1 - float(x) ** 2) - lift * float(x) ** 2) for x in xs]

    polygon(mouth_curve(-thick) + mouth_curve(gap + thick)[::-1], lips)
    if gap:
        polygon(mouth_curve(-1) + mouth_curve(gap + 1)[::-1], (70, 16, 22))
        polygon(mouth_curve(-1)[1:-1] + mouth_curve(2.5)[1:-1][::-1], (250, 248, 240))
    else:
        line(mouth_curve(0), mix(lips, black, 0.5), 1.2)

    # Beard, glasses, hat.
    beard = mix(hair, black, 0.3) if "Bald" not in has else (60, 44, 36)
    if "Mustache" in has:
        for side in (-1, 1):
            polygon([(0, mouth_y - 12), (side * 19, mouth_y - 6), (side * 17, mouth_y - 2), (0, mouth_y - 6)], beard)
    if "Goatee" in has:
        ellipse(0, mouth_y + gap + 15, 11, 7, beard)
    if "Eyeglasses" in has:
        frame = mix(black, (150, 40, 30), float(rng.integers(0, 2)) * 0.7)
        for side in (-1, 1):
            x = side * eye_x
            pen.rounded_rectangle(at([(x - 15, eye_y - 9), (x + 15, eye_y + 10)]), 10, outline=frame, width=3 * SCALE)
            line([(side * (eye_x + 15), eye_y - 3), (side * half_w, eye_y - 5)], frame, 2.5)
        line([(-eye_x + 15, eye_y - 2), (eye_x - 15, eye_y - 2)], frame, 2.5)
    if "Wearing_Hat" in has:
        hat = mix(cloth, black, 0.25)
        polygon([(-half_w + 4, -38), (-half_w + 8, -120), (half_w - 8, -120), (half_w - 4, -38)], hat)
        ellipse(0, -37, half_w + 22, 9, mix(hat, black, 0.3))

    picture = finish_picture(image, rng, has, (cx, cy, half_w, half_h, mouth_y))
    points = [(-eye_x, eye_y), (eye_x, eye_y), (0, nose_y), (-mouth_w, mouth_y - lift), (mouth_w, mouth_y - lift)]
    landmarks = tuple(round(v) for x, y in points for v in (cx + x, cy + y))
    return picture, Face(identity, has, landmarks)


def finish_picture(
    image: Image.Image, rng: np.random.Generator, has: frozenset[str], head: tuple[float, float, float, float, float]
) -> Image.Image:
    """The drawing averaged down, lit from one side, with stubble, blur and a camera's noise."""
    small = image.reduce(SCALE)
    small = small.filter(ImageFilter.GaussianBlur(3.5 if "Blurry" in has else 0.6))
    pixels = np.asarray(small, dtype=np.float32)
    ys, xs = np.mgrid[-1 : 1 : HEIGHT * 1j, -1 : 1 : WIDTH * 1j].astype(np.float32)
    light = 1 + float(rng.normal(0, 0.08)) + xs * float(rng.normal(0, 0.12)) + ys * float(rng.normal(0, 0.08))
    light -= 0.10 * (xs**2 + ys**2)
    pixels = pixels * light[:, :, None]
    if "5_o_Clock_Shadow" in has:
        cx, cy, half_w, half_h, mouth_y = head
        y, x = np.ogrid[0:HEIGHT, 0:WIDTH]
        inside = ((x - cx) / half_w) ** 2 + ((y - cy) / half_h) ** 2 < 0.97
        jaw = inside & (y > cy + 20) & (((x - cx) / 24) ** 2 + ((y - cy - mouth_y) / 11) ** 2 > 1)
        pixels[jaw] *= 0.72
    # Noise in two sizes: sensor grain, and the coarser texture that skin and cloth have in a photo.
    grain = rng.normal(0, 2.5, (HEIGHT, WIDTH, 1)).astype(np.float32)
    coarse = rng.normal(0, 4.0, (HEIGHT // 4 + 1, WIDTH // 4 + 1, 3)).astype(np.float32)
    pixels += grain + np.repeat(np.repeat(coarse, 4, axis=0), 4, axis=1)[:HEIGHT, :WIDTH]
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def write_face(number: int, *, folder: Path, seed: int, identities: int, quality: int) -> Face:
    """Face `number` drawn and saved as a JPEG; what the text files shall say of it."""
    picture, face = draw_face(seed, number, identities)
    picture.save(folder / f"{number:06d}.jpg", quality=quality)
    return face


def write_texts(out: Path, faces: list[Face]) -> None:
    """The text files of the official layout, to the trailing space in the line of names."""
    count = len(faces)
    names = [f"{number:06d}.jpg" for number in range(1, count + 1)]

    def save(name: str, head: list[str], row: Callable[[Face], str]) -> None:
        rows = [f"{file} {row(face)}" for file, face in zip(names, faces, strict=True)]
        (out / name).write_text("\n".join([*head, *rows]) + "\n")

    def attributes(face: Face) -> str:
        return " ".join(f"{1 if name in face.attributes else -1:2d}" for name in NAMES)

    save("list_attr_celeba.txt", [str(count), " ".join(NAMES) + " "], attributes)
    save("identity_CelebA.txt", [], lambda face: str(face.identity))
    save(
        "list_landmarks_align_celeba.txt",
        [str(count), LANDMARKS],
        lambda face: " ".join(f"{value:4d}" for value in face.landmarks),
    )
    # Train, valid, test: eight, one and one tenths, in order, as in the real set.
    first_valid, first_test = round(count * 0.8), round(count * 0.9)
    parts = [0 if i < first_valid else 1 if i < first_test else 2 for i in range(count)]
    partition = "".join(f"{file} {part}\n" for file, part in zip(names, parts, strict=True))
    (out / "list_eval_partition.txt").write_text(partition)


def main() -> None:
    """Parse the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw faces in the official CelebA layout.")
    parser.add_argument("out", type=Path, help="folder to write into")
    parser.add_argument("--count", type=int, default=5000, help="faces to draw (default: 5000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quality", type=int, default=88, help="JPEG quality (default: 88)")
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    )
    options = parser.parse_args()
    if options.count < 1:
        parser.error("--count must be at least 1")

    # Written last, so its presence with these words says that the folder is complete.
    note = options.out / "SOURCE.txt"
    words = (
        f"{options.count} procedural faces in the CelebA layout, drawn by fastload's tools/make_faces.py\n"
        f"seed {options.seed}, JPEG quality {options.quality}\n"
    )
    if note.exists() and note.read_text() == words:
        print(f"{options.out}: {options.count} faces are there already")
        return
    note.unlink(missing_ok=True)
    folder = options.out / "img_align_celeba"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.jpg"):
        old.unlink()
    begin = time.perf_counter()
    identities = max(1, options.count // FACES_PER_IDENTITY)
    task = partial(write_face, folder=folder, seed=options.seed, identities=identities, quality=options.quality)
    with ProcessPoolExecutor(max(1, options.workers)) as pool:
        faces = list(pool.map(task, range(1, options.count + 1), chunksize=32))
    write_texts(options.out, faces)
    note.write_text(words)
    mean_kb = sum(file.stat().st_size for file in folder.glob("*.jpg")) / options.count / 1000
    print(f"{options.out}: {options.count} faces of {identities} identities, {mean_kb:.1f} kB each, "
          f"in {time.perf_counter() - begin:.0f} s")  # fmt: skip


if __name__ == "__main__":
    main()
