"""A layer whose forward and backward are two CUDA graphs, for batches so small that launching takes
longer than computing.

    x, indices, probs ──copy──► static inputs ──replay──► out       (graph 1: forward_step)
    dout ───────────────copy──► static dout ────replay──► dx, dprobs (graph 2: its backward, which
                                                          adds to main_grad)

A call costs two replays and a copy of each argument and result. A batch may be shorter than the one
that was captured: the rows behind it have no expert, so nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

from ..autograd import refuse_second_derivative
from ..autograd.torch_bridge import asked_for
from ..enums import EngineName, FlushMode
from ..errors import ConfigError, DeviceError, DTypeError, ShapeError, expect
from ..interop import data_ptr, device_name, dtype_name, is_cuda, require_framework_tensor
from ..stream_order import StreamOrder

if TYPE_CHECKING:
    from .backward_step import BackwardStep
    from .choices import Choices
    from .layer_state import LayerState

Tensor = torch.Tensor
ForwardStep = Callable[..., tuple[Tensor, "BackwardStep"]]
_NO_EXPERT = -1
_WARM_UPS = 2  # the second finds what the first has allocated


class GraphedLayer:
    """What `SonicMoEMlpNode.graphed` returns: call it as the node, without counts.

    Weights are read where they lay at the capture, and quantised again where they changed. Memory
    of the graphs lives as long as this object.

    trained: which parameters the captured backward adds gradients for.
    """

    def __init__(
        self,
        forward_step: ForwardStep,
        layer: LayerState,
        choices: Choices,
        x: Tensor,
        indices: Tensor,
        probs: Tensor,
    ) -> None:
        """Capture both passes; see `SonicMoEMlpNode.graphed` for arguments and errors.
        forward_step, layer, choices: the node's.
        """
        _check_samples(x, indices, probs)
        self._layer = layer.parameters
        self._parameters = self._layer.parameters()
        self.trained = [parameter.requires_grad for parameter in self._parameters]
        _check_destinations(self._parameters, self.trained, self._layer.name_of)
        # Zeros and no expert: the warm-up adds nothing to any gradient.
        self._x, self._probs, self._dout = map(torch.zeros_like, (x.detach(), probs.detach(), x))
        self._indices = torch.full_like(indices, _NO_EXPERT)
        self._used = 0  # rows of the static indices that may name an expert
        self._calls = 0
        self._order = StreamOrder()
        self._warm_up(forward_step)
        _check_engine(choices.latest.engine.name, layer)
        self._capture(forward_step)
        self._places = list(map(data_ptr, self._parameters))

    def __call__(self, x: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
        """`[T, H]` in x's dtype of a batch of up to as many tokens as were captured.

        Raises:
            ShapeError, DTypeError, DeviceError, FrameworkError: naming the argument, what came and
                what was captured.
            RuntimeError: the weights are others or lie elsewhere by now. In the backward: another
                forward of this layer ran since, weights were frozen or unfrozen, or gradients of
                some inputs alone are asked for.
        """
        self._check(x, indices, probs)
        check_in_place(self._layer.parameters(), self._parameters, self._places)
        arguments = (self, x, indices, probs, *self._parameters)
        return _Replayed.apply(*arguments)  # type: ignore[no-any-return]

    def replay_forward(self, x: Tensor, indices: Tensor, probs: Tensor) -> Tensor:
        """The output, outside autograd; `_calls` counts these."""
        tokens = int(x.shape[0])
        # Another stream may still run the replay before this one, on the same memory.
        self._order.enter(x)
        self._x[:tokens].copy_(x)
        self._probs[:tokens].copy_(probs)
        self._indices[:tokens].copy_(indices)
        # Rows of a longer batch before it would add to the gradients again.
        if tokens < self._used:
            self._indices[tokens : self._used].fill_(_NO_EXPERT)
        self._used = tokens
        self._calls += 1
        self._forward.replay()
        # A copy, because the next replay writes there again.
        out = self._out[:tokens].clone()
        self._order.leave()
        return out

    def replay_backward(self, dout: Tensor, call: int) -> tuple[Tensor, Tensor]:
        """dx and dprobs of the last forward, whose number is `call`."""
        # Each forward writes over the static inputs and over what was saved of them.
        if call != self._calls:
            raise RuntimeError(
                f"this backward is of call {call} of a graphed layer, and {self._calls - call} "
                "forward(s) ran since, which wrote over what it reads; needed: each backward "
                "before the next forward, or a graphed layer for each of them"
            )
        if [parameter.requires_grad for parameter in self._parameters] != self.trained:
            raise RuntimeError(
                "a weight was frozen or unfrozen since the layer was captured; needed: another "
                "capture"
            )
        tokens = int(dout.shape[0])
        self._order.enter(dout)
        self._dout[:tokens].copy_(dout)
        self._backward.replay()
        results = self._dx[:tokens].clone(), self._dprobs[:tokens].clone()
        self._order.leave()
        return results

    def _warm_up(self, forward_step: ForwardStep) -> None:
        """Have kernels loaded and weights prepared, on a side stream as a capture demands."""
        device = self._x.device
        current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                _, step = forward_step(self._x, None, self._indices, self._probs)
                step.backward(self._dout)
        current.wait_stream(stream)

    def _capture(self, forward_step: ForwardStep) -> None:
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._forward):
            self._out, step = forward_step(self._x, None, self._indices, self._probs)
        # One pool, because the backward reads what a replay of the forward leaves in it.
        with torch.cuda.graph(self._backward, pool=self._forward.pool()):
            self._dx, self._dprobs = step.backward(self._dout)
        # It holds the weights that the graphs read by address.
        self._step = step

    def _check(self, x: Any, indices: Any, probs: Any) -> None:
        samples = {"x": self._x, "indices": self._indices, "probs": self._probs}
        rows = int(x.shape[0]) if getattr(x, "shape", ()) else -1
        for (name, sample), value in zip(samples.items(), (x, indices, probs), strict=True):
            require_framework_tensor(value, name)
            if value.dtype != sample.dtype:
                raise DTypeError(
                    f"{name} is {dtype_name(value.dtype)}; captured: {dtype_name(sample.dtype)}"
                )
            if value.device != sample.device:
                raise DeviceError(
                    f"{name} is on {device_name(value)}; captured: {device_name(sample)}"
                )
            most, width = map(int, sample.shape)
            if tuple(value.shape) != (rows, width) or rows > most:
                raise ShapeError(
                    f"{name} has shape {tuple(value.shape)}; captured: {tuple(sample.shape)}, of "
                    "which a batch may have fewer rows, as many in each argument"
                )


class _Replayed(torch.autograd.Function):
    """Arguments: the layer, its inputs, its parameters."""

    @staticmethod
    def forward(
        ctx: Any, layer: GraphedLayer, x: Tensor, indices: Tensor, probs: Tensor, *_: Tensor
    ) -> Tensor:
        out = layer.replay_forward(x, indices, probs)
        ctx.layer, ctx.call = layer, layer._calls
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative()
        layer: GraphedLayer = ctx.layer
        # Of the tensors among the arguments x, indices and probs come first.
        reached, collected = asked_for([node for node, _ in ctx.next_functions[3:]])
        # A graph cannot leave out an addition that it was captured with.
        if collected or reached != layer.trained:
            raise RuntimeError(
                "gradients of some inputs alone were asked for (torch.autograd.grad, or "
                "backward(inputs=...)), and the captured backward of a graphed layer adds those of "
                "its weights to main_grad; needed: backward(), or the node itself"
            )
        dx, dprobs = layer.replay_backward(gradients[0], ctx.call)
        needs_x, _, needs_probs = ctx.needs_input_grad[1:4]
        kept = dx if needs_x else None, None, dprobs if needs_probs else None
        return (None, *kept, *(None,) * len(reached))


def check_in_place(now: list[Tensor], captured: list[Tensor], places: list[int]) -> None:
    """Raise RuntimeError where a layer's weights are not those, or not where those lay."""
    if not all(map(is_, now, captured)) or list(map(data_ptr, now)) != places:
        raise RuntimeError(
            "the layer has other weights by now than at the capture, or they lie elsewhere "
            "(load_state_dict(assign=True), .data, FSDP), and a replay reads those of the capture; "
            "needed: another capture"
        )


def _check_engine(name: str, layer: LayerState) -> None:
    """After the warm-up: what it did is what replays would do."""
    expect(
        name != EngineName.REFERENCE.value,
        ConfigError,
        "engine 'reference' waits for the device, which no graph can; needed: a GPU engine "
        "(`sonicmoe doctor` says what is missing)",
    )
    expect(
        layer.gradients.way is not FlushMode.STEP,
        ConfigError,
        "flush='step': gradients would wait for a step() that knows of no replay; needed: a node "
        "with flush='auto'",
    )


def _check_samples(x: Any, indices: Any, probs: Any) -> None:
    for name, value in (("x", x), ("indices", indices), ("probs", probs)):
        require_framework_tensor(value, name)
        expect(
            is_cuda(value),
            DeviceError,
            f"{name} is on {device_name(value)}; needed: a CUDA device, because a host has no graphs",
        )


def _check_destinations(
    parameters: list[Tensor], trained: list[bool], name_of: Callable[[int], str]
) -> None:
    for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
        expect(
            not wanted or getattr(parameter, "main_grad", None) is not None,
            ConfigError,
            f"{name_of(index)} has no main_grad; a replay adds to the memory that was there at the "
            "capture: needed: fp32 main_grad on every one that trains, allocated before",
        )
