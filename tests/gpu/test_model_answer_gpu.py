"""`sonicmoe bench --model` on a GPU: three ways run, and the answer ends in a sentence."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from sonicmoe.bench.contest import Entrant, ours, random_weights, stock
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.workload import Batch
from sonicmoe.cli.main import main

pytestmark = pytest.mark.gpu
SHAPE = Shape(512, 256, 256, 8, 2)


def test_the_command_times_three_ways():
    sizes = ["--H", "256", "--I", "256", "--E", "8", "--K", "2"]
    result = CliRunner().invoke(main, ["bench", "--tokens", "512", *sizes, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["measured"] and found["advice"].endswith(".")
    assert [way["refusal"] for way in found["ways"]] == [None, None, None]
    assert all(way["memory_mib"] > 0 for way in found["ways"])


@pytest.mark.parametrize(("use_fp8", "bar"), [(False, 0.01), (True, 0.1)])
def test_every_way_computes_the_same_layer(use_fp8, bar):
    torch.manual_seed(0)
    batch, weights = Batch.random(SHAPE, "cuda"), random_weights(SHAPE, "cuda")
    gradients = []
    for layer in (stock, ours(use_fp8)):
        Entrant(layer, batch, weights).call(write=True)
        gradients.append([each.grad.float() for each in (batch.x, batch.probs, *weights)])
    for theirs, own in zip(*gradients, strict=True):
        assert (theirs - own).norm() <= bar * theirs.norm()
