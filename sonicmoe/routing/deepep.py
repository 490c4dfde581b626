"""DeepEP's dispatched indices and probabilities -> `RoutingMetadata`."""

from __future__ import annotations

from typing import Any

import torch

from ..config import current_config
from ..errors import DTypeError, RoutingError
from ..interop import dtype_name
from .build import build_routing
from .metadata import ROW_ALIGNMENT, RoutingMetadata
from .validation import HYBRID_EP_HINT

Tensor = torch.Tensor


def deepep_topk_to_sonic_metadata(
    dispatched_indices: Tensor,
    dispatched_probs: Tensor,
    num_experts: int,
    tokens_per_expert: Any = None,
    *,
    alignment: int = ROW_ALIGNMENT,
    validate: bool | None = None,
) -> RoutingMetadata:
    """Build the routing metadata of one dispatched batch.

    Args:
        dispatched_indices: `recv_topk_idx`, int64 or int32 `[T, K]`: local expert ids
            (docs/design.md, "Routing contract").
        dispatched_probs: `recv_topk_weights`, fp32 `[T, K]`; never read where the id is not here
            (ElasticBuffer leaves them non-zero).
        num_experts: local experts E.
        tokens_per_expert: DeepEP's count list, true or aligned; None, or the empty list of
            worst-case dispatch: counted from the indices.
        alignment: rows every expert is padded to in the metadata.
        validate: check every precondition; None follows `SONIC_MOE_VALIDATE_DISPATCH`.

    Raises:
        RoutingError: counts disagree with the indices (expert and counts named), or validation
            failed (row named).
        ShapeError, DTypeError, DeviceError: the tensors do not fit together; already permuted
            (HybridEP) input is refused.
    """
    if validate is None:
        validate = current_config().validate_dispatch
    return build_routing(
        dispatched_indices,
        dispatched_probs,
        num_experts,
        tokens_per_expert,
        alignment=alignment,
        validate=validate,
    )


def check_dispatched_tokens(
    x: Any,
    dispatched_indices: Any,
    dispatched_probs: Any,
    tokens_per_expert: Any = None,
    x_scale: Any = None,
) -> None:
    """Refuse the outputs of other dispatch modes by name, before any tensor is read;
    `tokens_per_expert`: for the hint alone.

    Raises:
        DTypeError: `x` is the (data, scale) pair of an FP8 dispatch, or FP8 without its scales, or
            not FP8 with them.
        RoutingError: indices or probabilities are missing, as in a permuted dispatch.
    """
    if isinstance(x, tuple | list | dict):
        raise DTypeError(
            f"x is a {type(x).__name__}, as an FP8 dispatch delivers; needed: the codes as x and their scales as "
            "x_scale, or bfloat16 tokens"
        )
    if hasattr(x, "dtype"):
        found = dtype_name(x.dtype)
        if "float8" in found and x_scale is None:
            raise DTypeError(
                f"x is {found} without its scales, from an FP8 dispatch; needed: x_scale, float32 [T, ceil(H/128)], or "
                "bfloat16 tokens"
            )
        if "float8" not in found and x_scale is not None:
            raise DTypeError(
                f"x_scale came with x in {found}; needed: x in float8_e4m3fn, or no x_scale"
            )
    # The usual slip of callers who left out the second argument: indices then arrive in its place.
    if dispatched_probs is None and len(getattr(tokens_per_expert, "shape", ())) == 2:
        raise RoutingError(
            "dispatched_probs missing; the second argument, tokens_per_expert, has two axes as indices have: needed: "
            "node(x, tokens_per_expert or None, dispatched_indices, dispatched_probs)"
        )
    if dispatched_indices is None or dispatched_probs is None:
        given = {"dispatched_indices": dispatched_indices, "dispatched_probs": dispatched_probs}
        missing = " and ".join(name for name, value in given.items() if value is None)
        raise RoutingError(f"{missing} missing{HYBRID_EP_HINT}")
