"""Facts that only a process with CuTe DSL and quack knows, as JSON on standard output: `python
cute_facts.py ROWS BLOCKS`. Needs no GPU. One program for all, because importing CuTe DSL takes longer
than any of them.

* Byte offsets of the scales of an MXFP8 operand as CuTe's own algebra and quack's packer have them.
* How many functions the epilogues have for each activation.
"""

import json
import os
import sys

os.environ.setdefault("CUTE_DSL_ARCH", "sm_100a")
os.environ.setdefault("QUACK_ARCH", "100")
import torch

torch.compile = torch.compiler.disable = lambda function=None, **_: (
    function or (lambda decorated: decorated)
)
import cutlass  # noqa: E402
from cutlass import cute  # noqa: E402
from cutlass.utils.blockscaled_layout import tile_atom_to_shape_SF  # noqa: E402
from quack.blockscaled.utils import _pack_blockscaled_scales  # noqa: E402

from sonicmoe.enums import ACTIVATIONS  # noqa: E402
from sonicmoe.kernels.blackwell.quack_epilogues import gate_functions, ungated_functions  # noqa: E402

BLOCK = 32


def evaluate(layout, rows: int, blocks: int) -> list[list[int]]:
    return [[int(layout((m, BLOCK * b, 0))) for b in range(blocks)] for m in range(rows)]


found: list[list[int]] = []


@cute.jit
def trace(rows: cutlass.Constexpr, blocks: cutlass.Constexpr):  # type: ignore[no-untyped-def]
    found.extend(evaluate(tile_atom_to_shape_SF((rows, BLOCK * blocks, 1), BLOCK), rows, blocks))


def packed_by_quack(rows: int, blocks: int) -> list[list[int]]:
    """Where quack's packer puts each scale: numbers are packed, and looked for."""
    numbers = torch.arange(1, rows * blocks + 1, dtype=torch.float32).reshape(rows, blocks, 1)
    places = torch.empty(rows * blocks + 1, dtype=torch.int64)
    flat = _pack_blockscaled_scales(numbers).reshape(-1)
    places[flat.to(torch.int64)] = torch.arange(flat.numel())
    return places[1:].reshape(rows, blocks).tolist()


def functions_of_activations() -> dict[str, int]:
    """Those that the epilogues compute, and how many functions they have for each."""
    counts = {}
    for activation, record in ACTIVATIONS.items():
        find = gate_functions if record.gated else ungated_functions
        own = [" ".join(f"{name}={value}" for name, value in record.values().items())]
        try:
            counts[activation.value] = len(find(activation.value, *own * bool(record.parameters)))
        except NotImplementedError:
            continue
    return counts


if __name__ == "__main__":
    sizes = int(sys.argv[1]), int(sys.argv[2])
    trace(*sizes)
    facts = {
        "cute": found,
        "quack": packed_by_quack(*sizes),
        "activations": functions_of_activations(),
    }
    json.dump(facts, sys.stdout)
