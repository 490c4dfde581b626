"""Two ranks of sharded_worker.py each train a small MoE under DDP and FSDP2 and compare it with one process
that sees both ranks' batches. Then they shard, offload or wrap a layer or a part of it in every way of a
table. Its output and the gradient of its tokens are those of the layer alone, or one sentence names the
parameter and the module to wrap.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from functional.sharded_models import (
    HIDDEN,
    OnOneRouting,
    TopK,
    adapted,
    decoder,
    make_layer,
    whole,
)
from node.direct_layers import Expert
from pairwise import pairwise
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from sonicmoe import MoE
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.layer.plan import make_plan, number_of
from sonicmoe.layouts import WeightLayout

CPU = torch.device("cpu")
Way = Callable[[Any], Any]


RANKS, STEPS, H, I, E = 2, 3, 32, 48, 4


def layer(seed: int = 0) -> MoE:
    return make_layer(H, I, experts=E, bias=True, seed=seed)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(24, H, generator=generator), torch.randn(24, H, generator=generator)


def trained(model: Any, moe: MoE, ranks: Sequence[int], use_fp8: bool) -> dict[str, torch.Tensor]:
    """Weights after some steps on the batches of these ranks, and gradients of the last step."""
    optimizer = torch.optim.SGD(moe.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in ranks:
            x, target = batch(step, rank)
            out = model(x, use_fp8=use_fp8)[0]
            ((out - target).square().mean() / len(ranks)).backward()
        optimizer.step()
    gradients = {f"grad {name}": whole(weight.grad) for name, weight in moe.named_parameters()}
    return gradients | {name: whole(weight) for name, weight in moe.named_parameters()}


def check_training(wrap: Way, rank: int, use_fp8: bool, compiled: bool) -> None:
    """Beside one process that accumulates over both ranks' batches."""
    alone, moe = layer(), layer()
    expected = trained(alone, alone, range(RANKS), use_fp8)
    model = wrap(moe) or moe
    model = torch.compile(model, backend="aot_eager") if compiled else model
    found = trained(model, moe, [rank], use_fp8)
    # The same products and sums as in one process: equal bits here. Room for libraries whose
    # last bits depend on where a tensor lies.
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    for name, old in layer().named_parameters():
        assert not torch.equal(found[name], old), f"{name} did not train"


def check_changes_of_sharded_weights(rank: int) -> None:
    """Gathered weights reappear in the same memory with the same version: copies prepared of them
    must not.
    """
    layers = [layer(seed) for seed in (0, 5)]
    moe = layer()
    fully_shard(moe, reshard_after_forward=True)
    x, _ = batch(0, rank)
    expected = [other(x, use_fp8=True)[0] for other in layers]
    prepare, prepared = ReferenceEngine.prepare_weights, []
    ReferenceEngine.prepare_weights = lambda *arguments: prepared.append(1) or prepare(*arguments)
    for turn in range(10):  # the allocator returns the same address often, not always
        with torch.no_grad():
            for mine, its in zip(moe.parameters(), layers[turn % 2].parameters(), strict=True):
                mine.copy_(distribute_tensor(its, mine.device_mesh, mine.placements))
            torch.testing.assert_close(moe(x, use_fp8=True)[0], expected[turn % 2])
    ReferenceEngine.prepare_weights = prepare
    assert len(prepared) == 10


def check_numbers_of_plans() -> None:
    """Compilers keep graphs on disk: a number must not mean other settings in another process."""
    halves = WeightLayout(split_half=True)
    mine = [number_of(make_plan(ActivationType.GEGLU, halves, fp8)) for fp8 in (True, False, None)]
    everybodys: list[list[int]] = [[]] * RANKS
    dist.all_gather_object(everybodys, mine)
    assert everybodys == [mine] * RANKS and len(set(mine)) == 3


class Experts(torch.nn.Module):
    """A node over modules that FSDP2 shards, on a routing that is the same in every call."""

    def __init__(self, flush: str = "auto") -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [(torch.randn(H, 2 * I) * 0.2, torch.randn(I, H) * 0.2) for _ in range(E)]
        self.experts = torch.nn.ModuleList(Expert(*pair) for pair in made)
        self.nodes = [SonicMoEMlpNode(self.experts, E, H, I, flush=flush)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        indices = torch.arange(48).reshape(24, 2) % E
        out: torch.Tensor = self.nodes[0](x, None, indices, torch.full((24, 2), 0.5))
        return out


def check_a_node_whose_gradients_wait(rank: int) -> None:
    """Gradients that wait cannot be reduced, and the node says so."""
    module = Experts("step")
    fully_shard(module)
    module(batch(0, rank)[0]).sum().backward()
    try:
        module.nodes[0].step()
    except RuntimeError as error:
        assert "resharded as FSDP2 does" in str(error), error
    else:
        raise AssertionError("step() handed over what no rank has reduced")


def result_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = model(x)
    return out[0] if isinstance(out, tuple) else out


# What makes a module of each face, and the shape of its tokens.
FACES = {
    "MoE": (layer, (24, H)),
    "MoE on a batch": (layer, (2, 12, H)),
    "functional": (lambda: TopK(layer()), (24, H)),
    "node": (Experts, (24, H)),
}


def check_results_written_in_place(rank: int, face: str, reshard: bool, x_grad: bool) -> None:
    """`out += x` on what a sharded layer returned: FSDP2 hangs its hooks on the result, and an
    operation in place on a view would go around them.
    """
    make, shape = FACES[face]

    def run(model: torch.nn.Module, seed: int) -> None:
        x = batch(seed, 0)[0].reshape(shape).requires_grad_(x_grad)
        out = result_of(model, x)
        assert not out._is_view(), face
        out += x
        out.square().mean().backward()

    expected, sharded = make(), make()
    for other in range(RANKS):
        run(expected, other)
    fully_shard(sharded, reshard_after_forward=reshard)
    run(sharded, rank)
    for mine, its in zip(sharded.parameters(), expected.parameters(), strict=True):
        assert isinstance(mine.grad, DTensor), face
        torch.testing.assert_close(whole(mine.grad), its.grad / RANKS, rtol=1e-4, atol=1e-5)


def check_all(rank: int) -> None:
    check_numbers_of_plans()
    check_a_node_whose_gradients_wait(rank)
    # DDP first: a process that has sharded a module keeps no prepared weights.
    check_training(DistributedDataParallel, rank, use_fp8=True, compiled=False)
    check_changes_of_sharded_weights(rank)
    for face, reshard, x_grad in pairwise(list(FACES), (True, False), (True, False)):
        check_results_written_in_place(rank, face, reshard, x_grad)
    for use_fp8, compiled in ((False, False), (True, True)):
        check_training(fully_shard, rank, use_fp8, compiled)


# ---- parts ----


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
    lambda: adapted(layer(), "c_fc.weight", "c_proj.weight"): {
        "the layer with adapters": (fully_shard, ""),
        "a factor": (on(LORA_A, fully_shard), r"^lora_A\['default'\].weight of weight in Experts is a DTensor"),
    },
    Experts: {
        "the module of a node": (fully_shard, ""),
        "the module of a node, called by itself": (outside, OF_NODE),
        "an expert": (on("experts.0", fully_shard), OF_NODE),
        "a projection": (on("experts.1.down_proj", fully_shard), OF_NODE),
    },
}  # fmt: skip


BY_ITSELF = (
    "has 3 of its 6 experts on this rank: .* needed: a call by way of the module that was given"
)
TRANSFORMERS: dict[Callable[[], nn.Module], dict[str, tuple[Way, str]]] = {
    decoder: {
        "the decoder": (fully_shard, ""),
        "the experts": (on("moe", fully_shard), ""),
        "the experts, and the decoder": (lambda m: around(on("moe", fully_shard)(m)), ""),
        "the decoder, its experts called by themselves": (
            lambda m: OnOneRouting(outside(m).moe), f"gate_up_proj of Qwen3MoeExperts {BY_ITSELF}"),
        "FSDP1": (on("moe", fsdp1), ""),
        "DDP": (on("moe", DistributedDataParallel), ""),
        "offload": (on("moe", offloaded), ""),
        "checkpointing": (on("moe", checkpoint_wrapper), ""),
        "a graph": (on("moe", torch.compile), ""),
        "ZeRO-3": (on("moe", zero3), r"^gate_up_proj is empty, .*\(model, \[Qwen3MoeExperts\]\)"),
        "no memory": (on("moe", lambda m: m.to("meta")), "^gate_up_proj is on meta"),
    },
    lambda: decoder(adapters=True): {
        "the decoder with adapters": (fully_shard, ""),
        "the experts with adapters": (on("moe", fully_shard), ""),
        "a factor": (
            on("moe.base_layer.lora_A.default", fully_shard),
            r"^lora_A\['default'\].weight of gate_up_proj in Qwen3MoeExperts is a DTensor",
        ),
    },
}  # fmt: skip


def outcome(module: Any, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, dout = torch.randn(2, 24, width, generator=generator)
    x.requires_grad_()
    out = result_of(module, x)
    out.backward(dout)
    assert x.grad is not None
    return out.detach(), x.grad


@cache
def of_the_layer_alone(make: Callable[[], nn.Module], width: int) -> tuple[torch.Tensor, ...]:
    return outcome(make(), width)


def problem(make: Callable[[], nn.Module], way: Way, words: str) -> str:
    """What is not as the table says, or nothing."""
    width = HIDDEN if make in TRANSFORMERS else H
    try:
        found = outcome(way(make()), width)
    except Exception as error:
        return "" if words and re.search(words, str(error)) else repr(error)
    if words:
        return f"{words} was not said"
    near = [
        torch.allclose(*pair, rtol=1e-4, atol=1e-5)
        for pair in zip(found, of_the_layer_alone(make, width), strict=True)
    ]
    return "" if all(near) else "other numbers"


def check_table(
    table: dict[Callable[[], nn.Module], dict[str, tuple[Way, str]]], rank: int
) -> None:
    found = {
        name: problem(make, way, words)
        for make, ways in table.items()
        for name, (way, words) in ways.items()
    }
    assert not any(found.values()), {name: words for name, words in found.items() if words}
