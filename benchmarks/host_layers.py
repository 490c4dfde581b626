"""The layers whose host time `host_bench.py` measures. Each function returns a step: forward and
backward of `LAYERS` layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

LAYERS = 8
# The host's work depends on them in one thing: with few rows for the size of a weight, as in a small
# step of a real model, memory of both gradients is taken at once.
HIDDEN, INNER, TOPK = 3328, 64, 8
Step = Callable[[], None]


def node_step(experts: int, tokens: int, is_fp8: bool, face: str) -> Step:
    """A step of a node in PyTorch or in Paddle's torch proxy; see `host_bench.py` for its faces."""
    from sonicmoe.interop import torch

    def parameter(*shape: int) -> Any:
        # No weights are drawn, here and below, because no kernel reads them, and drawing them took
        # longer than counting calls.
        weight = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
        if face != "grad":
            weight.main_grad = torch.empty(shape, dtype=torch.float32)
        return weight

    up, down = (HIDDEN, 2 * INNER), (INNER, HIDDEN)
    node, weights = make_node(parameter, (up, down), experts, face == "stacked", is_fp8)
    indices = torch.rand([tokens, experts]).argsort(1)[:, :TOPK]
    counts = torch.bincount(indices.reshape([-1]), minlength=experts).tolist()
    x, dout = (torch.randn([tokens, HIDDEN]).to(torch.bfloat16) for _ in range(2))
    probs = torch.rand(indices.shape)

    def forward() -> Any:
        return node(leaf(x), counts, indices, leaf(probs))

    def leaf(tensor: Any) -> Any:
        return tensor.detach().requires_grad_()

    def step() -> None:
        torch.autograd.backward([forward() for _ in range(LAYERS)], [dout] * LAYERS)

    def step_each() -> None:
        for _ in range(LAYERS):
            forward().backward(dout)
            node.step()

    def step_grad() -> None:
        for _ in range(LAYERS):
            for weight in weights:
                weight.grad = None
            forward().backward(dout)

    return {"step": step_each, "grad": step_grad}.get(face, step)


def make_node(
    parameter: Callable[..., Any], shapes: Any, experts: int, stacked: bool, is_fp8: bool
) -> tuple[Any, list[Any]]:
    """A node on two parameters of each expert or of all experts, and these."""
    from sonicmoe import SonicMoEConfig
    from sonicmoe.ernie_compat import SonicMoEMlpNode
    from sonicmoe.interop import torch

    config = SonicMoEConfig(fp8_mode="perf" if is_fp8 else "off")
    if stacked:
        weights = [parameter(experts, *shape) for shape in shapes]
        return SonicMoEMlpNode.from_fused(*weights, config=config), weights
    weights, modules = [], []
    for _ in range(experts):
        modules.append(torch.nn.Module())
        for name, shape in zip(("up_gate_proj", "down_proj"), shapes, strict=True):
            projection = torch.nn.Module()
            projection.weight = parameter(*shape)
            setattr(modules[-1], name, projection)
            weights.append(projection.weight)
    return SonicMoEMlpNode(modules, experts, HIDDEN, INNER, config=config), weights


def moe_step(experts: int, tokens: int, is_fp8: bool) -> Step:
    """A step of a `MoE`, whose weights are kept; gradients in `.grad`."""
    import torch

    from sonicmoe import MoE

    with torch.device("meta"):
        layer = MoE(experts, TOPK, HIDDEN, INNER).to(torch.bfloat16)
    layer.to_empty(device="cpu")
    parameters = list(layer.parameters())
    for parameter in parameters:
        parameter.data.zero_()  # the router's is read
    x, dout = (torch.randn(tokens, HIDDEN).to(torch.bfloat16) for _ in range(2))
    x.requires_grad_()

    def step() -> None:
        for _ in range(LAYERS):
            for tensor in (x, *parameters):
                tensor.grad = None
            layer(x, use_fp8=is_fp8)[0].backward(dout)

    return step


def transformers_step(experts: int, tokens: int, is_fp8: bool, face: str) -> Step:
    """A step of Qwen3-MoE's experts module, whose weights are kept, or written before every
    forward; gradients in `.grad`.
    """
    import torch
    from model_experts import Experts, Row

    from sonicmoe.integrations.transformers import register

    register()
    topk = min(TOPK, experts)
    row = Row("Qwen3-30B-A3B", HIDDEN, INNER, experts, topk, tokens)
    with patch("torch.randn", torch.zeros):
        batch = Experts(row, "cpu")
    batch.train_weights(face != "frozen")
    module = batch.module("sonicmoe_fp8" if is_fp8 else "sonicmoe")

    def step() -> None:
        for _ in range(LAYERS):
            batch.clear()
            if face == "written":
                batch.write_weights()
            module(batch.x, batch.ids, batch.probs).backward(batch.dout)

    return among_sharded(step) if face == "gathered" else step


def among_sharded(step: Step) -> Step:
    """The step of a process in which `fully_shard` was applied to a module."""
    import torch.distributed.fsdp  # noqa: F401  looked for among the modules that are loaded

    from sonicmoe.weights import stacked_cache

    def sharded_step() -> None:
        alone = stacked_cache._any_module_is_sharded
        stacked_cache._any_module_is_sharded = lambda: True
        try:
            step()
        finally:
            stacked_cache._any_module_is_sharded = alone

    return sharded_step
