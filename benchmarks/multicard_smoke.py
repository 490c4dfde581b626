#!/usr/bin/env python3
"""Expert parallelism over the ranks of one host: is it right? `ep_bench.py` says how long it takes.

    benchmarks/multicard_smoke.py               # 2 GPUs where there are 2, NCCL and DeepEP; else the same program over gloo, small
    benchmarks/multicard_smoke.py --device cpu  # the same program over gloo: is the program itself right?
    benchmarks/multicard_smoke.py --no-wait     # beside each dispatcher the same one with wait_for_counts=False

Per dispatcher and precision, every rank runs one MoE layer on its own tokens, and rank 0 the same
layer on everybody's tokens alone: outputs and all gradients must agree within rounding, be free of
NaN when fresh memory is full of it, and repeat bit for bit; once with tokens everywhere, once with
a rank that has none and an expert that gets none. A short training run must reach the loss of one
rank, and leave all ranks with the same weights. Kernels are compiled by rank 0 once, into a cache
that all ranks then read. With `--no-wait` the same layer also runs without waiting for counts, and
must give the same bits. Exit code 0 when everything held, 1 when not, 2 when there are too few GPUs.
`--json` prints the figures as one line on stdout, also
when ranks failed, died or were stopped: they are then what was found until there.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RANK_PROGRAM = HERE / "multicard_rank.py"
DISPATCHERS = ("collective", "deepep")
# Of the experts, with rows between ranks in bf16; "fp8-dispatch": FP8, and tokens and gradients
# travel to the experts in FP8 too.
PRECISIONS = ("fp8", "bf16", "fp8-dispatch")
# Sizes of the layer on GPUs and on CPUs.
DEFAULTS = {
    "tokens": (8192, 128, "tokens per rank; a layer takes an eighth"),
    "hidden": (3072, 64, "H"),
    "intermediate": (1536, 32, "I"),
    "experts": (16, 8, "of all ranks"),
    "topk": (8, 2, "K"),
    "steps": (20, 10, "training steps; 0: none"),
}
TOO_FEW_GPUS = 2
# What ranks need of the caller's shell. A launcher's variables, proxies or another run's settings
# would change what is measured.
PASSED = (
    "PATH",
    "HOME",
    "LANG",
    "TMPDIR",
    "USER",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONUNBUFFERED",
    "VIRTUAL_ENV",
    "CC",
    "CXX",
)
PASSED_FAMILIES = (
    "CUDA_",
    "CUTE_",
    "EP_",
    "GLOO_",
    "NCCL_",
    "NVIDIA_",
    "NVSHMEM_",
    "OMP_",
    "PYTORCH_",
    "QUACK_",
    "SONIC_MOE_",
)
PASSED_FAMILIES += ("TORCH_", "TRITON_", "TVM_FFI_")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; sizes that were not given are None."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--dispatchers", nargs="*", choices=DISPATCHERS, default=list(DISPATCHERS))
    usual = list(PRECISIONS[:2])
    parser.add_argument("--precisions", nargs="*", choices=PRECISIONS, default=usual)
    for name, (gpu, cpu, text) in DEFAULTS.items():
        parser.add_argument(f"--{name}", type=int, help=f"{text} (default {gpu}, on CPUs {cpu})")
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="also run every dispatcher with wait_for_counts=False: its bits must be those of the one that waits "
        "(the training run waits)",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        help="compile cache of the ranks (default: a fresh one, so that they start cold)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=220,
        help="seconds until all ranks are stopped (default 220)",
    )
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")
    return parser.parse_args(argv)


def launch(arguments: argparse.Namespace) -> int:
    """Run all ranks and report; the exit code."""
    found = 0 if arguments.device == "cpu" else gpu_count()
    if arguments.device == "cuda" and found < arguments.ranks:
        print(
            f"multicard_smoke: {found} GPUs here, {arguments.ranks} needed; nothing was run",
            file=sys.stderr,
        )
        return TOO_FEW_GPUS
    if arguments.device == "auto":
        arguments.device = "cuda" if found >= arguments.ranks else "cpu"
    for name, (gpu, cpu, _) in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, gpu if arguments.device == "cuda" else cpu)
    with tempfile.TemporaryDirectory(
        prefix="sonicmoe-smoke-", ignore_cleanup_errors=True
    ) as scratch:
        workdir = Path(scratch)
        (workdir / "arguments.json").write_text(json.dumps(vars(arguments), default=str))
        ranks = start(arguments, workdir)
        stopped = wait(ranks, arguments.timeout)
        figures = gather([process.returncode for process in ranks], stopped, arguments, workdir)
    for failure in figures["failures"]:
        print(f"FAILED: {failure}", file=sys.stderr)
    if arguments.json:
        print(json.dumps(figures), flush=True)
    print(
        "failed" if figures["failures"] else "all checks held",
        file=sys.stderr if arguments.json else sys.stdout,
    )
    return 1 if figures["failures"] else 0


def start(arguments: argparse.Namespace, workdir: Path) -> list[subprocess.Popen[bytes]]:
    """One process per rank, with the variables that torchrun would set. Their stdin closes when
    this process ends, and ends them.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    cache = arguments.cache or workdir / "cache"
    shared = {
        **passed_environment(os.environ),
        "WORLD_SIZE": str(arguments.ranks),
        "LOCAL_WORLD_SIZE": str(arguments.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "SONIC_MOE_CACHE_DIR": str(cache),
        "SONIC_MOE_LOCAL_CACHE_DIR": str(workdir / "local"),
    }
    shared["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(ROOT), str(HERE), shared.get("PYTHONPATH", "")])
    )
    if arguments.device == "cpu":
        shared["CUDA_VISIBLE_DEVICES"] = ""
    return [
        subprocess.Popen(
            [sys.executable, str(RANK_PROGRAM), str(workdir)],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=sys.stderr.fileno() if arguments.json else None,
        )
        for rank in range(arguments.ranks)
    ]


def passed_environment(environ: Any) -> dict[str, str]:
    """The whitelisted part of an environment."""
    return {
        name: value
        for name, value in environ.items()
        if name in PASSED or name.startswith(PASSED_FAMILIES)
    }


def wait(ranks: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """The first bad exit code ends all ranks after a moment for their own words, so does the time
    limit; the ranks that were stopped.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline and any(process.poll() is None for process in ranks):
        if any(process.poll() for process in ranks):
            deadline = min(deadline, time.monotonic() + 2)
        time.sleep(0.1)
    stopped = [rank for rank, process in enumerate(ranks) if process.poll() is None]
    for process in ranks:
        process.kill()
        process.wait()
    return stopped


def gather(
    codes: list[int], stopped: list[int], arguments: argparse.Namespace, workdir: Path
) -> dict[str, Any]:
    """Rank 0's figures with everybody's failures; ranks that did not come to their end say where
    they were.
    """
    found = [read_rank(workdir, rank) for rank in range(len(codes))]
    failures = [failure for each in found for failure in each.get("failures", [])]
    first_to_fail = [rank for rank, code in enumerate(codes) if code and rank not in stopped]
    for rank, (code, each) in enumerate(zip(codes, found, strict=True)):
        where = each.get("stage", "starting")
        if rank in stopped and not first_to_fail:
            failures.append(f"rank {rank} was stopped after {arguments.timeout:.0f} s, in: {where}")
        elif code and rank not in stopped and not each.get("failures"):
            failures.append(f"rank {rank} ended with exit code {code}, in: {where}")
    figures = {
        "ranks": arguments.ranks,
        "device": arguments.device,
        "layers": [],
        "skipped": {},
        **found[0],
    }
    return {**figures, "failed_ranks": sum(code != 0 for code in codes), "failures": failures}


def read_rank(workdir: Path, rank: int) -> dict[str, Any]:
    """What a rank has written last; nothing if it never came so far."""
    try:
        content: dict[str, Any] = json.loads((workdir / f"rank{rank}.json").read_text())
    except (OSError, ValueError):
        return {}
    return content


def gpu_count() -> int:
    """GPUs that PyTorch sees."""
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    sys.exit(launch(parse()))
