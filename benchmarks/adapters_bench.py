#!/usr/bin/env python3
"""LoRA on the experts of real models: adapters of both projections on frozen weights, beside the
same layer trained whole, and beside peft alone. One layer, forward and backward, bf16 tokens.

    benchmarks/adapters_bench.py                          # one Hopper GPU: Qwen3-30B-A3B, 16,384 tokens, r = 16
    benchmarks/adapters_bench.py --only OLMoE --rank 64   # another row of experts_bench, another rank
    benchmarks/adapters_bench.py --json a.json; benchmarks/adapters_bench.py --show a.json
    benchmarks/adapters_bench.py --quick                  # tiny, on a CPU: is the program right?

| contestant | what |
|---|---|
| full fp8, full bf16 | this engine, every weight trains, and nobody writes one between the calls |
| frozen fp8, frozen bf16 | this engine without adapters: gradients of tokens and probabilities |
| lora fp8, lora bf16 | this engine with adapters of peft |
| lora fp8, one order | the same with `iso_weight`: codes of the weights in one order |
| lora codes | adapters of peft on experts that are codes alone; a backward transposes them |
| peft | peft alone over transformers' grouped_mm, as it runs: no graph can hold its parametrizations |
| peft compiled | what peft computes, `W + scale B A` and then grouped_mm, in one compiled graph |

| figure | what |
|---|---|
| forward, wall, busy, peak | as of experts_bench; `forward` is the wall time of the forward alone |
| adapters | what the adapters add to the forward of frozen weights, in % |
| error | the largest relative RMSE of a factor's gradient against fp32, in % |

As in experts_bench, an untimed call comes before whatever is measured: the contestants have the same
weights, and another one may have dropped the codes that FP8 keeps of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import timing
import torch
from model_experts import ROWS, Experts, Row, exact_copy, tiny, worst_error
from peft import LoraConfig, get_peft_model
from timing import Way, cell, markdown
from torch import nn

from sonicmoe import SonicMoEConfig
from sonicmoe.integrations.frozen import freeze_experts
from sonicmoe.integrations.transformers import register

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


class Layer(nn.Module):
    """Experts as a part of a model, so that peft can wrap them."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """`(x, ids, probs)` -> `[T, H]`."""
        return self.experts(*batch)  # type: ignore[no-any-return]


class Folded(nn.Module):
    """The layer as peft's wrappers compute it, in a form that the compiler takes."""

    def __init__(self, wrapper: Any) -> None:
        super().__init__()
        self.base, self.wrappers = wrapper.get_base_layer(), [wrapper, wrapper.base_layer]

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """As `Layer`."""
        weights = {}
        for wrapper in self.wrappers:
            a, b, scale = wrapper.get_delta_factors("default")
            weight = wrapper.get_param()
            weights[wrapper.parameter_name] = torch.baddbmm(weight, a, b, alpha=scale)
        return torch.func.functional_call(self.base, weights, batch)  # type: ignore[no-any-return]


@dataclass
class Contestant:
    """One way to run the layer. trains: its weights get gradients. factors: the adapters'."""

    experts: Experts
    module: Callable[..., torch.Tensor]
    trains: bool = False
    factors: dict[str, nn.Parameter] = field(default_factory=dict)
    config: SonicMoEConfig = field(default_factory=SonicMoEConfig)

    def forward(self) -> torch.Tensor:
        """Alone, as in training: what backward needs is kept."""
        experts = self.experts
        return self.module(experts.x, experts.ids, experts.probs)

    def call(self) -> None:
        """Forward and backward; gradients of the call before are dropped first."""
        self.experts.clear()
        for factor in self.factors.values():
            factor.grad = None
        with self.config.activate():
            self.forward().backward(self.experts.dout)

    def way(self, call: Callable[[], object]) -> Way:
        """`call`, or `forward` alone, on weights that train or do not."""

        def settle() -> None:
            self.experts.train_weights(self.trains)
            call()

        return Way(call, settle, self.experts.clear)


def adapted(
    experts: Experts, implementation: str, rank: int, in_codes: bool = False
) -> tuple[Any, dict[str, Any]]:
    """The module that peft has wrapped, and the factors of its adapters, equal for equal ranks.
    in_codes: the module's weights become codes; the other modules keep theirs.
    """
    layer = Layer(experts.module(implementation))
    if in_codes:
        freeze_experts(layer)
    config = LoraConfig(
        r=rank, target_modules=[], target_parameters=TARGETS, init_lora_weights=False
    )
    torch.manual_seed(1)
    model = get_peft_model(layer, config)
    factors = {name: p for name, p in model.named_parameters() if "lora_" in name}
    return layer.experts, factors


def contestants(experts: Experts, rank: int, ours: bool = False) -> dict[str, Contestant]:
    """All of them, or those of this engine, over the same weights."""
    experts.train_weights(False)  # before peft freezes what it finds
    made = {}
    for name, implementation in (("fp8", "sonicmoe_fp8"), ("bf16", "sonicmoe")):
        module = experts.module(implementation)
        made[f"full {name}"] = Contestant(experts, module, trains=True)
        made[f"frozen {name}"] = Contestant(experts, module)
        wrapped, factors = adapted(experts, implementation, rank)
        made[f"lora {name}"] = Contestant(experts, wrapped, factors=factors)
    wrapped, factors = adapted(experts, "sonicmoe_fp8", rank)
    one_order = SonicMoEConfig(iso_weight=True)
    made["lora fp8, one order"] = Contestant(experts, wrapped, factors=factors, config=one_order)
    wrapped, factors = adapted(experts, "sonicmoe_fp8", rank, in_codes=True)
    made["lora codes"] = Contestant(experts, wrapped, factors=factors)
    if ours:
        return made
    wrapped, factors = adapted(experts, "grouped_mm", rank)
    made["peft"] = Contestant(experts, wrapped, factors=factors)
    folded = torch.compile(Folded(wrapped), backend=timing.backend_of(experts.device))
    made["peft compiled"] = Contestant(experts, folded, factors=factors)
    return made


def gradients(contestant: Contestant) -> dict[str, torch.Tensor]:
    """Gradients of the factors, in fp32."""
    contestant.call()
    return {n: f.grad.float() for n, f in contestant.factors.items() if f.grad is not None}


def exact_gradients(experts: Experts, rank: int) -> dict[str, torch.Tensor]:
    """Gradients of the factors in fp32, by the reference engine."""
    wide = exact_copy(experts)
    module, factors = adapted(wide, "sonicmoe", rank)
    with torch.no_grad():
        for factor in factors.values():  # peft's are rounded to the weights' dtype elsewhere
            factor.copy_(factor.to(torch.bfloat16))
    with SonicMoEConfig(engine="reference").activate():
        return gradients(Contestant(wide, module, factors=factors))


def measure(row: Row, rank: int, rounds: int, device: str, ours: bool = False) -> dict[str, Any]:
    """All figures of a row."""
    experts = Experts(row, device)
    made = contestants(experts, rank, ours)
    exact, errors = exact_gradients(experts, rank), {}
    for name, contestant in made.items():
        if contestant.factors:
            experts.train_weights(False)
            errors[name] = worst_error(gradients(contestant), exact)
    ways = {
        (name, kind): each.way(getattr(each, kind))
        for name, each in made.items()
        for kind in ("call", "forward")
    }
    found = timing.measured(ways, device, rounds)
    figures = {
        name: {"forward": found[name, "forward"]["wall"], **found[name, "call"]} for name in made
    }
    return {"row": row._asdict(), "rank": rank, "errors": errors, "figures": figures}


def table(found: dict[str, Any]) -> str:
    """A row a contestant."""
    figures, errors = found["figures"], found["errors"]
    full, stock = figures["full fp8"], figures.get("peft compiled")
    heads = (
        *(
            f"{Row(**found['row']).title}, r = {found['rank']}",
            "forward us",
            "adapters %",
            "wall us",
        ),
        *("of full fp8", "as fast as peft compiled", "busy us"),
        *("peak MiB", "of full fp8", "error %"),
    )
    rows = []
    for name, each in figures.items():
        kind, _, precision = name.partition(" ")
        frozen = "frozen bf16" if precision == "bf16" else "frozen fp8"
        base = figures[frozen]["forward"] if kind == "lora" else None
        rows.append((
            name, cell(each["forward"]), cell(base and 100 * (each["forward"] / base - 1), ".1f"),
            cell(each["wall"]), cell(each["wall"] / full["wall"], ".2f"),
            cell(stock and stock["wall"] / each["wall"], ".2f") + ("x" if stock else ""),
            cell(each["busy"]), cell(each["peak"]),
            cell(each["peak"] / full["peak"] if full["peak"] else None, ".2f"),
            cell(100 * errors[name] if name in errors else None, ".2f"),
        ))  # fmt: skip
    return markdown(heads, rows)


@click.command(help=__doc__)
@click.option("--only", default="Qwen3-30B-A3B", help="Rows whose title contains this.")
@click.option("--tokens", type=click.IntRange(1), default=16384, show_default=True)
@click.option("--rank", type=click.IntRange(1, 128), default=16, show_default=True)
@timing.rounds_option()
@click.option("--ours", is_flag=True, help="Without peft alone, which takes most of the time.")
@timing.quick_option
@timing.json_option
@click.option("--show", type=click.Path(path_type=Path), help="Print such a file only.")
def main(
    only: str, tokens: int, rank: int, rounds: int, ours: bool, quick: bool, json_file: Path | None,
    show: Path | None,
) -> None:  # fmt: skip
    """Measure, and print."""
    if show is not None:
        every = json.loads(show.read_text(encoding="utf-8"))["rows"]
    else:
        device = timing.device_of(quick)
        register()
        chosen = {
            row.model: row for row in ROWS if only in row.title
        }.values()  # of several sizes, one
        rows = [tiny(row) if quick else row._replace(tokens=tokens) for row in chosen]
        every = [measure(row, rank, rounds, device, ours) for row in rows]
        timing.write_figures(json_file, rows=every)
    for found in every:
        click.echo(table(found))


if __name__ == "__main__":
    main()
