#!/usr/bin/env python3
"""LoRA beside experts that are frozen as FP8 codes alone: whole models of real sizes on one GPU, and
one layer beside codes in two orders.

    benchmarks/frozen_bench.py --json f.json            # one H200: all three
    benchmarks/frozen_bench.py --only qwen3             # Qwen3-30B-A3B: 48 layers, 4 x 2,048 tokens
    benchmarks/frozen_bench.py --only gpt-oss           # gpt-oss-120b: 36 layers, 2 x 2,048 tokens
    benchmarks/frozen_bench.py --only layer             # a layer of Qwen3-30B-A3B, 16,384 tokens
    benchmarks/frozen_bench.py --quick                  # tiny, on a CPU: is the program right?

Models have random codes, made layer by layer on the GPU, and adapters of rank 16 on experts and
attention. A step is forward, backward and AdamW, with checkpointing of every decoder layer; the loss
is computed 1,024 tokens at a time, because logits of all are larger than what is measured here.
Factors and their moments are fp32, of gpt-oss-120b bf16. Peaks are what PyTorch has allocated.

| contestant of the layer | what |
|---|---|
| codes alone | LoRA beside frozen codes; a backward transposes them |
| two orders | LoRA beside bf16 weights and their codes in two orders |
| one order | the same with `iso_weight`: bf16 weights and codes in one order |
| compiled | LoRA as peft computes it, `W + scale B A` and then grouped_mm, in one compiled graph |

`error` is the largest relative RMSE of a factor's gradient against fp32, in %.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import timing
import torch
from model_experts import ROWS, Experts, exact_copy, tiny, worst_error
from model_step_bench import config_of
from timing import GIB, Way
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig

from sonicmoe import LowRank, SonicMoEConfig
from sonicmoe.integrations.frozen import empty_codes, freeze_experts, frozen_bytes
from sonicmoe.integrations.transformers import register

WEIGHTS = "gate_up_proj", "down_proj"
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
LOSS_AT_ONCE = 1024


def say(words: str) -> None:
    """At once, because a step may run out of memory."""
    print(words, flush=True)


class AdaptedExperts(nn.Module):
    """Experts of transformers with a pair of factors beside each projection."""

    def __init__(self, base: nn.Module, rank: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.base, self.scale, self.factors = base, 2.0, nn.ParameterDict()
        for name in WEIGHTS:
            experts, first, second = getattr(base, name).shape
            turned = getattr(base, "is_transposed", False)
            inputs, outputs = (first, second) if turned else (second, first)
            a = torch.randn(experts, rank, inputs, device=device) * inputs**-0.5
            b = torch.randn(experts, outputs, rank, device=device) * 0.01
            self.factors[f"{name}_a"] = nn.Parameter(a.to(dtype))
            self.factors[f"{name}_b"] = nn.Parameter(b.to(dtype))

    def pairs(self) -> dict[str, LowRank]:
        """By the name of the weight."""
        return {
            name: LowRank(self.factors[f"{name}_a"], self.factors[f"{name}_b"], self.scale)
            for name in WEIGHTS
        }

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """As the experts."""
        return self.base(*batch, adapters=self.pairs())  # type: ignore[no-any-return]


class AdaptedLinear(nn.Module):
    """A frozen linear map with a pair of factors."""

    def __init__(self, base: nn.Linear, rank: int, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        a = torch.randn(rank, base.in_features, device=device) * base.in_features**-0.5
        self.a = nn.Parameter(a.to(dtype))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x W + 2 (x A) B`."""
        return self.base(x) + 2.0 * ((x @ self.a.to(x.dtype).T) @ self.b.to(x.dtype).T)  # type: ignore[no-any-return]


class Folded(nn.Module):
    """Experts as peft computes them, in a form that the compiler takes."""

    def __init__(self, adapted: AdaptedExperts, base: nn.Module) -> None:
        super().__init__()
        self.adapted, self.base = adapted, base

    def forward(self, *batch: torch.Tensor) -> torch.Tensor:
        """As the experts."""
        weights = {}
        for name, (a, b, scale) in self.adapted.pairs().items():
            weight = getattr(self.base, name)
            weights[name] = torch.baddbmm(weight, b.to(weight), a.to(weight), alpha=scale)
        return torch.func.functional_call(self.base, weights, batch)  # type: ignore[no-any-return]


def fill_codes(model: nn.Module) -> None:
    """Random finite codes of weights whose standard deviation is about 0.02."""
    for module in model.modules():
        for name in WEIGHTS:
            scales = getattr(module, f"{name}_scale", None)
            if scales is not None:
                held = getattr(module, name).detach()
                held.random_(0, 256)
                held.bitwise_and_(0xBF)  # below 2, and no NaN
                scales.detach().view(torch.float32).fill_(0.03)


def materialise(model: nn.Module, config: PretrainedConfig, device: str) -> None:
    """Give what is still on meta, all but the experts' codes, random values on the device."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not parameter.is_meta:
                continue
            values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            is_norm = parameter.ndim == 1 and name == "weight"
            values = values.fill_(1.0) if is_norm else values.normal_(0.0, 0.02)
            module._parameters[name] = nn.Parameter(values, requires_grad=False)
    rotary = type(model.model.rotary_emb)
    model.model.rotary_emb = rotary(config).to(device)
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    assert not left, f"buffers without values: {left}"


def adapt(model: nn.Module, rank: int, device: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """Put adapters on attention and experts; the factors."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in list(model.modules()):
        for name, part in list(module.named_children()):
            if name in ATTENTION:
                setattr(module, name, AdaptedLinear(part, rank, device, dtype))
            elif name == "experts":
                setattr(module, name, AdaptedExperts(part, rank, device, dtype))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def build(config: PretrainedConfig, attention: str, device: str) -> nn.Module:
    """A frozen model of these sizes, of which no weight of experts was ever bf16."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16,
            attn_implementation=attention,
            experts_implementation="sonicmoe_fp8",
        )
    empty_codes(model, device)
    fill_codes(model)
    materialise(model, config, device)
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)()
    model.enable_input_require_grads()
    return model.train()


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The loss of the next token, part by part."""
    hidden = model.model(input_ids=ids, use_cache=False)[0][:, :-1].flatten(0, 1)
    wanted = ids[:, 1:].flatten()

    def part(rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(rows).float()
        return nn.functional.cross_entropy(logits, labels, reduction="sum")

    both = zip(hidden.split(LOSS_AT_ONCE), wanted.split(LOSS_AT_ONCE), strict=True)
    sums = [checkpoint(part, *each, use_reentrant=False) for each in both]
    return torch.stack(sums).sum() / wanted.numel()


def measure_model(name: str, case: dict[str, Any], rank: int, steps: int, device: str) -> Any:
    """Seconds of a step, and memory."""
    torch.manual_seed(0)
    on_gpu = device != "cpu"
    begin = time.perf_counter()
    model = build(case["config"], case["attention"], device)
    factors = adapt(model, rank, device, case["dtype"])
    timing.wait(device)
    found: dict[str, Any] = {
        "model": name,
        "codes GiB": frozen_bytes(model) / GIB,
        "factors": sum(factor.numel() for factor in factors),
        "built s": time.perf_counter() - begin,
        "resident GiB": torch.cuda.memory_allocated() / GIB if on_gpu else 0.0,
    }
    say(f"{name}: {found}")
    optimizer = torch.optim.AdamW(factors, lr=1e-4, fused=on_gpu)
    ids = torch.randint(0, case["config"].vocab_size, case["batch"], device=device)
    seconds, losses = [], []
    for step in range(steps + 1):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        timing.wait(device)
        seconds.append(time.perf_counter() - begin)
        losses.append(loss.item())
        found["peak GiB"] = torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0
        found["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB if on_gpu else 0.0
        say(
            f"{name} step {step}: {seconds[-1]:.3f} s, loss {losses[-1]:.4f}, peak {found['peak GiB']:.2f} GiB"
        )
    tokens = ids.numel()
    found |= {"step s": statistics.median(seconds[1:]), "losses": losses, "tokens": tokens}
    found["tokens/s"] = tokens / found["step s"]
    return found


def layer_of(experts: Experts, implementation: str, rank: int, freeze: bool) -> AdaptedExperts:
    """The row's experts with the same factors in every contestant."""
    module = experts.module(implementation)
    for weight in experts.weights.values():
        weight.requires_grad_(False)
    if freeze:
        say(f"layer: codes lose {100 * freeze_experts(module).error:.2f} % of the weights")
    torch.manual_seed(1)
    return AdaptedExperts(module, rank, experts.device, torch.bfloat16)


def way_of(experts: Experts, layer: nn.Module, module: Callable[..., Any], config: Any) -> Way:
    """Forward and backward of a contestant."""

    def clear() -> None:
        experts.clear()
        layer.zero_grad()

    def call() -> None:
        clear()
        with config.activate():
            module(experts.x, experts.ids, experts.probs).backward(experts.dout)

    return Way(call, call, clear)


def gradients(layer: AdaptedExperts, way: Way) -> dict[str, torch.Tensor]:
    """Gradients of the factors, in fp32, after one call."""
    way.call()
    return {name: factor.grad.float() for name, factor in layer.factors.items()}


def measure_layer(rank: int, rounds: int, tokens: int, device: str) -> Any:
    """Medians of every contestant, in turns."""
    row = next(row for row in ROWS if row.model == "Qwen3-30B-A3B")
    row = tiny(row) if device == "cpu" else row._replace(tokens=tokens)
    experts = Experts(row, device)
    wide, reference = exact_copy(experts), SonicMoEConfig(engine="reference")
    layer = layer_of(wide, "sonicmoe", rank, freeze=False)
    exact = gradients(layer, way_of(wide, layer, layer, reference))
    layers = {
        "codes alone": layer_of(experts, "sonicmoe_fp8", rank, freeze=True),
        "two orders": layer_of(experts, "sonicmoe_fp8", rank, freeze=False),
        "one order": layer_of(experts, "sonicmoe_fp8", rank, freeze=False),
        "compiled": layer_of(experts, "grouped_mm", rank, freeze=False),
    }
    ways, errors = {}, {}
    for name, layer in layers.items():
        module: Any = layer
        if name == "compiled":
            folded = Folded(layer, layer.base)
            module = torch.compile(folded, backend=timing.backend_of(device))
        config = SonicMoEConfig(iso_weight=True) if name == "one order" else SonicMoEConfig()
        way = way_of(experts, layer, module, config)
        try:
            errors[name] = worst_error(gradients(layer, way), exact)
        except Exception as error:  # the others are measured all the same
            say(f"layer, {name}: {type(error).__name__}: {error}")
            continue
        ways[name] = way
    figures = timing.measured(ways, device, rounds)
    for name, each in figures.items():
        each["error"] = errors[name]
        times = f"{each['wall']:.0f} us wall, {each['busy']:.0f} us busy"
        say(f"layer, {name}: {times}, error {100 * each['error']:.2f} %")
    return {"row": row.title, "figures": figures}


def cases(quick: bool) -> dict[str, dict[str, Any]]:
    """Models of real sizes, or tiny ones."""
    small = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_experts_per_tok": 2,
        "pad_token_id": 0, "num_local_experts": 4,
    }  # fmt: skip
    # The defaults of the class are the sizes of gpt-oss-120b.
    gpt_oss = {"config": GptOssConfig(**(small if quick else {})), "attention": "eager"}
    qwen3 = {"config": config_of(2 if quick else 48, quick), "attention": "sdpa"}
    batches = [(2, 12), (2, 12)] if quick else [(4, 2048), (2, 2048)]
    return {
        "Qwen3-30B-A3B": {**qwen3, "batch": batches[0], "dtype": torch.float32},
        "gpt-oss-120b": {**gpt_oss, "batch": batches[1], "dtype": torch.bfloat16},
    }


@click.command(help=__doc__)
@click.option("--only", type=click.Choice(["layer", "qwen3", "gpt-oss"]), help="One of the three.")
@click.option("--rank", type=click.IntRange(1, 128), default=16, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True)
@timing.rounds_option()
@click.option("--tokens", type=click.IntRange(1), default=16384, show_default=True)
@timing.quick_option
@timing.json_option
def main(
    only: str | None, rank: int, steps: int, rounds: int, tokens: int, quick: bool,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Measure, and print."""
    device, failed = timing.device_of(quick), []
    register()
    found: dict[str, Any] = {"models": [], "layer": None}
    programs = {
        name: partial(measure_model, name, case, rank, steps, device)
        for name, case in cases(quick).items()
    }
    programs = {"layer": partial(measure_layer, rank, rounds, tokens, device), **programs}
    if only is not None:
        programs = {name: p for name, p in programs.items() if name.lower().startswith(only)}
    for name, program in programs.items():
        try:
            figures = program()
            found |= (
                {"layer": figures} if name == "layer" else {"models": [*found["models"], figures]}
            )
        except Exception as error:  # what was measured before is written all the same
            say(f"{name} FAILED: {type(error).__name__}: {error}")
            failed.append(name)
        if device != "cpu":
            torch.cuda.empty_cache()
        timing.write_figures(json_file, **found)
    for each in found["models"]:
        keys = "step s", "tokens/s", "peak GiB", "reserved GiB", "resident GiB", "codes GiB"
        say(f"| {each['model']} | " + " | ".join(f"{key} {each[key]:.2f}" for key in keys) + " |")
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
