"""The figures of a run, and its metrics file."""

from __future__ import annotations

import json

import pytest

from ernie_compat.metrics import (
    MetricsError,
    StepRecord,
    append_metrics,
    begin_metrics,
    loss_gap,
    read_metrics,
    smoothed,
)
from ernie_compat.model_config import smoothing_window


def record(step, loss=3.0, reference=None):
    load = [[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]]
    return StepRecord(step, loss, 1.0, 2.0, 0.5, 1e-3, 1000.0, 0.1, load, reference)


def test_short_runs_are_smoothed_over_a_quarter():
    windows = {1: 1, 7: 1, 8: 2, 20: 5, 99: 24, 100: 25, 10_000: 25}
    assert {steps: smoothing_window(steps) for steps in windows} == windows
    assert smoothed([*(15 * [9.0]), *(5 * [1.0])])[-1] == 1, "of the last five, not of all"


def test_loss_gap_is_the_mean_relative_difference_of_the_tail():
    reference = [2.0] * 8
    assert loss_gap(reference, reference) == 0
    # Means of two steps at the last two: 5.51 and 1.99.
    found = loss_gap([9.0] * 6 + [2.02, 1.96], reference)
    assert found == pytest.approx((5.51 / 2 - 1 + 0.005) / 2)
    assert loss_gap([1.8] * 8, reference) == pytest.approx(0.1)  # better is a gap too
    with pytest.raises(ValueError, match="3 and 8 steps"):
        loss_gap([1.0] * 3, reference)


def test_metrics_file_round_trip_and_restart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    records = [record(step, reference=2.5) for step in (1, 2, 3)]
    for item in records:
        append_metrics(path, item)
    assert read_metrics(path) == records
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]
    begin_metrics(path, read_metrics(path, up_to_step=2))
    append_metrics(path, record(3, loss=9.0))
    assert [(item.step, item.loss) for item in read_metrics(path)] == [(1, 3.0), (2, 3.0), (3, 9.0)]


def test_a_cut_last_line_is_ignored_and_a_broken_earlier_one_is_not(tmp_path):
    path = tmp_path / "metrics.jsonl"
    begin_metrics(path, [record(1), record(2)])
    whole = path.read_text()
    path.write_text(whole[:-40])
    assert [item.step for item in read_metrics(path)] == [1]
    for content, words in ((f"{{}}\n{whole}".encode(), "line 1"), (b"\xff\xfe", "cannot read")):
        path.write_bytes(content)
        with pytest.raises(MetricsError, match=words):
            read_metrics(path)


def test_the_load_of_the_busiest_expert():
    assert record(1).load_imbalance == pytest.approx((1.5 + 1.8) / 2)
