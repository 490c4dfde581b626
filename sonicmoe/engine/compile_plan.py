"""What a training run of a model needs compiled, from the records of the engines.

`plan` answers for one configuration, `warm_up_plan` for every setting that a program may choose
when it runs. Imports neither a framework nor a compiler.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ..config import ResolvedConfig, current_config
from ..enums import ActivationType, EngineName
from ..errors import ConfigError, expect
from ..jit.plan import BF16, BOTH, FP8, NEITHER, PRECISIONS, CompileJob, ModelSpec, WarmUpPlan
from ..kernels import EVERY_RUN
from .capabilities import RECORDS, EngineRecord, missing_package, problem
from .settings import EngineSettings, Workload

FP8_PLAIN_WGRAD = "fp8 with fp8_wgrad=0"
# The parts of a plan that each precision of the command stands for.
_PARTS = {FP8: (FP8,), BF16: (BF16,), BOTH: (FP8, BF16)}
# The settings of each part that decide what is compiled.
_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    FP8: {"fp8_mode": "perf", "fp8_wgrad": True},
    FP8_PLAIN_WGRAD: {"fp8_mode": "perf", "fp8_wgrad": False},
    BF16: {"fp8_mode": "off"},
}


def plan(spec: ModelSpec, config: ResolvedConfig | None = None) -> tuple[CompileJob, ...]:
    """Every distinct compile job that a run of `spec` under `config` (default: the one in force)
    needs, with and without biases, with stacked weights and with those of each expert apart.
    """
    settings = config or current_config()
    jobs: list[CompileJob] = []
    # The first two are seen in a model's weights, which a warm-up does not have.
    either, adapted = (False, True), (False, True) if spec.adapters else (False,)
    for bias, separate, low_rank in itertools.product(either, either, adapted):
        workload = replace(
            _workload(spec, settings), bias=bias, separate=separate, low_rank=low_rank
        )
        # The first one that can: `auto` runs no other.
        able = (r for r in _engines(settings) if _reason(r, workload, spec.arch) is None)
        for record in itertools.islice(able, 1):
            jobs += record.jobs(workload, spec.arch)
    return tuple(dict.fromkeys([*jobs, *(source(spec.arch) for source in EVERY_RUN)]))


def warm_up_plan(
    spec: ModelSpec, precision: str = BOTH, config: ResolvedConfig | None = None
) -> WarmUpPlan:
    """Every distinct compile job of runs of `spec` in `precision`, whatever FP8 mode and
    `recompute_z` they choose.

    A part without kernels for `spec` is left out: see `WarmUpPlan.left_out`. `config` (default: the
    one in force) gives the settings that are not varied: engine, recipe, storage of z. Weight
    gradients of FP8 on unquantised operands (`fp8_wgrad=False`) run on the GEMMs of BF16: theirs are
    planned where `config` has that setting, or BF16 needs them anyway.
    """
    words = f"precision={precision!r}; needed: one of {list(PRECISIONS)}"
    expect(precision in PRECISIONS, ConfigError, words)
    settings = config or current_config()
    parts = _parts(precision, settings)
    problems = _problems(parts, spec, settings)
    covered = [part for part in parts if part not in problems]
    # The kernels of every run come first: the reference engine adds none of its own.
    jobs = plan(spec, settings.replace(engine=EngineName.REFERENCE, fp8_mode="off"))
    for part in covered:
        # Both modes, because a program may choose one when memory runs short.
        for again in (False, True):
            jobs += plan(spec, settings.replace(**_SETTINGS[part], recompute_z=again))
    names = [part for part in (FP8, BF16) if part in covered]
    label = BOTH if len(names) == 2 else names[0] if names else NEITHER
    # Where FP8 as a whole has no kernels, its variant has none either: one line is enough.
    told = (part for part in problems if not (part == FP8_PLAIN_WGRAD and FP8 in problems))
    return WarmUpPlan(
        tuple(dict.fromkeys(jobs)), label, tuple(f"{part}: {problems[part]}" for part in told)
    )


def require_precision(planned: WarmUpPlan, precision: str) -> WarmUpPlan:
    """Raise ConfigError where one precision was asked for and the plan does not cover it; "both"
    takes what there is.
    """
    words = f"precision={precision!r} has no kernels for this model: {'; '.join(planned.left_out)}"
    expect(precision in (BOTH, planned.precision), ConfigError, words)
    return planned


def without_kernels(spec: ModelSpec, planned: WarmUpPlan, config: ResolvedConfig) -> str | None:
    """Why a plan of "both" has no kernels but those of every run, and the nearest sizes that an engine
    takes; None where it has some, or other sizes would not help.
    """
    if planned.precision != NEITHER:
        return None
    takes: dict[str, dict[str, None]] = {}  # sizes: engines, each once
    for settings in (config.replace(**_SETTINGS[part]) for part in _parts(BOTH, config)):
        for record in _engines(settings):
            hidden = _nearest(spec.H, record.hidden_multiple)
            near = replace(spec, H=hidden, I=_nearest(spec.I, record.intermediate_multiple))
            if _reason(record, _workload(near, settings), spec.arch) is None:
                takes.setdefault(f"H={near.H} I={near.I}", {})[record.name.value] = None
    told = "; ".join(f"{sizes} ({', '.join(engines)})" for sizes, engines in takes.items())
    words = f"no engine has kernels for this model: {'; '.join(planned.left_out)}"
    return f"{words}; the nearest sizes that one takes: {told}" if told else None


def _nearest(size: int, multiple: int) -> int:
    return max(1, round(size / multiple)) * multiple


def _parts(precision: str, config: ResolvedConfig) -> tuple[str, ...]:
    # Unquantised weight gradients need GEMMs that plain FP8 does not.
    parts = _PARTS[precision]
    plain = FP8 in parts and not config.fp8_wgrad
    return (*parts, FP8_PLAIN_WGRAD) if plain else parts


def _problems(parts: Iterable[str], spec: ModelSpec, config: ResolvedConfig) -> dict[str, str]:
    """The reasons of the parts without kernels; FP8's holds for its variants too."""
    found = {}
    for part in parts:
        settings = config.replace(**_SETTINGS[part])
        # Every engine is asked, so that the message has all reasons and not the first.
        workload, engines = _workload(spec, settings), _engines(settings)
        reasons = {r.name.value: _reason(r, workload, spec.arch) for r in engines}
        if not engines:
            found[part] = f"the configuration asks for engine {config.engine.value!r}"
        elif None not in reasons.values():
            found[part] = "; ".join(f"not {name}: {reason}" for name, reason in reasons.items())
    return found


def _engines(config: ResolvedConfig) -> list[EngineRecord]:
    """Those with kernels that compute this precision and that the configuration allows."""
    if config.engine is EngineName.AUTO:
        return [record for record in RECORDS.values() if record.serves_auto(config.fp8)]
    named = (record for name, record in RECORDS.items() if name is config.engine)
    return [record for record in named if record.architectures and record.quantises(config.fp8)]


def _reason(record: EngineRecord, workload: Workload, arch: str) -> str | None:
    """Why there is nothing to compile; a missing nvcc is an error of the compile instead."""
    return problem(record, workload, arch) or missing_package(record.jobs(workload, arch))


def _workload(spec: ModelSpec, config: ResolvedConfig) -> Workload:
    own = ActivationType(spec.activation), spec.activation_parameters
    settings = EngineSettings.from_config(config, *own)
    # fp32 master weights are rounded to the dtype of the tokens.
    dtype = "bfloat16" if spec.dtype == "float32" else spec.dtype
    return Workload(settings, spec.H, spec.I, dtype)
