"""Fixtures of the node suites."""

from __future__ import annotations

import framework  # noqa: F401  before anything of sonicmoe
import pytest

from sonicmoe.interop import grad_enabled


@pytest.fixture(autouse=True)
def _autograd_is_on_afterwards():
    yield
    assert grad_enabled()
