"""Clock, power and energy: the binding against a library with NVML's own signatures, the meter, and
the sustained rows that they end in.
"""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from framework import torch

from sonicmoe.bench import nvml, runner, steady
from sonicmoe.bench.figures import Result, Sustained, Turn
from sonicmoe.bench.nvml import Meter, Nvml, NvmlError, Reading, mean_watts
from sonicmoe.bench.points import read_points
from sonicmoe.bench.runner import Effort, measure
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.steady import AHEAD, open_nvml, sustain
from sonicmoe.bench.sweep import sweep
from sonicmoe.bench.tables import notes, sustained_table
from sonicmoe.bench.workload import Variant
from sonicmoe.cli.main import main
from sonicmoe.enums import EngineName

UUID = "GPU-00112233-4455-6677-8899-aabbccddeeff"
TINY = Shape(16, 32, 16, 4, 2)
TINY_OPTIONS = ["--T", "16", "--H", "16", "--I", "16", "--E", "2", "--K", "1", "--rounds", "1", "--layers", "1"]  # fmt: skip
OFF, PERF = (Variant(EngineName.REFERENCE, mode) for mode in ("off", "perf"))
READING = Reading(1530.0, 700.0, 700.0)
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="needs cc")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Builds the fake library with the macros given and returns its path."""
    folder = tmp_path_factory.mktemp("nvml")

    def build(*macros):
        path = folder / f"libnvidia-ml{'-'.join(macros)}.so.1"
        if not path.exists():
            source = Path(__file__).with_name("fake_nvml.c")
            command = ["cc", "-Wall", "-Werror", "-shared", "-fPIC", "-Wno-unused-variable"]
            command += [*(f"-D{macro}" for macro in macros), "-o", str(path), str(source)]
            subprocess.run(command, check=True)
        return str(path)

    return build


@needs_cc
def test_every_quantity_comes_in_the_units_of_its_name(library):
    gpu = Nvml(UUID, library())
    users = ctypes.CDLL(library()).fake_users
    assert users() == 1
    assert (gpu.sm_mhz(), gpu.limit_watts()) == (1530.0, 700.0)
    assert gpu.joules() > 2**33 / 1000, "the counter has 64 bits"
    gpu.close()
    assert users() == 0


@needs_cc
def test_what_nvml_refuses_is_named(library):
    with pytest.raises(NvmlError, match="nvmlDeviceGetHandleByUUID failed: Not Found"):
        Nvml("GPU-another", library())
    assert ctypes.CDLL(library()).fake_users() == 0, "the initialisation is undone"
    with pytest.raises(NvmlError, match=r"no NVML: .*libnone\.so"):
        Nvml(UUID, "libnone.so")


@needs_cc
def test_power_comes_from_the_counter(library):
    with Meter(Nvml(UUID, library()), interval_s=0.001) as meter:
        time.sleep(0.5)
    reading = meter.reading()
    assert reading == Reading(1530.0, reading.watts, 700.0)
    assert reading.watts == pytest.approx(700, rel=0.1)


@needs_cc
@pytest.mark.parametrize(
    ("macros", "reason"),
    [
        ((), "too short for the board's energy counter"),
        (("WITHOUT_COUNTER",), "TotalEnergyConsumption failed: Not Supported"),
        (("OLD",), "too old: it has no nvmlDeviceGetTotalEnergyConsumption"),
        (("LOST",), "nvmlDeviceGetTotalEnergyConsumption failed: GPU is lost"),
    ],
)
def test_without_a_counter_there_is_no_reading(library, macros, reason):
    with Meter(Nvml(UUID, library(*macros)), interval_s=0.001) as meter:
        time.sleep(0.02)
    with pytest.raises(NvmlError, match=reason):
        meter.reading()


@needs_cc
def test_a_gpu_that_is_lost_meanwhile_is_said(library, monkeypatch):
    users = ctypes.CDLL(library("LOST")).fake_users
    before = users()
    monkeypatch.setattr(steady, "open_nvml", lambda device: Nvml(UUID, library("LOST")))
    row = Sustained.of([sustain(FakeSteps(), 0.01, "cpu", 0.0)])
    assert users() == before, "closed all the same"
    assert row.joules is None and "GPU is lost" in row.unavailable


def test_the_counters_first_value_has_no_known_beginning():
    readings = [(0.0, 100.0), (0.09, 110.0), (0.19, 180.0), (0.29, 250.0)]
    assert mean_watts(readings) == pytest.approx(700)
    assert [mean_watts(readings[:3])] == pytest.approx([700])


class FakeSteps:
    """Steps of two layers that take no time."""

    layers = 2

    def __init__(self):
        self.steps = 0

    def run(self):
        self.steps += 1


class Clock:
    """A host clock that a step moves by 10 ms."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(steady.time, "perf_counter", lambda: self.now)


class TimedSteps(FakeSteps):
    """The first ten steps are burst clocks: half as long."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def run(self):
        super().run()
        self._clock.now += 0.005 if self.steps <= 10 else 0.01


def test_steps_before_clocks_have_settled_do_not_count(monkeypatch):
    steps = TimedSteps(Clock(monkeypatch))
    turn = sustain(steps, 0.2, "cpu", settle_s=0.1)
    assert turn.us == pytest.approx([5000.0] * len(turn.us))
    assert 20 <= len(turn.us) <= 21 and turn.power == "no GPU"
    assert turn.seconds == pytest.approx(0.01 * len(turn.us))


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


def test_on_a_gpu_its_clock_counts_and_the_host_stays_a_few_steps_ahead(monkeypatch):
    FakeEvent.steps, FakeEvent.waits = FakeSteps(), []
    waited = []
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(True))
    monkeypatch.setattr(steady, "open_nvml", lambda device: "no NVML")
    turn = sustain(FakeEvent.steps, 0.01, "cuda:0", settle_s=0.005)
    assert set(turn.us) == {1500.0} and len(turn.us) < FakeEvent.steps.steps
    assert set(FakeEvent.waits) == {AHEAD} and waited == [True]


def test_turns_are_joined_by_their_time():
    slow = Turn((10.0, 10.0), 2, Reading(1400.0, 700.0, 700.0))
    fast = Turn((5.0, 5.0, 5.0, 5.0), 2, Reading(1600.0, 600.0, 700.0))
    row = Sustained.of([slow, fast])
    assert (row.us.median, row.us.count) == (5.0, 6)
    assert row.seconds == pytest.approx(80e-6)
    assert (row.sm_mhz, row.watts) == pytest.approx((1500.0, 650.0)) and row.limit_watts == 700
    assert row.joules == pytest.approx(650 * 40e-6 / 6), "40 us hold six layers' worth of steps"
    assert row.unavailable is None
    silent = Sustained.of([slow, Turn((5.0,), 2, "GPU is lost")])
    assert silent.us.count == 3 and silent.joules is None and silent.unavailable == "GPU is lost"


def test_variants_take_turns_and_the_figures_reach_tables_and_json(monkeypatch):
    order = []
    us = {str(OFF): 9000.0, str(PERF): 6000.0}

    def fake_sustain(stack, seconds, device):
        assert seconds == 1.25
        order.append(stack)
        return Turn((us[stack],), 2, READING)

    monkeypatch.setattr(runner, "sustain", fake_sustain)
    results = [Result(TINY, str(v), v.fp8, True) for v in (OFF, PERF)]
    runner._time_sustained(dict(enumerate(us)), results, 2.5, "cuda:0")
    assert order == [str(OFF), str(PERF), str(PERF), str(OFF)]
    table = sustained_table(results)
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert [column.header for column in table.columns] == [
        "engine", "sustained us", "sustained speed-up", "SM MHz", "W", "W limit", "J/layer",
    ]  # fmt: skip
    assert rows[0] == ("reference:off", "9,000 ±0.0 %", "1.00", "1,530", "700", "700", "6.3")
    assert rows[1][2] == "1.50" and rows[1][-1] == "4.2"
    data = results[1].to_json()["sustained"]
    assert data["joules"] == pytest.approx(4.2) and data["us"]["median"] == 6000.0
    assert (data["sm_mhz"], data["watts"]) == (1530.0, 700.0)


def test_layers_that_do_not_fit_have_no_sustained_row():
    class Full(FakeSteps):
        def run(self):
            raise torch.OutOfMemoryError

    result = Result(TINY, "reference:off", False, False)
    runner._time_sustained({0: Full()}, [result], 0.1, "cpu")
    assert result.sustained is None


def test_a_host_without_nvml_says_so_in_the_columns(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0-1"))
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError(name)))
    reason = open_nvml("cuda:0")
    assert reason == "no NVML: libnvidia-ml.so.1"
    result = Result(TINY, "hopper:perf", True, True)
    result.sustained = Sustained.of([Turn((5.0,), 2, reason)])
    cells = {c.header: next(iter(c.cells)) for c in sustained_table([result]).columns}
    assert cells["sustained us"] == "5 ±0.0 %"
    assert (cells["SM MHz"], cells["W"], cells["J/layer"]) == ("no NVML",) * 3
    assert f"hopper:perf at {TINY}: no clock, power and energy: {reason}" in notes([result])


@needs_cc
def test_the_gpu_is_found_by_its_uuid(library, monkeypatch):
    name = "00112233-4455-6677-8899-aabbccddeeff"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=name))
    monkeypatch.setattr(Nvml.__init__, "__defaults__", (library(),))
    gpu = open_nvml("cuda:0")
    assert gpu.sm_mhz() == 1530
    gpu.close()


def test_the_option_measures_on_a_cpu_too_and_zero_leaves_it_out(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(steady.sustain, "__defaults__", (0.0,))
    options = [*TINY_OPTIONS, "--json"]

    def sustained_of(*more):
        outcome = CliRunner().invoke(main, ["bench", *options, *more])
        assert outcome.exit_code == 0, outcome.output
        return json.loads(outcome.stdout)["results"][0]["sustained"]

    assert sustained_of() is None and sustained_of("--sustained", "0") is None
    row = sustained_of("--sustained", "0.01")
    assert row["us"]["median"] > 0 and row["seconds"] > 0 and row["unavailable"] == "no GPU"


def test_a_sweep_writes_what_its_sustained_row_gave(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    turn = Turn((40.0,), 2, READING)
    monkeypatch.setattr("sonicmoe.bench.sweep.sustain", lambda *_: turn)
    path = tmp_path / "sweep.jsonl"
    assert sweep(path, [TINY], OFF, rounds=1) == (1, 0)
    assert sweep(path, [Shape(24, 32, 16, 4, 2)], OFF, rounds=1, sustained_s=1.0) == (1, 0)
    without, with_row = read_points(path)
    assert (without.sustained_us, without.joules) == (None, None)
    assert (with_row.sustained_us, with_row.sm_mhz, with_row.watts) == (40.0, 1530.0, 700.0)
    assert with_row.joules == pytest.approx(0.028)
    old = {key: value for key, value in vars(without).items() if key not in vars(READING)}
    for name in ("sustained_us", "joules"):
        del old[name]
    path.write_text(json.dumps(old) + "\n")
    assert read_points(path) == [without], "files from before still read"


def test_measure_has_a_sustained_row_where_it_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(steady.sustain, "__defaults__", (0.0,))
    (result,) = measure(TINY, [OFF], Effort(rounds=1, warmup=1, layers=1, sustained_s=0.01))
    assert result.sustained.us.count >= 2 and result.sustained.unavailable == "no GPU"
