"""A CuTe DSL kernel of any length, y = a * x + y: imported only by build processes."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream


def compile_scale_add(threads: int) -> Any:
    @cute.kernel
    def scale_add(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, n: cutlass.Int32):
        i = cute.arch.block_idx()[0] * threads + cute.arch.thread_idx()[0]
        if i < n:
            y[i] = a * x[i] + y[i]

    @cute.jit
    def launch(x: cute.Tensor, y: cute.Tensor, a: cutlass.Float32, stream):
        n = cute.size(x)
        scale_add(x, y, a, n).launch(
            grid=(cute.ceil_div(n, threads), 1, 1), block=(threads, 1, 1), stream=stream
        )

    n = cute.sym_int()
    x, y = (make_fake_compact_tensor(cutlass.Float32, (n,)) for _ in range(2))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(launch, x, y, cutlass.Float32(1.0), stream, options="--enable-tvm-ffi")
