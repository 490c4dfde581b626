"""The suites of the integrations run under PyTorch, where the library they are about is installed."""

from __future__ import annotations

import importlib.util

import framework
import pytest

collect_ignore_glob = (
    []
    if importlib.util.find_spec("transformers") and not framework.IS_PADDLE
    else ["test_transformers_*"]
)


def pytest_report_header() -> str | None:
    """Say out loud what is not run."""
    return (
        "NOT RUN: the transformers suites need PyTorch and transformers >= 5.7"
        if collect_ignore_glob
        else None
    )


@pytest.fixture
def registered():
    from sonicmoe.integrations.transformers import register

    register()


@pytest.fixture
def blind(monkeypatch):
    """The engine of every call: it keeps FP8 codes, and its sample misses every write."""
    from functional.following import Following

    from sonicmoe.layer.plan import Plan

    engine = Following()
    engine.is_blind, engine.name = True, "reference"
    monkeypatch.setattr(Plan, "chosen", property(lambda _: engine, lambda *_: None))
    return engine
