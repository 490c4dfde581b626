"""Public import path of DeepEP's metadata builder; it lives in `sonicmoe.routing.build`."""

from ..routing.build import deepep_topk_to_sonic_metadata

__all__ = ["deepep_topk_to_sonic_metadata"]
