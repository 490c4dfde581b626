"""Chooses the dispatcher and logs the choice with its reason, in one line."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, NamedTuple

from ..errors import ConfigError, EngineUnavailableError, expect
from ..interop import IS_PADDLE
from ..log import logger
from .collective import CollectiveTransport
from .deepep import (
    ELASTIC,
    LEGACY,
    DeepEPLibrary,
    ElasticTransport,
    LegacyTransport,
    find_library,
    group_shape,
    legacy_problem,
    worst_case_problem,
)
from .dispatcher import Dispatcher, LocalDispatcher, TransportDispatcher
from .fixed_size import FixedSizeTransport
from .fleet import FleetDispatcher, find_fleet
from .fp8_rows import check_forms
from .interface import Transport
from .row_limit import RowLimit, check_max_tokens

if IS_PADDLE:
    from .exchange_paddle import PaddleExchange as GroupExchange
    from .exchange_paddle import is_gpu_group
else:
    from .exchange_torch import TorchExchange as GroupExchange  # type: ignore[assignment]
    from .exchange_torch import is_gpu_group

FLEET_WAITS = "Fleet's fused_dispatch always waits for counts"

KINDS = ("auto", "local", "collective", "deepep", "fleet")


class _Sizes(NamedTuple):
    """What the caller says of the sizes of deliveries."""

    max_tokens: int
    wait_for_counts: bool


def make_dispatcher(
    num_experts: int,
    group: Any = None,
    *,
    kind: str = "auto",
    max_tokens: int = 0,
    wait_for_counts: bool = True,
    fp8: bool | str = False,
    fp8_grad: bool | str = False,
) -> Dispatcher:
    """A dispatcher for `num_experts` experts over a group; one serves all MoE layers of a model.

    Args:
        num_experts: of the whole group.
        group: process group (torch) or communication group (Paddle); None is one rank without a
            group.
        kind: "auto": local without a group or in a group of one, collectives over a CPU group, else
            Fleet's or DeepEP's own kernels where installed, else collectives. Or one of "local",
            "collective", "deepep", "fleet".
        max_tokens: the most tokens that a rank dispatches at once, the same on all ranks. Needed by
            an ElasticBuffer, and without waiting for counts.
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
        fp8, fp8_grad: send tokens quantised in the forward, and the gradients of the experts' output
            in the backward: True, or "row" for one scale per row; see `Dispatcher.dispatch`. Fleet's
            own functions and an ElasticBuffer send bfloat16 only.

    Raises:
        ConfigError: an unknown kind, or one that does not fit the group, `fp8`, `fp8_grad` or
            `wait_for_counts`; no `max_tokens` where it is needed.
        EngineUnavailableError: `kind` names a library that is not there; the message says why.
    """
    sizes = _Sizes(max_tokens, wait_for_counts)
    _check(kind, group, fp8, fp8_grad, sizes)
    if group is None:
        return LocalDispatcher(num_experts, fp8, fp8_grad)
    if kind == "auto":
        dispatcher, why = _auto(num_experts, group, sizes)
    else:
        dispatcher, why = _named(kind, num_experts, group, sizes), "as asked for"
    if (fp8 or fp8_grad) and dispatcher.bf16_only:
        raise ConfigError(
            f"fp8 is {fp8!r}, fp8_grad is {fp8_grad!r}, and {dispatcher.name} sends bfloat16 only; "
            f"needed: both False, or another kind than {kind!r}"
        )
    dispatcher.fp8, dispatcher.fp8_grad = fp8, fp8_grad
    _announce(dispatcher, why, sizes)
    return dispatcher


def _check(kind: str, group: Any, fp8: bool | str, fp8_grad: bool | str, sizes: _Sizes) -> None:
    expect(kind in KINDS, ConfigError, f"kind is {kind!r}; needed: one of {KINDS}")
    check_forms(fp8, fp8_grad)
    needs_none = kind in ("auto", "local")
    alone = f"kind {kind!r} needs a group of ranks; group is None"
    expect(group is not None or needs_none, ConfigError, alone)
    words = "kind 'local' is for one rank; a group was given"
    expect(group is None or kind != "local", ConfigError, words)
    words = f"wait_for_counts is {sizes.wait_for_counts!r}; needed: True or False"
    expect(isinstance(sizes.wait_for_counts, bool), ConfigError, words)
    if not sizes.wait_for_counts:
        check_max_tokens(sizes.max_tokens)


def _announce(dispatcher: Dispatcher, why: str, sizes: _Sizes) -> None:
    # A library that is installed and cannot be used is news to whoever installed it.
    level = logging.WARNING if "cannot serve" in why else logging.INFO
    if not (sizes.wait_for_counts or isinstance(dispatcher, LocalDispatcher)):
        why += f"; without waiting for counts: room for {sizes.max_tokens} tokens of every rank"
    line = "expert parallelism over %s: %d experts, %d here (%s)"
    experts = dispatcher.num_experts, dispatcher.num_local_experts
    logger.log(level, line, dispatcher.name, *experts, why)


def _auto(num_experts: int, group: Any, sizes: _Sizes) -> tuple[Dispatcher, str]:
    """The dispatcher, and the reason for the log line."""
    # Every branch returns the reason for its choice, because the log line must tell a user why the
    # fast library was not taken.
    if group_shape(group)[0] == 1:
        return LocalDispatcher(num_experts), "a group of one"
    if not is_gpu_group(group):
        return _collective(num_experts, group, sizes), "the group has no NCCL, which DeepEP needs"
    no_fleet = ""
    if IS_PADDLE:
        fleet, no_fleet = find_fleet()
        if fleet is not None and sizes.wait_for_counts:
            dispatcher = FleetDispatcher(num_experts, group, fleet)
            return dispatcher, "PaddleFleet is installed with DeepEP"
        no_fleet = f"no PaddleFleet: {no_fleet}; " if fleet is None else f"{FLEET_WAITS}; "
    library, no_library = find_library()
    if library is None:
        return _collective(num_experts, group, sizes), f"{no_fleet}no DeepEP: {no_library}"
    kind, problems = _usable_buffer(library, group, sizes)
    if kind is None:
        return _collective(num_experts, group, sizes), f"{no_fleet}DeepEP's {problems}"
    why = f"{no_fleet}DeepEP is installed" + (f"; its {problems}" if problems else "")
    return TransportDispatcher(_deepep(kind, library, num_experts, group, sizes)), why


def _collective(num_experts: int, group: Any, sizes: _Sizes) -> Dispatcher:
    exchange = GroupExchange(group)
    if sizes.wait_for_counts:
        return TransportDispatcher(CollectiveTransport(num_experts, exchange))
    return TransportDispatcher(FixedSizeTransport(num_experts, exchange, sizes.max_tokens))


def _named(kind: str, num_experts: int, group: Any, sizes: _Sizes) -> Dispatcher:
    if kind == "collective":
        return _collective(num_experts, group, sizes)
    if kind == "fleet":
        needed = "True, or kind 'deepep' or 'collective'"
        unable = f"kind 'fleet' cannot: {FLEET_WAITS}"
        words = f"wait_for_counts is False, and {unable}; needed: {needed}"
        expect(sizes.wait_for_counts, ConfigError, words)
        functions, why = find_fleet()
        if functions is None:
            raise EngineUnavailableError(f"PaddleFleet's fused dispatch is not available: {why}")
        return FleetDispatcher(num_experts, group, functions)
    library, why = find_library()
    if library is None:
        raise EngineUnavailableError(f"DeepEP is not available: {why}")
    buffer, problems = _usable_buffer(library, group, sizes)
    # A buffer that would serve if the host waited: the caller can have it by saying so.
    if buffer is None and _usable_buffer(library, group, _Sizes(sizes.max_tokens, True))[0]:
        needed = "needed: True, or kind 'collective'"
        raise ConfigError(f"wait_for_counts is False, and DeepEP's {problems}; {needed}")
    # An ElasticBuffer without a size has a message of its own.
    if buffer is None and library.kinds != (ELASTIC,):
        raise EngineUnavailableError(f"DeepEP cannot be used: its {problems}")
    return TransportDispatcher(_deepep(buffer or ELASTIC, library, num_experts, group, sizes))


def _usable_buffer(library: DeepEPLibrary, group: Any, sizes: _Sizes) -> tuple[str | None, str]:
    """The first of the library's buffers that can serve the group, None if there is none; and why
    those before it cannot.
    """
    problems: list[str] = []
    for kind in library.kinds:
        if kind == LEGACY:
            ranks = group_shape(group)[0]
            problem = legacy_problem(library.module, ranks)
            if not (problem or sizes.wait_for_counts):
                problem = worst_case_problem(library.module, ranks)
        else:
            # An ElasticBuffer is sized once for the fullest rank. That number cannot be guessed
            # here: a guess below it would fail in the middle of a run.
            problem = "" if sizes.max_tokens > 0 else "ElasticBuffer needs max_tokens"
        if not problem:
            return kind, "; ".join(problems)
        problems.append(problem)
    return None, "; ".join(problems)


def _deepep(
    kind: str, library: DeepEPLibrary, num_experts: int, group: Any, sizes: _Sizes
) -> Transport:
    if kind == ELASTIC:
        return ElasticTransport(num_experts, group, library.module, **sizes._asdict())
    limit = None
    if not sizes.wait_for_counts:
        limit = RowLimit(sizes.max_tokens, partial(GroupExchange, group))
    return LegacyTransport(num_experts, group, library.module, limit=limit)
