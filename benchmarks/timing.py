"""What the benchmarks here share: the GPU that they need, ways that take turns, tables and files of
figures. `sonicmoe.bench.timing` has the clocks below them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # this tree's package, for all of them

import torch

from sonicmoe.bench.runner import machine
from sonicmoe.bench.timing import busy_us, in_turns, peak_mib, trace_of, wait, wall_us
from sonicmoe.bench.trace import covered_us, kernels_of, short_name, total_us

MIB, GIB = 1 << 20, 1 << 30
CALLS, WARM_UPS = 8, 3  # a round has a whole number of writes of the weights, up to one in eight
HOST_CALLS = 5  # more could fill the launch queue, and the host would wait

quick_option = click.option("--quick", is_flag=True, help="Tiny sizes on a CPU: is it right?")
json_option = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write all figures too."
)


def rounds_option(default: int = 5) -> Callable[..., Any]:
    """`--rounds`, of all ways in turns."""
    return click.option("--rounds", type=click.IntRange(1), default=default, show_default=True)


def device_of(quick: bool) -> str:
    """ "cpu" with `--quick`, else "cuda"; ends the program where there is no GPU."""
    if not quick and not torch.cuda.is_available():
        raise click.ClickException("this needs an NVIDIA Hopper GPU, or --quick")
    return "cpu" if quick else "cuda"


def backend_of(device: str | torch.device) -> str:
    """What `torch.compile` generates: a CPU checks the program, and generates no code for it."""
    return "aot_eager" if str(device) == "cpu" else "inductor"


@dataclass(frozen=True)
class Way:
    """One way to compute something. call: what is timed. settle: what runs untimed before each turn,
    because another way may have dropped what this one keeps. clear: drops gradients.
    """

    call: Callable[[], object]
    settle: Callable[[], object]
    clear: Callable[[], object]


def measured(
    ways: Mapping[str, Way], device: str, rounds: int, bursts: int = 0
) -> dict[str, dict[str, float]]:
    """By way: `wall`, microseconds of a call, in rows of eight, median of rounds in turns; `busy`,
    those in which the GPU ran anything; `peak`, MiB of a call; with `bursts`, `host`, microseconds
    until the host had launched one of five calls behind a wait, so often in a round, the first burst
    left out. A way that does not fit into memory is left out.
    """

    def warm_up(way: Way) -> None:
        way.settle()
        for _ in range(WARM_UPS - 1):
            way.call()

    def turn(way: Way) -> tuple[float, list[float]]:
        way.settle()
        wall = wall_us(way.call, device, CALLS)
        return wall, [host_us(way.call, device) for _ in range(bursts)][1:]

    fitting = {name: ways[name] for name in in_turns(ways, 1, warm_up)}
    found: dict[str, dict[str, float]] = {}
    for name, turns in in_turns(fitting, rounds, turn).items():
        way, hosts = ways[name], [host for _, burst in turns for host in burst]
        found[name] = {"wall": statistics.median(wall for wall, _ in turns)}
        if hosts:
            found[name]["host"] = statistics.median(hosts)
        way.settle()
        found[name]["busy"] = busy_us(way.call, device, CALLS)
        way.settle()
        way.clear()
        found[name]["peak"] = peak_mib(way.call, device)
    return found


def traced(call: Callable[[], object], device: str | torch.device, calls: int) -> dict[str, Any]:
    """idle: ms of a call without a kernel; kernels: us of a call by kernel. Empty on a CPU, and where
    nobody may profile.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(calls):
            call()
        wait(device)
    kernels = kernels_of(trace_of(profiler))
    if not kernels:
        return {}
    span = max(k.start + k.us for k in kernels) - kernels[0].start
    named: dict[str, float] = {}
    for name, us in total_us(kernels, "name", calls).items():
        named[short_name(name)] = named.get(short_name(name), 0.0) + us
    return {"idle": (span - covered_us(kernels)) / calls / 1e3, "kernels": named}


def host_us(call: Callable[[], object], device: str) -> float:
    """Microseconds of the host for one of `HOST_CALLS` calls behind a wait."""
    wait(device)
    began = time.perf_counter()
    for _ in range(HOST_CALLS):
        call()
    return 1e6 * (time.perf_counter() - began) / HOST_CALLS


def markdown(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [heads, *rows]
    head, *body = (f"| {' | '.join(map(str, line))} |" for line in lines)
    return "\n".join([head, "|" + "---|" * len(heads), *body])


def cell(value: float | None, form: str = ".0f") -> str:
    """A number of a table, or a dash where there is none."""
    return "–" if value is None else format(value, form)


def write_figures(file: Path | None, **figures: Any) -> None:
    """The figures and the machine as JSON, where a file is asked for."""
    if file is not None:
        every = {"machine": machine(), **figures}
        file.write_text(json.dumps(every, indent=2) + "\n", encoding="utf-8")
