"""DeepEP's `Buffer` as a transport. The library is found by the methods it offers, not by its
version, and is never required.

This file hides the following differences from the rest of `ep/`: the element type of ids, and the
empty count list of a worst-case dispatch.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch

from ..errors import ConfigError, DTypeError, ShapeError, expect
from ..interop import IS_PADDLE, dtype_name
from ..quant.format import BlockScaledTensor
from ..quant.tokens import WORD_COLUMNS
from .fixed_size import RowLimit
from .interface import Meanwhile, Received, Tokens, Transport, nothing

Tensor = torch.Tensor
PADDLES = ("paddle.distributed.communication.deep_ep", "paddlefleet_ops.deep_ep")
MODULES = PADDLES if IS_PADDLE else ("deep_ep",)
METHODS = ("get_dispatch_layout", "dispatch", "combine")
# DeepEP moves a row as whole 16-byte words, so H must be a multiple of 8 bf16 values.
ROW_BYTES = 16
# Ranks of one NVLink domain. Above it DeepEP sends over RDMA, by NVSHMEM, without which it may have
# been built.
NVLINK_RANKS = 8
# The argument of a Buffer's dispatch that sizes a delivery without counts.
WORST_CASE = "num_worst_tokens"


def find_library() -> tuple[Any, str]:
    """`(module, "")`, or `(None, why there is none)`."""
    reasons = []
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        # An extension that was built for another framework or CUDA fails in each of these ways.
        except (ImportError, OSError, RuntimeError) as error:
            reasons.append(f"{name}: {first_line(error)}")
            continue
        # The methods are checked, too, because a build may have the class and lack a method that
        # this package calls.
        buffer = getattr(module, "Buffer", None)
        if buffer is not None and all(hasattr(buffer, method) for method in METHODS):
            return module, ""
        reasons.append(f"{name} has no Buffer with {', '.join(METHODS)}")
    return None, "; ".join(reasons)


def first_line(error: BaseException) -> str:
    """The first line of its message; its class where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def buffer_problem(module: Any, world_size: int) -> str:
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


class DeepEPTransport(Transport):
    """`deep_ep.Buffer`.

    module: the library, or anything with its class and methods.
    limit: the most tokens any rank dispatches at once, or None for exact deliveries. With a limit a
    delivery has room for as many of every rank. The host does not wait for the device and knows no
    counts, and rows beyond the real ones have every id -1.
    """

    name = "DeepEP (Buffer)"

    def __init__(
        self, num_experts: int, group: Any, module: Any, *, limit: RowLimit | None = None
    ) -> None:
        """Allocates nothing: the buffer's size follows the first tokens."""
        world_size, rank = group_shape(group)
        super().__init__(num_experts, world_size, rank)
        self._group, self._module = group, module
        # A build says here in which integers it takes ids; one without the name takes int64.
        self._id_dtype = getattr(module, "topk_idx_t", torch.int64)
        # Made at the first dispatch, when the width of a row is known.
        self._buffer: Any = None
        self._hidden = 0  # columns of a row that the buffer was made for
        self._limit, self.exact_rows = limit, limit is None
        if limit is not None:
            problem = worst_case_problem(module, self.world_size)
            needed = "needed: True, or kind 'collective'"
            words = f"wait_for_counts is False, and DeepEP's {problem}; {needed}"
            expect(not problem, ConfigError, words)

    def dispatch(
        self, x: Tokens, topk_idx: Tensor, topk_weights: Tensor, meanwhile: Meanwhile = nothing
    ) -> Received:
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
        meanwhile()
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
        # The list is empty where the host did not wait for the counts.
        on_host = [int(count) for count in counts] if self._limit is None else None
        return Received(_as_arrived(recv_x, x), ids, recv_weights, on_host, handle)

    def check_quantised(self, hidden: int) -> None:
        carried = f"DeepEP carries FP8 rows whose length is a multiple of {WORD_COLUMNS}"
        expect(hidden % WORD_COLUMNS == 0, ShapeError, f"x has {hidden} columns; {carried}")

    def dispatch_cached(self, x: Tokens, handle: Any) -> Tokens:
        sent = self._as_sent(x)
        # With a handle DeepEP sends rows along the recorded routes and returns no ids and no
        # weights.
        arrived = self._sized_buffer(int(x.shape[1])).dispatch(sent, handle=handle)[0]
        return _as_arrived(arrived, x)

    def combine(
        self, x: Tensor, handle: Any, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        self._check(x)
        buffer = self._sized_buffer(int(x.shape[1]))
        combined, combined_weights, _ = buffer.combine(x, handle, topk_weights=weights)
        return combined, combined_weights

    def _as_sent(self, x: Tokens) -> Any:
        """bf16 rows, or the pair of e4m3 codes and fp32 scales, one per row and 128 columns."""
        if not isinstance(x, BlockScaledTensor):
            self._check(x)
            return x
        return x.codes, x.scale_inv

    def _check(self, x: Tensor) -> None:
        found = f"x is {dtype_name(x.dtype)}"
        carried = "DeepEP carries bfloat16 rows, and quantised ones with fp8=True"
        expect(x.dtype == torch.bfloat16, DTypeError, f"{found}; {carried}")
        hidden = int(x.shape[1])
        words = f"x has {hidden} columns; DeepEP needs a multiple of {ROW_BYTES // 2}"
        expect(2 * hidden % ROW_BYTES == 0, ShapeError, words)

    def _sized_buffer(self, hidden: int) -> Any:
        """The buffer; a larger one is made where rows are wider than before. It never shrinks.

        Making a buffer is a collective. All ranks see the same width, so they make it in the same
        call. Handles hold layouts and no addresses, so those of the former buffer stay valid.
        """
        # The size must never depend on this rank's tokens. Otherwise one rank would enter the
        # collective that makes a buffer while another enters a dispatch, and both would wait for
        # ever.
        if hidden > self._hidden:
            # `2 * hidden` is the size of a bf16 row in bytes.
            sizes = _buffer_sizes(self._module.Buffer, 2 * hidden, self.world_size)
            self._buffer, self._hidden = self._module.Buffer(self._group, *sizes), hidden
        return self._buffer


def _as_arrived(received: Any, sent: Tokens) -> Tokens:
    if not isinstance(sent, BlockScaledTensor):
        return received  # type: ignore[no-any-return]
    codes, scales = received
    return BlockScaledTensor(codes, scales, sent.block, sent.code)


def group_shape(group: Any) -> tuple[int, int]:
    """`(ranks, own rank)` of a torch process group or a Paddle communication group."""
    if IS_PADDLE:
        # Attributes in Paddle, methods in PyTorch.
        return int(group.nranks), int(group.rank)
    return int(group.size()), int(group.rank())
