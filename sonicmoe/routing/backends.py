"""Which kernels build routing metadata and aggregate rows: CUDA, else Triton, else plain tensor
operations. One log line says why.
"""

from __future__ import annotations

import functools
import logging
from typing import Protocol

import torch

from ..interop import IS_PADDLE, current_stream, device_name, device_of, empty, is_cuda
from ..jit.decided import FALLBACK, NO_FALLBACK, Decided
from ..kernels import aggregate_source, routing_metadata_source
from .metadata import NO_ROW, RoutingMetadata
from .reference import build_routing

logger = logging.getLogger("sonicmoe")

Tensor = torch.Tensor
MAX_EXPERTS = 512


class RoutingKernels(Protocol):
    """One implementation. All of them give identical tensors; every tensor argument is contiguous
    and on one device.
    """

    name: str

    def build_metadata(
        self,
        indices: Tensor,
        probs: Tensor,
        outputs: tuple[Tensor, ...],
        num_experts: int,
        alignment: int,
    ) -> None:
        """Fill `outputs`, in the order of `RoutingMetadata.TENSOR_FIELDS`, every element of each."""

    def gather_or_zero(self, index: Tensor, values: Tensor, out: Tensor) -> None:
        """`out[i] = values[index[i]]`, 0 where `index[i]` is none of `values`; int64, fp32, fp32."""

    def aggregate_rows(
        self, rows: Tensor, slot_row: Tensor, row_prob: Tensor, out: Tensor, weighted: bool
    ) -> None:
        """`out[t] = sum_k w * rows[slot_row[t, k]]` in slot order and fp32, w = 1 or the row's
        probability.
        """


class CudaKernels:
    """The CUDA sources, built or loaded on construction; errors as `CudaSource.load`."""

    name = "cuda"

    def __init__(self, arch: str, forced_ctas: int = 0) -> None:
        """`forced_ctas` > 0 sets the size of the metadata kernel's grid, for measurements; 0 lets
        it decide.
        """
        metadata, aggregate = routing_metadata_source(arch).load(), aggregate_source(arch).load()
        self._build, self._gather = metadata.build_metadata, metadata.gather_or_zero
        self._aggregate = aggregate.aggregate_rows
        self._scratch_per_expert = int(metadata.scratch_per_expert())
        self._forced_ctas = forced_ctas

    def build_metadata(
        self,
        indices: Tensor,
        probs: Tensor,
        outputs: tuple[Tensor, ...],
        num_experts: int,
        alignment: int,
    ) -> None:
        """One launch. The scratch is the call's own, so calls on several streams cannot meet."""
        scratch = empty((num_experts * self._scratch_per_expert,), torch.int32, device_of(indices))
        stream = current_stream(indices)
        self._build(
            indices, probs, *outputs, scratch, num_experts, alignment, self._forced_ctas, stream
        )

    def gather_or_zero(self, index: Tensor, values: Tensor, out: Tensor) -> None:
        self._gather(index, values, out, current_stream(index))

    def aggregate_rows(
        self, rows: Tensor, slot_row: Tensor, row_prob: Tensor, out: Tensor, weighted: bool
    ) -> None:
        self._aggregate(rows, slot_row, row_prob, out, weighted, current_stream(rows))


class TritonKernels:
    """The Triton kernels; compiled by Triton at the first launch for each number of experts."""

    name = "triton"

    def __init__(self) -> None:
        """Import them; ImportError without Triton."""
        from ..kernels import triton_aggregate, triton_routing

        if IS_PADDLE:
            _take_stream_from_paddle()
        self.build_metadata = triton_routing.build_metadata
        self.gather_or_zero = triton_routing.gather_or_zero
        self.aggregate_rows = triton_aggregate.aggregate_rows


class PlainKernels:
    """Plain tensor operations, any device; `build_metadata` waits for the device."""

    name = "reference"

    def build_metadata(
        self,
        indices: Tensor,
        probs: Tensor,
        outputs: tuple[Tensor, ...],
        num_experts: int,
        alignment: int,
    ) -> None:
        """The reference builder, with padding rows up to the size of the outputs."""
        built = build_routing(indices, probs, num_experts, alignment=alignment)
        for name, out, value in zip(
            RoutingMetadata.TENSOR_FIELDS, outputs, built.tensors(), strict=True
        ):
            if not name.startswith("row_"):
                out.copy_(value)
                continue
            out.fill_(0 if name == "row_prob" else NO_ROW)
            kept = min(int(value.shape[0]), int(out.shape[0]))
            if kept:
                out[:kept] = value[:kept]

    def gather_or_zero(self, index: Tensor, values: Tensor, out: Tensor) -> None:
        """A gather of clamped indices and a select."""
        if 0 in (*index.shape, *values.shape):
            out.fill_(0.0)
            return
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
                row = slot_row[:, slot]
                source = torch.where(row >= 0, row, torch.zeros_like(row))
                term = rows.index_select(0, source).to(torch.float32)
                if weighted:
                    term = term * row_prob.index_select(0, source).unsqueeze(-1)
                total = torch.where((row >= 0).unsqueeze(-1), total + term, total)
        out.copy_(total.to(out.dtype))


def kernels_for(tensor: Tensor) -> RoutingKernels:
    """The kernels for tensors on the device of `tensor`; decided once per device and process, each
    choice and reason logged once.

    Where better ones failed by something that may pass, they are tried again: see `Decided`.

    Raises:
        CompileForbiddenError, CompileLockTimeout: a compile is needed and forbidden, or another
            process's takes too long; never answered by a silent fallback.
    """
    return _choose(device_name(tensor)) if is_cuda(tensor) else plain_kernels("no GPU")


@Decided
def _choose(device: str) -> tuple[RoutingKernels, list[Exception]]:
    reasons: list[str] = []
    errors: list[Exception] = []
    for name, make in (("CUDA", _make_cuda), ("Triton", _make_triton)):
        try:
            kernels = make(device)
        except NO_FALLBACK:
            raise
        except FALLBACK as error:
            reasons.append(f"{name} kernels are unavailable: {_first_line(error)}")
            errors.append(error)
            continue
        level, why = (
            logging.WARNING if reasons else logging.INFO,
            "; ".join(reasons) or "compiled for this GPU",
        )
        _choose.say(level, f"routing kernels on {device}: {kernels.name} ({why})")
        return kernels, errors
    why = "; ".join(reasons)
    _choose.say(
        logging.WARNING,
        f"routing kernels on {device}: plain tensor operations, which wait for the device ({why})",
    )
    return PlainKernels(), errors


@functools.lru_cache(maxsize=64)
def plain_kernels(reason: str) -> RoutingKernels:
    """Plain tensor operations, with one log line for each reason."""
    logger.info("routing kernels: plain tensor operations (%s)", reason)
    return PlainKernels()


def arch_of(device: str) -> str:
    """The architecture to compile for: "cuda:0" -> "sm_90a" on a Hopper GPU."""
    major, minor = torch.cuda.get_device_capability(int(device.partition(":")[2] or 0))
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


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


def _take_stream_from_paddle() -> None:
    """Triton asks PyTorch for the stream where PyTorch is installed; under Paddle, Paddle's stream
    is the caller's.
    """
    import sys

    from triton.runtime import driver

    paddle = sys.modules["paddle"]
    driver.active.get_current_stream = paddle.base.libpaddle._get_current_raw_stream


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or '-').splitlines()[0]}"
