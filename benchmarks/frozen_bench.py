#!/usr/bin/env python3
"""LoRA beside experts that are frozen as FP8 codes alone: whole models of real sizes on one GPU.

    benchmarks/frozen_bench.py --json f.json            # one H200: both
    benchmarks/frozen_bench.py --only qwen3             # Qwen3-30B-A3B: 48 layers, 4 x 2,048 tokens
    benchmarks/frozen_bench.py --only gpt-oss           # gpt-oss-120b: 36 layers, 2 x 2,048 tokens
    benchmarks/frozen_bench.py --quick                  # tiny, on a CPU: is the program right?

Models have random codes, made layer by layer on the GPU, and peft's adapters of rank 16 on experts
and attention. A step is forward, backward and AdamW, with checkpointing of every decoder layer; the
loss is computed 1,024 tokens at a time, because logits of all are larger than what is measured here.
Factors and their moments are fp32, of gpt-oss-120b bf16. Peaks are what PyTorch has allocated.
adapters_bench.py has one layer of frozen codes beside others.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import click
import timing
import torch
from model_step_bench import config_of
from peft import LoraConfig, get_peft_model
from timing import GIB
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, GptOssConfig, PretrainedConfig

from sonicmoe.integrations.frozen import empty_codes, frozen_bytes
from sonicmoe.integrations.transformers import register

WEIGHTS = "gate_up_proj", "down_proj"
ATTENTION = "q_proj", "k_proj", "v_proj", "o_proj"
LOSS_AT_ONCE = 1024


def say(words: str) -> None:
    """At once, because a step may run out of memory."""
    print(words, flush=True)


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


def adapt(model: nn.Module, rank: int, dtype: torch.dtype) -> list[nn.Parameter]:
    """Put adapters on attention and experts; the factors."""
    parameters = [f"experts.{name}" for name in WEIGHTS]
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=list(ATTENTION), target_parameters=parameters
    )
    in_fp32 = dtype == torch.float32
    adapted = get_peft_model(model, config, autocast_adapter_dtype=in_fp32)
    return [parameter for parameter in adapted.parameters() if parameter.requires_grad]


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
    factors = adapt(model, rank, case["dtype"])
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
@click.option("--only", type=click.Choice(["qwen3", "gpt-oss"]), help="One of the two.")
@click.option("--rank", type=click.IntRange(1, 128), default=16, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=5, show_default=True)
@timing.quick_option
@timing.json_option
def main(only: str | None, rank: int, steps: int, quick: bool, json_file: Path | None) -> None:
    """Measure, and print."""
    device, failed = timing.device_of(quick), []
    register()
    found: list[dict[str, Any]] = []
    for name, case in cases(quick).items():
        if not name.lower().startswith(only or ""):
            continue
        try:
            found.append(measure_model(name, case, rank, steps, device))
        except Exception as error:  # what was measured before is written all the same
            say(f"{name} FAILED: {type(error).__name__}: {error}")
            failed.append(name)
        if device != "cpu":
            torch.cuda.empty_cache()
        timing.write_figures(json_file, models=found)
    for each in found:
        keys = "step s", "tokens/s", "peak GiB", "reserved GiB", "resident GiB", "codes GiB"
        say(f"| {each['model']} | " + " | ".join(f"{key} {each[key]:.2f}" for key in keys) + " |")
    if failed:
        raise click.ClickException(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
