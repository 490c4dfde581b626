"""What the PTX of a grouped GEMM loads, multiplies and stores, read from its text.

A compiler that loses an operand's loads is found nowhere else without the GPU: ptxas reports
nothing, and the kernel would wait for bytes that never come.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

# Copies by tensor map: the group is the register that holds the address of the map.
_COPIES = {
    "loads": re.compile(
        r"cp\.async\.bulk\.tensor\.\S*shared::\S*\.global\S*\s+\[[^\]]*\], \[(%rd\d+)"
    ),
    "stores": re.compile(r"cp\.async\.bulk\.tensor\.\S*\.global\.shared::cta\S*\s+\[(%rd\d+)"),
    "adds": re.compile(
        r"cp\.reduce\.async\.bulk\.tensor\.\S*\.global\.shared::cta\S*add\S*\s+\[(%rd\d+)"
    ),
}
_COUNTS = {
    "gathers": re.compile(r"cp\.async\.bulk\.tensor\.\S*tile::gather4"),
    "cp_async": re.compile(r"cp\.async\.c[ag]\.shared\.global"),
    "wgmma": re.compile(r"wgmma\.mma_async"),
    "mma_sync": re.compile(r"mma\.sync\.aligned"),
    "tcgen05": re.compile(r"tcgen05\.mma"),
    "clc": re.compile(r"clusterlaunchcontrol\.try_cancel"),
}
_DEFINITION = re.compile(r"^\s*(?:mov|cvta|add)\S*\s+(%rd\d+), ([^;]*);$", re.M)
_CONSTANT = re.compile(r"^\s*mov\S*\s+(%r\d+), (\d+);$", re.M)
_EXPECTED = re.compile(r"expect_tx\S*\s+\S+ \[[^\]]*\], (%?\w+);")
_PARAMETER = re.compile(r"_param_(\d+)")


@dataclass(frozen=True)
class Traffic:
    """Of one kernel.

    loads, stores, adds: how often the text copies by each tensor map, by the number of the kernel
    parameter that is the map. expected_bytes: what barriers are told to wait for, where it is a
    constant. The others count instructions in the text.
    """

    loads: dict[str, int]
    stores: dict[str, int]
    adds: dict[str, int]
    expected_bytes: tuple[int, ...]
    gathers: int
    cp_async: int
    wgmma: int
    mma_sync: int
    tcgen05: int
    clc: int

    def as_json(self) -> dict[str, Any]:
        """Of plain values; `Traffic(**found)` gives it back."""
        return asdict(self)


def traffic(ptx: str) -> Traffic:
    """Read the text of one kernel.

    Raises:
        ValueError: a copy's tensor map is no parameter of the kernel.
    """
    sources: dict[str, list[str]] = defaultdict(list)
    for register, source in _DEFINITION.findall(ptx):
        sources[register].append(source)
    copies = {
        kind: dict(Counter(_parameter(register, sources) for register in pattern.findall(ptx)))
        for kind, pattern in _COPIES.items()
    }
    constants = {register: int(value) for register, value in _CONSTANT.findall(ptx)}
    waits = [
        int(found) if found.isdigit() else constants.get(found, 0)
        for found in _EXPECTED.findall(ptx)
    ]
    counts = {name: len(pattern.findall(ptx)) for name, pattern in _COUNTS.items()}
    return Traffic(**copies, expected_bytes=tuple(sorted(set(waits) - {0})), **counts)


def _parameter(register: str, sources: Mapping[str, list[str]]) -> str:
    """The number of the parameter whose address a register holds, through copies of it."""
    seen, left = set(), [register]
    while left:
        current = left.pop()
        seen.add(current)
        for source in sources.get(current, []):
            if match := _PARAMETER.search(source):
                return match[1]
            left += [found for found in re.findall(r"%rd\d+", source) if found not in seen]
    raise ValueError(f"the tensor map in {register} is no parameter of the kernel")


# Operands and results of each kernel, in the order of its tensor maps, as far as the copy engine
# moves them. A gathered A comes by `cp_async`, biases and probabilities by ordinary loads.
_LOADED = {
    "bf16_up": ("w1",),
    "bf16_up_again": ("w1",),
    "bf16_down": ("y1", "w2"),
    "bf16_dgated": ("w2", "z"),
    "bf16_dgrad": ("dz", "w1"),
    "bf16_wgrad": ("rows",),
}
_STORED = {
    "bf16_up": ("z", "y1"),
    "bf16_up_again": ("z",),
    "bf16_down": ("y2",),
    "bf16_dgated": ("dz", "y1s"),
    "bf16_dgrad": ("dx_rows",),
    "bf16_wgrad": (),
}
_UNGATHERED = frozenset({"bf16_down", "bf16_dgrad"})
_MULTIPLY = {"sm90": "wgmma", "sm100": "tcgen05", "sm120": "mma_sync"}
_DEPTH = 64  # columns of K in a stage, 2 bytes each
_GATHERING = 128  # threads of a block that gather, 16 bytes at a time


# Of MXFP8: two operands, each with its scales, before what an epilogue reads.
_SCALED = ("a", "b", "the scales of a", "the scales of b")
_MX_LOADED = {"mxfp8_dgated": (*_SCALED, "z")}
_MX_STORED = {
    "mxfp8_up": ("z", "y1"),
    "mxfp8_down": ("d",),
    "mxfp8_dgated": ("dz", "y1s"),
    "mxfp8_dgrad": ("dx_rows",),
    "mxfp8_wgrad": (),
}
_MX_DEPTH = 128  # columns of K in a stage, a byte each, with a scale for every 32 of them


def mx_problems(name: str, statics: Mapping[str, Any], found: Traffic) -> list[str]:
    """What is missing from, or is too much in, the kernel `name` of `mx_gemm`. quack-kernels traces
    a gathered block-scaled GEMM to a kernel without loads of scales, whose barriers wait for their
    bytes: it compiles, and would hang.
    """
    loaded, stored = _MX_LOADED.get(name, _SCALED), _MX_STORED[name]
    if name == "mxfp8_up" and not statics["store_z"]:
        stored = stored[1:]
    rows, columns = statics["tile"]
    # Two blocks share a tile: each has half of both operands, its own rows' scales and all columns'.
    scales = (rows + 2 * columns) * _MX_DEPTH // 32
    stage = (rows + columns) * _MX_DEPTH + scales
    text = _copy_problems(found, loaded, stored, name == "mxfp8_wgrad", stage)
    if not found.tcgen05 or found.wgmma or found.mma_sync or found.gathers:
        text.append("multiplies or gathers as another family does")
    return text + _tile_problems(found, statics)


def _copy_problems(
    found: Traffic, loaded: tuple[str, ...], stored: tuple[str, ...], adds: bool, stage: int
) -> list[str]:
    """Of the copies by tensor map, and of the bytes of a stage that barriers wait for."""
    text = []
    for what, wanted, maps in (("loads", loaded, found.loads), ("stores", stored, found.stores)):
        if len(maps) != len(wanted):
            text.append(f"{what} by {len(maps)} tensor maps; needed: {len(wanted)}, for {wanted}")
    if len(found.adds) != adds:
        text.append(f"adds by {len(found.adds)} tensor maps")
    if stage not in found.expected_bytes:
        text.append(f"barriers wait for {found.expected_bytes} bytes; needed: {stage} of a stage")
    return text


def _tile_problems(found: Traffic, statics: Mapping[str, Any]) -> list[str]:
    if bool(found.clc) == statics["clc"]:
        return []
    return [f"asks {found.clc} times for its next tile, and clc is {statics['clc']}"]


def problems(name: str, statics: Mapping[str, Any], found: Traffic) -> list[str]:
    """What is missing from, or is too much in, the kernel `name` of `quack_gemm` or `mx_gemm`."""
    if name.startswith("mxfp8_"):
        return mx_problems(name, statics, found)
    loaded, stored = _LOADED[name], _STORED[name]
    if name == "bf16_up" and not statics["store_z"]:
        stored = stored[1:]
    gathered = name not in _UNGATHERED
    rows, columns = statics["tile"]
    stage = (columns + (0 if gathered else rows)) * _DEPTH * 2
    text = _copy_problems(found, loaded, stored, name == "bf16_wgrad", stage)
    if gathered:
        # On sm100 a pair of blocks shares a tile of 256 rows.
        own = rows // 2 if statics["family"] == "sm100" and rows == 256 else rows
        least = own * _DEPTH * 2 // (_GATHERING * 16)
        if found.cp_async < least:
            text.append(f"{found.cp_async} gathering copies; needed: at least {least}")
    if found.gathers:
        text.append(f"{found.gathers} gathers by the copy engine")
    counts = {family: getattr(found, field) for family, field in _MULTIPLY.items()}
    if [family for family, number in counts.items() if number] != [statics["family"]]:
        text.append(f"multiplies as {counts}; needed: as {statics['family']} alone")
    return text + _tile_problems(found, statics)
