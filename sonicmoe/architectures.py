"""GPU architectures: the compute capability that devices report, the name that compilers take, and
the family whose kernel sources serve it.

Imports `errors` alone. An engine's record lists the architectures it has kernels for
(`engine/capabilities.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from .errors import ConfigError, expect


@dataclass(frozen=True)
class Architecture:
    """One architecture that some engine is made for.

    name: as compilers take it. generation: NVIDIA's name, for messages. family: architectures that
    one set of kernel sources serves, each compiled for its own name; kernels bound to a family lie
    in a folder of its name (`kernels/sm90`). shared_kib: shared memory that a block may ask for.
    """

    name: str
    capability: tuple[int, int]
    generation: str
    family: str
    shared_kib: int

    def __str__(self) -> str:
        """`sm_90a (Hopper, compute capability 9.0)`."""
        major, minor = self.capability
        return f"{self.name} ({self.generation}, compute capability {major}.{minor})"


SM80 = Architecture("sm_80", (8, 0), "Ampere", "sm80", 163)
SM86 = Architecture("sm_86", (8, 6), "Ampere", "sm80", 99)
SM89 = Architecture("sm_89", (8, 9), "Ada", "sm80", 99)
SM90 = Architecture("sm_90a", (9, 0), "Hopper", "sm90", 227)
SM100 = Architecture("sm_100a", (10, 0), "Blackwell", "sm100", 227)
SM103 = Architecture("sm_103a", (10, 3), "Blackwell Ultra", "sm100", 227)
# The mma.sync of Ampere with the TMA of Hopper: no tcgen05, no shared copies in a cluster.
SM120 = Architecture("sm_120a", (12, 0), "Blackwell RTX", "sm120", 99)
SM121 = Architecture("sm_121a", (12, 1), "Blackwell GB10", "sm120", 99)

ARCHITECTURES: dict[str, Architecture] = {
    known.name: known for known in (SM80, SM86, SM89, SM90, SM100, SM103, SM120, SM121)
}

# Warm-up compiles for this one on a host that has no GPU and names none.
DEFAULT_ARCH = SM90.name


def arch_name(capability: tuple[int, int]) -> str:
    """(9, 0) -> "sm_90a". From 9.0 on, compilers need the suffix for instructions such as WGMMA."""
    major, minor = capability
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


def describe(capability: tuple[int, int]) -> str:
    """(10, 0) -> "sm_100a (Blackwell, compute capability 10.0)", also of one in no table."""
    name, (major, minor) = arch_name(capability), capability
    known = ARCHITECTURES.get(name)
    return str(known) if known else f"{name} (compute capability {major}.{minor})"


def chosen_arch(named: str | None, capabilities: Iterable[tuple[int, int]]) -> str:
    """What to compile for: `named`, else the architecture of the host's GPUs, and `DEFAULT_ARCH` where
    it has none. ConfigError where no engine has kernels for `named` and no GPU of the host is of it,
    or nobody names one and the host's GPUs are of several.
    """
    here = sorted({arch_name(capability) for capability in capabilities})
    if named is None:
        words = f"arch is not given, and this host has GPUs of {' and '.join(here)}"
        expect(
            len(here) <= 1, ConfigError, f"{words}; needed: one of them (--arch {[*here, ''][0]})"
        )
        return here[0] if here else DEFAULT_ARCH
    # The few kernels that every run needs could be compiled for any name. A misspelt one, such as
    # sm_90, would then warm nothing that a GPU looks for, and report success. The nearest is found
    # by the number alone: sm_75 is another architecture than sm_89, however alike the names are.
    digits = re.sub(r"\D", "", named)
    near = [known for known in ARCHITECTURES if re.sub(r"\D", "", known) == digits]
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = named in ARCHITECTURES or named in here
    words = f"arch is {named!r}{hint}; needed: one of {list(ARCHITECTURES)}"
    expect(known, ConfigError, words)
    return named
