"""MXFP8's kernels compile without a GPU for the architectures that run them, and spill nothing."""

from __future__ import annotations

import importlib.util

import pytest
from kernels.ptxas_report import performance_losses, require_no_spills, resource_usage

from sonicmoe.jit.cache import CompileCache
from sonicmoe.jit.cuda_source import BUILD_LOG
from sonicmoe.jit.toolchain import find_toolkit
from sonicmoe.kernels.cuda_mx import mx_quantize_source

pytestmark = [
    pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc"),
    pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi"),
]
EXPORTS = (
    "quantize_rows_iso32",
    "store_addresses",
    "num_checksums",
    "check_weights",
    "quantize_weights_iso32",
)
# Rows that are gathered or lie in order; weights of 3 dtypes; the guard and its addresses.
KERNELS = 7


@pytest.mark.parametrize("arch", ["sm_100a", "sm_90a"])
def test_the_quantisers_do_not_spill(
    arch: str, artefacts: CompileCache, pytestconfig: pytest.Config
) -> None:
    """sm_90a stands for the GPUs on which the quantisers can be tried; `pytest --every-variant`."""
    if arch != "sm_100a" and not pytestconfig.getoption("--every-variant"):
        pytest.skip("pytest --every-variant")
    source = mx_quantize_source(arch)
    artefact = source.compile(artefacts)
    resources = resource_usage(artefact)
    assert len(resources) == KERNELS
    assert {item.arch for item in resources} == {arch}
    require_no_spills(resources)
    assert performance_losses(artefact.file(BUILD_LOG).read_text(encoding="utf-8")) == ()
    assert all(item.stack_bytes == 0 for item in resources)
    module = source.load(artefacts)
    for name in EXPORTS:
        assert callable(getattr(module, name)), name
