"""Losses of runs in one file, and the gaps, spreads and slopes that are read off it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import loss_curves
import numpy as np
from click.testing import CliRunner


def run(*arguments: object) -> str:
    result = CliRunner().invoke(loss_curves.main, [str(argument) for argument in arguments])
    return result.output


def curve(seed: int, gap: float, recipe: str = "dx256", twin: bool = True) -> str:
    full, held_out = [4.0 + seed] * 40, [2.1, 2.0 if twin else None]
    losses = [loss * (1 + gap) for loss in full]
    task = "tiny", "a text", recipe, seed, "CPU"
    made = loss_curves.Curve(*task, losses, full if twin else None, held_out)
    return json.dumps(dataclasses.asdict(made)) + "\n"


def test_seeds_have_an_interval_and_a_run_alone_finds_its_twin(tmp_path: Path) -> None:
    alone, path = curve(1, 0.02, recipe="iso128", twin=False), tmp_path / "losses.jsonl"
    path.write_text(curve(0, 0.01) + curve(1, 0.03) + alone)
    said = run("report", path, "--tail", 20)
    # Two seeds: a deviation of 1.414 %, and 12.706 of it over sqrt(2) to each side.
    assert "signed gap of the last 20 steps: +2.000 [-10.706, +14.706]" in said
    assert "20 steps before 30: +2.000" in run("report", path, "--tail", 20, "--until", 30)
    assert said.count("signed gap on held-out text: +5.000") == 2
    assert "seeds: 22.222 apart" in said
    assert "    seed 1: +2.000; loss 5.1000 in FP8, 5.0000" in said
    path.write_text(alone)
    assert "seed 1 has no full-precision run" in run("report", path)


def test_the_slope_lies_in_its_interval_as_often_as_it_says() -> None:
    """Under noise that wanders, where the textbook interval holds the slope in half of the cases."""
    rng, inside, slope = np.random.default_rng(5), 0, 2e-3
    for _ in range(100):
        noise = np.zeros(4000)
        for step in range(1, 4000):
            noise[step] = 0.99 * noise[step - 1] + 1e-3 * rng.standard_normal()
        gaps = slope * np.arange(4000) / 1000 + noise
        found = loss_curves.slope(2.0 * (1 + gaps), np.full(4000, 2.0))
        inside += found.low <= slope <= found.high
    assert 85 <= inside <= 100
