"""The GPU half of the clocks with the CUDA calls replaced: what is measured between what, and what becomes of a trace."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from framework import torch

from sonicmoe.bench import runner
from sonicmoe.bench.figures import Result
from sonicmoe.bench.report import kernel_table, notes, result_table, stage_table
from sonicmoe.bench.runner import measure
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.timing import measure_memory, profile_phases, time_phases
from sonicmoe.bench.workload import Variant
from sonicmoe.diagnostics.stages import stage
from sonicmoe.enums import EngineName

TINY = Shape(48, 32, 16, 4, 2)
VARIANTS = [Variant(EngineName.REFERENCE, "off"), Variant(EngineName.REFERENCE, "perf")]


class FakeCuda:
    """A GPU whose clock is a counter of the calls made: every event, synchronisation and phase takes one millisecond."""

    def __init__(self, monkeypatch):
        self.log, self.allocated, self.peak = [], 0, 0
        cuda = torch.cuda
        monkeypatch.setattr(cuda, "synchronize", lambda *_: self.log.append("sync"))
        monkeypatch.setattr(cuda, "Event", lambda enable_timing: FakeEvent(self))
        monkeypatch.setattr(cuda, "reset_peak_memory_stats", lambda: setattr(self, "peak", self.allocated))
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
    phases = [(name, lambda name=name: gpu.log.append(name)) for name in ("forward", "backward", "step")]
    times = time_phases(phases, "cuda:0")
    assert gpu.log == ["sync", "event", "forward", "event", "backward", "event", "step", "event", "sync"]
    assert [times[name].wall for name, _ in phases] == [2000.0, 2000.0, 2000.0]
    assert all(0 <= times[name].host < 1e5 for name, _ in phases)


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
    """Exports two kernels per phase range it has seen, launched inside the stage ranges that were open."""

    def __init__(self, activities):
        self.ranges = []

    def __enter__(self):
        FakeProfiler.running = self
        return self

    def __exit__(self, *_):
        FakeProfiler.running = None

    def export_chrome_trace(self, path):
        events = []
        for number, (name, start, end) in enumerate(self.ranges):
            span = {"ph": "X", "tid": 1, "args": {"correlation": number + 1}}
            events.append({**span, "cat": "user_annotation", "name": name, "ts": start, "dur": end - start})
            if not name.startswith("sonicmoe.phase."):
                events.append({**span, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": start, "dur": 0.1})
                events.append({**span, "cat": "kernel", "name": f"{name}_kernel", "ts": start, "dur": 7.0, "tid": 9})
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

    kernels = profile_phases([[("forward", forward)], [("forward", forward)]], nvtx=False)
    assert [(kernel.name, kernel.us, kernel.stage, kernel.phase) for kernel in kernels] == 2 * [
        ("sonicmoe.up_kernel", 7.0, "up", "forward")
    ]
    forward()
    assert FakeProfiler.running is None
    assert gpu.log == ["sync", "up", "sync", "up", "sync", "up"]


def test_a_whole_measurement_with_tables(profiler, gpu, monkeypatch):
    """The reference engine on the host, its kernels faked: busy, stages, floors and rates reach the tables."""
    monkeypatch.setattr(runner, "find_device", lambda: "cpu")
    names = {"forward": "up", "backward": "dw1", "step": "flush"}

    def spied(calls, nvtx):
        def run(name, phase):
            with stage(names[name]):
                phase()

        return profile_phases([[(n, lambda n=n, p=p: run(n, p)) for n, p in phases] for phases in calls], nvtx)

    monkeypatch.setattr(runner, "profile_phases", spied)
    original = runner._examine
    monkeypatch.setattr(
        runner, "_examine", lambda node, result, batches, device, nvtx: original(node, result, batches, "cuda:0", nvtx)
    )
    results = measure(TINY, VARIANTS, rounds=2, warmup=1)
    for result in results:
        result.gpu = True
        assert result.busy == {"forward": 7.0, "backward": 7.0, "step": 7.0}
        assert result.stages == {"up": 7.0, "dw1": 7.0, "flush": 7.0}
        assert result.tflops == pytest.approx(TINY.flop / 14 / 1e6)
        assert result.mfu == pytest.approx(result.tflops / (1979 if result.fp8 else 989))
    assert [str(cell) for cell in result_table(results).columns[5].cells] == ["14", "14"]
    assert list(stage_table(results[1]).columns[0].cells) == ["up", "dw1", "flush"]
    assert list(kernel_table(results[0], 1).columns[2].cells) == ["sonicmoe.up_kernel", "2 others"]
    assert "profiler" in notes(results)[0]


def test_a_driver_that_forbids_profiling_leaves_wall_times(gpu, monkeypatch):
    monkeypatch.setattr(runner, "find_device", lambda: "cpu")
    monkeypatch.setattr(runner, "profile_phases", lambda calls, nvtx: [])
    original = runner._examine
    monkeypatch.setattr(
        runner, "_examine", lambda node, result, batches, device, nvtx: original(node, result, batches, "cuda:0", nvtx)
    )
    (result,) = measure(TINY, VARIANTS[:1], rounds=2, warmup=1)
    result.gpu = True
    assert result.busy == {} and result.pair_us == result.wall["pair"].median
    assert "the profiler saw no kernel" in notes([result])[0]
    assert isinstance(result, Result)
