"""What a layer takes on an H100 by the cost model, for machines without a GPU. numpy only.

The coefficients are those of `fit_model` over docs/data/h100_sweep.jsonl (FP8) and
docs/data/h100_bf16.jsonl (BF16): GPU time of forward and backward, with weight gradients that are
added to fp32 `main_grad`.
"""

from __future__ import annotations

from ..engine.capabilities import BF16 as BF16_ENGINE
from ..engine.capabilities import HOPPER, problem
from .answer import BF16, FP8, KEPT_CALLS, Answer, Way, workload_of
from .cost_model import evaluate
from .models import CARD, DATE, nearest
from .shapes import Shape

H100 = "NVIDIA H100 80GB HBM3"
COEFFICIENTS = {
    "bf16": {
        "roofline": 0.8508336354632655,
        "TK*H*I": 8.402302639483156e-09,
        "idle rows*H*I": 3.783422419289054e-08,
        "TK*I": 2.1547157370917317e-06,
        "TK": 0.0016037176521969464,
        "E": 0.18893607482887967,
    },
    "fp8": {
        "roofline": 0.5155246087433196,
        "TK*H*I": 9.163491365141036e-09,
        "idle rows*H*I": 2.296295564283013e-08,
        "E*H*I": 3.944036350622877e-06,
        "TK*I": 2.1781067771328847e-07,
        "TK": 0.004259047192845289,
        "E": 1.020909658011658,
        "1": 61.58366974237601,
    },
}
HELD_OUT_ERROR = {"bf16": 3.4, "fp8": 2.6}  # percent, in the mean
# Microseconds for each weight that is quantised: 170 at E=8 H=3072 I=1536, docs/lab/layer_times.md.
QUANTISE_US = 170 / (3 * 8 * 3072 * 1536)
# The sizes of BF16's points, which lie inside FP8's. Beyond them the estimate is less sure.
SWEPT = {
    "rows": (8192, 262144),
    "hidden": (2048, 4096),
    "intermediate": (768, 4096),
    "experts": (8, 128),
}
MIB = float(1 << 20)


def predicted_us(shape: Shape, precision: str) -> float:
    """Microseconds of forward and backward with weights that are prepared; "bf16" or "fp8"."""
    terms = COEFFICIENTS[precision]
    (values,) = evaluate([shape], precision == "fp8", H100, terms)
    return float(sum(value * each for value, each in zip(values, terms.values(), strict=True)))


def estimate(shape: Shape) -> Answer:
    """The answer of the cost model; it has no figure of stock, so the nearest measured layer stands
    in a note.
    """
    weights = 3 * shape.experts * shape.hidden * shape.intermediate
    z = 2 * shape.rows * shape.intermediate
    quantise = QUANTISE_US * weights
    bf16, fp8 = (predicted_us(shape, name) for name in ("bf16", "fp8"))
    near = nearest(shape)
    notes = [
        f"ESTIMATE, nothing was measured: GPU time on {H100} by the cost model, whose mean error on "
        f"points it never saw is {HELD_OUT_ERROR['bf16']} % in BF16 and {HELD_OUT_ERROR['fp8']} % in "
        f"FP8; weight gradients are added to fp32 main_grad",
        "memory: what is kept between the passes, and in FP8 the codes of the weights in both orders",
        f"stock has no model; the nearest measured layer, {near.model} with {near.shape}, took "
        f"{near.compiled:,} us in compiled stock on one {CARD} ({DATE}), of which BF16 was "
        f"{near.compiled / near.bf16:.2f}x and FP8 {near.compiled / near.fp8:.2f}x",
    ]
    # z is kept as bf16, or as INT8 codes with an fp32 scale for each 128.
    ways = (
        Way(BF16, bf16, bf16, memory_mib=2 * z / MIB),
        Way(FP8, fp8 + quantise, fp8 + quantise / KEPT_CALLS,
            memory_mib=(z * (1 + 4 / 128) + 2 * weights) / MIB),
    )  # fmt: skip
    records = {BF16: BF16_ENGINE, FP8: HOPPER}
    refusals = {way: problem(records[way], workload_of(shape, way), "sm_90a") for way in records}
    able = tuple(
        way if refusals[way.name] is None else Way(way.name, refusal=refusals[way.name])
        for way in ways
    )
    beyond = [
        name for name, (least, most) in SWEPT.items() if not least <= getattr(shape, name) <= most
    ]
    if beyond:
        notes.append(f"less sure: beyond the points of the model in {', '.join(beyond)}")
    return Answer(shape, able, tuple(notes), measured=False)
