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
`--json` prints the figures as one line on stdout, also when ranks failed, died or were stopped: they
are then what was found until there.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import timing  # noqa: F401  this tree's package
import torch
import torch.distributed as dist
from multicard_layer import PRECISIONS, LayerSizes, World
from rank_processes import run_ranks

from ernie_compat.corpus import load_corpus
from ernie_compat.model_config import ModelConfig, RunConfig, TrainConfig
from ernie_compat.ranks import Ranks, is_expert, read_launch
from ernie_compat.torch_backend import JoinedRanks
from ernie_compat.trainer import MAIN, Trainer

ROOT = Path(__file__).resolve().parents[1]
DISPATCHERS = ("collective", "deepep")
DEFAULTS = {  # on GPUs, on CPUs
    "tokens": (8192, 128, "Tokens of a rank; a layer takes an eighth."),
    "hidden": (3072, 64, "H."),
    "intermediate": (1536, 32, "I."),
    "experts": (16, 8, "Of all ranks."),
    "topk": (8, 2, "K."),
    "steps": (20, 10, "Training steps; 0: none."),
}
TOO_FEW_GPUS = 2
# One bf16 rounding of a partial sum per rank, and codes of a dgrad quantised from it: noise of
# rounding, not of FP8.
BOUNDS = {"y": 6e-3, "dx": 1.5e-2, "dweights": 1.5e-2, "up_gate": 1.5e-2, "down": 1.5e-2}
LOSS_BOUND = 5e-3
NOT_WAITING = ", not waiting"


class Report:
    """Collects what one rank found, in a file that is whole at any moment; rank 0 also says it."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file, self._rank = folder / f"rank{rank}.json", rank
        self.failures: list[str] = []
        self.figures: dict[str, Any] = {"layers": [], "skipped": {}, "failures": self.failures}

    def enter(self, stage: str) -> None:
        """What happens from now on."""
        self.figures["stage"] = stage
        self.save()

    def say(self, line: str) -> None:
        """On stderr, because stdout may have to stay one line of JSON."""
        self.save()
        if self._rank == 0:
            click.echo(line, err=True)

    def fail(self, failure: str) -> None:
        """Something that does not hold."""
        self.failures.append(f"rank {self._rank}: {failure}")
        self.save()

    def skip(self, kind: str, why: str) -> None:
        """A dispatcher that is not there."""
        self.figures["skipped"][kind] = why
        self.say(f"{kind}: SKIPPED, {why}")

    def layer(self, dispatcher: str, precision: str, found: dict[str, dict[str, Any]]) -> None:
        """One layer against one rank alone, by case."""
        self.figures["layers"].append({"dispatcher": dispatcher, "precision": precision, **found})
        for case, figures in found.items():
            where = f"{dispatcher}, {precision}, {case}"
            for name, error in figures["errors"].items():
                if not error <= BOUNDS[name]:
                    words = f"{name} differs from one rank's by {error:.2e}"
                    self.fail(f"{where}: {words}, bound {BOUNDS[name]:.0e}")
            for name in ("finite", "poison_changes_nothing", "repeats_bit_identical"):
                if not figures[name]:
                    self.fail(f"{where}: not {name.replace('_', ' ')}")
            errors = "  ".join(f"{name} {error:.1e}" for name, error in figures["errors"].items())
            self.say(f"{where}: relative errors against one rank: {errors}")

    def same_bits(self, where: str, differences: dict[str, dict[str, float]]) -> None:
        """A layer against the same layer with the counts unknown, by case."""
        for case, found in differences.items():
            for name, error in found.items():
                words = f"{name} differs by {error:.2e} without waiting for counts"
                self.fail(f"{where}, {case}: {words}")
            if not found:
                self.say(f"{where}, {case}: the same bits without waiting for counts")

    def training(self, losses: dict[str, float], unmoved: int, differing: int) -> None:
        """A short run: final losses, parameters that did not train, replicated ones that are not
        the same on all ranks.
        """
        counts = {"unmoved_parameters": unmoved, "differing_parameters": differing}
        self.figures.update(training=losses, **counts)
        for name, count in counts.items():
            if count:
                self.fail(f"training: {count} {name.replace('_', ' ')}")
        if "alone" in losses:
            ranks, alone = losses["ranks"], losses["alone"]
            gap = self.figures["gap_to_one_process"] = abs(ranks - alone) / alone
            words = f"loss {ranks:.4f} over ranks, {alone:.4f} alone, gap {100 * gap:.3f} %"
            self.say(f"training: {words}")
            if not gap <= LOSS_BOUND:
                self.fail(f"training: {words}")

    def save(self) -> None:
        """Write what was found so far."""
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self.figures))
        os.replace(partial, self._file)


def run_rank(rank: int, device: torch.device, options: dict[str, Any], folder: Path) -> None:
    """One rank's part of everything."""
    faulthandler.dump_traceback_later(max(1.0, options["timeout"] - 10))  # where a rank hangs
    report = Report(folder, rank)
    report.enter("joining the ranks")
    parallel = JoinedRanks(read_launch(), options["tokens"])
    sizes = LayerSizes(*(options[name] for name in LayerSizes._fields))
    world = World(sizes, parallel.device, dist.group.WORLD)
    report.enter("compiling")
    # The training run is FP8.
    needed = dict.fromkeys([*options["precisions"], *(["fp8"] if options["steps"] else [])])
    report.say(f"kernels compiled or cached by rank 0: {len(world.warm_up(tuple(needed)))}")
    with world.nothing_compiles():
        for kind in DISPATCHERS:
            check_layers(options, report, world, kind)
        if options["steps"]:
            report.enter("training")
            train(options["steps"], parallel, report)
    report.enter("leaving the ranks")
    world.meet()
    parallel.close()
    report.enter("done")


def check_layers(options: dict[str, Any], report: Report, world: World, kind: str) -> None:
    """Check one dispatcher in every precision, beside the same one that does not wait for counts where
    that is asked for.
    """
    report.enter(f"{kind}: making the dispatcher")
    made = {}
    for waits in (True, False) if options["no_wait"] else (True,):
        dispatcher, why = world.dispatcher(kind, waits)
        if dispatcher is None:
            report.skip(kind + ("" if waits else NOT_WAITING), why)
            break
        made[dispatcher.name + ("" if waits else NOT_WAITING)] = dispatcher
    for precision in options["precisions"] if made else ():
        report.enter(f"{kind}, {precision}: checks")
        for name, each in made.items():
            report.layer(name, precision, world.check(each, precision))
        if len(made) > 1:
            differences = world.differences(*made.values(), precision)
            report.same_bits(f"{next(iter(made))}, {precision}", differences)


def train(steps: int, parallel: Ranks, report: Report) -> None:
    """A short run over all ranks and the same run on rank 0 alone."""
    on_gpu = parallel.device.type == "cuda"
    size = 256 if on_gpu else 64
    config = RunConfig(
        model=ModelConfig(hidden_size=size, intermediate_size=size),
        train=TrainConfig(
            steps=steps, batch_size=8, micro_batches=2, checkpoint_every=0, eval_batches=0
        ),
        engine=PRECISIONS["fp8"][1] if on_gpu else "reference",
    )
    corpus, losses = load_corpus([ROOT / "docs", ROOT / "sonicmoe"]), {}
    unmoved = differing = 0
    for name, where in (("ranks", parallel), ("alone", Ranks())):
        if name == "ranks" or parallel.layout.rank == 0:
            with tempfile.TemporaryDirectory() as directory:
                trainer = Trainer.start(config, corpus, Path(directory), where)
                before = weights_of(trainer)
                trainer.train()
            losses[name] = float(np.mean([record.loss for record in trainer.records[-5:]]))
            if name == "ranks":
                after = weights_of(trainer)
                unmoved = sum(bool(np.array_equal(before[key], after[key])) for key in after)
                differing = count_differing(after, parallel.device)
    report.training(losses, unmoved, differing)


def weights_of(trainer: Trainer) -> dict[str, np.ndarray]:
    """Copies of this rank's own parameters."""
    parameters = trainer.learners[MAIN].parameters
    return {name: p.detach().cpu().numpy().copy() for name, p in parameters.items()}


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


def gather(folder: Path, ranks: int, problem: str) -> dict[str, Any]:
    """Rank 0's figures with everybody's failures; a rank that did not come to its end says where it
    was.
    """
    files = [folder / f"rank{rank}.json" for rank in range(ranks)]
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    stages = [each.get("stage", "starting") for each in found]
    failures = [failure for each in found for failure in each.get("failures", [])]
    failed = sum(bool(each.get("failures")) or stage != "done"
                 for each, stage in zip(found, stages, strict=True))  # fmt: skip
    if problem:
        where = ", ".join(f"rank {rank} in: {stage}" for rank, stage in enumerate(stages))
        failures.append(f"{problem}; {where}")
    figures = {"ranks": ranks, "layers": [], "skipped": {}, **found[0]}
    return {**figures, "failed_ranks": failed, "failures": failures}


@click.command(help=__doc__)
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True)
@click.option("--device", type=click.Choice(("auto", "cuda", "cpu")), default="auto")
@click.option("--precision", "precisions", multiple=True, type=click.Choice(list(PRECISIONS)),
              default=("fp8", "bf16"), show_default=True, help="Of the experts; fp8-dispatch: tokens "
              "and gradients travel to them in FP8 too.")  # fmt: skip
@click.option("--no-wait", is_flag=True, help="Also every dispatcher with wait_for_counts=False.")
@click.option("--cache", type=click.Path(path_type=Path), help="Compile cache of the ranks.  "
              "[default: a fresh one, so that they start cold]")  # fmt: skip
@click.option(
    "--timeout", default=220.0, show_default=True, help="Seconds until ranks are stopped."
)
@click.option("--json", "as_json", is_flag=True, help="Figures as JSON on stdout.")
@click.pass_context
def main(
    context: click.Context,
    ranks: int,
    device: str,
    cache: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Run all ranks and report."""
    found = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and found < ranks:
        click.echo(f"{found} GPUs here, {ranks} needed; nothing was run", err=True)
        context.exit(TOO_FEW_GPUS)
    on_cpu = device == "cpu" or found < ranks
    if on_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # of the ranks
    for name, (gpu, cpu, _) in DEFAULTS.items():
        usual = cpu if on_cpu else gpu
        options[name] = usual if options[name] is None else options[name]
    problem = ""
    with tempfile.TemporaryDirectory(
        prefix="sonicmoe-smoke-", ignore_cleanup_errors=True
    ) as scratch:
        folder = Path(scratch)
        os.environ["SONIC_MOE_CACHE_DIR"] = str(cache or folder / "cache")
        os.environ["SONIC_MOE_LOCAL_CACHE_DIR"] = str(folder / "local")
        given, limit = {**options, "ranks": ranks}, options["timeout"]
        try:
            run_ranks(run_rank, ranks, on_cpu, given, folder, limit_s=limit, joined=False)
        except Exception as error:
            problem = str(error).strip().splitlines()[-1]
            click.echo(str(error), err=True)
        figures = gather(folder, ranks, problem)
    figures["device"] = "cpu" if on_cpu else "cuda"
    for failure in figures["failures"]:
        click.echo(f"FAILED: {failure}", err=True)
    if as_json:
        click.echo(json.dumps(figures))
    click.echo("failed" if figures["failures"] else "all checks held", err=as_json)
    context.exit(bool(figures["failures"]))


for _name, (_gpu, _cpu, _text) in DEFAULTS.items():
    _help = f"{_text}  [default: {_gpu}, on CPUs {_cpu}]"
    main.params.append(click.Option([f"--{_name}"], type=click.IntRange(0), help=_help))

if __name__ == "__main__":
    main()
