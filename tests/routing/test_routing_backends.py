"""The choice of routing kernels: what a passing error forced is not for ever, and a lock timeout
reaches the caller.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import framework  # noqa: F401  before anything of sonicmoe
import pytest

from sonicmoe.jit.errors import CompileLockTimeout, ToolchainError
from sonicmoe.routing import backends


@pytest.fixture(autouse=True)
def fresh_choice():
    backends._choose.cache_clear()
    yield
    backends._choose.cache_clear()


def failing(name, *errors):
    """Makes the kernels after raising each error once."""
    left = list(errors)

    def make(device):
        if left:
            raise left.pop(0)
        return SimpleNamespace(name=name)

    return make


def chosen(times):
    return [backends._choose("cuda:0").name for _ in range(times)]


def test_a_passing_error_does_not_decide_for_the_process(monkeypatch, caplog):
    monkeypatch.setattr(backends, "_make_cuda", failing("cuda", RuntimeError("CUDA out of memory")))
    monkeypatch.setattr(backends, "_make_triton", failing("triton"))
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        assert chosen(3) == ["triton", "cuda", "cuda"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines[:2] == [
        "routing kernels on cuda:0: triton (CUDA kernels are unavailable: RuntimeError: CUDA out of memory)",
        "routing kernels on cuda:0: cuda (compiled for this GPU)",
    ]


def test_a_lasting_error_decides_once_though_a_passing_one_hit_the_next_choice(monkeypatch):
    monkeypatch.setattr(backends, "_make_cuda", failing("cuda", *[ToolchainError("no nvcc")] * 9))
    monkeypatch.setattr(backends, "_make_triton", failing("triton", OSError("too many open files")))
    assert chosen(3) == ["reference", "triton", "triton"]


@pytest.mark.parametrize("maker", ["_make_cuda", "_make_triton"])
def test_a_lock_timeout_is_raised_and_the_next_call_tries_again(maker, monkeypatch):
    monkeypatch.setattr(backends, "_make_cuda", failing("cuda", ToolchainError("no nvcc")))
    monkeypatch.setattr(backends, "_make_triton", failing("triton"))
    monkeypatch.setattr(
        backends, maker, failing("late", CompileLockTimeout("waited 600 s for pid 7 on host a"))
    )
    with pytest.raises(CompileLockTimeout, match="pid 7 on host a"):
        chosen(1)
    assert chosen(1)[0] != "reference"
