"""What a flag is: the values that it takes, how each is spelt, and the field that holds it.

`config.py` declares the flags; this module knows none of them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, overload

from .enums import ACTIVATIONS, RECIPE_NAMES, ActivationType
from .errors import ConfigError

PREFIX = "SONIC_MOE_"

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


def spellings(
    listed: str, needed: str, meanings: Mapping[str, Value], *types: type
) -> Values[Value]:
    """A few values with a few spellings each, which are read in any case and between blanks."""

    def parse(text: str) -> Value:
        try:
            return meanings[text.strip().lower()]
        except KeyError:
            raise ValueError(needed) from None

    return Values(listed, parse, types)


def members_of(enum: type[Member]) -> Values[Member]:
    """The members of an enum, by value."""
    members = {member.value: member for member in enum}
    return spellings(", ".join(members), f"one of {list(members)}", members, enum)


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


def _whole_number(text: str) -> int:
    """-1 where the text is none; digits of other scripts, which `int` takes, are none."""
    return int(text) if text.isdecimal() and text.isascii() else -1


def _parse_processes(text: str) -> str:
    lowered = text.strip().lower()
    if lowered in {"off", "0"}:
        return "off"
    if lowered == "auto":
        return lowered
    number = _whole_number(lowered)
    if number > 0:
        return str(number)
    raise ValueError("'auto', 'off' or a number of processes > 0")


def _parse_multiprocessors(text: str) -> int:
    lowered = text.strip().lower()
    if lowered in {"all", "0", ""}:
        return 0
    number = _whole_number(lowered)
    # A cluster of the GEMMs takes two.
    if number >= 2:
        return number
    raise ValueError("'all' or a number of multiprocessors >= 2")


def _parse_recipe(text: str) -> str:
    if text in RECIPE_NAMES:
        return text
    raise ValueError(f"one of {sorted(RECIPE_NAMES)}")


def bound_of_situ(name: str) -> Values[float]:
    """Values of a number of SiTU-GLU; infinity, spelt `none` too, where it may be left out."""
    parameters = ACTIVATIONS[ActivationType.SITU_GLU].parameters
    bound = next(known for known in parameters if known.name == name)
    # An infinite default means that the bound may be left out.
    off = ("none", "null", "off", "inf") if bound.default == math.inf else ()

    def parse(text: str) -> float:
        lowered = text.strip().lower()
        try:
            return bound.read(math.inf if lowered in off else float(lowered))
        except (ValueError, ConfigError):
            ranged = f"a number from {bound.low} to {bound.high}"
            raise ValueError(ranged + (", or none" if off else "")) from None

    return Values("a number > 0" + (", none" if off else ""), parse, (int, float))


_ON, _OFF = ("1", "true", "on", "yes"), ("0", "false", "off", "no", "")
BOOLEAN = spellings("0, 1", "0 or 1", dict.fromkeys(_ON, True) | dict.fromkeys(_OFF, False), bool)
FP8_MODE = spellings(
    "perf, mem, off",
    "'perf', 'mem' or 'off'",
    {"perf": "perf", "mem": "mem", **dict.fromkeys(("off", "", "0", "none"), "off")},
)
SECONDS = Values("seconds > 0", _parse_seconds, (int, float))
DIRECTORY = Values("a directory", _parse_directory, (Path,))
PROCESSES = Values("auto, off, processes > 0", _parse_processes, (int,))
MULTIPROCESSORS = Values("all, multiprocessors >= 2", _parse_multiprocessors, (int,))
RECIPE = Values("a name from docs/numerics.md", _parse_recipe)


def spelling(value: Any) -> str:
    """A flag's value as one types it into the environment."""
    # `1` and not `True`, because documentation shows a flag as people type it.
    if isinstance(value, bool):
        return str(int(value))
    return str(value.value if isinstance(value, Enum) else value)


# A misspelt name keeps one of these words, unless it is misspelt in two places.
_WORDS = ("SONIC", "MOE", "QUACK", "GEMM")
# How near a flag has to be: to a name of this package's, and to one that may be another program's.
_OURS, _ANYBODYS = 0.6, 0.9


def nearest_flag(name: str, known: Collection[str]) -> str | None:
    """The flag that a variable, which is none, was perhaps meant to be."""
    upper = name.upper()
    # The words come first because they are cheap. An environment may have hundreds of names, and
    # comparing each with every flag takes long.
    if not any(word in upper for word in _WORDS):
        return None
    cutoff = _OURS if upper.startswith(PREFIX) else _ANYBODYS
    # `SONICMOE_FP8` for `SONIC_MOE_FP8_MODE`: the prefix is put right, and then a flag that begins
    # like this beats one that is merely similar.
    without_underscore = PREFIX.replace("_", "", 1)
    if upper.startswith(without_underscore) and upper != without_underscore:
        upper = PREFIX + upper.removeprefix(without_underscore)
        begun = next((env for env in known if env.startswith(upper)), None)
        if begun:
            return begun
    return next(iter(difflib.get_close_matches(upper, known, n=1, cutoff=cutoff)), None)


# `Flag.__get__` must tell type checkers which of the two it reads from. `config.py` has the classes
# with the fields; importing them here would be a cycle.
class Settings:
    """A class whose fields are flags; a field that nobody set reads as None."""

    decided: ClassVar[bool] = False


class DecidedSettings(Settings):
    """Settings with every field decided; one that nobody set reads as its default."""

    decided = True


class Flag(Generic[Value]):
    """One setting: a field of the configuration, and the environment variable that sets it.

    A descriptor, so that one declaration serves both kinds of configuration: a field that nobody
    set reads as None in `Settings` and as its default in `DecidedSettings`.

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
        """A value from outside, parsed alike whether it came as text or as an object; a ConfigError
        names `source`.
        """
        # To Python True is an int, so a boolean would pass for a number of seconds.
        listed = isinstance(value, (str, *self.values.types))
        if not listed or (isinstance(value, bool) and bool not in self.values.types):
            came = f"{value!r} ({type(value).__name__})"
            raise ConfigError(f"{source} got {came}; needed: {self.values.listed}")
        text = value if isinstance(value, str) else spelling(value)
        try:
            return self.values.parse(text)
        except ValueError as needed:
            raise ConfigError(f"{source}={text!r} is not understood; needed: {needed}") from None

    @overload
    def __get__(self, config: DecidedSettings, owner: Any = None) -> Value: ...
    @overload
    def __get__(self, config: Settings, owner: Any = None) -> Value | None: ...
    @overload
    def __get__(self, config: None, owner: Any = None) -> None: ...
    def __get__(self, config: Settings | None, owner: Any = None) -> Value | None:
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

    def __set__(self, config: Settings, value: Value | str | None) -> None:
        """Store a value that a constructor was given."""
        # The constructor of a frozen dataclass assigns through `object.__setattr__`, which arrives
        # here. Any later assignment raises before it does.
        if value is not None:
            value = self.take(value, f"SonicMoEConfig.{self.field}")
        elif config.decided:
            value = self.plain_default
        config.__dict__[self.field] = value
