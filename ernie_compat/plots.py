"""The two pictures of a run, drawn off screen: loss over steps, and expert load over steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sonicmoe.plotting import new_figure, save_figure

from .metrics import StepRecord, smoothed

MAX_LOAD_COLUMNS = 150


def plot_loss(
    records: Sequence[StepRecord], path: Path, label: str, twin: str = "full precision"
) -> None:
    """Loss of the run and, where recorded, of its full-precision `twin`, with the difference of the
    smoothed curves below.

    Raises:
        PlotsUnavailableError: matplotlib is missing.
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
    axes[0].plot(steps, smoothed(losses), color="tab:blue", label=label)
    if compared:
        axes[0].plot(steps, smoothed(references), color="tab:orange", linestyle="--", label=twin)
        gap_percent = 100 * (smoothed(losses) / smoothed(references) - 1)
        axes[1].plot(steps, gap_percent, color="tab:red")
        axes[1].axhline(0, color="black", linewidth=0.6)
        axes[1].set_ylabel("smoothed gap, %")
    axes[0].set_ylabel("cross entropy, nats per byte")
    axes[0].set_title("Training loss")
    axes[0].legend()
    axes[-1].set_xlabel("step")
    for axis in axes:
        axis.grid(alpha=0.3)
    save_figure(figure, path)


def plot_expert_load(records: Sequence[StepRecord], path: Path) -> None:
    """One heat map per MoE layer: share of routed slots per expert, relative to a balanced share,
    over steps.

    Raises:
        PlotsUnavailableError: matplotlib is missing.
    """
    # A picture has fewer columns than a long run has steps.
    load = binned([record.expert_load for record in records], MAX_LOAD_COLUMNS)
    _, layers, experts = load.shape
    figure = new_figure((8, 1.2 + 1.8 * layers))
    axes = figure.subplots(layers, 1, sharex=True, squeeze=False)[:, 0]
    first, last = records[0].step - 0.5, records[-1].step + 0.5
    for layer, axis in enumerate(axes):
        image = axis.imshow(
            load[:, layer].T * experts,
            aspect="auto", origin="lower", cmap="viridis", vmin=0, vmax=max(2.0, float(load.max()) * experts),
            extent=(first, last, -0.5, experts - 0.5), interpolation="nearest",
        )  # fmt: skip
        axis.set_ylabel(f"MoE layer {layer}\nexpert")
    axes[0].set_title("Expert load (1 = balanced)")
    axes[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(axes))
    save_figure(figure, path)


def binned(rows: Sequence[Any], max_columns: int) -> np.ndarray:
    """Means over consecutive steps, so that at most `max_columns` remain: `[N, ...]` -> `[min(N,
    max_columns), ...]`.
    """
    values = np.asarray(rows, dtype=np.float64)
    return np.stack(
        [part.mean(axis=0) for part in np.array_split(values, min(len(values), max_columns))]
    )
