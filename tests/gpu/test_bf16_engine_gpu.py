"""The BF16 engine on the GPU against the reference engine, per expert and per block of 128 tokens,
and its whole contract: on the GEMM class of this GPU's family, and on that for sm120, whose
instructions Hopper has too.

The yardstick of every comparison is the reference engine in fp32; what the reference engine loses
by rounding where this one rounds is what this one may lose.
"""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import pytest
import torch
from gpu.activation_cases import OWN, gain_of
from public_models import EXPERT_SIZES

from sonicmoe.engine.bf16 import Bf16Engine, ExpertRows
from sonicmoe.engine.capabilities import Workload
from sonicmoe.engine.interface import EngineSettings, NativeBuffer
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.select import unavailable
from sonicmoe.enums import ActivationType, EngineName, is_glu
from sonicmoe.jit import default_cache, no_compile
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.jit.warmup import warm_up
from sonicmoe.kernels import cuda_sources, quack_gemm
from sonicmoe.kernels.quack_gemm import (
    MlpShape,
    all_kernels,
    candidates,
    expert_rows_source,
    grouped_gemms,
)
from sonicmoe.kernels.quack_tilings import FAMILIES, PRODUCTS, served_by
from sonicmoe.routing.build import build_routing

pytestmark = pytest.mark.gpu

SWIGLU, ARCH = ActivationType.SWIGLU, "sm_90a"
BF16, FP16 = torch.bfloat16, torch.float16
H, I, E, K = 512, 384, 6, 3
OURS, REFERENCE = Bf16Engine(), ReferenceEngine()
CLASSES = ("sm90", "sm120")


def tilings(family):
    """As this GPU runs them: without cluster launch control."""
    shape = MlpShape(H, I, SWIGLU, arch=ARCH, family=family)
    return [(p, config) for p in PRODUCTS for config, _ in candidates(p, shape)]


@pytest.fixture(scope="module", params=CLASSES, autouse=True)
def family(request):
    """Whose GEMM class the engine runs; its numbers are compared with the same yardstick."""
    with served_by(ARCH, request.param):
        yield request.param


@pytest.fixture(scope="module", autouse=True)
def compiled(family):
    """Every variant of this module, built in parallel; nothing below may compile."""
    shapes = [
        MlpShape(H, I, activation, "bfloat16", bias, arch=ARCH)
        for activation in ActivationType
        for bias in (False, True)
    ]
    shapes += [MlpShape(H, I, kind, parameters=own, arch=ARCH) for kind, own in OWN.items()]
    shapes += [
        MlpShape(H, I, SWIGLU, "float16", arch=ARCH),
        *(MlpShape(h, i, SWIGLU, arch=ARCH) for h, i in EXPERT_SIZES.values()),
    ]
    shapes += [MlpShape(128, 1280, SWIGLU, arch=ARCH)]
    jobs = [*cuda_sources("sm_90a"), expert_rows_source("sm_90a")]
    jobs += [
        kernel
        for shape in shapes
        for kernel in all_kernels(shape, recompute_z=shape.activation is SWIGLU)
    ]
    jobs += [forced(product, config) for product, config in tilings(family)]
    report = warm_up(
        ModelSpec(E, H, I),
        default_cache(),
        jobs=os.cpu_count(),
        compile_jobs=tuple(dict.fromkeys(jobs)),
    )
    assert report.complete, [outcome.message for outcome in report.kernels if outcome.message]
    gemms = [job for job in jobs if job.name.startswith("bf16_")]
    assert gemms and {dict(job.statics)["family"] for job in gemms} == {family}
    with no_compile():
        yield


def forced(product, config):
    """The variant of one product with one tiling."""
    make, options = (
        getattr(quack_gemm, f"{product}_kernel"),
        {"store_z": True} if product == "up" else {},
    )
    return make(MlpShape(H, I, SWIGLU, arch=ARCH), config=config, **options)


@dataclass
class Case:
    """Operands on the GPU in one dtype; `weights` as native w1, w2, b1, b2."""

    x: torch.Tensor
    dout: torch.Tensor
    indices: torch.Tensor
    probs: torch.Tensor
    weights: tuple
    activation: ActivationType
    parameters: tuple = ()

    @property
    def routing(self):
        return build_routing(self.indices, self.probs, int(self.weights[0].shape[0]))

    def to(self, dtype):
        w1, w2, b1, b2 = self.weights
        weights = (w1.to(dtype), w2.to(dtype), b1, b2)
        return Case(
            self.x.to(dtype),
            self.dout.to(dtype),
            self.indices,
            self.probs,
            weights,
            self.activation,
            self.parameters,
        )


def make_case(
    tokens=700, *, hidden=H, intermediate=I, experts=E, topk=K, activation=SWIGLU, bias=False, dtype=BF16, invalid=0.3, empty=(4,), seed=0
):  # fmt: skip
    """Random operands of unit scale; both sentinels at `invalid` of the slots, no token for the
    experts in `empty`.
    """
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size, scale=1.0):
        return torch.randn(size, generator=generator, device="cuda") * scale

    scores = torch.rand((tokens, experts), generator=generator, device="cuda")
    scores[:, list(empty)] = -1.0
    indices = scores.topk(topk, 1).indices
    indices = torch.where(scores.gather(1, indices) < 0, -1, indices)
    dropped = torch.rand((tokens, topk), generator=generator, device="cuda") < invalid
    sentinel = torch.where(
        torch.rand((tokens, topk), generator=generator, device="cuda") < 0.5, -1, experts
    )
    probs = torch.rand((tokens, topk), generator=generator, device="cuda") + 0.05
    n1 = intermediate * (2 if is_glu(activation) else 1)
    gain = gain_of(activation)
    weights = (
        normal(experts, n1, hidden, scale=gain * hidden**-0.5).to(dtype),
        normal(experts, hidden, intermediate, scale=intermediate**-0.5).to(dtype),
        normal(experts, n1, scale=0.3) if bias else None,
        normal(experts, hidden, scale=0.3) if bias else None,
    )
    x, dout = normal(tokens, hidden).to(dtype), normal(tokens, hidden).to(dtype)
    return Case(x, dout, torch.where(dropped, sentinel, indices), probs, weights, activation)


def run(case, engine=OURS, *, accumulators=None, settings=None):
    """Everything a forward and a backward give, by name."""
    own = case.parameters
    settings = settings or EngineSettings(case.activation, activation_parameters=own)
    weights = engine.prepare_weights(*case.weights, settings)
    routing = case.routing
    out, saved = engine.forward(case.x, routing, weights, settings)
    w1, w2, b1, _ = case.weights
    accumulators = accumulators or NativeBuffer.zeros(
        int(w1.shape[0]),
        int(w1.shape[1]),
        int(w1.shape[2]),
        int(w2.shape[2]),
        b1 is not None,
        "cuda",
    )
    dx, dprobs = engine.backward(case.dout, saved, weights, accumulators)
    named = {
        "out": out,
        "dx": dx,
        "dprobs": dprobs,
        "dw1": accumulators.dw1,
        "dw2": accumulators.dw2,
    }
    if accumulators.db1 is not None:
        named |= {"db1": accumulators.db1, "db2": accumulators.db2}
    return named


def relative(actual, wanted):
    """Relative RMSE along all but the first dimension; the plain norm where nothing is wanted."""
    flat = [t.double().reshape(t.shape[0], -1) for t in (actual, wanted)]
    error, norm = (flat[0] - flat[1]).norm(dim=1), flat[1].norm(dim=1)
    return torch.where(norm > 0, error / norm.clamp(min=1e-300), error)


def blocks(tensor, rows=128):
    """`[T, H]` -> `[T / 128, 128 H]`, the last block filled up with zeros."""
    missing = -tensor.shape[0] % rows
    return torch.nn.functional.pad(tensor.double(), (0, 0, 0, missing)).reshape(
        -1, rows * tensor.shape[1]
    )


def per_expert(dprobs, case):
    """`[T, K]` -> `[E, T * K]`: the slots of each expert."""
    flat, index = dprobs.double().reshape(-1), case.indices.reshape(-1)
    return torch.stack(
        [torch.where(index == e, flat, 0.0) for e in range(int(case.weights[0].shape[0]))]
    )


def check(case, actual=None):
    """Assert that no tensor, in any expert or block, is further from fp32 than the reference
    engine's rounding puts it.
    """
    actual = actual or run(case)
    exact, rounded = run(case.to(torch.float32), REFERENCE), run(case, REFERENCE)
    for name, got in actual.items():
        split = {
            "out": blocks,
            "dx": blocks,
            "dprobs": functools.partial(per_expert, case=case),
        }.get(name, lambda t: t)
        assert got.shape == exact[name].shape, name
        assert bool(torch.isfinite(got).all()), name
        ours, theirs = (relative(split(t), split(exact[name])) for t in (got, rounded[name]))
        # db1 sums dz as it is stored; the reference engine sums it before rounding to bf16, whose
        # relative RMSE is 1.7e-3.
        slack = 3e-3 if name == "db1" else 2e-4
        assert bool((ours <= 1.2 * theirs + slack).all()), (name, ours.tolist(), theirs.tolist())
    invalid = (case.indices < 0) | (case.indices >= int(case.weights[0].shape[0]))
    assert bool((actual["dprobs"][invalid] == 0).all())
    assert bool((actual["out"][invalid.all(1)] == 0).all()) and bool(
        (actual["dx"][invalid.all(1)] == 0).all()
    )


def assert_same_bits(actual, wanted, names=None):
    for name in names or wanted:
        assert torch.equal(actual[name], wanted[name]), name


def test_this_gpu_can_run_it():
    assert unavailable(EngineName.BF16, "cuda:0") is None
    fp32 = Workload(EngineSettings(), H, I, "float32")
    assert "float32" in unavailable(EngineName.BF16, "cuda:0", fp32)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", ActivationType, ids=lambda a: a.value)
def test_every_activation(activation, bias):
    check(make_case(activation=activation, bias=bias))


@pytest.mark.parametrize("activation", OWN, ids=lambda a: a.value)
def test_parameters_of_a_layer(activation):
    case = make_case(activation=activation)
    defaults = run(case, engine=REFERENCE)["out"].float()
    case.parameters = OWN[activation]
    check(case)
    assert not torch.allclose(run(case)["out"].float(), defaults, rtol=0.1, atol=0.1)


def test_float16():
    check(make_case(dtype=FP16))


@pytest.mark.parametrize(("hidden", "intermediate"), EXPERT_SIZES.values(), ids=EXPERT_SIZES)
def test_sizes_of_public_models(hidden, intermediate):
    few = hidden * intermediate > 2**25
    options = {"experts": 2, "empty": ()} if few else {"experts": 4, "empty": (1,)}
    check(make_case(300, hidden=hidden, intermediate=intermediate, topk=2, **options))


@pytest.mark.parametrize(
    ("family", "product", "config"),
    [(family, *tiling) for family in CLASSES for tiling in tilings(family)],
    indirect=["family"],
    ids=str,
)
def test_every_tiling(family, product, config, monkeypatch):
    """Also at sizes that no tile divides: 512 = 2 x 192 + 128, 768 = 3 x 256, 384 = 256 + 128."""
    monkeypatch.setitem(FAMILIES[family].candidates, product, ((config, 1.0),))
    grouped_gemms.cache_clear()
    try:
        check(make_case(seed=1))
    finally:
        grouped_gemms.cache_clear()


@pytest.mark.parametrize("tokens", [1, 2, 127, 128, 129, 255, 256, 257, 4095])
def test_counts_around_the_tile(tokens):
    check(make_case(tokens, experts=2, topk=1, invalid=0.0, empty=(0,)))


@pytest.mark.parametrize(
    ("tokens", "options"),
    [
        (3000, {"invalid": 0.99}),
        (64, {"invalid": 1.0}),
        (513, {"topk": 1, "invalid": 0.0, "empty": (0, 1, 2, 4, 5)}),
    ],
    ids=["99 % invalid", "all invalid", "one expert"],
)
def test_uneven_routing(tokens, options):
    check(make_case(tokens, **options))


def test_many_experts():
    check(make_case(600, experts=130, topk=4, empty=(0, 1, 64, 129)))


def test_no_tokens():
    case = make_case(5)
    case = Case(case.x[:0], case.dout[:0], case.indices[:0], case.probs[:0], case.weights, SWIGLU)
    got = run(case)
    assert got["out"].shape == got["dx"].shape == (0, H) and got["dprobs"].shape == (0, K)
    assert bool((got["dw1"] == 0).all()) and bool((got["dw2"] == 0).all())


def test_equal_calls_give_equal_bits():
    case = make_case(2000, bias=True)
    assert_same_bits(run(case), run(case))


def fill_free_memory(value):
    """Leave `value` in what the allocator will hand out next, in large blocks and in small ones."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = [torch.full((2**28,), value, device="cuda")]
    held += [torch.full((2**17,), value, device="cuda") for _ in range(256)]
    torch.cuda.synchronize()
    del held


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("activation", [SWIGLU, ActivationType.RELU_SQ], ids=lambda a: a.value)
def test_unwritten_memory_is_never_read(activation, bias):
    case = make_case(333, activation=activation, bias=bias)
    fill_free_memory(0.0)
    zeroed = run(case)
    fill_free_memory(float("nan"))
    poisoned = run(case)
    torch.use_deterministic_algorithms(
        True, warn_only=True
    )  # fills every fresh `torch.empty` with NaN or the largest integer
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
    out, saved = OURS.forward(
        case.x, case.routing, OURS.prepare_weights(*case.weights, settings), settings, save=False
    )
    assert saved is None and torch.equal(out, stored["out"])


def test_other_spellings_of_the_operands():
    """A gradient in fp32, tokens in a strided view and off a 16-byte address, on another stream."""
    case = make_case(200)
    wanted = run(case)
    off = torch.empty(case.x.numel() + 1, dtype=BF16, device="cuda")[1:].reshape(case.x.shape)
    off.copy_(case.x)
    strided = torch.stack([case.x, case.x], 2)[..., 0]
    for x in (off, strided):
        assert_same_bits(
            run(Case(x, case.dout.float(), case.indices, case.probs, case.weights, SWIGLU)), wanted
        )
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
    big = Case(
        case.x.repeat(tokens // 128, 1), torch.zeros((tokens, hidden), dtype=BF16, device="cuda"),
        torch.zeros((tokens, 1), dtype=torch.int64, device="cuda"), case.probs.repeat(tokens // 128, 1), case.weights, SWIGLU,
    )  # fmt: skip
    big.dout[-128:] = case.dout
    assert tokens * 2 * intermediate > 2**31
    got = run(big)
    assert torch.equal(got["out"], alone["out"].repeat(tokens // 128, 1))
    for name in ("dx", "dprobs"):
        assert torch.equal(got[name][-128:], alone[name]), name
        assert bool((got[name][:-128] == 0).all()), name
    for name in ("dw1", "dw2"):
        assert torch.equal(got[name], alone[name]), name


@pytest.mark.parametrize(
    ("tokens", "experts", "invalid"), [(700, 6, 0.3), (40, 130, 0.5), (64, 3, 1.0), (2000, 2, 0.0)]
)
def test_rows_of_experts(tokens, experts, invalid):
    case = make_case(
        tokens, hidden=8, intermediate=8, experts=experts, topk=2, invalid=invalid, empty=()
    )
    routing = case.routing
    rows = ExpertRows.of(routing)
    assert rows.cu_rows.tolist() == routing.padded_offsets.tolist()
    token, wanted = routing.row_token.tolist(), [0] * routing.num_rows
    for first, count, padded in routing.expert_slices():
        wanted[first : first + padded] = token[first : first + count] + [
            token[first + count - 1]
        ] * (padded - count)
    assert rows.gather_index.tolist() == wanted


def test_counts_too_small_lose_rows_and_nothing_else():
    """The offsets then pass the rows there are: no product may follow them."""
    case, settings = make_case(600, invalid=0.0), EngineSettings()
    weights = OURS.prepare_weights(*case.weights, settings)
    routing = build_routing(case.indices, case.probs, E, [128] * E)
    assert int(routing.padded_offsets[-1]) > routing.num_rows
    assert int(ExpertRows.of(routing).cu_rows[-1]) == routing.num_rows
    out, saved = OURS.forward(case.x, routing, weights, settings)
    accumulators = NativeBuffer.zeros(E, 2 * I, H, I, False, "cuda")
    dx, dprobs = OURS.backward(case.dout, saved, weights, accumulators)
    torch.cuda.synchronize()
    lost = routing.slot_row < 0
    assert bool(lost.any()) and bool((dprobs[lost] == 0).all())
    assert all(
        bool(torch.isfinite(t).all()) for t in (out, dx, dprobs, accumulators.dw1, accumulators.dw2)
    )
