"""The mutable configuration that PaddleFleet gets from `functional._refresh_fp8_config()`, one per
expert layer, and what each of its fields means for this engine.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from ..config import FLAGS, ResolvedConfig, SonicMoEConfig, active_config, environment
from ..enums import ActivationParameters, ActivationType, ZCode, layer_parameters, member_of
from ..errors import ConfigError, expect
from ..log import log_once
from .situ import beta_of, linear_beta_of, parse_situ_activation


def _boolean(name: str, value: Any) -> bool:
    expect(isinstance(value, bool), ConfigError, _got(name, value, "True, False or None"))
    return bool(value)


def _clamp(name: str, value: Any) -> float:
    needed = "a number; 0, or less, for no clamp"
    expect(_is_number(value), ConfigError, _got(name, value, needed))
    return max(float(value), 0.0)


def _multiprocessors(name: str, value: Any) -> int:
    # The flag of that name knows what the kernels can be held to.
    needed = "a whole number >= 2, 0 for all, or None for what the flag says"
    expect(isinstance(value, int), ConfigError, _got(name, value, needed))
    try:
        return SonicMoEConfig(gemm_num_sms=value).gemm_num_sms or 0  # type: ignore[arg-type]
    except ConfigError:
        raise ConfigError(_got(name, value, needed)) from None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _got(name: str, value: Any, needed: str) -> str:
    return f"fp8_config.{name} is {value!r}; needed: {needed}"


class _Field(NamedTuple):
    """How a field reads what it is given, and its value in a new object."""

    read: Callable[[str, Any], Any]
    default: Callable[[ResolvedConfig], Any]


def _given_z() -> ZCode | None:
    """The storage of z that somebody asked for by this package's own flag."""
    return active_config().save_z or environment().save_z


# Fields that change nothing here, with the values that they have in Fleet's own engine. Fleet sets
# some of them and reads others, so they are kept.
_ON = _Field(_boolean, lambda _: True)
_OFF = _Field(_boolean, lambda _: False)
_FIELDS: Mapping[str, _Field] = {
    "enabled": _Field(_boolean, attrgetter("fp8")),
    "fp8_wgrad": _Field(_boolean, attrgetter("fp8_wgrad")),
    "recompute_z": _Field(_boolean, attrgetter("recompute_z")),
    # Our flag has a default in 8 bits, and Fleet's has not: only a flag that somebody set counts.
    "save_z_fp8": _Field(_boolean, lambda _: _given_z() not in (None, ZCode.BF16)),
    "iso32_weight": _Field(_boolean, attrgetter("iso_weight")),
    "swiglu_clamp_value": _Field(_clamp, lambda _: 0.0),
    "situ_beta": _Field(
        lambda name, value: beta_of(value, f"fp8_config.{name}"), attrgetter("situ_beta")
    ),
    # None is a value, and no default: Fleet's `activation_situ_linear_beta` is None for "no bound".
    "situ_linear_beta": _Field(
        lambda name, value: linear_beta_of(value, f"fp8_config.{name}"),
        lambda config: None if config.situ_linear_beta == math.inf else config.situ_linear_beta,
    ),
    # Here None is a value too: the flag decides when the node is made, and may change until then.
    "gemm_num_sms": _Field(_multiprocessors, lambda config: config.gemm_num_sms or None),
    "alignment_assumed": _Field(_boolean, attrgetter("fp8_assume_aligned")),
    "use_quack_gemm": _Field(_boolean, attrgetter("use_quack_gemm")),
    "fused_gated": _ON,
    "fused_swiglu_quant": _ON,
    "fused_zy1_quant": _OFF,
    "epilogue_quant": _ON,
    "fuse_y1_quant": _ON,
    "fuse_y1_bf16_trunc": _ON,
    "fused_weight_layout": _ON,
    "stagewise_memory": _OFF,
}
# Names that the two configuration classes of Fleet's own engine have for one thing.
_ALIASES = {"use_fp8": "enabled", "assume_aligned": "alignment_assumed"}
FIELDS = (*_FIELDS, *_ALIASES)


class FP8Config:
    """Settings of one expert layer under the names that PaddleFleet and its own engine use. Each
    field can be set, read, and read as `resolve_<field>()`. None sets a field to its default.

    | field | here |
    |---|---|
    | `enabled`, `use_fp8` | honoured where a call does not say it: `run_sonic_moe(fp8=...)` does |
    | `fp8_wgrad` | honoured; off: weight gradients of unquantised operands |
    | `recompute_z` | honoured, per call |
    | `save_z_fp8` | honoured: z in 8 bits, or for False, the default, in BF16, which the log says \
once. A flag `save_z` that is set decides until the field is |
    | `iso32_weight` | honoured as `iso_weight`: one FP8 copy of each weight |
    | `swiglu_clamp_value` | honoured for SwiGLU, 0 for off; refused with other activations |
    | `situ_beta`, `situ_linear_beta` | honoured where the activation comes without its numbers |
    | `gemm_num_sms` | honoured; 0 for all multiprocessors, None for what the flag says |
    | `fused_gated`, `fused_swiglu_quant`, `epilogue_quant`, `fuse_y1_quant` | irrelevant: the \
kernels always fuse activation and quantisation; False is said once |
    | `fused_zy1_quant` | irrelevant: z and y1 are quantised in one kernel anyway |
    | `fuse_y1_bf16_trunc` | irrelevant: y1 is quantised from fp32, without a rounding to BF16 |
    | `fused_weight_layout` | irrelevant: weights are read in either layout |
    | `alignment_assumed`, `assume_aligned` | irrelevant: every expert is padded |
    | `use_quack_gemm` | irrelevant: the engine does not depend on it |
    | `stagewise_memory` | irrelevant: it prints memory there; said once. The variable \
`SONIC_MOE_STAGEWISE_MEMORY` means our flag, which frees z in the middle of backward |

    A new object has the values of the configuration in force. Fields that nobody knows are refused.

    Raises:
        ConfigError: an unknown field, or a value that the field does not take.
    """

    enabled: bool
    fp8_wgrad: bool
    recompute_z: bool
    save_z_fp8: bool
    iso32_weight: bool
    swiglu_clamp_value: float
    situ_beta: float
    situ_linear_beta: float | None
    gemm_num_sms: int | None

    # Beside the fields, which are everything in `__dict__`: the last answer of `node_config`.
    __slots__ = ("__dict__", "_answer")

    def __init__(self) -> None:
        config = active_config().resolve()
        self.__dict__.update({name: field.default(config) for name, field in _FIELDS.items()})

    def __getstate__(self) -> dict[str, Any]:
        # The fields alone: a copy makes answers of its own.
        return self.__dict__.copy()

    def __setattr__(self, name: str, value: Any) -> None:
        name = _ALIASES.get(name, name)
        known = ", ".join(sorted(FIELDS))
        expect(name in _FIELDS, ConfigError, f"fp8_config has no field {name!r}; known: {known}")
        unset, field = value is None and name != "situ_linear_beta", _FIELDS[name]
        config = active_config()
        self.__dict__[name] = field.default(config.resolve()) if unset else field.read(name, value)
        # What was answered belongs to the fields as they were.
        object.__setattr__(self, "_answer", None)

    def __getattr__(self, name: str) -> Any:
        # Python asks for what `__dict__` lacks: second names of fields, and `resolve_<field>`.
        if name in _ALIASES:
            return getattr(self, _ALIASES[name])
        field = name.removeprefix("resolve_")
        if field != name and field in FIELDS:
            return lambda: getattr(self, field)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FP8Config) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # it can change

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({fields})"

    def node_config(self, *, fp8: bool | None = None) -> SonicMoEConfig:
        """The configuration for a node: these fields over the configuration in force here.

        Equal arguments, fields and surroundings give the identical object.

        Args:
            fp8: whether operands are quantised; None: as `enabled` says.
        """
        fp8 = self.enabled if fp8 is None else fp8
        around = active_config()
        found = around.resolve()
        # Every forward asks. Comparing the fields would take as long as a launch, so the last
        # answer is found by identity; setting a field drops it.
        last: _Answer | None = getattr(self, "_answer", None)
        if last is not None and last.found is found and last.fp8 is fp8 and last.around is around:
            return last.config
        mode = (found.fp8_mode if found.fp8 else "perf") if fp8 else "off"
        config = _node_config(around, mode, _given_z(), tuple(self.__dict__.items()))
        object.__setattr__(self, "_answer", _Answer(around, found, fp8, config))
        return config

    def activation(
        self, activation_type: Any = ActivationType.SWIGLU
    ) -> tuple[ActivationType, ActivationParameters]:
        """The activation of a call with the numbers of this layer, as a node takes them.

        Args:
            activation_type: a member or value of `ActivationType`, `swiglu_precise`, or a
                description of SiTU-GLU (`sonicmoe.fleet.situ`), whose numbers precede the fields.

        Raises:
            ConfigError: an unknown activation, or a clamp with another one than SwiGLU.
        """
        name = getattr(activation_type, "value", activation_type)
        if not isinstance(name, str):
            name = member_of(ActivationType, name, "activation_type").value
        return _activation(name, self.swiglu_clamp_value, self.situ_beta, self.situ_linear_beta)


class _Answer(NamedTuple):
    """What `node_config` answered, and to what."""

    around: SonicMoEConfig
    found: ResolvedConfig
    fp8: bool
    config: SonicMoEConfig


@lru_cache(maxsize=256)  # every forward asks, with the same answer
def _activation(
    name: str, limit: float, beta: float, linear_beta: float | None
) -> tuple[ActivationType, ActivationParameters]:
    # A description has numbers of its own; a plain name takes those of the layer.
    situ = parse_situ_activation(name)
    # `swiglu_precise` asks for a sigmoid in fp32. The kernels have no other one.
    name = "swiglu" if name == "swiglu_precise" else name
    found = ActivationType.SITU_GLU if situ is not None else None
    found = found or member_of(ActivationType, name, "activation_type")
    clamps = (ActivationType.SWIGLU, ActivationType.SWIGLU_CLAMP)
    words = f"swiglu_clamp_value is {limit} with activation {found.value!r}; needed: 0, or SwiGLU"
    expect(limit == 0 or found in clamps, ConfigError, words)
    if limit and found in clamps:
        found = ActivationType.SWIGLU_CLAMP
        return found, layer_parameters(found, {"limit": limit})
    if situ is None:
        return found, ()
    return found, layer_parameters(found, {"beta": beta, "linear_beta": linear_beta} | situ)


def refresh_fp8_config() -> FP8Config:
    """A fresh configuration from the one in force; Fleet knows it as `_refresh_fp8_config`.

    The first call of a process logs the environment variables that mean something else here than in
    PaddleFleet's own engine.
    """
    # `log_once` says each once, however many layers ask.
    for flag in FLAGS:
        if flag.field in _ELSEWHERE and getattr(environment(), flag.field):
            _say(f"{flag.env}=1 {_ELSEWHERE[flag.field]}")
    return FP8Config()


# `FleetLayer.node` finds a node by the identity of its configuration. So equal fields must give the
# identical object, also where two layers have fields of their own.
@lru_cache(maxsize=256)
def _node_config(
    around: SonicMoEConfig, mode: str, given_z: ZCode | None, kept: tuple[tuple[str, Any], ...]
) -> SonicMoEConfig:
    field = dict(kept)
    own: dict[str, Any] = {
        "fp8_mode": mode,
        "fp8_wgrad": field["fp8_wgrad"],
        "recompute_z": field["recompute_z"],
        "iso_weight": field["iso32_weight"],
    }
    # Else the flag decides, when the node reads its configuration.
    if field["gemm_num_sms"] is not None:
        own["gemm_num_sms"] = field["gemm_num_sms"]
    if mode != "off":  # also where z is recomputed: it is rounded as a z that was saved
        own["save_z"] = code = _z_code(field["save_z_fp8"], given_z)
        if given_z is None and code is ZCode.BF16 and not field["recompute_z"]:
            _say(
                "z is kept in BF16 for backward, as save_z_fp8 is off, which is Fleet's default; "
                "SONIC_MOE_FP8_SAVE_Z=adaptive halves that memory",
                logging.INFO,
            )
    _say_what_has_no_effect(field)
    return SonicMoEConfig(**{**around.given(), **own})


def _z_code(in_fp8: bool, given: ZCode | None) -> ZCode:
    # The field says whether z has 8 bits, and the flag which 8-bit code it is.
    if given is not None and in_fp8 == (given is not ZCode.BF16):
        return given
    return ZCode.ADAPTIVE if in_fp8 else ZCode.BF16


def _say_what_has_no_effect(field: Mapping[str, Any]) -> None:
    fused = ("fused_gated", "fused_swiglu_quant", "epilogue_quant", "fuse_y1_quant")
    if apart := [name for name in fused if not field[name]]:
        _say(f"{', '.join(apart)} off has no effect: activation and quantisation are always fused")
    if field["stagewise_memory"]:
        _say("stagewise_memory has no effect: this engine prints no memory; see sonicmoe doctor")


# What a variable means to Fleet's own engine, where the flag of that name means another thing here.
_ELSEWHERE = {
    "stagewise_memory": "frees the saved z in the middle of backward, and PaddleFleet's own engine "
    "prints memory under that name",
    "use_quack_gemm": "changes nothing: PaddleFleet's own engine needs it, and this one does not",
}


def _say(message: str, level: int = logging.WARNING) -> None:
    log_once(level, "PaddleFleet: %s", message)
