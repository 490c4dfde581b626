"""Which variants of the Triton kernels a model launches, as compile jobs; without Triton.

Keys hold sizes of the model and choices of tiles, never a number of tokens or rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...enums import ACTIVATIONS, ActivationParameters, ActivationType, is_glu
from ...jit.triton_variant import TritonVariant
from .tilings import Tiling, choose_tiling

_ENTRY = f"{__package__}.launches:ahead"
GRADIENT_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ExpertShape:
    """What the variants of one expert MLP are compiled for; static over a training run.

    dtype: "bfloat16" or "float16". bias: whether z and y2 get one. parameters: those of the
    activation that the layer sets; they are constants of the compiled code. arch: "sm_80".
    """

    hidden: int
    intermediate: int
    activation: ActivationType
    dtype: str = "bfloat16"
    bias: bool = False
    parameters: ActivationParameters = ()
    arch: str = field(kw_only=True)

    @property
    def parts(self) -> int:
        """Gate and up, or one."""
        return 2 if is_glu(self.activation) else 1

    @property
    def n1(self) -> int:
        return self.intermediate * self.parts

    def width(self, product: str) -> int:
        """Columns of a product's result, as its tiles cut them."""
        if product == "up":
            return self.n1
        return self.intermediate if product in ("dgated", "wgrad_down") else self.hidden


def parameter_values(shape: ExpertShape) -> tuple[float, float]:
    """The parameters of the activation in the order of its record, zeros where it has fewer. An
    infinite one is 0 too, which is no bound.
    """
    values = ACTIVATIONS[shape.activation].values(shape.parameters).values()
    finite = [0.0 if value == float("inf") else value for value in values]
    first, second, *_ = *finite, 0.0, 0.0
    return first, second


def tiling_of(product: str, shape: ExpertShape) -> Tiling:
    """The tiles that a product of this model is computed in."""
    return choose_tiling(product, shape.width(product), shape.arch)


def variant(product: str, shape: ExpertShape, **choices: Any) -> TritonVariant:
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


def gemm_variants(shape: ExpertShape, *, recompute_z: bool = False) -> Iterator[TritonVariant]:
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


def wgrad_layouts(shape: ExpertShape) -> Iterator[tuple[str, int]]:
    """The weight gradients, each in every way its columns or rows can be contiguous: see
    `launches.GradientOutput`.
    """
    yield from (("wgrad_down", 0), ("wgrad_down", 1), ("wgrad_up", 0), ("wgrad_up", 1))
    if is_glu(shape.activation):
        yield "wgrad_up", 2


def row_variants(shape: ExpertShape) -> Iterator[TritonVariant]:
    """The row kernels that training and inference of `shape` launch."""
    yield variant("index_rows", shape)
    yield variant("row_sums", shape)
    yield variant("write_addresses", shape)
    if shape.bias:
        yield variant("column_sums", shape, gathered=True)
        yield variant("column_sums", shape, gathered=False)


def all_variants(shape: ExpertShape, *, recompute_z: bool = False) -> tuple[TritonVariant, ...]:
    """Every kernel of the Triton engine for `shape`."""
    return (*gemm_variants(shape, recompute_z=recompute_z), *row_variants(shape))
