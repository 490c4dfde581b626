"""`SonicMoEConfig` and the one registry of environment flags.

Precedence: an explicit field of the configuration in force beats the environment, which beats the
default. `docs/env.md` is generated from `FLAGS`; nothing else in the package reads a `SONIC_MOE_*`
variable.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from .enums import EngineName, ZCode
from .errors import ConfigError

logger = logging.getLogger("sonicmoe")

PREFIX = "SONIC_MOE_"
FP8_MODES = ("off", "perf", "mem")


def _parse_bool(text: str) -> bool:
    lowered = text.strip().lower()
    if lowered in {"1", "true", "on", "yes"}:
        return True
    if lowered in {"0", "false", "off", "no", ""}:
        return False
    raise ValueError("0 or 1")


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ValueError("a positive number of seconds")
    return seconds


def _parse_directory(text: str) -> Path:
    if not text.strip():  # Path("") would be the current directory
        raise ValueError("a directory, or leave it unset")
    return Path(text).expanduser()


def _parse_fp8_mode(text: str) -> str:
    lowered = text.strip().lower()
    if lowered in {"", "0", "none"}:
        return "off"
    if lowered in FP8_MODES:
        return lowered
    raise ValueError("'perf', 'mem', 'off' or unset")


def _parse_recipe(text: str) -> str:
    from .quant.recipes import (
        RECIPES,
    )  # quant imports enums only; importing it here keeps config free of a framework

    if text in RECIPES:
        return text
    raise ValueError(f"one of {sorted(RECIPES)}")


def _enum_parser(enum: type[ZCode] | type[EngineName]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            return enum(text.strip().lower())
        except ValueError:
            raise ValueError(f"one of {[member.value for member in enum]}") from None

    return parse


@dataclass(frozen=True)
class Flag:
    """One environment variable: the config field it sets, how it is parsed, its default and its
    meaning.
    """

    env: str
    field: str
    parse: Callable[[str], Any]
    default: Any
    values: str
    meaning: str


def default_cache_dir() -> Path:
    """The platform's per-user cache directory for this package."""
    return Path(platformdirs.user_cache_dir("sonicmoe"))


def default_local_cache_dir() -> Path:
    """A per-user directory of this node, for artefacts that `cache_dir` cannot take."""
    return Path(tempfile.gettempdir()) / f"sonicmoe-{os.getuid()}"


FLAGS: tuple[Flag, ...] = (
    Flag("SONIC_MOE_FP8_MODE", "fp8_mode", _parse_fp8_mode, "off", "perf, mem, off",
         "`perf`: full FP8; `mem`: FP8 with stage-wise memory reuse; `off`: the dtype of the tokens (BF16)"),
    Flag("SONIC_MOE_FP8_WGRAD", "fp8_wgrad", _parse_bool, True, "0, 1",
         "FP8 weight gradients in the FP8 modes; `0`: wgrad on unquantised operands (engine `hopper`: BF16 GEMMs of engine `bf16`)"),
    Flag("SONIC_MOE_FP8_ASSUME_ALIGNED", "fp8_assume_aligned", _parse_bool, False, "0, 1",
         "accepted for source compatibility: the routing metadata pads every expert, so there is neither a check nor a copy to skip"),
    Flag("SONIC_MOE_FP8_ISO32_WEIGHT", "iso_weight", _parse_bool, False, "0, 1",
         "one FP8 buffer per weight serves forward and backward: engine `hopper` keeps forward's order only and transposes into a "
         "scratch shared by all layers in every backward; a recipe with other weight blocks in backward is refused"),
    Flag("SONIC_MOE_FP8_SAVE_Z", "save_z", _enum_parser(ZCode), ZCode.INT8, "int8, e4m3, bf16",
         "storage of the pre-activation `z` kept for backward in the FP8 modes; the 8-bit codes use one scale per 128 columns. "
         "Engine `reference` has all three, `hopper` `int8`; without FP8, z has the dtype of the tokens"),
    Flag("SONIC_MOE_FP8_RECOMPUTE_Z", "recompute_z", _parse_bool, False, "0, 1",
         "do not store `z`: rerun the up-projection in backward"),
    Flag("SONIC_MOE_FP8_RECIPE", "recipe", _parse_recipe, "iso128", "a name from `sonicmoe numerics --list`",
         "block shapes and scale format of every FP8 operand (docs/numerics.md)"),
    Flag("SONIC_MOE_STAGEWISE_MEMORY", "stagewise_memory", _parse_bool, False, "0, 1",
         "drop the saved `z` in the middle of backward; a second backward through the same graph is refused (node only)"),
    Flag("SONIC_MOE_ENGINE", "engine", _enum_parser(EngineName), EngineName.AUTO, "auto, reference, bf16, hopper",
         "the engine to run; one that cannot raises and says why. `auto`: on a Hopper GPU `hopper` in the FP8 modes, else `bf16`; "
         "`reference` where that one cannot run and on a host; the log says which and why (docs/design.md)"),
    Flag("SONIC_MOE_CACHE_DIR", "cache_dir", _parse_directory, None, "a directory",
         "compile cache, may lie on a shared file system; default: the platform's user cache directory /sonicmoe"),
    Flag("SONIC_MOE_LOCAL_CACHE_DIR", "local_cache_dir", _parse_directory, None, "a directory",
         "node-local copy of the compile cache: read after it, written when it is read-only or full; default: "
         "sonicmoe-<uid> in the temporary directory"),
    Flag("SONIC_MOE_LOCK_TIMEOUT", "lock_timeout_s", _parse_seconds, 600.0, "seconds > 0",
         "longest wait for another process that builds the same kernel; the error names that process"),
    Flag("SONIC_MOE_FORBID_COMPILE", "forbid_compile", _parse_bool, False, "0, 1",
         "every compile raises and names the kernel and its key: proves that `sonicmoe warmup` covered the run"),
    Flag("SONIC_MOE_VALIDATE_DISPATCH", "validate_dispatch", _parse_bool, False, "0, 1",
         "check every routing precondition (distinct ids, finite probabilities, counts) and raise on the first violation"),
    Flag("USE_QUACK_GEMM", "use_quack_gemm", _parse_bool, False, "0, 1",
         "accepted for source compatibility with upstream SonicMoE; the engine choice does not depend on it"),
)  # fmt: skip
FLAGS_BY_ENV: Mapping[str, Flag] = {flag.env: flag for flag in FLAGS}
HONOURED_VARIABLES = ("TRITON_PTXAS_PATH", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "CUDA_HOME")


@dataclass(frozen=True)
class SonicMoEConfig:
    """Settings of one node or layer; a field left at None is taken from the environment, then from
    its default.

    `docs/env.md` has the meaning of each field. Use `with cfg.activate():` to make a configuration
    the one in force for everything that was not given its own.
    """

    fp8_mode: str | None = None
    fp8_wgrad: bool | None = None
    fp8_assume_aligned: bool | None = None
    iso_weight: bool | None = None
    save_z: ZCode | str | None = None
    recompute_z: bool | None = None
    recipe: str | None = None
    stagewise_memory: bool | None = None
    engine: EngineName | str | None = None
    cache_dir: Path | str | None = None
    local_cache_dir: Path | str | None = None
    lock_timeout_s: float | str | None = None
    forbid_compile: bool | None = None
    validate_dispatch: bool | None = None
    use_quack_gemm: bool | None = None

    def __post_init__(self) -> None:
        """Parse every given field like its environment variable, so both doors refuse the same
        values.
        """
        for flag in FLAGS:
            value = getattr(self, flag.field)
            if isinstance(value, str):
                object.__setattr__(
                    self, flag.field, _parse(flag, value, f"SonicMoEConfig.{flag.field}")
                )
            elif value is not None:
                _check_type(flag, value)

    @contextmanager
    def activate(self) -> Iterator[SonicMoEConfig]:
        """Make this configuration the one in force inside the `with` block (per thread and async
        task).
        """
        token = _ACTIVE.set(self)
        try:
            yield self
        finally:
            _ACTIVE.reset(token)

    def resolve(self) -> ResolvedConfig:
        """Fill every unset field from the environment, then from the defaults.

        Raises:
            ConfigError: an environment variable has a value its parser refuses, or two settings
                contradict each other.
        """
        _report_unknown_flags()
        return _resolve(self, _environment(), tempfile.gettempdir())


@dataclass(frozen=True)
class ResolvedConfig:
    """A `SonicMoEConfig` with every field decided; what engines read."""

    fp8_mode: str | None
    fp8_wgrad: bool
    fp8_assume_aligned: bool
    iso_weight: bool
    save_z: ZCode
    recompute_z: bool
    recipe: str
    stagewise_memory: bool
    engine: EngineName
    cache_dir: Path
    local_cache_dir: Path
    lock_timeout_s: float
    forbid_compile: bool
    validate_dispatch: bool
    use_quack_gemm: bool

    @property
    def fp8(self) -> bool:
        """Whether operands are quantised to FP8."""
        return self.fp8_mode is not None

    @property
    def frees_stagewise(self) -> bool:
        """Whether saved activations are dropped as soon as their last stage has read them."""
        return self.stagewise_memory or self.fp8_mode == "mem"

    def replace(self, **changes: Any) -> ResolvedConfig:
        """A copy with the given fields changed."""
        return dataclasses.replace(self, **changes)


def _environment() -> tuple[str | None, ...]:
    """The values of `FLAGS_BY_ENV`, and of what directories depend on."""
    # CPython's own dictionary: to ask the mapping for 20 names that are not set costs as much as
    # four launches, in every forward.
    values: dict[Any, Any] | None = getattr(os.environ, "_data", None)
    if values is None:
        return tuple(map(os.environ.get, _NAMES))
    found = map(values.get, _ENCODED_NAMES)
    return tuple(None if value is None else os.environ.decodevalue(value) for value in found)


_NAMES = (*FLAGS_BY_ENV, "XDG_CACHE_HOME", "HOME")
_ENCODED_NAMES = tuple(map(os.environ.encodekey, _NAMES))


@functools.lru_cache(maxsize=64)
def _resolve(
    config: SonicMoEConfig, environment: tuple[str | None, ...], _temporary: str
) -> ResolvedConfig:
    """`environment`: see `_environment`. Equal settings, and equal places for the default
    directories, give one object.
    """
    values: dict[str, Any] = {}
    for flag, text in zip(FLAGS, environment[: len(FLAGS)], strict=True):
        given = getattr(config, flag.field)
        if given is None and text is not None:
            given = _parse(flag, text, flag.env)
        values[flag.field] = flag.default if given is None else given
    if values["fp8_mode"] == "off":
        values["fp8_mode"] = None
    if values["cache_dir"] is None:
        values["cache_dir"] = default_cache_dir()
    if values["local_cache_dir"] is None:
        values["local_cache_dir"] = default_local_cache_dir()
    return ResolvedConfig(**values)


_ACTIVE: ContextVar[SonicMoEConfig | None] = ContextVar("sonicmoe_config", default=None)


def active_config() -> SonicMoEConfig:
    """The configuration activated here, or one that leaves everything to the environment."""
    return _ACTIVE.get() or SonicMoEConfig()


def current_config(explicit: SonicMoEConfig | None = None) -> ResolvedConfig:
    """Resolve `explicit`, else the activated configuration, else the environment and the defaults."""
    return (explicit or active_config()).resolve()


def unknown_flags(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Set `SONIC_MOE_*` names the registry does not know, each with the nearest known name (or
    None); also flags spelt `SONICMOE_*`.
    """
    names = os.environ if environ is None else environ
    unknown = [name for name in names if name.startswith(PREFIX) and name not in FLAGS_BY_ENV]
    found = {
        name: next(iter(difflib.get_close_matches(name, FLAGS_BY_ENV, n=1, cutoff=0.6)), None)
        for name in unknown
    }
    joined = {
        flag.replace(PREFIX, "SONICMOE_"): flag for flag in FLAGS_BY_ENV if flag.startswith(PREFIX)
    }
    return found | {name: joined[name] for name in names if name in joined}


_WARNED: set[str] = set()
_looked_for_unknown_flags = False


def _report_unknown_flags() -> None:
    """`warn_unknown_flags`, at the first configuration that a process resolves: every face resolves
    one, and often.
    """
    global _looked_for_unknown_flags
    if not _looked_for_unknown_flags:
        _looked_for_unknown_flags = True
        warn_unknown_flags()


def warn_unknown_flags() -> None:
    """Log each unknown `SONIC_MOE_*` variable once, with a near-miss suggestion."""
    for name, suggestion in unknown_flags().items():
        if name not in _WARNED:
            _WARNED.add(name)
            hint = f"; did you mean {suggestion}?" if suggestion else ""
            logger.warning("unknown environment variable %s is ignored%s", name, hint)


def _parse(flag: Flag, text: str, source: str) -> Any:
    try:
        return flag.parse(text)
    except ValueError as error:
        raise ConfigError(f"{source}={text!r} is not understood; needed: {error}") from None


_FIELD_TYPES: Mapping[str, type] = {
    "fp8_mode": str, "recipe": str, "save_z": ZCode, "engine": EngineName,
    "cache_dir": Path, "local_cache_dir": Path, "lock_timeout_s": float,
}  # fmt: skip


def _check_type(flag: Flag, value: Any) -> None:
    wanted: type = _FIELD_TYPES.get(flag.field, bool)
    if (
        wanted is float
        and isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value < math.inf
    ):
        return
    if wanted is float or not isinstance(value, wanted):
        raise ConfigError(
            f"SonicMoEConfig.{flag.field} got {value!r} ({type(value).__name__}); needed: {flag.values}"
        )
