"""Repairs of Triton's interpreter, to be applied in a process that runs with TRITON_INTERPRET=1.

* Its bf16 conversions truncate or lose the rounding carry: PyTorch's conversions replace them.
* Its loop bounds are one-element arrays, which NumPy >= 2.4 no longer converts to int.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter


def convert_float(data: np.ndarray, source: Any, target: Any, rounding_mode: Any) -> np.ndarray:
    """fp32 <-> bf16, bits in and bits out, round to nearest even; other pairs are not needed here."""
    names = (str(source), str(target))
    if names == ("fp32", "bf16"):
        values = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
        return (
            values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16).reshape(data.shape)
        )
    if names == ("bf16", "fp32"):
        return (
            (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16)
            .view(np.float32)
            .reshape(data.shape)
        )
    raise NotImplementedError(f"interpreter conversion {names}")


def repair() -> None:
    """Patch the interpreter of this process; once is enough."""
    original = interpreter._LangPatchScope.set_attr

    def set_attr(self: Any, obj: object, name: str, value: object) -> None:
        if name == "__index__":
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        original(self, obj, name, value)

    interpreter._LangPatchScope.set_attr = set_attr
    interpreter._convert_float = convert_float
