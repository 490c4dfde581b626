"""Take the inputs of calls out of a running program, for `sonicmoe bisect` and `sonicmoe numerics
--captured`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ..node.mlp_node import SonicMoEMlpNode
from ..observe import BackwardBegins, CallEvent, observing
from .cases import as_case
from .step_capture import dump_next_step, step_of_backward
from .step_dump import StepDump


def dump(layer: object, path: str | Path) -> None:
    """Write the inputs of the next forward of a layer, then of its backward, to `path`, for
    `sonicmoe bisect` and `sonicmoe numerics --captured`.

    The file is there after the forward and complete after the backward. The optimizer step ends the
    wait for a backward: `step()` of a node, and a step of any `torch.optim.Optimizer` for other
    layers. Copies weights and tokens to the host, so it is not for every step. What fails during
    the step is logged, and the step goes on. Where no forward follows, the log says at the end of
    the program that nothing was written.

    Args:
        layer: a `SonicMoEMlpNode`, a `MoE`, the experts of a transformers model
            (`model.model.layers[3].mlp.experts`), or any module that has these weights; of several
            such layers the first that runs is taken. For the functional API and PaddleFleet w1, or
            the parameter that it is a view of.
        path: of the file.

    Raises:
        DumpError: `path` cannot be written.
    """
    # A node is no module: its calls are told by the state that they share.
    if isinstance(layer, SonicMoEMlpNode):
        layer.dump(path)
    else:
        dump_next_step(layer, path)


@contextmanager
def captured_calls(name: str) -> Iterator[list[StepDump]]:
    """Inside the block, every backward of experts appends a copy of its inputs to the list: of
    every node, `MoE`, functional call and transformers model. The last layer's comes first.

    Cases are called `{name}-0`, `{name}-1`, ..., with the name of the layer behind it where its
    modules are known: `{name}-0 model.layers.3.mlp.experts`. Any activation, with or without
    biases, whatever engine and precision they run in. `step_dump.save_dump` writes one to a file.
    """
    cases: list[StepDump] = []

    def collect(event: CallEvent) -> None:
        # At this event the saved tensors are complete. Later the backward may release them one by
        # one.
        if isinstance(event, BackwardBegins):
            cases.append(case_of(f"{name}-{len(cases)}", event))

    with observing(collect):
        yield cases


def case_of(name: str, event: BackwardBegins) -> StepDump:
    """The inputs of one call as a case."""
    case = as_case(step_of_backward(name, event))
    layer = case.caller.layer if case.caller is not None else ""
    return replace(case, name=f"{name} {layer}") if layer else case
