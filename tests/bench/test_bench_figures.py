"""Shapes, floors, figures and the trace parser: the arithmetic behind every printed number."""

from __future__ import annotations

import pytest

from sonicmoe.bench.figures import Result, Spread
from sonicmoe.bench.floors import (
    BACKWARD_STAGES,
    FORWARD_STAGES,
    PEAK_TFLOPS,
    STEP_STAGES,
    floors,
    gemm_flop,
)
from sonicmoe.bench.plots import floor_bars
from sonicmoe.bench.shapes import REFERENCE, SHAPES, Shape
from sonicmoe.bench.steady import busy_per_step
from sonicmoe.bench.trace import Kernel, covered_us, gpu_spans, kernels_of, short_name, total_us
from sonicmoe.errors import ShapeError


def test_the_work_of_the_reference_shape():
    assert REFERENCE.rows == 65536
    assert REFERENCE.flop == pytest.approx(5.566e12, rel=1e-3)


@pytest.mark.parametrize("name", SHAPES)
def test_the_six_gemms_are_all_of_the_work(name):
    shape = SHAPES[name]
    assert sum(gemm_flop(shape).values()) == pytest.approx(shape.flop)


@pytest.mark.parametrize(
    ("changes", "message"), [({"tokens": 0}, "tokens is 0"), ({"topk": 9}, "topk is 9")]
)
def test_impossible_shapes_are_refused(changes, message):
    with pytest.raises(ShapeError, match=message):
        Shape(**{**vars(REFERENCE), **changes})


def test_floors_of_the_reference_shape_are_the_bare_gemms_and_the_copies():
    ideal = floors(REFERENCE, fp8=True, flush=True)
    bare = {"up": 860, "down": 461, "dgated": 431, "dx_gemm": 860, "dw2": 659, "dw1": 1262}
    for stage, us in bare.items():
        assert ideal[stage].us == pytest.approx(us, rel=0.01), stage
    assert ideal["aggregate_out"].us == pytest.approx(0.45e9 / 4.24e6, rel=0.02)
    assert set(ideal) == {*FORWARD_STAGES, *BACKWARD_STAGES, *STEP_STAGES}
    assert "quantize_x" not in floors(REFERENCE, fp8=False)
    straight = floors(REFERENCE, fp8=True)
    assert straight == {stage: floor for stage, floor in ideal.items() if stage != "flush"}


def test_a_tiny_problem_is_bound_by_the_weights_it_reads():
    tiny = Shape(1, 4096, 1024, 128, 1)
    floor = floors(tiny, fp8=True)["up"]
    assert floor.us == pytest.approx(floor.bytes / 4.24e6)
    assert floor.bytes > 2 * 128 * 4096 * 1024


def test_spread():
    spread = Spread.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert spread == Spread(median=3, low=2, high=4, least=1, most=5, count=5)
    assert spread.percent == pytest.approx(50 * 2 / 3)
    assert Spread.of([7.0]).percent == 0


def gpu_result(fp8=True, **changes):
    fields = {
        "busy": {"forward": 2000.0, "backward": 3566.0, "step": 500.0},
        "wall": {"pair": Spread.of([6000.0]), "forward": Spread.of([2100.0]), "backward": Spread.of([3900.0]), "step": Spread.of([1.0])},
    }  # fmt: skip
    return Result(REFERENCE, "hopper:perf", fp8, True, **{**fields, **changes})


def test_rates_come_from_busy_time_and_name_their_peak():
    result = gpu_result()
    assert result.tflops == pytest.approx(1000, rel=1e-3)
    assert result.mfu == pytest.approx(1000 / PEAK_TFLOPS["fp8"], rel=1e-3)
    assert gpu_result(fp8=False).mfu == pytest.approx(1000 / 989, rel=1e-3)
    assert gpu_result(fp8=False).to_json()["peak_tflops"] == 989
    data = result.to_json()
    assert data["peak_tflops"] == 1979
    assert data["floors_us"]["up"] == pytest.approx(860, rel=0.01)


def test_a_flush_is_expected_only_where_gradients_wait_in_the_node():
    direct, step = gpu_result(gradient_mib=0.0), gpu_result(gradient_mib=432.0)
    assert "flush" not in direct.to_json()["floors_us"] and "flush" in step.to_json()["floors_us"]
    assert direct.gbytes_per_s == step.gbytes_per_s  # of forward and backward alone
    names = ["flush", "prepare_weights", "step"]
    alone, both = floor_bars([direct], names), floor_bars([direct, step], names)
    assert alone["flush"] == 0 < both["flush"]
    assert both["step"] == pytest.approx(both["flush"] + both["prepare_weights"])
    assert alone["step"] == alone["prepare_weights"]


def test_without_a_profile_rates_come_from_wall_time():
    assert gpu_result(busy={}).tflops == pytest.approx(REFERENCE.flop / 6000 / 1e6)
    assert Result(REFERENCE, "reference:perf", True, False, wall=gpu_result().wall).mfu is None


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
        event("cuda_driver", "cuLaunchKernelEx", 215, 2, 2, tid=2),
        event("cuda_runtime", "cudaLaunchKernel", 240, 2, 3, tid=2),
        event("cuda_runtime", "cudaMemcpyAsync", 150, 2, 4),
        event("kernel", "void gemm<float, 3>(int)", 45, 25, 1, tid=7),
        event("kernel", "wgrad", 280, 10, 2, tid=7),  # runs late: the launch decides
        event("kernel", "wgrad", 291, 5, 3, tid=7),
        event("gpu_memcpy", "Memcpy DtoD", 160, 3, 4, tid=7),
        event("cpu_op", "aten::mm", 12, 50),
        {"ph": "M", "name": "process_name"},
    ]
}


def test_kernels_are_found_with_the_stage_and_phase_that_launched_them():
    assert kernels_of(TRACE) == [
        Kernel("void gemm<float, 3>(int)", 25, "up", "forward"),
        Kernel("Memcpy DtoD", 3, "", ""),
        Kernel("wgrad", 10, "dw1", "backward"),
        Kernel("wgrad", 5, "", "backward"),
    ]
    assert kernels_of({}) == []


def test_totals_are_per_call_and_sorted():
    kernels = kernels_of(TRACE)
    assert total_us(kernels, "phase", 1) == {"forward": 25, "backward": 15, "": 3}
    assert list(total_us(kernels, "name", 5).items())[:2] == [
        ("void gemm<float, 3>(int)", 5),
        ("wgrad", 3),
    ]


def test_time_covered_counts_overlap_once_and_gaps_not_at_all():
    spans = gpu_spans(TRACE)
    assert spans == [(45, 70), (160, 163), (280, 290), (291, 296)]
    assert covered_us(spans) == 25 + 3 + 10 + 5
    assert covered_us([(0, 10), (5, 8), (9, 12), (20, 21)]) == 13
    assert covered_us([]) == 0 and gpu_spans({}) == []


def test_busy_steps_are_cut_by_their_number_of_launches():
    one = [(0.0, 4.0), (4.0, 6.0)]
    spans = [
        (start + shift, end + shift + shift / 100) for shift in (0, 100, 200) for start, end in one
    ]
    assert busy_per_step(spans, 2, 2) == [
        (6 + 1) / 2,
        (6 + 2) / 2,
    ]  # each step's second kernel begins inside its first
    assert busy_per_step(spans[:-1], 2, 1) == [pytest.approx(covered_us(spans[:-1]) / 3)]
    assert busy_per_step([], 2, 1) == []


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void ns::gemm<float, 3>(int)", "ns::gemm"),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD "),
        ("x" * 70, "x" * 59 + "…"),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short
