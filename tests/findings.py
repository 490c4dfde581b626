"""What detection finds in a call and what the commands say of a file, for the suites of every face."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
from click.testing import CliRunner
from framework import torch
from numerics_cases import load_case
from numerics_scores import evaluate

from sonicmoe.cli.main import main
from sonicmoe.diagnostics.capture import step_of_backward
from sonicmoe.diagnostics.cases import as_case
from sonicmoe.diagnostics.nonfinite import NonFiniteError, detect_nonfinite
from sonicmoe.enums import ZCode
from sonicmoe.observe import BackwardBegins, observing
from sonicmoe.quant.recipes import RECIPES

NAN = float("nan")


def spoil(tensor, *index):
    """The tensor, with a NaN there."""
    with torch.no_grad():
        tensor[index] = NAN
    return tensor


def found(run, match=None, **options) -> NonFiniteError:
    """The error of a block that does this."""
    with pytest.raises(NonFiniteError, match=match) as caught, detect_nonfinite(**options):
        run()
    return caught.value


@contextmanager
def captured_calls(name):
    """Inside the block every backward appends a copy of its inputs to the list, as a case."""
    cases = []

    def collect(event):
        if isinstance(event, BackwardBegins):
            case = as_case(step_of_backward(f"{name}-{len(cases)}", event))
            cases.append(replace(case, name=f"{case.name} {case.caller.layer}".strip()))

    with observing(collect):
        yield cases


def fault_of(error: NonFiniteError) -> str:
    """The line that says where it began."""
    return str(error).splitlines()[1]


def said_by(*arguments, exit_code=0):
    """What a command printed."""
    result = CliRunner().invoke(main, list(map(str, arguments)))
    assert result.exit_code == exit_code, result.output
    return result.stdout


def measured(path, bound=0.12):
    """The name of the case in a file: its errors are of FP8, and not of another formula."""
    (result,) = evaluate(load_case(path), [RECIPES["iso128"]], [ZCode.INT8])
    assert all(score.overall.rmse < bound for score in result.scores.values())
    return result.data
