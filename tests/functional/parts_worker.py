"""One of two ranks: shards, offloads or wraps a layer or a part of it in every way of the table, and
compares what it returns, and the gradient of its tokens, with the layer alone; and before that runs
all of parallel_worker.py.

python parts_worker.py RANK STORE_FILE [TABLE ...]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from functional.parallel_worker import H, Routed, check_all, layer
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

CPU = torch.device("cpu")
Way = Callable[[Any], Any]


class Around(nn.Module):
    """What a unit may be: a module around the layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any) -> Any:
        return self.inner(*arguments)


def around(module: nn.Module) -> nn.Module:
    """Sharded with a module around it, by which it is called."""
    unit = Around(module)
    fully_shard(unit)
    return unit


def outside(module: nn.Module) -> nn.Module:
    """The same, but called by itself."""
    around(module)
    return module


def on(name: str, change: Way) -> Way:
    """Of a part by its name; what the change returns takes its place."""

    def way(module: nn.Module) -> nn.Module:
        changed = change(module.get_submodule(name))
        if isinstance(changed, nn.Module):
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, changed)
        return module

    return way


def fsdp1(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=CPU, use_orig_params=True)


def zero3(module: nn.Module) -> None:
    """As DeepSpeed leaves parameters between the calls of their module."""
    for parameter in module.parameters():
        parameter.data = torch.empty(0)


def offloaded(module: nn.Module, **options: Any) -> nn.Module:
    from accelerate import cpu_offload

    return cpu_offload(module, CPU, **options)


def split(module: nn.Module) -> nn.Module:
    mesh = dist.init_device_mesh("cpu", (2,))

    def part(name: str, held: nn.Module, mesh: Any) -> None:
        for own, parameter in list(held._parameters.items()):
            held.register_parameter(
                own, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]))
            )

    return distribute_module(module, mesh, part)


def moe_of_peft() -> nn.Module:
    import peft

    targets = ["c_fc.weight", "c_proj.weight"]
    config = peft.LoraConfig(r=2, target_parameters=targets, init_lora_weights=False)
    torch.manual_seed(1)
    return peft.get_peft_model(layer(), config).base_model.model


DTENSOR = r"is a DTensor, of which this rank has a part; needed: fully_shard\(MoE\)"
NOT_CALLED = "whose forward would not be called; needed: one around the whole MoE"
ON_META = r"is on meta, .* preload_module_classes=\['MoE'\]"
ZERO_3 = r"is empty, as ZeRO-3 leaves parts; needed: set_z3_leaf_modules\(model, \[MoE\]\)"
OF_NODE = "weights are DTensors, .* needed: fully_shard of the module whose forward calls the node"
LORA_A = "c_fc.lora_A.default"

# By what makes the layer: the ways, and what the refusal says, "" where the way works.
LAYERS: dict[Callable[[], nn.Module], dict[str, tuple[Way, str]]] = {
    layer: {
        "the layer": (fully_shard, ""),
        "a module around it": (around, ""),
        "a module around it, called by itself": (outside, f"^c_fc.weight {DTENSOR}"),
        "c_fc": (on("c_fc", fully_shard), f"^c_fc.weight {DTENSOR}"),
        "c_proj": (on("c_proj", fully_shard), f"^c_proj.weight {DTENSOR}"),
        "the router": (on("router", fully_shard), ""),
        "tensor parallelism of c_fc": (on("c_fc", split), f"^c_fc.weight {DTENSOR}"),
        "FSDP1": (fsdp1, ""),
        "FSDP1 of c_fc": (on("c_fc", fsdp1), f"^c_fc is FullyShardedDataParallel, {NOT_CALLED}"),
        "FSDP1 of the router": (on("router", fsdp1), ""),
        "DDP": (DistributedDataParallel, ""),
        "DDP of c_proj": (on("c_proj", DistributedDataParallel), f"^c_proj is .*, {NOT_CALLED}"),
        "DDP of the router": (on("router", DistributedDataParallel), ""),
        "DataParallel of c_fc": (on("c_fc", nn.DataParallel), f"^c_fc is DataParallel, {NOT_CALLED}"),
        "ZeRO-3": (on("c_fc", zero3), f"^c_fc.weight {ZERO_3}"),
        "ZeRO-3 of c_proj": (on("c_proj", zero3), f"^c_proj.weight {ZERO_3}"),
        "offload of its parts": (offloaded, f"^c_fc.weight {ON_META}"),
        "offload of c_proj": (on("c_proj", offloaded), f"^c_proj.weight {ON_META}"),
        "offload as a whole": (lambda m: offloaded(m, preload_module_classes=["MoE"]), ""),
        "offload of the router": (on("router", offloaded), ""),
        "checkpointing": (checkpoint_wrapper, ""),
        "checkpointing of c_fc": (on("c_fc", checkpoint_wrapper), ""),
        "a graph of c_fc": (on("c_fc", torch.compile), ""),
        "weight norm of c_fc": (on("c_fc", weight_norm), ""),
        "no memory for c_fc": (on("c_fc", lambda m: m.to("meta")), f"^c_fc.weight {ON_META}"),
    },
    moe_of_peft: {
        "the layer with adapters": (fully_shard, ""),
        "a factor": (on(LORA_A, fully_shard), r"^lora_A\['default'\].weight of weight in Experts is a DTensor"),
    },
    lambda: Routed("auto"): {
        "the module of a node": (fully_shard, ""),
        "the module of a node, called by itself": (outside, OF_NODE),
        "an expert": (on("experts.0", fully_shard), OF_NODE),
        "a projection": (on("experts.1.down_proj", fully_shard), OF_NODE),
    },
}  # fmt: skip


def qwen3(adapters: bool = False) -> nn.Module:
    from integrations.hf_models import FAMILIES, build

    from sonicmoe.integrations.transformers import register

    register()
    model = build(FAMILIES["qwen3-moe"](1), "sonicmoe")
    if adapters:
        import peft

        targets = ["experts.gate_up_proj", "experts.down_proj"]
        config = peft.LoraConfig(r=2, target_parameters=targets, init_lora_weights=False)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config).get_base_model()
    return Decoder(model.model.layers[0].mlp.experts)


class Decoder(nn.Module):
    """Experts of transformers on a routing that is the same in every call."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(2 * len(x)).reshape(-1, 2) % 6
        out: torch.Tensor = self.experts(x, ids, torch.full((len(x), 2), 0.5))
        return out


BY_ITSELF = (
    "has 3 of its 6 experts on this rank: .* needed: a call by way of the module that was given"
)
TRANSFORMERS: dict[Callable[[], nn.Module], dict[str, tuple[Way, str]]] = {
    qwen3: {
        "the decoder": (fully_shard, ""),
        "the experts": (on("experts", fully_shard), ""),
        "the experts, and the decoder": (lambda m: around(on("experts", fully_shard)(m)), ""),
        "the decoder, its experts called by themselves": (
            lambda m: Decoder(outside(m).experts), f"gate_up_proj of Qwen3MoeExperts {BY_ITSELF}"),
        "FSDP1": (on("experts", fsdp1), ""),
        "DDP": (on("experts", DistributedDataParallel), ""),
        "offload": (on("experts", offloaded), ""),
        "checkpointing": (on("experts", checkpoint_wrapper), ""),
        "a graph": (on("experts", torch.compile), ""),
        "ZeRO-3": (on("experts", zero3), r"^gate_up_proj is empty, .*\(model, \[Qwen3MoeExperts\]\)"),
        "no memory": (on("experts", lambda m: m.to("meta")), "^gate_up_proj is on meta"),
    },
    lambda: qwen3(adapters=True): {
        "the decoder with adapters": (fully_shard, ""),
        "the experts with adapters": (on("experts", fully_shard), ""),
        "a factor": (
            on("experts.base_layer.lora_A.default", fully_shard),
            r"^lora_A\['default'\].weight of gate_up_proj in Qwen3MoeExperts is a DTensor",
        ),
    },
}  # fmt: skip


def outcome(module: Any, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, dout = torch.randn(2, 24, width, generator=generator)
    x.requires_grad_()
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    out.backward(dout)
    assert x.grad is not None
    return out.detach(), x.grad


def problem(make: Callable[[], nn.Module], way: Way, words: str) -> str:
    """What is not as the table says, or nothing."""
    width = 64 if make in TRANSFORMERS else H
    expected = outcome(make(), width)
    try:
        found = outcome(way(make()), width)
    except Exception as error:
        return "" if words and re.search(words, str(error)) else repr(error)
    if words:
        return f"{words} was not said"
    near = [
        torch.allclose(*pair, rtol=1e-4, atol=1e-5) for pair in zip(found, expected, strict=True)
    ]
    return "" if all(near) else "other numbers"


def main() -> None:
    rank, store, *names = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=2)
    check_all(int(rank))
    tables = {"layers": LAYERS, "transformers": TRANSFORMERS}
    found = {
        name: problem(make, way, words)
        for table in names
        for make, ways in tables[table].items()
        for name, (way, words) in ways.items()
    }
    assert not any(found.values()), {name: words for name, words in found.items() if words}
    dist.destroy_process_group()
    print("all")


if __name__ == "__main__":
    main()
