"""The MXFP8 grouped GEMMs of an expert MLP on compute capability 10.0 and 10.3: quack-kernels'
block-scaled class, compiled as the BF16 GEMMs are (`quack_gemm`), called with what.

Never run on such a GPU by this project: the kernels are compiled, their spills, loads and barriers
checked (`tests/kernels/test_mx_compiled.py`). Tensors are handed on as they come: no framework is
imported.

Legend: R padded rows in expert order, cut by `cu_rows`; other letters as in `engine.interface`. A
matrix is a pair here: uint8 codes, and its scales for the contraction of that product.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...enums import ActivationParameters, ActivationType
from .cute_kernel import CuteKernel
from .quack_gemm import Launch, Stored, Variants, parameters_text

_HERE = Path(__file__).parent
_BUILDER = f"{__package__}.mx_build"
_SOURCES = tuple(_HERE / name for name in ("mx_build.py", "quack_build.py", "quack_epilogues.py"))
# quack's own default of this class: two blocks multiply a tile together. Without hardware no other
# one has a measured time.
TILE, CLUSTER, SWIZZLE = (256, 256), (2, 1), 8

Pair = tuple[Any, Any]


@dataclass(frozen=True)
class MxShape:
    """What the variants of one expert MLP are compiled for; static over a training run.

    The activation is a gated one. parameters: those of it that the layer sets. capped: a launch
    takes the multiprocessors that it is given and no more; otherwise the hardware hands out tiles,
    which knows no such number. arch: "sm_100a".
    """

    activation: ActivationType
    parameters: ActivationParameters = ()
    capped: bool = False
    arch: str = field(kw_only=True)


def up_kernel(shape: MxShape, *, store_z: bool) -> CuteKernel:
    """`z = x w1^T` in bf16 (kept when `store_z`), `y1 = act(z)` quantised per row and 32."""
    return _kernel("up", "compile_up", shape, {**_activation(shape), "store_z": store_z})


def down_kernel(shape: MxShape) -> CuteKernel:
    """`y2 = y1 w2^T`."""
    return _kernel("down", "compile_down", shape, {"transpose": False})


def dgated_kernel(shape: MxShape) -> CuteKernel:
    """`dy1 = dout w2`, then dz, probability-weighted y1 and partial row sums of `dy1 * y1`."""
    return _kernel("dgated", "compile_dgated", shape, _activation(shape))


def dgrad_kernel(shape: MxShape) -> CuteKernel:
    """`dx_rows = dz w1`."""
    return _kernel("dgrad", "compile_down", shape, {"transpose": True})


def wgrad_kernel(shape: MxShape, *, halves: bool = False) -> CuteKernel:
    """`dw[e] += left^T right` over the rows of e; see `Stored.HALVES`."""
    return _kernel("wgrad", "compile_wgrad", shape, {"halves": halves})


def all_kernels(shape: MxShape, *, fp8_wgrad: bool = True) -> tuple[CuteKernel, ...]:
    """Every distinct variant that training and inference of `shape` launch."""
    kernels = (
        up_kernel(shape, store_z=True),
        up_kernel(shape, store_z=False),
        down_kernel(shape),
        dgated_kernel(shape),
        dgrad_kernel(shape),
    )
    return (*kernels, *wgrad_kernels(shape)) if fp8_wgrad else kernels


def wgrad_kernels(shape: MxShape) -> tuple[CuteKernel, ...]:
    """The kernels of weight gradients, however their memory lies."""
    return wgrad_kernel(shape), wgrad_kernel(shape, halves=True)


def _activation(shape: MxShape) -> dict[str, Any]:
    text = parameters_text(shape.activation, shape.parameters)
    return {"activation": shape.activation.value, "parameters": text}


def _kernel(name: str, builder: str, shape: MxShape, special: dict[str, Any]) -> CuteKernel:
    statics = {**special, "tile": TILE, "cluster": CLUSTER, "swizzle": SWIZZLE}
    statics["clc"] = not shape.capped
    return CuteKernel.make(
        f"mxfp8_{name}", f"{_BUILDER}:{builder}", statics, *_SOURCES, arch=shape.arch
    )


class MxGemms:
    """The loaded variants of one shape on one device. Every method launches on the current stream
    and waits for nothing; errors as those of `Variants`.
    """

    def __init__(self, shape: MxShape, multiprocessors: int) -> None:
        """For that many multiprocessors, of which a cluster takes two."""
        self._clusters = multiprocessors // CLUSTER[0]
        self._variants = Variants(
            {
                "up": lambda: up_kernel(shape, store_z=True),
                "up_only": lambda: up_kernel(shape, store_z=False),
                "down": lambda: down_kernel(shape),
                "dgated": lambda: dgated_kernel(shape),
                "dgrad": lambda: dgrad_kernel(shape),
                "wgrad": lambda: wgrad_kernel(shape),
                "wgrad halves": lambda: wgrad_kernel(shape, halves=True),
            }
        )

    def dprob_tiles(self, intermediate: int) -> int:
        """Columns of the partial sums of dprobs."""
        return -(-intermediate // TILE[1])

    def up(self, x: Pair, w1: Pair, z: Any | None, y1: Pair, cu_rows: Any) -> None:
        """x `[R, H]`, w1 `[E, N1, H]` -> z bf16 `[R, N1]` unless None, y1 `[R, I]` with its scales."""
        launch = self._variants["up" if z is not None else "up_only"]
        launch(*x, *w1, z, *y1, cu_rows, self._clusters)

    def up_again(self, x: Pair, w1: Pair, z: Any, cu_rows: Any) -> None:
        """The z that `up` would have written: the sums of its kernel, whose tiling this one has."""
        self._variants["down"](*x, *w1, z, cu_rows, self._clusters)

    def down(self, y1: Pair, w2: Pair, y2: Any, cu_rows: Any) -> None:
        """y1 `[R, I]`, w2 `[E, H, I]` -> y2 bf16 `[R, H]`."""
        self._variants["down"](*y1, *w2, y2, cu_rows, self._clusters)

    def dgated(
        self,
        dout: Pair,
        w2: Pair,
        dz: Any,
        z: Any,
        y1s: Any,
        prob: Any,
        partials: Any,
        cu_rows: Any,
    ) -> None:
        """dout `[R, H]`, w2 with the scales of a contraction over H, z, prob fp32 `[R]` -> dz bf16
        `[R, N1]`, y1s bf16 `[R, I]`, partials fp32 `[R, dprob_tiles]`.
        """
        self._variants["dgated"](*dout, *w2, dz, z, y1s, prob, partials, cu_rows, self._clusters)

    def dgrad(self, dz: Pair, w1: Pair, dx_rows: Any, cu_rows: Any) -> None:
        """dz `[R, N1]`, w1 with the scales of a contraction over N1 -> dx_rows bf16 `[R, H]`."""
        self._variants["dgrad"](*dz, *w1, dx_rows, cu_rows, self._clusters)

    def load_wgrad(self, stored: Stored) -> None:
        """Load the kernel of gradients that lie so, or raise before anything is added."""
        self._wgrad(stored)

    def wgrad_down(
        self, dout: Pair, y1s: Pair, dw2: Any, cu_rows: Any, stored: Stored = Stored.INNER
    ) -> None:
        """dout `[R, H]`, y1s `[R, I]`, with the scales of a contraction over the rows -> added to dw2
        fp32 `[E, H, I]`, or `[E, I, H]`: `stored`.
        """
        left, right = (dout, y1s) if stored is Stored.INNER else (y1s, dout)
        self._wgrad(stored)(*left, *right, dw2, cu_rows, self._clusters)

    def wgrad_up(
        self, x: Pair, dz: Pair, dw1: Any, cu_rows: Any, stored: Stored = Stored.HIDDEN
    ) -> None:
        """x `[R, H]`, dz `[R, N1]` -> added to dw1 fp32 `[E, N1, H]`, or `[E, H, N1]`: `stored`."""
        # Where memory is contiguous along N1, the operands change places, and so do the result's
        # axes.
        left, right = (x, dz) if stored is Stored.INNER else (dz, x)
        self._wgrad(stored)(*left, *right, dw1, cu_rows, self._clusters)

    def _wgrad(self, stored: Stored) -> Launch:
        return self._variants["wgrad halves" if stored is Stored.HALVES else "wgrad"]


@lru_cache(maxsize=64)
def mx_gemms(shape: MxShape, multiprocessors: int) -> MxGemms:
    """The process's GEMMs of a shape."""
    return MxGemms(shape, multiprocessors)
