"""That a call leaves its caller's tensors alone. A kernel may write through a raw address, so whole
storages are compared, the bytes between and around a view's own too. Paddle shows values alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from framework import IS_PADDLE, numpy, torch

from sonicmoe.interop import data_ptr

MARGIN = 64  # elements around a tensor, enough to keep it aligned
PADDING = 8  # elements between rows


def spelled(values: Any, spelling: str = "contiguous") -> Any:
    """These values inside a larger memory of zeros: in one piece, "strided" in every second element of it,
    "padded" with elements between rows, or "turned", where columns of a matrix lie like padded rows.
    """
    if IS_PADDLE:
        return values.detach()
    packed, step = values.contiguous(), 2 if spelling == "strided" else 1
    sizes, turn = list(packed.shape), spelling == "turned"
    if turn:
        sizes[-2:] = sizes[:-3:-1]
    width = sizes[-1] + PADDING if spelling in ("padded", "turned") else sizes[-1]
    strides = [
        step * stride for stride in torch.empty((*sizes[:-1], width), device="meta").stride()
    ]
    if turn:
        strides[-2:] = strides[:-3:-1]
    size = 2 * MARGIN + step * math.prod(sizes[:-1]) * width
    memory = torch.zeros(size, dtype=values.dtype, device=values.device)
    return memory.as_strided(packed.shape, strides, MARGIN).copy_(packed).detach()


def in_a_buffer(values: Any, spelling: str) -> Any:
    """`spelled`; under Paddle a slice of a communication buffer of zeros, shaped as it shapes them."""
    if not IS_PADDLE:
        return spelled(values, spelling)
    size = math.prod(values.shape)
    buffer = torch.zeros(size + 2 * MARGIN, dtype=values.dtype)
    piece = buffer._slice(MARGIN, MARGIN + size)
    piece.get_tensor()._set_dims(values.shape)
    piece.copy_(values)
    piece.around = buffer
    return piece


class Hooked:
    """What the gradients of weights were whenever their hooks fired, as whoever reduces them sees them."""

    def __init__(self, weights: list[Any], gradient: Callable[[Any], Any]) -> None:
        self.seen: list[list[Any]] = [[] for _ in weights]
        for weight, seen in zip(weights, self.seen, strict=True):

            def fired(*_: Any, weight: Any = weight, seen: list[Any] = seen) -> None:
                seen.append(gradient(weight))

            if IS_PADDLE:
                weight._register_backward_hook(fired)
            else:
                weight.register_post_accumulate_grad_hook(fired)


def storage_bytes(tensor: Any) -> Any:
    """All of the memory that the tensor is a view of."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.detach().untyped_storage())


def facts(tensor: Any) -> tuple[Any, ...]:
    about = data_ptr(tensor), tuple(tensor.shape), tensor.dtype
    return about if IS_PADDLE else (*about, tensor.stride(), tensor._version, tensor.requires_grad)


class Snapshot:
    """Tensors by name as they are now."""

    def __init__(self, **tensors: Any) -> None:
        self.tensors = tensors
        self.facts = {name: facts(tensor) for name, tensor in tensors.items()}
        self.bytes = {name: self._bytes(tensor) for name, tensor in tensors.items()}

    @staticmethod
    def _bytes(tensor: Any) -> Any:
        return numpy(tensor).tobytes() if IS_PADDLE else storage_bytes(tensor).clone()

    def changes(self) -> list[str]:
        """What has changed since, in words."""
        found = [
            f"{name}: {facts(tensor)}, was {self.facts[name]}"
            for name, tensor in self.tensors.items()
            if facts(tensor) != self.facts[name]
        ]
        for name, tensor in self.tensors.items():
            now, was = self._bytes(tensor), self.bytes[name]
            if now != was if IS_PADDLE else not torch.equal(now, was):
                found.append(f"{name}: its bytes changed")
        return found


@contextmanager
def untouched(**tensors: Any) -> Iterator[None]:
    """Assert that nothing of these tensors changes inside."""
    before = Snapshot(**tensors)
    yield
    changes = before.changes()
    assert not changes, changes


def written_beside(memory: Any) -> bool:
    """Whether something stands around a tensor of `spelled`, or between its elements, that was zeros."""
    if IS_PADDLE:
        whole = numpy(memory.around)
        return bool(whole[:MARGIN].any() or whole[-MARGIN:].any())
    whole = torch.empty(0, dtype=memory.dtype, device=memory.device)
    whole = whole.set_(memory.detach().untyped_storage()).clone()
    whole.as_strided(memory.shape, memory.stride(), memory.storage_offset()).zero_()
    return bool(whole.view(torch.uint8).any())
