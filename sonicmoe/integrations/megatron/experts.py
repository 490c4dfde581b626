"""The experts of one MoE layer of Megatron-Core."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import TEGroupedMLP
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

from ...enums import is_glu
from ...ep import Dispatched
from ...errors import ConfigError, expect
from ...interop import require_framework_tensor
from ...layer.late_wgrad import WgradStore
from ...layer.state import LayerState
from ...node.mlp_node import SonicMoEMlpNode
from ...refusals import need_type
from ...weights.parameters import NumberedParameters
from .linear import ExpertLinear
from .options import activation_of, check_options, check_sizes, own_config, puts_off, sizes_of

Tensor = torch.Tensor
_NAMES = ("linear_fc1", "linear_fc2")


class SonicExperts(TEGroupedMLP):  # type: ignore[misc]
    """The local experts, with the parameters and checkpoints of `TEGroupedMLP`:
    `linear_fc1.weight{i} [2F, H]` (gate rows, then up rows; `[F, H]` without a gate) and
    `linear_fc2.weight{i} [H, F]`, and `bias{i}` of each with `add_bias_linear`. It is one by class,
    because Megatron-FSDP and upcycling ask who has such parameters, and has nothing else of it.
    Transformer Engine is not needed.

    Args:
        num_local_experts, config, pg_collection: as Megatron passes them.
        submodules, name: accepted, and not used.
        options: fields of `SonicMoEConfig`, such as `fp8_mode`.

    Raises:
        ConfigError, ShapeError: an option, of the configuration or of this call, that the engine
            cannot serve; the message names it.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        name: str | None = None,
        **options: Any,
    ) -> None:
        own = own_config(options)
        check_options(config, own, asked="fp8_mode" in options)
        activation, parameters = activation_of(config)
        groups = pg_collection
        sizes = sizes_of(config, num_local_experts, groups.expt_tp.size())
        check_sizes(sizes, own, activation, config.add_bias_linear)
        MegatronModule.__init__(self, config=config)
        self.num_local_experts = num_local_experts
        self.ep_group, self.tp_group = groups.ep, groups.expt_tp
        gated, late = is_glu(activation), puts_off(config)
        rows = 2 * sizes.inner if gated else sizes.inner
        shared: dict[str, Any] = {"groups": groups, "puts_off": late}
        self.linear_fc1 = ExpertLinear(
            *(config, num_local_experts, (rows, sizes.hidden), config.init_method),
            **shared, split=0, stride=2 if gated else 1,
        )  # fmt: skip
        self.linear_fc2 = ExpertLinear(
            *(config, num_local_experts, (sizes.hidden, sizes.inner)),
            config.output_layer_init_method,
            **shared, split=1, stride=1,
        )  # fmt: skip
        projections = self.linear_fc1, self.linear_fc2
        fused = config.gradient_accumulation_fusion
        held = NumberedParameters(
            *projections, sizes, activation, names=_NAMES, through_autograd=not fused
        )
        state = LayerState(held)
        self._store = WgradStore() if late else None
        if late:
            state.offers = self._offer
        self.node = SonicMoEMlpNode.over(
            state, activation, config=own, activation_parameters=parameters
        )

    def _offer(self) -> WgradStore | None:
        return self._store

    def forward(
        self, hidden_states: Tensor, tokens_per_expert: Any, probs: Tensor, **unserved: Any
    ) -> tuple[Tensor, None]:
        """Rows `[R, H]`, and where each of them goes.

        Args:
            hidden_states: in expert order; or as they were received.
            tokens_per_expert: counts `[E]` on the host or the device; or what `TokenDispatcher` and
                `RowsDispatcher` pass on, of rows that nobody has sorted.
            probs: `[R]`, of each row; `[R, K]` of rows as they were received.

        Returns:
            The output of each row, weighted by its probability, and None: biases are in it. With
            slots of its own, a row has their sum.
        """
        given = sorted(key for key, value in unserved.items() if value is not None)
        words = f"the experts got {given}, which no engine serves"
        expect(not given, ConfigError, f"{words}; needed: Megatron's options that leave them out")
        require_framework_tensor(hidden_states, "hidden_states")
        require_framework_tensor(probs, "probs")
        needed = "counts [E] in a tensor, or what our dispatchers pass on"
        need_type("tokens_per_expert", tokens_per_expert, (Tensor, Dispatched), needed)
        # For their hooks: parameters that are gathered in the background are there afterwards.
        self.linear_fc1()
        self.linear_fc2()
        biases = self._biases() if self.config.add_bias_linear else None
        routes = tokens_per_expert if isinstance(tokens_per_expert, Dispatched) else None
        if self._may_lose_rows(routes):
            hidden_states = hidden_states.clone()
        weighed: Tensor | None = probs.to(torch.float32)
        if self.config.moe_apply_probs_on_input:
            hidden_states, weighed = _weigh(hidden_states, probs, routes), None
        if routes is not None:
            weighed = torch.ones_like(probs, dtype=torch.float32) if weighed is None else weighed
            return self._routed(hidden_states, routes, weighed, biases), None
        # Counts on the host size the rows; those on the device are never waited for.
        counts = tokens_per_expert.to(hidden_states.device, non_blocking=True)
        out = self.node.forward_sorted(hidden_states, counts, weighed, tokens_per_expert, biases)
        return out, None

    def _routed(self, rows: Tensor, routes: Dispatched, probs: Tensor, biases: Any) -> Tensor:
        others = {"dout_source": routes.dout_source, "biases": biases}
        if routes.x_scale is not None:
            dx_to = rows if rows.requires_grad else None
            rows, others = routes.x, {**others, "x_scale": routes.x_scale, "dx_to": dx_to}
        return self.node(rows, routes.tokens_per_expert, routes.indices, probs, **others)  # type: ignore[no-any-return]

    def _may_lose_rows(self, routes: Dispatched | None) -> bool:
        """Whether the schedule frees these rows, which the backward reads, after this forward. It
        does that where the stock modules have a copy: of a permutation, or of a quantisation.
        """
        config = self.config
        if not getattr(config, "overlap_moe_expert_parallel_comm", False):
            return False
        if routes is not None:
            return routes.x_scale is None
        quantised = config.fp8 and config.moe_token_dispatcher_type == "flex"
        return bool(self.num_local_experts == 1 or quantised)

    def _biases(self) -> tuple[Tensor, Tensor]:
        """b1 `[E, N1]` and b2 `[E, H]`."""
        b1, b2 = self.linear_fc1.biases(), self.linear_fc2.biases()
        # The dispatcher sums the outputs of these ranks, and b2 belongs into the sum once. It stays
        # in the graph of the others, where data parallelism waits for the hooks of every parameter.
        return b1, b2 if self.tp_group.rank() == 0 else b2 * 0.0

    def backward_dw(self) -> None:
        """Run the weight gradients of the oldest backward that put them off (`delay_wgrad_compute`),
        and the hooks that data parallelism registered for that moment. Otherwise they are complete
        already, and nothing is done.
        """
        if self._store is None:
            return
        self._store.run()
        self.linear_fc2.fire_hooks()
        self.linear_fc1.fire_hooks()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Of these experts among all, interchangeable with `TEGroupedMLP`'s and `SequentialMLP`'s."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        apart = metadata.get("singleton_local_shards", False)
        experts, axis = self.num_local_experts, len(sharded_offsets)
        count, first = self.ep_group.size() * experts, self.ep_group.rank() * experts
        made: dict[str, Any] = {}
        for name, projection in zip(_NAMES, (self.linear_fc1, self.linear_fc2), strict=True):
            for expert in range(experts):
                number = first + expert
                place = () if apart else ((axis, number, count),)
                key = f"{prefix}experts.{number}.{name}." if apart else f"{prefix}experts.{name}."
                offsets = (*sharded_offsets, *place)
                entries = projection.sharded_entries(expert, key, offsets, apart, metadata)
                made.update((f"{prefix}{name}.{own}", entry) for own, entry in entries)
        return made


def _weigh(rows: Tensor, probs: Tensor, routes: Dispatched | None) -> Tensor:
    """Rows times their one probability, in their dtype."""
    if routes is not None:
        probs = torch.where(routes.indices >= 0, probs, 0.0).sum(1)
    return (probs.unsqueeze(-1) * rows).to(rows.dtype)
