"""Which kernel flushes gradients: what a passing error forced is not for ever, and a lock timeout
reaches the caller.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import framework  # noqa: F401  before anything of sonicmoe
import pytest

from sonicmoe.gradients import destinations
from sonicmoe.jit.errors import CompileForbiddenError, CompileLockTimeout, ToolchainError


@pytest.fixture
def attempts(monkeypatch):
    """Errors that the next attempts to load the kernel meet; what it then is."""
    destinations._kernel_on.cache_clear()
    errors = []

    def load():
        if errors:
            raise errors.pop(0)
        return "kernel"

    monkeypatch.setattr(destinations, "flush_source", lambda arch: SimpleNamespace(load=load))
    monkeypatch.setattr(destinations, "arch_of", lambda device: "sm_90a")
    yield errors
    destinations._kernel_on.cache_clear()


@pytest.mark.parametrize(
    "error", [CompileLockTimeout("waited 600 s"), CompileForbiddenError("forbidden")]
)
def test_what_is_promised_to_be_an_error_is_one_and_the_next_call_tries_again(error, attempts):
    attempts.append(error)
    with pytest.raises(type(error)):
        destinations._kernel_on("cuda:0")
    assert destinations._kernel_on("cuda:0") == "kernel"


def test_a_passing_error_does_not_decide_for_the_process(attempts, caplog):
    attempts += [RuntimeError("CUDA out of memory")] * 2
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        assert destinations._kernel_on("cuda:0") is None
        assert destinations._kernel_on("cuda:0") is None
        attempts.clear()
        tentative = destinations._kernel_on._tentative
        tentative["cuda:0"] = tentative["cuda:0"]._replace(again_at=0.0)
        assert destinations._kernel_on("cuda:0") == "kernel"
    warned, told = caplog.records
    assert warned.getMessage().endswith("flushed by plain tensor operations: CUDA out of memory")
    assert told.getMessage() == "kernels on cuda:0: what had stood in the way is gone"


def test_a_missing_compiler_is_asked_for_once(attempts, caplog):
    attempts.append(ToolchainError("no nvcc"))
    with caplog.at_level(logging.WARNING, logger="sonicmoe"):
        assert [destinations._kernel_on("cuda:0") for _ in range(3)] == [None] * 3
    assert len(caplog.records) == 1
