"""The weight gradients of one backward, and the memory that takes them. It is decided when that
backward begins, from what the parameters are then, so that freezing a weight later changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, repeat
from operator import attrgetter, is_
from typing import Any

import torch

from ..engine.interface import (
    Engine,
    EngineSettings,
    FreshTargets,
    GradientTargets,
    ParameterTargets,
    PendingWgrad,
)
from ..engine.targets import WeightTarget
from ..errors import LayoutError
from ..interop import IS_PADDLE, device_name, device_of, empty, plain_ops, writes_of
from ..weights.parameters import ExpertParameters
from .destinations import check_main_grads

Tensor = torch.Tensor
ABSENT: Any = object()  # in place of a `main_grad` that a parameter has no attribute for


@dataclass(eq=False)
class Batch:
    """What `GradientSink.open` gives and `close` takes back.

    parameters: the layer's, as the forward found them.
    trained: which of them want a gradient, at the moment of this backward.
    targets: what the engine adds to: the `main_grad` of all parameters, fresh memory that autograd
        gets, or a native buffer.
    waits: the native buffer is the sink's, and its gradients wait there.
    written: which gradients this backward writes into `main_grad`, where it adds the others
        (`overwriting`); empty where it writes none.
    fresh: memory for a `main_grad` that is None; the parameter's own after the addition.
    stand_ins: what autograd is given for parameters whose wrapper must be told that the gradient
        is in `main_grad`, by position (`stand_ins_for`).
    """

    parameters: Sequence[Tensor]
    trained: list[bool]
    targets: GradientTargets
    waits: bool = False
    written: list[bool] = field(default_factory=list)
    fresh: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stand_ins: dict[int, Tensor] = field(default_factory=dict)

    @property
    def is_direct(self) -> bool:
        """Whether the engine adds straight into `main_grad`."""
        return type(self.targets) is ParameterTargets

    @property
    def added(self) -> Iterator[Tensor]:
        """Parameters whose gradients are added to what is there."""
        written = self.written or repeat(False)
        for parameter, wanted, over in zip(self.parameters, self.trained, written, strict=False):
            if wanted and not over:
                yield parameter

    @property
    def written_memory(self) -> list[Tensor]:
        """The `main_grad` of each parameter whose gradient is written, where there is memory."""
        memory = [getattr(parameter, "main_grad", None) for parameter in self.parameters]
        if isinstance(self.targets, ParameterTargets):  # what was made for None is not bound yet
            memory = [*self.targets.up.tensors, *self.targets.down.tensors]
        return [held for held in compress(memory, self.written) if held is not None]

    def for_engine(self, engine: Engine, pending: PendingWgrad) -> GradientTargets:
        """What the engine adds to, or writes. Where it cannot write, or some gradients are added,
        those that are written are zeros now, which gives the same.
        """
        if not self.is_direct or not self.written:
            return self.targets
        assert isinstance(self.targets, ParameterTargets)
        if self.written == self.trained and engine.writes_gradients(
            pending.settings, device_name(self.targets.anchor)
        ):
            return FreshTargets.like(self.targets)
        with plain_ops():
            for memory in self.written_memory:
                memory.zero_()
        return self.targets

    def bind(self) -> None:
        """Hand over memory that was made for this backward; only after it was added to."""
        for parameter, memory in self.fresh:
            parameter.main_grad = memory  # type: ignore[attr-defined]
        self.fresh = []


def stand_ins_for(parameters: Sequence[Tensor], trained: Sequence[bool]) -> dict[int, Tensor]:
    """Zeros, by position, for parameters that have `grad_added_to_main_grad`.

    Megatron's data parallelism sets that attribute and hangs its reductions on gradient hooks,
    which must find a `.grad`. Where the attribute is True they drop it and take `main_grad`.
    """
    # Asked at every backward of parameters that nearly never have it.
    marked = list(map(hasattr, parameters, repeat("grad_added_to_main_grad")))
    if not any(marked):
        return {}
    found = {
        id(parameter): index
        for index, parameter in enumerate(parameters)
        if marked[index] and trained[index] and hasattr(parameter, "main_grad")
    }
    return {index: _zeros_like(parameters[index]) for index in found.values()}


def _zeros_like(parameter: Tensor) -> Tensor:
    """Zeros that all parameters of its kind share, because the hooks of a whole layer may run at the end
    of its backward, when each would hold memory of its own.
    """
    # Zeros and not unwritten memory: a hook that adds `.grad` all the same must add nothing.
    kind = tuple(parameter.shape), parameter.dtype, device_name(parameter)
    held = _zeros.get(kind)
    if held is None or writes_of(held[0]) != held[1]:  # somebody has written them
        made = torch.zeros_like(parameter)
        held = _zeros[kind] = made, writes_of(made)
    # Another tensor over the memory, which autograd may keep as `.grad` without a copy.
    return held[0].detach()


_zeros: dict[Any, tuple[Tensor, int]] = {}


def has_main_grad(parameter: Tensor) -> bool:
    """Whether the parameter has a `main_grad`, or makes one when it is asked."""
    return hasattr(parameter, "main_grad") or hasattr(parameter, "get_main_grad")


def main_grads_of(parameters: Sequence[Tensor], trained: Sequence[bool]) -> list[Any]:
    """`main_grad` of each parameter that wants a gradient, or `ABSENT`; None of the others."""
    # Megatron-FSDP takes the memory back after each reduction, so it is asked for at each backward.
    if any(map(hasattr, parameters, repeat("get_main_grad"))):
        for parameter in compress(parameters, trained):
            if hasattr(parameter, "get_main_grad"):
                parameter.main_grad = parameter.get_main_grad()  # type: ignore[attr-defined]
    # The presence of the attribute decides and not its value: a framework that sets `main_grad =
    # None` wants an fp32 gradient there.
    if all(trained):
        return list(map(getattr, parameters, repeat("main_grad"), repeat(ABSENT)))
    return [
        getattr(parameter, "main_grad", ABSENT) if wanted else None
        for parameter, wanted in zip(parameters, trained, strict=True)
    ]


def is_among(value: Any, values: Sequence[Any]) -> bool:
    """By identity: tensors compare their elements."""
    return any(map(is_, values, repeat(value)))


def direct_batch(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: list[bool],
    main_grads: list[Any],
    dout: Tensor,
) -> Batch:
    """Straight into `main_grads`. Memory that is made here, for None, is not zeroed yet."""
    fresh: dict[int, tuple[Tensor, Tensor]] = {}  # once for a parameter that experts share
    if is_among(None, main_grads):
        for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
            if wanted and main_grads[index] is None:
                if id(parameter) not in fresh:
                    shape = layer.fresh_shape(index, parameter)
                    made = torch.empty(shape, dtype=torch.float32, device=dout.device)
                    fresh[id(parameter)] = (parameter, made)
                main_grads[index] = fresh[id(parameter)][1]
    return Batch(parameters, trained, layer.targets(main_grads), fresh=list(fresh.values()))


def fresh_targets(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: list[bool],
    dout: Tensor,
) -> FreshTargets | None:
    """Over memory that an engine that writes fills as autograd takes it. None where it cannot, or
    where experts share a parameter, whose gradient is a sum.
    """
    # Sums need memory that was zero before, and fresh memory is written once.
    dtypes = dtypes_of(parameters, trained)
    if not FreshTargets.fits(dtypes) or len(set(map(id, parameters))) < len(parameters):
        return None
    experts = 1 if layer.has_biases else len(parameters) // 2
    # Paddle's views of a stack would be copies.
    if experts > 1 and all(trained) and len(dtypes) == 1 and not IS_PADDLE:
        device = device_of(dout)
        # Memory for every expert would take the host longer than all launches of this backward.
        stacks = (
            empty((experts, *p.shape), p.dtype, device) for p in (parameters[0], parameters[-1])
        )
        up, down = (WeightTarget.stacked(stack, experts, layer.layout) for stack in stacks)
        return FreshTargets(up, down)
    return targets_of_each(layer, parameters, trained, dout)


def dtypes_of(parameters: Sequence[Tensor], trained: Sequence[bool]) -> set[Any]:
    """Of the parameters that want a gradient."""
    return set(map(attrgetter("dtype"), compress(parameters, trained)))


def targets_of_each(
    layer: ExpertParameters, parameters: Sequence[Tensor], trained: Sequence[bool], dout: Tensor
) -> FreshTargets:
    """Over fresh memory of each parameter that wants a gradient, in dtypes that `FreshTargets.fits`."""
    device = device_of(dout)
    memory = [
        empty(tuple(p.shape), p.dtype, device) if is_trained else None
        for p, is_trained in zip(parameters, trained, strict=True)
    ]
    return layer.fresh_targets(memory)


def late_targets(
    layer: ExpertParameters, parameters: Sequence[Tensor], trained: Sequence[bool], dout: Tensor
) -> FreshTargets:
    """The same for two stacked weights, where the memory of the second is taken when the engine comes
    to it.
    """
    both = trained[0] and trained[1]
    first = [True, False, *trained[2:]] if both else trained
    targets = targets_of_each(layer, parameters, first, dout)
    if both:
        down, device = parameters[1], device_of(dout)

        def make_down() -> WeightTarget:
            memory = empty(tuple(down.shape), down.dtype, device)
            return layer.fresh_targets([None, memory, None, None][: len(parameters)]).down

        targets.make_down = make_down
    return targets


def direct_problem(
    batch: Batch, engine: Engine, settings: EngineSettings, layer: ExpertParameters, dout: Tensor
) -> str | None:
    """Why the engine cannot add the gradients of `dout` to `main_grad`, in one sentence, or None;
    raises where nothing could be added there.
    """
    targets = batch.targets
    assert isinstance(targets, ParameterTargets)
    (_, n1, hidden), (_, _, inner) = layer.native_shapes()
    problem = targets.problem(n1, hidden, inner, device_name(dout))
    check = partial(check_main_grads, layer, batch.parameters, batch.trained, dout)
    if problem is not None:
        check()  # names the parameter, where it can
        raise LayoutError(problem)
    # Of memory that was recognised this was found before.
    targets.once("checked", check)
    return engine.problem_of(targets, settings, layer.layout)
