"""What the caller of a step calls its tensors, and where in them an element of the engine's tensors
lies. Imports no framework.

Engines read native weights, `w1 [E, N1, H]` with gate and up in turns and `w2 [E, H, I]`. Callers
have halves, transposed matrices, one parameter per expert, or tokens of several axes. A diagnosis
finds a native index, and says it in the caller's own names and order.

Axes: T token, K slot, E expert, N row of w1 (gate and up), H hidden, I intermediate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..observe import FACES

NATIVE_AXES = {
    "x": "TH", "out": "TH", "probs": "TK", "w1": "ENH", "w2": "EHI", "b1": "EN", "b2": "EH",
}  # fmt: skip
GRADIENT = "the gradient of "
# Stage: the tensor whose elements it shows, and what it says about them.
_TENSOR_OF_STAGE = {
    "x": ("x", ""), "x_fp8": ("x", ""), "dx": ("x", GRADIENT),
    "out": ("out", ""), "dout": ("out", GRADIENT), "dout_fp8": ("out", GRADIENT),
    "probs": ("probs", ""), "ds": ("probs", GRADIENT),
    **{name: (name, "") for name in ("w1", "w2", "b1", "b2")},
    **{f"{name}_fp8": (name, "") for name in ("w1", "w2")},
    **{f"d{name}": (name, GRADIENT) for name in ("w1", "w2", "b1", "b2")},
}  # fmt: skip


@dataclass(frozen=True)
class Located:
    """An element of a tensor of the caller's; without an index where only its tensor is known."""

    name: str
    index: tuple[int, ...]

    def __str__(self) -> str:
        """`model.layers.3.mlp.experts.gate_up_proj[5, 7, 3]`."""
        return self.name + (f"[{', '.join(map(str, self.index))}]" if self.index else "")


@dataclass(frozen=True)
class Named:
    """A tensor of the caller's.

    names: its name; or those of the E matrices of a weight that is one parameter per expert.
    axes: the letters of its axes in their order; none where the caller has no such tensor.
    """

    names: tuple[str, ...]
    axes: str

    def at(self, where: Mapping[str, int]) -> str:
        """The name of the tensor that has this element."""
        return self.names[0 if len(self.names) == 1 else where["E"]]


@dataclass(frozen=True)
class Caller:
    """What the caller of one step calls its tensors, and how they lie.

    face: a key of `FACES`.
    layer: the module that has the weights, by its name in the model; empty where it was not found.
    tensors: by their names in `NATIVE_AXES`, those that the step has.
    split_half: w1 and b1 have a gate half before an up half.
    lead: the axes of the caller's tokens that are one axis T to the experts, where there are
        several.
    """

    face: str
    tensors: dict[str, Named] = field(default_factory=dict)
    layer: str = ""
    split_half: bool = False
    lead: tuple[int, ...] = ()

    @property
    def flushes(self) -> bool:
        """Whether gradients go to the parameters by the flush of a node."""
        return FACES[self.face].flushes

    def locate(self, stage: str, index: tuple[int, ...], rows: int, gated: bool) -> Located | None:
        """An element of a stage in the caller's tensors; None for stages that show none of them.

        Args:
            stage: one of `bisect.STAGES`.
            index: as the stage has it.
            rows: N1, the rows of w1.
            gated: half of them are gates.
        """
        if stage == "flush":
            stage, index = _before_flush(index, rows, gated)
        tensor, prefix = _TENSOR_OF_STAGE.get(stage, ("", ""))
        named = self.tensors.get(tensor)
        if named is None:
            return None
        where = dict(zip(NATIVE_AXES[tensor], index, strict=True))
        # Native rows have gate and up in turns; the caller has all gates before all ups.
        if self.split_half and "N" in where:
            where["N"] = where["N"] // 2 + rows // 2 * (where["N"] % 2)
        found: list[int] = []
        # The caller's own order of axes; an axis that he has not, such as E of one expert, is left out.
        for axis in named.axes:
            found += _unravelled(where["T"], self.lead) if axis == "T" else [where[axis]]
        return Located(prefix + named.at(where), tuple(found))

    def called(self, result: str) -> str:
        """A result of a call (`out`, `dx`, `dw1`, ...) in the caller's words."""
        tensor, prefix = _TENSOR_OF_STAGE.get(result, ("", ""))
        named = self.tensors.get(tensor)
        return result if named is None or len(named.names) > 1 else prefix + named.names[0]

    def problem(self, tokens: int, experts: int) -> str | None:
        """Why this cannot be the caller of a step of these sizes, or None."""
        if self.lead and math.prod(self.lead) != tokens:
            return f"lead is {list(self.lead)}; needed: the axes of {tokens} tokens"
        for tensor, named in self.tensors.items():
            wanted = NATIVE_AXES.get(tensor)
            if wanted is None or not set(named.axes) <= set(wanted):
                return f"{tensor} has axes {named.axes!r}; needed: of {wanted}"
            if len(named.names) not in (1, experts):
                return f"{tensor} has {len(named.names)} names; needed: 1 or {experts}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Caller:
        """Inverse of `to_json`; ValueError where the data is something else."""
        try:
            tensors = {
                str(tensor): Named(tuple(map(str, found["names"])), str(found["axes"]))
                for tensor, found in data["tensors"].items()
            }
            lead = tuple(int(size) for size in data["lead"])
            face = data["face"]
            FACES[face]  # refused here and not at its first use
            return cls(face, tensors, str(data["layer"]), bool(data["split_half"]), lead)
        except (KeyError, TypeError, AttributeError, OverflowError, ValueError) as error:
            raise ValueError(f"caller: {type(error).__name__}: {error}") from None


def _before_flush(index: tuple[int, ...], rows: int, gated: bool) -> tuple[str, tuple[int, ...]]:
    """The native gradient that an element of the stage `flush` comes from, and its place there:
    that stage is `[E, H, N1 + I]`, dw1 transposed and in halves, then dw2.
    """
    expert, hidden, column = index
    if column >= rows:
        return "dw2", (expert, hidden, column - rows)
    if gated:
        column = 2 * column if column < rows // 2 else 2 * (column - rows // 2) + 1
    return "dw1", (expert, column, hidden)


def _unravelled(token: int, lead: tuple[int, ...]) -> list[int]:
    """Indices of a token along the axes that were flattened, the last of them fastest."""
    found: list[int] = []
    for size in reversed(lead[1:]):
        token, inner = divmod(token, size)
        found.insert(0, inner)
    return [token, *found]
