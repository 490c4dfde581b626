"""torchao's FP8 grouped products as an experts implementation of transformers, to compare with."""

from __future__ import annotations

import torch
from torch import nn

Tensor = torch.Tensor

TORCHAO = "torchao_fp8"
ALIGNMENT = 16  # rows of a group, which the scaled product demands


def register_torchao() -> bool:
    """Register the implementation where torchao has the product; says whether it has."""
    try:
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm
    except ImportError:
        return False
    from transformers.integrations import moe

    def forward(self: nn.Module, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """`[T, H]`, ids `[T, K]`, weights `[T, K]` -> `[T, H]`."""

        def product(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
            return _to_fp8_rowwise_then_scaled_grouped_mm(
                rows, weight.transpose(1, 2), offsets, pad_token_groups_for_grouped_mm=False
            )

        topk = ids.shape[1]
        sorted_ids, order = ids.reshape(-1).sort()
        position, offsets = padded_positions(sorted_ids, self.num_experts)
        total = sorted_ids.numel() + self.num_experts * ALIGNMENT
        rows = x.new_zeros(total, x.shape[1]).index_copy(0, position, x[order // topk])
        z = product(rows, self.gate_up_proj, offsets)
        y = product(self._apply_gate(z), self.down_proj, offsets)[position]
        # Nobody writes the rows of other ranks' experts, which lie behind all groups.
        others = (sorted_ids >= self.num_experts).unsqueeze(1)
        y = y.masked_fill(others, 0.0) * weights.reshape(-1)[order, None]
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=order.device)
        return y[back].view(*ids.shape, -1).sum(1).to(x.dtype)

    moe.ALL_EXPERTS_FUNCTIONS.register(TORCHAO, forward)
    return True


def padded_positions(sorted_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The row of every slot, and the end of every group as int32 `[E]`, when groups are padded to
    multiples of `ALIGNMENT`. Slots of other ranks (`sorted_ids >= experts`) follow the last group.
    """
    every = torch.arange(experts + 1, device=sorted_ids.device)
    starts = torch.searchsorted(sorted_ids, every)
    ends = torch.searchsorted(sorted_ids, every, right=True)
    sizes = (ends - starts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    padded_ends = sizes.cumsum(0)
    slots = torch.arange(sorted_ids.numel(), device=sorted_ids.device)
    group = sorted_ids.clamp(max=experts)
    position = (padded_ends - sizes)[group] + slots - starts[group]
    return position, padded_ends[:experts].to(torch.int32)
