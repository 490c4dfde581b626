"""Real processes on one cache directory: races, kills, stale holders, clocks."""

import os
import signal
import time

from forks import start
from racer import make_key
from racers import held

from sonicmoe.jit import CompileCache

PROCESSES = 8


def test_same_key_is_built_once(field):
    results = field.race([{"seconds": 0.3}] * PROCESSES)
    assert [result.get("bytes") for result in results] == [4096] * PROCESSES
    assert len({result["path"] for result in results}) == 1
    assert field.builds() == {1: 1}
    assert list((field.root / "staging").iterdir()) == []


def test_kill_in_the_middle_of_a_build_then_restart(field):
    victim = field.start(seconds=60.0)
    field.until(lambda: any((field.root / "staging").glob("*/kernel.so")))
    victim.kill()
    assert len(list((field.root / "staging").iterdir())) == 1, "the victim left its half behind"
    result = field.run()
    assert result["bytes"] == 4096 and result["seconds"] < 5
    assert f"pid {victim.pid}" in result["log"]
    assert "ended before it was complete" in result["log"]
    assert list((field.root / "staging").iterdir()) == []
    assert field.builds() == {1: 2}


def test_bounded_wait_names_the_holder(field):
    holder = field.start(seconds=60.0)
    field.until(lambda: field.builds() == {1: 1})
    result = field.run(timeout=1.0)
    assert result["error"] == "CompileLockTimeout"
    for part in (str(make_key()), f"pid {holder.pid}", f"host {os.uname().nodename}", "since 20", "waited 1 s",
                 "SONIC_MOE_LOCK_TIMEOUT"):  # fmt: skip
        assert part in result["message"]
    holder.kill()
    assert field.run()["bytes"] == 4096


def test_waiter_goes_on_when_the_artefact_appears_under_a_held_lock(field):
    """A holder that published and then hangs, for example on its way out of a network file system
    call.
    """
    field.run()
    artefact, key = field.root / "artefacts" / "fake" / make_key().digest, make_key()
    hidden = artefact.with_name("hidden")
    artefact.rename(hidden)
    with held(field.root / "locks" / f"fake-{key.digest}.lock") as holder:
        waiter = field.start(timeout=30.0)
        time.sleep(0.5)
        hidden.rename(artefact)
        assert waiter.result()["bytes"] == 4096
        os.kill(holder, 0)  # it lives
    assert field.builds() == {1: 1}


def test_forked_child_of_a_dead_holder_does_not_keep_the_lock(field):
    """A data loader forked in the middle of a build inherits the descriptor, and must not inherit
    the lock.
    """

    def build(folder):
        child = os.fork()
        if child == 0:
            signal.pause()
        (field.folder / "child").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    cache = CompileCache(field.root, field.local)
    parent = start(lambda: cache.build(make_key(), build))
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == -signal.SIGKILL
    try:
        assert field.run(timeout=5.0)["bytes"] == 4096
    finally:
        os.kill(int((field.folder / "child").read_text()), signal.SIGKILL)
