#!/usr/bin/env python3
"""What a layer of your model gains: the experts of real models as transformers' own modules, with
stock `grouped_mm`, with the same under `torch.compile`, and with this engine in BF16 and in FP8. One
layer, forward and backward, bf16 `.grad`.

    benchmarks/experts_bench.py                                  # one Hopper GPU, all sixteen rows
    benchmarks/experts_bench.py --only Qwen3-30B --mode kept4    # some of it
    benchmarks/experts_bench.py --json a.json; benchmarks/experts_bench.py --show a.json   # tables again
    benchmarks/experts_bench.py --quick                          # tiny, on a CPU: is the program right?

| mode | what happens |
|---|---|
| new | weights are written before every call, as without accumulation |
| kept4, kept8 | weights are written before every fourth or eighth call, as under accumulation; `.grad` is written by every call |
| frozen | weights get no gradients: forward, and backward to tokens and probabilities |
| forward | forward alone, without gradients |

| figure | what |
|---|---|
| wall | microseconds of a call, in rows of eight behind untimed calls: median of rounds, taken in turns |
| host | microseconds until the host had launched one of five calls that follow a synchronisation, median |
| busy | microseconds of a call in which the GPU ran anything, from the profiler, behind untimed calls |
| peak | MiB of a call above what lies there before it: weights, and in FP8 their codes |
| error | relative RMSE against fp32, the largest of output, dx and weight gradients |

Each round repeats the burst of `host` ten times in a row, because a training step runs the same
code for every layer. The first burst of a round does not count.

A turn begins with untimed calls, one for every call that shares its weights with the first. All
contestants share one set of weights, and BF16 drops the codes that FP8 keeps of it, so the first FP8
call of a turn takes memory for the codes and quantises anew. That takes milliseconds of the host. A
user who stays with one implementation does not pay for it.

`six` are torch's six bare grouped_mm of a layer, on rows that are gathered already. `node` is
SonicMoEMlpNode in FP8, which adds weight gradients to fp32 `main_grad`; three rows have it. An EP8
row is one rank's share under expert parallelism of 8: of 32,768 tokens of all ranks those that chose
an expert of this rank, with the ids of other ranks as sentinels.
"""

from __future__ import annotations

import gc
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import timing
import torch
from model_experts import ROWS, Experts, Row, errors_of, tiny
from timing import Way, cell, markdown

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.integrations.transformers import register

MODES = ("new", "kept4", "kept8", "frozen", "forward")
CALLS_OF_WEIGHTS = {"new": 1, "kept4": 4, "kept8": 8}  # of the modes that train them
WITH_NODE = ("Qwen3-30B-A3B", "ERNIE-4.5-21B-A3B", "Qwen3-Next-80B")
HOST_BURSTS = 10  # in a round
Module = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def way_of(experts: Experts, module: Module, mode: str) -> Way:
    """One implementation in one mode. Its untimed calls are a whole cycle of writes, so that the calls
    behind them have as many writes as without them.
    """
    cycle = CALLS_OF_WEIGHTS.get(mode, 1)
    writes = itertools.cycle(number == 0 for number in range(cycle))

    def call() -> None:
        if mode in CALLS_OF_WEIGHTS and next(writes):
            experts.write_weights()
        if mode == "forward":
            with torch.no_grad():
                module(experts.x, experts.ids, experts.probs)
            return
        experts.clear()
        module(experts.x, experts.ids, experts.probs).backward(experts.dout)

    def settle() -> None:
        for _ in range(cycle):
            call()

    return Way(call, settle, experts.clear)


def modules_of(experts: Experts) -> dict[str, Module]:
    """Every implementation that computes these experts as its name says."""
    stock = experts.module("grouped_mm")
    return {
        "stock": stock,
        "compiled": torch.compile(stock, backend=timing.backend_of(experts.device)),
        "bf16": experts.module("sonicmoe"),
        "fp8": experts.module("sonicmoe_fp8"),
    }


def node_of(experts: Experts) -> Module:
    """The node in FP8 on weights of its own, in its layout, with fp32 `main_grad`."""
    row = experts.row
    shapes = ((row.experts, row.hidden, 2 * row.inner), (row.experts, row.inner, row.hidden))
    weights = []
    for shape in shapes:
        values = torch.randn(shape, device=experts.device, dtype=torch.bfloat16)
        weight = torch.nn.Parameter(values.mul_(row.hidden**-0.5))
        weight.main_grad = torch.zeros(shape, device=experts.device)  # type: ignore[attr-defined]
        weights.append(weight)
    node = SonicMoEMlpNode.from_fused(*weights, config=SonicMoEConfig(fp8_mode="perf"))

    def call(x: torch.Tensor, ids: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        return node(x, None, ids, probs)

    experts.weights.update(node_up=weights[0], node_down=weights[1])
    return call


def six_products(experts: Experts) -> Callable[[], object]:
    """The six grouped_mm of a layer, on rows that are gathered and activated already."""
    row, device = experts.row, experts.device
    local = experts.ids[experts.ids < row.local_experts]
    counts = torch.bincount(local, minlength=row.local_experts)
    offsets = counts.cumsum(0).to(torch.int32)
    total = local.numel()

    def rows(width: int) -> torch.Tensor:
        return torch.randn(total, width, device=device, dtype=torch.bfloat16)

    x, dz, y1, dout = rows(row.hidden), rows(2 * row.inner), rows(row.inner), rows(row.hidden)
    up, down = (experts.weights[name].detach() for name in ("gate_up_proj", "down_proj"))
    if experts.module("grouped_mm").is_transposed:  # [E, H, 2I] and [E, I, H]
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    product = torch._grouped_mm

    def call() -> None:
        product(x, up.transpose(1, 2), offsets)
        product(y1, down.transpose(1, 2), offsets)
        product(dout, down, offsets)
        product(dz, up, offsets)
        product(dz.T, x, offsets)
        product(dout.T, y1, offsets)

    return call


def measure_mode(
    experts: Experts, modules: dict[str, Module], mode: str, rounds: int
) -> dict[str, dict[str, float]]:
    """Figures of every implementation that fits into memory."""
    trained = mode in CALLS_OF_WEIGHTS
    experts.train_weights(trained)
    ways = {
        name: way_of(experts, module, mode)
        for name, module in modules.items()
        if name != "node" or trained
    }
    # A CPU only checks the program.
    found = timing.measured(
        ways, experts.device, rounds, 2 if experts.device == "cpu" else HOST_BURSTS
    )
    experts.clear()
    return found


def measure(row: Row, modes: tuple[str, ...], rounds: int, device: str) -> dict[str, Any]:
    """All figures of a row."""
    experts = Experts(row, device)
    modules = modules_of(experts)
    experts.train_weights(True)
    errors = errors_of(experts, modules)
    six = timing.busy_us(six_products(experts), device, timing.CALLS)
    if row.model in WITH_NODE:
        modules["node"] = node_of(experts)
    figures = {}
    for mode in modes:
        begin = time.perf_counter()
        figures[mode] = measure_mode(experts, modules, mode, rounds)
        click.echo(f"  {mode}: {time.perf_counter() - begin:.0f} s", err=True)
    return {"row": row._asdict(), "six": six, "errors": errors, **figures}


def table(figures: list[dict[str, Any]], mode: str, figure: str) -> str:
    """A row per model, a column per implementation, ratios to compiled stock for times."""
    names = ("stock", "compiled", "bf16", "fp8", "node")
    rows = []
    for each in figures:
        found = {name: each[mode].get(name, {}).get(figure) for name in names}
        base = found["compiled"] if figure in ("wall", "busy") else None
        gains = (f" ({base / us:.2f}x)" if base and us else "" for us in found.values())
        cells = (f"{cell(us)}{gain}" for us, gain in zip(found.values(), gains, strict=True))
        rows.append((Row(**each["row"]).title, *cells, cell(each["six"])))
    return markdown((f"{mode}: {figure}", *names, "six"), rows)


def gains(figures: list[dict[str, Any]]) -> str:
    """Wall time of compiled stock with new weights, and how many times as fast as compiled stock in
    the same mode this package is; peaks in MiB of compiled stock, BF16 and FP8.
    """
    columns = [("bf16", "new"), *(("fp8", mode) for mode in MODES)]
    heads = (f"{name.upper()}, {mode}" for name, mode in columns)
    rows = []
    for each in figures:
        walls = [_ratio(each.get(mode, {}), name) for name, mode in columns]
        peaks = [each["new"].get(name, {}).get("peak") for name in ("compiled", "bf16", "fp8")]
        base = each["new"]["compiled"]["wall"]
        rows.append((Row(**each["row"]).title, cell(base), *walls, " / ".join(map(cell, peaks))))
    return markdown(("experts", "compiled stock, us", *heads, "peak MiB"), rows)


def _ratio(found: dict[str, dict[str, float]], name: str) -> str:
    if not {"compiled", name} <= set(found):
        return "–"
    return f"{found['compiled']['wall'] / found[name]['wall']:.2f}x"


def error_table(figures: list[dict[str, Any]]) -> str:
    """The largest error of every implementation, in per cent."""
    names = ("stock", "compiled", "bf16", "fp8")
    rows = []
    for each in figures:
        found = (each["errors"].get(name) for name in names)
        cells = (cell(errors and 100 * max(errors.values()), ".2f") for errors in found)
        rows.append((Row(**each["row"]).title, *cells))
    return markdown(("error in %", *names), rows)


@click.command(help=__doc__)
@click.option("--only", multiple=True, help="Rows whose title contains one of these.")
@click.option("--mode", "modes", multiple=True, type=click.Choice(MODES), default=MODES)
@timing.rounds_option()
@timing.quick_option
@timing.json_option
@click.option(
    "--show", multiple=True, type=click.Path(path_type=Path), help="Print such files only."
)
def main(
    only: tuple[str, ...], modes: tuple[str, ...], rounds: int, quick: bool, json_file: Path | None,
    show: tuple[Path, ...],
) -> None:  # fmt: skip
    """Measure row by row, and print."""
    if show:
        print_tables([row for file in show for row in json.loads(file.read_text())["rows"]])
        return
    device = timing.device_of(quick)
    register()
    every: list[dict[str, Any]] = []
    for row in ROWS:
        if only and not any(part in row.title for part in only):
            continue
        click.echo(row.title, err=True)
        every.append(measure(tiny(row) if quick else row, modes, rounds, device))
        timing.write_figures(json_file, rows=every)  # after every row: a later one may not fit
        torch._dynamo.reset()
        gc.collect()
        if not quick:
            torch.cuda.empty_cache()
    print_tables(every)


def print_tables(figures: list[dict[str, Any]]) -> None:
    """Every table that these figures are enough for."""
    found = [mode for mode in MODES if all(mode in each for each in figures)]
    for mode in found:
        for figure in ("wall", "busy", "host", "peak"):
            click.echo("\n" + table(figures, mode, figure))
    if "new" in found:
        click.echo("\n" + gains(figures))
    click.echo("\n" + error_table(figures))


if __name__ == "__main__":
    main()
