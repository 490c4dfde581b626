"""A small GPT MoE of the real Megatron-Core on two gloo ranks with expert parallelism 2: our experts
against stock ones, under each dispatcher, and checkpoints that one saves and the other loads.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import processes
import pytest
import worlds

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each rank has printed."""
    root = tmp_path_factory.mktemp("megatron")
    variables = worlds.torchrun_variables(2)
    for each in variables:
        each["PYTHONPATH"] = f"{worlds.environment()['PYTHONPATH']}:{HERE}"
    outputs = worlds.run_world(lambda _: (HERE / "megatron_worker.py", root), variables)
    return [json.loads(output.splitlines()[-1]) for output in outputs]


STOCK = "alltoall stock"
WAYS = {
    **{f"{name} ours": (f"{name} stock", 1e-5) for name in ("alltoall", "allgather", "flex")},
    **dict.fromkeys(("autograd", "late", "late flex", "late sorted"), (STOCK, 1e-5)),
    **dict.fromkeys(("fp8", "late fp8"), (STOCK, 0.02)),
}


@pytest.mark.parametrize("name", WAYS)
def test_losses_and_gradients_are_those_of_stock_experts(ranks, name):
    """`autograd`: without gradient_accumulation_fusion. `late`: with delay_wgrad_compute in the schedule
    of overlap_moe_expert_parallel_comm, over each dispatcher.
    """
    stock, tolerance = WAYS[name]
    for results in ranks:
        for found, wanted in zip(results[name], results[stock], strict=True):
            assert found == pytest.approx(wanted, rel=tolerance)
        assert "fp8" not in name or results[name] != results["alltoall ours"]


BARS = {"router in bf16": 0.02, "fp8": 0.08, "fp8, recompute": 0.08}


def test_a_layer_computes_what_the_stock_one_computes_under_each_option(ranks):
    """Output and all gradients, of each of its cases."""
    for results in ranks:
        errors = results["layers"]
        assert {name: e for name, e in errors.items() if not e <= BARS.get(name, 1e-5)} == {}
        assert len(errors) > 20 and all(errors[name] > 1e-4 for name in BARS)


def test_what_the_dispatcher_does_not_serve_is_named(ranks):
    for results in ranks:
        refused = results["refused"]
        assert refused and all(words in found for words, found in refused.items()), refused


def test_checkpoints_are_exchanged_and_another_shape_is_named(ranks):
    """Every model above began with what stock experts have saved."""
    for results in ranks:
        assert results["exchanged"]
        assert results["allreduce"] == [False]
        assert "(2, 4, 256, 32)) tensor for key" in results["wrong shape"]
        assert results["wrong shape"].endswith("experts.linear_fc1.weight")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_example_of_the_page_trains_by_one_command(ranks):
    command = ["examples/train_megatron.py", f"--ep={ranks}", "--steps=6"]
    if ranks > 1:
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        command = [*launcher, *command]
    done = processes.of_checkout(*command)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"^step .*: loss ([\d.]+)$", done.stdout, re.M)]
    assert len(losses) == 2 and losses[-1] < losses[0] - 0.5
