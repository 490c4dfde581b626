"""One forward of the node and what its backward will need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..autograd import DifferentiableCall
from ..config import SonicMoEConfig
from ..diagnostics.call_events import BackwardBegins, BackwardDone, ExpertCall, ForwardDone
from ..diagnostics.stages import emit, is_awaited, stage
from ..engine.interface import (
    Engine,
    EngineSettings,
    EngineWeights,
    GradAccumulators,
    PendingWgrad,
    Saved,
)
from ..enums import FlushMode
from ..experts import ExpertWeights
from ..interop import plain_ops, requires_grad
from ..routing.build import build_metadata
from .step_guard import StepGuard
from .wgrad_queue import WgradQueue

Tensor = torch.Tensor


@dataclass(eq=False)
class MlpCall(DifferentiableCall):
    """Arguments of one call. Holds no activation: those live in the autograd context, so any number
    of calls may be outstanding.

    parameters are the module's as this forward found them: the inputs of the autograd node.
    engine_weights is shared by all calls of an optimizer step and outlives the last backward
    through this reference; weight_updates says which state of the weights it held then.
    config is in force in both passes, so that kernels of the node's own cache directory serve it;
    backward may run on another thread, and after the caller's `activate()` block has ended.
    """

    config: SonicMoEConfig
    engine: Engine
    settings: EngineSettings
    experts: ExpertWeights
    parameters: list[Tensor]
    engine_weights: EngineWeights
    weight_updates: int
    flush: FlushMode
    indices: Tensor
    tokens_per_expert: Any
    num_experts: int
    validate: bool
    step_guard: StepGuard
    wgrad_queue: WgradQueue | None

    @property
    def releases_saved(self) -> bool:
        return self.settings.frees_stagewise

    def forward(self, inputs: tuple[Tensor, ...], *, save: bool) -> tuple[Tensor, Saved | None]:
        """Routing, then the engine, on `(x, probs)`."""
        x, probs = inputs
        with self.config.activate(), plain_ops():  # once: inside, autocast costs nothing more
            with stage("routing"):
                routing = build_metadata(
                    self.indices,
                    probs,
                    self.num_experts,
                    self.tokens_per_expert,
                    alignment=self.settings.row_alignment,
                    validate=self.validate,
                )
            out, saved = self.engine.forward(
                x, routing, self.engine_weights, self.settings, save=save
            )
        if is_awaited():
            emit(ForwardDone(self._described(), x, probs, out, saved))
        return out, saved

    def backward(
        self,
        gradients: tuple[Tensor, ...],
        saved: Saved | None,
        *,
        reaches_parameters: bool = True,
        following: Any = None,
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None]]:
        """`(dout,)` -> `(dx, dprobs)` and gradients to return per parameter; weight gradients are
        accumulated, and flushed where the mode says so.
        """
        (dout,) = gradients
        assert saved is not None
        if is_awaited():
            emit(BackwardBegins(self._described(), dout, saved))
        trainable = reaches_parameters and any(map(requires_grad, self.parameters))
        dx, dprobs, returned = self._backward(dout, saved, trainable)
        if is_awaited():
            left = partial(self._weight_gradients, returned, trainable)
            emit(BackwardDone(self._described(), dx, dprobs, left))
        if self.wgrad_queue is not None:
            self.wgrad_queue.launch_after(following)
        return (dx, dprobs), returned

    def _backward(
        self, dout: Tensor, saved: Saved, trainable: bool
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        self.experts.check_current(self.engine_weights, self.weight_updates)
        accumulators = self.experts.accumulators(dout.device) if trainable else None
        with self.config.activate():
            dx, dprobs, pending = self.engine.backward_dx(dout, saved, self.engine_weights)
            if accumulators is not None:
                self._hand_over(pending, accumulators)
        if trainable:
            self.experts.note_backward()
            if self.flush is FlushMode.BACKWARD:
                return dx, dprobs, self.experts.flush_through_autograd()
            self.step_guard.note_backward(self.parameters)
        return dx, dprobs, [None] * len(self.parameters)

    def _hand_over(self, pending: PendingWgrad, accumulators: GradAccumulators) -> None:
        """Add the weight gradients now, or have them added off the way of dx."""
        if self.wgrad_queue is None:
            self._add_wgrad(pending, accumulators)
        else:
            pending.shares_gpu = True
            self.wgrad_queue.submit(pending, partial(self._add_wgrad, pending, accumulators))

    def _add_wgrad(self, pending: PendingWgrad, accumulators: GradAccumulators) -> None:
        try:
            self.experts.additions.enter(accumulators.dw1)
            with self.config.activate(), plain_ops():
                self.engine.backward_dw(pending, accumulators)
            self.experts.additions.leave()
        except BaseException:
            self.experts.note_failed_backward()
            raise

    def _described(self) -> ExpertCall:
        source = self.experts.source
        return ExpertCall(
            self.experts, self.engine.name, self.settings, self.indices, source.native
        )

    def _weight_gradients(
        self, returned: Sequence[Tensor | None], trainable: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """The weight gradients of this backward, by name, wherever the flush mode has left them;
        those that `wgrad_queue` puts off are nowhere yet.
        """
        if not trainable or self.wgrad_queue is not None:
            return
        sums = self.experts.accumulators(self.indices.device)
        yield from (("dw1", sums.dw1), ("dw2", sums.dw2))
        if self.flush is FlushMode.BACKWARD:
            mains = (getattr(parameter, "main_grad", None) for parameter in self.parameters)
            yield from (
                ("flushed gradient", tensor) for tensor in (*returned, *mains) if tensor is not None
            )
