#!/usr/bin/env python3
"""A training step of Qwen3-30B-A3B with fewer layers under FSDP2 over all GPUs of a host: each decoder
layer is compiled and a unit of its own. One process per GPU; the ways take turns.

    benchmarks/fsdp_bench.py --json a.json                             # all GPUs, 4,096 and 16,384 tokens each
    torchrun --nproc-per-node 2 benchmarks/fsdp_bench.py --layers 4 --trace
    benchmarks/fsdp_bench.py --way stock --way codes
    benchmarks/fsdp_bench.py --quick                                   # tiny, two CPU ranks: is it right?

| way | what |
|---|---|
| stock | transformers' `grouped_mm` |
| bf16, fp8 | this engine, on gathered values |
| codes | this engine in FP8, on gathered codes (`sonicmoe.fsdp.gather_codes`) |

| figure | what |
|---|---|
| ms | of a step by the host's clock, median of the rounds; the N steps of a round are timed together |
| gathered MB | what a rank gives to the all-gathers of decoder layers in one step, experts and the rest |
| peak GiB | of a step on this GPU, without the parameters and AdamW's state of the other models |
| loss | of the last step, on this rank |

Values and codes need models of their own, with equal weights at the beginning.
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import timing
import torch
import torch.distributed as dist
from model_step_bench import Figures, Training, config_of
from rank_processes import run_ranks, world_size
from timing import GIB, WARM_UPS
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from sonicmoe import SonicMoEConfig
from sonicmoe.fsdp import gather_codes
from sonicmoe.integrations.transformers import register

# Implementation of the experts, and the configuration under which codes are gathered; None: values.
WAYS: dict[str, tuple[str, SonicMoEConfig | None]] = {
    "stock": ("grouped_mm", None),
    "bf16": ("sonicmoe", None),
    "fp8": ("sonicmoe_fp8", None),
    "codes": ("sonicmoe_fp8", SonicMoEConfig(fp8_mode="perf")),
}
VOCABULARY = 32000
OF_A_LAYER = 5  # inputs of an all-gather, at least; embeddings, norm and head are three


class Gathered:
    """Bytes of this rank's inputs to FSDP2's all-gathers of layers, counted where it copies them. It
    stands for the operator that does.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._copy_in = torch.ops.fsdp.all_gather_copy_in
        torch.ops.fsdp.all_gather_copy_in = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._copy_in, name)  # the compiler asks every operator for its overloads

    def __call__(self, inputs: Any, *others: Any) -> Any:
        if len(inputs) >= OF_A_LAYER:
            self.bytes += sum(each.numel() * each.element_size() for each in inputs)
        return self._copy_in(inputs, *others)


@dataclass
class ShardedFigures(Figures):
    """What was found about one way and one number of tokens."""

    gathered: int = 0
    trace: dict[str, Any] = field(default_factory=dict)


class Sharded(Training):
    """A sharded model, whose `resident` bytes are its parameters, AdamW's state and codes of shards."""

    def __init__(
        self, gathered: Gathered, codes: SonicMoEConfig | None, layers: int, device: str
    ) -> None:
        """codes: the configuration under which codes are gathered; None: values."""
        self.gathered, self.codes, self.resident, self._has_state = gathered, codes, 0, False
        config = config_of(layers, device == "cpu")
        config.vocab_size = min(config.vocab_size, VOCABULARY)
        before = torch.cuda.memory_allocated()
        super().__init__(config, device, compiled=True)
        self.resident = torch.cuda.memory_allocated() - before

    def prepare(self) -> None:
        if self.codes is not None:
            # Rounds run without a configuration, because a graph is of one only.
            self.model.set_experts_implementation("sonicmoe_fp8")
            with self.codes.activate():
                gather_codes(self.model)

    def shard(self, part: torch.nn.Module) -> None:
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        if part is self.model:
            # By itself FSDP2 gathers a layer when the host comes to it, which is late where a step waits for the host.
            for layer, following in pairwise(part.model.layers):
                layer.set_modules_to_forward_prefetch([following])

    def steps(self, tokens: int, count: int) -> float:
        before = torch.cuda.memory_allocated()
        last = super().steps(tokens, count)
        if not self._has_state:
            self.resident += torch.cuda.memory_allocated() - before
        self._has_state = True
        return last

    def meet(self) -> None:
        dist.barrier()
        self.gathered.bytes = 0


class Rank:
    """What one rank measures. Prints where it is the first."""

    def __init__(self, device: torch.device, options: dict[str, Any]) -> None:
        self.device, self.options = device, options
        self.on_gpu = device.type == "cuda"
        self.say = click.echo if dist.get_rank() == 0 else lambda _: None
        self.gathered = Gathered()
        self.trainings: dict[Any, Sharded] = {}

    def training(self, way: str) -> Sharded:
        """The model of this way; ways on values share one."""
        _, config = WAYS[way]
        if config not in self.trainings:
            self.say(f"a model for {way} ...")
            given = self.gathered, config, self.options["layers"], str(self.device)
            self.trainings[config] = Sharded(*given)
            gc.collect()
            if self.on_gpu:
                torch.cuda.empty_cache()
        return self.trainings[config]

    def round(self, way: str, tokens: int, count: int, figures: ShardedFigures) -> None:
        """Time `count` steps behind one that follows the change of the implementation."""
        training = self.training(way)
        training.timed(WAYS[way][0], tokens, count, figures)
        figures.gathered = self.gathered.bytes // count

    def trace(self, way: str, tokens: int, figures: ShardedFigures) -> None:
        """One step, by kernel."""
        training = self.training(way)
        training.model.set_experts_implementation(WAYS[way][0])
        training.steps(tokens, 1)
        figures.trace = timing.traced(lambda: training.steps(tokens, 1), self.device, 1)
        self.say(f"\n{way}, {tokens} tokens: idle {figures.trace.get('idle', 0):.1f} ms")
        for name, us in list(figures.trace.get("kernels", {}).items())[:20]:
            self.say(f"  {us:10.0f} us  {name}")

    def measure(self, tokens: int) -> dict[str, ShardedFigures]:
        """Rounds of all ways in turns; the first ones only warm up. A way that fails in those is left
        out, and the reason printed.
        """
        found = {}
        for way in self.options["ways"]:
            begin, problem = time.perf_counter(), ""
            try:
                self.round(way, tokens, 1 if not self.on_gpu else WARM_UPS, ShardedFigures())
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            failed = torch.tensor(float(bool(problem)), device=self.device)
            dist.all_reduce(failed)
            if failed.item():
                self.say(f"{way} is left out: {problem or 'another rank failed'}")
                continue
            found[way] = ShardedFigures()
            self.say(f"{way}: warm after {time.perf_counter() - begin:.0f} s")
        for index in range(self.options["rounds"]):
            for way, figures in found.items():
                self.round(way, tokens, self.options["steps"], figures)
            took = ", ".join(f"{way} {1e3 * f.seconds[-1]:.1f}" for way, f in found.items())
            self.say(f"round {index + 1}, ms: {took}")
        for way, figures in found.items():
            others = (t for t in self.trainings.values() if t is not self.training(way))
            figures.peak -= sum(other.resident for other in others)
            if self.options["trace"] and self.on_gpu:
                self.trace(way, tokens, figures)
        return found


def table(found: dict[str, ShardedFigures], tokens: int) -> str:
    """In Markdown."""
    first = next(iter(found.values()))
    base, rows = statistics.median(first.seconds), []
    for way, figures in found.items():
        seconds = statistics.median(figures.seconds)
        rows.append((
            *(way, f"{tokens / seconds:.0f}", f"{1e3 * seconds:.1f}", f"{base / seconds:.2f}x"),
            f"{figures.gathered / 1e6:.1f}", f"{figures.gathered / max(1, first.gathered):.3f}",
            *(f"{figures.peak / GIB:.1f}", f"{figures.loss:.3f}"),
        ))  # fmt: skip
    heads = ("way", "tokens/s of a GPU", "ms", "of the first", "gathered MB", "of the first")
    return f"\n{tokens} tokens of a GPU\n\n" + timing.markdown((*heads, "peak GiB", "loss"), rows)


def run_rank(
    rank: int, device: torch.device, size: int, tokens: list[int], json_file: Path | None,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """One rank's part of everything."""
    register()
    measuring, written = Rank(device, options), []
    measuring.say(f"{size} ranks, {options['layers']} layers, {timing.machine()}")
    for count in tokens:
        found = measuring.measure(count)
        measuring.say(table(found, count))
        written.append({"tokens": count, "rows": {way: vars(f) for way, f in found.items()}})
        # After every size: a later one may not fit.
        file = json_file if rank == 0 else None
        timing.write_figures(file, ranks=size, options=options, sizes=written)


@click.command(help=__doc__)
@click.option("--layers", type=click.IntRange(1), default=6, show_default=True)
@click.option("--tokens", type=click.IntRange(1), multiple=True, default=(4096, 16384),
              show_default=True, help="Of a step and a GPU; several times for several sizes.")  # fmt: skip
@click.option("--way", "ways", multiple=True, type=click.Choice(list(WAYS)), default=list(WAYS),
              show_default=True)  # fmt: skip
@timing.rounds_option()
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="Of a round.")
@click.option("--trace", is_flag=True, help="Kernels of one step, and time without any.")
@click.option("--ranks", type=click.IntRange(1), help="All GPUs; 2 with --quick.")
@timing.quick_option
@timing.json_option
def main(
    tokens: tuple[int, ...], ranks: int | None, quick: bool, json_file: Path | None, **options: Any
) -> None:
    """Start the ranks, or be one of torchrun's."""
    timing.device_of(quick)
    if quick:
        tokens, options["layers"] = (64,), min(options["layers"], 2)
    size = world_size(ranks, quick)
    run_ranks(run_rank, size, quick, size, list(tokens), json_file, options)


if __name__ == "__main__":
    main()
