#!/usr/bin/env python3
"""Megatron-Core's experts modules against this engine's: `SequentialMLP`, `TEGroupedMLP` where
Transformer Engine is installed, and `SonicExperts` in BF16 and in FP8, at Qwen3-30B's sizes on rows
that a dispatcher has sorted. Forward and backward of one layer, gradients in fp32 `main_grad`, weights
written before every fourth micro-batch.

    benchmarks/doors_bench.py            # one Hopper GPU, 8192 tokens
    benchmarks/doors_bench.py --quick    # tiny, on a CPU: is the program right?

`benchmarks/torchtitan_bench.py` times torchtitan. A line has microseconds of a micro-batch, median of
rounds in turns; the gain over the fastest stock module; MiB of a micro-batch above what lies there
before it; and the relative RMSE of the output against fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import click
import timing
import torch
from timing import Way, cell, markdown

ROWS = 16  # of the output are compared with fp32
KEPT = 4  # micro-batches of one set of weights
MODES = (("bf16", "off"), ("fp8", "perf"))  # ours
Tensor = torch.Tensor


class Sizes(NamedTuple):
    """One layer of experts and its batch."""

    hidden: int = 2048
    inner: int = 768
    experts: int = 128
    topk: int = 8
    tokens: int = 8192


TINY = Sizes(64, 64, 4, 2, 48)


class Contestant:
    """One module, and a batch of rows in expert order that a router which is not balanced chose. Where
    data parallelism adds what is in `.grad`, `main_grad` gets it.
    """

    def __init__(self, module: torch.nn.Module, sizes: Sizes, device: str) -> None:
        torch.manual_seed(0)
        scores, ids = torch.rand(sizes.tokens, sizes.experts).topk(sizes.topk, 1)
        self.ids, order = ids.reshape(-1).sort(stable=True)
        tokens = (torch.randn(2, sizes.tokens, sizes.hidden)).to(device, torch.bfloat16)
        x, self.dout = tokens[:, order // sizes.topk]
        self.x, self.module, self.kept = x.requires_grad_(), module, 0
        self.scores = (scores.reshape(-1)[order] / sizes.topk).to(device).requires_grad_()
        # On the host, where the stock modules want them.
        self.counts = torch.bincount(self.ids, minlength=sizes.experts)
        torch.manual_seed(1)
        named = sorted(module.named_parameters(), key=_place)
        self.weights = [parameter for _, parameter in named]
        for parameter in self.weights:
            with torch.no_grad():  # the same values for all, whatever they call them
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[1] ** -0.5)
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False

    def micro_batch(self) -> Tensor:
        """Forward and backward, and what Megatron-Core's data parallelism does behind it."""
        for parameter in self.weights if self.kept % KEPT == 0 else ():
            torch.autograd.graph.increment_version(parameter)
        self.kept += 1
        out = self.module(self.x, self.counts, self.scores)[0]
        out.backward(self.dout)
        for parameter in self.weights:
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:
                parameter.main_grad.add_(parameter.grad)
            parameter.grad = None
        self.clear()
        return out.detach()

    def clear(self) -> None:
        """Drop the gradients of rows and scores."""
        self.x.grad = self.scores.grad = None

    def settle(self) -> None:
        """Micro-batches of one set of weights."""
        for _ in range(KEPT):
            self.micro_batch()

    def error(self) -> float:
        """Relative RMSE of the output, on a few rows."""
        exact = torch.stack([self._exact(row) for row in range(ROWS)])
        return float((self.micro_batch()[:ROWS].float() - exact).norm() / exact.norm())

    def _exact(self, row: int) -> Tensor:
        x, expert = self.x[row].float(), int(self.ids[row])
        gate, up = self.weights[expert].float().chunk(2)
        down = self.weights[len(self.weights) // 2 + expert].float()
        return self.scores[row] * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))


def megatron_modules(sizes: Sizes, device: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """Every experts module of Megatron-Core that this machine can build, stock ones first."""
    from megatron.core import parallel_state
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
        # Its random states on a GPU know their ranks by groups of processes, of one here.
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
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
    for name, mode in MODES:
        made = SonicExperts(sizes.experts, config, pg_collection=groups, fp8_mode=mode)
        yield name, made


def _place(named: tuple[str, Any]) -> tuple[bool, int]:
    """Up-projections first, in the order of the experts, whoever names them."""
    name = named[0]
    number = name.split(".")[1] if "local_experts" in name else name.rsplit("weight", 1)[-1]
    return "linear_fc2" in name, int(number)


@click.command(help=__doc__)
@timing.quick_option
@timing.rounds_option(20)
def main(quick: bool, rounds: int) -> None:
    """Print a table."""
    device = timing.device_of(quick)
    sizes = TINY if quick else Sizes()
    made = {name: Contestant(m, sizes, device) for name, m in megatron_modules(sizes, device)}
    ways = {name: Way(one.micro_batch, one.settle, one.clear) for name, one in made.items()}
    errors = {name: one.error() for name, one in made.items()}
    found = timing.measured(ways, device, rounds)
    stock = min(each["wall"] for name, each in found.items() if name not in dict(MODES))
    rows = (
        (
            name,
            cell(each["wall"]),
            cell(stock / each["wall"], ".2f"),
            cell(each["peak"]),
            cell(errors[name], ".4f"),
        )
        for name, each in found.items()
    )
    heads = "experts", "us", "gain", "peak MiB", "error"
    click.echo(f"{sizes}, {timing.machine()}\n\n{markdown(heads, rows)}")


if __name__ == "__main__":
    main()
