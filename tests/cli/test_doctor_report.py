"""`sonicmoe doctor --self-test --report FILE`: what a maintainer gets, and what he must not get."""

import getpass
import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from sonicmoe.architectures import SM120
from sonicmoe.cli.doctor import doctor
from sonicmoe.config import current_config
from sonicmoe.diagnostics import doctor_engine, engine_trials, selftest
from sonicmoe.diagnostics.doctor_engine import _run
from sonicmoe.diagnostics.doctor_report import Report
from sonicmoe.diagnostics.engine_trials import Gpu, words_of, workloads_of
from sonicmoe.diagnostics.report_file import private_names, scrub
from sonicmoe.diagnostics.selftest import SelfTest
from sonicmoe.engine.capabilities import RECORDS, REFERENCE
from sonicmoe.engine.trust import UndecidedError, Verdict
from sonicmoe.enums import EngineName

OTHERS = [record for record in RECORDS.values() if record is not REFERENCE]


def run(*arguments):
    return CliRunner().invoke(doctor, ["--framework", "torch", "--self-test", *arguments])


@pytest.fixture
def private(monkeypatch, tmp_path):
    """Names that a report must not hold."""
    monkeypatch.setattr(socket, "gethostname", lambda: "node-17")
    monkeypatch.setattr(getpass, "getuser", lambda: "ada")
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setenv("SONIC_MOE_CACHE_DIR", str(tmp_path / "cache"))
    return ["node-17", "ada", "/home", str(tmp_path), str(Path(__file__).parents[2])]


def test_on_a_host_it_says_that_nothing_was_tried(private, tmp_path):
    done = run("--report", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.output
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    found = json.loads(text)
    assert not any(name in text for name in private)
    assert "no engine was tried: there is no GPU" in text and found["trials"] == []
    assert found["versions"]["sonicmoe"] and found["system"]["cpus"] and found["framework"]
    flags = {flag["name"]: flag["value"] for flag in found["flags"]}
    assert flags["SONIC_MOE_CACHE_DIR"] == ".../cache" and flags["SONIC_MOE_ENGINE"] == "auto"
    assert len(found["self_test"]) == 10 and "package_path" not in found and "caches" not in found


def test_it_needs_the_self_test(tmp_path):
    done = CliRunner().invoke(doctor, ["--report", str(tmp_path / "report.json")])
    assert done.exit_code == 2 and not list(tmp_path.iterdir())
    assert "--report is given without --self-test; needed: both" in done.output


@pytest.fixture
def somebodys_gpu(monkeypatch):
    """A GPU of another kind, and what each engine's trial finds there."""
    device = selftest.Device("cuda:0", "NVIDIA RTX", "12.0")
    gpu = Gpu("NVIDIA RTX", SM120.name, [], "580.0", "13.0", 32 << 30, 170)
    case = {"event": "result", "case": "training", "seconds": 0.002, "problem": None}
    good = Verdict(True, "", ({**case, "errors": {"dx": [0.0017, 0.01]}},))
    bad = {**case, "errors": {"dx": [float("inf"), 1.0]}}
    wrong = Verdict(False, "training: dx is inf% away", (bad,))
    found = {}
    compiled = []

    def try_engine(subject):
        (jobs,) = compiled  # of all trials, once and before the first of them
        assert set(subject.record.jobs(subject.workload, subject.arch)) <= set(jobs)
        verdict = found.get(words_of(subject.workload), found.get("any", good))
        if isinstance(verdict, Exception):
            raise verdict
        return verdict

    monkeypatch.setattr(doctor_engine, "find_device", lambda: device)
    monkeypatch.setattr(engine_trials, "gpu_of", lambda name: gpu)
    monkeypatch.setattr(engine_trials, "arch_of", lambda name: SM120.name)
    monkeypatch.setattr(engine_trials, "missing_tool", lambda *_: None)
    monkeypatch.setattr(engine_trials, "compile_ahead", compiled.append)
    monkeypatch.setattr(engine_trials, "try_engine", try_engine)
    monkeypatch.setattr(doctor_engine, "examine_engine", lambda *_: None)
    return found, wrong


def test_every_engine_is_tried(somebodys_gpu, tmp_path):
    done = run("--report", str(tmp_path / "report.json"))
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert found["gpu"]["driver"] == "580.0" and found["gpu"]["arch"] == SM120.name
    by_engine = {trial["engine"]: trial for trial in found["trials"]}
    assert set(by_engine) == {record.name.value for record in OTHERS}
    assert by_engine["hopper"]["verdict"] == "not tried"
    assert "its kernels are for sm_90a" in by_engine["hopper"]["reason"]
    tried = [trial for trial in found["trials"] if trial["engine"] == "bf16"]
    assert {trial["verdict"] for trial in tried} == {"passed"}
    assert len(tried) == len(workloads_of(RECORDS[EngineName.BF16]))
    assert tried[0]["cases"][0]["errors"] == {"dx": [0.0017, 0.01]}
    assert f"{len(tried)} of {len(tried)}" in done.output and "0.17%" in done.output


def test_what_fails_is_an_error_of_the_report(somebodys_gpu, tmp_path):
    found, wrong = somebodys_gpu
    first, second = map(words_of, workloads_of(RECORDS[EngineName.BF16])[:2])
    found |= {first: wrong, second: UndecidedError("no memory in /home/ada/job.py")}
    done = run("--report", str(tmp_path / "report.json"))
    assert done.exit_code == 1
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert f"engine bf16 failed with {first}: training: dx is" in text
    assert f"engine bf16 undecided with {second}: no memory in .../job.py" in text
    trials = {(t["engine"], t["workload"]): t for t in json.loads(text)["trials"]}
    assert trials["bf16", first]["cases"][0]["errors"] == {"dx": ["inf", 1.0]}


@pytest.mark.parametrize("record", OTHERS, ids=lambda record: record.name.value)
def test_workloads_show_everything_that_a_record_lists(record):
    found = workloads_of(record)
    assert len(set(map(words_of, found))) == len(found)
    settings = [workload.settings for workload in found]
    assert {one.activation for one in settings} == set(record.activations)
    assert {workload.dtype for workload in found} == set(record.dtypes)
    assert {one.recipe and one.recipe.name for one in settings} == set(record.recipes)
    assert any(workload.bias for workload in found) == record.biases
    if record.z_codes:
        assert {one.save_z for one in settings if one.recipe} == set(record.z_codes)


def test_names_and_paths_are_taken_out():
    assert "..." in scrub("/home/ada/x.py", ()) and "localhost" not in private_names()
    for text, wanted in {
        "error in /home/ada/work/train.py, line 3": "error in .../train.py, line 3",
        "cache '/tmp/x/cache' is full": "cache '.../cache' is full",
        "~/kernels": ".../kernels",
        "dx/dw, 1/2, and/or": "dx/dw, 1/2, and/or",
        "on node-17 of ada": "on ... of ...",
        "adapter": "adapter",
    }.items():
        assert scrub(text, ("node-17", "ada")) == wanted


@pytest.mark.parametrize("self_test", [False, True])
def test_an_engine_that_never_ran_here_is_tried_before_the_self_test(self_test, monkeypatch):
    """A fault of its kernels would end the doctor."""
    did = []
    half = {
        "untried": lambda test: "bf16" if test.precision == "bf16" else None,
        "make_ready": lambda test: did.append(f"tried for {test.precision}") or test,
        "run": lambda test: did.append(f"ran {test.precision}") or [],
    }
    for name, function in half.items():
        monkeypatch.setattr(SelfTest, name, function)
    report = Report()
    tests = [SelfTest(current_config(), name, "cuda:0") for name in ("bf16", "fp8")]
    _run(report, tests, self_test, lambda line: None)
    assert did == (["tried for bf16", "ran bf16", "ran fp8"] if self_test else ["ran fp8"])
    said = [problem.what for problem in report.problems]
    wanted = "the self-test in bf16 did not run: engine bf16 never ran on such a GPU"
    assert said == ([] if self_test else [wanted])
