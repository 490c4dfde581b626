"""Take a step out of a running node, into a `StepDump` or a file."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..engine.interface import Saved
from ..interop import dtype_name
from .call_hooks import CallObserver, forget, observe
from .capture import to_numpy
from .step_dump import DumpError, StepDump, StepSettings, save_dump

if TYPE_CHECKING:
    from ..node.mlp_call import MlpCall
    from ..node.mlp_node import SonicMoEMlpNode

logger = logging.getLogger("sonicmoe")

Tensor = torch.Tensor


def dump_next_step(node: SonicMoEMlpNode, path: str | Path) -> None:
    """Write the inputs of the node's next step to `path`, for `sonicmoe bisect`.

    The next forward writes them at once; the next backward (under recompute another forward runs
    before it) writes them again with `dout`, and ends it; so does a forward that keeps no graph.
    Copies weights and tokens to the host: for diagnosis, not for every step. What fails during the
    step is logged, and the step goes on.

    Raises:
        DumpError: `path` cannot be written.
    """
    path = Path(path)
    _check_writable(path)
    observe(_Writer(node._experts, path))


def _check_writable(path: Path) -> None:
    """Make the folder and write something there: permissions do not tell of a read-only file
    system.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise DumpError(f"cannot write a step to {path}: {error}") from error
    if path.is_dir() or (path.exists() and not os.access(path, os.W_OK)):
        raise DumpError(f"cannot write a step to {path}: it is a directory, or write-protected")


def step_of_forward(name: str, call: MlpCall, x: Tensor, probs: Tensor) -> StepDump:
    """Inputs of one forward."""
    w1, w2 = call.experts.source.native()
    return StepDump(
        name,
        settings_of(call, x),
        to_numpy(x),
        to_numpy(call.indices),
        to_numpy(probs),
        to_numpy(w1),
        to_numpy(w2),
    )


def step_of_backward(name: str, call: MlpCall, dout: Tensor, saved: Saved) -> StepDump:
    """Inputs of one forward and its backward; probabilities at invalid slots, which nobody reads,
    are zero.
    """
    assert saved.x is not None
    slot_row, row_prob = to_numpy(saved.routing.slot_row), to_numpy(saved.routing.row_prob)
    probs = np.zeros(slot_row.shape, dtype=np.float32)
    probs[slot_row >= 0] = row_prob[slot_row[slot_row >= 0]]
    w1, w2 = call.experts.source.native()
    x, indices = to_numpy(saved.x), to_numpy(call.indices)
    return StepDump(
        name,
        settings_of(call, saved.x),
        x,
        indices,
        probs,
        to_numpy(w1),
        to_numpy(w2),
        to_numpy(dout),
    )


def settings_of(call: MlpCall, x: Tensor) -> StepSettings:
    """How the call runs, by name."""
    own = call.settings
    return StepSettings(
        activation=own.activation.value,
        recipe=None if own.recipe is None else own.recipe.name,
        fp8_wgrad=own.fp8_wgrad,
        save_z=own.save_z.value,
        recompute_z=own.recompute_z,
        dtype=dtype_name(x.dtype),
        engine=call.engine.name,
    )


class _Writer(CallObserver):
    """Writes one node's next step, then goes."""

    def __init__(self, experts: object, path: Path) -> None:
        self._experts, self._path = experts, path
        self._has_forward = False

    def after_forward(
        self, call: MlpCall, x: Tensor, probs: Tensor, out: Tensor, saved: Saved | None
    ) -> None:
        if call.experts is not self._experts:
            return
        if not self._has_forward:
            self._has_forward = True
            self._write(lambda: step_of_forward(self._path.stem, call, x, probs))
        if saved is None and not _in_autograd_function():
            forget(self)

    def before_backward(self, call: MlpCall, dout: Tensor, saved: Saved) -> None:
        if call.experts is self._experts:
            forget(self)
            self._write(lambda: step_of_backward(self._path.stem, call, dout, saved))

    def _write(self, make: Callable[[], StepDump]) -> None:
        """Diagnosis must not end a training: whatever fails here is logged, and nothing more is
        tried.
        """
        try:
            save_dump(self._path, make())
        except Exception as error:
            forget(self)
            logger.warning(
                "no dump of this step in %s: %s: %s", self._path, type(error).__name__, error
            )


def _in_autograd_function() -> bool:
    """Whether an autograd function's forward is on the stack: recompute, which keeps no graph there
    and runs all again in backward.
    """
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        first = (
            frame.f_locals.get(code.co_varnames[0])
            if code.co_name == "forward" and code.co_argcount
            else None
        )
        if hasattr(first, "save_for_backward"):  # the context
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
