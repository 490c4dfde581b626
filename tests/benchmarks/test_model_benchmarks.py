"""Experts and training steps of real models: tiny, on a CPU."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
from worlds import ROOT, run_forked, torchrun_variables

pytest.importorskip("transformers", minversion="5.7")
# transformers' own grouped_mm calls such a function where it is compiled.
pytestmark = pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")


@pytest.fixture
def measured(run, tmp_path):
    """`measured(program, *options)`: what it printed, and the figures of its file."""

    def ran(program, *options):
        said = run(program, "--quick", *options, "--json", tmp_path / "f.json")
        return said, json.loads((tmp_path / "f.json").read_text())

    return ran


@pytest.mark.parametrize(
    ("title", "implementations", "modes"),
    [
        (
            "Qwen3-Next-80B",
            {"stock", "compiled", "bf16", "fp8", "node"},
            ("new", "kept4", "kept8", "frozen", "forward"),
        ),
        ("gpt-oss-20b", {"stock", "compiled", "bf16", "fp8"}, ("new",)),
    ],
)
def test_experts_of_real_models(run, measured, tmp_path, title, implementations, modes):
    asked = [f"--mode={mode}" for mode in modes]
    said, figures = measured("experts_bench", "--only", title, "--rounds=1", *asked)
    (row,) = figures["rows"]
    for mode in modes:
        trained = mode not in ("frozen", "forward")
        assert set(row[mode]) == implementations - (set() if trained else {"node"})
        assert all(figures["wall"] > 0 and figures["host"] > 0 for figures in row[mode].values())
        assert f"| {mode}: wall |" in said and f"| {mode}: peak |" in said
    assert said == run("experts_bench", "--show", tmp_path / "f.json")
    gain = row["new"]["compiled"]["wall"] / row["new"]["bf16"]["wall"]
    assert f"| {row['new']['compiled']['wall']:.0f} | {gain:.2f}x |" in said
    for name, errors in row["errors"].items():
        bound = 0.10 if name == "fp8" else 0.01
        assert all(0 < error < bound for error in errors.values()), (name, errors)
        assert name != "fp8" or errors["out"] > 0.01, "nothing was quantised"


def test_adapters_on_experts(run, measured, tmp_path):
    pytest.importorskip("peft", minversion="0.21")
    said, figures = measured("adapters_bench", "--rounds=1", "--rank=4")
    (row,) = figures["rows"]
    kinds = [
        f"{kind} {precision}"
        for precision in ("fp8", "bf16")
        for kind in ("full", "frozen", "lora")
    ]
    more = "lora fp8, one order", "lora codes"
    assert list(row["figures"]) == [*kinds, *more, "peft", "peft compiled"]
    assert all(each["wall"] > 0 and each["forward"] > 0 for each in row["figures"].values())
    errors = row["errors"]
    assert set(errors) == {"lora fp8", "lora bf16", *more, "peft", "peft compiled"}
    assert errors["lora bf16"] < 0.01 < errors["lora fp8"] < 0.1
    assert errors["lora fp8"] == errors["lora fp8, one order"] and 0.01 < errors["lora codes"] < 0.1
    assert max(errors["peft"], errors["peft compiled"]) < 0.01
    assert said.endswith(run("adapters_bench", "--show", tmp_path / "f.json"))
    assert len(said.split("r = 4 |")[1].strip().splitlines()) == 2 + 10


def test_steps_of_a_model(measured):
    said, figures = measured("model_step_bench", "--rounds=1", "--checkpoint")
    assert set(figures["rows"]) == {"grouped_mm", "sonicmoe", "sonicmoe_fp8"}
    assert figures["checkpoint"] and not figures["compiled"]
    losses = [row["loss"] for row in figures["rows"].values()]
    assert max(losses) - min(losses) < 0.1
    assert len(said.split("| loss |")[1].strip().splitlines()) == 1 + 3


@pytest.mark.slow
def test_steps_under_fsdp2(tmp_path):
    found, ways = tmp_path / "f.json", ("stock", "codes")
    options = ["--quick", "--layers=1", "--rounds=1", "--steps=1", f"--json={found}"]
    options += [f"--way={way}" for way in ways]
    program = ROOT / "benchmarks" / "fsdp_bench.py"
    imports = ["torch._dynamo.config", "transformers", *(["peft"] if find_spec("peft") else [])]
    said, _ = run_forked(lambda rank: [program, *options], torchrun_variables(2), imports)
    (size,) = json.loads(found.read_text())["sizes"]
    rows = size["rows"]
    assert tuple(rows) == ways
    assert all(f"| {way} | " in said for way in ways)
    # Attention is a third of this layer, and gathered in bf16.
    assert 0.5 < rows["codes"]["gathered"] / rows["stock"]["gathered"] < 0.65
    losses = [row["loss"] for row in rows.values()]
    assert max(losses) - min(losses) < 0.1


def test_models_with_frozen_experts(measured):
    pytest.importorskip("peft", minversion="0.21")
    said, figures = measured("frozen_bench", "--steps=3", "--rank=4")
    assert [each["model"] for each in figures["models"]] == ["Qwen3-30B-A3B", "gpt-oss-120b"]
    for each in figures["models"]:
        assert each["step s"] > 0 and each["codes GiB"] > 0 and len(each["losses"]) == 4
        assert each["losses"][-1] < each["losses"][0]
        assert f"| {each['model']} | step s {each['step s']:.2f} |" in said
