"""The GPU half of the clocks with the CUDA calls replaced: what is measured between what, and what
becomes of a trace.
"""

from __future__ import annotations

import dataclasses
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from framework import torch

from sonicmoe.bench import runner
from sonicmoe.bench.figures import Result
from sonicmoe.bench.floors import PEAKS_OF
from sonicmoe.bench.runner import Effort, measure
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.steady import Stack, profile_steps, time_steps
from sonicmoe.bench.sweep import sweep
from sonicmoe.bench.tables import NONE, kernel_table, notes, rate_table, stage_table, time_table
from sonicmoe.bench.timing import measure_memory, profile_phases, time_phases
from sonicmoe.bench.workload import Batch, Call, Layer, Variant
from sonicmoe.enums import EngineName
from sonicmoe.observe import stage

TINY = Shape(48, 32, 16, 4, 2)
VARIANTS = [Variant(EngineName.REFERENCE, "off"), Variant(EngineName.REFERENCE, "perf")]


class FakeCuda:
    """A GPU whose clock is a counter of the calls made: every event, synchronisation and phase
    takes one millisecond.
    """

    def __init__(self, monkeypatch):
        self.log, self.allocated, self.peak = [], 0, 0
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "synchronize", lambda *_: self.log.append("sync"))
        monkeypatch.setattr(cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(
            cuda, "reset_peak_memory_stats", lambda: setattr(self, "peak", self.allocated)
        )
        monkeypatch.setattr(cuda, "memory_allocated", lambda: self.allocated)
        monkeypatch.setattr(cuda, "max_memory_allocated", lambda: self.peak)

    def allocate(self, size):
        self.allocated += size
        self.peak = max(self.peak, self.allocated)


class FakeEvent:
    def __init__(self, gpu):
        self._gpu, self.at = gpu, None

    def record(self):
        self._gpu.log.append("event")
        self.at = len(self._gpu.log)

    def elapsed_time(self, later):
        return float(later.at - self.at)


@pytest.fixture
def gpu(monkeypatch):
    return FakeCuda(monkeypatch)


def test_a_phase_is_timed_between_its_events_and_nothing_waits_inside(gpu):
    phases = [
        (name, lambda name=name: gpu.log.append(name)) for name in ("forward", "backward", "step")
    ]
    times = time_phases(phases, "cuda:0")
    wanted = "sync event forward event backward event step event sync"
    assert " ".join(gpu.log) == wanted
    assert [times[name].wall for name, _ in phases] == [2000.0, 2000.0, 2000.0]
    assert all(0 <= times[name].host < 1e5 for name, _ in phases)


class FakeStack:
    """Two layers; a step is one entry in the log and launches three kernels that overlap: 10, 12
    and 14 us long, 5 us apart.
    """

    layers = 2

    def __init__(self, gpu):
        self._gpu = gpu

    def run(self):
        self._gpu.log.append("step")
        if FakeProfiler.running is not None:
            began = 100.0 * sum(entry == "step" for entry in self._gpu.log)
            FakeProfiler.running.kernels += [(began + 5 * n, 10.0 + 2 * n) for n in range(3)]


def test_steady_steps_follow_each_other_and_nothing_waits_between(gpu):
    # Two clock ticks a step of two layers.
    assert time_steps(FakeStack(gpu), 2, "cuda:0") == [1000.0, 1000.0]
    assert " ".join(gpu.log) == "step event step event step event sync"


def test_steady_busy_time_counts_overlap_once_and_leaves_out_the_first_step(profiler, gpu):
    assert profile_steps(FakeStack(gpu), 3) == 3 * [12.0]  # from 0 to 24 us, over two layers
    assert gpu.log == ["sync", "step", "step", "step", "step", "sync"]


def first_row(table):
    return {column.header: next(iter(column.cells)) for column in table.columns}


def test_steady_figures_reach_the_table(profiler, gpu):
    results = [Result(TINY, str(variant), variant.fp8, True) for variant in VARIANTS]
    runner._time_steady(dict.fromkeys(range(2), FakeStack(gpu)), results, 2, "cuda:0")
    for result in results:
        assert (result.steady.count, result.steady.median) == (4, 1000)
        assert result.steady_busy.median == 12
        assert result.to_json()["steady_ratio"] == result.steady_ratio == pytest.approx(1000 / 12)
        result.wall = result.host = {
            name: result.steady for name in ("forward", "backward", "pair", "step")
        }
    shown = first_row(time_table(results))
    assert (shown["steady us"], shown["steady busy us"]) == ("1,000 ±0.0 %", "12 ±0.0 %")
    assert shown["steady/busy"] == "83.333"
    results[0].steady = dataclasses.replace(results[0].steady, median=1500.0)
    rates = rate_table(results).columns
    assert rates[0].header == "engine" and list(rates[-1].cells) == ["1.00", "1.50"]


@pytest.mark.parametrize(("capability", "known"), [((9, 0), True), ((10, 0), False)])
def test_peaks_and_floors_of_hopper_are_not_held_against_another_gpu(capability, known):
    """TFLOPS and GB/s need neither."""
    result = Result(TINY, "bf16:off", False, True, capability == PEAKS_OF.capability)
    result.busy, result.stages = {"forward": 5.0, "backward": 10.0}, {"up": 4.0}
    assert result.tflops > 0 and result.gbytes_per_s > 0
    data = result.to_json()
    if known:
        assert 0 < result.mfu < 1 and data["peak_tflops"] == 989.0 and data["floors_us"]["up"] > 0
    else:
        assert result.mfu is data["peak_tflops"] is None and data["floors_us"] == {}
    assert any("MFU, floors: not known" in line for line in notes([result])) == (not known)
    assert first_row(stage_table(result))["us"] == "4"
    assert (first_row(stage_table(result))["floor us"] == NONE) == (not known)


def test_layers_that_do_not_fit_leave_no_steady_figure_and_a_line(gpu):
    class Full(FakeStack):
        def run(self):
            raise torch.OutOfMemoryError

    result = Result(TINY, "hopper:perf", True, True)
    runner._time_steady({0: Full(gpu)}, [result], 2, "cuda:0")
    assert result.steady is None and result.steady_ratio is None
    result.wall = {"pair": None}
    assert any("do not fit at once" in line for line in notes([result]))


def test_a_stack_computes_what_its_calls_compute():
    """All weight gradients arrive, and the gradients of a batch that layers share stay out of the
    batch.
    """
    torch.manual_seed(5)
    batches = [Batch.random(TINY, "cpu") for _ in range(2)]
    stacked, single = Layer(TINY, "cpu"), Layer(TINY, "cpu")
    node = stacked.node(VARIANTS[1])
    Stack(node, batches, 3).run()
    node.step()
    other = single.node(VARIANTS[1])
    for batch in (batches[0], batches[1], batches[0]):
        call = Call(other, batch)
        call.forward()
        call.backward()
        call.clear()
    other.step()
    for a, b in zip(stacked.experts, single.experts, strict=True):
        torch.testing.assert_close(a.down_proj.weight.main_grad, b.down_proj.weight.main_grad)
        assert a.down_proj.weight.main_grad.abs().sum() > 0
    assert all(batch.x.grad is None and batch.probs.grad is None for batch in batches)


def test_a_swept_point_is_busy_time_of_enough_steps(profiler, gpu, monkeypatch, tmp_path):
    monkeypatch.setattr("sonicmoe.bench.sweep.find_device", lambda: "cuda:0")
    monkeypatch.setattr("sonicmoe.bench.runner.arch_of", lambda device: "sm_100a")
    monkeypatch.setattr("sonicmoe.bench.sweep.rotating_batches", lambda *_: [])
    monkeypatch.setattr("sonicmoe.bench.sweep.PointBench._node_for", lambda self, shape: None)
    monkeypatch.setattr("sonicmoe.bench.sweep.Stack", lambda node, batches, layers: FakeStack(gpu))
    path = tmp_path / "sweep.jsonl"
    assert sweep(path, [TINY], VARIANTS[1]) == (1, 0)
    point = json.loads(path.read_text())
    assert (point["us"], point["percent"], point["wall_us"]) == (12.0, 0.0, 1000.0)
    profiled = gpu.log[gpu.log.index("sync") + 2 :]
    assert profiled.count("step") == 1 + 40  # 150 ms would be 75


class FakeCall:
    """Saves 3 MiB, returns 1 MiB, needs 6 more for a moment in backward, leaves 2 of gradients."""

    def __init__(self, gpu):
        self.gpu, self.out = gpu, None
        gpu.allocate(2 << 20)  # gradients of an earlier call

    def clear(self):
        self.gpu.allocate(-2 << 20)

    def forward(self):
        self.gpu.allocate(4 << 20)
        self.out = SimpleNamespace(numel=lambda: 1 << 19, element_size=lambda: 2)

    def backward(self):
        self.gpu.allocate(6 << 20)
        self.gpu.allocate(-8 << 20)


def test_memory_leaves_out_the_output_and_what_was_there(gpu):
    gpu.allocate(100 << 20)
    memory = measure_memory(FakeCall(gpu), "cuda:0")
    assert (memory.saved, memory.peak, memory.total_peak) == (3.0, 10.0, 110.0)


class FakeProfiler:
    """Exports the kernels it was given, and two per phase range it has seen, launched inside the
    stage ranges that were open.
    """

    running = None

    def __init__(self, activities):
        self.ranges, self.kernels = [], []

    def __enter__(self):
        FakeProfiler.running = self
        return self

    def __exit__(self, *_):
        FakeProfiler.running = None

    def export_chrome_trace(self, path):
        events = []

        def add(category, name, start, duration, thread=9, **arguments):
            events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration,
                           "tid": thread, "args": arguments})  # fmt: skip

        for number, (name, start, end) in enumerate(self.ranges, start=1):
            add("user_annotation", name, start, end - start, 1)
            if not name.startswith("sonicmoe.phase."):
                add("cuda_runtime", "cudaLaunchKernel", start, 0.1, 1, correlation=number)
                add("kernel", f"{name}_kernel", start, 7.0, correlation=number)
        for start, duration in self.kernels:
            add("kernel", "k", start, duration)
        with open(path, "w") as file:
            json.dump({"traceEvents": events}, file)


class FakeRange:
    """torch.profiler.record_function on a clock of its own."""

    clock = 0.0

    def __init__(self, name):
        self._name = name

    def __enter__(self):
        FakeRange.clock += 10
        self._start = FakeRange.clock

    def __exit__(self, *_):
        FakeRange.clock += 10
        FakeProfiler.running.ranges.append((self._name, self._start, FakeRange.clock))


@pytest.fixture
def profiler(gpu, monkeypatch):
    monkeypatch.setattr(torch.profiler, "profile", FakeProfiler)
    monkeypatch.setattr(torch.profiler, "record_function", FakeRange)


def test_stages_open_ranges_only_while_profiling(profiler, gpu):
    def forward():
        with stage("up"):
            gpu.log.append("up")

    kernels = profile_phases([[("forward", forward)], [("forward", forward)]])
    assert [(kernel.name, kernel.us, kernel.stage, kernel.phase) for kernel in kernels] == 2 * [
        ("sonicmoe.up_kernel", 7.0, "up", "forward")
    ]
    forward()
    assert FakeProfiler.running is None
    assert gpu.log == ["sync", "up", "sync", "up", "sync", "up"]


@pytest.fixture
def profiled(monkeypatch):
    """The reference engine on the host, profiled as on a GPU."""
    original = runner._profile
    monkeypatch.setattr(runner, "find_device", lambda: "cpu")
    monkeypatch.setattr(
        runner, "_profile", lambda run, result, _, nvtx: original(run, result, "cuda:0", nvtx)
    )


def test_a_whole_measurement_with_tables(profiler, profiled, gpu, monkeypatch):
    """Its kernels faked: busy, stages, floors and rates reach the tables."""

    def spied(calls, nvtx):
        def run(name, phase):  # the node names routing and flush; this engine names nothing
            with stage("dw1") if name == "backward" else nullcontext():
                phase()

        return profile_phases(
            [[(n, lambda n=n, p=p: run(n, p)) for n, p in phases] for phases in calls]
        )

    monkeypatch.setattr(runner, "profile_phases", spied)
    results = measure(TINY, VARIANTS, Effort(rounds=2, warmup=1))
    for result in results:
        result.gpu = True
        # Nothing waits for the step: gradients go straight into main_grad.
        assert result.busy == {"forward": 7.0, "backward": 7.0, "step": 0.0}
        assert result.stages == {"routing": 7.0, "dw1": 7.0}
        assert result.tflops == pytest.approx(TINY.flop / 14 / 1e6)
        assert result.mfu == pytest.approx(result.tflops / (1979 if result.fp8 else 989))
    assert first_row(time_table(results))["busy us"] == "14"
    assert "steady us" not in first_row(time_table(results)), "nobody has it: no column"
    assert list(stage_table(results[1]).columns[0].cells) == ["routing", "dw1"]
    kernels = list(kernel_table(results[0], 1).columns[2].cells)
    assert kernels == ["sonicmoe.routing_kernel", "1 others"]
    assert "docs/performance.md" in notes(results)[-1], "what the columns mean"


def test_a_driver_that_forbids_profiling_leaves_wall_times(profiled, gpu, monkeypatch):
    monkeypatch.setattr(runner, "profile_phases", lambda calls, nvtx: [])
    (result,) = measure(TINY, VARIANTS[:1], Effort(rounds=2, warmup=1))
    result.gpu = True
    assert result.busy == {} and result.pair_us == result.wall["pair"].median
    assert "the profiler saw no kernel" in notes([result])[0]
    assert isinstance(result, Result)
