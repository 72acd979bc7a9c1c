"""The fused kernel gives what a float64 reference gives: under Triton's interpreter here, on a GPU where there is one.

The interpreter runs the same source but not the compiler. So the kernel is compiled as well, for an H100 that need not
be there, and what the compiler made of its loops is looked at.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from child_processes import child_environment
from kernel_cases import CASES, FAR, GATHERS, check, check_gather

from fastload.transforms.engine import gpu

needs_triton = pytest.mark.skipif(not gpu.triton_available(), reason="Triton is not installed")


@pytest.fixture(scope="module")
def errors_under_the_interpreter(run_interpreted: Callable[[Path], str]) -> dict[str, str | None]:
    errors: dict[str, str | None] = json.loads(run_interpreted(Path(__file__).with_name("kernel_cases.py")))
    return errors


@needs_triton
@pytest.mark.parametrize("name", [*CASES, *GATHERS, FAR])
def test_interpreted_kernel_gives_what_numpy_gives(errors_under_the_interpreter, name):
    error = errors_under_the_interpreter[name]
    if error and "only 0-dimensional arrays can be converted" in error:
        pytest.skip("this Triton's interpreter cannot read loop bounds with NumPy 2.4 or newer")
    assert error is None, error


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("name", CASES)
def test_compiled_kernel_agrees_with_float64(name):
    check(CASES[name], "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("name", GATHERS)
def test_compiled_gather_copies_every_byte(name):
    check_gather(GATHERS[name], "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@needs_triton
@pytest.mark.parametrize("blocks", gpu.CONFIGURATIONS)
@pytest.mark.parametrize("resampled", [True, False])
def test_block_sizes_and_pinned_memory_change_nothing_and_nothing_waits(blocks, resampled):
    images = torch.randint(0, 256, (5, 200, 180, 3), dtype=torch.uint8).pin_memory()
    side = 150 if resampled else 160
    table = [[b, 2 * b, side, side, 160, 160, 0, 0, b // 2, b % 2] for b in range(5)]
    scale, shift = torch.full((3,), 0.01, device="cuda"), torch.zeros(3, device="cuda")
    windows = torch.tensor(table, dtype=torch.int32, device="cuda")
    tables = gpu.PassTables(windows, scale=scale, shift=shift)

    def made(source: torch.Tensor, blocks: gpu.Blocks) -> torch.Tensor:
        return gpu.fused(
            source, None, tables, (160, 160), dtype=torch.bfloat16, resampled=resampled, blocks=blocks
        )  # fmt: skip

    expected = made(images.cuda(), gpu.Blocks(8, 1, 2))
    made(images, blocks)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = made(images, blocks)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, expected)


# Of one channel where that is enough: three take 18 s to compile.
VARIANTS = {
    "resized, bfloat16": {"output": "*bf16"},
    "resized, gray, uint8": {"output": "*u8", "channels": 1},
    "resized, gray, rows, rectangles, float32": {"output": "*fp32", "channels": 1, "rows": True, "rectangles": True},
    "resized, gray, float16": {"output": "*fp16", "channels": 1},
    "each its own strides, bfloat16": {"output": "*bf16", "rows": True, "varied": True},
    "each its own strides, crop, uint8": {"output": "*u8", "rows": True, "varied": True, "resampled": False},
    "crop, bfloat16": {"output": "*bf16", "resampled": False},
    "crop, four channels, uint8": {"output": "*u8", "channels": 4, "resampled": False},
    "crop by words, bfloat16": {"output": "*bf16", "resampled": False, "words": True},
    "crop by words, gray, erased, uint8": {
        "output": "*u8",
        "channels": 1,
        "rectangles": True,
        "resampled": False,
        "words": True,
    },
    "short crop by words, float32": {"output": "*fp32", "resampled": False, "words": True, "full": False},
    "resized, colour, bfloat16": {"output": "*bf16", "colour": True},
    "padded crop, bfloat16": {"output": "*bf16", "resampled": False, "padding": "constant"},
    "mirrored crop, uint8": {"output": "*u8", "resampled": False, "padding": "reflect"},
    "sums of gray levels": {"output": None, "colour": True},
}


@needs_triton
@pytest.mark.parametrize("name", VARIANTS)
def test_kernel_compiles_for_hopper_and_keeps_its_rows(name):
    compiled = compiled_for_hopper(**VARIANTS[name])
    assert ".target sm_90" in compiled["ptx"]
    assert ".local" not in compiled["ptx"]
    # Bytes are denormal numbers, which products must not flush to zero.
    assert not re.search(r"\b(mul|fma)(\.rn)?\.ftz", compiled["ptx"])
    # Nothing is exchanged between threads: loads, colour steps and stores share a layout.
    exchanged = "st.shared" in compiled["ptx"] or "shfl" in compiled["ptx"]
    assert not exchanged
    if VARIANTS[name].get("words"):
        # A thread's 4 neighbours are read by words, its others by bytes.
        assert {"b8", "b32"} <= set(re.findall(r"ld\.global\.(\w+)", compiled["ptx"]))
    # Their values are stored at once.
    if VARIANTS[name]["output"] is not None:
        wide = {"*bf16": r"v2\.b32", "*fp16": r"v2\.b32", "*u8": "b32", "*fp32": r"v4\.b32"}[VARIANTS[name]["output"]]
        assert re.search(rf"st\.global\.{wide} ", compiled["ptx"])
    if VARIANTS[name].get("resampled", True):
        # Each loop over output rows, of 2 and 3 taps and of two kinds of more, and the loop over source rows within it
        # carry the number of the next source row beside the rows held, of 3 blocks a channel (4, 2 and 1 pixels).
        # Triton 3.6 and 3.9 drop such values in ways that the interpreter does not show: see triton_kernels.py.
        carried = [
            ["tensor" if "tensor" in kind else kind for kind in re.split(r",\s*(?![^<]*>)", kinds)]
            for kinds in re.findall(r"= scf\.for .*? -> \((.*?)\)\s+:", compiled["ttgir"])
        ]
        blocks = 3 * VARIANTS[name].get("channels", 3)
        rows_held = Counter(kinds.count("tensor") / blocks for kinds in carried if "i32" in kinds)
        expected = Counter([2, 3, 2, 2, 2, 3, 1, 1])
        assert all(rows_held[held] >= loops for held, loops in expected.items()), carried


def compiled_for_hopper(
    output: str | None,
    *,
    channels: int = 3,
    rows: bool = False,
    rectangles: bool = False,
    colour: bool = False,
    resampled: bool = True,
    varied: bool = False,
    padding: str | None = None,
    words: bool = False,
    full: bool = True,
) -> dict[str, str]:
    """The kernel's intermediate code and PTX, with the default block sizes."""
    pytest.importorskip("triton")
    from fastload.transforms.engine.triton_kernels import augment

    floats = "*fp32" if output not in (None, "*u8") else None
    types = {
        "source": "*u8", "rows": "*i64" if rows else None, "windows": "*i32",
        "ops": "*i32" if colour else None, "factors": "*fp32" if colour else None, "sums": "*i64" if colour else None,
        "outside": "*fp32" if padding == "constant" else None,
        "rectangles": "*i32" if rectangles else None, "value": "*fp32" if rectangles else None,
        "scale": floats, "shift": floats, "output": output, "stride_n": "i64",
    }  # fmt: skip
    constants = {
        "STRIDE_X": 1 if varied else channels, "STRIDE_C": 0 if varied else 1, "VARIED": varied,
        "CHANNELS": channels, "RESAMPLED": resampled,
        "FULL": full, "WIDE": True, "WORDS": words, "PADDING": padding,
        "THREADS": 32 * gpu.BLOCKS.num_warps, "PIXELS": gpu.BLOCKS.pixels, "BLOCK_Y": gpu.BLOCKS.rows,
    } | {name: None for name, kind in types.items() if kind is None}  # fmt: skip
    return compiled(augment, types, constants, aligned=("source", "output"), warps=gpu.BLOCKS.num_warps)


def compiled(
    kernel: Any, types: dict[str, str | None], constants: dict[str, Any], *, aligned: tuple[str, ...], warps: int = 4
) -> dict[str, str]:
    """A kernel's intermediate code and PTX; arguments without a type are int32."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton compiles for other GPUs than NVIDIA's")
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name) or "i32" for name in names}
    hints = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name not in constants}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in constants.items()}, hints)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


@needs_triton
@pytest.mark.parametrize(("words", "access"), [(4, "v4.b32"), (2, "v2.b32"), (1, "b32")])
def test_gather_reads_and_writes_a_lane_at_once(words, access):
    from fastload.transforms.engine.triton_kernels import gather

    types = {"source": "*i32", "index": "*i64", "out": "*i32"}
    constants = {"WORDS": words, "ALIGN": 32 // words, "ROWS": 1, "SPAN": 512}
    ptx = compiled(gather, types, constants, aligned=("source", "out"))["ptx"]
    accesses = [set(re.findall(rf"\b{kind}\.global\.((?:v\d\.)?b32)\b", ptx)) for kind in ("ld", "st")]
    assert accesses == [{access}, {access}]
    assert ".local" not in ptx and "st.shared" not in ptx


@needs_triton
@pytest.mark.parametrize(
    ("pixels", "width", "words"),
    [
        (torch.zeros(2, 9, 228, 3, dtype=torch.uint8), 224, True),
        (torch.zeros(2, 9, 227, 3, dtype=torch.uint8), 224, True),
        (torch.zeros(2, 9, 227, 3, dtype=torch.uint8), 223, False),  # rows of the result begin within words
        (torch.zeros(2, 9, 227, 3, dtype=torch.uint8), 32, False),  # threads have no 4 neighbours
        (torch.zeros(2, 3, 9, 228, dtype=torch.uint8).permute(0, 2, 3, 1), 224, False),
        (torch.zeros(2, 1, 9, 228, dtype=torch.uint8).permute(0, 2, 3, 1), 224, True),
        (torch.zeros(2, 9, 228, 6, dtype=torch.uint8)[..., :3], 224, False),
    ],
)
@pytest.mark.parametrize("padding", [None, "edge"])
def test_rows_are_read_by_words_where_pixels_are_dense(monkeypatch, pixels, width, words, padding):
    from fastload.transforms.engine import triton_kernels

    given = []

    class Recorded:
        def __getitem__(self, grid):
            return lambda *args, WORDS, **constants: given.append(WORDS)

    monkeypatch.setattr(triton_kernels, "augment", Recorded())
    windows = torch.zeros((2, 10), dtype=torch.int32)
    gpu.fused(pixels, None, gpu.PassTables(windows, padding=padding), (8, width), resampled=False)
    gpu.fused(pixels, None, gpu.PassTables(windows), (8, width), resampled=True)
    assert given == [words and padding is None, False]


@pytest.mark.parametrize(
    ("width", "pixels"),
    [(224, 7), (192, 6), (256, 4), (512, 4), (384, 6), (160, 5), (128, 4), (64, 2), (32, 1), (5, 1)],
)
def test_threads_make_as_many_pixels_as_leave_few_of_them_idle(width, pixels):
    assert gpu._pixels(width, 32, gpu.BLOCKS.pixels) == pixels


def test_a_triton_that_passes_no_tuples_on_is_named(monkeypatch):
    monkeypatch.setattr(pytest.importorskip("triton"), "__version__", "3.2.0")
    with pytest.warns(UserWarning, match=r"Triton 3\.2\.0 is installed, 3\.5 is needed"):
        assert not gpu.kernel_runs.__wrapped__(torch.device("cpu"))


def test_importing_it_leaves_triton_out():
    code = "import sys, fastload.transforms.engine.gpu as k; k.triton_available(); sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=child_environment()).returncode == 0


def test_no_samples_give_no_images():
    source, none = torch.zeros(2, 4, 4, 3, dtype=torch.uint8), torch.zeros((0, 10), dtype=torch.int32)
    output = gpu.fused(source, None, gpu.PassTables(none), (3, 2))
    assert output.shape == (0, 3, 3, 2)
    assert output.dtype == torch.uint8
    assert np.array_equal(output.numpy(), np.zeros((0, 3, 3, 2)))
