"""GPU time of a launch, from CUDA events: of launches in a row, or of CUDA graphs that take turns.
The benchmarks here share it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

INPUTS = 4  # what rotates through a graph's calls


def median_us(launch: Callable[[], object], *, launches: int = 20, rest: float = 0.3) -> float:
    """Median microseconds of one of `launches` launches in a row, on a GPU that has rested for
    `rest` seconds.
    """
    for _ in range(3):
        launch()
    idle(rest)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(launches + 1)]
    marks[0].record()
    for mark in marks[1:]:
        launch()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks))


def idle(seconds: float) -> None:
    """Let the GPU finish and its clocks recover."""
    torch.cuda.synchronize()
    time.sleep(seconds)


def captured(call: Callable[[int], Any], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls; the call is warmed up on a side stream first, as capture demands."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for number in range(INPUTS):
            call(number)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(number % INPUTS)
    return graph


def interleaved_us(
    variants: dict[str, Callable[[int], Any]], calls: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """name -> (median, smallest) microseconds of GPU time per call."""
    graphs = {name: captured(call, calls) for name, call in variants.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(rounds + 2):
        for name, graph in graphs.items():
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            if number >= 2:
                times[name].append(start.elapsed_time(stop) * 1e3 / calls)
    return {name: (statistics.median(values), min(values)) for name, values in times.items()}


def host_us(call: Callable[[int], Any], calls: int = 200) -> float:
    """Microseconds of host time per call, while the GPU keeps up."""
    for number in range(20):
        call(number % INPUTS)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for number in range(calls):
        call(number % INPUTS)
    elapsed = time.perf_counter() - begin
    torch.cuda.synchronize()
    return elapsed * 1e6 / calls


def copy_tbps() -> float:
    """Bytes read and written per second by a large device copy, in TB/s; median of ten, the better
    of two ways to copy.
    """
    source = torch.randn(2**29, device="cuda")
    target, zero = torch.empty_like(source), torch.zeros((), device="cuda")
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = 0.0
    for copy in (lambda: target.copy_(source), lambda: torch.add(source, zero, out=target)):
        times = []
        for _ in range(13):
            start.record()
            copy()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
        best = max(best, 2 * source.numel() * 4 / statistics.median(times[3:]) / 1e9)
    return best
