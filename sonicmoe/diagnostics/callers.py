"""What the caller of a step calls its tensors. Imports no framework.

A diagnosis finds an element of a native tensor, `w1 [E, N1, H]` with gate and up in turns or `w2
[E, H, I]`. It says the name that the tensor has in the caller's model, the expert, and the native
row and column.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

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
class Caller:
    """What the caller of one step calls its tensors.

    tensors: by their names in a step ("x", "out", "probs", "w1", ...), those that it has: its name,
        or those of the E matrices of a weight that is one parameter per expert.
    layer: the module that has the weights, by its name in the model; empty where it was not found.
    """

    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    layer: str = ""

    def called(self, stage: str, expert: int | None = None) -> str | None:
        """The tensor that a stage of a call shows (`out`, `dx`, `w1_fp8`, ...), in the caller's
        words; None where it has no such tensor, or one per expert and `expert` is not given.
        """
        tensor, prefix = _TENSOR_OF_STAGE.get(stage, ("", ""))
        names = self.tensors.get(tensor, ())
        if len(names) > 1:
            # Per expert the caller has tensors of their own, so the expert decides the name. Names out
            # of a damaged file may be too few.
            names = () if expert is None else names[expert : expert + 1]
        return prefix + names[0] if names else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Caller:
        """Inverse of `to_json`; ValueError where the data is something else."""
        try:
            # A name is a list of characters too, so a tuple is made of lists alone.
            tensors = {
                str(tensor): tuple(map(str, names)) if isinstance(names, list) else ()
                for tensor, names in data["tensors"].items()
            }
            return cls(tensors, str(data["layer"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"caller: {type(error).__name__}: {error}") from None
