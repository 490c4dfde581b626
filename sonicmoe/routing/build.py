"""Dispatched top-k indices and probabilities -> `RoutingMetadata`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch

from ..config import current_config
from ..interop import is_cuda, plain_ops
from ..log import log_once
from .backends import MAX_EXPERTS, RoutingKernels, kernels_for, plain_kernels
from .metadata import ROW_ALIGNMENT, RoutingMetadata, check_alignment
from .reference import exact_routing, exact_sorted_routing
from .validation import (
    DISPATCHED,
    check_contents,
    check_counts,
    check_indices_and_probs,
    check_sorted,
    check_sorted_contents,
    host_counts_of,
)

Tensor = torch.Tensor


def build_routing(
    indices: Tensor,
    probs: Tensor,
    num_experts: int,
    tokens_per_expert: Any = None,
    *,
    alignment: int = ROW_ALIGNMENT,
    validate: bool = False,
    static_rows: bool = False,
    names: tuple[str, str] = DISPATCHED,
    is_checked: bool = False,
) -> RoutingMetadata:
    """Build the metadata of one forward.

    On a GPU this is one launch that waits for nothing. R then follows from the counts that the host
    was given, or is the worst case of `num_rows_bound`; rows behind `padded_offsets[E]` are padding
    (-1, 0). On a host R is exact, and counts are checked against the indices.

    Args:
        indices: int32 or int64 `[T, K]`; docs/design.md, "Routing contract", says which ids are
            "not here".
        probs: fp32 `[T, K]`; read at valid slots only.
        num_experts: E, local experts.
        tokens_per_expert: E counts on the host, true or rounded up to one power of two. None, an
            empty list and a GPU tensor, which is not read, mean that nobody knows them. Counts
            below the true ones lose slots on a GPU (never memory safety) unless `validate`.
        alignment: rows every expert is padded to.
        validate: also check distinct ids, finite probabilities, ids >= -1 and the counts; waits for
            the device.
        static_rows: size R on a host as on a GPU, from shapes and given counts alone.
        names: what the caller calls indices and probabilities, for the messages of `validate`.
        is_checked: the caller's own border has checked indices, probabilities and E.

    Raises:
        RoutingError: counts disagree with the indices, or `validate` found a violation.
        ShapeError, DTypeError, DeviceError, FrameworkError: the inputs do not fit together.
        CompileForbiddenError: the kernels are not compiled and compiling is forbidden.
    """
    if not is_checked:
        check_alignment(alignment)
        check_indices_and_probs(indices, probs, num_experts)
    given = host_counts_of(tokens_per_expert, num_experts)
    indices, probs = indices.contiguous(), probs.contiguous()
    if validate:
        with plain_ops():
            check_contents(indices, probs, num_experts, names)
    # A host reads values without waiting, so R can be exact. A GPU would have to wait for the
    # counts.
    if not (static_rows or is_cuda(indices)):
        with plain_ops():
            routing = exact_routing(indices, probs.detach(), num_experts, alignment)
            _warn_if_global(indices, routing, num_experts)
        return _with_counts_checked(routing, given)
    tokens, topk = map(int, indices.shape)
    # The number of rows must be known before the kernel that counts has run.
    rows = num_rows_bound(tokens * topk, num_experts, alignment, given)
    is_known = num_experts <= MAX_EXPERTS
    kernels = kernels_for(indices) if is_known else _without_kernels(num_experts)
    routing = kernels.build(indices, probs, num_experts, alignment, rows)
    # Given counts may be rounded up, or wrong. They size the rows, and nobody takes them for true.
    return _with_counts_checked(routing, given) if validate else routing


def build_sorted_routing(
    counts: Tensor,
    num_tokens: int,
    probs: Tensor | None = None,
    tokens_per_expert: Any = None,
    *,
    alignment: int = ROW_ALIGNMENT,
    validate: bool = False,
    static_rows: bool = False,
) -> RoutingMetadata:
    """Build the metadata of rows that a dispatcher has sorted by expert already: K = 1, and row t of
    the caller is slot t.

    On a GPU this is one launch, which waits for nothing, and no ids of rows exist. R is that of
    `build_routing`.

    Args:
        counts: int32 or int64 `[E]`, rows of each expert, on the device of the rows; 0 is ordinary.
            Rows beyond their sum are padding of the caller: no engine reads them, and they get
            zeros.
        num_tokens: T, all rows of the caller.
        probs: fp32 `[T]`; None: 1, where the caller applies them himself.
        tokens_per_expert: E counts on the host, as of `build_routing`; they size the rows.
        alignment, static_rows: as of `build_routing`.
        validate: on a GPU, also check the counts and the probabilities; waits for the device.

    Raises:
        RoutingError: a count is negative, or they sum to more than T; found on a host, and by
            `validate`. Without it a GPU takes 0 for a negative count, and drops rows beyond T.
        ShapeError, DTypeError, DeviceError: the tensors do not fit together.
        CompileForbiddenError: as of `build_routing`.
    """
    check_alignment(alignment)
    check_sorted(counts, num_tokens, probs)
    experts = int(counts.shape[0])
    given = host_counts_of(tokens_per_expert, experts)
    counts = counts.detach().contiguous()
    probs = None if probs is None else probs.detach().contiguous()
    if validate or not is_cuda(counts):
        check_sorted_contents(counts, num_tokens, probs, validate)
    if not (static_rows or is_cuda(counts)):
        with plain_ops():
            return exact_sorted_routing(counts, probs, num_tokens, alignment)
    rows = num_rows_bound(num_tokens, experts, alignment, given)
    kernels = kernels_for(counts) if experts <= MAX_EXPERTS else _without_kernels(experts)
    return kernels.build_sorted(counts, probs, num_tokens, alignment, rows)


def deepep_topk_to_sonic_metadata(
    dispatched_indices: Tensor,
    dispatched_probs: Tensor,
    num_experts: int,
    tokens_per_expert: Any = None,
    *,
    alignment: int = ROW_ALIGNMENT,
    validate: bool | None = None,
) -> RoutingMetadata:
    """Build the routing metadata of one dispatched batch.

    Args:
        dispatched_indices: `recv_topk_idx`, int64 or int32 `[T, K]`: local expert ids
            (docs/design.md, "Routing contract").
        dispatched_probs: `recv_topk_weights`, fp32 `[T, K]`; never read where the id is not here
            (ElasticBuffer leaves them non-zero).
        num_experts: local experts E.
        tokens_per_expert: DeepEP's count list, true or aligned; None, or the empty list of
            worst-case dispatch: counted from the indices.
        alignment: rows every expert is padded to in the metadata.
        validate: check every precondition; None follows `SONIC_MOE_VALIDATE_DISPATCH`.

    Raises:
        RoutingError: counts disagree with the indices (expert and counts named), or validation
            failed (row named).
        ShapeError, DTypeError, DeviceError: the tensors do not fit together; already permuted
            (HybridEP) input is refused.
    """
    if validate is None:
        validate = current_config().validate_dispatch
    given = dispatched_indices, dispatched_probs, num_experts, tokens_per_expert
    return build_routing(*given, alignment=alignment, validate=validate)


def num_rows_bound(
    num_slots: int, num_experts: int, alignment: int, given: tuple[int, ...] | None = None
) -> int:
    """Rows that any routing of `num_slots` slots fits in; with counts given, the rows of those
    counts.
    """
    if given is not None:
        # Without a call per expert: `round_up` of each, in units of the alignment.
        return sum([-(-count // alignment) for count in given]) * alignment
    # Each expert that has rows wastes at most alignment - 1, and the sum is a multiple of the
    # alignment. A compiled graph may know the number of slots as a symbol alone, which cannot be
    # compared.
    smaller = min if isinstance(num_slots, int) else torch.sym_min
    return (num_slots + smaller(num_experts, num_slots) * (alignment - 1)) // alignment * alignment


def _without_kernels(num_experts: int) -> RoutingKernels:
    return plain_kernels(f"{num_experts} experts; the GPU kernels take at most {MAX_EXPERTS}")


def _warn_if_global(indices: Tensor, routing: RoutingMetadata, num_experts: int) -> None:
    """Say once that a batch names experts and none of them is here, as ids of the whole model do:
    its output is zeros. On a host, where the counts are known anyway.
    """
    # A batch with one expert here is an ordinary one, so this costs it a sum of counts that are known.
    if 0 in tuple(indices.shape) or any(routing.counts_on_host()):
        return
    largest = int(indices.max())
    if largest > num_experts:  # the number itself marks "not here", as -1 does
        log_once(
            logging.WARNING,
            "no expert id of a batch of %d tokens is in 0..%d, and the largest is %d: the output is zeros. Needed: ids of this "
            "rank's experts, counted from 0, and -1 for experts of other ranks. Said once.",
            int(indices.shape[0]),
            num_experts - 1,
            largest,
            key="a batch without an id of this rank",
        )


def _with_counts_checked(
    routing: RoutingMetadata, given: tuple[int, ...] | None
) -> RoutingMetadata:
    """The metadata with counts known on the host; given ones must agree with them."""
    host_counts = routing.counts_on_host()
    if given is not None:
        check_counts(given, host_counts)
    return replace(routing, host_counts=host_counts)
