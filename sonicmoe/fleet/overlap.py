"""The experts as a step of a schedule that overlaps the forward of one micro-batch with the backward
of another (1F1B): what `run_sonic_moe` computes, with the backward as a call of its own.

    dispatch(A) ─► A.forward ─► combine(A)            ...   combine's backward(B) ─► B.backward
                       └──── while B's tokens travel ────────────┘        └─ while A's travel

The combine's backward fills the handle, and `backward` reads it. Nothing joins an autograd graph, so
the schedule passes gradients on by itself; the weights' go to `main_grad`, at once or through the
deferral hook (`deferral`).
"""

from __future__ import annotations

from typing import Any

import torch

from ..enums import ActivationType
from ..layer.node_call import BackwardStep
from .configuration import FP8Config
from .run import ExpertsOfACall, check_arguments
from .weight_copies import release_forward_copies

Tensor = torch.Tensor


class ExpertsStep:
    """The experts of one layer on one micro-batch. Arguments are those of `run_sonic_moe`.

    Under PyTorch no gradient hook of the weights fires.
    """

    def __init__(
        self,
        K: int,
        E: int,
        w1: Tensor,
        w2: Tensor,
        fp8: bool = False,
        fp8_combine_grad_handle: Any = None,
        fp8_config: FP8Config | None = None,
        activation_type: ActivationType | str = ActivationType.SWIGLU,
    ) -> None:
        """Nothing is computed, and nothing checked before the forward."""
        self._experts = ExpertsOfACall(
            *(K, E, w1, w2, fp8, fp8_combine_grad_handle, fp8_config, activation_type)
        )
        self._step: BackwardStep | None = None

    def forward(
        self,
        hidden_states: Tensor,
        topk_indices: Tensor,
        topk_scores: Tensor,
        tokens_per_expert: Any = None,
        fp8_scale: Tensor | None = None,
        release_fp8_weights: bool = False,
    ) -> Tensor:
        """What the dispatch delivered -> bf16 `[T, H]` for the combine.

        Raises:
            RuntimeError: a forward of this step waits for its backward.
            As `run_sonic_moe`.
        """
        if self._step is not None:
            needed = "one ExpertsStep per micro-batch"
            raise RuntimeError(f"forward() ran and backward() did not; needed: {needed}")
        try:
            # Without autograd, so that e4m3 tokens which want a gradient are fine here.
            codes = hidden_states.detach()
            routed = codes, topk_indices, topk_scores
            given = self._experts.arguments(*routed, tokens_per_expert, fp8_scale)
            # The caller's own tensor where nothing was moved, because its writes are counted.
            x = hidden_states if given.x is codes else given.x
            out, step = given.node.forward_step(
                *(x, given.tokens_per_expert, given.indices, given.scores),
                *(given.x_scale, given.source, given.copies),
            )
        except Exception:
            # As in `run_sonic_moe`: looked at only where something was refused.
            check_arguments(hidden_states, topk_indices, topk_scores, fp8_scale)
            raise
        if self._experts.fp8 and release_fp8_weights:
            release_forward_copies(self._experts.w1, self._experts.w2, given.copies)
        self._step = step
        return out

    def backward(self, out_grad: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the output, as the combine's backward returned it -> `(bf16 [T, H], fp32
        [T, K])`, the gradients of `hidden_states` and `topk_scores`. Weight gradients are added.

        Raises:
            RuntimeError: no forward waits for it; or see `BackwardStep.backward`.
            ConfigError, DTypeError, ShapeError, DeviceError: as a backward of `run_sonic_moe`.
        """
        if self._step is None:
            raise RuntimeError("backward() without a forward(); needed: forward() first, once each")
        gradients = self._step.backward(out_grad)
        # Only now: a gradient that is refused leaves the forward waiting for a better one.
        self._step = None
        return gradients
