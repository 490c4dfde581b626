"""Symmetric memory, emulated by processes of this host that run the very kernels: addressing and
protocol with up to eight ranks, and a rank that ends. `test_ep_worlds.py` has whole layers.
"""

from __future__ import annotations

import processes
import pytest
from kernels.needs import HOST_MODULE
from worlds import TESTS, environment

pytestmark = HOST_MODULE
PLACES = ("dispatch", "combine", "dispatch of dout", "combine of dx")


def world_of(ranks, folder, session_folder, *arguments):
    """`(exit code of each rank, stderr)`."""
    worker = TESTS / "ep" / "symmetric_worker.py"
    command = [worker, ranks, folder, session_folder, *arguments]
    process = processes.start(command, environment(SONICMOE_TEST_FRAMEWORK="torch"), TESTS.parent)
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-4000:]
    return [int(code) for code in said.strip().strip("[]").split(",")], errors


@pytest.mark.parametrize("ranks", [2, 8])
def test_every_kind_of_row_equals_the_collectives(ranks, tmp_path, session_folder):
    codes, errors = world_of(ranks, tmp_path, session_folder, "equals")
    assert codes == [0] * ranks, errors[-4000:]


@pytest.mark.parametrize(("place", "fatal"), [(place, 4 + i) for i, place in enumerate(PLACES)])
def test_a_rank_that_ends_is_an_error_of_the_others(place, fatal, tmp_path, session_folder):
    """Each of them waits no longer than the timeout, and says where it was."""
    codes, errors = world_of(4, tmp_path, session_folder, "dies", fatal)
    assert codes == [1, 1, 1, 9], errors[-4000:]
    lines = [line for line in errors.splitlines() if "RankLostError" in line]
    reason = "timed out: rank 3 of the group did not come within 2 s"
    for rank in (0, 1, 2):
        words = f"rank {rank} of 4 lost another rank in the {place} over symmetric memory: {reason}"
        assert any(words in line for line in lines), lines
