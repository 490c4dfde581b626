"""The node on the engines for Hopper: chosen by itself, capturable, on any stream, never with stale
weights, and the memory that gradients need.
"""

from __future__ import annotations

import logging

import pytest
import torch
from gpu.device import LONG, captured, compiled_beforehand
from gpu.hopper_step import FP8, E, H, I, T, layer
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
BF16 = SonicMoEConfig(fp8_mode="off", engine="bf16")


LARGE = (8, 1024, 1024, 2)  # whose accumulators outweigh everything else
each_config = pytest.mark.parametrize("config", [FP8, BF16], ids=["fp8", "bf16"])
# The BF16 GEMMs add to stacked parameters in the native layout.
adding = pytest.mark.parametrize(
    ("config", "options"), [(FP8, {}), (BF16, {"arrangement": "native"})], ids=["fp8", "bf16"]
)


compiled = compiled_beforehand((FP8, (E, H, I)), (BF16, (E, H, I)))


def whole_step(made, *batches):
    """Results of every micro-batch, then every main_grad."""
    results = [tensor for batch in batches for tensor in made.run(batch)]
    made.node.step()
    return results + made.main_grads


def batches_of(*tokens):
    made = layer()
    return [made.batch(seed, count) for seed, count in enumerate(tokens)]


def test_auto_chooses_it(caplog):
    call_plan._fits.clear()  # plans of earlier tests have announced their engines
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        for seed in range(2):
            whole_step(made := layer(AUTO, seed=seed), made.batch())
    (line,) = [line for line in caplog.messages if line.startswith("engine ")]
    assert line.startswith("engine hopper on cuda:0: a Hopper GPU")


@pytest.mark.parametrize(
    "options", [{}, {"flush": "step"}, {"flush": "step", "arrangement": "fused"}]
)
def test_captured_in_a_cuda_graph(options):
    """Forward, backward and step; replayed with other tokens, other routing and other weights, all
    copied in place.
    """
    made = layer(**options)
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
        fresh = layer(seed=seed, **options)
        batch = fresh.batch(seed, T)
        wanted = whole_step(fresh, batch)
        with torch.no_grad():
            for mine, its in zip((*static, *made.weights), (*batch, *fresh.weights), strict=True):
                mine.copy_(its)
        made.clear()
        graph.replay()
        assert_same_bits([*results, *made.main_grads], wanted)


@each_config
def test_two_streams_share_a_node(config):
    """The first is late, and nobody waits for it, nor reads its tokens before: the second needs the
    weights it prepares, and adds to the sums it adds to.
    """
    batches = batches_of(700, 513)
    wanted, made = whole_step(layer(config), *batches), layer(config)
    streams, results = [torch.cuda.Stream() for _ in batches], []
    late = batches[0][0].detach()
    tokens = late.clone()
    late.fill_(float("nan"))
    torch.cuda.synchronize()
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(LONG)
        late.copy_(tokens)
    for stream, batch in zip(streams, batches, strict=True):
        with torch.cuda.stream(stream):
            results += made.run(batch)
    for stream in streams:
        torch.cuda.current_stream().wait_stream(stream)
    made.node.step()
    assert_same_bits(results + made.main_grads, wanted)


@adding
@pytest.mark.parametrize("flush", ["auto", "step"])
def test_two_nodes_on_two_streams_add_in_order(config, options, flush):
    """To the same experts: the first is late, and the second, of mode `flush`, is not."""
    made = layer(config, **options)
    nodes, batches = [made.node, made.another_node(flush=flush)], batches_of(300, 307)
    streams = [torch.cuda.Stream() for _ in nodes]
    found = []
    for late in (False, True):
        made.clear()
        torch.cuda.synchronize()
        if late:
            with torch.cuda.stream(streams[0]):
                torch.cuda._sleep(LONG)
        kept = []
        for batch, node, stream in zip(batches, nodes, streams, strict=True):
            with torch.cuda.stream(stream):
                kept += made.run(batch, node=node)
                node.step()
            if not late:
                torch.cuda.synchronize()
        torch.cuda.synchronize()
        found.append([gradient.clone() for gradient in made.main_grads])
    assert_same_bits(*reversed(found))
    made.check_strangers()


@adding
def test_gradients_that_are_added_at_once_hold_no_memory(config, options):
    """The peak of a step is lower than in step mode by its accumulators, nearly."""

    def peak(flush):
        made = layer(config, sizes=LARGE, tokens=300, flush=flush, **options)
        made.step(0)
        made.clear()
        made.node.release_grads()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made.run(made.batch(0))
        held = made.node.gradient_bytes
        made.node.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, held

    (direct, nothing), (step, accumulators) = peak("auto"), peak("step")
    assert nothing == 0 and accumulators == 4 * 8 * 3 * 1024**2
    assert step - direct >= 0.98 * accumulators


def test_weights_that_change_without_a_step():
    """The node is not told of the optimizer, and a write through `.data` moves no version
    counter.
    """
    made, (batch,) = layer(), batches_of(700)
    optimizer = torch.optim.AdamW(made.weights, lr=1e-2, fused=True)
    before = made.run(batch)[0]
    for change in (optimizer.step, lambda: [w.data.mul_(-0.75) for w in made.weights]):
        for weight in made.weights:
            weight.grad = torch.randn_like(weight)
        change()
        other = layer()
        for mine, its in zip(other.weights, made.weights, strict=True):
            mine.data.copy_(its.data)
        got = made.run(batch)
        assert_same_bits(got, other.run(batch))
        assert relative(got[0], before) > 0.01
        before = got[0]


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
