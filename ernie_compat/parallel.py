"""Several ranks: the experts and tokens of each, and the few collectives that the learners need.

W ranks form W / N expert-parallel groups of N consecutive ranks; every group holds all experts
once. The batch is split over all W ranks (data parallel); everything but the experts is replicated.
A rank's experts are replicated once per group.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sonicmoe.errors import ConfigError, expect

if TYPE_CHECKING:
    from sonicmoe.ep import Dispatcher

# Everything a launcher may tell a rank: torchrun, then paddle.distributed.launch. Nothing else of
# the environment decides a run.
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PADDLE_VARIABLES = (
    *("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    *("PADDLE_TRAINER_ENDPOINTS", "PADDLE_CURRENT_ENDPOINT"),
)
# The number between ".experts." and the next dot. Both are looked at and not matched, so a
# substitution replaces the number alone.
EXPERT_NAME = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class Launch:
    """A launcher's answers: own rank, number of ranks, index on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


@dataclass(frozen=True)
class RankLayout:
    """Position of one rank. ConfigError where the ranks do not split into groups of `ep_size`."""

    launch: Launch
    ep_size: int

    def __post_init__(self) -> None:
        world = self.world_size
        alone = "; start it with torchrun or paddle.distributed.launch" if world == 1 else ""
        expect(
            self.ep_size > 0 and world % self.ep_size == 0,
            ConfigError,
            f"--ep is {self.ep_size} and there {'is 1 rank' if world == 1 else f'are {world} ranks'}; "
            f"needed: a number of ranks that is a multiple of --ep{alone}",
        )

    @property
    def rank(self) -> int:
        """Own rank among all."""
        return self.launch.rank

    @property
    def world_size(self) -> int:
        return self.launch.world_size

    @property
    def ep_rank(self) -> int:
        """Own rank in the expert-parallel group."""
        # Groups are consecutive ranks: rank r is in group r // N at place r % N.
        return self.rank % self.ep_size

    @property
    def ep_groups(self) -> list[list[int]]:
        """Ranks of every expert-parallel group."""
        return [
            list(range(first, first + self.ep_size))
            for first in range(0, self.world_size, self.ep_size)
        ]

    @property
    def replica_groups(self) -> list[list[int]]:
        """Ranks that hold the same experts."""
        # Equal places in all groups hold equal experts, so these ranks are N apart.
        return [list(range(first, self.world_size, self.ep_size)) for first in range(self.ep_size)]

    def local_experts(self, num_experts: int) -> range:
        """Global ids of the experts on this rank."""
        count = num_experts // self.ep_size
        return range(self.ep_rank * count, (self.ep_rank + 1) * count)

    def shard(self, batch: np.ndarray) -> np.ndarray:
        """This rank's consecutive part of `[B, ...]`."""
        # Consecutive parts of equal size; `RunConfig.require_world` has checked that they come out
        # even.
        return np.split(batch, self.world_size)[self.rank]


class Parallel:
    """Collectives over ranks; every rank calls them in one order. Sums are the same bits on every
    rank and in every run.

    This one is of a single rank, for which every sum is its own result already.
    """

    _world_group: Any = None
    _ep_group: Any = None
    _replica_group: Any = None

    def __init__(self, layout: RankLayout | None = None) -> None:
        """`layout` None: one rank, all experts."""
        self.layout = layout or RankLayout(Launch(), 1)

    def dispatcher(self, num_experts: int) -> Dispatcher:
        from sonicmoe.ep import LocalDispatcher

        return LocalDispatcher(num_experts)

    def sum_world(self, tensors: list[Any]) -> None:
        """Add fp32 tensors over all ranks, in place."""
        self._sum(tensors, self._world_group)

    def sum_replicas(self, tensors: list[Any]) -> None:
        """Add fp32 tensors over the ranks that hold the same experts, in place."""
        self._sum(tensors, self._replica_group)

    def sum_ep(self, tensors: list[Any]) -> None:
        """Add fp32 tensors over the expert-parallel group, in place."""
        self._sum(tensors, self._ep_group)

    def gather_ep(self, values: np.ndarray) -> list[np.ndarray]:
        """Equally long fp32 vectors of the expert-parallel group, in rank order."""
        return [values]

    def largest(self, value: int) -> int:
        """The largest of all ranks' numbers (below 2^24)."""
        return value

    def close(self) -> None:
        """Leave the ranks; the last call."""

    def _sum(self, tensors: list[Any], group: Any) -> None:
        """In place, in one message."""


class JoinedRanks(Parallel):
    """The half that the frameworks share of several ranks; they join the groups and add."""

    def __init__(self, layout: RankLayout, max_tokens: int) -> None:
        """`max_tokens`: most tokens a rank dispatches at once."""
        super().__init__(layout)
        self._max_tokens = max_tokens

    def dispatcher(self, num_experts: int) -> Dispatcher:
        from sonicmoe.ep import make_dispatcher

        # Every rank has all experts then: tokens stay where they are, although there are several
        # ranks.
        if self.layout.ep_size == 1:
            return super().dispatcher(num_experts)
        return make_dispatcher(num_experts, self._ep_group, max_tokens=self._max_tokens)


def read_launch(environ: Mapping[str, str] | None = None) -> Launch:
    """The `Launch` that torchrun or paddle.distributed.launch put into the environment; one rank
    where neither did. ConfigError where the variables are incomplete or not numbers.
    """
    environ = os.environ if environ is None else environ
    try:
        # torchrun is asked first. A launcher is recognised by the variable that counts its ranks.
        if "WORLD_SIZE" in environ:
            rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
            _ = environ["MASTER_ADDR"]  # where PyTorch looks for rank 0
            return Launch(rank, world, int(environ.get("LOCAL_RANK", rank)))
        if "PADDLE_TRAINERS_NUM" in environ:
            rank, world = int(environ["PADDLE_TRAINER_ID"]), int(environ["PADDLE_TRAINERS_NUM"])
            _ = environ["PADDLE_TRAINER_ENDPOINTS"]  # where Paddle looks for the others
            return Launch(rank, world, int(environ.get("PADDLE_RANK_IN_NODE", rank)))
    except (KeyError, ValueError) as error:
        needed = TORCHRUN_VARIABLES if "WORLD_SIZE" in environ else PADDLE_VARIABLES
        raise ConfigError(
            f"the launcher's environment is incomplete ({error}); needed: {', '.join(needed)}"
        ) from None
    return Launch()


@contextmanager
def lost_ranks_named(layout: RankLayout, library: str) -> Iterator[None]:
    """Say of a collective that broke that another rank is gone. Ranks that wait for one that is
    gone are ended by the launcher, torchrun or paddle.distributed.launch, which watches all of
    them. RankLostError has the collective's error, in one sentence.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        if layout.world_size > 1:
            # Not before, because the package imports the framework, which is not chosen yet.
            from sonicmoe.ep.interface import raise_lost_rank

            raise_lost_rank(error, "training", library, layout.rank, layout.world_size)
        raise


def is_expert(name: str) -> bool:
    """Whether an array or parameter of this name belongs to one expert."""
    return EXPERT_NAME.search(name) is not None


def on_rank(name: str, shift: int) -> str:
    """The name of the same array of the expert `shift` ids further."""
    return EXPERT_NAME.sub(lambda match: str(int(match[0]) + shift), name)


def whole_shapes(
    local: Mapping[str, tuple[int, ...]], parallel: Parallel, num_experts: int
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all ranks' arrays from this rank's."""
    layout = parallel.layout
    per_rank = num_experts // layout.ep_size
    whole: dict[str, tuple[int, ...]] = {}
    for name, shape in local.items():
        # All ranks have equally many experts of the same shapes, and everything else in common.
        ranks = range(layout.ep_size) if is_expert(name) else [layout.ep_rank]
        for rank in ranks:
            whole[on_rank(name, (rank - layout.ep_rank) * per_rank)] = tuple(shape)
    return whole


def gather_state(
    local: Mapping[str, np.ndarray], parallel: Parallel, num_experts: int
) -> dict[str, np.ndarray]:
    """All experts' arrays from those of this rank's; a collective of the expert-parallel group."""
    layout = parallel.layout
    if layout.ep_size == 1:
        return dict(local)
    # All experts of this rank travel as one vector. Every rank holds the same number of experts of
    # the same shapes, so this rank's names and sizes also tell how to cut the others' vectors.
    mine = [name for name in local if is_expert(name)]
    pieces = parallel.gather_ep(np.concatenate([local[name].reshape(-1) for name in mine]))
    ends = np.cumsum([local[name].size for name in mine])
    # Everything but the experts is the same on all ranks.
    whole = {name: array for name, array in local.items() if not is_expert(name)}
    per_rank = num_experts // layout.ep_size
    for rank, piece in enumerate(pieces):
        for name, values in zip(mine, np.split(piece, ends[:-1]), strict=True):
            # The i-th expert of another rank has an id that is higher by the distance of the ranks
            # times the experts per rank.
            there = on_rank(name, (rank - layout.ep_rank) * per_rank)
            whole[there] = values.reshape(local[name].shape)
    return whole
