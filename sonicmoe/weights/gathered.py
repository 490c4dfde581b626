"""Experts' weights of which FSDP2 gathers FP8 codes and block scales in place of values.

    ExpertShard (bf16, fp32) ──► LayerCodes.inputs ──► all-gather ──► LayerCodes.hold ──► read ──► engine
    optimizer ◄── gradients of the shard ◄── reduce-scatter ◄── gradients of a parameter without values

Shards are cut along E, so a block of the shard is one of the whole weight, and has the same scale.
A rank quantises its shard once after each event of docs/design.md, "Stale weights". What the module
holds between gather and reshard is a parameter of the whole shape whose memory is a single NaN:
whoever reads its values without the codes sees that at once.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ..engine.interface import Engine, EngineWeights
from ..engine.settings import EngineSettings
from ..errors import ConfigError, LayoutError
from ..interop import holds_memory, in_backward, plain_ops
from ..layouts import GateUp, WeightLayout
from ..quant.format import BlockScaledTensor, Orientation
from ..quant.gpu import transposed
from ..weight_source import WeightSource
from .cache import PreparedWeights, Reading
from .changes import traces_of
from .copies import fit, named
from .shards import ExpertShard, Gathered, padded

Tensor = torch.Tensor
Chosen = tuple[Engine, EngineSettings]


class LayerCodes:
    """The codes of one layer's experts: those of this rank's shard, and between gather and reshard
    those of all.
    """

    def __init__(
        self,
        parameters: Sequence[tuple[nn.Module, str]],
        layout: WeightLayout,
        choose: Callable[[Sequence[Tensor]], Chosen | None],
    ) -> None:
        """Make shards of the parameters.

        Args:
            parameters: w1, w2, or gate, up, w2 where `layout.apart`, by module and name.
            layout: how they lie; axes between the first and the last two count as one.
            choose: the engine and its settings for weights like these; None where values are to be
                gathered. Asked until the first gather.
        """
        # Weakly, because the parameters hold this object.
        self._owners = [(weakref.ref(module), name) for module, name in parameters]
        self._layout, self._choose = layout, choose
        self._chosen: Chosen | None = None
        self._is_frozen = self._is_stale = False
        self._prepared = PreparedWeights()
        self._kept: EngineWeights | None = None  # of this rank's shard, in forward's order
        self._seen: tuple[Any, ...] = ()  # what the last gather saw of the shard
        self._served: set[int] = set()  # roles that the last gather has read
        self._held: dict[int, BlockScaledTensor] = {}
        self._read: dict[bool, EngineWeights] = {}
        self.wrap()
        for module in dict.fromkeys(module for module, _ in parameters):
            module.register_load_state_dict_post_hook(partial(_wrap_again, self))

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a module has no codes, and its hooks nothing to do."""
        return type(None), ()

    def wrap(self) -> None:
        """Make shards of the parameters, where others have taken their places too."""
        for role, (reference, name) in enumerate(self._owners):
            if (module := reference()) is not None:
                self._wrap(module, name, role)

    def _wrap(self, module: nn.Module, name: str, role: int) -> None:
        held: Any = module._parameters[name]
        local = getattr(held, "_local_tensor", held)
        if isinstance(local, ExpertShard):
            return
        if local is not held:
            held._local_tensor = ExpertShard.of(local, self, role)
            return
        shard = ExpertShard.of(held.detach(), self, role)
        module._parameters[name] = nn.Parameter(shard, held.requires_grad)

    def _parameters(self) -> list[Any]:
        found = [(reference(), name) for reference, name in self._owners]
        return [None if module is None else module._parameters[name] for module, name in found]

    def chooses_codes(self) -> bool:
        """Whether codes are gathered, as far as is known."""
        if self._is_frozen:
            return self._chosen is not None
        parts = [getattr(held, "_local_tensor", held) for held in self._parameters()]
        if any(part is None or part.device.type == "meta" for part in parts):
            return True
        self._chosen = self._choose([part.plain() for part in parts])
        return self._chosen is not None

    def freeze(self, chosen: Chosen | None) -> None:
        """Gather so from now on: FSDP2 keeps the sizes of its first gather."""
        self._is_frozen, self._chosen = True, chosen

    def expire(self) -> None:
        """Have the next gather quantise."""
        self._is_stale = True

    def inputs(self, shard: ExpertShard, mesh: Any) -> tuple[tuple[Tensor, ...], Gathered]:
        """The codes and scales that are gathered of a shard: in a backward those that backward reads,
        else those that forward reads.
        """
        self.freeze(self._chosen)
        parameters, role, ranks = self._parameters(), shard.role, mesh.size()
        whole = parameters[role]
        # Other axes of the mesh, as of expert parallelism, have cut E before. FSDP2's are known by name.
        spec, own = whole._spec, mesh.mesh_dim_names or ()
        placed = zip(spec.mesh.mesh_dim_names or (), spec.placements, strict=False)
        elsewhere = any(name in own and at.is_shard() and at.dim > 0 for name, at in placed)
        shards = spec.num_shards_map[0]
        if shards < ranks or elsewhere:
            words = (
                f"{self._owners[role][1]} is sharded along another axis than that of the experts"
            )
            raise LayoutError(f"{words}, which cuts blocks; needed: Shard(0), or no gather_codes")
        experts = whole.shape[0] * ranks // shards
        if whole._local_tensor.device != shard.device:
            raise LayoutError(
                f"the shards of the experts are on {whole._local_tensor.device} and are gathered on {shard.device}; codes are made "
                "where shards lie. Needed: fully_shard without CPUOffloadPolicy, or no gather_codes"
            )
        made = self._current(parameters, -(-experts // ranks), role)
        if 0 < role < len(parameters) - 1:
            # The codes of gate and up are those of one w1, and come with gate.
            nothing = torch.zeros(1, dtype=torch.uint8, device=shard.device)
            return (nothing,), Gathered(experts, None)
        codes: Any = made.w2 if role else made.w1
        if in_backward():
            # Behind the gather each rank would have to transpose the codes of all ranks.
            codes = transposed(codes)
        if ranks == 1:
            return (codes.bytes,), Gathered(experts, codes, codes.scale_inv.clone())
        return (codes.bytes, codes.scale_inv), Gathered(experts, codes)

    def _current(self, parameters: list[Any], experts: int, role: int) -> EngineWeights:
        """Codes of the shard, padded to as many experts as the largest has."""
        if self._kept is not None and not self._is_stale and role not in self._served:
            self._served.add(role)  # the rest of a gather that began before
            return self._kept
        assert self._chosen is not None
        engine, settings = self._chosen
        shards = [held._local_tensor for held in parameters]
        # A write to a DTensor moves its own counter, and one to its part that of the part.
        traces = traces_of([*parameters, *shards])
        if not any(held.requires_grad for held in parameters):
            traces = traces._replace(
                optimizer_steps=0
            )  # those of others leave frozen weights alone
        place = tuple([(shard.data_ptr(), shard.dtype) for shard in shards])
        seen, self._seen = self._seen, (place, traces)
        # Nobody writes weights between a forward and its backward, not even without a trace.
        if self._kept is None or not in_backward() or self._is_stale or seen != self._seen:
            source = partial(self._source_of, shards, experts)
            with torch.inference_mode(False), plain_ops():
                given = engine, settings.of_weights.in_one_order, source, shards[0], place, traces
                self._kept = self._prepared.read(*given, stale=self._is_stale, keeps=True).weights
            self._is_stale = False
        self._served = {role}
        return self._kept

    def _source_of(self, shards: Sequence[ExpertShard], experts: int) -> WeightSource:
        """The engine quantises the shards with their padding."""
        parts = [padded(shard, experts) for shard in shards]
        parts = [part.flatten(1, -2) if part.dim() > 3 else part for part in parts]
        w1 = GateUp(*parts[:2]) if self._layout.apart else parts[0]
        return WeightSource.stacked(w1, parts[-1], layout=self._layout)

    def hold(self, role: int, outputs: tuple[Tensor, ...], gathered: Gathered) -> None:
        """Codes have come: of these the layer reads until FSDP2 frees or gathers them again."""
        self._read.clear()
        like = gathered.like
        if like is None:
            return
        codes, *rest = outputs
        scales = rest[0] if gathered.scales is None else gathered.scales
        form = like.block, like.code, like.orientation
        if codes.shape[0] != gathered.experts:  # FSDP2 gathered the padding, too
            codes, scales = codes[: gathered.experts], scales[: gathered.experts]
        self._held[role] = BlockScaledTensor.from_bytes(codes, scales, *form)

    def read(
        self,
        engine: Engine,
        settings: EngineSettings,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
        backward: bool = False,
    ) -> Reading:
        """The weights of a forward, or of a backward, that starts now. biases: native.

        Raises:
            ConfigError: the call computes with another engine or recipe than the codes are of.
            LayoutError: the codes were freed.
        """
        assert self._chosen is not None
        asked, made_for = fit(engine, settings), fit(*self._chosen)
        if asked != made_for:
            raise ConfigError(
                f"FSDP2 gathered codes of the experts for {named(*made_for)}, and this call computes with {named(*asked)}; needed: the "
                "configuration, and the use_fp8, under which gather_codes was called"
            )
        given = tuple(b if b is None else b.detach().to(torch.float32) for b in biases)
        weights = self._weights(backward, settings.recompute_z)
        weights = weights if given[0] is None else weights.with_biases(*given)
        return Reading(weights, lent=_GatheredAgain(self, settings))

    def _weights(self, backward: bool, recomputes_z: bool) -> EngineWeights:
        first, last = self._held.get(0), self._held.get(len(self._owners) - 1)
        if (
            first is None
            or last is None
            or not (holds_memory(first.bytes) and holds_memory(last.bytes))
        ):
            words = "the codes of the experts were freed, as FSDP2 does behind the unit that gathers them"
            raise LayoutError(f"{words}; needed: a call by way of that unit")
        alone = first.orientation is Orientation.ROWS or (backward and not recomputes_z)
        if alone and backward in self._read:
            return self._read[backward]
        with plain_ops():
            if first.orientation is Orientation.ROWS:
                made = EngineWeights(first, last, first, last)
            elif alone:
                made = EngineWeights(copy.copy(first), copy.copy(last), first, last)
                made.release_forward()
            else:  # a forward inside of a backward, as of activation checkpointing
                made = EngineWeights(transposed(first), transposed(last), first, last)
        if alone:
            self._read[backward] = made
        return made


class _GatheredAgain:
    """For the backward of a forward that read gathered codes: they lie elsewhere by then, and maybe
    in the other order.
    """

    def __init__(self, codes: LayerCodes, settings: EngineSettings) -> None:
        self._codes, self._recomputes_z = codes, settings.recompute_z

    def check(self, weights: EngineWeights) -> EngineWeights:
        """The weights as they were gathered for this backward, with the biases of its forward."""
        found = self._codes._weights(True, self._recomputes_z)
        return found if weights.b1 is None else found.with_biases(weights.b1, weights.b2)


def _wrap_again(codes: LayerCodes | None, module: Any, keys: Any) -> None:
    """`load_state_dict(assign=True)` has put other tensors in the place of the shards."""
    if codes is not None:
        codes.wrap()
