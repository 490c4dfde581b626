"""Which variants of the Triton kernels a model launches, as compile jobs; without Triton.

Keys hold sizes of the model and choices of tiles, never a number of tokens or rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...enums import ACTIVATIONS, is_glu
from ...jit.triton_variant import TritonVariant
from ..quack_gemm import MlpShape
from .tilings import Tiling, choose_tiling

_ENTRY = f"{__package__}.launches:ahead"
GRADIENT_DTYPES = ("float32", "bfloat16")


def parameter_values(shape: MlpShape) -> tuple[float, float]:
    """The parameters of the activation in the order of its record, zeros where it has fewer. An
    infinite one is 0 too, which is no bound.
    """
    values = ACTIVATIONS[shape.activation].values(shape.parameters).values()
    finite = [0.0 if value == float("inf") else value for value in values]
    first, second, *_ = *finite, 0.0, 0.0
    return first, second


def tiling_of(product: str, shape: MlpShape) -> Tiling:
    """The tiles that a product of this model is computed in."""
    # A column of the weight gradients is one of H or of I: dz is read gate first.
    width = {"wgrad_up": shape.hidden, "wgrad_down": shape.intermediate}.get(product)
    return choose_tiling(product, width or shape.width(product), shape.arch)


def variant(product: str, shape: MlpShape, **choices: Any) -> TritonVariant:
    """One kernel as a compile job; `choices` as `launches.ahead` takes them."""
    statics = {
        "product": product,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "activation": shape.activation.value,
        "dtype": shape.dtype,
        "bias": shape.bias,
        "parameters": shape.parameters,
        **choices,
    }
    return TritonVariant.make(f"triton_{product}", _ENTRY, statics, shape.arch)


def gemm_variants(shape: MlpShape, *, recompute_z: bool = False) -> Iterator[TritonVariant]:
    """The GEMMs that training and inference of `shape` launch."""
    yield variant("up", shape, store_z=True, store_y1=True)
    yield variant("up", shape, store_z=False, store_y1=True)
    if recompute_z:
        yield variant("up", shape, store_z=True, store_y1=False)
    yield variant("down", shape)
    yield variant("dgated", shape)
    yield variant("dgrad", shape)
    for product, step_m in wgrad_layouts(shape):
        for gradient in GRADIENT_DTYPES:
            yield variant(product, shape, gradient=gradient, step_m=step_m)


def wgrad_layouts(shape: MlpShape) -> Iterator[tuple[str, int]]:
    """The weight gradients, each in every way its columns or rows can be contiguous: see
    `launches.Place`.
    """
    yield from (("wgrad_down", 0), ("wgrad_down", 1), ("wgrad_up", 0), ("wgrad_up", 1))
    if is_glu(shape.activation):
        yield "wgrad_up", 2


def row_variants(shape: MlpShape) -> Iterator[TritonVariant]:
    """The row kernels that training and inference of `shape` launch."""
    yield variant("index_rows", shape)
    yield variant("row_sums", shape)
    yield variant("write_addresses", shape)
    if shape.bias:
        yield variant("column_sums", shape, gathered=True)
        yield variant("column_sums", shape, gathered=False)


def all_variants(shape: MlpShape, *, recompute_z: bool = False) -> tuple[TritonVariant, ...]:
    """Every kernel of the Triton engine for `shape`."""
    return (*gemm_variants(shape, recompute_z=recompute_z), *row_variants(shape))
