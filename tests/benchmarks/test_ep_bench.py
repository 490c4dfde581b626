"""The benchmark of a layer under expert parallelism, over two gloo ranks: what it measures."""

from __future__ import annotations

import json

import pytest
from worlds import ROOT, run_forked, torchrun_variables

BENCH = ROOT / "benchmarks" / "ep_bench.py"
SKIPPED = {"MinimalAsyncEP", "deepep, waiting", "deepep, no wait"}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What was printed, and the figures of the one shape."""
    file = tmp_path_factory.mktemp("ep") / "figures.json"
    precisions = "--precision=fp8-rows", "--precision=bf16"
    options = ["--quick", "--operator", "--rounds=1", "--T=16", *precisions]
    command, imports = [BENCH, *options, f"--json={file}"], ["torch._dynamo.config"]
    said, _ = run_forked(lambda rank: command, torchrun_variables(2), imports)
    (shape,) = json.loads(file.read_text())["shapes"]
    return said, shape


def test_every_way_that_a_cpu_has_is_measured(measured):
    said, shape = measured
    assert shape["shape"] == {"T": 16, "H": 256, "I": 128, "E": 8, "K": 2}
    rows = {row["name"]: row for row in shape["rows"]}
    ours = [
        f"collective, {way}, {p}" for way in ("waiting", "no wait") for p in ("fp8-rows", "bf16")
    ]
    alone = "experts alone, grouped_mm", "experts alone, bf16"
    assert set(rows) >= {"all-to-all", *ours, *(f"operator, {name}" for name in ours), *alone}
    for name, row in rows.items():
        assert len(row["walls"]) == 1 and row["ms"] > 0 and f"| {name} | {row['ms']:.2f} |" in said
    # Others may come; each is measured or named, and these cannot run here.
    assert set(shape["skipped"]) >= SKIPPED and not set(rows) & set(shape["skipped"])
    assert all(f"skipped: {name}: {why}" in said for name, why in shape["skipped"].items())


def test_they_compute_alike(measured):
    """Both ways of waiting give the same bits; FP8 is far from a factor."""
    rows = {row["name"]: row for row in measured[1]["rows"]}
    assert rows["all-to-all"]["error"] == 0
    for precision, least, most in (("bf16", 1e-4, 0.01), ("fp8-rows", 0.01, 0.12)):
        waiting, blind = (rows[f"collective, {way}, {precision}"] for way in ("waiting", "no wait"))
        assert set(waiting["errors"]) == {"y", "dx", "dprobs", "dw1", "dw2"}
        assert waiting["errors"] == blind["errors"]
        assert all(least < error < most for error in waiting["errors"].values())
        operator = rows[f"operator, collective, waiting, {precision}"]["errors"]
        assert all(operator[name] == waiting["errors"][name] for name in ("y", "dx", "dprobs"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--quick", "--E=9"], "2 ranks and 2 slots do not suit --E 9"),
        (["--quick", "--T=8", "--T=9", "--H=64", "--H=64", "--H=128"], "--T is given 2 times; needed: 1 or 3"),
        ([], "this needs an NVIDIA Hopper GPU, or --quick"),
    ],
)  # fmt: skip
def test_refuses_by_name(run, options, words):
    assert words in " ".join(run("ep_bench", *options, exit_code=2 if options else 1).split())
