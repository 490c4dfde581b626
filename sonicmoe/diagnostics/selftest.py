"""The half of the doctor that needs a loaded framework: the device it sees, and one engine on the
problem of a trial (`engine.trial`) against fp64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..config import ResolvedConfig
from ..engine.capabilities import RECORDS
from ..engine.cold_start import run_jobs
from ..engine.select import ENGINES, EngineChoice, choose_engine, ready_engine, unavailable
from ..engine.settings import EngineSettings, Workload
from ..engine.trial import Problem
from ..engine.trust import Subject, is_untried
from ..enums import ActivationType, EngineName
from ..jit.plan import CompileJob
from ..routing.backends import arch_of
from .golden_stages import TENSORS, golden_tensors
from .step_capture import to_numpy
from .step_dump import Array, StepDump, StepSettings

H, I = 256, 128
_NAMES = {"ds": "dprobs"}

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


def engine_for(config: ResolvedConfig, precision: str, device: str) -> EngineChoice:
    """The engine `config` chooses on `device` for the self-test in this precision.

    Raises:
        EngineUnavailableError, ConfigError: the configuration asks for what this machine or engine
            cannot do.
    """
    return choose_engine(device, config.engine, Workload(_settings(config, precision), H, I))


def untried(config: ResolvedConfig, precision: str, device: str) -> str | None:
    """The engine of `engine_for`, where it has to pass a trial before it may run here."""
    if not device.startswith("cuda"):
        return None
    choice = engine_for(config, precision, device)
    name = EngineName(choice.engine.name)
    workload = Workload(choice.settings or _settings(config, precision), H, I)
    subject = Subject(ENGINES[name], RECORDS[name], workload, device, arch_of(device))
    return name.value if is_untried(subject) else None


def make_ready(config: ResolvedConfig, precision: str, device: str) -> None:
    """Try the engine of `engine_for`, and the next ones where it fails.

    Raises:
        EngineUnavailableError: it is asked for by name, and failed.
    """
    ready_engine(device, config.engine, Workload(_settings(config, precision), H, I))


def engines_on(device: str) -> dict[str, str]:
    """Whether each engine can run on a device, whatever the model: "able", or the reason."""
    return {name.value: unavailable(name, device) or "able" for name in ENGINES}


def kernels_of(config: ResolvedConfig, precision: str, device: str) -> tuple[CompileJob, ...]:
    """The kernels that the self-test in this precision launches on `device`; none on a CPU.

    Raises:
        EngineUnavailableError, ConfigError: as `engine_for`.
    """
    if not device.startswith("cuda"):
        return ()
    choice, arch = engine_for(config, precision, device), arch_of(device)
    # A precision that falls back to another engine runs with that engine's settings.
    settings = choice.settings or _settings(config, precision)
    record = RECORDS[EngineName(choice.engine.name)]
    return run_jobs(record, Workload(settings, H, I), arch)


def run_self_test(config: ResolvedConfig, precision: str, device: str) -> list[TensorCheck]:
    """Forward and backward of a small MoE on the engine `config` chooses, checked against fp64.

    Args:
        config: settings in force; `precision` overrides its `fp8_mode`.
        precision: "bf16" (unquantised operands) or "fp8" (the configuration's recipe).
        device: "cpu" or "cuda:0".

    Raises:
        EngineUnavailableError, ConfigError: the configuration asks for what this machine or build
            cannot do.
    """
    choice = engine_for(config, precision, device)
    settings = choice.settings or _settings(config, precision)
    problem = Problem(Workload(settings, H, I), device)
    computed, wanted = problem.train(choice.engine), _golden(problem)
    return [
        compare(precision, choice.engine.name, name, computed[name].astype(np.float64), values)
        for name, values in wanted.items()
    ]


def _golden(problem: Problem) -> dict[str, Array]:
    """In fp64, because on a host the engine that is tested is the trial's own reference."""
    x, w1, w2, dout = map(to_numpy, (problem.x, problem.w1, problem.w2, problem.dout))
    arrays = (x, problem.indices, problem.probs, w1, w2, dout)
    golden = golden_tensors(StepDump("self-test", StepSettings(recipe=None), *arrays))
    return {_NAMES.get(name, name): golden[name] for name in TENSORS}


def _settings(config: ResolvedConfig, precision: str) -> EngineSettings:
    if config.fp8 != (precision == "fp8"):
        config = config.replace(fp8_mode="perf" if precision == "fp8" else "off")
    return EngineSettings.from_config(config, ActivationType.SWIGLU)


def compare(precision: str, engine: str, name: str, computed: Array, wanted: Array) -> TensorCheck:
    """Cosine and relative RMSE of two arrays against the limits of the precision."""
    norm = float(np.linalg.norm(wanted))
    # A result of zeros has no direction: dividing by NaN makes the check fail instead of raising.
    cosine = float((computed * wanted).sum() / (float(np.linalg.norm(computed)) * norm or math.nan))
    error = float(np.linalg.norm(computed - wanted)) / norm
    least_cosine, most_error = LIMITS[precision]
    return TensorCheck(
        precision, engine, name, cosine, error, cosine >= least_cosine and error <= most_error
    )
