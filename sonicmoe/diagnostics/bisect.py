"""Which stage of a step goes wrong first, and at which expert, row and token.

A stage is wrong where it holds a NaN or an infinity, or where it is further than rounding can take
it from what the reference engine makes of the same inputs. Stages are judged in the order in which
they run, so the first wrong one is the cause. Cosine and RMSE in the statistics are against fp64
from the inputs of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..engine.reference import ReferenceEngine
from ..engine.select import choose_engine
from ..enums import EngineName
from .golden_stages import RowLayout, golden_stages
from .json_data import plain
from .stage_runner import StageRun, run_stages
from .stage_stats import StageStats, StageValue, closeness, row_deviations, stage_stats
from .step_dump import GRADIENT, Array, StepDump

INPUTS = ("x", "probs", "w1", "w2", "b1", "b2", "dout")
WGRAD_OPERANDS = ("wgrad_dout", "wgrad_y1s", "wgrad_x", "wgrad_dz")
ROW_STAGES = ("z", "z_saved", "y1", "y2", "dy1", "dz", "y1s", "dz_fp8", "dx_rows", *WGRAD_OPERANDS)
SLOT_STAGES = ("probs", "ds")
WEIGHT_STAGES = ("w1", "w2", "w1_fp8", "w2_fp8", "dw1", "dw2")
DOWN_BIASES = ("b2", "db2")
BIAS_STAGES = ("b1", "db1", *DOWN_BIASES)
# The order in which stages run. The first faulty name in this order is the cause, so a stage must
# come after all its inputs.
FORWARD = (
    "x", "w1", "w2", "b1", "b2", "probs", "routing",
    "w1_fp8", "w2_fp8", "x_fp8", "z", "z_saved", "y1", "y2", "out",
)  # fmt: skip
BACKWARD_DX = ("dout", "dout_fp8", "dy1", "ds", "dz", "y1s", "dz_fp8", "dx_rows", "dx")
BACKWARD_DW = ("wgrad_dout", "wgrad_y1s", "dw2", "db2", "wgrad_x", "wgrad_dz", "dw1", "db1")
STAGES = (*FORWARD, *BACKWARD_DX, *BACKWARD_DW)

# GEMM operands: an engine that reads whole tiles of them needs finite padding rows.
PADDING = "padding"
READ_PADDING = ("y1", "dz", "y1s", "dz_fp8", *WGRAD_OPERANDS)

# Relative RMSE of a stage and deviation of its worst row, beyond which it is wrong. What is left
# between a stage and the reference engine's is rounding: 3 % where one side is quantised and the
# other is not, 0.4 % of bf16.
FP8_BARS, PLAIN_BARS = (0.05, 0.15), (0.02, 0.08)
# Rows far smaller than the others are measured against this share of the typical norm: their blocks
# may be scaled by larger rows.
ROW_FLOOR = 0.25


def stages_of(step: StepDump) -> tuple[str, ...]:
    """The stages that the step has, in the order in which they run."""
    stages = FORWARD if step.dout is None else STAGES
    return tuple(name for name in stages if step.b1 is not None or name not in BIAS_STAGES)


@dataclass(frozen=True)
class ValuePlace:
    """Where: what does not apply is None. `experts` are those that serve the token when the place
    is a token's. index: of the stage, whose weights are native, and so are row and column of these.
    """

    index: tuple[int, ...]
    expert: int | None = None
    row: int | None = None
    token: int | None = None
    slot: int | None = None
    column: int | None = None
    experts: tuple[int, ...] = ()

    def __str__(self) -> str:
        """`expert 3, row 130, token 17, column 5`."""
        named = (
            (name, getattr(self, name)) for name in ("expert", "row", "token", "slot", "column")
        )
        words = [f"{name} {value}" for name, value in named if value is not None]
        if self.experts:
            words.append(f"served by experts {', '.join(map(str, self.experts))}")
        return ", ".join(words) or f"index {self.index}"


@dataclass(frozen=True)
class Fault:
    """The first wrong stage: `kind` is "nan", "inf", "deviation", "padding" or "routing".

    caller: the caller's name of the tensor that the stage shows, where it is known.
    """

    stage: str
    kind: str
    place: ValuePlace
    what: str
    caller: str | None = None

    def __str__(self) -> str:
        """`first bad: input w1 = experts.gate_up_proj at expert 5, row 14, column 3: nan; ...`."""
        source = "input " if self.stage in INPUTS else "stage "
        # Of x and dout most callers have the same name.
        says = self.caller is None or self.caller.removeprefix(GRADIENT) in ("x", "out")
        own = "" if says else f" = {self.caller}"
        return f"first bad: {source}{self.stage}{own} at {self.place}: {self.what}"


@dataclass(frozen=True, eq=False)
class BisectReport:
    """Statistics of every stage shown, in order, and the first fault, None when every stage is as
    expected.

    missing: stages that the engine does not show (it fuses them, or shows them in a form of its
    own). layer: the module that has the weights, by its name in the caller's model; empty where it
    is not known.
    wrong: every wrong stage, those that a fault has spread to included.
    error: the exception that ended the run, if one did.
    padding: NaN or infinity in padding rows of a healthy run, which is harmless in an engine that
        reads no padding.
    """

    step: str
    engine: str
    stats: dict[str, StageStats]
    fault: Fault | None
    missing: tuple[str, ...]
    wrong: tuple[str, ...]
    error: str | None = None
    padding: tuple[str, ...] = ()
    layer: str = ""

    @property
    def healthy(self) -> bool:
        """Whether every stage shown is as it should be, and the run came to its end."""
        return self.fault is None and self.error is None

    def to_json(self) -> dict[str, Any]:
        """Plain data; numbers that are not finite become None."""
        found = asdict(self)
        found["stages"] = found.pop("stats")
        listed: dict[str, Any] = plain(found)
        return listed


def bisect(step: StepDump, engine: str, device: str = "cpu") -> BisectReport:
    """Run `step` on `engine`, a value of `EngineName`, and judge it stage by stage.
    EngineUnavailableError where an engine does not run on `device` ("cpu" or "cuda:0").
    """
    # Rows are compared one by one, so every side must lay them out alike. The layout comes from a
    # plain loop and not from the routing kernels, which may be what is wrong.
    layout = RowLayout.of(step, step.settings.computed.row_alignment)
    run = run_stages(step, choose_engine(device, EngineName(engine)).engine, device)
    judged = _Judge(step, layout)
    values = judged.comparable(run)
    # Against fp64 from the inputs of the step, one wrong stage makes all later ones wrong. So the
    # reference engine runs with the values of this run forced in, and every stage is measured
    # against what it makes of them. The golden serves the statistics.
    forced = run_stages(step, ReferenceEngine(), device, forced=judged.forced(values))
    judged.standards = {name: value.values for name, value in forced.stages.items()}
    if forced.error is not None and run.error is None:
        run.error = f"the stages behind it are not judged: the reference engine: {forced.error}"
    return judged.report(run, values)


class _Judge:
    """Compares the stages of one run with those expected, and translates indices into places.

    standards: what the deviation of a stage is measured from, by stage.
    """

    def __init__(self, step: StepDump, layout: RowLayout) -> None:
        self._step, self._layout, self._expected = step, layout, golden_stages(step, layout)
        self.standards: dict[str, Array] = {}
        self._quantised = step.settings.recipe is not None
        self._stage_bar, self._row_bar = FP8_BARS if self._quantised else PLAIN_BARS

    def comparable(self, run: StageRun) -> dict[str, StageValue]:
        """The stages of a run in the shapes of the golden. Engines show what they have: a stage of
        another shape is in a form of the engine's own, and counts as not shown.
        """
        shown = {name: run.stages[name] for name in stages_of(self._step) if name in run.stages}
        # Engines that do not wait for counts size row tensors for the worst case. The rows behind
        # the contract's last one belong to nobody.
        rows = len(self._layout.row_expert)
        cut = {
            name: value.head(rows) if name in ROW_STAGES else value for name, value in shown.items()
        }
        return {
            name: value
            for name, value in cut.items()
            if name not in self._expected or self._expected[name].shape == value.values.shape
        }

    def forced(self, values: Mapping[str, StageValue]) -> dict[str, Array]:
        """What the reference engine is to go on with: all but the inputs, which it has itself."""
        padding = ~self._layout.real[:, None]
        return {
            name: np.where(padding & ~np.isfinite(value.values), 0, value.values)
            if name in ROW_STAGES
            else value.values
            for name, value in values.items()
            if name not in INPUTS
        }

    def report(self, run: StageRun, values: Mapping[str, StageValue]) -> BisectReport:
        """Statistics of every stage of `run`, and the first that is wrong."""
        stages = stages_of(self._step)
        stats: dict[str, StageStats] = {}
        faults: list[Fault] = []
        for name in stages:
            if name == "routing":
                faults += self._routing(run.routing)
            elif name in values:
                stats[self._shown(name)], found = self._stage(name, values[name])
                faults += found
        harmless: tuple[str, ...] = ()
        # NaN in padding rows is a fault only if it went further: engines that read no padding need
        # not clear it. Where it went no further, no fault of another kind is found.
        if all(fault.kind == PADDING for fault in faults):
            harmless = tuple(f"{fault.stage} at {fault.place}: {fault.what}" for fault in faults)
            faults = []
        return BisectReport(
            self._step.name,
            run.engine,
            stats,
            faults[0] if faults else None,
            tuple(self._shown(one) for one in stages if one != "routing" and one not in values),
            tuple(dict.fromkeys(fault.stage for fault in faults)),
            run.error,
            harmless,
            "" if self._step.caller is None else self._step.caller.layer,
        )

    def _stage(self, name: str, value: StageValue) -> tuple[StageStats, list[Fault]]:
        """Statistics, and at most one fault."""
        mask = self._layout.real if name in ROW_STAGES else None
        wanted = self._expected.get(name)
        if name == "probs":  # those of invalid slots are never read
            # The caller may leave anything at invalid slots, also NaN. It must neither be reported
            # nor spoil the statistics.
            served = self._layout.fields["slot_row"] >= 0
            value = StageValue(np.where(served, value.values, 0))
            wanted = None if wanted is None else np.where(served, wanted, 0)
        stats = stage_stats(value, wanted, mask)
        return stats, list(self._faults(name, value, stats))

    def _faults(self, name: str, value: StageValue, stats: StageStats) -> Iterator[Fault]:
        # A value that is not finite is reported as such and not as a deviation, because a distance
        # from NaN says nothing.
        if stats.first_bad is not None:
            found = float(value.values[stats.first_bad])
            what = f"{found}; {stats.nan} NaN and {stats.inf} infinite of {stats.total}"
            kind = "nan" if math.isnan(found) else "inf"
            yield self._fault(name, kind, stats.first_bad, what)
        # Real rows are finite here. Padding rows are looked at only where a GEMM may multiply them
        # with other rows' data.
        elif name in READ_PADDING and (bad := ~np.isfinite(value.values[~self._layout.real])).any():
            position = np.argwhere(bad)[0]
            index = (int(np.flatnonzero(~self._layout.real)[position[0]]), int(position[1]))
            yield self._fault(name, PADDING, index, f"{value.values[index]} in a padding row")
        # Inputs are given and have nothing to be measured against.
        elif name not in INPUTS and (standard := self.standards.get(name)) is not None:
            yield from self._deviations(name, value, standard)

    def _deviations(self, name: str, value: StageValue, standard: Array) -> Iterator[Fault]:
        """The first row far off, or the worst one of a stage that is off as a whole."""
        # A slot's gradient is one number. As a row of one column it goes through the same formulas
        # as rows of tokens.
        values = value.values[..., None] if name in SLOT_STAGES else value.values
        standard = standard.reshape(values.shape)
        rows = row_deviations(values, standard, ROW_FLOOR)
        real = self._layout.real if name in ROW_STAGES else np.ones(len(rows), dtype=bool)
        rows = np.where(real, rows, 0)
        beyond = rows > self._row_bar
        # Two bars: one row far off, which an average over many rows would hide, and a small error
        # in all rows, which no single row shows.
        whole = closeness(
            values[real] if name in ROW_STAGES else values,
            standard[real] if name in ROW_STAGES else standard,
        )
        if not beyond.any() and not whole["rmse"] > self._stage_bar:
            return
        # `argmax` of a boolean array is its first True.
        first = int(beyond.argmax()) if beyond.any() else int(rows.argmax())
        index = tuple(int(axis) for axis in np.unravel_index(first, values.shape[:-1]))
        column = int(np.abs(values[index] - standard[index]).argmax())
        what = (
            f"off by {rows[first]:.1%} of its norm, where rounding explains a few percent "
            f"({int(beyond.sum())} rows are beyond {self._row_bar:.0%}); "
            f"the whole stage by {whole['rmse']:.2%}, cosine {whole['cosine']:.4f}"
        )
        place = index if name in SLOT_STAGES else (*index, column)
        yield self._fault(name, "deviation", place, what)

    def _fault(self, name: str, kind: str, index: tuple[int, ...], what: str) -> Fault:
        place, caller = self._place(name, index), self._step.caller
        called = None if caller is None else caller.called(name, place.expert)
        return Fault(self._shown(name), kind, place, what, called)

    def _shown(self, name: str) -> str:
        """The name of a stage in a report: operands of a step without FP8 are no FP8 codes."""
        return name if self._quantised else name.replace("_fp8", "_read")

    def _routing(self, found: dict[str, Array]) -> list[Fault]:
        # All engines share the builder of the routing, so only the contract can judge it. The first
        # tensor that breaks it is named, at its first wrong element.
        for name, built in found.items():
            wanted = self._layout.fields[name]
            array = built[: len(wanted)]  # rows beyond the contract's are padding by definition
            if array.shape != wanted.shape:
                what = f"{name} has shape {array.shape}; the contract says {wanted.shape}"
                return [Fault("routing", "routing", ValuePlace(()), what)]
            # Compared in the dtype of the builder: fp32 probabilities against fp64 ones would
            # differ by rounding.
            off = array != wanted.astype(array.dtype)
            if off.any():
                index = _first(off)
                what = (
                    f"{name} is {array[index]}; the contract says {wanted[index]} "
                    f"({int(off.sum())} of {off.size} differ)"
                )
                return [Fault("routing", "routing", self._routing_place(name, index), what)]
        return []

    def _routing_place(self, name: str, index: tuple[int, ...]) -> ValuePlace:
        if name == "slot_row":
            # `slot_row` has the shape of probabilities, [T, K], so its places are those of `ds`.
            return self._place("ds", index)
        if name.startswith("row_"):
            place = self._place("z", (*index, 0))
            return ValuePlace(index, place.expert, place.row, place.token, place.slot)
        return ValuePlace(index, expert=min(index[0], self._step.num_experts - 1))

    def _place(self, name: str, index: tuple[int, ...]) -> ValuePlace:
        if name in ROW_STAGES:
            slot = int(self._layout.fields["row_slot"][index[0]])
            expert, topk = int(self._layout.row_expert[index[0]]), self._step.indices.shape[1]
            # A padding row has an expert, whose share of rows it fills up, but no token.
            if slot < 0:
                return ValuePlace(index, expert, index[0], column=index[1])
            return ValuePlace(index, expert, index[0], slot // topk, slot % topk, index[1])
        if name in SLOT_STAGES:
            row = int(self._layout.fields["slot_row"][index])
            if row < 0:
                return ValuePlace(index, token=index[0], slot=index[1])
            return ValuePlace(index, int(self._step.indices[index]), row, index[0], index[1])
        if name in (*WEIGHT_STAGES, *BIAS_STAGES):
            return _weight_place(name, index)
        return ValuePlace(
            index, token=index[0], column=index[1], experts=self._experts_of(index[0])
        )

    def _experts_of(self, token: int) -> tuple[int, ...]:
        ids = self._step.indices[token]
        return tuple(int(one) for one in ids if 0 <= one < self._step.num_experts)


def _first(true: Array) -> tuple[int, ...]:
    return tuple(int(axis) for axis in np.argwhere(true)[0])


def _weight_place(name: str, index: tuple[int, ...]) -> ValuePlace:
    expert, *rest = index
    if name in DOWN_BIASES:
        return ValuePlace(index, expert=expert, column=rest[0])
    return ValuePlace(index, expert=expert, row=rest[0], column=rest[1] if len(rest) > 1 else None)
