#!/usr/bin/env python3
"""A training step of Qwen3-30B-A3B with fewer layers and all its other sizes (attention, vocabulary,
bf16 parameters, fused AdamW): transformers' own `grouped_mm`, and this engine in BF16 and in FP8.
Every decoder layer is compiled, or none.

    benchmarks/model_step_bench.py                                     # one GPU: 6 layers, 16,384 tokens
    benchmarks/model_step_bench.py --layers 12 --tokens 8192 --checkpoint
    benchmarks/model_step_bench.py --tokens 2048 --compile             # every layer compiled
    benchmarks/model_step_bench.py --quick                             # tiny, on a CPU: is it right?

| figure | what |
|---|---|
| tokens/s | of a step by the host's clock, median of the rounds, in which the implementations take turns |
| ms | the same as a time; a step is synchronised, or with `--steps N` the N steps of a round together |
| peak GiB | of a step, with parameters, gradients, AdamW's state, and in FP8 the codes of weights |
| loss | of the last step: the implementations train one model in turns, so it must stay about equal |

There is one model, whose experts implementation changes between rounds: three of them would not fit.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from sonicmoe.bench.runner import machine
from sonicmoe.integrations.transformers import invalidate_caches, register

IMPLEMENTATIONS = ("grouped_mm", "sonicmoe", "sonicmoe_fp8")
LENGTH = 4096  # of a sequence, at most
WARM_UPS = 3
GIB = 1 << 30


def config_of(layers: int, quick: bool) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B's sizes and fewer layers; with `quick` the same structure, tiny."""
    sizes = dict(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8,
    )  # fmt: skip
    tiny = dict(
        vocab_size=256, hidden_size=64, intermediate_size=192, moe_intermediate_size=64,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=4,
        num_experts_per_tok=2,
    )  # fmt: skip
    return Qwen3MoeConfig(
        **(tiny if quick else sizes),
        num_hidden_layers=layers,
        norm_topk_prob=True,
        output_router_logits=False,
        use_cache=False,  # a cache of keys and values per layer would be a graph per layer
        max_position_embeddings=LENGTH,
    )


@dataclass
class Figures:
    """Of one implementation."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    loss: float = float("nan")


class Training:
    """The model, its optimizer and a stream of random tokens."""

    def __init__(
        self, layers: int, tokens: int, compiled: bool, checkpoint: bool, quick: bool
    ) -> None:
        torch.manual_seed(0)
        self.device = "cpu" if quick else "cuda"
        with torch.device(self.device):
            self.model = AutoModelForCausalLM.from_config(
                config_of(layers, quick), dtype=torch.bfloat16
            )
        self.model.train()
        if checkpoint:
            self.model.gradient_checkpointing_enable()
        if compiled:
            for layer in self.model.model.layers:
                layer.compile(backend="aot_eager" if quick else "inductor")
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=not quick)
        length = min(tokens, LENGTH)
        self._shape = tokens // length, length

    def steps(self, count: int) -> float:
        """Forward, backward and AdamW; the loss of the last step, which waits for the device."""
        for _ in range(count):
            ids = torch.randint(self.model.config.vocab_size, self._shape, device=self.device)
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        return float(loss.detach())

    def round(self, implementation: str, count: int, figures: Figures) -> None:
        """Time `count` steps of an implementation, behind as many that it needs to warm up."""
        self.model.set_experts_implementation(implementation)
        self.steps(1)  # another implementation ran before: caches, and in FP8 the codes of weights
        if self.device != "cpu":
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        figures.loss = self.steps(count)
        figures.seconds.append((time.perf_counter() - begin) / count)
        if self.device != "cpu":
            figures.peak = max(figures.peak, torch.cuda.max_memory_allocated())
        # What this implementation keeps beside the weights must not count as another's memory.
        invalidate_caches(self.model)


def measure(training: Training, rounds: int, steps: int) -> dict[str, Figures]:
    """Rounds of all implementations in turns; the first ones only warm up."""
    for name in IMPLEMENTATIONS:
        training.round(name, WARM_UPS, Figures())
    found = {name: Figures() for name in IMPLEMENTATIONS}
    for _ in range(rounds):
        for name, figures in found.items():
            training.round(name, steps, figures)
    return found


@click.command(help=__doc__)
@click.option("--layers", type=click.IntRange(1), default=6, show_default=True)
@click.option(
    "--tokens", type=click.IntRange(1), default=16384, show_default=True, help="Of a step."
)
@click.option("--compile", "compiled", is_flag=True, help="Compile every decoder layer.")
@click.option("--checkpoint", is_flag=True, help="Gradient checkpointing.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=1, show_default=True, help="Of a round.")
@click.option("--quick", is_flag=True, help="Tiny sizes on a CPU.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures too.")
def main(
    layers: int, tokens: int, compiled: bool, checkpoint: bool, rounds: int, steps: int,
    quick: bool, json_file: Path | None,
) -> None:  # fmt: skip
    """Measure and print."""
    if not quick and not torch.cuda.is_available():
        raise click.ClickException("this needs a GPU, or --quick")
    register()
    layers, tokens = (min(layers, 2), min(tokens, 64)) if quick else (layers, tokens)
    training = Training(layers, tokens, compiled, checkpoint, quick)
    click.echo(
        f"{layers} layers, {tokens} tokens, {'every layer' if compiled else 'nothing'} compiled\n"
    )
    found = measure(training, rounds, steps)
    base = statistics.median(found[IMPLEMENTATIONS[0]].seconds)
    click.echo(
        "| experts | tokens/s | ms | of grouped_mm | peak GiB | loss |\n|---|---|---|---|---|---|"
    )
    rows: dict[str, Any] = {}
    for name, figures in found.items():
        seconds = statistics.median(figures.seconds)
        rows[name] = {"seconds": figures.seconds, "peak": figures.peak, "loss": figures.loss}
        click.echo(
            f"| {name} | {tokens / seconds:.0f} | {1e3 * seconds:.1f} | {base / seconds:.2f}x "
            f"| {figures.peak / GIB:.1f} | {figures.loss:.3f} |"
        )
    if json_file is not None:
        said = {"layers": layers, "tokens": tokens, "compiled": compiled, "checkpoint": checkpoint}
        figures_of_all = {"machine": machine(), **said, "rows": rows}
        json_file.write_text(json.dumps(figures_of_all, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
