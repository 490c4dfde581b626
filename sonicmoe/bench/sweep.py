"""A sweep over E x (H, I) x T*K into a file of JSON lines that can be stopped and continued; one
line per point.

A point on a GPU is the time in which it worked, per layer, during steps issued back to back
(`steady.py`): no host time in it, and the clocks of a training run. Experts are built once for all
T; those of one (E, H, I) follow each other.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import SonicMoEError
from .shapes import Shape, stack_layers

if TYPE_CHECKING:
    from .workload import Variant

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


class SweepError(SonicMoEError, ValueError):
    """The file of a sweep cannot be read."""


@dataclass(frozen=True)
class Point:
    """One measurement. `us` is busy time of forward and backward on a GPU, wall time elsewhere;
    None where the engine refused.

    percent: half the interquartile range of `us` over the steps measured. wall_us: wall time per
    layer of the same steps unprofiled. sustained_us, sm_mhz, watts, joules: time, SM clock, power
    and energy per layer of a sustained row (`figures.Sustained`); None where none was asked for, or
    where NVML gives nothing.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int
    engine: str
    fp8: bool
    device: str
    us: float | None
    percent: float | None = None
    wall_us: float | None = None
    sustained_us: float | None = None
    sm_mhz: float | None = None
    watts: float | None = None
    joules: float | None = None
    date: str = ""
    refusal: str | None = None

    @property
    def shape(self) -> Shape:
        return Shape(self.tokens, self.hidden, self.intermediate, self.experts, self.topk)

    @property
    def group(self) -> str:
        """Points that one model describes: an engine on a device."""
        return f"{self.engine} on {self.device}"

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for two measurements of one thing: the second is unnecessary."""
        return (self.shape, self.engine, self.device)


def grid(device: str) -> list[Shape]:
    """Every point that fits into memory. Points that share experts follow each other, and groups of
    experts come in steps of `STRIDE`, so that any beginning of the list covers the grid.
    """
    gpu = device != "cpu"
    experts, widths, tokens = (
        (GPU_EXPERTS, GPU_WIDTHS, GPU_TOKENS) if gpu else (CPU_EXPERTS, CPU_WIDTHS, CPU_TOKENS)
    )
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


def read_points(path: Path) -> list[Point]:
    """Every measured point of a file, refusals left out; a last line cut short by a kill is
    ignored.

    Raises:
        SweepError: another line is no point.
    """
    return [point for point in _all_points(path) if point.us is not None]


def _all_points(path: Path) -> Iterator[Point]:
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, start=1):
        try:
            yield Point(**json.loads(line))
        except (ValueError, TypeError) as error:
            # A kill may cut the last line and no other.
            if number == len(lines):
                return
            raise SweepError(f"{path}, line {number}, is not a point of a sweep: {error}") from None


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
    from .point_bench import PointBench
    from .runner import find_device, machine

    # Before anything is measured: a point may take a minute, and would be lost.
    path.parent.mkdir(parents=True, exist_ok=True)
    path.open("a").close()
    started, bench = time.monotonic(), PointBench(variant, find_device(), sustained_s)
    facts = machine()
    # Refusals count as known, so a sweep that is continued does not repeat them.
    known = {point.key for point in _all_points(path)}
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
