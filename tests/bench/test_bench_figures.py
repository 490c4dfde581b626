"""Shapes, floors, figures and the trace parser: the arithmetic behind every printed number."""

from __future__ import annotations

import pytest

from sonicmoe.bench.figures import Result, Spread
from sonicmoe.bench.floors import OTHER_STAGES, PEAK_TFLOPS, floors, gemm_flop, stage_bytes
from sonicmoe.bench.shapes import REFERENCE, SHAPES, Shape
from sonicmoe.bench.tables import NONE, result_table
from sonicmoe.bench.trace import Kernel, covered_us, kernels_of, total_us


def test_the_work_of_the_reference_shape():
    assert REFERENCE.rows == 65536
    assert REFERENCE.flop == pytest.approx(5.566e12, rel=1e-3)
    layers = [Shape(t, 64, 64, 8, 8).stack_layers for t in (256, 8192, 16384, 131072)]
    assert layers == [8, 8, 4, 2]


def test_the_six_gemms_are_all_of_the_work():
    for shape in SHAPES.values():
        assert sum(gemm_flop(shape).values()) == pytest.approx(shape.flop)


def test_floors_of_the_reference_shape_are_the_bare_gemms_and_the_copies():
    ideal = floors(REFERENCE, fp8=True)
    bare = {"up": 860, "down": 461, "dgated": 431, "dx_gemm": 860, "dw2": 659, "dw1": 1262}
    for stage, us in bare.items():
        assert ideal[stage] == pytest.approx(us, rel=0.01), stage
    assert ideal["aggregate_out"] == pytest.approx(0.45e9 / 4.24e6, rel=0.02)
    assert {*bare, *OTHER_STAGES} < set(ideal)
    assert "quantize_x" not in floors(REFERENCE, fp8=False)


def test_a_tiny_problem_is_bound_by_the_weights_it_reads():
    tiny = Shape(1, 4096, 1024, 128, 1)
    read = stage_bytes(tiny, fp8=True)["up"]
    assert floors(tiny, fp8=True)["up"] == pytest.approx(read / 4.24e6)
    assert read > 2 * 128 * 4096 * 1024


def gpu_result(fp8=True, **changes):
    fields = {
        "busy": {"forward": 2000.0, "backward": 3566.0, "step": 500.0},
        "stages": {"up": 1000.0, "": 4.0},
        "kernels": {"void gemm<3>(int)": 900.0, **{f"k{n}": 1.0 for n in range(13)}},
        "steady": Spread.of([6000.0]),
    }
    return Result(
        REFERENCE, "hopper:perf" if fp8 else "bf16:off", fp8, True, **{**fields, **changes}
    )


def test_rates_come_from_busy_time_and_name_their_peak():
    result = gpu_result()
    assert result.tflops == pytest.approx(1000, rel=1e-3)
    assert result.mfu == pytest.approx(1000 / PEAK_TFLOPS["fp8"], rel=1e-3)
    assert gpu_result(fp8=False).mfu == pytest.approx(1000 / 989, rel=1e-3)
    data = result.to_json()
    assert data["pair_busy"] == 5566 and data["steady"]["median"] == 6000
    assert data["floors_us"] == {"up": pytest.approx(860, rel=0.01)}


def cells(table):
    """Rows by their first cell."""
    columns = [list(column.cells) for column in table.columns]
    return {first: rest for first, *rest in zip(*columns, strict=True)}


def test_a_table_has_a_column_for_each_engine():
    base = gpu_result(fp8=False, steady=Spread.of([9000.0, 9090.0, 9180.0]), steady_busy=9000.0)
    rows = cells(result_table([base, gpu_result()]))
    assert rows["busy us"] == ["5,566 (1.00x)", "5,566 (1.00x)"]
    assert rows["steady us"] == ["9,090 ±0.5 % (1.00x)", "6,000 ±0.0 % (1.51x)"]
    assert rows["steady busy us"] == ["9,000", NONE] and rows["steady/busy"] == ["1.010", NONE]
    assert rows["step us"] == ["500", "500"] and rows["MFU"][0] == "101.1%"
    assert "sustained us" not in rows, "nobody has it: no row"


def event(cat, name, ts, dur, correlation=None, tid=1):
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


TRACE = {
    "traceEvents": [
        event("user_annotation", "sonicmoe.phase.forward", 0, 100),
        event("user_annotation", "sonicmoe.phase.backward", 200, 100),
        event("user_annotation", "sonicmoe.up", 10, 20),
        event("user_annotation", "sonicmoe.dw1", 210, 20, tid=2),
        event("user_annotation", "somebody.else", 0, 400),
        event("gpu_user_annotation", "sonicmoe.up", 40, 30, tid=7),
        event("cuda_runtime", "cudaLaunchKernel", 15, 2, 1),
        event("cuda_runtime", "cudaDeviceSynchronize", 16, 2),
        event("cuda_driver", "cuLaunchKernelEx", 215, 2, 2, tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 240, 2, 3, tid=2),
        event("kernel", "void gemm<float, 3>(int)", 45, 25, 1, tid=7),
        event("kernel", "wgrad", 280, 10, 2, tid=7),  # runs late: the launch decides
        event("kernel", "wgrad", 291, 5, 3, tid=7),
        event("gpu_memcpy", "Memcpy DtoD", 160, 3, 4, tid=7),
        event("gpu_memset", "Memset", 170, 1, tid=7),
        event("cpu_op", "aten::mm", 12, 50),
        {"ph": "M", "name": "process_name"},
    ]
}


def test_kernels_are_found_with_the_stage_and_phase_that_launched_them():
    assert kernels_of(TRACE) == [
        Kernel("void gemm<float, 3>(int)", 45, 25, "up", "forward"),
        Kernel("Memcpy DtoD", 160, 3, "", ""),
        Kernel("Memset", 170, 1, "", ""),
        Kernel("wgrad", 280, 10, "dw1", "backward"),
        Kernel("wgrad", 291, 5, "", "backward"),
    ]
    assert kernels_of({}) == []
    totals = list(total_us(kernels_of(TRACE), "phase", 5).items())
    assert totals == [("forward", 5), ("backward", 3), ("", 0.8)], "per call, the largest first"


def test_time_covered_counts_overlap_once_and_gaps_not_at_all():
    def covered(*spans):
        return covered_us(Kernel("k", start, end - start, "", "") for start, end in spans)

    assert covered_us(kernels_of(TRACE)) == 25 + 3 + 1 + 10 + 5
    assert covered((0, 10), (5, 8), (9, 12), (20, 21)) == 13 and covered() == 0
