"""GPU architectures: the name that compilers take, and the compute capability that devices report.

A leaf: standard library only. An engine's record lists the architectures it has kernels for
(`engine/capabilities.py`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Architecture:
    """One architecture that an engine has kernels for.

    name: as compilers take it; kernels bound to it lie in a folder of that number
    (`kernels/sm90`). family: NVIDIA's name, for messages.
    """

    name: str
    capability: tuple[int, int]
    family: str

    def __str__(self) -> str:
        """`sm_90a (Hopper, compute capability 9.0)`."""
        major, minor = self.capability
        return f"{self.name} ({self.family}, compute capability {major}.{minor})"


SM90 = Architecture("sm_90a", (9, 0), "Hopper")

# Warm-up compiles for this one unless it is told another: it may run on a machine without a GPU.
DEFAULT_ARCH = SM90.name


def arch_name(capability: tuple[int, int]) -> str:
    """(9, 0) -> "sm_90a". From 9.0 on, compilers need the suffix for instructions such as WGMMA."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")
