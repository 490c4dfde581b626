"""Plans by number: a compiled graph holds tensors and numbers only, so it names its settings."""

from __future__ import annotations

import hashlib

from ..errors import ConfigError
from .call import Plan

_plans: dict[int, Plan] = {}


def number_of(plan: Plan) -> int:
    """The number that stands for `plan` in a graph.

    It is a digest of the plan and not a counter, because the compiler's caches keep graphs beyond
    the process, and another process must give the same plan the same number.
    """
    number = int.from_bytes(hashlib.sha256(repr(plan).encode()).digest()[:7], "big")
    _plans[number] = plan
    return number


def plan_of(number: int) -> Plan:
    """The plan that this process gave the number to.

    Raises:
        ConfigError: there is none.
    """
    plan = _plans.get(number)
    if plan is None:
        raise ConfigError(
            f"no plan {number} in this process: a program exported in another one names its settings by this number and does not "
            "carry them; trace the layer once here before (torch.compile or torch.export), with the same arguments and configuration"
        )
    return plan
