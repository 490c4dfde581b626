"""The GPU half of the clocks with the CUDA calls and nvidia-ml-py replaced: what is measured between
what, what becomes of a trace, and the sustained rows with their power and energy.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from framework import torch

from sonicmoe.bench import power, runner, timing
from sonicmoe.bench.figures import PowerReading, Result, Sustained
from sonicmoe.bench.power import Meter, mean_watts
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.tables import notes, result_table
from sonicmoe.bench.timing import AHEAD, profile_steps, sustain, time_steps
from sonicmoe.bench.trace import Kernel
from sonicmoe.bench.workload import Batch, Layer, NodeCall, Stack, Variant
from sonicmoe.enums import EngineName

TINY = Shape(48, 32, 16, 4, 2)
PERF = Variant(EngineName.REFERENCE, "perf")
UUID = "00112233-4455-6677-8899-aabbccddeeff"
WATTS = 700


def result(**fields):
    return Result(TINY, "hopper:perf", True, True, **fields)


@pytest.fixture
def log(monkeypatch):
    """The calls made to a GPU whose clock is their number: each takes one millisecond."""
    calls = []

    class Event:
        """Its time is the length of the log when it was recorded; a caller that waits for it lets the host
        stay ahead.
        """

        def __init__(self, enable_timing):
            self.at = 0

        def record(self):
            calls.append("event")
            self.at = len(calls)

        def synchronize(self):
            assert calls[self.at :].count("event") == AHEAD

        def elapsed_time(self, later):
            return float(later.at - self.at)

    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: calls.append("sync"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return calls


def test_steady_steps_follow_each_other_and_the_gpu_never_waits_for_the_host(log):
    # Two clock ticks a step of two layers.
    stack = SimpleNamespace(layers=2, run=lambda: log.append("step"))
    assert time_steps(stack, 4, "cuda:0") == 4 * [1000.0]
    assert log == [*5 * ["step", "event"], "sync"]


def test_steady_busy_time_counts_overlap_once_and_leaves_out_the_first_step(log, monkeypatch):
    """Each step launches three kernels that overlap: 10, 12 and 14 us long, 5 us apart."""
    spans = [(100 * step + 5 * n, 10 + 2 * n) for step in range(3) for n in range(3)]
    kernels = [Kernel("k", start, us, "", "") for start, us in spans]
    profiler = lambda activities: nullcontext(log.append("profiled"))  # noqa: E731
    monkeypatch.setattr(torch.profiler, "profile", profiler)
    monkeypatch.setattr(timing, "trace_of", lambda _: None)
    monkeypatch.setattr(timing, "kernels_of", lambda _: kernels)
    stack = SimpleNamespace(layers=2, run=lambda: log.append("step"))
    assert profile_steps(stack, 3) == 12.0  # from 0 to 24 us, over two layers
    assert log == ["step", "sync", "profiled", "step", "step", "step", "sync"]
    kernels.clear()
    assert profile_steps(stack, 3) is None, "the driver lets nobody profile"


def test_a_stack_computes_what_its_calls_compute():
    """All weight gradients arrive, and the gradients of a batch that layers share stay out of the
    batch.
    """
    torch.manual_seed(5)
    batches = [Batch.random(TINY, "cpu") for _ in range(2)]
    stacked, single = Layer(TINY, "cpu"), Layer(TINY, "cpu")
    Stack(stacked.node(PERF), batches, 3).run()
    assert all(batch.x.grad is None and batch.probs.grad is None for batch in batches)
    other = single.node(PERF)
    for batch in (batches[0], batches[1], batches[0]):
        call = NodeCall(other, batch)
        call.forward()
        call.backward()
    for a, b in zip(stacked.experts, single.experts, strict=True):
        torch.testing.assert_close(a.down_proj.weight.main_grad, b.down_proj.weight.main_grad)
        assert a.down_proj.weight.main_grad.abs().sum() > 0


def test_every_quantity_comes_in_the_units_of_its_name(monkeypatch):
    """Of a board that draws 700 W, whose counter moves every 10 ms."""
    monkeypatch.setattr(power, "INTERVAL_S", 0.001)
    users = []
    nvml = SimpleNamespace(
        NVML_CLOCK_SM=1,
        NVMLError=OSError,
        nvmlInit=lambda: users.append("in"),
        nvmlShutdown=lambda: users.append("out"),
        nvmlDeviceGetHandleByUUID={f"GPU-{UUID}": "board"}.__getitem__,
        nvmlDeviceGetEnforcedPowerLimit={"board": 650_000}.__getitem__,
        nvmlDeviceGetTotalEnergyConsumption=lambda handle: (
            2**33 + 10 * WATTS * (time.perf_counter_ns() // 10_000_000)
        ),
        nvmlDeviceGetClockInfo=lambda handle, kind: {("board", 1): 1530}[handle, kind],
    )
    monkeypatch.setattr(power, "pynvml", nvml)
    of_gpu = lambda _: SimpleNamespace(uuid=UUID)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "get_device_properties", of_gpu)
    with Meter("cuda:0") as meter:
        time.sleep(0.5)
    reading = meter.reading()
    assert reading == PowerReading(1530.0, reading.watts, 650.0) and users == ["in", "out"]
    assert reading.watts == pytest.approx(WATTS, rel=0.1)
    # Nobody knows when the counter's first value was new.
    readings = [(0.0, 100.0), (0.09, 110.0), (0.19, 180.0), (0.29, 250.0)]
    assert [mean_watts(readings), mean_watts(readings[:3])] == pytest.approx([700, 700])


class TimedSteps:
    """A step of two layers moves the host's clock by 10 ms. The first ten are burst clocks: half as
    long.
    """

    layers, steps, now = 2, 0, 0.0

    def run(self):
        self.steps += 1
        self.now += 0.005 if self.steps <= 10 else 0.01


def test_steps_before_clocks_have_settled_do_not_count(monkeypatch):
    steps = TimedSteps()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: steps.now)
    us, reason = sustain(steps, 0.2, "cpu", settle_s=0.1)
    assert us == pytest.approx([5000.0] * len(us))
    assert 20 <= len(us) <= 21 and reason == "no GPU"


def test_engines_take_turns_and_their_figures_reach_table_and_json(monkeypatch):
    order, us = [], {"slow": 9000.0, "fast": 6000.0}

    def fake_sustain(stack, seconds, device):
        assert seconds == 1.25
        order.append(stack)
        return [us[stack]], PowerReading(1530.0, 700.0, 650.0)

    monkeypatch.setattr(runner, "sustain", fake_sustain)
    results = [result(), result()]
    runner._time_sustained(dict(enumerate(us)), results, 2.5, "cuda:0")
    assert order == ["slow", "fast", "fast", "slow"]
    rows = list(zip(*(column.cells for column in result_table(results).columns), strict=True))
    assert rows == [
        ("sustained us", "9,000 ±0.0 % (1.00x)", "6,000 ±0.0 % (1.50x)"),
        ("SM MHz", "1,530", "1,530"),
        ("W", "700", "700"),
        ("W limit", "650", "650"),
        ("J/layer", "6.3", "4.2"),
    ]
    data = results[1].to_json()["sustained"]
    assert data["joules"] == pytest.approx(4.2) and data["us"]["median"] == 6000.0
    assert data["power"] == {"sm_mhz": 1530.0, "watts": 700.0, "limit_watts": 650.0}
    blind = result(sustained=Sustained.of([([5.0], "NVML: gone")]))
    cells = [list(column.cells) for column in result_table([blind]).columns]
    assert cells == [["sustained us"], ["5 ±0.0 % (1.00x)"]]
    assert f"hopper:perf at {TINY}: no clock, power and energy: NVML: gone" in notes([blind])
