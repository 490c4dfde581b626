"""The benchmark on a GPU: kernel time from the profiler, phases and stages attributed, figures that
agree with each other.
"""

from __future__ import annotations

import pytest
import torch
from worlds import ROOT

from sonicmoe.bench.points import read_points
from sonicmoe.bench.runner import find_device, measure
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.sweep import sweep
from sonicmoe.bench.workload import available_variants

pytestmark = pytest.mark.gpu

PRODUCTS = {"up", "down", "dgated", "dx_gemm", "dw2", "dw1"}
SHAPE = Shape(1024, 512, 256, 8, 4)


def test_every_engine_of_this_machine_is_measured():
    variants = available_variants(find_device())
    results = measure(SHAPE, variants)
    for result in results:
        assert result.refusal is None
        assert set(result.busy) == {"forward", "backward", "step"} and min(result.busy.values()) > 0
        assert sum(result.stages.values()) == pytest.approx(sum(result.kernels.values()))
        assert sum(result.kernels.values()) >= 0.99 * sum(result.busy.values())
        assert 0 < result.mfu < 1
        assert result.saved_mib > 0 and result.peak_mib >= result.saved_mib
        assert result.steady_ratio > 0.9  # clocks of two runs; work that overlaps counts once
        assert 0.5 < result.steady_busy / result.pair_busy < 1.5
        assert {*PRODUCTS, "aggregate_out", "aggregate_dx"} <= set(result.stages)


def test_a_sweep_measures_busy_time_of_every_engine(tmp_path):
    """Busy time of a swept point is that of the benchmark, it repeats, and more tokens cost more."""
    for variant in available_variants(find_device()):
        path = tmp_path / f"{variant.engine.value}.jsonl"
        shapes = [Shape(tokens, 512, 256, 8, 4) for tokens in (1024, 8192)]
        assert sweep(path, shapes, variant) == 2 and sweep(path, shapes, variant) == 0
        small, large = read_points(path)
        assert 0 < small.us < large.us < 8.8 * small.us
        (result,) = measure(shapes[1], [variant])
        assert large.us == pytest.approx(result.steady_busy, rel=0.1)


def test_a_sustained_row_has_the_clock_power_and_energy_of_this_gpu():
    pytest.importorskip("pynvml")
    shape = Shape(4096, 2048, 1024, 8, 4)
    (result,) = measure(shape, available_variants(find_device())[-1:], sustained_s=1.0)
    row = result.sustained
    assert row.unavailable is None
    seconds = 1e-6 * shape.stack_layers * row.us.count * row.us.median
    assert 0.9 < seconds < 2 and row.us.median > 0.8 * result.steady_busy
    assert 300 < row.power.sm_mhz < 2100
    # The counter and the limit belong to one board: a driver regulates to a few percent.
    assert 100 < row.power.watts < 1.05 * row.power.limit_watts
    assert row.joules == pytest.approx(row.power.watts * row.us.median * 1e-6, rel=0.2)


@pytest.mark.parametrize("engine", ["hopper", "bf16"])
def test_a_layer_is_timed_beside_a_copy(engine, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import shared_gpu_bench as bench

    monkeypatch.setattr(bench, "COPY_BYTES", 16 << 20)
    beside = bench.Beside(bench.Shape(512, 256, 128, 4, 2), bench.EngineName(engine), rounds=2)
    row = beside.row(100)
    assert min(row.layer, row.copy, row.layer_beside, row.copy_beside) > 0
    assert torch.equal(beside._source, beside._target)
