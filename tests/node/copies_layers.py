"""What must hold of a layer that trains on FP8 copies without its weights' memory on a GPU, for
tests/gpu/test_copies_gpu.py; test_node_copies.py has the same of a host.
"""

from __future__ import annotations

from functools import partial

from node.direct_layers import DirectLayer, assert_same_bits
from torch.utils.checkpoint import checkpoint
from weights.freed_memory import free, holds_memory

SEEDS = (0, 1, 2)


def outstanding(layer, seeds=SEEDS, copies=None, through=None, before_backward=lambda: None):
    """All forwards, then all backwards: results of every micro-batch and every gradient."""
    node = layer.node if copies is None else partial(layer.node, copies=copies)
    calls = []
    for seed in seeds:
        x, indices, probs, dout = layer.batch(seed)
        leaves = [leaf.detach().requires_grad_() for leaf in (x, probs)]
        call = partial(through, node) if through else node
        out = call(leaves[0], None, indices, leaves[1])
        calls.append((out, dout, *leaves))
    before_backward()
    found = []
    for out, dout, x, probs in calls:
        out.backward(dout)
        found += [out.detach(), x.grad, probs.grad]
    return found + [gradient.clone() for gradient in layer.main_grads]


def check_freed(setup, arrangement, release):
    """The bits of a layer that keeps its memory; forward's order may go before the backwards."""
    wanted = outstanding(DirectLayer(setup, arrangement))
    layer = DirectLayer(setup, arrangement)
    copies = layer.node.make_copies()
    free(*layer.weights)

    def then():
        assert (copies.release_forward() == "") is release
        assert copies.is_released is release

    assert_same_bits(outstanding(layer, copies=copies, before_backward=then), wanted)
    assert not any(map(holds_memory, layer.weights))
    layer.check_strangers()
    return copies


def check_recompute(setup, arrangement, use_reentrant):
    """Activation checkpointing runs the forward again, in the backward."""
    wanted = outstanding(DirectLayer(setup, arrangement))
    layer = DirectLayer(setup, arrangement)
    copies = layer.node.make_copies()
    free(*layer.weights)
    through = partial(checkpoint, use_reentrant=use_reentrant)
    assert_same_bits(outstanding(layer, copies=copies, through=through), wanted)
