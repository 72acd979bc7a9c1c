"""The command line of `train.py`: what may be asked for, and what does not go together."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path


def at_least(least: float, below: float = math.inf) -> Callable[[str], float]:
    """A parser of numbers of the kind of `least`, for argparse, which says what is wrong with others."""

    def number(text: str) -> float:
        found = type(least)(text)
        if not least <= found < below:
            raise argparse.ArgumentTypeError(
                f"must be at least {least}" + (f", below {below}" if below < math.inf else "")
            )
        return found

    return number


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """The command line, or the words of another one."""
    parser = argparse.ArgumentParser(description="Train a small network from a packed file.")
    add = parser.add_argument
    add("data", type=Path, help="file written by `fastload pack`")
    add(
        "--task",
        choices=["classify", "attributes", "segment", "detect", "text"],
        help="default: what the file's fields and labels suggest",
    )
    add("--epochs", type=at_least(1), default=2, help="times that all training samples are seen (2)")
    add("--batch-size", type=at_least(1), help="samples a batch and process (64; texts 128, masks and boxes 8)")
    add("--lr", type=at_least(1e-9), help="peak learning rate (0.003; texts 0.002, masks 0.004)")
    add("--warmup-steps", type=at_least(0), help="steps up to it (a twentieth of all); then down along half a cosine")
    add("--width", type=at_least(1), help="channels of the first stage (16; masks 24; texts 64, a multiple of 4)")
    add(
        "--size",
        type=at_least(1),
        default=128,
        help="side that images of several sizes are cut to; with boxes, their shorter side (128)",
    )
    add("--layers", type=at_least(0), default=2, help="of attention, for texts (2); 0: a bag of words")
    add("--dropout", type=at_least(0.0, below=1.0), default=0.1, help="for texts and masks (0.1)")
    add(
        "--layer-drop",
        type=at_least(0.0, below=1.0),
        default=0.0,
        help="share of the steps that a text layer is left out of (0)",
    )
    add("--picture", type=Path, help="where the answers for masks and boxes are drawn (a new DATA-answers.png here)")
    add(
        "--parallel",
        choices=["none", "dp", "dp-loss", "ddp"],
        help="default: ddp under torchrun or with --spawn, else none",
    )
    add("--spawn", type=at_least(1), metavar="N", help="start N ranks of ddp here, without torchrun")
    add("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    add("--output-device", type=int, help="dp, dp-loss: the GPU that gathers (0)")
    add("--bucket-cap-mb", type=at_least(1e-9), help="ddp: gradients reduced at once (torch's: 1, then 25)")
    add("--static-graph", action="store_true", help="ddp: the same parameters are used in each step")
    add("--find-unused-parameters", action="store_true", help="ddp: each step may leave others unused")
    add("--accumulate", type=at_least(1), default=1, help="batches a step (1); ddp reduces after the last")
    add("--sync-bn", action="store_true", help="ddp: batch norms see the batches of all ranks")
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32", help="of the forward pass (fp32)")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile (inductor)")
    add("--channels-last", action=argparse.BooleanOptionalAction, default=True, help="memory order of images (on)")
    add("--optimizer-fused", action="store_true", help="AdamW as one kernel")
    add("--cudnn-benchmark", action="store_true", help="let cuDNN try which kernels are fastest")
    add("--ends", choices=["drop", "pad", "exact"], default="drop", help="of an epoch, as FastLoader has them (drop)")
    add("--echo", type=at_least(1), default=1, help="times each batch is used (1)")
    add("--workers", type=int, help="default: the loader's own choice")
    add("--seed", type=int, default=0, help="of order, augmentation, first weights and dropout (0)")
    add("--checkpoint", type=Path, help="file to keep the state of the run in")
    add("--checkpoint-every", type=at_least(1), default=200, help="steps between checkpoints (200)")
    add("--resume", action="store_true", help="go on from --checkpoint where it exists")
    add("--max-steps", type=at_least(1), help="stop after that many steps of this run, with a checkpoint")
    # Not --log, which torchrun takes for an option of its own.
    add("--loss-log", type=Path, help="file for the loss of each step, JSON lines")
    parser.set_defaults(meet="env://")  # where ranks find each other
    options = parser.parse_args(words)
    ranks = int(os.environ.get("WORLD_SIZE", options.spawn or 1))
    options.parallel = options.parallel or ("ddp" if "RANK" in os.environ or options.spawn else "none")
    if options.parallel != "ddp":
        for name in ("spawn", "bucket_cap_mb", "static_graph", "find_unused_parameters", "sync_bn"):
            if getattr(options, name):
                parser.error(f"--{name.replace('_', '-')} is for --parallel ddp, not {options.parallel}")
        if ranks > 1:
            parser.error(f"--parallel {options.parallel} is one process, and {ranks} were started")
    if options.static_graph and options.find_unused_parameters:
        parser.error("--static-graph finds unused parameters itself: leave out --find-unused-parameters")
    if options.output_device is not None and not options.parallel.startswith("dp"):
        parser.error(f"--output-device is for --parallel dp and dp-loss, not {options.parallel}")
    if options.spawn and "RANK" in os.environ:
        parser.error("--spawn starts ranks, and torchrun has done so already")
    if options.static_graph and options.layer_drop:
        parser.error("--layer-drop leaves out other layers in each step: not with --static-graph")
    if options.compile and options.parallel.startswith("dp"):
        parser.error("--compile does not work with nn.DataParallel, whose replicas are new modules in each step")
    if options.resume and not options.checkpoint:
        parser.error("--resume needs --checkpoint FILE")
    if options.picture and options.picture.suffix.lower() != ".png":
        parser.error(f"--picture {options.picture}: give a name that ends in .png")
    if options.checkpoint and options.checkpoint in (options.loss_log, options.data):
        parser.error(f"--checkpoint {options.checkpoint}: give each file a name of its own")
    for path in (options.checkpoint, options.loss_log, options.picture):
        if path and not path.absolute().parent.is_dir():
            parser.error(f"{path}: its folder does not exist. Make it first.")
        if path and path.exists() and not options.resume and path != options.picture:
            parser.error(f"{path} exists. Give another name, or go on from a checkpoint with --resume.")
    return options
