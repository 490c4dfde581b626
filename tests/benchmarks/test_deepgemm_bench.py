"""DeepGEMM beside our engines: the operands it is handed, and the table of its figures."""

from __future__ import annotations

import builtins
import importlib
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from fake_deep_gemm import make_module
from framework import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import deepgemm_bench as script
import deepgemm_gemms as gemms
from deepgemm_gemms import PeerError, load, prepare

from sonicmoe.bench import runner
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.trace import Kernel
from sonicmoe.observe import ranges_on

SHAPE = Shape(150, 256, 128, 4, 2)
COUNTS = [130, 0, 128, 42]  # partly filled blocks, none at all, whole ones
TINY = Shape(16, 128, 128, 2, 1)


@pytest.fixture
def install(monkeypatch):
    """Puts a fake module where `import deep_gemm` finds it."""

    def put(**changes):
        module = make_module(**changes)
        monkeypatch.setitem(sys.modules, "deep_gemm", module)
        return module

    return put


def test_the_six_products_are_handed_what_deepgemm_takes_and_are_right():
    module = make_module()
    prepare(module, SHAPE, [COUNTS], "cpu")
    rows, padded = sum(COUNTS), 256 + 128 + 128
    assert module.calls.log == [
        ("rows", 4, rows, 256, 256),  # z of x: 2 I by H
        ("rows", 4, rows, 256, 128),  # out of y: H by I
        ("rows", 4, rows, 128, 256),  # dy of dout: I by H
        ("rows", 4, rows, 256, 256),  # dx of dz: H by 2 I
        ("experts", 4, padded, 256, 128),  # dw2: H by I
        ("experts", 4, padded, 256, 256),  # dw1: 2 I by H
    ]

    # Sizes that all differ show which one each product takes.
    module.calls.log.clear()
    prepare(module, Shape(8, 640, 256, 2, 2), [[8, 8]], "cpu")
    assert [call[3:] for call in module.calls.log] == [
        (512, 640), (640, 256), (256, 640), (640, 512), (640, 256), (512, 640),
    ]  # fmt: skip


def test_both_forms_of_an_operand_are_one_matrix_with_zeros_as_padding():
    layout = gemms._Layout(COUNTS, "cpu")
    (codes, scales), by_column = gemms._operand(layout, 256)
    by_row = codes.to(torch.float32) * scales.repeat_interleave(128, 1)
    assert by_row.std() > 0.5
    for expert, (start, count, padded) in enumerate(
        zip(layout.starts, layout.counts, layout.padded, strict=True)
    ):
        own = gemms._of_expert(by_column, layout, expert).T
        assert own.shape == (padded, 256) and not own[count:].any()
        # Each form rounds by itself: half a step of three bits of mantissa, twice.
        torch.testing.assert_close(own, by_row[start : start + padded], rtol=0.15, atol=0.03)


def test_phases_and_steps_run_forward_and_backward_in_order():
    module, opened = make_module(), []
    six = prepare(module, SHAPE, [COUNTS], "cpu")

    class Range:
        def __init__(self, name):
            opened.append(name.removeprefix("sonicmoe."))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    forward, backward = ["up", "down"], ["dgated", "dx_gemm", "dw2", "dw1"]
    with ranges_on(Range):
        for name, run_phase in six.phases(0):
            assert name == ("backward" if opened else "forward")
            run_phase()
        assert opened == forward + backward
        opened.clear()
        stack = six.steps(2)
        stack.run()
    assert stack.layers == 2 and opened == 2 * forward + 2 * backward


def test_operands_rotate_as_far_as_it_takes_to_leave_the_cache(monkeypatch):
    counts = [[16, 0], [8, 8], [0, 16]]
    assert len(prepare(make_module(), TINY, counts, "cpu")._sets) == 3
    nbytes = 2 * TINY.rows * 5 * 128
    monkeypatch.setattr(gemms, "ROTATION_BYTES", nbytes)
    module = make_module()
    six = prepare(module, TINY, counts, "cpu")
    assert len(six._sets) == 2
    module.calls.log.clear()
    for number in range(3):
        six.phases(number)[1][1]()
    experts = [call[2] for call in module.calls.log if call[0] == "experts"]
    assert len(module.calls.log) == 12 and experts == [128, 128, 256, 256, 128, 128]


def test_gradients_add_up_and_checking_leaves_none_behind():
    six = prepare(make_module(), TINY, [[16, 0]], "cpu")
    dw1 = six._sets[0][-1].launch.__closure__
    (gradient,) = (c.cell_contents for c in dw1 if isinstance(c.cell_contents, torch.Tensor))
    assert not gradient.any()
    six._sets[0][-1].run()
    once = gradient.clone()
    six._sets[0][-1].run()
    torch.testing.assert_close(gradient, 2 * once)
    assert once[0].any() and not once[1].any()


def wrong(kind):
    """A library whose results are not the product of the operands."""
    module = make_module()
    right = getattr(module, kind)

    def spoiled(a, b, d, *more):
        right(a, b, d, *more)
        d.mul_(1.05)

    return {kind: spoiled}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (wrong("m_grouped_fp8_gemm_nt_contiguous"), "up is off by .* of its norm"),
        (wrong("k_grouped_fp8_gemm_nt_contiguous"), "dw2 is off by .* of its norm"),
        ({"m_grouped_fp8_gemm_nt_contiguous": lambda *_: None}, "up is off by nan"),
        ({"m_grouped_fp8_gemm_nt_contiguous": lambda a, b, d: None}, "TypeError: .*positional"),
        ({"get_mk_alignment_for_contiguous_layout": lambda: 240}, "aligns experts to 240 rows"),
    ],
)
def test_another_interface_is_said_and_not_timed(changes, message):
    with pytest.raises(PeerError, match=message):
        prepare(make_module(**changes), SHAPE, [COUNTS], "cpu")


def test_sizes_and_gpus_that_it_does_not_take_are_named(monkeypatch):
    with pytest.raises(PeerError, match="intermediate is 96; needed: a multiple of 128"):
        prepare(make_module(), Shape(8, 128, 96, 2, 1), [[8, 0]], "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    with pytest.raises(PeerError, match=r"compute capability 10\.0; needed: 9\.0"):
        prepare(make_module(), TINY, [[16, 0]], "cuda:0")


def test_the_module_is_loaded_where_it_is_installed(install, monkeypatch, capsys):
    assert install() is load()
    install(k_grouped_fp8_gemm_nt_contiguous=None)
    with pytest.raises(PeerError, match=r"deep_gemm 2\.6\.1 has no k_grouped_fp8_gemm_nt_cont"):
        load()

    def imported(name):
        builtins.print("some parts are missing")
        raise AssertionError("no CUDA\nhome")

    monkeypatch.setattr(importlib, "import_module", imported)
    with pytest.raises(
        PeerError, match="deep_gemm cannot be imported: AssertionError: no CUDA home"
    ):
        load()
    # What the import prints would spoil the JSON object on stdout.
    assert capsys.readouterr().out == ""


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that passes for a GPU: the host's clock, a kernel of 7 us in every phase."""
    clocks = {name: getattr(runner, name) for name in ("sustain", "time_steps")}

    def profile(calls):
        for _, run_phase in (phase for phases in calls for phase in phases):
            run_phase()
        return [Kernel("k", 0.0, 7.0, "", name) for phases in calls for name, _ in phases]

    monkeypatch.setattr(runner, "find_device", lambda: "cuda:0")
    monkeypatch.setattr(runner, "arch_of", lambda device: "sm_90a")
    for name in ("Layer", "rotating_batches"):
        made = getattr(script, name)
        monkeypatch.setattr(script, name, lambda shape, device, made=made: made(shape, "cpu"))
    monkeypatch.setattr(runner, "time_steps", lambda s, n, _: clocks["time_steps"](s, n, "cpu"))
    monkeypatch.setattr(runner, "sustain", lambda s, t, _: clocks["sustain"](s, t, "cpu", 0.0))
    monkeypatch.setattr(runner, "profile_steps", lambda stack, steps: None)
    monkeypatch.setattr(runner, "profile_phases", profile)
    monkeypatch.setattr(runner, "STEADY_ROUNDS", 3)
    monkeypatch.setattr(script, "prepare", lambda lib, shape, counts, _: prepare(lib, shape, counts, "cpu"))  # fmt: skip
    monkeypatch.setitem(script.SHAPES, "reference", TINY)


def run(*options):
    sizes = ["--layers", "2", "--sustained", "0.02", "--engine", "reference:off"]
    return CliRunner().invoke(script.main, [*sizes, *options])


def test_the_six_take_turns_with_the_engines_on_the_same_rows(install, gpu, monkeypatch):
    module, order = install(), []
    timed = runner.time_steps

    def noted(stack, *more):
        order.append(type(stack).__name__)
        return timed(stack, *more)

    monkeypatch.setattr(runner, "time_steps", noted)
    outcome = run("--json")
    assert outcome.exit_code == 0, outcome.output
    six, engine = json.loads(outcome.stdout)["rows"]
    assert order == ["PeerStack", "Stack", "Stack", "PeerStack", "PeerStack", "Stack"]
    assert (six["engine"], engine["engine"]) == (script.NAME, "reference:off")
    assert {call[2] for call in module.calls.log if call[0] == "rows"} == {TINY.rows}
    assert all(row["busy_us"] == 14 and row["sustained_us"] > 0 for row in (six, engine))
    assert "over" in run().output


def test_ratios_are_those_to_the_six(install, gpu, monkeypatch):
    results = [runner.Result(SHAPE, name, True, True) for name in (script.NAME, "hopper:perf")]
    for result, busy in zip(results, (4600.0, 5100.0), strict=True):
        result.busy = {"forward": busy / 4, "backward": 3 * busy / 4}
        result.stages = {"up": busy}
    columns = [list(column.cells) for column in script.engine_table(results).columns]
    assert columns[1:3] == [["4,600", "5,100"], ["1.00", "1.11"]]
    assert columns[3:] == [["–", "–"]] * 3, "there is no sustained row"
    (rate,) = script.gemm_table(results[0]).columns[2].cells
    assert rate == f"{4 * SHAPE.rows * 256 * 128 / 4600 / 1e6:,.0f}"


def test_what_cannot_be_measured_is_said_in_one_line(install, gpu, monkeypatch):
    install(m_grouped_fp8_gemm_nt_contiguous=lambda *_: None)
    outcome = run()
    assert outcome.exit_code == 1 and "up is off by nan of its norm" in outcome.output
    monkeypatch.setattr(runner, "find_device", lambda: "cpu")
    outcome = run()
    assert outcome.exit_code == 1 and outcome.output == "Error: needs a Hopper GPU\n"
