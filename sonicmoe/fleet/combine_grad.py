"""PaddleFleet's `fp8_combine_grad_handle` as the source of the node's gradient.

Fleet's MoE layer makes one empty dict per forward and hands it to the experts and to the combine.
Where the combine's backward sends the gradient in FP8, it leaves the received codes and scales there
under "data" and "scale", and returns the codes as the gradient.

| gradient | handle | |
|---|---|---|
| e4m3 | filled | the codes and scales of the handle |
| bf16 | filled | the same: a placeholder, as where PyTorch casts gradients |
| bf16 | empty | the gradient: the combine did not send it in FP8 |
| e4m3 | empty, or None | refused: codes without scales |

The third row is legal. Fleet makes the dict by its configuration (`fp8`, `fp8_wgrad`) and not by the
communication: a group of one rank sends nothing, and a combine under refined recompute sends bf16.
With `fp8_wgrad` off there is no dict.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch

from ..errors import ConfigError, DeviceError, DTypeError, ShapeError, SonicMoEError, expect
from ..interop import device_name, dtype_name
from ..quant.format import BlockScaledTensor
from ..quant.tokens import is_fp8
from ..refusals import need_dtype, need_type
from .carrier import tokens_from_carrier

Tensor = torch.Tensor

KEYS = ("data", "scale")
# Some commits of Fleet tell their combine by an entry which quantiser to call.
_NOT_OURS = ("using_sonic_moe",)
_NAME = "fp8_combine_grad_handle"
_FILLED_BY = (
    "the backward of the combine fills it: needed: this very dict as combine_grad_handle of "
    "fused_combine, with fp8_dispatch=True, and one dict per forward"
)


def combine_gradient(handle: Any) -> CombineGradient | None:
    """The source for a call of the node; None where Fleet passes no handle."""
    return None if handle is None else CombineGradient(handle)


class CombineGradient:
    """A `GradientSource` over one forward's handle, read when a backward runs and emptied then, so
    that nobody but the running backward keeps the codes.
    """

    def __init__(self, handle: MutableMapping[str, Any]) -> None:
        """It may be filled already: recompute runs the experts again after the combine's backward."""
        need_type(_NAME, handle, MutableMapping, "a dict, or None", DTypeError)
        self._handle, self._was_taken = handle, False

    def take(self, gradient: Tensor) -> BlockScaledTensor | Tensor:
        """See `GradientSource`. Refusals name the entry of the handle, what came and what is needed."""
        if not self._found():
            self._refuse_lost_scales(gradient)
            return gradient
        data, scale = self._entries()
        _check_data(data, gradient)
        try:
            tokens = tokens_from_carrier(data, scale).tokens
        except SonicMoEError as error:
            raise type(error)(f"{_NAME}['data'] and ['scale']: {error}") from None
        # Only now: who gets an error finds what it is about.
        for key in KEYS:
            del self._handle[key]
        self._was_taken = True
        return tokens

    def _refuse_lost_scales(self, gradient: Tensor) -> None:
        # An empty handle is legal for a gradient in bf16 (the table above), unless it was full
        # before: a second backward would take a placeholder for the gradient.
        taken = "an earlier backward of this forward took what was in it, and no combine filled it again"
        expect(not self._was_taken, ConfigError, f"{_NAME} is empty: {taken}; {_FILLED_BY}")
        came = f"the gradient of the experts' output is {dtype_name(gradient.dtype)}"
        expect(not is_fp8(gradient), ConfigError, f"{came} and {_NAME} is empty; {_FILLED_BY}")

    def _found(self) -> list[str]:
        return [str(key) for key in self._handle if key not in _NOT_OURS]

    def _entries(self) -> tuple[Any, Any]:
        found = self._found()
        words = f"{_NAME} has the keys {found}; needed: {list(KEYS)}, or none; {_FILLED_BY}"
        expect(sorted(found) == sorted(KEYS), ConfigError, words)
        for key in KEYS:
            value = self._handle[key]
            need_type(f"{_NAME}[{key!r}]", value, torch.Tensor, "a tensor", DTypeError)
        return self._handle["data"], self._handle["scale"]


def _check_data(data: Tensor, gradient: Tensor) -> None:
    need_dtype(f"{_NAME}['data']", data, torch.float8_e4m3fn)
    shapes = tuple(data.shape), tuple(gradient.shape)
    whose = f"the gradient of the experts' output has {shapes[1]}"
    needed = "needed: the handle of the same forward"
    words = f"{_NAME}['data'] has shape {shapes[0]}; {whose}: {needed}"
    expect(shapes[0] == shapes[1], ShapeError, words)
    devices = device_name(data), device_name(gradient)
    words = f"{_NAME}['data'] is on {devices[0]} but the gradient is on {devices[1]}"
    expect(devices[0] == devices[1], DeviceError, words)
