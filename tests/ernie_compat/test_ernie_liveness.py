"""The watch between ranks: every way a rank can end reaches every other rank once, and no good end
does.
"""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ernie_compat import rank_guard
from ernie_compat.liveness import RankWatch
from ernie_compat.parallel import (
    Launch,
    RankLayout,
    SingleProcess,
    on_rank,
    read_launch,
    whole_shapes,
)
from ernie_compat.rank_guard import RankGuard
from sonicmoe.errors import ConfigError, RankLostError

SILENCE_S = 0.6


class News:
    """What a rank was told, and a way to wait for it."""

    def __init__(self):
        self.told, self.came = [], threading.Event()

    def __call__(self, reason):
        self.told.append(reason)
        self.came.set()


def star(size, silence_s=20.0):
    """`(watches, news)` of `size` ranks in this process."""
    listener, news = RankWatch.listen(), [News() for _ in range(size)]
    address = ("127.0.0.1", listener.getsockname()[1])

    def join(rank):
        own = listener if rank == 0 else None
        return RankWatch(rank, size, address, news[rank], listener=own, silence_s=silence_s)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(join, range(size))), news


def end_all(watches):
    for watch in watches:
        watch.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_reaches_every_other_rank_once(failing):
    watches, news = star(3)
    watches[failing].fail("ValueError: step 4\nis bad")
    for rank, heard in enumerate(news):
        if rank != failing:
            assert heard.came.wait(10)
            assert heard.told == [f"rank {failing} failed: ValueError: step 4 is bad"]
            assert watches[rank].wait_for_news(0)
    assert news[failing].told == []
    end_all(watches)


@pytest.mark.parametrize("dying", [0, 1, 2])
def test_a_closed_connection_is_the_end_of_a_process(dying):
    watches, news = star(3)
    watches[dying]._ended = True  # a killed process says nothing more,
    for link in watches[dying]._peers.values():  # and the kernel closes its connections
        link.shutdown(socket.SHUT_RDWR)
    for rank, heard in enumerate(news):
        if rank != dying:
            assert heard.came.wait(10)
            assert heard.told == [f"rank {dying} is gone (its process ended)"]
    end_all(watches)


def test_a_rank_that_hangs_is_noticed_within_the_bound():
    listener, heard = RankWatch.listen(), News()
    address = ("127.0.0.1", listener.getsockname()[1])
    with ThreadPoolExecutor(1) as pool:
        hub = pool.submit(RankWatch, 0, 2, address, heard, listener=listener, silence_s=SILENCE_S)
        with socket.create_connection(address) as frozen:
            frozen.sendall(b"1\n")
            started = time.monotonic()
            watch = hub.result(10)
            assert heard.came.wait(10) and time.monotonic() - started < 10 * SILENCE_S
    assert heard.told == [f"rank 1 has not been heard of for {SILENCE_S} s"]
    watch.close()


def test_heartbeats_keep_a_slow_rank_alive_and_goodbyes_are_no_news():
    watches, news = star(3, SILENCE_S)
    time.sleep(3 * SILENCE_S)
    watches[1].close()
    time.sleep(2 * SILENCE_S)
    end_all(watches)
    time.sleep(SILENCE_S)
    assert [heard.told for heard in news] == [[], [], []]


def test_a_rank_that_never_comes_is_an_error_and_no_hang():
    listener = RankWatch.listen()
    with pytest.raises(OSError):
        RankWatch(0, 2, listener.getsockname(), News(), listener=listener, silence_s=0.2)


def test_one_rank_guards_nothing():
    with pytest.raises(ValueError, match="as it was"), RankGuard(SingleProcess(), lambda: "hint"):
        raise ValueError("as it was")


TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "1",
}
PADDLE = {
    "PADDLE_TRAINER_ID": "1",
    "PADDLE_TRAINERS_NUM": "2",
    "PADDLE_TRAINER_ENDPOINTS": "h0:6070,h1:6071",
}


def test_launchers_are_read():
    assert read_launch({"PATH": "/bin", "LOCAL_RANK": "7"}) == Launch()
    assert read_launch(TORCHRUN) == Launch(3, 4, 1, "node0")
    assert read_launch({**PADDLE, "PADDLE_RANK_IN_NODE": "0"}) == Launch(1, 2, 0, "h0")
    with pytest.raises(ConfigError, match=r"incomplete.*'RANK'.*needed: RANK, WORLD_SIZE"):
        read_launch({"WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM"):
        read_launch({**PADDLE, "PADDLE_TRAINERS_NUM": "two"})


def test_layout():
    layout = RankLayout(Launch(rank=5, world_size=8), 4)
    assert layout.ep_groups == [[0, 1, 2, 3], [4, 5, 6, 7]] and layout.ep_rank == 1
    assert layout.replica_groups == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert list(layout.local_experts(16)) == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match="--ep is 3 and there are 8 ranks"):
        RankLayout(Launch(world_size=8), 3)
    with pytest.raises(
        ConfigError, match=r"--ep is 2 and there is 1 rank; .* start it with torchrun"
    ):
        RankLayout(Launch(), 2)


def test_names_of_other_ranks_experts():
    name = "weight/layers.12.mlp.experts.9.up_gate_proj.weight"
    assert on_rank(name, 8) == "weight/layers.12.mlp.experts.17.up_gate_proj.weight"
    parallel = SingleProcess()
    parallel.layout = RankLayout(Launch(rank=1, world_size=2), 2)
    local = {"layers.0.mlp.experts.2.down_proj.weight": (3, 4), "layers.0.norm.weight": (4,)}
    assert whole_shapes(local, parallel, 4) == {
        "layers.0.mlp.experts.0.down_proj.weight": (3, 4),
        "layers.0.mlp.experts.2.down_proj.weight": (3, 4),
        "layers.0.norm.weight": (4,),
    }


class HeardOfALostRank:
    """A watch whose news has come, and whose thread has yet to end the process."""

    def __init__(self):
        self.told = []

    def wait_for_news(self, seconds):
        return True

    def fail(self, reason):
        self.told.append(reason)


@pytest.mark.parametrize(
    ("error", "waits"),
    [(RankLostError("in a collective"), True), (ValueError("torch's"), True), (ConfigError("own"), False)],
)  # fmt: skip
def test_the_news_of_a_lost_rank_is_printed_before_the_error_that_it_caused(
    error, waits, monkeypatch
):
    slept = []
    monkeypatch.setattr(rank_guard.time, "sleep", slept.append)
    guard = RankGuard(SingleProcess(), lambda: "hint")
    guard._watch = HeardOfALostRank()
    guard.__exit__(type(error), error, None)
    assert slept == [rank_guard.NEWS_S] * waits
