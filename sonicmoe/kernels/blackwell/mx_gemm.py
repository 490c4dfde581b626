"""The MXFP8 grouped GEMMs of an expert MLP on compute capability 10.0 and 10.3: quack-kernels'
block-scaled class, compiled as the BF16 GEMMs are (`quack_gemm`), called with what.

Never run on such a GPU by this project: the kernels are compiled, their spills, loads and barriers
checked (`tests/kernels/test_mx_compiled.py`). Tensors are handed on as they come: no framework is
imported.

Legend: R padded rows in expert order, cut by `cu_rows`; other letters as in `engine.interface`. A
matrix is a pair here: uint8 codes, and its scales for the contraction of that product.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...enums import ActivationParameters, ActivationType
from .cute_kernel import CuteKernel
from .quack_gemm import Gemms, parameters_text

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


def variants(shape: MxShape) -> dict[Hashable, CuteKernel]:
    """All variants of a shape: "up", "up_only" (without z), "down", which restores z too, because it has the
    sums and the tiling of up, "dgated", "dgrad", "wgrad" and "wgrad halves".
    """
    return {
        "up": up_kernel(shape, store_z=True),
        "up_only": up_kernel(shape, store_z=False),
        "down": down_kernel(shape),
        "dgated": dgated_kernel(shape),
        "dgrad": dgrad_kernel(shape),
        "wgrad": wgrad_kernel(shape),
        "wgrad halves": wgrad_kernel(shape, halves=True),
    }


def all_kernels(shape: MxShape, *, fp8_wgrad: bool = True) -> tuple[CuteKernel, ...]:
    """Those that training and inference of `shape` launch."""
    found = variants(shape).items()
    return tuple(k for name, k in found if fp8_wgrad or not str(name).startswith("wgrad"))


def _activation(shape: MxShape) -> dict[str, Any]:
    text = parameters_text(shape.activation, shape.parameters)
    return {"activation": shape.activation.value, "parameters": text}


def _kernel(name: str, builder: str, shape: MxShape, special: dict[str, Any]) -> CuteKernel:
    statics = {**special, "tile": TILE, "cluster": CLUSTER, "swizzle": SWIZZLE}
    statics["clc"] = not shape.capped
    return CuteKernel.make(
        f"mxfp8_{name}", f"{_BUILDER}:{builder}", statics, *_SOURCES, arch=shape.arch
    )


@lru_cache(maxsize=64)
def mx_gemms(shape: MxShape, multiprocessors: int) -> Gemms:
    """The process's `variants` of a shape, for so many multiprocessors, of which a cluster takes two."""
    clusters = multiprocessors // CLUSTER[0]
    return Gemms({name: (kernel, clusters) for name, kernel in variants(shape).items()})


def dprob_tiles(intermediate: int) -> int:
    """Columns of the partial sums of dprobs."""
    return -(-intermediate // TILE[1])
