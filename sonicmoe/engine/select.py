"""Which engine runs, and why: one decision, one log line."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from ..enums import EngineName
from ..errors import EngineUnavailableError
from .interface import Engine
from .reference import ReferenceEngine

logger = logging.getLogger("sonicmoe")

# Engines of this build, by name. A GPU engine registers here together with the test that says where it can run.
ENGINES: dict[EngineName, Callable[[], Engine]] = {EngineName.REFERENCE: ReferenceEngine}


@dataclass(frozen=True)
class EngineChoice:
    """The engine to run and the reason, in words fit for a log line."""

    engine: Engine
    reason: str


def choose_engine(device: str, requested: EngineName = EngineName.AUTO) -> EngineChoice:
    """Decide for tensors on `device` ("cpu", "cuda:0").

    Raises:
        EngineUnavailableError: `requested` names an engine this build does not have or this device cannot run.
    """
    if requested is EngineName.AUTO:
        place = "no GPU" if device == "cpu" else f"no GPU engine in this build for {device}"
        return EngineChoice(ReferenceEngine(), f"{place}: plain tensor operations in fp32, FP8 emulated exactly")
    if requested not in ENGINES:
        available = sorted(name.value for name in ENGINES)
        raise EngineUnavailableError(
            f"engine {requested.value!r} is not part of this build; available: {available}, or 'auto'"
        )
    return EngineChoice(ENGINES[requested](), "asked for by the configuration")


_LOGGED: set[tuple[str, str]] = set()


def announce(choice: EngineChoice, device: str) -> None:
    """Log the choice once per engine and device."""
    key = (choice.engine.name, device)
    if key not in _LOGGED:
        _LOGGED.add(key)
        logger.info("engine %s on %s: %s", choice.engine.name, device, choice.reason)
