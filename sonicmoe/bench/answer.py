"""How fast is my layer, and in which precision: the answer as a table and one sentence. Imports no
framework.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from ..config import current_config
from ..engine.capabilities import Workload
from ..engine.settings import EngineSettings
from ..enums import ActivationType
from ..quant.recipes import RECIPES
from .shapes import Shape

KEPT_CALLS = 4  # calls for one write of the weights: micro-batches of an optimizer step
# Times that differ by less are equal: rounds of one contestant differ by about as much.
EQUAL = 1.03
STOCK, BF16, FP8 = "stock", "BF16", "FP8"


@dataclass(frozen=True)
class Way:
    """One way to compute a layer: microseconds of forward and backward where weights change before
    every call, and before every fourth; None where it did not run, with the reason.
    """

    name: str
    new_us: float | None = None
    kept_us: float | None = None
    memory_mib: float | None = None
    refusal: str | None = None

    @property
    def ran(self) -> bool:
        return self.new_us is not None and self.kept_us is not None


@dataclass(frozen=True)
class Answer:
    """All ways of one layer, and what to know of the figures."""

    shape: Shape
    ways: tuple[Way, ...]
    notes: tuple[str, ...]
    measured: bool

    def way(self, name: str) -> Way | None:
        """The way of this name, where it ran."""
        return next((each for each in self.ways if each.name == name and each.ran), None)

    @property
    def advice(self) -> str:
        """One sentence: which precision, when."""
        bf16, fp8, stock = self.way(BF16), self.way(FP8), self.way(STOCK)
        ours = [way for way in (bf16, fp8) if way is not None]
        if not ours:
            return "Stay with stock: this package did not run here, for the reason above."
        if stock and all(
            _gain(stock, way, mode) < EQUAL for way in ours for mode in ("new", "kept")
        ):
            return "Stay with stock: neither BF16 nor FP8 is faster at these sizes."
        return f"{_choice(bf16, fp8)}{_beside(stock, ours)}."

    def table(self) -> Table:
        """A row for each way, with its gain over stock where stock ran."""
        told = "measured" if self.measured else "ESTIMATE"
        table = Table(title=f"{self.shape}: {told}, forward and backward")
        for head in ("", "new weights us", f"kept over {KEPT_CALLS} calls us", "memory MiB"):
            table.add_column(head)
        stock = self.way(STOCK)
        for way in self.ways:
            cells = [
                _cell(us, us and stock and way is not stock and _gain(stock, way, mode))
                for mode, us in (("new", way.new_us), ("kept", way.kept_us))
            ]
            memory = "–" if way.memory_mib is None else f"{way.memory_mib:,.0f}"
            table.add_row(way.name, *cells, memory)
        return table

    @property
    def lines(self) -> list[str]:
        """What did not run and why, what the figures are, and last the advice."""
        refused = [f"{way.name} did not run: {way.refusal}" for way in self.ways if way.refusal]
        return [*refused, *self.notes, self.advice]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "advice": self.advice}


def workload_of(shape: Shape, name: str) -> Workload:
    """What an engine must be able to compute to run the way `name`, `BF16` or `FP8`."""
    recipe = RECIPES[current_config().recipe] if name == FP8 else None
    settings = EngineSettings(ActivationType.SWIGLU, recipe)
    return Workload(settings, shape.hidden, shape.intermediate)


def _us(way: Way, mode: str) -> float:
    us = way.new_us if mode == "new" else way.kept_us
    assert us is not None
    return us


def _gain(base: Way, way: Way, mode: str) -> float:
    """How many times as fast as `base` a way is."""
    return _us(base, mode) / _us(way, mode)


def _cell(us: float | None, gain: Any) -> str:
    if us is None:
        return "–"
    return f"{us:,.0f}" + (f" ({gain:.2f}x)" if gain else "")


def _choice(bf16: Way | None, fp8: Way | None) -> str:
    """Which of the two, by their times in both modes."""
    if bf16 is None or fp8 is None:
        return f"Take {FP8 if bf16 is None else BF16}, which alone ran here"
    new, kept = (_gain(bf16, fp8, mode) for mode in ("new", "kept"))
    if new >= EQUAL:
        return f"Take FP8: it is {new:.2f} times as fast as BF16"
    if kept >= EQUAL:
        with_new = "as fast as FP8" if new > 1 / EQUAL else f"{1 / new:.2f} times as fast as FP8"
        return (
            f"Take FP8 where weights serve {KEPT_CALLS} or more micro-batches, where it is "
            f"{kept:.2f} times as fast as BF16, and else BF16, which is {with_new}"
        )
    return "Take BF16: FP8 is not faster at these sizes"


def _beside(stock: Way | None, ours: list[Way]) -> str:
    """The best gain over stock with new weights."""
    if stock is None:
        return ""
    best = max(ours, key=lambda way: _gain(stock, way, "new"))
    gain = _gain(stock, best, "new")
    return f"; with new weights {best.name} is {gain:.2f} times as fast as compiled stock"
