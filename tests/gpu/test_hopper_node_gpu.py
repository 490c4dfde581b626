"""The node and `MoE` on the Hopper engine: chosen by itself, never waiting, capturable, on any
stream, never with stale weights.
"""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from gpu.device import LONG, captured, compiled_beforehand, waiting_is_an_error
from gpu.hopper_step import (
    FP8,
    E,
    H,
    I,
    K,
    backward,
    forward,
    main_grads,
    make_batch,
    make_experts,
    make_node,
    run,
)
from node.direct_layers import assert_same_bits, relative

from sonicmoe import MoE, SonicMoEConfig
from sonicmoe.engine.compile_plan import plan
from sonicmoe.engine.hopper_passes import passes_on
from sonicmoe.enums import ActivationType
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.functional import call
from sonicmoe.gradients import destinations
from sonicmoe.jit.cuda_source import CudaSource
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.kernels.sm90 import engine_sources
from sonicmoe.quant import gpu
from sonicmoe.routing import backends
from sonicmoe.routing.build import num_rows_bound

pytestmark = pytest.mark.gpu

AUTO = SonicMoEConfig(fp8_mode="perf")
EMULATION = SonicMoEConfig(fp8_mode="perf", engine="reference")
PLAIN_WGRAD = SonicMoEConfig(fp8_mode="perf", engine="hopper", fp8_wgrad=False)
BF16 = SonicMoEConfig(fp8_mode="off", engine="bf16")
UNFIT = (2, 256, 96)  # E, H, I of a layer that the FP8 engine has no kernels for


compiled = compiled_beforehand(
    *((config, (E, H, I)) for config in (FP8, PLAIN_WGRAD, BF16)), (BF16, UNFIT)
)


def layer(seed=0, config=FP8, **options):
    """`(node, experts)`."""
    experts = make_experts(seed)
    return make_node(experts, config, **options), experts


def whole_step(node, experts, *batches):
    """Results of every micro-batch, then every main_grad; no gradient waits for `step()`."""
    results = [tensor for batch in batches for tensor in run(node, batch)]
    assert node.gradient_bytes == 0
    node.step()
    return results + main_grads(experts)


def engine_lines(caplog):
    lines = (record.getMessage() for record in caplog.records)
    return [line for line in lines if line.startswith("engine ")]


class TestChoice:
    @pytest.fixture(autouse=True)
    def undecided(self, caplog):
        call._choice.cache_clear()
        with caplog.at_level(logging.INFO, logger="sonicmoe"):
            yield

    def test_node(self, caplog):
        for seed in range(2):
            whole_step(*layer(seed, AUTO), make_batch())
        (line,) = engine_lines(caplog)
        assert line.startswith("engine hopper on cuda:0: a Hopper GPU")

    def test_moe(self, caplog):
        moe = MoE(E, K, H, I).to("cuda", torch.bfloat16)
        for tokens in (64, 200):
            out, loss = moe(
                torch.randn(tokens, H, device="cuda", dtype=torch.bfloat16), use_fp8=True
            )
            (out.float().sum() + loss).backward()
        (line,) = engine_lines(caplog)
        assert line.startswith("engine hopper on cuda:0: a Hopper GPU")

    def test_a_size_without_a_kernel_falls_back_out_loud(self, caplog):
        experts = make_experts(0, *UNFIT)
        run(make_node(experts, AUTO), make_batch(50, 0, 256, 2, 1))
        (line,) = engine_lines(caplog)
        assert line.startswith("engine bf16 on cuda:0: not hopper: H is 256 and I is 96")
        assert line.endswith("without FP8")
        (record,) = (record for record in caplog.records if record.getMessage() == line)
        assert record.levelname == "WARNING"


class TestNumbers:
    def test_node_against_the_emulation(self):
        ours, theirs = (
            whole_step(*layer(config=config), make_batch(), make_batch(300, 1))
            for config in (FP8, EMULATION)
        )
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert relative(a, b) <= 0.03, index

    def test_moe_against_the_emulation(self):
        torch.manual_seed(0)
        moe = MoE(E, K, H, I, std=H**-0.5).to("cuda", torch.bfloat16)
        x = torch.randn(500, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dout, found = torch.randn_like(x), []
        for config in (FP8, EMULATION):
            with config.activate():
                out, _ = moe(x, use_fp8=True)
                found.append((out, *torch.autograd.grad(out, (x, *moe.parameters()), dout)))
        for name, a, b in zip(("out", "x", *dict(moe.named_parameters())), *found, strict=True):
            # What reaches the router is what is left of each token's probabilities' gradients after
            # their mean.
            assert relative(a, b) <= (0.06 if name == "router.weight" else 0.03), name

    def test_an_empty_micro_batch(self):
        node, experts = layer()
        empty, batch = make_batch(0), make_batch()
        wanted = whole_step(*layer(), batch)
        out, dx, dprobs = run(node, empty)
        assert out.shape == dx.shape == (0, H) and dprobs.shape == (0, K)
        assert_same_bits(whole_step(node, experts, batch), wanted)


def fused_layer(config=FP8, **options):
    """`layer` on two stacked parameters, with `main_grad`s."""
    experts = make_experts()
    stacked = [
        torch.stack([getattr(e, name).weight.detach() for e in experts])
        for name in ("up_gate_proj", "down_proj")
    ]
    weights = torch.nn.ParameterList(torch.nn.Parameter(weight) for weight in stacked)
    for weight in weights:
        weight.main_grad = torch.zeros(weight.shape, device=weight.device)
    return SonicMoEMlpNode.from_fused(*weights, config=config, **options), weights


def memory_mode(**changes):
    return SonicMoEConfig(**{"fp8_mode": "perf", "engine": "hopper"} | changes)


STEP, SPLIT = {"flush": "step"}, {"flush": "step", "split_wgrad": True}
SYNC_FREE = {
    "plain": (layer, FP8, {}),
    "iso_weight and recompute_z": (layer, memory_mode(iso_weight=True, recompute_z=True), {}),
    "mem": (layer, memory_mode(fp8_mode="mem"), {}),
    "plain wgrad": (layer, PLAIN_WGRAD, {}),
    "step": (layer, FP8, STEP),
    "split_wgrad": (layer, FP8, SPLIT),
    "from_fused": (fused_layer, FP8, {}),
    "bf16": (layer, BF16, {}),
    "bf16, step": (layer, BF16, STEP),
    "bf16, split_wgrad": (layer, BF16, SPLIT),
    "bf16, from_fused": (fused_layer, BF16, {}),
}


@pytest.mark.parametrize(("make", "config", "options"), SYNC_FREE.values(), ids=SYNC_FREE)
def test_waits_for_nothing(make, config, options):
    node, weights = make(config=config, **options)
    batches = [make_batch(tokens, seed) for seed, tokens in enumerate((700, 333, 1500))]
    counts = [int((batches[2].indices == e).sum()) for e in range(E)]
    for _ in range(3):  # over the first steps the guard of a forgotten step() compares values
        run(node, batches[0])
        node.step()
    with waiting_is_an_error():
        for _ in range(2):
            for batch in batches:
                run(node, batch)
            backward(forward(node, batches[2], counts), batches[2])
            node.step()
    assert all(bool(weight.main_grad.any()) for weight in weights.parameters()), "computed nothing"


@pytest.mark.parametrize(
    "wait", [torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.nonzero], ids=lambda f: f.__name__
)
def test_a_wait_would_be_seen(wait):
    with pytest.raises(RuntimeError, match="synchronizing"), waiting_is_an_error():
        wait(torch.ones(1, device="cuda"))


def test_captured_in_a_cuda_graph():
    """Forward, backward and step; replayed with other tokens, other routing and other weights, all
    copied in place.
    """
    node, experts = layer()
    static = make_batch()

    def step():
        results = run(node, static)
        node.step()
        return results

    def before():
        for _ in range(3):
            step()
        # so that the graph holds the check for changes, and no unconditional quantisation
        node.prequantize_weights()

    graph, results = captured(step, before)
    for seed in (1, 2, 2):
        fresh_node, fresh = layer(seed)
        batch = make_batch(seed=seed)
        wanted = whole_step(fresh_node, fresh, batch)
        with torch.no_grad():
            for mine, its in zip(static.tensors, batch.tensors, strict=True):
                mine.copy_(its)
            for mine, its in zip(experts.parameters(), fresh.parameters(), strict=True):
                mine.copy_(its)
                mine.main_grad.zero_()
        graph.replay()
        assert_same_bits([*results, *main_grads(experts)], wanted)


def test_micro_batches_on_a_side_stream():
    batches = [make_batch(tokens, seed) for seed, tokens in enumerate((700, 129, 1024))]
    wanted = whole_step(*layer(), *batches)
    node, experts = layer()
    originals = [batch.x.detach().clone() for batch in batches]
    with torch.no_grad():
        for batch in batches:
            batch.x.fill_(float("nan"))  # what the caller's stream would read
    torch.cuda.synchronize()
    side, results = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for batch, original in zip(batches, originals, strict=True):
            with torch.no_grad():
                batch.x.copy_(original)
            results += run(node, batch)
    torch.cuda.current_stream().wait_stream(side)
    node.step()
    assert_same_bits(results + main_grads(experts), wanted)


@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_two_streams_share_a_node(config):
    """The first is late, and nobody waits for it: the second needs the weights it prepares, and
    adds to the sums it adds to.
    """
    batches = [make_batch(tokens, seed) for seed, tokens in enumerate((700, 513))]
    wanted = whole_step(*layer(config=config), *batches)
    node, experts = layer(config=config)
    streams, results = [torch.cuda.Stream() for _ in batches], []
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(LONG)
    for stream, batch in zip(streams, batches, strict=True):
        with torch.cuda.stream(stream):
            results += run(node, batch)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    node.step()
    assert_same_bits(results + main_grads(experts), wanted)


@pytest.mark.parametrize(
    ("order", "config"),
    [((0, 1, 2), FP8), ((2, 1, 0), memory_mode(fp8_mode="mem")), ((1, 2, 0), FP8)],
    ids=["in order", "backwards, mem", "another"],
)
def test_several_forwards_outstanding(config, order):
    batches = [make_batch(tokens, seed) for seed, tokens in enumerate((700, 129, 1024))]
    one_by_one = whole_step(*layer(), *batches)
    node, experts = layer(config=config)
    outs = [forward(node, batch) for batch in batches]
    gradients_of = {index: backward(outs[index], batches[index]) for index in order}
    node.step()
    results = [t for index in range(3) for t in (outs[index].detach(), *gradients_of[index])]
    assert_same_bits(results, one_by_one[:9])
    for a, b in zip(main_grads(experts), one_by_one[9:], strict=True):
        assert relative(a, b) <= 1e-6  # three fp32 sums in another order


@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_split_weight_gradients_are_the_same_bits(config):
    """Whatever the caller writes into memory that a backward has dropped."""
    batches = [make_batch(tokens, seed) for seed, tokens in enumerate((700, 4096, 300))]
    wanted = whole_step(*layer(config=config), *batches)
    for _ in range(3):
        (node, experts), results = layer(config=config, split_wgrad=True), []
        for batch in batches:
            results += run(node, batch)
            torch.full([len(batch.x) * K * 4, 2 * I], float("nan"), device="cuda")
        node.step()
        assert_same_bits(results + main_grads(experts), wanted)


def test_split_weight_gradients_outlive_the_callers_memory():
    """The side stream is late, and the caller's goes on and takes every byte that the backward has
    dropped.
    """
    (node, experts), batch = layer(**SPLIT), make_batch()
    wanted = whole_step(*layer(), batch)[3:]
    run(node, batch)
    node.step()
    for gradient in main_grads(experts):
        gradient.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(node._state.wgrad_queue._stream):
        torch.cuda._sleep(LONG)
    run(node, batch)
    rows = num_rows_bound(len(batch.x) * K, E, 128)
    sizes = [n * rows for n in (I, 2 * I, H)] * 8
    held = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sizes]
    node.step()
    assert_same_bits(main_grads(experts), wanted)
    del held


def test_accumulators_outlive_their_node():
    """The node is gone while its side stream is still to add: the memory that the caller gets next
    must not be added to.
    """
    (node, experts), batch = layer(config=AUTO, split_wgrad=True), make_batch()
    run(node, batch)
    node.step()
    torch.cuda.synchronize()
    bytes_held = node.gradient_bytes
    with torch.cuda.stream(node._state.wgrad_queue._stream):
        torch.cuda._sleep(2 * LONG)
    run(node, batch)
    del node, experts
    gc.collect()
    sizes = (bytes_held // 12, bytes_held // 6)
    taken = [torch.zeros(size, device="cuda") for size in sizes for _ in range(8)]
    torch.cuda.synchronize()
    assert bytes_held > 0 and not any(bool(tensor.any()) for tensor in taken)


class TestWeightsThatChange:
    def test_without_a_step(self):
        """By an optimizer that the node is not told of, and through `.data`, which moves no version
        counter.
        """
        node, experts = layer()
        batch = make_batch()
        optimizer = torch.optim.AdamW(experts.parameters(), lr=1e-2, fused=True)
        seen = [run(node, batch)[0]]
        for change in (optimizer.step, lambda: [p.data.mul_(-0.75) for p in experts.parameters()]):
            for parameter in experts.parameters():
                parameter.grad = torch.randn_like(parameter)
            change()
            other = make_experts()
            other.load_state_dict(experts.state_dict())
            got = run(node, batch)
            assert_same_bits(got, run(make_node(other), batch))
            assert all(relative(got[0], before) > 0.01 for before in seen)
            seen.append(got[0])

    def test_between_a_forward_and_its_backward(self):
        node, experts = layer()
        batch = make_batch()
        late = forward(node, batch)
        with torch.no_grad():
            experts[0].down_proj.weight.mul_(0.5)
        run(node, batch)
        with pytest.raises(RuntimeError, match="between this forward and its backward"):
            backward(late, batch)

    def test_one_expert_alone(self):
        node, experts = layer()
        batch = make_batch()
        before = run(node, batch)[0]
        experts[3].down_proj.weight.data.neg_()
        after, served = run(node, batch)[0], (batch.indices == 3).any(1)
        assert torch.equal(after[~served], before[~served])
        assert bool((after[served] != before[served]).any(1).all())

    def test_of_a_moe_layer(self):
        torch.manual_seed(0)
        moe, x = MoE(E, K, H, I, std=0.1).to("cuda", torch.bfloat16), make_batch().x.detach()
        with FP8.activate():
            before, _ = moe(x, use_fp8=True)
            moe.c_fc.weight.data.neg_()
            after, _ = moe(x, use_fp8=True)
            other = MoE(E, K, H, I).to("cuda", torch.bfloat16)
            other.load_state_dict(moe.state_dict())
            assert torch.equal(after, other(x, use_fp8=True)[0])
        assert relative(after, before) > 0.01


def test_warm_up_plans_every_kernel_of_a_step(monkeypatch):
    """What a whole step loads is what warm-up compiled: nothing that only another test has put into
    the cache.
    """
    loaded, load = [], CudaSource.load

    def remember(source, *arguments):
        loaded.append(source)
        return load(source, *arguments)

    monkeypatch.setattr(CudaSource, "load", remember)
    for remembered in (passes_on, gpu._kernels, backends._choose, destinations._kernel_on):
        remembered.cache_clear()
    results = whole_step(*layer(), make_batch())
    assert all(bool(torch.isfinite(tensor).all()) for tensor in results)
    planned = set(plan(ModelSpec(E, H, I), FP8.resolve()))
    assert set(engine_sources("sm_90a", ActivationType.SWIGLU)) <= set(loaded) <= planned
