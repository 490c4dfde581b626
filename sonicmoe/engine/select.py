"""Which engine runs, and why: one decision, one log line. `capabilities.py` says who can compute
what.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..enums import EngineName
from ..errors import EngineUnavailableError
from ..log import log_once
from ..routing.backends import arch_of
from .bf16 import Bf16Engine
from .blackwell.mxfp8 import Mxfp8Engine
from .capabilities import (
    HOST,
    RECORDS,
    format_problem,
    lost_on_gpus,
    missing_tool,
    problem,
    remedy,
)
from .cold_start import compile_missing
from .hopper import HopperEngine
from .interface import Engine
from .reference import ReferenceEngine
from .settings import EngineSettings, TokenFormat, Workload
from .triton import TritonEngine
from .trust import Subject, refusal, require_tried, trusted

ENGINES: dict[EngineName, Callable[[], Engine]] = {
    EngineName.REFERENCE: ReferenceEngine,
    EngineName.BF16: Bf16Engine,
    EngineName.HOPPER: HopperEngine,
    EngineName.TRITON: TritonEngine,
    EngineName.MXFP8: Mxfp8Engine,
}


@dataclass(frozen=True)
class EngineChoice:
    """The engine to run and the reason, in words fit for a log line.

    falls_back: a faster one was wanted and cannot run. settings: what to run it with, where not
    with the workload's own. on_gpus: what FP8 that is emulated on the host loses on a GPU, None where
    nothing. dequantises: why the caller must hand it the values of quantised tokens
    in bfloat16; None where it takes the workload's tokens as they are.
    """

    engine: Engine
    reason: str
    falls_back: bool = False
    settings: EngineSettings | None = None
    on_gpus: str | None = None
    dequantises: str | None = None

    @property
    def name(self) -> EngineName:
        return EngineName(self.engine.name)

    def computed(self, workload: Workload) -> Workload:
        """What the engine runs of a workload."""
        return replace(workload, settings=self.settings or workload.settings)


def choose_engine(
    device: str, requested: EngineName = EngineName.AUTO, workload: Workload | None = None
) -> EngineChoice:
    """Decide for tensors on `device` ("cpu", "cuda:0"); without a workload, for settings that every
    engine can compute. EngineUnavailableError, which says why, where `requested` names an engine
    that this device or workload cannot use.
    """
    return _choose(device, _arch(device), requested, workload)


def _choose(
    device: str, arch: str, requested: EngineName, workload: Workload | None
) -> EngineChoice:
    # The format of the tokens has no say in which engine runs: one that cannot read quantised tokens
    # reads their values, and is still faster than another engine.
    plain = None if workload is None else replace(workload, tokens=TokenFormat.PLAIN)
    choice = (
        _automatic(device, arch, plain)
        if requested is EngineName.AUTO
        else _named(device, arch, requested, plain)
    )
    if workload is None or workload.tokens is TokenFormat.PLAIN:
        return choice
    settings = choice.computed(workload).settings
    return replace(
        choice, dequantises=format_problem(RECORDS[choice.name], settings, workload.tokens)
    )


def _named(device: str, arch: str, name: EngineName, workload: Workload | None) -> EngineChoice:
    reason = _refused(name, device, arch, workload)
    if reason is not None:
        able = [one.value for one in ENGINES if _refused(one, device, arch, workload) is None]
        raise EngineUnavailableError(
            f"engine {name.value!r} cannot run: {reason}; able: {able}, or 'auto'"
        )
    return EngineChoice(ENGINES[name](), "asked for by the configuration")


def ready_engine(device: str, requested: EngineName, workload: Workload) -> EngineChoice:
    """`choose_engine`, and everything compiled that a run on that engine needs; on an architecture
    where it never ran, an engine that has passed its trial. Errors as `choose_engine`;
    EngineUnavailableError too where a capture comes before the trial.
    """
    arch = _arch(device)
    while True:
        choice = _choose(device, arch, requested, workload)
        # An engine that fails its trial is not chosen again, so this ends.
        if arch == HOST or _is_ready(choice, device, arch, workload):
            return choice


def _is_ready(choice: EngineChoice, device: str, arch: str, workload: Workload) -> bool:
    computed, record = choice.computed(workload), RECORDS[choice.name]
    subject = Subject(ENGINES[choice.name], record, computed, device, arch)
    # A capture follows forwards that have loaded every kernel. So nothing is compiled ahead here,
    # and nothing tried: a trial would not be part of the graph.
    if _is_capturing():
        require_tried(subject)
        return True
    compile_missing(record, computed, arch)
    return trusted(subject)


def _is_capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


def unavailable(name: EngineName, device: str, workload: Workload | None = None) -> str | None:
    """Why this engine cannot serve this workload on this device, or None."""
    return _refused(name, device, _arch(device), workload)


def _refused(name: EngineName, device: str, arch: str, workload: Workload | None) -> str | None:
    if name is EngineName.REFERENCE:  # nothing is left to fall back to, and its border says more
        return None
    record = RECORDS[name]
    reason = problem(record, workload, arch)
    if reason is not None or arch == HOST:
        return reason
    # Asked in the order of what they cost: a trial's verdict lies in a file.
    reason = missing_tool(record, workload, arch)
    if reason is not None or workload is None:
        return reason
    return refusal(Subject(ENGINES[name], record, workload, device, arch))


def _arch(device: str) -> str:
    return arch_of(device) if device.startswith("cuda") else HOST


def _automatic(device: str, arch: str, workload: Workload | None) -> EngineChoice:
    """The first engine with kernels, in the order of the records, that computes this precision."""
    plain = f"{RECORDS[EngineName.REFERENCE].gemms}, {_emulation(workload)}"
    fp8 = workload is not None and workload.settings.recipe is not None
    if arch == HOST:
        lost = lost_on_gpus(workload) if workload is not None and fp8 else None
        return EngineChoice(ReferenceEngine(), f"no GPU: {plain}", on_gpus=lost)
    name, problems = _first_able(device, arch, workload, fp8)
    if name is not None:
        architecture = RECORDS[name].architecture(arch)
        assert architecture is not None
        why = f"{problems};" if problems else f"a {architecture.generation} GPU:"
        reason = f"{why} {RECORDS[name].gemms}"
        return EngineChoice(ENGINES[name](), reason, falls_back=bool(problems))
    if workload is not None and fp8:
        # Without the recipe a GPU is hundreds of times faster than plain operations that emulate it.
        settings = replace(workload.settings, recipe=None)
        unquantised = replace(workload, settings=settings)
        name, more = _first_able(device, arch, unquantised, fp8=False)
        problems = "; ".join(filter(None, (problems, more)))
        if name is not None:
            reason = f"{problems}; {RECORDS[name].gemms}, without FP8"
            return EngineChoice(ENGINES[name](), reason, falls_back=True, settings=settings)
    reason = f"{problems}; {plain}{remedy(workload)}"
    return EngineChoice(ReferenceEngine(), reason, falls_back=True)


def _first_able(
    device: str, arch: str, workload: Workload | None, fp8: bool
) -> tuple[EngineName | None, str]:
    """The engine, and why not those before it that are made for this GPU; in its absence, why none
    can: "not hopper: ...".
    """
    problems: list[str] = []
    made_for_it: list[str] = []
    for name, record in RECORDS.items():
        if record.serves_auto(fp8):
            reason = _refused(name, device, arch, workload)
            if reason is None:
                return name, "; ".join(made_for_it)
            problems.append(f"not {name.value}: {reason}")
            if record.architecture(arch) is not None:
                made_for_it.append(problems[-1])
    return None, "; ".join(problems)


def _emulation(workload: Workload | None) -> str:
    if workload is None:
        return "FP8, where it is on, emulated exactly"
    recipe = workload.settings.recipe
    return "FP8 off" if recipe is None else f"FP8 emulated exactly (recipe {recipe.name})"


def announce(choice: EngineChoice, device: str) -> None:
    """Log the choice once per engine, device and reason, and what the user loses by it as warnings:
    a fallback, quantised tokens that are dequantised, FP8 that is emulated and that no GPU computes.
    """
    level = logging.WARNING if choice.falls_back else logging.INFO
    lines = [(level, "engine %s on %s: %s", choice.reason)]
    if choice.dequantises is not None:
        lines.append((logging.WARNING, _values_are_read("tokens"), choice.dequantises))
    if choice.on_gpus is not None:
        lines.append((logging.WARNING, "engine %s on %s emulates FP8, but %s", choice.on_gpus))
    for severity, words, reason in lines:
        log_once(severity, words, choice.engine.name, device, reason)


def announce_values(what: str, engine: str, device: str, reason: str) -> None:
    """Log once that tokens or gradients which arrive in FP8 are dequantised for an engine."""
    log_once(logging.WARNING, _values_are_read(what), engine, device, reason)


def _values_are_read(what: str) -> str:
    # A warning, because they were rounded to 8 bits and the engine reads 16.
    return f"engine %s on %s: {what} that arrive in FP8 are dequantised to bfloat16, because %s"
