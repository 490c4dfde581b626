"""Engines that launch a planted CUDA kernel behind their backward, for processes that try them."""

from __future__ import annotations

from pathlib import Path

import torch

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.jit.cuda_source import CudaSource

SOURCE = Path(__file__).with_name("planted_faults.cu")


def planted_source(kind: int, arch: str) -> CudaSource:
    return CudaSource.make("planted_faults", SOURCE, defines={"KIND": kind}, arch=arch)


class Sound(ReferenceEngine):
    """Without a fault."""

    name = "bf16"


class _Planted(Sound):
    KIND: int

    def backward_dx(self, *arguments):
        from sonicmoe.routing.backends import arch_of

        dx, dprobs, pending = super().backward_dx(*arguments)
        flag = torch.zeros(1, dtype=torch.int32, device=dprobs.device)
        planted_source(self.KIND, arch_of(str(dprobs.device))).load().plant(dprobs, flag)
        return dx, dprobs, pending


class WrongNumber(_Planted):
    KIND = 0


class Faults(_Planted):
    KIND = 1


class NeverEnds(_Planted):
    KIND = 2
