"""A fault planted in any stage is named with its stage, expert, row and token; healthy steps are
called healthy on every kind of data.
"""

import dataclasses
import json
from contextlib import ExitStack

import numpy as np
import pytest
from click.testing import CliRunner
from framework import numpy, tensor, torch
from numerics_cases import DATA_KINDS
from oracle.case import Case
from oracle.faces import run as run_case
from oracle.golden import scene_of
from planted import SIZES, layout_of, make_step, plant, row_of

from sonicmoe.cli.main import main
from sonicmoe.diagnostics.bisect import (
    BIAS_STAGES,
    INPUTS,
    ROW_STAGES,
    SLOT_STAGES,
    STAGES,
    WEIGHT_STAGES,
    WGRAD_OPERANDS,
    bisect,
    stages_of,
)  # fmt: skip
from sonicmoe.diagnostics.bisect_report import text_of, verdict
from sonicmoe.diagnostics.golden_stages import golden_stages
from sonicmoe.diagnostics.stage_runner import run_stages
from sonicmoe.diagnostics.stage_stats import StageValue, row_deviations, stage_stats
from sonicmoe.diagnostics.step_dump import STEP_FLAGS, DumpError, StepSettings, load_dump, save_dump
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import ActivationType, ZCode, is_glu
from sonicmoe.errors import ShapeError
from sonicmoe.observe import listening
from sonicmoe.quant.recipes import RECIPES, rows
from sonicmoe.quant.reference import dequantize, quantize

PLAIN = {"recipe": None}
TOKEN_STAGES = ("x", "x_fp8", "out", "dout", "dout_fp8", "dx")


def place_of(stage, kind, step):
    """Where to plant, and what the tool must say of it."""
    row, token, slot = row_of(step)
    served = {"expert": 2, "row": row, "token": token, "slot": slot}
    if stage in ROW_STAGES:
        # A broken scale of a square block breaks all of its rows, and the first is named.
        square = stage == "dz_fp8" or stage in WGRAD_OPERANDS
        whole_block = square and kind != "nan" and step.settings.recipe == "dx256"
        return (row, 5), {"expert": 2} if whole_block else served
    if stage in SLOT_STAGES:
        return (token, slot), served
    if stage in WEIGHT_STAGES:
        return (2, 9, 4), {"expert": 2}
    if stage in BIAS_STAGES:
        return (2, 9), {"expert": 2}
    return (token, 7), {"token": token}


def bisected(step, *listeners):
    """What `bisect` finds while these plant their faults."""
    with ExitStack() as heard:
        for listener in listeners:
            heard.enter_context(listening(listener))
        return bisect(step, "reference")


SETTINGS = {
    "dx256": {},
    "unquantised": PLAIN,
    "deepseek-v3": {"recipe": "deepseek-v3", "save_z": "e4m3", "fp8_wgrad": False},
}
# Every stage in two of the settings, once with values that are not finite and once with wrong ones.
PLANTED = [
    (stage, list(SETTINGS)[(number + turn) % 3], (("nan", "inf")[number // 3 % 2], "scaled")[turn])
    for number, stage in enumerate(stage for stage in STAGES if stage != "routing")
    for turn in (0, 1)
    if not (turn and stage in INPUTS)  # finite inputs are what they are
]


def shown(stages, step):
    """Their names in a report: without FP8 no operand is called by it."""
    return [s if step.settings.recipe else s.replace("_fp8", "_read") for s in stages]


@pytest.mark.parametrize(("stage", "settings", "kind"), PLANTED)
def test_a_planted_fault_is_named(stage, settings, kind):
    step = make_step(bias=stage in BIAS_STAGES, **SETTINGS[settings])
    index, wanted = place_of(stage, kind, step)
    report = bisected(step, plant(stage, kind, index))
    fault, (name,) = report.fault, shown([stage], step)
    assert fault is not None and fault.stage == name, text_of(report)
    assert fault.kind in (("deviation",) if kind == "scaled" else ("nan", "inf"))
    assert {name: getattr(fault.place, name) for name in wanted} == wanted
    if kind == "scaled":
        assert report.wrong == (name,), "a stage that is right on wrong inputs is right"
    if stage in TOKEN_STAGES:
        ids = step.indices[wanted["token"]]
        assert fault.place.experts == tuple(one for one in ids if 0 <= one < SIZES.experts)


def test_a_row_given_to_the_wrong_token_is_named():
    step = make_step()
    report = bisected(step, plant("routing", "", ()))
    first = layout_of(step).fields["row_token"]
    assert report.fault.kind == "routing"
    assert report.fault.place.expert == 0 and report.fault.place.row == 0
    assert f"row_token is {first[1]}; the contract says {first[0]} (2 of" in str(report.fault)


@pytest.mark.parametrize("stage", ["y1", "dz_fp8", "y1s", "wgrad_x", "y2"])
def test_nan_in_a_padding_row_is_a_fault_when_it_spreads(stage):
    """Nobody reads one of y2."""
    step = make_step()
    padding = int(np.flatnonzero(~layout_of(step).real)[0])
    bad = plant(stage, "nan", (padding, 0))
    report = bisected(step, bad)
    assert report.healthy
    if stage == "y2":
        assert report.padding == ()
        return
    assert report.padding[0].startswith(f"{stage} at expert 0, row {padding}, column 0: nan")
    fault = bisected(step, bad, plant("dw1", "nan", (0, 0, 0))).fault
    assert (fault.stage, fault.kind) == (stage, "padding")
    assert (fault.place.row, fault.place.expert) == (padding, 0)


@pytest.mark.parametrize("kind", DATA_KINDS)
@pytest.mark.parametrize(
    "settings", [{}, PLAIN, {"recipe": "wide512", "save_z": "bf16"}, {"dtype": "float32"}]
)
def test_healthy_steps_are_called_healthy(kind, settings):
    step = make_step(kind, **settings)
    report = bisect(step, "reference")
    assert report.healthy and report.missing == (), text_of(report)
    assert max(map(len, text_of(report).splitlines())) <= 100
    assert set(stages_of(step)) == set(STAGES) - set(BIAS_STAGES)
    expected = [stage for stage in stages_of(step) if stage != "routing"]
    assert list(report.stats) == shown(expected, step)
    if kind == "gaussian":
        assert all(one.cosine > 0.99 for one in report.stats.values())


def of_activation(step, activation):
    """The step with another activation, and the first rows alone where that has no gate."""
    if is_glu(activation):
        return step.but(activation=activation.value)
    b1 = None if step.b1 is None else step.b1[:, ::2].copy()
    return step.but(w1=step.w1[:, ::2].copy(), b1=b1, activation=activation.value)


@pytest.mark.parametrize("activation", list(ActivationType))
def test_every_activation(activation):
    """The step runs in FP8; a test below compares the stages without it."""
    step = of_activation(make_step(bias=True), activation)
    report = bisect(step, "reference")
    assert report.healthy and report.missing == (), text_of(report)
    assert set(report.stats) == {*stages_of(step)} - {"routing"} and "db1" in report.stats
    assert all(one.cosine > 0.98 for one in report.stats.values()), text_of(report)


def test_without_a_valid_slot_and_without_a_backward():
    step = make_step()
    report = bisect(step.but(indices=np.full_like(step.indices, -1)), "reference")
    assert report.healthy and report.stats["z"].total == 0
    report = bisect(step.but(dout=None), "reference")
    assert report.healthy and "out" in report.stats and "dz" not in report.stats


def test_an_engine_that_raises_keeps_the_stages_before_it():
    def raising(name, value):
        if name == "y2":
            raise IndexError("row 7")
        return value

    report = bisected(make_step(), raising)
    assert not report.healthy and report.error == "IndexError: row 7"
    assert "y1" in report.stats and "y2" in report.missing
    assert "the engine raised: IndexError: row 7" in verdict(report)


@pytest.mark.parametrize(
    "line", ["recipe=dx256", "", "recipe=1x128 save_z=e4m3", "recipe=dx256 fp8_wgrad=False"]
)
def test_a_listener_changes_no_bit(line):
    case = Case.parse(f"dtype=bfloat16 {line}")
    with listening(lambda name, value: value):
        shown = run_case(case, scene_of(case))
    for name, array in run_case(case, scene_of(case)).items():
        np.testing.assert_array_equal(shown[name], array, err_msg=name)


@pytest.mark.parametrize("activation", list(ActivationType))
def test_golden_and_reference_agree_where_nothing_is_quantised(activation):
    """The reference engine is what stages are measured from, and the golden is its oracle; tests/oracle
    has the engine's own.
    """
    step = of_activation(make_step(bias=True, dtype="float32", **PLAIN), activation)
    shown = run_stages(step, ReferenceEngine(), "cpu").stages
    for name, golden in golden_stages(step, layout_of(step)).items():
        atol = 1e-4 * max(1.0, np.abs(golden).max())
        np.testing.assert_allclose(shown[name].values, golden, atol=atol, err_msg=name)


@pytest.mark.parametrize("settings", [{}, PLAIN, {"recipe": "1x128", "save_z": "e4m3"}])
def test_forced_stages_show_the_planted_stage_alone(settings):
    """The reference engine with another run's values makes of them what that run did, to the bit."""
    step = make_step(**settings)
    row, *_ = row_of(step)
    with listening(plant("dz", "scaled", (row, 5))):
        suspect = run_stages(step, ReferenceEngine(), "cpu").stages
        values = {name: value.values for name, value in suspect.items() if name not in INPUTS}
        forced = run_stages(step, ReferenceEngine(), "cpu", forced=values).stages
    same = {name: np.array_equal(one.values, suspect[name].values) for name, one in forced.items()}
    off = {name for name, equal in same.items() if not equal}
    assert off == {"dz"}


def test_statistics():
    values = np.array([[1.0, -2.0], [np.nan, 4.0], [np.inf, -np.inf], [9.0, 9.0]], np.float32)
    stats = stage_stats(StageValue(values), None, np.array([True, True, True, False]))
    assert (stats.total, stats.finite, stats.nan, stats.inf) == (6, 3, 1, 2)
    assert (stats.first_bad, stats.low, stats.high) == ((1, 0), -2.0, 4.0)
    later = stage_stats(StageValue(values), None, np.array([False, False, True, True]))
    assert later.first_bad == (2, 0)
    codes = np.array([[448.0, 0.0, -448.0, 1.0]], np.float32)
    wanted = np.array([[448.0, 0.001, -448.0, 0.0]])
    stats = stage_stats(StageValue(codes, codes, 448.0), wanted)
    assert stats.saturation == 0.5 and stats.underflow == pytest.approx(1 / 3)
    # Small rows are measured against typical ones.
    wanted = np.array([[3.0, 4.0], [0.0, 0.0], [1e-9, 0.0]])
    values = wanted + np.array([[0.5, 0.0], [0.0, 0.0], [1e-9, 0.0]])
    first, second, third = row_deviations(values, wanted, 0.25)
    assert first == pytest.approx(0.1) and second == 0 and third < 1e-8
    assert row_deviations(np.ones((1, 1)), np.zeros((1, 1)), 0.25)[0] == np.inf


def test_dumps_come_back(tmp_path):
    step = make_step(recipe="dx256", activation="geglu", engine="hopper")
    save_dump(tmp_path / "deep" / "step", step)
    again = load_dump(tmp_path / "deep" / "step")
    assert again.settings == step.settings and again.name == step.name
    for name in ("x", "indices", "probs", "w1", "w2", "dout"):
        np.testing.assert_array_equal(getattr(again, name), getattr(step, name))
    biased = make_step(bias=True)
    save_dump(tmp_path / "biased.npz", biased)
    for name in ("b1", "b2"):
        found = getattr(load_dump(tmp_path / "biased.npz"), name)
        np.testing.assert_array_equal(found, getattr(biased, name))
        with pytest.raises(ShapeError, match=f"{name} is missing"):
            biased.but(**{name: None})
    with pytest.raises(ShapeError, match=r"b1 has shape \(3, 128\)"):
        biased.but(b1=biased.b1[:, :128])
    save_dump(tmp_path / "forward.npz", step.but(dout=None))
    assert load_dump(tmp_path / "forward.npz").dout is None


def test_dumps_keep_every_flag_that_decides_what_a_step_computes(tmp_path):
    """A flag of that kind is a field of the engines' settings, and bisect runs the step with it."""
    changed = {"fp8_wgrad": False, "save_z": "e4m3", "recompute_z": True}
    assert set(changed) == {flag.field for flag in STEP_FLAGS}, "give the new flag a value"
    assert set(changed) <= {field.name for field in dataclasses.fields(EngineSettings)}
    save_dump(tmp_path / "step", make_step(**changed))
    settings = load_dump(tmp_path / "step").settings
    assert settings.names() == {**StepSettings().names(), **changed}
    wanted = EngineSettings(recipe=RECIPES["dx256"], fp8_wgrad=False, save_z=ZCode.E4M3)
    assert load_dump(tmp_path / "step").settings.computed == wanted
    assert make_step().but(**changed).settings == settings


def test_bad_dumps_are_refused(tmp_path):
    with pytest.raises(DumpError, match="cannot read"):
        load_dump(tmp_path / "none.npz")
    np.savez(tmp_path / "partial.npz", x=np.zeros((2, 2)), name="a")
    with pytest.raises(DumpError, match=r"partial.npz is no dump of a step: .*indices"):
        load_dump(tmp_path / "partial.npz")
    with pytest.raises(ShapeError, match="probs has shape"):
        make_step().but(probs=np.zeros((3, 2), np.float32))
    for names, words in (
        ({"recipe": "fp4"}, "recipe is 'fp4'"),
        ({"save_z": "int4"}, "settings of a step: SonicMoEConfig.save_z='int4' is not understood"),
        ({"colour": "blue"}, "settings of a step: .*'colour'"),
    ):
        with pytest.raises(DumpError, match=words):
            StepSettings.of(**names)


def run(*arguments):
    return CliRunner().invoke(main, ["bisect", *map(str, arguments)])


def test_command(tmp_path):
    step = make_step()
    save_dump(tmp_path / "good.npz", step)
    good = run(tmp_path / "good.npz")
    assert good.exit_code == 0 and "every stage shown is as it should be" in good.output
    x = step.x.copy()
    x[11, 3] = np.nan
    save_dump(tmp_path / "bad.npz", step.but(x=x))
    bad = run(tmp_path / "bad.npz", "--precision", "bf16")
    assert bad.exit_code == 1
    words = "first bad: input x at token 11, column 3, served by experts"
    assert bad.output.splitlines()[0].startswith(words)
    data = json.loads(run(tmp_path / "bad.npz", "--json").stdout)
    assert data["fault"]["stage"] == "x" and data["stages"]["x"]["nan"] == 1
    assert run(tmp_path / "bad.npz", "--engine", "hopper").exit_code == 2
    assert "cannot read" in run(tmp_path / "absent.npz").output


# Tokens in FP8.


def arrived(step):
    """The step with x and dout as they arrive in FP8, one scale per row and 128 columns."""
    fields = {}
    for name in ("x", "dout"):
        q = quantize(tensor(getattr(step, name)), rows(128))
        fields[name] = numpy(dequantize(q)).astype(np.float32)
        fields[f"{name}_codes"] = numpy(q.codes.view(torch.uint8)).astype(np.uint8)
        fields[f"{name}_scale"] = numpy(q.scale_inv).astype(np.float32)
    return step.but(**fields)


@pytest.mark.parametrize("stage", ["dw1", "dz"])
def test_a_fault_behind_quantised_tokens_is_named(stage):
    step = arrived(make_step("outliers" if stage == "dz" else "gaussian"))
    report = bisect(step, "reference")
    assert report.healthy, text_of(report)
    row, *_ = row_of(step)
    index = (2, 9, 4) if stage == "dw1" else (row, 5)
    report = bisected(step, plant(stage, "scaled", index))
    assert (report.fault.stage, report.fault.place.expert) == (stage, 2)
    assert report.wrong == (stage,), "a stage that is right on wrong inputs is right"
