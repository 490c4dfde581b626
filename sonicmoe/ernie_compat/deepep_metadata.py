"""Public import path of DeepEP's metadata builder; it lives in `sonicmoe.routing.deepep`."""

from ..routing.deepep import deepep_topk_to_sonic_metadata

__all__ = ["deepep_topk_to_sonic_metadata"]
