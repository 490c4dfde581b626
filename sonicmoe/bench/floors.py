"""The least time of each stage on one H200, from bare GEMM rates and copy bandwidth. Pure
arithmetic, no framework.

A stage's floor is the larger of its operations over the rate of the best public GEMM of its kind
and its least traffic over copy bandwidth. Traffic counts every operand once, so neither caches nor
fusion can lower it further.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..architectures import SM90
from .shapes import Shape

# Dense peaks of H100 and H200 SXM, in TFLOPS.
PEAKS_OF = SM90
PEAK_TFLOPS = {"fp8": 1979.0, "bf16": 989.0}

# TFLOPS of DeepGEMM's bare FP8 GEMMs at T=8192 H=3072 I=1536 E=8 K=8, and of cuBLAS BF16 at 8192^3,
# on one H200.
DEEPGEMM_TFLOPS = {
    "up": 1438.0,
    "down": 1343.0,
    "dgated": 1433.0,
    "dx_gemm": 1438.0,
    "dw2": 938.0,
    "dw1": 980.0,
}
CUBLAS_BF16_TFLOPS = 790.0
COPY_BYTES_PER_S = 4.24e12

# The stages of one call, in order; engines name their ranges after them.
FORWARD_STAGES = ("routing", "quantize_x", "up", "down", "aggregate_out")
BACKWARD_STAGES = (
    "quantize_dout",
    "dgated",
    "dx_gemm",
    "aggregate_dx",
    "wgrad_operands",
    "dw2",
    "dw1",
)
STEP_STAGES = ("flush", "prepare_weights")  # "flush" only where gradients wait in the node
PHASE_STAGES = {"forward": FORWARD_STAGES, "backward": BACKWARD_STAGES, "step": STEP_STAGES}


@dataclass(frozen=True)
class Floor:
    """Operations and least bytes of one stage, and the microseconds neither can go below."""

    flop: float
    bytes: float
    us: float


def floors(shape: Shape, fp8: bool, flush: bool = False) -> dict[str, Floor]:
    """Floors of every stage, in the order of `PHASE_STAGES`; without FP8 the quantising stages have
    none. flush: whether weight gradients wait in accumulators, so that `step()` has that stage.
    """
    flop, traffic = gemm_flop(shape), stage_bytes(shape, fp8, float(shape.rows))
    absent = {"flush"} if not flush else set()
    if not fp8:
        # Operands in bf16 are read as they lie.
        absent |= {"quantize_x", "quantize_dout", "wgrad_operands"}
    result = {}
    for stage in (*FORWARD_STAGES, *BACKWARD_STAGES, *STEP_STAGES):
        if stage in absent:
            continue
        seconds = traffic[stage] / COPY_BYTES_PER_S
        if stage in flop:
            # A GEMM waits for its operands or for the tensor cores, whichever takes longer.
            seconds = max(seconds, flop[stage] / (1e12 * gemm_tflops(stage, fp8)))
        result[stage] = Floor(flop.get(stage, 0.0), traffic[stage], 1e6 * seconds)
    return result


def gemm_tflops(stage: str, fp8: bool) -> float:
    """The rate of the best public GEMM of a stage's kind."""
    return DEEPGEMM_TFLOPS[stage] if fp8 else CUBLAS_BF16_TFLOPS


def gemm_flop(shape: Shape) -> dict[str, float]:
    """Operations of the six grouped GEMMs; they sum to `shape.flop`."""
    unit = 2.0 * shape.rows * shape.hidden * shape.intermediate
    return {
        "up": 2 * unit,
        "down": unit,
        "dgated": unit,
        "dx_gemm": 2 * unit,
        "dw2": unit,
        "dw1": 2 * unit,
    }


def stage_bytes(sizes: Any, fp8: bool, row_slots: Any) -> dict[str, Any]:
    """Least traffic per stage. Operands have one byte in FP8, else two; x, dout, out and dx have
    two, the sums of weight gradients four, in `main_grad` as in accumulators.

    Args:
        sizes: a `Shape`, or anything with its sizes as fields, arrays included.
        fp8: whether operands are quantised.
        row_slots: rows of z and y with their padding, as far as it is counted.
    """
    element = 1 if fp8 else 2
    x, rows = 1.0 * sizes.tokens * sizes.hidden, 1.0 * sizes.rows * sizes.hidden
    y = row_slots * sizes.intermediate
    z, w2 = 2 * y, 1.0 * sizes.experts * sizes.hidden * sizes.intermediate
    w1 = 2 * w2
    return {
        "routing": 44.0 * sizes.rows,  # ids and probabilities in; token, slot, row, probability out
        "quantize_x": x * (2 + element),
        "up": element * (x + w1 + z + y),
        "down": element * (y + w2) + 2 * rows,
        "aggregate_out": 2 * (rows + x),
        "quantize_dout": x * (2 + element),
        "dgated": element * (x + w2 + 2 * z + y),
        "dx_gemm": element * (z + w1) + 2 * rows,
        "aggregate_dx": 2 * (rows + x),
        # x and dout stay in cache while they are gathered; dgated writes the other two operands.
        "wgrad_operands": 2 * element * (x + rows),
        "dw2": element * (rows + y) + 8 * w2,
        "dw1": element * (rows + z) + 8 * w1,
        "flush": 16 * (w1 + w2),  # read and zero the accumulator, read and write main_grad
        "prepare_weights": (2 + 2 * element) * (w1 + w2),
    }
