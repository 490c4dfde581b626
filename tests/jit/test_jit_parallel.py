"""Real processes that share the compile jobs of one empty cache, as the ranks of a host do."""

from collections import Counter

import pytest
from fake_jobs import FakeJob, TimedJob
from forks import Child
from racer import make_key, wait_for

from sonicmoe.jit import CompileCache
from sonicmoe.jit.parallel import ParallelBuild
from sonicmoe.jit.slots import HostSlots

RANKS, JOBS, LIMIT = 4, 6, 3


def start(field, seconds=0.2):
    """A rank with its workers: it builds fake jobs together with other ranks."""

    def rank():
        cache = CompileCache(field.root, field.local, lock_timeout_s=30.0)
        jobs = [TimedJob(size, field.log, seconds) for size in range(1, JOBS + 1)]
        wait_for(field.folder / "go")
        outcomes = ParallelBuild(jobs, cache, HostSlots(cache.local_root, LIMIT)).run()
        return {each.kernel: f"{each.state} {each.message}".strip() for each in outcomes}

    return Child(rank)


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
    ranks = [start(field) for _ in range(RANKS)]
    (field.folder / "go").touch()
    outcomes = [rank.answer()[0] for rank in ranks]
    assert field.builds() == dict.fromkeys(range(1, JOBS + 1), 1)
    assert all(set(each) == {f"fake_{size}" for size in range(1, JOBS + 1)} for each in outcomes)
    states = Counter(state for each in outcomes for state in each.values())
    assert states == {"built": JOBS, "cached": JOBS * (RANKS - 1)}
    # Jobs that found the artefact of another rank are not compiles, but counting them is safe.
    assert 1 <= most_at_once(field.log.with_suffix(".times")) <= LIMIT


def test_another_rank_takes_over_from_one_that_was_killed_with_its_workers(field):
    (field.folder / "go").touch()
    victim = start(field, seconds=60.0)
    field.until(lambda: sum(field.builds().values()) == LIMIT)
    other = start(field)
    victim.kill()
    assert set(other.answer()[0].values()) == {"built"}
    assert sum(field.builds().values()) == JOBS + LIMIT


def test_an_interrupt_ends_the_workers(field, cache, monkeypatch):
    jobs = [FakeJob(1, field.log, 60.0)]
    running = ParallelBuild(jobs, cache, HostSlots(field.local, 1))

    def interrupt():
        field.until(lambda: field.builds() == {1: 1})
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "_answers", interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(running.run())
    field.until(lambda: HostSlots(field.local, 1).take() is not None)
    assert cache.try_load(make_key(1)) is None


def test_unusable_cache_is_explained_once_for_all_workers(field, capfd):
    """And every kernel is compiled once, for the directory that takes it."""
    field.root.write_text("not a directory")
    field.folder.joinpath("go").touch()
    outcomes, said = start(field, seconds=0.0).answer()
    said += capfd.readouterr().err  # of the workers
    assert set(outcomes.values()) == {"built"}, said
    assert said.count(f"compile cache {field.root}: a part of the path is a file") == 1, said
    assert set(field.builds().values()) == {1}
