"""What a kernel of blocked scales must move, by its PTX, and what ptxas reports."""

from __future__ import annotations

from dataclasses import replace

import pytest
from kernels import ptxas_report
from kernels.mx_matrix import mx_shape
from kernels.ptx_report import Traffic, mx_problems
from kernels.ptxas_report import (
    KernelResources,
    SpillError,
    parse_ptxas,
    performance_losses,
    require_no_spills,
    require_no_stack,
)

from sonicmoe.kernels.blackwell import mx_gemm


def test_what_is_missing_from_a_kernel_with_scales_is_found():
    """Figures of `up` as it is compiled for sm_100a."""
    kernel = mx_gemm.up_kernel(mx_shape("sm_100a"), store_z=True)
    name, statics = kernel.name, dict(kernel.statics)
    sound = Traffic(
        loads={"1": 1, "3": 1, "5": 1, "7": 1}, stores={"9": 4, "11": 4}, adds={},
        expected_bytes=(16, 68608), gathers=0, cp_async=0, wgmma=0, mma_sync=0, tcgen05=4, clc=2,
    )  # fmt: skip
    assert mx_problems(name, statics, sound) == []
    for changes, words in (
        ({"loads": {"1": 1, "3": 1}}, "loads by 2 tensor maps; needed: 4"),
        ({"stores": {"9": 4}}, "stores by 1 tensor maps; needed: 2, for ('z', 'y1')"),
        ({"expected_bytes": (16, 65536)}, "needed: 68608 of a stage"),
        ({"adds": {"9": 1}}, "adds by 1"),
        ({"tcgen05": 0}, "another family"),
        ({"clc": 0}, "asks 0 times for its next tile"),
    ):
        (problem,) = mx_problems(name, statics, replace(sound, **changes))
        assert words in problem


PTXAS = """\
[1/2] nvcc -Xptxas -v -c gemm.cu
ptxas info    : 12 bytes gmem, 8 bytes cmem[4]
ptxas info    : Compiling entry function '_Z4gemmPKf' for 'sm_90a'
ptxas info    : Function properties for _Z4gemmPKf
    552 bytes stack frame, 504 bytes spill stores, 620 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 552 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 100.000 ms
ptxas info    : Compiling entry function 'clean' for 'sm_90a'
ptxas info    : Function properties for clean
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
ptxas info    : Function properties for helper
    16 bytes stack frame, 16 bytes spill stores, 16 bytes spill loads
"""
LOSS = "(C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
SERIALISED = f"ptxas info    : {LOSS} ill formed pipeline stage in the function 'clean'\n"
IGNORED = (
    "(C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count."
)


def test_every_figure_of_ptxas_is_read():
    gemm = KernelResources("_Z4gemmPKf", "sm_90a", 168, 552, 504, 620, 1024)
    assert parse_ptxas(PTXAS) == (gemm, KernelResources("clean", "sm_90a", 10))
    assert parse_ptxas("ninja: no work to do.") == ()
    line = f"ptxas info    : {IGNORED}\n"
    first, second = performance_losses(line + PTXAS + line + SERIALISED)
    assert first == IGNORED and second.startswith(LOSS)
    assert performance_losses(PTXAS) == ()


def test_what_ptxas_spilled_serialised_or_left_on_the_stack_is_named():
    gemm, clean = parse_ptxas(PTXAS)
    require_no_spills([clean])
    require_no_stack([clean])
    indexed = KernelResources("row_maxima", "sm_90a", registers=40, stack_bytes=256)
    require_no_spills([indexed])
    spills = "^_Z4gemmPKf spills 504 bytes of stores and 620 of loads at 168 registers"
    for require, kernels, words in (
        (require_no_spills, [gemm, clean], spills),
        (require_no_spills, parse_ptxas(PTXAS + SERIALISED)[1:], "clean: ptxas serialised"),
        (require_no_stack, [clean, indexed], r"on the stack: row_maxima has 256 bytes$"),
    ):
        with pytest.raises(SpillError, match=words):
            require(kernels)


def test_spills_are_allowed_by_name_architecture_and_bytes(monkeypatch):
    kernels = parse_ptxas(PTXAS)
    for allowed in (
        {},
        {("sm_90a", "gemmPK"): 1123},
        {("sm_100a", "gemmPK"): 2000},
        {("sm_90a", "clean"): 2000},
    ):
        monkeypatch.setattr(ptxas_report, "ALLOWED", allowed)
        with pytest.raises(SpillError, match="_Z4gemmPKf spills"):
            require_no_spills(kernels)
    monkeypatch.setattr(ptxas_report, "ALLOWED", {("sm_90a", "gemmPK"): 504 + 620})
    require_no_spills(kernels)
