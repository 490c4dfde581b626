"""Observers of every node call, installed while there are any: with none, the node runs its own
code and nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..engine.interface import Saved
from ..node.mlp_call import MlpCall

Tensor = torch.Tensor


class CallObserver:
    """Override what is of interest; all methods run on the thread of the pass."""

    def after_forward(
        self, call: MlpCall, x: Tensor, probs: Tensor, out: Tensor, saved: Saved | None
    ) -> None:
        """`out` was computed from x and probs; `saved` is what backward will get, None of a forward
        that keeps no graph.
        """

    def before_backward(self, call: MlpCall, dout: Tensor, saved: Saved) -> None:
        """`saved` still holds everything."""

    def after_backward(
        self, call: MlpCall, result: tuple[Tensor, Tensor, list[Tensor | None]]
    ) -> None:
        """`(dx, dprobs, gradients returned per parameter)`; accumulators hold theirs."""


_lock = threading.Lock()
_observers: list[CallObserver] = []
_originals: dict[str, Callable[..., Any]] = {}


def observe(observer: CallObserver) -> None:
    """Add an observer; the first one installs the hooks."""
    with _lock:
        if not _observers:
            _originals.update(forward=MlpCall.forward, backward=MlpCall.backward)
            for name, hook in (("forward", _forward), ("backward", _backward)):
                setattr(MlpCall, name, hook)
        _observers.append(observer)


def forget(observer: CallObserver) -> None:
    """Remove an observer (twice is once); the last one removes the hooks."""
    with _lock:
        if observer not in _observers:
            return
        _observers.remove(observer)
        if not _observers:
            for name, original in _originals.items():
                setattr(MlpCall, name, original)


def _forward(call: MlpCall, x: Tensor, probs: Tensor, *, save: bool) -> Any:
    out, saved = _originals["forward"](call, x, probs, save=save)
    for observer in tuple(_observers):
        observer.after_forward(call, x, probs, out, saved)
    return out, saved


def _backward(call: MlpCall, dout: Tensor, saved: Saved) -> Any:
    for observer in tuple(_observers):
        observer.before_backward(call, dout, saved)
    result = _originals["backward"](call, dout, saved)
    for observer in tuple(_observers):
        observer.after_backward(call, result)
    return result
