"""The ERNIE / PaddleFleet face: the node on per-expert modules, DeepEP metadata, `main_grad`.

Under Paddle, call `paddle.enable_compat(scope={"sonicmoe"}, silent=True)` before the first import. The same classes work on
PyTorch modules when the package was imported with PyTorch.
"""

from .. import interop  # noqa: F401  first: where no framework is reachable, it says what to do
from .deepep_metadata import deepep_topk_to_sonic_metadata
from .mlp_node import SonicMoEMlpNode

__all__ = ["SonicMoEMlpNode", "deepep_topk_to_sonic_metadata"]
