"""The seam between faces and engines: pure functions over plain data, no autograd, no framework
module, no state.

    forward(x, routing, weights, settings, save)      -> out, Saved
    backward_dx(dout, saved, weights)                  -> dx, dprobs, PendingWgrad
    backward_dw(pending, targets)                      -> None (adds fp32 weight gradients to the targets)

`dx` and `dw` are separate calls so that a schedule may put a combine, or a whole pipeline bubble,
between them.

Legend: T tokens, K slots, E experts, H hidden, I intermediate, N1 = 2I (gated) or I, R padded rows
in expert order.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from ..enums import ActivationType, EngineName
from ..errors import ConfigError, DTypeError, RoutingError, ShapeError, expect
from ..interop import (
    dtype_name,
    is_cuda,
    plain_ops,
    require_framework_tensor,
    require_same_device,
    same_device,
)
from ..layouts import WeightSource
from ..quant.format import BlockScaledTensor, Code
from ..quant.recipes import BlockShape
from ..quant.tokens import has_row_scales, is_fp8
from ..routing.metadata import RoutingMetadata
from .activations import pre_activation_width
from .capabilities import (
    RECORDS,
    EngineRecord,
    GradientTarget,
    TokenFormat,
    gradient_problem,
    token_problem,
)
from .settings import EngineSettings
from .targets import (
    FreshTargets,
    GradientTargets,
    NativeBuffer,
    ParameterTargets,
    WeightTarget,
    native_buffer,
)

__all__ = [
    "TOKEN_DTYPES",
    "BlockSpec",
    "Change",
    "Engine",
    "EngineSettings",
    "EngineWeights",
    "FreshTargets",
    "GradientTargets",
    "NativeBuffer",
    "ParameterTargets",
    "PendingWgrad",
    "Saved",
    "SavedSpec",
    "Tokens",
    "WeightTarget",
    "check_dout",
    "check_forward",
    "check_weights",
    "native_buffer",
    "plain_tokens",
    "routing_checksum",
    "token_dtype",
    "token_format",
]

Tensor = torch.Tensor
Tokens = Tensor | BlockScaledTensor
TOKEN_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class EngineWeights:
    """Weights as one engine reads them, made by `Engine.refresh`, valid until the user's weights
    change.

    w1 `[E, N1, H]`, w2 `[E, H, I]`: plain tensors, or block-scaled ones under a recipe. The
    `_dgrad` pair is the same logical matrices as backward reads them (the same objects when the
    recipe shares buffers).
    b1 `[E, N1]`, b2 `[E, H]`: fp32, or both None.
    store: engine-private state for bringing the weights up to date in place; opaque to callers.
    native: the engine's handle of these very tensors, once it made one.
    """

    w1: Tensor | BlockScaledTensor
    w2: Tensor | BlockScaledTensor
    w1_dgrad: Tensor | BlockScaledTensor
    w2_dgrad: Tensor | BlockScaledTensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    store: Any = None
    native: Any = field(default=None, init=False, repr=False)

    @property
    def updated_in_place(self) -> bool:
        """Whether the engine writes changed weights where these lie, and looks for changes on the
        device by itself. A CUDA graph then reads these addresses at every replay.
        """
        return self.store is not None

    @property
    def two_orders(self) -> bool:
        """Whether backward reads other memory than forward, so that forward's may go first."""
        return self.w1_dgrad is not self.w1

    def release_forward(self) -> None:
        """Drop forward's pair; backward's stays, and can no longer be brought up to date. Only where
        `two_orders`, and only when no forward and no recomputation of z is to come.
        """
        # Asked for the last time: they are read off the pair that goes.
        assert self.two_orders and self.num_experts and self.hidden_size and self.intermediate_size
        # `native` refers to all four tensors, and `store` to the buffers that it writes.
        for name in ("w1", "w2", "store", "native"):
            object.__setattr__(self, name, None)

    @functools.cached_property
    def num_experts(self) -> int:
        return int(self.w1.shape[0])

    @functools.cached_property
    def hidden_size(self) -> int:
        return int(self.w1.shape[2])

    @functools.cached_property
    def intermediate_size(self) -> int:
        return int(self.w2.shape[2])


class Change(Enum):
    """The host's knowledge of writes to the user's weights since an engine last read them."""

    NO = "no"  # nobody wrote them, as far as the host can see
    MAYBE = "maybe"  # the host cannot see writes: Paddle on a GPU, and replays of a CUDA graph
    YES = "yes"  # somebody wrote them, or announced that he would


@dataclass(eq=False)
class Saved:
    """The part of one forward that its backward needs. Fields are released (set to None) stage by
    stage when the settings ask for it.

    x `[T, H]` as given, plain or quantised; z `[R, N1]`: 8-bit codes, a plain tensor, or None when
    it is recomputed.
    """

    settings: EngineSettings
    routing: RoutingMetadata
    x: Tokens | None
    z: BlockScaledTensor | Tensor | None

    def take_z(self) -> BlockScaledTensor | Tensor | None:
        """Move `z` out, so that its holder alone keeps it alive and may drop it in the middle of a
        backward.
        """
        z, self.z = self.z, None
        return z

    def pack(self) -> tuple[list[Tensor], SavedSpec]:
        """Flatten into tensors (for `save_for_backward`) and everything else."""
        assert self.x is not None
        # This order is the format that `SavedSpec.unpack` reads. x comes first, because the Paddle
        # bridge asks the caller's tensors whether they were freed or written.
        x_spec: BlockSpec | None = None
        if isinstance(self.x, BlockScaledTensor):
            # The codes as the caller gave them, and not as bytes: a view would have another name.
            tensors = [self.x.codes, self.x.scale_inv]
            x_spec = BlockSpec(self.x.block, self.x.code)
        else:
            tensors = [self.x]
        tensors += self.routing.tensors()
        z_spec: BlockSpec | None = None
        if isinstance(self.z, BlockScaledTensor):
            tensors += [self.z.bytes, self.z.scale_inv]
            z_spec = BlockSpec(self.z.block, self.z.code)
        elif self.z is not None:
            tensors.append(self.z)
        return tensors, SavedSpec(self.settings, self.routing, x_spec, z_spec)


@dataclass(frozen=True)
class BlockSpec:
    """Static half of a block-scaled tensor."""

    block: BlockShape
    code: Code


@dataclass(frozen=True, eq=False)
class SavedSpec:
    """The static half of a `Saved`: holds no tensor, so autograd's saved-tensor machinery sees
    every byte.
    """

    settings: EngineSettings
    sizes: tuple[int, ...]
    host_counts: tuple[int, ...] | None
    x: BlockSpec | None
    z: BlockSpec | None
    routing_checksum: int | None

    def __init__(
        self,
        settings: EngineSettings,
        routing: RoutingMetadata,
        x: BlockSpec | None,
        z: BlockSpec | None,
    ) -> None:
        """Keep the routing's numbers, drop its tensors."""
        # The class is frozen, so its fields are set past `__setattr__`.
        self.__dict__.update(
            settings=settings,
            sizes=routing.sizes,
            host_counts=routing.host_counts,
            x=x,
            z=z,
            routing_checksum=routing_checksum(routing),
        )

    @property
    def given(self) -> int:
        """How many of the tensors, counted from the first, came from the caller: x, or its codes
        and scales.
        """
        return 1 if self.x is None else 2

    def unpack(self, tensors: list[Tensor] | tuple[Tensor, ...]) -> Saved:
        """Inverse of `Saved.pack`."""
        n_routing = len(RoutingMetadata.TENSOR_FIELDS)
        given, tensors = tensors[: self.given], tensors[self.given :]
        routing_tensors, rest = tensors[:n_routing], tensors[n_routing:]
        fields: tuple[Any, ...] = (*self.sizes, *routing_tensors)
        routing = RoutingMetadata(*fields, host_counts=self.host_counts)  # type: ignore[misc]
        # Under activation recompute the tensors come from a second forward and the spec from the
        # first.
        _check_same_routing(routing, self.routing_checksum)
        x: Tokens = given[0]
        if self.x is not None:
            x = BlockScaledTensor(given[0], given[1], self.x.block, self.x.code)
        z: BlockScaledTensor | Tensor | None = None
        if self.z is not None:
            z = BlockScaledTensor.from_bytes(rest[0], rest[1], self.z.block, self.z.code)
        elif rest:
            z = rest[0]
        return Saved(self.settings, routing, x, z)


def routing_checksum(routing: RoutingMetadata) -> int | None:
    """A checksum of which row serves which slot; None on a GPU, where reading it would wait, but
    for routing that was validated.
    """
    if is_cuda(routing.slot_row) and routing.host_counts is None:
        return None
    size = routing.num_tokens * routing.topk
    # Weighted by position: two slots that exchange their rows leave a plain sum as it was.
    position = torch.arange(1, size + 1, dtype=torch.int64, device=routing.slot_row.device)
    return int((routing.slot_row.reshape([size]) * position).sum())


def _check_same_routing(routing: RoutingMetadata, checksum: int | None) -> None:
    """Activation recompute rebuilds the tensors but not the host counts and the checksum: where
    they disagree, routing changed.
    """
    if checksum is None or routing.host_counts is None:
        return
    # Counts alone are not enough: another choice of tokens may have the same counts.
    rebuilt = tuple(int(count) for count in routing.expert_counts.tolist())
    expect(
        rebuilt == routing.host_counts and routing_checksum(routing) == checksum,
        RoutingError,
        f"routing differs between forward and recompute: tokens per expert were {list(routing.host_counts)}, are now {list(rebuilt)}"
        f"{' (other tokens)' if rebuilt == routing.host_counts else ''}; make the router deterministic, or recompute without it",
    )


@dataclass(eq=False)
class PendingWgrad:
    """Operands of the weight gradients, held between `backward_dx` and `backward_dw`.

    Row tensors are `[R, ...]` in expert order with zero padding rows: dz `[R, N1]`, y1s `[R, I]`
    (probability times y1), plain or quantised for wgrad. x, dout `[T, H]` are gathered inside.
    shares_gpu: other kernels will run beside these, on another stream. native: the engine's handle
    of the routing.
    """

    settings: EngineSettings
    routing: RoutingMetadata
    x: Tokens | None
    dout: Tokens | None
    dz: Any  # a tensor or a block-scaled one, the engine's own affair
    y1s: Any
    shares_gpu: bool = False
    native: Any = None


class Engine(ABC):
    """One implementation of the gated expert MLP, forward and backward. Stateless: every call may
    be repeated with equal results.
    """

    name: str

    @property
    def record(self) -> EngineRecord:
        """What this engine can compute, and into which kinds of targets it adds."""
        return RECORDS[EngineName(self.name)]

    def keep(self, previous: EngineWeights, change: Change) -> bool:
        """Bring `previous` up to date without a look at its source, which lies where it lay when
        `refresh` returned `previous`; `change` is not YES. False: this engine needs `refresh`.

        Asked at every forward, because describing the source takes the host longer than a launch.
        An engine that looks for changes on the device looks here too.
        """
        return change is Change.NO

    def refresh(
        self,
        source: WeightSource,
        settings: EngineSettings,
        previous: EngineWeights | None = None,
        change: Change = Change.YES,
    ) -> EngineWeights:
        """The user's weights as `forward` and `backward_dx` read them; called before every forward.

        This one returns `previous` while nothing changed, and makes everything anew otherwise. An
        engine that can look for changes on the device overrides it, keeps what it needs for that in
        `EngineWeights.store`, and writes changed weights in place.

        Args:
            source: where the weights lie.
            settings: static over a run.
            previous: what this method made of the same source and settings before, or None.
            change: what the host knows of writes since `previous` was returned.
        """
        # MAYBE makes new weights here, because this engine cannot look by itself.
        if previous is not None and change is Change.NO:
            return previous
        with plain_ops():
            w1, w2, b1, b2 = source.native()
            # Quantising starts from the parameters' own dtype, and rounds once; only plain weights
            # are cast.
            if settings.recipe is None:
                dtype = source.compute_dtype
                w1, w2 = (w1, w2) if dtype is None else (w1.to(dtype), w2.to(dtype))
            elif b1 is not None and b2 is not None:
                # A cache keeps quantised weights, and must not keep the user's biases alive or
                # show writes to them in the backward of an older forward.
                b1, b2 = (bias.to(torch.float32).clone() for bias in (b1, b2))
            return self.prepare_weights(w1, w2, b1, b2, settings)

    @abstractmethod
    def prepare_weights(
        self, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, settings: EngineSettings
    ) -> EngineWeights:
        """`refresh` of weights that are native already: `w1 [E, N1, H]`, `w2 [E, H, I]`."""

    @abstractmethod
    def forward(
        self,
        x: Tokens,
        routing: RoutingMetadata,
        weights: EngineWeights,
        settings: EngineSettings,
        *,
        save: bool = True,
    ) -> tuple[Tensor, Saved | None]:
        """`out[t] = sum_k p[t,k] * (act(x_t W1_e) W2_e + b2_e)`, `[T, H]` in the dtype of `x`;
        `save=False` keeps nothing (inference).

        Tokens that their sender quantised are read as they are, where the engine's record lists
        their format, and stand for bfloat16. No row without a valid slot is read into a result.
        """

    @abstractmethod
    def backward_dx(
        self, dout: Tokens, saved: Saved, weights: EngineWeights
    ) -> tuple[Tensor, Tensor, PendingWgrad]:
        """`(dx [T, H] in `token_dtype` of x, dprobs fp32 [T, K], operands of the weight gradients)`; dprobs
        is exactly 0 in invalid slots.

        A dout that its sender quantised is read as it is, where the engine's record lists its
        format. Its codes and scales are the operand of dgated, and their values that of wgrad.
        """

    @abstractmethod
    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """Add dw1, dw2 (and bias gradients) to the targets and release `pending`.

        Where it raises before its first addition, nothing was added. `pending` still holds its
        operands then, unless stage-wise memory has freed some, and the call may be repeated.
        """

    def writes_gradients(self, settings: EngineSettings) -> bool:
        """Whether `backward_dw` takes `FreshTargets` under these settings."""
        return GradientTarget.FRESH in self.record.gradients

    def problem_of(self, targets: ParameterTargets, settings: EngineSettings) -> str | None:
        """Why this engine cannot add to these parameters' own memory in any way, in one sentence, or
        None; what no engine could add to is `ParameterTargets.problem`.
        """
        if GradientTarget.MAIN_GRAD in self.record.gradients:
            return None
        return f"the {self.name} engine adds to accumulators in the native layout only"

    def backward(
        self,
        dout: Tokens,
        saved: Saved,
        weights: EngineWeights,
        targets: GradientTargets | None,
    ) -> tuple[Tensor, Tensor]:
        """`backward_dx`, then `backward_dw` unless `targets` is None (frozen weights)."""
        dx, dprobs, pending = self.backward_dx(dout, saved, weights)
        if targets is not None:
            self.backward_dw(pending, targets)
        return dx, dprobs


def check_weights(
    w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, activation: ActivationType
) -> None:
    """Check native weights and biases against each other.

    Raises:
        ShapeError: naming the tensor, its shape and the shape needed; or one bias without the
            other.
    """
    expect(len(w1.shape) == 3, ShapeError, f"w1 has shape {tuple(w1.shape)}; needed: [E, N1, H]")
    expect(len(w2.shape) == 3, ShapeError, f"w2 has shape {tuple(w2.shape)}; needed: [E, H, I]")
    _refuse_transposed(w1, w2, activation)
    experts, n1, hidden = (int(size) for size in w1.shape)
    wanted = (experts, hidden, int(w2.shape[2]))
    expect(
        tuple(w2.shape) == wanted,
        ShapeError,
        f"w2 has shape {tuple(w2.shape)}; w1 {tuple(w1.shape)} needs [E, H, I] = {wanted}",
    )
    width = pre_activation_width(wanted[2], activation)
    expect(
        n1 == width,
        ShapeError,
        f"w1 has {n1} rows per expert; {activation.value} with I={wanted[2]} needs {width}",
    )
    expect((b1 is None) == (b2 is None), ShapeError, "b1 and b2 must be given both or neither")
    if b1 is not None and b2 is not None:
        expect(
            tuple(b1.shape) == (experts, n1),
            ShapeError,
            f"b1 has shape {tuple(b1.shape)}; needed: {(experts, n1)}",
        )
        expect(
            tuple(b2.shape) == (experts, hidden),
            ShapeError,
            f"b2 has shape {tuple(b2.shape)}; needed: {(experts, hidden)}",
        )


def _refuse_transposed(w1: Tensor, w2: Tensor, activation: ActivationType) -> None:
    """Raise where w1, w2 or both fit once their last two axes change places. Else the wrong one of
    the two might be blamed.
    """
    up, down = tuple(map(int, w1.shape)), tuple(map(int, w2.shape))
    turned_up, turned_down = (up[0], up[2], up[1]), (down[0], down[2], down[1])
    if _fit(up, down, activation):
        return
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


def _fit(up: tuple[int, ...], down: tuple[int, ...], activation: ActivationType) -> bool:
    experts, hidden, inner = down
    return up == (experts, pre_activation_width(inner, activation), hidden)


def token_format(x: Tokens) -> TokenFormat:
    """The form in which an engine is handed these tokens."""
    if not isinstance(x, BlockScaledTensor):
        return TokenFormat.PLAIN
    return TokenFormat.E4M3_ROW if has_row_scales(x) else TokenFormat.E4M3_1X128


def token_dtype(x: Tokens) -> torch.dtype:
    """The dtype of out and dx for these tokens: their own, or bfloat16 where they are quantised."""
    return torch.bfloat16 if isinstance(x, BlockScaledTensor) else x.dtype


def plain_tokens(x: Tokens | None) -> Tensor:
    """The tokens, for an engine whose border lets plain ones pass only."""
    assert x is not None and not isinstance(x, BlockScaledTensor)
    return x


def check_forward(
    x: Any,
    routing: RoutingMetadata,
    weights: EngineWeights,
    settings: EngineSettings,
    record: EngineRecord,
) -> None:
    """Check tokens and routing at the border of the engine with this record.

    Raises:
        DTypeError: `x` is not bf16, fp16 or fp32 (FP8 bytes without their scales are refused here),
            or quantised in a form that the engine does not read.
        ConfigError: `x` is quantised, and the recipe reads it in other blocks, or there is none.
        ShapeError, RoutingError, DeviceError: `x`, routing and weights do not fit together.
    """
    # Asked at every forward, so messages are composed for errors only: `expect` would compose them
    # always.
    if isinstance(x, BlockScaledTensor):
        _require_format(record, x, settings)
    else:
        require_framework_tensor(x, "x")
        if x.dtype not in TOKEN_DTYPES:
            raise DTypeError(f"x is {dtype_name(x.dtype)}; needed: bfloat16, float16 or float32")
    wanted = (routing.num_tokens, weights.hidden_size)
    if tuple(x.shape) != wanted:
        raise ShapeError(
            f"x has shape {tuple(x.shape)}; routing and weights need [T, H] = {wanted}"
        )
    if routing.num_experts != weights.num_experts:
        raise RoutingError(
            f"routing is for {routing.num_experts} experts, the weights hold {weights.num_experts}"
        )
    if routing.alignment % settings.row_alignment:
        raise RoutingError(
            f"routing pads experts to {routing.alignment} rows; the recipe needs a multiple of {settings.row_alignment}"
        )
    quantised = isinstance(weights.w1, BlockScaledTensor)
    if quantised != (settings.recipe is not None):
        raise DTypeError(
            f"weights are {'block-scaled' if quantised else 'plain'}, the settings have recipe "
            f"{settings.recipe and settings.recipe.name!r}; needed: weights from prepare_weights with these settings"
        )
    w1 = weights.w1.bytes if isinstance(weights.w1, BlockScaledTensor) else weights.w1
    given = x.codes if isinstance(x, BlockScaledTensor) else x
    row_token = routing.row_token
    if not (same_device(given, row_token) and same_device(given, w1)):
        require_same_device([("x", given), ("routing", row_token), ("weights", w1)])


def _require_format(record: EngineRecord, x: BlockScaledTensor, settings: EngineSettings) -> None:
    reason = token_problem(record, settings, token_format(x))
    if reason is not None:
        kind = DTypeError if token_format(x) not in record.tokens else ConfigError
        raise kind(
            f"the {record.name.value} engine cannot read x: {reason}; needed: the values in bfloat16"
        )


def check_dout(dout: Any, saved: Saved, record: EngineRecord) -> Tokens:
    """Check the gradient of the output at the border of the engine with this record, and return it
    with contiguous rows.

    Raises:
        DTypeError: it is FP8 without scales, or quantised in a form that the engine does not read.
        ConfigError: it is quantised, and the recipe reads it in other blocks, or there is none.
        ShapeError, DeviceError: its shape is not that of `out`, or it lies elsewhere.
        RuntimeError: an earlier backward released the activations.
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
    if saved.x is None:
        raise RuntimeError(
            "activations of this forward were released by an earlier backward (stage-wise memory)"
        )
    if tuple(dout.shape) != tuple(saved.x.shape):
        raise ShapeError(f"dout has shape {tuple(dout.shape)}; needed: {tuple(saved.x.shape)}")
    if not quantised:
        return dout.detach().contiguous()  # type: ignore[no-any-return]
    _require_gradient_format(record, dout, saved.settings)
    require_same_device(
        [("dout", dout.codes), ("its scales", dout.scale_inv), ("routing", saved.routing.row_token)]
    )
    return dout


def _require_gradient_format(
    record: EngineRecord, dout: BlockScaledTensor, settings: EngineSettings
) -> None:
    reason = gradient_problem(record, settings, token_format(dout))
    if reason is not None:
        kind = DTypeError if token_format(dout) not in record.tokens else ConfigError
        raise kind(
            f"the {record.name.value} engine cannot read dout: {reason}; needed: the values in bfloat16"
        )
