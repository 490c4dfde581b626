"""`choose_engine`: the decision, its reason, and its one log line."""

from __future__ import annotations

import logging

import pytest

from sonicmoe.engine import select
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.select import ENGINES, announce, choose_engine
from sonicmoe.enums import EngineName
from sonicmoe.errors import EngineUnavailableError


@pytest.mark.parametrize("requested", [EngineName.AUTO, EngineName.REFERENCE])
def test_a_machine_without_a_gpu_runs_the_reference_engine(requested):
    choice = choose_engine("cpu", requested)
    assert isinstance(choice.engine, ReferenceEngine)
    assert choice.engine.name == "reference"
    assert choice.reason


def test_the_default_is_auto_and_says_why():
    assert "no GPU" in choose_engine("cpu").reason
    assert choose_engine("cpu", EngineName.REFERENCE).reason != choose_engine("cpu").reason


@pytest.mark.parametrize(
    "requested", [name for name in EngineName if name not in (EngineName.AUTO, EngineName.REFERENCE)]
)
def test_an_engine_that_cannot_run_on_a_cpu_is_refused_by_name(requested):
    with pytest.raises(EngineUnavailableError, match=requested.value) as caught:
        choose_engine("cpu", requested)
    assert "reference" in str(caught.value)


def test_every_engine_of_the_build_carries_its_name():
    for name, make in ENGINES.items():
        assert make().name == name.value


def test_announced_once_per_engine_and_device(caplog, monkeypatch):
    monkeypatch.setattr(select, "_LOGGED", set())
    choice = choose_engine("cpu")
    with caplog.at_level(logging.INFO, logger="sonicmoe"):
        for device in ("cpu", "cpu", "cuda:1", "cpu"):
            announce(choice, device)
    assert [r.getMessage() for r in caplog.records] == [
        f"engine reference on {d}: {choice.reason}" for d in ("cpu", "cuda:1")
    ]
