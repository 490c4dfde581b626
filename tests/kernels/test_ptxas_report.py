"""Reading ptxas' report."""

from __future__ import annotations

import pytest
from kernels import ptxas_report
from kernels.ptxas_report import (
    KernelResources,
    SpillError,
    allowed_bytes,
    parse_ptxas,
    performance_losses,
    require_no_spills,
    require_no_stack,
)

REPORT = """\
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
SERIALISED = (
    "ptxas info    : (C7514) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ill formed "
    "pipeline stage in the function 'clean'\n"
)


def test_every_figure_is_read() -> None:
    assert parse_ptxas(REPORT) == (
        KernelResources("_Z4gemmPKf", "sm_90a", 168, 552, 504, 620, 1024),
        KernelResources("clean", "sm_90a", 10),
    )


def test_spills_raise_and_name_the_kernel() -> None:
    gemm, clean = parse_ptxas(REPORT)
    require_no_spills([clean])
    words = "_Z4gemmPKf spills 504 bytes of stores and 620 of loads at 168 registers"
    with pytest.raises(SpillError, match=words):
        require_no_spills([gemm, clean])


def test_a_stack_without_spills_raises_and_names_the_kernel() -> None:
    indexed = KernelResources("row_maxima", "sm_90a", registers=40, stack_bytes=256)
    require_no_spills([indexed])
    require_no_stack(parse_ptxas(REPORT)[1:])
    with pytest.raises(SpillError, match=r"on the stack: row_maxima has 256 bytes$"):
        require_no_stack([KernelResources("clean", "sm_90a"), indexed])


def test_spills_are_allowed_by_name_architecture_and_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gemm, clean = parse_ptxas(REPORT)
    assert allowed_bytes(gemm) == 0
    monkeypatch.setattr(ptxas_report, "ALLOWED", {("sm_90a", "gemmPK"): 504 + 620})
    require_no_spills([gemm, clean])
    for allowed in (
        {("sm_90a", "gemmPK"): 1123},
        {("sm_100a", "gemmPK"): 2000},
        {("sm_90a", "clean"): 2000},
    ):
        monkeypatch.setattr(ptxas_report, "ALLOWED", allowed)
        with pytest.raises(SpillError, match="_Z4gemmPKf spills"):
            require_no_spills([gemm, clean])


def test_serialised_wgmma_raises() -> None:
    with pytest.raises(SpillError, match="clean: ptxas serialised"):
        require_no_spills(parse_ptxas(REPORT + SERIALISED)[1:])


def test_performance_losses_are_read_once_each() -> None:
    ignored = "(C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry."
    found = performance_losses(
        f"ptxas info    : {ignored}\n{REPORT}ptxas info    : {ignored}\n{SERIALISED}"
    )
    assert found[0] == ignored and found[1].startswith("(C7514) Potential Performance Loss: wgmma")
    assert len(found) == 2
    assert performance_losses(REPORT) == ()


def test_nothing_to_read() -> None:
    assert parse_ptxas("ninja: no work to do.") == ()
