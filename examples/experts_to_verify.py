"""Three experts as `sonicmoe verify` takes them: a callable and a named layout.

    sonicmoe verify examples/experts_to_verify.py:grouped_mm --layout halves
    sonicmoe verify examples/experts_to_verify.py:transformers_eager --layout halves
    sonicmoe verify examples/experts_to_verify.py:sonicmoe_fp8 --layout halves --tolerance 0.1

x [T, H], ids and probs [T, K], w1 [E, 2I, H] (gate rows, then up rows), w2 [E, H, I] -> [T, H].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def grouped_mm(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """SwiGLU experts on torch's grouped GEMM, as its users write them: sort by expert, multiply,
    sum.
    """
    slots = ids.reshape(-1)
    order = slots.argsort(stable=True)
    counts = torch.bincount(slots, minlength=len(w1))
    ends = counts.cumsum(0).to(torch.int32)
    token = order // ids.shape[1]
    gate, up = F.grouped_mm(x[token], w1.mT, offs=ends).chunk(2, -1)
    y = F.grouped_mm(F.silu(gate) * up, w2.mT, offs=ends)
    weighted = y * probs.reshape(-1)[order, None]
    return torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))


def transformers_eager(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """The experts of Qwen3-MoE in transformers, with its own loop over experts."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    (experts, _, hidden), inner = w1.shape, w2.shape[2]
    config = Qwen3MoeConfig(
        hidden_size=hidden, moe_intermediate_size=inner, num_experts=experts, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    with torch.device("meta"):
        module = Qwen3MoeExperts(config)
    weights = {"gate_up_proj": w1, "down_proj": w2}
    out: Tensor = torch.func.functional_call(module, weights, (x, ids, probs.to(x.dtype)))
    return out


def sonicmoe_fp8(x: Tensor, ids: Tensor, probs: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """This package's function, in FP8."""
    from sonicmoe import moe_general_routing_inputs

    tokens = torch.arange(len(x), device=x.device).repeat_interleave(ids.shape[1])
    weights = w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None
    routed = probs.reshape(-1), tokens, ids.reshape(-1)
    out, _ = moe_general_routing_inputs(x, *routed, *weights, concat_layout=True, use_fp8=True)
    return out
