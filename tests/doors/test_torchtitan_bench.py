"""The benchmark of a whole model through torchtitan counts its work."""

from __future__ import annotations

from doors import torchtitan_on_cpu  # noqa: F401  before anything of torchtitan
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
