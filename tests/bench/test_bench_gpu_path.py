"""The GPU half of the clocks with the CUDA calls replaced: what is measured between what, and what
becomes of a trace.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from framework import torch

from sonicmoe.bench import runner
from sonicmoe.bench import sweep as sweep_module
from sonicmoe.bench.figures import Result
from sonicmoe.bench.runner import NodeRun
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.steady import AHEAD, Stack, profile_steps, time_steps
from sonicmoe.bench.timing import measure_memory, profile_phases
from sonicmoe.bench.workload import Batch, Call, Layer, Variant
from sonicmoe.enums import EngineName
from sonicmoe.observe import stage

TINY = Shape(48, 32, 16, 4, 2)
VARIANTS = [Variant(EngineName.REFERENCE, "off"), Variant(EngineName.REFERENCE, "perf")]


class FakeCuda:
    """A GPU whose clock is a counter of the calls made: every event, synchronisation and step takes
    one millisecond.
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
    """Its time is the length of the log when it was recorded; knows how many were recorded since
    when somebody waits for it.
    """

    def __init__(self, gpu):
        self._gpu, self.at = gpu, None

    def record(self):
        self._gpu.log.append("event")
        self.at = len(self._gpu.log)

    def synchronize(self):
        assert self._gpu.log[self.at :].count("event") == AHEAD

    def elapsed_time(self, later):
        return float(later.at - self.at)


@pytest.fixture
def gpu(monkeypatch):
    return FakeCuda(monkeypatch)


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


def test_steady_steps_follow_each_other_and_the_gpu_never_waits_for_the_host(gpu):
    # Two clock ticks a step of two layers.
    assert time_steps(FakeStack(gpu), 4, "cuda:0") == 4 * [1000.0]
    assert gpu.log == [*5 * ["step", "event"], "sync"]


def test_steady_busy_time_counts_overlap_once_and_leaves_out_the_first_step(profiler, gpu):
    assert profile_steps(FakeStack(gpu), 3) == 12.0  # from 0 to 24 us, over two layers
    assert gpu.log == ["step", "sync", "step", "step", "step", "sync"]
    idle = SimpleNamespace(layers=2, run=lambda: None)
    assert profile_steps(idle, 3) is None, "the driver lets nobody profile"


def test_steady_figures_reach_the_result(profiler, gpu):
    results = [Result(TINY, str(variant), variant.fp8, True) for variant in VARIANTS]
    runner._time_steady(dict.fromkeys(range(2), FakeStack(gpu)), results, "cuda:0")
    for result in results:
        assert (result.steady.count, result.steady.median) == (10, 1000)
        assert result.steady_busy == 12
        assert result.to_json()["steady_ratio"] == pytest.approx(1000 / 12)


def test_layers_that_do_not_fit_leave_no_steady_figure(gpu):
    def run():
        raise torch.OutOfMemoryError

    result = Result(TINY, "hopper:perf", True, True)
    full = SimpleNamespace(layers=2, run=run)
    runner._time_steady({0: full}, [result], "cuda:0")
    runner._time_sustained({0: full}, [result], 0.1, "cuda:0")
    assert result.steady is result.steady_ratio is result.sustained is None


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


def test_a_swept_point_is_busy_time_of_enough_steps(profiler, gpu, monkeypatch):
    monkeypatch.setattr(sweep_module, "rotating_batches", lambda *_: [])
    monkeypatch.setattr(sweep_module, "Stack", lambda node, batches, layers: FakeStack(gpu))
    assert sweep_module._timed(None, TINY, "cuda:0") == 12.0
    profiled = gpu.log[gpu.log.index("sync") + 1 :]
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
    """Exports the kernels it was given, and one per stage range it has seen, launched inside the
    range.
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


class StagedRun(NodeRun):
    """The node names routing and flush, and this engine names nothing; so backward has a stage."""

    def phases(self, number):
        return [
            (name, lambda name=name, run=run: self.staged(name, run))
            for name, run in super().phases(number)
        ]

    def staged(self, name, run):
        with stage("dw1") if name == "backward" else nullcontext():
            run()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_whole_profile_reaches_its_result(variant, profiler, gpu):
    """Its kernels faked: busy, stages and rates are of one call."""
    run = StagedRun(Layer(TINY, "cpu").node(variant), [Batch.random(TINY, "cpu")])
    result = Result(TINY, str(variant), variant.fp8, True)
    runner._profile(run, result)
    # Nothing waits for the step: gradients go straight into main_grad.
    assert result.busy == {"forward": 7.0, "backward": 7.0, "step": 0.0}
    assert result.stages == {"routing": 7.0, "dw1": 7.0}
    assert result.kernels == {"sonicmoe.routing_kernel": 7.0, "sonicmoe.dw1_kernel": 7.0}
    assert result.tflops == pytest.approx(TINY.flop / 14 / 1e6)
    assert result.mfu == pytest.approx(result.tflops / (1979 if result.fp8 else 989))


def test_a_driver_that_forbids_profiling_leaves_nothing(gpu, monkeypatch):
    monkeypatch.setattr(runner, "profile_phases", lambda calls: [])
    result = Result(TINY, "reference:off", False, True)
    runner._profile(SimpleNamespace(phases=lambda number: []), result)
    assert result.busy == result.stages == result.kernels == {}
