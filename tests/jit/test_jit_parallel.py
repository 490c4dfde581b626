"""Compiling many kernels at once: alone, and as the ranks of a host that share an empty cache."""

import os
import time
from collections import Counter

import pytest
from fake_jobs import FakeJob, TimedJob
from forks import Child
from racer import make_key, wait_for
from racers import held

from sonicmoe.config import SonicMoEConfig, reload_environment
from sonicmoe.jit import CompileCache, cpus
from sonicmoe.jit.parallel import build_all

RANKS, JOBS, LIMIT = 4, 6, 2


def start(field, seconds=0.2):
    """A rank that builds fake jobs together with other ranks."""

    def rank():
        cache = CompileCache(field.root, field.local, lock_timeout_s=30.0)
        jobs = [TimedJob(size, field.log, seconds) for size in range(1, JOBS + 1)]
        (field.folder / f"ready-{os.getpid()}").touch()
        wait_for(field.folder / "go")
        outcomes = build_all(jobs, cache, LIMIT)
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


def test_ranks_share_the_jobs(field):
    ranks = [start(field, seconds=1.0) for _ in range(RANKS)]
    # On a busy machine the first rank could be done before the last one is there.
    field.until(lambda: len(list(field.folder.glob("ready-*"))) == RANKS)
    (field.folder / "go").touch()
    outcomes = [rank.answer()[0] for rank in ranks]
    assert field.builds() == dict.fromkeys(range(1, JOBS + 1), 1)
    assert all(set(each) == {f"fake_{size}" for size in range(1, JOBS + 1)} for each in outcomes)
    states = Counter(state for each in outcomes for state in each.values())
    assert set(states) <= {"built", "cached"} and states["built"] >= JOBS
    assert all(Counter(each.values())["built"] < JOBS for each in outcomes), "one did all the work"


def test_a_rank_compiles_as_many_at_once_as_it_may(field):
    (field.folder / "go").touch()
    assert set(start(field).answer()[0].values()) == {"built"}
    assert most_at_once(field.log.with_suffix(".times")) == LIMIT


def test_a_builder_that_hangs_is_named_and_holds_up_no_other_kernel(field):
    cache = CompileCache(field.root, field.local, lock_timeout_s=0.5)
    lock = field.root / "locks" / f"fake-{make_key(1).digest}.lock"
    with held(lock):
        jobs = [FakeJob(size, field.log) for size in (1, 2, 3)]
        found = {each.kernel: each for each in build_all(jobs, cache, 1)}
    assert {name: each.state for name, each in found.items()} == {
        "fake_1": "failed", "fake_2": "built", "fake_3": "built",
    }  # fmt: skip
    assert "waited 0.5 s" in found["fake_1"].message and str(lock) in found["fake_1"].message


def test_a_caller_that_stops_asking_starts_no_further_compile(field, cache):
    """And does not wait for those that run."""
    jobs = [FakeJob(size, field.log, seconds) for size, seconds in ((1, 0.1), (2, 0.3), (3, 0.2))]
    outcomes = build_all(jobs, cache, 1)
    assert next(outcomes).kernel == "fake_2", "the longest begins first"
    began = time.monotonic()
    outcomes.close()
    assert time.monotonic() - began < 0.1
    time.sleep(0.6)
    assert sum(field.builds().values()) == 2 and field.builds()[1] == 0


def test_the_callers_configuration_is_that_of_its_compilers(field, cache, monkeypatch):
    monkeypatch.setenv("SONIC_MOE_FORBID_COMPILE", "1")
    reload_environment()
    with SonicMoEConfig(forbid_compile=False).activate():
        outcomes = [*build_all([FakeJob(size, field.log) for size in (1, 2)], cache, LIMIT)]
    assert {each.state for each in outcomes} == {"built"}, outcomes


def test_unusable_cache_is_explained_once(field, capfd):
    """And every kernel is compiled once, for the directory that takes it."""
    field.root.write_text("not a directory")
    field.folder.joinpath("go").touch()
    outcomes, said = start(field, seconds=0.0).answer()
    said += capfd.readouterr().err
    assert set(outcomes.values()) == {"built"}, said
    assert said.count(f"compile cache {field.root}: Not a directory (ENOTDIR)") == 1, said
    assert set(field.builds().values()) == {1}


def groups(tmp_path, membership, files):
    own, mount = tmp_path / "cgroup", tmp_path / "mount"
    own.write_text(membership)
    for name, text in files.items():
        path = mount / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return own, mount


@pytest.mark.parametrize(("membership", "files", "expected"), [
    ("0::/\n", {"cpu.max": "400000 100000\n"}, 4.0),
    ("0::/\n", {"cpu.max": "max 100000\n"}, None),
    ("0::/job/step\n", {"cpu.max": "max 100000", "job/cpu.max": "150000 100000",
                        "job/step/cpu.max": "800000 100000"}, 1.5),
    ("0::/not/mounted/here\n", {"cpu.max": "200000 100000"}, 2.0),
    ("4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n",
     {"cpu,cpuacct/cpu.cfs_quota_us": "300000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}, 3.0),
    ("4:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1", "cpu/a/cpu.cfs_period_us": "100000"}, None),
    ("3:memory:/a\n", {"memory/a/cpu.max": "100000 100000"}, None),
    ("0::/\n", {"cpu.max": "rubbish"}, None),
    ("rubbish\n", {}, None),
])  # fmt: skip
def test_quota(tmp_path, membership, files, expected):
    assert cpus.quota(*groups(tmp_path, membership, files)) == expected


@pytest.mark.parametrize(("quota", "expected"), [(None, 4), (1.5, 2), (0.2, 1), (64.0, 4)])
def test_a_compiler_per_cpu_unless_the_quota_is_smaller(quota, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(cpus.os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    monkeypatch.setattr(cpus, "quota", lambda: quota)
    assert cpus.compilers() == expected and cpus.compilers("3") == 3
    monkeypatch.undo()
    assert cpus.quota(tmp_path / "absent", tmp_path) is None, "no control groups"
