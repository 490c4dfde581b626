"""Fixtures of the node suites."""

from __future__ import annotations

import framework  # noqa: F401  before anything of sonicmoe
import pytest

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.interop import grad_enabled


@pytest.fixture(autouse=True)
def _autograd_is_on_afterwards():
    yield
    assert grad_enabled()


@pytest.fixture
def prepared(monkeypatch):
    """How often weights were prepared."""
    calls, original = [], ReferenceEngine.prepare_weights

    def count(self, *arguments):
        calls.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(ReferenceEngine, "prepare_weights", count)
    return calls
