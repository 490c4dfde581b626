"""Warm-up: plan, worker processes, record, check, command."""

from __future__ import annotations

import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from fake_jobs import DyingJob, FailingJob, FakeJob, UnsendableJob
from racer import load
from racers import Field, environment

import sonicmoe.jit.parallel as parallel_module
import sonicmoe.jit.worker as worker_module
import sonicmoe.jit_warmup as jit_warmup_module
from sonicmoe.cli.main import main
from sonicmoe.cli.warmup import warmup
from sonicmoe.config import SonicMoEConfig, current_config
from sonicmoe.engine import capabilities, compile_plan
from sonicmoe.engine.capabilities import BF16, RECORDS, TRITON, missing_package
from sonicmoe.engine.compile_plan import plan, warm_up_plan
from sonicmoe.enums import EngineName, ZCode
from sonicmoe.errors import ConfigError, DeviceError
from sonicmoe.jit import CompileCache, no_compile
from sonicmoe.jit.errors import CompileForbiddenError
from sonicmoe.jit.parallel import KernelOutcome
from sonicmoe.jit.plan import BOTH, PRECISIONS, ModelSpec, WarmUpPlan
from sonicmoe.jit.warmup import SELECTED, check, find_record, read_records, warm_up
from sonicmoe.jit_warmup import warmup_jit

SPEC = ModelSpec(8, 3072, 1536)
DIMENSIONS = ["--E", "8", "--H", "3072", "--I", "1536"]
WARM_UP = "sonicmoe warmup --E 8 --H 3072 --I 1536 --arch sm_90a"


def states(kernels: tuple[KernelOutcome, ...]) -> dict[str, str]:
    return {outcome.kernel: outcome.state for outcome in kernels}


def test_everything_is_compiled_in_other_processes_then_forbidden(
    cache: CompileCache, field: Field
) -> None:
    jobs = [FakeJob(size, field.log, 0.1) for size in range(1, 7)]
    seen: list[KernelOutcome] = []
    report = warm_up(SPEC, cache, jobs=3, compile_jobs=jobs, progress=seen.append)
    assert report.complete and len(seen) == 6 and set(states(report.kernels).values()) == {"built"}
    assert all(count == 1 for count in field.builds().values()) and len(field.builds()) == 6
    workers = {line.split()[1] for line in field.log.read_text().splitlines()}
    assert str(os.getpid()) not in workers and 2 <= len(workers) <= 3
    with no_compile():
        again = warm_up(SPEC, cache, compile_jobs=jobs)
        assert set(states(again.kernels).values()) == {"cached"}
        assert all(load(job.compile(cache)) == 4096 for job in jobs)


def test_what_only_this_node_has_is_copied_and_not_compiled(
    cache: CompileCache, field: Field
) -> None:
    jobs = [FakeJob(size, field.log) for size in (1, 2)]
    warm_up(SPEC, CompileCache(field.local, field.local), compile_jobs=jobs)
    report = warm_up(SPEC, cache, compile_jobs=jobs)
    assert set(states(report.kernels).values()) == {"cached"} and set(field.builds().values()) == {
        1
    }
    elsewhere = CompileCache(field.root, field.root.with_name("another_node"))
    assert (
        check(SPEC, elsewhere, jobs).complete
        and report.record is not None
        and report.record.is_relative_to(field.root)
    )
    assert all(load(elsewhere.try_load(job.key())) == 4096 for job in jobs)


def test_failures_do_not_stop_the_others(cache: CompileCache, field: Field) -> None:
    jobs = [
        FakeJob(1, field.log),
        FailingJob(2, field.log),
        DyingJob(3, field.log),
        FakeJob(4, field.log),
        FakeJob(5, field.log),
    ]
    report = warm_up(SPEC, cache, jobs=1, compile_jobs=jobs)
    assert states(report.kernels) == {
        "fake_1": "built", "fake_2": "failed", "fake_3": "failed", "fake_4": "built", "fake_5": "built"
    }  # fmt: skip
    messages = {outcome.kernel: outcome.message for outcome in report.kernels}
    assert "ValueError: expected ';'" in messages["fake_2"]
    assert "fake_3 ended with status 41" in messages["fake_3"]
    assert not report.complete and report.record is None and find_record(SPEC, cache) is None


def test_a_job_that_cannot_be_sent_fails_alone(cache: CompileCache, field: Field) -> None:
    report = warm_up(
        SPEC, cache, jobs=1, compile_jobs=[UnsendableJob(1, field.log), FakeJob(2, field.log)]
    )
    assert states(report.kernels) == {"fake_1": "failed", "fake_2": "built"} and not report.complete
    assert "this job stays here" in report.kernels[0].message


def test_workers_that_do_not_start_fail_every_kernel(
    cache: CompileCache, field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(worker_module.subprocess, "Popen", refuse)
    report = warm_up(
        SPEC, cache, jobs=2, compile_jobs=[FakeJob(size, field.log) for size in (1, 2, 3)]
    )
    assert states(report.kernels) == {"fake_1": "failed", "fake_2": "failed", "fake_3": "failed"}
    assert all("Resource temporarily unavailable" in outcome.message for outcome in report.kernels)
    assert not report.complete and report.record is None


def test_progress_that_raises_stops_no_compile_and_is_raised_at_the_end(
    cache: CompileCache, field: Field
) -> None:
    seen = []

    def progress(outcome: KernelOutcome) -> None:
        seen.append(outcome)
        raise BrokenPipeError("stdout is gone")

    jobs = [FakeJob(size, field.log) for size in (1, 2, 3)]
    with pytest.raises(BrokenPipeError, match="stdout is gone"):
        warm_up(SPEC, cache, jobs=1, compile_jobs=jobs, progress=progress)
    assert (
        len(seen) == 1
        and check(SPEC, cache, jobs).complete
        and find_record(SPEC, cache, SELECTED) is None
    )


def test_a_job_without_an_outcome_is_not_warm(
    cache: CompileCache, field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel_module.ParallelBuild, "_work", lambda *arguments: None)
    report = warm_up(SPEC, cache, compile_jobs=[FakeJob(1, field.log)])
    assert (
        states(report.kernels) == {"fake_1": "failed"}
        and not report.complete
        and report.record is None
    )


def test_fewer_threads_than_asked_for_do_the_work(
    cache: CompileCache, field: Field, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Scarce(parallel_module.threading.Thread):
        started = 0

        def start(self) -> None:
            if Scarce.started == 1:
                raise RuntimeError("can't start new thread")
            Scarce.started += 1
            super().start()

    monkeypatch.setattr(parallel_module.threading, "Thread", Scarce)
    assert warm_up(
        SPEC, cache, jobs=3, compile_jobs=[FakeJob(size, field.log) for size in (1, 2, 3)]
    ).complete


def test_record_says_what_was_warmed_with_versions(cache: CompileCache, field: Field) -> None:
    job = FakeJob(1, field.log)
    report = warm_up(SPEC, cache, compile_jobs=[job])
    path = field.root / "warmed" / f"{SPEC.digest(SELECTED)}.json"
    assert report.record == path == find_record(SPEC, cache, SELECTED)
    (record,) = read_records(field.root)
    assert record["model"] == {
        "E": 8,
        "H": 3072,
        "I": 1536,
        "dtype": "bfloat16",
        "activation": "swiglu",
        "arch": "sm_90a",
        "activation_parameters": [],
    }
    assert record["kernels"] == [{"kernel": "fake_1", "key": str(job.key())}]
    assert {"sonicmoe", "apache-tvm-ffi", "triton"} <= set(record["versions"])
    assert record["precision"] == SELECTED and find_record(SPEC, cache) is None, (
        "picked kernels warm no precision"
    )
    assert find_record(ModelSpec(16, 3072, 1536), cache, SELECTED) is None


def test_records_that_are_none_are_left_out(cache: CompileCache, field: Field) -> None:
    """A FIFO would hang the reader, and a deep nesting end it; a link is not followed."""
    assert warm_up(SPEC, cache, compile_jobs=[FakeJob(1, field.log)], jobs=1).record is not None
    (good,) = read_records(cache.root)
    warmed = cache.root / "warmed"
    os.mkfifo(warmed / "a.json")
    (warmed / "b.json").write_text("[" * 100_000)
    (warmed / "c.json").write_text("[]")
    (field.folder / "elsewhere.json").write_text("{}")
    (warmed / "d.json").symlink_to(field.folder / "elsewhere.json")
    assert read_records(cache.root) == [good]


def test_record_writes_through_no_link(cache: CompileCache, field: Field) -> None:
    victim = field.folder / "victim"
    victim.write_text("precious")
    record = warm_up(SPEC, cache, compile_jobs=[FakeJob(1, field.log)], jobs=1).record
    assert record is not None
    record.unlink()
    for name in (record.name, f"{record.name}.{os.getpid()}.partial"):
        record.with_name(name).symlink_to(victim)
    again = warm_up(SPEC, cache, compile_jobs=[FakeJob(1, field.log)], jobs=1).record
    assert again == record and not record.is_symlink() and victim.read_text() == "precious"


def test_a_second_precision_has_a_record_of_its_own(cache: CompileCache, field: Field) -> None:
    for size, precision in enumerate(["fp8", "bf16"], start=1):
        warm_up(SPEC, cache, compile_jobs=WarmUpPlan((FakeJob(size, field.log),), precision))
        assert (
            find_record(SPEC, cache, precision) is not None
            and find_record(SPEC, cache, BOTH) is None
        )
    kernels = {
        record["precision"]: record["kernels"][0]["kernel"] for record in read_records(field.root)
    }
    assert kernels == {"fp8": "fake_1", "bf16": "fake_2"}


def test_a_warm_up_for_both_serves_each(cache: CompileCache, field: Field) -> None:
    planned = WarmUpPlan((FakeJob(1, field.log),), BOTH)
    record = warm_up(SPEC, cache, compile_jobs=planned).record
    assert record is not None and {
        find_record(SPEC, cache, precision) for precision in PRECISIONS
    } == {record}
    assert check(SPEC, cache, WarmUpPlan(planned.jobs, "fp8")).record == record


def test_check_sees_what_is_missing_and_writes_nothing(cache: CompileCache, field: Field) -> None:
    jobs = [FakeJob(1, field.log), FakeJob(2, field.log)]
    assert not check(SPEC, cache, jobs).complete and not field.root.exists()
    artefact = jobs[0].compile(cache)
    assert states(check(SPEC, cache, jobs).kernels) == {"fake_1": "cached", "fake_2": "missing"}
    (artefact.path / "kernel.so").write_bytes(b"")
    assert states(check(SPEC, cache, jobs).kernels) == {"fake_1": "missing", "fake_2": "missing"}


def test_forbidden_warm_up_names_the_kernel(cache: CompileCache, field: Field) -> None:
    with no_compile(), pytest.raises(CompileForbiddenError, match=r"fake\[H=1"):
        warm_up(SPEC, cache, compile_jobs=[FakeJob(1, field.log)])


def test_plan_is_static_and_distinct() -> None:
    jobs = plan(SPEC)
    assert jobs == plan(SPEC) and len({job.key().family for job in jobs}) == len(jobs) >= 1
    assert {job.key().arch for job in plan(ModelSpec(8, 3072, 1536, arch="sm_100a"))} == {"sm_100a"}


FP8_KERNELS = {"fp8_grouped_gemm", "fp8_dgated", "fp8_wgrad", "quantize", "wgrad_operands"}
BF16_KERNELS = {f"bf16_{name}" for name in ("up", "up_again", "down", "dgated", "dgrad", "wgrad")}
EVERY_RUN = {"routing_metadata", "aggregate", "flush"}
MISSING = missing_package(BF16.jobs(None, "sm_90a"))
needs_quack = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


def names(planned: WarmUpPlan) -> set[str]:
    return {job.name for job in planned.jobs}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("fp8_mode", [None, "perf", "mem"])
@pytest.mark.parametrize("changes", [
    {}, {"fp8_wgrad": False}, {"recompute_z": True}, {"fp8_wgrad": False, "recompute_z": True},
    {"stagewise_memory": True}, {"iso_weight": True},
])  # fmt: skip
def test_default_plan_covers_whatever_a_run_chooses(
    dtype: str, fp8_mode: str | None, changes: dict[str, Any]
) -> None:
    spec = ModelSpec(8, 3072, 1536, dtype)
    needed = plan(spec, current_config(SonicMoEConfig(fp8_mode=fp8_mode or "off", **changes)))
    assert {job.name for job in needed} >= EVERY_RUN and set(needed) <= set(warm_up_plan(spec).jobs)


@needs_quack
def test_what_each_precision_compiles() -> None:
    both, fp8, bf16 = (warm_up_plan(SPEC, precision) for precision in ("both", "fp8", "bf16"))
    assert [p.precision for p in (both, fp8, bf16)] == ["both", "fp8", "bf16"]
    assert not (both.left_out or fp8.left_out or bf16.left_out)
    assert names(fp8) == FP8_KERNELS | EVERY_RUN | {"passes"}
    assert names(bf16) & (FP8_KERNELS | BF16_KERNELS) == BF16_KERNELS
    assert set(both.jobs) == set(fp8.jobs) | set(bf16.jobs) and len(set(both.jobs)) == len(
        both.jobs
    )


@needs_quack
def test_fp8_has_no_cute_kernels_unless_the_setting_asks_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_flags: Callable[..., None]
) -> None:
    """By the variable, by the option and from a program; a check looks for the same kernels, and
    its command compiles them wherever it is run.
    """
    set_flags(SONIC_MOE_CACHE_DIR=str(tmp_path), SONIC_MOE_LOCAL_CACHE_DIR=str(tmp_path / "local"))
    plain = {"expert_rows", "bf16_wgrad"}

    def checked(*options: str) -> tuple[set[str], str]:
        asked = ["warmup", *DIMENSIONS, "--precision", "fp8", "--check", "--json", *options]
        report = json.loads(CliRunner().invoke(main, asked).stdout)
        return {kernel["kernel"] for kernel in report["kernels"]}, report["command"]

    fp8 = FP8_KERNELS | EVERY_RUN | {"passes"}
    command = f"{WARM_UP} --precision fp8"
    assert checked() == (fp8, command)
    assert checked("--plain-wgrad") == (fp8 | plain, f"{command} --plain-wgrad")
    seen = []
    monkeypatch.setattr("sonicmoe.jit_warmup.warm_up", lambda *_, compile_jobs, **__: seen.append(
        names(compile_jobs)) or SimpleNamespace(kernels=()))  # fmt: skip
    for fp8_wgrad in (True, False):
        warmup_jit(8, 3072, 1536, config=SonicMoEConfig(fp8_mode="perf", fp8_wgrad=fp8_wgrad))
    assert seen == [fp8, fp8 | plain]
    set_flags(SONIC_MOE_FP8_WGRAD="0")
    assert checked() == (fp8 | plain, f"{command} --plain-wgrad")


def test_plain_weight_gradients_beside_bf16_alone_are_refused() -> None:
    asked = ["warmup", *DIMENSIONS, "--precision", "bf16", "--plain-wgrad"]
    refused = CliRunner().invoke(main, asked)
    assert refused.exit_code == 2
    assert refused.output == "Error: --plain-wgrad has no effect with --precision bf16.\n"


def test_the_plan_does_not_depend_on_the_mode_in_force(set_flags: Callable[..., None]) -> None:
    usual = set(warm_up_plan(SPEC).jobs)
    for mode in ("perf", "off"):
        set_flags(SONIC_MOE_FP8_MODE=mode)
        assert set(warm_up_plan(SPEC).jobs) == usual


@pytest.mark.parametrize(("change", "config", "words"), [
    ({"H": 3080}, {}, "fp8: not hopper: H is 3080 and I is 1536, and it needs multiples of 16 and 64"),
    ({"I": 1504}, {}, "fp8: not hopper: H is 3072 and I is 1504"),
    ({"activation": "gelu"}, {}, "fp8: not hopper: the activation is 'gelu'"),
    ({"dtype": "float16"}, {}, "fp8: not hopper: tokens are float16"),
    ({"arch": "sm_100a"}, {}, "fp8: not hopper: the architecture is sm_100a"),
    ({}, {"recipe": "iso128"}, "fp8: not hopper: the recipe is 'iso128'"),
    ({}, {"save_z": ZCode.E4M3}, "fp8: not hopper: z is saved as 'e4m3'"),
    ({}, {"engine": EngineName.BF16}, "fp8: the configuration asks for engine 'bf16'"),
])  # fmt: skip
def test_what_has_no_fp8_kernels_is_left_out_unless_asked_for(
    change: dict[str, Any], config: dict[str, Any], words: str, tmp_path: Path
) -> None:
    sizes = {"E": 8, "H": 3072, "I": 1536, **change}
    planned = warm_up_plan(ModelSpec(**sizes), config=current_config(SonicMoEConfig(**config)))
    assert planned.left_out[0].startswith(words) and planned.precision != "both"
    assert names(planned) >= EVERY_RUN and not FP8_KERNELS & names(planned)
    assert not any(line.startswith("fp8 with fp8_wgrad=0") for line in planned.left_out), (
        "said once"
    )
    with pytest.raises(ConfigError, match="precision='fp8' has no kernels for this model: fp8: "):
        warmup_jit(**sizes, precision="fp8", config=SonicMoEConfig(cache_dir=tmp_path, **config))


def test_without_the_bf16_compiler_its_part_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    why = "quack-kernels 0.6.5 compiles its GEMMs, and it is absent"
    absent = lambda *names: tuple((name, "absent") for name in names)  # noqa: E731
    monkeypatch.setattr(capabilities, "package_versions", absent)
    planned = warm_up_plan(SPEC)
    neither = f"bf16: not bf16: {why}; not triton: triton compiles its kernels, and it is absent"
    assert planned.precision == "fp8" and planned.left_out == (neither,)
    plain = warm_up_plan(SPEC, "fp8", current_config(SonicMoEConfig(fp8_wgrad=False)))
    assert plain.left_out == (f"fp8 with fp8_wgrad=0: not hopper: {why}",)
    assert names(planned) >= FP8_KERNELS and not BF16_KERNELS & names(planned)
    # Where Triton is there, its kernels are what a run without quack launches.
    monkeypatch.setattr(
        capabilities,
        "package_versions",
        lambda *names: tuple((n, "3.6.0" if n == "triton" else "absent") for n in names),
    )
    planned = warm_up_plan(SPEC, "bf16")
    assert planned.left_out == () and "triton_dgated" in names(planned)


def test_gpus_before_hopper_are_given_triton_kernels() -> None:
    spec = ModelSpec(8, 3072, 1536, arch="sm_80")
    planned = warm_up_plan(spec, "bf16")
    products = {"up", "down", "dgated", "dgrad", "wgrad_down", "wgrad_up"}
    assert names(planned) >= {f"triton_{product}" for product in products} | EVERY_RUN
    assert {job.arch for job in planned.jobs} == {"sm_80"}
    # Where quack serves, they are not compiled.
    assert not any(name.startswith("triton") for name in names(warm_up_plan(SPEC)))


def test_the_bf16_part_knows_its_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    others = tuple(member for member in BF16.activations if member.value != "swiglu")
    monkeypatch.setitem(RECORDS, BF16.name, replace(BF16, activations=others))
    monkeypatch.setitem(RECORDS, TRITON.name, replace(TRITON, activations=others))
    planned = warm_up_plan(SPEC)
    assert planned.left_out[-1].startswith(
        "bf16: not bf16: the activation is 'swiglu', and it has ["
    )
    assert not (BF16_KERNELS - {"bf16_wgrad"}) & names(planned)


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision='int4'; needed: one of"):
        warm_up_plan(SPEC, "int4")


@pytest.mark.parametrize(
    "change",
    [
        {"E": 0}, {"H": -1}, {"I": 1.5}, {"dtype": "int8"}, {"activation": "tanh"},
        {"activation_parameters": (("limit", 7.0),)},
    ],
)  # fmt: skip
def test_model_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ModelSpec(**{"E": 8, "H": 64, "I": 64, **change})


def test_in_process_refuses_an_unknown_device_and_skips_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="device='tpu'"):
        warmup_jit(8, 64, 64, device="tpu")
    report = warmup_jit(8, 64, 64, device="cpu", cache_dir=tmp_path)
    assert report.kernels == () and report.record is None and list(tmp_path.iterdir()) == []
    named = type("Device", (), {"__str__": lambda self: "cpu"})()  # as a torch.device prints
    assert warmup_jit(8, 64, 64, device=named, cache_dir=tmp_path).kernels == ()


def test_in_process_names_an_unknown_activation_and_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^activation is 'swish'; needed: one of \['swiglu', "):
        warmup_jit(8, 64, 64, activation="swish", cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"^config is \{\}; needed: a SonicMoEConfig, or None$"):
        warmup_jit(8, 64, 64, config={}, cache_dir=tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(("options", "quantised", "precision"), [
    ({}, {False, True}, "both"),
    ({"config": SonicMoEConfig(recompute_z=True)}, {False, True}, "both"),
    ({"config": SonicMoEConfig(fp8_mode="mem")}, {True}, "fp8"),
    ({"config": SonicMoEConfig(fp8_mode="off")}, {False}, "bf16"),
    ({"precision": "bf16", "config": SonicMoEConfig(fp8_mode="perf")}, {False}, "bf16"),
])  # fmt: skip
def test_in_process_plans_both_unless_the_configuration_or_the_caller_says_which(
    options: dict[str, Any],
    quantised: set[bool],
    precision: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []
    monkeypatch.setattr(compile_plan, "EVERY_RUN", ())
    for name, record in RECORDS.items():
        jobs = lambda workload, arch: seen.append(workload.settings.recipe is not None) or ()  # noqa: E731
        monkeypatch.setitem(RECORDS, name, replace(record, jobs=jobs))
    assert (
        warmup_jit(8, 64, 64, cache_dir=tmp_path, **options).precision == precision
        and set(seen) == quantised
    )


def test_command_checks_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local")
    )  # this machine's own may be warm
    result = CliRunner().invoke(
        warmup, [*DIMENSIONS, "--cache-dir", str(tmp_path), "--check", "--json"]
    )
    report = json.loads(result.stdout)
    assert (
        result.exit_code == 1
        and not report["complete"]
        and report["kernels"][0]["state"] == "missing"
    )
    assert {kernel["kernel"] for kernel in report["kernels"]} >= FP8_KERNELS, (
        "though no FP8 mode is in force"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_check_that_finds_kernels_missing_ends_with_the_command_that_compiles_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local"))
    field, cache_dir = Field(tmp_path), tmp_path / "a cache"  # a name that a shell would split
    jobs = tuple(FakeJob(size, field.log) for size in (1, 2))
    monkeypatch.setattr(compile_plan, "RECORDS", {})
    sources = tuple(lambda arch, job=job: job for job in jobs)
    monkeypatch.setattr(compile_plan, "EVERY_RUN", sources)
    asked = [
        *("warmup", *DIMENSIONS, "--dtype", "float16", "--activation", "situ_glu"),
        *("--activation-parameter", "beta=4", "--jobs", "2", "--cache-dir", str(cache_dir)),
    ]
    found = CliRunner().invoke(main, [*asked, "--check"])
    assert found.exit_code == 1 and "2 kernels are missing." in found.stdout
    command = found.stdout.splitlines()[-1]
    said = json.loads(CliRunner().invoke(main, [*asked, "--check", "--json"]).stdout)
    assert said["command"] == command.strip()
    words = shlex.split(command)
    assert words[0] == "sonicmoe" and "--precision" not in words
    built = CliRunner().invoke(main, words[1:])
    assert built.exit_code == 0 and "; recorded in " in built.stdout.replace("\n", " ")
    # Nothing is missing, so nothing is to be run, and a check has recorded nothing.
    found = CliRunner().invoke(main, [*asked, "--check"])
    assert found.exit_code == 0 and "are missing" not in found.stdout
    assert "; there is a record of a warm-up: " in found.stdout and "recorded" not in found.stdout
    assert (
        json.loads(CliRunner().invoke(main, [*asked, "--check", "--json"]).stdout)["command"]
        is None
    )


def test_a_warm_up_says_which_kernels_no_other_node_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache directory takes nothing, so a cluster is not warm."""
    field, shared, local = Field(tmp_path), tmp_path / "shared", tmp_path / "local"
    jobs = tuple(FakeJob(size, field.log) for size in (1, 2))
    monkeypatch.setattr(compile_plan, "RECORDS", {})
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(local))
    monkeypatch.setenv("SONIC_MOE_CACHE_DIR", str(shared))

    def summary(*options: str, count: int = 2) -> str:
        sources = tuple(lambda arch, job=job: job for job in jobs[:count])
        monkeypatch.setattr(compile_plan, "EVERY_RUN", sources)
        done = CliRunner().invoke(main, ["warmup", *DIMENSIONS, "--jobs", "1", *options])
        assert done.exit_code == 0
        return done.stdout.splitlines()[-1]

    assert f"1 of 1 kernels in {shared}," in summary(count=1)
    shared.rename(tmp_path / "kept")
    shared.write_text("no directory")
    nobody = f"{local} of this node, where no other node looks,"
    assert f"2 of 2 kernels in {nobody}" in summary()
    assert f"2 of 2 kernels in {nobody}" in summary("--check")
    shared.unlink()
    (tmp_path / "kept").rename(shared)
    assert f"2 of 2 kernels in {shared}, 1 of them in {nobody}" in summary("--check")
    found = CliRunner().invoke(main, ["warmup", *DIMENSIONS, "--check", "--json"])
    assert json.loads(found.stdout)["only_local"] == 1
    assert f"2 of 2 kernels in {shared}," in summary()  # which copies them


@pytest.mark.parametrize("precision", ["fp8", "bf16"])
def test_the_command_asks_for_the_precision_that_was_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local"))
    monkeypatch.setenv("SONIC_MOE_CACHE_DIR", str(tmp_path / "cache"))
    said = CliRunner().invoke(main, ["warmup", *DIMENSIONS, "--precision", precision, "--check"])
    command = said.stdout.splitlines()[-1].strip()
    assert command == f"{WARM_UP} --precision {precision}"


def test_parameters_of_the_activation_are_warmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command, from a program, and back from a record: other numbers, other kernels."""
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local"))

    def keys(*options: str) -> set[str]:
        asked = [*DIMENSIONS, "--cache-dir", str(tmp_path), "--check", "--json", *options]
        report = json.loads(CliRunner().invoke(warmup, asked).stdout)
        return {kernel["key"] for kernel in report["kernels"]}

    situ = ("--activation", "situ_glu")
    own = (*situ, "--activation-parameter", "beta=4", "--activation-parameter", "linear_beta=25")
    assert keys(*situ) == keys(*situ, "--activation-parameter", "beta=1") != keys(*own)
    asked: list[ModelSpec] = []

    def record(spec: ModelSpec, *_: Any, **__: Any) -> SimpleNamespace:
        asked.append(spec)
        return SimpleNamespace(kernels=())

    monkeypatch.setattr(jit_warmup_module, "warm_up", record)
    numbers = {"beta": 4, "linear_beta": 25.0}
    warmup_jit(
        8, 3072, 1536, activation="situ_glu", activation_parameters=numbers, cache_dir=tmp_path
    )
    (spec,) = asked
    assert ModelSpec(**json.loads(json.dumps(asdict(spec)))) == spec
    assert spec.activation_parameters == (("beta", 4.0), ("linear_beta", 25.0))
    refused = CliRunner().invoke(warmup, [*DIMENSIONS, "--activation-parameter", "beta"])
    assert refused.exit_code == 2 and "'beta'; needed: NAME=VALUE" in refused.output
    refused = CliRunner().invoke(
        main, ["warmup", *DIMENSIONS, *situ, "--activation-parameter", "b=1"]
    )
    assert refused.exit_code == 2 and "has 'b'; situ_glu has ['beta'" in refused.output


def test_command_says_what_it_leaves_out_and_refuses_it_when_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local"))
    sizes = ["--E", "8", "--H", "3080", "--I", "1536", "--cache-dir", str(tmp_path), "--check"]
    said = CliRunner().invoke(warmup, sizes)
    assert (
        said.exit_code == 1
        and "left out, fp8: not hopper: H is 3080 and I is 1536, and it needs multiples"
        in said.output
    )
    refused = CliRunner().invoke(main, ["warmup", *sizes, "--precision", "fp8"])
    assert refused.exit_code == 2 and refused.output.startswith(
        "Error: precision='fp8' has no kernels for this model"
    )


def test_command_reports_a_misspelt_flag(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sonicmoe", "warmup", *DIMENSIONS, "--cache-dir", str(tmp_path), "--check"],
        env=environment(SONIC_MOE_FP8_MOD="perf"), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (
        done.returncode == 1
        and done.stderr.count("SONIC_MOE_FP8_MOD is ignored; did you mean SONIC_MOE_FP8_MODE?") == 1
    )


def test_command_needs_the_dimensions() -> None:
    result = CliRunner().invoke(warmup, ["--E", "8", "--H", "0"])
    assert result.exit_code == 2 and "--H" in result.output


def test_package_and_command_import_no_framework_and_no_compiler() -> None:
    program = (
        "import sys, sonicmoe.jit, sonicmoe.cli.warmup, sonicmoe.jit_warmup, sonicmoe.jit.cute_kernel\n"
        "import sonicmoe.jit.cuda_source, sonicmoe.jit.triton_variant, sonicmoe.jit.worker, sonicmoe.jit.probe\n"
        "print(sorted(set(sys.modules) & {'torch', 'paddle', 'triton', 'tvm_ffi', 'cutlass', 'numpy'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"
