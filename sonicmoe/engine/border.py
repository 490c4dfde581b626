"""What every engine checks at its border: weights against each other, tokens and gradients against
them and the routing.

Legend: E experts, H hidden, I intermediate, N1 = 2I (gated) or I.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..enums import ActivationType
from ..errors import ConfigError, DTypeError, RoutingError, ShapeError, expect
from ..interop import dtype_name, require_framework_tensor, require_same_device, same_device
from ..quant.format import BlockScaledTensor
from ..quant.tokens import is_fp8
from ..refusals import need_dtype, need_shape
from ..routing.metadata import RoutingMetadata
from .activations import pre_activation_width
from .capabilities import EngineRecord, format_problem
from .expert_matrices import tensors_of
from .interface import EngineWeights
from .settings import EngineSettings
from .tokens import TOKEN_DTYPES, PendingWgrad, Saved, Tokens, token_format

Tensor = torch.Tensor
Shape = tuple[int, ...]


def check_weights(
    w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, activation: ActivationType
) -> None:
    """`check_shapes` of tensors."""
    given = (None if each is None else tuple(map(int, each.shape)) for each in (w1, w2, b1, b2))
    check_shapes(*given, activation)  # type: ignore[arg-type]


# A node asks again after every write. Of shapes that fit, the answer is kept.
@functools.lru_cache(maxsize=256)
def check_shapes(
    w1: Shape, w2: Shape, b1: Shape | None, b2: Shape | None, activation: ActivationType
) -> None:
    """Check the shapes of native weights and biases against each other; ShapeError names the one that is
    wrong. Kernels would take a bias of another shape that has as many elements.
    """
    for name, shape, needed in (("w1", w1, "[E, N1, H]"), ("w2", w2, "[E, H, I]")):
        expect(len(shape) == 3, ShapeError, f"{name} has shape {shape}; needed: {needed}")
    # Before the comparisons below, which would blame one of two wrong weights.
    _refuse_transposed(w1, w2, activation)
    experts, n1, hidden = w1
    inner = w2[2]
    wanted = (experts, hidden, inner)
    expect(w2 == wanted, ShapeError, f"w2 has shape {w2}; w1 {w1} needs [E, H, I] = {wanted}")
    width = pre_activation_width(inner, activation)
    words = f"w1 has {n1} rows per expert; {activation.value} with I={inner} needs {width}"
    expect(n1 == width, ShapeError, words)
    expect((b1 is None) == (b2 is None), ShapeError, "b1 and b2 must be given both or neither")
    for name, bias, size in (("b1", b1, (experts, n1)), ("b2", b2, (experts, hidden))):
        fits = bias is None or bias == size
        expect(fits, ShapeError, f"{name} has shape {bias}; needed: {size}")


def _refuse_transposed(up: Shape, down: Shape, activation: ActivationType) -> None:
    """Raise where w1, w2 or both fit once their last two axes change places."""
    turned_up, turned_down = (up[0], up[2], up[1]), (down[0], down[2], down[1])
    if _fit(up, down, activation):
        return
    # Every way of turning them that fits is a better message than two shapes.
    for first, second, looks in (
        (turned_up, down, "w1 looks"),
        (up, turned_down, "w2 looks"),
        (turned_up, turned_down, "both look"),
    ):
        if _fit(first, second, activation):
            raise ShapeError(
                f"w1 has shape {up} and w2 {down} with the experts first, and {looks} transposed; "
                f"needed: [E, N1, H] = {first} and [E, H, I] = {second}"
            )


def _fit(up: Shape, down: Shape, activation: ActivationType) -> bool:
    experts, hidden, inner = down
    return up == (experts, pre_activation_width(inner, activation), hidden)


def check_forward(
    x: Any,
    routing: RoutingMetadata,
    weights: EngineWeights,
    settings: EngineSettings,
    record: EngineRecord,
) -> None:
    """Check tokens and routing at the border of the engine with this record: FP8 bytes without their
    scales are refused here, and formats that the engine or the recipe does not read.
    """
    # Asked at every forward, so messages are composed for errors only: `expect` would compose them
    # always.
    given = x
    if isinstance(x, BlockScaledTensor):
        _require_format(record, "x", x, format_problem(record, settings, token_format(x)))
        given = x.codes
    else:
        require_framework_tensor(x, "x")
        if x.dtype not in TOKEN_DTYPES:
            need_dtype("x", x, *TOKEN_DTYPES)
    wanted = (routing.num_tokens, weights.hidden_size)
    if tuple(x.shape) != wanted:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}; routing and weights need [T, H] = {wanted}"
        )
    if weights.adapters is not None:
        if not record.low_rank:
            raise ConfigError(
                f"the {record.name.value} engine has no low-rank adapters, and the layer has some"
            )
        weights.adapters.check(*weights.native_shapes)
    # Counts of experts agree wherever both come from one model; a rank of another size shows here.
    if routing.num_experts != weights.num_experts:
        raise RoutingError(
            f"routing is for {routing.num_experts} experts, the weights hold {weights.num_experts}"
        )
    # Blocks of the recipe must not span two experts. More padding than needed is no harm.
    if routing.alignment % settings.row_alignment:
        raise RoutingError(
            f"routing pads experts to {routing.alignment} rows; the recipe needs a multiple of {settings.row_alignment}"
        )
    # Plain weights under a recipe would compute something else without a word.
    w1: Any = weights.w1
    quantised = isinstance(w1, BlockScaledTensor)
    if quantised != (settings.recipe is not None):
        raise DTypeError(
            f"weights are {'block-scaled' if quantised else 'plain'}, the settings have recipe "
            f"{settings.recipe and settings.recipe.name!r}; needed: weights from prepare_weights with these settings"
        )
    # One comparison for the usual case. The list that names every tensor is made for an error only.
    w1, anchor = tensors_of(w1)[0], routing.held[0]
    if not (same_device(given, anchor) and same_device(given, w1)):
        require_same_device([("x", given), ("routing", anchor), ("weights", w1)])


def _require_format(
    record: EngineRecord, name: str, tokens: BlockScaledTensor, problem: str | None
) -> None:
    if problem is not None:
        kind = DTypeError if token_format(tokens) not in record.tokens else ConfigError
        raise kind(
            f"the {record.name.value} engine cannot read {name}: {problem}; "
            "needed: the values in bfloat16"
        )


def check_dout(dout: Any, saved: Saved, record: EngineRecord) -> Tokens:
    """Check the gradient of the output as `check_forward` checks tokens, and return it with contiguous
    rows. RuntimeError: an earlier backward released the activations.
    """
    quantised = isinstance(dout, BlockScaledTensor)
    if not quantised:
        require_framework_tensor(dout, "dout")
        if dout.dtype not in TOKEN_DTYPES:
            without = " without its scales" if is_fp8(dout) else ""
            others = ", or a dout_source of the node that has them" if is_fp8(dout) else ""
            raise DTypeError(
                f"dout is {dtype_name(dout.dtype)}{without}; needed: bfloat16, float16 or float32{others}"
            )
    # A second backward of one forward needs what stage-wise memory has freed.
    if saved.x is None:
        raise RuntimeError(
            "activations of this forward were released by an earlier backward (stage-wise memory)"
        )
    wanted = tuple(saved.x.shape)
    if tuple(dout.shape) != wanted:
        need_shape(False, "dout", dout, wanted)
    if not quantised:
        # Autograd may hand an expanded or a turned gradient; kernels read rows.
        return dout.detach().contiguous()  # type: ignore[no-any-return]
    problem = format_problem(record, saved.settings, token_format(dout), "dout")
    _require_format(record, "dout", dout, problem)
    require_same_device(
        [("dout", dout.codes), ("its scales", dout.scale_inv), ("routing", saved.routing.held[0])]
    )
    return dout


def require_operands(pending: PendingWgrad) -> None:
    """Refuse weight gradients whose operands an earlier `backward_dw` released."""
    missing = pending.x is None or pending.dout is None
    if missing or pending.dz is None or pending.y1s is None:
        raise RuntimeError(
            "the operands of these weight gradients were released by an earlier backward_dw"
        )
