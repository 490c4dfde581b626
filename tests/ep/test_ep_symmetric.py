"""Symmetric memory, emulated by processes of this host that run the very kernels: addressing and
protocol with up to eight ranks. `test_ep_worlds.py` has whole layers, `test_ep_lost_ranks.py` ranks
that end.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from kernels.needs import HOST_MODULE

from sonicmoe import SonicMoEConfig, late_errors
from sonicmoe.ep import peer_memory
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import RankLostError, RoutingError

pytestmark = HOST_MODULE


@pytest.mark.parametrize("world", ["equals 2", "equals 8", "loads 4"])
def test_rows_equal_the_collectives_and_more_than_max_load_is_said(world, forked_ranks):
    """The ranks compare their rows in `symmetric_ranks.py`."""
    codes, said = forked_ranks(world)
    assert not any(codes), said[-4000:]


def test_a_step_raises_what_a_kernel_has_found(monkeypatch):
    """Without a dispatch behind it."""
    words = torch.zeros(6000, dtype=torch.int64)
    peers = SimpleNamespace(
        world_size=2, rank=0, timeout_s=7.0, name="memory", words=lambda count: words
    )
    memory = peer_memory.PeerMemory(peers)
    monkeypatch.setattr(late_errors, "_QUESTIONS", [])
    late_errors.ask_later(memory.check)
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in ((2, 8, 8), (2, 4, 8))]
    node = SonicMoEMlpNode.from_fused(*weights, config=SonicMoEConfig(fp8_mode="off"))
    node.step()
    words[peer_memory.OVERFLOW] = 1 << 32 | 99
    with pytest.raises(RoutingError, match="rank 0 was to get 99 slots"):
        node.step()
    node.step()
    words[peer_memory.LOST] = 2
    match = "rank 0 of 2 lost another rank in the step over memory: timed out: rank 1"
    with pytest.raises(RankLostError, match=match):
        node.step()
