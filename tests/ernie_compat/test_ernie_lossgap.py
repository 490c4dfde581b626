"""Loss gaps over seeds: read from real runs, averaged with an interval, drawn; and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from small_run import run_config, write_text

from ernie_compat.corpus import load_corpus
from ernie_compat.gap_runs import Interval, LossGapError, read_run
from ernie_compat.lossgap import lossgap
from ernie_compat.metrics import loss_gap
from ernie_compat.trainer import Trainer


def train(directory, seed, compare=True, precision="fp8"):
    text = write_text(directory.parent / "text")
    config = run_config(precision=precision, compare=compare, train={"steps": 5, "seed": seed})
    trainer = Trainer.start(config, load_corpus([text]), directory)
    trainer.train()
    (directory / "summary.json").write_text(json.dumps(trainer.summary()))
    return trainer


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return {seed: (root / f"seed{seed}", train(root / f"seed{seed}", seed)) for seed in (0, 1, 2)}


def test_a_run_is_read_as_its_summary_says(runs):
    directory, trainer = runs[1]
    run = read_run(directory)
    assert run.seed == 1 and run.steps == 5
    assert run.gap == pytest.approx(trainer.summary()["loss_gap"])
    references = [record.full_precision_loss for record in trainer.records]
    assert run.gap == loss_gap([record.loss for record in trainer.records], references)
    assert abs(run.signed_gap) <= run.gap + 1e-12
    assert len(run.curve) == 5
    assert run.held_out_gap == pytest.approx(
        trainer.summary()["held_out_loss"] / trainer.summary()["held_out_loss_full_precision"] - 1
    )


def test_interval_is_students():
    found = Interval.of([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.776 * math.sqrt(2.5) / math.sqrt(5)
    assert (found.mean, found.low, found.high) == pytest.approx((3, 3 - half, 3 + half))
    assert found.deviation == pytest.approx(math.sqrt(2.5))
    assert math.isnan(Interval.of([7.0]).low) and math.isnan(Interval.of([7.0]).deviation)
    assert Interval.of([0.0, 0.001, 0.1], least=0.0).low == 0
    many = Interval.of([float(i % 2) for i in range(100)])
    assert many.high - many.mean == pytest.approx(1.96 * 0.5025 / 10, rel=1e-3)


def test_what_is_no_compared_run_is_refused(tmp_path):
    with pytest.raises(LossGapError, match=r"summary\.json is missing"):
        read_run(tmp_path)
    train(tmp_path / "alone", 0, compare=False)
    with pytest.raises(LossGapError, match="without --compare"):
        read_run(tmp_path / "alone")
    result = CliRunner().invoke(lossgap, [str(tmp_path / "alone")])
    assert result.exit_code == 2 and "without --compare" in result.output


def test_command(runs, tmp_path):
    directories = [str(directory) for directory, _ in runs.values()]
    result = CliRunner().invoke(lossgap, [*directories, "--plot", str(tmp_path / "gap.png")])
    assert result.exit_code == 0, result.output
    assert (
        "fp8 on torch, engine auto, 5 steps" in result.output
        and (tmp_path / "gap.png").stat().st_size > 10_000
    )
    markdown = CliRunner().invoke(lossgap, directories).output
    assert "its standard deviation" in markdown
    data = json.loads(CliRunner().invoke(lossgap, [*directories[:1], "--json"]).stdout)
    assert data["summaries"][0]["gap"]["low"] is None and data["runs"][0]["seed"] == 0
    assert data["summaries"][0]["signed_gap"]["deviation"] is None
    gaps = [read_run(directory).signed_gap for directory, _ in runs.values()]
    assert f"| {100 * np.std(gaps, ddof=1):.3f} |" in markdown
    assert "| run |" in markdown
