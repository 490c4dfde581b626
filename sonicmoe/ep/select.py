"""Chooses the dispatcher and logs the choice with its reason, in one line."""

from __future__ import annotations

import logging
from typing import Any

from ..errors import ConfigError, EngineUnavailableError, expect
from ..interop import IS_PADDLE
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
)
from .dispatcher import Dispatcher, TransportDispatcher
from .fleet import FleetDispatcher, find_fleet
from .fp8_rows import check_fp8
from .interface import Transport
from .local import LocalDispatcher

if IS_PADDLE:
    from .exchange_paddle import PaddleExchange as GroupExchange
    from .exchange_paddle import is_gpu_group
else:
    from .exchange_torch import TorchExchange as GroupExchange  # type: ignore[assignment]
    from .exchange_torch import is_gpu_group

logger = logging.getLogger("sonicmoe")

KINDS = ("auto", "local", "collective", "deepep", "fleet")


def make_dispatcher(
    num_experts: int,
    group: Any = None,
    *,
    kind: str = "auto",
    max_tokens: int = 0,
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
        max_tokens: the most tokens that a rank dispatches at once, the same on all ranks. Only an
            ElasticBuffer needs it.
        fp8, fp8_grad: send tokens quantised in the forward, and the gradients of the experts' output
            in the backward: True, or "row" for one scale per row; see `Dispatcher.dispatch`. Fleet's
            own functions and an ElasticBuffer send bfloat16 only.

    Raises:
        ConfigError: an unknown kind, or one that does not fit the group, `fp8` or `fp8_grad`.
        EngineUnavailableError: `kind` names a library that is not there; the message says why.
    """
    expect(kind in KINDS, ConfigError, f"kind is {kind!r}; needed: one of {KINDS}")
    check_fp8(fp8)
    check_fp8(fp8_grad, "fp8_grad")
    if group is None:
        expect(
            kind in ("auto", "local"),
            ConfigError,
            f"kind {kind!r} needs a group of ranks; group is None",
        )
        return LocalDispatcher(num_experts, fp8, fp8_grad)
    expect(kind != "local", ConfigError, "kind 'local' is for one rank; a group was given")
    level = logging.INFO
    if kind == "auto":
        dispatcher, why = _auto(num_experts, group, max_tokens)
        # A library that is installed and cannot be used is news to whoever installed it.
        if "cannot serve" in why:
            level = logging.WARNING
    else:
        dispatcher, why = _named(kind, num_experts, group, max_tokens), "as asked for"
    expect(
        not ((fp8 or fp8_grad) and dispatcher.bf16_only),
        ConfigError,
        f"fp8 is {fp8!r}, fp8_grad is {fp8_grad!r}, and {dispatcher.name} sends bfloat16 only; needed: both False, or "
        f"another kind than {kind!r}",
    )
    dispatcher.fp8, dispatcher.fp8_grad = fp8, fp8_grad
    logger.log(
        level,
        "expert parallelism over %s: %d experts, %d here (%s)",
        dispatcher.name,
        num_experts,
        dispatcher.num_local_experts,
        why,
    )
    return dispatcher


def _auto(num_experts: int, group: Any, max_tokens: int) -> tuple[Dispatcher, str]:
    """The dispatcher, and the reason for the log line."""
    # Every branch returns the reason for its choice, because the log line must tell a user why the
    # fast library was not taken.
    if group_shape(group)[0] == 1:
        return LocalDispatcher(num_experts), "a group of one"
    if not is_gpu_group(group):
        return _collective(num_experts, group), "the group has no NCCL, which DeepEP needs"
    no_fleet = ""
    if IS_PADDLE:
        fleet, no_fleet = find_fleet()
        if fleet is not None:
            return FleetDispatcher(
                num_experts, group, fleet
            ), "PaddleFleet is installed with DeepEP"
        no_fleet = f"no PaddleFleet: {no_fleet}; "
    library, no_library = find_library()
    if library is None:
        return _collective(num_experts, group), f"{no_fleet}no DeepEP: {no_library}"
    kind, problems = _usable_buffer(library, group, max_tokens)
    if kind is None:
        return _collective(num_experts, group), f"{no_fleet}DeepEP's {problems}"
    why = f"{no_fleet}DeepEP is installed" + (f"; its {problems}" if problems else "")
    return TransportDispatcher(_deepep(kind, library, num_experts, group, max_tokens)), why


def _collective(num_experts: int, group: Any) -> Dispatcher:
    return TransportDispatcher(CollectiveTransport(num_experts, GroupExchange(group)))


def _named(kind: str, num_experts: int, group: Any, max_tokens: int) -> Dispatcher:
    if kind == "fleet":
        functions, why = find_fleet()
        if functions is None:
            raise EngineUnavailableError(f"PaddleFleet's fused dispatch is not available: {why}")
        return FleetDispatcher(num_experts, group, functions)
    if kind == "deepep":
        library, why = find_library()
        if library is None:
            raise EngineUnavailableError(f"DeepEP is not available: {why}")
        buffer, problems = _usable_buffer(library, group, max_tokens)
        # An ElasticBuffer without a size has a message of its own.
        if buffer is None and library.kinds != (ELASTIC,):
            raise EngineUnavailableError(f"DeepEP cannot be used: its {problems}")
        return TransportDispatcher(
            _deepep(buffer or ELASTIC, library, num_experts, group, max_tokens)
        )
    return _collective(num_experts, group)


def _usable_buffer(library: DeepEPLibrary, group: Any, max_tokens: int) -> tuple[str | None, str]:
    """The first of the library's buffers that can serve the group, None if there is none; and why
    those before it cannot.
    """
    problems: list[str] = []
    for kind in library.kinds:
        if kind == LEGACY:
            problem = legacy_problem(library.module, group_shape(group)[0])
        else:
            # An ElasticBuffer is sized once for the fullest rank. That number cannot be guessed
            # here: a guess below it would fail in the middle of a run.
            problem = "" if max_tokens > 0 else "ElasticBuffer needs max_tokens"
        if not problem:
            return kind, "; ".join(problems)
        problems.append(problem)
    return None, "; ".join(problems)


def _deepep(
    kind: str, library: DeepEPLibrary, num_experts: int, group: Any, max_tokens: int
) -> Transport:
    if kind == ELASTIC:
        return ElasticTransport(num_experts, group, library.module, max_tokens=max_tokens)
    return LegacyTransport(num_experts, group, library.module)
