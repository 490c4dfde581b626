"""`sonicmoe bench --model`: sizes of a model, the estimate without a GPU, the ways that a GPU times,
and the sentence at the end.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from framework import torch
from processes import ROOT

from sonicmoe.bench import contest as contest_module
from sonicmoe.bench.answer import Answer, Way, workload_of
from sonicmoe.bench.contest import Entrant, contest, ours, random_weights, stock
from sonicmoe.bench.cost_model import fit_model
from sonicmoe.bench.estimate import COEFFICIENTS, H100, HELD_OUT_ERROR, SWEPT, estimate
from sonicmoe.bench.models import CARD, DATE, MEASURED, model_shape, nearest
from sonicmoe.bench.points import read_points
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.workload import Batch
from sonicmoe.cli.main import main
from sonicmoe.errors import ConfigError, ShapeError

TINY = Shape(24, 64, 64, 4, 2)


def run(*arguments):
    return CliRunner().invoke(main, ["bench", *arguments])


def test_the_measured_layers_are_those_of_the_page():
    data = json.loads((ROOT / "docs" / "data" / "model_layers.json").read_text())
    assert (data["card"], data["date"]) == (CARD, DATE)
    for row, each in zip(data["rows"], MEASURED, strict=True):
        shape = each.shape
        assert row["experts"] == each.model and each.ranks == (8 if "EP8" in each.model else 1)
        assert row["tokens"] == shape.tokens * each.ranks
        sizes = [shape.hidden, shape.intermediate, shape.experts * each.ranks, shape.topk]
        assert row["H_I_E_K"] == sizes
        times = [row[f"{name}_us"] for name in ("compiled", "bf16", "fp8")]
        assert times == [each.compiled, each.bf16, each.fp8]


def test_a_name_is_the_largest_measured_layer_of_the_model_in_any_case_and_with_or_without_ep8():
    for name in ("Qwen3-30B-A3B", "qwen3-30b-a3b"):
        assert model_shape(name) == Shape(8192, 2048, 768, 128, 8)
    for name in ("DeepSeek-V3", "deepseek-v3 EP8"):
        assert model_shape(name) == Shape(4096, 7168, 2048, 32, 8)
    assert all(nearest(each.shape) == each for each in MEASURED)
    with pytest.raises(ConfigError, match=r"did you mean 'qwen3-30b-a3b'\?; needed: .*OLMoE-7B"):
        model_shape("Qwen3-30B-A3")
    with pytest.raises(ConfigError, match="is no file"):
        model_shape("no/such/config.json")
    out = run("--list").stdout
    assert all(each.model in out for each in MEASURED)


WIDE = {"hidden_size": 64, "intermediate_size": 256}
CONFIGS = {
    "qwen3_moe": {**WIDE, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {**WIDE, "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2},
    "mixtral": {**WIDE, "intermediate_size": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "ernie4_5_vl_moe": {"text_config": {
        "hidden_size": 64, "moe_intermediate_size": [32, 16], "moe_num_experts": [8, 4], "moe_k": 2}},
    "longcat_flash": {**WIDE, "expert_ffn_hidden_size": 32, "n_routed_experts": 8, "moe_topk": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_of_transformers_gives_the_sizes(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    assert model_shape(str(path)) == model_shape(str(tmp_path)) == Shape(8192, 64, 32, 8, 2)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("{}", ConfigError, "has no hidden_size; needed: the hidden of its experts"),
        ("[]", ConfigError, "has no JSON object"),
        ("{", ConfigError, "is no JSON"),
        (json.dumps({**CONFIGS["mixtral"], "hidden_size": "wide"}), ShapeError, "hidden is 'wide'"),
        (json.dumps({**CONFIGS["mixtral"], "num_experts_per_tok": 9}), ShapeError, "topk is 9"),
    ],
)
def test_a_file_that_is_no_such_config_says_what_is_missing(text, error, words, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(error, match=words):
        model_shape(str(path))


def test_the_coefficients_are_those_of_the_fits():
    for precision, name in (("fp8", "sweep"), ("bf16", "bf16")):
        points = list(read_points(ROOT / "docs" / "data" / f"h100_{name}.jsonl"))
        model = fit_model(points)
        assert model.card == H100 and model.fp8 == (precision == "fp8")
        assert COEFFICIENTS[precision] == pytest.approx(model.coefficients, rel=1e-6)
        assert HELD_OUT_ERROR[precision] == round(model.held_out_error, 1)


def test_sizes_beyond_the_points_of_the_model_are_named():
    files = (ROOT / "docs" / "data" / f"h100_{name}.jsonl" for name in ("bf16", "sweep"))
    bf16, fp8 = ([point.shape for point in read_points(file)] for file in files)
    for name, (least, most) in SWEPT.items():
        sizes, wider = ([getattr(shape, name) for shape in points] for points in (bf16, fp8))
        assert (least, most) == (min(sizes), max(sizes))
        assert min(wider) <= least and most <= max(wider)
    (line,) = (note for note in estimate(model_shape("DeepSeek-V3")).notes if "beyond" in note)
    assert line == "less sure: beyond the points of the model in hidden"
    assert not any("beyond" in note for note in estimate(model_shape("Qwen3-30B-A3B")).notes)


def test_the_bf16_points_are_those_of_their_page():
    page = (ROOT / "docs" / "lab" / "layer_times.md").read_text()
    for point in read_points(ROOT / "docs" / "data" / "h100_bf16.jsonl"):
        sizes = ", ".join(str(size) for size in vars(point.shape).values())
        (row,) = (line for line in page.splitlines() if line.startswith(f"| {sizes} |"))
        assert float(row.split("|")[4]) == point.us


def test_an_estimate_says_that_it_is_one():
    result = run("--tokens", "4096", "--H", "1024", "--I", "2816", "--E", "16", "--K", "2")
    assert result.exit_code == 0, result.output
    assert "ESTIMATE, nothing was measured" in result.stdout and "Moonlight-16B" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Take ")
    told = json.loads(run("--model", "OLMoE-7B", "--tokens", "512", "--json").stdout)
    assert told["shape"]["tokens"] == 512 and told["measured"] is False
    assert [way["name"] for way in told["ways"]] == ["BF16", "FP8"] and told["advice"]
    found = estimate(Shape(4096, 1024, 2816, 16, 2))
    assert not found.measured and found.way("stock") is None
    bf16, fp8 = found.way("BF16"), found.way("FP8")
    assert bf16.new_us == bf16.kept_us and fp8.kept_us < fp8.new_us
    # docs/lab/memory.md: 385 MiB in BF16 and 199 in FP8, without 216 MiB of codes.
    found = estimate(Shape(8192, 3072, 1536, 8, 8))
    assert found.way("BF16").memory_mib == pytest.approx(385, rel=0.02)
    assert found.way("FP8").memory_mib - 216 == pytest.approx(199, rel=0.02)


def test_sizes_that_an_engine_refuses_are_not_predicted():
    found = estimate(Shape(4096, 1024, 1000, 16, 2))
    assert found.way("FP8") is None and found.way("BF16") is not None
    assert found.lines[0].startswith("FP8 did not run: H is 1024 and I is 1000, and it needs")
    assert found.advice == "Take BF16, which alone ran here."
    neither = estimate(Shape(4096, 1001, 1001, 16, 2))
    assert neither.advice.startswith("Stay with stock: this package")


def test_a_gpu_is_asked_whether_it_computes_these_sizes_in_fp8(monkeypatch):
    asked = []
    monkeypatch.setattr(contest_module, "choose_engine", lambda *each: asked.append(each))
    for name in ("stock", "BF16", "FP8"):
        contest_module._may_run(name, TINY, "cuda:0")
    ((device, chosen, workload),) = asked
    assert (device, chosen.value) == ("cuda:0", "hopper")
    assert workload == workload_of(TINY, "FP8")
    assert workload.settings.recipe is not None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tokens", "64"], "--H, --I, --E, --K is missing; needed: --model"),
        (["--model", "OLMoE-7B", "--H", "64"], "--H has no effect beside --model"),
        (["--model", "OLMoE-7B", "--T", "64"], "--T has no effect beside --model"),
        (["--model", "nothing"], "model is 'nothing'; needed: the path"),
    ],
)
def test_what_would_have_no_effect_is_refused(arguments, words):
    result = run(*arguments)
    assert result.exit_code == 2 and words in result.stderr


def test_stock_computes_what_this_package_computes():
    torch.manual_seed(0)
    batch, weights = Batch.random(TINY, "cpu"), random_weights(TINY, "cpu")
    found = []
    for layer in (stock, ours(False)):
        Entrant(layer, batch, weights).call(write=False)
        tensors = (batch.x, batch.probs, *weights)
        found.append([tensor.grad.float() for tensor in tensors])
        found[-1].append(layer(batch.x, batch.indices, batch.probs, *weights).detach().float())
    for theirs, own in zip(*found, strict=True):
        assert (theirs - own).norm() <= 0.02 * own.norm()


def test_every_way_is_timed_in_both_modes_and_one_that_cannot_run_says_why(monkeypatch):
    def refuses(*tensors):
        raise RuntimeError("strides of\nanother kind")

    monkeypatch.setattr(contest_module, "WARM_UPS", 1)
    monkeypatch.setattr(contest_module, "CALLS", 1)
    monkeypatch.setattr(contest_module, "CALLS_OF_WEIGHTS", {"new": 1, "kept": 1})
    found = contest(TINY, "cpu", rounds=1)
    assert [way.name for way in found.ways] == ["stock", "BF16", "FP8"] and found.measured
    assert all(way.ran and way.refusal is None for way in found.ways)
    assert found.advice == found.lines[-1]
    monkeypatch.setattr(contest_module, "layers", lambda device: {
        "stock": refuses, "BF16": stock, "FP8": stock,
    })  # fmt: skip
    found = contest(TINY, "cpu", rounds=1)
    assert not found.ways[0].ran and found.way("BF16") and found.way("FP8")
    assert found.lines[0] == "stock did not run: strides of another kind"


OURS = "with new weights BF16 is 2.00 times as fast as compiled stock."
KEPT = "Take FP8 where weights serve 4 or more micro-batches, where it is 1.25 times as fast as BF16, and else BF16"


@pytest.mark.parametrize(
    ("stock_way", "bf16", "fp8", "sentence"),
    [
        ((20, 20), (12, 12), (10, 8), "Take FP8: it is 1.20 times as fast as BF16; "
         "with new weights FP8 is 2.00 times as fast as compiled stock."),
        ((20, 20), (10, 10), (12, 8), f"{KEPT}, which is 1.20 times as fast as FP8; {OURS}"),
        ((20, 20), (10, 10), (10.1, 8), f"{KEPT}, which is as fast as FP8; {OURS}"),
        ((20, 20), (10, 10), (12, 12), f"Take BF16: FP8 is not faster at these sizes; {OURS}"),
        ((10, 10), (12, 12), (13, 11), "Stay with stock: neither BF16 nor FP8 is faster at these sizes."),
        (None, (12, 12), (10, 8), "Take FP8: it is 1.20 times as fast as BF16."),
        ((20, 20), (10, 10), None, f"Take BF16, which alone ran here; {OURS}"),
        ((20, 20), None, None, "Stay with stock: this package did not run here, for the reason above."),
    ],
)  # fmt: skip
def test_the_advice_is_one_sentence(stock_way, bf16, fp8, sentence):
    given = zip(("stock", "BF16", "FP8"), (stock_way, bf16, fp8), strict=True)
    ways = tuple(Way(name, *times) if times else Way(name, refusal="no") for name, times in given)
    assert Answer(TINY, ways, (), True).advice == sentence
