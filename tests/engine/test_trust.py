"""Trials of engines: every planted fault is found in a real process, the verdict is kept and shared,
and the next engine is taken by name.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import framework
import planted_engines
import pytest

from sonicmoe import SonicMoEConfig
from sonicmoe.architectures import SM90, SM120
from sonicmoe.engine import select, trial, trial_process, trust
from sonicmoe.engine.capabilities import BF16, RECORDS
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.settings import TokenFormat, Workload
from sonicmoe.engine.trust import Subject, UndecidedError, Verdict, try_engine
from sonicmoe.enums import EngineName
from sonicmoe.errors import EngineUnavailableError
from sonicmoe.jit.cache import CompileCache, default_cache
from sonicmoe.quant.recipes import RECIPES

WORKLOAD = Workload(EngineSettings(), 64, 32)
# An engine that never ran on this architecture. Its kernels are those of nobody.
RECORD = replace(BF16, architectures=(SM90, SM120), jobs=lambda workload, arch: ())
ARCH, GPU = SM120.name, "NVIDIA of another kind"
torch_only = pytest.mark.skipif(framework.IS_PADDLE, reason="the processes are the same")


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """A GPU of that architecture, and an empty cache."""
    trust._KNOWN.clear()
    monkeypatch.setattr(trust, "run_jobs", lambda record, *_: record.jobs(*_))
    monkeypatch.setattr(trust, "gpu_name", lambda device: GPU)
    monkeypatch.setattr(trust, "driver_version", lambda: "580.0")
    config = SonicMoEConfig(cache_dir=tmp_path / "cache", local_cache_dir=tmp_path / "local")
    with config.activate():
        yield
    trust._KNOWN.clear()


def subject(engine, workload=WORKLOAD):
    return Subject(engine, RECORD, workload, "cpu", ARCH)


class TestInAProcess:
    """Real processes, on the host."""

    def test_a_sound_engine_passes_every_case(self):
        fp8 = Workload(EngineSettings(recipe=RECIPES["dx256"]), 64, 64)
        verdict = try_engine(subject(planted_engines.Sound, fp8))
        assert verdict.trusted and verdict.reason == ""
        names = [case["case"] for case in verdict.cases]
        assert names[:4] == ["routing", "inference", "training", "tokens as e4m3_1x128"]
        assert sum(name.startswith("gradients into main_grad") for name in names) == 8
        wanted = {"out", "dx", "dprobs", "dw1", "dw2"}
        assert {name for case in verdict.cases[1:] for name in case["errors"]} == wanted

    @torch_only
    @pytest.mark.parametrize(("engine", "words"), [
        (planted_engines.WrongNumber, "training: an element of dx is "),
        (planted_engines.Faults, "training: the process died of SIGSEGV"),
        (planted_engines.NeverEnds, "training: did not end within 4 s"),
    ], ids=["a wrong number", "a fault", "an endless loop"])  # fmt: skip
    def test_a_planted_fault_is_named(self, monkeypatch, engine, words):
        monkeypatch.setattr(trial_process, "CASE_S", 4.0)
        verdict = try_engine(subject(engine))
        assert not verdict.trusted and verdict.reason.startswith(words)
        assert [case["problem"] for case in verdict.cases[:2]] == [None, None]
        assert not planted_engines.trials_of_this_process()


def inline(monkeypatch, engine, ended="exit status 1"):
    """`try_engine` without a process: the events are those of `trial.run` in this one."""

    def run(request):
        events = []
        try:
            trial.run(pickle.loads(pickle.dumps(request)), events.append)
        except BaseException as error:
            return events, ended, f"Traceback\n{type(error).__name__}: {error}\n"
        return events, None, ""

    monkeypatch.setattr(trust, "run_trial", run)
    return try_engine(subject(engine))


# What an engine does, how its process ended, and the verdict; or why there is none.
SEEN = {
    "overwrites": (planted_engines.Overwrites, "exit status 1", Verdict,
                   r"training: dw1 is [\d.]+% away from the reference engine's"),
    "differs": (planted_engines.Differs, "exit status 1", Verdict,
                "inference: two equal calls differ in out$"),
    "raises": (planted_engines.Raises, "exit status 1", Verdict,
               r"training: exit status 1 \(RuntimeError: CUDA error: an illegal memory access was encountered\)$"),
    "no memory": (planted_engines.NoMemory, "exit status 1", UndecidedError,
                  r"inference: exit status 1 \(RuntimeError: CUDA out of memory"),
    "no start": (planted_engines.NeverBegins, "exit status 1", UndecidedError,
                 r"exit status 1 before the first case \(SystemExit: this pac"),
    "killed": (planted_engines.Raises, "killed", UndecidedError,
               "training: the process was killed from outside"),
}  # fmt: skip


class TestVerdicts:
    @pytest.mark.parametrize(("engine", "ended", "kind", "words"), SEEN.values(), ids=SEEN)
    def test_names_what_is_wrong_or_is_none_where_nothing_was_learnt(
        self, engine, ended, kind, words, monkeypatch
    ):
        planted_engines.Differs.calls = 0
        try:
            found = inline(monkeypatch, engine, ended)
            reason = found.reason
        except UndecidedError as error:
            found, reason = error, str(error)
        assert type(found) is kind and re.match(words, reason), reason
        assert kind is UndecidedError or not found.trusted

    def test_routing_of_a_gpu_is_compared_with_that_of_a_host(self, monkeypatch):
        build, built = trial.build_routing, []

        def wrong_on_the_gpu(*arguments, **options):
            routing = build(*arguments, **options)
            built.append(routing)
            # The host's is built once, after the operands' own.
            row_token = routing.row_token.clone()
            row_token[:2] = row_token[:2].flip(0)
            return routing if len(built) == 2 else replace(routing, row_token=row_token)

        monkeypatch.setattr(trial, "build_routing", wrong_on_the_gpu)
        verdict = inline(monkeypatch, planted_engines.Sound)
        assert re.match(
            r"routing: row_token is [\d.]+% away from the reference engine's, of at most 0%",
            verdict.reason,
        )


@pytest.fixture
def trials(monkeypatch):
    """What trials find, by engine; and a list of those that were made."""
    made = []

    def find(subject):
        made.append(subject)
        found = find.verdicts.get(subject.record.name, Verdict(True))
        if isinstance(found, Exception):
            raise found
        return found

    find.verdicts, find.made = {}, made
    monkeypatch.setattr(trust, "try_engine", find)
    return find


BROKEN = Verdict(False, "training: dx is 31.00% away from the reference engine's, of at most 2%")
ASKED = Subject(ReferenceEngine, RECORD, WORKLOAD, "cuda:0", ARCH)


class TestKept:
    def test_once_for_these_kernels_this_gpu_and_this_driver(self, trials, monkeypatch):
        assert trust.refusal(ASKED) is None and not trials.made, "asking alone tries nothing"
        assert trust.trusted(ASKED) and trust.trusted(ASKED)
        trust._KNOWN.clear()  # the next run
        quantised = replace(WORKLOAD, tokens=TokenFormat.E4M3_1X128)
        assert trust.trusted(replace(ASKED, workload=quantised, device="cuda:1"))
        assert len(trials.made) == 1
        other = replace(ASKED, record=replace(RECORD, jobs=lambda workload, arch: (_Job(),)))
        monkeypatch.setattr(default_cache(), "try_load", _holds(default_cache().try_load))
        assert trust.trusted(other)
        trust._KNOWN.clear()
        assert trust.trusted(other)
        assert len(trials.made) == 2
        for name, other in (("driver_version", "590.0"), ("gpu_name", "NVIDIA of a third kind")):
            monkeypatch.setattr(trust, name, lambda *_, other=other: other)
            trust._KNOWN.clear()
            before = len(trials.made)
            assert trust.trusted(ASKED) and len(trials.made) == before + 1

    def test_a_refusal_is_kept_with_its_reason(self, trials):
        trials.verdicts[EngineName.BF16] = BROKEN
        assert not trust.trusted(ASKED)
        wanted = f"its check on {GPU} failed: {BROKEN.reason}. {trust.HOW_TO_SKIP}"
        assert trust.refusal(ASKED) == wanted
        trust._KNOWN.clear()
        assert trust.refusal(ASKED) == wanted and not trust.trusted(ASKED)
        assert len(trials.made) == 1

    def test_what_was_not_decided_is_asked_again_by_the_next_process(self, trials):
        trials.verdicts[EngineName.BF16] = UndecidedError("no memory")
        assert not trust.trusted(ASKED) and not trust.trusted(ASKED)
        words = "could not be checked on this GPU, where it never ran: no memory."
        assert words in str(trust.refusal(ASKED)) and len(trials.made) == 1
        trust._KNOWN.clear()
        trials.verdicts.clear()
        assert trust.trusted(ASKED) and len(trials.made) == 2

    @pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO], ids=errno.errorcode.get)
    @pytest.mark.parametrize("found", [Verdict(True), UndecidedError("no memory")])
    def test_a_verdict_that_cannot_be_read_says_nothing(
        self, trials, monkeypatch, caplog, code, found
    ):
        """The engine is tried again, or not used, and a warning says why."""
        assert trust.trusted(ASKED)
        trust._KNOWN.clear()
        trials.verdicts[EngineName.BF16] = found
        read = Path.read_text

        def lost(path, *arguments, **options):
            if path.name == "verdict.json":
                raise OSError(code, os.strerror(code), str(path))
            return read(path, *arguments, **options)

        monkeypatch.setattr(Path, "read_text", lost)
        assert trust.refusal(ASKED) is None
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            assert trust.trusted(ASKED) == (found == Verdict(True))
        assert len(trials.made) == 2
        assert "cannot be read, so it is checked again" in caplog.text
        if found != Verdict(True):
            assert "could not be checked on this GPU" in str(trust.refusal(ASKED))

    def test_processes_that_ask_at_once_share_one_trial(self, trials, tmp_path):
        """Each with a cache object of its own, as ranks have."""
        folders = {"cache_dir": tmp_path / "cache", "local_cache_dir": tmp_path / "local"}
        found = []

        def ask():
            with SonicMoEConfig(**folders).activate():
                cache = CompileCache(*folders.values())
                found.append(trust._judge(subject(ReferenceEngine), cache))

        ranks = [threading.Thread(target=ask) for _ in range(4)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert len(trials.made) == 1 and found == [Verdict(True)] * 4


class _Job:
    """Of a kernel that the cache holds."""

    name, effort_s = "some_gemm", 1.0

    def key(self):
        own = {"statics": {}, "fingerprint": {}, "toolchain": {"nvcc": "13"}}
        return trust.CompileKey.make(self.name, arch=ARCH, **own)


def _holds(try_load):
    def look(key):
        if key.kernel != _Job.name:
            return try_load(key)
        return SimpleNamespace(path=SimpleNamespace(name=key.digest))

    return look


class TestChoice:
    @pytest.fixture(autouse=True)
    def gpu(self, monkeypatch, trials):
        """What `select` sees of that machine: the BF16 engine has kernels for it."""
        monkeypatch.setattr(select, "arch_of", lambda device: ARCH)
        monkeypatch.setattr(select, "missing_tool", lambda *_: None)
        monkeypatch.setattr(select, "compile_missing", lambda *_: None)
        monkeypatch.setitem(RECORDS, EngineName.BF16, RECORD)
        self.capturing = False
        monkeypatch.setattr(select, "_is_capturing", lambda: self.capturing)
        self.trials = trials

    @staticmethod
    def ready(requested=EngineName.AUTO, settings=WORKLOAD.settings):
        return select.ready_engine("cuda:0", requested, replace(WORKLOAD, settings=settings))

    @pytest.mark.parametrize("recipe", [None, RECIPES["dx256"]], ids=["bf16", "fp8"])
    def test_the_next_one_is_taken_by_name_and_said_once(self, recipe, caplog):
        self.trials.verdicts[EngineName.BF16] = BROKEN
        with caplog.at_level(logging.WARNING, logger="sonicmoe"):
            for _ in range(2):
                choice = self.ready(settings=EngineSettings(recipe=recipe))
                select.announce(choice, "cuda:0")
        following = choice.engine.name
        assert following != "bf16" and choice.falls_back
        assert f"not bf16: its check on {GPU} failed: training: dx is 31.00% away" in choice.reason
        lines = [r.getMessage() for r in caplog.records if "on cuda:0" in r.getMessage()]
        assert [line.startswith(f"engine {following} on cuda:0: ") for line in lines] == [True]
        assert [s.record.name for s in self.trials.made].count(EngineName.BF16) == 1

    def test_by_name_it_is_refused_with_the_reason(self):
        self.trials.verdicts[EngineName.BF16] = BROKEN
        for _ in range(2):
            with pytest.raises(EngineUnavailableError, match="'bf16' cannot run: its check on"):
                self.ready(EngineName.BF16)
        assert len(self.trials.made) == 1

    def test_no_trial_during_a_capture(self):
        self.capturing = True
        with pytest.raises(EngineUnavailableError, match="run one forward before the capture"):
            self.ready()
        assert not self.trials.made
        self.capturing = False
        self.ready()
        self.capturing = True
        assert self.ready().engine.name == "bf16" and len(self.trials.made) == 1

    def test_switched_off_or_proven_it_is_taken_unchecked(self, monkeypatch):
        self.trials.verdicts[EngineName.BF16] = BROKEN
        with SonicMoEConfig(engine_check=False).activate():
            assert self.ready().engine.name == "bf16"
        monkeypatch.setattr(select, "arch_of", lambda device: SM90.name)
        assert self.ready().engine.name == "bf16"
        assert self.ready(EngineName.REFERENCE).engine.name == "reference"
        assert not self.trials.made
