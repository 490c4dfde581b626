"""A Triton kernel of any length: y = a * x + y."""

from __future__ import annotations

import triton
import triton.language as tl

from sonicmoe.jit.triton_kernel import TritonCompile, stored_jit


@stored_jit(do_not_specialize=["num_tokens"])
def scale_add(x_ptr, y_ptr, a, num_tokens, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < num_tokens
    y = tl.load(y_ptr + i, mask=mask)
    tl.store(y_ptr + i, a * tl.load(x_ptr + i, mask=mask) + y, mask=mask)


def scale_add_for(block: int, arch: str) -> TritonCompile:
    pointer = triton.runtime.jit.MockTensor(tl.float32)
    return scale_add.ahead(pointer, pointer, 2.0, 1000, BLOCK=block, arch=arch)
