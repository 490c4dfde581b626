"""Tests of the double run under Paddle: `SONICMOE_TEST_FRAMEWORK=paddle`."""

from __future__ import annotations

import framework
import pytest

collect_ignore_glob = [] if framework.IS_PADDLE else ["test_double*.py"]


@pytest.fixture
def traceless(monkeypatch):
    """No write shows on the host, as under Paddle."""
    from sonicmoe.weights import layer
    from sonicmoe.weights.changes import Traces

    monkeypatch.setattr(layer, "traces_of", lambda _weights: Traces())
