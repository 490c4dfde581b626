#!/usr/bin/env python3
"""PaddleFleet's expert path through PyTorch: tokens and gradients sent in FP8 against BF16, the host
between dispatch and the first GEMM, and memory while the BF16 weights are freed.

    benchmarks/fleet_bench.py                 # one GPU: no exchange, the host's time, memory
    benchmarks/fleet_bench.py --ranks 2       # two GPUs over NCCL (or --kind deepep): times by stage
    benchmarks/fleet_bench.py --device cpu    # tiny, on the reference engine: is the program right?

| figure | what |
|---|---|
| stage | median microseconds of the device's clock; ranks start together |
| error | relative L2 against the BF16 engine behind a BF16 dispatch, this rank's tokens and experts |
| host | microseconds from the dispatched tokens until the forward's GEMMs are launched, median: after a wait, and in a row |
| memory | MiB at the peak of a step above what lies there before, and of the weights in all forms |

Before anything is timed, every arm is compared. An error beyond its bound ends it with exit code 1.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from fleet_layer import (
    ARMS,
    STAGES,
    Arm,
    Batch,
    Clock,
    Experts,
    Sizes,
    fleet_arguments,
    freed,
    give_copies,
    relative,
    run,
    steps,
    take_copies,
    weights_of,
)

from sonicmoe.bench.runner import machine
from sonicmoe.bench.timing import MIB
from sonicmoe.engine.hopper_layer import HopperLayer
from sonicmoe.ep import Dispatcher, make_dispatcher
from sonicmoe.fleet.run import run_sonic_moe
from sonicmoe.fleet.weight_copies import copies_of

DEFAULTS = {  # on a GPU, on a CPU
    "tokens": (8192, 48),
    "hidden": (3072, 128),
    "intermediate": (1536, 64),
    "experts": (16, 4),
    "topk": (8, 2),
    "repeats": (20, 2),
}
WARM_UPS = 3
FLEET = "run_sonic_moe"
IN_A_ROW = 8  # calls whose host time is taken after one wait
# FP8 of operands against BF16 of them; tokens and dout in FP8 add a rounding of their own, which is
# what the engine would have done to them.
BOUND = 0.1


class Rank:
    """One rank's part of the program."""

    def __init__(self, sizes: Sizes, device: str, kind: str, group: Any) -> None:
        self.sizes, self.device, self.group = sizes, device, group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.ranks = 1 if group is None else dist.get_world_size(group)
        self.dispatcher: Dispatcher = make_dispatcher(
            sizes.experts, group, kind=kind, max_tokens=sizes.tokens
        )
        self.batch = Batch.random(sizes, device, self.rank)
        # An engine keeps what it makes of a pair of weights until another one asks for them, so every
        # arm has a pair of its own.
        self.weights = {
            arm: weights_of(sizes, device, self.rank, self.ranks) for arm in ARMS.values()
        }

    def experts(self, arm: Arm) -> Experts:
        return Experts(self.weights[arm], arm, None if self.device != "cpu" else "reference")

    def meet(self) -> None:
        """Wait for all ranks, and for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize()
        if self.group is not None:
            dist.barrier(self.group)
        if self.device != "cpu":
            torch.cuda.synchronize()

    def compare(self) -> dict[str, dict[str, float]]:
        """By arm: errors against the first arm, the largest of all ranks."""
        found = {
            name: run(self.dispatcher, self.experts(arm), self.batch, arm)
            for name, arm in ARMS.items()
        }
        wanted = found.pop(next(iter(ARMS)))
        errors = {
            name: {key: relative(value[key], wanted[key]) for key in wanted}
            for name, value in found.items()
        }
        table = torch.tensor([list(each.values()) for each in errors.values()], device=self.device)
        if self.group is not None:
            dist.all_reduce(table, dist.ReduceOp.MAX, group=self.group)
        return {
            name: dict(zip(wanted, row, strict=True))
            for name, row in zip(errors, table.tolist(), strict=True)
        }

    def stages(self, repeats: int) -> dict[str, dict[str, float]]:
        """By arm: the median of each stage and of the whole; arms take turns."""
        experts = {name: self.experts(arm) for name, arm in ARMS.items()}
        times: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
        for _ in range(repeats + WARM_UPS):
            for name, arm in ARMS.items():
                x, probs = (leaf(t) for t in (self.batch.x, self.batch.probs))
                self.meet()
                clock = Clock(self.device)
                clock("start")
                inputs = x, self.batch.ids, probs
                for _ in steps(
                    self.dispatcher, experts[name], inputs, self.batch.dout, arm, {}, clock
                ):
                    pass
                times[name].append(clock.read())
        medians = {
            name: {stage: statistics.median(t[stage] for t in each[WARM_UPS:]) for stage in STAGES}
            for name, each in times.items()
        }
        return {name: {**each, "total": sum(each.values())} for name, each in medians.items()}

    def host(self, repeats: int) -> dict[str, float]:
        """By arm that computes in FP8: from the call of the experts until their GEMMs are launched;
        and of the call that Fleet makes, on weights with FP8 copies. The GPU idles before it.
        """
        found = {}
        for name, forward in self._forwards().items():
            times = [forward() for _ in range(WARM_UPS + repeats)][WARM_UPS:]
            found[name] = 1e6 * statistics.median(first for first, *_ in times)
            in_a_row = [time for _, *later in times for time in later]
            found[f"{name}, in a row"] = 1e6 * statistics.median(in_a_row)
        take_copies(self.weights[ARMS["fp8 dispatch"]])
        return found

    def _forwards(self) -> dict[str, Callable[[], list[float]]]:
        def of_arm(arm: Arm, experts: Experts) -> list[float]:
            x, probs = (leaf(t) for t in (self.batch.x, self.batch.probs))
            options = {"fp8": arm.fp8_tokens, "fp8_grad": arm.fp8_gradients}
            received = self.dispatcher.dispatch(x, self.batch.ids, probs, **options)
            return self._until_launched(lambda: experts(received))

        def of_fleet(weights: list[torch.Tensor]) -> list[float]:
            arguments = fleet_arguments(weights, self.batch, {})
            if copies_of(*weights) is None:  # made once per optimizer step
                give_copies(weights)
            return self._until_launched(lambda: run_sonic_moe(**arguments))

        arms = {name: arm for name, arm in ARMS.items() if arm.fp8}
        forwards = {name: partial(of_arm, arm, self.experts(arm)) for name, arm in arms.items()}
        if self.ranks == 1:  # the batch names local experts
            forwards[FLEET] = partial(of_fleet, self.weights[ARMS["fp8 dispatch"]])
        return forwards

    def _until_launched(self, call: Callable[[], object]) -> list[float]:
        """Seconds until the pass returned that launches the GEMMs of a forward, the later ones too:
        after a wait, and of calls in a row behind it. A profiler would see the first launch, and
        slow the way to it down.
        """
        launched: list[float] = []
        launch = HopperLayer.forward

        def observed(*arguments: Any) -> None:
            launch(*arguments)
            launched.append(time.perf_counter())

        self.meet()
        begins = []
        with mock.patch.object(HopperLayer, "forward", observed):
            for _ in range(IN_A_ROW):
                begins.append(time.perf_counter())
                call()
        return [end - begin for begin, end in zip(begins, launched, strict=True)]

    def memory(self) -> dict[str, float]:
        """Peaks of a step in FP8, with the BF16 weights and with their memory freed."""
        arm = ARMS["fp8 dispatch"]
        weights = self.weights[arm]
        found = {"bf16_weights": sum(w.numel() * w.element_size() for w in weights) / MIB}
        for name in ("held", "freed"):
            experts = self.experts(arm)
            take_copies(weights)
            if name == "freed":
                give_copies(weights)
            with freed(weights) if name == "freed" else nullcontext():
                run(self.dispatcher, experts, self.batch, arm)
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                run(self.dispatcher, experts, self.batch, arm)
                torch.cuda.synchronize()
                found[f"{name}_before"] = before / MIB
                found[f"{name}_peak"] = torch.cuda.max_memory_allocated() / MIB
        return found


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that wants a gradient."""
    return tensor.clone().requires_grad_()


def rank_main(rank: int, options: dict[str, Any], folder: str) -> None:
    """One process; rank 0 leaves the figures in the folder."""
    device, group = options["device"], None
    if device != "cpu":
        device = f"cuda:{rank}"
        torch.cuda.set_device(rank)
    if options["ranks"] > 1:
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"tcp://127.0.0.1:{options['port']}",
            rank=rank,
            world_size=options["ranks"],
            **({} if device == "cpu" else {"device_id": torch.device(device)}),
        )
        group = dist.group.WORLD
    sizes = Sizes(*(options[name] for name in list(DEFAULTS)[:5]))
    here = Rank(sizes, device, options["kind"], group)
    figures: dict[str, Any] = {
        "sizes": vars(sizes),
        "ranks": here.ranks,
        "dispatcher": here.dispatcher.name,
        "errors": here.compare(),
    }
    if options["timed"]:
        figures["stages_us"] = here.stages(options["repeats"])
    if device != "cpu":
        figures["machine"] = machine()
        if options["timed"]:
            figures["host_us"] = here.host(options["repeats"])
            figures["memory_mib"] = here.memory() if here.ranks == 1 else {}
    if rank == 0:
        (Path(folder) / "figures.json").write_text(json.dumps(figures))
    if group is not None:
        dist.destroy_process_group()


def show(figures: dict[str, Any]) -> None:
    """Tables for a person."""
    click.echo(f"{figures['ranks']} ranks, {figures['dispatcher']}, {figures['sizes']}")
    tables = {
        "relative error": figures["errors"],
        "us by stage": figures.get("stages_us", {}),
        "host us until GEMMs are launched": {"": figures.get("host_us", {})},
        "MiB": {"": figures.get("memory_mib", {})},
    }
    for title, rows in tables.items():
        for name, row in rows.items():
            for key, value in row.items():
                form = f"{value:12.4f}" if title == "relative error" else f"{value:12.1f}"
                click.echo(f"{title:26} {name:14} {key:18} {form}")


@click.command(help=__doc__)
@click.option("--ranks", default=1, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--kind",
    type=click.Choice(["collective", "deepep"]),
    default="collective",
    show_default=True,
    help="Dispatcher of several ranks.",
)
@click.option("--check", is_flag=True, help="Compare the arms, and time nothing.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of tables.")
@click.pass_context
def main(
    context: click.Context,
    ranks: int,
    device: str,
    kind: str,
    check: bool,
    as_json: bool,
    **sizes: Any,
) -> None:
    """Start the ranks, wait for them and print."""
    at = 1 if device == "cpu" else 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = {
        **{name: sizes[name] or default[at] for name, default in DEFAULTS.items()},
        "ranks": ranks,
        "device": device,
        "kind": "local" if ranks == 1 else kind,
        "timed": not check,
        "port": port,
    }
    with tempfile.TemporaryDirectory(prefix="fleet-bench-") as folder:
        if ranks == 1:
            rank_main(0, options, folder)
        else:
            # The children import this file by its path.
            os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
            torch.multiprocessing.spawn(rank_main, (options, folder), nprocs=ranks)
        figures = json.loads((Path(folder) / "figures.json").read_text())
    if as_json:
        click.echo(json.dumps(figures))
    else:
        show(figures)
    worst = max(value for arm in figures["errors"].values() for value in arm.values())
    if not worst <= BOUND:
        click.echo(f"FAILED: a relative error of {worst:.3f}, bound {BOUND}", err=True)
        context.exit(1)


for _name, (_gpu, _cpu) in DEFAULTS.items():
    main.params.append(
        click.Option([f"--{_name}"], type=int, help=f"Default {_gpu}; on a CPU {_cpu}.")
    )

if __name__ == "__main__":
    main()
