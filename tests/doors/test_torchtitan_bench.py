"""The training step of a whole model through torchtitan, tiny, over two ranks."""

from __future__ import annotations

import json

import pytest
import worlds
from click.testing import CliRunner
from doors import torchtitan_on_cpu  # noqa: F401  before anything of torchtitan
from processes import ROOT
from torchtitan_bench import main
from torchtitan_turn import exchange_us

# Parameters of a tiny layer that multiply a token: attention, norms, router, 2 experts of 8.
LAYER = 256 * 128 * (16 + 2 * 8 + 16) + 2 * (256 + 128) + 256 * 8 + 2 * 3 * 128 * 256
FLOPS = 6 * (4 * LAYER + 256 + 2048 * 256) + 12 * 4 * 16 * 128 * 64


def test_every_kind_of_experts_takes_its_turn(tmp_path):
    file = tmp_path / "found.json"
    options = "--quick", "--sequences=1", "--steps=2", "--compile=none", f"--json={file}"
    command = [ROOT / "benchmarks" / "torchtitan_bench.py", *options]
    said, nothing = worlds.run_world(lambda rank: command, worlds.torchrun_variables(2), 400)
    found = json.loads(file.read_text())
    assert found["job"]["layers"] == 4 and found["job"]["expert_parallel"] == found["ranks"] == 2
    stock, bf16, fp8 = found["rows"]
    assert [row["experts"] for row in found["rows"]] == ["stock", "bf16", "fp8"]
    for row in found["rows"]:
        assert len(row["losses"]) == len(row["seconds"]) == 2
        assert row["step"] == row["seconds"][1] and 0 < row["exchange"] < 1
        assert row["flops"] == FLOPS and row["peak"] is None
        assert row["losses"] == pytest.approx(stock["losses"], rel=2e-3)
        assert f"| {row['experts']} | {64 / row['step']:.0f} |" in said
        assert f"loss of {row['experts']}: {row['losses'][0]:.4f} " in said
    # Otherwise one of them did not run on what it says.
    assert len({tuple(row["losses"]) for row in (stock, bf16, fp8)}) == 3
    assert "| experts |" in said and "| experts |" not in nothing


def test_exchanges_are_counted_once():
    names = "ncclDevKernel_SendRecv(", "ncclDevKernel_AllGather_RING_LL(", "gloo:all_to_all"
    times = (0, 10), (0, 90), (8, 12)
    pairs = zip(names, times, strict=True)
    events = [{"ph": "X", "name": name, "ts": ts, "dur": dur} for name, (ts, dur) in pairs]
    assert exchange_us({"traceEvents": [{"ph": "M", "name": "gloo:all_to_all"}, *events]}) == 20


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        ("1", (), "needs a GPU, or --quick"),
        (None, ("--quick",), "started by torchrun, also for one GPU"),
        ("1", ("--layer=1",), "No such option"),
        ("1", ("--layers=0",), "0 is not in the range"),
        ("1", ("--experts=triton",), "'triton' is not one of"),
        ("1", ("--quick", "--layers=9"), "--layers 9: the tiny model has 8 layers at most"),
        ("3", ("--quick",), "--expert-parallel 3 does not divide the 8 experts"),
        (
            "3",
            ("--quick", "--expert-parallel=2"),
            "--expert-parallel 2 does not divide the 3 ranks",
        ),
    ],
)
def test_refuses_by_name(ranks, options, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = CliRunner().invoke(main, options, env={"WORLD_SIZE": ranks})
    assert result.exit_code and words in " ".join(result.output.split()), result.output
