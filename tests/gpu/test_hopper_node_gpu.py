"""The node and `MoE` on the Hopper engine: chosen by itself, never waiting, capturable, on any
stream, never with stale weights.
"""

from __future__ import annotations

import logging

import pytest
import torch
from gpu.device import LONG, captured, compiled_beforehand, waiting_is_an_error
from gpu.hopper_step import FP8, E, H, I, K, T, layer
from node.direct_layers import assert_same_bits, relative

from sonicmoe import SonicMoEConfig
from sonicmoe.engine.compile_plan import plan
from sonicmoe.engine.hopper_passes import passes_on
from sonicmoe.enums import ActivationType
from sonicmoe.gradients import flush
from sonicmoe.jit.cuda_source import CudaSource
from sonicmoe.jit.plan import ModelSpec
from sonicmoe.kernels.sm90 import engine_sources
from sonicmoe.layer import plan as call_plan
from sonicmoe.quant import gpu
from sonicmoe.routing import backends

pytestmark = pytest.mark.gpu

AUTO = SonicMoEConfig(fp8_mode="perf")
PLAIN_WGRAD = SonicMoEConfig(fp8_mode="perf", engine="hopper", fp8_wgrad=False)
BF16 = SonicMoEConfig(fp8_mode="off", engine="bf16")


compiled = compiled_beforehand(*((config, (E, H, I)) for config in (FP8, PLAIN_WGRAD, BF16)))


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


def test_auto_chooses_it(caplog):
    call_plan._bound.clear()  # plans of earlier tests have announced their engines
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        for seed in range(2):
            whole_step(made := layer(AUTO, seed=seed), made.batch())
    (line,) = [line for line in caplog.messages if line.startswith("engine ")]
    assert line.startswith("engine hopper on cuda:0: a Hopper GPU")


def memory_mode(**changes):
    return SonicMoEConfig(**{"fp8_mode": "perf", "engine": "hopper"} | changes)


STEP, FUSED = {"flush": "step"}, {"arrangement": "fused"}
SYNC_FREE = {
    "plain": (FP8, {}),
    "iso_weight and recompute_z": (memory_mode(iso_weight=True, recompute_z=True), {}),
    "mem": (memory_mode(fp8_mode="mem"), {}),
    "plain wgrad": (PLAIN_WGRAD, {}),
    "step": (FP8, STEP),
    "from_fused": (FP8, FUSED),
    "bf16": (BF16, {}),
    "bf16, step": (BF16, STEP),
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


@pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
def test_weight_gradients_that_wait_are_the_same_bits(config):
    """Whatever the caller writes into memory that a backward has dropped."""
    batches = batches_of(700, 4096, 300)
    wanted = whole_step(layer(config), *batches)
    for _ in range(3):
        made, results = layer(config, **STEP), []
        for batch in batches:
            results += made.run(batch)
            torch.full([len(batch[0]) * K * 4, 2 * I], float("nan"), device="cuda")
        made.node.step()
        assert_same_bits(results + made.main_grads, wanted)


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
    for remembered in (passes_on, gpu._kernels, backends._choose, flush._kernel_on):
        remembered.cache_clear()
    results = whole_step(layer(), *batches_of(700))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in results)
    planned = set(plan(ModelSpec(E, H, I), FP8.resolve()))
    assert set(engine_sources("sm_90a", ActivationType.SWIGLU)) <= set(loaded) <= planned
