"""DeepGEMM beside our engines: the operands it is handed, what becomes of its figures, and a bench
that goes on where it cannot be measured.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import json
import sys
import weakref

import pytest
from click.testing import CliRunner
from fake_deep_gemm import make_module
from framework import torch

from sonicmoe.bench import deepgemm, runner
from sonicmoe.bench.deepgemm import NAME, PeerError, load, prepare
from sonicmoe.bench.figures import Result, Spread, Sustained, Turn
from sonicmoe.bench.nvml import Reading
from sonicmoe.bench.plots import plot_all
from sonicmoe.bench.report import notes, rate_table, stage_table, sustained_table, time_table
from sonicmoe.bench.runner import measure
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.timing import time_phases
from sonicmoe.bench.workload import Variant
from sonicmoe.cli.main import main
from sonicmoe.enums import EngineName
from sonicmoe.observe import ranges_on

SHAPE = Shape(150, 256, 128, 4, 2)
COUNTS = [130, 0, 128, 42]  # partly filled blocks, none at all, whole ones
TINY = Shape(16, 128, 128, 2, 1)
OFF = Variant(EngineName.REFERENCE, "off")


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


def test_sizes_are_those_of_the_layer_where_all_differ():
    module = make_module()
    prepare(module, Shape(8, 640, 256, 2, 2), [[8, 8]], "cpu")
    assert [call[3:] for call in module.calls.log] == [
        (512, 640), (640, 256), (256, 640), (640, 512), (640, 256), (512, 640),
    ]  # fmt: skip


def test_both_forms_of_an_operand_are_one_matrix_with_zeros_as_padding():
    layout = deepgemm._Layout(COUNTS, "cpu")
    (codes, scales), by_column = deepgemm._operand(layout, 256)
    by_row = codes.to(torch.float32) * scales.repeat_interleave(128, 1)
    assert by_row.std() > 0.5
    for expert, (start, count, padded) in enumerate(
        zip(layout.starts, layout.counts, layout.padded, strict=True)
    ):
        own = deepgemm._of_expert(by_column, layout, expert).T
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
        assert list(time_phases(six.phases(0), "cpu")) == ["forward", "backward"]
        assert opened == forward + backward
        opened.clear()
        stack = six.steps(2)
        stack.run()
    assert stack.layers == 2 and opened == 2 * forward + 2 * backward


def test_operands_rotate_as_far_as_it_takes_to_leave_the_cache(monkeypatch):
    counts = [[16, 0], [8, 8], [0, 16]]
    assert len(prepare(make_module(), TINY, counts, "cpu")._sets) == 3
    nbytes = 2 * TINY.rows * 5 * 128
    monkeypatch.setattr(deepgemm, "ROTATION_BYTES", nbytes)
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
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
    monkeypatch.setattr(sys, "meta_path", [])
    assert load() is None
    assert install() is load()
    install(k_grouped_fp8_gemm_nt_contiguous=None)
    with pytest.raises(PeerError, match=r"deep_gemm 2\.6\.1 has no k_grouped_fp8_gemm_nt_cont"):
        load()

    def fails(error):
        def imported(name):
            builtins.print("some parts are missing")
            raise error

        monkeypatch.setattr(importlib, "import_module", imported)
        with pytest.raises(PeerError) as caught:
            load()
        return str(caught.value)

    assert fails(AssertionError("no CUDA\nhome")) == (
        "deep_gemm cannot be imported: AssertionError: no CUDA home"
    )
    assert "No module named 'x'" in fails(ModuleNotFoundError("No module named 'x'", name="x"))
    # What the import prints would spoil the JSON object on stdout.
    assert capsys.readouterr().out == ""


@pytest.fixture
def gpu(monkeypatch):
    """A CPU that passes for a GPU: the host's clock, no profiler."""
    original = {name: getattr(runner, name) for name in ("time_phases", "sustain", "time_steps")}
    monkeypatch.setattr(runner, "find_device", lambda: "cuda:0")
    monkeypatch.setattr(runner, "arch_of", lambda device: "sm_90a")
    for name in ("Layer", "rotating_batches"):
        made = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda shape, device, made=made: made(shape, "cpu"))
    monkeypatch.setattr(runner, "time_phases", lambda p, _: original["time_phases"](p, "cpu"))
    monkeypatch.setattr(runner, "time_steps", lambda s, n, _: original["time_steps"](s, n, "cpu"))
    monkeypatch.setattr(
        runner, "sustain", lambda s, n, _, g: original["sustain"](s, n, "cpu", g, 0.0)
    )
    monkeypatch.setattr(runner, "open_nvml", lambda device: "no NVML here")
    monkeypatch.setattr(runner, "profile_steps", lambda stack, steps: [])
    monkeypatch.setattr(runner, "profile_phases", lambda calls, nvtx: [])
    memory = runner.measure_memory
    monkeypatch.setattr(runner, "measure_memory", lambda call, _: memory(call, "cpu"))
    monkeypatch.setattr(
        deepgemm, "prepare", lambda lib, shape, counts, _: prepare(lib, shape, counts, "cpu")
    )


def test_the_peer_takes_turns_with_the_engines_on_the_same_rows(install, gpu, monkeypatch):
    module, order = install(), []
    timed = runner.time_phases
    monkeypatch.setattr(runner, "time_phases", lambda p, d: order.append(len(p)) or timed(p, d))
    ours, peer = measure(TINY, [OFF], rounds=3, warmup=1, layers=2, sustained_s=0.02, peer=True)
    # Three phases are ours, two the peer's: one warm-up each, then interleaved.
    assert order == [3, 2, 3, 2, 2, 3, 3, 2]
    assert (ours.peer, peer.peer, peer.variant, peer.refusal) == (False, True, NAME, None)
    assert peer.wall["pair"].count == 3 and set(peer.wall) == {"forward", "backward", "pair"}
    assert peer.steady.median > 0 and peer.sustained.us.count >= 2
    assert {call[2] for call in module.calls.log if call[0] == "rows"} == {TINY.rows}
    assert peer.gbytes_per_s is None and set(peer.floors) == {
        "up", "down", "dgated", "dx_gemm", "dw2", "dw1",
    }  # fmt: skip
    data = peer.to_json()
    assert data["peer"] is True and data["sustained"]["unavailable"] == "no NVML here"


def test_without_the_module_or_the_wish_there_is_no_peer(install, gpu, monkeypatch):
    monkeypatch.setattr(deepgemm, "load", lambda: None)
    assert len(measure(TINY, [OFF], rounds=1, warmup=1, layers=1, peer=True)) == 1
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    install()
    assert len(measure(TINY, [OFF], rounds=1, warmup=1, peer=True)) == 1, "no GPU"


@pytest.mark.parametrize("flags", [(), ("--no-peer",)])
def test_the_bench_goes_on_where_the_peer_cannot(install, gpu, monkeypatch, flags):
    install(m_grouped_fp8_gemm_nt_contiguous=lambda *_: None)
    facts = {
        "versions": {}, "clocks": {}, "device": "H200", "architecture": "sm_90a", "date": "today"
    }  # fmt: skip
    monkeypatch.setattr(runner, "machine", lambda: facts)
    options = ["--T", "16", "--H", "128", "--I", "128", "--E", "2", "--K", "1", "--rounds", "1"]
    options += ["--layers", "1", "--sustained", "0", "--engine", "reference:off", *flags]
    table = CliRunner().invoke(main, ["bench", *options])
    assert table.exit_code == 0, table.output
    assert "H200, sm_90a, today: " in table.output
    assert (f"{NAME} did not run at T=16" in table.output) == (not flags)
    assert ("not run" in table.output) == (not flags)
    data = json.loads(CliRunner().invoke(main, ["bench", *options, "--json"]).stdout)
    assert [each["peer"] for each in data["results"]] == [False, True][: 2 - len(flags)]
    assert data["results"][0]["wall"] and ("nan" in str(data["results"][-1]["refusal"])) == (
        not flags
    )


def test_a_peer_alone_is_no_benchmark(install, gpu, monkeypatch):
    install()
    monkeypatch.setattr(runner, "machine", dict)
    options = ["--T", "16", "--H", "128", "--I", "128", "--E", "2", "--K", "1", "--rounds", "1"]
    options += ["--layers", "1", "--sustained", "0", "--engine", "hopper", "--json"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    outcome = CliRunner().invoke(main, ["bench", *options])
    ours, peer = json.loads(outcome.stdout)["results"]
    assert "hopper" in ours["refusal"] and peer["refusal"] is None and peer["wall"]
    assert outcome.exit_code == 1


def a_result(name, peer, busy, sustained):
    """Figures in microseconds."""
    spread = Spread.of([busy])
    result = Result(SHAPE, name, True, True, peer=peer)
    result.busy = {"forward": busy / 4, "backward": 3 * busy / 4}
    result.wall = {"forward": spread, "backward": spread, "pair": spread}
    result.wall |= {} if peer else {"step": spread}
    result.host, result.steady = {"pair": spread}, spread
    result.stages = {"up": busy}
    reading = Reading(1446.0, 690.0, "energy counter", 700.0)
    result.sustained = Sustained.of([Turn((sustained,), 2, reading)])
    return result


def columns_of(table):
    return {column.header: list(column.cells) for column in table.columns}


def test_the_column_is_the_ratio_to_the_six_gemms(tmp_path):
    results = [a_result("bf16:off", False, 7600.0, 8900.0), a_result("hopper:perf", False, 5100.0, 6000.0)]  # fmt: skip
    without = columns_of(rate_table(results))
    results.append(a_result(NAME, True, 4600.0, 5500.0))
    rates, sustained = columns_of(rate_table(results)), columns_of(sustained_table(results))
    assert "over DeepGEMM" not in without
    assert rates["over DeepGEMM"] == ["1.65", "1.11", "–"]
    assert sustained["over DeepGEMM"] == ["1.62", "1.09", "–"]
    # The peer does part of the work, so it is no faster engine.
    assert rates["speed-up"] == ["1.00", "1.49", "–"]
    assert rates["steady speed-up"] == ["1.00", "1.49", "–"]
    assert sustained["sustained speed-up"] == ["1.00", "1.48", "–"]
    assert sustained["J/layer"] == ["6.14", "4.14", "3.79"]
    assert columns_of(time_table(results))["step us"] == ["7,600", "5,100", "–"]
    assert any(line.startswith("over DeepGEMM:") for line in notes(results))
    assert not any(line.startswith("over DeepGEMM:") for line in notes(results[:2]))
    stages = columns_of(stage_table(results[2]))
    assert stages["stage"] == ["up"] and stages["GB/s"] == ["–"], "the floor's bytes are ours"
    results[2].busy = results[2].stages = {}
    assert len(plot_all(results, tmp_path)) == 1


def test_what_heats_the_gpu_comes_last_and_the_peers_operands_leave_before_memory(
    install, gpu, monkeypatch
):
    install()
    log, alive = [], []
    six = deepgemm.prepare

    def prepared(*arguments):
        made = six(*arguments)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(deepgemm, "prepare", prepared)
    for name in ("_time_interleaved", "_time_steady", "_profile", "_time_sustained"):
        done = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda *a, d=done, n=name: log.append(n) or d(*a))
    measured = runner.measure_memory

    def memory(call, device):
        gc.collect()
        log.append(("memory", alive[0]() is not None))
        return measured(call, device)

    monkeypatch.setattr(runner, "measure_memory", memory)
    measure(TINY, [OFF], rounds=1, warmup=1, layers=1, sustained_s=0.01, peer=True)
    assert log == [
        "_time_interleaved", "_time_steady", "_profile", "_profile", "_time_sustained",
        ("memory", False),
    ]  # fmt: skip
