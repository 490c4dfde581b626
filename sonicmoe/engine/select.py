"""Which engine runs, and why: one decision, one log line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..enums import EngineName
from ..errors import EngineUnavailableError
from ..kernels.limits import FP8_RECIPE
from ..kernels.quack_gemm import MlpShape
from ..quant.recipes import RECIPES
from .bf16 import Bf16Engine, bf16_unavailable
from .hopper import HopperEngine, hopper_unavailable
from .interface import Engine, EngineSettings
from .reference import ReferenceEngine

logger = logging.getLogger("sonicmoe")

ENGINES: dict[EngineName, Callable[[], Engine]] = {
    EngineName.REFERENCE: ReferenceEngine,
    EngineName.BF16: Bf16Engine,
    EngineName.HOPPER: HopperEngine,
}


@dataclass(frozen=True)
class Workload:
    """What is to be computed, as far as it decides which engine can: sizes and dtype are of the
    experts and their tokens.
    """

    settings: EngineSettings
    hidden_size: int
    intermediate_size: int
    dtype: str = "bfloat16"
    bias: bool = False


@dataclass(frozen=True)
class EngineChoice:
    """The engine to run and the reason, in words fit for a log line.

    falls_back: a faster one was wanted and cannot run. settings: what to run it with, where not
    with the workload's own.
    """

    engine: Engine
    reason: str
    falls_back: bool = False
    settings: EngineSettings | None = None


def choose_engine(
    device: str, requested: EngineName = EngineName.AUTO, workload: Workload | None = None
) -> EngineChoice:
    """Decide for tensors on `device` ("cpu", "cuda:0"); without a workload, for settings that every
    engine can compute.

    Raises:
        EngineUnavailableError: `requested` names an engine that this device or workload cannot use;
            the message says why.
    """
    if requested is EngineName.AUTO:
        return _automatic(device, workload)
    reason = _unavailable(requested, device, workload)
    if reason is not None:
        able = [name.value for name in ENGINES if _unavailable(name, device, workload) is None]
        raise EngineUnavailableError(
            f"engine {requested.value!r} cannot run: {reason}; able: {able}, or 'auto'"
        )
    return EngineChoice(ENGINES[requested](), "asked for by the configuration")


def _automatic(device: str, workload: Workload | None) -> EngineChoice:
    plain = f"plain tensor operations in fp32, {_emulation(workload)}"
    if device == "cpu":
        return EngineChoice(ReferenceEngine(), f"no GPU: {plain}")
    wanted = (
        EngineName.BF16
        if workload is None or workload.settings.recipe is None
        else EngineName.HOPPER
    )
    reason = _unavailable(wanted, device, workload)
    if reason is not None:
        return _fallback(device, workload, f"not {wanted.value}: {reason}", plain)
    what = (
        "FP8 GEMMs with fused activation"
        if wanted is EngineName.HOPPER
        else "grouped GEMMs in the dtype of the tokens"
    )
    return EngineChoice(ENGINES[wanted](), f"a Hopper GPU: {what}")


def _emulation(workload: Workload | None) -> str:
    if workload is None:
        return "FP8, where it is on, emulated exactly"
    recipe = workload.settings.recipe
    return "FP8 off" if recipe is None else f"FP8 emulated exactly (recipe {recipe.name})"


def _fallback(device: str, workload: Workload | None, problem: str, plain: str) -> EngineChoice:
    """For FP8 that the GPU engine cannot compute, BF16 that it can: emulating it would be hundreds
    of times slower.
    """
    if workload is not None and workload.settings.recipe is not None:
        settings = replace(workload.settings, recipe=None)
        if _unavailable(EngineName.BF16, device, replace(workload, settings=settings)) is None:
            reason = f"{problem}; grouped GEMMs in the dtype of the tokens, without FP8"
            return EngineChoice(Bf16Engine(), reason, falls_back=True, settings=settings)
    return EngineChoice(ReferenceEngine(), f"{problem}; {plain}", falls_back=True)


def _unavailable(name: EngineName, device: str, workload: Workload | None) -> str | None:
    """Why this engine cannot serve this workload on this device, or None."""
    if name is EngineName.REFERENCE:
        return None
    if workload is None:  # the device and packages; nothing else is known
        fp8 = EngineSettings(recipe=RECIPES[FP8_RECIPE])
        return (
            hopper_unavailable(device, fp8)
            if name is EngineName.HOPPER
            else bf16_unavailable(device)
        )
    settings, sizes = workload.settings, (workload.hidden_size, workload.intermediate_size)
    if name is EngineName.HOPPER:
        return hopper_unavailable(device, settings, workload.dtype, sizes, workload.bias)
    if settings.recipe is not None:
        return f"FP8 is on (recipe {settings.recipe.name!r}), and it quantises nothing"
    return bf16_unavailable(
        device, workload.dtype, MlpShape(*sizes, settings.activation, workload.dtype, workload.bias)
    )


_LOGGED: set[tuple[str, str, str]] = set()


def announce(choice: EngineChoice, device: str) -> None:
    """Log the choice once per engine, device and reason; as a warning where it is a fallback."""
    key = (choice.engine.name, device, choice.reason)
    if key not in _LOGGED:
        _LOGGED.add(key)
        level = logging.WARNING if choice.falls_back else logging.INFO
        logger.log(level, "engine %s on %s: %s", choice.engine.name, device, choice.reason)
