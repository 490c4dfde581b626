"""`SonicMoEConfig`: every flag of the package, each declared once as a field with its environment
variable, its values, its default and its meaning.

Precedence: an explicit field of the configuration in force beats the environment, which beats the
default. Resolution, `sonicmoe doctor`, step dumps and `docs/env.md` walk over `FLAGS`; nothing else
in the package reads a `SONIC_MOE_*` variable. CONTRIBUTING.md has the recipe for a new flag.
"""

from __future__ import annotations

import difflib
import functools
import logging
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, overload

import platformdirs

from .enums import ACTIVATIONS, ActivationType, EngineCheck, EngineName, Parameter, ZCode
from .errors import ConfigError

logger = logging.getLogger("sonicmoe")

PREFIX = "SONIC_MOE_"
FP8_MODES = ("off", "perf", "mem")
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

Value = TypeVar("Value")
Member = TypeVar("Member", bound=Enum)


@dataclass(frozen=True)
class Values(Generic[Value]):
    """The values that a flag takes.

    Attributes:
        listed: how documentation names them.
        parse: reads one as it is typed into the environment; ValueError says what is needed.
        types: Python types that a field of the configuration takes besides text.
    """

    listed: str
    parse: Callable[[str], Value]
    types: tuple[type, ...] = ()


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
    """An absolute path, so that a later change of the working directory does not move it."""
    if not text.strip():  # Path("") would be the current directory
        raise ValueError("a directory")
    # Manifests and messages hold paths as text, and the system ends a name at NUL.
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError("a directory whose name is UTF-8 text without NUL")
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError("a directory; the home directory in it is not known here") from None
    except FileNotFoundError:
        raise ValueError("an absolute path, as the working directory no longer exists") from None


def _parse_fp8_mode(text: str) -> str:
    lowered = text.strip().lower()
    if lowered in {"", "0", "none"}:
        return "off"
    if lowered in FP8_MODES:
        return lowered
    raise ValueError("'perf', 'mem' or 'off'")


def _bound_of_situ(name: str) -> Values[float]:
    """Values of a number of SiTU-GLU; infinity, spelt `none` too, where it may be left out."""
    parameters = ACTIVATIONS[ActivationType.SITU_GLU].parameters
    bound: Parameter = next(known for known in parameters if known.name == name)
    off = ("none", "null", "off", "inf") if bound.default == math.inf else ()

    def parse(text: str) -> float:
        lowered = text.strip().lower()
        try:
            return bound.read(math.inf if lowered in off else float(lowered))
        except (ValueError, ConfigError):
            ranged = f"a number from {bound.low} to {bound.high}"
            raise ValueError(ranged + (", or none" if off else "")) from None

    return Values("a number > 0" + (", none" if off else ""), parse, (int, float))


def _parse_processes(text: str) -> str:
    lowered = text.strip().lower()
    if lowered in {"off", "0"}:
        return "off"
    if lowered == "auto" or (lowered.isdecimal() and lowered.isascii()):
        return lowered.lstrip("0")
    raise ValueError("'auto', 'off' or a number of processes > 0")


def _parse_multiprocessors(text: str) -> int:
    lowered = text.strip().lower()
    if lowered in {"all", "0", ""}:
        return 0
    # A cluster of the GEMMs takes two.
    if lowered.isdecimal() and lowered.isascii() and int(lowered) >= 2:
        return int(lowered)
    raise ValueError("'all' or a number of multiprocessors >= 2")


def _parse_recipe(text: str) -> str:
    # Importing `quant` where it is needed keeps this module free of a framework.
    from .quant.recipes import RECIPES

    if text in RECIPES:
        return text
    raise ValueError(f"one of {sorted(RECIPES)}")


def members_of(enum: type[Member]) -> Values[Member]:
    """The members of an enum, by value and in any case."""
    names = [member.value for member in enum]

    def parse(text: str) -> Member:
        try:
            return enum(text.strip().lower())
        except ValueError:
            raise ValueError(f"one of {names}") from None

    return Values(", ".join(names), parse, (enum,))


def _parse_engine_check(text: str) -> EngineCheck:
    lowered = text.strip().lower()
    return members_of(EngineCheck).parse({"0": "off", "1": "always"}.get(lowered, lowered))


BOOLEAN = Values("0, 1", _parse_bool, (bool,))
SECONDS = Values("seconds > 0", _parse_seconds, (int, float))
DIRECTORY = Values("a directory", _parse_directory, (Path,))
FP8_MODE = Values("perf, mem, off", _parse_fp8_mode)
PROCESSES = Values("auto, off, processes > 0", _parse_processes, (int,))
MULTIPROCESSORS = Values("all, multiprocessors >= 2", _parse_multiprocessors, (int,))
ENGINE_CHECK = Values("auto, off, always", _parse_engine_check, (EngineCheck,))
RECIPE = Values("a name from `sonicmoe numerics --list`", _parse_recipe)


def spelling(value: Any) -> str:
    """A flag's value as one types it into the environment."""
    if isinstance(value, bool):
        return str(int(value))
    return str(value.value if isinstance(value, Enum) else value)


class Flag(Generic[Value]):
    """One setting: a field of the configuration, and the environment variable that sets it.

    A descriptor, so that one declaration serves both kinds of configuration: a field that nobody
    set reads as None in a `SonicMoEConfig` and as its default in a `ResolvedConfig`.

    Attributes:
        default: the value, or a function that finds it when it is first read.
        in_steps: whether it decides what a step computes. Such a flag is a field of
            `EngineSettings` under the same name, and dumps of a step keep it.
    """

    field: str

    def __init__(
        self,
        env: str,
        values: Values[Value],
        default: Value | Callable[[], Value],
        meaning: str,
        *,
        in_steps: bool = False,
    ) -> None:
        """Declare a flag; the class that it is assigned in names its field."""
        self.env, self.values, self.default = env, values, default
        self.meaning, self.in_steps = meaning, in_steps

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the name of the field."""
        self.field = name

    @property
    def plain_default(self) -> Value | None:
        """The default where it is a value; None where the machine decides it."""
        return None if callable(self.default) else self.default

    @property
    def shown_default(self) -> str:
        """The default as one types it."""
        return "unset" if self.plain_default is None else spelling(self.plain_default)

    def take(self, value: Any, source: str) -> Value:
        """A value from outside, parsed alike whether it came as text or as an object.

        Raises:
            ConfigError: naming `source`, what came and what is needed.
        """
        # To Python True is an int, so a boolean would pass for a number of seconds.
        listed = isinstance(value, (str, *self.values.types))
        if not listed or (isinstance(value, bool) and bool not in self.values.types):
            raise ConfigError(
                f"{source} got {value!r} ({type(value).__name__}); needed: {self.values.listed}"
            )
        text = value if isinstance(value, str) else spelling(value)
        try:
            return self.values.parse(text)
        except ValueError as needed:
            raise ConfigError(f"{source}={text!r} is not understood; needed: {needed}") from None

    @overload
    def __get__(self, config: ResolvedConfig, owner: Any = None) -> Value: ...
    @overload
    def __get__(self, config: SonicMoEConfig, owner: Any = None) -> Value | None: ...
    @overload
    def __get__(self, config: None, owner: Any = None) -> None: ...
    def __get__(self, config: SonicMoEConfig | None, owner: Any = None) -> Value | None:
        """The value; on the class None, which `dataclass` takes for the field's default."""
        if config is None:
            return None
        # Values live in the instance's `__dict__` under the field's name. A descriptor with
        # `__set__` is asked first, so they do not hide it.
        found: Value | None = config.__dict__[self.field]
        # The machine decides this default. It is looked up at the first read, because it may raise
        # (a user without a home directory) and only some commands need it.
        if found is None and config.decided and callable(self.default):
            found = config.__dict__[self.field] = self.default()
        return found

    def __set__(self, config: SonicMoEConfig, value: Value | str | None) -> None:
        """Store a value that a constructor was given."""
        # The constructor of a frozen dataclass assigns through `object.__setattr__`, which arrives
        # here. Any later assignment raises before it does.
        if value is not None:
            value = self.take(value, f"SonicMoEConfig.{self.field}")
        elif config.decided:
            value = self.plain_default
        config.__dict__[self.field] = value


def default_cache_dir() -> Path:
    """The platform's per-user cache directory for this package.

    Raises:
        ConfigError: this user has no home directory.
    """
    try:
        found = platformdirs.user_cache_dir("sonicmoe")
    except RuntimeError:
        found = "~"
    if found.startswith("~"):  # older versions of platformdirs return it as it is
        raise ConfigError(
            f"there is no directory for the compile cache: HOME is unset and user {os.getuid()} is "
            "not known to this system; set SONIC_MOE_CACHE_DIR"
        )
    return Path(found).absolute()


def default_local_cache_dir() -> Path:
    """A per-user directory of this node, for artefacts that `cache_dir` cannot take.

    Raises:
        ConfigError: no temporary directory can be written.
    """
    try:
        return Path(tempfile.gettempdir()) / f"sonicmoe-{os.getuid()}"
    except FileNotFoundError as error:
        raise ConfigError(
            "there is no directory for the node's own copy of the compile cache: "
            f"{error.strerror}; set SONIC_MOE_LOCAL_CACHE_DIR, or TMPDIR"
        ) from None


@dataclass(frozen=True, eq=False, repr=False)
class SonicMoEConfig:
    """Settings of one node or layer; a field left at None is taken from the environment, then from
    its default.

    `docs/env.md` has the meaning of each field. Use `with cfg.activate():` to make a configuration
    the one in force for everything that was not given its own.

    Raises:
        ConfigError: a field has a value that its environment variable would not take either.
    """

    decided: ClassVar[bool] = False

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
        "that forward reads, and every backward transposes it into memory that all layers share. "
        "This saves one byte per weight and costs a transposition per backward. A recipe whose "
        "weight blocks differ between forward and backward is refused, because it needs two copies. "
        "Engine `mxfp8` always has one copy, which both directions read as it lies",
    )
    save_z: Flag[ZCode] = Flag(
        "SONIC_MOE_FP8_SAVE_Z",
        members_of(ZCode),
        ZCode.INT8,
        "storage of the pre-activation `z` kept for backward in the FP8 modes; the 8-bit codes use "
        "one scale per 128 columns. Engine `reference` has all three, `hopper` `int8` and `bf16`, "
        "`mxfp8` `bf16` alone; "
        "without FP8, z has the dtype of the tokens",
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
        "block shapes and scale format of every FP8 operand (docs/numerics.md). Engine `reference` has all, "
        "`hopper` `dx256` and `row128-dx256`, `mxfp8` `iso32-pow2`",
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
        "in the FP8 modes, or `bf16` without FP8 where `hopper` cannot run; `bf16` without FP8 modes; "
        "`triton` where these cannot run and on Ampere and Ada GPUs; `reference` where that cannot "
        "run and on a host; never `mxfp8`, which nobody has run; the log says which and why "
        "(docs/engines.md)",
    )
    engine_check: Flag[EngineCheck] = Flag(
        "SONIC_MOE_ENGINE_CHECK",
        ENGINE_CHECK,
        EngineCheck.AUTO,
        "the trial of an engine before its first use: its kernels against the reference engine, on a "
        "small problem, in a process with a time limit; one that fails is not taken. `auto`: on GPU "
        "architectures on which the engine never ran, once for these kernels, this kind of GPU and "
        "this driver; `off`: never; `always`: on every GPU, in every process (docs/engines.md)",
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
        "processes that compile at once, over all ranks of a host. `auto`: as many as CPU affinity "
        "and the quota of the control group allow. `off`: a run that finds kernels missing compiles "
        "each where it first needs it, instead of all of them at its first forward",
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
        _bound_of_situ("beta"),
        4.0,
        "`beta` of SiTU-GLU where PaddleFleet's face (`sonicmoe.fleet`) gets that activation without "
        "it; nodes and layers have `activation_parameters`",
    )
    situ_linear_beta: Flag[float] = Flag(
        "SONIC_MOE_SITU_LINEAR_BETA",
        _bound_of_situ("linear_beta"),
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
        return _Activation(self)

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


class ResolvedConfig(SonicMoEConfig):
    """A configuration with every field decided; what engines read."""

    decided = True

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

    Raises:
        ConfigError: a variable has a value that is not understood; then the next call reads again.
    """
    # `functools.cache` keeps results only. After an error the next call reads again.
    warn_unknown_flags()
    return read_flags(os.environ)


def reload_environment() -> None:
    """Have the environment read again by the next configuration that is resolved. For tests."""
    environment.cache_clear()


def read_flags(environ: Mapping[str, str]) -> SonicMoEConfig:
    """The configuration that these variables spell.

    Raises:
        ConfigError: naming the first variable whose value is not understood.
    """
    return SonicMoEConfig(
        **{
            flag.field: flag.take(environ[flag.env], flag.env)
            for flag in FLAGS
            if flag.env in environ
        }
    )


# A new thread starts with the default. Calls therefore carry their configuration: autograd runs
# backwards on threads of its own, where nothing is activated.
_ACTIVE: ContextVar[SonicMoEConfig | None] = ContextVar("sonicmoe_config", default=None)
_NOTHING_SET = SonicMoEConfig()


class _Activation(AbstractContextManager[SonicMoEConfig]):
    """A class, because four of these open in every step of a layer, and a generator behind
    `contextmanager` takes three times as long.
    """

    __slots__ = ("_config", "_token")

    def __init__(self, config: SonicMoEConfig) -> None:
        self._config = config

    def __enter__(self) -> SonicMoEConfig:
        self._token = _ACTIVE.set(self._config)
        return self._config

    def __exit__(self, *_: object) -> None:
        _ACTIVE.reset(self._token)


def active_config() -> SonicMoEConfig:
    """The configuration activated here, or one that leaves everything to the environment."""
    return _ACTIVE.get() or _NOTHING_SET


def current_config(explicit: SonicMoEConfig | None = None) -> ResolvedConfig:
    """Resolve `explicit`, else the activated configuration, else environment and defaults."""
    return (explicit or active_config()).resolve()


# A misspelt name keeps one of these words, unless it is misspelt in two places.
_WORDS = ("SONIC", "MOE", "QUACK", "GEMM")
# How near a flag has to be: to a name of this package's, and to one that may be another program's.
_OURS, _ANYBODYS = 0.6, 0.9


def unknown_flags(environ: Mapping[str, str] | None = None) -> dict[str, str | None]:
    """Variables that look like a flag and are none, each with the nearest flag (or None).

    Every `SONIC_MOE_*` name counts, in any case, and others where a flag is near: `SONICMOE_FP8`,
    `USE_QUACK_GEM`. Those in `FLEETS_VARIABLES` are spelt right, so no flag is near to them.
    """
    names = os.environ if environ is None else environ
    found: dict[str, str | None] = {}
    for name in names:
        upper = name.upper()
        # The words come first because they are cheap. An environment may have hundreds of names,
        # and comparing each with every flag takes long.
        if name in FLAGS_BY_ENV or not any(word in upper for word in _WORDS):
            continue
        nearest = None if name in FLEETS_VARIABLES else _nearest_flag(upper)
        if nearest or upper.startswith(PREFIX):
            found[name] = nearest
    return found


def _nearest_flag(upper: str) -> str | None:
    cutoff = _OURS if upper.startswith(PREFIX) else _ANYBODYS
    # `SONICMOE_FP8` for `SONIC_MOE_FP8_MODE`: the prefix is put right, and then a flag that begins
    # like this beats one that is merely similar.
    without_underscore = PREFIX.replace("_", "", 1)
    if upper.startswith(without_underscore) and upper != without_underscore:
        upper = PREFIX + upper.removeprefix(without_underscore)
        beginning = (env for env in FLAGS_BY_ENV if env.startswith(upper))
        if begun := next(beginning, None):
            return begun
    return next(iter(difflib.get_close_matches(upper, FLAGS_BY_ENV, n=1, cutoff=cutoff)), None)


_WARNED: set[str] = set()


def warn_unknown_flags() -> None:
    """Log each variable of `unknown_flags` once, with the nearest flag."""
    for name, suggestion in unknown_flags().items():
        if name not in _WARNED:
            _WARNED.add(name)
            hint = f"; did you mean {suggestion}?" if suggestion else ""
            if name in FLEETS_VARIABLES:
                hint = f"; it is one of PaddleFleet's own engine: {FLEETS_VARIABLES[name]}"
            logger.warning("unknown environment variable %s is ignored%s", name, hint)
