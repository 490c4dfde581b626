"""Choices of kernels per device: lasting ones once, those that a passing error forced again and
again, at growing pauses.
"""

import pytest

from sonicmoe.jit import decided
from sonicmoe.jit.decided import Decided, may_pass
from sonicmoe.jit.errors import (
    ArtefactLoadError,
    CacheUnwritableError,
    CompileError,
    CompileLockTimeout,
    ToolchainError,
)

LASTING = [
    ToolchainError("no nvcc"), CompileError("nvcc"), CacheUnwritableError("full"),
    ImportError("no triton"),
]  # fmt: skip
PASSING = [
    RuntimeError("CUDA out of memory"), OSError("unreadable"),
    ArtefactLoadError("cannot allocate memory"),
]  # fmt: skip


def failing(errors):
    """Falls back for each error in turn, then finds the kernel; and the devices it was asked for."""
    asked = []

    @Decided
    def choose(device):
        asked.append(device)
        return ("fallback", [errors.pop(0)]) if errors else ("kernel", [])

    return choose, asked


@pytest.mark.parametrize("error", LASTING, ids=lambda error: type(error).__name__)
def test_what_cannot_change_is_decided_once(error):
    choose, asked = failing([error])
    assert [choose("cuda:0") for _ in range(3)] == ["fallback"] * 3 and asked == ["cuda:0"]
    choose.cache_clear()
    assert choose("cuda:0") == "kernel"


@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_what_may_pass_is_tried_again_at_the_next_call_then_kept(error):
    choose, asked = failing([error])
    assert [choose("cuda:0") for _ in range(4)] == ["fallback", "kernel", "kernel", "kernel"]
    assert choose("cuda:1") == "kernel" and asked == ["cuda:0", "cuda:0", "cuda:1"]


def test_attempts_that_keep_failing_become_rare(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(decided.time, "monotonic", lambda: now[0])
    choose, asked = failing([RuntimeError("no C compiler")] * 1000)
    for _ in range(100_000):
        assert choose("cuda:0") == "fallback"
        now[0] += 0.01
    assert 15 <= len(asked) <= 30, "in a thousand seconds"
    assert not may_pass(ToolchainError("no nvcc")) and not may_pass(CompileLockTimeout("waited"))
