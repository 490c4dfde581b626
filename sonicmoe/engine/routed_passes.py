"""What the programs of all Hopper engines share: the routing in front of every pass, buffers and words of
their lists, and the passes over the kernels of one device.

Legend: R padded rows in expert order; other letters as in `interface`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..interop import device_of, empty
from ..routing.metadata import RoutingMetadata
from .low_rank import Adapters
from .program import Buffer, Program, Programs, Rule, Stage, Vocabulary
from .settings import EngineSettings

Tensor = torch.Tensor
# A pass: its stages, the buffers that its scratch lies in, and rules which arguments exclude others.
# A part that several buffers have is cut from the first that a call gives.
Pass = tuple[list[Stage], str, Sequence[Rule]]

ROUTED_TENSORS = """
    num_tokens size T | topk size K | num_experts size E | num_rows size R | inner size I
    expert_counts i32 E | padded_offsets i64 E+1 | row_token i32 R | slot_row i64 T K | row_prob f32 R
"""
ROUTING = "expert_counts", "padded_offsets", "row_token", "slot_row", "row_prob"
HEAD = "routing_memory", *ROUTING, "num_tokens", "topk", "num_experts", "num_rows", "inner"
# Those that a forward reads, and those that a backward reads, transposed.
OF_FORWARD = "up_a", "up_b", "down_a", "down_b"
OF_BACKWARD = tuple(f"{name}_t" for name in OF_FORWARD)
FACTORS = *OF_FORWARD, *OF_BACKWARD
# What is bound beside weights: scales of adapters, and how many multiprocessors GEMMs may take.
OF_LAUNCHES = "up_scale", "down_scale", "multiprocessors"
WORDS = {"ROWS": "row_token padded_offsets", "SMS": "multiprocessors stream"}


def buffers_of(chains: Mapping[str, Sequence[str]]) -> dict[str, Buffer]:
    """These buffers, and the memory of the routing."""
    return {
        # As `routing_places.hpp` has it, where one builder has filled all.
        "routing_memory": Buffer(128, [" ".join(ROUTING)]),
        # 512: the alignment of a framework's allocator.
        **{buffer: Buffer(512, each) for buffer, each in chains.items()},
    }


def kernels_of(passes: Mapping[str, Pass]) -> set[str]:
    """All that they launch."""
    return {
        one.kernel for stages, *_ in passes.values() for each in stages for one in each.launches
    }


MAX_SIZES = 1024  # of scratch, kept for one device: a step has as many as batches in flight
_NO_TENSORS = [None] * len(ROUTING)
# What layers with adapters call themselves.
OF_ADAPTERS = "gradient_parts", "parts_of_both", "prepare_factor"


class Routed(NamedTuple):
    """A routing as passes take it, how many bytes of each buffer of a layer its parts take up to their
    ends (`Programs.part_ends`), the passes that take them, and the device.
    """

    routing: tuple[Any, ...]
    ends: Mapping[tuple[str, str], int]
    passes: Any
    device: Any


class RoutedPasses:
    """The programs over one set of kernels; each takes its arguments by keyword. bind: makes a handle
    of all that is bound.
    """

    forward: Callable[..., None]
    dgated: Callable[..., None]
    dgrad: Callable[..., None]
    adapters: Callable[..., None]
    wgrad: Callable[..., None]

    def __init__(
        self,
        native: Any,
        kernels: Mapping[str, Any],
        vocabulary: Vocabulary,
        passes: Mapping[str, Pass],
        binds: Sequence[str] = (),
    ) -> None:
        """The passes of one device.

        Args:
            native: the loaded module.
            kernels: functions by the names their modules export, also those that no list names.
            vocabulary, passes, binds: of the engine's program; binds: the passes that take what is
                bound.
        """
        self.kernels, of = kernels, Programs(native, vocabulary, kernels)
        self.bind, self._part_ends = of.bind, of.part_ends("TKERHI")
        for name, told in passes.items():
            setattr(self, name, Program(of, name, *told, binds=name in binds).call)
        self._ends: dict[tuple[int, ...], dict[tuple[str, str], int]] = {}

    def routed(self, routing: RoutingMetadata, hidden: int, inner: int) -> Routed:
        """What the passes of one forward, or of one backward, need to know of `routing`."""
        memory = routing.memory
        held = _NO_TENSORS if memory is not None else routing.tensors()
        tokens, topk, experts, _, rows = routing.sizes
        # Asking native code takes as long as a launch: a backward finds the sizes of its forward.
        key = tokens, topk, experts, rows, hidden, inner
        ends = self._ends.get(key)
        if ends is None:
            # Token counts differ from step to step, so this would grow for ever.
            if len(self._ends) >= MAX_SIZES:
                self._ends.clear()
            ends = self._ends[key] = self._part_ends(*key)
        given = memory, *held, tokens, topk, experts, rows, inner
        return Routed(given, ends, self, device_of(routing.held[0]))


def exported_by(modules: Iterable[Any], names: Iterable[str]) -> dict[str, Any]:
    """The functions of these names, each of the module that exports it; None where none does: kernels
    of biases and of adapters, where there is no need of them.
    """
    return {
        name: next((getattr(module, name) for module in modules if hasattr(module, name)), None)
        for name in names
    }


def factors_of(
    adapters: Adapters | None,
    kernels: Mapping[str, Any],
    dtype: torch.dtype,
    settings: EngineSettings,
    backward: bool,
    stream: int,
) -> dict[str, Tensor]:
    """Those that a forward, or a backward, reads, by their names in the lists."""
    found = {}
    for side, pair in zip(("up", "down"), adapters or (None, None), strict=True):
        if pair is None:
            continue
        for name, axis in (("a", 1), ("b", 2)):
            factor, own = getattr(pair, name).detach(), (kernels["prepare_factor"], stream)
            made = partial(_factor, factor, axis, pair.width, dtype, *own)
            if backward:
                found[f"{side}_{name}_t"] = made(turned=True)
            # A backward may compute z again.
            if not backward or (settings.recompute_z and side == "up"):
                found[f"{side}_{name}"] = made(turned=False)
    return found


def _factor(
    factor: Tensor,
    axis: int,
    width: int,
    dtype: torch.dtype,
    prepare: Any,
    stream: int,
    *,
    turned: bool,
) -> Tensor:
    """A factor as the kernels read it: contiguous, in the dtype of the tokens, with zeros behind the
    rank along `axis`; turned: its last two axes have changed places.
    """
    as_it_is = factor.dtype == dtype and factor.shape[axis] == width
    if not turned and as_it_is and factor.is_contiguous() and factor.data_ptr() % 16 == 0:
        return factor
    shape = [int(size) for size in factor.shape]
    shape[axis] = width
    experts, *sides = shape
    made: Tensor = empty((experts, *sides[:: -1 if turned else 1]), dtype, factor.device)
    prepare(factor, *((None, made) if turned else (made, None)), stream)
    return made
