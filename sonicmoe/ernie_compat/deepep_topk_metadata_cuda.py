"""DeepEP's top-k indices and probabilities -> `RoutingMetadata` on the GPU, in one launch and
without a host sync.

The fused CUDA kernel is built once per machine and cached; where it cannot be, Triton kernels with
identical results take over, and where neither runs, plain tensor operations do. One log line on the
logger "sonicmoe" says which, and why.
"""

from __future__ import annotations

from typing import Any

import torch

from ..config import current_config
from ..routing.backends import kernels_for
from ..routing.gpu import build_routing_gpu, gather_to_rows, scatter_to_slots
from ..routing.metadata import ROW_ALIGNMENT, RoutingMetadata

Tensor = torch.Tensor

__all__ = ["backend_of", "gather_probs", "scatter_dprobs", "topk_metadata"]


def topk_metadata(
    dispatched_indices: Tensor,
    dispatched_probs: Tensor,
    num_experts: int,
    tokens_per_expert: Any = None,
    *,
    alignment: int = ROW_ALIGNMENT,
    validate: bool | None = None,
) -> RoutingMetadata:
    """The metadata of one dispatched batch; arguments and errors as
    `deepep_topk_to_sonic_metadata`.

    Without `tokens_per_expert` nothing is waited for either: the row tensors then have their
    worst-case size.
    """
    if validate is None:
        validate = current_config().validate_dispatch
    return build_routing_gpu(
        dispatched_indices,
        dispatched_probs,
        num_experts,
        tokens_per_expert,
        alignment=alignment,
        validate=validate,
    )


def gather_probs(probs: Tensor, routing: RoutingMetadata) -> Tensor:
    """fp32 `[T, K]` -> `[R]`: probabilities in row order, 0 in padding rows (`topk_metadata`
    already gives `row_prob`).
    """
    return gather_to_rows(probs, routing)


def scatter_dprobs(row_dprobs: Tensor, routing: RoutingMetadata) -> Tensor:
    """fp32 `[R]` -> `[T, K]`: the gradient of the probabilities, exactly 0 in invalid slots
    whatever padding rows hold.
    """
    return scatter_to_slots(row_dprobs, routing)


def backend_of(tensor: Tensor) -> str:
    """What builds metadata for tensors on this device: "cuda", "triton" or "reference"."""
    return kernels_for(tensor).name
