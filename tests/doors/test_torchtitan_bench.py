"""What the benchmark of a whole model through torchtitan counts and refuses."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from doors import torchtitan_on_cpu  # noqa: F401  before anything of torchtitan
from torchtitan_bench import main
from torchtitan_turn import exchange_us


def test_exchanges_are_counted_once():
    ours = "void sonicmoe::(anonymous namespace)::"
    names = {
        "ncclDevKernel_SendRecv(": (0, 10),
        "gloo:all_to_all": (8, 12),
        "_copy_rows_to_peer_ptrs_kernel": (30, 1),
        f"{ours}send_tokens(sonicmoe::Peers)": (40, 2),
        f"{ours}arrive(sonicmoe::Peers)": (50, 4),
        f"{ours}sum_back<__nv_bfloat16>(": (60, 8),
        # Neither of these is one.
        "ncclDevKernel_AllGather_RING_LL(": (0, 90),
        f"{ours}gemm<sum>(": (80, 90),
    }
    events = [{"ph": "X", "name": n, "ts": ts, "dur": dur} for n, (ts, dur) in names.items()]
    assert exchange_us({"traceEvents": [{"ph": "M", "name": "gloo:all_to_all"}, *events]}) == 35


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        ("1", (), "needs an NVIDIA Hopper GPU, or --quick"),
        (None, ("--quick",), "started by torchrun, also for one GPU"),
        ("1", ("--layer=1",), "No such option"),
        ("1", ("--layers=0",), "0 is not in the range"),
        ("1", ("--experts=triton",), "'triton' is not one of"),
        ("1", ("--quick", "--layers=9"), "--layers 9: the tiny model has 8 layers at most"),
        ("2", ("--quick", "--experts=minimal"), "minimal needs GPUs, several ranks and"),
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
