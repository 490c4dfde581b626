"""The regression gate: what passes, what fails, what is not run, and the exit code that says so."""

from __future__ import annotations

import json
import sys

import click
import pytest
from click.testing import CliRunner
from processes import ROOT, program

from sonicmoe.bench.figures import Result, Spread

TOOLS = ROOT / "tools" / "ci"


@pytest.fixture(scope="module")
def core():
    """tools/ci/core_tests.py as a module, with its phases."""
    return program("ci/core_tests.py")


@pytest.mark.parametrize(
    ("found", "gate", "passes"),
    [
        (1.03, {"gate": "most", "value": 1.0, "tolerance": 0.03}, True),
        (1.04, {"gate": "most", "value": 1.0, "tolerance": 0.03}, False),
        (0.97, {"gate": "least", "value": 1.0, "tolerance": 0.03}, True),
        (0.96, {"gate": "least", "value": 1.0, "tolerance": 0.03}, False),
        (float("nan"), {"gate": "most", "value": 1.0}, False),
        (float("nan"), {"gate": "least", "value": 1.0}, False),
        ("ab", {"gate": "equal", "value": "ab"}, True),
        ("ab", {"gate": "equal", "value": "ac"}, False),
        ("ab", {"gate": "most", "value": 1}, False),
        (-1.02, {"gate": "most", "value": -1.0, "tolerance": 0.03}, True),
    ],
)
def test_gates(core, found, gate, passes):
    assert core.within(found, gate) is passes
    with pytest.raises(click.ClickException, match="gate is 'about'"):
        core.within(1.0, {"gate": "about", "value": 1.0})


def test_every_figure_needs_a_gate_and_every_gate_its_figure(core):
    gates = {
        "a": {"gate": "most", "value": 1.0},
        "b": {"gate": "equal", "value": 0},
        "*:perf bytes": {"gate": "most", "value": 2.0},
    }
    assert core.judge({"a": 1.0, "b": 0, "hopper:perf bytes": 1.5}, gates) == []
    assert core.judge({"a": 2.0, "c": 3, "x:perf bytes": 2.5}, gates) == [
        "b was not measured", "a is 2.0; needed: most 1.0", "c is 3 and has no gate (--record)", "x:perf bytes is 2.5; needed: most 2.0",
    ]  # fmt: skip


def phases_of(core, monkeypatch, tmp_path, *phases, baselines=None):
    monkeypatch.setattr(core, "PHASES", phases)
    monkeypatch.setattr(core, "BASELINES", tmp_path / "baselines.json")
    core.BASELINES.write_text(json.dumps(baselines or {}))
    core.main.params[1].type = click.Choice([phase.name for phase in phases])


def raising(error):
    def measure(fast):
        raise error

    return measure


def test_states_exit_code_and_summary(core, monkeypatch, tmp_path):
    phase, gate = core.Phase, {"value": 1}
    gates = {"good": {"x": gate | {"gate": "equal"}}, "bad": {"x": gate | {"gate": "most"}}}
    some = (
        phase("good", lambda fast: {"x": 1}),
        phase("absent", raising(sys.modules["core_phases"].NotHere("needs a moon"))),
        phase("late", raising(ValueError("boom")), slow=True),
    )
    phases_of(core, monkeypatch, tmp_path, *some, baselines=gates)
    result = CliRunner().invoke(core.main, ["--fast", "--json", str(tmp_path / "summary.json")])
    assert result.exit_code == 0, result.output
    assert "NOT RUN on this machine: absent" in result.output and "needs a moon" in result.output
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["passed"] is True
    states = {p["phase"]: p["state"] for p in summary["phases"]}
    assert states == {"good": "passed", "absent": "NOT RUN"}
    bad = phase("bad", lambda fast: {"x": 2})
    phases_of(core, monkeypatch, tmp_path, *some, bad, baselines=gates)
    result = CliRunner().invoke(core.main, ["--json", str(tmp_path / "summary.json")])
    assert result.exit_code == 1
    assert "ValueError: boom" in result.output and "x is 2; needed: most 1" in result.output
    assert json.loads((tmp_path / "summary.json").read_text())["passed"] is False


def test_figures_of_gpu_phases_have_gates(core, monkeypatch):
    """Both engines faked: an FP8 engine twice as fast passes, one as fast as BF16 does not, and
    every figure has its gate.
    """
    phases, gates = (
        sys.modules["core_phases"],
        json.loads((TOOLS / "baselines.json").read_text())["performance"],
    )
    variants = [phases.Variant.parse(name) for name in ("bf16", "hopper")]
    monkeypatch.setattr(phases, "find_device", lambda: "cuda:0")
    monkeypatch.setattr(phases, "available_variants", lambda device: variants)

    def faked(fp8_us):
        def measure(shape, chosen):
            for variant in chosen:
                us = fp8_us if variant.fp8 else 1000.0
                steady = {"steady": Spread.of([1.04 * us]), "steady_busy": us}
                yield Result(shape, str(variant), variant.fp8, True, **steady)

        return measure

    monkeypatch.setattr(phases, "measure", faked(500.0))
    phase = next(phase for phase in phases.PHASES if phase.name == "performance")
    assert core.run_phase(phase, False, gates).misses == []
    monkeypatch.setattr(phases, "measure", faked(1000.0))
    misses = core.run_phase(phase, False, gates).misses
    assert len(misses) == 5 and all("fp8 over bf16" in miss for miss in misses)


def test_a_worse_engine_does_not_pass(core, monkeypatch):
    """The coarsest recipe in place of the default; `make core` runs the phases as they are."""
    core_phases = sys.modules["core_phases"]
    baselines = json.loads((TOOLS / "baselines.json").read_text())
    real = {phase.name: phase for phase in core_phases.PHASES}
    assert set(baselines) == set(real), "every phase has its baselines"
    monkeypatch.setattr(core_phases, "DEFAULT_RECIPE", "deepseek-v3-pow2")
    gates = core.gates_of(real["precision"], baselines, True)
    outcome = core.run_phase(real["precision"], True, gates)
    assert outcome.state == "FAILED" and "gaussian fp8 out rmse" in str(outcome.misses)
