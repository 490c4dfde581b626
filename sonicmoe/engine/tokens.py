"""Tokens as an engine is handed them, and what it keeps of a forward and of a backward: for the
backward, and for the weight gradients.

Legend: T tokens, H hidden, I intermediate, N1 = 2I (gated) or I, R padded rows in expert order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import RoutingError, expect
from ..interop import is_cuda
from ..quant.format import BlockScaledTensor, Code
from ..quant.recipes import BlockShape
from ..routing.metadata import RoutingMetadata
from .settings import EngineSettings, TokenFormat

Tensor = torch.Tensor
Tokens = Tensor | BlockScaledTensor
TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def token_format(x: Tokens) -> TokenFormat:
    """The form in which an engine is handed these tokens."""
    return TokenFormat.E4M3_1X128 if isinstance(x, BlockScaledTensor) else TokenFormat.PLAIN


def token_dtype(x: Tokens) -> torch.dtype:
    """The dtype of out and dx for these tokens: their own, or bfloat16 where they are quantised."""
    return torch.bfloat16 if isinstance(x, BlockScaledTensor) else x.dtype


def plain_tokens(x: Tokens | None) -> Tensor:
    """The tokens, for an engine whose border lets plain ones pass only."""
    assert x is not None and not isinstance(x, BlockScaledTensor)
    return x


@dataclass(eq=False)
class Saved:
    """The part of one forward that its backward needs. Fields are released (set to None) stage by
    stage when the settings ask for it.

    x `[T, H]` as given, plain or quantised; z `[R, N1]`: 8-bit codes, a plain tensor, or None when
    it is recomputed.
    donated: nobody reads z after this backward, and its memory is the engine's from then on.
    wants_weights: whether anybody asks for the gradients of weights or biases afterwards.
    wants_biases: whether anybody asks for those of biases.
    projected: u of both projections beside each other, `[R, columns]` (`low_rank.py`); None without
        adapters.
    """

    settings: EngineSettings
    routing: RoutingMetadata
    x: Tokens | None
    z: BlockScaledTensor | Tensor | None
    donated: bool = False
    wants_weights: bool = True
    wants_biases: bool = True
    projected: Tensor | None = None

    def take_z(self) -> BlockScaledTensor | Tensor | None:
        """Move `z` out, so that its holder alone keeps it alive and may drop it in the middle of a
        backward.
        """
        # One reference, so that dropping it frees the memory at once and waits for no collection.
        z, self.z = self.z, None
        return z

    def pack(self) -> tuple[list[Tensor], SavedSpec]:
        """Flatten into tensors (for `save_for_backward`) and everything else."""
        assert self.x is not None
        # This order is the format that `SavedSpec.unpack` reads. x comes first, because the Paddle
        # bridge asks the caller's tensors whether they were freed or written.
        x_spec: BlockSpec | None = None
        if isinstance(self.x, BlockScaledTensor):
            # The codes as the caller gave them, and not as bytes: a view would have another name.
            tensors = [self.x.codes, self.x.scale_inv]
            x_spec = BlockSpec(self.x.block, self.x.code)
        else:
            tensors = [self.x]
        tensors += self.routing.held
        if self.projected is not None:
            tensors.append(self.projected)
        # z last, because recomputing leaves it out.
        z_spec: BlockSpec | None = None
        if isinstance(self.z, BlockScaledTensor):
            tensors += [self.z.bytes, self.z.scale_inv]
            z_spec = BlockSpec(self.z.block, self.z.code)
        elif self.z is not None:
            tensors.append(self.z)
        routing, has_projected = self.routing, self.projected is not None
        return tensors, SavedSpec(
            settings=self.settings,
            sizes=routing.sizes,
            places=None if routing.memory is None else routing.places,  # type: ignore[arg-type]
            host_counts=routing.host_counts,
            x=x_spec,
            z=z_spec,
            has_projected=has_projected,
            routing_checksum=routing_checksum(routing),
            given=1 if x_spec is None else 2,
        )


class BlockSpec(NamedTuple):
    """Static half of a block-scaled tensor."""

    block: BlockShape
    code: Code


class SavedSpec(NamedTuple):
    """The static half of a `Saved`: holds no tensor, so autograd's saved-tensor machinery sees
    every byte.

    given: how many of the tensors, counted from the first, came from the caller: x, or its codes and
        scales.
    """

    settings: EngineSettings
    sizes: tuple[int, ...]
    places: tuple[int, ...] | None
    host_counts: tuple[int, ...] | None
    x: BlockSpec | None
    z: BlockSpec | None
    has_projected: bool
    routing_checksum: int | None
    given: int

    def unpack(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> Saved:
        # The order of `Saved.pack`: x, the routing, what adapters project, z.
        n_routing = len(RoutingMetadata.TENSOR_FIELDS) if self.places is None else 1
        n_given = self.given
        given, tensors = tensors[:n_given], tensors[n_given:]
        routing_tensors, rest = tensors[:n_routing], tensors[n_routing:]
        # The tensors may be others than at `pack`: activation recompute makes them again.
        if self.places is not None:
            routing = RoutingMetadata.in_memory(self.sizes, routing_tensors[0], self.places)
        else:
            fields: tuple[Any, ...] = (*self.sizes, *routing_tensors)
            routing = RoutingMetadata(*fields, host_counts=self.host_counts)  # type: ignore[misc]
        # Under activation recompute the tensors come from a second forward and the spec from the
        # first.
        if self.routing_checksum is not None:
            _check_same_routing(routing, self.routing_checksum)
        x: Tokens = given[0]
        if self.x is not None:
            x = BlockScaledTensor(given[0], given[1], self.x.block, self.x.code)
        projected = rest[0] if self.has_projected else None
        rest = rest[int(self.has_projected) :]
        z: BlockScaledTensor | Tensor | None = None
        if self.z is not None:
            z = BlockScaledTensor.from_bytes(rest[0], rest[1], self.z.block, self.z.code)
        elif rest:
            z = rest[0]
        return Saved(self.settings, routing, x, z, projected=projected)


def routing_checksum(routing: RoutingMetadata) -> int | None:
    """A checksum of which row serves which slot; None where nobody asks for it."""
    # On a GPU reading it would wait. Routing that was validated has waited already.
    if is_cuda(routing.held[0]) and routing.host_counts is None:
        return None
    size = routing.num_tokens * routing.topk
    # Weighted by position: two slots that exchange their rows leave a plain sum as it was.
    position = torch.arange(1, size + 1, dtype=torch.int64, device=routing.slot_row.device)
    return int((routing.slot_row.reshape([size]) * position).sum())


def _check_same_routing(routing: RoutingMetadata, checksum: int | None) -> None:
    # Activation recompute rebuilds the tensors but not the host counts and the checksum: where they
    # disagree, routing changed.
    if checksum is None or routing.host_counts is None:
        return
    # Counts alone are not enough: another choice of tokens may have the same counts.
    rebuilt = tuple(int(count) for count in routing.expert_counts.tolist())
    expect(
        rebuilt == routing.host_counts and routing_checksum(routing) == checksum,
        RoutingError,
        f"routing differs between forward and recompute: tokens per expert were {list(routing.host_counts)}, are now {list(rebuilt)}"
        f"{' (other tokens)' if rebuilt == routing.host_counts else ''}; make the router deterministic, or recompute without it",
    )


@dataclass(eq=False)
class PendingWgrad:
    """Operands of the weight gradients, held between `backward_dx` and `backward_dw`.

    Row tensors are `[R, ...]` in expert order with zero padding rows: dz `[R, N1]`, y1s `[R, I]`
    (probability times y1), plain or quantised for wgrad. x, dout `[T, H]` are gathered inside.
    dz and y1s may be None where nobody wanted gradients of weights (`Saved.wants_weights`).
    split_half: the columns of plain dz are all gates and then all up values, as the rows of w1 are.
    native: the engine's handle of the routing. biases: db1 and db2, as `Engine.bias_gradients` has
    them, where the backward to the tokens has summed them. donated: dz lies in the memory of a z
    that autograd still holds, and that nobody else reads. adapters: computes fp32 gradients of
    `Adapters.factors`, summed in a fixed order, of operands of its own, which live as long as it
    does; None without adapters.
    """

    settings: EngineSettings
    routing: RoutingMetadata
    x: Tokens | None
    dout: Tokens | None
    dz: Any  # a tensor or a block-scaled one, the engine's own affair
    y1s: Any
    split_half: bool = False
    native: Any = None
    biases: tuple[Tensor, Tensor] | None = None
    donated: bool = False
    adapters: Callable[[], tuple[Tensor | None, ...]] | None = None
