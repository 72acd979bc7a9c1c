"""How many instructions does the fused kernel take for a value of its output? Counted in machine code, without a GPU.

    python benchmarks/kernel_code.py
    python benchmarks/kernel_code.py --blocks 32 4 1

(Kernels of commits before this way of making pixels are counted by the `kernel_code.py` of their commit.)

It compiles the kernel for GPUs that need not be there, and reads what `ptxas` made of it (`nvdisasm`, `cuobjdump`; all
three come with Triton). Says nothing about time: memory is not in it. Each line has registers and bytes spilled a
thread, and the instructions a value of RGB output, 224x224, of

    crop      a window that keeps its size, of rows a multiple of 4 bytes apart
    mirrored  the same, turned left to right
    256       RandomResizedCrop(224) of images 256x256: the mean over 2,000 drawn windows
    2 taps    of those, the windows that are not above 224 along any side
    2.3       windows 515x515 resized to 224x224
    4         windows 896x896

counted thus, for a thread: the instructions of the loop over output rows, in which the stores are; of each loop inside
it that loads pixels, its instructions a load times the loads that an output row needs (source rows read x taps x values
a thread); of loops between the two, their own instructions times their turns; and what comes before, over the rows of a
program. Divided by the values that a thread makes, times the lanes that are made over those that are shown. A loop that
the compiler unrolled counts by its cheapest copy. The number of source rows is that of the windows, with what programs
read twice.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import harness
from fastload.transforms import Draws, RandomResizedCrop
from fastload.transforms.engine import gpu, triton_kernels

SIDE, CHANNELS = 224, 3
OUTPUTS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "uint8": "*u8"}
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass
class Loop:
    """Instructions from `first` to `last`, their positions in the code, and the loops within."""

    first: int
    last: int
    own: int = 0  # instructions in no loop within
    loads: int = 0  # of single bytes, among those
    stores: int = 0
    inner: list[Loop] = field(default_factory=list)
    branch: int = 0  # of the whole code: the position of its first jump

    def all(self) -> list[Loop]:
        """This loop and all within."""
        return [self, *(loop for part in self.inner for loop in part.all())]


def loops(sass: str) -> Loop:
    """Returns the code of a kernel as `nvdisasm -c` prints it as one loop, which holds those that jump back."""
    labels, codes = {}, []
    for line in sass.splitlines():
        if label := re.match(r"(\.L\w+):", line):
            labels[label[1]] = len(codes)
        elif code := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            codes.append(code[1])
    jumps = [(at, re.search(r"\bBRA\b.*?(\.L\w+)", code)) for at, code in enumerate(codes)]
    backward = [(labels[jump[1]], at) for at, jump in jumps if jump and labels.get(jump[1], at) < at]
    # Two jumps to one label are one loop.
    spans = {first: max(last for begin, last in backward if begin == first) for first, _ in backward}
    whole = Loop(0, len(codes) - 1, branch=next((at for at, jump in jumps if jump), 0))
    for first, last in sorted(spans.items(), key=lambda span: (span[0], -span[1])):
        holder = whole
        while around := [loop for loop in holder.inner if loop.first <= first and last <= loop.last]:
            holder = around[0]
        holder.inner.append(Loop(first, last))
    for at, code in enumerate(codes):
        innermost = [loop for loop in whole.all() if loop.first <= at <= loop.last][-1]
        innermost.own += 1
        innermost.loads += "LDG.E.U8" in code
        innermost.stores += bool(re.search(r"\bSTG\b", code))
    return whole


@dataclass(frozen=True)
class Way:
    """One way through the kernel: the loop over output rows, and the instructions before it."""

    rows: Loop
    before: int

    def a_value(self, zoom: float, taps: int, blocks: gpu.Blocks) -> float:
        """Instructions a value."""
        rows, pixels, warps = blocks
        values = pixels * CHANNELS
        cover = taps if taps <= 3 else 2 * zoom
        read = zoom + (cover - zoom) / rows
        cost = self.rows.own + self.before / rows
        loading = [loop for loop in self.rows.all()[1:] if loop.loads]
        if loading:
            cost += read * taps * values * min(loop.own / loop.loads for loop in loading)
            between = [loop for loop in self.rows.inner if not loop.loads and any(part.loads for part in loop.all())]
            cost += sum(loop.own for loop in between[:1]) * read
        tile = 32 * warps * pixels
        return cost / values * (-(-SIDE // tile) * tile) / SIDE


def ways(whole: Loop) -> list[Way]:
    """Returns the ways through the kernel, as they stand in its code."""
    found, end = [], 0
    for outer in whole.inner:
        for loop in outer.all():
            if loop.stores:
                found.append(Way(loop, loop.first - end + (whole.branch if end else 0)))
                end = outer.last + 1
    return found


def compiled(module: ModuleType, blocks: gpu.Blocks, arch: int, output: str, resampled: bool) -> tuple[str, str]:
    """Returns machine code and usage of the kernel with Normalize (or none, for uint8) for a compute capability."""
    constants = {"outside": None, "rows": None, "ops": None, "factors": None, "sums": None, "rectangles": None,
                 "value": None, "STRIDE_X": CHANNELS, "STRIDE_C": 1, "CHANNELS": CHANNELS,
                 "THREADS": 32 * blocks.num_warps, "PIXELS": blocks.pixels, "FULL": True, "WIDE": True,
                 "WORDS": not resampled and blocks.pixels >= 4, "PADDING": None, "RESAMPLED": resampled,
                 "VARIED": False, "BLOCK_Y": blocks.rows}  # fmt: skip
    if output == "*u8":
        constants |= {"scale": None, "shift": None}
    types = {"source": "*u8", "windows": "*i32", "scale": "*fp32", "shift": "*fp32", "output": output,
             "stride_n": "i64"}  # fmt: skip
    names = module.augment.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in ("source", "output")}
    source = ASTSource(module.augment, signature, {(names.index(k),): v for k, v in constants.items()}, aligned)
    made = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options={"num_warps": blocks.num_warps, "enable_fp_fusion": True}
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        said = [
            subprocess.run([TOOLS / words[0], *words[1:], file.name], capture_output=True, text=True, check=True)
            for words in (("nvdisasm", "-c"), ("cuobjdump", "-res-usage"))
        ]
    return said[0].stdout.split(".text.augment:")[1], said[1].stdout + said[1].stderr


def counts(module: ModuleType, blocks: gpu.Blocks, arch: int, output: str) -> dict[str, Any]:
    """Returns registers, bytes spilled and instructions a value."""
    sass, usage = compiled(module, blocks, arch, output, resampled=True)
    found = ways(loops(sass))
    drawn = RandomResizedCrop(SIDE).place(np.array([[256, 256]]), Draws(0, 0, np.arange(2000))).window
    kept = (drawn <= SIDE).all(axis=1)
    each = [
        found[0 if keep else 1].a_value(height / SIDE, 2 if keep else 3, blocks)
        for keep, height in zip(kept.tolist(), drawn[:, 0].tolist(), strict=True)
    ]
    crop_sass, crop_usage = compiled(module, blocks, arch, output, resampled=False)
    mirrored, *upright = ways(loops(crop_sass))
    return {
        "instructions_a_value": {
            "crop": (upright or [mirrored])[0].a_value(1, 1, blocks), "mirrored": mirrored.a_value(1, 1, blocks),
            "256": float(np.mean(each)), "2 taps": float(np.mean(np.array(each)[kept])),
            "2.3": found[2].a_value(515 / SIDE, 5, blocks), "4": found[-1].a_value(4, 10, blocks),
        },
        "registers": _used(usage, "REG"), "crop_registers": _used(crop_usage, "REG"),
        "spilled_bytes": _used(usage, "LOCAL") + _used(usage, "STACK"), "instructions": loops(sass).last + 1,
    }  # fmt: skip


def _used(usage: str, what: str) -> int:
    (number,) = re.findall(rf"\b{what}:(\d+)", usage)
    return int(number)


def main() -> None:
    """Count, and write the figures."""
    parser = argparse.ArgumentParser(description="Count the fused kernel's instructions a value of its output.")
    parser.add_argument(
        "--blocks", type=int, nargs=3, default=list(gpu.BLOCKS), help="rows, pixels a thread, warps of a program"
    )
    parser.add_argument("--archs", type=int, nargs="+", default=[90, 80], help="compute capabilities times 10")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "kernel_code.jsonl")
    options = parser.parse_args()
    blocks = gpu.Blocks(*options.blocks)
    journal = harness.Journal(options.out, blocks=options.blocks, triton=triton.__version__)
    for arch in options.archs:
        for name, output in OUTPUTS.items():
            found = counts(triton_kernels, blocks, arch, output)
            journal.note(f"kernel-code sm_{arch} {name}", arch=f"sm_{arch}", output=name, **found)


if __name__ == "__main__":
    main()
