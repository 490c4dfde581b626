"""Whoever writes a file says which one, where the disk does not take it. The operating system refuses
here by a limit on the size of files, and its error names no file, as that of a full disk.
"""

from __future__ import annotations

import resource
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from bench.test_cost_model import made_points
from engine.moe_golden import make_problem
from framework import torch
from node.node_harness import Layer

from ernie_compat import run_report
from ernie_compat.checkpoint import SavedRun, save_checkpoint
from ernie_compat.metrics import StepRecord, append_metrics
from ernie_compat.model_config import RunConfig
from sonicmoe.bench import sweep as sweeps
from sonicmoe.bench.cost_model import fit_model
from sonicmoe.bench.plots import plot_model
from sonicmoe.bench.shapes import Shape
from sonicmoe.bench.workload import Variant
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.diagnostics.step_dump import StepDump, StepSettings, save_dump
from sonicmoe.errors import SonicMoEError
from sonicmoe.jit import pack

BIG = np.zeros((64, 64), np.float32)


@contextmanager
def disk_of(nbytes):
    """No file may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def dump(path):
    ids, rows = np.zeros((64, 1), np.int64), BIG[:, :16]
    weights = {"w1": BIG[None, :, :16], "w2": BIG[None, :16, :32]}
    save_dump(
        path, StepDump("a", StepSettings(), rows, ids, np.ones((64, 1), np.float32), **weights)
    )


def summary(path):
    run_report.report(path.parent, {"text": "x" * 9000}, True)


def packed(path):
    pack._write(path, bytes(9000))


def metrics(path):
    append_metrics(path, StepRecord(**dict.fromkeys(StepRecord.__dataclass_fields__, 1)))


def swept(path):
    """A point whose refusal is long."""
    shape = Shape(1, 1, 1, 1, 1)
    with mock.patch.object(sweeps, "_measured", lambda *_: [(shape, None, "x" * 9000)]):
        sweeps.sweep(path, [shape], Variant.parse("reference"))


def picture(path):
    """Of a cost model."""
    points = made_points()
    plot_model(fit_model(points), points, path.parent)


WRITERS = {
    "a step": dump,
    "a figure": picture,
    "a pack": packed,
    "a checkpoint": lambda path: save_checkpoint(
        path, SavedRun(0, RunConfig(), ""), {"weight": BIG}
    ),
    "a summary": summary,
    "metrics": metrics,
    "a sweep": swept,
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_error_names_the_file(name, tmp_path):
    path = tmp_path / "there" / "file"
    path.parent.mkdir()
    with disk_of(100), pytest.raises((OSError, SonicMoEError)) as caught:
        WRITERS[name](path)
    assert str(path.parent) in str(caught.value)


def test_a_finding_counts_for_more_than_its_file(tmp_path):
    node, problem = Layer(make_problem()).node, make_problem()
    x = torch.full(problem.x.shape, float("nan"))
    given = x, None, torch.from_numpy(problem.indices), torch.from_numpy(problem.probs).float()
    with (
        disk_of(100),
        pytest.raises(NonFiniteError, match="the inputs cannot be written: ") as caught,
        detect_nonfinite(tmp_path),
    ):
        node(*given)
    assert caught.value.dump is None and str(tmp_path) in str(caught.value)
