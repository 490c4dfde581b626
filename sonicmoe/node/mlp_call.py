"""One forward of the node and what its backward will need: everything the two autograd bridges
share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..config import SonicMoEConfig
from ..diagnostics.stages import stage
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
class MlpCall:
    """Arguments of one call. Holds no activation: those live in the autograd context, so any number
    of calls may be outstanding.

    parameters are the module's as this forward found them: the inputs of the autograd node.
    engine_weights is shared by all calls of an optimizer step and outlives the last backward
    through this reference; weight_updates says which state of the weights it held then.
    reaches_weights is false of a backward that was asked for gradients of other inputs only.
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
    reaches_weights: bool = True

    @property
    def trainable(self) -> bool:
        """Whether a backward is to add gradients of any parameter."""
        return self.reaches_weights and any(map(requires_grad, self.parameters))

    def forward(self, x: Tensor, probs: Tensor, *, save: bool) -> tuple[Tensor, Saved | None]:
        """Routing, then the engine."""
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
            return self.engine.forward(x, routing, self.engine_weights, self.settings, save=save)

    def backward(self, dout: Tensor, saved: Saved) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """`(dx, dprobs, gradients to return per parameter)`; weight gradients are accumulated, and
        flushed where the mode says so.
        """
        self.experts.check_current(self.engine_weights, self.weight_updates)
        trainable = self.trainable
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
