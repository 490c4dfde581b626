"""The CUDA sources compile for Hopper without a GPU, spill nothing, and refuse to run without one
with words.
"""

from __future__ import annotations

import importlib.util

import pytest
from kernels.ptxas_report import (
    performance_losses,
    require_no_spills,
    require_no_stack,
    resource_usage,
)

from sonicmoe.architectures import ARCHITECTURES
from sonicmoe.config import SonicMoEConfig, current_config
from sonicmoe.engine.capabilities import HOPPER
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.jit.cache import CompileCache
from sonicmoe.jit.cuda_source import BUILD_LOG, CudaSource
from sonicmoe.jit.toolchain import find_toolkit
from sonicmoe.kernels import cuda_sources, routing_metadata_source
from sonicmoe.kernels.cuda_quantize import quantize_source
from sonicmoe.kernels.sm90 import PARAMETERS_OF_ALL, gemm_sources

# How z is kept, whether scales stay along K and what the activation computes are parts of an epilogue
# that share registers and nothing else. What is not usual is compiled beside the activation that
# holds the most values; beside the others, and together, it is with `--every-variant`.
HUNGRIEST = ActivationType.SITU_GLU


def variants(
    activation: ActivationType, z: ZCode = ZCode.INT8, steady: bool = False
) -> tuple[CudaSource, ...]:
    """The gated GEMMs of one activation."""
    own = PARAMETERS_OF_ALL.get(activation, ())
    return gemm_sources("sm_90a", activation, own, z, steady)[:2]


SOURCES = (
    *cuda_sources("sm_90a"),
    quantize_source("sm_90a"),
    *gemm_sources("sm_90a"),
    *variants(HUNGRIEST, steady=True),
    *variants(HUNGRIEST, ZCode.BF16),
)
OTHERS = (
    *gemm_sources("sm_90a", steady=True)[:2],
    *(
        source
        for activation in HOPPER.activations
        for steady in (False, True)
        for source in variants(activation, ZCode.BF16, steady)
        if source not in SOURCES
    ),
)

EXPORTS = {
    "routing_metadata": (
        "build_metadata",
        "gather_or_zero",
        "sum_or_zero",
        "scratch_per_expert",
        "max_experts",
    ),
    "aggregate": ("aggregate_rows",),
    "quantize": (
        "quantize_rows",
        "quantize_steady_rows",
        "transpose_bytes",
        "store_addresses",
        "num_checksums",
        "check_weights",
        "quantize_weights",
        "quantize_steady_weights",
    ),
    "fp8_grouped_gemm": ("activation_names", "grouped_gemm", "gather_gated_gemm"),
    "fp8_dgated": ("activation_names", "gather_dgated_gemm"),
    "fp8_wgrad": ("grouped_wgrad", "grouped_wgrad_into", "wgrad_destination"),
}
# entry functions: {int32, int64}, the gather and its sum; 7 pairs of rows' and result's dtype x {3
# vectors, 4 vectors, one element} ... rows and weights of 3 dtypes each, both again with steady
# scales, whose weights take two kernels, transposition, guard, addresses ... the plain GEMM with
# either depth of its blocks, {SwiGLU, GeGLU, ReGLU, clamped SwiGLU, SiTU-GLU} x {with z, without}
# ... the same five x {FP8, plain} operands of wgrad ... one map, few, many
KERNELS = {
    "routing_metadata": 4,
    "aggregate": 21,
    "quantize": 18,
    "fp8_grouped_gemm": 12,
    "fp8_dgated": 10,
    "fp8_wgrad": 3,
}
# of one activation: the plain GEMMs, and with z and without ... FP8 and plain operands of wgrad
KERNELS_OF_ONE = {"fp8_grouped_gemm": 4, "fp8_dgated": 2}


def activation_of(source) -> str | None:
    return dict(source.defines).get("ACTIVATION")


def label(source) -> str:
    defines = dict(source.defines)
    parts = {"Z_BF16": "z in bf16", "STEADY_SCALES": "steady scales"}
    shown = [source.name, activation_of(source), *(parts[n] for n in parts if n in defines)]
    return ", ".join(filter(None, shown))


pytestmark = [
    pytest.mark.skipif(find_toolkit() is None, reason="needs nvcc"),
    pytest.mark.skipif(importlib.util.find_spec("tvm_ffi") is None, reason="needs apache-tvm-ffi"),
]


EVERY_SOURCE = (
    *SOURCES,
    *(pytest.param(source, marks=pytest.mark.every_variant) for source in OTHERS),
)


@pytest.mark.parametrize("source", EVERY_SOURCE, ids=label)
def test_compiles_for_hopper_without_spills(source, artefacts: CompileCache) -> None:
    artefact = source.compile(artefacts)
    resources = resource_usage(artefact)
    counts = KERNELS_OF_ONE if activation_of(source) else KERNELS
    assert len(resources) == counts[source.name]
    assert {item.arch for item in resources} == {"sm_90a"}
    require_no_spills(resources)
    assert performance_losses(artefact.file(BUILD_LOG).read_text(encoding="utf-8")) == ()
    if (
        source.name == "routing_metadata"
    ):  # 1024 threads of 64 registers fill the register file: a wider kernel would not launch
        assert max(item.registers for item in resources) <= 64
    require_no_stack(resources)


@pytest.mark.parametrize("source", SOURCES, ids=label)
def test_loads_without_a_gpu(source, artefacts: CompileCache) -> None:
    module = source.load(artefacts)
    for name in EXPORTS[source.name]:
        assert callable(getattr(module, name)), name


def test_limits_agree_with_the_python_side(artefacts: CompileCache) -> None:
    from sonicmoe.routing.backends import MAX_EXPERTS

    module = cuda_sources("sm_90a")[0].load(artefacts)
    assert int(module.max_experts()) == MAX_EXPERTS
    assert int(module.scratch_per_expert()) >= 132


def test_routing_fits_the_shared_memory_of_every_architecture(artefacts: CompileCache) -> None:
    """The source asserts that the metadata of the most experts fits into what it is told. A GPU that
    gives a block less would refuse the launch, whatever the number of experts.
    """
    told = {arch: dict(routing_metadata_source(arch).defines) for arch in (*ARCHITECTURES, "sm_75")}
    assert told.pop("sm_75") == {}
    assert told == {arch: {"SHARED_KIB": known.shared_kib} for arch, known in ARCHITECTURES.items()}
    small = {arch for arch, known in ARCHITECTURES.items() if known.shared_kib == 99}
    assert small == {"sm_86", "sm_89", "sm_120a", "sm_121a"}
    resources = resource_usage(routing_metadata_source("sm_120a").compile(artefacts))
    assert len(resources) == KERNELS["routing_metadata"] and resources[0].arch == "sm_120a"
    require_no_spills(resources)
    require_no_stack(resources)
    assert max(item.registers for item in resources) <= 64


@pytest.mark.parametrize("source", gemm_sources("sm_90a")[:2], ids=lambda source: source.name)
def test_modules_name_the_activations_they_were_built_with(source, artefacts: CompileCache) -> None:
    names = [str(name) for name in source.load(artefacts).activation_names()]
    assert {ActivationType(name) for name in names} == set(HOPPER.activations)
    assert len(names) == len(set(names))


def test_host_tensors_are_refused_by_name(artefacts: CompileCache) -> None:
    import torch

    module = cuda_sources("sm_90a")[0].load(artefacts)
    index, values = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    with pytest.raises(Exception, match="index must be on a CUDA device"):
        module.gather_or_zero(index, values, values, 0)


def test_warm_up_plans_every_source() -> None:
    from sonicmoe.engine.compile_plan import plan
    from sonicmoe.jit.plan import ModelSpec

    def names(dtype: str = "bfloat16", **options) -> set[str]:
        spec = ModelSpec(E=8, H=3072, I=1536, dtype=dtype)
        return {job.name for job in plan(spec, current_config(SonicMoEConfig(**options)))}

    always = {source.name for source in cuda_sources("sm_90a")}
    fp8 = {source.name for source in (quantize_source("sm_90a"), *gemm_sources("sm_90a"))}
    assert always | fp8 <= names(fp8_mode="perf")
    assert always | fp8 <= names("float32", fp8_mode="perf"), "fp32 master weights, bf16 tokens"
    assert always <= names() and not fp8 & names()


def test_warm_up_plans_the_kernels_of_a_recipe_only_where_it_is_asked_for() -> None:
    from sonicmoe.engine.compile_plan import plan
    from sonicmoe.jit.plan import ModelSpec

    def steady(recipe: str) -> list[bool]:
        config = current_config(SonicMoEConfig(fp8_mode="perf", recipe=recipe))
        gemms = ("fp8_grouped_gemm", "fp8_dgated")
        jobs = [job for job in plan(ModelSpec(E=8, H=3072, I=1536), config) if job.name in gemms]
        return ["STEADY_SCALES" in dict(job.defines) for job in jobs]

    assert steady("row128-dx256") == [True, True] and steady("dx256") == [False, False]
