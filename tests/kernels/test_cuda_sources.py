"""The CUDA sources compile for their GPU without one, spill nothing, and refuse to run without one
with words.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
from sonicmoe.enums import ActivationType, ZCode, is_glu
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


class Wanted(NamedTuple):
    """How many kernels a module has, what it exports, and the registers of all but its `rare` ones."""

    kernels: int
    exports: str
    registers: int = 255
    rare: int = 0


WANTED = {
    # {int32, int64} of ids and of counts, the gather and its sum. 1024 threads of 64 registers fill
    # the register file: a wider kernel would not launch.
    "routing_metadata": Wanted(
        6,
        "build_metadata build_sorted metadata_places gather_or_zero sum_or_zero scratch_bytes "
        "max_experts",
        64,
    ),
    # 7 pairs of rows' and result's dtype x {3 vectors, 4 vectors, one element}
    "aggregate": Wanted(21, "aggregate_rows"),
    # Four ways of a row, each in words of 16 bytes, 4 and 1; two barriers; sums of 3 dtypes, by
    # vectors and by elements.
    "peer_rows": Wanted(23, "half_bytes send take again back", 128),
    # Rows and weights of 3 dtypes each; transposition, guard, addresses.
    "quantize": Wanted(
        9,
        "quantize_rows transpose_bytes store_addresses num_checksums check_weights "
        "quantize_weights",
    ),
    # Rows that are gathered or lie in order; weights of 3 dtypes; the guard and its addresses.
    "mx_quantize": Wanted(
        7,
        "quantize_rows_iso32 store_addresses num_checksums check_weights quantize_weights_iso32",
    ),
    # {bf16, fp16, fp32, codes}. Memory-bound: four CTAs of 256 threads
    # keep enough loads under way. The rare fp32 tokens have twice the values in registers.
    "wgrad_operands": Wanted(
        4,
        "gather_transpose_quantize gather_transpose_quantize_pair gather_transpose_requantize",
        64,
        1,
    ),
    # Index; sums of rows and of columns for two dtypes each.
    "expert_rows": Wanted(6, "index_rows gather_rows row_sums column_sums"),
    # Of rows as bf16, fp16 and codes: {8, 16, 32, 64} columns of the factor, codes up to 32; the same
    # of gradients of both kinds of codes, of values {16, 64}; two sums of shares; codes times few
    # columns, two ways; factors of three dtypes into two, five ways.
    "low_rank": Wanted(
        57, "narrow_rows narrow_gradient narrow_both gradient_parts parts_of_both prepare_factor"
    ),
    "flush": Wanted(2, "flush_gradients gradient_format", 64),  # {transposed, native}
    # Of tokens as values and as codes, with db2 and without; blocks of dz; sums of experts. Two CTAs
    # of 256 threads keep eight loads of each thread under way.
    "bias_gradients": Wanted(6, "sum_tokens sum_dz", 128),
    # The plain GEMM with either depth of its blocks, seven activations, of which SiTU-GLU is two, with
    # a cap on up and without, x {with z, without}.
    "fp8_grouped_gemm": Wanted(18, "activation_names grouped_gemm gather_gated_gemm"),
    # The same eight x {FP8, plain} operands of wgrad.
    "fp8_dgated": Wanted(16, "activation_names gather_dgated_gemm"),
    # One map, few, many.
    "fp8_wgrad": Wanted(6, "grouped_wgrad wgrad_destination"),
    # Weights that are contiguous along either axis, of each: halves, turns, a plain product.
    "bf16_gemm": Wanted(6, "activation_names up grouped_gemm"),
    "bf16_dgated": Wanted(4, "activation_names dgated"),
    # Either operand as the rows of the gradient x {one map, many}.
    "bf16_wgrad": Wanted(8, "wgrad wgrad_destination"),
}
# of one activation: the plain GEMMs, and with z and without ... FP8 and plain operands of wgrad; of
# a second one where up may be capped too
KERNELS_OF_ONE = {
    "fp8_grouped_gemm": (4, 2),
    "fp8_dgated": (2, 2),
    "bf16_gemm": (6, 4),
    "bf16_dgated": (4, 4),
}
KERNELS_WITHOUT_GATE = {"bf16_gemm": 4, "bf16_dgated": 2}  # one order instead of two


def activation_of(source) -> str | None:
    return dict(source.defines).get("ACTIVATION")


def kernels_in(source) -> int:
    """How many its module has."""
    activation, every = activation_of(source), WANTED[source.name].kernels
    if activation is None:
        return every
    if not is_glu(ActivationType(activation)):
        return KERNELS_WITHOUT_GATE.get(source.name, every)
    of_one, of_capped_up = KERNELS_OF_ONE[source.name]
    # A plain GEMM that adds a bias.
    of_one += "BIAS" in dict(source.defines)
    return of_one + (of_capped_up if activation == ActivationType.SITU_GLU.value else 0)


def label(source) -> str:
    defines = dict(source.defines)
    parts = {
        "Z_BF16": "z in bf16", "Z_INT8": "z in int8",
        "BIAS": "biases", "FP16": "fp16", "LOW_RANK": "adapters",
    }  # fmt: skip
    shown = [source.name, activation_of(source), *(parts[n] for n in parts if n in defines)]
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
    wanted, report = WANTED[source.name], report_of(source, artefacts)
    resources = parse_ptxas(report)
    assert len(resources) == kernels_in(source)
    assert {item.arch for item in resources} == {source.arch}
    require_no_spills(resources)
    require_no_stack(resources)
    assert performance_losses(report) == ()
    usual = sorted(item.registers for item in resources)[: len(resources) - wanted.rare]
    assert max(usual) <= wanted.registers


@pytest.mark.kernels
def test_the_device_half_alone_has_the_report_of_the_whole(artefacts: CompileCache) -> None:
    source = flush_source("sm_90a")
    reports = device_report(source, artefacts), report_of(source, artefacts)
    # nvcc names an anonymous namespace after the path of the file, too, and what is kept may have
    # been compiled in another checkout.
    alone, whole = (re.sub("(_GLOBAL__N__)[0-9a-f]{8}", r"\1", report) for report in reports)
    assert parse_ptxas(alone) == parse_ptxas(whole)


@pytest.mark.kernels
@pytest.mark.parametrize("source", WHOLE, ids=label)
def test_loads_without_a_gpu(source, artefacts: CompileCache) -> None:
    module = source.load(artefacts)
    for name in WANTED[source.name].exports.split():
        assert callable(getattr(module, name)), name


def test_limits_agree_with_the_python_side(artefacts: CompileCache) -> None:
    from sonicmoe.routing.backends import MAX_EXPERTS

    module = cuda_sources("sm_90a")[0].load(artefacts)
    assert int(module.max_experts()) == MAX_EXPERTS
    # Counts of each expert from every CTA of the largest grid, or of the only one.
    assert int(module.scratch_bytes(1 << 20, 3, 0)) >= 3 * 132 * 4
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
@pytest.mark.parametrize(
    "source", gemm_sources("sm_90a", SWIGLU)[:2], ids=lambda source: source.name
)
def test_modules_name_the_activations_they_were_built_with(source, artefacts: CompileCache) -> None:
    """One here: `KERNELS_OF_ONE` and `WANTED` count those of modules that have one, and all."""
    (line,) = source.load(artefacts).activation_names()
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
