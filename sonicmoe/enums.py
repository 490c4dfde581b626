"""Names shared by every layer, and the records of the activations. Members and values of the first
two enumerations follow upstream SonicMoE, so that user code keeps working.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any, TypeVar

from .errors import ConfigError

Named = TypeVar("Named", bound=Enum)


class KernelBackendMoE(Enum):
    """Which implementation `MoE.forward` runs."""

    # A name of upstream's, which `MoE.forward` refuses.
    scattermoe = "scattermoe"
    torch = "torch"
    sonicmoe = "sonicmoe"
    sonicmoe_fp8 = "sonicmoe_fp8"


class ActivationType(Enum):
    """The expert's activation. The first seven are gated. `ACTIVATIONS` has the record of each."""

    SWIGLU = "swiglu"
    GEGLU = "geglu"
    REGLU = "reglu"
    SWIGLU_OAI = "swiglu_oai"
    SWIGLU_CLAMP = "swiglu_clamp"
    SITU_GLU = "situ_glu"
    GEGLU_TANH = "geglu_tanh"

    RELU_SQ = "relu_sq"
    RELU = "relu"
    GELU = "gelu"
    SILU = "silu"
    GELU_TANH = "gelu_tanh"


class EngineName(Enum):
    """Engines behind the seam; `AUTO` lets `choose_engine` decide and say why."""

    AUTO = "auto"
    REFERENCE = "reference"
    BF16 = "bf16"
    HOPPER = "hopper"
    TRITON = "triton"
    MXFP8 = "mxfp8"


@dataclass(frozen=True)
class Parameter:
    """A number of an activation that a layer may set for itself, from `low` to `high`.

    An infinite default means that the parameter does nothing unless a layer sets it.
    """

    name: str
    default: float
    low: float = -inf
    high: float = inf

    def read(self, value: float | None) -> float:
        """The value that a layer gives, checked; None stands for an infinite default. ConfigError
        where it is no finite number, or lies outside the range.
        """
        if self.default == inf and (value is None or value == inf):
            return inf
        if (
            isinstance(value, int | float)
            # To Python True is an int.
            and not isinstance(value, bool)
            # Comparisons with NaN are false, so NaN is refused too.
            and abs(value) < inf
            and self.low <= value <= self.high
        ):
            return float(value)
        raise ConfigError(f"activation_parameters[{self.name!r}] is {value!r}; needed: {self}")

    def __str__(self) -> str:
        """The values it takes, in words."""
        off = ", or None to leave it out" if self.default == inf else ""
        ranged = f" from {self.low} to {self.high}" if self.low > -inf else ""
        return f"a number{ranged}{off}"


# An engine computes in fp32 with a bound and with its reciprocal. Outside these powers of two one of
# them would be subnormal or infinite.
def _bound(name: str, default: float) -> Parameter:
    return Parameter(name, default, low=2.0**-126, high=2.0**126)


@dataclass(frozen=True)
class Activation:
    """What an activation is.

    Attributes:
        formula: y1 as an expression of `x` (ungated), or of `gate` and `up`, and of the parameters.
            It may use + - * / **, numbers, the functions of `diagnostics/formulas.py`, and the
            names of ungated activations. The golden of `bisect` evaluates this text and its
            derivative.
        source: who defined it.
        kernels: the engines whose kernels compute it, beside the reference engine, which computes
            all.
        base: of a gated one `base(gate) * up`, the ungated activation; None for other gates.
        parameters: the numbers that a layer may set for itself.
    """

    formula: str
    source: str
    kernels: frozenset[EngineName]
    gated: bool = False
    base: ActivationType | None = None
    parameters: tuple[Parameter, ...] = ()

    @property
    def clamps(self) -> bool:
        """Whether its gradient ends at the parameter `limit`: of gate, and of up on both sides."""
        return any(parameter.name == "limit" for parameter in self.parameters)

    def values(self, overrides: ActivationParameters = ()) -> dict[str, float]:
        """Every parameter by name, at its default where `overrides` does not set it."""
        defaults = {parameter.name: parameter.default for parameter in self.parameters}
        return {**defaults, **dict(overrides)}


# (name, value) pairs of the parameters that a layer sets, sorted by name.
ActivationParameters = tuple[tuple[str, float], ...]

_BF16 = frozenset({EngineName.BF16, EngineName.TRITON})
_BOTH = _BF16 | {EngineName.HOPPER}
_GLU = "Shazeer, arXiv:2002.05202"

ACTIVATIONS: Mapping[ActivationType, Activation] = {
    ActivationType.SWIGLU: Activation(
        "silu(gate) * up", _GLU, _BOTH, gated=True, base=ActivationType.SILU
    ),
    ActivationType.GEGLU: Activation(
        "gelu(gate) * up", _GLU, _BOTH, gated=True, base=ActivationType.GELU
    ),
    ActivationType.REGLU: Activation(
        "relu(gate) * up", _GLU, _BOTH, gated=True, base=ActivationType.RELU
    ),
    ActivationType.SWIGLU_OAI: Activation(
        "min(gate, limit) * sigmoid(alpha * min(gate, limit)) * (clamp(up, -limit, limit) + 1)",
        "GPT-OSS, arXiv:2508.10925",
        _BOTH,
        gated=True,
        parameters=(Parameter("alpha", 1.702), _bound("limit", 7.0)),
    ),
    # An activation of its own and not a parameter of SwiGLU: whoever takes SwiGLU for
    # silu(gate) * up stays right, and no engine can overlook a limit.
    ActivationType.SWIGLU_CLAMP: Activation(
        "silu(min(gate, limit)) * clamp(up, -limit, limit)",
        "DeepSeek-V4; activation_func_clamp_value of PaddleFleet",
        _BOTH,
        gated=True,
        parameters=(_bound("limit", 10.0),),
    ),
    # softcap(x, c) is c * tanh(x / c), and x where c is infinite.
    ActivationType.SITU_GLU: Activation(
        "softcap(gate, beta) * sigmoid(gate) * softcap(up, linear_beta)",
        "situ_glu of PaddleFleet",
        _BOTH,
        gated=True,
        parameters=(_bound("beta", 1.0), _bound("linear_beta", inf)),
    ),
    ActivationType.GEGLU_TANH: Activation(
        "gelu_tanh(gate) * up", _GLU, _BOTH, gated=True, base=ActivationType.GELU_TANH
    ),
    ActivationType.RELU_SQ: Activation("max(x, 0) ** 2", "So et al., arXiv:2109.08668", _BF16),
    ActivationType.RELU: Activation("max(x, 0)", "Nair and Hinton, ICML 2010", _BF16),
    ActivationType.GELU: Activation(
        "x * (1 + erf(x / sqrt(2))) / 2", "Hendrycks and Gimpel, arXiv:1606.08415", _BF16
    ),
    ActivationType.SILU: Activation("x * sigmoid(x)", "Elfwing et al., arXiv:1702.03118", _BF16),
    # `gelu_tanh_approx` of quack-kernels, `gelu_pytorch_tanh` of transformers: an activation of its
    # own, up to 5e-4 from GELU.
    ActivationType.GELU_TANH: Activation(
        "x * (1 + tanh(0.7978845608028654 * (x + 0.044715 * x ** 3))) / 2",
        "Hendrycks and Gimpel, arXiv:1606.08415",
        _BF16,
    ),
}


def is_glu(activation_type: ActivationType) -> bool:
    """Whether the up-projection has a gate and an up half."""
    return ACTIVATIONS[activation_type].gated


def layer_parameters(
    activation: ActivationType, given: Mapping[str, float | None] | ActivationParameters | None
) -> ActivationParameters:
    """The parameters of `given` that differ from the activation's defaults, checked and sorted, so that
    equal layers have equal settings. ConfigError names a parameter that this activation does not
    have, or a value outside its range.
    """
    known = {parameter.name: parameter for parameter in ACTIVATIONS[activation].parameters}
    found = {}
    try:
        numbers = dict(given or {})
    except (TypeError, ValueError):
        needed = "numbers by name, for example {'limit': 7.0}"
        raise ConfigError(f"activation_parameters is {given!r}; needed: {needed}") from None
    for name, value in numbers.items():
        if name not in known:
            there = f"{activation.value} has {sorted(known)}"
            raise ConfigError(f"activation_parameters has {name!r}; {there}")
        number = known[name].read(value)
        # A number at its default is left out, so that a layer that sets it shares the kernels of
        # one that does not.
        if number != known[name].default:
            found[name] = number
    return tuple(sorted(found.items()))


class ZCode(Enum):
    """Storage of the pre-activation `z` kept for backward. It is no GEMM operand, so any 8-bit code
    will do. ADAPTIVE is INT8, and E4M3 in blocks whose values lie far apart.
    """

    ADAPTIVE = "adaptive"
    INT8 = "int8"
    E4M3 = "e4m3"
    BF16 = "bf16"


# Recipes by name; `quant/recipes.py` has the blocks of each. Every layout of blocks exists with
# fp32 scales and, under a name that ends in -pow2, with powers of two.
RECIPE_LAYOUTS = (
    "deepseek-v3", "1x128", "1x32", "iso32", "iso128", "iso256", "dx256", "wide256", "wide512",
)  # fmt: skip
RECIPE_NAMES = tuple(f"{layout}{scales}" for layout in RECIPE_LAYOUTS for scales in ("", "-pow2"))


class FlushMode(Enum):
    """When the weight gradients of a backward are complete.

    AUTO: when it returns: in fp32 `main_grad`, or returned to autograd where a parameter that trains
        has none. "backward" is another name for it.
    STEP: at `step()`. Until then they wait in fp32 accumulators of the node.
    """

    AUTO = "auto"
    STEP = "step"

    @classmethod
    def _missing_(cls, value: object) -> FlushMode | None:
        # `Enum` asks here for a value that is no member's.
        return cls.AUTO if value == "backward" else None


class FirstBackward(Enum):
    """What the first backward since `node.step()` or `discard_grads()` does with a gradient in
    `main_grad`. The others add.
    """

    ADD = "add"
    OVERWRITE = "overwrite"


def member_of(enum: type[Named], value: Any, argument: str) -> Named:
    """The member that `value` is or names. ConfigError names `argument`, what came and every value
    there is.
    """
    try:
        return enum(value)
    except ValueError:
        known = [member.value for member in enum]
        raise ConfigError(f"{argument} is {value!r}; needed: one of {known}") from None
