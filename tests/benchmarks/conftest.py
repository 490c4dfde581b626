"""Programs of benchmarks/, run as a user runs them but in this process, which has paid for the import of
the framework already.
"""

from __future__ import annotations

import importlib

import pytest
from click.testing import CliRunner


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.fixture
def run(no_gpu, monkeypatch):
    """`run(name, *arguments)`: what a program printed, on a machine without a GPU. It calls once what it
    measures, where it would call it eight times.
    """
    for name in ("CALLS", "WARM_UPS", "HOST_CALLS"):
        monkeypatch.setattr(f"timing.{name}", 1)

    def invoke(name, *arguments, exit_code=0):
        main = importlib.import_module(name).main
        result = CliRunner().invoke(main, [str(argument) for argument in arguments])
        assert result.exit_code == exit_code, (result.output, result.exc_info)
        return result.stdout if exit_code == 0 else result.output

    return invoke
