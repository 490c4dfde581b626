"""Memory that the weight gradients of a layer are left in.

Legend: E experts, H hidden, I intermediate, N1 = 2I (gated) or I.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from ..interop import numel
from ..layouts import NATIVE, stack
from .footprint import Findings, Footprint, findings_of
from .gradient_places import (
    GradientPlaces,
    contiguous_axis,
    extent_of,
    first_overlap,
    tma_misfit,
)
from .settings import GradientMode

Tensor = torch.Tensor
Value = TypeVar("Value")
# Memory that gradients are written to has one of these dtypes.
FRESH_DTYPES = frozenset({torch.bfloat16, torch.float32})


@dataclass(eq=False)
class GradientTargets:
    """Memory for the gradients dw1 `[E, N1, H]` and dw2 `[E, H, I]` and, where the layer has biases,
    db1 `[E, N1]` and db2 `[E, H]`, as `Engine.backward_dw` leaves them there.

    The gradient sink makes targets and decides what becomes of them after a backward; an engine only
    adds or writes.

    up, down: where dw1 and dw2 go.
    mode: NATIVE, fp32 accumulators in the native layout, each one tensor: every engine can add there.
        MAIN_GRAD, fp32 memory of the parameters, to which gradients are added; an expert without
        tokens is left untouched. FRESH, memory whose contents mean nothing, all of which is written,
        zeros for experts without tokens: it was made for one backward, in dtype and layout of the
        parameters, and the fp32 sums are rounded once; or it is a `main_grad` that this backward
        writes.
    biases: memory of db1, its rows as those of dw1 lie, and of db2, None for one that nobody wants;
        None where the layer has no biases.
    make_down: takes the memory of dw2, for an engine that frees the operands of dw1 before
        (`Engine.frees_dw1_first`); others never get it.
    findings: what is known of the memory; None: nobody has asked yet.
    adding: an engine sets this before the first addition of a backward and clears it after the
        last. It takes all memory and loads all kernels before, so that running out of memory leaves
        the targets as they were.
    """

    up: GradientPlaces
    down: GradientPlaces
    mode: GradientMode = GradientMode.MAIN_GRAD
    biases: tuple[Tensor | None, Tensor | None] | None = None
    make_down: Callable[[], GradientPlaces] | None = None
    findings: Findings | None = None
    adding: bool = False

    @classmethod
    def native(
        cls, dw1: Tensor, dw2: Tensor, db1: Tensor | None = None, db2: Tensor | None = None
    ) -> GradientTargets:
        """Accumulators that are there."""
        up, down = (GradientPlaces.stacked(t, int(t.shape[0]), NATIVE) for t in (dw1, dw2))
        return cls(up, down, GradientMode.NATIVE, None if db1 is None else (db1, db2))

    @classmethod
    def zeros(
        cls, num_experts: int, n1: int, hidden: int, intermediate: int, bias: bool, device: Any
    ) -> GradientTargets:
        """Accumulators of zeros."""
        shapes: list[tuple[int, ...]] = [(num_experts, n1, hidden)]
        shapes.append((num_experts, hidden, intermediate))
        shapes += [(num_experts, n1), (num_experts, hidden)] if bias else []
        return cls.native(*(torch.zeros(s, dtype=torch.float32, device=device) for s in shapes))

    @property
    def dw1(self) -> Any:
        """The tensor of a stacked dw1."""
        return self.up.tensors[0]

    @property
    def dw2(self) -> Any:
        """The tensor of a stacked dw2."""
        return self.down.tensors[0]

    @property
    def db1(self) -> Tensor | None:
        return None if self.biases is None else self.biases[0]

    @property
    def db2(self) -> Tensor | None:
        return None if self.biases is None else self.biases[1]

    @property
    def anchor(self) -> Tensor:
        """One of the tensors, for questions about device and stream."""
        first = self.up.tensors[0]
        return first if first is not None else self.tensors()[0]  # the former nearly always

    def named(self) -> dict[str, Tensor]:
        weights = {
            name if places.is_stacked else f"{name}[{index}]": tensor
            for name, places in self._weights()
            for index, tensor in enumerate(places.tensors)
        }
        every = {**weights, "db1": self.db1, "db2": self.db2}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self.named().values())

    @property
    def nbytes(self) -> int:
        return sum(tensor.element_size() * numel(tensor) for tensor in self.tensors())

    def of_parameters(self, count: int) -> list[Tensor | None]:
        """The memory of each of so many parameters, which is a part of one tensor where experts have
        parameters of their own.
        """
        tensors = [*self.up.tensors, *self.down.tensors, *(self.biases or ())]
        if len(tensors) == count:
            return tensors
        return [each for stacked in tensors if stacked is not None for each in stacked.unbind()]

    def take_down(self) -> None:
        """Take the memory of dw2, if it was put off."""
        if self.make_down is not None:
            self.down, self.make_down, self.findings = self.make_down(), None, None

    # ---- what is known of the memory ----

    @classmethod
    def at(cls, footprint: Footprint, tensors: Sequence[Tensor]) -> GradientTargets:
        """`main_grad` of all parameters, up and down, where a footprint has found them again."""
        up, down = footprint.arrangement
        _, experts, is_stacked = up
        count = 1 if is_stacked else experts
        both = GradientPlaces(tensors[:count], *up), GradientPlaces(tensors[count:], *down)
        return cls(*both, findings=footprint.findings)

    def footprint(self) -> Footprint:
        """Where the memory of the weights' gradients lies now."""
        found = Footprint(*self._memory())
        self.findings = found.findings
        return found

    def _memory(self) -> tuple[Hashable, list[Tensor | None]]:
        """What decides where gradients are added: arrangements, and the tensors of both projections."""
        up, down = self.up, self.down
        # Written out, because every backward into fresh memory asks.
        arrangement = (
            (up.layout, up.num_experts, up.is_stacked),
            (down.layout, down.num_experts, down.is_stacked),
        )
        return arrangement, [*up.tensors, *down.tensors]

    def once(self, key: Hashable, find: Callable[[], Value]) -> Value:
        """What `find` returns, which depends on where the memory lies and on `key` alone, and holds no
        memory; called once of the same memory.
        """
        if self.findings is None:
            self.findings = findings_of(*self._memory())
        answers = self.findings
        if key not in answers:
            answers[key] = find()
        return answers[key]  # type: ignore[no-any-return]

    def copy_engine_problem(self) -> str | None:
        """Why the GPU's copy engine (TMA) cannot add here: one sentence, or None."""
        return self.once("copy engine", self._copy_engine_problem)

    def _copy_engine_problem(self) -> str | None:
        extents = []
        for name, places in self._weights():
            # One map of the copy engine serves all experts, so they must be contiguous along one
            # axis.
            contiguous: set[int] = set()
            for index, tensor in enumerate(places.tensors):
                if tensor is None:
                    continue
                where = _where(name, places, index)
                found = tma_misfit(tensor)
                if found is not None:
                    return f"{where} {found}"
                contiguous.add(contiguous_axis(tensor))
                extents.append((*extent_of(tensor), where))
            if len(contiguous) > 1:
                return f"the experts' {_NAMES[name]} are contiguous along different axes"
        pair = first_overlap(extents)
        return None if pair is None else f"{pair[0]} overlaps {pair[1]}"

    # ---- plain operations ----

    def wants(self, name: str) -> bool:
        """Whether anybody wants dw1, or dw2; what nobody wants need not be computed."""
        return (self.up if name == "dw1" else self.down).first is not None

    def arranged(self, name: str, gradient: Tensor) -> Tensor:
        """A native gradient of one expert, or of all, in the layout that `add` takes. Memory that this
        needs is taken here, so that `add` needs none.
        """
        layout = self._weight(name).layout
        return layout.user_w1(gradient) if name == "dw1" else layout.user_w2(gradient)

    def add(self, name: str, expert: int, gradient: Tensor) -> None:
        # None where this expert is frozen: its gradient was asked for with those of the others.
        matrix = self._weight(name).matrix(expert)
        if matrix is not None:
            matrix.add_(gradient)

    def sums(self, name: str) -> Tensor | None:
        """All that is in the memory of one gradient, in the native layout, with zeros for frozen
        experts; None where nobody wants that gradient.
        """
        if name in ("db1", "db2"):
            return self.named().get(name)
        places = self._weight(name)
        if places.first is None:
            return None
        back = places.layout.native_w1 if name == "dw1" else places.layout.native_w2
        if places.is_stacked:
            return back(places.first)
        zeros = torch.zeros_like(places.first)
        return stack([back(zeros if matrix is None else matrix) for matrix in places.tensors])

    def replace(self, name: str, sums: Tensor) -> None:
        """Write other sums, in the native layout, over those that are there."""
        places = self._weight(name)
        for expert in range(places.num_experts):
            matrix = places.matrix(expert)
            if matrix is not None:
                matrix.copy_(self.arranged(name, sums[expert]))

    @property
    def has_biases(self) -> bool:
        """Whether anybody wants a gradient of a bias."""
        return self.biases is not None and any(memory is not None for memory in self.biases)

    def add_biases(self, db1: Tensor, db2: Tensor, *, split_half: bool) -> None:
        """Add fp32 sums `[E, N1]` and `[E, H]`, or write them where the memory is fresh; `split_half`:
        db1 holds all gates and then all up values, else the two in turns.
        """
        sums = self.up.layout.ordered_b1(db1, split_half), db2
        for memory, gradient in zip((self.db1, self.db2), sums, strict=True):
            if memory is None:
                continue
            if self.mode is GradientMode.FRESH:
                memory.copy_(gradient)
            else:
                memory.add_(gradient)

    def _weights(self) -> tuple[tuple[str, GradientPlaces], ...]:
        return ("dw1", self.up), ("dw2", self.down)

    def _weight(self, name: str) -> GradientPlaces:
        return self.up if name == "dw1" else self.down


_NAMES = {"dw1": "up-projection gradients", "dw2": "down-projection gradients"}


def _where(name: str, places: GradientPlaces, index: int) -> str:
    projection = "up" if name == "dw1" else "down"
    if places.is_stacked:
        return f"the gradient memory of the {projection}-projections"
    return f"the gradient memory of expert {index}'s {projection}-projection"
