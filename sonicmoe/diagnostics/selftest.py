"""The half of the doctor that needs a loaded framework: the device it sees, and one engine against
a plain fp64 computation.

Legend: T tokens, K slots, E experts, H hidden, I intermediate; native weights `w1 [E, 2I, H]`
(gate, up interleaved), `w2 [E, H, I]`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from ..config import ResolvedConfig
from ..engine.capabilities import RECORDS
from ..engine.cold_start import run_jobs
from ..engine.interface import EngineSettings, NativeBuffer
from ..engine.select import ENGINES, EngineChoice, choose_engine, ready_engine, unavailable
from ..engine.settings import Workload
from ..engine.trust import Subject, is_untried
from ..enums import ActivationType, EngineName
from ..jit.plan import CompileJob
from ..routing.backends import arch_of
from ..routing.build import build_routing
from .golden_stages import golden_tensors
from .step_dump import Array, StepDump, StepSettings

Tensor = torch.Tensor

T, K, E, H, I = 64, 3, 4, 256, 128

# Least cosine, most relative RMSE. The worst of all recipes and z codes is 9.0 % (dprobs, e4m3 z);
# BF16 rounding leaves 0.4 %.
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
    settings, engine = choice.settings or _settings(config, precision), choice.engine
    indices, probs, values = problem()
    x, w1, w2, dout = (torch.tensor(value, device=device).to(torch.bfloat16) for value in values)
    routing = build_routing(
        torch.tensor(indices, device=device),
        torch.tensor(probs, device=device),
        E,
        alignment=settings.row_alignment,
    )
    weights = engine.prepare_weights(w1, w2, None, None, settings)
    out, saved = engine.forward(x, routing, weights, settings)
    assert saved is not None
    sums = NativeBuffer.zeros(E, 2 * I, H, I, bias=False, device=device)
    dx, dprobs = engine.backward(dout, saved, weights, sums)

    computed = {"out": out, "dx": dx, "dprobs": dprobs, "dw1": sums.dw1, "dw2": sums.dw2}
    arrays = (to_numpy(x), indices, probs, to_numpy(w1), to_numpy(w2), to_numpy(dout))
    wanted = golden_tensors(StepDump("self-test", StepSettings(recipe=None), *arrays))
    wanted["dprobs"] = wanted.pop("ds")
    return [
        compare(precision, engine.name, name, to_numpy(tensor), wanted[name])
        for name, tensor in computed.items()
    ]


def _settings(config: ResolvedConfig, precision: str) -> EngineSettings:
    if config.fp8 != (precision == "fp8"):
        config = config.replace(fp8_mode="perf" if precision == "fp8" else "off")
    return EngineSettings.from_config(config, ActivationType.SWIGLU)


def problem() -> tuple[Array, Array, tuple[Array, Array, Array, Array]]:
    """Seeded Gaussian `(indices, probs, (x, w1, w2, dout))`: distinct ids, both spellings of "not
    here", the last expert idle.
    """
    rng = np.random.default_rng(0)
    indices = np.stack([rng.permutation(E - 1)[:K] for _ in range(T)])
    # Both spellings of a slot that is not here, so that a mistake in either makes the self-test
    # fail.
    indices[::5, 1] = -1
    indices[::7, 0] = E
    probs = rng.uniform(0.1, 1.0, (T, K)).astype(np.float32)
    shapes = {"x": (T, H), "w1": (E, 2 * I, H), "w2": (E, H, I), "dout": (T, H)}
    spread = {"w1": 1 / math.sqrt(H), "w2": 1 / math.sqrt(I)}
    x, w1, w2, dout = (
        (rng.standard_normal(shape) * spread.get(name, 1.0)).astype(np.float32)
        for name, shape in shapes.items()
    )
    return indices.astype(np.int64), probs, (x, w1, w2, dout)


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


def to_numpy(tensor: Tensor) -> Array:
    """fp64 copy on the host."""
    return np.asarray(tensor.detach().to(torch.float32).cpu().numpy(), dtype=np.float64)
