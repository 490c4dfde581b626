"""DeepEP as a transport: its legacy `Buffer` and its `ElasticBuffer`. The library is found by the
classes and methods it offers, not by its version, and is never required.

This file hides the following differences from the rest of `ep/`: the element type of ids; the empty
count list of a worst-case dispatch; worst-case rows, which the libraries do not write (an
ElasticBuffer without host synchronisation does not even write their ids); and the weights that an
ElasticBuffer delivers at other ranks' slots.
"""

from __future__ import annotations

import importlib
import inspect
from abc import abstractmethod
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError, DTypeError, ShapeError, expect
from ..interop import IS_PADDLE, dtype_name
from ..quant.format import BlockScaledTensor
from ..quant.tokens import WORD_COLUMNS, has_row_scales
from .interface import Received, Tokens, Transport
from .row_limit import RowLimit, require_rows

Tensor = torch.Tensor
PADDLES = ("paddle.distributed.communication.deep_ep", "paddlefleet_ops.deep_ep")
MODULES = PADDLES if IS_PADDLE else ("deep_ep",)
LEGACY, ELASTIC = "legacy", "elastic"
CLASSES = {LEGACY: "Buffer", ELASTIC: "ElasticBuffer"}
METHODS = {LEGACY: ("get_dispatch_layout", "dispatch", "combine"), ELASTIC: ("dispatch", "combine")}
# DeepEP moves a row as whole 16-byte words, so H must be a multiple of 8 bf16 values.
ROW_BYTES = 16
# Ranks of one NVLink domain. Above it DeepEP sends over RDMA, by NVSHMEM, without which it may have
# been built.
NVLINK_RANKS = 8
# The argument of a Buffer's dispatch that sizes a delivery without counts.
WORST_CASE = "num_worst_tokens"


class DeepEPLibrary(NamedTuple):
    """An importable DeepEP and the buffers it offers, best first."""

    module: Any
    kinds: tuple[str, ...]


def buffer_kinds(module: Any) -> tuple[str, ...]:
    """Buffers that `module` offers. The legacy one comes first: it needs neither a size agreed in
    advance nor a recent NCCL.
    """

    # The methods are checked, too, because a build may have the class and lack a method that this
    # package calls.
    def offered(kind: str) -> bool:
        buffer = getattr(module, CLASSES[kind], None)
        return buffer is not None and all(hasattr(buffer, method) for method in METHODS[kind])

    return tuple(kind for kind in (LEGACY, ELASTIC) if offered(kind))


def find_library() -> tuple[DeepEPLibrary | None, str]:
    """`(library, "")`, or `(None, why there is none)`."""
    reasons = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        # An extension that was built for another framework or CUDA fails in each of these ways.
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{name}: {first_line(error)}")
            continue
        kinds = buffer_kinds(module)
        if kinds:
            return DeepEPLibrary(module, kinds), ""
        reasons.append(f"{name} has neither {' nor '.join(CLASSES.values())}")
    return None, "; ".join(reasons)


def first_line(error: BaseException) -> str:
    """Of its message; its class where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def legacy_problem(module: Any, world_size: int) -> str:
    """Why `module.Buffer` cannot serve a group of that size; "" where it can.

    Asks for the sizes of its buffers, which every build knows that can make them. Allocates
    nothing, and has the same answer on every rank of a run, because all of them have one build.
    """
    try:
        _buffer_sizes(module.Buffer, ROW_BYTES, world_size)
    # A build without NVSHMEM raises RuntimeError; numbers of ranks without a configuration fail an
    # assertion.
    except Exception as error:
        return f"Buffer cannot serve {world_size} ranks: {first_line(error)}"
    return ""


def worst_case_problem(module: Any, world_size: int) -> str:
    """Why `module.Buffer` cannot deliver to a group of that size without counts on the host; ""
    where it can.
    """
    unable = f"Buffer cannot serve {world_size} ranks with wait_for_counts=False"
    # Its kernels between hosts take their sizes from the host.
    if world_size > NVLINK_RANKS:
        return f"{unable}: it can within one NVLink domain, of {NVLINK_RANKS} ranks"
    # Paddle's build of it has no such argument.
    try:
        parameters = inspect.signature(module.Buffer.dispatch).parameters
    except (TypeError, ValueError):  # a method of a compiled class may tell nothing of itself
        return ""
    kinds = {parameter.kind for parameter in parameters.values()}
    if WORST_CASE in parameters or inspect.Parameter.VAR_KEYWORD in kinds:
        return ""
    return f"{unable}: its dispatch takes no {WORST_CASE}"


def _buffer_sizes(buffer: Any, row_bytes: int, world: int) -> tuple[int, int]:
    """Bytes of the NVLink and of the RDMA buffer."""
    # One buffer serves both directions, so each hint is taken for the larger need.
    configs = [buffer.get_dispatch_config(world), buffer.get_combine_config(world)]
    nvlink = max(config.get_nvl_buffer_size_hint(row_bytes, world) for config in configs)
    if world <= NVLINK_RANKS:
        return nvlink, 0
    return nvlink, max(config.get_rdma_buffer_size_hint(row_bytes, world) for config in configs)


class _DeepEPTransport(Transport):
    """The common part of both buffers: when to make one, and checks of rows. module: the library,
    or anything with the class's name and methods.
    """

    def __init__(self, num_experts: int, group: Any, module: Any) -> None:
        """Allocates nothing: the buffer's size follows the first tokens."""
        world_size, rank = group_shape(group)
        super().__init__(num_experts, world_size, rank)
        self._group, self._module = group, module
        # A build says here in which integers it takes ids; one without the name takes int64.
        self._id_dtype = getattr(module, "topk_idx_t", torch.int64)
        # Made at the first dispatch, when the width of a row is known.
        self._buffer: Any = None
        self._hidden = self._topk = 0  # the sizes that the buffer was made for

    def _check(self, x: Tensor) -> None:
        found = f"x is {dtype_name(x.dtype)}"
        carried = "DeepEP carries bfloat16 rows, and quantised ones with fp8=True"
        expect(x.dtype == torch.bfloat16, DTypeError, f"{found}; {carried}")
        hidden = int(x.shape[1])
        words = f"x has {hidden} columns; DeepEP needs a multiple of {ROW_BYTES // 2}"
        expect(2 * hidden % ROW_BYTES == 0, ShapeError, words)

    def _sized_buffer(self, hidden: int, topk: int = 0) -> Any:
        """The buffer; a larger one is made where rows are wider or tokens have more slots than
        before. It never shrinks.

        Making a buffer is a collective. All ranks see the same sizes, so they make it in the same
        call. Handles hold layouts and no addresses, so those of the former buffer stay valid.
        """
        # The size must never depend on this rank's tokens. Otherwise one rank would enter the
        # collective that makes a buffer while another enters a dispatch, and both would wait for
        # ever.
        if hidden > self._hidden or topk > self._topk:
            hidden, topk = max(hidden, self._hidden), max(topk, self._topk)
            self._buffer = self._make_buffer(hidden, topk)
            self._hidden, self._topk = hidden, topk
        return self._buffer

    @abstractmethod
    def _make_buffer(self, hidden: int, topk: int) -> Any: ...

    def combine(
        self, x: Tensor, handle: Any, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._check(x)
        buffer = self._sized_buffer(int(x.shape[1]))
        combined, combined_weights, _ = buffer.combine(x, handle, topk_weights=weights)
        return combined, combined_weights


class LegacyTransport(_DeepEPTransport):
    """`deep_ep.Buffer`.

    limit: the most tokens any rank dispatches at once, or None for exact deliveries. With a limit a
    delivery has room for as many of every rank. The host does not wait for the device and knows no
    counts, and rows beyond the real ones have every id -1.
    """

    name = "DeepEP (Buffer)"

    def __init__(
        self, num_experts: int, group: Any, module: Any, *, limit: RowLimit | None = None
    ) -> None:
        super().__init__(num_experts, group, module)
        self._limit, self.exact_rows = limit, limit is None
        if limit is not None:
            problem = worst_case_problem(module, self.world_size)
            expect(not problem, ConfigError, f"DeepEP's {problem}; needed: wait_for_counts=True")

    def dispatch(self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor) -> Received:
        sent = self._as_sent(x)
        arguments = {}
        if self._limit is not None:
            # The library writes as many rows as arrive, wherever the memory for them ends.
            self._limit.check(x, topk_idx)
            arguments[WORST_CASE] = self.world_size * self._limit.max_tokens
        # Sized for bf16 rows in either case: combine sends such.
        buffer = self._sized_buffer(int(x.shape[1]))
        ids = topk_idx.to(self._id_dtype)
        # The layout says which token goes to which rank and how many rows that makes. Without a
        # limit, `dispatch` below waits until the counts have reached the host, because they size
        # the outputs.
        layout = buffer.get_dispatch_layout(ids, self.num_experts)
        per_rank, per_rdma_rank, per_expert, in_rank, _ = layout
        recv_x, recv_idx, recv_weights, counts, handle, _ = buffer.dispatch(
            sent,
            topk_idx=ids,
            topk_weights=topk_weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            **arguments,
        )
        # The rest of the package knows int64 ids only.
        ids = recv_idx.to(torch.int64)
        return Received(_as_arrived(recv_x, x), ids, recv_weights, host_counts(counts), handle)

    def _as_sent(self, x: Tokens) -> Any:
        """bf16 rows, or the pair of e4m3 codes and fp32 scales, one per row and 128 columns."""
        if not isinstance(x, BlockScaledTensor):
            self._check(x)
            return x
        # It knows one form of scales. A row's own is repeated on the way.
        if not has_row_scales(x):
            return x.codes, x.scale_inv
        return x.codes, torch.cat([x.scale_inv] * (x.shape[1] // WORD_COLUMNS), 1)

    def check_quantised(self, hidden: int) -> None:
        carried = f"DeepEP carries FP8 rows whose length is a multiple of {WORD_COLUMNS}"
        expect(hidden % WORD_COLUMNS == 0, ShapeError, f"x has {hidden} columns; {carried}")

    def dispatch_cached(self, x: Tokens, handle: Any) -> Tokens:
        sent = self._as_sent(x)
        # With a handle DeepEP sends rows along the recorded routes and returns no ids and no
        # weights.
        arrived = self._sized_buffer(int(x.shape[1])).dispatch(sent, handle=handle)[0]
        return _as_arrived(arrived, x)

    def _make_buffer(self, hidden: int, topk: int) -> Any:
        # `2 * hidden` is the size of a bf16 row in bytes.
        sizes = _buffer_sizes(self._module.Buffer, 2 * hidden, self.world_size)
        return self._module.Buffer(self._group, *sizes)


class ElasticTransport(_DeepEPTransport):
    """`deep_ep.ElasticBuffer`, in its deterministic mode.

    max_tokens: most tokens any rank dispatches at once; the same on every rank.
    wait_for_counts: let the host learn exact sizes; without, deliveries have worst-case size and
        only the device knows it.
    """

    name = "DeepEP (ElasticBuffer)"
    bf16_only = True

    def __init__(
        self,
        num_experts: int,
        group: Any,
        module: Any,
        *,
        max_tokens: int,
        wait_for_counts: bool = True,
    ) -> None:
        needed = "an ElasticBuffer needs the most tokens a rank dispatches, the same on all ranks"
        expect(max_tokens > 0, ConfigError, f"max_tokens is {max_tokens}; {needed}")
        super().__init__(num_experts, group, module)
        self._max_tokens = max_tokens
        self._wait_for_counts = self.exact_rows = wait_for_counts

    def check_quantised(self, hidden: int) -> None:
        raise ConfigError(
            "fp8 or fp8_grad was asked for, and an ElasticBuffer is used in bfloat16 only; "
            "needed: both False, or DeepEP's Buffer"
        )

    def dispatch(self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor) -> Received:
        x = self._plain(x)
        require_rows(x, self._max_tokens)
        buffer = self._sized_buffer(int(x.shape[1]), int(topk_idx.shape[1]))
        recv_x, recv_idx, recv_weights, handle, _ = buffer.dispatch(
            x,
            topk_idx=topk_idx.to(self._id_dtype),
            topk_weights=topk_weights,
            num_experts=self.num_experts,
            do_cpu_sync=self._wait_for_counts,
        )
        recv_idx, counts = recv_idx.to(torch.int64), None
        if self._wait_for_counts:
            # The list holds counts only after the host has waited for them.
            counts = host_counts(handle.num_recv_tokens_per_expert_list)
        else:
            # Without host synchronisation nobody writes the rows beyond the real ones, so their ids
            # are whatever the memory held. They could look like valid experts and must become -1.
            recv_idx = _without_tail(recv_idx, handle.psum_num_recv_tokens_per_scaleup_rank)
        return Received(recv_x, recv_idx, recv_weights, counts, handle)

    def _plain(self, x: Tokens) -> Tensor:
        if isinstance(x, BlockScaledTensor):
            self.check_quantised(x.shape[1])
        assert not isinstance(x, BlockScaledTensor)  # refused above
        self._check(x)
        return x

    def dispatch_cached(self, x: Tokens, handle: Any) -> Tokens:
        x = self._plain(x)
        # The number of experts sizes the launch before the library looks into the handle.
        buffer = self._sized_buffer(int(x.shape[1]))
        return buffer.dispatch(x, num_experts=self.num_experts, handle=handle)[0]  # type: ignore[no-any-return]

    def _make_buffer(self, hidden: int, topk: int) -> Any:
        return self._module.ElasticBuffer(
            self._group,
            num_max_tokens_per_rank=self._max_tokens,
            hidden=hidden,
            num_topk=topk,
            # Equal inputs must give equal bits, and rows must come in the order that `Dispatched`
            # promises.
            deterministic=True,
        )


def _as_arrived(received: Any, sent: Tokens) -> Tokens:
    if not isinstance(sent, BlockScaledTensor):
        return received  # type: ignore[no-any-return]
    codes, scales = received
    if has_row_scales(sent):
        scales = scales[:, :1].contiguous()
    return BlockScaledTensor(codes, scales, sent.block, sent.code)


def host_counts(counts: Any) -> list[int] | None:
    """A count list as Python integers; None for the empty one of a dispatch that does not wait for
    the device.
    """
    return [int(count) for count in counts] if counts is not None and len(counts) else None


def group_shape(group: Any) -> tuple[int, int]:
    """`(ranks, own rank)` of a torch process group or a Paddle communication group."""
    if IS_PADDLE:
        # Attributes in Paddle, methods in PyTorch.
        return int(group.nranks), int(group.rank)
    return int(group.size()), int(group.rank())


def _without_tail(indices: Tensor, received_per_rank: Tensor) -> Tensor:
    """Ids -1 in the rows beyond the real ones, whose number (the last of the running sums) only the
    device knows.
    """
    rows = torch.arange(int(indices.shape[0]), dtype=torch.int64, device=indices.device)
    # A comparison on the device: reading the number on the host would be the very wait that this
    # mode avoids.
    real = received_per_rank[-1].to(torch.int64)
    return torch.where((rows < real).reshape([-1, 1]), indices, torch.full_like(indices, -1))
