"""FP8 copies of expert weights at PaddleFleet's events, and on its attributes.

    on_step_begin        quantize_native_fp8_weights(w1, w2) ──► weight.fp8, weight.transposed_fp8
                         the bf16 storage is freed
    micro-batches        run_sonic_moe finds the copies on the parameters (`copies_of`)
      the last one       release_forward_copies: backward's order stays
    on_optimizer_begin   clear_all_fp8_weight_caches(), and Fleet sets the attributes to None

Nothing here keeps a copy alive: Fleet's attributes do, and autograd for the backwards that are to
come. The engine's buffers are found by a mark on the codes that Fleet was given.

| `fp8_weight_quant_format` | `iso32` | payload of each weight | buffers |
|---|---|---|---|
| `32x32` | True | codes, scales, transposed scales | one, which backward transposes into a scratch |
| `1x32` | False | codes, scales, transposed codes, transposed scales | two |

Blocks are our own in both formats, 256x128 of w1 and 128x128 of w2 in the default recipe, and
scales are fp32 multipliers.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakSet

import torch

from ..errors import LayoutError, ShapeError, expect
from ..interop import require_framework_tensor
from ..log import log_once
from ..quant.format import BlockScaledTensor
from ..weights.copies import WeightCopies, used_copies
from ..weights.parameters import check_memory
from .configuration import FP8Config
from .layer import drop_weight_caches, layer_of

Tensor = torch.Tensor

# An attribute of the codes. A table by address would find copies whose memory was handed out again.
_MARK = "_sonicmoe_copies"
# Copies that backwards had read when the caches were last cleared. Whether that announced an
# optimizer shows in the next call: see `clear_all_fp8_weight_caches`.
_doubtful: WeakSet[WeightCopies] = WeakSet()


def quantize_native_fp8_weights(w1: Tensor, w2: Tensor, iso32: bool = True) -> dict[str, Any]:
    """Quantise the experts of two parameters now, in either layout.

    Args:
        w1, w2: bf16 `[E, 2I, H]` and `[E, H, I]` (Sonic's layout), or `[E, H, 2I]` and `[E, I, H]`
            (grouped).
        iso32: whether one buffer serves forward and backward.

    Returns:
        `{"format": "iso32", "w1": (codes, scales, transposed scales), "w2": ...}`, or
        `{"format": "1x32", "w1": (codes, scales, transposed codes, transposed scales), "w2": ...}`.
        Codes are e4m3 in Sonic's layout, `[E, 2I, H]` and `[E, H, I]`, transposed ones
        `[E, H, 2I]` and `[E, I, H]`. Scales are fp32, one per block. All are views of the
        engine's memory, which must not be written.

    Raises:
        ShapeError, DTypeError, LayoutError, FrameworkError: the weights fit no layout, or hold no
            memory.
        ConfigError: the configuration in force, or these sizes, leave no engine that computes in
            FP8; or `iso32` with a recipe that needs two buffers.
    """
    layer = layer_of(w1, w2, _hidden_size(w1, w2))
    check_memory([w1, w2])
    # Fleet passes no configuration here, only the format that its own setting names.
    config = FP8Config()
    config.iso32_weight = bool(iso32)
    # Copies do not depend on which gated activation it is.
    node = layer.node(config.node_config(fp8=True), *config.activation())
    copies = node.make_copies()
    # The clearing before this belongs to a quantisation, so it announced no optimizer.
    _doubtful.clear()
    weights = copies.weights
    return {
        "format": "iso32" if copies.iso_weight else "1x32",
        "w1": _payload(copies, weights.w1, weights.w1_dgrad),
        "w2": _payload(copies, weights.w2, weights.w2_dgrad),
    }


def copies_of(w1: Tensor, w2: Tensor) -> WeightCopies | None:
    """The copies that hang on two parameters; None where one of them has none. Whether they are
    current is asked by the node that reads them.
    """
    if _doubtful:
        _settle()
    held1, held2 = getattr(w1, "fp8", None), getattr(w2, "fp8", None)
    if held1 is None or held2 is None:
        return None
    first, second = _marked("w1", held1), _marked("w2", held2)
    # Of two quantisations one is older, and its weights may have been written since.
    if first is not second:
        raise LayoutError("w1.fp8 and w2.fp8 are of two quantisations; needed: both of one")
    return first


def release_forward_copies(w1: Tensor, w2: Tensor, copies: WeightCopies | None) -> None:
    """After the last forward of a step: free the copies that only forwards read, and set `fp8` of
    both weights to None. Where they have to stay, the log says why, once per reason.
    """
    kept = "the engine quantised the weights by itself, for later forwards too"
    if copies is not None:
        kept = copies.release_forward()
    if kept:
        line = "release_fp8_weights: copies of expert weights for forward are kept: %s"
        log_once(logging.INFO, line, kept)
    else:
        # Fleet sets them to None by itself, after this call. Callers without its expert do not.
        w1.fp8 = w2.fp8 = None  # type: ignore[attr-defined]


def clear_all_fp8_weight_caches() -> None:
    """Free whatever engines hold of weights, for every layer of this process; the next forwards
    quantise again. Copies on attributes are Fleet's own: their memory goes when Fleet sets them to
    None.

    Fleet calls this for every layer before the optimizer, whose step makes copies stale, and also at
    the beginning of every quantisation, which may be another layer's in the middle of a step. So
    copies that a backward has read are stale from here on, unless a quantisation follows at once.
    """
    drop_weight_caches()
    # A second clearing without a quantisation in between: the first one announced an optimizer.
    _settle()
    _doubtful.update(used_copies())


def _settle() -> None:
    """No quantisation has followed the last clearing."""
    for copies in list(_doubtful):
        copies.expire("clear_all_fp8_weight_caches() was called after a backward")
    _doubtful.clear()


def _payload(copies: WeightCopies, forward: Any, dgrad: Any) -> tuple[Tensor, ...]:
    scales = forward.scale_inv
    # One buffer serves both orders: Fleet gets transposed scales, and views the codes transposed.
    if copies.iso_weight:
        return _codes(copies, forward), scales, scales.transpose(-2, -1)
    return _codes(copies, forward), scales, _codes(copies, dgrad), dgrad.scale_inv


def _codes(copies: WeightCopies, quantised: BlockScaledTensor) -> Tensor:
    """A view of the codes, by which the copies are found again.

    A new one: the copies must not lead back to it, or neither would be freed by reference counting.
    """
    view = quantised.bytes.view(quantised.code.dtype)
    setattr(view, _MARK, copies)
    return view


def _marked(name: str, pair: Any) -> WeightCopies:
    codes = pair[0] if isinstance(pair, tuple) and pair else pair
    copies = getattr(codes, _MARK, None)
    if not isinstance(copies, WeightCopies):
        raise LayoutError(
            f"{name}.fp8 holds {type(codes).__name__} that this package has not made; needed: the "
            "codes that quantize_native_fp8_weights returned, themselves and not a copy, or None"
        )
    return copies


def _hidden_size(w1: Any, w2: Any) -> int:
    """H of two weights. No pair of shapes fits both layouts, so there is one answer."""
    for name, weight in (("w1", w1), ("w2", w2)):
        require_framework_tensor(weight, name)
    shapes = [tuple(int(size) for size in weight.shape) for weight in (w1, w2)]
    first, second = shapes
    needed = "[E, 2I, H] and [E, H, I], or [E, H, 2I] and [E, I, H]"
    words = f"w1 has shape {first} and w2 {second}; needed: {needed}"
    expect(len(first) == len(second) == 3, ShapeError, words)
    # In Sonic's layout w1 has twice as many rows as w2 has columns. `layer_of` checks the rest.
    return second[1] if first[1] == 2 * second[2] else second[2]
