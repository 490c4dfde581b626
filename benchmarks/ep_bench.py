#!/usr/bin/env python3
"""One MoE layer under expert parallelism, forward and backward: as trainers run it, and as this
package does, in turn within one process group.

    benchmarks/ep_bench.py                        # all GPUs of this host, three shapes
    torchrun --nproc-per-node 4 benchmarks/ep_bench.py --T 4096 --T 16384 --json a.json
    benchmarks/ep_bench.py --quick                # tiny, two ranks over gloo: is the program right?

| contestant | what it does |
|---|---|
| all-to-all | sorts slots by expert, waits for counts, sends a row a slot, permutes for compiled grouped_mm, and back; bf16 `.grad` |
| MinimalAsyncEP | torchtitan's dispatcher over symmetric memory with the same experts, where torchtitan is installed |
| KIND, waiting | `make_dispatcher(kind=KIND)`, `SonicMoEMlpNode` with fp32 `main_grad`; the host waits for counts |
| KIND, no wait | the same with `wait_for_counts=False`; with `max_load` where a line says "load" |
| operator, KIND, ... | the same path as one operator in a compiled graph, as torchtitan's blocks have it (`--operator`); bf16 `.grad` |
| experts alone | rows are there already |

| figure | what |
|---|---|
| ms | wall time of a call, in rows of four behind an untimed one: median of rounds of the slowest rank |
| idle | ms of a call in which this rank's GPU ran nothing (`--trace`) |
| peak | MiB of a call above what lies there before it, of the rank with most |
| held | MiB outside PyTorch's allocator, until it was warm: symmetric memory, buffers of libraries, code of kernels |
| error | relative L2 from the first contestant, the largest of y, dx, dprobs and weight gradients |

MinimalAsyncEP keeps the rows it has received in memory that the backward's exchange overwrites. Its
trainer therefore recomputes the forward. Nothing is recomputed here, so its dw1 is wrong.

`fp8-rows` sends tokens and gradients to the experts in FP8 too. FP8 quantises the weights anew in
every call, as a training does without accumulation.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click
import timing
import torch
import torch.distributed as dist
from ep_contestants import (
    PRECISIONS,
    Contestant,
    Layer,
    OurExperts,
    Shape,
    all_to_all,
    minimal_async_ep,
    our_layer,
    our_operator,
    ours_alone,
    stock_alone,
    ways,
)
from rank_processes import run_ranks, world_size
from timing import MIB, WARM_UPS, cell

from sonicmoe import SonicMoEConfig
from sonicmoe.distributed_utils import clear_ep_cache
from sonicmoe.ep import make_dispatcher
from sonicmoe.jit_warmup import warmup_jit

# Qwen3-30B-A3B's experts twice, and wide ones.
SHAPES = {"T": (8192, 16384, 8192), "H": (2048, 2048, 3072), "I": (768, 768, 1536),
          "E": (128, 128, 16), "K": (8, 8, 8)}  # fmt: skip
TINY = {"T": (64,), "H": (256,), "I": (128,), "E": (8,), "K": (2,)}
CALLS, KERNELS = 4, 14
T = TypeVar("T")
HEADS = ("contestant", "ms", "of the first", "idle", "peak", "held", "error")


def shapes_of(given: dict[str, tuple[int, ...]], ranks: int) -> list[Shape]:
    """One shape for each place of the options; an option that was given once counts for all."""
    count = max(len(values) for values in given.values())
    for name, values in given.items():
        if len(values) not in (1, count):
            raise click.UsageError(f"--{name} is given {len(values)} times; needed: 1 or {count}")
    each = {name: values * (count if len(values) == 1 else 1) for name, values in given.items()}
    shapes = [Shape(*sizes) for sizes in zip(*(each[name] for name in Shape._fields), strict=True)]
    for shape in shapes:
        if shape.E % ranks or shape.K > shape.E:
            raise click.UsageError(f"{ranks} ranks and {shape.K} slots do not suit --E {shape.E}")
    return shapes


class Ranks:
    """What the ranks do together; figures are those of the first."""

    def __init__(self, device: torch.device, said: Callable[[str], None]) -> None:
        self.device, self.say, self.skipped = device, said, dict[str, str]()

    def meet(self) -> None:
        """Wait for all ranks."""
        timing.wait(self.device)
        dist.barrier()

    def largest(self, values: list[float]) -> list[float]:
        """The largest value of all ranks, place by place."""
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.tolist()  # type: ignore[no-any-return]

    def taken_outside(self) -> float:
        """MiB of this GPU that PyTorch's allocator does not hold."""
        if self.device.type != "cuda":
            return 0.0
        free, total = torch.cuda.mem_get_info()
        return (total - free - torch.cuda.memory_reserved()) / MIB

    def tried(self, name: str, make: Callable[[], T]) -> T | None:
        """What `make` returns; None where any rank cannot make it, with the reason."""
        found, why = None, ""
        try:
            found = make()
        except Exception as error:  # whatever a version of PyTorch or torchtitan lacks
            why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if not self.largest([float(found is None)])[0]:
            return found
        self.skipped[name] = why or "another rank cannot"
        self.say(f"skipped: {name}: {self.skipped[name]}")
        return None

    def warmed_up(self, contestant: Contestant, before: float) -> Contestant:
        """The contestant, which may have taken memory outside since `before`."""
        for _ in range(WARM_UPS):
            contestant.call()
        timing.wait(self.device)
        contestant.figures["held"] = self.taken_outside() - before
        return contestant

    def timed(self, contestant: Contestant) -> None:
        """One round."""
        contestant.call()
        self.meet()
        contestant.walls.append(timing.wall_us(contestant.call, self.device, CALLS) / 1e3)


def contestants(
    layer: Layer, ranks: Ranks, precisions: tuple[str, ...], operator: bool
) -> Iterator[Contestant]:
    """All that can be made here, warmed up."""

    def made(
        name: str, make: Callable[[], Contestant], before: float | None = None
    ) -> Iterator[Contestant]:
        before = ranks.taken_outside() if before is None else before
        found = ranks.tried(name, lambda: ranks.warmed_up(make(), before))
        if found is not None:
            yield found

    yield from made("all-to-all", lambda: all_to_all(layer))
    yield from made("MinimalAsyncEP", lambda: minimal_async_ep(layer))
    yield from made("experts alone, grouped_mm", lambda: stock_alone(layer))
    experts = {name: OurExperts(layer, name) for name in precisions}
    for name, options in ways():
        before: float | None = ranks.taken_outside()
        given = {**options, "max_tokens": layer.shape.T}
        make = partial(make_dispatcher, layer.shape.E, dist.group.WORLD, **given)
        dispatcher = ranks.tried(name, make)
        if dispatcher is None:
            continue
        for precision, own in experts.items():
            whole = f"{name}, {precision}"
            given = dispatcher, precision, own
            yield from made(whole, partial(our_layer, layer, whole, *given), before)
            before = None
            if name == "collective, waiting" and precision != "fp8-rows":
                yield from made(f"experts alone, {precision}", partial(ours_alone, layer, *given))
        for precision in precisions if operator else ():
            whole = f"operator, {name}, {precision}"
            yield from made(whole, partial(our_operator, layer, whole, options, precision))


def errors_of(found: list[Contestant], ranks: Ranks) -> None:
    """Largest relative L2 from the first contestant."""
    wanted: dict[str, torch.Tensor] = {}
    for each in found:
        if each.results is None:
            continue
        each.call()
        results = each.results()
        wanted = wanted or results
        distances = [_relative(results[name], wanted[name]) for name in wanted]
        each.figures["errors"] = dict(zip(wanted, ranks.largest(distances), strict=True))
        each.figures["error"] = max(each.figures["errors"].values())


def _relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    # In fp32, because large weight gradients in fp64 would not fit.
    difference = (found.float() - wanted.float()).norm()
    return float(difference / wanted.float().norm().clamp_min(1e-30))


def measure(
    shape: Shape, ranks: Ranks, rounds: int, with_trace: bool, **options: Any
) -> list[Contestant]:
    """All contestants on one shape."""
    layer = Layer(shape, ranks.device)
    found = list(contestants(layer, ranks, **options))
    errors_of(found, ranks)
    for _ in range(rounds):
        for contestant in found:
            ranks.timed(contestant)
    for contestant in found:
        contestant.figures["ms"] = statistics.median(ranks.largest(contestant.walls))
        contestant.call()
        peak = timing.peak_mib(contestant.call, ranks.device)
        peaks = ranks.largest([peak, contestant.figures["held"]])
        contestant.figures.update(zip(("peak", "held"), peaks, strict=True))
        if with_trace:
            ranks.meet()
            contestant.figures.update(timing.traced(contestant.call, ranks.device, CALLS))
    return found


def table(found: list[Contestant], on_gpu: bool) -> Iterator[str]:
    """Markdown."""
    first, rows = found[0].figures["ms"], []
    for each in found:
        figures, name = each.figures, each.name
        gain = f"{first / figures['ms']:.2f}x" if "error" in figures else "–"
        error = f"{100 * figures['error']:.2f} %" if "error" in figures else "–"
        memory = (cell(figures[kind] if on_gpu else None) for kind in ("peak", "held"))
        idle = cell(figures.get("idle"), ".2f")
        rows.append((name, f"{figures['ms']:.2f}", gain, idle, *memory, error))
    yield timing.markdown(HEADS, rows)
    for each in found:
        if kernels := each.figures.get("kernels"):
            yield f"\n{each.name}: us of a call by kernel, of {sum(kernels.values()):.0f}"
            yield from (f"  {us:8.0f}  {name}" for name, us in list(kernels.items())[:KERNELS])


def run_rank(
    rank: int, device: torch.device, size: int, shapes: list[Shape], quick: bool,
    json_file: Path | None, options: dict[str, Any],
) -> None:  # fmt: skip
    """One rank's part of everything."""
    ranks = Ranks(device, click.echo if rank == 0 else lambda _: None)
    written: list[dict[str, Any]] = []
    ranks.say(f"{size} ranks, {timing.machine()}")
    for shape in shapes:
        ranks.say(f"\n{', '.join(f'{n}={size}' for n, size in shape._asdict().items())}\n")
        if rank == 0 and not quick:
            warm_up(shape, size, device, options["precisions"])
        ranks.meet()
        found = measure(shape, ranks, **options)
        ranks.say("\n".join(table(found, not quick)))
        rows = [{"name": each.name, "walls": each.walls, **each.figures} for each in found]
        written.append({"shape": shape._asdict(), "skipped": ranks.skipped, "rows": rows})
        # After every shape: a later one may not fit.
        file = json_file if rank == 0 else None
        timing.write_figures(file, ranks=size, options=options, shapes=written)
        del found
        clear_ep_cache()
        torch._dynamo.reset()
        gc.collect()
        ranks.skipped = {}
        if not quick:
            torch.cuda.empty_cache()


def warm_up(shape: Shape, ranks: int, device: torch.device, precisions: tuple[str, ...]) -> None:
    """Compile our kernels once, into the cache that all ranks read."""
    for mode, engine in sorted({PRECISIONS[name][:2] for name in precisions}):
        config = SonicMoEConfig(fp8_mode=mode, engine=engine)
        warmup_jit(shape.E // ranks, shape.H, shape.I, str(device), config=config)


def sizes_options(command: Callable[..., None]) -> Callable[..., None]:
    """--T, --H, --I, --E and --K."""
    texts = ("tokens of a rank", "hidden", "intermediate", "experts of all ranks", "slots")
    for name, text in reversed(list(zip(Shape._fields, texts, strict=True))):
        kind = {"type": click.IntRange(1), "multiple": True}
        words = f"{text}; several times for several shapes."
        command = click.option(f"--{name}", name, help=words, **kind)(command)  # type: ignore[arg-type]
    return command


@click.command(help=__doc__)
@sizes_options
@click.option("--ranks", type=click.IntRange(1), help="All GPUs; 2 with --quick.")
@click.option("--precision", "precisions", multiple=True, type=click.Choice(list(PRECISIONS)),
              default=tuple(PRECISIONS), show_default=True)  # fmt: skip
@timing.rounds_option(10)
@click.option("--operator", is_flag=True, help="Also the operator of torchtitan's blocks.")
@click.option("--trace", "with_trace", is_flag=True, help="Kernels, and time without any.")
@timing.quick_option
@timing.json_option
def main(ranks: int | None, quick: bool, json_file: Path | None, **options: Any) -> None:
    """Start the ranks, or be one of torchrun's."""
    timing.device_of(quick)
    usual = TINY if quick else SHAPES
    given = {name: options.pop(name) or usual[name] for name in Shape._fields}
    size = world_size(ranks, quick)
    run_ranks(run_rank, size, quick, size, shapes_of(given, size), quick, json_file, options)


if __name__ == "__main__":
    main()
