"""Measure the points of a sweep on one engine, with experts built once for all T and freed before
the next are built.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import SonicMoEError
from ..node.mlp_node import SonicMoEMlpNode
from .figures import Spread, Sustained
from .shapes import Shape, stack_layers
from .steady import Stack, open_nvml, profile_steps, sustain, time_steps
from .workload import Batch, Layer, Variant, rotating_batches

# of steps in one go: past the clocks of the first milliseconds, and many kernels to average over
ENOUGH_US = 150e3
MOST_STEPS = 40


class PointBench:
    """One engine's node, kept as long as its experts fit the next point."""

    def __init__(self, variant: Variant, device: str, sustained_s: float = 0.0) -> None:
        """Nothing is built yet. sustained_s: seconds of the sustained row; 0 leaves it out."""
        self._variant, self._device = variant, device
        self._sustained_s = sustained_s
        self._layer: Layer | None = None
        self._node: SonicMoEMlpNode | None = None

    def figures(self, shape: Shape, rounds: int) -> dict[str, Any]:
        """`us`, `percent`, `wall_us` of a `Point` from at least `rounds` steps, and the figures of
        its sustained row; or the engine's `refusal`.
        """
        try:
            node = self._node_for(shape)
            return self._timed(
                node, shape, rotating_batches(shape, self._device, stack_layers(shape)), rounds
            )
        # One point that does not fit must not end a sweep of hours. The refusal is written down, so
        # that a continued sweep does not try it again.
        except (SonicMoEError, torch.OutOfMemoryError) as error:
            self._layer = self._node = None
            return {"us": None, "refusal": " ".join(str(error).split())}

    def _node_for(self, shape: Shape) -> SonicMoEMlpNode:
        if (
            self._node is None
            or self._layer is None
            or _widths(self._layer.shape) != _widths(shape)
        ):
            self._layer = self._node = None  # frees the last one first
            if self._device != "cpu":
                # PyTorch keeps freed blocks. The next experts have other sizes and would not fit
                # into them.
                torch.cuda.empty_cache()
            self._layer = Layer(shape, self._device)
            self._node = self._layer.node(self._variant)
        return self._node

    def _timed(
        self, node: SonicMoEMlpNode, shape: Shape, batches: Sequence[Batch], rounds: int
    ) -> dict[str, Any]:
        stack = Stack(node, batches, stack_layers(shape))
        stack.run()  # compiles, quantises the weights, makes accumulators where they are needed
        walls = time_steps(stack, rounds, self._device)
        wall = Spread.of(walls)
        figures = {"wall_us": wall.median, **self._sustained(stack)}
        if self._device == "cpu":
            return {"us": wall.median, "percent": wall.percent, **figures}
        # Small layers need many steps to run long enough, large ones few.
        steps = max(rounds, min(MOST_STEPS, round(ENOUGH_US / (wall.median * stack.layers))))
        # Where the driver lets nobody profile, wall times stand in.
        busy = Spread.of(profile_steps(stack, steps) or walls)
        return {"us": busy.median, "percent": busy.percent, **figures}

    def _sustained(self, stack: Stack) -> dict[str, float | None]:
        if not self._sustained_s:
            return {}
        gpu = open_nvml(self._device)
        row = Sustained.of([sustain(stack, self._sustained_s, self._device, gpu)])
        if not isinstance(gpu, str):
            gpu.close()
        return {
            "sustained_us": row.us.median,
            "sm_mhz": row.sm_mhz,
            "watts": row.watts,
            "joules": row.joules,
        }


def _widths(shape: Shape) -> tuple[int, int, int]:
    return shape.hidden, shape.intermediate, shape.experts
