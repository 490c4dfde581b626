"""A bisect report as a table and as text. Imports no framework."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from .stage_stats import StageStats

if TYPE_CHECKING:
    from .bisect import BisectReport

WIDTH = 100
# What to do about inputs that other modules made.
_OUTSIDE = {
    "x": "it came from before the experts: look for the first module whose output is not finite; where a gradient "
    "was bad first, torch.autograd.detect_anomaly() names the line of its forward (PyTorch)",
    "dout": "it came from outside the experts, from the side of the loss: torch.autograd.detect_anomaly() names the line "
    "of the forward whose backward returned it first (PyTorch)",
    "probs": "they came from before the experts: look at the router, its weights and its logits",
}


def stage_table(report: BisectReport) -> Table:
    """One row per stage in the order in which they run; the first wrong one stands out."""
    columns = (
        "stage", "total", "finite", "NaN", "inf", "first\nbad", "min", "max", "satu-\nrated",
        "under-\nflow", "cosine\nto fp64", "rel.\nRMSE",
    )  # fmt: skip
    layer = f" of {report.layer}" if report.layer else ""
    title = f"{report.step}{layer} on engine {report.engine}"
    table = Table(*columns, title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name, stats in report.stats.items():
        first = report.fault is not None and name == report.fault.stage
        # Red is the cause, yellow are stages that it has spread to.
        spread = name in report.wrong and not first
        table.add_row(
            name + (" <- first bad" if first else ""),
            *cells(stats),
            style="bold red" if first else "yellow" if spread else None,
        )
    return table


def cells(stats: StageStats) -> list[str]:
    """One stage's figures."""
    return [
        f"{stats.total:,}",
        f"{stats.finite:,}",
        f"{stats.nan:,}",
        f"{stats.inf:,}",
        # A dash where there is nothing to tell: no bad element, no codes, nothing to compare with.
        "–" if stats.first_bad is None else str(list(stats.first_bad)),
        _figure(stats.low, ".3g"),
        _figure(stats.high, ".3g"),
        "–" if stats.saturation is None else f"{stats.saturation:.2%}",
        "–" if stats.underflow is None else f"{stats.underflow:.2%}",
        _figure(stats.cosine, ".5f"),
        "–" if math.isnan(stats.rmse) else f"{stats.rmse:.2%}",
    ]


def verdict(report: BisectReport) -> list[str]:
    """The lines to read before the table: cause, spread, and stages that were not shown."""
    lines = []
    # The cause first: whoever reads one line only must read that one.
    if report.fault is not None:
        lines.append(str(report.fault))
        if report.fault.stage in _OUTSIDE:
            lines.append(_OUTSIDE[report.fault.stage])
        spread = [name for name in report.wrong if name != report.fault.stage]
        if spread:
            lines.append(f"wrong after it: {', '.join(spread)}")
    if report.error is not None:
        lines.append(f"the engine raised: {report.error}")
    if report.healthy:
        lines.append("every stage shown is as it should be")
    lines += [f"harmless unless a GEMM reads padding: {text}" for text in report.padding]
    if report.missing:
        lines.append(f"not shown by this engine: {', '.join(report.missing)}")
    return lines


def text_of(report: BisectReport) -> str:
    """Verdict and table, without colours."""
    # A fixed width: an exception's text must not be folded to the terminal of the process that
    # raised it.
    console = Console(file=io.StringIO(), width=WIDTH, highlight=False, no_color=True)
    console.print(stage_table(report))
    assert isinstance(console.file, io.StringIO)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join([*verdict(report), *lines])


def _figure(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)
