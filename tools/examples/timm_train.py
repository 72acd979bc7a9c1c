"""A training loop as in timm's train.py on a packed file, with FastLoader in place of `create_loader`.

    python timm_train.py PACKED.h5 --model resnet18 --device cuda
    torchrun --standalone --nproc-per-node 2 timm_train.py PACKED.h5

Against train.py what differs is the call of `FastLoader`: augmentation is a list of transforms, run on the device for a
whole batch, in place of `input_size=`, `mean=`, `scale=`, `hflip=`, `auto_augment=` and `re_prob=`. Mixup stays timm's.
"""

from __future__ import annotations

import argparse
import json

import timm
import timm.utils
import torch
from timm.data import Mixup, resolve_model_data_config
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from torch.nn.parallel import DistributedDataParallel

from fastload import FastLoader, PackedDataset
from fastload.transforms import Normalize, RandAugment, RandomErasing, RandomHorizontalFlip, RandomResizedCrop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--model", default="test_resnet")
    parser.add_argument("--img-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=8, help="of each process")
    parser.add_argument("--opt", default="adamw")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--mixup", type=float, default=0.2)
    parser.add_argument("--cutmix", type=float, default=1.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seen", help="write here, as SEEN.RANK, the rows that each rank saw: a JSON list an epoch")
    args = parser.parse_args()
    device = timm.utils.init_distributed_device(args)  # sets args.distributed and args.rank, too
    timm.utils.random_seed(42, args.rank)

    dataset = PackedDataset(args.file)
    classes = len(dataset.classes or ()) or 10
    model = timm.create_model(args.model, num_classes=classes).to(device, memory_format=torch.channels_last)
    data = resolve_model_data_config(model)
    loader = FastLoader(
        dataset,
        args.batch_size,
        seed=42,
        device=device,
        transform=[
            RandomResizedCrop(args.img_size, scale=(0.35, 1.0)),
            RandomHorizontalFlip(),
            RandAugment(magnitude=9),
            RandomErasing(p=0.25),
            Normalize(data["mean"], data["std"]),  # the last: all others move bytes
        ],
    )
    mixup = Mixup(args.mixup, args.cutmix, label_smoothing=0.1, num_classes=classes)  # batches of an even size
    loss_fn = SoftTargetCrossEntropy()
    optimizer = create_optimizer_v2(model, opt=args.opt, lr=args.lr, weight_decay=0.05)
    scheduler, num_epochs = create_scheduler_v2(
        optimizer, "cosine", num_epochs=args.epochs, step_on_epochs=False, updates_per_epoch=len(loader)
    )
    if args.distributed:
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)

    seen: list[list[int]] = []
    for epoch in range(num_epochs):
        loader.set_epoch(epoch)
        model.train()
        losses = timm.utils.AverageMeter()
        seen.append([])
        for step, batch in enumerate(loader):
            images, targets = mixup(*batch)
            loss = loss_fn(model(images), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step_update(epoch * len(loader) + step + 1, metric=losses.avg)
            losses.update(loss.item(), len(images))
            seen[-1] += batch.rows.tolist()
        scheduler.step(epoch + 1, losses.avg)
        print(f"epoch {epoch}, rank {args.rank}: {len(seen[-1])} samples, mean loss {losses.avg:.3f}")
    if args.seen:
        with open(f"{args.seen}.{args.rank}", "w") as file:
            json.dump(seen, file)
    if args.distributed:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
