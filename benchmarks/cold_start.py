#!/usr/bin/env python3
"""How long a first step takes while kernels are compiled: one process, both engines, all ranks of a
host at once, and a warm start.

    python benchmarks/cold_start.py [--ranks 8] [--E 8 --H 3072 --I 1536]

Every figure begins with an empty temporary cache directory. A step is forward, backward and
gradients of the node, in a process that has imported the framework and made its weights; its time
ends when the GPU is done. Without a GPU the kernels are compiled and no step runs: seconds then
count until the cache holds everything. Ranks share the visible GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from start_together import REPOSITORY, start_together, with_package

sys.path.insert(0, str(REPOSITORY))
TOKENS, TOPK = 4096, 2
ARCH_WITHOUT_GPU = "sm_90a"


def child(sizes: tuple[int, int, int], precision: str, rank: int) -> None:
    """One rank: prepares its step, says "ready", takes the step when told to on standard input."""
    step = prepared_step(sizes, precision, rank)
    print("ready", flush=True)
    sys.stdin.readline()
    started = time.monotonic()
    step()
    # One clock for all processes of the machine.
    ended = time.monotonic()
    print(json.dumps({"seconds": ended - started, "ended": ended}), flush=True)


def prepared_step(sizes: tuple[int, int, int], precision: str, rank: int) -> Callable[[], None]:
    """A step of the node on this rank's GPU; without one, what its first forward compiles."""
    import torch

    from sonicmoe import SonicMoEConfig

    config = SonicMoEConfig(fp8_mode="perf" if precision == "fp8" else "off")
    if not torch.cuda.is_available():
        return lambda: compile_only(sizes, config)
    from sonicmoe.ernie_compat import SonicMoEMlpNode

    experts, hidden, inner = sizes
    device = f"cuda:{rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    shapes = ((experts, hidden, 2 * inner), (experts, inner, hidden))
    weights = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes]
    node = SonicMoEMlpNode.from_fused(*weights, config=config)
    x = torch.randn(TOKENS, hidden, dtype=torch.bfloat16, device=device, requires_grad=True)
    scores = torch.rand(TOKENS, experts, device=device)
    probs, indices = torch.topk(scores, min(TOPK, experts))
    torch.cuda.synchronize()

    def step() -> None:
        node(x, None, indices, probs).float().square().mean().backward()
        node.step()
        torch.cuda.synchronize()

    return step


def compile_only(sizes: tuple[int, int, int], config: Any) -> None:
    """The compiles of a first forward."""
    from sonicmoe.engine.capabilities import RECORDS
    from sonicmoe.engine.cold_start import compile_missing
    from sonicmoe.engine.settings import EngineSettings, Workload
    from sonicmoe.enums import ActivationType, EngineName

    resolved = config.resolve()
    settings = EngineSettings.from_config(resolved, ActivationType.SWIGLU, ())
    name = EngineName.HOPPER if resolved.fp8 else EngineName.BF16
    workload = Workload(settings, sizes[1], sizes[2])
    compile_missing(RECORDS[name], workload, ARCH_WITHOUT_GPU, resolved)


def first_step(
    cache: Path, sizes: tuple[int, int, int], precision: str, ranks: int = 1
) -> dict[str, float]:
    """Seconds of a first step of `ranks` processes that start together: of the slowest, and until
    the last one is done.
    """
    options = [*map(str, sizes), precision]
    child = [sys.executable, __file__, "--child", *options]
    started, results = start_together(
        [[*child, str(rank)] for rank in range(ranks)], environment(cache)
    )
    return {
        "slowest": max(result["seconds"] for result in results),
        "all": max(result["ended"] for result in results) - started,
    }


def warm_up_both(cache: Path, sizes: tuple[int, int, int]) -> float:
    """Seconds of `sonicmoe warmup` for both precisions, its start included."""
    options = [f"--{name}={size}" for name, size in zip("EHI", sizes, strict=True)]
    started = time.monotonic()
    subprocess.run(
        [sys.executable, "-m", "sonicmoe", "warmup", *options],
        env=environment(cache),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return time.monotonic() - started


def environment(cache: Path) -> dict[str, str]:
    """This process's, with the cache directories of a measurement."""
    return with_package(os.environ) | {
        "SONIC_MOE_CACHE_DIR": str(cache / "cache"),
        "SONIC_MOE_LOCAL_CACHE_DIR": str(cache / "local"),
    }


def measure(sizes: tuple[int, int, int], ranks: int, show: Callable[[str, float], None]) -> None:
    """Take every figure and show each when it is there."""
    with tempfile.TemporaryDirectory() as folder:
        show("first FP8 step, empty cache", first_step(Path(folder), sizes, "fp8")["slowest"])
        show("first FP8 step, warm cache", first_step(Path(folder), sizes, "fp8")["slowest"])
        show("then the first BF16 step", first_step(Path(folder), sizes, "bf16")["slowest"])
    with tempfile.TemporaryDirectory() as folder:
        show("first BF16 step, empty cache", first_step(Path(folder), sizes, "bf16")["slowest"])
    with tempfile.TemporaryDirectory() as folder:
        show("both engines by `sonicmoe warmup`", warm_up_both(Path(folder), sizes))
    with tempfile.TemporaryDirectory() as folder:
        together = first_step(Path(folder), sizes, "fp8", ranks)["all"]
        show(f"{ranks} processes at once, FP8, empty cache", together)


@click.command(help=__doc__)
@click.option("--E", "experts", default=8, show_default=True, help="Local experts.")
@click.option("--H", "hidden", default=3072, show_default=True, help="Hidden size.")
@click.option("--I", "inner", default=1536, show_default=True, help="Expert intermediate size.")
@click.option("--ranks", default=8, show_default=True, help="Processes of one host at once.")
def main(experts: int, hidden: int, inner: int, ranks: int) -> None:
    """Measure and print."""

    def show(name: str, seconds: float) -> None:
        click.echo(f"{name:<42} {seconds:7.1f} s")

    measure((experts, hidden, inner), ranks, show)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        *given, kind, number = sys.argv[2:]
        child((int(given[0]), int(given[1]), int(given[2])), kind, int(number))
    else:
        main()
