"""`ExpertWeights`: the user's parameters, what engines read of them, and the fp32 accumulators
their gradients wait in.

One object lives as long as its layer. Parameters are never rebound, copied over or written;
gradients are added in place.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch

from . import gradients, layouts
from .engine.activations import pre_activation_width
from .engine.interface import Engine, EngineSettings, EngineWeights, GradAccumulators
from .enums import ActivationType, is_glu
from .errors import DTypeError, LayoutError, ShapeError, expect
from .gradients import Destination, add_to_grad, add_to_main_grad, check_main_grad
from .interop import (
    IS_PADDLE,
    current_stream,
    data_ptr,
    device_name,
    dtype_name,
    grad_enabled,
    is_cuda,
    numel,
    plain_ops,
    require_framework_tensor,
    requires_grad,
)
from .layouts import StackedMatrices, WeightSource, native_matrices
from .stream_order import StreamOrder
from .weight_changes import optimizer_steps, weight_fingerprint

Tensor = torch.Tensor
logger = logging.getLogger("sonicmoe")

PARAMETER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ExpertParameters(ABC):
    """The user's weights of E local experts in one of the supported arrangements: up `[H, N1]`,
    gate half first, down `[I, H]`.
    """

    activation: ActivationType
    transposed = True

    @property
    def split_half(self) -> bool:
        """Whether up has a gate and an up half."""
        return is_glu(self.activation)

    @abstractmethod
    def parameters(self) -> list[Tensor]:
        """Every parameter, in a fixed order."""

    def native(self) -> tuple[Tensor, Tensor]:
        """Native copies `(w1 [E, N1, H], w2 [E, H, I])` in the parameters' dtype."""
        return native_matrices(self.source())

    @abstractmethod
    def native_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Shapes of `native()` without making it."""

    @abstractmethod
    def source(self, parameters: Sequence[Tensor] | None = None) -> WeightSource:
        """Where the weights lie, one matrix per expert and projection; `parameters`: what
        `parameters()` has just returned.
        """

    @abstractmethod
    def user_gradients(self, accumulators: GradAccumulators) -> Iterator[tuple[Tensor, Tensor]]:
        """`(parameter, fp32 gradient in the parameter's own layout)` pairs; the gradients are fresh
        tensors.
        """


_up_weight, _down_weight = attrgetter("up_gate_proj.weight"), attrgetter("down_proj.weight")


class PerExpertParameters(ExpertParameters):
    """ERNIE / Fleet modules: `expert.up_gate_proj.weight [H, 2I]` (split-half, gate first) and
    `expert.down_proj.weight [I, H]`.

    Args:
        experts: modules in local-id order; `None` entries (experts of other ranks) are skipped.
        num_experts, hidden_size, intermediate_size: what the weights must match.

    Raises:
        LayoutError: a module lacks a projection, or the number of local experts is not
            `num_experts`.
        ShapeError, DTypeError: naming the weight.
    """

    def __init__(
        self,
        experts: Sequence[Any],
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: ActivationType,
    ) -> None:
        """Collect and check the weights; keeps references to the modules."""
        local = [expert for expert in experts if expert is not None]
        expect(
            len(local) == num_experts,
            LayoutError,
            f"experts holds {len(local)} local modules ({len(experts)} entries, None = another rank's); n_experts is {num_experts}",
        )
        self.activation = activation
        self._experts = local
        width = pre_activation_width(intermediate_size, activation)
        for index, expert in enumerate(local):
            up_gate, down = (
                _projection(expert, index, "up_gate_proj"),
                _projection(expert, index, "down_proj"),
            )
            _check_parameter(
                up_gate.weight,
                f"experts[{index}].up_gate_proj.weight",
                (hidden_size, width),
                "[H, 2I]",
            )
            _check_parameter(
                down.weight,
                f"experts[{index}].down_proj.weight",
                (intermediate_size, hidden_size),
                "[I, H]",
            )

    def parameters(self) -> list[Tensor]:
        """up_gate of every expert, then down of every expert; read from the modules, which may
        replace them.
        """
        return [*map(_up_weight, self._experts), *map(_down_weight, self._experts)]

    def native_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """From the first expert."""
        first, count = self._experts[0], len(self._experts)
        hidden, n1 = (int(size) for size in first.up_gate_proj.weight.shape)
        return (count, n1, hidden), (count, hidden, int(first.down_proj.weight.shape[0]))

    def source(self, parameters: Sequence[Tensor] | None = None) -> WeightSource:
        weights, experts = tuple(parameters or self.parameters()), len(self._experts)
        return WeightSource(weights[:experts], weights[experts:], self.transposed, self.split_half)

    def user_gradients(self, accumulators: GradAccumulators) -> Iterator[tuple[Tensor, Tensor]]:
        """One pair per expert and projection."""
        for index, expert in enumerate(self._experts):
            yield (
                expert.up_gate_proj.weight,
                layouts.split_half_from_native_w1(accumulators.dw1[index], self.split_half),
            )
            yield expert.down_proj.weight, layouts.user_w2_from_native(accumulators.dw2[index])


class FusedParameters(ExpertParameters):
    """Two stacked parameters: `weight1 [E, H, 2I]` (split-half, gate first) and `weight2 [E, I,
    H]`.
    """

    def __init__(self, weight1: Tensor, weight2: Tensor, activation: ActivationType) -> None:
        """Check the pair against each other."""
        require_framework_tensor(weight1, "weight1")
        require_framework_tensor(weight2, "weight2")
        expect(
            len(weight1.shape) == 3,
            ShapeError,
            f"weight1 has shape {tuple(weight1.shape)}; needed: [E, H, 2I]",
        )
        expect(
            len(weight2.shape) == 3,
            ShapeError,
            f"weight2 has shape {tuple(weight2.shape)}; needed: [E, I, H]",
        )
        experts, hidden, _ = (int(size) for size in weight1.shape)
        intermediate = int(weight2.shape[1])
        width = pre_activation_width(intermediate, activation)
        _check_parameter(weight1, "weight1", (experts, hidden, width), "[E, H, 2I]")
        _check_parameter(weight2, "weight2", (experts, intermediate, hidden), "[E, I, H]")
        self.activation = activation
        self._weights = (weight1, weight2)

    def parameters(self) -> list[Tensor]:
        """`[weight1, weight2]`."""
        return list(self._weights)

    def native_shapes(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """The fused shapes, transposed."""
        experts, hidden, n1 = (int(size) for size in self._weights[0].shape)
        return (experts, n1, hidden), (experts, hidden, int(self._weights[1].shape[1]))

    def source(self, parameters: Sequence[Tensor] | None = None) -> WeightSource:
        """Views of each expert's matrices."""
        up, down = (StackedMatrices(weight.detach()) for weight in self._weights)
        return WeightSource(up, down, self.transposed, self.split_half)

    def user_gradients(self, accumulators: GradAccumulators) -> Iterator[tuple[Tensor, Tensor]]:
        """The two stacked gradients."""
        weight1, weight2 = self._weights
        yield weight1, layouts.split_half_from_native_w1(accumulators.dw1, self.split_half)
        yield weight2, layouts.user_w2_from_native(accumulators.dw2)


class ExpertWeights:
    """Engine weights cached per optimizer step, fp32 accumulators allocated at the first backward,
    and the flush between them.
    """

    FORGOTTEN_STEP_BACKWARDS = 1024  # more micro-batches than anybody accumulates

    def __init__(self, source: ExpertParameters) -> None:
        """Wrap the user's parameters; allocates nothing."""
        self.source = source
        self._prepared: EngineWeights | None = None
        self._prepared_for: tuple[Any, ...] | None = None
        self._fingerprint: tuple[int, ...] = ()
        self._optimizer_steps = 0
        self._updates = 0
        self._stale = True
        self._preparation = StreamOrder()
        self.additions = StreamOrder()  # to the accumulators
        self._accumulators: GradAccumulators | None = None
        self._backwards = 0
        self._backwards_since_step = 0
        self._incomplete = False
        self._cannot_see_changes = False
        self._warned_forgotten_step = False

    @property
    def unflushed(self) -> bool:
        """Whether the accumulators hold gradients of a backward that no flush has taken."""
        return self._backwards > 0

    @property
    def _untouched(self) -> bool:
        """Whether no backward, not even a failed one, has added since the last flush."""
        return not (self.unflushed or self._incomplete)

    def note_backward(self) -> None:
        """A backward has added to the accumulators."""
        self._backwards += 1
        self._backwards_since_step += 1
        # Weights that never get gradients never move: a step() that is never called shows in no
        # other way. Nor do changes of weights that nothing but step() announces, with complete
        # gradients too.
        waiting = self._backwards_since_step if self._cannot_see_changes else self._backwards
        if waiting == self.FORGOTTEN_STEP_BACKWARDS:
            self._warn_forgotten_step(f"{waiting} backward passes have run since node.step()")

    def note_failed_backward(self) -> None:
        """A backward stopped while it added: the accumulators may hold a part of its gradients."""
        self._incomplete = True

    def discard(self) -> None:
        """Zero the accumulators: their gradients are not wanted."""
        if self._accumulators is not None:
            self.additions.enter(self._accumulators.dw1)
            with plain_ops():
                for tensor in self._accumulators.tensors():
                    tensor.zero_()
            self.additions.leave()
        self._backwards, self._incomplete = 0, False

    def prepared(
        self, engine: Engine, settings: EngineSettings, parameters: Sequence[Tensor] | None = None
    ) -> EngineWeights:
        """What `engine` reads: cached until `invalidate`, a new pointer or other settings.
        `parameters`: read a moment ago, if they were.

        A write that no event announces is noticed by an engine that follows its weights, and on the
        host, where their bytes are compared. On a GPU that would wait for the device: there the
        other engines go by PyTorch's version counters and optimizer steps. Paddle has neither, so
        with them `invalidate` is the contract of training, and nothing is trusted without
        gradients.

        Raises:
            LayoutError: the framework has freed the memory of a weight.
        """
        training = grad_enabled()
        with plain_ops():
            parameters = parameters or self.source.parameters()
            _check_memory(parameters)
            source = self.source.source(parameters) if engine.follows_weights else None
            pointers = tuple(map(data_ptr, parameters)) if source is None else source.pointers
            key = (engine.name, settings, pointers)
            on_gpu = is_cuda(parameters[0])
            fingerprint = (
                weight_fingerprint(parameters) if on_gpu or not engine.follows_weights else ()
            )
            steps = optimizer_steps() if on_gpu else 0
            previous = self._prepared if key == self._prepared_for else None
            self._cannot_see_changes = not fingerprint and not engine.follows_weights
            changed = self._stale or previous is None or (self._cannot_see_changes and not training)
            if previous is not None:
                changed = self._look_for_changes(fingerprint, steps, announced=changed) or changed
            if not engine.follows_weights:  # the others order their streams by themselves
                self._preparation.enter(parameters[0])
            if changed or engine.follows_weights:
                source = source or self.source.source(parameters)
                self._prepared = engine.prepare_source(source, settings, previous, changed)
            if not engine.follows_weights:
                self._preparation.leave()
            self._prepared_for, self._fingerprint, self._optimizer_steps, self._stale = (
                key,
                fingerprint,
                steps,
                False,
            )
            assert self._prepared is not None
            return self._prepared

    @property
    def updates(self) -> int:
        """How many changes of the weights `prepared` has seen, as far as the host can: no fused
        optimizer of Paddle leaves a trace.
        """
        return self._updates

    def check_current(self, prepared: EngineWeights, updates: int) -> None:
        """Whether a backward still finds the weights of its forward, which saw that many `updates`;
        waits for nothing.

        Raises:
            RuntimeError: a later forward has written changed weights into the buffers of
                `prepared`.
        """
        if prepared is self._prepared and updates != self._updates:
            raise RuntimeError(
                "expert weights were changed, and read by another forward, between this forward and its backward; its gradients would "
                "mix old activations with new weights. Finish every backward before the optimizer steps"
            )

    def invalidate(self) -> None:
        """Trust nothing derived from the weights; the next forward makes it anew."""
        self._stale = True
        self._backwards_since_step = 0

    def accumulators(self, device: Any) -> GradAccumulators:
        """The native fp32 accumulators, allocated and zeroed on `device` at first use."""
        if self._accumulators is None:
            (experts, n1, hidden), (_, _, intermediate) = self.source.native_shapes()
            self._accumulators = GradAccumulators.zeros(
                experts, n1, hidden, intermediate, False, device
            )
        return self._accumulators

    @property
    def allocated_gradient_bytes(self) -> int:
        """Bytes of native accumulators held now; 0 before the first backward and after `release`."""
        return (
            0
            if self._accumulators is None
            else sum(4 * numel(t) for t in self._accumulators.tensors())
        )

    def release(self) -> None:
        """Free the accumulators.

        Raises:
            RuntimeError: they hold gradients that were not flushed.
        """
        if not self._untouched:
            raise RuntimeError(
                "accumulators hold gradients that were never flushed; call step() or discard_grads() first"
            )
        self._accumulators = None

    def flush(self) -> None:
        """Add the accumulated gradients into `main_grad` (or `.grad`) of every trainable parameter,
        then zero the accumulators.

        Does nothing when no backward ran since the last flush.
        """
        if self._flush_in_one_launch(through_autograd=False) is not None:
            return
        for parameter, gradient in self._drain():
            if not add_to_main_grad(parameter, gradient):
                add_to_grad(parameter, gradient)

    def flush_through_autograd(self) -> list[Tensor | None]:
        """Like `flush`, from inside a backward: a gradient without a `main_grad` to go to is
        returned, in `parameters()` order.

        Autograd then accumulates it into `.grad`; either way the framework fires each parameter's
        hooks exactly once.
        """
        flushed = self._flush_in_one_launch(through_autograd=True)
        if flushed is not None:
            return [
                entry.tensor if entry is not None and entry.returned else None for entry in flushed
            ]
        returned: dict[int, Tensor] = {}
        for parameter, gradient in self._drain():
            if not add_to_main_grad(parameter, gradient):
                earlier = returned.get(id(parameter))  # of another expert that shares the parameter
                returned[id(parameter)] = gradient if earlier is None else earlier + gradient
        ordered = [returned.pop(id(parameter), None) for parameter in self.source.parameters()]
        return [
            gradient if gradient is None else gradient.to(p.dtype)
            for gradient, p in zip(ordered, self.source.parameters(), strict=True)
        ]

    def _flush_in_one_launch(self, through_autograd: bool) -> list[Destination | None] | None:
        """Serve all parameters by the kernel: where the gradient of each went, None for frozen
        ones.

        None where there is nothing to flush, or no kernel for it: experts that share memory need
        one addition after the other.
        """
        held, parameters = self._accumulators, self.source.parameters()
        if (
            self._untouched
            or held is None
            or len({id(parameter) for parameter in parameters}) < len(parameters)
        ):
            return None
        kernel = gradients.kernel_for(held.dw1)
        if kernel is None:
            return None
        self._check_main_grads(held)
        with plain_ops():
            destinations = [
                Destination.of(p, through_autograd, held.dw1.device) if requires_grad(p) else None
                for p in parameters
            ]
            wanted = [destination for destination in destinations if destination is not None]
            if not gradients.fit_one_launch(wanted, device_name(held.dw1)):
                return None
            table, source = (
                gradients.destination_table(destinations, int(held.dw1.shape[0])),
                self.source,
            )
            self.additions.enter(held.dw1)
            kernel(
                held.dw1,
                held.dw2,
                table,
                source.transposed,
                source.split_half,
                current_stream(held.dw1),
            )
            self.additions.leave()
            for destination in wanted:
                destination.bind()
        self._backwards = 0
        return destinations

    def _check_main_grads(self, held: GradAccumulators) -> None:
        """Before the first addition: a repeated flush may add nothing twice."""
        if self._incomplete:
            raise RuntimeError(
                "a backward failed while it added weight gradients, and left a part of them in the node; call node.discard_grads(), "
                "which drops those of every backward since the last step(), and run the step again or skip it"
            )
        for parameter in self.source.parameters():
            if requires_grad(parameter):
                check_main_grad(parameter, held.dw1)

    def _drain(self) -> Iterator[tuple[Tensor, Tensor]]:
        """`(trainable parameter, gradient)` pairs; zeroes the accumulators when all were taken."""
        if self._untouched or self._accumulators is None:
            return
        self._check_main_grads(self._accumulators)
        self.additions.enter(self._accumulators.dw1)
        with plain_ops():
            for parameter, gradient in self.source.user_gradients(self._accumulators):
                if requires_grad(parameter):
                    yield parameter, gradient
            for tensor in self._accumulators.tensors():
                tensor.zero_()
        self.additions.leave()
        self._backwards = 0

    def _look_for_changes(
        self, fingerprint: tuple[int, ...], optimizer_steps: int, *, announced: bool
    ) -> bool:
        """Whether weights were, or may have been, written since they were prepared; says so where
        nobody announced it.
        """
        written, stepped = (
            fingerprint != self._fingerprint,
            optimizer_steps != self._optimizer_steps,
        )
        self._updates += written
        if not announced and (written or stepped):
            if self.unflushed:
                what = "expert weights changed" if written else "an optimizer stepped"
                self._warn_forgotten_step(
                    f"{what} while gradients wait in the node, and will be without them"
                )
            elif written:
                logger.info(
                    "expert weights changed without step() or invalidate_caches(); caches rebuilt"
                )
        return written or stepped

    def _warn_forgotten_step(self, symptom: str) -> None:
        if not self._warned_forgotten_step:
            self._warned_forgotten_step = True
            logger.warning(
                "%s; call node.step() after the last backward and before the gradient reduction",
                symptom,
            )


def _check_memory(parameters: Sequence[Tensor]) -> None:
    if not IS_PADDLE:
        if parameters[0].is_meta:
            raise LayoutError(
                "the experts' weights are on the meta device and hold no memory; needed: weights made real before the forward, and a "
                "node of stacked parameters made after that: it keeps the tensors it was given"
            )
        return
    freed = [index for index, parameter in enumerate(parameters) if not parameter._is_initialized()]  # type: ignore[attr-defined]
    expect(
        not freed,
        LayoutError,
        f"weights {freed} of the experts hold no memory; a forward needs all of them",
    )


def _projection(expert: Any, index: int, name: str) -> Any:
    module = getattr(expert, name, None)
    if module is not None and getattr(module, "weight", None) is not None:
        return module
    found = [
        candidate
        for candidate in ("gate_proj", "up_proj", "gate_up_fused_proj")
        if hasattr(expert, candidate)
    ]
    hint = (
        f"; it has {found}: fuse gate and up into one [H, 2I] weight, gate first" if found else ""
    )
    raise LayoutError(f"experts[{index}] ({type(expert).__name__}) has no {name}.weight{hint}")


def _check_parameter(weight: Any, name: str, shape: tuple[int, ...], legend: str) -> None:
    require_framework_tensor(weight, name)
    expect(
        weight.dtype in PARAMETER_DTYPES,
        DTypeError,
        f"{name} is {dtype_name(weight.dtype)}; needed: bfloat16, float16 or float32",
    )
    found = tuple(weight.shape)
    transposed = (*shape[:-2], shape[-1], shape[-2])
    hint = (
        "; it looks transposed: torch.nn.Linear stores [out, in]"
        if found == transposed != shape
        else ""
    )
    expect(
        found == shape, ShapeError, f"{name} has shape {found}; needed: {legend} = {shape}{hint}"
    )
    expect(
        weight.is_leaf,
        LayoutError,
        f"{name} is the result of an operation; needed: a leaf parameter, whose gradient can be kept",
    )
    expect(
        weight.is_contiguous(),
        LayoutError,
        f"{name} is not contiguous; needed: a contiguous {legend} parameter",
    )
