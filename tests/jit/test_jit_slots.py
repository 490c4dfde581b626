"""Places of a host: what CPUs and quotas allow, and what happens to them when processes end."""

import os
import signal

import pytest

from sonicmoe.jit import cpus
from sonicmoe.jit.slots import AUTO, HostSlots


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
    found = cpus.quota(*groups(tmp_path, membership, files))
    assert (None if found is None else found.cpus) == expected


def test_no_control_groups(tmp_path):
    assert cpus.quota(tmp_path / "absent", tmp_path) is None


@pytest.mark.parametrize(("cpu_quota", "expected"), [(None, 4), (1.5, 2), (0.2, 1), (64.0, 4)])
def test_a_place_per_cpu_unless_the_quota_is_smaller(cpu_quota, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(cpus, "affinity", lambda: (0, 1, 2, 3))
    limit = None if cpu_quota is None else cpus.Quota(cpu_quota, "7")
    monkeypatch.setattr(cpus, "quota", lambda: limit)
    places = HostSlots(tmp_path, AUTO)
    held = [places.take() for _ in range(expected)]
    assert places.count == expected and all(held)
    assert places.take() is None
    held[0].release()
    assert places.take() is not None


def test_pinned_ranks_add_up_and_share_a_quota(tmp_path, monkeypatch):
    ranks = []
    monkeypatch.setattr(cpus, "quota", lambda: cpus.Quota(3.0, "7"))
    for affinity in ((0, 1), (2, 3)):
        monkeypatch.setattr(cpus, "affinity", lambda affinity=affinity: affinity)
        ranks.append(HostSlots(tmp_path, AUTO))
    taken = [rank.take() for rank in ranks for _ in range(2)]
    assert sum(place is not None for place in taken) == 3, "four CPUs, and a quota of three"


def test_a_place_ends_with_the_last_process_that_has_it(tmp_path):
    places = HostSlots(tmp_path, 1)
    held = places.take()
    assert held is not None
    child = os.fork()  # as a data loader would be, in the middle of a compile
    if child == 0:
        signal.pause()
    try:
        held.release()
        again = places.take()
        assert again is not None, "release unlocks although a forked process has a copy"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_claim_belongs_to_one(tmp_path):
    first, second = HostSlots(tmp_path, 4), HostSlots(tmp_path, 4)
    claim = first.claim("kernel")
    assert claim is not None and second.claim("kernel") is None
    assert second.claim("other") is not None
    claim.release()
    claim.release()
    assert second.claim("kernel") is not None


def test_a_directory_of_somebody_else_is_not_used_and_that_is_said(tmp_path, caplog, monkeypatch):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    for _ in range(2):
        places = HostSlots(tmp_path / "open", 1)
        assert places.take() and places.take() and places.claim("kernel"), "only unshared"
    assert caplog.text.count("the ranks of this host cannot share their compilers") == 1
    assert list((tmp_path / "open").iterdir()) == []


def test_a_link_in_place_of_a_lock_is_not_followed(tmp_path):
    folder, target = tmp_path / "slots", tmp_path / "target"
    folder.mkdir()
    (folder / "kernel.lock").symlink_to(target)
    assert HostSlots(tmp_path, 1).claim("kernel") is not None and not target.exists()
