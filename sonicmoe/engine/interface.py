"""The seam between faces and engines: pure functions over plain data, no autograd, no framework
module, no state.

    forward(x, routing, weights, settings, save)      -> out, Saved
    backward_dx(dout, saved, weights)                  -> dx, dprobs, PendingWgrad
    bias_gradients(pending)                            -> db1, db2
    backward_dw(pending, targets)                      -> None (adds fp32 weight gradients to the targets)

`dx` and `dw` are separate calls so that a schedule may put a combine, or a whole pipeline bubble,
between them. Gradients of biases are asked for by themselves where they go elsewhere than those of
the weights, or sooner.

Legend: T tokens, K slots, E experts, H hidden, I intermediate, N1 = 2I (gated) or I, R padded rows
in expert order.
"""

from __future__ import annotations

import copy
import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch

from ..enums import EngineName
from ..errors import ConfigError
from ..interop import plain_ops
from ..layouts import NATIVE, GateUp, StackedWeights, WeightLayout
from ..quant.format import BlockScaledTensor
from ..routing.metadata import RoutingMetadata
from ..weight_source import WeightSource
from .capabilities import RECORDS, EngineRecord
from .expert_matrices import ExpertMatrices
from .low_rank import NO_ADAPTERS, Adapters
from .settings import EngineSettings, GradientMode
from .targets import GradientTargets
from .tokens import (
    TOKEN_DTYPES,
    PendingWgrad,
    Saved,
    Tokens,
    plain_tokens,
    token_dtype,
    token_format,
)

__all__ = [
    "TOKEN_DTYPES",
    "Engine",
    "EngineSettings",
    "EngineWeights",
    "GradientMode",
    "GradientTargets",
    "PendingWgrad",
    "Saved",
    "Tokens",
    "plain_tokens",
    "token_dtype",
    "token_format",
]

Tensor = torch.Tensor
EngineWeight = Tensor | BlockScaledTensor | ExpertMatrices | GateUp


@dataclass(eq=False)
class EngineWeights:
    """Weights as one engine reads them, made by `Engine.refresh`, valid until the user's weights
    change.

    w1 `[E, N1, H]`, w2 `[E, H, I]`: plain tensors, or block-scaled ones under a recipe, or
    `ExpertMatrices` where the engine reads a matrix of each expert, or a `GateUp` where it reads a
    w1 in two tensors. The `_dgrad` pair is the same logical matrices as backward reads them (the
    same objects when the recipe shares buffers).
    b1 `[E, N1]`, b2 `[E, H]`: fp32, or both None.
    layout: how plain weights and b1 lie, where the engine reads them in another layout than the
        native one.
    store: engine-private state for bringing the weights up to date in place, by an engine that looks
        for changes on the device by itself; opaque to callers. A CUDA graph reads the addresses of
        these weights at every replay.
    native: the engine's handle of these very tensors, once it made one.
    adapters: low-rank pairs beside the weights (`with_adapters`), in the native order.
    """

    w1: EngineWeight
    w2: EngineWeight
    w1_dgrad: EngineWeight
    w2_dgrad: EngineWeight
    b1: Tensor | None = None
    b2: Tensor | None = None
    layout: WeightLayout = NATIVE
    store: Any = None
    native: Any = field(default=None, init=False, repr=False)
    adapters: Adapters | None = field(default=None, init=False, repr=False)

    def with_adapters(self, adapters: Adapters | None) -> EngineWeights:
        """These very weights with the adapters of one call; itself without any."""
        if adapters in (None, NO_ADAPTERS):
            return self
        # What is prepared outlives the call and has no adapters. The copy shares all that it holds.
        made = copy.copy(self)
        made.adapters = adapters
        return made

    def with_biases(self, b1: Tensor | None, b2: Tensor | None) -> EngineWeights:
        """These very weights with the biases of one call. The copy keeps the sizes that are known, also
        where forward's pair has gone.
        """
        made = copy.copy(self)
        made.b1, made.b2, made.native = b1, b2, None
        return made

    @property
    def two_orders(self) -> bool:
        """Whether backward reads other memory than forward, so that forward's may go first."""
        return self.w1_dgrad is not self.w1

    def add_backward(self, w1_dgrad: EngineWeight, w2_dgrad: EngineWeight) -> None:
        """Have backward read these from now on, also one whose forward ran before."""
        self.w1_dgrad, self.w2_dgrad, self.native = w1_dgrad, w2_dgrad, None

    def release_forward(self) -> None:
        """Drop forward's pair; backward's stays, and can no longer be brought up to date. Only where
        `two_orders`, and only when no forward and no recomputation of z is to come.
        """
        assert self.two_orders
        _ = self.native_shapes  # sizes are read off the pair that goes, and kept
        # `native` refers to all four tensors, and `store` to the buffers that it writes.
        for name in ("w1", "w2", "store", "native"):
            setattr(self, name, None)

    @functools.cached_property
    def native_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        experts, hidden = self.num_experts, self.hidden_size
        return (experts, self.n1, hidden), (experts, hidden, self.intermediate_size)

    @functools.cached_property
    def num_experts(self) -> int:
        return int(self.w1.shape[0])

    @functools.cached_property
    def n1(self) -> int:
        """Rows of a native w1."""
        return int(self.w1.shape[2 if self.layout.transposed else 1])

    @functools.cached_property
    def hidden_size(self) -> int:
        return int(self.w1.shape[1 if self.layout.transposed else 2])

    @functools.cached_property
    def intermediate_size(self) -> int:
        return int(self.w2.shape[1 if self.layout.transposed else 2])


class Engine(ABC):
    """One implementation of the gated expert MLP, forward and backward. Stateless: every call may
    be repeated with equal results.

    frees_dw1_first: `backward_dw` frees the operands of dw1 before it takes memory of fresh dw2.
    joins_codes: codes and scales of some experts behind those of others are codes of all.
    """

    name: str
    frees_dw1_first = False
    joins_codes = False

    def __reduce__(self) -> tuple[type[Engine], tuple[()]]:
        """A copy finds its kernels by itself."""
        return type(self), ()

    @functools.cached_property
    def record(self) -> EngineRecord:
        """What this engine can compute, and into which kinds of targets it adds."""
        return RECORDS[EngineName(self.name)]

    def in_one_order(self, settings: EngineSettings) -> EngineSettings:
        """Settings under which `refresh` makes only the order of the weights that forward reads, and
        every backward makes its own of it; `settings` where this engine has no such choice.
        `refresh` adds the other order to weights of one where it is given `settings` again.
        """
        return settings

    def keep(self, previous: EngineWeights, written: bool = False) -> bool:
        """Bring `previous` up to date without a look at its source, which lies where it lay when
        `refresh` returned `previous`. False: this engine needs `refresh`. written: the host knows of
        a write, or one may have come without a trace.

        Asked at every forward, because describing the source takes the host longer than a launch.
        An engine that looks for changes on the device looks here too.
        """
        return not written

    def refresh(
        self,
        source: WeightSource,
        settings: EngineSettings,
        previous: EngineWeights | None = None,
        written: bool = True,
    ) -> EngineWeights:
        """The user's weights as `forward` and `backward_dx` read them.

        This one makes everything anew. An engine that can look for changes on the device overrides
        it, keeps what it needs for that in `EngineWeights.store`, and writes changed weights in
        place.

        Args:
            source: where the weights lie.
            settings: static over a run.
            previous: what this method made of the same source and settings before, or None.
            written: whether the host knows of a write since `previous` was returned. Without one
                an engine that looks at the device decides by what it finds.
        """
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

    def read_stacked(
        self,
        weights: StackedWeights,
        layout: WeightLayout,
        dtype: torch.dtype | None,
        settings: EngineSettings,
    ) -> EngineWeights:
        """`refresh` of stacked weights for one call, after which nothing of them is kept; `dtype`:
        what they are cast to without a recipe.
        """
        source = WeightSource.stacked(*weights, layout=layout, compute_dtype=dtype)
        return self.refresh(source, settings)

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

    def bias_gradients(self, pending: PendingWgrad) -> tuple[Tensor, Tensor]:
        """The gradients of biases, fp32 sums over the rows of each expert: db1 `[E, N1]`, whose columns
        lie as `pending.split_half` says, and db2 `[E, H]`. Zeros for an expert without rows.

        It reads operands that `backward_dw` has not released, and releases none: the call may be
        repeated, and has equal bits again.
        """
        raise ConfigError(f"engine {self.name!r} computes no biases")

    @abstractmethod
    def backward_dw(self, pending: PendingWgrad, targets: GradientTargets) -> None:
        """Add dw1, dw2, and `bias_gradients` where the targets want these, to the targets, or write them
        there (`GradientMode.FRESH`), and release `pending`.

        Where it raises before its first addition, nothing was added. `pending` still holds its
        operands then, unless stage-wise memory has freed some, and the call may be repeated.
        """

    def writes_gradients(self, settings: EngineSettings, device: str) -> bool:
        """Whether `backward_dw` writes under these settings, on the device of this name: fresh memory,
        and the `main_grad`s that `problem_of` has no objection to. An engine that does not is given
        zeros to add to.
        """
        return GradientMode.FRESH in self.record.gradients

    def problem_of(
        self, targets: GradientTargets, settings: EngineSettings, layout: WeightLayout = NATIVE
    ) -> str | None:
        """Why this engine cannot add to these parameters' own memory in any way, in one sentence, or
        None. layout: of the weights, because operands of wgrad may lie as they do.
        """
        # An engine whose GEMMs cannot reach every layout says more in a method of its own.
        if GradientMode.MAIN_GRAD in self.record.gradients:
            return None
        return f"the {self.name} engine adds to accumulators in the native layout only"
