"""`SonicMoEConfig`: every flag of the package, each declared once as a field with its environment
variable, its values, its default and its meaning.

Precedence: an explicit field of the configuration in force beats the environment, which beats the
default. Resolution, `sonicmoe doctor`, step dumps and `docs/env.md` walk over `FLAGS`; nothing else
in the package reads a `SONIC_MOE_*` variable. docs/recipes/flag.md has the recipe for a new flag.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .enums import EngineName, FirstBackward, ZCode
from .flags import (
    BOOLEAN,
    DIRECTORY,
    FP8_MODE,
    MULTIPROCESSORS,
    PREFIX,
    PROCESSES,
    RECIPE,
    SECONDS,
    DecidedSettings,
    Flag,
    Settings,
    bound_of_situ,
    members_of,
    nearest_flag,
)
from .host import default_cache_dir, default_local_cache_dir
from .log import log_once

HONOURED_VARIABLES = ("TRITON_PTXAS_PATH", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR", "CUDA_HOME")

_FUSED = "whether a kernel also quantises what it computes; here it always does"
# Variables of the engine that PaddleFleet ships. They have no meaning here, and a user who comes
# from there has them set.
FLEETS_VARIABLES = {
    "SONIC_MOE_FP8_SAVE_Z_FP8": "`1` keeps z in FP8 there; here `SONIC_MOE_FP8_SAVE_Z` names the code",
    "SONIC_MOE_FP8_EPILOGUE_QUANT": _FUSED,
    "SONIC_MOE_FP8_FUSED_GATED": _FUSED,
    "SONIC_MOE_FP8_FUSED_SWIGLU_QUANT": _FUSED,
    "SONIC_MOE_FP8_FUSED_ZY1_QUANT": _FUSED,
}


# `eq` and `repr` are written below: those of `dataclass` would read every field, and the default of
# a directory may raise.
@dataclass(frozen=True, eq=False, repr=False)
class SonicMoEConfig(Settings):
    """Settings of one node or layer; a field left at None is taken from the environment, then from
    its default.

    `docs/env.md` has the meaning of each field. Use `with cfg.activate():` to make a configuration
    the one in force for everything that was not given its own.

    Raises:
        ConfigError: a field has a value that its environment variable would not take either.
    """

    fp8_mode: Flag[str] = Flag(
        "SONIC_MOE_FP8_MODE",
        FP8_MODE,
        "off",
        "`perf`: full FP8; `mem`: FP8 with stage-wise memory reuse; `off`: the dtype of the tokens "
        "(BF16)",
    )
    fp8_wgrad: Flag[bool] = Flag(
        "SONIC_MOE_FP8_WGRAD",
        BOOLEAN,
        True,
        "FP8 weight gradients in the FP8 modes; `0`: wgrad on unquantised operands (engine "
        "`hopper`: BF16 GEMMs of engine `bf16`)",
        in_steps=True,
    )
    fp8_assume_aligned: Flag[bool] = Flag(
        "SONIC_MOE_FP8_ASSUME_ALIGNED",
        BOOLEAN,
        False,
        "accepted for source compatibility: the routing metadata pads every expert, so there is "
        "neither a check nor a copy to skip",
    )
    iso_weight: Flag[bool] = Flag(
        "SONIC_MOE_FP8_ISO32_WEIGHT",
        BOOLEAN,
        False,
        "`1`: engine `hopper` keeps one FP8 copy of each weight instead of two. It stores the copy "
        "that forward reads, and every backward transposes it into memory of its own. This saves "
        "one byte per weight and costs a transposition per backward. Under activation checkpointing "
        "the engine does so without this flag while weights change before every backward. A recipe "
        "whose weight blocks differ between forward and backward is refused, because it needs two "
        "copies. Engine `mxfp8` always has one copy, which both directions read as it lies",
    )
    save_z: Flag[ZCode] = Flag(
        "SONIC_MOE_FP8_SAVE_Z",
        members_of(ZCode),
        ZCode.ADAPTIVE,
        "storage of the pre-activation `z` kept for backward in the FP8 modes; the 8-bit codes use "
        "one scale per 128 columns. `adaptive` is `int8`, and `e4m3` in the blocks where a large "
        "value would leave its neighbours no bits. `int8` alone loses gradients there, also under "
        "`recompute_z`, which codes z again. Engine `reference` has all four, `hopper` has "
        "`adaptive`, `int8` and `bf16`, `mxfp8` has `bf16` alone; without FP8, z has the dtype of "
        "the tokens",
        in_steps=True,
    )
    recompute_z: Flag[bool] = Flag(
        "SONIC_MOE_FP8_RECOMPUTE_Z",
        BOOLEAN,
        False,
        "do not store `z`: rerun the up-projection in backward",
        in_steps=True,
    )
    recipe: Flag[str] = Flag(
        "SONIC_MOE_FP8_RECIPE",
        RECIPE,
        "dx256",
        "block shapes and scale format of every FP8 operand (docs/numerics.md). Engine "
        "`reference` has all, `hopper` `dx256`, `mxfp8` `iso32-pow2`",
    )
    stagewise_memory: Flag[bool] = Flag(
        "SONIC_MOE_STAGEWISE_MEMORY",
        BOOLEAN,
        False,
        "drop the saved `z` in the middle of backward; a second backward through the same graph is "
        "refused (node only). PaddleFleet's own engine prints memory under this name",
    )
    gemm_num_sms: Flag[int] = Flag(
        "SONIC_MOE_GEMM_NUM_SMS",
        MULTIPROCESSORS,
        0,
        "multiprocessors that the GEMMs of engines `hopper`, `bf16` and `triton` may take, which "
        "leaves the others to kernels of other streams, such as those of communication; `all` or 0: every one",
    )
    engine: Flag[EngineName] = Flag(
        "SONIC_MOE_ENGINE",
        members_of(EngineName),
        EngineName.AUTO,
        "the engine to run; one that cannot raises and says why. `auto`: on a Hopper GPU `hopper` "
        "in the FP8 modes, or `bf16` without FP8 where `hopper` cannot run; `bf16` without FP8 "
        "modes; `triton` where these cannot run and on Ampere and Ada GPUs; `reference` where "
        "that cannot run and on a host; never `mxfp8`, which nobody has run; the log says which "
        "and why (docs/engines.md)",
    )
    engine_check: Flag[bool] = Flag(
        "SONIC_MOE_ENGINE_CHECK",
        BOOLEAN,
        True,
        "the trial of an engine on a GPU architecture on which it never ran, once for these kernels, "
        "this kind of GPU and this driver: its kernels against the reference engine, on a small "
        "problem, in a process with a time limit; one that fails is not taken. `0`: never "
        "(docs/engines.md)",
    )
    cache_dir: Flag[Path] = Flag(
        "SONIC_MOE_CACHE_DIR",
        DIRECTORY,
        default_cache_dir,
        "compile cache, may lie on a shared file system; default: the platform's user cache "
        "directory /sonicmoe",
    )
    local_cache_dir: Flag[Path] = Flag(
        "SONIC_MOE_LOCAL_CACHE_DIR",
        DIRECTORY,
        default_local_cache_dir,
        "node-local copy of the compile cache: read after it, written when it is read-only or "
        "full; default: sonicmoe-<uid> in the temporary directory",
    )
    trust_cache: Flag[bool] = Flag(
        "SONIC_MOE_TRUST_CACHE",
        BOOLEAN,
        False,
        "`1`: load kernels from `cache_dir` whoever can write there; without it a directory that "
        "every user can write is refused (docs/security.md)",
    )
    lock_timeout_s: Flag[float] = Flag(
        "SONIC_MOE_LOCK_TIMEOUT",
        SECONDS,
        600.0,
        "longest wait for another process that builds the same kernel; the error names that "
        "process",
    )
    forbid_compile: Flag[bool] = Flag(
        "SONIC_MOE_FORBID_COMPILE",
        BOOLEAN,
        False,
        "every compile raises and names the kernel and its key: proves that `sonicmoe warmup` "
        "covered the run",
    )
    compile_jobs: Flag[str] = Flag(
        "SONIC_MOE_COMPILE_JOBS",
        PROCESSES,
        "auto",
        "kernels that a process compiles at once. `auto`: as many as CPU affinity "
        "and the quota of the control group allow. `off`: a run that finds kernels missing "
        "compiles each where it first needs it, instead of all of them at its first forward",
    )
    first_backward: Flag[FirstBackward] = Flag(
        "SONIC_MOE_FIRST_BACKWARD",
        members_of(FirstBackward),
        FirstBackward.ADD,
        "`overwrite`: the first backward since `node.step()` or `discard_grads()` writes weight "
        "gradients into `main_grad`, later ones add, and `step()` zeroes those that none of them "
        'wrote: nobody has to clear `main_grad`. Nodes with `flush="auto"`; refused by the '
        "others and by every other face (docs/gradients.md)",
    )
    validate_dispatch: Flag[bool] = Flag(
        "SONIC_MOE_VALIDATE_DISPATCH",
        BOOLEAN,
        False,
        "check every routing precondition (distinct ids, finite probabilities, counts) and raise "
        "on the first violation",
    )
    situ_beta: Flag[float] = Flag(
        "SONIC_MOE_SITU_BETA",
        bound_of_situ("beta"),
        4.0,
        "`beta` of SiTU-GLU where PaddleFleet's face (`sonicmoe.fleet`) gets that activation "
        "without it; nodes and layers have `activation_parameters`",
    )
    situ_linear_beta: Flag[float] = Flag(
        "SONIC_MOE_SITU_LINEAR_BETA",
        bound_of_situ("linear_beta"),
        25.0,
        "`linear_beta` likewise; `none`: the up half is not bounded",
    )
    use_quack_gemm: Flag[bool] = Flag(
        "USE_QUACK_GEMM",
        BOOLEAN,
        False,
        "accepted for source compatibility with upstream SonicMoE; the engine choice does not "
        "depend on it",
    )

    def activate(self) -> AbstractContextManager[SonicMoEConfig]:
        """Make this configuration the one in force inside the `with` block (per thread and async
        task).
        """
        return _ActiveConfig(self)

    def resolve(self) -> ResolvedConfig:
        """Fill every unset field from the environment, then from the defaults.

        Raises:
            ConfigError: an environment variable has a value its parser refuses.
        """
        # Every forward asks. The answer stays with the configuration until the environment is read
        # again, so that asking costs one comparison.
        read = environment()
        known: tuple[SonicMoEConfig, ResolvedConfig] | None = self.__dict__.get("_resolved")
        if known is None or known[0] is not read:
            known = read, ResolvedConfig.of(read.given() | self.given())
            self.__dict__["_resolved"] = known
        return known[1]

    def given(self) -> dict[str, Any]:
        """The fields that have a value, in the order of `FLAGS`."""
        # The `__dict__` and not the attribute, which would look up the defaults of directories.
        held = self.__dict__
        return {flag.field: held[flag.field] for flag in FLAGS if held[flag.field] is not None}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SonicMoEConfig) or other.decided != self.decided:
            return False
        return other.given() == self.given()

    def __hash__(self) -> int:
        return hash(tuple(self.given().items()))

    def __repr__(self) -> str:
        """The fields that have a value; a default directory that nobody asked for is not looked
        up.
        """
        fields = ", ".join(f"{name}={value!r}" for name, value in self.given().items())
        return f"{type(self).__name__}({fields})"


class ResolvedConfig(SonicMoEConfig, DecidedSettings):
    """A configuration with every field decided; what engines read."""

    @property
    def fp8(self) -> bool:
        """Whether operands are quantised to FP8."""
        return self.fp8_mode != "off"

    @property
    def frees_stagewise(self) -> bool:
        """Whether saved activations are dropped as soon as their last stage has read them."""
        return self.stagewise_memory or self.fp8_mode == "mem"

    @classmethod
    def of(cls, values: dict[str, Any]) -> ResolvedConfig:
        """Values that a configuration has taken before, and defaults for the rest."""
        # Past the constructor: these values were parsed when they came in.
        config = object.__new__(cls)
        config.__dict__.update(_PLAIN_DEFAULTS | values)
        return config

    def resolve(self) -> ResolvedConfig:
        """This configuration: nothing is left to the environment."""
        return self

    def replace(self, **changes: Any) -> ResolvedConfig:
        """A copy with the given fields changed; None stands for the default."""
        return ResolvedConfig(**{**self.given(), **changes})


FLAGS: tuple[Flag[Any], ...] = tuple(
    declared for declared in vars(SonicMoEConfig).values() if isinstance(declared, Flag)
)
FLAGS_BY_ENV: Mapping[str, Flag[Any]] = {flag.env: flag for flag in FLAGS}
_PLAIN_DEFAULTS = {flag.field: flag.plain_default for flag in FLAGS}


@functools.cache
def environment() -> SonicMoEConfig:
    """The flags that the environment sets, read when a process first asks.

    A variable that changes afterwards is not obeyed: settings that change from one forward to the
    next would otherwise cost every forward a look at each of them.
    """
    # `functools.cache` keeps results only. After an error the next call reads again.
    warn_unknown_flags()
    return read_flags(os.environ)


def reload_environment() -> None:
    """Have the environment read again by the next configuration that is resolved. For tests."""
    environment.cache_clear()


def read_flags(environ: Mapping[str, str]) -> SonicMoEConfig:
    """The configuration that these variables spell."""
    given = (flag for flag in FLAGS if flag.env in environ)
    return SonicMoEConfig(**{flag.field: flag.take(environ[flag.env], flag.env) for flag in given})


# What `activate` sets. A call of a layer sets it itself, because it does so twice in every step.
# A new thread starts with the default. Calls therefore carry their configuration: autograd runs
# backwards on threads of its own, where nothing is activated.
ACTIVE: ContextVar[SonicMoEConfig | None] = ContextVar("sonicmoe_config", default=None)
_NOTHING_SET = SonicMoEConfig()


class _ActiveConfig(AbstractContextManager[SonicMoEConfig]):
    """A class, because a generator behind `contextmanager` takes three times as long."""

    __slots__ = ("_config", "_token")

    def __init__(self, config: SonicMoEConfig) -> None:
        self._config = config

    def __enter__(self) -> SonicMoEConfig:
        self._token = ACTIVE.set(self._config)
        return self._config

    def __exit__(self, *_: object) -> None:
        ACTIVE.reset(self._token)


def active_config() -> SonicMoEConfig:
    """The configuration activated here, or one that leaves everything to the environment."""
    return ACTIVE.get() or _NOTHING_SET


def current_config(explicit: SonicMoEConfig | None = None) -> ResolvedConfig:
    """Resolve `explicit`, else the activated configuration, else environment and defaults."""
    return (explicit or active_config()).resolve()


def unknown_flags(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Variables that look like a flag and are none, each with the nearest flag (or None).

    Every `SONIC_MOE_*` name counts, in any case, and others where a flag is near: `SONICMOE_FP8`,
    `USE_QUACK_GEM`. Those in `FLEETS_VARIABLES` are spelt right, so no flag is near to them.
    """
    names = os.environ if environ is None else environ
    found: dict[str, str | None] = {}
    for name in names:
        if name not in FLAGS_BY_ENV:
            nearest = None if name in FLEETS_VARIABLES else nearest_flag(name, FLAGS_BY_ENV)
            if nearest or name.upper().startswith(PREFIX):
                found[name] = nearest
    return found


def warn_unknown_flags() -> None:
    """Log each variable of `unknown_flags` once, with the nearest flag."""
    for name, suggestion in unknown_flags().items():
        hint = f"; did you mean {suggestion}?" if suggestion else ""
        if name in FLEETS_VARIABLES:
            hint = f"; it is one of PaddleFleet's own engine: {FLEETS_VARIABLES[name]}"
        log_once(logging.WARNING, "unknown environment variable %s is ignored%s", name, hint)
