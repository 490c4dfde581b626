"""Losses other than spills that ptxas reports are named. tests/jit compiles one that spills."""

from __future__ import annotations

import pytest
from kernels.ptxas_report import (
    KernelResources,
    SpillError,
    parse_ptxas,
    performance_losses,
    require_no_spills,
    require_no_stack,
)

LOSS = "(C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to"
REPORT = f"""\
ptxas info    : {LOSS} ill formed pipeline stage in the function 'gemm'
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count.
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count.
"""


def test_what_ptxas_serialised_ignored_or_left_on_the_stack_is_named():
    with pytest.raises(SpillError, match=r"^gemm: ptxas serialised its WGMMA instructions$"):
        require_no_spills(parse_ptxas(REPORT))
    first, second = performance_losses(REPORT)
    assert first.startswith(LOSS) and "'setmaxnreg' ignored" in second
    indexed = KernelResources("row_maxima", "sm_90a", registers=40, stack_bytes=256)
    require_no_spills([indexed])
    with pytest.raises(SpillError, match=r"on the stack: row_maxima has 256 bytes$"):
        require_no_stack([indexed])
