#!/usr/bin/env python3
"""The experts module of a trainer, its own against this engine's: one layer, forward and backward,
weights written before every fourth micro-batch.

    benchmarks/doors_bench.py                          # one Hopper GPU, Qwen3-30B's layer at 8192 tokens
    benchmarks/doors_bench.py --trainer torchtitan     # the same, in the place of Megatron-Core's
    benchmarks/doors_bench.py --quick                  # tiny, on a CPU: is the program right?

Megatron-Core: `SequentialMLP`, `TEGroupedMLP` where Transformer Engine is installed, and
`SonicExperts` in BF16 and in FP8, on rows that its dispatcher has sorted, gradients in fp32
`main_grad`.

torchtitan: `RoutedExperts` as it is and under `torch.compile`, and the override `routed_experts` in
BF16 and in FP8, compiled, on tokens and what their router chose, gradients in bf16 `.grad`. FSDP2,
which torchtitan always uses, gathers the weights for every micro-batch, and no codes of them are
kept: `--kept 1` is that case.

Each line has microseconds of a micro-batch, median of the rounds, in which the contestants take
turns; the gain over the fastest stock module; MiB of a micro-batch above what lies there before it;
and the relative RMSE of the output against fp32.
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

MIB = 1 << 20
ROWS = 16  # of the output are compared with fp32
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


class Batch(NamedTuple):
    """Tokens `[T, H]`, the experts `[T, K]` that a router which is not balanced chose, their scores,
    and dout.
    """

    x: Tensor
    ids: Tensor
    scores: Tensor
    dout: Tensor

    @classmethod
    def of(cls, sizes: Sizes, device: str) -> Batch:
        """On this device."""
        torch.manual_seed(0)
        scores, ids = torch.rand(sizes.tokens, sizes.experts).topk(sizes.topk, 1)
        shape = sizes.tokens, sizes.hidden
        x, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))
        return cls(x, ids.to(device), (scores / sizes.topk).to(device), dout)

    def sorted(self) -> Batch:
        """Rows in expert order, one expert each."""
        order = self.ids.reshape(-1).argsort(stable=True)
        x, dout = (each[order // self.ids.shape[1]] for each in (self.x, self.dout))
        ids, scores = (each.reshape(-1)[order] for each in (self.ids, self.scores))
        return Batch(x, ids.unsqueeze(1), scores, dout)


class Contestant:
    """One module, and what was found about it."""

    def __init__(self, name: str, module: torch.nn.Module, batch: Batch, kept: int) -> None:
        self.name, self.module, self.batch, self.kept = name, module, batch, kept
        self.x = batch.x.detach().requires_grad_()
        self.scores = batch.scores.detach().requires_grad_()
        self.walls: list[float] = []
        self.device = batch.x.device.type

    def forward(self) -> Tensor:
        """The output of the batch."""
        raise NotImplementedError

    def weights_of(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """Gate and up `[I, H]` and down `[H, I]`."""
        raise NotImplementedError

    def take_gradients(self) -> None:
        """What the trainer does behind a backward; `.grad` adds up by itself."""

    def micro_batch(self) -> Tensor:
        """Forward and backward."""
        out = self.forward()
        out.backward(self.batch.dout)
        self.take_gradients()
        self.x.grad = self.scores.grad = None
        return out.detach()

    def round(self) -> None:
        """One set of weights."""
        self._wait()
        begin = time.perf_counter()
        for parameter in self.module.parameters():
            torch.autograd.graph.increment_version(parameter)
            parameter.grad = None
        for _ in range(self.kept):
            self.micro_batch()
        self._wait()
        self.walls.append(1e6 * (time.perf_counter() - begin) / self.kept)

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
        """Relative RMSE of the output, on a few rows."""
        exact = torch.stack([self._exact(row) for row in range(ROWS)])
        return float((self.micro_batch()[:ROWS].float() - exact).norm() / exact.norm())

    def _exact(self, row: int) -> Tensor:
        x, out = self.batch.x[row].float(), torch.zeros_like(self.batch.x[row], dtype=torch.float32)
        scores = self.batch.scores[row].reshape(-1)
        for expert, score in zip(self.batch.ids[row].tolist(), scores, strict=True):
            gate, up, down = (weight.detach().float() for weight in self.weights_of(expert))
            out += score * (down @ (torch.nn.functional.silu(gate @ x) * (up @ x)))
        return out

    def _wait(self) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()


class Megatron(Contestant):
    """Rows that a dispatcher has sorted, and gradients in `main_grad`, where data parallelism adds
    what is in `.grad`.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # On the host, where the stock modules want them.
        experts = sum("linear_fc2" in name for name, _ in self.module.named_parameters())
        self.counts = torch.bincount(self.batch.ids.reshape(-1).cpu(), minlength=experts)
        torch.manual_seed(1)
        for _, parameter in self._sorted():
            with torch.no_grad():  # the same values for all, whatever they call them
                parameter.copy_(torch.randn(parameter.shape) * parameter.shape[1] ** -0.5)
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore
            parameter.grad_added_to_main_grad = False  # type: ignore[attr-defined]

    def forward(self) -> Tensor:
        """Of the module."""
        out: Tensor = self.module(self.x, self.counts, self.scores)[0]
        return out

    def take_gradients(self) -> None:
        """As its data parallelism does."""
        for parameter in self.module.parameters():
            if parameter.grad is not None and not parameter.grad_added_to_main_grad:  # type: ignore
                parameter.main_grad.add_(parameter.grad)  # type: ignore[attr-defined]
            parameter.grad = None

    def weights_of(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """One parameter has gate and up."""
        weights = [parameter for _, parameter in self._sorted()]
        gate, up = weights[expert].chunk(2)
        return gate, up, weights[len(weights) // 2 + expert]

    def _sorted(self) -> list[tuple[str, torch.nn.Parameter]]:
        return sorted(self.module.named_parameters(), key=_place)


class Torchtitan(Contestant):
    """Tokens and what their router chose, and gradients in `.grad`."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        experts = self.module.inner_experts.num_experts
        self.counts = torch.bincount(self.batch.ids.reshape(-1), minlength=experts)
        torch.manual_seed(1)
        state = self.module.state_dict()  # which has the stock names
        for name in sorted(state):
            drawn = torch.randn(state[name].shape) * state[name].shape[2] ** -0.5
            state[name] = drawn.to(state[name])
        self.module.load_state_dict(state)

    def forward(self) -> Tensor:
        """Of the module, whose batches have one more axis."""
        given = self.x, self.scores, self.batch.ids
        out: Tensor = self.module(*(each.unsqueeze(0) for each in given), self.counts)
        return out.squeeze(0)

    def weights_of(self, expert: int) -> tuple[Tensor, Tensor, Tensor]:
        """By the stock names."""
        state = self.module.state_dict()
        w1, w3, w2 = (state[f"inner_experts.{name}"] for name in ("w1_EFD", "w3_EFD", "w2_EDF"))
        return w1[expert], w3[expert], w2[expert]


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


def torchtitan_modules(sizes: Sizes, device: str) -> Iterator[tuple[str, torch.nn.Module]]:
    """torchtitan's routed experts and ours."""
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

    from sonicmoe.integrations.torchtitan import routed_experts

    dispatcher = AllToAllTokenDispatcher.Config(num_experts=sizes.experts, top_k=sizes.topk)
    inner = GroupedExperts.Config(
        dim=sizes.hidden, hidden_dim=sizes.inner, num_experts=sizes.experts
    )
    stock = RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)
    configs = {"eager": stock, "compiled": stock}
    configs |= {name: routed_experts(stock, fp8_mode=mode) for name, mode in MODES}
    for name, config in configs.items():
        with torch.device(device):
            module = config.build().bfloat16()
        if name != "eager":
            # As torchtitan compiles a block.
            module.compile(fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
        yield name, module


def _place(named: tuple[str, Any]) -> tuple[bool, int]:
    """Up-projections first, in the order of the experts, whoever names them."""
    name = named[0]
    number = name.split(".")[1] if "local_experts" in name else name.rsplit("weight", 1)[-1]
    return "linear_fc2" in name, int(number)


@click.command(help=__doc__)
@click.option("--trainer", type=click.Choice(["megatron", "torchtitan"]), default="megatron")
@click.option("--kept", default=4, show_default=True, help="Micro-batches of one set of weights.")
@click.option("--quick", is_flag=True, help="Tiny sizes on a CPU.")
@click.option("--rounds", default=20, show_default=True, help="Rounds of every contestant.")
def main(trainer: str, kept: int, quick: bool, rounds: int) -> None:
    """Print a table."""
    device, sizes = ("cpu", TINY) if quick else ("cuda", Sizes())
    batch = Batch.of(sizes, device)
    # The machine need not have both of them.
    made: list[Contestant]
    if trainer == "megatron":
        modules, rows = megatron_modules(sizes, device), batch.sorted()
        made = [Megatron(name, module, rows, kept) for name, module in modules]
    else:
        of_titan = torchtitan_modules(sizes, device)
        made = [Torchtitan(name, module, batch, kept) for name, module in of_titan]
    for contestant in made:
        contestant.round()
        contestant.walls.clear()
    for _ in range(rounds):
        for contestant in made:
            contestant.round()
    walls = {contestant.name: statistics.median(contestant.walls) for contestant in made}
    stock = min(wall for name, wall in walls.items() if name not in dict(MODES))
    machine = "a CPU" if quick else torch.cuda.get_device_name()
    print(f"{trainer}, {sizes}, {machine}")
    for contestant in made:
        name = contestant.name
        figures = f"{stock / walls[name]:.2f}x  {contestant.peak():.0f} MiB  "
        print(f"{name:14}{walls[name]:10.0f} us  {figures}error {contestant.error():.4f}")


if __name__ == "__main__":
    main()
