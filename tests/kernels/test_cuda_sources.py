"""The CUDA sources compile for their GPU without one, spill nothing, and refuse to run without one
with words.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from kernels.device_half import device_report
from kernels.needs import NVCC
from kernels.ptxas_report import (
    parse_ptxas,
    performance_losses,
    require_no_spills,
    require_no_stack,
)

from sonicmoe.architectures import ARCHITECTURES
from sonicmoe.engine.capabilities import BF16, HOPPER
from sonicmoe.engine.expert_matrices import MOST
from sonicmoe.enums import ActivationType, ZCode
from sonicmoe.jit.cache import CompileCache
from sonicmoe.jit.cuda_source import CudaSource
from sonicmoe.jit.shared_object import BUILD_LOG
from sonicmoe.kernels import cuda_sources, peer_rows_source, routing_metadata_source, sm90
from sonicmoe.kernels.blackwell import mx_quantize_source
from sonicmoe.kernels.cuda_quantize import quantize_source
from sonicmoe.kernels.cuda_wgrad import (
    bias_gradients_source,
    expert_rows_source,
    flush_source,
    low_rank_source,
    wgrad_operands_source,
)
from sonicmoe.kernels.sm90 import bf16_sources, fp8_grouped_gemm_source, gemm_sources

# How z is kept and what the activation computes are parts of an epilogue
# that share registers and nothing else. So what is not usual is compiled together, beside the
# activation that holds the most values; each alone, and beside the others, with `--every-variant`.
HUNGRIEST = ActivationType.SITU_GLU
SWIGLU, OAI, GELU = ActivationType.SWIGLU, ActivationType.SWIGLU_OAI, ActivationType.GELU


def variants(activation: ActivationType, z: ZCode = ZCode.ADAPTIVE) -> tuple[CudaSource, ...]:
    """The gated GEMMs of one activation."""
    return gemm_sources("sm_90a", activation, z)[:2]


def in_bf16(activation: ActivationType, **special: bool) -> tuple[CudaSource, ...]:
    """The BF16 GEMMs that compute one activation."""
    return tuple(bf16_sources("sm_90a", activation, **special).values())[:2]


def with_biases(activation: ActivationType, z: ZCode = ZCode.ADAPTIVE) -> CudaSource:
    """The up projection and the plain GEMMs; dgated knows no bias."""
    return fp8_grouped_gemm_source("sm_90a", activation, z, bias=True)


def adapted(activation: ActivationType, bias: bool = False) -> tuple[CudaSource, ...]:
    """The GEMMs that low-rank adapters may follow, in FP8 and in BF16."""
    in_fp8 = gemm_sources("sm_90a", activation, bias=bias, low_rank=True)[:2]
    return *in_fp8, *in_bf16(activation, low_rank=True)


WHOLE = (
    *cuda_sources("sm_90a"),
    peer_rows_source("sm_90a"),
    quantize_source("sm_90a"),
    wgrad_operands_source("sm_90a"),
    bias_gradients_source("sm_90a"),
    low_rank_source("sm_90a"),
    flush_source("sm_90a"),
    mx_quantize_source("sm_100a"),
    expert_rows_source("sm_90a"),
    *bf16_sources("sm_90a", SWIGLU).values(),
    *gemm_sources("sm_90a", SWIGLU),
)
# Of further variants of the same files the device half alone is compiled.
VARIANTS = (
    # Every activation in one module.
    *gemm_sources("sm_90a")[:2],
    *variants(HUNGRIEST, ZCode.BF16),
    # GPT-OSS: its gate, and biases; and adapters.
    *adapted(OAI, bias=True),
    *in_bf16(SWIGLU, rows_first=True, separate=True),
    *bf16_sources("sm_90a", GELU, dtype="float16").values(),
)
OTHERS = (
    *adapted(SWIGLU),
    *adapted(HUNGRIEST),
    *in_bf16(SWIGLU, rows_first=True),
    *in_bf16(SWIGLU, separate=True),
    *variants(OAI),
    variants(OAI, ZCode.INT8)[0],
    # It stands for the GPUs on which the quantisers can be tried.
    mx_quantize_source("sm_90a"),
    *variants(HUNGRIEST),
    *(
        source
        for activation in HOPPER.activations
        for source in variants(activation, ZCode.BF16)
        if source not in VARIANTS
    ),
    *(
        with_biases(activation, z)
        for activation in HOPPER.activations
        for z in (ZCode.ADAPTIVE, ZCode.BF16)
    ),
    *(
        source
        for activation in BF16.activations
        if activation is not SWIGLU
        for source in in_bf16(activation)
    ),
)


# Most registers of a kernel, where fewer than a thread can have are needed: 1024 threads of 64 fill the
# register file, and a wider kernel of `routing_metadata` would not launch; `wgrad_operands` waits for
# memory, and four CTAs of 256 threads keep enough loads under way; of `peer_rows` and `bias_gradients`
# two do. The rare fp32 tokens of `wgrad_operands` have twice the values.
REGISTERS = {
    "routing_metadata": 64, "peer_rows": 128, "wgrad_operands": 64, "flush": 64, "bias_gradients": 128,
}  # fmt: skip
RARE = {"wgrad_operands": 1}


def label(source) -> str:
    defines = dict(source.defines)
    parts = {
        "Z_BF16": "z in bf16", "Z_INT8": "z in int8",
        "BIAS": "biases", "FP16": "fp16", "LOW_RANK": "adapters",
    }  # fmt: skip
    activation = defines.get("ACTIVATION")
    shown = [source.name, activation, *(parts[n] for n in parts if n in defines)]
    return ", ".join(filter(None, shown))


pytestmark = NVCC
EVERY_SOURCE = (
    *WHOLE,
    *VARIANTS,
    *(pytest.param(source, marks=pytest.mark.every_variant) for source in OTHERS),
)


def report_of(source: CudaSource, artefacts: CompileCache) -> str:
    """What ptxas said of it."""
    if source in WHOLE:
        # Several threads of nvcc take more CPU time for the same machine code.
        log = replace(source, split=False).compile(artefacts).file(BUILD_LOG)
        return log.read_text(encoding="utf-8")
    return device_report(source, artefacts)


@pytest.mark.kernels
@pytest.mark.parametrize("source", EVERY_SOURCE, ids=label)
def test_compiles_without_spills(source, artefacts: CompileCache) -> None:
    report = report_of(source, artefacts)
    resources = parse_ptxas(report)
    assert {item.arch for item in resources} == {source.arch}
    require_no_spills(resources)
    require_no_stack(resources)
    assert performance_losses(report) == ()
    usual = sorted(item.registers for item in resources)[
        : len(resources) - RARE.get(source.name, 0)
    ]
    assert max(usual) <= REGISTERS.get(source.name, 255)


@pytest.mark.kernels
def test_the_device_half_alone_has_the_report_of_the_whole(artefacts: CompileCache) -> None:
    source = flush_source("sm_90a")
    reports = device_report(source, artefacts), report_of(source, artefacts)
    # nvcc names an anonymous namespace after the path of the file, too, and what is kept may have
    # been compiled in another checkout.
    alone, whole = (re.sub("(_GLOBAL__N__)[0-9a-f]{8}", r"\1", report) for report in reports)
    assert parse_ptxas(alone) == parse_ptxas(whole)


def test_limits_agree_with_the_python_side(artefacts: CompileCache) -> None:
    from sonicmoe.routing.backends import MAX_EXPERTS

    module = cuda_sources("sm_90a")[0].load(artefacts)
    assert int(module.max_experts()) == MAX_EXPERTS
    # Each CTA of the largest grid, 66 by itself and 132 by force, or the only one counts every expert.
    assert int(module.scratch_bytes(1 << 20, 3, 0)) >= 3 * 66 * 4
    assert int(module.scratch_bytes(1 << 20, 3, 132)) >= 3 * 132 * 4
    assert int(module.scratch_bytes(0, 3, 0)) == int(module.scratch_bytes(1 << 20, 3, 1)) == 12


@pytest.mark.kernels
def test_routing_fits_the_shared_memory_of_every_architecture(artefacts: CompileCache) -> None:
    """The source asserts that the metadata of the most experts fits into what it is told. A GPU that
    gives a block less would refuse the launch, whatever the number of experts.
    """
    told = {arch: dict(routing_metadata_source(arch).defines) for arch in (*ARCHITECTURES, "sm_75")}
    assert told.pop("sm_75") == {}
    assert told == {arch: {"SHARED_KIB": known.shared_kib} for arch, known in ARCHITECTURES.items()}
    small = {arch for arch, known in ARCHITECTURES.items() if known.shared_kib == 99}
    assert small == {"sm_86", "sm_89", "sm_120a", "sm_121a"}
    test_compiles_without_spills(routing_metadata_source("sm_120a"), artefacts)


@pytest.mark.kernels
@pytest.mark.parametrize("source", WHOLE, ids=label)
def test_loads_without_a_gpu(source, artefacts: CompileCache) -> None:
    """And names the activations that it was built with."""
    module = source.load(artefacts)
    if source.name in ("fp8_grouped_gemm", "fp8_dgated"):
        (line,) = module.activation_names()
        assert str(line).split()[0] == SWIGLU.value


def test_host_tensors_are_refused_by_name(artefacts: CompileCache) -> None:
    import torch

    index, values = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    counts, gradient = torch.zeros(2, dtype=torch.int32), torch.zeros((1, 4, 4))
    for source, function, arguments, name in (
        (cuda_sources("sm_90a")[0], "gather_or_zero", (index, values, values), "index"),
        (flush_source("sm_90a"), "flush_gradients", (gradient, gradient, [0] * 4, True, True), "dw1"),
        (expert_rows_source("sm_90a"), "index_rows", (counts, counts, index[:3], counts, counts[:1]), "row_token"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=f"{name} must be on a CUDA device"):
            getattr(source.load(artefacts), function)(*arguments, 0)


def test_formats_are_the_kernels_own(artefacts: CompileCache) -> None:
    """Python asks for each by the name of its dtype, and knows no number."""
    from sonicmoe.gradients.flush import FLUSHED_DTYPES
    from sonicmoe.interop import dtype_name

    module = flush_source("sm_90a").load(artefacts)
    dtypes = [dtype_name(dtype) for dtype in FLUSHED_DTYPES]
    formats = {module.gradient_format(dtype, fresh) for dtype in dtypes for fresh in (True, False)}
    assert len(formats) == 2 * len(dtypes)
    with pytest.raises(ValueError, match="dtype is float64; needed: bfloat16, float16 or float32"):
        module.gradient_format("float64", False)


def test_the_engine_knows_how_many_experts_a_kernel_has_maps_for() -> None:
    text = (Path(sm90.__file__).parent / "bf16_grouped_gemm.cuh").read_text(encoding="utf-8")
    assert f"kMapsOfB = {MOST};  // an expert's" in text
