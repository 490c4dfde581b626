"""What ranks are told by their launcher, which experts and tokens are theirs, and what they say of a
rank that is gone.
"""

from __future__ import annotations

import numpy as np
import pytest

from ernie_compat.ranks import RankLayout, lost_ranks_named, names_on_all_ranks, read_launch
from sonicmoe.errors import ConfigError, RankLostError

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "1",
}  # fmt: skip
PADDLE = {
    "PADDLE_TRAINER_ID": "1", "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": "h0:6070,h1:6071",
}  # fmt: skip


def test_launchers_are_read():
    assert read_launch({"PATH": "/bin", "LOCAL_RANK": "7"}) == RankLayout()
    assert read_launch(TORCHRUN) == RankLayout(3, 4, 1)
    assert read_launch({**PADDLE, "PADDLE_RANK_IN_NODE": "0"}) == RankLayout(1, 2, 0)
    with pytest.raises(ConfigError, match=r"incomplete.*'RANK'.*needed: RANK, WORLD_SIZE"):
        read_launch({"WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match=r"incomplete \('MASTER_ADDR'\)"):
        read_launch({name: value for name, value in TORCHRUN.items() if name != "MASTER_ADDR"})
    with pytest.raises(ConfigError, match="PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM"):
        read_launch({**PADDLE, "PADDLE_TRAINERS_NUM": "two"})


def test_layout():
    layout = RankLayout(rank=1, world_size=4)
    assert list(layout.local_experts(16)) == [4, 5, 6, 7]
    assert layout.shard(np.arange(8)).tolist() == [2, 3]
    name = "weight/layers.1.mlp.experts.{}.down_proj.weight"
    wanted = [name.format(expert) for expert in (1, 5, 9, 13)]
    assert names_on_all_ranks(name.format(5), layout, 16) == wanted
    assert names_on_all_ranks("weight/lm_head.weight", layout, 16) == ["weight/lm_head.weight"]


def test_a_broken_collective_of_paddle_is_said_in_one_sentence():
    """As PyTorch's is, of which tests/ep has the words of every library."""
    words = "rank 1 of 2 lost another rank in the training over paddle"
    error = OSError("(External) Connection reset by peer")
    with pytest.raises(RankLostError, match=words), lost_ranks_named(RankLayout(1, 2), "paddle"):
        raise error
    with pytest.raises(OSError, match="External"), lost_ranks_named(RankLayout(), "paddle"):
        raise error  # one rank has no other
