"""Chooses the dispatcher and logs the choice with its reason, in one line."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

from ..errors import ConfigError, EngineUnavailableError, expect
from ..interop import IS_PADDLE
from ..log import logger
from .collective import CollectiveTransport
from .deepep import (
    DeepEPTransport,
    buffer_problem,
    find_library,
    group_shape,
    worst_case_problem,
)
from .dispatcher import Dispatcher, LocalDispatcher
from .fixed_size import FixedSizeTransport, RowLimit, check_max_load, check_max_tokens
from .fp8_rows import check_forms
from .peer_memory import memory_of, peers_problem
from .symmetric import SymmetricTransport

if IS_PADDLE:
    from .exchange_paddle import PaddleExchange as GroupExchange
    from .exchange_paddle import is_gpu_group
else:
    from .exchange_torch import TorchExchange as GroupExchange  # type: ignore[assignment]
    from .exchange_torch import is_gpu_group

KINDS = ("auto", "local", "symmetric", "deepep", "collective")


def make_dispatcher(
    num_experts: int,
    group: Any = None,
    *,
    kind: str = "auto",
    max_tokens: int = 0,
    wait_for_counts: bool = True,
    max_load: float | None = None,
    fp8: bool = False,
    fp8_grad: bool = False,
) -> Dispatcher:
    """A dispatcher for `num_experts` experts over a group; one serves all MoE layers of a model.

    Args:
        num_experts: of the whole group.
        group: process group (torch) or communication group (Paddle); None is one rank without a
            group.
        kind: "auto": local without a group or in a group of one, collectives over a CPU group, else
            symmetric memory where the ranks can map each other's, else DeepEP where it is installed
            and serves the group, else collectives. Or one of "local", "symmetric", "deepep",
            "collective". With "auto" and "symmetric" the first call for a GPU group is a collective,
            which tries the mapping.
        max_tokens: the most tokens that a rank dispatches at once, the same on all ranks. Needed
            without waiting for counts, and else without effect.
        wait_for_counts: let the host of every dispatch wait until it knows how many rows arrive. If
            False, it launches dispatch, experts and combine without waiting for the device. Every
            delivery then has its worst-case size: of W ranks with K slots a token, x is
            `[W * max_tokens, H]`, rows for nobody here have every index -1, there are no counts,
            and activations take `W * max_tokens * K` rows and padding. It pays where most tokens go
            to most ranks anyway (few ranks, K large against them), because collectives then send
            every token to every rank. Results have the same bits. The first dispatch waits once, to
            compare `max_tokens` between ranks. A rank that dispatches more raises ShapeError and
            sends nothing, which the others learn when it ends, or after the group's timeout
            (`RankLostError`). One rank alone never waits and has no limit.
        max_load: without waiting for counts over symmetric memory, bound what a rank gets to so many
            times the even share of slots, which is `max_tokens * K`. A delivery is
            `[min(W * max_tokens, max_load * max_tokens * K), H]`, `tokens_per_expert` sizes the
            activations to `max_load * max_tokens * K` rows and padding, and eight ranks need 1.5
            and not 8 times the memory. Where a rank would get more, slots are left out, and the
            next dispatch or the next `step()` of a node that begins when the host has seen it
            raises RoutingError on every rank: output and gradients since then are incomplete.
        fp8, fp8_grad: send tokens quantised in the forward, and the gradients of the experts' output
            in the backward; see `Dispatcher.dispatch`.

    Raises:
        ConfigError: an unknown kind, an option that is no bool, or a kind that does not fit the
            group or `wait_for_counts`; no `max_tokens` where it is needed; `max_load` where the
            transport cannot heed it.
        EngineUnavailableError: `kind` names a library that is not there; the message says why.
    """
    check_options(kind=kind, fp8=fp8, fp8_grad=fp8_grad, wait_for_counts=wait_for_counts)
    _check_group(kind, group)
    if not wait_for_counts:
        check_max_tokens(max_tokens)
    check_max_load(max_load, wait_for_counts)
    if group is None:
        return LocalDispatcher(num_experts, fp8, fp8_grad)
    bound = None if wait_for_counts else max_tokens
    dispatcher, why = _chosen(kind, num_experts, group, bound, max_load)
    dispatcher.fp8, dispatcher.fp8_grad = fp8, fp8_grad
    _announce(dispatcher, why, bound)
    return dispatcher


def check_options(
    *,
    kind: object = "auto",
    fp8: object = False,
    fp8_grad: object = False,
    wait_for_counts: object = True,
    max_tokens: object = None,
    max_load: object = None,
) -> None:
    """Raise ConfigError for a value that `make_dispatcher` refuses whatever the group is."""
    expect(kind in KINDS, ConfigError, f"kind is {kind!r}; needed: one of {KINDS}")
    check_forms(fp8, fp8_grad)
    words = f"wait_for_counts is {wait_for_counts!r}; needed: True or False"
    expect(isinstance(wait_for_counts, bool), ConfigError, words)
    if max_tokens is not None:
        check_max_tokens(max_tokens)
    check_max_load(max_load, wait_for_counts=False)


def _check_group(kind: str, group: Any) -> None:
    needs_none = kind in ("auto", "local")
    alone = f"kind {kind!r} needs a group of ranks; group is None"
    expect(group is not None or needs_none, ConfigError, alone)
    words = "kind 'local' is for one rank; a group was given"
    expect(group is None or kind != "local", ConfigError, words)


def _announce(dispatcher: Dispatcher, why: str, bound: int | None) -> None:
    # A library that is installed and cannot be used is news to whoever installed it.
    level = logging.WARNING if "cannot serve" in why else logging.INFO
    if bound is not None and not isinstance(dispatcher, LocalDispatcher):
        why += f"; without waiting for counts: room for {bound} tokens of every rank"
    line = "expert parallelism over %s: %d experts, %d here (%s)"
    experts = dispatcher.num_experts, dispatcher.num_local_experts
    logger.log(level, line, dispatcher.name, *experts, why)


def _chosen(
    kind: str, num_experts: int, group: Any, bound: int | None, max_load: float | None
) -> tuple[Dispatcher, str]:
    """The dispatcher, and the reason for the log line; bound: None where the host waits for counts."""
    if kind == "auto" and group_shape(group)[0] == 1:
        return LocalDispatcher(num_experts), "a group of one"
    problem = ""
    if kind in ("auto", "symmetric"):
        problem = (
            peers_problem(group) if is_gpu_group(group) else "the group has no NCCL, so no GPUs"
        )
        if not problem:
            why = "as asked for" if kind == "symmetric" else "the ranks map each other's memory"
            return _symmetric(num_experts, group, bound, max_load), why
        words = f"symmetric memory cannot be used: {problem}"
        expect(kind == "auto", EngineUnavailableError, words)
    library, why = None, "as asked for"
    if kind == "auto":
        library, why = _usable_library(group, bound, problem)
    elif kind == "deepep":
        library = _required_library(group)
    words = (
        f"max_load is {max_load!r}, and only symmetric memory heeds it; it was not chosen ({why})"
    )
    expect(max_load is None, ConfigError, words)
    made = _collective if library is None else partial(_deepep, library)
    return made(num_experts, group, bound), why


def _usable_library(group: Any, bound: int | None, apart: str) -> tuple[Any, str]:
    """DeepEP where it can serve the group, else None; apart: why symmetric memory cannot.

    The reason comes with either, because the log line must tell a user why the fast library was not
    taken.
    """
    if not is_gpu_group(group):
        return None, apart
    apart = f"no symmetric memory: {apart}"
    library, missing = find_library()
    if library is None:
        return None, f"no DeepEP: {missing}; {apart}"
    ranks = group_shape(group)[0]
    problem = buffer_problem(library, ranks)
    if not problem and bound is not None:
        problem = worst_case_problem(library, ranks)
    if problem:
        return None, f"DeepEP's {problem}; {apart}"
    return library, f"DeepEP is installed; {apart}"


def _required_library(group: Any) -> Any:
    library, why = find_library()
    if library is None:
        raise EngineUnavailableError(f"DeepEP is not available: {why}")
    if problem := buffer_problem(library, group_shape(group)[0]):
        raise EngineUnavailableError(f"DeepEP cannot be used: its {problem}")
    return library


def _collective(num_experts: int, group: Any, bound: int | None) -> Dispatcher:
    exchange = GroupExchange(group)
    if bound is None:
        return Dispatcher(CollectiveTransport(num_experts, exchange))
    return Dispatcher(FixedSizeTransport(num_experts, exchange, bound))


def _symmetric(
    num_experts: int, group: Any, bound: int | None, max_load: float | None
) -> Dispatcher:
    limit = None if bound is None else RowLimit(bound, partial(GroupExchange, group), max_load)
    memory = partial(memory_of, group)
    return Dispatcher(SymmetricTransport(num_experts, group_shape(group), memory, limit=limit))


def _deepep(library: Any, num_experts: int, group: Any, bound: int | None) -> Dispatcher:
    limit = None if bound is None else RowLimit(bound, partial(GroupExchange, group))
    return Dispatcher(DeepEPTransport(num_experts, group, library, limit=limit))
