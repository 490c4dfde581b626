"""Symmetric memory, emulated by processes of this host that run the very kernels: addressing and
protocol with up to eight ranks, and a rank that ends. `test_ep_worlds.py` has whole layers.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import processes
import pytest
import torch
from kernels.needs import HOST_MODULE
from worlds import TESTS, environment

from sonicmoe import SonicMoEConfig, late_errors
from sonicmoe.ep import peer_memory
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import RankLostError, RoutingError

pytestmark = HOST_MODULE
PLACES = ("dispatch", "combine", "dispatch of dout", "combine of dx")


def world_of(ranks, folder, session_folder, *arguments):
    """`(exit code of each rank, stderr)`, the codes of one world after the other."""
    worker = TESTS / "ep" / "symmetric_worker.py"
    command = [worker, ranks, folder, session_folder, *arguments]
    process = processes.start(command, environment(SONICMOE_TEST_FRAMEWORK="torch"), TESTS.parent)
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-4000:]
    return [code for line in said.splitlines() for code in json.loads(line)], errors


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_kind_of_row_equals_the_collectives(ranks, tmp_path, session_folder):
    codes, errors = world_of(ranks, tmp_path, session_folder, "equals")
    assert codes == [0] * ranks, errors[-4000:]


def test_more_than_max_load_is_said_on_every_rank(tmp_path, session_folder):
    codes, errors = world_of(4, tmp_path, session_folder, "loads")
    assert codes == [0] * 4, errors[-4000:]


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


def test_a_rank_that_ends_is_an_error_of_the_others(tmp_path, session_folder):
    """Each of them waits no longer than the timeout, and says where it was."""
    last = [4 + number for number in range(len(PLACES))]
    codes, errors = world_of(4, tmp_path, session_folder, "dies", *last)
    assert codes == [1, 1, 1, 9] * len(PLACES), errors[-4000:]
    lines = [line for line in errors.splitlines() if "RankLostError" in line]
    reason = "timed out: rank 3 of the group did not come within 2 s"
    for place in PLACES:
        for rank in (0, 1, 2):
            words = (
                f"rank {rank} of 4 lost another rank in the {place} over symmetric memory: {reason}"
            )
            assert any(words in line for line in lines), (place, lines)
