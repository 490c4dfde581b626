"""What a training run of a model needs compiled: kernels register, `plan` collects.

A kernel's module registers a function from (model, configuration) to its compile jobs, and is listed in
`PROVIDER_MODULES`. Such modules describe kernels; they import neither a framework nor a compiler.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Protocol, TypeVar

from ..config import ResolvedConfig, current_config
from ..enums import ActivationType
from ..errors import ConfigError, expect
from .cache import CompileCache
from .key import CompileKey
from .manifest import Artefact

PROVIDER_MODULES: tuple[str, ...] = (
    "sonicmoe.jit.probe",
    "sonicmoe.kernels",
    "sonicmoe.kernels.cuda_quantize",
    "sonicmoe.kernels.cuda_wgrad",
    "sonicmoe.kernels.quack_gemm",
    "sonicmoe.kernels.sm90",
)
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ModelSpec:
    """The static dimensions of one expert MLP on one rank. Token counts are absent: no artefact depends on them.

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
            expect(isinstance(value, int) and value > 0, ConfigError, f"{name}={value!r}; needed: a positive integer")
        expect(self.dtype in DTYPES, ConfigError, f"dtype={self.dtype!r}; needed: one of {list(DTYPES)}")
        known = [member.value for member in ActivationType]
        expect(self.activation in known, ConfigError, f"activation={self.activation!r}; needed: one of {known}")

    @property
    def digest(self) -> str:
        """16 hex digits that name this model's warm-up record."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


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
    """Register a function as the source of compile jobs of the kernel family `name`; a later one replaces it."""

    def register(provider: Registered) -> Registered:
        _PROVIDERS[name] = provider
        return provider

    return register


def plan(spec: ModelSpec, config: ResolvedConfig | None = None) -> tuple[CompileJob, ...]:
    """Every distinct compile job that a run of `spec` under `config` (default: the one in force) needs."""
    for module in PROVIDER_MODULES:
        importlib.import_module(module)
    settings = config or current_config()
    jobs = [job for name in sorted(_PROVIDERS) for job in _PROVIDERS[name](spec, settings)]
    return tuple(dict.fromkeys(jobs))
