"""Take the inputs of a call out of a running program, for `sonicmoe bisect`, and to measure recipes
on (`benchmarks/numerics_report.py`).
"""

from __future__ import annotations

import atexit
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..engine.interface import Tokens, token_dtype
from ..interop import dtype_name, is_cuda
from ..layer.state import LayerState
from ..log import logger
from ..observe import BackwardBegins, CallEvent, ExpertCall, ForwardDone, forget, observe
from ..quant.format import BlockScaledTensor
from ..quant.reference import dequantize
from ..routing.ids import is_here
from .module_names import caller_of, shares_memory
from .step_dump import STEP_FLAGS, Array, DumpError, StepDump, StepSettings, save_dump

Tensor = torch.Tensor


def dump(layer: object, path: str | Path) -> None:
    """Write the inputs of the next backward of a layer, and of its forward, to `path`, for `sonicmoe
    bisect`.

    The backward writes the file when it begins. Copies weights and tokens to the host, so it is not
    for every step. An error during the step is logged, and the step goes on. Where no backward
    follows, the log says at the end of the program that nothing was written.

    Args:
        layer: a `SonicMoEMlpNode`, a `MoE`, the experts of a transformers model
            (`model.model.layers[3].mlp.experts`), or any module that has these weights; of several
            such layers the first whose backward runs is taken. For the functional API and
            PaddleFleet w1, or the parameter that it is a view of.
        path: of the file.

    Raises:
        DumpError: `path` cannot be written.
        TypeError: `path` is no path.
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


def _indices_of(event: BackwardBegins) -> Array:
    """The ids that the caller gave; where only the routing is left, -1 stands for every id that is not
    here.
    """
    if event.call.indices is not None:
        return to_numpy(event.call.indices)
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
        **tokens,
    )


def token_fields(name: str, tokens: Tokens, indices: Array, experts: int) -> dict[str, Array]:
    """Fields of a `StepDump`: values, and where they arrived in FP8 codes and multipliers. Rows that
    nobody reads are zeros, of plain values those that are not finite. No dispatcher writes them, so
    a NaN that was in their memory would look like the first one of the step.
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


class _Writer:
    """Observes calls, writes the next backward of one layer, then goes."""

    def __init__(self, layer: object, path: Path) -> None:
        # Weakly: a dump that waits for a backward must not keep a dropped layer's weights.
        self._layer, self._path = weakref.ref(_owner(layer)), path

    def say_if_unused(self) -> None:
        """At the end of the program: the dump was asked for behind the step that it was to show."""
        logger.warning(
            "nothing was written to %s: no backward of the layer ran after its dump was asked for; "
            "ask before the step",
            self._path,
        )

    def __call__(self, event: CallEvent) -> None:
        layer = self._layer()
        # The layer was dropped before its next step, so no event of it can come.
        if layer is None:
            self.say_if_unused()
            self._end()
        elif isinstance(event, BackwardBegins) and _is_of(layer, event.call):
            self._end()
            self._write(event)

    def _end(self) -> None:
        forget(self)
        atexit.unregister(self.say_if_unused)

    def _write(self, event: BackwardBegins) -> None:
        # Diagnosis must not end a training, so every error is logged.
        try:
            save_dump(self._path, step_of_backward(self._path.stem, event))
        except Exception as error:
            kind = type(error).__name__
            logger.warning("no dump of this step in %s: %s: %s", self._path, kind, error)


def _is_of(layer: object, call: ExpertCall) -> bool:
    """Whether the call is of this layer: by the state of a node, the module, or the weights."""
    if call.layer is not None and call.layer is layer:
        return True
    if call.module is not None and any(part is call.module for part in _listed(layer, "modules")):
        return True
    own = (layer,) if isinstance(layer, Tensor) else _listed(layer, "parameters")
    return any(shares_memory(one, other) for one in own for other in call.weights.get("w1", ()))


def _owner(layer: Any) -> Any:
    """What lives as long as the layer, and tells its calls."""
    # A node is no module, but its calls share its state. A view is another object at every call.
    state = getattr(layer, "_state", None)
    if isinstance(state, LayerState):
        return state
    base = getattr(layer, "_base", None)
    return layer if base is None else base


def _listed(layer: Any, method: str) -> Sequence[Any]:
    """What a module's method of that name lists; nothing of what is no module."""
    found = getattr(layer, method, None)
    return list(found()) if callable(found) else ()
