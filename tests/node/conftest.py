"""Fixtures of the node suites."""

from __future__ import annotations

import logging
import warnings

import framework  # noqa: F401  before anything of sonicmoe
import pytest

from sonicmoe.engine.interface import GradientMode
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.interop import grad_enabled


@pytest.fixture(autouse=True)
def _autograd_is_on_afterwards():
    yield
    assert grad_enabled()


@pytest.fixture
def said(caplog):
    """Every line of the log and every Python warning so far."""
    logger = logging.getLogger("sonicmoe")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [*dict.fromkeys(caplog.messages), *(str(w.message) for w in caught)]
    logger.removeHandler(caplog.handler)


@pytest.fixture
def engine(monkeypatch):
    """Make the reference engine one that "adds" gradients into `main_grad`, one that "writes" them
    there, or one of a native buffer that is flushed ("elsewhere"); what it returns lists the targets
    that were written.
    """
    adds, written = ReferenceEngine.backward_dw, []

    def writes(self, pending, targets):
        if targets.mode is GradientMode.FRESH:
            written.append(targets)
            for tensor in targets.tensors():
                tensor.zero_()
        adds(self, pending, targets)

    def choose(which):
        if which == "elsewhere":
            monkeypatch.setattr(ReferenceEngine, "problem_of", lambda *_: "the moon is full")
        if which == "writes":
            monkeypatch.setattr(ReferenceEngine, "writes_gradients", lambda *_: True)
            monkeypatch.setattr(ReferenceEngine, "backward_dw", writes)
        return written

    return choose
