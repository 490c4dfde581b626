"""The least time of each stage on one H100 or H200, from bare GEMM rates and copy bandwidth. Pure
arithmetic, no framework.

A stage's floor is the larger of its operations over the rate of the best public GEMM of its kind
and its least traffic over copy bandwidth. Traffic counts every operand once, so neither caches nor
fusion can lower it further.
"""

from __future__ import annotations

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
# Bytes read and written by a plain copy, by a part of the card's name.
COPY_BYTES_PER_S = {"H100 80GB HBM3": 2.96e12, "H200": 4.24e12}

QUANTISING_STAGES = ("quantize_x", "quantize_dout", "wgrad_operands")
# An engine that cannot add to a caller's gradients in place flushes its own into them.
OTHER_STAGES = ("flush", "prepare_weights")


def floors(shape: Shape, fp8: bool, card: str = "H200") -> dict[str, float]:
    """Microseconds of the stages, in the order in which they run; without FP8 operands are read as they
    lie, and the stages that quantise have none. A card whose copies nobody has timed counts as an H200.
    """
    flop, result = gemm_flop(shape), {}
    known = [name for name in COPY_BYTES_PER_S if name in card]
    copied = COPY_BYTES_PER_S[known[0] if known else "H200"]
    for stage, least in stage_bytes(shape, fp8).items():
        if stage in QUANTISING_STAGES and not fp8:
            continue
        seconds = least / copied
        if stage in flop:
            # A GEMM waits for its operands or for the tensor cores, whichever takes longer.
            rate = DEEPGEMM_TFLOPS[stage] if fp8 else CUBLAS_BF16_TFLOPS
            seconds = max(seconds, flop[stage] / (1e12 * rate))
        result[stage] = 1e6 * seconds
    return result


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


def stage_bytes(shape: Shape, fp8: bool) -> dict[str, float]:
    """Least traffic of the stages in the order in which they run; engines name their ranges after
    them. Operands have one byte in FP8, else two; x, dout, out and dx have two, the sums of weight
    gradients four.
    """
    element = 1 if fp8 else 2
    x, rows = shape.tokens * shape.hidden, shape.rows * shape.hidden
    y = shape.rows * shape.intermediate
    z, w2 = 2 * y, shape.experts * shape.hidden * shape.intermediate
    w1 = 2 * w2
    return {
        "routing": 44 * shape.rows,  # ids and probabilities in; token, slot, row, probability out
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
