"""FP8 copies of the weights on the Hopper engine: training while the parameters hold no memory, what
the allocator has back, streams, CUDA graphs, and writes that only the device sees.
"""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch
from gpu.device import LONG, captured, compiled_beforehand
from node.direct_layers import DirectLayer, Setup, assert_same_bits
from weights.freed_memory import free, holds_memory, restore

from sonicmoe import SonicMoEConfig

pytestmark = pytest.mark.gpu

E, H, I, K, T = 4, 272, 320, 2, 300  # H no multiple of 128, I an odd number of 64s
LARGE = (8, 1024, 1024, 2)
MIB = 1 << 20


def setup_for(sizes=(E, H, I, K), **changes):
    """By name, because a fallback would prove nothing."""
    config = SonicMoEConfig(**{"engine": "hopper", "fp8_mode": "perf"} | changes)
    return Setup(config, "cuda", torch.bfloat16, sizes, T)


# How FP8 is done, and whether forward's order of the copies may go before the backwards.
MODES = {
    "perf": (setup_for(), True),
    "mem": (setup_for(fp8_mode="mem"), True),
    "iso": (setup_for(iso_weight=True), False),
    "recompute_z": (setup_for(recompute_z=True), False),
    "bf16 wgrad": (setup_for(fp8_wgrad=False), True),
}
compiled = compiled_beforehand(*((setup.config, (E, H, I)) for setup, _ in MODES.values()))


def outstanding(layer, seeds=(0, 1, 2), copies=None, before_backward=lambda: None):
    """All forwards, then all backwards: results of every micro-batch and every gradient."""
    node = layer.node if copies is None else partial(layer.node, copies=copies)
    calls = []
    for seed in seeds:
        x, indices, probs, dout = layer.batch(seed)
        leaves = [leaf.detach().requires_grad_() for leaf in (x, probs)]
        calls.append((node(leaves[0], None, indices, leaves[1]), dout, *leaves))
    before_backward()
    found = []
    for out, dout, x, probs in calls:
        out.backward(dout)
        found += [out.detach(), x.grad, probs.grad]
    return found + [gradient.clone() for gradient in layer.main_grads]


def freed_layer(setup):
    """A layer without memory of its parameters, and its copies."""
    layer = DirectLayer(setup, "native")
    copies = layer.node.make_copies()
    free(*layer.weights)
    return layer, copies


@pytest.mark.parametrize(("setup", "release"), MODES.values(), ids=MODES)
def test_the_bits_of_a_layer_that_keeps_its_memory(setup, release):
    wanted = outstanding(DirectLayer(setup, "native"))
    layer, copies = freed_layer(setup)

    def then():
        assert (copies.release_forward() == "") is release
        assert copies.is_released is release

    assert_same_bits(outstanding(layer, copies=copies, before_backward=then), wanted)
    assert not any(map(holds_memory, layer.weights))
    layer.check_strangers()


class TestMemory:
    """Of E=8, H=I=1024: 48 MiB of BF16 parameters, 24 MiB of codes in each order."""

    PARAMETERS, ORDER = 48, 24

    def allocated(self):
        gc.collect()
        torch.cuda.synchronize()
        # What was asked for: a cached block may be up to 1 MiB larger than what is put into it.
        return torch.cuda.memory_stats()["requested_bytes.all.current"] / MIB

    @pytest.mark.parametrize("iso", [False, True])
    def test_every_event_gives_back_what_it_promises(self, iso):
        setup = setup_for(LARGE, iso_weight=iso)
        layer = DirectLayer(setup, "native")
        outstanding(layer, copies=layer.node.make_copies())  # all that is made once
        before = self.allocated()
        copies = layer.node.make_copies()
        orders = 1 if iso else 2
        assert self.allocated() - before == pytest.approx(orders * self.ORDER, abs=1)
        values = [weight.detach().cpu() for weight in layer.weights]
        free(*layer.weights)
        freed = before - self.PARAMETERS
        assert self.allocated() - freed == pytest.approx(orders * self.ORDER, abs=1)
        if not iso:
            outstanding(layer, (0,), copies, before_backward=partial(self.released, copies))
            assert self.allocated() - freed == pytest.approx(self.ORDER, abs=1)
        del copies
        assert self.allocated() == pytest.approx(freed, abs=1)
        for weight, value in zip(layer.weights, values, strict=True):
            restore(weight, value.cuda())
        assert self.allocated() == pytest.approx(before, abs=1)

    def released(self, copies):
        before = self.allocated()
        assert copies.release_forward() == ""
        assert before - self.allocated() == pytest.approx(self.ORDER, abs=1)


def test_released_memory_is_not_taken_while_another_stream_reads_it():
    """The buffers belong to the first stream, and the forward that reads them runs late on a
    second one.
    """
    setup, _ = MODES["perf"]
    wanted = outstanding(DirectLayer(setup, "native"), (0,))
    layer, copies = freed_layer(setup)
    sizes = [copies.weights.w1.bytes.numel(), copies.weights.w2.bytes.numel()]
    x, indices, probs, dout = layer.batch(0)
    leaves = [leaf.detach().requires_grad_() for leaf in (x, probs)]
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(LONG)
        out = layer.node(leaves[0], None, indices, leaves[1], copies=copies)
        assert copies.release_forward() == ""
    # Were the memory free for this stream, these would be it.
    strangers = [torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda") for size in sizes * 2]
    torch.cuda.current_stream().wait_stream(side)
    out.backward(dout)
    torch.cuda.synchronize()
    found = [out.detach(), *(leaf.grad for leaf in leaves), *layer.main_grads]
    assert_same_bits(found, wanted)
    del strangers


def test_a_graph_reads_the_copies_and_keeps_forwards_order():
    setup, _ = MODES["perf"]
    wanted = outstanding(DirectLayer(setup, "native"), (0,))
    layer, copies = freed_layer(setup)
    x, indices, probs, dout = layer.batch(0)

    def once():
        layer.node(x, None, indices, probs, copies=copies).backward(dout)
        layer.clear()
        x.grad = probs.grad = None

    def step():
        out = layer.node(x, None, indices, probs, copies=copies)
        kept = copies.release_forward()
        out.backward(dout)
        return out, kept

    graph, (out, kept) = captured(step, once)
    assert "CUDA graph that is being captured" in kept
    for _ in range(2):
        layer.clear()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, wanted[0])
        assert_same_bits(layer.main_grads, wanted[3:])
