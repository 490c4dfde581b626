"""dispatch -> node -> combine and back, in the framework under test; used by worker processes and
by the tests beside them.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
from ep_cases import HIDDEN, INTERMEDIATE, expert_weights
from framework import numpy, parameter, tensor, torch

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode


def local_experts(first, count):
    """Modules of experts `first .. first + count`, each weight with a zero fp32 `main_grad`."""
    made = []
    up, down = expert_weights()
    for expert in range(first, first + count):
        weights = [parameter(values[expert]) for values in (up, down)]
        for weight in weights:
            weight.main_grad = tensor(np.zeros(tuple(weight.shape), np.float32))
        made.append(
            SimpleNamespace(
                up_gate_proj=SimpleNamespace(weight=weights[0]),
                down_proj=SimpleNamespace(weight=weights[1]),
            )
        )
    return made


def run_layer(dispatcher, source, rank=0, dtype="float32", fp8=False):
    """Everything one rank sees of one forward and backward, by name, in numpy."""
    count = dispatcher.num_local_experts
    experts = local_experts(rank * count, count)
    config = SonicMoEConfig(fp8_mode="perf" if fp8 else "off")
    node = SonicMoEMlpNode(experts, count, HIDDEN, INTERMEDIATE, config=config)
    leaf = tensor(source.x, grad=True)
    weights = tensor(source.weights, grad=True)
    received = dispatcher.dispatch(leaf.to(getattr(torch, dtype)), tensor(source.ids), weights)
    out = node(received.x, received.tokens_per_expert, received.indices, received.probs)
    y = dispatcher.combine(out, received.handle)
    y.backward(tensor(source.dout).to(y.dtype))
    node.step()
    counts = received.tokens_per_expert
    return {
        "y": numpy(y),
        "dx": gradient(leaf),
        "dweights": gradient(weights),
        "recv_x": numpy(received.x),
        "recv_idx": numpy(received.indices),
        "recv_probs": numpy(received.probs),
        "counts": np.array([-1] * count if counts is None else counts),
        "up_gate": np.stack([numpy(e.up_gate_proj.weight.main_grad) for e in experts]),
        "down": np.stack([numpy(e.down_proj.weight.main_grad) for e in experts]),
    }


def gradient(leaf):
    """The gradient, zeros where none arrived (no token, nothing to differentiate)."""
    return np.zeros(tuple(leaf.shape)) if leaf.grad is None else numpy(leaf.grad)
