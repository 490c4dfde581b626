"""A sweep over E x (H, I) x T*K into a file of JSON lines that can be stopped and continued.

A point on a GPU is the time in which it worked, per layer, during steps issued back to back
(`steady.py`): no host time in it, and the clocks of a training run. Experts are built once for all
T, and freed before the next are built; those of one (E, H, I) follow each other.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ..errors import SonicMoEError
from ..node.mlp_node import SonicMoEMlpNode
from .figures import Spread, Sustained
from .points import Point, all_points
from .runner import find_device, machine
from .shapes import Shape, stack_layers
from .steady import Stack, profile_steps, sustain, time_steps
from .workload import Batch, Layer, Variant, rotating_batches

TOPK = 8
GPU_TOKENS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
GPU_EXPERTS = (8, 16, 32, 64, 128)
GPU_WIDTHS = ((2048, 768), (3072, 1536), (4096, 1024), (4096, 4096), (7168, 2048))
CPU_TOKENS, CPU_EXPERTS, CPU_WIDTHS = (64, 128, 256, 512), (4, 8), ((64, 32), (128, 64))
CPU_TOPK = 2
# no divisor of the number of (E, H, I): a sweep that is stopped early has seen all over the grid
STRIDE = 7
MAX_BYTES = 110 << 30  # leaves room on a 141 GB GPU
STEPS = 3  # least number timed
# of steps in one go: past the clocks of the first milliseconds, and many kernels to average over
ENOUGH_US = 150e3
MOST_STEPS = 40


def grid(device: str) -> list[Shape]:
    """Every point that fits into memory. Points that share experts follow each other, and groups of
    experts come in steps of `STRIDE`, so that any beginning of the list covers the grid.
    """
    gpu = device != "cpu"
    experts, widths, tokens = (
        (GPU_EXPERTS, GPU_WIDTHS, GPU_TOKENS) if gpu else (CPU_EXPERTS, CPU_WIDTHS, CPU_TOKENS)
    )
    # The grid of a host is small enough for the reference engine.
    topk = TOPK if gpu else CPU_TOPK
    layers = [(e, *width) for e in experts for width in widths]
    # STRIDE has no common divisor with the number of layers, so this visits each of them once.
    layers = [layers[STRIDE * number % len(layers)] for number in range(len(layers))]
    shapes = [Shape(t, h, i, e, topk) for e, h, i in layers for t in tokens]
    return [shape for shape in shapes if needed_bytes(shape) <= MAX_BYTES]


def needed_bytes(shape: Shape) -> float:
    """Upper estimate of memory: weights, their FP8 codes or native copy, fp32 `main_grad`, and as
    much again in accumulators of an engine that cannot add there (12 bytes a weight), row tensors
    of one call in bf16, and z, tokens and gradients of every layer of a step.
    """
    # w1 has 2 H I elements per expert and w2 H I.
    weights = 3.0 * shape.experts * shape.hidden * shape.intermediate
    padded = shape.rows + 128.0 * shape.experts
    one_call = 2 * padded * (3 * shape.hidden + 6 * shape.intermediate)
    held = 4 * padded * shape.intermediate + 12.0 * shape.tokens * shape.hidden
    return 12 * weights + one_call + stack_layers(shape) * held


def sweep(
    path: Path,
    shapes: Sequence[Shape],
    variant: Variant,
    *,
    budget_s: float | None = None,
    rounds: int = STEPS,
    sustained_s: float = 0.0,
    notify: Callable[[str], None] = lambda text: None,
) -> tuple[int, int]:
    """Measure the shapes that `path` lacks, appending each as soon as it is known.

    Args:
        path: file of JSON lines, continued where it exists.
        shapes: points of the grid.
        variant: what is measured.
        budget_s: no point is begun later than so many seconds.
        rounds: least number of timed steps.
        sustained_s: seconds of the sustained row of each point; 0 leaves it out. A point that the
            file holds without one is not measured again.
        notify: called with the name of each point as it starts.

    Returns:
        Points measured now, and points left when the budget ended.
    """
    # Before anything is measured: a point may take a minute, and would be lost.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()
    started, bench = time.monotonic(), PointBench(variant, find_device(), sustained_s)
    facts = machine()
    # Refusals count as known, so a sweep that is continued does not repeat them.
    known = {point.key for point in all_points(path)}
    missing = [shape for shape in shapes if (shape, str(variant), facts["device"]) not in known]
    _drop_cut_line(path)
    for done, shape in enumerate(missing):
        if budget_s is not None and time.monotonic() - started > budget_s:
            return done, len(missing) - done
        notify(f"{done + 1} of {len(missing)}: {shape}")
        names = {
            "engine": str(variant),
            "fp8": variant.fp8,
            "device": facts["device"],
            "date": facts["date"],
        }
        _append(path, Point(**vars(shape), **names, **bench.figures(shape, rounds)))
    return len(missing), 0


def _append(path: Path, point: Point) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(point)) + "\n")
        file.flush()
        # A point may have taken a minute; it must survive a kill of the machine right behind it.
        os.fsync(file.fileno())


def _drop_cut_line(path: Path) -> None:
    """A line that a kill cut short would spoil the next one."""
    if path.exists() and (text := path.read_text()) and not text.endswith("\n"):
        path.write_text(text[: text.rfind("\n") + 1])


class PointBench:
    """One engine's node, kept as long as its experts fit the next point."""

    def __init__(self, variant: Variant, device: str, sustained_s: float = 0.0) -> None:
        """Nothing is built yet. sustained_s: seconds of the sustained row; 0 leaves it out."""
        self._variant, self._device = variant, device
        self._sustained_s = sustained_s
        self._widths: tuple[int, ...] = ()
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
            self._node = None
            return {"us": None, "refusal": " ".join(str(error).split())}

    def _node_for(self, shape: Shape) -> SonicMoEMlpNode:
        if self._node is None or self._widths != _widths(shape):
            self._node = None  # frees the last one first
            if self._device != "cpu":
                # PyTorch keeps freed blocks. The next experts have other sizes and would not fit
                # into them.
                torch.cuda.empty_cache()
            self._widths = _widths(shape)
            self._node = Layer(shape, self._device).node(self._variant)
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
        # One turn only: there is no other engine to take turns with.
        row = Sustained.of([sustain(stack, self._sustained_s, self._device)])
        return {
            "sustained_us": row.us.median,
            "sm_mhz": row.sm_mhz,
            "watts": row.watts,
            "joules": row.joules,
        }


def _widths(shape: Shape) -> tuple[int, ...]:
    return shape.hidden, shape.intermediate, shape.experts
