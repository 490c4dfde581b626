"""`sonicmoe bench` on a machine without a GPU, and what it runs: variants, rotation, phases,
memory, pictures.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from framework import torch

from sonicmoe.bench import runner, timing, workload
from sonicmoe.bench import sweep as sweep_module
from sonicmoe.bench.runner import Effort, measure
from sonicmoe.bench.shapes import SHAPES, SMALL, Shape
from sonicmoe.bench.timing import measure_memory, time_phases
from sonicmoe.bench.workload import (
    Batch,
    Call,
    Layer,
    Variant,
    available_variants,
    rotating_batches,
)
from sonicmoe.cli.main import main
from sonicmoe.enums import EngineName, FlushMode
from sonicmoe.errors import ConfigError, EngineUnavailableError

TINY = Shape(48, 32, 16, 4, 2)
TINY_OPTIONS = ["--T", "48", "--H", "32", "--I", "16", "--E", "4", "--K", "2", "--rounds", "2"]
PERF = Variant(EngineName.REFERENCE, "perf")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """These tests are about the machine without one, also where there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


def test_variants_are_spelled_engine_and_mode():
    assert Variant.parse("hopper:mem") == Variant(EngineName.HOPPER, "mem")
    assert [str(Variant.parse(name)) for name in ("reference", "bf16", "hopper")] == [
        "reference:perf", "bf16:off", "hopper:perf",
    ]  # fmt: skip
    assert PERF.fp8 is True and Variant.parse("bf16").fp8 is False
    assert Variant.parse("mxfp8").config.recipe is not None, "of one chosen by name: no default"


@pytest.mark.parametrize(
    ("text", "message"), [("auto", "engine is 'auto'"), ("hopper:fast", "mode is 'fast'")]
)
def test_unknown_variants_are_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        Variant.parse(text)


def test_gpu_engines_are_found_as_soon_as_they_register(monkeypatch):
    absent = {EngineName.BF16, EngineName.TRITON}

    def choose(device, name):
        if name in absent:
            raise EngineUnavailableError("not today")

    assert available_variants("cpu") == [PERF]
    monkeypatch.setattr(workload, "choose_engine", choose)
    hopper, bf16 = Variant(EngineName.HOPPER, "perf"), Variant(EngineName.BF16, "off")
    assert available_variants("cuda:0") == [hopper]
    # The Triton engine stands in for the BF16 engine, and is not timed beside it.
    absent.remove(EngineName.TRITON)
    assert available_variants("cuda:0") == [Variant(EngineName.TRITON, "off"), hopper]
    absent.clear()
    assert available_variants("cuda:0") == [bf16, hopper]


def test_batches_route_to_distinct_experts_and_count_them():
    torch.manual_seed(1)
    batch = Batch.random(TINY, "cpu")
    assert all(len(set(row)) == TINY.topk for row in batch.indices.tolist())
    assert (
        batch.counts == torch.bincount(batch.indices.reshape(-1), minlength=TINY.experts).tolist()
    )
    assert batch.nbytes == 48 * (2 * 32 * 2 + 2 * (8 + 4))


def test_rotation_exceeds_the_cache_twice(monkeypatch):
    monkeypatch.setattr(Batch, "random", classmethod(lambda cls, shape, device: BATCH))
    assert len(rotating_batches(SHAPES["reference"], "cpu")) == 1
    assert len(rotating_batches(SMALL, "cuda:0")) == workload.MAX_ROTATION
    assert len(rotating_batches(SMALL, "cuda:0", most=10_000)) == 1 + -(
        -workload.ROTATION_BYTES // BATCH.nbytes
    )


BATCH = Batch.random(SMALL, "cpu")


def test_phases_run_in_order_and_leave_gradients():
    layer = Layer(TINY, "cpu")
    batch = Batch.random(TINY, "cpu")
    call = Call(layer.node(PERF), batch)
    times = time_phases(call.phases, "cpu")
    assert list(times) == ["forward", "backward", "step"]
    assert all(time.wall > 0 for time in times.values())
    assert batch.x.grad is not None and batch.probs.grad is not None
    assert layer.experts[0].up_gate_proj.weight.main_grad.abs().sum() > 0
    assert call.out is None


@pytest.mark.parametrize(("flush", "held"), [("auto", 0), ("step", 4 * 4 * 3 * 32 * 16)])
def test_a_variant_sends_weight_gradients_where_it_says(flush, held):
    variant = replace(PERF, flush=FlushMode(flush))
    assert str(variant) == ("reference:perf" if flush == "auto" else f"reference:perf:{flush}")
    layer = Layer(TINY, "cpu")
    node, weight = layer.node(variant), layer.experts[0].up_gate_proj.weight
    place = weight.main_grad.data_ptr()
    call = Call(node, Batch.random(TINY, "cpu"))
    call.forward()
    call.backward()
    assert bool(weight.main_grad.any()) == (held == 0)
    call.step()
    assert weight.main_grad.any() and weight.main_grad.data_ptr() == place
    assert node.gradient_bytes == held


def test_ways_of_gradients_are_measured_side_by_side(caplog):
    result = run(*TINY_OPTIONS, "--json", "--flush", "auto", "--flush", "step")
    ways = {each["variant"]: each for each in json.loads(result.stdout)["results"]}
    assert list(ways) == ["reference:perf", "reference:perf:step"]
    assert [each["gradient_mib"] * timing.MIB for each in ways.values()] == [0, 4 * 4 * 3 * 32 * 16]
    # They share `main_grad`, and no node takes the other's additions for somebody else's.
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "gradient MiB" in run(*TINY_OPTIONS, "--flush", "step").output


def test_a_sweep_takes_one_way(tmp_path):
    result = run("--sweep", str(tmp_path / "s"), "--flush", "auto", "--flush", "step")
    assert result.exit_code == 2 and "--sweep takes one --flush" in result.output


@pytest.mark.parametrize(
    ("mode", "per_element"), [("perf", 1 + 4 / 128), ("off", 2), ("mem", 1 + 4 / 128)]
)
def test_saved_bytes_are_z_and_routing(mode, per_element):
    """z in 8 bits with a scale per 128 columns, or bf16; the routing tensors; nothing else."""
    shape = Shape(256, 128, 128, 2, 1)
    layer = Layer(shape, "cpu")
    call = Call(layer.node(Variant(EngineName.REFERENCE, mode)), Batch.random(shape, "cpu"))
    saved = measure_memory(call, "cpu").saved * timing.MIB
    z = 2 * 128 * per_element
    least, most = shape.rows * z, (shape.rows + 2 * 127) * (z + 16) + shape.rows * 8 + 1024
    assert least < saved <= most


def test_results_of_two_variants_are_interleaved(monkeypatch):
    order = []
    monkeypatch.setattr(runner, "Call", lambda node, batch: order.append(node) or Call(node, batch))
    results = measure(TINY, [PERF, Variant.parse("reference:off")], Effort(rounds=2, warmup=1))
    first, second, *rounds, _, _ = order
    assert rounds == [first, second, second, first]
    for result in results:
        assert result.wall["pair"].count == 2
        assert result.wall["pair"].median == pytest.approx(
            result.wall["forward"].median + result.wall["backward"].median, rel=0.5
        )
        assert result.mfu is None and result.tflops > 0 and result.busy == {}


def test_table_says_that_there_is_no_gpu_and_draws(tmp_path):
    result = run(*TINY_OPTIONS, "--T", "96", "--plot", str(tmp_path / "plots"))
    assert result.exit_code == 0, result.output
    assert "no GPU" in result.output and "T=96 H=32 I=16 E=4 K=2" in result.output
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == [
        "rate_over_rows.png", "stages_48_32_16_4_2.png", "stages_96_32_16_4_2.png",
    ]  # fmt: skip


def test_json_holds_machine_and_figures():
    result = run(*TINY_OPTIONS, "--json", "--engine", "reference:off", "--engine", "hopper")
    data = json.loads(result.stdout)
    assert data["machine"]["gpu"] is False and data["machine"]["versions"]["torch"]
    ran, refused = data["results"]
    assert ran["shape"] == {"tokens": 48, "hidden": 32, "intermediate": 16, "experts": 4, "topk": 2}
    assert ran["tflops"] == pytest.approx(ran["flop"] / ran["wall"]["pair"]["median"] / 1e6)
    assert "hopper" in refused["refusal"] and refused["wall"] == {}


def test_nothing_ran_is_a_failure():
    result = run("--engine", "hopper", *TINY_OPTIONS)
    assert result.exit_code == 1
    assert "hopper:perf did not run at T=48" in result.output


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", ["--sustained", "--budget"])
def test_seconds_are_a_finite_number(option, value, monkeypatch):
    """Steps for NaN seconds never ended, so here nothing is measured."""
    monkeypatch.setattr("sonicmoe.bench.runner.measure", None)
    monkeypatch.setattr("sonicmoe.bench.sweep.sweep", None)
    refused = run(*TINY_OPTIONS, option, value)
    assert refused.exit_code == 2 and option in refused.output


@pytest.mark.parametrize("option", ["--plot", "--sweep"])
def test_a_place_that_takes_nothing_is_refused_before_anything_is_measured(
    option, tmp_path, monkeypatch
):
    def measured(*_, **__):
        raise AssertionError("measured first")

    monkeypatch.setattr(runner, "measure", measured)
    monkeypatch.setattr(sweep_module, "PointBench", measured)
    (tmp_path / "file").write_text("")
    refused = run(*TINY_OPTIONS, option, str(tmp_path / "file" / "inside"))
    assert refused.exit_code == 1 and refused.output.startswith(f"Error: {tmp_path / 'file'}")


def test_pictures_that_cannot_be_drawn_are_refused_before_anything_is_measured(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    refused = run(*TINY_OPTIONS, "--plot", str(tmp_path / "plots"))
    assert refused.exit_code == 2 and "matplotlib is not installed" in refused.output
    assert "T=48" not in refused.output and list(tmp_path.iterdir()) == []


def test_refusals_and_list():
    assert run("--engine", "blackwell").exit_code == 2
    assert run("--T", "8", "--E", "1", "--K", "2").exit_code == 2
    listed = run("--list").output
    assert all(name in listed for name in SHAPES)
    assert json.loads(run("--list", "--json").output)["reference"]["tokens"] == 8192
