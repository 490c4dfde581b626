"""DeepGEMM's six bare grouped FP8 GEMMs of one layer, for `deepgemm_bench.py`.

They are the products of a layer's forward and backward and nothing else: no gather, activation,
quantisation, routing or aggregation. So they bound what those cost an engine that does all of it.
The operands are quantised once, before anything is timed.

Legend: R rows, sorted by expert, each expert's padded to whole blocks; E experts. "Contiguous"
operands are `[R, width]` with one scale per row and 128 columns; weights are `[E, N, K]` with one
per 128 x 128; operands of a weight gradient lie expert by expert as `[width, rows]`, with one scale
per column of `[R, width]` and 128 rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import click
import torch

from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.workload import ROTATION_BYTES
from sonicmoe.observe import stage
from sonicmoe.quant.recipes import columns, iso, rows
from sonicmoe.quant.reference import quantize, transpose_storage

Tensor = torch.Tensor
Scaled = tuple[Tensor, Tensor]  # codes, scales

BLOCK = 128  # of its scales, and of its rows per expert
# bf16 outputs round to 2^-9 of a value, and Hopper's tensor cores sum FP8 products with 14 bits.
# Scales of another layout are wrong by far more.
TOLERANCE = 0.02
CHECKED_ROWS = 64


@dataclass(frozen=True)
class Gemm:
    """One product, named like our engines' stage. error: runs it once and returns the relative
    error of a sample of its output.
    """

    stage: str
    launch: Callable[[], None]
    error: Callable[[], float]

    def run(self) -> None:
        """Issue it; waits for nothing."""
        with stage(self.stage):
            self.launch()


class SixGemms:
    """The products on rotating operands, with the methods that `runner.time_all` asks for."""

    def __init__(
        self, library: Any, shape: Shape, counts: Sequence[Sequence[int]], device: str
    ) -> None:
        """Quantise all operands, and compile and check every product. counts: rows of each expert, of
        one batch after another.
        """
        torch.manual_seed(0)
        sizes = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
        weights = [_weight(shape.experts, *size, device) for size in sizes]
        # Both forms of x, dout (H), y (I) and dz (2 I); sets that exceed the L2 cache twice.
        nbytes = 2 * shape.rows * (2 * shape.hidden + 3 * shape.intermediate)
        used = counts[: 1 + ROTATION_BYTES // nbytes]
        self._sets = [
            _products(library, shape, _Layout(each, device), *weights[0], *weights[1])
            for each in used
        ]
        for gemm in (gemm for gemms in self._sets for gemm in gemms):
            error = gemm.error()
            if not error <= TOLERANCE:  # also where it is NaN
                words = f"{gemm.stage} is off by {error:.2g} of its norm; needed: {TOLERANCE}"
                raise click.ClickException(f"{words}. Its layouts may not be those of DeepGEMM 2.6")

    def phases(self, number: int) -> Sequence[tuple[str, Callable[[], None]]]:
        """Forward and backward of call `number`, in order of time."""
        gemms = self._sets[number % len(self._sets)]

        def run(some: Sequence[Gemm]) -> None:
            for gemm in some:
                gemm.run()

        return ("forward", lambda: run(gemms[:2])), ("backward", lambda: run(gemms[2:]))

    def steps(self, layers: int) -> PeerStack:
        """A step of several layers, as our engines have it in the steady state."""
        return PeerStack(self, layers)


class PeerStack:
    """Forwards of several layers, then their backwards."""

    def __init__(self, six: SixGemms, layers: int) -> None:
        """Nothing runs yet."""
        self._six, self.layers = six, layers

    def run(self) -> None:
        """One step, issued; waits for nothing."""
        phases = [self._six.phases(number) for number in range(self.layers)]
        for (_, forward), _ in phases:
            forward()
        for _, (_, backward) in reversed(phases):
            backward()


class _Layout:
    """Where each expert's rows lie: padded to whole blocks, one expert behind the other."""

    def __init__(self, counts: Sequence[int], device: str) -> None:
        self.device = device
        self.padded = [-(-count // BLOCK) * BLOCK for count in counts]
        # A wrong offset shows first in the last expert that has rows.
        self.last = max(expert for expert, count in enumerate(counts) if count)
        self.checked = min(counts[self.last], CHECKED_ROWS)
        self.start, self.rows = sum(self.padded[: self.last]), sum(self.padded)
        owners = torch.full((self.rows,), -1, dtype=torch.int32)  # -1: padding
        first = 0
        for expert, (count, padded) in enumerate(zip(counts, self.padded, strict=True)):
            owners[first : first + count] = expert
            first += padded
        self.owners = owners.to(device)
        self.sizes = torch.tensor(self.padded, dtype=torch.int32, device=device)


def _products(
    library: Any, shape: Shape, layout: _Layout, up: Scaled, up_transposed: Scaled, down: Scaled,
    down_transposed: Scaled,
) -> list[Gemm]:  # fmt: skip
    """In the order of a layer's forward and backward."""
    hidden, inner = shape.hidden, shape.intermediate
    x, y, dout, dz = (_operand(layout, width) for width in (hidden, inner, hidden, 2 * inner))

    def of_rows(name: str, a: Scaled, b: Scaled) -> Gemm:
        return _row_gemm(library.m_grouped_fp8_gemm_nt_contiguous, name, layout, a, b)

    def of_weights(name: str, a: Scaled, b: Scaled) -> Gemm:
        return _weight_gemm(library.k_grouped_fp8_gemm_nt_contiguous, name, layout, a, b)

    return [
        of_rows("up", x[0], up),
        of_rows("down", y[0], down),
        of_rows("dgated", dout[0], down_transposed),
        of_rows("dx_gemm", dz[0], up_transposed),
        of_weights("dw2", dout[1], y[1]),
        of_weights("dw1", dz[1], x[1]),
    ]


def _row_gemm(
    function: Callable[..., Any], name: str, layout: _Layout, a: Scaled, b: Scaled
) -> Gemm:
    """`d[r] = a[r] @ b[owner of r].T` in bf16."""
    d = torch.empty((layout.rows, b[0].shape[1]), dtype=torch.bfloat16, device=layout.device)

    def launch() -> None:
        function(a, b, d, layout.owners)

    def error() -> float:
        d.fill_(float("nan"))
        launch()
        sample, expert = slice(layout.start, layout.start + layout.checked), layout.last
        blocks = b[1][expert].repeat_interleave(BLOCK, 0)
        wanted = _values(a[0][sample], a[1][sample]) @ _values(b[0][expert], blocks).T
        return _relative_error(d[sample], wanted)

    return Gemm(name, launch, error)


def _weight_gemm(
    function: Callable[..., Any], name: str, layout: _Layout, a: Scaled, b: Scaled
) -> Gemm:
    """`d[e] += a[rows of e].T @ b[rows of e]` in fp32."""
    sizes = len(layout.padded), a[1].shape[0], b[1].shape[0]
    d = torch.zeros(sizes, device=layout.device)

    def launch() -> None:
        # Positions, because the fifth argument has had two names.
        function(a, b, d, layout.padded, layout.sizes, d)

    def error() -> float:
        d.zero_()
        launch()
        left, right = (_of_last(each, layout) for each in (a, b))
        return _relative_error(d[layout.last, :CHECKED_ROWS], left[:CHECKED_ROWS] @ right.T)

    return Gemm(name, launch, error)


def _operand(layout: _Layout, width: int) -> tuple[Scaled, Scaled]:
    """Random normal rows with zeros as padding, as a contiguous operand and as that of a weight
    gradient. All scales are transposed in memory, as its kernels read them: otherwise it would copy
    them in every call.
    """
    values = torch.randn((layout.rows, width), device=layout.device)
    values = (values * (layout.owners >= 0).unsqueeze(1)).to(torch.bfloat16)
    by_row, by_column = quantize(values, rows(BLOCK)), quantize(values, columns(BLOCK))
    # Of every expert `[width, rows]`, one behind the other; moved as bytes, because few operations
    # know FP8.
    parts = by_column.codes.view(torch.uint8).split(layout.padded)
    turned = torch.cat([part.T.reshape(-1) for part in parts]).view(by_column.codes.dtype)
    return (
        (by_row.codes, _columns_first(by_row.scale_inv)),
        (turned, _columns_first(by_column.scale_inv.T)),
    )


def _columns_first(scales: Tensor) -> Tensor:
    """The same matrix with its columns contiguous in memory."""
    height, width = scales.shape
    # Strides are asked for, because a matrix of one column counts as contiguous with any.
    laid = torch.empty_strided((height, width), (1, height), device=scales.device)
    return laid.copy_(scales)


def _of_last(operand: Scaled, layout: _Layout) -> Tensor:
    """The values `[width, rows]` of the last expert's part of a weight gradient's operand."""
    codes, scales = operand
    width, start, count = scales.shape[0], layout.start, layout.padded[layout.last]
    own = codes[start * width : (start + count) * width].view(width, count)
    return _values(own, scales[:, start // BLOCK : (start + count) // BLOCK])


def _weight(experts: int, height: int, width: int, device: str) -> tuple[Scaled, Scaled]:
    """A random normal weight `[E, height, width]` and its transpose, of variance 1 / width."""
    values = torch.randn((experts, height, width), device=device) * width**-0.5
    straight = quantize(values.to(torch.bfloat16), iso(BLOCK))
    turned = transpose_storage(straight)
    return (straight.codes, straight.scale_inv), (turned.codes, turned.scale_inv)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """`[n, k]` codes times their scales `[n, k / 128]`, fp32."""
    return codes.to(torch.float32) * scales.repeat_interleave(BLOCK, 1)


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.to(torch.float32) - wanted).norm() / wanted.norm())
