"""Several ranks: the experts and tokens of each, and the few collectives that the learners need.

All ranks of a run share the experts (expert parallelism) and split the batch; everything but the
experts is replicated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from sonicmoe.errors import ConfigError

if TYPE_CHECKING:
    from sonicmoe.ep import Dispatcher

# What a launcher tells a rank: own rank, number of ranks, index on this host, where the others are.
# torchrun is asked first. A launcher is recognised by the variable that counts its ranks.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"),
    (
        *("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
        *("PADDLE_RANK_IN_NODE", "PADDLE_TRAINER_ENDPOINTS"),
    ),
)
# The number between ".experts." and the next dot. Both are looked at and not matched, so a
# substitution replaces the number alone.
EXPERT_NAME = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


@dataclass(frozen=True)
class RankLayout:
    """A launcher's answers: own rank, number of ranks, index on this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    def local_experts(self, num_experts: int) -> range:
        """Global ids of the experts on this rank."""
        count = num_experts // self.world_size
        return range(self.rank * count, (self.rank + 1) * count)

    def shard(self, batch: np.ndarray) -> np.ndarray:
        """This rank's consecutive part of `[B, ...]`, of which all ranks have equal ones."""
        return np.split(batch, self.world_size)[self.rank]


def read_launch(environ: Mapping[str, str] | None = None) -> RankLayout:
    """What torchrun or paddle.distributed.launch put into the environment; one rank where neither
    did. ConfigError where the variables are incomplete or not numbers.
    """
    environ = os.environ if environ is None else environ
    for rank, size, local, others in LAUNCHERS:
        if size not in environ:
            continue
        try:
            own, _ = int(environ[rank]), environ[others]
            return RankLayout(own, int(environ[size]), int(environ.get(local, own)))
        except (KeyError, ValueError) as error:
            words = f"the launcher's environment is incomplete ({error})"
            raise ConfigError(f"{words}; needed: {rank}, {size}, {others}") from None
    return RankLayout()


class Ranks:
    """Collectives over ranks; every rank calls them in one order. Sums are the same bits on every
    rank and in every run.

    This one is of a single rank, for which every sum is its own result already.
    """

    def __init__(self, layout: RankLayout | None = None, max_tokens: int = 0) -> None:
        """`max_tokens`: the most tokens that a rank dispatches at once."""
        self.layout, self._max_tokens = layout or RankLayout(), max_tokens

    def dispatcher(self, num_experts: int) -> Dispatcher:
        from sonicmoe.ep import LocalDispatcher, make_dispatcher

        if self.layout.world_size == 1:
            return LocalDispatcher(num_experts)
        return make_dispatcher(num_experts, self._group(), max_tokens=self._max_tokens)

    def sum(self, tensors: list[Any]) -> None:
        """Add fp32 tensors over all ranks, in place and in one message."""

    def gather(self, values: np.ndarray) -> list[np.ndarray]:
        """Equally long fp32 vectors of all ranks, in their order."""
        return [values]

    def largest(self, value: int) -> int:
        """The largest of all ranks' numbers (below 2^24)."""
        return value

    def close(self) -> None:
        """Leave the ranks; the last call."""

    def _group(self) -> Any:
        """The group of all ranks, as the framework has it."""


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


def names_on_all_ranks(name: str, layout: RankLayout, num_experts: int) -> list[str]:
    """The names of the arrays of all ranks that have the place of this one: those of experts differ,
    by equally many ids a rank.
    """
    per_rank = num_experts // layout.world_size

    def on(rank: int) -> str:
        shift = (rank - layout.rank) * per_rank
        return EXPERT_NAME.sub(lambda match: str(int(match[0]) + shift), name)

    return [on(rank) for rank in range(layout.world_size)] if is_expert(name) else [name]


def gather_state(
    local: Mapping[str, np.ndarray], ranks: Ranks, num_experts: int
) -> dict[str, np.ndarray]:
    """All experts' arrays from those of this rank's; a collective."""
    if ranks.layout.world_size == 1:
        return dict(local)
    # All experts of this rank travel as one vector. Every rank holds the same number of experts of
    # the same shapes, so this rank's names and sizes also tell how to cut the others' vectors.
    mine = [name for name in local if is_expert(name)]
    pieces = ranks.gather(np.concatenate([local[name].reshape(-1) for name in mine]))
    ends = np.cumsum([local[name].size for name in mine])[:-1]
    # Everything but the experts is the same on all ranks.
    whole = {name: array for name, array in local.items() if not is_expert(name)}
    of_ranks = [np.split(piece, ends) for piece in pieces]
    for place, name in enumerate(mine):
        names = names_on_all_ranks(name, ranks.layout, num_experts)
        for there, arrays in zip(names, of_ranks, strict=True):
            whole[there] = arrays[place].reshape(local[name].shape)
    return whole
