"""The report of ptxas about a kernel: registers, shared memory, spills, optimisations it gave up."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sonicmoe.jit.manifest import Artefact
from sonicmoe.jit.shared_object import BUILD_LOG

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FUNCTION = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")
_SERIALISED = re.compile(r"wgmma\.mma_async instructions are serialized.*?function '([^']+)'")
_LOSS = re.compile(r"\(C\d+\) Potential Performance Loss: .*\S")


# Spills that stay, by architecture and part of the entry's name: bytes of stores and loads together.
# All but three are of kernels that wait for memory, and whose registers are bounded so that several
# blocks share a multiprocessor; without the bound fewer of them would. The three are of dgated with
# gradients for an unquantised wgrad, under a clamp, or under GELU's tanh form with z in bf16: one
# word, stored and loaded once a tile.
ALLOWED = {
    ("sm_90a", "DgatedFp8INS0_8GeluTanhELb0E"): 8,
    ("sm_90a", "DgatedFp8INS0_11ClampedSiluELb0E"): 8,
    ("sm_90a", "DgatedFp8INS0_3OaiELb0E"): 8,
    **{(arch, "flush_tilesILb1E"): 24 for arch in ("sm_100a", "sm_103a")},
    **{(arch, "flush_tilesILb1E"): 32 for arch in ("sm_120a", "sm_121a")},
    ("sm_80", "aggregate_rowsI6__halfS2_Li8E"): 16,
    ("sm_80", "aggregate_rowsI13__nv_bfloat16S2_Li8E"): 16,
}


class SpillError(AssertionError):
    """A kernel spills registers, or ptxas serialised its WGMMA instructions."""


@dataclass(frozen=True)
class KernelResources:
    """One kernel as ptxas compiled it; sizes in bytes, registers per thread."""

    kernel: str
    arch: str
    registers: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0
    static_shared_bytes: int = 0
    wgmma_serialised: bool = False

    @property
    def spills(self) -> bool:
        """Whether any register was spilled to local memory."""
        return self.spill_store_bytes > 0 or self.spill_load_bytes > 0


def resource_usage(artefact: Artefact) -> tuple[KernelResources, ...]:
    """Registers, spills and shared memory of each kernel of a CUDA artefact, from its build log."""
    return parse_ptxas(artefact.file(BUILD_LOG).read_text(encoding="utf-8"))


def parse_ptxas(report: str) -> tuple[KernelResources, ...]:
    """The kernels of a `ptxas -v` report (for example the build log of a CUDA artefact), in its
    order.

    Properties of device functions that are not inlined are not attributed to a kernel.
    """
    # `-v` prints three kinds of lines in turn: the entry function that is compiled, then per
    # function (the entry, or a device function it calls) the stack and spills, then the registers
    # of the entry.
    found: dict[str, KernelResources] = {}
    entry = function = ""
    for line in report.splitlines():
        if match := _ENTRY.search(line):
            entry = function = match[1]
            found[entry] = KernelResources(entry, match[2])
        elif match := _FUNCTION.search(line):
            function = match[1]
        # A device function that was not inlined reports its own stack between the entry's lines. It
        # must not overwrite the numbers of the kernel.
        elif entry and function == entry and (match := _STACK.search(line)):
            stack, stores, loads = (int(text) for text in match.groups())
            found[entry] = replace(
                found[entry], stack_bytes=stack, spill_store_bytes=stores, spill_load_bytes=loads
            )
        elif entry and (match := _USED.search(line)):
            shared = _SHARED.search(line)
            count = int(shared[1]) if shared else 0
            found[entry] = replace(found[entry], registers=int(match[1]), static_shared_bytes=count)
    # This warning names its function itself and is no part of the sequence above, so it is searched
    # for in the whole report.
    for name in _SERIALISED.findall(report):
        found[name] = replace(found.get(name, KernelResources(name, "")), wgmma_serialised=True)
    return tuple(found.values())


def performance_losses(report: str) -> tuple[str, ...]:
    """Distinct "Potential Performance Loss" lines of a ptxas report, with their codes; most name no
    kernel.

    C7510 and C7514 serialise WGMMA; C7508 and its neighbours ignore `setmaxnreg`, which leaves
    consumers the registers of producers.
    """
    return tuple(dict.fromkeys(_LOSS.findall(report)))


def allowed_bytes(item: KernelResources) -> int:
    """What `ALLOWED` says of a kernel; 0 where it says nothing."""
    for (arch, part), count in ALLOWED.items():
        if arch == item.arch and part in item.kernel:
            return count
    return 0


def require_no_spills(resources: Iterable[KernelResources]) -> None:
    """Raise SpillError naming each kernel that spills more than `ALLOWED` says, or whose WGMMA
    ptxas serialised.
    """
    problems = []
    for item in resources:
        # The stack alone is no failure: an array that is indexed at run time lives there by design.
        spilled = item.spill_store_bytes + item.spill_load_bytes
        if spilled > allowed_bytes(item):
            problems.append(
                f"{item.kernel} spills {item.spill_store_bytes} bytes of stores and {item.spill_load_bytes} of loads at "
                f"{item.registers} registers"
            )
        if item.wgmma_serialised:
            problems.append(f"{item.kernel}: ptxas serialised its WGMMA instructions")
    if problems:
        raise SpillError("; ".join(problems))


def require_no_stack(resources: Iterable[KernelResources]) -> None:
    """Raise SpillError naming each kernel that keeps values in memory that each thread has of its
    own: arrays that are indexed at run time, where `require_no_spills` sees nothing. A spill that is
    allowed lies there too.
    """
    found = [
        f"{item.kernel} has {item.stack_bytes} bytes"
        for item in resources
        if item.stack_bytes and not allowed_bytes(item)
    ]
    if found:
        raise SpillError(f"values lie on the stack: {'; '.join(found)}")
