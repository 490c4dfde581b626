"""A backward of the node that its caller runs, where a schedule and not autograd decides when."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..engine.interface import Saved
from ..errors import DTypeError, ShapeError, expect
from ..gradients.destinations import add_to_grad
from ..interop import (
    dtype_name,
    holds_memory,
    plain_ops,
    require_framework_tensor,
    requires_grad,
    writes_of,
)
from ..quant.tokens import is_fp8
from .late_wgrad import fire_hooks
from .mlp_call import MlpCall

Tensor = torch.Tensor


class BackwardStep:
    """The backward of one `forward_step`, to be run once. It keeps alive what that forward saved.

    Weight gradients go where they go in a backward under autograd, and then the backward hooks of
    the weights are fired, under Paddle: under PyTorch nobody but autograd can.
    """

    def __init__(self, call: MlpCall, saved: Saved, given: dict[str, Tensor]) -> None:
        """`given`: the caller's tensors that the backward reads, by their names."""
        self._call, self._saved = call, saved
        # The caller's own, because under Paddle a detached tensor counts its own writes only.
        self._given = given
        self._writes = {name: writes_of(tensor) for name, tensor in given.items()}
        self._shape = tuple(int(size) for size in given["x"].shape)
        self._ran = False

    def backward(self, dout: Tensor) -> tuple[Tensor, Tensor]:
        """`(dx [T, H], dprobs fp32 [T, K])` of `dout [T, H]`, the gradient of the output; e4m3
        codes where the forward was given a `dout_source` that has their scales.

        Raises:
            RuntimeError: it ran before, or the tokens were written or freed since the forward.
            ShapeError, DTypeError: `dout` is not of the output's shape, or FP8 without a source.
            OutOfMemoryError: nothing was added, and it may be run again, unless stage-wise memory
                has dropped z.
        """
        if self._ran:
            raise RuntimeError(
                "this backward ran before; needed: one backward of each forward_step()"
            )
        self._check(dout)
        call = self._call
        # Asked before the backward, as autograd does: a hook may freeze a weight.
        trained = list(map(requires_grad, call.parameters))
        try:
            with plain_ops():
                (dx, dprobs, *_), returned = call.backward((dout,), self._saved)
        except Exception as error:
            call.explain(error, "backward")
            raise
        assert dx is not None and dprobs is not None
        # Only now: a backward that ran out of memory may be run again.
        self._ran = True
        self._given.clear()
        if call.attaches_parameters:
            self._finish(returned, trained)
        del self._saved
        return dx, dprobs

    def _finish(self, returned: Sequence[Tensor | None], trained: Sequence[bool]) -> None:
        """What autograd does where the weights are inputs of its node."""
        for parameter, gradient in zip(self._call.parameters, returned, strict=True):
            # Where there is `main_grad` the gradient is in it, and what is returned is a sign for
            # hooks of PyTorch's that nobody can fire.
            if gradient is not None and not hasattr(parameter, "main_grad"):
                with plain_ops():
                    add_to_grad(parameter, gradient)
        for parameter, wanted in zip(self._call.parameters, trained, strict=True):
            if wanted:
                fire_hooks(parameter)

    def _check(self, dout: Tensor) -> None:
        require_framework_tensor(dout, "dout")
        expect(
            tuple(dout.shape) == self._shape,
            ShapeError,
            f"dout has shape {tuple(dout.shape)}; the output has {self._shape}",
        )
        expect(
            self._call.dout_source is not None or not is_fp8(dout),
            DTypeError,
            f"dout is {dtype_name(dout.dtype)}; needed: bfloat16, or a dout_source that has the "
            "scales",
        )
        for name, tensor in self._given.items():
            # A tensor without elements never had memory that it could lose.
            held = 0 in tuple(tensor.shape) or holds_memory(tensor)
            if not held or writes_of(tensor) != self._writes[name]:
                raise RuntimeError(
                    f"{name} was {'written in place' if held else 'freed'} between this "
                    "forward_step() and its backward, which reads it; needed: tokens that stay "
                    "until then"
                )
