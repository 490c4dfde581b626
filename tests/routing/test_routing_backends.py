"""The choice of routing kernels and its one log line: what a passing error forced is not for ever,
and what says nothing of the kernels reaches the caller.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest
from framework import tensor, torch

from sonicmoe.jit.errors import CompileForbiddenError, CompileLockTimeout, ToolchainError
from sonicmoe.routing import backends
from sonicmoe.routing.build import build_routing


@pytest.fixture(autouse=True)
def choice(monkeypatch, caplog):
    """`choice(times, cuda=errors, triton=errors)`: which kernels are chosen one after the other where
    making them raises each of these errors once.
    """

    def clear():
        backends._choose.cache_clear()
        backends.plain_kernels.cache_clear()

    def failing(name, errors):
        left = list(errors)

        def make(device):
            if left:
                raise left.pop(0)
            return SimpleNamespace(name=name)

        return make

    def chosen(times, **errors):
        for name in ("cuda", "triton"):
            monkeypatch.setattr(backends, f"_make_{name}", failing(name, errors.get(name, ())))
        return [backends._choose("cuda:0").name for _ in range(times)]

    clear()
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        yield chosen
    clear()


NO_NVCC = [ToolchainError("no nvcc\nmore lines")] * 9


def test_a_passing_error_does_not_decide_for_the_process(choice, caplog):
    assert choice(3, cuda=[RuntimeError("CUDA out of memory")]) == ["triton", "cuda", "cuda"]
    assert caplog.messages[:2] == [
        "routing kernels on cuda:0: triton (CUDA kernels are unavailable: RuntimeError: CUDA out of memory)",
        "routing kernels on cuda:0: cuda (compiled for this GPU)",
    ]


def test_without_a_cuda_compiler_triton_takes_over_and_says_why(choice, caplog):
    assert choice(3, cuda=NO_NVCC) == ["triton"] * 3
    assert caplog.messages == [
        "routing kernels on cuda:0: triton (CUDA kernels are unavailable: ToolchainError: no nvcc)"
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_without_either_plain_operations_take_over_and_name_both_reasons(choice, caplog):
    assert choice(1, cuda=NO_NVCC, triton=[ImportError("no triton")]) == ["reference"]
    (line,) = caplog.messages
    assert "ToolchainError: no nvcc" in line and "ImportError: no triton" in line


def test_a_forbidden_compile_is_never_answered_by_a_fallback(choice):
    with pytest.raises(CompileForbiddenError):
        choice(1, cuda=[CompileForbiddenError("forbidden")])


@pytest.mark.parametrize("maker", ["cuda", "triton"])
def test_a_lock_timeout_is_raised_and_the_next_call_tries_again(maker, choice):
    errors = {"cuda": NO_NVCC} | {maker: [CompileLockTimeout("waited 600 s for pid 7 on host a")]}
    with pytest.raises(CompileLockTimeout, match="pid 7 on host a"):
        choice(1, **errors)
    assert backends._choose("cuda:0").name != "reference"


def test_more_experts_than_the_kernels_take(caplog):
    indices, probs = np.zeros((20, 3), np.int64), np.ones((20, 3))
    for _ in range(2):
        given = tensor(indices), tensor(probs, torch.float32)
        routing = build_routing(*given, 600, static_rows=True)
    assert routing.num_experts == 600
    (line,) = caplog.messages
    assert "600 experts; the GPU kernels take at most 512" in line
