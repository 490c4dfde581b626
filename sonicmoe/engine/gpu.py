"""The properties of a GPU that launches depend on; a leaf."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from ..routing.backends import arch_of, index_of_gpu
from .settings import EngineSettings


class Gpu(NamedTuple):
    """arch: "sm_90a", which kernels are compiled for."""

    arch: str
    multiprocessors: int

    def lent(self, settings: EngineSettings) -> int:
        """How many of its multiprocessors the GEMMs may take."""
        return min(settings.gemm_num_sms or self.multiprocessors, self.multiprocessors)


@lru_cache(maxsize=64)
def gpu_of(device: str) -> Gpu:
    """The GPU of this name, "cuda:0"; asked once."""
    properties = torch.cuda.get_device_properties(index_of_gpu(device))
    return Gpu(arch_of(device), int(properties.multi_processor_count))
