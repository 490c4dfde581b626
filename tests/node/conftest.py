"""Fixtures of the node suites."""

from __future__ import annotations

import logging
import warnings

import framework  # noqa: F401  before anything of sonicmoe
import pytest

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
