"""The CUDA sources around the weight gradients compile for Hopper without a GPU, spill nothing, and
refuse host tensors by name.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from kernels.ptxas_report import require_no_spills, resource_usage

from sonicmoe.config import SonicMoEConfig, current_config
from sonicmoe.engine.compile_plan import plan
from sonicmoe.gradients.destinations import ITEM_BYTES
from sonicmoe.interop import dtype_name
from sonicmoe.jit.cache import CompileCache
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.toolchain import find_toolkit
from sonicmoe.kernels.cuda_wgrad import flush_source, wgrad_operands_source

EXPORTS = {
    "wgrad_operands": (
        "gather_transpose_quantize",
        "gather_transpose_quantize_pair",
        "gather_transpose_requantize",
        "gather_row_scales",
        "gather_transpose_codes",
        "transpose_codes",
    ),
    "flush": ("flush_gradients", "gradient_format"),
}
# {bf16, fp16, fp32, codes of three kinds}, scales of rows; {transposed, native}
KERNELS = {"wgrad_operands": 7, "flush": 2}
SOURCES = (wgrad_operands_source("sm_90a"), flush_source("sm_90a"))

needs_compiler = [
    pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc"),
    pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi"),
]


@pytest.mark.parametrize(
    "source", [pytest.param(s, marks=needs_compiler, id=s.name) for s in SOURCES]
)
def test_compiles_for_hopper_without_spills(source, artefacts: CompileCache) -> None:
    resources = resource_usage(source.compile(artefacts))
    assert len(resources) == KERNELS[source.name]
    assert {item.arch for item in resources} == {"sm_90a"}
    require_no_spills(resources)
    assert all(item.stack_bytes == 0 for item in resources)
    # Memory-bound: four CTAs of 256 threads keep enough loads under way. The rare fp32 tokens have
    # twice the values in registers.
    assert (
        sorted(item.registers for item in resources)[-2 if source.name == "wgrad_operands" else -1]
        <= 64
    )
    module = source.load(artefacts)
    assert all(callable(getattr(module, name)) for name in EXPORTS[source.name])


@pytest.mark.parametrize("source", [pytest.param(SOURCES[1], marks=needs_compiler)])
def test_host_tensors_are_refused_by_name(source, artefacts: CompileCache) -> None:
    module = source.load(artefacts)
    with pytest.raises(Exception, match="dw1 must be on a CUDA device"):
        module.flush_gradients(
            torch.zeros((1, 4, 4)), torch.zeros((1, 4, 4)), [0] * 4, True, True, 0
        )


@pytest.mark.parametrize("source", [pytest.param(SOURCES[1], marks=needs_compiler)])
def test_formats_are_the_kernels_own(source, artefacts: CompileCache) -> None:
    """Python asks for each by the name of its dtype, and knows no number."""
    module = source.load(artefacts)
    dtypes = [dtype_name(dtype) for dtype in ITEM_BYTES]
    formats = {module.gradient_format(dtype, fresh) for dtype in dtypes for fresh in (True, False)}
    assert len(formats) == 2 * len(dtypes)
    with pytest.raises(ValueError, match="dtype is float64; needed: bfloat16, float16 or float32"):
        module.gradient_format("float64", False)


@pytest.mark.parametrize(("options", "names"), [
    ({"fp8_mode": "perf"}, {"flush", "wgrad_operands"}),
    ({"fp8_mode": "perf", "fp8_wgrad": False}, {"flush"}),
    ({"fp8_mode": "off"}, {"flush"}),
])  # fmt: skip
def test_warm_up_jobs(options, names) -> None:
    """Of the two sources; without FP8 weight gradients the operands come with the engine's other
    kernels, where its compilers are there.
    """
    config = current_config(SonicMoEConfig(**options))
    assert names <= {job.name for job in plan(ModelSpec(8, 3072, 1536), config)}
