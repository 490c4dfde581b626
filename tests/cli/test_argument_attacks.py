"""Every command with seeded nonsense for its own parameters: one line or a result, in time that
pyproject.toml bounds, and nothing written outside the directories that it was given.
"""

import os
import random
import sys
from contextlib import contextmanager
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from sonicmoe.cli.main import COMMANDS, main
from sonicmoe.diagnostics.doctor import Report
from sonicmoe.errors import ConfigError

TEXTS = (
    "", " ", "-1", "0", "1", "2", "3", "8", "64", "1.5", "nan", "-inf", "inf", "1e400", "1e30", "9" * 20, "9" * 400,
    "9" * 5000, "-" + "9" * 400, "0x10", "\0", "a\0b", "\ud800", "\udcff", "a\nb", "é", "\x1b[2J", "-", "--", "=",
    "x" * 5000, "%s%n", "{}", "[bold]", "bf16", "fp8", "torch", "None", "true",
)  # fmt: skip
PLACES = [
    "/dev/full", "/dev/null", "/dev/zero", "/", ".", "..", "/proc/self/mem", "~", "/proc/1/fd",
]  # fmt: skip
OWN_PLACES = [
    "directory", "empty", "fifo", "link", "loop", "missing/deep/name", "locked", "n" * 300,
]  # fmt: skip
EXIT_CODES = {0, 1, 2}


class Reached(ConfigError):
    """The command has taken its arguments and would begin to work."""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """The working directory, with something of every kind in it."""
    work = tmp_path / "work"  # so that ".." is a directory of the test too
    for path in (work, work / "directory", work / "locked", tmp_path / "cache", tmp_path / "local"):
        path.mkdir()
    for name in ("empty", "directory/a.txt"):
        (work / name).touch()
    os.mkfifo(work / "fifo")
    (work / "link").symlink_to("directory")
    (work / "loop").symlink_to("loop")
    (work / "locked").chmod(0o500)
    monkeypatch.chdir(work)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("SONIC_MOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))  # made when it is imported
    return tmp_path


@pytest.fixture
def idle(monkeypatch):
    """Commands end where their work would begin."""

    def reached(*_, **__):
        raise Reached("it would begin to work here")

    import sonicmoe.bench.runner
    import sonicmoe.bench.sweep
    import sonicmoe.cli.warmup  # noqa: F401  or a patch would not find it
    from ernie_compat.trainer import Trainer

    monkeypatch.setattr(Trainer, "start", reached)
    monkeypatch.setattr(Trainer, "resume", reached)
    for name in (
        "sonicmoe.bench.runner.measure",
        "sonicmoe.bench.sweep.sweep", "sonicmoe.cli.warmup.warm_up",
    ):  # fmt: skip
        monkeypatch.setattr(name, reached)
    # The engines are examined by other tests.
    monkeypatch.setattr("sonicmoe.cli.doctor.load_framework", lambda *_: False)
    assert Report().healthy


_ALLOWED = []
_WRITTEN_ELSEWHERE = []
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def _watch(event, arguments):
    """An audit hook: collects every path outside `_ALLOWED` that is opened for writing, made,
    renamed or removed.
    """
    if not _ALLOWED or event not in {"open", "os.mkdir", "os.rename", "os.remove", "os.truncate"}:
        return
    path, writes = arguments[0], event != "open" or bool(arguments[2] & _WRITES)
    if not writes or isinstance(path, int) or path is None:
        return
    where = Path(os.path.abspath(os.fsdecode(path)))
    if not any(where.is_relative_to(allowed) for allowed in _ALLOWED):
        _WRITTEN_ELSEWHERE.append(f"{event} {str(where)[:200]!r}")


@contextmanager
def watched(*allowed):
    """Fail where something is written outside these directories."""
    _WRITTEN_ELSEWHERE.clear()
    _ALLOWED[:] = allowed
    try:
        yield
    finally:
        _ALLOWED.clear()
    assert _WRITTEN_ELSEWHERE == []


sys.addaudithook(_watch)


def attack(command, rng):
    """A few of the command's own parameters with values of any kind."""
    arguments = []
    parameters = [one for one in command.params if one.name not in ("help", "list_only")]
    required = [one for one in parameters if one.required and rng.random() < 0.9]
    for parameter in [*required, *rng.sample(parameters, rng.randint(1, min(4, len(parameters))))]:
        if isinstance(parameter, click.Option):
            arguments.append(rng.choice(parameter.opts + parameter.secondary_opts))
            if parameter.is_flag:
                continue
        arguments.append(value_for(parameter, rng))
    if rng.random() < 0.05:
        arguments.append(rng.choice(("--no-such-option", "stray", "--", "-")))
    return arguments


def value_for(parameter, rng):
    """Often something that its type takes, so that the attack gets past the first check."""
    if isinstance(parameter.type, click.Choice) and rng.random() < 0.6:
        return str(rng.choice(list(parameter.type.choices)))
    if isinstance(parameter.type, click.Path) and rng.random() < 0.7:
        return rng.choice(PLACES + 3 * OWN_PLACES)
    return rng.choice(TEXTS)


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("name", COMMANDS)
def test_any_argument_gives_a_result_or_one_line(name, place, request):
    command = main.get_command(click.Context(main), name)
    assert command is not None
    rng = random.Random(name)
    for _ in range(request.config.getoption("--attacks") // 4):
        arguments = attack(command, rng)
        shown = " ".join(map(repr, arguments))[:300]
        with watched(place, Path("/dev/null")):
            result = CliRunner().invoke(main, [name, *arguments])
        error = result.exception
        assert error is None or isinstance(error, SystemExit), (shown, repr(error))
        assert result.exit_code in EXIT_CODES, shown
        if result.exit_code == 2:
            # A progress bar leaves an empty line where there is no terminal.
            lines = [line for line in result.stderr.splitlines() if line.strip()]
            assert len(lines) == 1, (shown, result.stderr)
        assert "Traceback" not in result.output, shown
