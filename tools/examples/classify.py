"""Image classification from end to end: packs a folder once, trains, validates, saves checkpoints, resumes, predicts.

    python tools/examples/classify.py photos/                          # run again, it goes on where it was stopped
    python tools/examples/classify.py photos/ --predict new/1.jpg new/2.jpg

The packed file and the checkpoint lie beside the folder, as photos.h5 and photos.pt.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import nn
from torch.utils.data import random_split

from fastload import FastLoader, PackedDataset, pack_images, transforms

NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
AUGMENT = [transforms.RandomResizedCrop(128), transforms.RandomHorizontalFlip(), NORMALIZE]
STEADY = [transforms.Resize(144), transforms.CenterCrop(128), NORMALIZE]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="of class folders, or of train/ and val/ with class folders in each")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--predict", nargs="+", default=(), metavar="IMAGE", help="name the classes of these images")
    args = parser.parse_args()
    packed, checkpoint = (Path(f"{args.folder.absolute()}.{suffix}") for suffix in ("h5", "pt"))
    if not packed.exists():
        pack_images(args.folder, packed, mode="rgb")  # gray images get three channels, too
    dataset = PackedDataset(packed)
    held_out = [name for name in ("val", "test") if name in dataset.file.splits]
    if "train" in dataset.file.splits and held_out:
        train_set, val_set = PackedDataset(packed, split="train"), PackedDataset(packed, split=held_out[0])
    else:  # the same tenth in each run
        train_set, val_set = random_split(dataset, [0.9, 0.1], torch.Generator().manual_seed(0))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    train = FastLoader(train_set, batch_size=32, device=device, transform=AUGMENT)
    val = FastLoader(val_set, batch_size=32, device=device, transform=STEADY, shuffle=False)
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(dataset.classes))]
    for sizes in ((32, 64), (16, 32), (3, 16)):
        layers = [nn.Conv2d(*sizes, 3, 2, 1), nn.BatchNorm2d(sizes[1]), nn.ReLU(), *layers]
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    parts = {"model": model, "optimizer": optimizer, "loader": train}
    if args.predict or checkpoint.exists():  # to predict needs one
        saved = torch.load(checkpoint, map_location=device, weights_only=True)
        for name, part in parts.items():  # of the loader: the next batch is the one behind the last that was learnt
            part.load_state_dict(saved[name])

    for epoch in range(train.epoch, 0 if args.predict else args.epochs):
        train.set_epoch(epoch)
        model.train()
        for step, (images, labels) in enumerate(train, 1):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % args.save_every == 0 or step == len(train):
                torch.save({name: part.state_dict() for name, part in parts.items()}, f"{checkpoint}.part")
                Path(f"{checkpoint}.part").replace(checkpoint)  # a whole one, whenever the script is stopped
        with torch.no_grad():  # each image of val once: the last batch is shorter
            right = sum(int((model.eval()(images).argmax(1) == labels).sum()) for images, labels in val)
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {right} of {len(val_set)} right", flush=True)
    for path in args.predict:
        pixels = torch.from_numpy(np.array(ImageOps.exif_transpose(Image.open(path)).convert("RGB")))
        fields, drawn = {"images": pixels.permute(2, 0, 1)[None]}, transforms.Draws(0, 0, np.zeros(1, np.int64))
        images = transforms.apply_transforms(STEADY, fields, drawn)["images"].to(device)
        probability, number = model.eval()(images).softmax(1)[0].max(0)
        print(f"{path}: {dataset.classes[int(number)]} ({probability.item():.0%})")


if __name__ == "__main__":
    main()
