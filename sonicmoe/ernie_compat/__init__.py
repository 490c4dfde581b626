"""The ERNIE / PaddleFleet face: public import paths of the node (`sonicmoe.node`) and of DeepEP's
metadata (`sonicmoe.routing`).

Under Paddle, call `paddle.enable_compat(scope={"sonicmoe"}, silent=True)` before the first import.
The same classes work on PyTorch modules when the package was imported with PyTorch.
"""

from .. import interop  # noqa: F401  first: where no framework is reachable, it says what to do
from ..node.mlp_node import SonicMoEMlpNode
from .deepep_metadata import deepep_topk_to_sonic_metadata

__all__ = ["SonicMoEMlpNode", "deepep_topk_to_sonic_metadata"]
