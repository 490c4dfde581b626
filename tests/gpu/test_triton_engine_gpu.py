"""The Triton engine on the GPU against the reference engine, per expert and per block of 128 tokens,
and its whole contract; then once more with code that was compiled for sm_80.

The yardstick is that of the BF16 engine's test, and so are the cases.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from gpu.activation_cases import OWN
from gpu.test_bf16_engine_gpu import (
    Case,
    E,
    H,
    I,
    K,
    assert_same_bits,
    check,
    fill_free_memory,
    make_case,
)
from gpu.test_bf16_engine_gpu import run as run_on
from public_models import EXPERT_SIZES
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from sonicmoe.engine import triton as triton_engine
from sonicmoe.engine.capabilities import Workload
from sonicmoe.engine.interface import (
    EngineSettings,
    FreshTargets,
    NativeBuffer,
    ParameterTargets,
    WeightTarget,
)
from sonicmoe.engine.select import unavailable
from sonicmoe.engine.triton import TritonEngine, index_of
from sonicmoe.enums import ActivationType, EngineName
from sonicmoe.jit import default_cache, no_compile, triton_kernel
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.warmup import warm_up
from sonicmoe.kernels import cuda_sources
from sonicmoe.kernels.triton import gemms, launches, rows
from sonicmoe.kernels.triton.tilings import TILINGS
from sonicmoe.kernels.triton.variants import ExpertShape, all_variants
from sonicmoe.layouts import WeightLayout
from sonicmoe.routing.build import build_routing

pytestmark = pytest.mark.gpu

SWIGLU, ARCH = ActivationType.SWIGLU, "sm_90a"
BF16, FP16 = torch.bfloat16, torch.float16
OURS = TritonEngine()
GEMMS = ("up", "rows_product", "dgated", "wgrad")
KERNELS = (
    *(gemms.up, gemms.rows_product, gemms.dgated, gemms.wgrad),
    *(rows.index_rows, rows.row_sums, rows.column_sums, rows.write_addresses),
)
LARGE = {name: size for name, size in EXPERT_SIZES.items() if size[0] * size[1] <= 2**25}


def run(case, **options):
    return run_on(case, OURS, **options)


def shapes():
    """Of the tests below that may compile nothing."""
    for activation in ActivationType:
        for bias in (False, True):
            yield ExpertShape(H, I, activation, "bfloat16", bias, arch=ARCH)
    for kind, own in OWN.items():
        yield ExpertShape(H, I, kind, parameters=own, arch=ARCH)
    yield ExpertShape(H, I, SWIGLU, "float16", arch=ARCH)
    yield ExpertShape(H, I, ActivationType.GELU, "float16", arch=ARCH)
    for hidden, intermediate in LARGE.values():
        yield ExpertShape(hidden, intermediate, SWIGLU, arch=ARCH)
    yield ExpertShape(128, 1280, SWIGLU, arch=ARCH)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Every variant of this module, built in parallel; nothing below may compile unless it says
    so.
    """
    jobs = [*cuda_sources(ARCH)]
    for shape in shapes():
        again = shape.activation is SWIGLU
        jobs += all_variants(shape, recompute_z=again)
    report = warm_up(
        ModelSpec(E, H, I),
        default_cache(),
        jobs=os.cpu_count(),
        compile_jobs=tuple(dict.fromkeys(jobs)),
    )
    assert report.complete, [outcome.message for outcome in report.kernels if outcome.message]


@pytest.fixture
def may_compile():
    """What a test asks for that runs variants of its own."""


@pytest.fixture(autouse=True)
def compiles_nothing(request):
    if "may_compile" in request.fixturenames:
        yield
        return
    with no_compile():
        yield


def test_this_gpu_can_run_it():
    assert unavailable(EngineName.TRITON, "cuda:0") is None
    fp32 = Workload(EngineSettings(), H, I, "float32")
    assert "float32" in unavailable(EngineName.TRITON, "cuda:0", fp32)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ActivationType, ids=lambda a: a.value)
def test_every_activation(activation, bias):
    check(case := make_case(activation=activation, bias=bias), run(case))


@pytest.mark.parametrize("activation", OWN, ids=lambda a: a.value)
def test_parameters_of_a_layer(activation):
    case = make_case(activation=activation)
    case.parameters = OWN[activation]
    check(case, run(case))


@pytest.mark.parametrize("activation", [SWIGLU, ActivationType.GELU], ids=lambda a: a.value)
def test_float16(activation):
    check(case := make_case(dtype=FP16, activation=activation), run(case))


@pytest.mark.parametrize(("hidden", "intermediate"), LARGE.values(), ids=LARGE)
def test_sizes_of_public_models(hidden, intermediate):
    case = make_case(300, hidden=hidden, intermediate=intermediate, topk=2, experts=4, empty=(1,))
    check(case, run(case))


@pytest.mark.parametrize(("hidden", "intermediate"), [(200, 72), (64, 8), (1032, 520)])
def test_sizes_that_no_tile_divides(hidden, intermediate, may_compile):
    case = make_case(300, hidden=hidden, intermediate=intermediate, bias=True)
    check(case, run(case))


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 255, 256, 257, 4095])
def test_counts_around_the_tile(tokens):
    case = make_case(tokens, experts=2, topk=1, invalid=0.0, empty=(0,))
    check(case, run(case))


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (3000, {"invalid": 0.99}),
        (64, {"invalid": 1.0}),
        (513, {"topk": 1, "invalid": 0.0, "empty": (0, 1, 2, 4, 5)}),
        (600, {"experts": 130, "topk": 4, "empty": (0, 1, 64, 129)}),
        (900, {"experts": 700, "topk": 4, "empty": (0, 1, 600, 699)}),
    ],
    ids=["99 % invalid", "all invalid", "one expert", "130 experts", "700 experts"],
)
def test_uneven_routing(tokens, options):
    case = make_case(tokens, **options)
    check(case, run(case))


def test_no_tokens():
    case = make_case(5)
    case = Case(case.x[:0], case.dout[:0], case.indices[:0], case.probs[:0], case.weights, SWIGLU)
    got = run(case)
    assert got["out"].shape == got["dx"].shape == (0, H) and got["dprobs"].shape == (0, K)
    assert bool((got["dw1"] == 0).all()) and bool((got["dw2"] == 0).all())


def test_equal_calls_give_equal_bits():
    case = make_case(2000, bias=True)
    assert_same_bits(run(case), run(case))


def test_a_part_of_the_gpu_gives_the_same_bits():
    case = make_case(2000, bias=True)
    wanted = run(case)
    for lent in (2, 37):
        assert_same_bits(run(case, settings=EngineSettings(gemm_num_sms=lent)), wanted)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", [SWIGLU, ActivationType.RELU_SQ], ids=lambda a: a.value)
def test_unwritten_memory_is_never_read(activation, bias):
    case = make_case(333, activation=activation, bias=bias)
    fill_free_memory(0.0)
    zeroed = run(case)
    fill_free_memory(float("nan"))
    poisoned = run(case)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills every fresh `torch.empty`
    try:
        filled = run(case)
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_bits(poisoned, zeroed)
    assert_same_bits(filled, zeroed)


@pytest.mark.parametrize("activation", [SWIGLU, *OWN], ids=lambda a: a.value)
@pytest.mark.parametrize("which", ["x", "dout"])
def test_a_bad_token_spoils_its_own_experts_only(which, activation):
    case = make_case(400, invalid=0.0, topk=1, empty=(4,), activation=activation)
    clean = run(case)
    token = 0  # the one an index of zero would gather
    expert = int(case.indices[token, 0])
    getattr(case, which)[token] = float("nan")
    spoilt = run(case)
    others = [e for e in range(E) if e != expert]
    for name in ("dw1", "dw2"):
        assert torch.equal(spoilt[name][others], clean[name][others]), name
        assert not bool(torch.isfinite(spoilt[name][expert]).all()), name
    for name in ("out", "dx", "dprobs"):
        assert torch.equal(spoilt[name][1:], clean[name][1:]), name


def test_accumulates_over_micro_batches():
    first, second = make_case(500, bias=True, seed=1), make_case(300, bias=True, seed=2)
    second.weights = first.weights
    alone = [run(case) for case in (first, second)]
    accumulators = NativeBuffer.zeros(E, 2 * I, H, I, True, "cuda")
    run(first, accumulators=accumulators)
    both = run(second, accumulators=accumulators)
    for name in ("dw1", "dw2", "db1", "db2"):
        assert torch.equal(both[name], alone[0][name] + alone[1][name]), name


def test_an_expert_without_tokens_is_left_untouched():
    case = make_case(300, bias=True, empty=(0, 4, 5))
    accumulators = NativeBuffer.zeros(E, 2 * I, H, I, True, "cuda")
    for tensor in accumulators.tensors():
        tensor.normal_()
    before = [tensor.clone() for tensor in accumulators.tensors()]
    run(case, accumulators=accumulators)
    for old, new in zip(before, accumulators.tensors(), strict=True):
        assert torch.equal(old[[0, 4, 5]], new[[0, 4, 5]])
        assert not bool((old[[1, 2, 3]] == new[[1, 2, 3]]).all())


def test_recomputed_z_and_inference_give_the_same_bits():
    case = make_case(bias=True)
    stored = run(case)
    assert_same_bits(run(case, settings=EngineSettings(recompute_z=True)), stored)
    assert_same_bits(run(case, settings=EngineSettings(frees_stagewise=True)), stored)
    settings = EngineSettings()
    weights = OURS.prepare_weights(*case.weights, settings)
    out, saved = OURS.forward(case.x, case.routing, weights, settings, save=False)
    assert saved is None and torch.equal(out, stored["out"])


def test_other_spellings_of_the_operands():
    """A gradient in fp32, tokens in a strided view and off a 16-byte address, on another stream."""
    case = make_case(200)
    wanted = run(case)
    off = torch.empty(case.x.numel() + 1, dtype=BF16, device="cuda")[1:].reshape(case.x.shape)
    off.copy_(case.x)
    strided = torch.stack([case.x, case.x], 2)[..., 0]
    for x in (off, strided):
        other = Case(x, case.dout.float(), case.indices, case.probs, case.weights, SWIGLU)
        assert_same_bits(run(other), wanted)
    good = case.x.clone()
    case.x.fill_(float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        case.x.copy_(good)
        got = run(case)
    torch.cuda.synchronize()
    assert_same_bits(got, wanted)


def test_waits_for_nothing_and_can_be_captured():
    case, settings = make_case(900), EngineSettings()
    weights = OURS.prepare_weights(*case.weights, settings)
    routing, wanted = case.routing, run(case)
    accumulators = NativeBuffer.zeros(E, 2 * I, H, I, False, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out, saved = OURS.forward(case.x, routing, weights, settings)
            dx, dprobs = OURS.backward(case.dout, saved, weights, accumulators)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph.replay()
    got = {"out": out, "dx": dx, "dprobs": dprobs, "dw1": accumulators.dw1, "dw2": accumulators.dw2}
    assert_same_bits(got, wanted)


def test_past_two_to_the_31_elements():
    """A row's results do not depend on the other rows: the last 128 tokens alone give the bits they
    give behind 860 000.
    """
    hidden, intermediate, tokens = 128, 1280, 860_032
    case = make_case(
        128, hidden=hidden, intermediate=intermediate, experts=1, topk=1, invalid=0.0, empty=()
    )
    alone = run(case)
    times = tokens // 128
    big = Case(
        case.x.repeat(times, 1),
        torch.zeros((tokens, hidden), dtype=BF16, device="cuda"),
        torch.zeros((tokens, 1), dtype=torch.int64, device="cuda"),
        case.probs.repeat(times, 1),
        case.weights,
        SWIGLU,
    )
    big.dout[-128:] = case.dout
    assert tokens * 2 * intermediate > 2**31
    got = run(big)
    assert torch.equal(got["out"], alone["out"].repeat(times, 1))
    for name in ("dx", "dprobs"):
        assert torch.equal(got[name][-128:], alone[name]), name
        assert bool((got[name][:-128] == 0).all()), name
    for name in ("dw1", "dw2"):
        assert torch.equal(got[name], alone[name]), name


@pytest.mark.parametrize(
    ("tokens", "experts", "invalid"),
    [(700, 6, 0.3), (40, 130, 0.5), (64, 3, 1.0), (2000, 2, 0.0), (500, 700, 0.2)],
)
def test_rows_of_experts(tokens, experts, invalid):
    case = make_case(
        tokens, hidden=8, intermediate=8, experts=experts, topk=2, invalid=invalid, empty=()
    )
    routing = case.routing
    calls = launches.Calls(ExpertShape(H, I, SWIGLU, arch=ARCH))
    of = index_of(calls, routing)
    assert of.cu_rows.tolist() == routing.padded_offsets.tolist()
    token, wanted = routing.row_token.tolist(), [0] * routing.num_rows
    owners = [0] * (routing.num_rows // 128)
    for expert, (first, count, padded) in enumerate(routing.expert_slices()):
        spare = [token[first + count - 1]] * (padded - count)
        wanted[first : first + padded] = token[first : first + count] + spare
        owners[first // 128 : (first + padded) // 128] = [expert] * (padded // 128)
    assert of.index.tolist() == wanted and of.tile_expert.tolist() == owners


def test_counts_too_small_lose_rows_and_nothing_else():
    """The offsets then pass the rows there are: no product may follow them."""
    case, settings = make_case(600, invalid=0.0), EngineSettings()
    weights = OURS.prepare_weights(*case.weights, settings)
    routing = build_routing(case.indices, case.probs, E, [128] * E)
    assert int(routing.padded_offsets[-1]) > routing.num_rows
    out, saved = OURS.forward(case.x, routing, weights, settings)
    accumulators = NativeBuffer.zeros(E, 2 * I, H, I, False, "cuda")
    dx, dprobs = OURS.backward(case.dout, saved, weights, accumulators)
    torch.cuda.synchronize()
    lost = routing.slot_row < 0
    assert bool(lost.any()) and bool((dprobs[lost] == 0).all())
    assert all(bool(torch.isfinite(t).all()) for t in (out, dx, dprobs, *accumulators.tensors()))


# ---- the parameters' own memory ----

LAYOUTS = [
    WeightLayout(transposed, split) for transposed in (False, True) for split in (False, True)
]


def targets_of(layout, kind, stacked, dtype=torch.float32, value=0.0):
    """`(targets, the memory around them)`: matrices between canaries of 4 elements."""
    held = []

    def matrix(height, width):
        shape = (width, height) if layout.transposed else (height, width)
        around = torch.full((shape[0] * shape[1] + 16,), 7.0, dtype=dtype, device="cuda")
        held.append(around)
        inner = around[8:-8].reshape(shape)
        inner.fill_(value)
        return inner

    def target(height, width):
        if not stacked:
            matrices = [matrix(height, width) for _ in range(E)]
            return WeightTarget.per_expert(matrices, layout)
        shape = (E, width, height) if layout.transposed else (E, height, width)
        around = torch.full((E * height * width + 16,), 7.0, dtype=dtype, device="cuda")
        held.append(around)
        inner = around[8:-8].reshape(shape)
        inner.fill_(value)
        return WeightTarget.stacked(inner, E, layout)

    return kind(target(2 * I, H), target(H, I)), held


def backward_into(case, targets):
    settings = EngineSettings()
    weights = OURS.prepare_weights(*case.weights, settings)
    _, saved = OURS.forward(case.x, case.routing, weights, settings)
    OURS.backward(case.dout, saved, weights, targets)


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per expert"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_main_grad_of_every_layout(layout, stacked):
    case = make_case(700)
    wanted = run(case)
    targets, held = targets_of(layout, ParameterTargets, stacked)
    assert OURS.problem_of(targets, EngineSettings()) is None
    backward_into(case, targets)
    for name in ("dw1", "dw2"):
        assert torch.equal(targets.sums(name), wanted[name]), name
    # A second backward adds, and an expert without tokens is left alone.
    backward_into(case, targets)
    for name in ("dw1", "dw2"):
        assert torch.equal(targets.sums(name), 2 * wanted[name]), name
    for around in held:
        assert bool((around[:8] == 7.0).all()) and bool((around[-8:] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per expert"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_are_written_where_autograd_accumulates(layout, stacked, dtype):
    case = make_case(700)
    wanted = run(case)
    targets, held = targets_of(layout, FreshTargets, stacked, dtype, float("nan"))
    backward_into(case, targets)
    for name in ("dw1", "dw2"):
        # Zeros for the expert without tokens, and one rounding.
        assert torch.equal(targets.sums(name), wanted[name].to(dtype)), name
    for around in held:
        assert bool((around[:8] == 7.0).all()) and bool((around[-8:] == 7.0).all())


def test_frozen_experts_are_left_out():
    case = make_case(700)
    wanted = run(case)
    layout = WeightLayout(True, True)
    targets, _ = targets_of(layout, ParameterTargets, stacked=False)
    up = [t if e % 2 else None for e, t in enumerate(targets.up.tensors)]
    some = ParameterTargets(
        WeightTarget.per_expert(up, layout), WeightTarget.per_expert([None] * E, layout)
    )
    backward_into(case, some)
    for expert in range(E):
        part = wanted["dw1"][expert] if expert % 2 else torch.zeros_like(wanted["dw1"][expert])
        assert torch.equal(some.sums("dw1")[expert], part)
    assert some.sums("dw2") is None


# ---- other code ----


@pytest.mark.parametrize("arch", TILINGS)
def test_tiles_of_every_architecture(arch, monkeypatch, may_compile):
    """Compiled for this GPU in the tiles of another one."""
    use_tiles_of(arch, monkeypatch)
    check(case := make_case(seed=1), run(case))


def use_tiles_of(arch, monkeypatch):
    triton_engine._gpu.cache_clear()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    monkeypatch.setattr(triton_engine, "_gpu", lambda device: triton_engine._Gpu(arch, sms))


@pytest.fixture
def code_of_ampere(monkeypatch, tmp_path, may_compile):
    """Kernels are compiled for sm_80, and their PTX, which is mma.sync and cp.async, is assembled
    for this GPU. Returns the PTX of every kernel that ran.
    """
    seen = {}

    def compile_for_ampere(source, target=None, options=None, _env_vars=None):
        options = {**options, "arch": "sm80"}
        request = triton_kernel.TritonCompile(source, GPUTarget("cuda", 80, 32), options, _env_vars)
        artefact = request.compile()
        folder = tmp_path / str(len(seen))
        folder.mkdir()
        files = {}
        for name in artefact.manifest["files"]:
            files[name] = str(shutil.copy(artefact.file(name), folder / name))
        ptx = Path(next(path for name, path in files.items() if name.endswith(".ptx")))
        cubin = next(path for name, path in files.items() if name.endswith(".cubin"))
        command = [knobs.nvidia.ptxas.path, "-arch=sm_90a", str(ptx), "-o", cubin]
        subprocess.run(command, check=True, capture_output=True)
        seen[f"{source.name} {len(seen)}"] = ptx.read_text(encoding="utf-8")
        return CompiledKernel(source, files, request._hash)

    monkeypatch.setattr(triton_kernel, "compile_stored", compile_for_ampere)
    use_tiles_of("sm_80", monkeypatch)
    for kernel in KERNELS:
        kernel.device_caches.clear()
    yield seen
    for kernel in KERNELS:
        kernel.device_caches.clear()


@pytest.mark.parametrize(
    ("activation", "dtype", "bias"),
    [
        (SWIGLU, BF16, True),
        (ActivationType.GELU, FP16, False),
        (ActivationType.SITU_GLU, BF16, False),
    ],
    ids=["swiglu bf16 bias", "gelu fp16", "situ_glu bf16"],
)
def test_the_code_for_ampere(activation, dtype, bias, code_of_ampere):
    case = make_case(activation=activation, dtype=dtype, bias=bias)
    check(case, first := run(case))
    assert_same_bits(run(case), first)
    fill_free_memory(float("nan"))
    assert_same_bits(run(case), first)
    again = run(case, settings=EngineSettings(activation, recompute_z=True))
    assert_same_bits(again, first)
    assert all(".target sm_80" in ptx for ptx in code_of_ampere.values())
    products = [ptx for name, ptx in code_of_ampere.items() if name.split()[0] in GEMMS]
    assert len(products) >= 6
    assert all("mma.sync" in ptx and "cp.async" in ptx and "wgmma" not in ptx for ptx in products)
