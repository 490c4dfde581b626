"""Index maps between weight layouts. They move bytes and do no arithmetic, so they are exact.

Native layouts (what every engine reads and accumulates into):
    w1 [E, N1, H]   up-projection, K-major; gated: N1 = 2I, row 2i = gate_i, row 2i+1 = up_i;
                    ungated: N1 = I
    w2 [E, H, I]    down-projection, K-major
`convert_weights` and `convert_bias` are public: they bring whole sets of stacked weights from one
layout into another. The rest serves the engines.

User layouts, which `WeightLayout` names:
    per expert   `up_gate_proj.weight [H, 2I]`, split-half: columns [0, I) gate, [I, 2I) up;
                 `down_proj.weight [I, H]`
    fused        `weight1 [E, H, 2I]` split-half and `weight2 [E, I, H]`

Interleaving keeps a (gate, up) pair in one GPU thread's registers: no exchange for the activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch

from .enums import member_of
from .errors import LayoutError, ShapeError, expect
from .interop import plain_ops, require_framework_tensor

Tensor = torch.Tensor


class GateUp(NamedTuple):
    """Stands for a w1 `[E, 2I, H]` in halves, of which each is a tensor `[E, I, H]` of its own."""

    gate: Tensor
    up: Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of that w1."""
        experts, rows, hidden = self.gate.shape
        return experts, 2 * rows, hidden


class Codes(NamedTuple):
    """Stands for a frozen weight that lives as FP8 codes alone, native and contiguous (`weights.frozen`).

    held: uint8 `[E, R, C]`, the bytes of e4m3 codes. scales: int32, the bits of fp32 multipliers per
    block. Neither dtype is a floating one, so no cast of a model changes them.
    """

    held: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight."""
        return self.held.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.held.dtype


# w1 (a tensor, `GateUp` or `Codes`), w2 (a tensor or `Codes`), b1, b2.
StackedWeights = tuple[Any, Any, Tensor | None, Tensor | None]


def flat_weights(weights: StackedWeights) -> tuple[Any, ...]:
    """Tensors alone, always six: `(w1, None, w2, None, b1, b2)`; gate and up in the first two where
    they are apart; scales behind the codes of each.
    """
    w1, w2, b1, b2 = weights
    # By class, because `isinstance` is a call more, and every call of a layer comes here.
    if type(w1) is Codes and type(w2) is Codes:
        return *w1, *w2, b1, b2
    return (*w1, w2, None, b1, b2) if type(w1) is GateUp else (w1, None, w2, None, b1, b2)


def weights_of(flat: Sequence[Any]) -> StackedWeights:
    """Inverse of `flat_weights`."""
    first, second, w2, scales, b1, b2 = flat
    if scales is not None:
        return Codes(first, second), Codes(w2, scales), b1, b2
    return first if second is None else GateUp(first, second), w2, b1, b2


def interleave_gate_up(split: Tensor) -> Tensor:
    """Rows [gate_0..gate_I-1, up_0..up_I-1] -> [gate_0, up_0, gate_1, up_1, ...] along the
    second-to-last axis ([..., 2I, H]).
    """
    # [2, I, H] -> [I, 2, H]: the transposition puts gate_i beside up_i, and the copy fixes that
    # order in memory.
    return _turned(split, "interleave_gate_up")


def deinterleave_gate_up(interleaved: Tensor) -> Tensor:
    """Inverse of `interleave_gate_up` ([..., 2I, H] -> [..., 2I, H])."""
    return _turned(interleaved, "deinterleave_gate_up", split=False)


def _turned(rows: Tensor, caller: str, split: bool = True) -> Tensor:
    *lead, n, h = rows.shape
    words = f"{caller} needs an even number of rows (2I), got shape {tuple(rows.shape)}"
    expect(n % 2 == 0, LayoutError, words)
    pairs = rows.reshape([*lead, 2, n // 2, h] if split else [*lead, n // 2, 2, h])
    return pairs.transpose(-3, -2).contiguous().reshape([*lead, n, h])


def stack(tensors: list[Tensor]) -> Tensor:
    """Per-expert tensors -> one `[E, ...]` tensor (a copy)."""
    with plain_ops():  # one switch instead of a detached view of each of 256 weights
        return torch.stack(list(tensors))


@dataclass(frozen=True)
class WeightLayout:
    """How the user's weights and biases lie, per expert or stacked; the default is native.

    The maps move bytes and serve gradients as well as weights. Where `transposed` is set, weights
    come back in fresh memory; elsewhere a map may return its argument or a view of it.

    Attributes:
        transposed: w1 is `[.., H, N1]` and w2 `[.., I, H]`, else w1 `[.., N1, H]` and w2
            `[.., H, I]`.
        split_half: the N1 = 2I gate and up entries of w1 and b1 are [gate; up] halves instead of
            (gate, up) pairs. False where the activation is not gated.
        apart: the halves of w1 are two tensors, a `GateUp`, or `[2, .., I, H]` where they are made
            here. Only with `split_half`, and never with `transposed`.
    """

    transposed: bool = False
    split_half: bool = False
    apart: bool = False

    def native_w1(self, w1: Tensor | GateUp) -> Tensor:
        """`w1` in native order, `[.., N1, H]`."""
        if self.apart:
            return torch.stack([w1[0], w1[1]], -2).flatten(-3, -2)
        assert not isinstance(w1, GateUp)
        # Transposed first, because the gate and up halves are rows only then.
        rows = _transposed(w1) if self.transposed else w1
        return interleave_gate_up(rows) if self.split_half else rows

    def native_w2(self, w2: Tensor) -> Tensor:
        """`w2` in native order, `[.., H, I]`."""
        return _transposed(w2) if self.transposed else w2

    def native_b1(self, b1: Tensor) -> Tensor:
        """`b1` in native order, `[.., N1]`."""
        # A bias is a matrix of one column, so that one function defines the order.
        return interleave_gate_up(b1.unsqueeze(-1)).squeeze(-1) if self.split_half else b1

    def ordered_b1(self, b1: Tensor, split_half: bool) -> Tensor:
        """`b1`, or its gradient, whose gates and up values lie in halves where `split_half` says
        so, else in turns, in this order.
        """
        if split_half == self.split_half:
            return b1
        return self.user_b1(WeightLayout(split_half=split_half).native_b1(b1))

    def user_w1(self, native: Tensor) -> Tensor:
        """Inverse of `native_w1`."""
        if self.apart:
            return torch.stack([native[..., 0::2, :], native[..., 1::2, :]])
        # The inverse in reverse order: halves first, then the transposition.
        rows = deinterleave_gate_up(native) if self.split_half else native
        return _transposed(rows) if self.transposed else rows

    def user_w2(self, native: Tensor) -> Tensor:
        """Inverse of `native_w2`."""
        return _transposed(native) if self.transposed else native

    def user_b1(self, native: Tensor) -> Tensor:
        """Inverse of `native_b1`."""
        if not self.split_half:
            return native
        return deinterleave_gate_up(native.unsqueeze(-1)).squeeze(-1)

    def intermediate_size(self, w2: Tensor) -> int:
        """I, from one expert's w2 or a stacked one."""
        return int(w2.shape[-2 if self.transposed else -1])


NATIVE = WeightLayout()


class ExpertLayout(Enum):
    """How the stacked weights of E gated experts lie, and who has them so.

    INTERLEAVED: w1 `[E, 2I, H]` with rows gate_0, up_0, gate_1, up_1, ..., and w2 `[E, H, I]`. So
        have `MoE`, `SonicMoEMlpNode.from_native` and the functional API.
    HALVES: w1 `[E, 2I, H]`, the gate rows, then the up rows, and w2 `[E, H, I]`. So have most
        models of transformers, and the functional API with `concat_layout=True`.
    FUSED: w1 `[E, H, 2I]`, the gate columns, then the up columns, and w2 `[E, I, H]`. So have
        `SonicMoEMlpNode.from_fused` and PaddleFleet.
    FUSED_INTERLEAVED: w1 `[E, H, 2I]` with columns gate_0, up_0, ..., and w2 `[E, I, H]`. So has
        GPT-OSS in transformers.

    Without a gate, I stands in the place of 2I, and the order of rows is one and the same.
    """

    INTERLEAVED = "interleaved"
    HALVES = "halves"
    FUSED = "fused"
    FUSED_INTERLEAVED = "fused_interleaved"


# The axes of w1, where 2I is two of them: G (gate, up) and I. Those of w2 and of a bias follow:
# w2 has H before I where w1 has it last, and a bias has no H.
_W1_AXES = {
    ExpertLayout.INTERLEAVED: "EIGH",
    ExpertLayout.HALVES: "EGIH",
    ExpertLayout.FUSED: "EHGI",
    ExpertLayout.FUSED_INTERLEAVED: "EHIG",
}


def convert_weights(
    w1: Tensor, w2: Tensor, source: ExpertLayout | str, target: ExpertLayout | str
) -> tuple[Tensor, Tensor]:
    """The stacked weights of E experts in another layout, exact to the bit in every dtype.

    The way back, with `source` and `target` exchanged, returns the same bits. Gradients and
    optimizer moments lie as their weights do, and are converted in the same way.

    Args:
        w1: up-projection, `[E, 2I, H]` or `[E, H, 2I]`, as `source` says; without a gate I in the
            place of 2I.
        w2: down-projection, `[E, H, I]` or `[E, I, H]`, as `source` says.
        source: how they lie, a member of `ExpertLayout` or its value.
        target: how they are wanted.

    Returns:
        `(w1, w2)` in fresh memory, contiguous, detached, of the dtypes and on the device of the
        arguments. Each is one copy, so a large model is converted layer by layer.

    Raises:
        ConfigError: an unknown layout.
        ShapeError: w1 and w2 do not fit together in `source`; the message says so where they look
            transposed. Gate and up in halves and in turns have equal shapes, so a wrong order of
            these two is not seen.
        TypeError, FrameworkError: an argument is no tensor, or one of the other framework.
    """
    lies, wanted = _ends(source, target)
    parts = _sizes(w1, w2, lies)
    return (
        reordered(w1, _W1_AXES[lies], _W1_AXES[wanted], parts),
        reordered(w2, _w2_axes(lies), _w2_axes(wanted), parts),
    )


def convert_bias(b1: Tensor, source: ExpertLayout | str, target: ExpertLayout | str) -> Tensor:
    """The bias `[E, 2I]` of gated up-projections in another layout, exact to the bit. That of a
    down-projection, `[E, H]`, is the same in all layouts.

    Raises:
        ConfigError: an unknown layout.
        ShapeError: b1 is not `[E, 2I]`.
        TypeError, FrameworkError: as `convert_weights`.
    """
    before, after = (_W1_AXES[layout].replace("H", "") for layout in _ends(source, target))
    require_framework_tensor(b1, "b1")
    shape = tuple(map(int, b1.shape))
    if len(shape) != 2 or shape[1] % 2:
        raise ShapeError(f"b1 has shape {shape}; needed: [E, 2I]")
    parts = {"E": shape[0], "G": 2, "I": shape[1] // 2}
    return reordered(b1, before, after, parts)


def _ends(source: Any, target: Any) -> tuple[ExpertLayout, ExpertLayout]:
    return member_of(ExpertLayout, source, "source"), member_of(ExpertLayout, target, "target")


def _w2_axes(layout: ExpertLayout) -> str:
    return "EHI" if _W1_AXES[layout].endswith("H") else "EIH"


def _sizes(w1: Tensor, w2: Tensor, layout: ExpertLayout) -> dict[str, int]:
    """The length of every axis: E, H, I, and G (2, or 1 without a gate)."""
    for name, weight in (("w1", w1), ("w2", w2)):
        require_framework_tensor(weight, name)
    up, down = tuple(map(int, w1.shape)), tuple(map(int, w2.shape))
    if parts := _fitted(up, down, _w2_axes(layout)):
        return parts
    legend = {"EHI": "w1 [E, 2I, H] and w2 [E, H, I]", "EIH": "w1 [E, H, 2I] and w2 [E, I, H]"}
    needed = legend.pop(_w2_axes(layout))
    ((axes, other),) = legend.items()
    turned = _fitted(up, down, axes)
    hint = f"; these two are {other}, which is another layout" if turned else ""
    raise ShapeError(
        f"w1 has shape {up} and w2 {down}; {layout.value!r} needs {needed} (I for 2I without a gate){hint}"
    )


def _fitted(up: tuple[int, ...], down: tuple[int, ...], w2_axes: str) -> dict[str, int] | None:
    """The sizes, if w2 has these axes and w1 fits to them."""
    if len(up) != 3 or len(down) != 3:
        return None
    sizes = dict(zip(w2_axes, down, strict=True))
    for gate in (2, 1):
        rows = sizes["H"], gate * sizes["I"]
        if up == (sizes["E"], *(rows if w2_axes == "EIH" else rows[::-1])):
            return {**sizes, "G": gate}
    return None


def reordered(weight: Tensor, before: str, after: str, parts: dict[str, int]) -> Tensor:
    """One copy: a stacked weight has gigabytes, and each more would be read and written again."""
    # G and I are neighbours in every layout, so they are one axis of the result.
    shape = [parts[axis] for axis in after]
    if "G" in after:
        inner = min(after.index("G"), after.index("I"))
        shape[inner : inner + 2] = [parts["G"] * parts["I"]]
    with plain_ops():
        apart = weight.detach().reshape([parts[axis] for axis in before])
        moved = apart.permute(*(before.index(axis) for axis in after))
        # Axes of one element may leave the view contiguous as it is, and equal orders always do.
        moved = moved.clone() if moved.is_contiguous() else moved.contiguous()
        return moved.reshape(shape)


def _transposed(matrix: Tensor) -> Tensor:
    """The last two axes swapped, in fresh memory: an axis of one element leaves the swapped view
    contiguous as it is.
    """
    # Gradients that come back from here are bound as `main_grad`. A view would share memory with
    # the accumulators, which the flush zeroes.
    swapped = matrix.transpose(-2, -1)
    return swapped.clone() if swapped.is_contiguous() else swapped.contiguous()
