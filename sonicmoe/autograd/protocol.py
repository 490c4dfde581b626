"""An operation with a backward of its own, written once for both frameworks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from ..engine.interface import Saved

Tensor = torch.Tensor


class DifferentiableCall(ABC):
    """One application of an operation: a bridge calls `forward` once and `backward` once per
    backward pass, possibly on another thread.

    Tensors come in two groups. *Inputs* are what the operation computes on; a bridge returns a
    gradient for those that want one. *Parameters* are leaves behind the operation, named so that
    frozen inputs cannot cut them off the graph: `forward` does not see them, and `backward` may
    return None for a parameter whose gradient it accumulates itself.

    A call keeps no tensor that needs saving: it returns them as `Saved`, which a bridge hands to
    the framework, so that hooks on saved tensors and both ways of recompute see them. An output
    kept in the call would keep the whole graph alive.

    releases_saved: `backward` drops the saved `z` in the middle to free its memory, and the bridge
        must not hold another reference to it.
    attaches_parameters: the parameters are inputs of the autograd node, so that the framework fires
        their hooks at the end of each backward. False: the call adds their gradients, now or later,
        and sees to their hooks.
    """

    releases_saved = False
    attaches_parameters = True

    def explain(self, error: Exception, during: str) -> None:  # noqa: B027  most have nothing to add
        """Raise a more helpful error than `error`, which came in "forward" or "backward", if there
        is one; a bridge asks before it lets `error` pass.
        """

    @abstractmethod
    def forward(self, inputs: tuple[Tensor, ...], *, save: bool) -> tuple[Any, Saved | None]:
        """Compute, outside autograd.

        Returns:
            A tensor or a tuple of tensors; and what `backward` needs besides the call itself, None
            where that is nothing or `save` is False.
        """

    @abstractmethod
    def backward(
        self,
        gradients: tuple[Tensor, ...],
        saved: Saved | None,
        *,
        reached: Sequence[bool] | None = None,
        collected: bool = False,
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
        """Gradients of the outputs -> gradients of the inputs (None for those that never have one),
        and of the parameters.

        Args:
            gradients: one per output; zeros for an output that nobody used.
            saved: what `forward` returned.
            reached: which parameters this backward goes on to; None: all. It does not go on to
                those that wanted no gradient in the forward, nor to those that the caller left out
                (`torch.autograd.grad(loss, x)`, `loss.backward(inputs=[x])`, `paddle.grad(loss, x)`).
            collected: the caller takes gradients of parameters for itself and wants none accumulated
                (`torch.autograd.grad(loss, weight)`, `paddle.grad(loss, weight)`).
        """


def refuse_second_derivative() -> None:
    """Raise where a backward was asked for a graph of the gradients (`create_graph=True`). Every
    backward of this package calls it before it computes.
    """
    # Both frameworks run a backward with gradients enabled only where its results must be
    # differentiable. An error on the way back through dx would come too late: a graph that also
    # holds differentiable operations, such as a router or a residual, goes around it, and the
    # second derivative would silently lack this package's part.
    if torch.is_grad_enabled():
        raise RuntimeError(
            "sonicmoe's operations have no second derivative, and this backward was asked for one "
            "(create_graph=True); needed: create_graph=False, or experts of plain operations where "
            "a gradient penalty or a Hessian is computed"
        )
