"""Warm-up: plan, worker processes, record, check, command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fake_jobs import DyingJob, FailingJob, FakeJob
from processes import Field, environment
from racer import load

import sonicmoe.jit.plan as plan_module
from sonicmoe.cli.warmup import warmup
from sonicmoe.config import SonicMoEConfig
from sonicmoe.errors import ConfigError, DeviceError
from sonicmoe.jit import CompileCache, no_compile
from sonicmoe.jit.errors import CompileForbiddenError
from sonicmoe.jit.plan import ModelSpec, plan
from sonicmoe.jit.warmup import KernelOutcome, check, find_record, read_records, warm_up
from sonicmoe.jit_warmup import warmup_jit

SPEC = ModelSpec(8, 3072, 1536)
DIMENSIONS = ["--E", "8", "--H", "3072", "--I", "1536"]


def states(kernels: tuple[KernelOutcome, ...]) -> dict[str, str]:
    return {outcome.kernel: outcome.state for outcome in kernels}


def test_everything_is_compiled_in_other_processes_then_forbidden(cache: CompileCache, field: Field) -> None:
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


def test_what_only_this_node_has_is_copied_and_not_compiled(cache: CompileCache, field: Field) -> None:
    jobs = [FakeJob(size, field.log) for size in (1, 2)]
    warm_up(SPEC, CompileCache(field.local, field.local), compile_jobs=jobs)
    report = warm_up(SPEC, cache, compile_jobs=jobs)
    assert set(states(report.kernels).values()) == {"cached"} and set(field.builds().values()) == {1}
    elsewhere = CompileCache(field.root, field.root.with_name("another_node"))
    assert (
        check(SPEC, elsewhere, jobs).complete and report.record is not None and report.record.is_relative_to(field.root)
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


def test_record_says_what_was_warmed_with_versions(cache: CompileCache, field: Field) -> None:
    job = FakeJob(1, field.log)
    report = warm_up(SPEC, cache, compile_jobs=[job])
    assert report.record == field.root / "warmed" / f"{SPEC.digest}.json" == find_record(SPEC, cache)
    (record,) = read_records(field.root)
    assert record["model"] == {
        "E": 8,
        "H": 3072,
        "I": 1536,
        "dtype": "bfloat16",
        "activation": "swiglu",
        "arch": "sm_90a",
    }
    assert record["kernels"] == [{"kernel": "fake_1", "key": str(job.key())}]
    assert {"sonicmoe", "apache-tvm-ffi", "triton"} <= set(record["versions"])
    assert find_record(ModelSpec(16, 3072, 1536), cache) is None


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


@pytest.mark.parametrize(
    "change", [{"E": 0}, {"H": -1}, {"I": 1.5}, {"dtype": "int8"}, {"activation": "tanh"}]
)  # fmt: skip
def test_model_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(change))):
        ModelSpec(**{"E": 8, "H": 64, "I": 64, **change})


def test_in_process_refuses_an_unknown_device_and_skips_the_cpu(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="device='tpu'"):
        warmup_jit(8, 64, 64, device="tpu")
    report = warmup_jit(8, 64, 64, device="cpu", cache_dir=tmp_path)
    assert report.kernels == () and report.record is None and list(tmp_path.iterdir()) == []


def test_in_process_plans_for_the_configuration_it_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    provider = lambda spec, config: seen.append((config.fp8_mode, config.recipe)) or ()  # noqa: E731
    monkeypatch.setattr(plan_module, "_PROVIDERS", {"seen": provider})
    warmup_jit(8, 64, 64, cache_dir=tmp_path, config=SonicMoEConfig(fp8_mode="mem", recipe="dx256"))
    assert seen == [("mem", "dx256")]


def test_command_checks_without_compiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local"))  # this machine's own may be warm
    result = CliRunner().invoke(warmup, [*DIMENSIONS, "--cache-dir", str(tmp_path), "--check", "--json"])
    report = json.loads(result.stdout)
    assert result.exit_code == 1 and not report["complete"] and report["kernels"][0]["state"] == "missing"
    assert list(tmp_path.iterdir()) == []


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
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
