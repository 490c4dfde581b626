"""The products of engine `bf16` where Hopper's GEMMs do not run: those of quack-kernels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...interop import device_name, dtype_name
from ...kernels.blackwell.quack_gemm import Gemms, dprob_tiles, grouped_gemms
from ...routing.metadata import RoutingMetadata
from ..expert_rows import ExpertRows, launch_scope
from ..gpu import gpu_of
from ..interface import EngineWeights
from ..kernel_jobs import mlp_shape
from ..products import Products, Wgrads, plain_operand
from ..settings import EngineSettings
from ..targets import GradientTargets
from ..tokens import PendingWgrad, plain_tokens
from .bf16_gradients import StackedOutput, outputs_of

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
        yield _QuackProducts(routing, weights, *gemms, ExpertRows.of(routing))


@contextmanager
def wgrads(pending: PendingWgrad, targets: GradientTargets) -> Iterator[Wgrads]:
    """Those that anybody wants. ConfigError where the GEMMs cannot add to `targets`."""
    into_dw1, into_dw2 = outputs_of(targets)
    x = plain_tokens(pending.x)
    sizes = int(x.shape[1]), int(pending.y1s.shape[1])
    gemms, _ = _gemms(x, sizes, pending.settings, targets.has_biases)
    with launch_scope(x):
        rows = ExpertRows.of(pending.routing)
        index, found = (rows.cu_rows, rows.gather_index), dict[str, Any]()

        # No operand has a name that lasts: their memory is free when all references are gone.
        def dw2(output: StackedOutput) -> None:
            operands = plain_tokens(pending.dout), pending.y1s
            gemms.launch(("wgrad_down", output.stored), *operands, output.tensor, *index)

        def dw1(output: StackedOutput) -> None:
            operands = plain_tokens(pending.x), plain_operand(pending.dz)
            gemms.launch(("wgrad_up", output.stored), *operands, output.tensor, *index)

        if into_dw2 is not None:
            gemms.load(("wgrad_down", into_dw2.stored))
            found["dw2"] = partial(dw2, into_dw2)
        if into_dw1 is not None:
            gemms.load(("wgrad_up", into_dw1.stored))
            found["dw1"] = partial(dw1, into_dw1)
        yield found


@dataclass(eq=False)
class _QuackProducts(Products):
    """The products of one shape; operands as `quack_build` names them."""

    gemms: Gemms
    tiles: int  # of dgated
    rows: ExpertRows

    def up(self, x: Tensor, z: Tensor | None, y1: Tensor) -> None:
        w1, rows = plain_operand(self.weights.w1), (self.rows.cu_rows, self.rows.gather_index)
        name = "up_only" if z is None else "up"
        self.gemms.launch(name, x, w1, z, y1, self.weights.b1, *rows)

    def up_again(self, x: Tensor, z: Tensor) -> None:
        w1, rows = plain_operand(self.weights.w1), (self.rows.cu_rows, self.rows.gather_index)
        self.gemms.launch("up_again", x, w1, z, self.weights.b1, *rows)

    def down(self, y1: Tensor, y2: Tensor) -> None:
        w2, b2 = plain_operand(self.weights.w2), self.weights.b2
        self.gemms.launch("down", y1, w2, y2, b2, self.rows.cu_rows, None)

    def dgated(self, dout: Tensor, z: Tensor, dz: Tensor, y1s: Tensor) -> Tensor:
        """Partial sums `[R, tiles]`."""
        w2, prob, rows = plain_operand(self.weights.w2_dgrad), self.routing.row_prob, self.rows
        sizes = self.routing.num_rows, self.tiles
        partials = torch.empty(sizes, dtype=torch.float32, device=dout.device)
        outputs = dz, z, y1s, prob, partials
        self.gemms.launch("dgated", dout, w2, *outputs, rows.cu_rows, rows.gather_index)
        return partials

    def row_sums(self, partials: Tensor, dout: Tensor) -> Tensor:
        return self.rows.sum_partials(partials, dout, self.weights.b2)

    def dgrad(self, dz: Tensor, dx_rows: Tensor) -> None:
        w1, cu_rows = plain_operand(self.weights.w1_dgrad), self.rows.cu_rows
        self.gemms.launch("dgrad", dz, w1, dx_rows, None, cu_rows, None)


def _gemms(
    x: Tensor, sizes: tuple[int, int], settings: EngineSettings, bias: bool
) -> tuple[Gemms, int]:
    """The GEMMs of a model with these H and I, for tokens like these, and the column tiles of dgated."""
    gpu = gpu_of(device_name(x))
    shape = mlp_shape(settings, sizes, dtype_name(x.dtype), bias, gpu.arch)
    return grouped_gemms(shape, gpu.lent(settings)), dprob_tiles(shape)
