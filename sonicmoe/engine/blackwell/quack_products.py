"""The products of engine `bf16` where Hopper's GEMMs do not run: those of quack-kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...interop import device_name, dtype_name
from ...kernels.blackwell.quack_gemm import GroupedGemms, grouped_gemms
from ...observe import stage
from ...routing.metadata import RoutingMetadata
from ..expert_rows import ExpertRows, launch_scope
from ..gpu import gpu_of
from ..interface import EngineWeights
from ..kernel_jobs import mlp_shape
from ..products import Products, plain_operand
from ..settings import EngineSettings
from ..targets import GradientTargets
from ..tokens import PendingWgrad, plain_tokens
from .bf16_gradients import outputs_of

Tensor = torch.Tensor


@contextmanager
def products(
    x: Tensor, weights: EngineWeights, settings: EngineSettings, routing: RoutingMetadata
) -> Iterator[Products]:
    """The products of one call; launches inside the block run where `x` lies."""
    # Tiles depend on H and I, and on no number of tokens: a batch of another size compiles nothing.
    sizes = weights.hidden_size, weights.intermediate_size
    gemms = _gemms(x, sizes, settings, weights.b1 is not None)
    with launch_scope(x):
        yield _QuackProducts(routing, weights, gemms, ExpertRows.of(routing))


def add_gradients(
    pending: PendingWgrad, targets: GradientTargets, biases: tuple[Tensor, Tensor] | None
) -> None:
    """Add dw1 and dw2, and the `biases`' gradients, to `targets`. ConfigError where the GEMMs cannot
    add there; then nothing was added.
    """
    into_dw1, into_dw2 = outputs_of(targets)
    settings, routing = pending.settings, pending.routing
    if routing.num_rows == 0 or not (into_dw1 or into_dw2 or biases):
        return
    # dout and y1s have no local name that lasts: their memory is free for dw1 only when all
    # references are gone.
    x, dz = plain_tokens(pending.x), plain_operand(pending.dz)
    sizes = int(x.shape[1]), int(pending.y1s.shape[1])
    gemms = _gemms(x, sizes, settings, biases is not None)
    with launch_scope(x):
        rows = ExpertRows.of(routing)
        if into_dw2 is not None:
            gemms.load_wgrad("wgrad_down", into_dw2.stored)
        if into_dw1 is not None:
            gemms.load_wgrad("wgrad_up", into_dw1.stored)
        targets.adding = True
        if biases is not None:
            targets.add_biases(*biases, split_half=False)
        index = rows.cu_rows, rows.gather_index
        if into_dw2 is not None:
            with stage("dw2"):
                tensor, stored = into_dw2
                operands = plain_tokens(pending.dout), pending.y1s
                gemms.wgrad_down(*operands, tensor, *index, stored)
                del operands
        if settings.frees_stagewise:
            pending.dout = pending.y1s = None
        if into_dw1 is not None:
            with stage("dw1"):
                tensor, stored = into_dw1
                gemms.wgrad_up(x, dz, tensor, *index, stored)
        targets.adding = False


@dataclass(eq=False)
class _QuackProducts(Products):
    """The products of one shape; every argument is named in `GroupedGemms`."""

    gemms: GroupedGemms
    rows: ExpertRows

    def up(self, x: Tensor, z: Tensor | None, y1: Tensor) -> None:
        w1, b1, rows = plain_operand(self.weights.w1), self.weights.b1, self.rows
        self.gemms.up(x, w1, z, y1, b1, rows.cu_rows, rows.gather_index)

    def up_again(self, x: Tensor, z: Tensor) -> None:
        w1, b1, rows = plain_operand(self.weights.w1), self.weights.b1, self.rows
        self.gemms.up_again(x, w1, z, b1, rows.cu_rows, rows.gather_index)

    def down(self, y1: Tensor, y2: Tensor) -> None:
        w2, b2 = plain_operand(self.weights.w2), self.weights.b2
        self.gemms.down(y1, w2, y2, b2, self.rows.cu_rows)

    def dgated(self, dout: Tensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """Partial sums `[R, tiles]`."""
        w2, prob, rows = plain_operand(self.weights.w2_dgrad), self.routing.row_prob, self.rows
        sizes = (self.routing.num_rows, self.gemms.dprob_tiles)
        partials = torch.empty(sizes, dtype=torch.float32, device=dout.device)
        self.gemms.dgated(dout, w2, dz, z, y1s, prob, partials, rows.cu_rows, rows.gather_index)
        return partials

    def row_sums(self, partials: Tensor, dout: Tensor) -> Tensor:
        return self.rows.sum_partials(partials, dout, self.weights.b2)

    def dgrad(self, dz: Tensor, dx_rows: Tensor) -> None:
        self.gemms.dgrad(dz, plain_operand(self.weights.w1_dgrad), dx_rows, self.rows.cu_rows)


def _gemms(x: Tensor, sizes: tuple[int, int], settings: EngineSettings, bias: bool) -> GroupedGemms:
    """The GEMMs of a model with these H and I, for tokens like these."""
    gpu = gpu_of(device_name(x))
    shape = mlp_shape(settings, sizes, dtype_name(x.dtype), bias, gpu.arch)
    return grouped_gemms(shape, gpu.lent(settings))
