"""The first forward that finds kernels missing compiles all of them; later ones do not look."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[1] / "jit"))
from fake_jobs import FailingJob, FakeJob
from racers import Field

from sonicmoe import SonicMoEConfig
from sonicmoe.engine import cold_start, select
from sonicmoe.engine.capabilities import HOPPER, RECORDS
from sonicmoe.engine.cold_start import compile_missing, run_jobs
from sonicmoe.engine.select import ready_engine
from sonicmoe.engine.settings import EngineSettings, Workload
from sonicmoe.enums import ActivationType, EngineName
from sonicmoe.jit import CompileCache
from sonicmoe.quant.recipes import RECIPES

FP8 = Workload(EngineSettings(recipe=RECIPES["dx256"]), 3072, 1536)


class Run:
    """A run of an engine whose kernels are fake jobs, on a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.field = Field(folder)
        self.config = SonicMoEConfig(
            cache_dir=self.field.root, local_cache_dir=self.field.local, compile_jobs="2"
        ).resolve()
        self.jobs = tuple(FakeJob(size, self.field.log) for size in (1, 2, 3))
        self.looks = 0

    def start(self, **changes: object) -> None:
        def listed(workload: Workload | None, arch: str) -> tuple[FakeJob, ...]:
            self.looks += 1
            return self.jobs

        record = replace(HOPPER, jobs=listed)
        compile_missing(record, FP8, "sm_90a", self.config.replace(**changes))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.setattr(cold_start, "EVERY_RUN", ())
    monkeypatch.setattr(cold_start, "_ASKED", set())
    yield Run(tmp_path)


def test_everything_is_compiled_at_once_with_one_line_before_and_one_after(run, caplog):
    run.start()
    assert run.field.builds() == {1: 1, 2: 1, 3: 1}
    before, after = (record.getMessage() for record in caplog.records)
    assert before.startswith("sonicmoe: compiling 3 kernels with 2 processes, about ")
    assert "`sonicmoe warmup --E <local experts> --H 3072 --I 1536` does this ahead of" in before
    assert after.startswith("sonicmoe: 3 kernels are ready after ")
    own = (("beta", 4.0), ("linear_beta", 25.0))
    settings = EngineSettings(ActivationType.SITU_GLU, activation_parameters=own)
    options = " --activation situ_glu --activation-parameter beta=4.0 --activation-parameter linear_beta=25.0"
    assert cold_start._options(settings, "sm_90a") == options
    assert cold_start._options(settings, "sm_100a") == f" --arch sm_100a{options}"


def test_a_process_looks_once_and_a_warm_one_says_nothing(run, caplog, monkeypatch):
    run.start()
    run.start()
    assert run.looks == 1
    caplog.clear()
    monkeypatch.setattr(cold_start, "_ASKED", set())  # another process
    run.start()
    assert run.looks == 2 and not caplog.records and sum(run.field.builds().values()) == 3


def test_only_what_is_missing_is_compiled(run, caplog):
    run.jobs[1].compile(CompileCache(run.field.root, run.field.local))
    run.start()
    assert run.field.builds() == {1: 1, 2: 1, 3: 1} and "compiling 2 kernels" in caplog.text


@pytest.mark.parametrize("change", [{"compile_jobs": "off"}, {"forbid_compile": True}])
def test_it_can_be_switched_off(run, change):
    with SonicMoEConfig(**change).activate():
        run.start(**change)
    assert not run.field.builds()


def test_a_kernel_that_fails_is_named_and_raises_where_it_is_loaded(run, caplog):
    run.jobs = (*run.jobs, FailingJob(4, run.field.log))
    run.start()
    assert run.field.builds() == {1: 1, 2: 1, 3: 1}
    assert caplog.messages[-1].endswith("; failed: fake_4")


@pytest.mark.parametrize(
    ("name", "arch"),
    [(EngineName.HOPPER, "sm_90a"), (EngineName.BF16, "sm_90a"), (EngineName.BF16, "sm_100a")],
)
@pytest.mark.parametrize("recompute_z", [False, True])
def test_a_run_of_an_engine_needs_its_kernels_and_those_of_every_run(name, arch, recompute_z):
    settings = replace(
        FP8.settings, recompute_z=recompute_z, recipe=None if name is EngineName.BF16 else FP8.settings.recipe
    )  # fmt: skip
    names = {job.name for job in run_jobs(RECORDS[name], replace(FP8, settings=settings), arch)}
    assert names >= {"routing_metadata", "aggregate", "flush"}
    own = {"fp8_wgrad", "program", "quantize"} if name is EngineName.HOPPER else {"bf16_wgrad"}
    assert names >= own
    # On Hopper `up` restores z, as one of its launches.
    assert ("bf16_up_again" in names) == (recompute_z and arch == "sm_100a")


class TestReadyEngine:
    @pytest.fixture
    def compiled(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Workload, str]]:
        """A Hopper GPU, and what was asked to be compiled for it."""
        seen: list[tuple[str, Workload, str]] = []
        monkeypatch.setattr(select, "arch_of", lambda device: "sm_90a")
        monkeypatch.setattr(select, "missing_tool", lambda *_: None)
        monkeypatch.setattr(select, "compile_missing", lambda r, w, a: seen.append((r.name, w, a)))
        capturing(monkeypatch, lambda: False)
        return seen

    def test_compiles_for_the_engine_that_was_chosen(self, compiled):
        assert ready_engine("cuda:0", EngineName.AUTO, FP8).engine.name == "hopper"
        assert compiled == [(EngineName.HOPPER, FP8, "sm_90a")]

    def test_compiles_nothing_on_a_host_or_in_a_capture(self, compiled, monkeypatch):
        ready_engine("cpu", EngineName.AUTO, FP8)
        capturing(monkeypatch, lambda: True)
        ready_engine("cuda:0", EngineName.AUTO, FP8)
        assert compiled == []


def capturing(monkeypatch: pytest.MonkeyPatch, answer: Callable[[], bool]) -> None:
    cuda = SimpleNamespace(is_current_stream_capturing=answer)
    monkeypatch.setattr(select, "torch", SimpleNamespace(cuda=cuda))
