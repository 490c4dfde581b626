"""From measured times to the figures that are printed. Pure arithmetic, no framework."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .floors import PEAK_TFLOPS, floors
from .shapes import Shape


@dataclass(frozen=True)
class Spread:
    """Repeated measurements in microseconds. percent: half the interquartile range over the median."""

    median: float
    percent: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        median = statistics.median(values)
        if len(values) == 1:
            return cls(median, 0.0, 1)
        # "inclusive" takes the values as the whole population, so quartiles stay inside them also
        # for two or three runs.
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, 50.0 * (high - low) / median if median else 0.0, len(values))


@dataclass(frozen=True)
class PowerReading:
    """Means over one stretch of time: the SM clock, and the power of the whole board from its
    energy counter. limit_watts: the power at which the driver lowers the clocks.
    """

    sm_mhz: float
    watts: float
    limit_watts: float


# Microseconds per layer of each step of a row, and what NVML saw meanwhile, or why it saw nothing.
Turn = tuple[list[float], PowerReading | str]


@dataclass(frozen=True)
class Sustained:
    """Steps back to back for seconds, so long that power and clocks have settled.

    us: time per layer, over the steps counted. power: None where NVML gives nothing, and
    `unavailable` says why. joules: energy of one layer.
    """

    us: Spread
    power: PowerReading | None = None
    joules: float | None = None
    unavailable: str | None = None

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Sustained:
        """The row of at least one turn; all turns took about as long."""
        steps = [us for row, _ in turns for us in row]
        # One turn without a reading leaves the whole row without power: a mean of the rest would be
        # of other clocks.
        for _, power in turns:
            if isinstance(power, str):
                return cls(Spread.of(steps), unavailable=power)
        readings = [dataclasses.astuple(power) for _, power in turns if not isinstance(power, str)]
        power = PowerReading(*map(statistics.fmean, zip(*readings, strict=True)))
        # The window of the power reading and that of the steps differ by a few steps at each end.
        # Power times time per layer does not mind; a difference of two energies over the number of
        # layers would count those steps in full.
        return cls(Spread.of(steps), power, power.watts * 1e-6 * statistics.fmean(steps))


@dataclass
class Result:
    """One variant at one shape. Times in microseconds.

    `busy` is kernel time of single calls per phase, empty without a GPU; `stages` and `kernels` sum
    the same by stage and by kernel name, and work outside every stage stands under "". `steady` is
    wall time per layer of steps issued back to back (`timing.py`), `steady_busy` the time in which
    the GPU worked during such steps; None where not measured. `sustained` is the same for seconds.
    `card` names the GPU. `refusal` says why the engine did not run, and then nothing else is set.
    `has_peaks` says whether peaks and floors, which are those of Hopper, hold for the GPU.
    """

    shape: Shape
    variant: str
    fp8: bool
    gpu: bool
    has_peaks: bool = True
    busy: dict[str, float] = field(default_factory=dict)
    stages: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    steady: Spread | None = None
    steady_busy: float | None = None
    sustained: Sustained | None = None
    saved_mib: float | None = None
    peak_mib: float | None = None
    card: str = ""
    refusal: str | None = None

    @property
    def pair_busy(self) -> float | None:
        return self.busy["forward"] + self.busy["backward"] if self.busy else None

    @property
    def steady_ratio(self) -> float | None:
        """Wall over busy time in the steady state. The excess over 1 is the price of the host, and
        of gaps between kernels, in a training step.
        """
        if not (self.steady and self.steady_busy):
            return None
        return self.steady.median / self.steady_busy

    @property
    def tflops(self) -> float | None:
        """`18 * T * K * H * I` over the busy time, or over the steady one where nothing was
        profiled.
        """
        us = self.pair_busy or (self.steady.median if self.steady else None)
        return self.shape.flop / us / 1e6 if us else None

    @property
    def mfu(self) -> float | None:
        """Share of the tensor cores' dense peak of the operands' format; None without a GPU, or on
        one whose peak is not known here.
        """
        known = self.gpu and self.has_peaks and self.tflops
        return known / PEAK_TFLOPS["fp8" if self.fp8 else "bf16"] if known else None

    @property
    def floors(self) -> dict[str, float]:
        """Microseconds of the stages that were measured; none on a GPU whose rates are not known here."""
        least = floors(self.shape, self.fp8, self.card) if self.has_peaks else {}
        return {stage: least[stage] for stage in self.stages if stage in least}

    def to_json(self) -> dict[str, Any]:
        derived = {
            "pair_busy": self.pair_busy, "tflops": self.tflops, "mfu": self.mfu,
            "steady_ratio": self.steady_ratio, "flop": self.shape.flop,
        }  # fmt: skip
        return {**dataclasses.asdict(self), **derived, "floors_us": self.floors}
