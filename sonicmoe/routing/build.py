"""Which builder serves a batch: kernels for tensors on a GPU, plain tensor operations for tensors
on the host.
"""

from __future__ import annotations

from typing import Any

import torch

from ..interop import is_cuda, require_framework_tensor
from .gpu import build_routing_gpu
from .metadata import ROW_ALIGNMENT, RoutingMetadata
from .reference import build_routing

Tensor = torch.Tensor


def build_metadata(
    indices: Tensor,
    probs: Tensor,
    num_experts: int,
    tokens_per_expert: Any = None,
    *,
    alignment: int = ROW_ALIGNMENT,
    validate: bool = False,
) -> RoutingMetadata:
    """The metadata of one forward; arguments and errors as `build_routing`.

    On the host, counts are always checked against the indices; on a GPU only with `validate`, which
    waits for the device.
    """
    require_framework_tensor(indices, "dispatched_indices")
    build = build_routing_gpu if is_cuda(indices) else build_routing
    return build(
        indices, probs, num_experts, tokens_per_expert, alignment=alignment, validate=validate
    )
