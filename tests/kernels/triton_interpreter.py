"""Repairs of Triton's interpreter, to be applied in a process that runs with TRITON_INTERPRET=1.

* Its bf16 conversions truncate or lose the rounding carry: PyTorch's conversions replace them.
* Its products take the bits of bf16 operands for integers.
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
        bits = np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
        return bits.view(np.float32).reshape(data.shape)
    raise NotImplementedError(f"interpreter conversion {names}")


def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """`a b + d` in fp32, of 16-bit operands of either kind."""
    left, right = (_fp32(operand) for operand in (a, b))
    return interpreter.TensorHandle(np.matmul(left, right) + d.data, d.dtype.scalar)


def _fp32(operand: Any) -> np.ndarray:
    if str(operand.dtype.scalar) == "bf16":
        return convert_float(operand.data, "bf16", "fp32", None)
    return operand.data.astype(np.float32)


def repair() -> None:
    """Patch the interpreter of this process; once is enough."""
    original = interpreter._LangPatchScope.set_attr

    def set_attr(self: Any, obj: object, name: str, value: object) -> None:
        if name == "__index__":
            value = lambda tensor: int(tensor.handle.data.item())  # noqa: E731
        original(self, obj, name, value)

    interpreter._LangPatchScope.set_attr = set_attr
    interpreter.InterpreterBuilder.create_dot = create_dot
    interpreter._convert_float = convert_float
