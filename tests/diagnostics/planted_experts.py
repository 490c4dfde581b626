"""Experts as `verify` takes them: from the definition, with one fault each; and through this
package's faces.
"""

from __future__ import annotations

from functools import partial

import torch


def plain(x, ids, probs, w1, w2, *, seen=range, fault=""):
    """Expert by expert; w1 `[E, 2I, H]` in halves."""
    out = torch.zeros_like(x)
    for expert in range(len(w1)):
        mine = ids == expert
        if fault == "wraps":  # as an index of a list does
            mine |= ids == expert - len(w1)
        if fault == "masks by multiplying":
            token, slot = torch.arange(len(x)), (ids == expert).int().argmax(1)
            weight = probs[token, slot] * mine.any(1)
        else:
            token, slot = torch.where(mine)
            weight = probs[token, slot]
        if fault == "drops":
            token, slot, weight = token[:200], slot[:200], weight[:200]
        first, second = (w[expert] for w in (w1, w2))
        gate, up = (x[token] @ first.T).chunk(2, -1)
        if fault == "turned" and expert == 1:
            gate, up = up, gate
        y = (torch.nn.functional.silu(gate) * up) @ second.T
        out = out.index_add(0, token, y * weight[:, None].to(y.dtype))
    return out


def refuses_none(x, *rest):
    assert len(x)
    return plain(x, *rest)


class Unwritten(torch.autograd.Function):
    """A gradient that nobody writes where an expert has no token."""

    @staticmethod
    def forward(ctx, weight, ids):
        ctx.busy = torch.isin(torch.arange(len(weight)), ids)
        return weight.clone()

    @staticmethod
    def backward(ctx, gradient):
        mine = torch.empty_like(gradient)
        mine[ctx.busy] = gradient[ctx.busy]
        return mine, None


def unwritten(x, ids, probs, w1, w2):
    return plain(x, ids, probs, Unwritten.apply(w1, ids), w2)


class Stale:
    """Prepared weights of the first call with this memory, or with this tensor."""

    def __init__(self, key):
        self.key, self.kept = key, {}

    def __call__(self, x, ids, probs, w1, w2):
        _, codes = self.kept.setdefault(self.key(w2), (w2, w2.detach().clone()))
        return plain(x, ids, probs, w1, w2 + (codes - w2).detach())


def unsteady(x, *rest):
    return plain(x, *rest) * (1 + 1e-6 * torch.rand(()))


def mixes(x, *rest):
    """What a token contributes to others vanishes, unless it is NaN."""
    return plain(x, *rest) + 0 * x.sum()


# The checks that find it, and no other one may.
FAULTS = {
    "turned": (partial(plain, fault="turned"), "values"),
    "drops": (partial(plain, fault="drops"), "all tokens on one expert"),
    "refuses none": (refuses_none, "no tokens"),
    "wraps": (partial(plain, fault="wraps"), "ids that are not here"),
    "masks by multiplying": (partial(plain, fault="masks by multiplying"), "NaN in rows of nobody"),
    "mixes": (mixes, "NaN in one token"),
    "unwritten": (unwritten, "NaN in fresh memory"),
    "unsteady": (unsteady, "repeated bits"),
    "stale": (Stale(lambda w2: w2.data_ptr()), "weights written in place"),
    "stale under FSDP2": (Stale(id), "FSDP2"),
}


def through_transformers(x, ids, probs, w1, w2, implementation="sonicmoe"):
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from sonicmoe.integrations.transformers import register

    register()
    sizes = {
        "num_experts": len(w1),
        "hidden_size": w1.shape[2],
        "moe_intermediate_size": w2.shape[2],
    }
    config = Qwen3MoeConfig(**sizes, hidden_act="silu")
    config._experts_implementation = implementation
    module = Qwen3MoeExperts(config)
    return torch.func.functional_call(
        module, {"gate_up_proj": w1, "down_proj": w2}, (x, ids, probs)
    )
