"""Take a step out of a running layer, into a `StepDump` or a file."""

from __future__ import annotations

import atexit
import logging
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..engine.interface import Tokens, token_dtype
from ..interop import IS_PADDLE, dtype_name, is_cuda
from ..observe import BackwardBegins, CallEvent, ExpertCall, ForwardDone, StepDone, forget, observe
from ..quant.format import BlockScaledTensor
from ..quant.reference import dequantize
from ..routing.ids import is_here
from .module_names import caller_of, shares_memory
from .step_dump import STEP_FLAGS, Array, DumpError, StepDump, StepSettings, save_dump

logger = logging.getLogger("sonicmoe")

Tensor = torch.Tensor


def dump_next_step(layer: object, path: str | Path) -> None:
    """`capture.dump` for every layer but a `SonicMoEMlpNode`, which hands its state here. Errors as
    there, and TypeError where `path` is no path.

    The next forward writes the file at once. Its backward, which brings the same indices, writes it
    again with `dout`, and ends the dump; so does the end of the optimizer step, by which every
    backward has run. A forward without a graph may be inference, which no backward follows, or the
    first pass of a recompute, which one does: only time tells them apart.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path is {type(path).__name__}; needed: a str or a Path")
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
    assert event.call.indices is not None
    return _step(name, event.call, event.x, to_numpy(event.call.indices), to_numpy(event.probs))


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
    step = _step(name, event.call, saved.x, _indices_of(event), probs)
    return step.but(**token_fields("dout", event.dout, step.indices, step.num_experts))


def _indices_of(event: ForwardDone | BackwardBegins) -> Array:
    """As the caller gave them; where only the routing is left, -1 stands for every id that is not
    here.
    """
    if event.call.indices is not None:
        return to_numpy(event.call.indices)
    assert event.saved is not None
    routing = event.saved.routing
    slot_row, first = to_numpy(routing.slot_row), to_numpy(routing.padded_offsets)
    # Rows lie in the order of experts, and `first` has the first row of each.
    owner = np.searchsorted(first, slot_row, side="right") - 1
    return np.where(slot_row >= 0, owner, -1)


def _step(name: str, call: ExpertCall, x: Tokens, indices: Array, probs: Array) -> StepDump:
    w1, w2, b1, b2 = (
        None if weight is None else to_numpy(weight) for weight in call.native_weights()
    )
    assert w1 is not None and w2 is not None
    tokens = token_fields("x", x, indices, len(w2))
    return StepDump(
        name,
        settings_of(call, x),
        indices=indices,
        probs=probs,
        w1=w1,
        w2=w2,
        b1=b1,
        b2=b2,
        caller=caller_of(call),
        framework="paddle" if IS_PADDLE else "torch",
        first_triple=None if call.first_triple is None else to_numpy(call.first_triple),
        **tokens,
    )


def token_fields(name: str, tokens: Tokens, indices: Array, experts: int) -> dict[str, Array]:
    """Fields of a `StepDump`: values, and where they arrived in FP8 codes and multipliers. Rows that
    nobody reads are zeros, of plain values those that are not finite: no dispatcher writes them,
    and what was in their memory would look like the first NaN of the step.
    """
    served = is_here(indices, experts).any(1)
    if not isinstance(tokens, BlockScaledTensor):
        values = to_numpy(tokens)
        values[~(served | np.isfinite(values).all(1))] = 0
        return {name: values}
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
    # Names instead of objects, because the file outlives this version of the package.
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
    own = tensor.detach().to(torch.int64 if integral else torch.float32)
    if own.dtype == tensor.dtype and not is_cuda(tensor):
        # `numpy()` of the caller's own memory would leave it at its size for good, and a sharded
        # model frees gathered weights by resizing them.
        own = own.clone()
    return np.asarray(own.cpu().numpy())


# Dumps that a step of any optimizer ends.
_until_optimizer: set[_Writer] = set()


def _optimizer_stepped(*_: Any) -> None:
    for writer in tuple(_until_optimizer):
        writer.end()


if not IS_PADDLE:  # its proxy has no such hook, and no face without `step()`
    from torch.optim.optimizer import register_optimizer_step_post_hook

    # Once and for good: a hook cannot remove itself while the optimizer goes through its hooks.
    register_optimizer_step_post_hook(_optimizer_stepped)


class _Writer:
    """Observes calls, writes one layer's next step, then goes."""

    def __init__(self, layer: object, path: Path) -> None:
        # Weakly: a dump that waits for a backward must not keep a dropped layer's weights.
        self._layer, self._path = weakref.ref(_owner(layer)), path
        self._indices: Array | None = None  # of the forward that was written, where ids are here

    def say_if_unused(self) -> None:
        """At the end of the program: the dump was asked for behind the step that it was to show."""
        if self._indices is None:
            logger.warning(
                "nothing was written to %s: no forward of the layer ran after its dump was asked for; "
                "ask before the step",
                self._path,
            )

    def end(self) -> None:
        """Observe no longer; twice is once."""
        forget(self)
        atexit.unregister(self.say_if_unused)
        _until_optimizer.discard(self)

    def __call__(self, event: CallEvent) -> None:
        layer = self._layer()
        # The layer was dropped before its next step, so no event of it can come.
        if layer is None:
            self.say_if_unused()
            self.end()
        elif isinstance(event, StepDone):
            # A step without a forward before it belongs to the time before the dump was asked for.
            if event.layer is layer and self._indices is not None:
                self.end()
        elif self._is_of(layer, event.call):
            self._take(event)

    @staticmethod
    def _is_of(layer: object, call: ExpertCall) -> bool:
        if call.layer is not None and call.layer is layer:
            return True
        if call.module is not None and any(part is call.module for part in _modules_of(layer)):
            return True
        w1 = call.weights.get("w1", ())
        return any(shares_memory(one, other) for one in _weights_of(layer) for other in w1)

    def _take(self, event: CallEvent) -> None:
        """Diagnosis must not end a training: whatever fails here is logged, and nothing more is
        tried.
        """
        try:
            if isinstance(event, ForwardDone) and self._indices is None:
                self._indices = self._here(event)
                self._write(lambda name: step_of_forward(name, event))
                # A node says itself when its step is over; for other layers an optimizer does.
                if event.call.layer is not self._layer():
                    self._layer = weakref.ref(_layer_of(event.call))
                    _until_optimizer.add(self)
            elif isinstance(event, BackwardBegins) and self._is_of_the_forward(event):
                self.end()
                self._write(lambda name: step_of_backward(name, event))
        except Exception as error:
            self.end()
            logger.warning(
                "no dump of this step in %s: %s: %s", self._path, type(error).__name__, error
            )

    def _is_of_the_forward(self, event: BackwardBegins) -> bool:
        """Whether a backward belongs to the forward that was written, not to another micro-batch.
        Where no forward was seen, every backward will do.
        """
        return self._indices is None or np.array_equal(self._indices, self._here(event))

    def _here(self, event: ForwardDone | BackwardBegins) -> Array:
        """Ids, with -1 for every one that is not here, however the caller spells it."""
        indices = _indices_of(event)
        return np.where(is_here(indices, _num_experts(event)), indices, -1)

    def _write(self, make: Callable[[str], StepDump]) -> None:
        save_dump(self._path, make(self._path.stem))


def _num_experts(event: ForwardDone | BackwardBegins) -> int:
    if event.saved is not None:
        return int(event.saved.routing.num_experts)
    weights = event.call.weights["w2"]
    return int(weights[0].shape[0]) if len(weights[0].shape) == 3 else len(weights)


def _layer_of(call: ExpertCall) -> Any:
    """What tells the calls of this layer from those of the others in the same module."""
    return _owner(call.weights["w1"][0]) if call.module is None else call.module


def _owner(layer: Any) -> Any:
    """What lives as long as the layer: a view is another object at every call."""
    base = getattr(layer, "_base", None)
    return layer if base is None else base


def _weights_of(layer: Any) -> Sequence[Tensor]:
    if isinstance(layer, Tensor):
        return (layer,)
    parameters = getattr(layer, "parameters", None)
    return list(parameters()) if callable(parameters) else ()


def _modules_of(layer: Any) -> Sequence[Any]:
    modules = getattr(layer, "modules", None)
    return list(modules()) if callable(modules) else ()
