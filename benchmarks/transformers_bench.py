#!/usr/bin/env python3
"""transformers' Qwen3-MoE with its own `grouped_mm`, with `sonicmoe` and with `sonicmoe_fp8`: time
and memory of one sparse block and of a model's training step, and the loss of a short training run.

    benchmarks/transformers_bench.py                  # one GPU, expert sizes of Qwen3-30B-A3B
    benchmarks/transformers_bench.py --device cpu     # tiny: is the program right?

| figure | what |
|---|---|
| block | median microseconds of forward and backward by the device's clock; peak MiB above the weights and gradients |
| step | median milliseconds of forward, backward, clipping and AdamW, by the host's clock; peak GiB of all |
| loss | mean cross entropy of the last ten steps on the bytes of the standard library; weights and batches are equal |

Implementations take turns in the block. Models are trained one after another, because each fills
much of the memory.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from ernie_compat.corpus import Corpus, load_corpus
from sonicmoe.bench.runner import machine
from sonicmoe.integrations.transformers import register

IMPLEMENTATIONS = ("grouped_mm", "sonicmoe", "sonicmoe_fp8")
WARM_UPS = 3
MIB = 1 << 20
LAST = 10  # steps whose losses are averaged


class Sizes(NamedTuple):
    """Of the model and its batches; `tokens` is `batch * length`."""

    hidden: int
    intermediate: int
    experts: int
    topk: int
    layers: int
    batch: int
    length: int

    @property
    def tokens(self) -> int:
        return self.batch * self.length


SIZES = {"cuda": Sizes(2048, 768, 128, 8, 4, 4, 2048), "cpu": Sizes(64, 64, 4, 2, 1, 2, 32)}


def config_of(sizes: Sizes, implementation: str) -> Qwen3MoeConfig:
    """Attention as in Qwen3-30B-A3B, and a vocabulary of bytes."""
    heads = sizes.hidden // 64
    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        moe_intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 8),
        head_dim=128 if sizes.hidden >= 1024 else 32,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.topk,
        norm_topk_prob=True,
        output_router_logits=False,
        max_position_embeddings=sizes.length,
    )
    config._experts_implementation = implementation
    return config


class Block:
    """One sparse block, its gradients in `.grad`."""

    def __init__(self, sizes: Sizes, implementation: str, device: str) -> None:
        torch.manual_seed(0)
        self.device, self.times = device, list[float]()
        with torch.device(device):
            self.module = Qwen3MoeSparseMoeBlock(config_of(sizes, implementation))
        for parameter in self.module.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        self.module.to(torch.bfloat16)
        shape = sizes.batch, sizes.length, sizes.hidden
        self.x = torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_()
        self.dout = torch.randn(shape, device=device).to(torch.bfloat16)

    def run(self) -> None:
        """A forward and backward; gradients of weights add up, as over micro-batches."""
        self.x.grad = None
        out = self.module(self.x)
        (out[0] if isinstance(out, tuple) else out).backward(self.dout)

    def timed(self) -> None:
        if self.device == "cpu":
            begin = time.perf_counter()
            self.run()
            self.times.append(1e6 * (time.perf_counter() - begin))
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        self.run()
        end.record()
        torch.cuda.synchronize()
        self.times.append(1e3 * start.elapsed_time(end))

    def peak(self) -> float:
        """MiB above what lies there before."""
        if self.device == "cpu":
            return 0.0
        self.x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / MIB


def blocks(sizes: Sizes, device: str, rounds: int) -> dict[str, dict[str, float]]:
    """Figures of the block by implementation."""
    made = {name: Block(sizes, name, device) for name in IMPLEMENTATIONS}
    for _ in range(rounds + WARM_UPS):
        for block in made.values():
            block.timed()
    return {
        name: {"us": statistics.median(block.times[WARM_UPS:]), "peak_mib": block.peak()}
        for name, block in made.items()
    }


def batches(corpus: Corpus, sizes: Sizes, steps: int, device: str) -> Iterator[torch.Tensor]:
    """int64 `[batch, length]` of each step."""
    for step in range(steps):
        tokens = corpus.batch(step, sizes.batch, sizes.length, 0)[:, :-1]
        yield torch.from_numpy(tokens.copy()).to(device)


def training(
    sizes: Sizes, implementation: str, device: str, steps: int, corpus: Corpus
) -> dict[str, Any]:
    """Time of a step, memory and losses of one model, bf16 weights and AdamW."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config_of(sizes, implementation),
            dtype=torch.bfloat16,
            experts_implementation=implementation,
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device != "cpu")
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    times, losses = [], []
    for ids in batches(corpus, sizes, steps, device):
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())  # waits for the device
        times.append(time.perf_counter() - begin)
    warm = times[min(WARM_UPS, steps - 1) :]
    return {
        "ms": 1e3 * statistics.median(warm),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if device != "cpu" else 0.0,
        "loss": statistics.fmean(losses[-LAST:]),
        "losses": losses,
    }


def release(device: str) -> None:
    """Have the memory of what was dropped back."""
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()


@click.command(help=__doc__)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Of blocks.")
@click.option(
    "--steps", type=click.IntRange(0), default=100, show_default=True, help="Of training."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures too.")
def main(device: str, rounds: int, steps: int, json_file: Path | None) -> None:
    """Measure and print."""
    register()
    sizes = SIZES[device]
    click.echo(f"{sizes.tokens} tokens, {sizes}")
    figures: dict[str, Any] = {"machine": machine() if device != "cpu" else {}}
    figures["block"] = blocks(sizes, device, rounds)
    click.echo("\n| block | us | of grouped_mm | peak MiB |\n|---|---|---|---|")
    first = figures["block"][IMPLEMENTATIONS[0]]["us"]
    for name, row in figures["block"].items():
        click.echo(
            f"| {name} | {row['us']:.0f} | {first / row['us']:.2f}x | {row['peak_mib']:.0f} |"
        )
    release(device)
    if steps:
        click.echo(
            "\n| model | ms per step | of grouped_mm | peak GiB | loss |\n|---|---|---|---|---|"
        )
        corpus, figures["training"] = load_corpus(), {}
        for name in IMPLEMENTATIONS:
            row = figures["training"][name] = training(sizes, name, device, steps, corpus)
            gain = figures["training"][IMPLEMENTATIONS[0]]["ms"] / row["ms"]
            click.echo(
                f"| {name} | {row['ms']:.1f} | {gain:.2f}x | {row['peak_gib']:.1f} | {row['loss']:.4f} |"
            )
            release(device)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
