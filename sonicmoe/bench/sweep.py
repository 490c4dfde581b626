"""A sweep over E x (H, I) x T*K into a file of JSON lines that can be stopped and continued.

A point on a GPU is the time in which it worked, per layer, during steps issued back to back
(`timing.py`): no host time in it, and the clocks of a training run. Experts are built once for all
T, and freed before the next are built; those of one (E, H, I) follow each other.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import torch

from ..errors import SonicMoEError, writing
from ..node.mlp_node import SonicMoEMlpNode
from ..routing.backends import find_device
from .points import Point, cut_line, read_points
from .runner import machine
from .shapes import Shape
from .timing import profile_steps, time_steps
from .workload import Layer, Stack, Variant, rotating_batches

# E, (H, I), T and K of a grid
GRIDS = {
    "cuda": (
        (8, 16, 32, 64, 128),
        ((2048, 768), (3072, 1536), (4096, 1024), (4096, 4096), (7168, 2048)),
        (256, 512, 1024, 2048, 4096, 8192, 16384, 32768),
        8,
    ),
    "cpu": ((4, 8), ((64, 32), (128, 64)), (64, 128, 256, 512), 2),
}
STEPS = 3  # least number timed
# of steps in one go: past the clocks of the first milliseconds, and many kernels to average over
ENOUGH_US = 150e3
MOST_STEPS = 40


def grid(device: str) -> list[Shape]:
    """Every point of a machine; those that share experts follow each other. The grid of a host is
    small enough for the reference engine.
    """
    experts, widths, tokens, topk = GRIDS["cpu" if device == "cpu" else "cuda"]
    return [Shape(t, h, i, e, topk) for e in experts for h, i in widths for t in tokens]


def sweep(
    path: Path,
    shapes: Sequence[Shape],
    variant: Variant,
    notify: Callable[[str], None] = lambda text: None,
) -> int:
    """Measure the shapes that `path` lacks, appending each as soon as it is known; returns how many.

    `path`, a file of JSON lines, is continued where it exists. `notify` is called with the name of
    each point as it starts.
    """
    # Before anything is measured: a point may take a minute, and would be lost.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()
    facts = machine()
    # Refusals count as known, so a sweep that is continued does not repeat them.
    known = {(point.shape, point.engine, point.device) for point in read_points(path)}
    missing = [shape for shape in shapes if (shape, str(variant), facts["device"]) not in known]
    _drop_cut_line(path)
    with path.open("a") as file:
        for shape, us, refusal in _measured(missing, variant, notify):
            names = str(variant), variant.fp8, facts["device"]
            with writing(path):
                file.write(Point(shape, *names, us, facts["date"], refusal).line())
                file.flush()
                # A point may have taken a minute; it must survive a kill of the machine behind it.
                os.fsync(file.fileno())
    return len(missing)


def _measured(
    shapes: Sequence[Shape], variant: Variant, notify: Callable[[str], None]
) -> Iterator[tuple[Shape, float | None, str | None]]:
    """Each shape with its microseconds, or with the engine's refusal."""
    device, done = find_device(), 0
    for _, alike in itertools.groupby(shapes, lambda s: (s.hidden, s.intermediate, s.experts)):
        node = None
        for shape in alike:
            done += 1
            notify(f"{done} of {len(shapes)}: {shape}")
            # One point that does not fit must not end a sweep of hours. The refusal is written
            # down, so that a continued sweep does not try it again.
            try:
                node = node or Layer(shape, device).node(variant)
                yield shape, _timed(node, shape, device), None
            except (SonicMoEError, torch.OutOfMemoryError) as error:
                node = None
                yield shape, None, " ".join(str(error).split())
        node = None  # frees these experts before the next are built
        if device != "cpu":
            # PyTorch keeps freed blocks. The next experts have other sizes and would not fit into
            # them.
            torch.cuda.empty_cache()


def _timed(node: SonicMoEMlpNode, shape: Shape, device: str) -> float:
    stack = Stack(node, rotating_batches(shape, device), shape.stack_layers)
    stack.run()  # compiles, and quantises the weights
    wall = median(time_steps(stack, STEPS, device))
    if device == "cpu":
        return wall
    # Small layers need many steps to run long enough, large ones few.
    steps = max(STEPS, min(MOST_STEPS, round(ENOUGH_US / (wall * stack.layers))))
    # Where the driver lets nobody profile, wall times stand in.
    return profile_steps(stack, steps) or wall


def _drop_cut_line(path: Path) -> None:
    """A line that a kill cut short would spoil the next one. A whole one that lacks its end gets it."""
    text = path.read_text(encoding="utf-8")
    if cut := cut_line(text):
        os.truncate(path, path.stat().st_size - len(cut.encode()))
    elif text and not text.endswith("\n"):
        with path.open("a") as file:
            file.write("\n")
