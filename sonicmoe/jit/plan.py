"""What a warm-up is told and what it compiles: a model, a configuration's part, compile jobs.

`engine/compile_plan.py` fills them in.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Protocol

from ..architectures import DEFAULT_ARCH
from ..enums import ActivationParameters, ActivationType, layer_parameters
from ..errors import ConfigError, expect
from .cache import CompileCache
from .key import CompileKey
from .manifest import Artefact

DTYPES = ("bfloat16", "float16", "float32")
FP8, BF16, BOTH, NEITHER = "fp8", "bf16", "both", "neither"
PRECISIONS = (FP8, BF16, BOTH)


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
        activation_parameters: (name, value) pairs that its layers set, compiled into some kernels.
        adapters: whether the experts may have low-rank adapters.
    """

    E: int
    H: int
    I: int
    dtype: str = "bfloat16"
    activation: str = ActivationType.SWIGLU.value
    arch: str = DEFAULT_ARCH
    activation_parameters: ActivationParameters = ()
    adapters: bool = False

    def __post_init__(self) -> None:
        for name in ("E", "H", "I"):
            value = getattr(self, name)
            whole = isinstance(value, int) and value > 0
            expect(whole, ConfigError, f"{name}={value!r}; needed: a positive integer")
        known = {"dtype": list(DTYPES), "activation": [member.value for member in ActivationType]}
        for name, values in known.items():
            value = getattr(self, name)
            expect(value in values, ConfigError, f"{name}={value!r}; needed: one of {values}")
        # Pairs come back from JSON as lists. The class is frozen, so the field is set through
        # `object`.
        own = layer_parameters(ActivationType(self.activation), self.activation_parameters)
        object.__setattr__(self, "activation_parameters", own)

    def digest(self, precision: str) -> str:
        """16 hex digits that name the record of this model's warm-up for `precision`."""
        content = json.dumps({**asdict(self), "precision": precision}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class CompileJob(Protocol):
    """One artefact to compile: `CudaSource`, `CuteKernel`, `TritonVariant`. Hashable."""

    @property
    def name(self) -> str:
        """For progress and messages."""

    @property
    def effort_s(self) -> float:
        """CPU time of the compile, roughly, in seconds: of many jobs the longest begins first."""

    def key(self) -> CompileKey:
        """The compile key."""

    def compile(self, cache: CompileCache) -> Artefact:
        """The published artefact, built if needed."""


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
