"""Models that ranks shard, for the workers beside this file: a layer of its own, upstream's function on
parameters of a module, experts of transformers, and adapters of peft on any of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sonicmoe import MoE, moe_TC_softmax_topk_layer

HIDDEN, EXPERTS = 64, 6  # of integrations/hf_models.py


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach().clone()


def make_layer(
    hidden: int, inner: int, *, experts: int = 4, bias: bool = False, seed: int = 0
) -> MoE:
    torch.manual_seed(seed)
    made = MoE(experts, 2, hidden, inner, "swiglu", bias, 0.2)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.2)
    return made


class TopK(nn.Module):
    """The functional API on parameters of a module's own, those of a layer; gate and up in turns, or in two
    tensors, or in halves; options: of the call.
    """

    def __init__(self, layer: MoE, apart: bool = False, **options: Any) -> None:
        super().__init__()
        w1 = layer.c_fc.weight.detach()
        self.router, self.down = layer.router.weight, layer.c_proj.weight
        self.b1, self.b2 = layer.c_fc.bias, layer.c_proj.bias
        self.apart, self.options = apart, options
        if options.get("concat_layout"):
            self.fused = nn.Parameter(torch.cat([w1[:, ::2], w1[:, 1::2]], 1))
        elif apart:
            self.gate, self.up = (nn.Parameter(w1[:, i::2].contiguous()) for i in (0, 1))
        else:
            self.fused = layer.c_fc.weight

    def names(self) -> Any:
        return (("gate", "up") if self.apart else "fused"), "down"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w1 = (self.gate, self.up) if self.apart else (self.fused,)
        first = tuple(weight.permute(1, 2, 0) for weight in w1)
        w1 = first if self.apart else first[0]
        given = w1, self.b1, self.down.permute(1, 2, 0), self.b2, 2
        return moe_TC_softmax_topk_layer(x, self.router, *given, **self.options)[0]


class OnOneRouting(nn.Module):
    """Experts of transformers on a routing that is the same in every call."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.moe = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(2 * len(x)).reshape(-1, 2) % EXPERTS
        out: torch.Tensor = self.moe(x[:, :HIDDEN], ids, torch.full(ids.shape, 0.5))
        return out


def decoder(
    family: str = "qwen3-moe", implementation: str = "sonicmoe", adapters: bool = False
) -> OnOneRouting:
    """The experts of a model with one layer; biases and fused matrices where the family has them."""
    from integrations.hf_models import FAMILIES, build

    from sonicmoe.integrations.transformers import register

    register()
    torch.manual_seed(0)
    model = build(FAMILIES[family](1), implementation)
    for parameter in model.model.layers[0].mlp.experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    if adapters:
        model = adapted(model, "experts.gate_up_proj", "experts.down_proj")
    return OnOneRouting(model.model.layers[0].mlp.experts)


def adapted(model: nn.Module, *targets: str) -> Any:
    """With adapters of peft on these parameters."""
    import peft

    config = peft.LoraConfig(r=2, target_parameters=list(targets), init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).base_model.model
