"""Launches of the Triton kernels, and the same launches as compiles ahead of time.

`Calls` composes the arguments of every kernel once, for both: what is compiled ahead and what a
step launches cannot differ. Tensors are handed on as they come; they are contiguous.

Legend: R padded rows in expert order; other letters as in `engine.interface`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import triton.language as tl
from triton import knobs
from triton.runtime.jit import MockTensor

from ...enums import ActivationParameters, ActivationType, is_glu
from . import gemms, rows
from .tilings import Tiling
from .variants import ExpertShape, parameter_values, tiling_of

IS_INTERPRETED = bool(knobs.runtime.interpret)
EXPERTS_AT_ONCE = 512  # ends of experts that a program of `index_rows` compares at a time
SUM_ROWS, SUM_COLUMNS = 32, 128  # of a program's tile in the kernels that sum
ADDRESSES = 8  # arguments of one launch of `write_addresses`
# Products over rows in expert order. Two of them are one kernel: no epilogue tells them apart.
_GEMMS = {
    "up": gemms.up,
    "down": gemms.rows_product,
    "dgrad": gemms.rows_product,
    "dgated": gemms.dgated,
}

Arguments = tuple[Any, ...]


class Call(NamedTuple):
    """A kernel, its arguments and its options; `programs`: how many it is launched with."""

    kernel: Any
    arguments: Arguments
    options: Mapping[str, Any]
    programs: tuple[int, ...]

    def launch(self) -> None:
        """Launch it on the current stream of the framework."""
        self.kernel[self.programs](*self.arguments, **self.options)

    def load(self) -> None:
        """Compile and load it, and launch nothing; errors as `CompileCache.build`."""
        if not IS_INTERPRETED:
            compiled = self.kernel.warmup(*self.arguments, grid=self.programs, **self.options)
            compiled._init_handles()  # else the driver is given the code at the first launch


class Rows(NamedTuple):
    """What the GEMMs know of the rows: see `rows.index_rows`. int32 `[R]`, `[R / 128]`, `[E + 1]`;
    the metadata's `padded_offsets` int64 `[E + 1]`; how many rows and experts there are.
    """

    index: Any
    tile_expert: Any
    cu_rows: Any
    padded_offsets: Any
    num_rows: int
    num_experts: int


class GradientOutput(NamedTuple):
    """Where a weight gradient `[E, part, m, n]` lies, in elements.

    tensor: all of it, or, where `addresses` int64 `[E]` says where each matrix begins, any of them.
    step_m, pitch: where n is contiguous, step_m is 0 and rows m are `pitch` apart. Where m is, rows
    are step_m apart (1, or 2 with gate and up in turns), and columns n `pitch`.
    adds: it is added to, else written.
    """

    tensor: Any
    stride_expert: int
    stride_part: int
    pitch: int
    step_m: int
    element_bytes: int = 4
    addresses: Any = None
    adds: bool = True

    def in_units(self) -> tuple[int, int]:
        """`stride_part` and `pitch` as the kernel takes them: what is a multiple of 16 bytes is
        counted so, and the compiler knows it.
        """
        unit = 16 // self.element_bytes
        part = self.stride_part if self.step_m == 2 else self.stride_part // unit
        return part, self.pitch // unit


@dataclass(frozen=True)
class Calls:
    """The calls of one model.

    Attributes:
        shape: of its experts.
        tilings: of products, in place of the table's, for measurements.
        lent: multiprocessors that the GEMMs may take; 0: all.
    """

    shape: ExpertShape
    lent: int = 0
    tilings: Mapping[str, Tiling] = field(default_factory=dict)

    def tiling(self, product: str) -> Tiling:
        """The tiles of a product."""
        return self.tilings.get(product) or tiling_of(product, self.shape)

    @property
    def dprob_tiles(self) -> int:
        """Partial sums of a row's dprob."""
        return self.tiling("dgated").tiles(self.shape.intermediate)

    def up(self, x: Any, w1: Any, bias: Any, z: Any, y1: Any, of: Rows) -> Call:
        """x `[T, H]`, w1 `[E, N1, H]` -> z `[R, N1]`, y1 `[R, I]`, each unless None."""
        width = self.shape.n1
        constants = {"H": self.shape.hidden, "WIDTH": width, **self._activation()}
        arguments = (x, w1, bias, z, y1, of.index, of.tile_expert, of.cu_rows, of.num_experts)
        return self._gemm("up", arguments, constants, width, of)

    def down(self, y1: Any, w2: Any, bias: Any, y2: Any, of: Rows) -> Call:
        """y1 `[R, I]`, w2 `[E, H, I]` -> y2 `[R, H]`."""
        depth, width = self.shape.intermediate, self.shape.hidden
        constants = {"DEPTH": depth, "WIDTH": width, "PARTS": 1, "TRANSPOSED": False}
        arguments = (y1, w2, bias, y2, of.tile_expert, of.cu_rows, of.num_experts)
        return self._gemm("down", arguments, constants, width, of)

    def dgrad(self, dz: Any, w1: Any, dx_rows: Any, of: Rows) -> Call:
        """dz `[R, parts, I]`, w1 `[E, N1, H]` -> dx_rows `[R, H]`."""
        depth, width = self.shape.intermediate, self.shape.hidden
        constants = {"DEPTH": depth, "WIDTH": width, "PARTS": self.shape.parts, "TRANSPOSED": True}
        arguments = (dz, w1, None, dx_rows, of.tile_expert, of.cu_rows, of.num_experts)
        return self._gemm("dgrad", arguments, constants, width, of)

    def dgated(
        self, dout: Any, w2: Any, z: Any, dz: Any, y1s: Any, prob: Any, partials: Any, of: Rows
    ) -> Call:
        """dout `[T, H]`, w2, z, prob fp32 `[R]` -> dz `[R, parts, I]`, y1s `[R, I]`, partials fp32
        `[dprob_tiles, R]`.
        """
        width = self.shape.intermediate
        constants = {"H": self.shape.hidden, "I": width, **self._activation()}
        tensors = (dout, w2, z, dz, y1s, prob, partials, of.index, of.tile_expert, of.cu_rows)
        arguments = (*tensors, of.num_experts, of.num_rows)
        return self._gemm("dgated", arguments, constants, width, of)

    def wgrad_up(self, x: Any, dz: Any, place: GradientOutput, of: Rows) -> Call:
        """x `[T, H]`, dz `[R, parts, I]` -> dw1 `[E, parts, I, H]`, in any layout."""
        sizes = {"HEIGHT": self.shape.intermediate, "WIDTH": self.shape.hidden}
        constants = {**sizes, "PARTS": self.shape.parts, "LEFT_GATHERED": False}
        return self._wgrad("wgrad_up", dz, x, place, of, constants)

    def wgrad_down(self, dout: Any, y1s: Any, place: GradientOutput, of: Rows) -> Call:
        """dout `[T, H]`, y1s `[R, I]` -> dw2 `[E, 1, H, I]`, in any layout."""
        sizes = {"HEIGHT": self.shape.hidden, "WIDTH": self.shape.intermediate}
        constants = {**sizes, "PARTS": 1, "LEFT_GATHERED": True}
        return self._wgrad("wgrad_down", dout, y1s, place, of, constants)

    def index_rows(self, row_token: Any, expert_counts: Any, of: Rows) -> Call:
        """The metadata's tensors -> those of `of`."""
        outputs = of.index, of.tile_expert, of.cu_rows
        arguments = (row_token, expert_counts, of.padded_offsets, *outputs)
        options = {"EXPERTS": EXPERTS_AT_ONCE, "ROWS": rows.TILE_ROWS, "num_warps": 4}
        programs = (max(1, _tiles(of.num_rows, rows.TILE_ROWS)),)
        sizes = (of.num_experts, of.num_rows)
        return Call(rows.index_rows, (*arguments, *sizes), options, programs)

    def row_sums(self, partials: Any, dout: Any, b2: Any, out: Any, of: Rows) -> Call:
        """partials fp32 `[dprob_tiles, R]` -> out fp32 `[R]`, plus `<dout, b2>` unless b2 is None."""
        options = {
            "WIDTH": self.shape.hidden,
            "ROWS": SUM_ROWS,
            "COLUMNS": SUM_COLUMNS,
            "TILE": rows.TILE_ROWS,
            "num_warps": 4,
        }
        tensors = (partials, dout, b2, of.index, of.tile_expert, of.cu_rows, out)
        sizes = (of.num_experts, of.num_rows, self.dprob_tiles)
        programs = (_tiles(of.num_rows, SUM_ROWS),)
        return Call(rows.row_sums, (*tensors, *sizes), options, programs)

    def column_sums(self, values: Any, weight: Any, out: Any, of: Rows) -> Call:
        """Sums over an expert's rows, added to out fp32: of dout weighted and gathered -> db2
        `[E, H]`; without a weight, of dz -> db1 `[E, N1]`, gate and up in turns.
        """
        gathered = weight is not None
        width = self.shape.hidden if gathered else self.shape.n1
        options = {
            "WIDTH": width,
            "PARTS": 1 if gathered else self.shape.parts,
            "GATHERED": gathered,
            "ROWS": SUM_ROWS,
            "COLUMNS": SUM_COLUMNS,
            "num_warps": 4,
        }
        programs = (_tiles(width, SUM_COLUMNS), of.num_experts)
        return Call(
            rows.column_sums, (values, of.index, weight, of.cu_rows, out), options, programs
        )

    def _activation(self) -> dict[str, Any]:
        first, second = parameter_values(self.shape)
        kind = self.shape.activation
        return {"KIND": kind.value, "P0": first, "P1": second, "GATED": is_glu(kind)}

    def _wgrad(
        self,
        product: str,
        left: Any,
        right: Any,
        place: GradientOutput,
        of: Rows,
        constants: dict[str, Any],
    ) -> Call:
        tiling = self.tiling(product)
        tabled = place.addresses is not None
        # Without a table that argument is not read. It has the same type, because another one
        # would be another variant.
        addresses = place.addresses if tabled else of.padded_offsets
        tensors = (left, right, of.index, of.cu_rows, place.tensor, addresses)
        sizes = (of.num_experts, int(tabled), int(place.adds))
        arguments = (*tensors, *sizes, place.stride_expert, *place.in_units())
        constants = {**constants, "STEP_M": place.step_m}
        if place.step_m == 2:
            # Elements that lie alone are stored alone, each with an address of its own.
            tiling = replace(tiling, chunks=4 * tiling.chunks)
        tiles = _tiles(constants["HEIGHT"], tiling.m) * tiling.tiles(constants["WIDTH"])
        programs = tiles * constants["PARTS"] * of.num_experts
        return self._call(gemms.wgrad, arguments, constants, tiling, programs)

    def _gemm(
        self, product: str, arguments: Arguments, constants: dict[str, Any], width: int, of: Rows
    ) -> Call:
        tiling = self.tiling(product)
        # As many programs as the rows that memory was made for have tiles. Fewer may be in use;
        # the device knows, and the programs behind them do nothing.
        tiles = _tiles(of.num_rows, tiling.m) * tiling.tiles(width)
        return self._call(_GEMMS[product], arguments, constants, tiling, tiles)

    def _call(
        self,
        kernel: Any,
        arguments: Arguments,
        constants: dict[str, Any],
        tiling: Tiling,
        programs: int,
    ) -> Call:
        options = {
            **constants,
            "M": tiling.m,
            "N": tiling.n,
            "K": tiling.k,
            "GROUP": tiling.group,
            "CHUNKS": tiling.chunks,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }
        if self.lent:
            programs = min(programs, self.lent * tiling.resident)
        return Call(kernel, arguments, options, (programs,))


def _tiles(size: int, tile: int) -> int:
    return -(-size // tile)


@lru_cache(maxsize=64)
def calls(shape: ExpertShape, lent: int) -> Calls:
    """The process's calls of a model."""
    return Calls(shape, lent)


def addresses_calls(out: Any, addresses: list[int]) -> list[Call]:
    """Addresses into out int64 `[E]`, by launches that a CUDA graph can capture."""
    found = []
    for first in range(0, len(addresses), ADDRESSES):
        given = addresses[first : first + ADDRESSES]
        given += [0] * (ADDRESSES - len(given))
        arguments = (out, first, len(addresses), *given)
        found.append(Call(rows.write_addresses, arguments, {"num_warps": 1}, (1,)))
    return found


# ---- ahead of time ----

_ROWS = 1 << 17  # of a call that is compiled and not launched; no key depends on it
_F32, _I32, _I64 = (MockTensor(dtype) for dtype in (tl.float32, tl.int32, tl.int64))
_SIXTEEN = {"bfloat16": MockTensor(tl.bfloat16), "float16": MockTensor(tl.float16)}
_GRADIENTS = {"float32": _F32, "bfloat16": _SIXTEEN["bfloat16"]}


def ahead(
    *,
    product: str,
    hidden: int,
    intermediate: int,
    activation: str,
    dtype: str,
    bias: bool,
    parameters: ActivationParameters,
    arch: str,
    tiling: Tiling | None = None,
    **choices: Any,
) -> Any:
    """The compile of one kernel: what `variants.variant` names.

    choices: `store_z`, `store_y1` of up; `gradient` (a dtype by name) and `step_m` (of `GradientOutput`) of
    wgrad; `gathered` of column_sums.
    """
    kind = ActivationType(activation)
    shape = ExpertShape(hidden, intermediate, kind, dtype, bias, parameters, arch=arch)
    made = Calls(shape, tilings={} if tiling is None else {product: tiling})
    call = _MOCKED[product](made, _SIXTEEN[dtype], _F32 if bias else None, **choices)
    return call.kernel.ahead(*call.arguments, arch=arch, **call.options)


_OF = Rows(_I32, _I32, _I32, _I64, _ROWS, 8)


def _mock_up(made: Calls, row: Any, bias: Any, store_z: bool, store_y1: bool) -> Call:
    z, y1 = (row if store else None for store in (store_z, store_y1))
    return made.up(row, row, bias, z, y1, _OF)


def _mock_wgrad(product: str) -> Callable[..., Call]:
    def mock(made: Calls, row: Any, bias: Any, gradient: str, step_m: int) -> Call:
        place = native_output(product, made, _GRADIENTS[gradient])._replace(step_m=step_m)
        call: Call = getattr(made, product)(row, row, place, _OF)
        return call

    return mock


def native_output(product: str, made: Calls, tensor: Any) -> GradientOutput:
    """The memory of an accumulator in the native layout: `[E, N1, H]` or `[E, H, I]`."""
    shape, turns = made.shape, made.shape.parts if product == "wgrad_up" else 1
    sizes = shape.hidden, shape.intermediate
    width, height = sizes if product == "wgrad_up" else sizes[::-1]
    return GradientOutput(tensor, turns * height * width, width, turns * width, 0)


_MOCKED: dict[str, Callable[..., Call]] = {
    "up": _mock_up,
    "down": lambda made, row, bias: made.down(row, row, bias, row, _OF),
    "dgrad": lambda made, row, bias: made.dgrad(row, row, row, _OF),
    "dgated": lambda made, row, bias: made.dgated(row, row, row, row, row, _F32, _F32, _OF),
    "wgrad_up": _mock_wgrad("wgrad_up"),
    "wgrad_down": _mock_wgrad("wgrad_down"),
    "index_rows": lambda made, row, bias: made.index_rows(_I32, _I32, _OF),
    "row_sums": lambda made, row, bias: made.row_sums(_F32, row, bias, _F32, _OF),
    "column_sums": lambda made, row, bias, gathered: made.column_sums(
        row, _F32 if gathered else None, _F32, _OF
    ),
    "write_addresses": lambda made, row, bias: addresses_calls(_I64, [2**40] * 8)[0],
}
