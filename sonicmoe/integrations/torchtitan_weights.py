"""torchtitan's w1 (gate) and w3 (up) as one parameter `w13 [E, F, 2, D]`: its state dicts under the
stock names, its initialisers and its shardings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import LayoutError, expect
from ..refusals import need_shape

Tensor = torch.Tensor


def split(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """`w13` as the stock w1 (gate) and w3 (up), when a state dict was made. They are views of it,
    because the trainer holds a state dict all the time.
    """
    w13 = state.pop(f"{prefix}w13").detach()
    halves = w13[:, :, 0], w13[:, :, 1]
    if isinstance(w13, DTensor):
        # A DTensor with an offset has an address, where torch's copies to the host for asynchronous
        # checkpoints expect none. So the second half is a DTensor without one, too.
        halves = halves[0], w13[:, :, 0]
        halves[1]._local_tensor = w13.to_local()[:, :, 1]  # type: ignore[attr-defined]
    state[f"{prefix}w1_EFD"], state[f"{prefix}w3_EFD"] = halves


def stack(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """The reverse, before a state dict is loaded."""
    names = [f"{prefix}w1_EFD", f"{prefix}w3_EFD"]
    there = [name for name in names if name in state]
    if not there:
        return
    words = f"the checkpoint has {there[0]} alone; needed: {' and '.join(names)}"
    expect(there == names, LayoutError, words)
    experts, hidden_dim, _, dim = module.w13.shape
    needed = experts, hidden_dim, dim
    for name in names:
        need_shape(tuple(state[name].shape) == needed, name, state[name], needed)
    state[f"{prefix}w13"] = torch.stack([state.pop(name) for name in names], 2)


def fused_initialisers(stock: dict[str, Callable[..., Any]] | None) -> Any:
    """Each half of `w13` keeps its own: up is often drawn as the down-projection is."""
    if stock is None:
        return None
    rest = dict(stock)
    gate, up = rest.pop("w1_EFD"), rest.pop("w3_EFD")
    # No function in here: the module holds it, and must be pickled.
    return {**rest, "w13": partial(_initialise, gate, up)}


def _initialise(gate: Callable[..., Any], up: Callable[..., Any], w13: Tensor) -> None:
    gate(w13[:, :, 0])
    up(w13[:, :, 1])


def fused_shardings(stock: Any) -> Any:
    """Experts and F are the first two axes of `w13` as they are of w1 and w3."""
    rest = dict(stock.state_shardings)
    w1, _ = rest.pop("w1_EFD"), rest.pop("w3_EFD")
    return dataclasses.replace(stock, state_shardings={**rest, "w13": w1})
