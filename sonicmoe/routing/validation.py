"""Border checks of routing inputs: shapes and dtypes always, counts on the host, contents under
`SONIC_MOE_VALIDATE_DISPATCH=1`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch

from ..errors import DTypeError, RoutingError, ShapeError, expect
from ..interop import (
    dtype_name,
    is_cuda,
    is_dense,
    require_framework_tensor,
    require_same_device,
    same_device,
)
from ..log import log_once
from ..refusals import need_dtype, need_shape
from .ids import is_here
from .metadata import round_up

Tensor = torch.Tensor
INDEX_DTYPES = (torch.int32, torch.int64)

HYBRID_EP_HINT = (
    "; already permuted expert-major rows with one probability each (HybridEP, or ElasticBuffer "
    "with do_expand=True) are a different contract: dispatch with per-token top-k indices"
)


def check_indices_and_probs(indices: Any, probs: Any, num_experts: int) -> None:
    """Check types, ranks, dtypes, shapes and devices; reads no element."""
    # One expression without messages for the usual case; what follows only finds out which part of
    # it is false.
    if type(num_experts) is int and num_experts > 0 and are_indices_and_probs(indices, probs):
        return
    require_framework_tensor(indices, "dispatched_indices")
    require_framework_tensor(probs, "dispatched_probs")
    # The counts are an argument too, and easily land here.
    whole = isinstance(num_experts, Integral) and not isinstance(num_experts, bool)
    words = f"num_experts is {num_experts!r}; needed: the number of local experts, at least 1"
    expect(whole and num_experts > 0, RoutingError, words)
    for name, tensor in (("dispatched_indices", indices), ("dispatched_probs", probs)):
        hint = HYBRID_EP_HINT if len(tensor.shape) == 1 else ""
        need_shape(len(tensor.shape) == 2, name, tensor, f"[tokens, topk]{hint}")
    need_dtype("dispatched_indices", indices, *INDEX_DTYPES)
    need_dtype("dispatched_probs", probs, torch.float32)
    expect(
        tuple(indices.shape) == tuple(probs.shape),
        ShapeError,
        f"dispatched_indices {tuple(indices.shape)} and dispatched_probs {tuple(probs.shape)} must have one shape",
    )
    require_same_device([("dispatched_indices", indices), ("dispatched_probs", probs)])


def are_indices_and_probs(indices: Any, probs: Any, *others: Tensor) -> bool:
    """Whether the pair is as needed, and the other tensors are dense."""
    # Asked at every forward, so it composes no message.
    return (
        isinstance(indices, torch.Tensor)
        and isinstance(probs, torch.Tensor)
        and is_dense(indices, probs, *others)
        and len(indices.shape) == 2
        and indices.shape == probs.shape
        and indices.dtype in INDEX_DTYPES
        and probs.dtype == torch.float32
        and same_device(indices, probs)
    )


# What the ids and the probabilities are called, where the caller has no other names for them.
DISPATCHED = "dispatched_indices", "dispatched_probs"


def check_contents(
    indices: Tensor, probs: Tensor, num_experts: int, names: tuple[str, str] = DISPATCHED
) -> None:
    """Refuse ids below -1, a token that names an expert twice, probabilities of valid slots that are
    not finite, and ids of the whole model; waits for the device. RoutingError names token and slot.
    """
    of_ids, of_probs = names
    ids = indices.to(torch.int64)
    _raise_at(
        ids < -1,
        lambda t, k: (
            f"{of_ids} of token {t}, slot {k}, is {int(ids[t, k])}; ids below -1 mean nothing"
        ),
    )
    valid = is_here(ids, num_experts)
    _check_range(ids, valid, num_experts, of_ids)
    _raise_at(
        valid & ~torch.isfinite(probs),
        lambda t, k: (
            f"{of_probs} of token {t}, slot {k}, is {float(probs[t, k])} at a valid slot "
            f"(expert {int(ids[t, k])})"
        ),
    )
    # Every pair of columns: K is small, and a sort of each row would lose the slots' positions.
    topk = int(ids.shape[1])
    for k in range(1, topk):
        for earlier in range(k):
            repeated = valid[:, k] & (ids[:, k] == ids[:, earlier])
            _raise_at(
                repeated.unsqueeze(-1),
                lambda t, _, k=k, earlier=earlier: (
                    f"{of_ids} of token {t} names expert {int(ids[t, k])} twice (slots {earlier} "
                    f"and {k}); ids must be distinct"
                ),
            )


def check_sorted(counts: Any, num_tokens: int, probs: Any) -> None:
    """Check types, ranks, dtypes, shapes and devices of counts `[E]` and probabilities `[T]` of rows
    in expert order; reads no element.
    """
    require_framework_tensor(counts, "counts")
    need_shape(len(counts.shape) == 1 and int(counts.shape[0]) > 0, "counts", counts, "[experts]")
    need_dtype("counts", counts, *INDEX_DTYPES)
    if probs is not None:
        require_framework_tensor(probs, "probs")
        need_dtype("probs", probs, torch.float32)
        need_shape(tuple(probs.shape) == (num_tokens,), "probs", probs, (num_tokens,))
        require_same_device([("counts", counts), ("probs", probs)])


def check_sorted_contents(
    counts: Tensor, num_tokens: int, probs: Tensor | None, validate: bool
) -> None:
    """Refuse counts below 0 or of more rows than there are, and under `validate` probabilities that
    are not finite; waits for the device.
    """
    found = [int(count) for count in counts.tolist()]
    for expert, count in enumerate(found):
        words = f"counts[{expert}] is {count}; needed: an int >= 0"
        expect(count >= 0, RoutingError, words)
    total = sum(found)
    words = f"counts sum to {total} rows and there are {num_tokens}; needed: at most as many"
    expect(total <= num_tokens, RoutingError, words)
    if validate and probs is not None:
        _raise_at(
            ~torch.isfinite(probs[:total]).unsqueeze(-1),
            lambda t, _: f"probs of row {t} is {float(probs[t])}",
        )


def _check_range(ids: Tensor, valid: Tensor, num_experts: int, name: str) -> None:
    if 0 in tuple(ids.shape):
        return
    largest = int(ids.max())
    if largest <= num_experts:  # the number itself marks "not here", as -1 does
        return
    needed = "needed: ids of this rank's experts, counted from 0, and -1 for experts of other ranks"
    words = f"no id of {name} is in 0..{num_experts - 1}, and the largest is {largest}; {needed}"
    expect(bool(valid.any()), RoutingError, words)
    # A dispatcher may mark other ranks' experts by their own ids, so this is no error.
    log_once(
        logging.WARNING,
        "the largest id of %s is %d, and only 0..%d are experts here: slots with larger ids are dropped. %s",
        name,
        largest,
        num_experts - 1,
        needed.capitalize(),
        key=("ids that are not here", name, num_experts),
    )


def _raise_at(bad: Tensor, message: Any) -> None:
    if 0 in tuple(bad.shape) or not bool(bad.any()):
        return
    token, slot = (int(position) for position in torch.nonzero(bad)[0].tolist())
    raise RoutingError(message(token, slot))


def check_dispatched_tokens(
    x: Any,
    dispatched_indices: Any,
    dispatched_probs: Any,
    tokens_per_expert: Any = None,
    x_scale: Any = None,
) -> None:
    """Refuse the outputs of other dispatch modes by name, before any tensor is read;
    `tokens_per_expert`: for the hint alone.
    """
    if isinstance(x, tuple | list | dict):
        raise DTypeError(
            f"x is a {type(x).__name__}, as an FP8 dispatch delivers; needed: the codes as x and "
            "their scales as x_scale, or bfloat16 tokens"
        )
    if hasattr(x, "dtype"):
        found = dtype_name(x.dtype)
        if "float8" in found and x_scale is None:
            raise DTypeError(
                f"x is {found} without its scales, from an FP8 dispatch; needed: x_scale, float32 "
                "[T, ceil(H/128)], or bfloat16 tokens"
            )
        if "float8" not in found and x_scale is not None:
            raise DTypeError(
                f"x_scale came with x in {found}; needed: x in float8_e4m3fn, or no x_scale"
            )
    # The usual slip of callers who left out the second argument: indices then arrive in its place.
    if dispatched_probs is None and len(getattr(tokens_per_expert, "shape", ())) == 2:
        raise RoutingError(
            "dispatched_probs missing; the second argument, tokens_per_expert, has two axes as indices have: needed: "
            "node(x, tokens_per_expert or None, dispatched_indices, dispatched_probs)"
        )
    if dispatched_indices is None or dispatched_probs is None:
        given = {"dispatched_indices": dispatched_indices, "dispatched_probs": dispatched_probs}
        missing = " and ".join(name for name, value in given.items() if value is None)
        raise RoutingError(f"{missing} missing{HYBRID_EP_HINT}")


def host_counts_of(tokens_per_expert: Any, num_experts: int) -> tuple[int, ...] | None:
    """`tokens_per_expert` as Python ints, or None when the caller gave none: None, an empty list, or
    a tensor on a device, which is never waited for.
    """
    if tokens_per_expert is None:
        return None
    # Dispatchers pass a list of ints at every forward, which no class has to be asked about.
    if type(tokens_per_expert) is not list:
        if hasattr(tokens_per_expert, "tolist") and hasattr(tokens_per_expert, "shape"):
            # A GPU tensor counts as "not given": reading it would wait, and the indices say the
            # same. Its shape costs nothing.
            if isinstance(tokens_per_expert, torch.Tensor) and is_cuda(tokens_per_expert):
                fits = tuple(tokens_per_expert.shape) in {(0,), (num_experts,)}
                need_shape(fits, "tokens_per_expert", tokens_per_expert, f"[{num_experts}]")
                return None
            tokens_per_expert = tokens_per_expert.tolist()
        expect(
            isinstance(tokens_per_expert, Sequence) and not isinstance(tokens_per_expert, str),
            RoutingError,
            f"tokens_per_expert is {type(tokens_per_expert).__name__}; needed: a list of ints, a 1-D tensor, or None",
        )
    if len(tokens_per_expert) == 0:
        return None
    if len(tokens_per_expert) != num_experts:
        raise ShapeError(
            f"tokens_per_expert has {len(tokens_per_expert)} entries; needed: {num_experts}, one per local expert"
        )
    # Accepted without a test per entry.
    if {*map(type, tokens_per_expert)} == {int} and min(tokens_per_expert) >= 0:
        return tuple(tokens_per_expert)
    counts = []
    for expert, count in enumerate(tokens_per_expert):
        words = f"tokens_per_expert[{expert}] is {count!r}; needed: an int >= 0"
        expect(_is_count(count), RoutingError, words)
        counts.append(int(count))
    return tuple(counts)


def _is_count(value: Any) -> bool:
    """Whether it is a non-negative integer of any numeric type: an integral float is one, True is
    none.
    """
    # True is an int to Python, and a list of flags is no list of counts.
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    number = float(value)
    return number >= 0 and number.is_integer()


def check_counts(given: Sequence[int], counted: Sequence[int]) -> None:
    """Accept counts that equal the indices' own, or those rounded up to one common alignment
    (DeepEP's `expert_alignment`).
    """
    # DeepEP rounds counts up where it was asked to, and does not say to what, so every power of two
    # is tried.
    if tuple(given) == tuple(counted) or _is_aligned_version(given, counted):
        return
    expert = next(e for e, (a, b) in enumerate(zip(given, counted, strict=True)) if a != b)
    raise RoutingError(
        f"tokens_per_expert[{expert}] is {given[expert]} but dispatched_indices hold {counted[expert]} tokens for expert {expert} "
        f"(given {list(given)}, counted {list(counted)}); pass None to have them counted"
    )


def _is_aligned_version(given: Sequence[int], counted: Sequence[int]) -> bool:
    # No alignment above the next power of two of the largest count can have produced it.
    largest = max(given, default=0)
    candidates = (1 << shift for shift in range(1, max(largest, 1).bit_length() + 1))
    return any(
        all(g == round_up(c, a) for g, c in zip(given, counted, strict=True)) for a in candidates
    )
