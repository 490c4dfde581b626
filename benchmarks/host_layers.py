"""The layers whose host time `host_bench.py` measures. Each function returns a step: forward and
backward of `LAYERS` layers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

LAYERS = 8
# The host's work depends on them in one thing: with few rows for the size of a weight, as in a small
# step of a real model, memory of both gradients is taken at once.
HIDDEN, INNER, TOPK = 3328, 64, 8
Step = Callable[[], None]


def torch_step(experts: int, tokens: int, is_fp8: bool, face: str, flush: str) -> Step:
    """A step of a node; see `host_bench.py` for its faces."""
    import torch

    linear = partial(torch.nn.Linear, bias=False, dtype=torch.bfloat16)
    modules = [make_expert(torch.nn.Module, linear) for _ in range(experts)]
    for module in modules:
        for linear in (module.up_gate_proj, module.down_proj):
            linear.weight = torch.nn.Parameter(linear.weight.detach().t().contiguous())

    def stack(parts: list[Any]) -> Any:
        return torch.nn.Parameter(torch.stack([part.detach() for part in parts]))

    def zeros_like(weight: Any) -> Any:
        return torch.zeros(weight.shape)

    node = make_node(modules, face == "stacked", stack, zeros_like, is_fp8, flush)
    weights = [p for module in modules for p in module.parameters()]
    if face == "grad":
        for weight in weights:
            del weight.main_grad
    indices = torch.rand(tokens, experts).argsort(1)[:, :TOPK]
    counts = torch.bincount(indices.reshape(-1), minlength=experts).tolist()
    x, dout = (torch.randn(tokens, HIDDEN).to(torch.bfloat16) for _ in range(2))
    probs = torch.rand(indices.shape)

    def leaf(tensor: Any) -> Any:
        return tensor.detach().requires_grad_()

    def step() -> None:
        outs = [node(leaf(x), counts, indices, leaf(probs)) for _ in range(LAYERS)]
        torch.autograd.backward(outs, [dout] * LAYERS)

    def step_each() -> None:
        for _ in range(LAYERS):
            node(leaf(x), counts, indices, leaf(probs)).backward(dout)
            node.step()

    def step_grad() -> None:
        for _ in range(LAYERS):
            for weight in weights:
                weight.grad = None
            node(leaf(x), counts, indices, leaf(probs)).backward(dout)

    return {"step": step_each, "grad": step_grad}.get(face, step)


def moe_step(experts: int, tokens: int, is_fp8: bool) -> Step:
    """A step of a `MoE`, whose weights are kept; gradients in `.grad`."""
    import torch

    from sonicmoe import MoE

    layer = MoE(experts, TOPK, HIDDEN, INNER).to(torch.bfloat16)
    parameters = list(layer.parameters())
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
    from model_experts import Experts, Row

    from sonicmoe.integrations.transformers import register

    register()
    topk = min(TOPK, experts)
    batch = Experts(Row("Qwen3-30B-A3B", HIDDEN, INNER, experts, topk, tokens), "cpu")
    batch.train_weights(face != "frozen")
    module = batch.module("sonicmoe_fp8" if is_fp8 else "sonicmoe")

    def step() -> None:
        for _ in range(LAYERS):
            batch.clear()
            if face == "written":
                batch.write_weights()
            module(batch.x, batch.ids, batch.probs).backward(batch.dout)

    return step


def paddle_step(experts: int, tokens: int, is_fp8: bool, stacked: bool, flush: str) -> Step:
    """A step of a node in Paddle."""
    import paddle

    linear = partial(paddle.nn.Linear, bias_attr=False)
    modules = [make_expert(paddle.nn.Layer, linear) for _ in range(experts)]
    for module in modules:
        for linear in (module.up_gate_proj, module.down_proj):
            linear.to(dtype="bfloat16")

    def stack(weights: list[Any]) -> Any:
        shape, fill = [len(weights), *weights[0].shape], paddle.nn.initializer.Constant(0.0)
        return paddle.create_parameter(shape, "bfloat16", default_initializer=fill)

    def zeros_like(weight: Any) -> Any:
        return paddle.zeros(weight.shape, "float32")

    node = make_node(modules, stacked, stack, zeros_like, is_fp8, flush)
    indices = paddle.rand([tokens, experts]).argsort(1)[:, :TOPK]
    counts = paddle.bincount(indices.reshape([-1]), minlength=experts).tolist()
    x, dout = (paddle.randn([tokens, HIDDEN]).astype("bfloat16") for _ in range(2))
    probs = paddle.rand(indices.shape)

    def leaf(tensor: Any) -> Any:
        tensor = tensor.detach()
        tensor.stop_gradient = False
        return tensor

    def step() -> None:
        outs = [node(leaf(x), counts, indices, leaf(probs)) for _ in range(LAYERS)]
        paddle.autograd.backward(outs, [dout] * LAYERS)

    return step


def make_expert(module: Any, linear: Any) -> Any:
    """A module with the two projections of one expert."""
    expert = module()
    expert.up_gate_proj = linear(HIDDEN, 2 * INNER)
    expert.down_proj = linear(INNER, HIDDEN)
    return expert


def make_node(
    modules: list[Any], stacked: bool, stack: Callable[[list[Any]], Any],
    zeros_like: Callable[[Any], Any], is_fp8: bool, flush: str,
) -> Any:  # fmt: skip
    """A node on the modules, or on stacked parameters of their weights' shapes; all of them have
    `main_grad`.
    """
    from sonicmoe import SonicMoEConfig
    from sonicmoe.ernie_compat import SonicMoEMlpNode

    config = SonicMoEConfig(fp8_mode="perf" if is_fp8 else "off")
    options: dict[str, Any] = {"config": config, "flush": flush}
    names = ("up_gate_proj", "down_proj")
    weights = [[getattr(module, name).weight for module in modules] for name in names]
    if stacked:
        up, down = map(stack, weights)
        weights = [[up, down]]
        node = SonicMoEMlpNode.from_fused(up, down, **options)
    else:
        node = SonicMoEMlpNode(modules, len(modules), HIDDEN, INNER, **options)
    for weight in itertools.chain(*weights):
        weight.main_grad = zeros_like(weight)
    return node
