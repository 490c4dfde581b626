"""Upstream SonicMoE's configuration of expert parallelism, and the dispatchers of `ep/` that
`functional/ep.py` keeps.
"""

from __future__ import annotations

import atexit
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch.distributed as dist

from .enums import member_of
from .ep import Dispatcher, make_dispatcher
from .errors import ConfigError, EngineUnavailableError
from .refusals import need_type


class DispatchMode(StrEnum):
    """How tokens reach the ranks of their experts. Results do not depend on it.

    AG: every token goes to every rank, and the host does not wait for counts; every rank has as
    many tokens. The others: a token goes once to each rank that holds one of its experts.
    """

    AG_DISPATCH_TRITON = "AG_DISPATCH_TRITON"
    AG_DISPATCH_MULTIMEM_TRITON = "AG_DISPATCH_MULTIMEM_TRITON"
    A2A_DISPATCH_TRITON = "A2A_DISPATCH_TRITON"
    RANK_DEDUP_DISPATCH_TRITON = "RANK_DEDUP_DISPATCH_TRITON"
    HIER_NODE_DEDUP_DISPATCH_GIN = "HIER_NODE_DEDUP_DISPATCH_GIN"

    @property
    def gathers(self) -> bool:
        """Whether it is one of AG."""
        return self.value.startswith("AG_")


class CombineMode(StrEnum):
    """How results come back. Decides nothing: they return along the routes of the dispatch."""

    A2A_COMBINE_TRITON = "A2A_COMBINE_TRITON"
    RS_COMBINE_TRITON = "RS_COMBINE_TRITON"
    RS_COMBINE_MULTIMEM_TRITON = "RS_COMBINE_MULTIMEM_TRITON"
    RANK_DEDUP_COMBINE_TRITON = "RANK_DEDUP_COMBINE_TRITON"
    HIER_NODE_DEDUP_COMBINE_GIN = "HIER_NODE_DEDUP_COMBINE_GIN"


@dataclass(frozen=True)
class RuntimeEPConfig:
    """W ranks in the group and K slots of a token, which a call must have, and how rows travel.

    Raises:
        ConfigError: an unknown mode.
    """

    W: int
    K: int
    dispatch_mode: DispatchMode = DispatchMode.A2A_DISPATCH_TRITON
    combine_mode: CombineMode = CombineMode.A2A_COMBINE_TRITON

    def __post_init__(self) -> None:
        # A member equals its value, so that a value may stay one.
        member_of(DispatchMode, self.dispatch_mode, "dispatch_mode")
        member_of(CombineMode, self.combine_mode, "combine_mode")


class NetworkProfiler:
    """Upstream's search for the fastest modes; here there is nothing to choose."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Raises EngineUnavailableError."""
        raise EngineUnavailableError(
            "NetworkProfiler is not there: leave ep_config out. Tokens travel over DeepEP where it "
            "is installed, else over the collectives of the group, and the log says which"
        )


def default_group() -> Any:
    """All ranks, where there are ranks."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def world_size(group: Any) -> int:
    """How many ranks it has; None is one.

    Raises:
        ConfigError: it is no process group.
    """
    if group is None:
        return 1
    need_type("group", group, dist.ProcessGroup, "a process group, or None", ConfigError)
    return dist.get_world_size(group)


# By group, experts, whether the host waits, and options: the dispatcher, and the most tokens it has
# room for.
_kept: dict[tuple[Any, ...], tuple[Dispatcher, int]] = {}


def dispatcher_of(
    num_experts: int, group: Any, max_tokens: int | None, /, **options: Any
) -> Dispatcher:
    """One for all layers of these experts; `max_tokens` where the host must not wait for counts;
    options: others of `make_dispatcher`.

    Raises:
        RoutingError: the experts cannot be split evenly over the ranks.
        ConfigError, EngineUnavailableError: as of `make_dispatcher`.
    """
    key = group, num_experts, max_tokens is None, *sorted(options.items())
    dispatcher, room = _kept.get(key, (None, 0))
    if dispatcher is None or room < (max_tokens or 0):
        room = max_tokens or 0
        # A rank without tokens has no bound, and every rank has as many as it.
        waits = {} if not room else {"wait_for_counts": False, "max_tokens": room}
        dispatcher = make_dispatcher(num_experts, group, **waits, **options)  # type: ignore[arg-type]
        _kept[key] = dispatcher, room
    return dispatcher


def clear_ep_cache() -> None:
    """Forget the dispatchers, and with them the buffers of DeepEP; needed before a process group
    is destroyed and another one made.
    """
    _kept.clear()


# Before the libraries that these hold are taken down.
atexit.register(clear_ep_cache)
