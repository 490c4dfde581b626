"""A rank is killed inside dispatch, inside combine, and inside their backwards: every other rank ends
within `worlds.GRACE_S` of its death, with one sentence.
"""

from __future__ import annotations

import pytest
from kernels.needs import HOST_MODULE

from sonicmoe.ep.interface import is_lost_rank, raise_lost_rank
from sonicmoe.errors import RankLostError, ShapeError

# Exchange of a layer's step at which the last rank dies: the operation that the others are in.
PLACES = {2: "dispatch", 3: "combine", 4: "dispatch of dout", 5: "combine of dx"}


@pytest.mark.parametrize(
    ("framework", "fatal"), [("torch", 3), pytest.param("paddle", 5, marks=pytest.mark.paddle)]
)
def test_whole_interpreters_end_with_one_sentence(framework, fatal, tmp_path, run_ranks):
    # The time that counts begins with the death: on a loaded machine ranks take long to start.
    survivor, victim = run_ranks(framework, 2, tmp_path, f"dies 2 {fatal}")
    code, _, said = survivor
    require_one_sentence([code, victim[0]], said, PLACES[fatal])


@pytest.mark.parametrize("world,fatal", [(4, 2), (2, 4), (2, 5)])
def test_so_do_the_children_of_one_process(world, fatal, forked_ranks):
    codes, said = forked_ranks(f"dies {world} {fatal}")
    require_one_sentence(codes, said, PLACES[fatal])


@pytest.mark.parametrize(
    ("fatal", "place"),
    [pytest.param(2 + fatal, PLACES[fatal], marks=HOST_MODULE) for fatal in PLACES],
)
def test_so_do_ranks_over_symmetric_memory(fatal, place, forked_ranks):
    """Each of them waits no longer than the timeout."""
    codes, said = forked_ranks(f"ends 4 {fatal}")
    reason = "symmetric memory: timed out: rank 3 of the group did not come within 2 s"
    require_one_sentence(codes, said, place, reason)
    assert codes[-1] == 9


def require_one_sentence(codes, said, place, transport=""):
    """Every rank says one sentence but the last one, which is gone."""
    *survivors, victim = codes
    assert victim in (9, -9)
    for rank, code in enumerate(survivors):
        assert code not in (0, -9), f"rank {rank} had to be stopped:\n{said[-3000:]}"
        words = f"rank {rank} of {len(codes)} lost another rank"
        (line,) = {line for line in said.splitlines() if words in line}
        assert f"{words} in the {place} over {transport}" in line
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
