"""Real processes that share the compile jobs of one empty cache, as the ranks of a host do."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fake_jobs import FakeJob
from racer import make_key
from racers import TIMEOUT_S, environment

from sonicmoe.jit.parallel import Outcomes, ParallelBuild
from sonicmoe.jit.slots import HostSlots

RANKS, JOBS, LIMIT = 4, 6, 3


def start(field, number, **request):
    """A rank in a process group of its own, which a test can kill with its workers."""
    request = {
        "root": str(field.root), "local": str(field.local), "log": str(field.log),
        "go": str(field.folder / "go"), "jobs": JOBS, "limit": LIMIT, "seconds": 0.2, **request,
    }  # fmt: skip
    path = field.folder / f"rank-{number}.json"
    path.write_text(json.dumps(request))
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("rank.py")), str(path)], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env=environment(), start_new_session=True,
    )  # fmt: skip


def result(rank):
    out, err = rank.communicate(timeout=TIMEOUT_S)
    assert rank.returncode == 0, err
    outcomes = json.loads(out)
    return outcomes


def most_at_once(times):
    """How many compiles ran at the same moment, at most."""
    events = []
    for line in times.read_text().splitlines():
        began, ended = map(float, line.split())
        events += [(began, 1), (ended, -1)]
    running = [0]
    for _, change in sorted(events):
        running.append(running[-1] + change)
    return max(running)


def test_ranks_share_the_jobs_and_the_places_of_their_host(field):
    ranks = [start(field, number) for number in range(RANKS)]
    (field.folder / "go").touch()
    outcomes = [result(rank) for rank in ranks]
    assert field.builds() == dict.fromkeys(range(1, JOBS + 1), 1)
    assert all(set(each) == {f"fake_{size}" for size in range(1, JOBS + 1)} for each in outcomes)
    states = Counter(state for each in outcomes for state in each.values())
    assert states == {"built": JOBS, "cached": JOBS * (RANKS - 1)}
    # Jobs that found the artefact of another rank are not compiles, but counting them is safe.
    assert 1 <= most_at_once(field.log.with_suffix(".times")) <= LIMIT


def test_another_rank_takes_over_from_one_that_was_killed_with_its_workers(field):
    (field.folder / "go").touch()
    victim = start(field, 0, seconds=60.0)
    field.until(lambda: sum(field.builds().values()) == LIMIT)
    other = start(field, 1)
    os.killpg(victim.pid, signal.SIGKILL)
    victim.communicate()
    assert set(result(other).values()) == {"built"}
    assert sum(field.builds().values()) == JOBS + LIMIT


def test_an_interrupt_ends_the_workers(field, cache, monkeypatch):
    jobs = [FakeJob(1, field.log, 60.0)]
    running = ParallelBuild(jobs, cache, HostSlots(field.local, 1), Outcomes())

    def interrupt():
        field.until(lambda: field.builds() == {1: 1})
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "_collect", interrupt)
    with pytest.raises(KeyboardInterrupt):
        running.run()
    field.until(lambda: HostSlots(field.local, 1).take() is not None)
    assert cache.try_load(make_key(1)) is None


def test_unusable_cache_is_explained_once_for_all_workers(field):
    """And every kernel is compiled once, for the directory that takes it."""
    field.root.write_text("not a directory")
    field.folder.joinpath("go").touch()
    rank = start(field, 0, seconds=0.0)
    out, err = rank.communicate(timeout=TIMEOUT_S)
    assert set(json.loads(out).values()) == {"built"}, err
    assert err.count(f"compile cache {field.root}: a part of the path is a file") == 1, err
    assert set(field.builds().values()) == {1}
