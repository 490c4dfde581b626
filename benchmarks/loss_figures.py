"""Tables and pictures of the runs that loss.py trained. Imports no framework."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from loss_runs import (
    APART,
    SCALE,
    Interval,
    Run,
    curves,
    gap,
    held_out_gap,
    parting,
    said,
    with_bases,
)
from readme_chart import PAGES, Page, paint_file

LAST = 500  # steps of a pair's end, a quarter of it at most
EARLY_STEPS = (0, 10), (10, 50), (50, 100), (100, 150), (150, 200)
WINDOW = 25  # steps that a point of a picture averages


def tables(runs: Sequence[Run]) -> Iterator[str]:
    """Lines of Markdown: signed gaps of branches by point and kind, then of pairs, then what differs
    in the first steps of pairs. Interval: Student's t, 95 %, over points and orders or over seeds.
    """
    of_branches = [run for run in runs if run.point]
    of_pairs = [run for run in runs if not run.point]
    for group in _groups(of_branches):
        yield from _branches(group)
    for group in _groups(of_pairs):
        yield from _pairs(group)


def _groups(runs: Sequence[Run]) -> Iterator[list[Run]]:
    """Runs of one task, trunk and number of steps."""
    keys = dict.fromkeys((run.task, run.trunk, len(run.losses)) for run in runs)
    for key in keys:
        yield [run for run in runs if (run.task, run.trunk, len(run.losses)) == key]


def _kinds(runs: Sequence[Run]) -> list[str]:
    return [kind for kind in dict.fromkeys(run.kind for run in runs) if kind != "bf16"]


def _title(runs: Sequence[Run], what: str) -> Iterator[str]:
    one = runs[0]
    gpus = ", ".join(sorted({run.gpu for run in runs}))
    yield f"\n{what}: {one.task}, {len(one.losses)} steps, on {gpus}"
    speeds = {
        kind: [r.seconds_per_step for r in runs if r.kind == kind and r.seconds_per_step]
        for kind in ("bf16", *_kinds(runs))
    }
    timed = [f"{k} {1e3 * np.median(seconds):.1f}" for k, seconds in speeds.items() if seconds]
    yield f"ms a step: {', '.join(timed) or 'not known, because the GPU was shared'}\n"


def _branches(runs: Sequence[Run]) -> Iterator[str]:
    yield from _title(runs, f"Branches of a trunk in {runs[0].trunk}")
    yield "| from step | kind | branches | signed gap, % | of the last fifth | held out |"
    yield "|---|---|---|---|---|---|"
    steps = len(runs[0].losses)
    points = sorted({run.point for run in runs})
    for name, chosen in (*((f"{p:,}", [p]) for p in points), ("**all**", points)):
        here = [run for run in runs if run.point in chosen]
        for kind in _kinds(runs):
            pairs = with_bases(here, kind)
            if pairs:
                figures = (
                    [gap(*pair) for pair in pairs],
                    [gap(*pair, steps - max(1, steps // 5)) for pair in pairs],
                    [held_out_gap(*pair, str(steps)) for pair in pairs],
                )
                yield f"| {name} | {kind} | {len(pairs)} | {' | '.join(map(said, figures))} |"


def _pairs(runs: Sequence[Run]) -> Iterator[str]:
    yield from _title(runs, "Pairs from the initial weights")
    evaluated = sorted({step for run in runs for step in run.held_out}, key=int)
    last = min(LAST, max(1, len(runs[0].losses) // 4))
    heads = ["kind", "seed", f"signed gap of the last {last} steps, %"]
    heads += [f"held out at {int(step):,}" for step in evaluated]
    yield f"| {' | '.join(heads)} |\n|{'---|' * len(heads)}"
    for kind in _kinds(runs):
        pairs = with_bases(runs, kind)
        rows = [
            [gap(*pair, -last), *(held_out_gap(*pair, step) for step in evaluated)]
            for pair in pairs
        ]
        for (run, _), row in zip(pairs, rows, strict=True):
            yield f"| {kind} | {run.seed} | {' | '.join(said([value]) for value in row)} |"
        if rows:
            means = [said([row[column] for row in rows]) for column in range(len(rows[0]))]
            yield f"| **{kind}** | {len(rows)} seeds | {' | '.join(means)} |"
    ends = [np.mean(run.losses[-last:]) / SCALE for run in runs if run.kind == "bf16"]
    apart = [2 * abs(a - b) / (a + b) for i, a in enumerate(ends) for b in ends[i + 1 :]]
    if apart:
        yield f"\ntwo BF16 runs of different seeds: {100 * np.mean(apart):.3f} % apart"
    yield from _early(runs)


def _early(runs: Sequence[Run]) -> Iterator[str]:
    """What differs in the first steps of a pair, and when its losses part."""
    pairs = [pair for kind in _kinds(runs) for pair in with_bases(runs, kind) if pair[0].norms]
    if not pairs:
        return
    yield (
        "\nThe run, and BF16's: the mean norm of the gradient; the tokens of the busiest and of the "
        "idlest expert of any layer, over the mean; and how many experts had less than a tenth of it"
    )
    yield "| kind, seed | steps | signed gap, % | norm | busiest | idlest | starved |"
    yield "|---|---|---|---|---|---|---|"
    for run, base in pairs:
        for first, last in EARLY_STEPS:
            if last <= len(run.norms):
                here = slice(first, last)
                figures = [
                    [f"{np.mean(one.norms[here]):.4g}" for one in (run, base)],
                    [f"{np.max(one.busiest[here]):.2f}" for one in (run, base)],
                    [f"{np.min(one.idlest[here]):.2f}" for one in (run, base)],
                    [f"{np.mean(one.starved[here]):.1f}" for one in (run, base)],
                ]
                yield (
                    f"| {run.kind}, {run.seed} | {first + 1} to {last} | "
                    f"{100 * gap(run, base, first, last):+.3f} | {' | '.join(map(', '.join, figures))} |"
                )
    yield f"\n| kind, seed | first step {APART:.1%} apart | on the side of its end from step |"
    yield "|---|---|---|"
    for run, base in pairs:
        apart, side = parting(run, base)
        yield f"| {run.kind}, {run.seed} | {apart or 'none'} | {side} |"


def branch_figures(runs: Sequence[Run]) -> dict[str, list[list[float]]]:
    """What the picture shows: kind -> mean, low and high of the gap in per cent, by window of steps,
    over all points and orders of the first task's branches from BF16.
    """
    group = next(_groups([run for run in runs if run.point and run.trunk == "bf16"]))
    found = {}
    for kind in ("fp8", "disturbed"):
        pairs = with_bases(group, kind)
        window = min(WINDOW, len(group[0].losses))
        bands = [Interval.of([float(v) for v in column]) for column in curves(pairs, window).T]
        found[kind] = [
            [round(100 * getattr(band, end), 4) for band in bands]
            for end in ("mean", "low", "high")
        ]
    return found


def paint_branches(figures: dict[str, list[list[float]]], axes: Any, page: Page) -> None:
    """Bands of the two kinds around BF16's line at zero."""
    names = {"fp8": ("FP8", page.fp8), "disturbed": ("BF16, weights disturbed by 1e-4", page.stock)}
    for kind, (label, colour) in names.items():
        mean, low, high = figures[kind]
        steps = WINDOW * (np.arange(len(mean)) + 0.5)
        axes.plot(steps, mean, color=colour, label=label)
        axes.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
    axes.axhline(0, color=page.ink, linewidth=0.8)
    axes.set_xlabel("steps behind the branch", fontsize=8)
    axes.set_ylabel("loss over BF16's, minus 1, %", fontsize=8)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def draw(runs: Sequence[Run], directory: Path) -> list[Path]:
    """The picture of the branches, for a light and for a dark page, with its figures in the file."""
    figures = branch_figures(runs)
    directory.mkdir(parents=True, exist_ok=True)
    paint = functools.partial(paint_branches, figures)
    return [
        paint_file(directory / f"loss_branches_{page.name}.png", page, paint, figures, 3.0)
        for page in PAGES
    ]
