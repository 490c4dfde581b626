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

from sonicmoe import SonicMoEConfig
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


def exact_copy(experts: Experts, trained: bool = False) -> Experts:
    """The same layer in fp32; `trained`: whether its weights get gradients."""
    wide = copy.copy(experts)
    wide.weights = {
        name: nn.Parameter(weight.detach().float(), trained)
        for name, weight in experts.weights.items()
    }
    wide.x, wide.probs = (t.detach().float().requires_grad_() for t in (experts.x, experts.probs))
    wide.dout = experts.dout.float()
    return wide


def worst_error(found: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The largest relative RMSE of all of these tensors."""
    return max(_relative(found[name], value) for name, value in exact.items())


def results_of(experts: Experts, module: nn.Module) -> dict[str, Tensor]:
    """Output, and gradients of the tokens and of every weight, of one call."""
    experts.clear()
    out = module(experts.x, experts.ids, experts.probs)
    out.backward(experts.dout)
    leaves = {"dx": experts.x, **experts.weights}
    found = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    experts.clear()
    return {"out": out.detach(), **found}


def errors_of(experts: Experts, modules: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Relative RMSE of out, dx and dweights, each over all of its elements, of every module: one call
    beside the reference engine's in fp32.
    """
    wide = exact_copy(experts, trained=True)
    with SonicMoEConfig(engine="reference").activate():
        exact = results_of(wide, wide.module("sonicmoe"))
    errors = {}
    for name, module in modules.items():
        found = results_of(experts, module)
        squares = {key: _squares(found[key], golden) for key, golden in exact.items()}
        of_weights = [squares.pop(key) for key in experts.weights]
        error, total = map(sum, zip(*of_weights, strict=True))
        errors[name] = {key: (above / below) ** 0.5 for key, (above, below) in squares.items()}
        errors[name]["dweights"] = (error / total) ** 0.5
    return errors


def _squares(found: Tensor, golden: Tensor) -> tuple[float, float]:
    """Sums of squares of the differences and of the values."""
    return float((found.float() - golden).square().sum()), float(golden.square().sum())


def _relative(found: Tensor, golden: Tensor) -> float:
    return float((found.detach().float() - golden).norm() / golden.norm())
