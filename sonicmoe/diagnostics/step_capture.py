"""Take a step out of a running layer, into a `StepDump` or a file."""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from ..engine.interface import Tokens, token_dtype
from ..interop import dtype_name
from ..quant.format import BlockScaledTensor
from ..quant.reference import dequantize
from ..routing.ids import is_here
from .call_events import BackwardBegins, CallEvent, ExpertCall, ForwardDone, StepDone
from .stages import forget, observe
from .step_dump import STEP_FLAGS, Array, DumpError, StepDump, StepSettings, save_dump

logger = logging.getLogger("sonicmoe")

Tensor = torch.Tensor


def dump_next_step(layer: object, path: str | Path) -> None:
    """Write the inputs of the next step of `layer` (`ExpertCall.layer`) to `path`, for `sonicmoe
    bisect`.

    The next forward writes them at once. Its backward, which brings the same indices, writes them
    again with `dout`, and ends the dump; so does the end of the optimizer step, by which every
    backward has run. A forward without a graph may be inference, which no backward follows, or the
    first pass of a recompute, which one does: only time tells them apart.

    Copies weights and tokens to the host: for diagnosis, not for every step. What fails during the
    step is logged, and the step goes on. Where no forward follows, the log says at the end of the
    program that nothing was written.

    Raises:
        DumpError: `path` cannot be written.
    """
    path = Path(path)
    _check_writable(path)
    # The path was checked above, before the step: afterwards nobody is there to raise to.
    writer = _Writer(layer, path)
    observe(writer)
    atexit.register(writer.say_if_unused)


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


def step_of_forward(name: str, event: ForwardDone) -> StepDump:
    """Inputs of one forward."""
    return _step(name, event.call, event.x, to_numpy(event.probs))


def step_of_backward(name: str, event: BackwardBegins) -> StepDump:
    """Inputs of one forward and its backward; probabilities at invalid slots, which nobody reads,
    are zero.
    """
    saved = event.saved
    assert saved.x is not None
    slot_row, row_prob = to_numpy(saved.routing.slot_row), to_numpy(saved.routing.row_prob)
    probs = np.zeros(slot_row.shape, dtype=np.float32)
    # Backward keeps probabilities per row and not per slot, so they are brought back through the
    # routing.
    probs[slot_row >= 0] = row_prob[slot_row[slot_row >= 0]]
    step = _step(name, event.call, saved.x, probs)
    return step.but(**_arrays("dout", event.dout, step.indices, step.num_experts))


def _step(name: str, call: ExpertCall, x: Tokens, probs: Array) -> StepDump:
    w1, w2 = (to_numpy(weight) for weight in call.native_weights())
    indices = to_numpy(call.indices)
    tokens = _arrays("x", x, indices, len(w2))
    return StepDump(
        name, settings_of(call, x), indices=indices, probs=probs, w1=w1, w2=w2, **tokens
    )


def _arrays(name: str, tokens: Tokens, indices: Array, experts: int) -> dict[str, Array]:
    """Fields of a `StepDump`: values, and where they arrived in FP8 codes and multipliers. Rows of
    these that nobody reads are zeros: no dispatcher writes them, and what was in their memory would
    look like the first NaN of the step.
    """
    if not isinstance(tokens, BlockScaledTensor):
        return {name: to_numpy(tokens)}
    served = is_here(indices, experts).any(1)
    arrays = {
        name: to_numpy(dequantize(tokens)),
        # Through int32: numpy knows no e4m3, and Paddle moves no uint8 of every kind.
        f"{name}_codes": to_numpy(tokens.bytes.to(torch.int32)).astype(np.uint8),
        f"{name}_scale": to_numpy(tokens.scale_inv),
    }
    for array in arrays.values():
        array[~served] = 0
    return arrays


def settings_of(call: ExpertCall, x: Tokens) -> StepSettings:
    """How the call runs, by name."""
    own = call.settings
    return StepSettings.of(
        activation=own.activation.value,
        activation_parameters=dict(own.activation_parameters),
        recipe=None if own.recipe is None else own.recipe.name,
        dtype=dtype_name(token_dtype(x)),
        engine=call.engine,
        **{flag.field: getattr(own, flag.field) for flag in STEP_FLAGS},
    )


def to_numpy(tensor: Tensor) -> Array:
    """A copy on the host: integers as int64, everything else as fp32."""
    # By name, because the two frameworks have dtype objects of different classes.
    integral = str(tensor.dtype).endswith(("int32", "int64"))
    return np.array(tensor.detach().to(torch.int64 if integral else torch.float32).cpu().numpy())


class _Writer:
    """Observes calls, writes one layer's next step, then goes."""

    def __init__(self, layer: object, path: Path) -> None:
        # Weakly: a dump that waits for a backward must not keep a dropped layer's weights.
        self._layer, self._path = weakref.ref(layer), path
        self._indices: Array | None = None  # of the forward that was written

    def say_if_unused(self) -> None:
        """At the end of the program: the dump was asked for behind the step that it was to show."""
        if self._indices is None:
            logger.warning(
                "nothing was written to %s: no forward of the layer ran after its dump was asked for; ask before the step",
                self._path,
            )

    def _end(self) -> None:
        forget(self)
        atexit.unregister(self.say_if_unused)

    def __call__(self, event: CallEvent) -> None:
        layer = self._layer()
        # The layer was dropped before its next step, so no event of it can come.
        if layer is None:
            self.say_if_unused()
            self._end()
        elif isinstance(event, StepDone):
            # A step without a forward before it belongs to the time before the dump was asked for.
            if event.layer is layer and self._indices is not None:
                self._end()
        elif event.call.layer is layer:
            self._take(event)

    def _take(self, event: CallEvent) -> None:
        """Diagnosis must not end a training: whatever fails here is logged, and nothing more is
        tried.
        """
        try:
            if isinstance(event, ForwardDone) and self._indices is None:
                self._indices = to_numpy(event.call.indices)
                self._write(lambda name: step_of_forward(name, event))
            elif isinstance(event, BackwardBegins) and self._is_of_the_forward(event.call):
                self._end()
                self._write(lambda name: step_of_backward(name, event))
        except Exception as error:
            self._end()
            logger.warning(
                "no dump of this step in %s: %s: %s", self._path, type(error).__name__, error
            )

    def _is_of_the_forward(self, call: ExpertCall) -> bool:
        """Whether a backward belongs to the forward that was written, not to another micro-batch.
        Where no forward was seen, every backward will do.
        """
        return self._indices is None or np.array_equal(self._indices, to_numpy(call.indices))

    def _write(self, make: Callable[[str], StepDump]) -> None:
        save_dump(self._path, make(self._path.stem))
