"""Steps that recipes are measured on: generated ones by the kind of their data, and captured ones.

Legend: T tokens, K slots, E experts, H hidden, I intermediate, N1 = 2I (gated) or I; native weights
`w1 [E, N1, H]` (gate, up interleaved), `w2 [E, H, I]`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sonicmoe.diagnostics.cases import CaseSizes, as_case, random_step
from sonicmoe.diagnostics.step_dump import Array, DumpError, StepDump, StepSettings, load_dump
from sonicmoe.errors import ConfigError, ShapeError, expect

DATA_KINDS: dict[str, str] = {
    "gaussian": "x, dout and weights are normal",
    "student-t": "x, dout and weights follow Student's t with 3 degrees of freedom: heavy tails",
    "row-spread": "normal, every token of x and of dout times 2^u, u uniform in [-10, 0]",
    "outliers": "normal, 1 % of the channels of x and of dout times 100",
}

# One row, column or element of one operand of every expert times `LONE_GAIN`, the rest normal. What
# is large in z, y1 or dz follows from its inputs.
LONE_OUTLIERS: dict[str, str] = {
    "x-row": "a token of x, in every 16",
    "x-column": "a channel of x",
    "x-element": "an element of x, in every 16th token",
    "w1-gate-row": "a gate row of w1: one unit's gate in z",
    "w1-up-row": "an up row of w1: one unit's up in z",
    "w1-both-rows": "both rows of a unit of w1: z, and y1",
    "w1-column": "a column of w1",
    "w1-element": "an element of w1",
    "w2-row": "a row of w2: a column of y2",
    "w2-column": "a column of w2: a column of dy1 and of dz",
    "w2-element": "an element of w2",
    "dout-row": "a token of dout, in every 16: rows of dz",
    "dout-column": "a channel of dout",
    "dout-element": "an element of dout, in every 16th token",
    "z-element": "x along a gate row of w1, in every 16th token: an element of z",
    "dz-element": "dout along a column of w2, in every 16th token: an element of dz",
}
LONE_GAIN, LONE_STEP = 300.0, 16

OUTLIER_SHARE, OUTLIER_GAIN = 0.01, 100.0
SPREAD_OCTAVES = 10.0
_DEFAULTS = StepSettings()


def make_case(
    kind: str,
    sizes: CaseSizes,
    seed: int,
    settings: StepSettings = _DEFAULTS,
    biases: float = 0.0,
) -> StepDump:
    """A case of one of `DATA_KINDS` or `LONE_OUTLIERS`, of experts with the activation of `settings`;
    the same bits for the same arguments. Weights have variance 1 / fan_in before heavy tails, and
    normal biases this standard deviation; 0: there are none. ConfigError for another kind.
    """
    known = [*DATA_KINDS, *LONE_OUTLIERS]
    expect(kind in known, ConfigError, f"data is {kind!r}; needed: one of {known}")
    # numpy's generator, so that both frameworks and every device get the same case.
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> Array:
        return rng.standard_t(3, shape) if kind == "student-t" else rng.standard_normal(shape)

    x, dout = draw(sizes.tokens, sizes.hidden), draw(sizes.tokens, sizes.hidden)
    if kind == "row-spread":
        x, dout = (m * 2.0 ** rng.uniform(-SPREAD_OCTAVES, 0, (sizes.tokens, 1)) for m in (x, dout))
    if kind == "outliers":
        for matrix in (x, dout):
            channels = rng.choice(
                sizes.hidden, max(1, round(OUTLIER_SHARE * sizes.hidden)), replace=False
            )
            matrix[:, channels] *= OUTLIER_GAIN
    name = f"{kind}, biases {biases:g}" if biases else kind
    made = random_step(name, settings, sizes, rng, draw, (x, dout))
    if kind in LONE_OUTLIERS:
        _add_outlier(made, kind, rng)
    if biases:  # drawn last: the rest has the bits of a case without
        b1, b2 = (
            (biases * rng.standard_normal(w.shape[:2])).astype(np.float32)
            for w in (made.w1, made.w2)
        )
        made = replace(made, b1=b1, b2=b2)
    return as_case(made)


def _add_outlier(made: StepDump, kind: str, rng: np.random.Generator) -> None:
    """Scale what `kind` names, in place."""
    operand, _, part = kind.partition("-")
    tokens = np.arange(3, made.x.shape[0], LONE_STEP)
    channels = rng.integers(made.x.shape[1], size=tokens.size)
    unit, channel = (int(rng.integers(size)) for size in (made.w2.shape[2], made.x.shape[1]))
    if operand in ("z", "dz"):
        rows = made.x if operand == "z" else made.dout
        weights = made.w1[:, 2 * unit] if operand == "z" else made.w2[:, :, unit]
        assert rows is not None
        along = weights[made.indices[tokens, 0]]
        rows[tokens] += LONE_GAIN * along / np.linalg.norm(along, axis=1, keepdims=True)
        return
    first, last = (2 * unit, channel) if operand == "w1" else (channel, unit)
    places: dict[str, Any] = {"column": (..., last), "element": (slice(None), first, last)}
    if operand in ("x", "dout"):
        places = {"row": tokens, "column": (..., channel), "element": (tokens, channels)}
    rows_of = {"row": [channel], "gate-row": [2 * unit], "up-row": [2 * unit + 1]}
    for name, chosen in {**rows_of, "both-rows": [2 * unit, 2 * unit + 1]}.items():
        places.setdefault(name, (slice(None), chosen))
    getattr(made, operand)[places[part]] *= LONE_GAIN


def load_case(path: str | Path) -> StepDump:
    """What `save_dump` wrote of a forward and its backward, as `as_case` has it. Errors as
    `load_dump`.
    """
    step = load_dump(path)
    try:
        return as_case(step)
    except (ShapeError, DumpError) as error:
        raise type(error)(f"{path}: {error}") from None
