"""The doctor: what it finds, what it exits with, and that its self-test can fail."""

import json
import math
import os
import re
import sys
import time
from contextlib import redirect_stdout

import numpy as np
import processes
import pytest
from click.testing import CliRunner
from fake_jobs import FakeJob
from processes import ROOT
from racer import make_key

import sonicmoe
from sonicmoe import host
from sonicmoe.cli.doctor import doctor, examine
from sonicmoe.config import FLAGS
from sonicmoe.diagnostics import doctor as doctor_module
from sonicmoe.diagnostics import doctor_engine
from sonicmoe.diagnostics.doctor import (
    PACKAGE_ROOT,
    Report,
    examine_caches,
    examine_copies,
    examine_flags,
    examine_variables,
)
from sonicmoe.diagnostics.doctor_engine import SelfTest
from sonicmoe.engine import select
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.host import install_hint
from sonicmoe.jit.cache import default_cache
from sonicmoe.jit.errors import CompileError

TENSORS = ["out", "dx", "dprobs", "dw1", "dw2"]
pytestmark = pytest.mark.usefixtures("in_empty_cache")
CACHES = ("SONIC_MOE_CACHE_DIR", "SONIC_MOE_LOCAL_CACHE_DIR")


def run_doctor(*arguments, without=()):
    """`sonicmoe doctor` in a process of its own, with some modules made unimportable. The last
    line on stderr says whether it loaded PyTorch.
    """
    blocked = "".join(f"sys.modules[{name!r}] = None; " for name in without)
    program = (
        "import atexit, sys; atexit.register(lambda: print('torch._C' in sys.modules, file=sys.stderr)); "
        f"{blocked}from sonicmoe.cli.main import main; main({['doctor', *arguments]!r})"
    )
    # `tests` is not on its path, where sitecustomize.py keeps PyTorch away.
    return processes.run(["-c", program], {**os.environ}, ROOT, timeout=240)


def run_here(*arguments, **environ):
    """The same in this process, which runs on PyTorch."""
    return CliRunner().invoke(doctor, ["--framework", "torch", *arguments], env=environ)


def messages(report):
    return [(problem.severity, problem.what) for problem in report.problems]


def examined(environ):
    """The report of these variables and of the caches that they name."""
    report = Report()
    examine_caches(report, examine_flags(report, environ))
    return report


@pytest.fixture
def in_empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SONIC_MOE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("SONIC_MOE_LOCAL_CACHE_DIR", str(tmp_path / "local"))
    return tmp_path


def test_healthy_machine_as_json():
    result = run_here("--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0, found["problems"]
    assert (found["healthy"], found["framework"]) == (True, "torch")
    assert found["versions"]["python"] == sys.version.split()[0]
    assert found["versions"]["numpy"] == np.__version__
    assert found["engine"] and found["engine_reason"]
    assert set(found["engines"]) == {"reference", "bf16", "hopper", "triton", "mxfp8"}
    assert found["engines"]["reference"] == "able"
    assert [flag["name"] for flag in found["flags"]] == [flag.env for flag in FLAGS]
    checks = found["self_test"]
    assert 0 <= found["self_test_seconds"] < 60
    errors = {(one["precision"], one["tensor"]): one["relative_rmse"] for one in checks}
    assert list(errors) == [(one, tensor) for one in ("bf16", "fp8") for tensor in TENSORS]
    # FP8 was really emulated: its error is E4M3's, far above BF16's.
    assert all(errors["fp8", tensor] > 0.03 > errors["bf16", tensor] for tensor in TENSORS)


def test_screen_shows_every_section(in_empty_cache):
    """What was warmed among them: records of other layouts are left out."""
    warmed = in_empty_cache / "cache" / "warmed"
    warmed.mkdir(parents=True)
    good = {
        "model": {"E": 8, "H": 64}, "versions": {"triton": "3.6.0", "quack-kernels": "absent"}, "kernels": [{}, {}],
        "at": "2026-01-02T03:04:05Z",
    }  # fmt: skip
    named = {**good, "precision": "fp8"}
    records = {"good": good, "named": named, "of another layout": {"model": 1}, "no record": []}
    for name, record in records.items():
        (warmed / f"{name}.json").write_text(json.dumps(record))
    result = run_here(SONIC_MOE_FP8_MODE="perf", COLUMNS="200")
    assert result.exit_code == 0, result.output
    lines, words = result.stdout.splitlines(), " ".join(result.stdout.split())
    assert lines[0] == f"sonicmoe {sonicmoe.__version__} from {ROOT / 'sonicmoe'}"
    headings = ("versions python", "framework torch (asked for)", "device", "engine", "cache")
    for heading in (*headings, "self-test", "healthy", str(in_empty_cache)):
        assert heading in words
    assert lines[1] == "healthy" and "bf16, hopper, triton, mxfp8: no GPU: " in words
    assert "SONIC_MOE_FP8_MODE perf" in words and "SONIC_MOE_FP8_WGRAD" not in words
    when = "2 kernels at 2026-01-02T03:04:05Z (triton 3.6.0)"
    assert [line.split(maxsplit=1)[1].rstrip() for line in lines if line.startswith("warmed ")] == [
        f"E=8, H=64: precision not recorded, {when}",
        f"E=8, H=64: fp8, {when}",
    ]
    assert words.count("pass") == 2 * len(TENSORS) and len(lines) < 30


def wrong(method, change):
    """A plant: the reference engine's `method` returns what `change` makes of its first result."""

    def plant(monkeypatch):
        right = getattr(ReferenceEngine, method)

        def planted(self, *arguments, **options):
            first, *others = right(self, *arguments, **options)
            return change(first), *others

        monkeypatch.setattr(ReferenceEngine, method, planted)

    return plant


def crashed(_):
    raise RuntimeError("CUDA error: misaligned address")


def flags(**values):
    def plant(monkeypatch):
        for name, value in values.items():
            monkeypatch.setenv(f"SONIC_MOE_{name}", value)

    return plant


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        # 2 % is far below FP8's own error.
        (wrong("backward_dx", lambda dx: dx * 1.02), "self-test: wrong dx (bf16) on engine reference"),
        (wrong("forward", lambda out: out * math.nan),
         "self-test: wrong out (bf16), out (fp8) on engine reference"),
        (wrong("forward", crashed), "self-test crashed: RuntimeError: CUDA error: misaligned address"),
        (flags(FP8_RECIPE="1x128", FP8_ISO32_WEIGHT="1"), "isotropic"),
        (flags(ENGINE="hopper"), "'hopper'"),
    ],
    ids=["2 % off", "NaN", "a crash", "settings that contradict", "an engine that cannot run"],
)  # fmt: skip
def test_what_is_wrong_with_an_engine_is_an_error(monkeypatch, plant, words):
    plant(monkeypatch)
    result = run_here("--json")
    found = json.loads(result.stdout)  # also where a number is not finite
    assert result.exit_code == 1 and not found["healthy"]
    (problem,) = found["problems"]
    assert problem["severity"] == "error" and words in problem["what"]
    rmse = [one["relative_rmse"] for one in found["self_test"] if one["tensor"] == "out"]
    assert (rmse == [None, None]) == ("out (fp8)" in words)
    assert found["self_test"] or "self-test: wrong" not in words


@pytest.fixture
def ran(monkeypatch):
    """A Hopper GPU for the doctor: `(precision, engine)` of each self-test that ran there."""
    found = []
    for module in (select, doctor_engine):
        monkeypatch.setattr(module, "arch_of", lambda device: "sm_90a")
    monkeypatch.setattr(select, "missing_tool", lambda *_: None)
    gpu = {"name": "cuda:0", "gpu": "NVIDIA H200", "capability": "9.0"}
    monkeypatch.setattr(doctor_engine, "find_device", lambda: gpu["name"])
    monkeypatch.setattr(doctor_engine, "described", lambda device: gpu)

    def run(test):
        found.append((test.precision, test.choice.engine.name))
        return []

    monkeypatch.setattr(SelfTest, "run", run)
    return found


def needs_kernels(monkeypatch, *jobs):
    """The self-test needs these alone."""
    monkeypatch.setattr(SelfTest, "kernels", lambda test: jobs)


def test_on_a_new_machine_missing_kernels_are_counted_and_not_compiled(ran, monkeypatch):
    """The keys are those of the real kernels; only the GPU is made up."""
    monkeypatch.setattr(doctor_engine, "ready_engine", lambda *_: pytest.fail("it compiles"))
    started = time.monotonic()
    result = run_here(COLUMNS="200")
    assert time.monotonic() - started < 5  # with torch loaded already
    words = " ".join(result.stdout.split())
    words_of_count = r"kernels 0 of (\d+) of the self-test are compiled; (\S+ \S+ \S+) compiles"
    counted = re.search(words_of_count, words)
    assert result.exit_code == 0 and ran == [] and counted, result.output
    assert int(counted[1]) > 10 and counted[2] == "`sonicmoe doctor --self-test`"
    assert f"{counted[1]} of the {counted[1]} kernels of the self-test are not compiled" in words
    assert "`sonicmoe warmup` compiles those of your model" in words
    assert "cuda:0: NVIDIA H200, sm_90a (Hopper, compute capability 9.0)" in words


def test_self_test_makes_each_engine_ready_and_says_so_on_stderr(ran, monkeypatch, tmp_path):
    """Which compiles what is missing, and tries an engine that never ran here."""
    jobs = {name: FakeJob(size, tmp_path / "log") for size, name in enumerate(("bf16", "fp8"))}
    made = []

    def ready(device, requested, workload):
        made.append(name := "bf16" if workload.settings.recipe is None else "fp8")
        with redirect_stdout(sys.stderr):  # this compiler talks
            jobs[name].compile(default_cache())

    monkeypatch.setattr(doctor_engine, "ready_engine", ready)
    monkeypatch.setattr(SelfTest, "kernels", lambda test: (jobs[test.precision],))
    result = run_here("--self-test", "--json")
    found = json.loads(result.stdout)
    assert (found["kernels"], found["problems"]) == ({"needed": 2, "missing": []}, [])
    assert [precision for precision, _ in ran] == made == ["bf16", "fp8"]
    assert [
        line for line in result.stderr.splitlines() if not line.endswith((" so far", "talks"))
    ] == [
        "importing torch",
        *(f"compiling and trying what the self-test in {name} needs" for name in made),
        *(f"self-test in {name}" for name in made),
    ]
    again = run_here()
    assert "2 of 2 of the self-test are compiled" in again.stdout and len(ran) == 4 == 2 * len(made)


def test_a_kernel_that_does_not_compile_is_an_error_with_its_name(ran, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_engine, "ready_engine", lambda *_: None)
    needs_kernels(monkeypatch, FakeJob(2, tmp_path / "log"))

    def run(test):
        raise CompileError("fake_2 cannot be compiled: expected ';'")

    monkeypatch.setattr(SelfTest, "run", run)
    report = examine("torch", self_test=True)
    words = "the self-test did not run: fake_2 cannot be compiled: expected ';'"
    assert messages(report) == [("error", words)]
    assert report.kernels == {"needed": 1, "missing": ["fake_2"]}


def test_a_kernel_outside_the_list_is_not_compiled_either(ran, monkeypatch):
    needs_kernels(monkeypatch)

    def needs_a_kernel(*_):
        default_cache().require_compiler(make_key(1), "not warmed")

    monkeypatch.setattr(SelfTest, "run", needs_a_kernel)
    (problem,) = examine("torch").problems
    assert problem.severity == "warning" and "self-test did not run" in problem.what
    assert problem.remedy == "run `sonicmoe doctor --self-test`"


def test_an_engine_that_never_ran_here_is_not_tested_unless_it_is_tried(ran, monkeypatch):
    """A fault of its kernels would end the doctor."""
    needs_kernels(monkeypatch)
    untried = lambda test: "bf16" if test.precision == "bf16" else None  # noqa: E731
    monkeypatch.setattr(SelfTest, "untried", untried)
    wanted = "the self-test in bf16 did not run: engine bf16 never ran on such a GPU"
    assert messages(examine("torch")) == [("warning", wanted)]
    assert [precision for precision, _ in ran] == ["fp8"]


@pytest.mark.parametrize(
    ("given", "engine", "tested"),
    [
        ({}, "bf16", ["bf16", "fp8"]),
        ({"FP8_MODE": "perf"}, "hopper", ["bf16", "fp8"]),
        ({"FP8_MODE": "perf", "ENGINE": "hopper"}, "hopper", ["fp8"]),
        ({"ENGINE": "bf16"}, "bf16", ["bf16"]),
    ],
    ids=["plain", "fp8", "hopper", "bf16"],
)
def test_engine_in_force_on_a_hopper_gpu(ran, monkeypatch, given, engine, tested):
    """Each precision is tested on the engine that a run in it would get; one asked for by name, in
    its own precision.
    """
    needs_kernels(monkeypatch)
    flags(**given)(monkeypatch)
    report = examine("torch")
    assert (report.engine, report.problems) == (engine, [])
    assert ran == [(name, {"bf16": "bf16", "fp8": "hopper"}[name]) for name in tested]


def test_a_directory_that_cannot_be_found_is_an_error_that_names_its_variable(
    monkeypatch, tmp_path
):
    """On a system that has no place for temporary files, and for a user without a home."""

    def unknown(uid):
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/nonexistent"])
    report = examined({})
    assert report.caches == []
    for problem, name in zip(report.problems, ("CACHE_DIR", "LOCAL_CACHE_DIR"), strict=True):
        assert f"set SONIC_MOE_{name}" in problem.what and f"set SONIC_MOE_{name}" in problem.remedy
    given = dict.fromkeys(CACHES, str(tmp_path / "new"))
    report = examined(given)
    assert [(state.path, state.exists) for state in report.caches] == [
        (given[CACHES[0]], False)
    ] * 2
    assert not report.problems and list(tmp_path.iterdir()) == [], "nothing is created"


@pytest.mark.parametrize(
    ("environ", "severity", "what", "remedy"),
    [
        *(({flag.env: "no-such-value"}, "error", f"{flag.env}='no-such-value' is not understood", "set it to ")
          for flag in FLAGS if flag.field not in {"cache_dir", "local_cache_dir"}),
        ({"SONIC_MOE_CACHE_DIR": " "}, "error", "SONIC_MOE_CACHE_DIR=' ' is not understood",
         "set it to a directory, or unset it"),
        ({"SONIC_MOE_FP8_MOD": "perf", "SONIC_MOE_FP8_MODE": "perf"}, "warning",
         "SONIC_MOE_FP8_MOD is not a flag of this package and is ignored", "did you mean SONIC_MOE_FP8_MODE?"),
        ({"CUDA_HOME": "TMP/none", "TRITON_PTXAS_PATH": sys.executable, "TRITON_CACHE_DIR": "TMP/on demand"},
         "warning", "CUDA_HOME=TMP/none does not exist", "point it at an existing path"),
        ({"CUDA_HOME": "TMP"}, "warning", "CUDA_HOME=TMP has no bin/nvcc, so it is ignored",
         "point it at a CUDA toolkit, or unset CUDA_HOME"),
        ({"SONIC_MOE_CACHE_DIR": "TMP/file/cache"}, "warning",
         "cache TMP/file/cache takes no kernels: Not a directory (ENOTDIR)", "what is already compiled there"),
    ],
)  # fmt: skip
def test_a_variable_and_its_problem(tmp_path, environ, severity, what, remedy):
    (tmp_path / "file").write_text("")
    given = {name: value.replace("TMP", str(tmp_path)) for name, value in environ.items()}
    report = Report()
    config = examine_flags(report, given)
    assert "not understood" not in what or config == examine_flags(Report(), {})
    examine_variables(report, given)
    examine_caches(report, config)
    assert messages(report) == [(severity, what.replace("TMP", str(tmp_path)))]
    assert report.problems[0].remedy.startswith(remedy)
    assert report.healthy == (severity == "warning")
    if "not understood" in what:  # the screen shows what was given; the default is in force
        ((name, text),) = given.items()
        assert next(flag for flag in report.flags if flag["name"] == name)["value"] == text
    assert report.honoured["TRITON_PTXAS_PATH"] == given.get("TRITON_PTXAS_PATH")
    assert list(report.unknown_flags) == [name for name in given if name == "SONIC_MOE_FP8_MOD"]


@pytest.mark.parametrize(
    ("own", "mode", "refused"),
    [
        (False, 0o777, "can be written by every user (mode 777)"),
        (True, 0o775, "can be written by its group (mode 775)"),
    ],
)
def test_cache_that_others_can_write_is_named(tmp_path, own, mode, refused):
    folder = tmp_path / "kernels"
    folder.mkdir()
    environ = {name: str(tmp_path / name) for name in CACHES} | {CACHES[own]: str(folder)}
    folder.chmod(0o700 if own else 0o775)
    assert examined(environ).problems == []
    folder.chmod(mode)
    report = examined(environ)
    (state,) = [state for state in report.caches if state.exists]
    assert [problem.what for problem in report.problems] == [f"{state.role} {folder} is not used"]
    assert f"{folder} {refused}" in report.problems[0].remedy and refused in state.problem
    assert bool(examined(environ | {"SONIC_MOE_TRUST_CACHE": "1"}).problems) == own


def test_without_any_framework():
    result = run_doctor("--json", without=("torch", "paddle"))
    found = json.loads(result.stdout)
    assert result.returncode == 1
    (problem,) = found["problems"]
    assert problem["what"] == "neither PyTorch nor Paddle is installed"
    assert problem["remedy"] == f"{install_hint('torch')}, or {install_hint('paddle')}"
    assert found["framework"] is None and found["device"] is None and found["self_test"] == []


def test_hint_never_puts_a_cpu_build_over_a_gpu_build(monkeypatch):
    for framework in ("torch", "paddle"):
        monkeypatch.setattr(host, "gpu_present", lambda: True)
        hint = install_hint(framework)
        assert "cuda]'" in hint and not re.search(r"pip install '[^']*paddle[^']*'", hint)
        monkeypatch.setattr(host, "gpu_present", lambda: False)
        assert install_hint(framework) == f"pip install 'sonicmoe[{framework}]'"


@pytest.mark.parametrize("sign", ["device", "tool", "library", None])
def test_a_gpu_is_recognised_by_any_part_of_its_driver(sign, tmp_path, monkeypatch):
    tool = "/bin/nvidia-smi" if sign == "tool" else None
    library = "libcuda.so.1" if sign == "library" else None
    monkeypatch.setattr(host, "NVIDIA_DRIVER", tmp_path if sign == "device" else tmp_path / "none")
    monkeypatch.setattr(host.shutil, "which", lambda name: tool)
    of_cuda = lambda name: library if name == "cuda" else None  # noqa: E731
    monkeypatch.setattr(host.ctypes.util, "find_library", of_cuda)
    assert host.gpu_present() is (sign is not None)


@pytest.mark.paddle
def test_paddle():
    """No part of it imports PyTorch, so it is the same where there is none."""
    result = run_doctor("--json", "--framework", "paddle")
    found = json.loads(result.stdout)
    assert result.returncode == 0, found["problems"]
    # Paddle itself would import PyTorch, which takes as long as all the rest.
    assert result.stderr.splitlines()[-1] == "False"
    assert found["framework"] == "paddle"
    assert found["engine"] == "reference"
    assert [check["tensor"] for check in found["self_test"]] == 2 * TENSORS
    assert all(check["passed"] for check in found["self_test"])


SONICMOE = "there is another sonicmoe"


def copies_found():
    report = Report()
    examine_copies(report)
    assert report.healthy
    return [problem.what for problem in report.problems]


def test_a_copy_that_could_be_imported(tmp_path, monkeypatch):
    """In a package that raises if anybody imports it."""
    before, package = copies_found(), tmp_path / "paddlefleet_ops" / "sonicmoe"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        text = '__version__ = "9.8"\nraise RuntimeError("imported")\n'
        (folder / "__init__.py").write_text(text)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    line = f"{SONICMOE}: paddlefleet_ops.sonicmoe 9.8 from {package}"
    assert copies_found() == [line, *before]


def test_installed_under_another_version(monkeypatch):
    monkeypatch.setattr(
        doctor_module, "package_versions", lambda *names: [(n, "9.8") for n in names]
    )
    words = f"sonicmoe 9.8 is installed, but {sonicmoe.__version__} runs from {PACKAGE_ROOT}"
    assert copies_found() == [words]
