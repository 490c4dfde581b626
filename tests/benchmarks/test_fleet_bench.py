"""The benchmark of PaddleFleet's flow runs where there is no GPU, and what its figures come from is
right.
"""

from __future__ import annotations

import json
from pathlib import Path

import processes
import pytest
import torch
from worlds import environment

from sonicmoe.fleet import carrier

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "fleet_bench.py"


@pytest.fixture
def layer(load, monkeypatch):
    monkeypatch.setattr(carrier, "_declared", None)
    return load("fleet_layer")


def test_figures():
    command = [str(SCRIPT), "--device", "cpu", "--ranks", "2", "--repeats", "1", "--json"]
    process = processes.run(command, environment(), ROOT, timeout=240)
    assert process.returncode == 0, process.stderr
    figures = json.loads(process.stdout.splitlines()[-1])
    assert figures["ranks"] == 2 and "host_us" not in figures
    errors = figures["errors"]
    assert set(errors) == {"bf16 dispatch", "fp8 dispatch"}
    assert errors["fp8 dispatch"]["y"] == errors["bf16 dispatch"]["y"], "the same codes"
    for arm, stages in figures["stages_us"].items():
        total = stages.pop("total")
        assert len(stages) == 6 and min(stages.values()) > 0, arm
        assert total == pytest.approx(sum(stages.values()))


def test_fleets_call_on_freed_weights(layer):
    """The flow of the GPU tests on the reference engine."""
    sizes = layer.Sizes(40, 128, 64, 4, 2)
    batch = layer.Batch.random(sizes, "cpu", 0)
    weights = layer.weights_of(sizes, "cpu")
    before = [weight.detach().clone() for weight in weights]

    def call():
        for weight in weights:
            weight.main_grad.zero_()
        found = layer.call_fleet(weights, batch, "reference")
        return {name: value.clone() for name, value in found.items()}

    wanted = call()
    layer.take_copies(weights)
    layer.give_copies(weights)
    with layer.freed(weights):
        assert all(weight.untyped_storage().nbytes() == 0 for weight in weights)
        found = call()
    for weight, values in zip(weights, before, strict=True):
        assert torch.equal(weight, values)
    layer.take_copies(weights)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    arm = layer.ARMS["fp8 dispatch"]
    from sonicmoe.ep import LocalDispatcher

    experts = layer.Experts(weights, arm, "reference")
    through_node = layer.run(LocalDispatcher(sizes.experts), experts, batch, arm)
    assert all(torch.equal(through_node[name], wanted[name]) for name in wanted)
