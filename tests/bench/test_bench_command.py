"""`sonicmoe bench` on a machine without a GPU, and what it runs: variants, rotation, phases,
memory.
"""

from __future__ import annotations

import json
import sys

import pytest
from click.testing import CliRunner

from sonicmoe.bench import runner, timing, workload
from sonicmoe.bench import sweep as sweep_module
from sonicmoe.bench.runner import measure
from sonicmoe.bench.shapes import SHAPES, SMALL, Shape
from sonicmoe.bench.timing import measure_memory
from sonicmoe.bench.workload import (
    Batch,
    Layer,
    NodeCall,
    Variant,
    available_variants,
    rotating_batches,
)
from sonicmoe.cli.main import main
from sonicmoe.enums import EngineName
from sonicmoe.errors import ConfigError, EngineUnavailableError

TINY = Shape(48, 32, 16, 4, 2)
TINY_OPTIONS = ["--T", "48", "--H", "32", "--I", "16", "--E", "4", "--K", "2"]
PERF = Variant(EngineName.REFERENCE, "perf")


@pytest.fixture(autouse=True)
def few_layers(monkeypatch):
    monkeypatch.setattr(Shape, "stack_layers", 2)


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


def test_variants_are_spelled_engine_and_mode():
    assert Variant.parse("hopper:mem") == Variant(EngineName.HOPPER, "mem")
    assert [str(Variant.parse(name)) for name in ("reference", "bf16", "hopper")] == [
        "reference:perf", "bf16:off", "hopper:perf",
    ]  # fmt: skip
    assert PERF.fp8 is True and Variant.parse("bf16").fp8 is False
    assert Variant.parse("mxfp8").config.recipe is not None, "of one chosen by name: no default"
    for text in ("auto", "hopper:fast"):
        with pytest.raises(ConfigError, match=f"engine is '{text}'"):
            Variant.parse(text)


def test_gpu_engines_are_found_as_soon_as_they_run(monkeypatch):
    able = set()

    def choose(device, name):
        if name.value not in able:
            raise EngineUnavailableError("not today")

    assert available_variants("cpu") == [PERF]
    monkeypatch.setattr(workload, "choose_engine", choose)
    # The Triton engine stands in for the BF16 engine, and is not timed beside it.
    for engine, found in (
        ("hopper", ["hopper:perf"]),
        ("triton", ["triton:off", "hopper:perf"]),
        ("bf16", ["bf16:off", "hopper:perf"]),
    ):
        able.add(engine)
        assert list(map(str, available_variants("cuda:0"))) == found


BATCH = Batch.random(SMALL, "cpu")


def test_batches_route_to_distinct_experts_and_exceed_the_cache_twice(monkeypatch):
    assert all(len(set(row)) == SMALL.topk for row in BATCH.indices.tolist())
    assert BATCH.counts == BATCH.indices.reshape(-1).bincount(minlength=SMALL.experts).tolist()
    monkeypatch.setattr(Batch, "random", classmethod(lambda cls, shape, device: BATCH))
    assert len(rotating_batches(SHAPES["reference"], "cpu")) == 1
    assert len(rotating_batches(SMALL, "cuda:0")) == workload.MAX_ROTATION
    read = 256 * (2 * 256 * 2 + 2 * (8 + 4))
    wanted = 1 + -(-workload.ROTATION_BYTES // read)
    monkeypatch.setattr(workload, "MAX_ROTATION", 10_000)
    assert len(rotating_batches(SMALL, "cuda:0")) == wanted


def test_phases_run_in_order_and_leave_gradients():
    layer, batch = Layer(TINY, "cpu"), Batch.random(TINY, "cpu")
    node, weight = layer.node(PERF), layer.experts[0].up_gate_proj.weight
    call, place = NodeCall(node, batch), weight.main_grad.data_ptr()
    (forward, backward, step) = call.phases
    assert (forward[0], backward[0], step[0]) == ("forward", "backward", "step")
    forward[1]()
    backward[1]()
    assert batch.x.grad is not None and batch.probs.grad is not None
    assert weight.main_grad.any()
    step[1]()
    assert weight.main_grad.any() and weight.main_grad.data_ptr() == place
    assert node.gradient_bytes == 0 and call.out is None


@pytest.mark.parametrize(("mode", "per_element"), [("perf", 1 + 4 / 128), ("off", 2)])
def test_saved_bytes_are_z_and_routing(mode, per_element):
    """z in 8 bits with a scale per 128 columns, or bf16; the routing tensors; nothing else."""
    shape = Shape(256, 128, 128, 2, 1)
    layer = Layer(shape, "cpu")
    call = NodeCall(layer.node(Variant(EngineName.REFERENCE, mode)), Batch.random(shape, "cpu"))
    saved = measure_memory(call, "cpu").saved * timing.MIB
    z = 2 * 128 * per_element
    least, most = shape.rows * z, (shape.rows + 2 * 127) * (z + 16) + shape.rows * 8 + 1024
    assert least < saved <= most


def test_results_of_two_variants_are_taken_in_turns(monkeypatch):
    order = []
    monkeypatch.setattr(runner, "HOST_ROUNDS", 2)
    timed = runner.time_steps
    monkeypatch.setattr(runner, "time_steps", lambda s, *_: order.append(s) or timed(s, *_))
    results = measure(TINY, [PERF, Variant.parse("reference:off")])
    first, second, *rest = order
    assert first is not second and rest == [second, first]
    for result in results:
        assert result.steady.count == 2 * runner.STEADY_STEPS and result.steady.median > 0
        assert result.mfu is None and result.tflops > 0 and result.busy == {}
        assert result.saved_mib > 0 and result.sustained is None


def test_table_and_json_hold_machine_and_figures(monkeypatch):
    monkeypatch.setattr(timing.sustain, "__defaults__", (0.0,))
    variants = ["--engine", "reference:off", "--engine", "hopper"]
    shown = run(*TINY_OPTIONS, "--T", "96", *variants)
    assert shown.exit_code == 0, shown.output
    assert "no GPU" in shown.output and "T=96 H=32 I=16 E=4 K=2" in shown.output
    assert "steady us" in shown.output and "busy us" not in shown.output, "nobody has it: no row"
    data = json.loads(run(*TINY_OPTIONS, *variants, "--sustained", "0.01", "--json").stdout)
    assert data["machine"]["gpu"] is False and data["machine"]["versions"]["torch"]
    ran, refused = data["results"]
    assert ran["shape"] == vars(TINY)
    assert ran["tflops"] == pytest.approx(ran["flop"] / ran["steady"]["median"] / 1e6)
    assert ran["sustained"]["us"]["count"] >= 2 and ran["sustained"]["unavailable"] == "no GPU"
    assert "hopper" in refused["refusal"] and refused["steady"] is None


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_seconds_are_a_finite_number(value, monkeypatch):
    """Steps for NaN seconds never ended, so here nothing is measured."""
    monkeypatch.setattr("sonicmoe.bench.runner.measure", None)
    refused = run(*TINY_OPTIONS, "--sustained", value)
    assert refused.exit_code == 2 and "--sustained" in refused.output


@pytest.mark.parametrize("option", ["--plot", "--sweep"])
def test_a_place_or_a_picture_that_cannot_be_is_refused_before_anything_is_measured(
    option, tmp_path, monkeypatch
):
    def measured(*_, **__):
        raise AssertionError("measured first")

    monkeypatch.setattr(sweep_module, "Layer", measured)
    refused = run("--plot", str(tmp_path / "plots"))
    assert refused.exit_code == 2 and "--plot draws a cost model" in refused.output
    places = {name: str(tmp_path / name.strip("-")) for name in ("--sweep", "--plot")}
    with monkeypatch.context() as absent:
        absent.setitem(sys.modules, "matplotlib", None)
        refused = run(*(word for pair in places.items() for word in pair))
    assert refused.exit_code == 2 and "matplotlib is not installed" in refused.output
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    places[option] = str(tmp_path / "file" / "inside")
    refused = run(*(word for pair in places.items() for word in pair))
    assert refused.exit_code == 1 and refused.output.startswith(f"Error: {tmp_path / 'file'}")


def test_refusals_and_list():
    assert run("--engine", "blackwell").exit_code == 2
    assert run("--T", "8", "--E", "1", "--K", "2").exit_code == 2
    nothing_ran = run("--engine", "hopper", *TINY_OPTIONS)
    assert nothing_ran.exit_code == 1
    assert "hopper:perf at T=48 H=32 I=16 E=4 K=2 did not run" in nothing_ran.output
    listed = run("--list").output
    assert all(f"{name} " in listed for name in SHAPES) and "T=8192 H=3072 I=1536" in listed
