"""Calls of native functions by keyword, and the stages of a pass that listeners see.

A native module declares the order of its arguments, and a call from here names them. So a call can
neither mix up two tensors nor forget one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..interop import numel
from ..observe import is_heard, is_observed, stage, tap
from ..quant.format import BlockScaledTensor, Code, Orientation
from ..quant.recipes import BlockShape

Tensor = torch.Tensor


def by_keyword(function: Any, names: Sequence[str]) -> Callable[..., Any]:
    """`function` with all its arguments by keyword, in the order that its module declares. An
    `observer` among them is made here, where somebody watches stages.
    """
    # Compiled once from the names: a loop over them in every call would take longer than the call.
    given = [name for name in names if name != "observer"]
    values = ", ".join("None" if name == "observer" else name for name in names)
    call = f"function({values})"
    if "observer" in names:
        by_name = ", ".join(f"{name}={name}" for name in given)
        call = f"{call} if not is_observed() else observed(function, names, dict({by_name}))"
    scope = {"function": function, "names": names, "is_observed": is_observed, "observed": observed}
    # Names come from our own module and never from a caller, so `eval` sees no foreign text.
    made: Callable[..., Any] = eval(f"lambda *, {', '.join(given)}: {call}", scope)
    return made


def observed(native_pass: Any, names: Sequence[str], arguments: dict[str, Any]) -> None:
    """Call a pass that tells an observer about its stages."""
    observer = _Observer(arguments)
    try:
        native_pass(*(observer if name == "observer" else arguments[name] for name in names))
    except Exception:
        if observer.failure is not None:  # on its way through native code it was copied
            raise observer.failure from None
        raise
    finally:
        observer.close()


class _Observer:
    """What a pass calls: opens the ranges of its stages and shows what it has written, which a
    listener may replace.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments
        self._range: AbstractContextManager[Any] | None = None
        self.failure: Exception | None = None

    def __call__(self, event: str, name: str, *what: Any) -> None:
        try:
            if event == "begin":
                self._range = stage(name)
                self._range.__enter__()
            elif event == "end":
                self.close()
            elif is_heard():
                self._show(name, *what) if event == "show" else self._show_quantised(name, *what)
        except Exception as error:
            self.failure = error
            raise

    def close(self) -> None:
        # Cleared first: closing may raise, and must not be tried twice.
        opened, self._range = self._range, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def _show(self, name: str, dtype: str, *where: Any) -> None:
        values = self.view(getattr(torch, dtype), *where)
        shown = tap(name, values)
        # A listener may plant a fault: later launches read this memory.
        if shown is not values:
            values.copy_(shown)

    def _show_quantised(
        self,
        name: str,
        code: str,
        block_rows: int,
        block_columns: int,
        transposed: bool,
        *where: Any,
    ) -> None:
        codes, scale_inv = self.view(torch.uint8, *where[:4]), self.view(torch.float32, *where[4:])
        orientation = Orientation.COLUMNS if transposed else Orientation.ROWS
        block, kind = BlockShape(block_rows, block_columns), Code(code)
        quantised = BlockScaledTensor.from_bytes(codes, scale_inv, block, kind, orientation)
        replaced = tap(name, quantised)
        if replaced is not quantised:
            codes.copy_(replaced.bytes)
            scale_inv.copy_(replaced.scale_inv)

    def view(self, dtype: torch.dtype, field: str, offset: int, rows: int, columns: int) -> Tensor:
        """The matrix that begins `offset` elements into the argument `field`."""
        memory = self._arguments[field]
        # Retyped first and sliced then, because Paddle retypes a slice at a wrong address.
        flat = memory.reshape([numel(memory)]).view(dtype)
        return flat[offset : offset + rows * columns].reshape([rows, columns])
