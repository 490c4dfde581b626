"""Public import path of the fused kernel that turns DeepEP's indices and probabilities into routing
metadata, and of the gradient of the probabilities; the code lives in `sonicmoe.routing`.

The CUDA kernel is built once per machine and cached. Where it cannot be built, Triton kernels with
identical results take over; where neither runs, plain tensor operations do. One log line says which.
"""

from ..routing.build import build_routing, deepep_topk_to_sonic_metadata
from ..routing.combine import scatter_to_slots

__all__ = ["build_routing", "deepep_topk_to_sonic_metadata", "scatter_to_slots"]
