"""Losses of runs in one file, and the gaps, spreads and slopes that are read off it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import loss_curves
import numpy as np
import pytest
from click.testing import CliRunner

from ernie_compat.train_command import train
from sonicmoe.plotting import require_matplotlib


def run(*arguments: object) -> str:
    result = CliRunner().invoke(loss_curves.main, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def curve(seed: int, gap: float, recipe: str = "dx256", twin: bool = True) -> loss_curves.Curve:
    full = [4.0 + seed] * 40
    losses = [loss * (1 + gap) for loss in full]
    return loss_curves.Curve(
        "tiny",
        "a text",
        recipe,
        seed,
        "CPU",
        losses,
        full if twin else None,
        [2.1, 2.0 if twin else None],
    )


def test_a_run_is_gathered_once_and_reported(tmp_path: Path) -> None:
    (text := tmp_path / "text").write_text("experts learn what the others leave\n" * 300)
    words = "--framework torch --engine reference --compare --no-checkpoint --steps 4 --batch 2 --seq-len 16"
    sizes = "--hidden 32 --intermediate 32 --experts 4 --topk 2 --layers 2 --heads 2"
    out, path = tmp_path / "run", tmp_path / "data" / "losses.jsonl"
    trained = [*f"{words} {sizes}".split(), "--data", str(text), "--out", str(out)]
    assert CliRunner().invoke(train, trained).exit_code == 0
    for _ in range(2):
        assert "1 runs" in run("gather", out, "--to", path)
    (found,) = loss_curves.read_curves(path)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for name, losses in (("loss", found.fp8), ("full_precision_loss", found.full)):
        assert losses == pytest.approx([record[name] for record in records], abs=1e-5)
    require_matplotlib()
    assert "signed gap of the last 2 steps" in run(
        "report", path, "--tail", 2, "--plot", tmp_path / "p.png"
    )
    assert (tmp_path / "p.png").stat().st_size


def test_seeds_have_an_interval_and_a_run_alone_finds_its_twin(tmp_path: Path) -> None:
    curves = [curve(0, 0.01), curve(1, 0.03), curve(1, 0.02, recipe="row128-dx256", twin=False)]
    path = tmp_path / "losses.jsonl"
    path.write_text("".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in curves))
    said = run("report", path, "--tail", 20)
    # Two seeds: a deviation of 1.414 %, and 12.706 of it over sqrt(2) to each side.
    assert "signed gap of the last 20 steps: +2.000 [-10.706, +14.706]" in said
    assert (
        "seeds: 22.222 apart" in said and "    seed 1: +2.000; loss 5.1000 in FP8, 5.0000" in said
    )
    path.write_text(json.dumps(dataclasses.asdict(curves[2])) + "\n")
    result = CliRunner().invoke(loss_curves.main, ["report", str(path)])
    assert "seed 1 has no full-precision run" in result.output and result.exit_code == 1


@pytest.mark.parametrize("per_thousand", [0.0, 2e-3])
def test_the_slope_lies_in_its_interval_as_often_as_it_says(per_thousand: float) -> None:
    """Under noise that wanders, where the textbook interval holds the slope in half of the cases."""
    rng, inside = np.random.default_rng(5), 0
    for _ in range(100):
        noise = np.zeros(4000)
        for step in range(1, 4000):
            noise[step] = 0.99 * noise[step - 1] + 1e-3 * rng.standard_normal()
        gaps = per_thousand * np.arange(4000) / 1000 + noise
        found = loss_curves.slope(2.0 * (1 + gaps), np.full(4000, 2.0))
        inside += found.low <= per_thousand <= found.high
    assert 85 <= inside <= 100
    assert math.isfinite(found.deviation)
