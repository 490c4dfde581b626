"""Which way the weight gradients of one backward take. It is decided when that backward begins, from
what the parameters are then, so that freezing a weight later changes nothing.

| mode | a parameter that trains has no `main_grad` | all have one | and the engine cannot add there |
|---|---|---|---|
| `auto` | `AUTOGRAD` | `DIRECT` | `WAIT` |
| `direct` | refused | `DIRECT` | refused |
| `step` | `WAIT` | `WAIT` | `WAIT` |
| `backward` | `AUTOGRAD` | `AUTOGRAD` | `AUTOGRAD` |
| `prompt` | `AUTOGRAD` | `DIRECT` | `AUTOGRAD` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import repeat
from operator import is_
from typing import Any

import torch

from ..engine.interface import (
    Engine,
    EngineSettings,
    FreshTargets,
    GradientTargets,
    ParameterTargets,
)
from ..interop import IS_PADDLE, data_ptr, device_name, is_cuda
from ..weights.parameters import ExpertParameters
from .destinations import check_main_grad

Tensor = torch.Tensor
ABSENT: Any = object()  # in place of a `main_grad` that a parameter has no attribute for


class Route(Enum):
    """Where a backward leaves its weight gradients, in words for the log."""

    DIRECT = "are added straight into main_grad"
    AUTOGRAD = "are handed over by every backward, through autograd where there is no main_grad"
    WAIT = "wait in fp32 accumulators for step()"


@dataclass(eq=False)
class Addition:
    """The weight gradients of one backward on their way.

    parameters: the layer's, as the forward found them.
    trained: which of them want a gradient, at the moment of this backward.
    targets: what the engine adds to.
    fresh: memory for a `main_grad` that is None; the parameter's own after the addition.
    stand_ins: what autograd is given for parameters whose wrapper must be told that the gradient
        is in `main_grad`, by position (`stand_ins_for`).
    """

    route: Route
    parameters: Sequence[Tensor]
    trained: list[bool]
    targets: GradientTargets
    fresh: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    stand_ins: dict[int, Tensor] = field(default_factory=dict)

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
    # Zeros and not unwritten memory: a hook that adds `.grad` all the same must add nothing.
    return {index: torch.zeros_like(parameters[index]) for index in found.values()}


def main_grads_of(parameters: Sequence[Tensor], trained: Sequence[bool]) -> list[Any]:
    """`main_grad` of each parameter that wants a gradient, or `ABSENT`; None of the others."""
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


def direct_addition(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: list[bool],
    main_grads: list[Any],
    dout: Tensor,
) -> Addition:
    """An addition straight into `main_grads`. Memory that is made here, where one that is wanted is
    None, is not zeroed yet.
    """
    fresh: dict[int, tuple[Tensor, Tensor]] = {}  # once for a parameter that experts share
    if is_among(None, main_grads):
        for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
            if wanted and main_grads[index] is None:
                if id(parameter) not in fresh:
                    shape = layer.fresh_shape(index, parameter)
                    made = torch.empty(shape, dtype=torch.float32, device=dout.device)
                    fresh[id(parameter)] = (parameter, made)
                main_grads[index] = fresh[id(parameter)][1]
    targets = layer.targets(main_grads)
    return Addition(Route.DIRECT, parameters, trained, targets, list(fresh.values()))


def fresh_addition(
    layer: ExpertParameters,
    parameters: Sequence[Tensor],
    trained: list[bool],
    engine: Engine,
    settings: EngineSettings,
    dout: Tensor,
) -> Addition | None:
    """An addition to nothing: gradients that autograd accumulates are written as it takes them. None
    where the engine cannot write them, or where experts share a parameter, whose gradient is a sum.
    """
    wanted = [p for p, is_trained in zip(parameters, trained, strict=True) if is_trained]
    fits = engine.writes_gradients(settings) and FreshTargets.fits(p.dtype for p in wanted)
    if not fits or len(set(map(id, parameters))) < len(parameters):
        return None
    memory = [
        torch.empty(tuple(p.shape), dtype=p.dtype, device=dout.device) if is_trained else None
        for p, is_trained in zip(parameters, trained, strict=True)
    ]
    return Addition(Route.AUTOGRAD, parameters, trained, layer.fresh_targets(memory))


def direct_problem(
    addition: Addition,
    engine: Engine,
    settings: EngineSettings,
    layer: ExpertParameters,
    dout: Tensor,
) -> str | None:
    """Why the engine cannot add there the gradients of `dout`, in one sentence, or None.

    Raises:
        DTypeError, ShapeError, DeviceError, LayoutError: a `main_grad` is none that anything could
            be added to.
    """
    targets = addition.targets
    assert isinstance(targets, ParameterTargets)
    (_, n1, hidden), (_, _, inner) = layer.native_shapes()
    problem = targets.problem(n1, hidden, inner, device_name(dout))

    def check() -> None:
        pairs = zip(addition.parameters, addition.trained, strict=True)
        for index, (parameter, wanted) in enumerate(pairs):
            if wanted:
                check_main_grad(parameter, dout, layer.name_of, index)

    if problem is not None:
        # Its dtype, shape or device would be refused by a flush as well, so it is refused here.
        check()
        return problem
    targets.once("checked", check)
    return engine.problem_of(targets, settings)


class CapturedMemory:
    """The memory that backwards captured into CUDA graphs add to.

    Every replay adds there, whatever has become of the parameters. So the memory is kept alive, and
    `check` raises where a parameter has another `main_grad` by now.
    """

    def __init__(self) -> None:
        """Nothing was captured yet."""
        self._held: dict[int, tuple[Tensor, Tensor]] = {}

    def __reduce__(self) -> tuple[type[CapturedMemory], tuple[()]]:
        """No graph adds to a copy's parameters."""
        return CapturedMemory, ()

    def keep(self, parameters: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """A backward that adds to the `main_grad` of these is being captured."""
        for parameter, wanted in zip(parameters, trained, strict=True):
            if wanted:
                self._held[id(parameter)] = (parameter, parameter.main_grad)  # type: ignore[attr-defined]

    def check(self) -> None:
        """Raise if gradients of a replay are where no optimizer looks.

        Raises:
            RuntimeError: a parameter's `main_grad` is no longer the captured one.
        """
        for parameter, memory in self._held.values():
            now = getattr(parameter, "main_grad", None)
            if now is not memory and (now is None or data_ptr(now) != data_ptr(memory)):
                raise RuntimeError(
                    "the main_grad of an expert weight was replaced after a backward that adds to it was captured into a CUDA "
                    "graph, and replays add to the memory it had then; needed: main_grad that stays in place (zeroed and not "
                    "rebound), or another capture; node.release_grads() forgets captured memory"
                )


def is_capturing(like: Tensor) -> bool:
    """Whether the current stream records a CUDA graph. Paddle does not tell."""
    return not IS_PADDLE and is_cuda(like) and torch.cuda.is_current_stream_capturing()
