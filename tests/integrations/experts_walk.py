"""Every class that the installed transformers decorates with its experts decorator, as small random
experts, and the section of docs/transformers.md that is made of them:

    PYTHONPATH=.:tests python -m integrations.experts_walk
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.integrations import moe

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.capabilities import HOPPER, problem
from sonicmoe.engine.settings import EngineSettings, Workload
from sonicmoe.integrations.gates import activation_of
from sonicmoe.integrations.transformers import register, unsupported_reason

# Multiples of what the FP8 kernels need, and more than one block of 128.
HIDDEN, INTERMEDIATE, EXPERTS = 256, 192, 4
TOKENS, TOPK = 128, 2
SIZES = {
    "hidden_size": HIDDEN, "moe_hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE,
    "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS, "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS, "moe_num_experts": EXPERTS,
}  # fmt: skip
FILES = sorted(Path(transformers.__path__[0], "models").glob("*/modeling_*.py"))
MANY = 8  # models in a cell of the table


@functools.cache
def decorated() -> dict[str, type[nn.Module]]:
    """The classes by name, found by what the decorator leaves: a constructor of its own."""
    found = {}
    for file in FILES:
        if "@use_experts_implementation" in file.read_text():
            module = importlib.import_module(f"transformers.models.{file.parent.name}.{file.stem}")
            own = [value for value in vars(module).values() if inspect.isclass(value)]
            found |= {kind.__name__: kind for kind in own if _is_decorated(kind, module.__name__)}
    return found


def _is_decorated(kind: type, module: str) -> bool:
    constructor = getattr(kind.__init__, "__code__", None)
    made_there = constructor is not None and constructor.co_filename == moe.__file__
    return kind.__module__ == module and made_there


def out_of_reach() -> list[str]:
    """Models with routed experts that are not decorated."""
    plain = re.compile(r"^(?!@use_experts).*\nclass (?!\w*Shared)\w+Experts\(", re.MULTILINE)
    return [file.parent.name for file in FILES if plain.search(file.read_text())]


@functools.cache
def small_experts(kind: type[nn.Module]) -> nn.Module:
    """Experts of this class under their model's own configuration, but for the sizes: normal tokens
    give normal pre-activations, and biases as large.
    """
    torch.manual_seed(0)
    register()
    experts = next(_constructed(kind))
    with torch.no_grad():
        for name, parameter in experts.named_parameters():
            # A weight's fan-in is H or I, whichever axis it lies on.
            inner = HIDDEN if "up_proj" in name else INTERMEDIATE
            parameter.normal_(0.0, 1.0 if parameter.ndim < 3 else inner**-0.5)
    return experts


def _constructed(kind: type[nn.Module]) -> Iterator[nn.Module]:
    """By every configuration of the class's file that has what the constructor reads."""
    sized = "intermediate_size" in inspect.signature(kind).parameters
    for configuration in vars(inspect.getmodule(kind)).values():
        if not inspect.isclass(configuration) or not issubclass(configuration, PretrainedConfig):
            continue
        config = configuration()
        for name, size in SIZES.items():
            if hasattr(config, name):
                # Ernie 4.5 VL lists the sizes of its two kinds of experts.
                listed = isinstance(getattr(config, name), list)
                setattr(config, name, [size, size] if listed else size)
        try:
            yield kind(config, INTERMEDIATE) if sized else kind(config)
        except AttributeError:
            continue  # the configuration of another part: vision, or the whole model


def batch(spread: float = 1.0, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Tokens, distinct ids, weights and the gradient of the output."""
    generator = torch.Generator().manual_seed(1)
    x, dout = torch.randn(2, TOKENS, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOPK] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, TOPK, generator=generator)
    return (spread * x).to(dtype), ids, weights.to(dtype), dout.to(dtype)


def lost_in_fp8(experts: nn.Module) -> str | None:
    """Why Hopper's FP8 kernels cannot compute these experts, None where they can."""
    (activation, parameters), _ = activation_of(experts, moe._default_apply_gate)
    config = SonicMoEConfig(fp8_mode="perf").resolve()
    settings = EngineSettings.from_config(config, activation, parameters)
    return problem(HOPPER, Workload(settings, HIDDEN, INTERMEDIATE, bias=experts.has_bias))


def section() -> str:
    """What the experts of every model compute, as docs/transformers.md shows it."""
    models: dict[tuple[str, str], list[str]] = defaultdict(list)
    for kind in decorated().values():
        # As `model_type` spells it.
        models[_row(kind)].append(kind.__module__.split(".")[2])
    cells = [
        f"| {what} | {_named(own) if len(own) <= MANY else f'{len(own)} classes, below'} | {fp8} |"
        for (what, fp8), own in models.items()
    ]
    lists = [f"{what}: {_named(own)}." for (what, _), own in models.items() if len(own) > MANY]
    lists.append(
        f"Out of reach, because their experts are not decorated: {_named(out_of_reach())}."
    )
    title = f"transformers {transformers.__version__} decorates {len(decorated())} classes:"
    head = "| experts | models | FP8 on Hopper |\n|---|---|---|"
    wrapped = [textwrap.fill(text, 100, break_on_hyphens=False) for text in lists]
    return "\n\n".join([title, "\n".join([head, *cells]), *wrapped])


def _named(models: list[str]) -> str:
    return ", ".join(f"`{model}`" for model in dict.fromkeys(models))


def _row(kind: type[nn.Module]) -> tuple[str, str]:
    experts = small_experts(kind)
    refused = unsupported_reason(experts)
    if refused is not None:
        return refused, "refused"
    (activation, parameters), _ = activation_of(experts, moe._default_apply_gate)
    numbers = "".join(f", {name} {value:g}" for name, value in parameters)
    biases = ", biases" if experts.has_bias else ""
    return f"`{activation.value}`{numbers}{biases}", "no: BF16" if lost_in_fp8(experts) else "yes"


if __name__ == "__main__":
    print(section())
