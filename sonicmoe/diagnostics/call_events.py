"""Events of one call of the routed expert MLP, emitted through `stages.emit`.

The caller of an engine (today the node) emits `ForwardDone`, `BackwardBegins` and `BackwardDone`,
each on the thread of the pass, and `StepDone`. Observers read the events and know nothing of the
emitter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..engine.interface import EngineSettings, Saved, Tokens

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class ExpertCall:
    """One forward and the backwards through it.

    layer: the object that all calls of one layer have in common; observers compare identities.
    engine: its name.
    indices: int `[T, K]` as the caller gave them (docs/design.md, "Routing contract").
    native_weights: `w1 [E, N1, H]` (gate, up interleaved) and `w2 [E, H, I]`, copied out of the
        caller's parameters as they are when it is called, or decoded where they hold no memory.
    """

    layer: object
    engine: str
    settings: EngineSettings
    indices: Tensor
    native_weights: Callable[[], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class ForwardDone:
    """`out [T, H]` was computed from x, as the engine took it, and probs. saved: what backward will get; None where the
    forward keeps no graph, which is inference or the first pass of a re-entrant recompute.
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
    none that were put off or not asked for.
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
