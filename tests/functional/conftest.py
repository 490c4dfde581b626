"""Fixtures of the PyTorch face's suites."""

from __future__ import annotations

import framework  # noqa: F401  before anything of sonicmoe
import pytest
import torch

from sonicmoe.engine.reference import ReferenceEngine


@pytest.fixture
def saves(monkeypatch):
    """The `save` argument of every engine forward."""
    asked, original = [], ReferenceEngine.forward

    def record(self, *arguments, save=True):
        asked.append(save)
        out, saved = original(self, *arguments, save=save)
        assert (saved is not None) == save
        return out, saved

    monkeypatch.setattr(ReferenceEngine, "forward", record)
    return asked


@pytest.fixture
def fresh_compiler():
    """No graph is there before or after the test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
