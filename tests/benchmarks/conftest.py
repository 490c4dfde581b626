"""Programs of benchmarks/, imported, and run as a user runs them but in this process, which has
paid for the import of the framework already.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """`load(name)`: the module, imported anew."""
    before = set(sys.modules)
    loaded = []

    def imported(name):
        sys.modules.pop(name, None)
        loaded.append(name)
        return importlib.import_module(name)

    yield imported
    for name in {*loaded, *(set(sys.modules) - before)}:
        place = getattr(sys.modules.get(name), "__file__", None)
        if place and Path(place).is_relative_to(BENCHMARKS):
            del sys.modules[name]


@pytest.fixture
def run(load, monkeypatch):
    """`run(name, *arguments)`: what a program printed, on a machine without a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def invoke(name, *arguments, exit_code=0):
        main = load(name).main
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == exit_code, (result.output, result.exc_info)
        return result.stdout if exit_code == 0 else result.output

    return invoke
