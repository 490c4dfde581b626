"""Names that PaddleFleet's in-tree copy of `run_sonic_moe` reads. It binds them when it is imported,
so they must be there; it runs only where `run_sonic_moe` cannot be imported, which is nowhere that
this engine is.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ..errors import EngineUnavailableError


class _InFleetsCopyAlone:
    """A name that can be bound and not used: an autograd function of one projection, whose `apply`
    raises, or a function.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise EngineUnavailableError(
            f"{self._name} is a part of PaddleFleet's in-tree copy of run_sonic_moe, and this "
            "engine routes and computes both projections in one call: call "
            "paddlefleet_ops.sonicmoe.run_sonic_moe"
        )

    __call__ = apply


UpProjection = _InFleetsCopyAlone("_UpProjection")
DownProjection = _InFleetsCopyAlone("_DownProjection")
attach_preallocated_gated_outputs = _InFleetsCopyAlone("attach_preallocated_gated_outputs")
deepep_topk_to_sonic_metadata = _InFleetsCopyAlone("deepep_topk_to_sonic_metadata")
deepep_topk_to_sonic_metadata_with_scales = _InFleetsCopyAlone(
    "deepep_topk_to_sonic_metadata_with_scales"
)
differentiable_router_scores = _InFleetsCopyAlone("_differentiable_router_scores")
scatter_router_scores_i32 = _InFleetsCopyAlone("_scatter_router_scores_i32")
enable_fp8 = _InFleetsCopyAlone("enable_fp8")
