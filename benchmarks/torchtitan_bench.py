#!/usr/bin/env python3
"""A training step of Qwen3-30B-A3B through torchtitan, with FSDP2 and expert parallelism: its stock
experts in BF16 behind two of its dispatchers, and this engine's in BF16 and in FP8, in turn within
one job.

    torchrun --nproc-per-node 8 benchmarks/torchtitan_bench.py                   # eight GPUs, all 48 layers
    torchrun --nproc-per-node 2 benchmarks/torchtitan_bench.py --layers 6        # any number of GPUs
    torchrun --nproc-per-node 2 benchmarks/torchtitan_bench.py --quick --steps 3 # tiny, on CPUs: is it right?

| experts | what |
|---|---|
| stock | behind all-to-all |
| minimal | stock experts behind MinimalAsyncEP, which needs GPUs, several ranks and full recompute |
| bf16, fp8 | the whole routed path; the host waits for counts |
| fp8-codes | the same as fp8, and FSDP2 gathers codes of weights, quantised once per optimizer step |
| fp8-no-wait, bf16-no-wait | as fp8-codes and bf16, and the host does not wait for counts, as in the place of minimal |
| fp8-rows | the same as fp8, and tokens and gradients travel to the experts in FP8 |

| figure | what |
|---|---|
| tokens/s | of a GPU: a step by the host's clock, median without the first fifth of the steps |
| MFU | operations of a token, times tokens/s, over the dense BF16 peak, also in FP8 |
| peak GiB | of the rank with most, behind the first step |
| exchange | of a step: rows of dispatch and combine travel, or a rank waits there for another |
| loss gap | of the stock loss of the same step, the largest in all steps |

A token takes 6 N + 12 L h d s operations: N parameters multiply it (no embedding, and of E experts
K), in L layers with h heads of d, and s is the length of a sequence. The formula is that of PaLM
(arXiv:2204.02311, appendix B) as torchtitan counts: attention without a mask, nothing recomputed.

The exchange is in one further step under the profiler, mean of the ranks: all-to-all of NCCL, copies
of MinimalAsyncEP, or our kernels over symmetric memory. Sorting rows is no part of it, and neither
are all-gathers, which FSDP2 has too. Each turn makes its model and frees it, because three would not fit. All
begin with the same weights, which wait in host memory, and read the same tokens.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import click
import timing
import torch
from timing import GIB

TESTS = Path(__file__).resolve().parents[1] / "tests"
EXPERTS = (
    "stock",
    "minimal",
    "bf16",
    "fp8",
    "fp8-codes",
    "fp8-no-wait",
    "bf16-no-wait",
    "fp8-rows",
)
USUAL = EXPERTS[:6]
# Layers, experts and tokens of a sequence, of the model and of the tiny one.
SIZES, TINY = (48, 128, 4096), (4, 8, 64)
HEADS = ("experts", "tokens/s", "of stock", "step ms", "MFU", "peak GiB", "exchange", "loss gap")


def expert_parallel_of(given: int | None, experts: int) -> int:
    """Ranks that share the experts of a layer: 8, or all where there are fewer."""
    ranks = int(os.environ["WORLD_SIZE"])
    size = min(8, ranks) if given is None else given
    for count, things in ((ranks, "ranks"), (experts, "experts")):
        if count % size:
            raise click.UsageError(f"--expert-parallel {size} does not divide the {count} {things}")
    return size


def row_of(name: str, found: Any, stock: Any, tokens: int) -> str:
    """A line of the table; stock: Figures, or None where stock experts had no turn."""
    rate = tokens / found.step
    mfu = rate * found.flops / found.peak_flops if found.peak_flops else None
    gain = gap = None
    if stock is not None:
        pairs = zip(found.losses, stock.losses, strict=True)
        gain, gap = stock.step / found.step, max(abs(ours / theirs - 1) for ours, theirs in pairs)
    cells = (
        *(name, f"{rate:.0f}", timing.cell(gain, ".2f"), f"{1e3 * found.step:.1f}"),
        *(timing.cell(mfu, ".1%"), timing.cell(found.peak and found.peak / GIB, ".1f")),
        *(timing.cell(found.exchange, ".1%"), timing.cell(gap, ".3%")),
    )
    return f"| {' | '.join(cells)} |"


@click.command(help=__doc__)
@click.option("--layers", type=click.IntRange(1, SIZES[0]), help="48, or 4 tiny ones.")
@click.option("--sequences", "counts", type=click.IntRange(1), multiple=True, default=(1, 4),
              show_default=True, help="Of a GPU; may be repeated.")  # fmt: skip
@click.option("--length", type=click.IntRange(8, 40960), help="Of a sequence: 4096, or 64 tiny.")
@click.option("--steps", type=click.IntRange(2), default=50, show_default=True)
@click.option("--experts", "names", type=click.Choice(EXPERTS), multiple=True,
              help=f"May be repeated: {', '.join(USUAL)}, those that can run.")  # fmt: skip
@click.option("--expert-parallel", type=click.IntRange(1), help="8, or all ranks if fewer.")
@click.option("--checkpoint", type=click.Choice(("full", "selective", "none")), default="full",
              show_default=True, help="Activation checkpointing.")  # fmt: skip
@click.option("--compile", "backend", type=click.Choice(("inductor", "aot_eager", "none")),
              default="inductor", show_default=True, help="Of every block and the loss.")  # fmt: skip
@click.option("--micro-batches", type=click.IntRange(1), default=1, show_default=True,
              help="Of a step, whose gradients are accumulated.")  # fmt: skip
@click.option("--balanced", is_flag=True, help="Every expert gets as many tokens.")
@click.option("--together", is_flag=True, help="All models at once, in turns of five steps.")
@timing.quick_option
@timing.json_option
def main(
    layers: int | None, counts: tuple[int, ...], length: int | None, steps: int,
    names: tuple[str, ...], expert_parallel: int | None, checkpoint: str, backend: str,
    micro_batches: int, balanced: bool, together: bool, quick: bool, json_file: Path | None,
) -> None:  # fmt: skip
    """Measure; the first rank prints."""
    timing.device_of(quick)
    if quick and (layers or 1) > 8:
        raise click.UsageError(f"--layers {layers}: the tiny model has 8 layers at most")
    if "WORLD_SIZE" not in os.environ:
        raise click.ClickException("this is started by torchrun, also for one GPU")
    depth, experts, tokens = TINY if quick else SIZES
    size = expert_parallel_of(expert_parallel, experts)
    has_minimal = not quick and size > 1 and checkpoint == "full"
    if "minimal" in names and not has_minimal:
        raise click.UsageError("minimal needs GPUs, several ranks and --checkpoint full")
    names = names or tuple(name for name in USUAL if name != "minimal" or has_minimal)
    if quick:
        # Before anything of torchtitan, which asks for a GPU while it is imported.
        sys.path.insert(0, str(TESTS))
        importlib.import_module("doors.torchtitan_on_cpu")
        # Flash attention counts as random. Where a checkpointed block has something random,
        # AOTAutograd of PyTorch 2.13 takes the mesh of its experts for a tensor. FlexAttention,
        # which a GPU uses, does not count as random.
        torch.backends.cuda.enable_flash_sdp(False)
    import torchtitan_turn

    depth, tokens = layers or depth, length or tokens
    given = depth, tokens, steps, size, checkpoint, backend, quick, micro_batches, balanced
    job = torchtitan_turn.Job(*given)
    is_first = os.environ["RANK"] == "0"
    say = click.echo if is_first else lambda _: None
    ranks, rows = int(os.environ["WORLD_SIZE"]), list[dict[str, Any]]()
    say(f"{job}, ranks={ranks}")
    for count in counts:
        say(f"\n{count} sequences of a GPU\n\n| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
        of: dict[str, Any] = {}
        for group in [names] if together else [[name] for name in names]:
            of |= torchtitan_turn.run_turns(job, group, count)
            for name in group:
                found = of[name]
                say(row_of(name, found, of.get("stock"), count * tokens * micro_batches))
                rows.append(
                    {"sequences": count, "experts": name, "step": found.step, **vars(found)}
                )
            # At once, because a later turn may run out of memory.
            file = json_file if is_first else None
            timing.write_figures(file, ranks=ranks, job=vars(job), rows=rows)
        for name, found in of.items():
            say(f"\nloss of {name}: {' '.join(f'{loss:.4f}' for loss in found.losses)}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
