"""One rank of `multicard_smoke.py`: `multicard_rank.py DIRECTORY`, with `arguments.json` there and
torchrun's variables set.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from multicard_layer import PRECISIONS, LayerSizes, World

from ernie_compat.corpus import load_corpus
from ernie_compat.learner import Learner
from ernie_compat.model_config import ModelConfig, RunConfig, TrainConfig
from ernie_compat.parallel import Parallel, RankLayout, is_expert, read_launch
from ernie_compat.torch_parallel import TorchParallel
from ernie_compat.trainer import MAIN, Trainer

ROOT = Path(__file__).resolve().parents[1]
# One bf16 rounding of a partial sum per rank, and codes of a dgrad quantised from it: noise of
# rounding, not of FP8.
BOUNDS = {"y": 6e-3, "dx": 1.5e-2, "dweights": 1.5e-2, "up_gate": 1.5e-2, "down": 1.5e-2}
LOSS_BOUND = 5e-3
NOT_WAITING = ", not waiting"


class Report:
    """Collects what one rank found, in a file that is whole at any moment; rank 0 also says it."""

    def __init__(self, file: Path, rank: int) -> None:
        self._file, self._rank, self._entered = file, rank, time.monotonic()
        self.failures: list[str] = []
        self.figures: dict[str, Any] = {
            "layers": [],
            "skipped": {},
            "seconds": {},
            "failures": self.failures,
        }

    def enter(self, stage: str) -> None:
        """What happens from now on."""
        now = time.monotonic()
        if "stage" in self.figures:
            self.figures["seconds"][self.figures["stage"]] = round(now - self._entered, 1)
        self._entered, self.figures["stage"] = now, stage
        self.save()

    def fact(self, name: str, value: Any) -> None:
        """A figure without a bound."""
        self.figures[name] = value
        self._say(f"{name}: {value}")

    def skip(self, kind: str, why: str) -> None:
        """A dispatcher that is not there."""
        self.figures["skipped"][kind] = why
        self._say(f"{kind}: SKIPPED, {why}")

    def fail(self, failure: str) -> None:
        """Something that does not hold."""
        self.failures.append(f"rank {self._rank}: {failure}")
        self.save()

    def layer(self, dispatcher: str, precision: str, found: dict[str, dict[str, Any]]) -> None:
        """One layer against one rank alone, by case."""
        self.figures["layers"].append({"dispatcher": dispatcher, "precision": precision, **found})
        for case, figures in found.items():
            where = f"{dispatcher}, {precision}, {case}"
            for name, error in figures["errors"].items():
                if not error <= BOUNDS[name]:
                    self.fail(
                        f"{where}: {name} differs from one rank's by {error:.2e}, bound {BOUNDS[name]:.0e}"
                    )
            for name in ("finite", "poison_changes_nothing", "repeats_bit_identical"):
                if not figures[name]:
                    self.fail(f"{where}: not {name.replace('_', ' ')}")
            errors = "  ".join(f"{name} {error:.1e}" for name, error in figures["errors"].items())
            self._say(f"{where}: relative errors against one rank: {errors}")

    def same_bits(
        self, dispatcher: str, precision: str, differences: dict[str, dict[str, float]]
    ) -> None:
        """A layer against the same layer with the counts unknown, by case."""
        for case, found in differences.items():
            where = f"{dispatcher}, {precision}, {case}"
            for name, error in found.items():
                self.fail(
                    f"{where}: {name} is not equal to the bit without waiting for counts, it differs by {error:.2e}"
                )
            if not found:
                self._say(f"{where}: the same bits without waiting for counts")

    def training(self, losses: dict[str, float], unmoved: int, differing: int) -> None:
        """A short run: final losses, parameters that did not train, replicated ones that are not
        the same on all ranks.
        """
        self.figures.update(
            training=losses, unmoved_parameters=unmoved, differing_parameters=differing
        )
        for count, words in ((unmoved, "did not train"), (differing, "differ between ranks")):
            if count:
                self.fail(f"training: {count} parameters {words}")
        if "alone" in losses:
            gap = abs(losses["ranks"] - losses["alone"]) / losses["alone"]
            self.figures["gap_to_one_process"] = gap
            ranks, alone = losses["ranks"], losses["alone"]
            self._say(
                f"training: loss {ranks:.4f} over ranks, {alone:.4f} alone, gap {100 * gap:.3f} %"
            )
            if not gap <= LOSS_BOUND:
                self.fail(f"training: the losses differ by {100 * gap:.2f} %")

    def save(self) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self.figures))
        os.replace(partial, self._file)

    def _say(self, line: str) -> None:
        self.save()
        if self._rank == 0:
            print(line, flush=True)


def run(arguments: Namespace, report: Report) -> None:
    """One rank's part of everything."""
    launch = read_launch()
    report.enter("joining the ranks")
    parallel = TorchParallel(RankLayout(launch, launch.world_size), arguments.tokens)
    sizes = LayerSizes(
        arguments.tokens,
        arguments.hidden,
        arguments.intermediate,
        arguments.experts,
        arguments.topk,
    )
    world = World(sizes, parallel.device, dist.group.WORLD)
    report.enter("compiling")
    needed = dict.fromkeys(
        [*arguments.precisions, *(["fp8"] if arguments.steps else [])]
    )  # the training run is FP8
    report.fact("kernels compiled or cached by rank 0", len(world.warm_up(tuple(needed))))
    with world.nothing_compiles():
        for kind in arguments.dispatchers:
            check_layers(arguments, report, world, kind)
        if arguments.steps:
            report.enter("training")
            train(arguments.steps, parallel, report)
    report.enter("leaving the ranks")
    world.meet()
    parallel.close()
    report.enter("done")


def check_layers(arguments: Namespace, report: Report, world: World, kind: str) -> None:
    """Check one dispatcher in every precision, beside the same one that does not wait for counts where
    that is asked for.
    """
    report.enter(f"{kind}: making the dispatcher")
    dispatcher, why = world.dispatcher(kind)
    if dispatcher is None:
        report.skip(kind, why)
        return
    dispatchers = {dispatcher.name: dispatcher}
    if arguments.no_wait:
        blind, why = world.dispatcher(kind, wait_for_counts=False)
        if blind is None:
            report.skip(kind + NOT_WAITING, why)
        else:
            dispatchers[blind.name + NOT_WAITING] = blind
    for precision in arguments.precisions:
        report.enter(f"{kind}, {precision}: checks")
        for name, each in dispatchers.items():
            report.layer(name, precision, world.check(each, precision))
        if len(dispatchers) > 1:
            differences = world.differences(*dispatchers.values(), precision)
            report.same_bits(dispatcher.name, precision, differences)


def train(steps: int, parallel: Parallel, report: Report) -> None:
    """A short run over all ranks and the same run on rank 0 alone."""
    on_gpu = torch.cuda.is_available()
    config = RunConfig(
        model=ModelConfig(hidden_size=256, intermediate_size=256)
        if on_gpu
        else ModelConfig(hidden_size=64, intermediate_size=64),
        train=TrainConfig(
            steps=steps, batch_size=8, micro_batches=2, checkpoint_every=0, eval_batches=0
        ),
        engine=PRECISIONS["fp8"][1] if on_gpu else "reference",
        ep=parallel.layout.world_size,
    )
    corpus, losses = load_corpus([ROOT / "docs", ROOT / "sonicmoe"]), {}
    unmoved = differing = 0
    for name, where in (("ranks", parallel), ("alone", Parallel())):
        if name == "ranks" or parallel.layout.rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                trainer = Trainer.start(config, corpus, Path(directory), where)
                before = weights_of(trainer.learners[MAIN])
                trainer.train()
            losses[name] = float(np.mean([record.loss for record in trainer.records[-5:]]))
            if name == "ranks":
                after = weights_of(trainer.learners[MAIN])
                unmoved = sum(bool(np.array_equal(before[key], after[key])) for key in after)
                differing = count_differing(after, parallel.device)
    report.training(losses, unmoved, differing)


def weights_of(learner: Learner) -> dict[str, np.ndarray]:
    """Copies of this rank's own parameters."""
    return {name: p.detach().cpu().numpy().copy() for name, p in learner.parameters.items()}  # type: ignore[attr-defined]


def count_differing(weights: dict[str, np.ndarray], device: Any) -> int:
    """Replicated parameters whose bits are not the same on all ranks; a collective."""
    replicated = sorted(name for name in weights if not is_expert(name))
    digests = [hashlib.sha256(weights[name].tobytes()).digest() for name in replicated]
    # Digests in one tensor: object collectives unpickle bytes that another rank sent.
    mine = torch.tensor(list(b"".join(digests)), dtype=torch.uint8, device=device)
    everybodys = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everybodys, mine)
    differing = torch.stack(everybodys).ne(mine).any(0).reshape(len(replicated), -1).any(1)
    return int(differing.sum())


def end_with_the_launcher() -> None:
    """A launcher that was killed cannot stop its ranks: the end of its pipe does."""

    def watch() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Run; end at once after an error, since other ranks may be waiting for this one inside a
    collective.
    """
    workdir = Path(sys.argv[1])
    arguments = Namespace(**json.loads((workdir / "arguments.json").read_text()))
    rank = int(os.environ["RANK"])
    end_with_the_launcher()
    faulthandler.dump_traceback_later(
        max(1.0, arguments.timeout - 10)
    )  # where a rank hangs, before it is stopped
    report = Report(workdir / f"rank{rank}.json", rank)
    try:
        run(arguments, report)
    except Exception as error:
        traceback.print_exc()
        report.fail(f"{type(error).__name__}: {error}, in: {report.figures.get('stage')}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if report.failures else 0)


if __name__ == "__main__":
    main()
