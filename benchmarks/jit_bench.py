#!/usr/bin/env python3
"""Times of the compile cache on this machine: cold, warm, reload, reuse, and eight racing processes
against one.

    python benchmarks/jit_bench.py [--processes 8] [--repeat 3] [--json]

Builds the toolchain probe with the real nvcc (no GPU needed) in temporary cache directories.
Medians over `--repeat`.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
from start_together import start_together, with_package

ROWS = {
    "import_s": ("import", "import sonicmoe.jit: no framework, no compiler"),
    "key_s": ("key", "hash the sources, find nvcc and ask its version: once a process"),
    "cold_s": ("cold", "empty cache: build with nvcc, publish, verify"),
    "warm_s": ("warm", "new process, warm cache: find and verify the artefact"),
    "load_s": ("load", "open the shared object; imports tvm_ffi, and PyTorch where installed"),
    "reload_s": ("reload", "same process, new cache object: verify and open again"),
    "reuse_s": ("reuse", "same process, same cache object"),
}
REUSES = 1000


def child(root: Path) -> None:
    """Measure one process; says "ready" when imported, starts when told to on standard input."""
    started = time.perf_counter()
    from sonicmoe.jit import CompileCache
    from sonicmoe.jit.cuda_source import CudaSource

    marks = {"import_s": time.perf_counter() - started}

    def mark(name: str, since: float, calls: int = 1) -> float:
        marks[name] = (time.perf_counter() - since) / calls
        return time.perf_counter()

    probe = Path(__file__).with_name("toolchain_probe.cu")
    source = CudaSource.make("toolchain_probe", probe, arch="sm_90a")
    cache = CompileCache(root, root / "node-local")
    print("ready", flush=True)
    sys.stdin.readline()
    moment = time.perf_counter()
    key = source.key()
    moment = mark("key_s", moment)
    hit = cache.try_load(key) is not None
    artefact = cache.build(key, source.build_into)
    built_at = time.monotonic()  # one clock for all processes of the machine
    moment = mark("warm_s" if hit else "cold_s", moment)
    assert cache.get(key, source.build_into, source.load_artefact).threads() == 256
    moment = mark("load_s", moment)
    CompileCache(root, root / "node-local").get(key, source.build_into, source.load_artefact)
    moment = mark("reload_s", moment)
    for _ in range(REUSES):
        cache.get(key, source.build_into, source.load_artefact)
    mark("reuse_s", moment, REUSES)
    is_builder = artefact.manifest["built"]["pid"] == os.getpid()
    print(json.dumps({**marks, "built_at": built_at, "builder": is_builder}), flush=True)


def run_together(root: Path, processes: int) -> tuple[float, list[dict[str, Any]]]:
    """Seconds from a common start until all of `processes` children have the artefact, and what
    each measured.
    """
    command = [sys.executable, __file__, "--child", str(root)]
    started, results = start_together(processes * [command], with_package(os.environ))
    return max(result["built_at"] for result in results) - started, results


def measure(processes: int, repeat: int) -> dict[str, Any]:
    """Medians of all figures, in seconds."""
    singles: list[dict[str, Any]] = []
    alone, racing, builds = [], [], 0
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            seconds, results = run_together(Path(folder), 1)
            alone.append(seconds)
            singles += results
            singles += run_together(Path(folder), 1)[1]
        with tempfile.TemporaryDirectory() as folder:
            seconds, results = run_together(Path(folder), processes)
            racing.append(seconds)
            builds += sum(result["builder"] for result in results)
    figures: dict[str, Any] = {
        name: statistics.median(single[name] for single in singles if name in single)
        for name in ROWS
    }
    figures |= {
        "cpus": len(os.sched_getaffinity(0)),
        "processes": processes,
        "one_process_s": statistics.median(alone),
        "racing_processes_s": statistics.median(racing),
        "race_ratio": statistics.median(racing) / statistics.median(alone),
        "builds_per_race": builds / repeat,
    }
    return figures


def show(figures: dict[str, Any]) -> None:
    """Print the table."""
    one, racing = (
        f"{figures[f'{name}_s'] * 1e3:.0f}" for name in ("one_process", "racing_processes")
    )
    race = f"the same on one directory, {figures['cpus']} CPUs: {figures['race_ratio']:.2f} x one, "
    rows = [
        *((step, f"{figures[name] * 1e3:.3f}", text) for name, (step, text) in ROWS.items()),
        ("one", one, "cold start of one process, until it has the artefact"),
        (
            f"{figures['processes']} racing",
            racing,
            f"{race}{figures['builds_per_race']:g} build(s)",
        ),
    ]
    for step, ms, text in rows:  # no framework may be imported here: what loads it is measured
        click.echo(f"{step:10} {ms:>10} ms  {text}")


@click.command()
@click.option("--processes", type=click.IntRange(2), default=8, show_default=True, help="Racing processes.")  # fmt: skip
@click.option("--repeat", type=click.IntRange(1), default=3, show_default=True, help="Medians are shown.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
@click.option("--child", "child_root", type=click.Path(path_type=Path), hidden=True)
def main(processes: int, repeat: int, as_json: bool, child_root: Path | None) -> None:
    """Time the compile cache. Exit code 1 when a race built a kernel more than once."""
    if child_root is not None:
        child(child_root)
        return
    figures = measure(processes, repeat)
    if as_json:
        click.echo(json.dumps(figures, indent=2))
    else:
        show(figures)
    sys.exit(0 if figures["builds_per_race"] == 1 else 1)


if __name__ == "__main__":
    main()
