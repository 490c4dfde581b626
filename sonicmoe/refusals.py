"""The commonest refusals at a border: a wrong shape, dtype or type. Each names the argument, what
came and what is needed. The sentence is composed only when it is raised.
"""

from __future__ import annotations

from typing import Any

import torch

from .errors import DTypeError, ShapeError, SonicMoEError
from .interop import dtype_name


def need_shape(fits: bool, name: str, tensor: torch.Tensor, needed: object) -> None:
    """Refuse a tensor of another shape. needed: as a tuple or in the letters of the shape legend."""
    if not fits:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; needed: {needed}")


def need_dtype(name: str, tensor: torch.Tensor, *dtypes: torch.dtype) -> None:
    """Refuse a tensor that has none of these dtypes."""
    if tensor.dtype not in dtypes:
        *others, last = map(dtype_name, dtypes)
        needed = f"{', '.join(others)} or {last}" if others else last
        raise DTypeError(f"{name} is {dtype_name(tensor.dtype)}; needed: {needed}")


def need_type(
    name: str,
    value: Any,
    kinds: type | tuple[type, ...],
    needed: str,
    error: type[SonicMoEError] | type[TypeError] = TypeError,
) -> None:
    """Refuse an object that is no instance of these classes. needed: what would do, in words."""
    if not isinstance(value, kinds):
        raise error(f"{name} is {type(value).__name__}; needed: {needed}")
