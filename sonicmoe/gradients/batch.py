"""The weight gradients of one backward, and the memory that takes them. It is decided when that
backward begins, from what the parameters are then, so that freezing a weight later changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import compress, repeat
from operator import attrgetter
from typing import Any

import torch

from ..engine.gradient_places import GradientPlaces
from ..engine.interface import Engine, GradientTargets, PendingWgrad
from ..engine.settings import GradientMode
from ..engine.targets import FRESH_DTYPES
from ..errors import LayoutError
from ..interop import IS_PADDLE, device_name, device_of, empty, plain_ops, writes_of
from ..weights.parameters import ExpertParameters

Tensor = torch.Tensor
ABSENT: Any = object()  # in place of a `main_grad` that a parameter has no attribute for


@dataclass(eq=False)
class GradientBatch:
    """What `GradientSink.open` gives and `close` takes back.

    parameters: the layer's, as the forward found them.
    trained: which of them want a gradient, at the moment of this backward.
    targets: what the engine adds to, or writes: the `main_grad` of all parameters, fresh memory that
        autograd gets, or a native buffer.
    is_direct: they are the `main_grad` of all parameters.
    waits: the native buffer is the sink's, and its gradients wait there.
    written: which gradients this backward writes into `main_grad`, where it adds the others
        (`overwriting`); empty where it writes none.
    fresh: memory for a `main_grad` that is None, by position; the parameter's own after the addition.
    stand_ins: what autograd is given for parameters whose wrapper must be told that the gradient
        is in `main_grad`, by position (`stand_ins_for`).
    """

    parameters: Sequence[Tensor]
    trained: list[bool]
    targets: GradientTargets
    is_direct: bool = False
    waits: bool = False
    written: list[bool] = field(default_factory=list)
    fresh: dict[int, Tensor] = field(default_factory=dict)
    stand_ins: dict[int, Tensor] = field(default_factory=dict)

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
        # Memory that was made for a `main_grad` of None is not bound yet.
        memory = [
            self.fresh.get(index, getattr(parameter, "main_grad", None))
            for index, parameter in enumerate(self.parameters)
        ]
        return [held for held in compress(memory, self.written) if held is not None]

    def prepare(self, engine: Engine, pending: PendingWgrad) -> None:
        """Have the engine write into `main_grad` what is `written`. Where it cannot, or some gradients
        are added, those that are written are zeros now, which gives the same.
        """
        device = device_name(self.targets.anchor)
        if self.written == self.trained and engine.writes_gradients(pending.settings, device):
            self.targets.mode = GradientMode.FRESH
            return
        with plain_ops():
            for memory in self.written_memory:
                memory.zero_()

    def bind(self) -> None:
        """Hand over memory that was made for this backward; only after it was added to."""
        for index, memory in self.fresh.items():
            self.parameters[index].main_grad = memory  # type: ignore[attr-defined]
        self.fresh = {}


def stand_ins_for(parameters: Sequence[Tensor], trained: Sequence[bool]) -> dict[int, Tensor]:
    """Zeros, by position, for parameters that have `grad_added_to_main_grad`.

    Megatron's data parallelism sets that attribute and hangs its reductions on gradient hooks,
    which must find a `.grad`. Where the attribute is True they drop it and take `main_grad`.
    """
    found = {
        id(parameter): index
        for index, parameter in enumerate(parameters)
        if trained[index]
        and hasattr(parameter, "grad_added_to_main_grad")
        and hasattr(parameter, "main_grad")
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


def refuse_results(
    layer: ExpertParameters, parameters: Sequence[Tensor], trained: Sequence[bool], waits: bool
) -> None:
    """Refuse tensors that a gradient is added to, or waits for, and is never passed on from."""
    for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
        if wanted and not parameter.is_leaf and (waits or has_main_grad(parameter)):
            raise LayoutError(
                f"{layer.name_of(index)} is the result of an operation (a parametrization, "
                "functional_call), which its gradient must be passed on to; needed: a parameter "
                "without main_grad and flush='auto', or a leaf"
            )


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


def memory_for_none(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    main_grads: list[Any],
    device: Any,
) -> dict[int, Tensor]:
    """fp32 memory, not zeroed, for each `main_grad` that is None, by position, which is put into
    `main_grads` too.
    """
    made: dict[int, Tensor] = {}  # by id: once for a parameter that experts share
    fresh: dict[int, Tensor] = {}
    for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
        if wanted and main_grads[index] is None:
            if id(parameter) not in made:
                shape = layer.fresh_shape(index, parameter)
                made[id(parameter)] = torch.empty(shape, dtype=torch.float32, device=device)
            main_grads[index] = fresh[index] = made[id(parameter)]
    return fresh


def are_writable(parameters: Sequence[Tensor], trained: Sequence[bool]) -> bool:
    """Whether an engine that writes can fill the gradients of those parameters as autograd takes
    them: not where experts share one, whose gradient is a sum.
    """
    # Sums need memory that was zero before, and fresh memory is written once.
    is_shared = len(set(map(id, parameters))) < len(parameters)
    dtypes = map(attrgetter("dtype"), compress(parameters, trained))
    return not is_shared and FRESH_DTYPES.issuperset(dtypes)


def fresh_targets(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    dout: Tensor,
    *,
    late: bool = False,
) -> GradientTargets:
    """Memory for parameters that `are_writable`, which an engine that writes fills as autograd takes
    it. late: of two stacked weights, the memory of the second is taken when the engine comes to it.
    """
    device = device_of(dout)
    # Paddle's views of a stack would be copies.
    if layer.are_separate and all(trained) and not IS_PADDLE:
        experts, ends = len(parameters) // 2, (parameters[0], parameters[-1])
        if experts > 1 and len({parameter.dtype for parameter in parameters}) == 1:
            # Memory for every expert would take the host longer than all launches of this backward.
            stacks = (empty((experts, *p.shape), p.dtype, device) for p in ends)
            up, down = (GradientPlaces.stacked(each, experts, layer.layout) for each in stacks)
            return GradientTargets(up, down, GradientMode.FRESH)
    # Made later: the second of two stacked weights, where the first is made now.
    put_off = 1 if late and trained[0] else -1
    memory = [
        empty(tuple(p.shape), p.dtype, device) if wanted and index != put_off else None
        for index, (p, wanted) in enumerate(zip(parameters, trained, strict=True))
    ]
    targets = layer.targets(memory, GradientMode.FRESH)
    if put_off > 0 and trained[put_off]:
        second = [index == put_off for index in range(len(trained))]
        targets.make_down = lambda: fresh_targets(layer, parameters, second, dout).down
    return targets
