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
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from experts_bench import CALLS, MIB, WARM_UPS, busy_us, wait
from model_experts import ROWS, Experts, Row, tiny
from peft import LoraConfig, get_peft_model
from torch import nn

from sonicmoe import SonicMoEConfig
from sonicmoe.bench.runner import machine
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
    walls: list[float] = field(default_factory=list)
    forwards: list[float] = field(default_factory=list)

    def forward(self) -> torch.Tensor:
        """Alone, as in training: what backward needs is kept."""
        experts = self.experts
        return self.module(experts.x, experts.ids, experts.probs)

    def call(self) -> None:
        """Forward and backward; gradients of the call before are dropped first."""
        self.experts.clear()
        for factor in self.factors.values():
            factor.grad = None
        self.forward().backward(self.experts.dout)

    def timed(self) -> None:
        """One round of each."""
        self.experts.train_weights(self.trains)
        for found, call in ((self.walls, self.call), (self.forwards, self.forward)):
            call()  # untimed: the codes of the weights may be gone
            wait(self.experts.device)
            begin = time.perf_counter()
            for _ in range(CALLS):
                call()
            wait(self.experts.device)
            found.append(1e6 * (time.perf_counter() - begin) / CALLS)

    def figures(self) -> dict[str, float]:
        """Medians of the rounds, and what is measured once."""
        self.experts.train_weights(self.trains)
        self.call()  # as in `timed`
        device = self.experts.device
        found = {"forward": statistics.median(self.forwards), "wall": statistics.median(self.walls)}
        found |= {"busy": busy_us(self.call, device), "peak": 0.0}
        if device != "cpu":
            self.experts.clear()
            wait(device)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.call()
            wait(device)
            found["peak"] = (torch.cuda.max_memory_allocated() - before) / MIB
        return found


def adapted(experts: Experts, implementation: str, rank: int) -> tuple[Any, dict[str, Any]]:
    """The module that peft has wrapped, and the factors of its adapters, equal for equal ranks."""
    layer = Layer(experts.module(implementation))
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
    if ours:
        return made
    wrapped, factors = adapted(experts, "grouped_mm", rank)
    made["peft"] = Contestant(experts, wrapped, factors=factors)
    backend = "aot_eager" if experts.device == "cpu" else "inductor"
    folded = torch.compile(Folded(wrapped), backend=backend)
    made["peft compiled"] = Contestant(experts, folded, factors=factors)
    return made


def gradients(contestant: Contestant) -> dict[str, torch.Tensor]:
    """Of the factors, in fp32."""
    contestant.call()
    return {n: f.grad.float() for n, f in contestant.factors.items() if f.grad is not None}


def exact_gradients(experts: Experts, rank: int) -> dict[str, torch.Tensor]:
    """In fp32, by the reference engine."""
    wide = Experts.__new__(Experts)
    wide.row, wide.device, wide.ids = experts.row, experts.device, experts.ids
    wide.weights = {n: nn.Parameter(w.detach().float(), False) for n, w in experts.weights.items()}
    wide.x, wide.probs = (t.detach().float().requires_grad_() for t in (experts.x, experts.probs))
    wide.dout = experts.dout.float()
    module, factors = adapted(wide, "sonicmoe", rank)
    with SonicMoEConfig(engine="reference").activate(), torch.no_grad():
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
            found = gradients(contestant)
            errors[name] = max(
                float((found[n] - value).norm() / value.norm()) for n, value in exact.items()
            )
    for number in range(rounds + 1):
        for contestant in made.values():
            for _ in range(0 if number else WARM_UPS):
                experts.train_weights(contestant.trains)
                contestant.call()
            if number:
                contestant.timed()
    figures = {name: contestant.figures() for name, contestant in made.items()}
    return {"row": row._asdict(), "rank": rank, "errors": errors, "figures": figures}


def table(found: dict[str, Any]) -> Iterator[str]:
    """Markdown: a row a contestant."""
    figures, errors = found["figures"], found["errors"]
    full, stock = figures["full fp8"], figures.get("peft compiled")
    title = f"{Row(**found['row']).title}, r = {found['rank']}"
    heads = (
        "forward us",
        "adapters %",
        "wall us",
        "of full fp8",
        "as fast as peft compiled",
        "busy us",
    )
    yield f"| {title} | {' | '.join((*heads, 'peak MiB', 'of full fp8', 'error %'))} |"
    yield "|---" * (len(heads) + 4) + "|"
    for name, each in figures.items():
        kind, _, precision = name.partition(" ")
        base = figures.get(f"frozen {precision}")
        added = 100 * (each["forward"] / base["forward"] - 1) if base and kind == "lora" else None
        ratio = each["peak"] / full["peak"] if full["peak"] else None
        cells = [
            f"{each['forward']:.0f}",
            "–" if added is None else f"{added:.1f}",
            f"{each['wall']:.0f}",
            f"{each['wall'] / full['wall']:.2f}",
            f"{stock['wall'] / each['wall']:.2f}x" if stock else "–",
            f"{each['busy']:.0f}",
            f"{each['peak']:.0f}",
            "–" if ratio is None else f"{ratio:.2f}",
            f"{100 * errors[name]:.2f}" if name in errors else "–",
        ]
        yield f"| {name} | {' | '.join(cells)} |"


@click.command(help=__doc__)
@click.option("--only", default="Qwen3-30B-A3B", help="Rows whose title contains this.")
@click.option("--tokens", type=click.IntRange(1), default=16384, show_default=True)
@click.option("--rank", type=click.IntRange(1, 128), default=16, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--ours", is_flag=True, help="Without peft alone, which takes most of the time.")
@click.option("--quick", is_flag=True, help="Tiny sizes on a CPU.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures too.")
@click.option("--show", type=click.Path(path_type=Path), help="Print such a file only.")
def main(
    only: str,
    tokens: int,
    rank: int,
    rounds: int,
    ours: bool,
    quick: bool,
    json_file: Path | None,
    show: Path | None,
) -> None:
    """Measure, and print."""
    if show is not None:
        every = json.loads(show.read_text(encoding="utf-8"))["rows"]
    else:
        if not quick and not torch.cuda.is_available():
            raise click.ClickException("this needs an NVIDIA Hopper GPU, or --quick")
        register()
        chosen = {
            row.model: row for row in ROWS if only in row.title
        }.values()  # of several sizes, one
        rows = [tiny(row) if quick else row._replace(tokens=tokens) for row in chosen]
        every = [measure(row, rank, rounds, "cpu" if quick else "cuda", ours) for row in rows]
        if json_file is not None:
            figures = {"machine": machine(), "rows": every}
            json_file.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for found in every:
        click.echo("\n".join(table(found)))


if __name__ == "__main__":
    main()
