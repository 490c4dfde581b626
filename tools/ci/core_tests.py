#!/usr/bin/env python3
"""Run the phases of core_phases.py, gate every figure against baselines.json, and say what was not
run and why.

A gate holds a figure to `value`: "most" fails above it, "least" below it, "equal" on any
difference; `tolerance` is a share of the value. Its name is a figure's, or a pattern of several. A
figure without a gate fails: `--record` writes one. Exit code 1 when a phase fails.
"""

from __future__ import annotations

import json
import math
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
sys.path.insert(0, str(HERE.parents[1] / "benchmarks"))
sys.path.insert(0, str(HERE))

from core_phases import PHASES, NotHere, Phase  # noqa: E402

BASELINES = HERE / "baselines.json"
PASSED, FAILED, NOT_RUN = "passed", "FAILED", "NOT RUN"
KINDS = ("most", "least", "equal")


@dataclass
class Outcome:
    """One phase: its state, seconds, figures, and every gate missed, in words."""

    phase: str
    state: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    misses: list[str] = field(default_factory=list)
    reason: str = ""


def judge(figures: Mapping[str, Any], gates: Mapping[str, Any]) -> list[str]:
    """Every figure that misses its gate or has none, and every gate (patterns apart) without a
    figure.
    """
    misses = [
        f"{name} was not measured" for name in gates if name not in figures and "*" not in name
    ]
    for name, found in figures.items():
        gate = gate_for(name, gates)
        if gate is None:
            misses.append(f"{name} is {found!r} and has no gate (--record)")
        elif not within(found, gate):
            slack = f" with {gate['tolerance']:.2%} tolerance" if gate.get("tolerance") else ""
            misses.append(f"{name} is {found!r}; needed: {gate['gate']} {gate['value']!r}{slack}")
    return misses


def gate_for(name: str, gates: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The gate of that name, else the first whose pattern fits."""
    return gates.get(name) or next(
        (gate for pattern, gate in gates.items() if fnmatchcase(name, pattern)), None
    )


def within(found: Any, gate: Mapping[str, Any]) -> bool:
    """Whether a figure passes its gate; NaN never does."""
    kind, value, tolerance = gate["gate"], gate["value"], gate.get("tolerance", 0.0)
    if kind not in KINDS:
        raise click.ClickException(f"{BASELINES.name}: gate is {kind!r}; needed: one of {KINDS}")
    if kind == "equal":
        return bool(found == value)
    if not isinstance(found, int | float) or math.isnan(found):
        return False
    slack = abs(value) * tolerance
    return found <= value + slack if kind == "most" else found >= value - slack


def run_phase(phase: Phase, fast: bool, gates: Mapping[str, Any]) -> Outcome:
    """Measure and judge one phase; an exception is a failure, `NotHere` is not."""
    started = time.monotonic()
    outcome = Outcome(phase.name, PASSED)
    try:
        outcome.figures = phase.measure(fast)
        outcome.misses = judge(outcome.figures, gates)
    except NotHere as reason:
        outcome.state, outcome.reason = NOT_RUN, str(reason)
    except Exception:
        outcome.misses = [traceback.format_exc().strip()]
    if outcome.misses:
        outcome.state = FAILED
    outcome.seconds = time.monotonic() - started
    return outcome


def chosen(names: tuple[str, ...], fast: bool) -> list[Phase]:
    """Phases by name, or all; `--fast` leaves the slow ones to the whole run."""
    return [
        phase for phase in PHASES if (phase.name in names if names else not (fast and phase.slow))
    ]


def gates_of(phase: Phase, baselines: Mapping[str, Any], fast: bool) -> dict[str, Any]:
    """The phase's gates without those of figures that only the whole run measures."""
    return {
        name: gate
        for name, gate in baselines.get(phase.name, {}).items()
        if phase.measures(name, fast)
    }


def record(outcomes: list[Outcome], baselines: dict[str, Any], phases: Mapping[str, Phase]) -> None:
    """Write a gate for every figure that has none; existing gates stay."""
    for outcome in outcomes:
        gates = baselines.setdefault(outcome.phase, {})
        for name, value in outcome.figures.items():
            if gate_for(name, gates) is None:
                gates[name] = {"value": value, **phases[outcome.phase].default_gate(name)}
    BASELINES.write_text(json.dumps(baselines, indent=2) + "\n")


def show(outcome: Outcome) -> None:
    """A line per phase, and what went wrong below it."""
    tail = f"  {outcome.reason}" if outcome.reason else ""
    click.secho(
        f"{outcome.state:<8} {outcome.phase:<14} {outcome.seconds:6.1f} s{tail}",
        fg=COLOURS[outcome.state],
    )
    for miss in outcome.misses:
        click.echo("         " + miss.replace("\n", "\n         "))


COLOURS = {PASSED: "green", FAILED: "red", NOT_RUN: "yellow"}


@click.command()
@click.option("--fast", is_flag=True, help="What needs no GPU and no minutes.")
@click.option(
    "--phase",
    "names",
    multiple=True,
    type=click.Choice([phase.name for phase in PHASES]),
    help="Only these.",
)
@click.option(
    "--json",
    "summary",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the summary to a file.",
)
@click.option(
    "--record", "recording", is_flag=True, help="Write a gate for every figure that has none."
)
@click.option("--figures", is_flag=True, help="Print every figure.")
def main(
    fast: bool, names: tuple[str, ...], summary: Path | None, recording: bool, figures: bool
) -> None:
    """Measure every core mechanism and gate it against its baseline. Exit code 1 when a phase
    fails.
    """
    baselines: dict[str, Any] = json.loads(BASELINES.read_text()) if BASELINES.exists() else {}
    outcomes = []
    for phase in chosen(names, fast):
        outcome = run_phase(phase, fast, gates_of(phase, baselines, fast))
        outcomes.append(outcome)
        show(outcome)
        if figures:
            click.echo(json.dumps(outcome.figures, indent=2))
    if recording:
        record(outcomes, baselines, {phase.name: phase for phase in PHASES})
    if summary is not None:
        data = {
            "fast": fast,
            "passed": not any(o.misses for o in outcomes),
            "phases": [asdict(o) for o in outcomes],
        }
        summary.write_text(json.dumps(data, indent=2) + "\n")
    left = [outcome.phase for outcome in outcomes if outcome.state == NOT_RUN]
    if left:
        click.secho(f"NOT RUN on this machine: {', '.join(left)}", fg="yellow", bold=True)
    sys.exit(1 if any(outcome.misses for outcome in outcomes) and not recording else 0)


if __name__ == "__main__":
    main()
