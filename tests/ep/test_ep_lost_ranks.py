"""A rank is killed inside dispatch, inside combine, and inside their backwards: every other rank ends
within `worlds.GRACE_S` of its death, with one sentence.
"""

from __future__ import annotations

import json

import pytest
from worlds import finish

from sonicmoe.ep.interface import is_lost_rank, raise_lost_rank
from sonicmoe.errors import RankLostError, ShapeError

# Exchange of a layer's step at which the last rank dies: the operation that the others are in.
PLACES = {2: "dispatch", 3: "combine", 4: "dispatch of dout", 5: "combine of dx"}
FRESH = [("torch", 2, 3), pytest.param("paddle", 2, 5, marks=pytest.mark.paddle)]


@pytest.mark.parametrize("framework,world,fatal", FRESH)
def test_the_others_end_with_one_sentence(framework, world, fatal, tmp_path, start_ranks):
    # The time that counts begins with the death: on a loaded machine ranks take long to start.
    *survivors, victim = finish(start_ranks(framework, world, tmp_path, "dies", fatal))
    assert victim[0] == -9
    for rank, (code, _, said) in enumerate(survivors):
        require_one_sentence(rank, world, fatal, code, said)


@pytest.mark.parametrize("world,fatal", [(4, 2), (2, 4), (2, 5)])
def test_so_do_the_children_of_one_process(world, fatal, tmp_path, start_ranks_as_one):
    """Those above show that whole interpreters end."""
    ((code, printed, said),) = finish(start_ranks_as_one(world, tmp_path, "dies", fatal))
    assert code == 0, said[-3000:]
    *survivors, victim = json.loads(printed)
    assert victim == -9
    for rank, code in enumerate(survivors):
        require_one_sentence(rank, world, fatal, code, said)


def require_one_sentence(rank, world, fatal, code, said):
    assert code not in (0, -9), f"rank {rank} had to be stopped:\n{said[-3000:]}"
    words = f"rank {rank} of {world} lost another rank"
    (line,) = {line for line in said.splitlines() if words in line}
    assert f"{words} in the {PLACES[fatal]} over " in line
    assert "start all ranks again from the last checkpoint" in line


@pytest.mark.parametrize(
    "said",
    [
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [::1]:1",
        "Timed out waiting 1800000ms for recv operation to complete",
        "NCCL error: remote process exited or there was a network error",
        "DeepEP error: CPU recv timeout",
    ],
)
def test_the_librarys_words_are_kept(said):
    words = "rank 1 of 4 lost another rank in the combine"
    with pytest.raises(RankLostError, match=words) as caught:
        raise_lost_rank(RuntimeError(f"a stack\n{said}\nmore"), "combine", "gloo", 1, 4)
    assert said in str(caught.value) and isinstance(caught.value.__cause__, RuntimeError)


def test_other_errors_stay_what_they_are():
    for error in (ValueError("timeout"), RuntimeError("CUDA error"), ShapeError("gloo")):
        assert not is_lost_rank(error)
        raise_lost_rank(error, "combine", "gloo", 0, 2)
