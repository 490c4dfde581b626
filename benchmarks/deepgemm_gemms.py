"""DeepGEMM's six bare grouped FP8 GEMMs of one layer, for `deepgemm_bench.py`.

They are the products of a layer's forward and backward and nothing else: no gather, activation,
quantisation, routing or aggregation. So they bound what those cost an engine that does all of it.
The operands are quantised once, before anything is timed.

Legend: R rows, sorted by expert, each expert's padded to whole blocks; E experts, H hidden, I
intermediate. "Contiguous" operands are `[R, width]` with one scale per row and 128 columns; weights
are `[E, N, K]` with one per 128 x 128; operands of a weight gradient lie expert by expert as
`[width, rows]`, with one scale per column of `[R, width]` and 128 rows.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.workload import ROTATION_BYTES
from sonicmoe.errors import SonicMoEError
from sonicmoe.observe import stage
from sonicmoe.quant.recipes import columns, iso, rows
from sonicmoe.quant.reference import quantize, transpose_storage

Tensor = torch.Tensor
Scaled = tuple[Tensor, Tensor]  # codes, scales

BLOCK = 128  # of its scales, and of its rows per expert
M_GROUPED, K_GROUPED = "m_grouped_fp8_gemm_nt_contiguous", "k_grouped_fp8_gemm_nt_contiguous"
ALIGNMENT = "get_mk_alignment_for_contiguous_layout"
# bf16 outputs round to 2^-9 of a value, and Hopper's tensor cores sum FP8 products with 14 bits.
# Scales of another layout are wrong by far more.
TOLERANCE = 0.02
CHECKED_ROWS = 64
CHUNK_ELEMENTS = 1 << 24  # of operands quantised at once; its fp32 temporaries take ten times that


class PeerError(SonicMoEError, RuntimeError):
    """`deep_gemm` is there and cannot be measured; the message says why."""


def load() -> ModuleType:
    """The module.

    Raises:
        PeerError: it cannot be imported, or lacks a function needed here.
    """
    try:
        # It reports missing parts on stdout, where our output must stay one JSON object.
        with contextlib.redirect_stdout(sys.stderr):
            library = importlib.import_module("deep_gemm")
    # Other people's code may raise anything.
    except Exception as error:
        raise PeerError(f"deep_gemm cannot be imported: {_one_line(error)}") from None
    missing = [name for name in (M_GROUPED, K_GROUPED, ALIGNMENT) if not hasattr(library, name)]
    if missing:
        version = getattr(library, "__version__", "of an unknown version")
        raise PeerError(f"deep_gemm {version} has no {', '.join(missing)}; needed: those of 2.6")
    return library


def prepare(
    library: ModuleType, shape: Shape, counts: Sequence[Sequence[int]], device: str
) -> SixGemms:
    """The six products, compiled and checked against their definition; counts: rows of each expert,
    of one batch after another.

    Raises:
        PeerError: sizes or a GPU that these GEMMs do not take, an interface other than the one
            written for, wrong results, or not enough memory.
    """
    for name, size in (("hidden", shape.hidden), ("intermediate", shape.intermediate)):
        if size % BLOCK:
            raise PeerError(f"{name} is {size}; needed: a multiple of {BLOCK}, the scales' block")
    if torch.cuda.get_device_capability(device)[0] != 9:
        raise PeerError("this is no Hopper GPU; needed: one, on others its formats differ")
    try:
        aligned = getattr(library, ALIGNMENT)()
        if aligned != BLOCK:
            raise PeerError(f"deep_gemm aligns experts to {aligned} rows; needed: {BLOCK}")
        six = SixGemms(library, shape, counts, device)
        six.check()
    except PeerError:
        raise
    # As above: an assertion of the library, a changed signature, a compiler that is missing.
    except Exception as error:
        raise PeerError(_one_line(error)) from None
    return six


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
    """The products on rotating operands."""

    def __init__(
        self, library: ModuleType, shape: Shape, counts: Sequence[Sequence[int]], device: str
    ) -> None:
        """Quantises all operands; compiles and runs nothing yet."""
        torch.manual_seed(0)
        sizes = (2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)
        weights = [_weight(shape.experts, *size, device) for size in sizes]
        layouts = [_Layout(each, device) for each in counts[: _rotation(shape, len(counts))]]
        outputs = _Outputs(shape, max(layout.rows for layout in layouts), device)
        self._sets = [_products(library, shape, each, weights, outputs) for each in layouts]

    def check(self) -> None:
        """Compile and run every product.

        Raises:
            PeerError: a sample of an output is not the product of the operands.
        """
        for gemms in self._sets:
            for gemm in gemms:
                error = gemm.error()
                if not error <= TOLERANCE:  # also where it is NaN
                    raise PeerError(
                        f"{gemm.stage} is off by {error:.2g} of its norm; needed: {TOLERANCE}. "
                        "Its layouts may differ from those of DeepGEMM 2.6"
                    )

    def phases(self, number: int) -> Sequence[tuple[str, Callable[[], None]]]:
        """Forward and backward of call `number`, in order of time."""
        return (
            ("forward", lambda: self._run(number, slice(None, 2))),
            ("backward", lambda: self._run(number, slice(2, None))),
        )

    def steps(self, layers: int) -> PeerStack:
        """A step of several layers, as our engines have it in the steady state."""
        return PeerStack(self, layers)

    def _run(self, number: int, which: slice) -> None:
        for gemm in self._sets[number % len(self._sets)][which]:
            gemm.run()


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
        self.device, self.counts = device, list(counts)
        self.padded = [-(-count // BLOCK) * BLOCK for count in counts]
        self.starts = [sum(self.padded[:expert]) for expert in range(len(counts))]
        self.rows = sum(self.padded)
        owners = torch.full((self.rows,), -1, dtype=torch.int32)  # -1: padding
        for expert, (start, count) in enumerate(zip(self.starts, counts, strict=True)):
            owners[start : start + count] = expert
        self.owners = owners.to(device)
        self.sizes = torch.tensor(self.padded, dtype=torch.int32, device=device)

    @property
    def last(self) -> int:
        """The last expert that has rows: a wrong offset shows there first."""
        return max(expert for expert, count in enumerate(self.counts) if count)


class _Outputs:
    """Buffers of the six products, for the most rows of any batch."""

    def __init__(self, shape: Shape, most_rows: int, device: str) -> None:
        def empty(width: int) -> Tensor:
            return torch.empty((most_rows, width), dtype=torch.bfloat16, device=device)

        def zeros(height: int, width: int) -> Tensor:
            return torch.zeros((shape.experts, height, width), device=device)

        self.z, self.out = empty(2 * shape.intermediate), empty(shape.hidden)
        self.dy, self.dx = empty(shape.intermediate), empty(shape.hidden)
        self.dw1 = zeros(2 * shape.intermediate, shape.hidden)
        self.dw2 = zeros(shape.hidden, shape.intermediate)


def _rotation(shape: Shape, batches: int) -> int:
    """How many sets of operands exceed the L2 cache twice; at most one per batch."""
    # Both forms of x, dout (H), y (I) and dz (2 I).
    nbytes = 2 * shape.rows * (2 * shape.hidden + 3 * shape.intermediate)
    return min(batches, 1 + ROTATION_BYTES // nbytes)


def _products(
    library: ModuleType, shape: Shape, layout: _Layout, weights: list[tuple[Scaled, Scaled]],
    outputs: _Outputs,
) -> list[Gemm]:  # fmt: skip
    """In the order of a layer's forward and backward; weights: each and its transpose."""
    (up, up_transposed), (down, down_transposed) = weights
    x_rows, x_columns = _operand(layout, shape.hidden)
    y_rows, y_columns = _operand(layout, shape.intermediate)
    dout_rows, dout_columns = _operand(layout, shape.hidden)
    dz_rows, dz_columns = _operand(layout, 2 * shape.intermediate)
    by_rows, by_experts = getattr(library, M_GROUPED), getattr(library, K_GROUPED)
    return [
        _row_gemm(by_rows, "up", layout, x_rows, up, outputs.z),
        _row_gemm(by_rows, "down", layout, y_rows, down, outputs.out),
        _row_gemm(by_rows, "dgated", layout, dout_rows, down_transposed, outputs.dy),
        _row_gemm(by_rows, "dx_gemm", layout, dz_rows, up_transposed, outputs.dx),
        _weight_gemm(by_experts, "dw2", layout, dout_columns, y_columns, outputs.dw2),
        _weight_gemm(by_experts, "dw1", layout, dz_columns, x_columns, outputs.dw1),
    ]


def _row_gemm(
    function: Callable[..., Any], name: str, layout: _Layout, a: Scaled, b: Scaled, buffer: Tensor
) -> Gemm:
    """`d[r] = a[r] @ b[owner of r].T` in bf16."""
    d = buffer[: layout.rows]

    def launch() -> None:
        function(a, b, d, layout.owners)

    def error() -> float:
        d.fill_(float("nan"))
        launch()
        expert = layout.last
        start = layout.starts[expert]
        sample = slice(start, start + min(layout.counts[expert], CHECKED_ROWS))
        blocks = b[1][expert].repeat_interleave(BLOCK, 0)
        wanted = _values(a[0][sample], a[1][sample]) @ _values(b[0][expert], blocks).T
        return _relative_error(d[sample], wanted)

    return Gemm(name, launch, error)


def _weight_gemm(
    function: Callable[..., Any], name: str, layout: _Layout, a: Scaled, b: Scaled, d: Tensor
) -> Gemm:
    """`d[e] += a[rows of e].T @ b[rows of e]` in fp32."""

    def launch() -> None:
        # Positions, because the fifth argument has had two names.
        function(a, b, d, layout.padded, layout.sizes, d)

    def error() -> float:
        d.zero_()
        launch()
        left, right = (_of_expert(each, layout, layout.last) for each in (a, b))
        found = d[layout.last, :CHECKED_ROWS].clone()
        d.zero_()
        return _relative_error(found, left[:CHECKED_ROWS] @ right.T)

    return Gemm(name, launch, error)


def _operand(layout: _Layout, width: int) -> tuple[Scaled, Scaled]:
    """Random normal rows with zeros as padding, as a contiguous operand and as that of a weight
    gradient. All scales are transposed in memory, as its kernels read them: otherwise it would copy
    them in every call.
    """
    chunk = max(BLOCK, CHUNK_ELEMENTS // width // BLOCK * BLOCK)
    by_row, by_column = [], []
    for first in range(0, layout.rows, chunk):
        owners = layout.owners[first : first + chunk]
        values = torch.randn((owners.numel(), width), device=layout.device)
        values = (values * (owners >= 0).unsqueeze(1)).to(torch.bfloat16)
        by_row.append(quantize(values, rows(BLOCK)))
        by_column.append(quantize(values, columns(BLOCK)))
    row_scales = torch.cat([q.scale_inv for q in by_row])
    column_scales = torch.cat([q.scale_inv for q in by_column])
    codes = _joined([q.codes for q in by_column])
    return (
        (_joined([q.codes for q in by_row]), _columns_first(row_scales)),
        (_per_expert(codes, layout), _columns_first(column_scales.T)),
    )


def _columns_first(scales: Tensor) -> Tensor:
    """The same matrix with its columns contiguous in memory."""
    height, width = scales.shape
    # Strides are asked for, because a matrix of one column counts as contiguous with any.
    laid = torch.empty_strided((height, width), (1, height), device=scales.device)
    return laid.copy_(scales)


def _per_expert(codes: Tensor, layout: _Layout) -> Tensor:
    """`[R, width]` to `[width, rows]` of every expert, one behind the other in one dimension."""
    parts = codes.view(torch.uint8).split(layout.padded)
    return torch.cat([part.T.reshape(-1) for part in parts]).view(codes.dtype)


def _of_expert(operand: Scaled, layout: _Layout, expert: int) -> Tensor:
    """The values `[width, rows]` of one expert's part of a weight gradient's operand."""
    codes, scales = operand
    width, start, count = scales.shape[0], layout.starts[expert], layout.padded[expert]
    own = codes[start * width : (start + count) * width].view(width, count)
    return _values(own, scales[:, start // BLOCK : (start + count) // BLOCK])


def _weight(experts: int, height: int, width: int, device: str) -> tuple[Scaled, Scaled]:
    """A random normal weight `[E, height, width]` and its transpose, of variance 1 / width."""
    straight, transposed = [], []
    for _ in range(experts):
        values = torch.randn((height, width), device=device) * width**-0.5
        straight.append(quantize(values.to(torch.bfloat16), iso(BLOCK)))
        transposed.append(transpose_storage(straight[-1]))
    both = [
        (_stacked([q.codes for q in each]), torch.stack([q.scale_inv for q in each]))
        for each in (straight, transposed)
    ]
    return both[0], both[1]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    # Moved as bytes: few operations know FP8.
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def _values(codes: Tensor, scales: Tensor) -> Tensor:
    """`[n, k]` codes times their scales `[n, k / 128]`, fp32."""
    return codes.to(torch.float32) * scales.repeat_interleave(BLOCK, 1)


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.to(torch.float32) - wanted).norm() / wanted.norm())


def _one_line(error: Exception) -> str:
    return " ".join([f"{type(error).__name__}:", *str(error).split()])
