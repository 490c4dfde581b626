"""Which kernels build routing metadata and aggregate rows: CUDA, else Triton, else plain tensor
operations. One log line says why.
"""

from __future__ import annotations

import functools
import logging
import sys
from abc import ABC, abstractmethod
from typing import Any

import torch

from ..architectures import arch_name
from ..interop import IS_PADDLE, current_stream, device_name, device_of, empty, is_cuda
from ..jit.decided import FALLBACK, NO_FALLBACK, Decided
from ..kernels import aggregate_source, routing_metadata_source
from ..log import log_once
from .metadata import NO_ROW, RoutingMetadata, round_up
from .reference import exact_routing, exact_sorted_routing

Tensor = torch.Tensor
Outputs = tuple[Tensor, ...]  # in the order of `RoutingMetadata.TENSOR_FIELDS`
MAX_EXPERTS = 512

_WIDEST = 8  # bytes of an element of routing metadata


class RoutingKernels(ABC):
    """One implementation. All of them give identical tensors; every tensor argument is contiguous
    and on one device.
    """

    name: str

    def build(
        self, indices: Tensor, probs: Tensor, num_experts: int, alignment: int, num_rows: int
    ) -> RoutingMetadata:
        """Metadata with `num_rows` rows; a slot whose row would lie behind them is dropped.

        No GPU implementation waits for the device, and so the counts stay unknown on the host.
        """
        tokens, topk = map(int, indices.shape)
        made = _unwritten((tokens, topk, num_experts, alignment, num_rows), device_of(indices))
        self.fill(indices, probs.detach(), made.tensors(), num_experts, alignment)
        return made

    def build_sorted(
        self, counts: Tensor, probs: Tensor | None, num_tokens: int, alignment: int, num_rows: int
    ) -> RoutingMetadata:
        """Metadata of rows in expert order, one slot each: counts int32 or int64 `[E]`, probs fp32
        `[T]` or None for 1. Rows beyond the sum of the counts have no slot.
        """
        sizes = num_tokens, 1, int(counts.shape[0]), alignment, num_rows
        made = _unwritten(sizes, device_of(counts))
        self.fill_sorted(counts, probs, made.tensors(), alignment)
        return made

    def fill(
        self, indices: Tensor, probs: Tensor, outputs: Outputs, num_experts: int, alignment: int
    ) -> None:
        """Write every element of `outputs`; of those that do not `build` in a way of their own."""
        raise NotImplementedError(f"{type(self).__name__} fills no tensors of others")

    def fill_sorted(
        self, counts: Tensor, probs: Tensor | None, outputs: Outputs, alignment: int
    ) -> None:
        """Write what `build_sorted` makes into tensors that are there."""
        raise NotImplementedError(f"{type(self).__name__} fills no tensors of others")

    @abstractmethod
    def gather_or_zero(self, index: Tensor, values: Tensor, out: Tensor) -> None:
        """`out[i] = values[index[i]]`, 0 where there is no such value; int64, fp32, fp32."""

    @abstractmethod
    def aggregate_rows(
        self, rows: Tensor, slot_row: Tensor, row_prob: Tensor, out: Tensor, weighted: bool
    ) -> None:
        """`out[t] = sum_k w * rows[slot_row[t, k]]` in slot order and fp32, w = 1 or the row's
        probability.
        """


class CudaKernels(RoutingKernels):
    """The CUDA sources, built or loaded on construction; errors as `CudaSource.load`."""

    name = "cuda"

    def __init__(self, arch: str, forced_ctas: int = 0) -> None:
        """`forced_ctas` > 0 sets the size of the metadata kernel's grid, for measurements; 0 lets
        it decide.
        """
        metadata, aggregate = routing_metadata_source(arch).load(), aggregate_source(arch).load()
        self._build, self._gather = metadata.build_metadata, metadata.gather_or_zero
        self._build_sorted = metadata.build_sorted
        self._aggregate = aggregate.aggregate_rows
        self._forced_ctas, self._native = forced_ctas, metadata
        # Asking takes as long as a launch, and sizes come again.
        self._memory_of = functools.lru_cache(maxsize=1024)(self._ask_for_memory)

    def _ask_for_memory(self, slots: int, experts: int, rows: int) -> tuple[tuple[int, ...], int]:
        """Where the tensors lie in one memory, and its bytes with the builder's scratch."""
        places = tuple(map(int, self._native.metadata_places(slots, experts, rows)))
        scratch = self._native.scratch_bytes(slots, experts, self._forced_ctas)
        # The memory is retyped whole where somebody asks for a tensor of it.
        return places, round_up(places[-1] + int(scratch), _WIDEST)

    def build(
        self, indices: Tensor, probs: Tensor, num_experts: int, alignment: int, num_rows: int
    ) -> RoutingMetadata:
        """One launch into one memory."""
        tokens, topk = map(int, indices.shape)
        device, stream = device_of(indices), current_stream(indices)
        places, size = self._memory_of(tokens * topk, num_experts, num_rows)
        # The scratch is the call's own too, so calls on several streams cannot meet.
        memory = empty((size,), torch.uint8, device)
        given = num_rows, num_experts, alignment, self._forced_ctas, stream
        self._build(indices, probs, memory, *given)
        sizes = tokens, topk, num_experts, alignment, num_rows
        return RoutingMetadata.in_memory(sizes, memory, places)

    def build_sorted(
        self, counts: Tensor, probs: Tensor | None, num_tokens: int, alignment: int, num_rows: int
    ) -> RoutingMetadata:
        """One launch into one memory."""
        experts, stream = int(counts.shape[0]), current_stream(counts)
        places, _ = self._memory_of(num_tokens, experts, num_rows)
        memory = empty(places[-1:], torch.uint8, device_of(counts))
        self._build_sorted(counts, probs, memory, num_tokens, num_rows, alignment, stream)
        sizes = num_tokens, 1, experts, alignment, num_rows
        return RoutingMetadata.in_memory(sizes, memory, places)

    def gather_or_zero(self, index: Tensor, values: Tensor, out: Tensor) -> None:
        self._gather(index, values, out, current_stream(index))

    def aggregate_rows(
        self, rows: Tensor, slot_row: Tensor, row_prob: Tensor, out: Tensor, weighted: bool
    ) -> None:
        self._aggregate(rows, slot_row, row_prob, out, weighted, current_stream(rows))


class TritonKernels(RoutingKernels):
    """The Triton kernels; compiled by Triton at the first launch for each number of experts."""

    name = "triton"

    def __init__(self) -> None:
        """Import them; ImportError without Triton."""
        from ..kernels import triton_aggregate, triton_routing

        if IS_PADDLE:
            take_driver_from_paddle()
        self._routing, self._aggregate = triton_routing, triton_aggregate

    def fill(
        self, indices: Tensor, probs: Tensor, outputs: Outputs, num_experts: int, alignment: int
    ) -> None:
        """Three launches."""
        self._routing.build_metadata(indices, probs, outputs, num_experts, alignment)

    def fill_sorted(
        self, counts: Tensor, probs: Tensor | None, outputs: Outputs, alignment: int
    ) -> None:
        """One launch."""
        self._routing.build_sorted(counts, probs, outputs, alignment)

    def gather_or_zero(self, index: Tensor, values: Tensor, out: Tensor) -> None:
        self._routing.gather_or_zero(index, values, out)

    def aggregate_rows(
        self, rows: Tensor, slot_row: Tensor, row_prob: Tensor, out: Tensor, weighted: bool
    ) -> None:
        self._aggregate.aggregate_rows(rows, slot_row, row_prob, out, weighted)


class PlainKernels(RoutingKernels):
    """Plain tensor operations, any device; `fill` waits for the device."""

    name = "reference"

    def fill(
        self, indices: Tensor, probs: Tensor, outputs: Outputs, num_experts: int, alignment: int
    ) -> None:
        """The exact metadata, with padding rows up to the size of the outputs."""
        _copy_into(outputs, exact_routing(indices, probs, num_experts, alignment))

    def fill_sorted(
        self, counts: Tensor, probs: Tensor | None, outputs: Outputs, alignment: int
    ) -> None:
        tokens = int(outputs[3].shape[0])
        _copy_into(outputs, exact_sorted_routing(counts, probs, tokens, alignment))

    def gather_or_zero(self, index: Tensor, values: Tensor, out: Tensor) -> None:
        """A gather of clamped indices and a select."""
        if 0 in (*index.shape, *values.shape):
            out.fill_(0.0)
            return
        # A gather may not be given -1, so it reads position 0 there and the result is replaced.
        # Multiplying by a mask would keep a NaN that position 0 holds.
        flat = index.reshape([-1])
        found = (flat >= 0) & (flat < int(values.shape[0]))
        picked = values.index_select(0, torch.where(found, flat, torch.zeros_like(flat)))
        out.copy_(torch.where(found, picked, torch.zeros_like(picked)).reshape(out.shape))

    def aggregate_rows(
        self, rows: Tensor, slot_row: Tensor, row_prob: Tensor, out: Tensor, weighted: bool
    ) -> None:
        """Slot by slot, so that sums have the kernels' order."""
        total = torch.zeros(tuple(out.shape), dtype=torch.float32, device=rows.device)
        if 0 not in (*rows.shape, *out.shape):
            for slot in range(int(slot_row.shape[1])):
                # A slot without a row reads row 0 and is not added. NaN in row 0 thus stays with
                # its own token.
                row = slot_row[:, slot]
                source = torch.where(row >= 0, row, torch.zeros_like(row))
                term = rows.index_select(0, source).to(torch.float32)
                if weighted:
                    term = term * row_prob.index_select(0, source).unsqueeze(-1)
                total = torch.where((row >= 0).unsqueeze(-1), total + term, total)
        out.copy_(total.to(out.dtype))


def _unwritten(sizes: tuple[int, int, int, int, int], device: Any) -> RoutingMetadata:
    """Metadata of these `sizes` in memory that nobody has written: `fill` writes every element,
    padding included, so no launch is spent on zeros.
    """
    tokens, topk, num_experts, _, num_rows = sizes
    return RoutingMetadata(
        *sizes,
        empty((num_experts,), torch.int32, device),
        empty((num_experts + 1,), torch.int64, device),
        empty((num_rows,), torch.int32, device),
        empty((tokens, topk), torch.int64, device),
        empty((num_rows,), torch.float32, device),
    )


def _copy_into(outputs: Outputs, built: RoutingMetadata) -> None:
    """Metadata with padding rows up to the size of the outputs."""
    counts, offsets, row_token, slot_row, row_prob = outputs
    counts.copy_(built.expert_counts)
    offsets.copy_(built.padded_offsets)
    rows = int(row_token.shape[0])
    # Where wrong counts made the row tensors too small, the slots behind them are dropped as
    # the kernels drop them, and nothing is written out of bounds.
    slot_row.copy_(
        torch.where(built.slot_row < rows, built.slot_row, torch.full_like(slot_row, NO_ROW))
    )
    for out, value, padding in (
        (row_token, built.row_token, NO_ROW),
        (row_prob, built.row_prob, 0.0),
    ):
        out.fill_(padding)
        kept = min(built.num_rows, rows)
        if kept:
            out[:kept] = value[:kept]


def kernels_for(tensor: Tensor) -> RoutingKernels:
    """The kernels for tensors on the device of `tensor`; decided once per device and process, each
    choice and reason logged once.

    Where better ones failed by something that may pass, they are tried again: see `Decided`.
    """
    # A forbidden compile, or another process's that takes too long, reaches the caller: a slow
    # fallback without a word would last for the whole run.
    return _choose(device_name(tensor)) if is_cuda(tensor) else plain_kernels("no GPU")


@Decided
def _choose(device: str) -> tuple[RoutingKernels, list[Exception]]:
    reasons: list[str] = []
    errors: list[Exception] = []
    # The fastest first. What failed is kept for the log line and for `Decided`, which tries again
    # if the error may pass.
    for name, make in (("CUDA", _make_cuda), ("Triton", _make_triton)):
        try:
            kernels = make(device)
        except NO_FALLBACK:
            raise
        except FALLBACK as error:
            reasons.append(f"{name} kernels are unavailable: {_first_line(error)}")
            errors.append(error)
            continue
        level = logging.WARNING if reasons else logging.INFO
        why = "; ".join(reasons) or "compiled for this GPU"
        log_once(level, "routing kernels on %s: %s (%s)", device, kernels.name, why)
        return kernels, errors
    why = "; ".join(reasons)
    line = "routing kernels on %s: plain tensor operations, which wait for the device (%s)"
    log_once(logging.WARNING, line, device, why)
    return PlainKernels(), errors


@functools.lru_cache(maxsize=64)
def plain_kernels(reason: str) -> RoutingKernels:
    """Plain tensor operations, with one log line for each reason."""
    log_once(logging.INFO, "routing kernels: plain tensor operations (%s)", reason)
    return PlainKernels()


def find_device() -> str:
    """ "cuda:0" where the framework sees a GPU, else "cpu"."""
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def index_of_gpu(device: str) -> int:
    """ "cuda:1" -> 1, "cuda" -> 0."""
    return int(device.partition(":")[2] or 0)


def arch_of(device: str) -> str:
    """The architecture to compile for: "cuda:0" -> "sm_90a" on a Hopper GPU."""
    major, minor = torch.cuda.get_device_capability(index_of_gpu(device))
    return arch_name((major, minor))


def _make_cuda(device: str) -> RoutingKernels:
    return CudaKernels(arch_of(device))


def _make_triton(device: str) -> RoutingKernels:
    kernels = TritonKernels()
    # Triton needs a host compiler and the driver at its first launch: find out now, while another
    # choice is left.
    index = torch.zeros((1,), dtype=torch.int64, device=device)
    value = torch.zeros((1,), dtype=torch.float32, device=device)
    kernels.gather_or_zero(index, value, torch.zeros((1,), dtype=torch.float32, device=device))
    return kernels


def take_driver_from_paddle() -> None:
    """Let Triton ask Paddle for the device and the stream of a launch.

    Its own driver asks PyTorch. It finds no GPU where PyTorch is not installed or was built without
    CUDA, and elsewhere launches on PyTorch's current stream, which nothing orders with Paddle's.
    """
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    # `torch` is Paddle's in this file. The constructor would import PyTorch, so it is passed over.
    found = nvidia.CudaDriver.__new__(nvidia.CudaDriver)
    found.utils, found.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
    found.get_device_capability = torch.cuda.get_device_capability
    found.get_current_device = torch.cuda.current_device
    found.set_current_device = torch.cuda.set_device
    found.get_current_stream = sys.modules["paddle"].base.libpaddle._get_current_raw_stream
    driver.set_active(found)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
