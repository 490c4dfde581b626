"""Tests of the double run under Paddle: `SONICMOE_TEST_FRAMEWORK=paddle`."""

from __future__ import annotations

import framework
import pytest
from engine.fp8_arrivals import problem_with_idle_tokens
from engine.moe_golden import make_problem

collect_ignore_glob = [] if framework.IS_PADDLE else ["test_double*.py"]


@pytest.fixture(scope="session")
def problem():
    return make_problem(dtype=framework.torch.bfloat16)


@pytest.fixture(scope="session")
def wide():
    """Wide enough for two scales a row; some tokens have no slot."""
    return problem_with_idle_tokens()


@pytest.fixture
def traceless(monkeypatch):
    """No write shows on the host, as under Paddle."""
    from sonicmoe.layer import bound
    from sonicmoe.weights.changes import Traces

    monkeypatch.setattr(bound, "traces_of", lambda _weights: Traces())


@pytest.fixture
def undeclared(monkeypatch):
    """Nobody has said what packed words mean."""
    from sonicmoe.fleet import carrier

    monkeypatch.setattr(carrier, "_declared", None)


@pytest.fixture
def tasks():
    """Weight gradients that a backward offers are put off, into this list; Paddle alone takes the
    hook.
    """
    from sonicmoe.fleet.deferral import set_wgrad_deferral_hook

    taken = []
    set_wgrad_deferral_hook(lambda _point, _weight, run: taken.append(run) or True)
    yield taken
    set_wgrad_deferral_hook(None)
