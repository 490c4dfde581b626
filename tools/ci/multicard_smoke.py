#!/usr/bin/env python3
"""Expert parallelism on the GPUs of one host: is it right, and where does the time go?

    tools/ci/multicard_smoke.py                 # 2 GPUs, fp8 and bf16, every dispatcher that is there
    tools/ci/multicard_smoke.py --device cpu    # the same program over gloo, small: is the program itself right?

Per dispatcher and precision, every rank runs one MoE layer on its own tokens, and rank 0 the same layer on everybody's tokens alone:
outputs and all gradients must agree within rounding, be free of NaN when fresh memory is full of it, and repeat bit for bit. A short
training run must reach the loss of one rank. Kernels are compiled by rank 0 once, into a cache that all ranks then read.
Exit code 0 when everything held. `--json` prints the figures for a program.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DISPATCHERS = ("collective", "deepep")
PRECISIONS = {"fp8": "perf", "bf16": "off"}
# One bf16 rounding of a partial sum per rank, and codes of a dgrad quantised from it: noise of rounding, not of FP8.
BOUNDS = {"y": 6e-3, "dx": 1.5e-2, "dweights": 1.5e-2, "up_gate": 1.5e-2, "down": 1.5e-2}
LOSS_BOUND = 5e-3
TIMEOUT_S = 480


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dispatchers", nargs="*", choices=DISPATCHERS, default=list(DISPATCHERS))
    parser.add_argument("--precisions", nargs="*", choices=list(PRECISIONS), default=list(PRECISIONS))
    for name, default, text in (
        ("tokens", 8192, "tokens per rank, of the timed runs; checks take an eighth"),
        ("hidden", 3072, "H"),
        ("intermediate", 1536, "I"),
        ("experts", 16, "of all ranks"),
        ("topk", 8, "K"),
        ("repeats", 10, "timed repetitions"),
        ("steps", 20, "training steps; 0: none"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default {default})")
    parser.add_argument("--json", action="store_true", help="figures as JSON on stdout")
    return parser.parse_args()


def launch(arguments: argparse.Namespace) -> int:
    """One process per rank; rank 0's output is this program's."""
    if arguments.device == "cuda":
        found = gpu_count()
        if found < arguments.ranks:
            print(f"multicard_smoke: {found} GPUs here, {arguments.ranks} needed; nothing was run", file=sys.stderr)
            return 2
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="sonicmoe-smoke-") as cache:
        shared = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "WORLD_SIZE": str(arguments.ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "SONIC_MOE_CACHE_DIR": cache,
            "SONIC_MOE_LOCAL_CACHE_DIR": f"{cache}/local",
        }
        if arguments.device == "cpu":
            shared["CUDA_VISIBLE_DEVICES"] = ""
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:]], env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}
            )
            for r in range(arguments.ranks)
        ]
        return wait(ranks)


def wait(ranks: list[subprocess.Popen[bytes]]) -> int:
    """The first bad exit code ends all ranks; so does the time limit."""
    import time

    deadline = time.monotonic() + TIMEOUT_S
    codes: list[int | None] = [None] * len(ranks)
    while None in codes and not any(codes) and time.monotonic() < deadline:
        time.sleep(0.2)
        codes = [process.poll() for process in ranks]
    for process in ranks:
        if process.poll() is None:
            process.kill()
        process.wait()
    if None in codes and not any(codes):
        print(f"multicard_smoke: not done after {TIMEOUT_S} s; all ranks were stopped", file=sys.stderr)
        return 1
    return next((code for code in codes if code), 0)


def gpu_count() -> int:
    """GPUs that PyTorch sees."""
    import torch

    return torch.cuda.device_count()


def run_rank(arguments: argparse.Namespace) -> int:
    """One rank's part of everything."""
    import torch.distributed as dist

    sys.path.insert(0, str(ROOT / "tools" / "ci"))
    from multicard_layer import LayerSizes, World

    from ernie_compat.parallel import RankLayout, read_launch
    from ernie_compat.torch_parallel import TorchParallel

    launch = read_launch()
    parallel = TorchParallel(RankLayout(launch, launch.world_size), arguments.tokens)
    sizes = LayerSizes(arguments.tokens, arguments.hidden, arguments.intermediate, arguments.experts, arguments.topk)
    world = World(sizes, parallel.device, dist.group.WORLD)
    report = Report(arguments, launch.rank == 0)
    compiled = world.warm_up()
    report.fact("compiled by rank 0", len(compiled))
    with world.nothing_compiles():
        for kind in arguments.dispatchers:
            dispatcher, why = world.dispatcher(kind)
            if dispatcher is None:
                report.skip(kind, why)
                continue
            for precision in arguments.precisions:
                report.layer(dispatcher.name, precision, world.check(dispatcher, PRECISIONS[precision]))
                report.times(
                    dispatcher.name, precision, world.measure(dispatcher, PRECISIONS[precision], arguments.repeats)
                )
    if arguments.steps:
        report.training(train(arguments.steps, parallel))
    dist.barrier()
    parallel.close()
    return report.finish()


def train(steps: int, parallel: Any) -> dict[str, float]:
    """Final losses of a short run over all ranks and of the same run on rank 0 alone."""
    import numpy as np

    from ernie_compat.corpus import load_corpus
    from ernie_compat.model_config import ModelConfig, RunConfig, TrainConfig
    from ernie_compat.parallel import SingleProcess
    from ernie_compat.trainer import Trainer

    config = RunConfig(
        model=ModelConfig(hidden_size=256, intermediate_size=256, num_heads=4),
        train=TrainConfig(steps=steps, checkpoint_every=0, eval_batches=0),
        framework="torch",
        ep=parallel.layout.world_size,
    )
    corpus, losses = load_corpus([ROOT / "docs", ROOT / "sonicmoe"]), {}
    for name, where in (("ranks", parallel), ("alone", SingleProcess())):
        if name == "ranks" or parallel.layout.rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                trainer = Trainer.start(config, corpus, Path(directory), where)
                trainer.train()
            losses[name] = float(np.mean([record.loss for record in trainer.records[-5:]]))
    return losses


class Report:
    """Collects what one rank found; rank 0 prints. A failed check on any rank fails the program."""

    def __init__(self, arguments: argparse.Namespace, prints: bool) -> None:
        """Nothing yet."""
        self._prints, self._json = prints, arguments.json
        self.figures: dict[str, Any] = {
            "ranks": arguments.ranks,
            "device": arguments.device,
            "layers": [],
            "skipped": {},
        }
        self.failures: list[str] = []

    def fact(self, name: str, value: Any) -> None:
        """A figure without a bound."""
        self.figures[name] = value
        self._say(f"{name}: {value}")

    def skip(self, kind: str, why: str) -> None:
        """A dispatcher that is not there."""
        self.figures["skipped"][kind] = why
        self._say(f"{kind}: SKIPPED, {why}")

    def layer(self, dispatcher: str, precision: str, found: dict[str, Any]) -> None:
        """One layer against one rank alone."""
        where = f"{dispatcher}, {precision}"
        self.figures["layers"].append({"dispatcher": dispatcher, "precision": precision, **found})
        for name, bound in BOUNDS.items():
            error = found["errors"].get(name)
            if error is not None and not error <= bound:
                self.failures.append(f"{where}: {name} differs from one rank's by {error:.2e}, bound {bound:.0e}")
        for name in ("finite", "poison_changes_nothing", "repeats_bit_identical"):
            if not found[name]:
                self.failures.append(f"{where}: not {name.replace('_', ' ')}")
        errors = "  ".join(f"{name} {error:.1e}" for name, error in found["errors"].items())
        self._say(f"{where}: relative errors against one rank: {errors or 'checked by rank 0'}")

    def times(self, dispatcher: str, precision: str, found: dict[str, float]) -> None:
        """Where the time went."""
        self.figures["layers"][-1]["times"] = found
        total = found["total_ms"]
        shares = "  ".join(f"{n} {100 * found[f'{n}_ms'] / total:.0f} %" for n in ("dispatch", "expert", "combine"))
        self._say(
            f"{dispatcher}, {precision}: {found['tokens_per_s']:,.0f} tokens/s a rank, forward and backward {total:.2f} ms: {shares}; "
            f"split_wgrad {found['split_wgrad_ms']:.2f} ms against {found['whole_wgrad_ms']:.2f} ms"
        )

    def training(self, losses: dict[str, float]) -> None:
        """The loss of a short run."""
        self.figures["training"] = losses
        if "alone" in losses:
            gap = abs(losses["ranks"] - losses["alone"]) / losses["alone"]
            self._say(
                f"training: loss {losses['ranks']:.4f} over ranks, {losses['alone']:.4f} alone, gap {100 * gap:.3f} %"
            )
            if not gap <= LOSS_BOUND:
                self.failures.append(f"training: the losses differ by {100 * gap:.2f} %")

    def finish(self) -> int:
        """Print the verdict; the exit code."""
        self.figures["failures"] = self.failures
        for failure in self.failures:
            print(f"FAILED: {failure}", file=sys.stderr)
        if self._prints and self._json:
            print(json.dumps(self.figures))
        self._say("failed" if self.failures else "all checks held")
        return 1 if self.failures else 0

    def _say(self, line: str) -> None:
        if self._prints:
            print(line, file=sys.stderr if self._json else sys.stdout, flush=True)


if __name__ == "__main__":
    ARGUMENTS = parse()
    sys.exit(run_rank(ARGUMENTS) if "RANK" in os.environ else launch(ARGUMENTS))
