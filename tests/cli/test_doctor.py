"""The doctor: what it finds, what it exits with, and that its self-test can fail."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import processes
import pytest
from click.testing import CliRunner
from fake_jobs import FailingJob, FakeJob
from racer import make_key

import sonicmoe
from sonicmoe import host
from sonicmoe.cli.doctor import cache_line, doctor
from sonicmoe.config import FLAGS, FLAGS_BY_ENV
from sonicmoe.diagnostics import copies, doctor_engine, selftest
from sonicmoe.diagnostics import doctor as doctor_module
from sonicmoe.diagnostics.doctor import (
    examine,
    examine_cache,
    examine_caches,
    examine_copies,
    examine_flags,
    examine_variables,
    installed_versions,
)
from sonicmoe.diagnostics.doctor_report import Report
from sonicmoe.engine import select
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.host import install_hint
from sonicmoe.jit.cache import default_cache
from sonicmoe.kernels.quack_gemm import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
TENSORS = ["out", "dx", "dprobs", "dw1", "dw2"]


def run_doctor(
    *arguments: str, without: tuple[str, ...] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    """`sonicmoe doctor` in a process of its own, with some modules made unimportable. The last
    line on stderr says whether it loaded PyTorch.
    """
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    program = (
        "import atexit, sys; atexit.register(lambda: print('torch._C' in sys.modules, file=sys.stderr)); "
        f"{blocked}from sonicmoe.cli.main import main; main({['doctor', *arguments]!r})"
    )
    return processes.run(["-c", program], {**os.environ, **environ}, ROOT, timeout=240)


def messages(report: Report) -> list[tuple[str, str]]:
    return [(problem.severity.value, problem.what) for problem in report.problems]


@pytest.fixture
def in_empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SONIC_MOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local"))
    return tmp_path


@pytest.mark.usefixtures("in_empty_cache")
def test_healthy_machine_as_json() -> None:
    result = CliRunner().invoke(doctor, ["--json", "--framework", "torch"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0, found["problems"]
    assert found["healthy"] is True
    assert found["framework"] == "torch"
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["numpy"] == np.__version__
    assert found["engine"] and found["engine_reason"]
    assert set(found["engines"]) == {"reference", "bf16", "hopper", "triton", "mxfp8"}
    assert found["engines"]["reference"] == "able"
    assert [flag["name"] for flag in found["flags"]] == [flag.env for flag in FLAGS]
    assert [(check["precision"], check["tensor"]) for check in found["self_test"]] == [
        (precision, tensor) for precision in ("bf16", "fp8") for tensor in TENSORS
    ]
    # FP8 was really emulated: its error is E4M3's, far above BF16's.
    errors = {
        (check["precision"], check["tensor"]): check["relative_rmse"]
        for check in found["self_test"]
    }
    assert all(errors["fp8", tensor] > 0.03 > errors["bf16", tensor] for tensor in TENSORS)


def test_the_compiler_is_among_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(version="13.0.88")
    monkeypatch.setattr(doctor_module, "find_toolkit", lambda: found)
    assert installed_versions()["nvcc"] == "13.0.88"
    monkeypatch.setattr(doctor_module, "find_toolkit", lambda: None)
    assert installed_versions()["nvcc"] is None  # the screen lists it as not installed


def test_screen_shows_every_section(in_empty_cache: Path) -> None:
    result = CliRunner().invoke(
        doctor, ["--framework", "torch"], env={"SONIC_MOE_FP8_MODE": "perf"}
    )
    assert result.exit_code == 0, result.output
    words = " ".join(result.output.split())
    for heading in (
        "versions python",
        "framework torch (asked for)",
        "device",
        "engine",
        "cache",
        "self-test",
        "healthy",
    ):
        assert heading in words
    assert str(in_empty_cache) in "".join(result.output.split())
    assert "SONIC_MOE_FP8_MODE perf environment" in words
    assert "SONIC_MOE_FP8_WGRAD 1 default" in words
    assert words.count("pass") == 2 * len(TENSORS)
    assert len(result.output.splitlines()) < 65


def plant(folder: Path, name: str, version: str) -> Path:
    """A package that raises if anybody imports it."""
    package = folder.joinpath(*name.split("."))
    package.mkdir(parents=True)
    for parent in list(package.parents)[: name.count(".")]:
        (parent / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "__init__.py").write_text(
        f'__version__ = "{version}"\nraise RuntimeError("imported")\n'
    )
    return package


def copies_found() -> list[str]:
    report = Report()
    examine_copies(report)
    assert report.healthy
    return [problem.what for problem in report.problems]


@pytest.mark.parametrize("name", ["paddlefleet_ops.sonicmoe", "sonicmoe"])
def test_another_importable_copy_is_a_warning(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert copies_found() == []
    package = plant(tmp_path, name, "9.8")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    assert copies_found() == [f"there is another sonicmoe: {name} 9.8 from {package} (importable)"]


def test_another_loaded_copy_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = ModuleType("paddlefleet_ops.sonicmoe")
    copy.__file__, copy.__version__ = str(tmp_path / "__init__.py"), "0.3"
    monkeypatch.setitem(sys.modules, copy.__name__, copy)
    copy.__path__ = [str(tmp_path)]
    module = ModuleType(
        "transformers.integrations.sonicmoe"
    )  # no package: what loads upstream's kernels there
    module.__file__ = str(tmp_path / "integrations" / "sonicmoe.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert copies_found() == [
        f"there is another sonicmoe: paddlefleet_ops.sonicmoe 0.3 from {tmp_path} (loaded)"
    ]


@pytest.mark.parametrize(("name", "version"), [
    ("quack", "0.1"), ("paddlefleet_ops.quack", "0.2"), ("quack", PACKAGES["quack-kernels"]),
])  # fmt: skip
def test_a_quack_of_another_version_is_a_warning(
    name: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = copies_found()
    package = plant(tmp_path, name, version)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    wanted = PACKAGES["quack-kernels"]
    line = f"quack of another version than {wanted}: {name} {version} from {package} (importable)"
    assert copies_found() == before + ([line] if version != wanted else [])


def test_installed_under_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "version", lambda name: "9.8")
    assert copies_found()[0].startswith("sonicmoe 9.8 is installed, but ")


def test_screen_begins_with_the_package_and_its_place(in_empty_cache: Path) -> None:
    result = CliRunner().invoke(doctor, ["--framework", "torch"])
    assert (
        result.output.splitlines()[0] == f"sonicmoe {sonicmoe.__version__} from {ROOT / 'sonicmoe'}"
    )


@pytest.mark.usefixtures("in_empty_cache")
def test_wrong_engine_fails_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose dx is 1 % off in one expert's direction must not pass as healthy."""
    right = ReferenceEngine.backward_dx

    def wrong(self, dout, saved, weights):
        dx, dprobs, pending = right(self, dout, saved, weights)
        return dx * 1.02, dprobs, pending

    monkeypatch.setattr(ReferenceEngine, "backward_dx", wrong)
    report = examine("torch")
    assert not report.healthy
    assert [(check.precision, check.tensor) for check in report.self_test if not check.passed] == [
        ("bf16", "dx")
    ]
    assert ("error", "self-test: wrong dx (bf16) on engine reference") in messages(report)


@pytest.mark.usefixtures("in_empty_cache")
def test_nan_fails_and_json_stays_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ReferenceEngine.forward

    def wrong(self, *arguments, **options):
        out, saved = right(self, *arguments, **options)
        return out * float("nan"), saved

    monkeypatch.setattr(ReferenceEngine, "forward", wrong)
    result = CliRunner().invoke(doctor, ["--json", "--framework", "torch"])
    found = json.loads(result.stdout)
    assert result.exit_code == 1
    assert [check["relative_rmse"] for check in found["self_test"] if check["tensor"] == "out"] == [
        None,
        None,
    ]
    assert not found["healthy"]


@pytest.mark.usefixtures("in_empty_cache")
def test_crashing_engine_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_, **__):
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(ReferenceEngine, "forward", crash)
    report = examine("torch")
    assert ("error", "self-test crashed: RuntimeError: CUDA error: misaligned address") in messages(
        report
    )


@pytest.mark.usefixtures("in_empty_cache")
def test_engine_this_build_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonicmoe.engine.select.ENGINES", {})
    monkeypatch.setenv("SONIC_MOE_ENGINE", "hopper")
    report = examine("torch")
    assert not report.healthy and report.engine is None and report.self_test == []
    assert "'hopper'" in report.problems[0].what


def on_a_hopper_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """A GPU for the doctor; returns the list of `(precision, engine)` of each self-test that ran."""
    ran: list[tuple[str, str]] = []
    for module in (select, selftest):
        monkeypatch.setattr(module, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(select, "missing_tool", lambda *_: None)
    monkeypatch.setattr(
        selftest, "find_device", lambda: selftest.Device("cuda:0", "NVIDIA H200", "9.0")
    )
    monkeypatch.setattr(
        selftest,
        "run_self_test",
        lambda config, name, device: (
            ran.append((name, selftest.engine_for(config, name, device).engine.name)) or []
        ),
    )
    return ran


@pytest.mark.usefixtures("in_empty_cache")
def test_on_a_new_machine_missing_kernels_are_counted_and_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys are those of the real kernels; only the GPU is made up."""
    ran = on_a_hopper_gpu(monkeypatch)
    monkeypatch.setattr(doctor_engine, "warm_up", lambda *_, **__: pytest.fail("it compiles"))
    started = time.monotonic()
    result = CliRunner().invoke(doctor, ["--framework", "torch"], env={"COLUMNS": "200"})
    assert time.monotonic() - started < 5  # with torch loaded already
    words = " ".join(result.stdout.split())
    counted = re.search(
        r"kernels 0 of (\d+) of the self-test are compiled; (\S+ \S+ \S+) compiles", words
    )
    assert result.exit_code == 0 and ran == [] and counted, result.output
    assert int(counted[1]) > 10 and counted[2] == "`sonicmoe doctor --self-test`"
    assert f"{counted[1]} of the {counted[1]} kernels of the self-test are not compiled" in words
    assert "`sonicmoe warmup` compiles those of your model" in words
    assert "cuda:0: NVIDIA H200, sm_90a (Hopper, compute capability 9.0)" in words


@pytest.mark.usefixtures("in_empty_cache")
def test_self_test_compiles_what_is_missing_and_says_so_on_stderr(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = on_a_hopper_gpu(monkeypatch)
    log = tmp_path / "log"
    jobs = (FakeJob(1, log), FakeJob(2, log))
    jobs[0].compile(default_cache())
    monkeypatch.setattr(selftest, "kernels_of", lambda *_: jobs)
    result = CliRunner().invoke(doctor, ["--self-test", "--json", "--framework", "torch"])
    found = json.loads(result.stdout)
    assert (found["kernels"], found["problems"]) == ({"needed": 2, "missing": []}, [])
    assert [precision for precision, _ in ran] == ["bf16", "fp8"]
    said = result.stderr.splitlines()
    assert said[0].startswith("compiling 1 kernels in 1 processes")
    assert said[1].startswith("fake_2: built in ")
    assert said[2:] == ["self-test in bf16", "self-test in fp8"]
    again = CliRunner().invoke(doctor, ["--framework", "torch"])
    assert "2 of 2 of the self-test are compiled" in again.stdout and again.stderr == ""
    assert len(ran) == 4


@pytest.mark.usefixtures("in_empty_cache")
def test_a_kernel_that_does_not_compile_is_an_error_with_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran = on_a_hopper_gpu(monkeypatch)
    jobs = (FakeJob(1, tmp_path / "log"), FailingJob(2, tmp_path / "log"))
    monkeypatch.setattr(selftest, "kernels_of", lambda *_: jobs)
    report = examine("torch", self_test=True)
    assert messages(report) == [("error", "fake_2 does not compile")] and ran == []
    assert "expected ';'" in report.problems[0].remedy
    assert report.kernels is not None and report.kernels.missing == ("fake_2",)


@pytest.mark.usefixtures("in_empty_cache")
def test_a_kernel_outside_the_list_is_not_compiled_either(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_hopper_gpu(monkeypatch)
    monkeypatch.setattr(selftest, "kernels_of", lambda *_: ())

    def needs_a_kernel(*_: object) -> None:
        default_cache().require_compiler(make_key(1), "not warmed")

    monkeypatch.setattr(selftest, "run_self_test", needs_a_kernel)
    (problem,) = examine("torch").problems
    assert problem.severity.value == "warning" and "self-test did not run" in problem.what
    assert problem.remedy == "run `sonicmoe doctor --self-test`"


@pytest.mark.usefixtures("in_empty_cache")
@pytest.mark.parametrize(
    ("flags", "engine", "tested"),
    [
        ({}, "bf16", ["bf16", "fp8"]),
        ({"SONIC_MOE_FP8_MODE": "perf"}, "hopper", ["bf16", "fp8"]),
        ({"SONIC_MOE_FP8_MODE": "perf", "SONIC_MOE_ENGINE": "hopper"}, "hopper", ["fp8"]),
        ({"SONIC_MOE_ENGINE": "bf16"}, "bf16", ["bf16"]),
    ],
    ids=["plain", "fp8", "hopper", "bf16"],
)
def test_engine_in_force_on_a_hopper_gpu(
    monkeypatch: pytest.MonkeyPatch, flags, engine, tested
) -> None:
    """Each precision is tested on the engine that a run in it would get; one asked for by name, in
    its own precision.
    """
    ran = on_a_hopper_gpu(monkeypatch)
    monkeypatch.setattr(selftest, "kernels_of", lambda *_: ())
    for name, value in flags.items():
        monkeypatch.setenv(name, value)
    report = examine("torch")
    assert (report.engine, report.problems) == (engine, [])
    assert ran == [(name, {"bf16": "bf16", "fp8": "hopper"}[name]) for name in tested]


@pytest.mark.usefixtures("in_empty_cache")
def test_contradictory_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SONIC_MOE_FP8_RECIPE", "1x128")
    monkeypatch.setenv("SONIC_MOE_FP8_ISO32_WEIGHT", "1")
    report = examine("torch")
    assert not report.healthy
    assert "isotropic" in report.problems[0].what


@pytest.mark.parametrize(
    "env", [flag.env for flag in FLAGS if flag.field not in {"cache_dir", "local_cache_dir"}]
)
def test_value_that_is_not_understood(env: str) -> None:
    report = Report()
    config = examine_flags(report, {env: "no-such-value"})
    assert messages(report) == [("error", f"{env}='no-such-value' is not understood")]
    assert next(state for state in report.flags if state.name == env).value == "no-such-value"
    assert config == examine_flags(Report(), {})


@pytest.mark.parametrize(
    ("env", "remedy"),
    [
        ("SONIC_MOE_FP8_MODE", "set it to 'perf', 'mem' or 'off', or unset it"),
        ("SONIC_MOE_CACHE_DIR", "set it to a directory, or unset it"),
    ],
)
def test_the_remedy_of_a_flag_is_one_sentence(env: str, remedy: str) -> None:
    report = Report()
    examine_flags(report, {env: " "} if env.endswith("DIR") else {env: "perff"})
    assert [problem.remedy for problem in report.problems] == [remedy]


def test_a_directory_that_cannot_be_found_is_an_error_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a system that has no place for temporary files, and for a user without a home."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nonexistent"])
    report = Report()
    examine_caches(report, examine_flags(report, {}))
    assert report.caches == []
    for problem, name in zip(report.problems, ("CACHE_DIR", "LOCAL_CACHE_DIR"), strict=True):
        assert f"set SONIC_MOE_{name}" in problem.what and f"set SONIC_MOE_{name}" in problem.remedy
    given = {"SONIC_MOE_CACHE_DIR": str(tmp_path), "SONIC_MOE_LOCAL_CACHE_DIR": str(tmp_path)}
    report = Report()
    examine_caches(report, examine_flags(report, given))
    assert [state.path for state in report.caches] == [str(tmp_path)] * 2 and not report.problems


def test_misspelt_flag_is_a_warning_with_the_right_name() -> None:
    report = Report()
    examine_variables(report, {"SONIC_MOE_FP8_MOD": "perf", "SONIC_MOE_FP8_MODE": "perf"})
    assert report.healthy
    assert report.unknown_flags == {"SONIC_MOE_FP8_MOD": "SONIC_MOE_FP8_MODE"}
    assert report.problems[0].remedy == "did you mean SONIC_MOE_FP8_MODE?"


def test_variable_that_points_nowhere(tmp_path: Path) -> None:
    report = Report()
    there = {
        "TRITON_PTXAS_PATH": sys.executable,
        "TRITON_CACHE_DIR": str(tmp_path / "made on demand"),
    }
    examine_variables(report, {**there, "CUDA_HOME": str(tmp_path / "none")})
    assert messages(report) == [("warning", f"CUDA_HOME={tmp_path / 'none'} does not exist")]
    assert report.honoured["TRITON_PTXAS_PATH"] == sys.executable


def test_cache_size_is_counted_and_nothing_is_created(tmp_path: Path) -> None:
    kernels = tmp_path / "cache" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "a.bin").write_bytes(b"x" * 1000)
    (kernels.parent / "b.bin").write_bytes(b"x" * 24)
    report = Report()
    environ = {
        "SONIC_MOE_CACHE_DIR": str(kernels.parent),
        "SONIC_MOE_LOCAL_CACHE_DIR": str(tmp_path / "new" / "local"),
    }
    examine_caches(report, examine_flags(report, environ))
    cache, local = report.caches
    assert (cache.exists, cache.writable, cache.size_bytes) == (True, True, 1024)
    assert (local.exists, local.writable, local.size_bytes) == (False, True, 0)
    assert cache.free_bytes > 0 and not (tmp_path / "new").exists()


def test_what_was_warmed_is_shown(tmp_path: Path) -> None:
    (tmp_path / "warmed").mkdir()
    good = {
        "model": {"E": 8, "H": 64}, "versions": {"triton": "3.6.0", "quack-kernels": "absent"}, "kernels": [{}, {}],
        "at": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    for name, record in {"good": good, "of another layout": {"model": 1}, "no record": []}.items():
        (tmp_path / "warmed" / f"{name}.json").write_text(json.dumps(record))
    named = {**good, "precision": "fp8"}
    (tmp_path / "warmed" / "named.json").write_text(json.dumps(named))
    state = examine_cache(Report(), FLAGS_BY_ENV["SONIC_MOE_CACHE_DIR"], tmp_path)
    when = "2 kernels at 2026-01-02T03:04:05Z (triton 3.6.0)"
    assert state.warmed == (f"E=8, H=64: precision not recorded, {when}", f"E=8, H=64: fp8, {when}")
    done = run_doctor(SONIC_MOE_CACHE_DIR=str(tmp_path), COLUMNS="200")
    assert (
        f"warmed         {state.warmed[0]}" in done.stdout
        and f"warmed         {state.warmed[1]}" in done.stdout
    )


@pytest.mark.parametrize(
    ("variable", "mode", "refused"),
    [
        ("SONIC_MOE_CACHE_DIR", 0o775, None),
        ("SONIC_MOE_CACHE_DIR", 0o777, "can be written by every user (mode 777)"),
        ("SONIC_MOE_LOCAL_CACHE_DIR", 0o700, None),
        ("SONIC_MOE_LOCAL_CACHE_DIR", 0o775, "can be written by its group (mode 775)"),
    ],
)
def test_cache_that_others_can_write_is_named(
    tmp_path: Path, variable: str, mode: int, refused: str | None
) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(mode)
    environ = {
        "SONIC_MOE_CACHE_DIR": str(tmp_path / "one"),
        "SONIC_MOE_LOCAL_CACHE_DIR": str(tmp_path / "two"),
    } | {variable: str(folder)}
    report = Report()
    examine_caches(report, examine_flags(report, environ))
    (state,) = [state for state in report.caches if state.exists]
    assert state.access.startswith("written by this user") and state.access in cache_line(state)
    assert ("group" in state.access) == bool(mode & 0o020)
    if refused is None:
        assert (report.problems, state.refused) == ([], "")
        return
    assert [problem.what for problem in report.problems] == [f"{state.role} {folder} is not used"]
    assert f"{folder} {refused}" in report.problems[0].remedy and refused in state.refused
    trusting: Report = Report()
    examine_caches(trusting, examine_flags(trusting, environ | {"SONIC_MOE_TRUST_CACHE": "1"}))
    assert bool(trusting.problems) == (variable == "SONIC_MOE_LOCAL_CACHE_DIR")


def test_cache_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    report = Report()
    state = examine_cache(report, FLAGS_BY_ENV["SONIC_MOE_CACHE_DIR"], tmp_path / "file" / "cache")
    assert not state.writable
    assert messages(report) == [
        ("error", f"cache {state.path}: {tmp_path / 'file'} is not a directory")
    ]


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(**_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(doctor_module.tempfile, "TemporaryFile", read_only)
    report = Report()
    assert not examine_cache(report, FLAGS_BY_ENV["SONIC_MOE_CACHE_DIR"], tmp_path).writable
    assert messages(report) == [("warning", f"cache {tmp_path} is not writable")]


def test_self_test_problem_has_an_idle_expert_and_both_spellings_of_invalid() -> None:
    indices, probs, _ = selftest.problem()
    assert {-1, selftest.E} <= set(indices.ravel())
    assert selftest.E - 1 not in indices
    assert (probs > 0).all()


def test_without_any_framework() -> None:
    result = run_doctor("--json", without=("torch", "paddle"))
    found = json.loads(result.stdout)
    assert result.returncode == 1
    assert [problem["what"] for problem in found["problems"]] == [
        "neither PyTorch nor Paddle is installed"
    ]
    assert found["problems"][0]["remedy"] == f"{install_hint('torch')}, or {install_hint('paddle')}"
    assert found["framework"] is None and found["device"] is None and found["self_test"] == []


def test_framework_that_is_not_installed() -> None:
    result = run_doctor("--framework", "paddle", without=("paddle",))
    assert result.returncode == 1
    assert "paddle is not installed in this Python" in " ".join(result.stdout.split())
    assert " ".join(install_hint("paddle").split()[:4]) in " ".join(result.stdout.split())


@pytest.mark.parametrize("framework", ["torch", "paddle"])
def test_hint_never_puts_a_cpu_build_over_a_gpu_build(
    framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "gpu_present", lambda: True)
    hint = install_hint(framework)
    assert "cuda]'" in hint and not re.search(r"pip install '[^']*paddle[^']*'", hint)
    monkeypatch.setattr(host, "gpu_present", lambda: False)
    assert install_hint(framework) == f"pip install 'sonicmoe[{framework}]'"


@pytest.mark.parametrize("sign", ["device", "tool", "library", None])
def test_a_gpu_is_recognised_by_any_part_of_its_driver(
    sign: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "NVIDIA_DRIVER", tmp_path if sign == "device" else tmp_path / "none")
    monkeypatch.setattr(
        host.shutil, "which", lambda name: f"/bin/{name}" if sign == "tool" else None
    )
    library = "libcuda.so.1" if sign == "library" else None
    monkeypatch.setattr(
        host.ctypes.util, "find_library", lambda name: library if name == "cuda" else None
    )
    assert host.gpu_present() is (sign is not None)


def test_other_framework_than_the_loaded_one() -> None:
    """This process runs on PyTorch; Paddle cannot be examined in it."""
    report = Report()
    assert doctor_module.load_framework(report, "paddle") is False
    assert "already runs sonicmoe on torch" in report.problems[0].what


@pytest.mark.paddle
@pytest.mark.parametrize("without", [(), ("torch",)], ids=["beside torch", "without torch"])
def test_paddle(without: tuple[str, ...], in_empty_cache: Path) -> None:
    choice = "auto" if without else "paddle"
    result = run_doctor("--json", "--framework", choice, without=without)
    found = json.loads(result.stdout)
    assert result.returncode == 0, found["problems"]
    # Paddle itself would import PyTorch, which takes as long as all the rest.
    assert result.stderr.splitlines()[-1] == "False"
    assert found["framework"] == "paddle"
    assert [(state["call"], state["engine"], state["precision"]) for state in found["calls"]] == [
        ("node", "reference", "bfloat16"),
        ('node with fp8_mode="perf"', "reference", "FP8 (dx256)"),
        ("MoE and the functional API", None, None),
        ("transformers", None, None),
    ]
    assert [check["tensor"] for check in found["self_test"]] == 2 * TENSORS
    assert all(check["passed"] for check in found["self_test"])


@pytest.mark.paddle
def test_paddle_without_the_torch_proxy() -> None:
    program = "import paddle, sys; del paddle.enable_compat; from sonicmoe.cli.main import main; main(['doctor', '--framework', 'paddle'])"
    result = processes.run(["-c", program], dict(os.environ), ROOT, timeout=240)
    assert result.returncode == 1
    assert "has no torch proxy; sonicmoe needs paddle >= 3.3.0" in " ".join(result.stdout.split())
