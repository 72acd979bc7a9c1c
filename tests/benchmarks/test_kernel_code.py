"""Loops of machine code are found, and their instructions counted where they belong."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from fastload.transforms.engine import gpu

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SASS = """
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/               @P0 BRA `(.L_x_9) ;
        /*0020*/                   MOV R1, R2 ;
.L_x_1:
        /*0030*/                   FADD R1, R1, R2 ;
.L_x_2:
        /*0040*/                   LDG.E.U8 R3, desc[UR6][R4.64] ;
        /*0050*/                   LDG.E.U8 R5, desc[UR6][R4.64+0x3] ;
        /*0060*/                   FFMA R1, R3, R5, R1 ;
        /*0070*/              @!P1 BRA `(.L_x_2) ;
        /*0080*/                   STG.E.U16 desc[UR6][R6.64], R1 ;
        /*0090*/               @P2 BRA `(.L_x_1) ;
.L_x_9:
        /*00a0*/                   EXIT ;
"""


@pytest.fixture
def kernel_code(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield importlib.import_module("kernel_code")
    for name in ("kernel_code", "harness"):
        sys.modules.pop(name, None)


def test_instructions_belong_to_their_innermost_loop(kernel_code):
    whole = kernel_code.loops(SASS)
    (rows,) = whole.inner
    (reading,) = rows.inner
    assert (whole.own, rows.own, reading.own) == (4, 3, 4)
    assert (reading.loads, rows.loads, rows.stores) == (2, 0, 1)


def test_a_value_costs_its_row_its_reads_and_its_share_of_what_comes_before(kernel_code):
    (way,) = kernel_code.ways(kernel_code.loops(SASS))
    assert way.before == 3
    # A thread with one pixel, 3 values; 224 pixels of a row in tiles of 64; 2 rows are read for the first of 4 rows.
    read = 0.5 + (2 - 0.5) / 4
    cost = 3 + 3 / 4 + read * 2 * 3 * 4 / 2
    assert way.a_value(0.5, 2, gpu.Blocks(4, 1, 2)) == pytest.approx(cost / 3 * 256 / 224)


def test_the_kernel_compiles_and_its_loops_are_found(kernel_code):
    from fastload.transforms.engine import triton_kernels

    if not (kernel_code.TOOLS / "nvdisasm").exists():
        pytest.skip("this Triton brings no disassembler")
    sass, usage = kernel_code.compiled(triton_kernels, gpu.BLOCKS, 90, "*u8", resampled=False)
    crops = kernel_code.ways(kernel_code.loops(sass))
    assert len(crops) == 2, "mirrored, and upright"
    assert all(0 < way.a_value(1, 1, gpu.BLOCKS) < 100 for way in crops) and "REG:" in usage
