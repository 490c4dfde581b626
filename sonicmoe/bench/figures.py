"""From measured times to the figures that are printed. Pure arithmetic, no framework."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .floors import PEAK_TFLOPS, STEP_STAGES, Floor, floors
from .nvml import Reading
from .shapes import Shape


@dataclass(frozen=True)
class Spread:
    """Median, quartiles and extremes of repeated measurements, microseconds."""

    median: float
    low: float
    high: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        # "inclusive" takes the values as the whole population, so quartiles stay inside them also
        # for two or three runs.
        low, _, high = (
            statistics.quantiles(values, n=4, method="inclusive")
            if len(values) > 1
            else [values[0]] * 3
        )
        return cls(statistics.median(values), low, high, min(values), max(values), len(values))

    @property
    def percent(self) -> float:
        """Half the interquartile range over the median, in percent."""
        return 50.0 * (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Turn:
    """One uninterrupted row of steps of `layers` layers: microseconds per layer of each step, and
    what NVML saw meanwhile, or why it saw nothing.
    """

    us: tuple[float, ...]
    layers: int
    power: Reading | str

    @property
    def seconds(self) -> float:
        return 1e-6 * self.layers * sum(self.us)


@dataclass(frozen=True)
class Sustained:
    """Steps back to back for seconds, so long that power and clocks have settled.

    us: time per layer, over the steps counted; seconds: the time they took together. The rest is
    None where NVML gives nothing, and `unavailable` says why: the SM clock, the mean power of the
    board, its limit, and the energy of one layer.
    """

    us: Spread
    seconds: float
    sm_mhz: float | None = None
    watts: float | None = None
    limit_watts: float | None = None
    joules: float | None = None
    unavailable: str | None = None

    @classmethod
    def of(cls, turns: Sequence[Turn]) -> Sustained:
        """Of at least one turn; clocks and power are weighted by the turns' times."""
        steps = [us for turn in turns for us in turn.us]
        us, seconds = Spread.of(steps), sum(turn.seconds for turn in turns)
        mhz = watts = 0.0
        # One turn without a reading leaves the whole row without power: a mean of the rest would be
        # of other clocks.
        limit = None
        for turn in turns:
            if isinstance(turn.power, str):
                return cls(us, seconds, unavailable=turn.power)
            mhz += turn.seconds * turn.power.sm_mhz / seconds
            watts += turn.seconds * turn.power.watts / seconds
            limit = turn.power.limit_watts
        # The window of the power reading and that of the steps differ by a few steps at each end.
        # Power times time per layer does not mind; a difference of two energies over the number of
        # layers would count those steps in full.
        joules = watts * 1e-6 * statistics.fmean(steps)
        return cls(us, seconds, mhz, watts, limit, joules)


@dataclass
class Result:
    """One variant at one shape. Times in microseconds; `busy` is kernel time per phase, empty
    without a GPU.

    `pair` is forward plus backward of the same call. `steady` is wall time per layer of steps
    issued back to back (`steady.py`), `steady_busy` the time in which the GPU worked during such
    steps; None where not measured. `sustained` is the same for seconds. `stages` and `kernels` sum
    GPU time per call by stage and by kernel name; work outside every stage stands under "".
    `gradient_mib` is what the node holds of fp32 gradients beside `main_grad`. `refusal` says why
    the engine did not run, and then nothing else is set. `has_peaks` says whether peaks and floors,
    which are those of Hopper, hold for the GPU.
    """

    shape: Shape
    variant: str
    fp8: bool
    gpu: bool
    has_peaks: bool = True
    wall: dict[str, Spread] = field(default_factory=dict)
    host: dict[str, Spread] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    steady: Spread | None = None
    steady_busy: Spread | None = None
    sustained: Sustained | None = None
    stages: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, float] = field(default_factory=dict)
    saved_mib: float | None = None
    peak_mib: float | None = None
    total_peak_mib: float | None = None
    gradient_mib: float | None = None
    refusal: str | None = None

    @property
    def pair_busy(self) -> float | None:
        """Busy time of forward and backward."""
        return self.busy["forward"] + self.busy["backward"] if self.busy else None

    @property
    def pair_us(self) -> float | None:
        """The time that rates are computed from: busy time of forward and backward, or wall time
        where nothing was profiled.
        """
        return self.pair_busy if self.busy else self.wall["pair"].median if self.wall else None

    @property
    def steady_ratio(self) -> float | None:
        """Wall over busy time in the steady state. The excess over 1 is the price of the host, and
        of gaps between kernels, in a training step.
        """
        if not (self.steady and self.steady_busy):
            return None
        return self.steady.median / self.steady_busy.median

    @property
    def tflops(self) -> float | None:
        """`18 * T * K * H * I` over `pair_us`."""
        return self.shape.flop / self.pair_us / 1e6 if self.pair_us else None

    @property
    def peak_name(self) -> str:
        """Which peak `mfu` is a share of."""
        return "fp8" if self.fp8 else "bf16"

    @property
    def mfu(self) -> float | None:
        """Share of the tensor cores' dense peak of the operands' format; None without a GPU, or on
        one whose peak is not known here.
        """
        peak = self._peak_tflops
        return self.tflops / peak if peak and self.tflops else None

    @property
    def _peak_tflops(self) -> float | None:
        return PEAK_TFLOPS[self.peak_name] if self.gpu and self.has_peaks else None

    @property
    def floors(self) -> dict[str, Floor]:
        """Of the stages that this variant has: there is a flush only where gradients wait in the
        node. A GPU whose rates are not known here has no floors.
        """
        return self._least if self.has_peaks else {}

    @property
    def _least(self) -> dict[str, Floor]:
        """Operations and bytes of the stages, which no GPU changes."""
        return floors(self.shape, self.fp8, flush=bool(self.gradient_mib))

    @property
    def gbytes_per_s(self) -> float | None:
        """Least traffic of forward and backward (each operand moves once) over `pair_us`, in GB/s."""
        if not self.pair_us:
            return None
        # The stages of the optimizer step are left out, because its time is not in `pair_us`.
        moved = sum(floor.bytes for stage, floor in self._least.items() if stage not in STEP_STAGES)
        return moved / self.pair_us / 1e3

    def to_json(self) -> dict[str, Any]:
        """Plain data with the derived figures."""
        derived = {
            "pair_us": self.pair_us, "tflops": self.tflops, "mfu": self.mfu, "gbytes_per_s": self.gbytes_per_s,
            "steady_ratio": self.steady_ratio, "peak_tflops": self._peak_tflops, "flop": self.shape.flop,
        }  # fmt: skip
        # Floors are those of a GPU, so they say nothing about host times.
        ideal = {stage: floor.us for stage, floor in self.floors.items()} if self.gpu else {}
        return {**dataclasses.asdict(self), **derived, "floors_us": ideal}
