"""The Hopper engine's launches: each pass is one call of native code, which names its stages to
whoever listens.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..diagnostics.stages import is_heard, is_observed, stage, tap
from ..enums import ActivationType
from ..interop import current_stream, data_ptr, device_name, device_of, empty, numel
from ..kernels import aggregate_source, routing_metadata_source
from ..kernels.cuda_quantize import quantize_source
from ..kernels.cuda_wgrad import wgrad_operands_source
from ..kernels.sm90 import (
    fp8_dgated_source,
    fp8_grouped_gemm_source,
    fp8_wgrad_source,
    passes_source,
)
from ..quant.format import BlockScaledTensor, Code, Orientation
from ..quant.recipes import BlockShape, iso, rows
from ..routing.backends import arch_of

Tensor = torch.Tensor
BY_ROWS, BY_BLOCKS = rows(128), iso(128)
# What the passes show in codes: the block of their scales, the code, and whether they are
# transposed. The rest is plain bf16.
_QUANTISED: dict[str, tuple[BlockShape, Code, Orientation]] = {
    "x_fp8": (BY_ROWS, Code.E4M3, Orientation.ROWS),
    "z": (BY_ROWS, Code.INT8, Orientation.ROWS),
    "y1": (BY_ROWS, Code.E4M3, Orientation.ROWS),
    "dout_fp8": (BY_ROWS, Code.E4M3, Orientation.ROWS),
    "dz_fp8": (BY_BLOCKS, Code.E4M3, Orientation.ROWS),
    "wgrad_x": (BY_BLOCKS, Code.E4M3, Orientation.COLUMNS),
    "wgrad_dout": (BY_BLOCKS, Code.E4M3, Orientation.COLUMNS),
}
_BYTES = {torch.uint8: 1, torch.bfloat16: 2, torch.float32: 4}


@dataclass(frozen=True)
class Passes:
    """Native functions, documented in `kernels/sm90/passes.cu`: `sizes` has those that say how
    large a scratch must be. The numbers of the activations are those that the modules of the up
    projection and of dgated were built with.
    """

    sizes: Any
    forward: Any
    dgated: Any
    dgrad: Any
    wgrad: Any
    wgrad_of: Any
    up_activations: Mapping[ActivationType, int]
    dgated_activations: Mapping[ActivationType, int]


@functools.lru_cache(maxsize=64)
def passes_on(device: str) -> Passes:
    """The compiled passes over the compiled kernels of a device; errors as `CudaSource.load`."""
    arch = arch_of(device)
    routing, aggregate = routing_metadata_source(arch).load(), aggregate_source(arch).load()
    quantize, operands = quantize_source(arch).load(), wgrad_operands_source(arch).load()
    gemms, dgated, wgrad = (
        s(arch).load() for s in (fp8_grouped_gemm_source, fp8_dgated_source, fp8_wgrad_source)
    )
    native = passes_source(arch).load()
    return make_passes(
        native,
        activations=(gemms.activation_names(), dgated.activation_names()),
        quantize_rows=quantize.quantize_rows,
        gather_gated_gemm=gemms.gather_gated_gemm,
        grouped_gemm=gemms.grouped_gemm,
        aggregate_rows=aggregate.aggregate_rows,
        gather_dgated_gemm=dgated.gather_dgated_gemm,
        sum_or_zero=routing.sum_or_zero,
        gather_transpose_quantize=operands.gather_transpose_quantize,
        gather_transpose_quantize_pair=operands.gather_transpose_quantize_pair,
        grouped_wgrad=wgrad.grouped_wgrad,
    )


def make_passes(
    native: Any, activations: tuple[Iterable[Any], Iterable[Any]], **kernels: Any
) -> Passes:
    """Passes of the module `native` that launch these kernels, named as their modules export them;
    `activations`: what the modules of the up projection and of dgated export.
    """
    k = kernels
    up_activations, dgated_activations = map(_numbers, activations)
    return Passes(
        sizes=native,
        forward=native.make_forward(
            k["quantize_rows"], k["gather_gated_gemm"], k["grouped_gemm"], k["aggregate_rows"]
        ),
        dgated=native.make_dgated(k["quantize_rows"], k["gather_dgated_gemm"], k["sum_or_zero"]),
        dgrad=native.make_dgrad(k["grouped_gemm"], k["aggregate_rows"]),
        wgrad=native.make_wgrad(k["gather_transpose_quantize_pair"], k["grouped_wgrad"]),
        wgrad_of=native.make_wgrad_of(k["gather_transpose_quantize"], k["grouped_wgrad"]),
        up_activations=up_activations,
        dgated_activations=dgated_activations,
    )


def _numbers(names: Iterable[Any]) -> dict[ActivationType, int]:
    """The number of each activation in a module that exports these names."""
    return {ActivationType(str(name)): number for number, name in enumerate(names)}


def scratch(size: int, device: Any) -> Tensor:
    """Unwritten bytes on a device that `device_of` gave."""
    return empty((size,), torch.uint8, device)  # type: ignore[no-any-return]


def launch(native_pass: Any, *arguments: Any, scratches: Sequence[Tensor | None]) -> None:
    """Call a pass on the current stream; `scratches`: the arguments in which what it shows lies,
    the scratch first.
    """
    stream = current_stream(scratches[0])
    if not is_observed():
        native_pass(*arguments, None, stream)
        return
    observer = _Observer(scratches)
    try:
        native_pass(*arguments, observer, stream)
    except Exception:
        if observer.failure is not None:  # on its way through native code it was copied
            raise observer.failure from None
        raise
    finally:
        observer.close()


class _Observer:
    """What a pass calls: opens the ranges of its stages and shows what it has written, which a
    listener may replace.
    """

    def __init__(self, scratches: Sequence[Tensor | None]) -> None:
        self._scratches = [memory for memory in scratches if memory is not None]
        self._range: AbstractContextManager[Any] | None = None
        self.failure: Exception | None = None

    def __call__(self, event: str, name: str, *where: int) -> None:
        try:
            if event == "begin":
                self._range = stage(name)
                self._range.__enter__()
            elif event == "end":
                self.close()
            elif is_heard():
                self._show(name, *where)
        except Exception as error:
            self.failure = error
            raise

    def close(self) -> None:
        """Leave the open range, if there is one."""
        opened, self._range = self._range, None
        if opened is not None:
            opened.__exit__(None, None, None)

    def _show(self, name: str, *where: int) -> None:
        if name not in _QUANTISED:
            values = self._view(torch.bfloat16, *where)
            shown = tap(name, values)
            if shown is not values:
                values.copy_(shown)
            return
        block, code, orientation = _QUANTISED[name]
        codes, scale_inv = (
            self._view(torch.uint8, *where[:3]),
            self._view(torch.float32, *where[3:]),
        )
        quantised = BlockScaledTensor(codes.view(code.dtype), scale_inv, block, code, orientation)
        replaced = tap(name, quantised)
        if replaced is not quantised:
            codes.copy_(replaced.bytes)
            scale_inv.copy_(replaced.scale_inv)

    def _view(self, dtype: torch.dtype, address: int, n_rows: int, n_columns: int) -> Tensor:
        """The matrix at an address inside one of the scratches."""
        count, width = n_rows * n_columns, _BYTES[dtype]
        if count == 0:
            return empty((n_rows, n_columns), dtype, device_of(self._scratches[0]))
        for memory in self._scratches:
            offset = address - data_ptr(memory)
            if 0 <= offset <= numel(memory) * _BYTES[memory.dtype] - count * width:
                first = (
                    offset // width
                )  # of the retyped bytes: Paddle retypes a slice at a wrong address
                return (
                    memory.reshape([numel(memory)])
                    .view(dtype)[first : first + count]
                    .reshape([n_rows, n_columns])
                )
        raise AssertionError(
            f"a pass showed {n_rows} x {n_columns} values outside its scratch on {device_name(memory)}"
        )
