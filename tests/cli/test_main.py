"""The console command: help, lazy loading, exit codes."""

import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from processes import ROOT

import sonicmoe
from sonicmoe.cli import main as main_module
from sonicmoe.cli.main import COMMANDS, main
from sonicmoe.errors import ConfigError


def python(*arguments):
    """What a process of its own prints; it must end well."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_help_lists_every_command_and_loads_none():
    program = (
        "import sys; from sonicmoe.cli.main import COMMANDS, main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('LOADED', *(n for n in COMMANDS if f'sonicmoe.cli.{n}' in sys.modules), *({'torch','paddle'} & set(sys.modules)))"
    )
    *screen, loaded = python("-c", program).splitlines()
    assert loaded == "LOADED"
    for name, summary in COMMANDS.items():
        line = next(line for line in screen if line.split()[:1] == [name])
        assert line.split()[1] == summary.split()[0]


def test_python_m_and_version():
    version = python("-m", "sonicmoe", "--version").strip()
    assert version == f"sonicmoe, version {sonicmoe.__version__}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_listed_command_loads_and_has_help(name):
    command = main.get_command(click.Context(main), name)
    assert command is not None
    assert command.name == name
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert f"Usage: main {name}" in result.output


def test_of_unknown_options_the_closest_is_named():
    for words, hint in (
        ("warmup --precison", "; did you mean '--precision'?"),
        ("bench --precison", ""),
        ("verify --tolerence", "; did you mean '--tolerance'?"),
    ):
        result = CliRunner().invoke(main, words.split())
        option = words.split()[1]
        assert result.exit_code == 2
        assert result.output == f"Error: No such option {option!r}{hint}\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [("trian", "did you mean 'train'?"), ("doctr", "did you mean 'doctor'?"), ("xyz", None)],
)
def test_an_unknown_command_is_a_usage_error(name, words):
    result = CliRunner().invoke(main, [name])
    assert result.exit_code == 2
    if words is None:
        assert "No such command 'xyz'" in result.output and "did you mean" not in result.output
    else:
        assert result.output == f"Error: No such command {name!r}; {words}\n"


def test_refusal_is_one_line_and_exit_code_two(monkeypatch):
    @click.command()
    def doctor():
        raise ConfigError("batch is 0; needed: at least 1")

    module = type("module", (), {"doctor": doctor})
    monkeypatch.setattr(main_module.importlib, "import_module", lambda _: module)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 2
    assert result.output == "Error: batch is 0; needed: at least 1\n"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "doctor"])
def test_a_flag_that_is_not_understood_stops_every_command(name, monkeypatch):
    """Before the command looks at its own options; its help is still there."""
    monkeypatch.setenv("SONIC_MOE_FP8_MODE", "perff")
    refused = CliRunner().invoke(main, [name])
    wanted = "SONIC_MOE_FP8_MODE='perff' is not understood; needed: 'perf', 'mem' or 'off'"
    assert (refused.exit_code, refused.output) == (2, f"Error: {wanted}\n")
    helped = CliRunner().invoke(main, [name, "--help"])
    assert helped.exit_code == 0 and "Usage:" in helped.output


def test_the_doctor_reports_a_flag_that_is_not_understood(monkeypatch, tmp_path):
    monkeypatch.setenv("SONIC_MOE_ENGINE", "hoper")
    monkeypatch.setenv("SONIC_MOE_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path))
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 1 and "SONIC_MOE_ENGINE='hoper' is not understood" in result.output
    assert "self-test" in result.output


@pytest.mark.parametrize(
    "line",
    ["--help", "--version", "bench --list", "doctor --json", "doctor"],
)
def test_output_that_cannot_be_written_is_one_line(line, monkeypatch, capsys):
    monkeypatch.setattr("sonicmoe.cli.doctor.load_framework", lambda *_: False)
    full = Path("/dev/full").open("w")  # noqa: SIM115  closing it would fail
    monkeypatch.setattr(sys, "stdout", full)
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 1
    said = "Error: the output cannot be written: No space left on device"
    *progress, last = capsys.readouterr().err.splitlines()
    assert last == said and all(line.endswith(" s so far") for line in progress)
