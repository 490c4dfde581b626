"""Clock, power and energy: the meter on a fake nvidia-ml-py, and the sustained rows they end in."""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from framework import torch

from sonicmoe.bench import power, runner, steady
from sonicmoe.bench.figures import Reading, Result, Sustained
from sonicmoe.bench.power import Meter, mean_watts
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.steady import AHEAD, sustain
from sonicmoe.bench.tables import notes, result_table
from sonicmoe.cli.main import main

UUID = "00112233-4455-6677-8899-aabbccddeeff"
TINY = Shape(16, 32, 16, 4, 2)
READING = Reading(1530.0, 700.0, 650.0)
WATTS = 700


class NVMLError(Exception):
    """As nvidia-ml-py raises it."""


class FakeNvml:
    """A board that draws 700 W, whose counter moves every 10 ms; `broken` queries raise."""

    NVML_CLOCK_SM = 1
    NVMLError = NVMLError

    def __init__(self, broken=""):
        self.users, self._broken = 0, broken

    def nvmlInit(self):
        self.users += 1

    def nvmlShutdown(self):
        self.users -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == f"GPU-{UUID}"
        return "board"

    def nvmlDeviceGetEnforcedPowerLimit(self, board):
        return 650_000

    def nvmlDeviceGetTotalEnergyConsumption(self, board):
        if self._broken:
            raise NVMLError(self._broken)
        return 2**33 + 10 * WATTS * (time.perf_counter_ns() // 10_000_000)

    def nvmlDeviceGetClockInfo(self, board, kind):
        assert kind == self.NVML_CLOCK_SM
        return 1530


@pytest.fixture
def board(monkeypatch):
    """Installs a fake board, and returns it."""

    def install(broken=""):
        fake = FakeNvml(broken)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    properties = SimpleNamespace(uuid=UUID)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(power, "INTERVAL_S", 0.001)
    return install


def test_every_quantity_comes_in_the_units_of_its_name(board):
    nvml = board()
    with Meter("cuda:0") as meter:
        time.sleep(0.5)
    reading = meter.reading()
    assert reading == Reading(1530.0, reading.watts, 650.0) and nvml.users == 0
    assert reading.watts == pytest.approx(WATTS, rel=0.1)


def test_what_gives_no_reading_is_said(board, monkeypatch):
    def reason(device="cuda:0"):
        with Meter(device) as meter:
            pass
        return meter.reading()

    board()
    assert reason() == "the time was too short for the board's energy counter"
    assert reason("cpu") == "no GPU"
    board("GPU is lost")
    assert reason() == "NVML: GPU is lost"
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert reason() == "nvidia-ml-py is not installed (pip install nvidia-ml-py)"


def test_the_counters_first_value_has_no_known_beginning():
    readings = [(0.0, 100.0), (0.09, 110.0), (0.19, 180.0), (0.29, 250.0)]
    assert [mean_watts(readings), mean_watts(readings[:3])] == pytest.approx([700, 700])
    assert mean_watts(readings[:2]) is None


class FakeSteps:
    """Steps of two layers that take no time."""

    layers = 2

    def __init__(self):
        self.steps = 0

    def run(self):
        self.steps += 1


class TimedSteps(FakeSteps):
    """A step moves the host's clock by 10 ms. The first ten are burst clocks: half as long."""

    now = 0.0

    def run(self):
        super().run()
        self.now += 0.005 if self.steps <= 10 else 0.01


def test_steps_before_clocks_have_settled_do_not_count(monkeypatch):
    steps = TimedSteps()
    monkeypatch.setattr(steady.time, "perf_counter", lambda: steps.now)
    us, reason = sustain(steps, 0.2, "cpu", settle_s=0.1)
    assert us == pytest.approx([5000.0] * len(us))
    assert 20 <= len(us) <= 21 and reason == "no GPU"


class FakeEvent:
    """Its time is the number of steps issued when it was recorded; knows who waited for it."""

    steps: FakeSteps
    waits: list[int]

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = self.steps.steps

    def synchronize(self):
        self.waits.append(self.steps.steps - self.at)

    def elapsed_time(self, later):
        return 3.0 * (later.at - self.at)


def test_on_a_gpu_its_clock_counts_and_the_host_stays_a_few_steps_ahead(monkeypatch, board):
    board()
    FakeEvent.steps, FakeEvent.waits = FakeSteps(), []
    waited = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    us, _ = sustain(FakeEvent.steps, 0.01, "cuda:0", settle_s=0.005)
    assert set(us) == {1500.0} and len(us) < FakeEvent.steps.steps
    assert set(FakeEvent.waits) == {AHEAD} and waited == [True]


def test_turns_are_joined():
    slow = ([10.0, 10.0], Reading(1400.0, 700.0, 650.0))
    fast = ([5.0, 5.0, 5.0, 5.0], Reading(1600.0, 600.0, 650.0))
    row = Sustained.of([slow, fast])
    assert (row.us.median, row.us.count) == (5.0, 6)
    assert row.power == Reading(1500.0, 650.0, 650.0) and row.unavailable is None
    assert row.joules == pytest.approx(650 * 40e-6 / 6), "40 us of six layers"
    silent = Sustained.of([slow, ([5.0], "GPU is lost")])
    assert silent.us.count == 3 and silent.joules is None and silent.unavailable == "GPU is lost"


def test_variants_take_turns_and_the_figures_reach_table_and_json(monkeypatch):
    order = []
    us = {"reference:off": 9000.0, "reference:perf": 6000.0}

    def fake_sustain(stack, seconds, device):
        assert seconds == 1.25
        order.append(stack)
        return [us[stack]], READING

    monkeypatch.setattr(runner, "sustain", fake_sustain)
    off, perf = results = [Result(TINY, name, name.endswith("perf"), True) for name in us]
    runner._time_sustained(dict(enumerate(us)), results, 2.5, "cuda:0")
    assert order == [off.variant, perf.variant, perf.variant, off.variant]
    rows = list(zip(*(column.cells for column in result_table(results).columns), strict=True))
    assert rows == [
        ("sustained us", "9,000 ±0.0 % (1.00x)", "6,000 ±0.0 % (1.50x)"),
        ("SM MHz", "1,530", "1,530"),
        ("W", "700", "700"),
        ("W limit", "650", "650"),
        ("J/layer", "6.3", "4.2"),
    ]
    data = perf.to_json()["sustained"]
    assert data["joules"] == pytest.approx(4.2) and data["us"]["median"] == 6000.0
    assert data["power"] == {"sm_mhz": 1530.0, "watts": 700.0, "limit_watts": 650.0}


def test_a_host_without_nvml_has_the_time_and_a_line_with_the_reason():
    result = Result(TINY, "hopper:perf", True, True)
    result.sustained = Sustained.of([([5.0], "NVML: gone")])
    cells = [list(column.cells) for column in result_table([result]).columns]
    assert cells == [["sustained us"], ["5 ±0.0 % (1.00x)"]]
    assert f"hopper:perf at {TINY}: no clock, power and energy: NVML: gone" in notes([result])


def test_the_option_measures_on_a_cpu_too_and_zero_leaves_it_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(steady.sustain, "__defaults__", (0.0,))
    monkeypatch.setattr(Shape, "stack_layers", 1)
    sizes = ["--T", "16", "--H", "16", "--I", "16", "--E", "2", "--K", "1"]

    def sustained_of(*more):
        outcome = CliRunner().invoke(main, ["bench", *sizes, "--json", *more])
        assert outcome.exit_code == 0, outcome.output
        return json.loads(outcome.stdout)["results"][0]["sustained"]

    assert sustained_of() is None and sustained_of("--sustained", "0") is None
    row = sustained_of("--sustained", "0.01")
    assert row["us"]["count"] >= 2 and row["us"]["median"] > 0 and row["unavailable"] == "no GPU"
