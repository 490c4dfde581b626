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
from .capabilities import HOST, RECORDS, EngineRecord, missing_tool, problem, token_problem
from .cold_start import compile_missing
from .hopper import HopperEngine
from .interface import Engine
from .mxfp8 import Mxfp8Engine
from .reference import ReferenceEngine
from .settings import EngineSettings, TokenFormat, Workload
from .triton import TritonEngine
from .trust import Subject, refusal, require_tried, trusted
from .without_kernels import lost_on_gpus

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


def choose_engine(
    device: str, requested: EngineName = EngineName.AUTO, workload: Workload | None = None
) -> EngineChoice:
    """Decide for tensors on `device` ("cpu", "cuda:0"); without a workload, for settings that every
    engine can compute.

    The format of the tokens has no say in which engine runs: one that cannot read quantised tokens
    reads their values, and is still faster than another engine.

    Raises:
        EngineUnavailableError: `requested` names an engine that this device or workload cannot use;
            the message says why.
    """
    if workload is None or workload.tokens is TokenFormat.PLAIN:
        return _choose(device, requested, workload)
    choice = _choose(device, requested, replace(workload, tokens=TokenFormat.PLAIN))
    computed = replace(workload, settings=choice.settings or workload.settings)
    reason = token_problem(
        RECORDS[EngineName(choice.engine.name)], computed.settings, computed.tokens
    )
    return replace(choice, dequantises=reason)


def _choose(device: str, requested: EngineName, workload: Workload | None) -> EngineChoice:
    if requested is EngineName.AUTO:
        return _automatic(device, workload)
    reason = unavailable(requested, device, workload)
    if reason is not None:
        able = [name.value for name in ENGINES if unavailable(name, device, workload) is None]
        raise EngineUnavailableError(
            f"engine {requested.value!r} cannot run: {reason}; able: {able}, or 'auto'"
        )
    return EngineChoice(ENGINES[requested](), "asked for by the configuration")


def ready_engine(device: str, requested: EngineName, workload: Workload) -> EngineChoice:
    """`choose_engine`, and everything compiled that a run on that engine needs; on an architecture
    where it never ran, an engine that has passed its trial.

    Where a CUDA graph is captured nothing is compiled ahead and nothing tried: a capture follows
    forwards that have loaded every kernel.

    Raises:
        EngineUnavailableError: as `choose_engine`, or a capture comes before the trial.
    """
    while True:
        choice = choose_engine(device, requested, workload)
        # An engine that fails its trial is not chosen again.
        if not device.startswith("cuda") or _is_ready(choice, device, workload):
            return choice


def _is_ready(choice: EngineChoice, device: str, workload: Workload) -> bool:
    computed = replace(workload, settings=choice.settings or workload.settings)
    name, arch = EngineName(choice.engine.name), arch_of(device)
    subject = Subject(ENGINES[name], RECORDS[name], computed, device, arch)
    if _is_capturing():
        require_tried(subject)
        return True
    compile_missing(RECORDS[name], computed, arch)
    return trusted(subject)


def _is_capturing() -> bool:
    return bool(torch.cuda.is_current_stream_capturing())


def unavailable(name: EngineName, device: str, workload: Workload | None = None) -> str | None:
    """Why this engine cannot serve this workload on this device, or None."""
    if name is EngineName.REFERENCE:  # nothing is left to fall back to, and its border says more
        return None
    arch, record = _arch(device), RECORDS[name]
    reason = problem(record, workload, arch)
    if reason is not None or arch == HOST:
        return reason
    reason = missing_tool(record, workload, arch)
    if reason is not None or workload is None:
        return reason
    return refusal(Subject(ENGINES[name], record, workload, device, arch))


def _arch(device: str) -> str:
    return arch_of(device) if device.startswith("cuda") else HOST


def _automatic(device: str, workload: Workload | None) -> EngineChoice:
    """The first engine with kernels, in the order of the records, that computes this precision."""
    plain = f"{RECORDS[EngineName.REFERENCE].gemms}, {_emulation(workload)}"
    if _arch(device) == HOST:
        emulates = workload is not None and workload.settings.recipe is not None
        lost = lost_on_gpus(workload) if workload is not None and emulates else None
        return EngineChoice(ReferenceEngine(), f"no GPU: {plain}", on_gpus=lost)
    fp8 = workload is not None and workload.settings.recipe is not None
    name, problems = _first_able(device, workload, fp8)
    if name is not None:
        why = problems or _gpu(device, RECORDS[name])
        reason = f"{why}{';' if problems else ':'} {RECORDS[name].gemms}"
        return EngineChoice(ENGINES[name](), reason, falls_back=bool(problems))
    if workload is not None and fp8:
        settings = replace(workload.settings, recipe=None)
        name, more = _first_able(device, replace(workload, settings=settings), fp8=False)
        if name is not None:  # emulating FP8 would be hundreds of times slower
            why = "; ".join(filter(None, (problems, more)))
            reason = f"{why}; {RECORDS[name].gemms}, without FP8"
            return EngineChoice(ENGINES[name](), reason, falls_back=True, settings=settings)
        problems = "; ".join(filter(None, (problems, more)))
    return EngineChoice(ReferenceEngine(), f"{problems}; {plain}", falls_back=True)


def _first_able(device: str, workload: Workload | None, fp8: bool) -> tuple[EngineName | None, str]:
    """The engine, and why not those before it that are made for this GPU; in its absence, why none
    can: "not hopper: ...".
    """
    problems: list[str] = []
    made_for_it: list[str] = []
    for name, record in RECORDS.items():
        if record.architectures and record.quantises(fp8) and not record.by_name_only:
            reason = unavailable(name, device, workload)
            if reason is None:
                return name, "; ".join(made_for_it)
            problems.append(f"not {name.value}: {reason}")
            if record.architecture(_arch(device)) is not None:
                made_for_it.append(problems[-1])
    return None, "; ".join(problems)


def _gpu(device: str, record: EngineRecord) -> str:
    """ "a Hopper GPU", for the log line."""
    architecture = record.architecture(_arch(device))
    assert architecture is not None
    return f"a {architecture.generation} GPU"


def _emulation(workload: Workload | None) -> str:
    if workload is None:
        return "FP8, where it is on, emulated exactly"
    recipe = workload.settings.recipe
    return "FP8 off" if recipe is None else f"FP8 emulated exactly (recipe {recipe.name})"


def announce(choice: EngineChoice, device: str) -> None:
    """Log the choice once per engine, device and reason; as a warning where it is a fallback.
    Likewise that quantised tokens are dequantised for it, which is a warning: they were rounded to
    8 bits, and the engine reads 16.
    """
    level = logging.WARNING if choice.falls_back else logging.INFO
    log_once(level, "engine %s on %s: %s", choice.engine.name, device, choice.reason)
    if choice.dequantises is not None:
        words = "engine %s on %s: tokens that arrive in FP8 are dequantised to bfloat16, because %s"
        log_once(logging.WARNING, words, choice.engine.name, device, choice.dequantises)


def announce_emulation(choice: EngineChoice, device: str) -> None:
    """Warn once of FP8 that is emulated here and that no GPU computes."""
    if choice.on_gpus is not None:
        words = "engine %s on %s emulates FP8, but %s"
        log_once(logging.WARNING, words, choice.engine.name, device, choice.on_gpus)


def announce_gradients(engine: str, device: str, reason: str) -> None:
    """Log once that gradients which arrive in FP8 are dequantised for an engine."""
    words = "engine %s on %s: gradients that arrive in FP8 are dequantised to bfloat16, because %s"
    log_once(logging.WARNING, words, engine, device, reason)
