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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("warmup --precison", "No such option '--precison'; did you mean '--precision'?"),
        ("bench --precison", "No such option '--precison'"),
        ("trian", "No such command 'trian'; did you mean 'train'?"),
        ("xyz", "No such command 'xyz'."),
    ],
)
def test_the_closest_option_or_command_is_named(words, said):
    result = CliRunner().invoke(main, words.split())
    assert (result.exit_code, result.output) == (2, f"Error: {said}\n")


def test_refusal_is_one_line_and_exit_code_two(monkeypatch):
    @click.command()
    def doctor():
        raise ConfigError("batch is 0; needed: at least 1")

    module = type("module", (), {"doctor": doctor})
    monkeypatch.setattr(main_module.importlib, "import_module", lambda _: module)
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 2
    assert result.output == "Error: batch is 0; needed: at least 1\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_that_is_not_understood_stops_every_command_but_the_doctor(
    name, monkeypatch, tmp_path
):
    """Before the command looks at its own options; its help is still there."""
    monkeypatch.setenv("SONIC_MOE_FP8_MODE", "perff")
    for place in ("SONIC_MOE_CACHE_DIR", "SONIC_MOE_LOCAL_CACHE_DIR"):
        monkeypatch.setenv(place, str(tmp_path))
    helped = CliRunner().invoke(main, [name, "--help"])
    assert helped.exit_code == 0 and f"Usage: main {name}" in helped.output
    refused = CliRunner().invoke(main, [name])
    wanted = "SONIC_MOE_FP8_MODE='perff' is not understood"
    if name == "doctor":  # which reports it
        assert refused.exit_code == 1 and wanted in refused.output
        assert "self-test" in refused.output
        return
    wanted += "; needed: 'perf', 'mem' or 'off'"
    assert (refused.exit_code, refused.output) == (2, f"Error: {wanted}\n")


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
