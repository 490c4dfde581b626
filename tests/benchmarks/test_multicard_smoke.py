"""The program for several GPUs, tried over gloo: it measures, it fails when something is wrong, and
it answers whatever happens.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import processes
import pytest
from worlds import ROOT, environment

BENCHMARKS = ROOT / "benchmarks"
SMOKE = BENCHMARKS / "multicard_smoke.py"
SIZES = {"tokens": 128, "hidden": 64, "intermediate": 32, "experts": 4, "topk": 2, "repeats": 1}
OPTIONS = ["--device=cpu", "--precisions", "fp8", *(f"--{n}={size}" for n, size in SIZES.items())]
GOOD = {"errors": dict.fromkeys(("y", "dx", "dweights", "up_gate", "down"), 1e-3), "finite": True}
GOOD |= {"poison_changes_nothing": True, "repeats_bit_identical": True}


@pytest.fixture
def smoke(monkeypatch):
    import multicard_smoke

    return multicard_smoke


def run(*more, program=SMOKE):
    """`(exit code, figures, stderr)` of a small run over gloo."""
    result = processes.run([program, *OPTIONS, "--json", *more], environment(), ROOT, timeout=240)
    return result.returncode, json.loads(result.stdout), result.stderr


@pytest.fixture(scope="module")
def measured():
    """Figures and words of a whole run: both ways that tokens travel, and both of waiting."""
    options = ["--precisions", "fp8-dispatch", "fp8", "--hidden", "256", "--no-wait"]
    code, figures, said = run("--steps", "4", *options)
    assert code == 0, said
    return figures, said


@pytest.mark.trained
def test_runs_over_gloo_and_reports(measured):
    figures, _ = measured
    assert figures["failures"] == [] and figures["skipped"] == {"deepep": "DeepEP needs GPUs"}
    for layer in figures["layers"]:
        for case in ("even", "idle_rank"):
            errors = layer[case]["errors"]
            assert set(errors) == set(GOOD["errors"]) and errors["y"] > 0
        times = layer["times"]
        shares = [times[f"{stage}_share"] for stage in ("dispatch", "expert", "combine")]
        assert sum(shares) == pytest.approx(1)
        assert min(times["tokens_per_s"], times["split_tokens_per_s"], times["dx_combine_ms"]) > 0
    for name in ("unmoved_parameters", "differing_parameters", "failed_ranks"):
        assert figures[name] == 0
    # 1e-5 to 2.7e-5 over 6 seeds.
    assert figures["gap_to_one_process"] <= 1e-3 and figures["seconds"]["training"] > 0


def test_rows_that_travel_in_fp8_beside_those_that_nobody_counts(measured):
    figures, said = measured
    layers = {(layer["dispatcher"], layer["precision"]): layer for layer in figures["layers"]}
    gloo = "torch.distributed (gloo)"
    names = (gloo, f"{gloo}, not waiting")
    assert list(layers) == [(n, precision) for precision in ("fp8-dispatch", "fp8") for n in names]
    assert all(layer["times"]["dout_dispatch_ms"] > 0 for layer in layers.values())
    for precision in ("fp8-dispatch", "fp8"):
        waiting, blind = (layers[name, precision] for name in names)
        assert waiting["times"] is not blind["times"] and waiting["even"] == blind["even"]
    for case in ("even", "idle_rank"):
        assert f"{gloo}, fp8, {case}: the same bits without waiting for counts" in said


def faulty_tools(directory, old, new, launcher=("", "")):
    """The tools with one line of a rank's program exchanged, and one of the launcher's."""
    changes = {"multicard_rank.py": (old, new), "multicard_smoke.py": launcher}
    directory = directory / "benchmarks"
    directory.mkdir(parents=True)
    for file in BENCHMARKS.glob("multicard_*.py"):
        text, (before, after) = file.read_text(), changes.get(file.name, ("", ""))
        assert before in text
        (directory / file.name).write_text(text.replace(before, after) if before else text)
    return directory / "multicard_smoke.py"


IN = "in: collective: making the dispatcher"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise RuntimeError('no more')", f"rank 1: RuntimeError: no more, {IN}"),
        ("open(HUNG, 'w').close(); time.sleep(600)", f"rank 1 was stopped after 2 s, {IN}"),
    ],
)
def test_a_rank_that_fails_or_hangs_is_named_and_what_was_found_is_printed(tmp_path, fault, said):
    line = "    dispatcher, why = world.dispatcher(kind)\n"
    hung, hangs = tmp_path / "hung", "HUNG" in fault
    fault = fault.replace("HUNG", repr(str(hung)))
    # Two seconds from when it hangs, however long a slow machine took to come there.
    clock = "    deadline = time.monotonic() + timeout\n"
    late = f"    while not Path({str(hung)!r}).exists():\n        time.sleep(0.05)\n{clock}"
    failing = f"    if world.rank == 1:\n        {fault}\n{line}"
    program = faulty_tools(tmp_path, line, failing, (clock, late) if hangs else ("", ""))
    started = time.monotonic()
    code, figures, _ = run("--steps", "0", "--timeout", "2" if hangs else "200", program=program)
    assert code == 1 and time.monotonic() - started < 150
    assert said in figures["failures"] and figures["failed_ranks"] >= 1
    assert figures["ranks"] == 2 and "joining the ranks" in figures["seconds"]


def test_ranks_end_with_a_killed_launcher(tmp_path):
    program = faulty_tools(
        tmp_path,
        '    report.enter("joining the ranks")\n',
        "    print('pid', os.getpid(), flush=True)\n    time.sleep(600)\n",
    )
    command = [sys.executable, str(program), *OPTIONS]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    pids = [int(launcher.stdout.readline().split()[1]) for _ in range(2)]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(pid) for pid in pids)


def alive(pid):
    """Whether a process runs; one that ended and was not collected does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False
