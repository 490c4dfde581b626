"""How tokens come to the experts: as rows, ids and probabilities. The engine gathers rows inside its
GEMMs and sums the slots of a row itself, so nobody sorts, permutes or pads. In the place of
`alltoall` and `allgather`, `TokenDispatcher` sends a row once to each rank that needs it. Over
DeepEP, `RowsDispatcher` keeps Megatron's exchange, without its maps, its wait and its two copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
    MoETokenDispatcher,
)

from ...distributed_utils import dispatcher_of
from ...ep import Dispatched, Dispatcher
from ...errors import ConfigError, expect

Tensor = torch.Tensor
_REPLACED = (MoEAlltoAllTokenDispatcher, MoEAllGatherTokenDispatcher)


class TokenDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Megatron's six steps over a dispatcher of `sonicmoe.ep`. Ranks of expert tensor parallelism are
    destinations as any other: each gets a row, and the combine sums what their slices give.
    """

    over: Dispatcher
    ids: Any  # these two are of the forward that runs; no backward reads them
    received: Any

    @classmethod
    def take_over(cls, stock: MoETokenDispatcher, options: Mapping[str, Any]) -> None:
        """Make `stock`, to which the layer has given its groups, one of this class."""
        group = stock.tp_ep_group if stock.tp_size * stock.ep_size > 1 else None
        experts = stock.config.num_moe_experts * stock.tp_size
        over = dispatcher_of(experts, group, None, **options)
        _check(stock.config, over)
        stock.__class__, stock.over = cls, over
        # What a CUDA graph of the router and of `dispatch_preprocess` has to hand over.
        kept = [name for name in stock.cudagraph_attrs if name.startswith("shared_experts.")]
        stock.cudagraph_attrs = ["ids", *kept]

    def dispatch_preprocess(
        self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens `[T, H]` of `[S, B, H]`, and their probabilities fp32 `[T, K]` in the order of `ids`.

        routing_map, probs: bool and floating `[T, E]`, at most `moe_router_topk` experts of a token
        with a probability other than 0. Those with 0, which fill an expert up to its capacity, add
        nothing, and go nowhere.
        """
        self.hidden_shape, self.dtype = hidden_states.shape, hidden_states.dtype
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        rows = hidden_states.view(-1, self.hidden_shape[-1])
        if _overlaps(self.config):
            # That schedule frees what was dispatched, and the router's backward reads these tokens.
            rows = rows.clone()
        topk = min(self.config.moe_router_topk, int(probs.shape[1]))
        weights, chosen = probs.masked_fill(~routing_map, float("-inf")).topk(topk)
        here = routing_map.gather(1, chosen) & (weights != 0)
        weights = torch.where(here, weights, 0.0).to(torch.float32)
        self.ids = torch.where(here, chosen, -1)
        if self.tp_size > 1:
            self.ids, weights = self._to_every_slice(chosen, here), weights.tile(1, self.tp_size)
        return rows, weights

    def _to_every_slice(self, chosen: Tensor, here: Tensor) -> Tensor:
        """Ids int64 `[T, tp * K]`: rank `ep_rank * tp + tp_rank` has a slice of `ep_rank`'s experts."""
        local, slices = self.num_local_experts, range(self.tp_size)
        first = chosen + chosen // local * (self.tp_size - 1) * local
        return torch.cat([torch.where(here, first + n * local, -1) for n in slices], 1)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Received rows `[R, H]`, or what stands for them in FP8; probabilities fp32 `[R, K]`."""
        received = self.over.dispatch(hidden_states, self.ids, probs)
        self.ids, self.received = None, received
        return received.x if received.dx_to is None else received.dx_to, received.probs

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Dispatched, Tensor]:
        """Rows, in the place of counts all that came with them, and probabilities."""
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        return hidden_states, self.received, probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows are where they were."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """`[R, H]` -> `[T, H]`, summed over ranks."""
        received, self.received = self.received, None
        return self.over.combine(hidden_states, received.handle)

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """In the shape of the tokens, with the output of shared experts that ran beside."""
        shared = self.shared_experts
        # Experts of rows that travelled in FP8 answer in bf16.
        output = hidden_states.view(self.hidden_shape).to(self.dtype)
        if shared is None:
            return output
        shared.linear_fc2_forward(hidden_states)
        shared.post_forward_comm()
        return output + shared.get_output()


def _check(config: Any, over: Dispatcher) -> None:
    """Refuse options of the configuration that `over` cannot serve as it was made."""
    words = (
        "transport has fp8=True with moe_apply_probs_on_input True: nobody can weigh rows that are"
    )
    refused = over.fp8 and config.moe_apply_probs_on_input
    expect(not refused, ConfigError, f"{words} codes; needed: one of them False")
    words = "transport has fp8_grad=True with overlap_moe_expert_parallel_comm True, whose schedule"
    refused, needed = over.fp8_grad and _overlaps(config), "needed: fp8_grad=False"
    expect(not refused, ConfigError, f"{words} copies gradients between its steps; {needed}")
    words = (
        "cuda_graph_impl and its scope put the dispatch into a CUDA graph, where the host cannot"
    )
    needed = (
        "transport={'wait_for_counts': False, 'max_tokens': ...}, or graphs of attn, moe_router and"
    )
    refused = over.transport.moves and over.transport.exact_rows and _is_captured(config)
    expect(not refused, ConfigError, f"{words} wait for counts; needed: {needed} moe_preprocess")


def _overlaps(config: Any) -> bool:
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False))


def _is_captured(config: Any) -> bool:
    named = "cuda_graph_scope", "cuda_graph_modules"  # 0.16, 0.19
    given = next((getattr(config, name) for name in named if hasattr(config, name)), None) or ()
    names = {getattr(scope, "name", scope) for scope in given}
    whole = not names or bool(names & {"moe", "full", "full_iteration"})
    return whole and getattr(config, "cuda_graph_impl", "none") != "none"


class RowsDispatcher(MoEFlexTokenDispatcher):  # type: ignore[misc]
    """The flex dispatcher over DeepEP, without a permutation."""

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Dispatched, Tensor]:
        """Rows, in the place of counts all that came with them, and probabilities."""
        # The manager's, because schedules that cut the graph here replace those there.
        manager, probs = self._comm_manager, self._comm_manager.dispatched_probs
        counts, ids = manager.tokens_per_expert, manager.dispatched_indices
        return hidden_states, Dispatched(hidden_states, counts, ids, probs, None), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows are where they were."""
        return hidden_states


class _EqualToStock(type(MoELayer)):  # type: ignore[misc]
    """A layer of 0.16 passes its process groups on to the classes that it lists, found by `==`."""

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is MoELayer

    __hash__ = type.__hash__


class SonicMoELayer(MoELayer, metaclass=_EqualToStock):  # type: ignore[misc]
    """Megatron's MoE layer with the dispatchers above; transport: as in `use_sonicmoe`."""

    def __init__(
        self, config: Any, *arguments: Any, transport: Mapping[str, Any] | bool = True, **named: Any
    ) -> None:
        super().__init__(config, *arguments, **named)
        dispatcher, options = self.token_dispatcher, {} if transport is True else transport
        if type(dispatcher) in _REPLACED and options is not False:
            TokenDispatcher.take_over(dispatcher, options)
            return
        words = f"transport is {transport} with moe_token_dispatcher_type"
        kind, needed = config.moe_token_dispatcher_type, "'alltoall' or 'allgather'"
        expect(not options, ConfigError, f"{words} {kind!r}; needed: {needed}, or no such argument")
        is_flex = type(dispatcher) is MoEFlexTokenDispatcher
        if is_flex and config.moe_flex_dispatcher_backend == "deepep":
            # The layer has named the class itself, and ours adds no state to what that one holds.
            dispatcher.__class__ = RowsDispatcher
