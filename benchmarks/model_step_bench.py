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

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import timing
import torch
from timing import GIB, WARM_UPS
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from sonicmoe.integrations.transformers import invalidate_caches, register

IMPLEMENTATIONS = ("grouped_mm", "sonicmoe", "sonicmoe_fp8")
LENGTH = 4096  # of a sequence, at most


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
    """What was found about one implementation."""

    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    loss: float = float("nan")


class Training:
    """A model, its optimizer and a stream of random tokens."""

    def __init__(self, config: Qwen3MoeConfig, device: str, compiled: bool) -> None:
        torch.manual_seed(0)
        self.device, self.on_gpu = device, not device.startswith("cpu")
        with torch.device(device):
            self.model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        self.model.train()
        self.prepare()
        for layer in self.model.model.layers:
            if compiled:
                layer.compile(backend=timing.backend_of(device))
            self.shard(layer)
        self.shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=self.on_gpu)

    def prepare(self) -> None:
        """What comes before a layer is compiled."""

    def shard(self, part: torch.nn.Module) -> None:
        """What becomes of every layer, and last of the model."""

    def steps(self, tokens: int, count: int) -> float:
        """Forward, backward and AdamW; the loss of the last step, which waits for the device."""
        length = min(tokens, LENGTH)
        shape, vocabulary = (tokens // length, length), self.model.config.vocab_size
        for _ in range(count):
            ids = torch.randint(vocabulary, shape, device=self.device)
            loss = self.model(input_ids=ids, labels=ids).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(loss.detach())

    def timed(self, implementation: str, tokens: int, count: int, figures: Figures) -> None:
        """Time `count` steps of an implementation of the experts, behind one that warms up: another one
        ran before, with caches of its own, and in FP8 the codes of weights.
        """
        self.model.set_experts_implementation(implementation)
        self.steps(tokens, 1)
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self.meet()
        begin = time.perf_counter()
        figures.loss = self.steps(tokens, count)
        timing.wait(self.device)
        figures.seconds.append((time.perf_counter() - begin) / count)
        if self.on_gpu:
            figures.peak = max(figures.peak, torch.cuda.max_memory_allocated())

    def meet(self) -> None:
        """What comes between the untimed step and the timed ones."""


def measure(training: Training, tokens: int, rounds: int, steps: int) -> dict[str, Figures]:
    """Rounds of all implementations in turns; the first ones only warm up."""
    found = {name: Figures() for name in IMPLEMENTATIONS}

    def turn(name: str, count: int, figures: Figures) -> None:
        training.timed(name, tokens, count, figures)
        # What this implementation keeps beside the weights must not count as another's memory.
        invalidate_caches(training.model)

    names = {name: name for name in found}
    timing.in_turns(names, 1, lambda name: turn(name, WARM_UPS, Figures()))
    timing.in_turns(names, rounds, lambda name: turn(name, steps, found[name]))
    return found


@click.command(help=__doc__)
@click.option("--layers", type=click.IntRange(1), default=6, show_default=True)
@click.option(
    "--tokens", type=click.IntRange(1), default=16384, show_default=True, help="Of a step."
)
@click.option("--compile", "compiled", is_flag=True, help="Compile every decoder layer.")
@click.option("--checkpoint", is_flag=True, help="Gradient checkpointing.")
@timing.rounds_option()
@click.option("--steps", type=click.IntRange(1), default=1, show_default=True, help="Of a round.")
@timing.quick_option
@timing.json_option
def main(
    layers: int, tokens: int, compiled: bool, checkpoint: bool, rounds: int, steps: int,
    quick: bool, json_file: Path | None,
) -> None:  # fmt: skip
    """Measure and print."""
    device = timing.device_of(quick)
    register()
    layers, tokens = (min(layers, 2), min(tokens, 64)) if quick else (layers, tokens)
    training = Training(config_of(layers, quick), device, compiled)
    if checkpoint:
        training.model.gradient_checkpointing_enable()
    click.echo(
        f"{layers} layers, {tokens} tokens, {'every layer' if compiled else 'nothing'} compiled\n"
    )
    found = measure(training, tokens, rounds, steps)
    base = statistics.median(found[IMPLEMENTATIONS[0]].seconds)
    rows = []
    for name, figures in found.items():
        seconds = statistics.median(figures.seconds)
        peak, gain = f"{figures.peak / GIB:.1f}", f"{base / seconds:.2f}x"
        times = f"{tokens / seconds:.0f}", f"{1e3 * seconds:.1f}"
        rows.append((name, *times, gain, peak, f"{figures.loss:.3f}"))
    heads = ("experts", "tokens/s", "ms", "of grouped_mm", "peak GiB", "loss")
    click.echo(timing.markdown(heads, rows))
    said = {"layers": layers, "tokens": tokens, "compiled": compiled, "checkpoint": checkpoint}
    every: dict[str, Any] = {name: vars(figures) for name, figures in found.items()}
    timing.write_figures(json_file, **said, rows=every)


if __name__ == "__main__":
    main()
