"""What `sonicmoe doctor` reports, as plain records. Imports no framework."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from .copies import PACKAGE_ROOT

# Those of the self-test, in the order in which it runs and the screen shows them.
PRECISIONS = ("bf16", "fp8")
COMPILE_COMMAND = "sonicmoe doctor --self-test"
Progress = Callable[[str], None]

if TYPE_CHECKING:
    # At run time these modules bind the package to a framework, and a report must not.
    from .selftest import Device, TensorCheck


class Severity(Enum):
    """An `ERROR` is a failed check (exit code 1); a `WARNING` is worth a look."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True)
class Problem:
    """One finding and what to do about it, a line each."""

    severity: Severity
    what: str
    remedy: str


@dataclass(frozen=True)
class FlagState:
    """A flag in force. `value` is as one would type it; `source` is "environment" or "default"."""

    name: str
    value: str
    source: str


@dataclass(frozen=True)
class CacheState:
    """A cache directory. `writable` and `free_bytes` are those of the nearest existing parent while
    it does not exist.

    `warmed` says what complete warm-ups recorded there: one line a model, with the versions that
    compiled it. `access` says who can write there, and `refused` why it is not used because of that.
    """

    role: str
    path: str
    exists: bool
    writable: bool
    size_bytes: int
    free_bytes: int
    warmed: tuple[str, ...] = ()
    access: str = ""
    refused: str = ""


@dataclass(frozen=True)
class KernelState:
    """The kernels that the self-test launches: how many there are, and the names of those that are
    not in the cache.
    """

    needed: int
    missing: tuple[str, ...]


@dataclass
class Report:
    """Everything on the doctor's screen. A field that could not be found out is None or empty, and
    `problems` says why.

    engine, engine_reason: what a run would get as configured, in the precision of the flags.
    engines: "able", or why this machine cannot run it, by engine and whatever the model.
    carried: what kernels lie inside the installed package, and which parts do not; a line each.
    self_test: empty where the self-test did not run, because its kernels are not compiled.
    """

    versions: dict[str, str | None] = field(default_factory=dict)
    package_path: str = str(PACKAGE_ROOT)
    framework: str | None = None
    framework_reason: str = ""
    device: Device | None = None
    engine: str | None = None
    engine_reason: str = ""
    engines: dict[str, str] = field(default_factory=dict)
    caches: list[CacheState] = field(default_factory=list)
    carried: list[str] = field(default_factory=list)
    flags: list[FlagState] = field(default_factory=list)
    honoured: dict[str, str | None] = field(default_factory=dict)
    unknown_flags: dict[str, str | None] = field(default_factory=dict)
    kernels: KernelState | None = None
    self_test: list[TensorCheck] = field(default_factory=list)
    self_test_seconds: float | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether no check failed."""
        return not any(problem.severity is Severity.ERROR for problem in self.problems)

    def error(self, what: str, remedy: str) -> None:
        self.problems.append(Problem(Severity.ERROR, what, remedy))

    def warning(self, what: str, remedy: str) -> None:
        self.problems.append(Problem(Severity.WARNING, what, remedy))
