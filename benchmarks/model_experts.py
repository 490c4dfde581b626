"""The experts of models that people train, as transformers' own modules: sizes, weights, routing,
and gradients in fp32 to compare with. experts_bench measures them.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from sonicmoe.bench.models import MEASURED

Tensor = torch.Tensor

OWN_CLASS = {  # model -> its module in transformers; sizes of others stand in Qwen3's class
    "OLMoE-7B": "olmoe",
    "Moonlight-16B": "deepseek_v3",
    "ERNIE-4.5-21B-A3B": "ernie4_5_moe",
    "Qwen3-Next-80B": "qwen3_next",
    "Mixtral-8x7B": "mixtral",
    "gpt-oss-20b": "gpt_oss",
    "gpt-oss-120b": "gpt_oss",
    "ERNIE-4.5-300B EP8": "ernie4_5_moe",
    "DeepSeek-V3 EP8": "deepseek_v3",
    "GLM-4.5-Air EP8": "glm4_moe",
    "MiniMax-M2 EP8": "minimax_m2",
}


class Row(NamedTuple):
    """One layer of experts. `experts` and `tokens` count those of all ranks, of which this one has
    a share: E / ranks experts, and the tokens that chose one of them.
    """

    model: str
    hidden: int
    inner: int
    experts: int
    topk: int
    tokens: int
    ranks: int = 1

    @property
    def local_experts(self) -> int:
        return self.experts // self.ranks

    @property
    def title(self) -> str:
        return f"{self.model}, {self.tokens} tokens"


ROWS = tuple(
    Row(
        m.model, m.shape.hidden, m.shape.intermediate, m.shape.experts * m.ranks, m.shape.topk,
        m.shape.tokens * m.ranks, m.ranks,
    )
    for m in MEASURED
)  # fmt: skip


def tiny(row: Row) -> Row:
    """Sizes at which a CPU checks the program, of the same class and the same share."""
    experts, topk = max(4, row.ranks), min(row.topk, 2)
    return row._replace(hidden=64, inner=64, experts=experts, topk=topk, tokens=48)


@dataclass
class Experts:
    """Weights and a batch of one row. Every implementation computes with the same tensors, so that
    no two copies of the weights lie in memory.

    `x` and `dout` `[T, H]` and the weights are bfloat16, `probs` `[T, K]` float32, `ids` `[T, K]`
    int64; ids from `local_experts` on are other ranks'. Of a share, T counts the tokens that
    dispatch brings here: those with at least one expert of this rank.
    """

    row: Row
    device: str
    weights: dict[str, nn.Parameter] = field(init=False)
    x: Tensor = field(init=False)
    dout: Tensor = field(init=False)
    probs: Tensor = field(init=False)
    ids: Tensor = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        row, device = self.row, self.device
        with torch.device("meta"):
            shapes = {name: p.shape for name, p in self._empty("eager").named_parameters()}
        self.weights = {}
        for name, shape in shapes.items():
            values = torch.randn(shape, device=device, dtype=torch.bfloat16)
            self.weights[name] = nn.Parameter(values.mul_(row.hidden**-0.5))
        scores = torch.rand(row.tokens, row.experts, device=device)
        probs, ids = scores.topk(row.topk, 1)
        here = (ids < row.local_experts).any(1)
        probs, ids = probs[here], ids[here]
        self.probs = (probs / probs.sum(1, keepdim=True)).requires_grad_()
        # The experts of other ranks are one sentinel, as transformers' router marks them.
        self.ids = torch.where(ids < row.local_experts, ids, row.local_experts)
        shape = len(ids), row.hidden
        self.x = torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()
        self.dout = torch.randn(shape, device=device, dtype=torch.bfloat16)

    def module(self, implementation: str) -> nn.Module:
        """The model's own experts module over the weights."""
        with torch.device("meta"):
            module = self._empty(implementation)
        for name, weight in self.weights.items():
            setattr(module, name, weight)
        module._is_expert_parallel = self.row.ranks > 1
        return module

    def train_weights(self, trained: bool) -> None:
        """Whether weights and biases get gradients."""
        for weight in self.weights.values():
            weight.requires_grad_(trained)

    def write_weights(self) -> None:
        """Count a write, as an optimizer's step does, without work for the GPU."""
        for weight in self.weights.values():
            torch.autograd.graph.increment_version(weight)

    def clear(self) -> None:
        """Drop all gradients."""
        for tensor in (self.x, self.probs, *self.weights.values()):
            tensor.grad = None

    def _empty(self, implementation: str) -> nn.Module:
        row = self.row
        name = OWN_CLASS.get(row.model, "qwen3_moe")
        models = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        config = SimpleNamespace(
            hidden_size=row.hidden,
            intermediate_size=row.inner,
            moe_intermediate_size=row.inner,
            num_experts=row.local_experts,
            num_local_experts=row.local_experts,
            n_routed_experts=row.local_experts,
            moe_num_experts=row.local_experts,
            hidden_act="silu",
            swiglu_alpha=1.702,
            swiglu_limit=7.0,
            _experts_implementation=implementation,
        )
        return _experts_class(models)(config)


def _experts_class(models: Any) -> type[nn.Module]:
    """The class that `use_experts_implementation` decorated, under whatever name it has in this
    version of transformers.
    """
    return next(
        kind
        for kind in vars(models).values()
        if inspect.isclass(kind)
        and kind.__module__ == models.__name__
        and hasattr(kind, "_apply_gate")
    )


def exact_copy(experts: Experts) -> Experts:
    """The same layer in fp32, whose weights are frozen."""
    wide = copy.copy(experts)
    wide.weights = {n: nn.Parameter(w.detach().float(), False) for n, w in experts.weights.items()}
    wide.x, wide.probs = (t.detach().float().requires_grad_() for t in (experts.x, experts.probs))
    wide.dout = experts.dout.float()
    return wide


def worst_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest relative RMSE of all of these tensors."""
    return max(_relative(found[name], value) for name, value in exact.items())


def errors_of(experts: Experts, module: nn.Module) -> dict[str, float]:
    """Relative RMSE of out, dx and dweights, each over all of its elements: one call of the module
    beside the same products in fp32, expert by expert, so that fp32 copies of one expert's weights
    suffice.
    """
    experts.clear()
    out = module(experts.x, experts.ids, experts.probs)
    out.backward(experts.dout)
    x = experts.x.detach().float().requires_grad_()
    golden = torch.zeros_like(x)
    sums = [0.0, 0.0]  # squares of differences and of values, of the weight gradients
    matmul = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        for expert in range(experts.row.local_experts):
            _add_expert(experts, module, expert, x, golden, sums)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul
    assert x.grad is not None and experts.x.grad is not None
    found = {
        "out": _relative(out, golden),
        "dx": _relative(experts.x.grad, x.grad),
        "dweights": (sums[0] / sums[1]) ** 0.5,
    }
    experts.clear()
    return found


def _add_expert(
    experts: Experts, module: nn.Module, expert: int, x: Tensor, golden: Tensor, sums: list[float]
) -> None:
    """This expert's part of the output and of dx, and the error of its weight gradients."""
    rows, slots = torch.where(experts.ids == expert)
    own = {
        name: weight[expert].detach().float().requires_grad_()
        for name, weight in experts.weights.items()
    }
    up, down = own["gate_up_proj"], own["down_proj"]
    transposed = getattr(module, "is_transposed", False)
    z = x[rows] @ (up if transposed else up.T) + own.get("gate_up_proj_bias", 0.0)
    y = module._apply_gate(z) @ (down if transposed else down.T)  # type: ignore[operator]
    y = (y + own.get("down_proj_bias", 0.0)) * experts.probs.detach()[rows, slots, None]
    golden.index_add_(0, rows, y.detach())
    y.backward(experts.dout[rows].float())
    for name, weight in experts.weights.items():
        gradient, reference = weight.grad, own[name].grad
        assert gradient is not None and reference is not None
        sums[0] += float((gradient[expert].float() - reference).square().sum())
        sums[1] += float(reference.square().sum())


def _relative(found: Tensor, golden: Tensor) -> float:
    return float((found.detach().float() - golden).norm() / golden.norm())
