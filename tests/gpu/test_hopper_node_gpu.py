"""The node and `MoE` on the Hopper engine: chosen by itself, never waiting, capturable, on any
stream, never with stale weights.
"""

from __future__ import annotations

import gc
import logging

import pytest
import torch
from gpu.device import LONG, captured, compiled_beforehand, waiting_is_an_error
from gpu.hopper_step import FP8, E, H, I, K, T, layer
from node.direct_layers import assert_same_bits, relative

from sonicmoe import MoE, SonicMoEConfig
from sonicmoe.engine.compile_plan import plan
from sonicmoe.engine.hopper_passes import passes_on
from sonicmoe.enums import ActivationType
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


def whole_step(made, *batches):
    """Results of every micro-batch, then every main_grad; no gradient waits for `step()`."""
    results = [tensor for batch in batches for tensor in made.run(batch)]
    assert made.node.gradient_bytes == 0
    made.node.step()
    return results + made.main_grads


def batches_of(*tokens):
    made = layer()
    return [made.batch(seed, count) for seed, count in enumerate(tokens)]


def forward(made, batch):
    x, indices, probs, _ = batch
    return made.node(x, None, indices, probs)


def backward(out, batch):
    """`(dx, dprobs)`"""
    x, _, probs, dout = batch
    out.backward(dout)
    found = x.grad, probs.grad
    x.grad = probs.grad = None
    return found


def engine_lines(caplog):
    lines = (record.getMessage() for record in caplog.records)
    return [line for line in lines if line.startswith("engine ")]


class TestChoice:
    @pytest.fixture(autouse=True)
    def undecided(self, caplog):
        call._made.clear()  # plans of earlier tests have announced their engines
        with caplog.at_level(logging.INFO, logger="sonicmoe"):
            yield

    def test_node(self, caplog):
        for seed in range(2):
            whole_step(made := layer(AUTO, seed=seed), made.batch())
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
        made = layer(AUTO, sizes=(*UNFIT, 1), tokens=50)
        made.run(made.batch())
        (line,) = engine_lines(caplog)
        assert line.startswith("engine bf16 on cuda:0: not hopper: H is 256 and I is 96")
        assert line.endswith("without FP8")
        (record,) = (record for record in caplog.records if record.getMessage() == line)
        assert record.levelname == "WARNING"


class TestNumbers:
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
        made, (batch,) = layer(), batches_of(700)
        wanted = whole_step(layer(), batch)
        out, dx, dprobs = made.run([tensor.detach()[:0] for tensor in batch])
        assert out.shape == dx.shape == (0, H) and dprobs.shape == (0, K)
        assert_same_bits(whole_step(made, batch), wanted)


def memory_mode(**changes):
    return SonicMoEConfig(**{"fp8_mode": "perf", "engine": "hopper"} | changes)


STEP, SPLIT, FUSED = (
    {"flush": "step"},
    {"flush": "step", "split_wgrad": True},
    {"arrangement": "fused"},
)
SYNC_FREE = {
    "plain": (FP8, {}),
    "iso_weight and recompute_z": (memory_mode(iso_weight=True, recompute_z=True), {}),
    "mem": (memory_mode(fp8_mode="mem"), {}),
    "plain wgrad": (PLAIN_WGRAD, {}),
    "step": (FP8, STEP),
    "split_wgrad": (FP8, SPLIT),
    "from_fused": (FP8, FUSED),
    "bf16": (BF16, {}),
    "bf16, step": (BF16, STEP),
    "bf16, split_wgrad": (BF16, SPLIT),
    "bf16, from_fused": (BF16, FUSED),
}


@pytest.mark.parametrize(("config", "options"), SYNC_FREE.values(), ids=SYNC_FREE)
def test_waits_for_nothing(config, options):
    made, batches = layer(config, **options), batches_of(700, 333, 1500)
    counts = [int((batches[2][1] == e).sum()) for e in range(E)]

    def with_counts(x, _, *rest):
        return made.node(x, counts, *rest)

    for _ in range(3):  # over the first steps the guard of a forgotten step() compares values
        made.run(batches[0])
        made.node.step()
    with waiting_is_an_error():
        for _ in range(2):
            for batch in batches:
                made.run(batch)
            made.run(batches[2], node=with_counts)
            made.node.step()
    # One expert has no token.
    idle = [not bool(gradient.any()) for gradient in made.main_grads]
    assert sum(idle) == (0 if len(idle) == 2 else 2), "computed nothing"


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
    made = layer()
    static = made.batch(0, T)

    def step():
        results = made.run(static)
        made.node.step()
        return results

    def before():
        for _ in range(3):
            step()
        # so that the graph holds the check for changes, and no unconditional quantisation
        made.node.prequantize_weights()

    graph, results = captured(step, before)
    for seed in (1, 2, 2):
        fresh = layer(seed=seed)
        batch = fresh.batch(seed, T)
        wanted = whole_step(fresh, batch)
        with torch.no_grad():
            for mine, its in zip((*static, *made.weights), (*batch, *fresh.weights), strict=True):
                mine.copy_(its)
        made.clear()
        graph.replay()
        assert_same_bits([*results, *made.main_grads], wanted)


def test_micro_batches_on_a_side_stream():
    batches = batches_of(700, 129, 1024)
    wanted, made = whole_step(layer(), *batches), layer()
    originals = [x.detach().clone() for x, *_ in batches]
    with torch.no_grad():
        for x, *_ in batches:
            x.fill_(float("nan"))  # what the caller's stream would read
    torch.cuda.synchronize()
    side, results = torch.cuda.Stream(), []
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        for batch, original in zip(batches, originals, strict=True):
            with torch.no_grad():
                batch[0].copy_(original)
            results += made.run(batch)
    torch.cuda.current_stream().wait_stream(side)
    made.node.step()
    assert_same_bits(results + made.main_grads, wanted)


@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_two_streams_share_a_node(config):
    """The first is late, and nobody waits for it: the second needs the weights it prepares, and
    adds to the sums it adds to.
    """
    batches = batches_of(700, 513)
    wanted, made = whole_step(layer(config), *batches), layer(config)
    streams, results = [torch.cuda.Stream() for _ in batches], []
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(LONG)
    for stream, batch in zip(streams, batches, strict=True):
        with torch.cuda.stream(stream):
            results += made.run(batch)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    made.node.step()
    assert_same_bits(results + made.main_grads, wanted)


@pytest.mark.parametrize(
    ("order", "config"),
    [((0, 1, 2), FP8), ((2, 1, 0), memory_mode(fp8_mode="mem")), ((1, 2, 0), FP8)],
    ids=["in order", "backwards, mem", "another"],
)
def test_several_forwards_outstanding(config, order):
    batches = batches_of(700, 129, 1024)
    one_by_one, made = whole_step(layer(), *batches), layer(config)
    outs = [forward(made, batch) for batch in batches]
    gradients_of = {index: backward(outs[index], batches[index]) for index in order}
    made.node.step()
    results = [t for index in range(3) for t in (outs[index].detach(), *gradients_of[index])]
    assert_same_bits(results, one_by_one[:9])
    for a, b in zip(made.main_grads, one_by_one[9:], strict=True):
        assert relative(a, b) <= 1e-6  # three fp32 sums in another order


@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_split_weight_gradients_are_the_same_bits(config):
    """Whatever the caller writes into memory that a backward has dropped."""
    batches = batches_of(700, 4096, 300)
    wanted = whole_step(layer(config), *batches)
    for _ in range(3):
        made, results = layer(config, split_wgrad=True), []
        for batch in batches:
            results += made.run(batch)
            torch.full([len(batch[0]) * K * 4, 2 * I], float("nan"), device="cuda")
        made.node.step()
        assert_same_bits(results + made.main_grads, wanted)


def test_split_weight_gradients_outlive_the_callers_memory():
    """The side stream is late, and the caller's goes on and takes every byte that the backward has
    dropped.
    """
    made, (batch,) = layer(**SPLIT), batches_of(700)
    wanted = whole_step(layer(), batch)[3:]
    made.run(batch)
    made.node.step()
    made.clear()
    torch.cuda.synchronize()
    with torch.cuda.stream(made.node._state.wgrad_queue._stream):
        torch.cuda._sleep(LONG)
    made.run(batch)
    rows = num_rows_bound(len(batch[0]) * K, E, 128)
    sizes = [n * rows for n in (I, 2 * I, H)] * 8
    held = [torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda") for size in sizes]
    made.node.step()
    assert_same_bits(made.main_grads, wanted)
    del held


def test_accumulators_outlive_their_node():
    """The node is gone while its side stream is still to add: the memory that the caller gets next
    must not be added to.
    """
    made, (batch,) = layer(AUTO, split_wgrad=True), batches_of(700)
    made.run(batch)
    made.node.step()
    torch.cuda.synchronize()
    bytes_held = made.node.gradient_bytes
    with torch.cuda.stream(made.node._state.wgrad_queue._stream):
        torch.cuda._sleep(2 * LONG)
    made.run(batch)
    del made
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
        made, (batch,) = layer(), batches_of(700)
        optimizer = torch.optim.AdamW(made.weights, lr=1e-2, fused=True)
        seen = [made.run(batch)[0]]
        for change in (optimizer.step, lambda: [w.data.mul_(-0.75) for w in made.weights]):
            for weight in made.weights:
                weight.grad = torch.randn_like(weight)
            change()
            other = layer()
            for mine, its in zip(other.weights, made.weights, strict=True):
                mine.data.copy_(its.data)
            got = made.run(batch)
            assert_same_bits(got, other.run(batch))
            assert all(relative(got[0], before) > 0.01 for before in seen)
            seen.append(got[0])

    def test_between_a_forward_and_its_backward(self):
        made, (batch,) = layer(), batches_of(700)
        late = forward(made, batch)
        with torch.no_grad():
            made.experts[0].down_proj.weight.mul_(0.5)
        made.run(batch)
        with pytest.raises(RuntimeError, match="between this forward and its backward"):
            backward(late, batch)


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
    results = whole_step(layer(), *batches_of(700))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in results)
    planned = set(plan(ModelSpec(E, H, I), FP8.resolve()))
    assert set(engine_sources("sm_90a", ActivationType.SWIGLU)) <= set(loaded) <= planned
