"""Two GPUs: the Hopper engine behind NCCL and behind DeepEP, by the program that a person would run;
a rank that is killed inside dispatch, combine and their backwards, after which the other one ends in
bounded time and says why; and a node on a GPU that is not the thread's current one.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import cache

import pytest
import torch
from gpu import hopper_step
from gpu.device import start_two_ranks
from gpu.lost_rank_gpu_worker import METHODS, TIMEOUT_S
from gpu.symmetric_gpu_worker import CASES
from node.direct_layers import assert_same_bits
from worlds import ROOT, TESTS, finish

from sonicmoe import SonicMoEConfig
from sonicmoe.ep.deepep import buffer_problem, find_library
from sonicmoe.jit.cache import default_cache

PRECISIONS = ("fp8", "bf16", "fp8-dispatch")
OPTIONS = [
    *("--json", "--device=cuda", "--no-wait", "--tokens=4096", "--hidden=1024"),
    *("--intermediate=512", "--experts=16", "--topk=4", "--steps=20"),
]
# What PyTorch's symmetric memory would map besides, and nobody here uses.
SYMMETRIC_VARIABLES = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
# NCCL's watchdog looks every few seconds and may write a report before it ends the process. DeepEP
# waits 100 s on the host and about as long on the device.
BOUND_S = {"collective": TIMEOUT_S + 100, "deepep": 280, "symmetric": TIMEOUT_S + 60}
# What the surviving rank says: our sentence, or that of the library that ended the process.
SAID = ("lost another rank", "remote process exited", "watchdog", "timeout", "timed out")


def test_layers_equal_one_gpu():
    """By benchmarks/multicard_smoke.py, with the kernels that this machine has compiled already."""
    program = ROOT / "benchmarks" / "multicard_smoke.py"
    options = [
        *OPTIONS,
        f"--cache={default_cache().root}",
        *(f"--precision={p}" for p in PRECISIONS),
    ]
    command = [sys.executable, str(program), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.stdout.strip(), done.stderr[-4000:]
    figures, said = json.loads(done.stdout.splitlines()[-1]), done.stderr[-4000:]
    assert figures["failures"] == [] and figures["failed_ranks"] == 0, said
    assert figures["ranks"] == 2 and figures["device"] == "cuda"
    assert figures["gap_to_one_process"] <= 5e-3
    assert figures["unmoved_parameters"] == figures["differing_parameters"] == 0
    assert {*figures["skipped"]} <= {"deepep"}, "NCCL is always there"
    ways = ("nccl", "DeepEP")[: 2 - len(figures["skipped"])]
    print(f"did NOT run: {figures['skipped']}")
    for way in ways:
        layers = [layer for layer in figures["layers"] if way in layer["dispatcher"]]
        assert {layer["precision"] for layer in layers} == {*PRECISIONS}, said
        for case in (layer[name] for layer in layers for name in ("even", "idle_rank")):
            assert set(case["errors"]) == {"y", "dx", "dweights", "up_gate", "down"}
            assert case["finite"]
            assert case["poison_changes_nothing"] and case["repeats_bit_identical"]


def test_every_way_through_the_benchmark_computes_alike(tmp_path):
    """Every transport that two GPUs of one host have, waiting for counts and not, and the operator of
    compiled graphs, beside the all-to-all of trainers.
    """
    file = tmp_path / "figures.json"
    sizes = "--T=1024", "--H=1024", "--I=512", "--E=16", "--K=4"
    program = ROOT / "benchmarks" / "ep_bench.py"
    command = [sys.executable, program, *sizes, "--ranks=2", "--rounds=1", "--operator"]
    command.append(f"--json={file}")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    (shape,) = json.loads(file.read_text())["shapes"]
    print(done.stdout)
    may_be_absent = "deepep", "MinimalAsyncEP", "symmetric", "collective, load"
    assert all(name.startswith(may_be_absent) for name in shape["skipped"]), shape["skipped"]
    rows = {row["name"]: row for row in shape["rows"] if "errors" in row}
    assert len(rows) >= 13
    for name, row in rows.items():
        bar = 0.01 if name.endswith("bf16") or "," not in name else 0.1
        assert all(error < bar for error in row["errors"].values()), (name, row["errors"])


@cache
def no_deepep():
    library, why = find_library()
    return why if library is None else buffer_problem(library, 2)


@pytest.mark.parametrize("place", METHODS)
@pytest.mark.parametrize("kind", BOUND_S)
def test_the_other_rank_ends_and_says_why(kind, place, tmp_path):
    if kind == "deepep" and no_deepep():
        pytest.skip(f"DeepEP did NOT run: {no_deepep()}")
    worker = TESTS / "gpu" / "lost_rank_gpu_worker.py"
    started = time.monotonic()
    variables = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", **SYMMETRIC_VARIABLES}
    processes = start_two_ranks(worker, tmp_path, kind, place, **variables)
    with pytest.MonkeyPatch.context() as patch:
        # `finish` gives the others half a minute after a failure, and NCCL takes longer.
        patch.setattr("worlds.GRACE_S", BOUND_S[kind])
        survivor, victim = finish(processes, BOUND_S[kind] + 60)
    seconds = time.monotonic() - started
    for code, said, errors in (survivor, victim):
        assert "a whole step is done" in said, errors[-3000:]
        assert "not reached" not in said, (code, errors[-3000:])
    assert victim[0] == -9
    assert survivor[0] not in (0, -9), f"had to be stopped after {seconds:.0f} s"
    assert any(words in survivor[2].lower() for words in SAID), survivor[2][-3000:]
    print(f"{kind}, {place}: ended with {survivor[0]} after {seconds:.0f} s")


def test_symmetric_memory_gives_the_bits_of_the_collectives(tmp_path):
    worker = TESTS / "gpu" / "symmetric_gpu_worker.py"
    ended = finish(start_two_ranks(worker, tmp_path, **SYMMETRIC_VARIABLES), 400)
    for code, said, errors in ended:
        assert code == 0, errors[-3000:]
        lines = [f"{precision}, {case}: equal" for precision in ("bf16", "fp8") for case in CASES]
        for line in ("auto takes symmetric memory", "captured: equal", *lines):
            assert line in said, said[-3000:]


@pytest.mark.parametrize("engine", ["hopper", "bf16"])
def test_gives_the_bits_of_the_current_one(engine: str) -> None:
    config = SonicMoEConfig(fp8_mode="perf" if engine == "hopper" else "off", engine=engine)
    assert torch.cuda.current_device() == 0
    # The second one before the current one has loaded anything.
    second, first = (
        hopper_step.layer(config, device=device).step(0) for device in ("cuda:1", "cuda:0")
    )
    assert torch.cuda.current_device() == 0
    assert_same_bits(first, [tensor.to("cuda:0") for tensor in second])
    assert any(bool(tensor.any()) for tensor in first)
