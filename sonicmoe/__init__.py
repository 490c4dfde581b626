"""Expert-MLP engine for Mixture-of-Experts training: FP8 on NVIDIA Hopper, one engine for Paddle
and PyTorch.

Importing this package imports no framework: names are loaded on first use, so that a program may
still choose between PyTorch and Paddle's torch proxy (`paddle.enable_compat(scope={"sonicmoe"})`).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import SonicMoEConfig
    from .engine.low_rank import Adapters, LowRank
    from .enums import ActivationType, KernelBackendMoE
    from .functional import (
        count_cumsum,
        enable_quack_gemm,
        moe_general_routing_inputs,
        moe_general_routing_inputs_fp8,
        moe_TC_softmax_topk_layer,
        moe_TC_softmax_topk_layer_fp8,
    )
    from .functional.ep import moe_ep_general_routing_forward, moe_ep_TC_softmax_topk_forward
    from .moe import MoE

_EXPORTS = {
    "Adapters": ".engine.low_rank",
    "LowRank": ".engine.low_rank",
    "SonicMoEConfig": ".config",
    "ActivationType": ".enums",
    "KernelBackendMoE": ".enums",
    "MoE": ".moe",
    "count_cumsum": ".functional",
    "enable_quack_gemm": ".functional",
    "moe_TC_softmax_topk_layer": ".functional",
    "moe_TC_softmax_topk_layer_fp8": ".functional",
    "moe_ep_TC_softmax_topk_forward": ".functional.ep",
    "moe_ep_general_routing_forward": ".functional.ep",
    "moe_general_routing_inputs": ".functional",
    "moe_general_routing_inputs_fp8": ".functional",
}

__all__ = [
    "ActivationType",
    "Adapters",
    "KernelBackendMoE",
    "LowRank",
    "MoE",
    "SonicMoEConfig",
    "count_cumsum",
    "enable_quack_gemm",
    "moe_TC_softmax_topk_layer",
    "moe_TC_softmax_topk_layer_fp8",
    "moe_ep_TC_softmax_topk_forward",
    "moe_ep_general_routing_forward",
    "moe_general_routing_inputs",
    "moe_general_routing_inputs_fp8",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'sonicmoe' has no attribute {name!r}")
    if _EXPORTS[name] not in {".config", ".enums"}:
        importlib.import_module(
            ".interop", __name__
        )  # where no framework is reachable, it says what to do
    value = getattr(importlib.import_module(_EXPORTS[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
