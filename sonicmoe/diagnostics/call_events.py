"""Events of one call of the routed expert MLP, emitted through `stages.emit`.

Every face ends in one of two emitters: `node/mlp_call.py` for the node, and `functional/call.py`
for the functional API, `MoE` and transformers models, in eager mode and in compiled graphs. Both
emit `ForwardDone`, `BackwardBegins` and `BackwardDone`, each on the thread of the pass; a node
emits `StepDone` too. Observers read the events and know nothing of the emitter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..engine.interface import EngineSettings, Saved, Tokens
from ..layouts import WeightLayout

Tensor = torch.Tensor
NativeWeights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True, eq=False)
class ExpertCall:
    """One forward and the backwards through it.

    engine: its name.
    indices: int `[T, K]` as the caller gave them (docs/design.md, "Routing contract"); None where
        only the routing that was made of them is left.
    native_weights: `w1 [E, N1, H]` (gate, up interleaved), `w2 [E, H, I]`, b1 `[E, N1]` and b2
        `[E, H]`, copied out of the caller's parameters as they are when it is called, or decoded
        where they hold no memory.
    read_weights: w1 and w2 as the engine read them, with the axes of `native_weights`: the values of
        its codes, where it computes on quantised copies.
    weights: the caller's own tensors by the names w1, w2, b1 and b2: one that is stacked, or one
        per expert; empty where the call no longer has them.
    layout: how they lie.
    face: a key of `callers.FACES`.
    layer: the state that all calls of a node have in common; None for other faces, whose layers are
        told by their weights.
    lead: the axes of the caller's tokens that are T to the experts; None where unknown.
    first_triple: int `[T]`, of general routing the number of every token's first triple.
    module: whose attributes the weights are, under the names that the face has for them; None where
        unknown. Adapters and parametrizations compute a weight from parameters of other names.
    """

    engine: str
    settings: EngineSettings
    indices: Tensor | None
    native_weights: Callable[[], NativeWeights]
    read_weights: Callable[[], tuple[Tensor, Tensor]]
    weights: Mapping[str, Sequence[Tensor]]
    layout: WeightLayout
    face: str
    layer: object = None
    lead: Sequence[int] | None = None
    first_triple: Tensor | None = None
    module: object = None


@dataclass(frozen=True, eq=False)
class ForwardDone:
    """`out [T, H]` was computed from x, as the engine took it, and probs. saved: what backward will
    get; None where the forward keeps no graph, which is inference or the first pass of a re-entrant
    recompute.
    """

    call: ExpertCall
    x: Tokens
    probs: Tensor
    out: Tensor
    saved: Saved | None


@dataclass(frozen=True, eq=False)
class BackwardBegins:
    """A backward is about to run on dout, as the engine takes it; `saved` still holds everything."""

    call: ExpertCall
    dout: Tokens
    saved: Saved


@dataclass(frozen=True, eq=False)
class BackwardDone:
    """A backward has run. weight_gradients: `(name, tensor)` wherever this backward has left them;
    none that were put off or not asked for. A name is dw1, dw2, db1 or db2 where the tensor is
    that gradient, and words where it is a part of one.
    """

    call: ExpertCall
    dx: Tensor
    dprobs: Tensor
    weight_gradients: Callable[[], Iterable[tuple[str, Tensor]]]


@dataclass(frozen=True, eq=False)
class StepDone:
    """The layer's optimizer step is complete: all its backwards have run."""

    layer: object


CallEvent = ForwardDone | BackwardBegins | BackwardDone | StepDone
