"""Rows, ids and probabilities as DeepEP delivers them, handed to the experts as they are: the engine
gathers rows inside its GEMMs and sums the slots of a row itself. The stock dispatcher makes two
multihot maps, waits for the number of rows, and copies each row once for every expert that it goes
to, twice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher

Tensor = torch.Tensor


class Routes(NamedTuple):
    """In place of counts: local expert ids `[R, K]` of the rows, -1 for experts of other ranks, and
    the counts `[E]` of these on the host.
    """

    indices: Tensor
    counts: Any


class RowsDispatcher(MoEFlexTokenDispatcher):  # type: ignore[misc]
    """The flex dispatcher over DeepEP, without a permutation."""

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Routes, Tensor]:
        """Received rows `[R, H]`, their routes, and probabilities fp32 `[R, K]`."""
        # The manager's and not the argument, because schedules that cut the graph here replace it
        # there.
        manager = self._comm_manager
        routes = Routes(manager.dispatched_indices, manager.tokens_per_expert)
        return hidden_states, routes, manager.dispatched_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows are where they were."""
        return hidden_states


class _EqualToStock(type(MoELayer)):  # type: ignore[misc]
    """A layer of 0.16 passes its process groups on to the classes that it lists, found by `==`."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is MoELayer

    __hash__ = type.__hash__


class SonicMoELayer(MoELayer, metaclass=_EqualToStock):  # type: ignore[misc]
    """Megatron's MoE layer; over DeepEP, with `RowsDispatcher`."""

    def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
        super().__init__(config, *arguments, **named)
        dispatcher = self.token_dispatcher
        is_flex = type(dispatcher) is MoEFlexTokenDispatcher
        if is_flex and config.moe_flex_dispatcher_backend == "deepep":
            # The layer has named the class itself, and ours adds no state to what that one holds.
            dispatcher.__class__ = RowsDispatcher
