"""Memory that weight gradients are left in: accumulators of our own in the native layout; the
parameters' own `main_grad`, each in the layout of its parameter; or memory of parameters that is
written instead of added to.

Legend: E experts, H hidden, I intermediate, N1 = 2I (gated) or I.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..errors import ConfigError
from ..interop import numel
from ..layouts import NATIVE, stack
from .footprint import Footprint
from .gradient_memory import WeightTarget, contiguous_axis, extent_of, misfit, tma_misfit

Tensor = torch.Tensor
Value = TypeVar("Value")


class GradientTargets(ABC):
    """Memory that `Engine.backward_dw` adds fp32 weight gradients to. An expert without tokens is
    left untouched.

    The gradient store makes targets and decides what becomes of them after a backward; an engine
    only adds. The gradients are dw1 `[E, N1, H]`, dw2 `[E, H, I]` and, where the weights have
    biases, db1 `[E, N1]` and db2 `[E, H]`.

    adding: an engine sets this before the first addition of a backward and clears it after the
        last. It takes all memory and loads all kernels before, so that running out of memory leaves
        the targets as they were.
    """

    adding: bool = False

    @abstractmethod
    def named(self) -> dict[str, Tensor]:
        """The tensors that are added to, by the name of the gradient."""

    def wants(self, name: str) -> bool:
        """Whether anybody wants this gradient; what nobody wants need not be computed."""
        return True

    @property
    @abstractmethod
    def anchor(self) -> Tensor:
        """One of them, for questions about device and stream."""

    @abstractmethod
    def arranged(self, name: str, gradient: Tensor) -> Tensor:
        """One expert's gradient, native, in the layout that `add` takes. Memory that this needs is
        taken here, so that `add` needs none.
        """

    @abstractmethod
    def add(self, name: str, expert: int, gradient: Tensor) -> None:
        """Add one expert's arranged gradient by plain tensor operations."""

    @abstractmethod
    def sums(self, name: str) -> Tensor | None:
        """All that was added to one gradient so far, in the native layout; None where nobody wants
        that gradient.
        """

    @abstractmethod
    def replace(self, name: str, sums: Tensor) -> None:
        """Write other sums, in the native layout, over those that are there."""

    @property
    def has_biases(self) -> bool:
        """Whether anybody wants a gradient of a bias."""
        return False

    def add_biases(self, db1: Tensor, db2: Tensor, *, split_half: bool) -> None:
        """Add fp32 sums `[E, N1]` and `[E, H]`, or write them where the memory is fresh; `split_half`:
        db1 holds all gates and then all up values, else the two in turns.
        """
        raise ConfigError(f"gradient targets are {type(self).__name__}, which have no biases")

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.named().values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.element_size() * numel(tensor) for tensor in self.tensors())


@dataclass(eq=False)
class NativeBuffer(GradientTargets):
    """Accumulators in the native layout, which every engine can add to.

    dw1 `[E, N1, H]`, dw2 `[E, H, I]`, db1 `[E, N1]`, db2 `[E, H]` (the biases' are None when the
    weights have none).
    """

    dw1: Tensor
    dw2: Tensor
    db1: Tensor | None = None
    db2: Tensor | None = None

    @classmethod
    def zeros(
        cls, num_experts: int, n1: int, hidden: int, intermediate: int, bias: bool, device: Any
    ) -> NativeBuffer:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float32, device=device)

        return cls(
            dw1=zeros(num_experts, n1, hidden),
            dw2=zeros(num_experts, hidden, intermediate),
            db1=zeros(num_experts, n1) if bias else None,
            db2=zeros(num_experts, hidden) if bias else None,
        )

    @property
    def anchor(self) -> Tensor:
        return self.dw1

    def named(self) -> dict[str, Tensor]:
        every = {"dw1": self.dw1, "dw2": self.dw2, "db1": self.db1, "db2": self.db2}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    @property
    def has_biases(self) -> bool:
        return self.db1 is not None

    def add_biases(self, db1: Tensor, db2: Tensor, *, split_half: bool) -> None:
        assert self.db1 is not None and self.db2 is not None
        self.db1.add_(NATIVE.ordered_b1(db1, split_half))
        self.db2.add_(db2)

    def arranged(self, name: str, gradient: Tensor) -> Tensor:
        return gradient

    def add(self, name: str, expert: int, gradient: Tensor) -> None:
        self.named()[name][expert].add_(gradient)

    def sums(self, name: str) -> Tensor:
        return self.named()[name]

    def replace(self, name: str, sums: Tensor) -> None:
        self.named()[name].copy_(sums)


def native_buffer(targets: GradientTargets) -> NativeBuffer:
    """The targets of an engine that adds to no other kind."""
    if not isinstance(targets, NativeBuffer):
        raise ConfigError(
            f"gradient targets are {type(targets).__name__}; this engine adds to a NativeBuffer"
        )
    return targets


@dataclass(eq=False)
class ParameterTargets(GradientTargets):
    """The parameters' own memory: every gradient is added where its parameter has it, in its own
    layout, and no memory of ours is between.

    up: of dw1, matrices `[N1, H]` or `[H, N1]`. down: of dw2, `[H, I]` or `[I, H]`.
    footprint: see `recognise`.
    biases: memory of db1 `[E, N1]`, as the rows of `up` lie, and db2 `[E, H]`, where the layer has
        biases; None for one that is frozen.
    """

    up: WeightTarget
    down: WeightTarget
    footprint: Footprint | None = None
    biases: tuple[Tensor | None, Tensor | None] | None = None

    def recognise(self, last: Footprint | None) -> Footprint:
        """Look where the memory lies, and take over what was found out about `last` where it is the
        same memory: reasons of `problem`, `copy_engine_problem` and engines, and the destinations
        that an engine has made of addresses.

        last: what the targets of the layer's previous backward returned here; None at the first.
        """
        arrangement = self.up.arrangement, self.down.arrangement
        tensors = [*self.up.tensors, *self.down.tensors]
        # A trainer may have replaced any tensor since, so every backward looks.
        again = None if last is None else last.seen_again(arrangement, tensors)
        self.footprint = again or Footprint(arrangement, tensors)
        return self.footprint

    def once(self, key: Hashable, find: Callable[[], Value]) -> Value:
        """What `find` returns, which depends on where the memory lies and on `key` alone; called
        once of recognised memory.
        """
        return find() if self.footprint is None else self.footprint.once(key, find)

    @property
    def anchor(self) -> Tensor:
        first = self.up.tensors[0]
        if first is not None:  # as nearly always
            return first
        return next(
            tensor for tensor in (*self.up.tensors, *self.down.tensors) if tensor is not None
        )

    def named(self) -> dict[str, Tensor]:
        weights = {
            name if weight.is_stacked else f"{name}[{index}]": tensor
            for name, weight in self._weights()
            for index, tensor in enumerate(weight.tensors)
            if tensor is not None
        }
        biases = zip(("db1", "db2"), self.biases or (None, None), strict=True)
        return {**weights, **{name: tensor for name, tensor in biases if tensor is not None}}

    @property
    def has_biases(self) -> bool:
        return any(memory is not None for memory in self.biases or ())

    def add_biases(self, db1: Tensor, db2: Tensor, *, split_half: bool) -> None:
        assert self.biases is not None
        into1, into2 = self.biases
        if into1 is not None:
            self._leave(into1, self.up.layout.ordered_b1(db1, split_half))
        if into2 is not None:
            self._leave(into2, db2)

    def _leave(self, memory: Tensor, sums: Tensor) -> None:
        memory.add_(sums)

    def wants(self, name: str) -> bool:
        weight = self.up if name == "dw1" else self.down
        return weight.is_wanted

    def arranged(self, name: str, gradient: Tensor) -> Tensor:
        layout = self._weight(name).layout
        return layout.user_w1(gradient) if name == "dw1" else layout.user_w2(gradient)

    def add(self, name: str, expert: int, gradient: Tensor) -> None:
        # None where this expert is frozen: its gradient was asked for with those of the others.
        matrix = self._weight(name).matrix(expert)
        if matrix is not None:
            matrix.add_(gradient)

    def sums(self, name: str) -> Tensor | None:
        """A copy, with zeros for frozen parameters."""
        weight = self._weight(name)
        if not weight.is_wanted:
            return None
        back = weight.layout.native_w1 if name == "dw1" else weight.layout.native_w2
        matrices = [weight.matrix(expert) for expert in range(weight.num_experts)]
        like = next(matrix for matrix in matrices if matrix is not None)
        return stack([back(torch.zeros_like(like) if m is None else m) for m in matrices])

    def replace(self, name: str, sums: Tensor) -> None:
        weight = self._weight(name)
        for expert in range(weight.num_experts):
            matrix = weight.matrix(expert)
            if matrix is not None:
                matrix.copy_(self.arranged(name, sums[expert]))

    def problem(self, n1: int, hidden: int, intermediate: int, device: str) -> str | None:
        """Why gradients of these sizes, computed on this device (by name), cannot be added here by
        any engine: one sentence, or None.
        """
        # The question is part of the key: one memory serves calls of one size on one device.
        key = ("problem", n1, hidden, intermediate, device)
        return self.once(key, lambda: self._problem(n1, hidden, intermediate, device))

    def _problem(self, n1: int, hidden: int, intermediate: int, device: str) -> str | None:
        for name, weight in self._weights():
            # A shape that is wrong here would make an addition elsewhere, so every tensor is looked
            # at.
            native = (n1, hidden) if name == "dw1" else (hidden, intermediate)
            wanted: tuple[int, ...] = native[::-1] if weight.layout.transposed else native
            if weight.is_stacked:
                wanted = (weight.num_experts, *wanted)
            for index, tensor in enumerate(weight.tensors):
                found = None if tensor is None else misfit(tensor, wanted, device)
                if found is not None:
                    return f"{_where(name, weight, index)} {found}"
        return None

    def copy_engine_problem(self) -> str | None:
        """Why the GPU's copy engine (TMA) cannot add here, once `problem` has found nothing: one
        sentence, or None.
        """
        return self.once("copy engine", self._copy_engine_problem)

    def _copy_engine_problem(self) -> str | None:
        extents = []
        for name, weight in self._weights():
            # One map of the copy engine serves all experts, so they must be contiguous along one
            # axis.
            contiguous: set[int] = set()
            for index, tensor in enumerate(weight.tensors):
                if tensor is None:
                    continue
                where = _where(name, weight, index)
                found = tma_misfit(tensor)
                if found is not None:
                    return f"{where} {found}"
                contiguous.add(contiguous_axis(tensor))
                extents.append((*extent_of(tensor), where))
            if len(contiguous) > 1:
                return f"the experts' {_NAMES[name]} are contiguous along different axes"
        # In ascending order of addresses an overlap of any two shows between neighbours.
        for one, other in itertools.pairwise(sorted(extents)):
            if one[1] > other[0]:
                return f"{one[2]} overlaps {other[2]}"
        return None

    def _weights(self) -> tuple[tuple[str, WeightTarget], ...]:
        return ("dw1", self.up), ("dw2", self.down)

    def _weight(self, name: str) -> WeightTarget:
        return self.up if name == "dw1" else self.down


@dataclass(eq=False)
class FreshTargets(ParameterTargets):
    """Memory whose contents mean nothing. `Engine.backward_dw` writes all of it, zeros for experts
    without tokens: no accumulators, and no pass over them.

    It was made for one backward, in dtype and layout of the parameters, and autograd accumulates
    the gradients: the fp32 sums are rounded once, as they leave the GEMM. Or it is a `main_grad`
    that this backward writes.

    make_down: takes the memory of dw2, for an engine that frees the operands of dw1 before
        (`Engine.frees_dw1_first`); others never get it.
    """

    make_down: Callable[[], WeightTarget] | None = None

    @classmethod
    def fits(cls, dtypes: Iterable[Any]) -> bool:
        """Whether gradients of these dtypes can be written."""
        return FRESH_DTYPES.issuperset(dtypes)

    @classmethod
    def like(cls, targets: ParameterTargets) -> FreshTargets:
        """Of the same memory, with what is known of it."""
        return cls(targets.up, targets.down, targets.footprint, targets.biases)

    def take_down(self) -> None:
        """Take the memory of dw2, if it was put off."""
        if self.make_down is not None:
            self.down, self.make_down = self.make_down(), None

    def _leave(self, memory: Tensor, sums: Tensor) -> None:
        memory.copy_(sums)

    def of_parameters(self, count: int) -> list[Tensor | None]:
        """The memory of each of so many parameters, which is a part of one tensor where experts have
        parameters of their own.
        """
        tensors = [*self.up.tensors, *self.down.tensors, *(self.biases or ())]
        if len(tensors) == count:
            return tensors
        return [each for stack in tensors if stack is not None for each in stack.unbind()]


FRESH_DTYPES = frozenset({torch.bfloat16, torch.float32})
_NAMES = {"dw1": "up-projection gradients", "dw2": "down-projection gradients"}


def _where(name: str, weight: WeightTarget, index: int) -> str:
    projection = "up" if name == "dw1" else "down"
    if weight.is_stacked:
        return f"the gradient memory of the {projection}-projections"
    return f"the gradient memory of expert {index}'s {projection}-projection"
