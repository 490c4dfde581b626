"""How far an FP8 recipe moves the tensors of a call from an fp64 golden, and whether that
meets the bars.

docs/numerics.md defines every number printed here and states what they decided.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numerics_baselines import BASELINES, Baseline, Dispatch

from sonicmoe.diagnostics.capture import to_numpy, token_fields
from sonicmoe.diagnostics.golden_stages import BIAS_GRADIENTS, TENSORS, golden_tensors
from sonicmoe.diagnostics.stage_runner import run_step
from sonicmoe.diagnostics.step_dump import Array, StepDump, StepSettings
from sonicmoe.engine.capabilities import REFERENCE, format_problem
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.settings import TokenFormat
from sonicmoe.enums import ZCode
from sonicmoe.quant.recipes import Fp8Recipe, rows
from sonicmoe.quant.reference import quantize

RMSE_BARS = {"out": 0.066, "dx": 0.069, "ds": 0.069, "dw1": 0.069, "dw2": 0.069}
COSINE_BAR = 0.9975
RESOLUTION = 2.0
BARRED_DATA = "gaussian"
BASELINE = BASELINES["deepseek-v3"]


@dataclass(frozen=True)
class Part:
    """A tensor, or one expert's share of it, against the golden. Errors are fractions; NaN where a
    value is not finite.

    rmse: `||computed - golden|| / ||golden||`, with its standard error over tokens, slots or weight
    rows.
    ratio: rmse over that of the baseline recipe on the same inputs, with the standard error of the
    paired ratio.
    """

    cosine: float
    rmse: float
    rmse_error: float
    ratio: float
    ratio_error: float


@dataclass(frozen=True)
class Score:
    """One tensor: all of it, and the share of every expert that has tokens.

    row_p99: 99 % of the rows have at most this relative error, each row against its own norm (out,
    dx: tokens; dw: weight rows; db: experts); it sees small rows that a norm over all rows hides.
    For ds, whose rows are single numbers, NaN.
    """

    tensor: str
    overall: Part
    experts: tuple[Part, ...]
    row_p99: float

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.overall, *self.experts)

    @property
    def worst_rmse(self) -> float:
        """Relative RMSE of the worst expert."""
        return max_or_nan(part.rmse for part in self.experts)


@dataclass(frozen=True)
class Result:
    """One recipe and saved-z code on one case, with the bars it misses and those too close to call;
    see `judge`.
    """

    data: str
    recipe: Fp8Recipe
    z: ZCode
    scores: dict[str, Score]
    failures: tuple[str, ...]
    unresolved: tuple[str, ...]
    dispatch: Dispatch = Dispatch.BF16


def evaluate(
    case: StepDump,
    recipes: Sequence[Fp8Recipe],
    z_codes: Sequence[ZCode],
    dispatch: Dispatch = Dispatch.BF16,
    against: Baseline = BASELINE,
) -> Iterator[Result]:
    """Results of every recipe and code on one case, each judged against the bars and the baseline,
    which is the DeepSeek-V3 recipe with e4m3 z unless another is named. Behind a dispatch in FP8 the
    baseline's tokens, and gradients where they do, come in FP8 too, one scale per row and 128
    columns; recipes that read them in other blocks have no result.
    """
    wanted = golden_tensors(case)
    # The baseline runs on the same case, so both errors share the data and their ratio is far more
    # certain than either.
    baseline = run_recipe(case, against.recipe, against.z, dispatch)
    for recipe in recipes:
        if not arrives(recipe, dispatch):
            continue
        for z in z_codes:
            # Not run twice: the engine gives the same bits.
            again = (recipe, z) == (against.recipe, against.z)
            computed = baseline if again else run_recipe(case, recipe, z, dispatch)
            found = {
                name: score(name, case, computed[name], baseline[name], wanted[name])
                for name in wanted
            }
            absolute = against.absolute and dispatch is Dispatch.BF16
            verdict = judge(case.name, found, absolute=absolute, against=against)
            yield Result(case.name, recipe, z, found, *verdict, dispatch)


def arrives(recipe: Fp8Recipe, dispatch: Dispatch) -> bool:
    """Whether the recipe reads rows as this dispatch delivers them."""
    settings, form = EngineSettings(recipe=recipe), TokenFormat.E4M3_1X128
    return all(format_problem(REFERENCE, settings, form, n) is None for n in dispatch.quantised)


def sent(step: StepDump, name: str, recipe: Fp8Recipe) -> StepDump:
    """The step with x or dout as its sender quantised it, in the recipe's scale format."""
    values = torch.tensor(getattr(step, name)).to(torch.bfloat16)
    arrived = quantize(values, rows(128), scale_format=recipe.scale_format)
    return step.but(**token_fields(name, arrived, step.indices, step.num_experts))


def run_recipe(
    case: StepDump, recipe: Fp8Recipe | None, z: ZCode, dispatch: Dispatch = Dispatch.BF16
) -> dict[str, Array]:
    """The tensors of `golden_tensors` as the reference engine computes them, fp64 copies;
    `recipe=None` leaves operands in bf16.
    """
    own = case.settings
    settings = StepSettings.of(
        activation=own.activation, activation_parameters=own.activation_parameters,
        recipe=None if recipe is None else recipe.name, save_z=z,
    )  # fmt: skip
    step = replace(case, settings=settings)
    if recipe is not None:
        for name in dispatch.quantised:
            step = sent(step, name, recipe)
    found: dict[str, Array] = {}

    def keep(name: str, value: Any) -> None:
        if name in TENSORS or name in BIAS_GRADIENTS:
            found[name] = to_numpy(value).astype(np.float64)

    run_step(step, ReferenceEngine(), "cuda:0" if torch.cuda.is_available() else "cpu", keep)
    return found


def score(name: str, case: StepDump, computed: Array, baseline: Array, wanted: Array) -> Score:
    """Score of one tensor. An expert's share of out and dx is the tokens it serves, of ds its
    slots, of dw its slice.
    """
    # Sums per unit are made once; every part of the tensor is then a selection of them.
    energies = Energies.of(name, computed, baseline, wanted)
    parts = []
    for expert in range(case.num_experts):
        served = case.indices == expert
        if served.any():
            parts.append(
                energies.part(
                    # Which units of the tensor are this expert's: an index for weight gradients,
                    # masks for the others.
                    expert
                    if name[:2] in ("dw", "db")
                    else served
                    if name == "ds"
                    else served.any(1)
                )
            )
    return Score(
        name,
        energies.part(...),
        tuple(parts),
        float("nan") if name == "ds" else energies.row_quantile(0.99),
    )


@dataclass(frozen=True, eq=False)
class Energies:
    """Squared norms and products of one tensor per sampling unit: a token's row, a slot, a row of a
    weight gradient.
    """

    error: Array
    baseline_error: Array
    wanted: Array
    computed: Array
    product: Array

    @classmethod
    def of(cls, name: str, computed: Array, baseline: Array, wanted: Array) -> Energies:
        """Sum over the last axis, except for ds, whose elements are units."""

        def total(values: Array) -> Array:
            return values if name == "ds" else values.sum(-1)

        with np.errstate(invalid="ignore", over="ignore"):
            return cls(
                error=total((computed - wanted) ** 2),
                baseline_error=total((baseline - wanted) ** 2),
                wanted=total(wanted**2),
                computed=total(computed**2),
                product=total(computed * wanted),
            )

    def part(self, index: Any) -> Part:
        """Ratios of sums over the units of `index`; standard errors by the delta method."""
        error, baseline_error, wanted, computed, product = (
            array[index].ravel()
            for array in (self.error, self.baseline_error, self.wanted, self.computed, self.product)
        )
        norms = float(np.sqrt(wanted.sum() * computed.sum()))
        cosine = float(product.sum()) / norms if norms else float(wanted.sum() == computed.sum())
        return Part(cosine, *root_ratio(error, wanted), *root_ratio(error, baseline_error))

    def row_quantile(self, q: float) -> float:
        """Quantile of every row's own relative error, NaN if one is not finite; rows whose golden
        is zero do not count.
        """
        live = self.wanted > 0  # a row of zeros has no relative error
        squares = self.error[live] / self.wanted[live]
        if not np.isfinite(squares).all():
            return float("nan")
        return float(np.sqrt(np.quantile(squares, q))) if squares.size else 0.0


def root_ratio(numerator: Array, denominator: Array) -> tuple[float, float]:
    """`sqrt(sum(n) / sum(d))` and its standard error; 0 over 0 counts as equal to its bound, (0,
    0).
    """
    above, below = float(numerator.sum()), float(denominator.sum())
    if below == 0 or not np.isfinite(above + below):
        return (0.0, 0.0) if above == 0 else (float("nan"), float("nan"))
    squared = above / below
    # The delta method for a ratio of sums: each unit contributes its residual n - r d, and units
    # are taken as independent. The square root halves the relative error.
    spread = float(np.linalg.norm(numerator - squared * denominator)) / below
    return float(np.sqrt(squared)), spread / (2 * float(np.sqrt(squared))) if squared else 0.0


def judge(
    data: str,
    found: Mapping[str, Score],
    *,
    absolute: bool = True,
    against: Baseline = BASELINE,
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`(failures, unresolved)`: every bar missed overall or by an expert, in words. NaN is a
    failure.

    Absolute bars hold on Gaussian data where asked for, the comparison with the baseline on all
    data. A figure beyond its bar by at most `RESOLUTION` of its own standard errors is unresolved:
    more tokens would tell.
    """
    failures: list[str] = []
    unresolved: list[str] = []
    for name, one in found.items():
        ratios = [(p.ratio, p.ratio_error) for p in one.parts]
        checks = [(against.slack, ratios, f"of {against.recipe.name}")]
        if absolute and data == BARRED_DATA and name in RMSE_BARS:
            checks.append((RMSE_BARS[name], [(p.rmse, p.rmse_error) for p in one.parts], ""))
            # cosine = 1 - rmse^2 / 2 to first order, so its standard error is rmse times that of
            # rmse
            cosines = [(1 - p.cosine, p.rmse * p.rmse_error) for p in one.parts]
            checks.append((1 - COSINE_BAR, cosines, "cosine"))
        for bar, figures, what in checks:
            worst = max_or_nan(f for f, _ in figures)
            certain = max_or_nan(f - RESOLUTION * error for f, error in figures)
            # Written so that NaN, which no comparison satisfies, counts as missed.
            if not worst <= bar:
                missed = unresolved if certain <= bar else failures
                missed.append(f"{name} {in_words(worst, what)}")
    return tuple(failures), tuple(unresolved)


def in_words(figure: float, what: str) -> str:
    """A missed figure: `+3.5% of deepseek-v3`, `cosine 0.9971`, `7.35%`."""
    if what == "cosine":
        return f"cosine {1 - figure:.4f}"
    return f"{figure - 1:+.1%} {what}" if what else f"{figure:.2%}"


def max_or_nan(values: Iterable[float]) -> float:
    """The largest value; NaN if any is NaN; 0 of nothing."""
    return float(np.max(np.fromiter(values, dtype=np.float64), initial=0.0))
