"""Names shared by every layer. Members and values of the first two follow upstream SonicMoE, so
that user code keeps working.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from .errors import ConfigError

Named = TypeVar("Named", bound=Enum)


class KernelBackendMoE(Enum):
    """Which implementation `MoE.forward` runs."""

    scattermoe = "scattermoe"
    torch = "torch"
    sonicmoe = "sonicmoe"


class ActivationType(Enum):
    """The expert's activation; the first four are gated.

    Upstream has seven, gated ones of the form `act(gate) * up`. `SWIGLU_OAI` is GPT-OSS's, with
    alpha 1.702 and limit 7: `gate = min(gate, limit)`, `up = clamp(up, -limit, limit)`, `gate *
    sigmoid(alpha * gate) * (up + 1)`.
    """

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    REGLU = "reglu"
    SWIGLU_OAI = "swiglu_oai"

    RELU_SQ = "relu_sq"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"


GATED_ACTIVATIONS = frozenset(
    {ActivationType.SWIGLU, ActivationType.GEGLU, ActivationType.REGLU, ActivationType.SWIGLU_OAI}
)


def is_glu(activation_type: ActivationType) -> bool:
    """Whether the up-projection has a gate and an up half."""
    return activation_type in GATED_ACTIVATIONS


class ZCode(Enum):
    """Storage of the pre-activation `z` kept for backward. It is no GEMM operand, so any 8-bit code
    will do.
    """

    INT8 = "int8"
    E4M3 = "e4m3"
    BF16 = "bf16"


class EngineName(Enum):
    """Engines behind the seam; `AUTO` lets `choose_engine` decide and say why."""

    AUTO = "auto"
    REFERENCE = "reference"
    BF16 = "bf16"
    HOPPER = "hopper"


class FlushMode(Enum):
    """When the native fp32 accumulators are added into `main_grad`."""

    STEP = "step"
    BACKWARD = "backward"


def member_of(enum: type[Named], value: Any, argument: str) -> Named:
    """The member that `value` is or names.

    Raises:
        ConfigError: naming `argument`, what came and every value there is.
    """
    try:
        return enum(value)
    except ValueError:
        raise ConfigError(
            f"{argument} is {value!r}; needed: one of {[member.value for member in enum]}"
        ) from None
