"""PaddleFleet's own fused dispatch and combine behind the dispatcher's contract, where Fleet is
installed with DeepEP.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError, DTypeError, expect
from ..interop import dtype_name
from .deepep import first_line, group_shape, host_counts
from .dispatcher import Dispatcher
from .fp8_rows import Forms
from .interface import Dispatched, check_combine, check_num_experts, zero_where_not_here

Tensor = torch.Tensor
MODULE = "paddlefleet.transformer.moe.fused_a2a"


class FleetFunctions(NamedTuple):
    """`fused_dispatch(x, token_indices, token_probs, num_experts, group, ...)` and
    `fused_combine(x, group, handle, ...)`.
    """

    dispatch: Any
    combine: Any


class FleetHandle(NamedTuple):
    """DeepEP's handle and the number of rows delivered."""

    handle: Any
    num_rows: int


def find_fleet() -> tuple[FleetFunctions | None, str]:
    """`(functions, "")`, or `(None, why there are none)`. Fleet sets both to None where it has no
    DeepEP.
    """
    try:
        module = importlib.import_module(MODULE)
    # An import of Fleet that fails for lack of hardware or libraries raises any of these.
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        return None, f"{MODULE}: {first_line(error)}"
    functions = FleetFunctions(
        getattr(module, "fused_dispatch", None), getattr(module, "fused_combine", None)
    )
    if None in functions:
        return None, f"{MODULE} has no fused_dispatch: DeepEP is missing"
    return functions, ""


class FleetDispatcher(Dispatcher):
    """Fleet brings autograd, events and the EP barrier; this class keeps the contract of
    `Dispatched`. It dispatches bf16 only.
    """

    name = "PaddleFleet (fused_dispatch)"
    bf16_only = True

    def __init__(self, num_experts: int, group: Any, functions: FleetFunctions) -> None:
        """`group`: the expert-parallel communication group."""
        ranks, _ = group_shape(group)
        check_num_experts(num_experts, ranks)
        self.num_experts, self.num_local_experts = num_experts, num_experts // ranks
        self._group, self._functions = group, functions

    def _send(self, x: Tensor, ids: Tensor, topk_weights: Tensor, forms: Forms) -> Dispatched:
        if forms.any:
            raise ConfigError(
                f"fp8 is {forms.tokens!r} and fp8_grad is {forms.gradients!r}; this dispatcher "
                "calls Fleet's fused_dispatch in bfloat16 only: needed: both False, or kind "
                "'deepep' or 'collective'"
            )
        words = f"x is {dtype_name(x.dtype)}; Fleet dispatches bfloat16"
        expect(x.dtype == torch.bfloat16, DTypeError, words)
        recv_x, recv_probs, states, *_ = self._functions.dispatch(
            x, ids, topk_weights, self.num_experts, self._group
        )
        indices = states["dispatched_indices"].to(torch.int64)
        # Fleet returns ids and weights as DeepEP delivers them, so the contract of `Dispatched` is
        # restored here.
        probs = zero_where_not_here(recv_probs, indices, self.num_local_experts)
        handle = FleetHandle(states["handle"], int(recv_x.shape[0]))
        return Dispatched(recv_x, host_counts(states["tokens_per_expert"]), indices, probs, handle)

    def combine(self, out: Tensor, handle: FleetHandle) -> Tensor:
        check_combine(out, handle, FleetHandle, lambda: handle.num_rows)
        return self._functions.combine(out, self._group, handle.handle)  # type: ignore[no-any-return]
