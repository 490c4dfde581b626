"""How a call is observed: names on its stages for profilers and for `bisect`, taps on its stage
tensors, events of whole calls, and the keys of the faces that calls come through.

A leaf: engines and faces import it, and it imports nothing of the package. An engine writes

    with stage("up"):                 # a range on the profiler's timeline
        y1, z = ...
    y1 = tap("y1", y1)                # shows a stage tensor to whoever listens

and the caller of an engine writes

    if is_awaited():
        emit(ForwardDone(...))

Each pays one read of a global where nobody listens: no allocation, no kernel, no framework call.

Every face ends in one emitter, `layer/call.py`, in eager mode and in compiled graphs. It emits
`ForwardDone`, `BackwardBegins` and `BackwardDone`, each on the thread of the pass. Observers read the
events and know nothing of the emitter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import torch

    from .engine.interface import EngineSettings, Saved, Tokens

    Tensor = torch.Tensor
    NativeWeights = tuple[Tensor, Tensor, Tensor | None, Tensor | None]

Value = TypeVar("Value")
RangeFactory = Callable[[str], AbstractContextManager[Any]]
Listener = Callable[[str, Any], Any]
Observer = Callable[[Any], None]

RANGE_PREFIX = "sonicmoe."
_SILENT = nullcontext()
_ranges: RangeFactory | None = None
_listener: Listener | None = None
# A tuple that is replaced and never changed: `emit` iterates over the one it found, so an observer
# may leave while it observes and no lock is held during a call.
_observers: tuple[Observer, ...] = ()
_observers_change = threading.Lock()


def stage(name: str) -> AbstractContextManager[Any]:
    """A range called `sonicmoe.<name>` around the launches of one stage; a shared null context
    while ranges are off.
    """
    return _SILENT if _ranges is None else _ranges(RANGE_PREFIX + name)


def staged(name: str, function: Callable[..., Value], *arguments: Any) -> Value:
    """`function` of these arguments inside `stage(name)`, which costs less while ranges are off."""
    if _ranges is None:
        return function(*arguments)
    with stage(name):
        return function(*arguments)


def is_heard() -> bool:
    """Whether somebody listens."""
    return _listener is not None


def is_observed() -> bool:
    """Whether ranges are on or somebody listens."""
    return _ranges is not None or _listener is not None


def tap(name: str, value: Value) -> Value:
    """Show a stage tensor (plain or block-scaled) to the listener and go on with what it returns;
    without one, `value` itself.
    """
    return value if _listener is None else _listener(name, value)


@contextmanager
def ranges_on(factory: RangeFactory) -> Iterator[None]:
    """Inside the block `stage` opens `factory(name)`; process-wide, because backward may run on
    another thread.
    """
    global _ranges
    before, _ranges = _ranges, factory
    try:
        yield
    finally:
        _ranges = before


@contextmanager
def listening(listener: Listener, *, alone: bool = False) -> Iterator[None]:
    """Inside the block `tap(name, value)` returns `listener(name, value)`; process-wide. Listeners
    chain, the outermost first; `alone`: those around the block hear nothing of it.
    """
    global _listener
    before = _listener
    _listener = (
        # The listener that was there first stays nearest to the engine, and the new one sees what
        # it returns.
        listener
        if before is None or alone
        else lambda name, value: listener(name, before(name, value))
    )
    try:
        yield
    finally:
        _listener = before


def is_awaited() -> bool:
    """Whether anybody observes events; asked before an event is made."""
    return bool(_observers)


def emit(event: Any) -> None:
    """Hand an event to every observer, on this thread; an exception of an observer ends the call
    that emitted it.
    """
    for observer in _observers:
        observer(event)


def observe(observer: Observer) -> None:
    """Hand every event from now on to `observer`; process-wide, because backward may run on another
    thread.
    """
    global _observers
    with _observers_change:
        _observers = (*_observers, observer)


def forget(observer: Observer) -> None:
    """Take an observer away; twice is once."""
    global _observers
    with _observers_change:
        # By identity, because two observers may compare equal.
        _observers = tuple(other for other in _observers if other is not observer)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """`observe` inside the block."""
    observe(observer)
    try:
        yield
    finally:
        forget(observer)


# The faces, by the names that events carry.
NODE, FLEET = "node", "PaddleFleet"
MOE, TOPK, TRIPLES, STACKED = "MoE", "top-k layer", "general routing", "expert_mlp"
GATED_EXPERTS, PLAIN_EXPERTS = "transformers, gated", "transformers, not gated"
GROUPED_EXPERTS, GPT_OSS_EXPERTS = "torchtitan", "torchtitan, GPT-OSS"


@dataclass(frozen=True)
class Face:
    """One way into the library, and the names of its arguments.

    indices, scores: ids and probabilities in messages about routing.
    """

    x: str = "x"
    out: str = "out"
    probs: str = "probs"
    w1: str = "w1"
    w2: str = "w2"
    b1: str = "b1"
    b2: str = "b2"
    indices: str = "dispatched_indices"
    scores: str = "dispatched_probs"


FACES: Mapping[str, Face] = {
    NODE: Face(probs="dispatched_probs"),
    FLEET: Face(x="hidden_states", probs="topk_scores"),
    MOE: Face(
        x="hidden_states", out="output", probs="the softmax of hidden_states @ router.weight.T",
        w1="c_fc.weight", w2="c_proj.weight", b1="c_fc.bias", b2="c_proj.bias",
    ),
    TOPK: Face(probs="the softmax of x @ router_w.T"),
    TRIPLES: Face(probs="router_scores", indices="expert_indices", scores="router_scores"),
    STACKED: Face(),
    **{
        face: Face(
            x="hidden_states", probs="top_k_weights", w1=up, w2="down_proj", b1=f"{up}_bias",
            b2="down_proj_bias", indices="top_k_index", scores="top_k_weights",
        )
        for face, up in ((GATED_EXPERTS, "gate_up_proj"), (PLAIN_EXPERTS, "up_proj"))
    },
    **{
        face: Face(
            x="x_RD", probs="topk_scores_BLK", w1=w1, w2=w2, b1="mlp1_bias_EG", b2="mlp2_bias_ED",
            indices="topk_expert_ids_BLK", scores="topk_scores_BLK",
        )
        for face, w1, w2 in (
            (GROUPED_EXPERTS, "w13", "w2_EDF"),
            (GPT_OSS_EXPERTS, "mlp1_weight_EGD", "mlp2_weight_EDF"),
        )
    },
}  # fmt: skip


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
    face: a key of `FACES`.
    layer: the state that all calls of a node have in common; None for other faces, whose layers are
        told by their weights.
    factors: the caller's of low-rank adapters, by `low_rank.NAMES_OF_FACTORS`; the native weights
        have them merged.
    module: whose attributes the weights are, under the names that the face has for them; None where
        unknown. Adapters and parametrizations compute a weight from parameters of other names.
    """

    engine: str
    settings: EngineSettings
    indices: Tensor | None
    native_weights: Callable[[], NativeWeights]
    read_weights: Callable[[], tuple[Tensor, Tensor]]
    weights: Mapping[str, Sequence[Tensor]]
    face: str
    layer: object = None
    module: object = None
    factors: Mapping[str, Tensor] = field(default_factory=dict)


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


CallEvent = ForwardDone | BackwardBegins | BackwardDone
