"""Tests of what only Paddle has: they are collected with `SONICMOE_TEST_FRAMEWORK=paddle`."""

from __future__ import annotations

import framework
import pytest

collect_ignore_glob = [] if framework.IS_PADDLE else ["test_*.py"]


@pytest.fixture(autouse=True)
def _grad_mode_survives():
    """No call of the package may leave autograd switched off behind it."""
    yield
    assert framework.torch.is_grad_enabled()
