"""The picture of a run, drawn off screen: loss over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sonicmoe.plotting import new_figure, save_figure

from .metrics import StepRecord, smoothed
from .model_config import smoothing_window


def plot_loss(
    records: Sequence[StepRecord], path: Path, label: str, twin: str = "full precision"
) -> None:
    """Loss of the run and, where recorded, of its full-precision `twin`, with the difference of the
    smoothed curves below. PlotsUnavailableError without matplotlib.
    """
    steps = [record.step for record in records]
    losses = [record.loss for record in records]
    references = [
        record.full_precision_loss for record in records if record.full_precision_loss is not None
    ]
    compared = len(references) == len(records)
    # The gap has an axis of its own: on that of the losses it would be a flat line.
    ratios = [3, 1] if compared else [1]
    figure = new_figure((8, 6.5 if compared else 5))
    axes = figure.subplots(len(ratios), 1, sharex=True, squeeze=False, height_ratios=ratios)[:, 0]
    axes[0].plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    # Each mean stands in the middle of its steps. At the last of them the curve would lag.
    window, middles = smoothing_window(len(steps)), smoothed(steps)
    label = f"{label}, mean of {window} steps"
    axes[0].plot(middles, smoothed(losses), color="tab:blue", label=label)
    if compared:
        axes[0].plot(middles, smoothed(references), color="tab:orange", linestyle="--", label=twin)
        gap_percent = 100 * (smoothed(losses) / smoothed(references) - 1)
        axes[1].plot(middles, gap_percent, color="tab:red")
        axes[1].axhline(0, color="black", linewidth=0.6)
        axes[1].set_ylabel("smoothed gap, %")
    axes[0].set_ylabel("cross entropy, nats per byte")
    axes[0].set_title("Training loss")
    axes[0].legend()
    axes[-1].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
    save_figure(figure, path)
