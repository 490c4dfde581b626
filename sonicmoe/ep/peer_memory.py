"""Memory of every rank of a group that all of them have mapped, and what its kernels tell the host.

One `PeerMemory` serves all dispatchers of a group, because only one exchange runs at a time. It
grows where an exchange needs more. Every rank knows then that all ranks need it, so they grow it
together. PyTorch's symmetric memory (`torch.distributed._symmetric_memory`) maps it.
"""

from __future__ import annotations

import functools
import importlib
import json
import platform
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..errors import ConfigError, RoutingError, SonicMoEError, expect
from ..interop import IS_PADDLE, is_capturing
from ..late_errors import ask_later
from ..log import logger
from ..stream_order import StreamOrder
from .interface import raise_lost_rank

Tensor = torch.Tensor
# As in kernels/cuda/peer_rows.cu: ranks of a group, experts of all ranks, bytes before the halves.
MOST_RANKS, MOST_EXPERTS, HEAD = 8, 4096, 1024
LOST, OVERFLOW, ROWS = 0, 1, 2
TOKENS, SLOTS = ROWS + MOST_RANKS, ROWS + 2 * MOST_RANKS
_WATCH_S = 0.5  # between two looks for a lost rank; kernels wait for six of them
_SAID_BYTES = 2048  # of the words of a rank: two of 150 characters, six bytes each at most
_LOOK_EVERY = 4096  # looks at a word, between two questions whether the device still works


class Peers(ABC):
    """The ranks of one group, as a framework knows them."""

    name: str
    world_size: int
    rank: int
    timeout_s: float

    @abstractmethod
    def map(self, size: int) -> tuple[Sequence[int], Any]:
        """Zeroed memory of `size` bytes on every rank: the address of each as this rank has mapped
        it, and what keeps it. A collective, behind everything that any rank has launched.
        """

    @abstractmethod
    def words(self, count: int) -> Tensor:
        """int64 zeros of the host that kernels write."""

    @abstractmethod
    def check_device(self) -> None:
        """Raise the error of the device, if it has one."""


class Counts(NamedTuple):
    """What a dispatch tells the host: the most tokens of any rank, the rows of each, and the slots of
    each local expert.
    """

    most_tokens: int
    rows: list[int]
    slots: list[int]


class PeerMemory:
    """The buffers of a group.

    Attributes:
        table: int64 `[5 + W]` on the host, which every kernel call reads.
        most_tokens: for how many tokens of a rank dispatches that wait have room; the same on all
            ranks.
    """

    def __init__(self, peers: Peers) -> None:
        """Maps nothing before the first exchange."""
        self.peers, self.order = peers, StreamOrder()
        self.table = torch.zeros([5 + peers.world_size], dtype=torch.int64)
        self.most_tokens, self._sequence = 256, 0
        self._half_bytes, self._held = 0, list[Any]()
        self._captured = False
        self._words = peers.words(SLOTS + MOST_EXPERTS)
        # numpy reads the memory itself, whoever writes it.
        self._seen = self._words.numpy()

    def __reduce__(self) -> Any:
        raise ConfigError(
            "memory of a process group cannot be copied; needed: make_dispatcher again"
        )

    def reserve(self, half_bytes: int, like: Tensor) -> None:
        """Make room for an exchange of `half_bytes`, which all ranks reserve in the same call."""
        if half_bytes <= self._half_bytes:
            return
        words = "needed: one step of these sizes before the capture, which makes the buffers"
        expect(not is_capturing(like), ConfigError, f"a graph cannot hold larger buffers; {words}")
        # Room for a little more, so that sizes that vary from step to step end this soon.
        half = -(-half_bytes * 9 // 8 // 1024) * 1024 if self._half_bytes else half_bytes
        # Every rank has ended what reads the old memory when the new one is there.
        addresses, kept = self.peers.map(HEAD + 2 * half)
        # A captured graph holds the addresses of the memory before.
        self._held = [*(self._held if self._captured else ()), kept]
        self._half_bytes = half
        nanoseconds = int(self.peers.timeout_s * 1e9)
        values = self.peers.world_size, self.peers.rank, half, nanoseconds, self._words.data_ptr()
        self.table = torch.tensor([*values, *addresses], dtype=torch.int64)

    def enter(self, like: Tensor) -> int:
        """The current stream, whose handle is returned, is about to use the memory."""
        self.raise_lost()
        self._captured = self._captured or is_capturing(like)
        return self.order.enter(like)

    def next_sequence(self) -> int:
        """The number of a dispatch that waits for its counts; never 0."""
        self._sequence = self._sequence % 0x7FFFFFFE + 1
        return self._sequence

    def counts(self, sequence: int, local_experts: int) -> Counts:
        """Wait until the device has counted the dispatch of this number."""
        world, looks = self.peers.world_size, 0
        asked = _counted(world, local_experts)
        while not ((found := self._seen[asked]) >> 32 == sequence).all():
            looks += 1
            if looks % _LOOK_EVERY == 0:
                self.raise_lost()
                self.peers.check_device()
            time.sleep(0)  # other threads of Python
        values = (found & 0xFFFFFFFF).tolist()
        return Counts(max(values[world : 2 * world]), values[:world], values[2 * world :])

    def check(self) -> None:
        """Raise what kernels have found out by now; waits for nothing."""
        if passed := int(self._seen[OVERFLOW]):
            self._seen[OVERFLOW] = 0
            raise RoutingError(
                f"rank {(passed >> 32) - 1} was to get {passed & 0xFFFFFFFF} slots in an earlier "
                "dispatch, more than max_load makes room for. What did not fit was left out, so the "
                "output and the gradients of that step are incomplete: discard them on all ranks. "
                "Needed: a larger max_load, or wait_for_counts=True"
            )
        if lost := self.lost():
            self.explain(lost, "step")

    def raise_lost(self) -> None:
        """The `TimeoutError` that `explain` explains, if there is one."""
        if lost := self.lost():
            raise lost

    def lost(self) -> TimeoutError | None:
        """What a kernel says that has waited for a rank in vain. It has also ended the work of this
        GPU, because whatever would be computed next is wrong.
        """
        lost, seconds = int(self._seen[LOST]), self.peers.timeout_s
        words = f"timed out: rank {lost - 1} of the group did not come within {seconds:g} s"
        return TimeoutError(words) if lost else None

    def explain(self, error: Exception, doing: str) -> None:
        """Raise a `RankLostError` if a kernel has waited for a rank in vain, or if `error` says so."""
        peers = self.peers
        if self._seen[OVERFLOW]:
            # The others may have raised it, and come no more.
            self.check()
        if not isinstance(error, SonicMoEError):
            said = self.lost() or error
            raise_lost_rank(said, doing, peers.name, peers.rank, peers.world_size)

    def say_lost(self) -> bool:
        """Log the rank that a kernel waited for in vain; whether there is one."""
        lost = self.lost()
        if lost is None:
            return False
        try:
            self.explain(lost, "exchange of rows")
        except SonicMoEError as error:
            logger.error("%s", error)
        return True


class TorchPeers(Peers):
    """A process group of PyTorch whose ranks have one GPU each, of one host."""

    name = "symmetric memory"

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self.world_size, self.rank = int(group.size()), int(group.rank())
        self.timeout_s = timeout_of(group)

    def map(self, size: int) -> tuple[Sequence[int], Any]:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        torch.cuda.synchronize(self._device)
        memory = symmetric.empty(size, dtype=torch.uint8, device=self._device)
        memory.zero_()
        torch.cuda.synchronize(self._device)
        # Ranks come together in it, so that behind it the memory of all is zeroed.
        handle = symmetric.rendezvous(memory, self._group)
        # It knows allocations, in each of which the memory may begin later.
        addresses = [int(address) for address in handle.buffer_ptrs]
        first = memory.data_ptr() - addresses[self.rank]
        return [address + first for address in addresses], (memory, handle)

    def words(self, count: int) -> Tensor:
        # Pinned memory has one address for the host and for every GPU.
        return torch.zeros([count], dtype=torch.int64).pin_memory()

    def check_device(self) -> None:
        torch.cuda.current_stream(self._device).query()


def timeout_of(group: Any) -> float:
    """Seconds after which the group's own collectives give a rank up."""
    backend = group._get_backend(torch.device("cuda"))
    timeout = getattr(getattr(backend, "options", None), "_timeout", None)
    return 600.0 if timeout is None else float(timeout.total_seconds())


@functools.cache
def _counted(world: int, local_experts: int) -> Any:
    """Which of the words of the host a dispatch writes."""
    rows, tokens = np.arange(ROWS, ROWS + world), np.arange(TOKENS, TOKENS + world)
    return np.concatenate([rows, tokens, np.arange(SLOTS, SLOTS + local_experts)])


_MEMORIES: dict[tuple[str, int], tuple[Any, PeerMemory]] = {}
_PROBLEMS: dict[str, tuple[Any, str]] = {}


def memory_of(group: Any, like: Tensor) -> PeerMemory:
    """The one of this group on the device of `like`."""
    place = str(group.group_name), int(like.device.index or 0)
    found = _MEMORIES.get(place)
    # A name comes again where groups are destroyed and made anew.
    if found is None or found[0] is not group:
        found = _MEMORIES[place] = group, PeerMemory(TorchPeers(group, like.device))
        watched = weakref.ref(found[1])
        threading.Thread(target=_watch, args=(watched,), name="lost rank", daemon=True).start()
        ask_later(found[1].check)
    return found[1]


def _watch(watched: weakref.ref[PeerMemory]) -> None:
    """Say at once that a rank is lost, as long as the memory is in use. The kernel that waited ends
    the work of the GPU next, and a process may die of that outside Python.
    """
    while (memory := watched()) is not None and not memory.say_lost():
        del memory
        time.sleep(_WATCH_S)


def peers_problem(group: Any) -> str:
    """Why the ranks of a group that exchanges by NCCL cannot map each other's memory; "" where they
    can. The first call for a group is a collective, whose answer is the same on every rank.
    """
    if IS_PADDLE:
        return "Paddle maps no memory of other ranks"
    found = _PROBLEMS.get(str(group.group_name))
    if found is None or found[0] is not group:
        found = _PROBLEMS[str(group.group_name)] = group, _problem_of(group)
    return found[1]


def _problem_of(group: Any) -> str:
    world = int(group.size())
    if world > MOST_RANKS:
        return f"it serves {MOST_RANKS} ranks, and the group has {world}"
    # Before anybody begins what needs all: a rank that cannot would leave the others waiting.
    hosts, problems = zip(*_from_all(group, platform.node(), _own_problem()), strict=True)
    if any(problems):
        return next(filter(None, problems))
    if len(set(hosts)) > 1:
        return f"the ranks are on {len(set(hosts))} hosts"
    try:
        TorchPeers(group, torch.device("cuda", torch.cuda.current_device())).map(HEAD)
        problem = ""
    except Exception as error:
        problem = f"mapping fails: {str(error).strip().splitlines()[:1]}"
    return next((found for (found,) in _from_all(group, problem) if found), "")


def _own_problem() -> str:
    try:
        symmetric = importlib.import_module("torch.distributed._symmetric_memory")
        backend = symmetric.get_backend(torch.device("cuda"))
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"this PyTorch has no symmetric memory: {error}"
    return "" if backend in ("CUDA", None) else f"PyTorch's own is set to {backend}"


def _from_all(group: Any, *words: str) -> list[list[str]]:
    """The words of every rank, cut to 150 characters each. They travel as text, because an object
    would be unpickled.
    """
    text = json.dumps([word[:150] for word in words]).encode()
    own = torch.zeros([_SAID_BYTES], dtype=torch.uint8)
    own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    own = own.to("cuda")
    said = [torch.empty_like(own) for _ in range(int(group.size()))]
    torch.distributed.all_gather(said, own, group=group)
    return [json.loads(bytes(one.tolist()).rstrip(b"\0")) for one in said]
