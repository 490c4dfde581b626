"""The half of the doctor that needs a loaded framework: the device it sees, and one engine on the
problem of a trial (`engine.trial`) against fp64.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..config import ResolvedConfig
from ..engine.capabilities import RECORDS
from ..engine.cold_start import run_jobs
from ..engine.select import ENGINES, EngineChoice, choose_engine, ready_engine
from ..engine.settings import EngineSettings, Workload
from ..engine.trial import Problem
from ..engine.trust import Subject, is_untried
from ..enums import ActivationType, EngineName
from ..jit.plan import CompileJob
from ..routing.backends import arch_of
from .capture import to_numpy
from .golden_stages import TENSORS, golden_tensors
from .stage_stats import closeness
from .step_dump import Array, StepDump, StepSettings

# Sizes that every engine takes, and the smallest of them, so that a host computes them at once.
H, I = 256, 128

# Least cosine, most relative RMSE. The worst of all recipes and z codes is 8.0 % (dprobs, e4m3 z);
# BF16 rounding leaves 0.3 %.
LIMITS = {"fp8": (0.995, 0.10), "bf16": (0.9999, 0.01)}


@dataclass(frozen=True)
class Device:
    """Where tensors go by default: `name` is "cpu" or "cuda:0"; `gpu` and `capability` ("9.0")
    describe it, None on a CPU.
    """

    name: str
    gpu: str | None
    capability: str | None


@dataclass(frozen=True)
class TensorCheck:
    """One tensor against the golden. `cosine` and `relative_rmse` (a fraction) are over all
    elements; NaN never passes.
    """

    precision: str
    engine: str
    tensor: str
    cosine: float
    relative_rmse: float
    passed: bool


def find_device() -> Device:
    """The first GPU the loaded framework sees, else the CPU."""
    if not torch.cuda.is_available():
        return Device("cpu", None, None)
    major, minor = torch.cuda.get_device_capability(0)
    return Device("cuda:0", str(torch.cuda.get_device_name(0)), f"{major}.{minor}")


@dataclass(frozen=True)
class SelfTest:
    """Forward and backward of a small MoE on the engine that `config` chooses on `device`.

    precision: "bf16" (unquantised operands) or "fp8" (the configuration's recipe), whatever the
        configuration's `fp8_mode`.

    Everything here raises EngineUnavailableError or ConfigError where the configuration asks for
    what this machine or engine cannot do.
    """

    config: ResolvedConfig
    precision: str
    device: str

    @functools.cached_property
    def choice(self) -> EngineChoice:
        return choose_engine(self.device, self.config.engine, self._asked())

    @property
    def workload(self) -> Workload:
        """What the engine runs: after a fallback to another one with that engine's settings."""
        asked = self._asked()
        return replace(asked, settings=self.choice.settings or asked.settings)

    def _asked(self) -> Workload:
        config = self.config
        # Only where it differs: a mode that was set keeps what else it decides ("mem").
        if config.fp8 != (self.precision == "fp8"):
            config = config.replace(fp8_mode="perf" if self.precision == "fp8" else "off")
        return Workload(EngineSettings.from_config(config, ActivationType.SWIGLU), H, I)

    def kernels(self) -> tuple[CompileJob, ...]:
        """The kernels that it launches; none on a CPU."""
        if not self.device.startswith("cuda"):
            return ()
        record = RECORDS[EngineName(self.choice.engine.name)]
        return run_jobs(record, self.workload, arch_of(self.device))

    def untried(self) -> str | None:
        """The engine, where it has to pass a trial before it may run here."""
        if not self.device.startswith("cuda"):
            return None
        name = EngineName(self.choice.engine.name)
        arch = arch_of(self.device)
        subject = Subject(ENGINES[name], RECORDS[name], self.workload, self.device, arch)
        return name.value if is_untried(subject) else None

    def make_ready(self) -> SelfTest:
        """Try the engine, and the next ones where it fails; the test of the one that passed."""
        ready_engine(self.device, self.config.engine, self._asked())
        # The choice depends on what was tried, so it is made again.
        return replace(self)

    def run(self) -> list[TensorCheck]:
        """Every output and gradient, against fp64: on a host the engine that is tested is the
        trial's own reference.
        """
        problem, engine = Problem(self.workload, self.device), self.choice.engine
        computed = problem.train(engine)
        x, w1, w2, dout = map(to_numpy, (problem.x, problem.w1, problem.w2, problem.dout))
        arrays = (x, problem.indices, problem.probs, w1, w2, dout)
        golden = golden_tensors(StepDump("self-test", StepSettings(recipe=None), *arrays))
        return [
            compare(
                self.precision, engine.name, name, computed[name].astype(np.float64), golden[own]
            )
            for own, name in zip(TENSORS, ("out", "dx", "dprobs", "dw1", "dw2"), strict=True)
        ]


def compare(precision: str, engine: str, name: str, computed: Array, wanted: Array) -> TensorCheck:
    """Cosine and relative RMSE of two arrays against the limits of the precision."""
    found = closeness(computed, wanted)
    least_cosine, most_error = LIMITS[precision]
    # Written so that NaN, which no comparison satisfies, does not pass.
    passed = found["cosine"] >= least_cosine and found["rmse"] <= most_error
    return TensorCheck(precision, engine, name, found["cosine"], found["rmse"], passed)
