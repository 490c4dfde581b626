"""What a workload loses on a GPU, because no engine there has kernels for it. Asked before a model
runs, on any machine.
"""

from __future__ import annotations

from dataclasses import replace

from .capabilities import RECORDS, problems
from .settings import Workload


def lost_on_gpus(workload: Workload) -> str | None:
    """What this workload loses on a GPU that has kernels, in words with the reason: FP8, or kernels
    at all. None where an engine with kernels takes it as it is.
    """
    reasons = _without_kernels(workload)
    if not reasons:
        return None
    if workload.settings.recipe is not None:
        plain = replace(workload, settings=replace(workload.settings, recipe=None))
        others = _without_kernels(plain)
        if not others:
            return f"a GPU computes it without FP8 ({'; '.join(reasons)})"
        reasons += others
    return f"a GPU computes it in plain tensor operations, which are slow ({'; '.join(reasons)})"


def _without_kernels(workload: Workload) -> list[str]:
    """Every reason why no engine with kernels takes a workload in its precision; empty where one
    does.
    """
    reasons = []
    for name, record in RECORDS.items():
        fp8 = workload.settings.recipe is not None
        if record.architectures and record.quantises(fp8) and not record.by_name_only:
            found = problems(record, workload)
            if not found:
                return []
            reasons += [f"not {name.value}: {reason}" for reason in found]
    return reasons
