"""How every command ends when something is wrong: one line on stderr and a documented exit code.

0: done. 1: a check failed, or the work could not be finished. 2: bad input, nothing was done.
128 + N: a training run that signal N ended, after its checkpoint.
"""

from __future__ import annotations

import errno
import math
import os
import stat
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ..errors import SonicMoEError, did_you_mean


class Refusal(click.ClickException):
    """Bad input, said in one line."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        """Line breaks of the message, which may quote what the user typed, become spaces."""
        super().__init__(" ".join(message.split()))


class FailureLine(Refusal):
    """The work could not be finished, said in one line."""

    exit_code = 1


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn every error that a user can cause into a `ClickException` of one line.

    An exception of any other kind is a mistake in this package and keeps its traceback.
    """
    _print_any_name()
    try:
        try:
            yield
        except (click.exceptions.Exit, SystemExit):
            # A full disk shows when the buffer is written, and a command has ended by then.
            _flush_stdout()
            raise
        _flush_stdout()
    except click.exceptions.NoArgsIsHelpError:  # the help is what is printed then
        raise
    except click.NoSuchOption as error:
        # click would name everything that is a little like it.
        hint = did_you_mean(error.option_name, error.possibilities or ())
        raise Refusal(f"No such option {error.option_name!r}{hint}") from error
    except click.UsageError as error:
        # click would print the usage block above the message of an error that has a context.
        raise Refusal(error.format_message()) from error
    except SonicMoEError as error:
        raise Refusal(str(error)) from error
    except OSError as error:
        if error.errno == errno.EPIPE:  # the reader has seen enough; click ends the process quietly
            raise
        drop_unwritable()
        named = f"{error.filename}: " if error.filename else "the output cannot be written: "
        raise FailureLine(f"{named}{error.strerror or error}") from error
    except MemoryError as error:
        raise FailureLine(f"out of memory; smaller sizes need less ({error})") from error


class _OneLine:
    """A click command or group whose errors are one line, whoever starts it."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Parse; here click finds errors of usage."""
        # Not around `main`: a test, or another program, may invoke the command itself.
        with one_line_errors():
            return super().make_context(*args, **extra)  # type: ignore[misc,no-any-return]

    def invoke(self, ctx: click.Context) -> Any:
        with one_line_errors():
            return super().invoke(ctx)  # type: ignore[misc]


class OneLineCommand(_OneLine, click.Command):
    """`click.command(cls=OneLineCommand)`."""


class OneLineGroup(_OneLine, click.Group):
    """`click.group(cls=...)`."""


class Seconds(click.FloatRange):
    """A number of seconds, 0 or more. click takes NaN and infinity for numbers in any such range,
    and work that is to take so long never ends.
    """

    def __init__(self) -> None:
        super().__init__(min=0)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not finite; needed: seconds", param, ctx)
        return seconds


class Location(click.Path):
    """`click.Path` for a file or a directory, there or to be made.

    Refuses the empty name, which Python reads as the current directory, names that the system
    cannot spell, a FIFO, which blocks, and a device, which never ends.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        text = os.fspath(value)
        # `Path("")` is the current directory, which nobody means by an empty variable of a shell.
        if not text.strip():
            self.fail(f"{text!r} is empty; needed: a path", param, ctx)
        try:
            sound = b"\0" not in os.fsencode(text)
        except UnicodeEncodeError:  # half of a surrogate pair, which only a program can pass
            sound = False
        if not sound:
            self.fail(f"{text!r} cannot be the name of a file", param, ctx)
        # Opening a FIFO waits for a writer, and reading /dev/zero ends with the memory.
        if _is_special(text):
            self.fail(f"{text!r} is neither a file nor a directory", param, ctx)
        return super().convert(value, param, ctx)


def _is_special(text: str) -> bool:
    try:
        found = os.stat(text)
    except OSError:  # it is not there, or cannot be; the command that uses it says so
        return False
    # Files of /proc call themselves regular and empty, and reading some of them never ends.
    kernels = os.path.ismount("/proc") and found.st_dev == os.stat("/proc").st_dev
    return kernels or not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode))


def _print_any_name() -> None:
    """Let stdout take names that are no text, as stderr does: a directory may have any bytes."""
    if isinstance(sys.stdout, TextIOWrapper):
        with suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def _flush_stdout() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def refuse_beside(option: str, allowed: Iterable[str]) -> None:
    """Refuse what was typed beside `option` and would have no effect. `allowed`: parameters by name."""
    context = click.get_current_context()
    for parameter in context.command.params:
        # By its source and not by its value: an option may be typed with the value it has anyway.
        source = context.get_parameter_source(parameter.name or "")
        if source is ParameterSource.COMMANDLINE and parameter.name not in allowed:
            raise click.UsageError(f"{parameter.opts[0]} has no effect beside {option}.")


def drop_unwritable() -> None:
    """Give up stdout and stderr where they cannot be written."""
    # What could not be written is still in the buffer. Python would try again at exit, fail, and
    # change the exit code to 120.
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  until the process ends
