"""Matrix products as another processor computes them: the gate's bounds on trained values are tried
with them (`pytest -m trained --other-products`).

Processors differ in the order in which they add the terms of a product, and that order decides the
last bits. Units for bf16 (avx512_bf16, AMX) multiply exactly and add in fp32, in an order of their
own, and round the sum once. Both are one change here: the terms are shuffled before the product is
taken in fp32. Products in processes that a test starts are not reached; the instruction sets that
tools/ci/other_processors.py asks for reach those too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
NARROW = (torch.bfloat16, torch.float16)


def shuffled_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` (two matrices, or two stacks of them), the same bits in every call."""
    terms = a.shape[-1]
    order = torch.randperm(terms, generator=torch.Generator().manual_seed(terms))
    wide = torch.float32 if a.dtype in NARROW else a.dtype
    return (a[..., order].to(wide) @ b[..., order, :].to(wide)).to(a.dtype)


class OtherProducts(TorchDispatchMode):
    """Replaces the products of PyTorch, in backward passes too. `seen` counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (aten.mm.default, aten.bmm.default):
            self.seen += 1
            return shuffled_product(*args)
        if func is aten.addmm.default and not kwargs:
            self.seen += 1
            return args[0] + shuffled_product(*args[1:])
        return func(*args, **(kwargs or {}))
