"""Gradients that go straight into `main_grad` on the GPU engines: the memory that they save, and the
order of streams. test_faults_gpu.py has memory that runs out or is poisoned.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from gpu.device import (
    LONG,
    compiled_beforehand,
)
from node.direct_layers import ARRANGEMENTS, DirectLayer, Setup, assert_same_bits

from sonicmoe import SonicMoEConfig

pytestmark = pytest.mark.gpu

E, H, I, K, T = 4, 272, 320, 2, 300  # H no multiple of 128, I an odd number of 64s
LARGE = (8, 1024, 1024, 2)  # whose accumulators outweigh everything else


def setup_for(engine, **changes):
    """By name, because a fallback would prove nothing."""
    mode = "perf" if engine == "hopper" else "off"
    config = SonicMoEConfig(**{"engine": engine, "fp8_mode": mode} | changes)
    return Setup(config, "cuda", torch.bfloat16, (E, H, I, K), T)


FP8, MEM, BF16 = setup_for("hopper"), setup_for("hopper", fp8_mode="mem"), setup_for("bf16")
STAGEWISE = setup_for("bf16", stagewise_memory=True)
# The BF16 GEMMs add to stacked parameters in the native layout.
SETUPS = {f"fp8, {arrangement}": (FP8, arrangement) for arrangement in ARRANGEMENTS}
SETUPS["bf16, native"] = (BF16, "native")
TWO = {name: SETUPS[name] for name in ("fp8, per_expert", "bf16, native")}
two_setups = pytest.mark.parametrize(("setup", "arrangement"), TWO.values(), ids=TWO)


def layer_of(setup, arrangement, memory="own", flush="auto"):
    return DirectLayer(setup, arrangement, memory, flush=flush)


compiled = compiled_beforehand(
    *product((setup.config for setup in (FP8, MEM, BF16, STAGEWISE)), ((E, H, I), LARGE[:3]))
)


@two_setups
def test_holds_no_gradient(setup, arrangement):
    """The peak of a step is lower than in step mode by its accumulators, nearly."""
    larger = replace(setup, sizes=LARGE)

    def peak(flush):
        layer = layer_of(larger, arrangement, flush=flush)
        layer.step(0)
        layer.clear()
        layer.node.release_grads()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        layer.run(layer.batch(0))
        held = layer.node.gradient_bytes
        layer.node.step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before, held

    (direct, nothing), (step, accumulators) = peak("auto"), peak("step")
    assert nothing == 0 and accumulators == 4 * 8 * 3 * 1024**2
    assert step - direct >= 0.98 * accumulators


class TestStreams:
    @two_setups
    @pytest.mark.parametrize("flush", ["auto", "step"])
    def test_two_nodes_on_two_streams_add_in_order(self, setup, arrangement, flush):
        """To the same experts: the first is late, and the second, of mode `flush`, is not."""
        layer = layer_of(setup, arrangement, "slices")
        nodes = [layer.node, layer.another_node(flush=flush)]
        batches = [layer.batch(seed) for seed in range(2)]
        streams = [torch.cuda.Stream() for _ in nodes]
        found = []
        for late in (False, True):
            layer.clear()
            torch.cuda.synchronize()
            if late:
                with torch.cuda.stream(streams[0]):
                    torch.cuda._sleep(LONG)
            kept = []
            for batch, node, stream in zip(batches, nodes, streams, strict=True):
                with torch.cuda.stream(stream):
                    kept += layer.run(batch, node=node)
                    node.step()
                if not late:
                    torch.cuda.synchronize()
            torch.cuda.synchronize()
            found.append([gradient.clone() for gradient in layer.main_grads])
        assert_same_bits(*reversed(found))
        layer.check_strangers()
