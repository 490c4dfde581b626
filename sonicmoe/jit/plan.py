"""What a training run of a model needs compiled: kernels register, `plan` and `warm_up_plan`
collect.

A kernel's module registers a function from (model, configuration) to its compile jobs, and is
listed in `PROVIDER_MODULES`. Such modules describe kernels; they import neither a framework nor a
compiler. `plan` answers for one configuration, `warm_up_plan` for every setting that a program may
choose when it runs.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from ..config import ResolvedConfig, current_config
from ..enums import ActivationType, EngineName
from ..errors import ConfigError, expect
from .cache import CompileCache
from .key import CompileKey
from .manifest import Artefact

PROVIDER_MODULES: tuple[str, ...] = (
    "sonicmoe.jit.probe",
    "sonicmoe.kernels",
    "sonicmoe.kernels.cuda_quantize",
    "sonicmoe.kernels.cuda_wgrad",
    "sonicmoe.kernels.limits",
    "sonicmoe.kernels.quack_gemm",
    "sonicmoe.kernels.sm90",
)
DTYPES = ("bfloat16", "float16", "float32")

FP8, FP8_PLAIN_WGRAD, BF16, BOTH, NEITHER = "fp8", "fp8 with fp8_wgrad=0", "bf16", "both", "neither"
PRECISIONS = (FP8, BF16, BOTH)
_PARTS = {FP8: (FP8, FP8_PLAIN_WGRAD), BF16: (BF16,), BOTH: (FP8, FP8_PLAIN_WGRAD, BF16)}
# The settings of each part that decide what is compiled; providers see every one of them.
_SETTINGS: dict[str, tuple[dict[str, Any], ...]] = {
    FP8: tuple(
        {"fp8_mode": "perf", "fp8_wgrad": True, "recompute_z": again} for again in (False, True)
    ),
    FP8_PLAIN_WGRAD: tuple(
        {"fp8_mode": "perf", "fp8_wgrad": False, "recompute_z": again} for again in (False, True)
    ),
    BF16: tuple({"fp8_mode": "off", "recompute_z": again} for again in (False, True)),
}


@dataclass(frozen=True)
class ModelSpec:
    """The static dimensions of one expert MLP on one rank. Token counts are absent: no artefact
    depends on them.

    Attributes:
        E: local experts.
        H: hidden size.
        I: expert intermediate size.
        dtype: dtype of tokens and parameters.
        activation: a value of `ActivationType`.
        arch: the GPU architecture to compile for.
    """

    E: int
    H: int
    I: int
    dtype: str = "bfloat16"
    activation: str = ActivationType.SWIGLU.value
    arch: str = "sm_90a"

    def __post_init__(self) -> None:
        """Refuse what no kernel could be compiled for."""
        for name in ("E", "H", "I"):
            value = getattr(self, name)
            expect(
                isinstance(value, int) and value > 0,
                ConfigError,
                f"{name}={value!r}; needed: a positive integer",
            )
        expect(
            self.dtype in DTYPES,
            ConfigError,
            f"dtype={self.dtype!r}; needed: one of {list(DTYPES)}",
        )
        known = [member.value for member in ActivationType]
        expect(
            self.activation in known,
            ConfigError,
            f"activation={self.activation!r}; needed: one of {known}",
        )

    def digest(self, precision: str) -> str:
        """16 hex digits that name the record of this model's warm-up for `precision`."""
        content = json.dumps({**asdict(self), "precision": precision}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class CompileJob(Protocol):
    """One artefact to compile: `CudaSource`, `CuteKernel`, `TritonVariant`. Picklable."""

    @property
    def name(self) -> str:
        """For progress and messages."""

    def key(self) -> CompileKey:
        """The compile key."""

    def compile(self, cache: CompileCache) -> Artefact:
        """The published artefact, built if needed."""


Provider = Callable[[ModelSpec, ResolvedConfig], Iterable[CompileJob]]
Registered = TypeVar("Registered", bound=Provider)
_PROVIDERS: dict[str, Provider] = {}


def provides(name: str) -> Callable[[Registered], Registered]:
    """Register a function as the source of compile jobs of the kernel family `name`; a later one
    replaces it.
    """

    def register(provider: Registered) -> Registered:
        _PROVIDERS[name] = provider
        return provider

    return register


Limit = Callable[[ModelSpec, ResolvedConfig], str | None]
RegisteredLimit = TypeVar("RegisteredLimit", bound=Limit)
_LIMITS: dict[str, Limit] = {}


def limits(part: str) -> Callable[[RegisteredLimit], RegisteredLimit]:
    """Register a function that says why `part` of a warm-up has no kernels for a model, or None
    where it has.
    """

    def register(limit: RegisteredLimit) -> RegisteredLimit:
        _LIMITS[part] = limit
        return limit

    return register


def plan(spec: ModelSpec, config: ResolvedConfig | None = None) -> tuple[CompileJob, ...]:
    """Every distinct compile job that a run of `spec` under `config` (default: the one in force)
    needs.
    """
    _import_providers()
    settings = config or current_config()
    jobs = [job for name in sorted(_PROVIDERS) for job in _PROVIDERS[name](spec, settings)]
    return tuple(dict.fromkeys(jobs))


@dataclass(frozen=True)
class WarmUpPlan:
    """What a warm-up compiles.

    Attributes:
        jobs: distinct compile jobs.
        precision: what they cover: "fp8", "bf16", "both" or "neither" (routing, aggregation, flush
            alone).
        left_out: for each part that was asked for and has no kernels, a line with the reason.
    """

    jobs: tuple[CompileJob, ...]
    precision: str
    left_out: tuple[str, ...] = ()


def warm_up_plan(
    spec: ModelSpec, precision: str = BOTH, config: ResolvedConfig | None = None
) -> WarmUpPlan:
    """Every distinct compile job of runs of `spec` in `precision`, whatever FP8 mode, weight
    gradients and `recompute_z` they choose.

    A part without kernels for `spec` is left out: see `WarmUpPlan.left_out`. `config` (default: the
    one in force) gives the
    settings that are not varied: engine, recipe, storage of z.
    """
    expect(
        precision in PRECISIONS,
        ConfigError,
        f"precision={precision!r}; needed: one of {list(PRECISIONS)}",
    )
    _import_providers()
    settings = config or current_config()
    problems = _problems(_PARTS[precision], spec, settings)
    covered = [part for part in _PARTS[precision] if part not in problems]
    jobs = plan(
        spec, settings.replace(engine=EngineName.REFERENCE, fp8_mode="off")
    )  # what every run needs
    for part in covered:
        for changes in _SETTINGS[part]:
            jobs += plan(spec, settings.replace(**changes))
    names = [part for part in (FP8, BF16) if part in covered]
    label = BOTH if len(names) == 2 else names[0] if names else NEITHER
    # Where FP8 as a whole has none, so has its variant: one line is enough.
    told = (part for part in problems if not (part == FP8_PLAIN_WGRAD and FP8 in problems))
    return WarmUpPlan(
        tuple(dict.fromkeys(jobs)), label, tuple(f"{part}: {problems[part]}" for part in told)
    )


def require(planned: WarmUpPlan, precision: str) -> WarmUpPlan:
    """Raise ConfigError where one precision was asked for and the plan does not cover it; "both"
    takes what there is.
    """
    expect(
        precision in (BOTH, planned.precision),
        ConfigError,
        f"precision={precision!r} has no kernels for this model: {'; '.join(planned.left_out)}",
    )
    return planned


def _problems(parts: Iterable[str], spec: ModelSpec, settings: ResolvedConfig) -> dict[str, str]:
    """The reasons of the parts without kernels; FP8's holds for its variants too."""
    found = {
        part: reason
        for part in parts
        if part in _LIMITS and (reason := _LIMITS[part](spec, settings))
    }
    if FP8 in found:
        found[FP8_PLAIN_WGRAD] = found[FP8]
    return found


def _import_providers() -> None:
    for module in PROVIDER_MODULES:
        importlib.import_module(module)
