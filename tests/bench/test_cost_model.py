"""The sweep is resumable, and the fit finds what made the data: error on unseen points, terms that
cost nothing left out.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bench.test_bench_command import PERF, few_layers  # noqa: F401
from click.testing import CliRunner
from matplotlib.figure import Figure
from worlds import ROOT

from sonicmoe.bench import sweep as sweep_module
from sonicmoe.bench.cost_model import TERMS, fit_model, idle_rows, roofline
from sonicmoe.bench.floors import OTHER_STAGES, floors
from sonicmoe.bench.points import Point, SweepError, read_points
from sonicmoe.bench.shapes import REFERENCE, SHAPES, Shape
from sonicmoe.bench.sweep import grid, sweep
from sonicmoe.bench.workload import Variant
from sonicmoe.cli.main import main
from sonicmoe.enums import EngineName

TINY = [Shape(t, 32, 16, e, 2) for e in (2, 4) for t in (16, 32)]


def plain(shape):
    """Operations, bytes of weights, and a time per expert."""
    product = shape.hidden * shape.intermediate
    return 1.4e-8 * shape.rows * product + 5e-6 * shape.experts * product + 2.0 * shape.experts


def made_points(truth=plain, noise=0.0, seed=0):
    shapes = grid("cuda:0")
    errors = 1 + noise * np.random.default_rng(seed).standard_normal(len(shapes))
    return [
        Point(shape, "hopper:perf", True, "H200", float(truth(shape) * error))
        for shape, error in zip(shapes, errors, strict=True)
    ]


def test_the_form_is_found_again_and_noise_ends_where_it_began():
    model = fit_model(made_points())
    assert model.held_out_error < 0.05 and model.fitted_error < 0.05
    assert model.coefficients["TK*H*I"] == pytest.approx(1.4e-8, rel=0.01)
    assert model.coefficients["E"] == pytest.approx(2.0, rel=0.01)
    assert 0.1 < len(model.held_out) / model.points < 0.3
    model = fit_model(made_points(noise=0.03))
    assert 1.0 < model.held_out_error < 3.8 and model.mfu_error < 2
    assert set(model.coefficients) <= set(TERMS) and min(model.coefficients.values()) > 0
    assert "held-out" in model.error_lines()[0]
    # Held-out points do not move the fit.
    spoiled = [
        replace(p, us=p.us * 50) if p.shape in model.held_out else p
        for p in made_points(noise=0.03)
    ]
    again = fit_model(spoiled)
    assert again.coefficients == model.coefficients and again.held_out_error > 90


def test_terms_of_tiles_and_floors():
    # All experts get all tokens.
    assert [idle_rows(Shape(tokens, 64, 64, 8, 8)) for tokens in (1000, 1024)] == [8 * 24, 0]
    # 683 tokens more are one tile more of each expert.
    idle, rng = [], np.random.default_rng(0)
    for tokens in range(4000, 4683, 20):
        counts = np.bincount(rng.random((tokens, 16)).argsort(1)[:, :3].ravel(), minlength=16)
        idle.append((-counts % 128).sum())
        assert idle_rows(Shape(tokens, 64, 64, 16, 3)) == pytest.approx(1024)
    assert np.mean(idle) == pytest.approx(1024, rel=0.1)
    least = floors(REFERENCE, fp8=True)
    bound = sum(us for stage, us in least.items() if stage not in OTHER_STAGES)
    assert roofline(REFERENCE, True, "H200") == pytest.approx(bound)
    assert floors(REFERENCE, True, "NVIDIA H100 80GB HBM3")["routing"] > least["routing"]


def test_a_real_gpu_is_predicted_as_the_docs_say():
    files = (ROOT / "docs" / "data" / f"h100_{name}.jsonl" for name in ("sweep", "off_grid"))
    points, others = (list(read_points(file)) for file in files)
    page = (ROOT / "docs" / "lab" / "cost_model.md").read_text(encoding="utf-8")
    model = fit_model(points)
    held_out = f"| **held out** | **{len(model.held_out)}** | **{model.held_out_error:.2f} %** |"
    assert f"{held_out} {model.worst:.1f} % | {model.mfu_error:.2f} points |" in page
    off = 100 * np.abs(model.predict([p.shape for p in others]) / [p.us for p in others] - 1)
    found = f"| **off the grid** | **{len(off)}** | **{off.mean():.2f} %** |"
    assert f"{found} {off.max():.1f} % |" in page
    assert max(model.held_out_error, off.mean()) <= 3
    for name, value in model.coefficients.items():
        assert f"| {name} | {value:.3g} |" in page, name


def test_a_sweep_continues_where_it_stopped_and_remembers_refusals(tmp_path):
    path = tmp_path / "data" / "sweep.jsonl"
    assert sweep(path, TINY[:1], PERF) == 1
    before = path.read_text()
    path.write_text(before.removesuffix("\n"))  # the last point lacks its end
    assert sweep(path, TINY[:2], PERF) == 1 and path.read_text().startswith(before)
    path.write_text(before)
    with path.open("a") as file:
        file.write('{"tokens": 3')  # a kill in the middle of a line
    assert len(list(read_points(path))) == 1
    told = []
    assert sweep(path, TINY, PERF, told.append) == 3 and sweep(path, TINY, PERF) == 0
    assert told == [f"{number} of 3: {shape}" for number, shape in enumerate(TINY[1:], start=1)]
    points = list(read_points(path))
    assert [p.shape for p in points] == TINY
    assert all(p.us > 0 and p.engine == "reference:perf" and p.fp8 and p.date for p in points)
    hopper = Variant(EngineName.HOPPER, "perf")
    assert sweep(path, TINY[:1], hopper) == 1 and sweep(path, TINY[:1], hopper) == 0
    *_, refused = read_points(path)
    assert "hopper" in refused.refusal and refused.us is None
    lines = path.read_text().splitlines()
    impossible = lines[0].replace('"tokens": 16', '"tokens": 0')
    for nonsense in ("nonsense", "[]", '{"tokens": 3}', impossible):
        path.write_text("\n".join([nonsense, *lines]) + "\n")
        with pytest.raises(SweepError, match="line 1"):
            list(read_points(path))
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SweepError, match=r"sweep\.jsonl is no sweep: 'utf-8' codec"):
        list(read_points(path))


def bench(*options):
    return CliRunner().invoke(main, ["bench", *map(str, options)])


LINE = made_points()[0].line()
NUMBERS = ("{}", "NaN", "-1", "0", "1" + 400 * "0")
FOREIGN = {
    "a size that is a dict": LINE.replace('"tokens": 256', '"tokens": {"a": 1}'),
    **{f"a time of {us[:4]}": LINE.replace('"us": ', f'"us": {us}, "was": ') for us in NUMBERS},
    "a size of 10^400": LINE.replace('"tokens": 256', f'"tokens": {10**400}'),
    "a size of 10^5000": LINE.replace('"tokens": 256', f'"tokens": 1{5000 * "0"}'),
    "an engine that is a list": LINE.replace('"hopper:perf"', "[1]"),
    "deep nesting": "[" * 100_000 + "]" * 100_000 + "\n",
    "nonsense without an end": "my only notes",
    "JSON without an end": '{"tokens": 3, "text": "mine"}',
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_refused_in_one_line_and_kept(name, tmp_path):
    path = tmp_path / "file"
    for whole in {FOREIGN[name], "".join(p.line() for p in made_points()) + FOREIGN[name]}:
        path.write_text(whole)
        for option in ("--fit", "--sweep"):
            refused = bench(option, path)
            assert refused.exit_code == 2 and len(refused.stderr.splitlines()) == 1, refused.output
            assert ", line " in refused.stderr and "is not a point of a sweep: " in refused.stderr
        assert path.read_text() == whole
    path.write_text("")
    refused = bench("--fit", path)
    assert refused.exit_code == 2 and "has no point that was measured" in refused.stderr


def test_sizes_beside_a_fit_are_predicted_and_other_options_refused():
    file = ROOT / "docs" / "data" / "h100_sweep.jsonl"
    sizes = ("--H", 1024, "--I", 2816, "--E", 16, "--K", 2)
    said = bench("--fit", file, "--T", 4096, "--T", 8192, *sizes)
    model = fit_model(list(read_points(file)))
    for tokens in (4096, 8192):
        shape = Shape(tokens, 1024, 2816, 16, 2)
        us = model.predict([shape])[0]
        line = f"predicted at {shape}: {us:,.0f} us, MFU {model.mfu([shape])[0]:.1%}; beyond the sweep in H, K"
        assert line in said.stdout.splitlines()
    named = json.loads(bench("--fit", file, "--shape", "qwen3-30b-a3b", "--json").stdout)
    (fit,) = named.values()
    (us,) = fit["predicted_us"].values()
    assert us == pytest.approx(model.predict([SHAPES["qwen3-30b-a3b"]])[0])
    for option in (("--engine", "hopper"), ("--sustained", 1), ("--sweep", "x")):
        refused = bench("--fit", file, *option)
        assert refused.output == f"Error: {option[0]} has no effect beside --fit.\n"
    refused = bench("--sweep", "x", "--H", 64)
    assert refused.output == "Error: --H has no effect beside --sweep.\n"


def test_a_cpu_refuses_sizes_that_would_take_it_hours(monkeypatch):
    monkeypatch.setattr("sonicmoe.bench.runner.measure", None)
    refused = bench("--T", 4096, "--H", 1024, "--I", 2816, "--E", 16, "--K", 2)
    assert refused.exit_code == 2 and len(refused.stderr.splitlines()) == 1
    assert (
        "needed without a GPU: at most 1e+11; --model, or these sizes with --tokens"
        in refused.stderr
    )


def test_commands(tmp_path, monkeypatch):
    monkeypatch.setitem(sweep_module.GRIDS, "cpu", ((4, 8), ((32, 16),), (16, 32), 2))
    path = tmp_path / "sweep.jsonl"

    def run(*options):
        result = CliRunner().invoke(main, ["bench", *options])
        assert result.exit_code == 0, result.output
        return result.stdout

    said = run("--sweep", str(path))
    assert "4 points measured now" in said and "4 points; a fit needs at least 12" in said
    # Where experts did not fit into memory, the points of a line are missing.
    points = [p for p in made_points(noise=0.02) if p.shape.hidden < 7168 or p.shape.experts < 128]
    path.write_text("".join(point.line() for point in points))
    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda f, *of, **how: drawn.append(f) or save(f, *of, **how)
    )
    said = run("--fit", str(path))
    assert "hopper:perf on H200" in said and "TK*H*I" in said and "held-out" in said
    data = json.loads(run("--fit", str(path), "--plot", str(tmp_path / "plots"), "--json"))
    # Dots have no label; the prediction between them has one.
    shown = [axis for axis in drawn[0].axes if axis.get_visible()]
    assert all(any(line.get_label()[0] != "_" for line in axis.lines) for axis in shown)
    model = data["hopper:perf on H200"]
    assert 0 < model["held_out_error"] < 3.8
    picture = Path(model["plot"])
    assert picture.name == "mfu_curves_hopper_perf_on_H200.png"
    assert picture.stat().st_size > 10_000
