#!/usr/bin/env python3
"""The experts module of a trainer, its own against this engine's: one layer, forward and backward of
rows that its dispatcher has sorted, gradients in fp32 `main_grad`, weights written before every
fourth micro-batch.

    benchmarks/doors_bench.py             # one Hopper GPU, Qwen3-30B's layer at 8192 tokens
    benchmarks/doors_bench.py --quick     # tiny, on a CPU: is the program right?

Megatron-Core: `SequentialMLP`, `TEGroupedMLP` where Transformer Engine is installed, and
`SonicExperts` in BF16 and in FP8. Each line has microseconds of a micro-batch, median of the rounds,
in which the contestants take turns; the gain over the fastest stock module; MiB of a micro-batch
above what lies there before it; and the relative RMSE of the output against fp32.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

KEPT, MIB = 4, 1 << 20  # micro-batches of one set of weights
Tensor = torch.Tensor


class Sizes(NamedTuple):
    """One layer of experts and its batch."""

    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    topk: int = 8
    tokens: int = 8192


TINY = Sizes(64, 64, 4, 2, 48)


class Batch(NamedTuple):
    """Rows in expert order, their counts on the host, their probabilities, and dout."""

    x: Tensor
    counts: Tensor
    probs: Tensor
    dout: Tensor

    @classmethod
    def of(cls, sizes: Sizes, device: str) -> Batch:
        """Of a router that is not balanced."""
        torch.manual_seed(0)
        ids = torch.rand(sizes.tokens, sizes.experts).topk(sizes.topk, 1).indices
        counts = torch.bincount(ids.reshape(-1), minlength=sizes.experts)
        shape = ids.numel(), sizes.hidden
        x, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        probs = torch.rand(shape[0], device=device) / sizes.topk
        return cls(x.requires_grad_(), counts, probs.requires_grad_(), dout)


def megatron_modules(sizes: Sizes, device: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every experts module of Megatron-Core that this machine can build, stock ones first."""
    # Here, so that the machine need not have every trainer.
    from megatron.core.extensions import transformer_engine
    from megatron.core.tensor_parallel import layers, model_parallel_cuda_manual_seed
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    from sonicmoe.integrations.megatron import SonicExperts

    one = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    groups = SimpleNamespace(ep=one, expt_tp=one, expt_dp=one)
    config = TransformerConfig(
        num_layers=1, num_attention_heads=1, hidden_size=sizes.hidden,
        num_moe_experts=2 * sizes.experts, expert_model_parallel_size=2,  # one rank's share of two
        moe_ffn_hidden_size=sizes.inner, activation_func=torch.nn.functional.silu,
        gated_linear_unit=True, add_bias_linear=False, bias_dropout_fusion=False,
        params_dtype=torch.bfloat16, use_cpu_initialization=device == "cpu",
        bias_activation_fusion=device != "cpu",
        gradient_accumulation_fusion=layers._grad_accum_fusion_available,
    )  # fmt: skip
    if device != "cpu":
        model_parallel_cuda_manual_seed(0, force_reset_rng=True)
    kinds = {"linear_fc1": layers.ColumnParallelLinear, "linear_fc2": layers.RowParallelLinear}
    plain = MLPSubmodules(**kinds)
    yield "SequentialMLP", SequentialMLP(sizes.experts, config, plain, groups)
    config.gradient_accumulation_fusion = True
    if transformer_engine.HAVE_TE:
        grouped = MLPSubmodules(
            linear_fc1=transformer_engine.TEColumnParallelGroupedLinear,
            linear_fc2=transformer_engine.TERowParallelGroupedLinear,
        )
        yield "TEGroupedMLP", TEGroupedMLP(sizes.experts, config, grouped, groups)
    for name, mode in (("bf16", "off"), ("fp8", "perf")):
        made = SonicExperts(sizes.experts, config, pg_collection=groups, fp8_mode=mode)
        yield name, made


class Contestant:
    """One module, and what was found about it."""

    def __init__(self, module: torch.nn.Module, batch: Batch) -> None:
        self.module, self.batch = module, batch
        self.walls: list[float] = []
        self.device = batch.x.device.type
        torch.manual_seed(1)
        for _, parameter in sorted(module.named_parameters(), key=_place):
            with torch.no_grad():  # the same values for all, whatever they call them
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[1] ** -0.5)
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def micro_batch(self) -> Tensor:
        """Forward and backward, and what data parallelism does with `.grad`."""
        batch = self.batch
        out: Tensor = self.module(batch.x, batch.counts, batch.probs)[0]
        out.backward(batch.dout)
        for parameter in self.module.parameters():
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:  # type: ignore
                parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
            parameter.grad = None
        batch.x.grad = batch.probs.grad = None
        return out.detach()

    def round(self) -> None:
        """One set of weights."""
        self._wait()
        begin = time.perf_counter()
        for parameter in self.module.parameters():
            torch.autograd.graph.increment_version(parameter)
        for _ in range(KEPT):
            self.micro_batch()
        self._wait()
        self.walls.append(1e6 * (time.perf_counter() - begin) / KEPT)

    def peak(self) -> float:
        """MiB of a micro-batch above what lies there before it."""
        if self.device == "cpu":
            return 0.0
        self._wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.micro_batch()
        self._wait()
        return (torch.cuda.max_memory_allocated() - before) / MIB

    def error(self) -> float:
        """Relative RMSE of the output, on the rows of the first expert that has any."""
        weights = [
            p.detach().float() for _, p in sorted(self.module.named_parameters(), key=_place)
        ]
        experts, counts = len(weights) // 2, self.batch.counts
        expert = int((counts > 0).nonzero()[0])
        rows = slice(int(counts[:expert].sum()), int(counts[: expert + 1].sum()))
        gate, up = (self.batch.x.detach()[rows].float() @ weights[expert].T).chunk(2, -1)
        exact = (torch.nn.functional.silu(gate) * up) @ weights[experts + expert].T
        exact = exact * self.batch.probs.detach()[rows].unsqueeze(-1)
        return float((self.micro_batch()[rows].float() - exact).norm() / exact.norm())

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


def _place(named: tuple[str, Any]) -> tuple[bool, int]:
    """Up-projections first, in the order of the experts, whoever names them."""
    name = named[0]
    number = name.split(".")[1] if "local_experts" in name else name.rsplit("weight", 1)[-1]
    return "linear_fc2" in name, int(number)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="Tiny sizes on a CPU.")
@click.option("--rounds", default=20, show_default=True, help="Rounds of every contestant.")
def main(quick: bool, rounds: int) -> None:
    """Print a table."""
    device, sizes = ("cpu", TINY) if quick else ("cuda", Sizes())
    batch = Batch.of(sizes, device)
    made = {name: Contestant(m, batch) for name, m in megatron_modules(sizes, device)}
    for contestant in made.values():
        contestant.round()
        contestant.walls.clear()
    for _ in range(rounds):
        for contestant in made.values():
            contestant.round()
    walls = {name: statistics.median(contestant.walls) for name, contestant in made.items()}
    stock = min(wall for name, wall in walls.items() if name.endswith("MLP"))
    print(f"Megatron-Core, {sizes}, {torch.cuda.get_device_name() if not quick else 'a CPU'}")
    for name, contestant in made.items():
        figures = f"{stock / walls[name]:.2f}x  {contestant.peak():.0f} MiB  "
        print(f"{name:14}{walls[name]:10.0f} us  {figures}error {contestant.error():.4f}")


if __name__ == "__main__":
    main()
