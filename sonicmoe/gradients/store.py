"""`GradientStore`: the weight gradients of one layer, from the backward that adds them to the
parameters that they are for.

    begin ──► add: engine.backward_dw ──► end ─┬─ DIRECT    they are in main_grad
                     │                         ├─ AUTOGRAD  flush ──► main_grad, or autograd's
                     │                         └─ WAIT      ... flush at step() ──► main_grad, .grad
                     └─ fails after its first addition: incomplete, flush refuses ──► discard

Running out of memory loses nothing: engines take theirs before the first addition, and a flush that
ends early leaves every gradient either with its parameter or here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import cache
from operator import attrgetter, is_
from threading import RLock
from typing import Any

import torch

from ..engine.footprint import Footprint
from ..engine.interface import (
    Engine,
    EngineSettings,
    FreshTargets,
    NativeBuffer,
    ParameterTargets,
    PendingWgrad,
)
from ..engine.settings import GradientTarget
from ..enums import FlushMode
from ..errors import ConfigError, LayoutError, expect
from ..interop import device_name, plain_ops, requires_grad
from ..stream_order import StreamOrder
from ..weights.parameters import ExpertParameters
from . import destinations
from .destinations import add_to_grad, add_to_main_grad, check_main_grad
from .routes import (
    ABSENT,
    Addition,
    CapturedMemory,
    Route,
    direct_addition,
    direct_problem,
    fresh_addition,
    is_among,
    is_capturing,
    main_grads_of,
    stand_ins_for,
)

Tensor = torch.Tensor
logger = logging.getLogger("sonicmoe")

_LOOKS_FOR_MAIN_GRAD = (FlushMode.AUTO, FlushMode.DIRECT, FlushMode.PROMPT)
_RETURNS = (FlushMode.AUTO, FlushMode.BACKWARD, FlushMode.PROMPT)  # through autograd


class GradientStore:
    """Decides where each backward's weight gradients go, owns the memory that some wait in, and
    orders the streams that add to it.

    That memory is the native buffer: fp32, in the engines' layout, made by the first backward whose
    gradients do not go straight into `main_grad`. A flush converts it to each parameter's layout,
    adds it there in place, and zeroes it.
    """

    def __init__(self, parameters: ExpertParameters, mode: FlushMode = FlushMode.STEP) -> None:
        """Allocates nothing."""
        self._parameters = parameters
        self._mode = mode
        self._native: NativeBuffer | None = None
        self._additions = StreamOrder()
        self._direct: StreamOrder | None = None
        self._captured = CapturedMemory()
        self._footprints: dict[tuple[bool, ...], Footprint] = {}
        self._fitting: tuple[Any, ...] = ()  # where and what the last backward could add directly
        self._waiting = 0
        self._trained: list[bool] | None = None
        self._owners: Sequence[Tensor] | None = None
        self._incomplete = ""

    @property
    def waiting(self) -> int:
        """How many backwards have added gradients that no flush has taken."""
        return self._waiting

    @property
    def nbytes(self) -> int:
        """Bytes held now; 0 before the first backward and after `release`."""
        return 0 if self._native is None else self._native.nbytes

    def __reduce__(self) -> tuple[type[GradientStore], tuple[ExpertParameters, FlushMode]]:
        """A copy has no backward behind it: what waits here is for these parameters."""
        return GradientStore, (self._parameters, self._mode)

    @property
    def owners(self) -> Sequence[Tensor]:
        """The parameters that the gradients that wait are for, as the forward of the last backward
        found them; where none wait, the layer's now.
        """
        held = self._owners if self._waiting else None
        return self._parameters.parameters() if held is None else held

    def waits_for(self, parameters: Sequence[Tensor], trained: list[bool]) -> bool:
        """Whether the gradients that wait are for those of these parameters that `trained` marks."""
        return self._trained in (None, trained) and (
            self._owners is None or all(map(is_, self._owners, parameters))
        )

    def alone(self, like: Tensor) -> AbstractContextManager[Any]:
        """While inside, no other thread adds weight gradients on the device of `like`."""
        device = device_name(like)
        # `setdefault` and not `cache`, which may call twice where two threads ask at once.
        return _LOCKS.get(device) or _LOCKS.setdefault(device, RLock())

    def begin(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: Sequence[Tensor],
        trained: list[bool],
        dout: Tensor,
    ) -> Addition:
        """Decide where a backward that begins now adds its gradients, and take the memory.

        Args:
            parameters: the layer's, as the forward found them.
            trained: which of them want a gradient.
            dout: the gradient of the output, on whose device gradients are computed.

        Raises:
            ConfigError: `flush="direct"` was asked for and cannot be had; the message says why.
            DTypeError, ShapeError, DeviceError: see `check_main_grad`.
            LayoutError: a parameter is the result of an operation, and not of a module by now.
            RuntimeError: memory for a `main_grad` that is None would be made during a capture.
        """
        _check_leaves(parameters, trained, self._mode, self._parameters.name_of)
        if self._mode in _LOOKS_FOR_MAIN_GRAD:
            return self._begin_direct(engine, settings, parameters, trained, dout)
        accumulators = self.accumulators(engine, dout.device)
        if self._mode is FlushMode.STEP:
            return Addition(Route.WAIT, parameters, trained, accumulators)
        stand_ins = stand_ins_for(parameters, trained)
        return Addition(Route.AUTOGRAD, parameters, trained, accumulators, stand_ins=stand_ins)

    def check_collectable(self, parameters: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """Check that gradients can be given to a caller who wants none accumulated.

        Raises:
            RuntimeError: they would be added to `main_grad`, or wait for `step()`.
        """
        here = (p for p, wanted in zip(parameters, trained, strict=True) if wanted)
        returned = self._mode in _RETURNS
        if not returned or any(hasattr(parameter, "main_grad") for parameter in here):
            raise RuntimeError(
                "torch.autograd.grad or paddle.grad was asked for the gradient of an expert weight, and this node adds it to "
                "main_grad or keeps it for step(); nothing was added; needed: backward(), or weights without main_grad and "
                "flush='auto' or 'backward'"
            )

    def accumulators(self, engine: Engine, device: Any) -> NativeBuffer:
        """The native buffer, for an engine that is to add there; zeroed at first use."""
        kinds = engine.record.gradients
        if GradientTarget.NATIVE in kinds:
            return self._native_buffer(device)
        raise ConfigError(
            f"engine {engine.name!r} adds weight gradients into {[kind.value for kind in kinds]}; "
            f"this layer has {GradientTarget.NATIVE.value!r} accumulators"
        )

    def held(self) -> dict[str, Tensor]:
        """The memory that gradients wait in, by the name of the gradient, for those who inspect it;
        empty before the first backward.
        """
        return {} if self._native is None else self._native.named()

    def add(self, engine: Engine, pending: PendingWgrad, addition: Addition) -> None:
        """Have the engine add the gradients of one backward, on the current stream.

        Where it raises between its additions, the sums stay incomplete, because nobody can take
        back what was added.
        """
        anchor = addition.targets.anchor
        with self.alone(anchor):
            self._add(engine, pending, addition, anchor)

    def _add(
        self, engine: Engine, pending: PendingWgrad, addition: Addition, anchor: Tensor
    ) -> None:
        targets = addition.targets
        is_direct = addition.route is Route.DIRECT
        # Two backwards may run on two streams and add into the same memory. Each waits, on the
        # device, for the additions launched before it.
        order = self._additions
        if is_direct:
            order = self._direct = _into_parameters(device_name(anchor))
        order.enter(anchor)
        try:
            with plain_ops():
                for _, memory in addition.fresh:
                    memory.zero_()
                engine.backward_dw(pending, targets)
        except BaseException:
            # Nothing was added to what is fresh, and nobody else has seen it.
            if targets.adding and not isinstance(targets, FreshTargets):
                self.give_up(is_direct)
            targets.adding = False
            raise
        finally:
            order.leave()
        addition.bind()

    def give_up(self, is_direct: bool = False) -> None:
        """Gradients of a backward are lost; from now on every flush refuses, until `discard`."""
        self._incomplete = _PARTLY_IN_MAIN_GRAD if is_direct else _PARTLY_HERE

    def end(self, addition: Addition) -> list[Tensor | None]:
        """A backward has added its gradients, or has handed them to a queue that will. Returns
        those that autograd is to accumulate, in `parameters()` order.
        """
        # What was written for autograd has not waited here.
        if isinstance(addition.targets, NativeBuffer):
            self.note_backward(addition.trained, addition.parameters)
        returned: list[Tensor | None] = [None] * len(addition.trained)
        if isinstance(addition.targets, FreshTargets):
            returned = [*addition.targets.up.tensors, *addition.targets.down.tensors]
        elif addition.route is Route.AUTOGRAD:
            returned = self.flush_through_autograd()
            # The next backward of this layer is far away, and other layers need the memory.
            if self._mode in _LOOKS_FOR_MAIN_GRAD:
                self._native = None
        for index, zeros in addition.stand_ins.items():
            addition.parameters[index].grad_added_to_main_grad = True  # type: ignore[attr-defined]
            returned[index] = zeros
        return returned

    def note_backward(
        self, trained: list[bool] | None = None, parameters: Sequence[Tensor] | None = None
    ) -> None:
        """Gradients wait now, for those of `parameters` that `trained` marks; None: for the layer's
        at the flush, and for those that want one then.
        """
        self._waiting += 1
        # A module may hold other parameters by the time of the flush, which these are not for.
        self._trained, self._owners = trained, parameters

    def flush(self) -> None:
        """Add what waits into `main_grad` (or `.grad`) of every trainable parameter. Does nothing
        where no backward ran since the last flush.

        Raises:
            RuntimeError: a backward failed while it added, or the layer has other parameters by now;
                nothing is flushed.
            DTypeError, ShapeError, DeviceError: see `check_main_grad`; nothing is flushed.
        """
        self._flush(through_autograd=False)

    def settle(self) -> None:
        """All that a flush does where no gradients wait.

        Raises:
            RuntimeError: as `flush`; or a captured backward adds to memory that no parameter has.
        """
        # Additions straight into main_grad may run on another stream than the one that is about to
        # reduce it.
        if self._direct is not None:
            self._direct.join()
        self._captured.check()
        # A backward that failed is not counted as waiting, but a part of its gradients was added.
        if self._incomplete:
            raise RuntimeError(self._incomplete)

    def flush_through_autograd(self) -> list[Tensor | None]:
        """Like `flush`, from inside a backward: a gradient without a `main_grad` to go to is
        returned, in `parameters()` order.

        Autograd then accumulates it into `.grad`; either way the framework fires each parameter's
        hooks exactly once. Where it raises, nothing was handed over, and what waited is dropped:
        it was this backward's, which may then be repeated.
        """
        try:
            returned = self._flush(through_autograd=True)
            return returned or [None] * len(self._parameters.parameters())
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Drop what waits: its gradients are not wanted. What is in `main_grad` already stays."""
        if self._native is not None:
            self._additions.enter(self._native.dw1)
            _zero(self._native)
            self._additions.leave()
        self._waiting, self._owners, self._incomplete = 0, None, ""

    def release(self) -> None:
        """Free the memory until the next backward, and forget captured memory.

        Raises:
            RuntimeError: gradients wait that were not flushed.
        """
        if self._waiting or self._incomplete:
            raise RuntimeError(
                "accumulators hold gradients that were never flushed; call step() or "
                "discard_grads() first"
            )
        self._native = None
        self._captured = CapturedMemory()

    def _begin_direct(
        self,
        engine: Engine,
        settings: EngineSettings,
        parameters: Sequence[Tensor],
        trained: list[bool],
        dout: Tensor,
    ) -> Addition:
        main_grads = main_grads_of(parameters, trained)
        if is_among(ABSENT, main_grads):
            if self._mode is FlushMode.DIRECT:
                lacking = [main_grad is ABSENT for main_grad in main_grads].index(True)
                raise ConfigError(
                    f"flush='direct', and {self._parameters.name_of(lacking)} has no main_grad; needed: fp32 "
                    "main_grad (None: memory is made) on every one that trains, or flush='auto'"
                )
            self._say(Route.AUTOGRAD)
            absent = (m is ABSENT for m, wanted in zip(main_grads, trained, strict=True) if wanted)
            if all(absent) and not self._waiting:
                fresh = fresh_addition(
                    self._parameters, parameters, trained, engine, settings, dout
                )
                if fresh is not None:
                    return fresh
            accumulators = self.accumulators(engine, dout.device)
            return Addition(Route.AUTOGRAD, parameters, trained, accumulators)
        addition = direct_addition(self._parameters, parameters, trained, main_grads, dout)
        assert isinstance(addition.targets, ParameterTargets)
        # Where no main_grad has moved since the last backward, nobody asks about it again.
        # Of two parameters each may be added to by itself; of many, all are looked at as one.
        which = tuple(trained) if len(trained) == 2 else ()
        self._footprints[which] = addition.targets.recognise(self._footprints.get(which))
        # Usually four identities: the memory was recognised, and nothing else has changed.
        asked = self._footprints[which], engine, settings, device_name(dout)
        problem = None
        if asked != self._fitting:
            problem = direct_problem(addition, engine, settings, self._parameters, dout)
            self._fitting = asked if problem is None else ()
        if problem is not None:
            if self._mode is FlushMode.DIRECT:
                raise ConfigError(f"flush='direct' with the {engine.name} engine: {problem}")
            route = Route.AUTOGRAD if self._mode is FlushMode.PROMPT else Route.WAIT
            self._say(route, problem)
            accumulators = self.accumulators(engine, dout.device)
            stand_ins = stand_ins_for(parameters, trained) if route is Route.AUTOGRAD else {}
            return Addition(route, parameters, trained, accumulators, stand_ins=stand_ins)
        if is_capturing(dout):
            if addition.fresh:
                raise RuntimeError(
                    "main_grad is None while a backward is captured into a CUDA graph, and every replay would zero the memory "
                    "made for it; needed: main_grad allocated before the capture"
                )
            self._captured.keep(parameters, trained)
        addition.stand_ins = stand_ins_for(parameters, trained)
        self._say(Route.DIRECT)
        return addition

    def _say(self, route: Route, reason: str = "") -> None:
        """Once per process for each route and reason; only `auto` decides, so only there is it worth
        a line.
        """
        if self._mode not in (FlushMode.AUTO, FlushMode.PROMPT):
            return
        line = f"expert weight gradients {route.value}{': ' if reason else ''}{reason}"
        if line not in _said:
            _said.add(line)
            logger.log(logging.WARNING if reason else logging.INFO, line)

    def _native_buffer(self, device: Any) -> NativeBuffer:
        if self._native is None:
            (experts, n1, hidden), (_, _, intermediate) = self._parameters.native_shapes()
            self._native = NativeBuffer.zeros(experts, n1, hidden, intermediate, False, device)
        return self._native

    def _flush(self, through_autograd: bool) -> list[Tensor | None]:
        """The gradients that autograd is to accumulate, None for every other parameter; empty where
        nothing waited.
        """
        self.settle()
        native = self._native
        if native is None:
            return []
        with self.alone(native.dw1):
            return self._flush_native(native, through_autograd) if self._waiting else []

    def _flush_native(self, native: NativeBuffer, through_autograd: bool) -> list[Tensor | None]:
        parameters = self.owners
        if not through_autograd:
            self._check_held(parameters)
        trained = self._trained or list(map(requires_grad, parameters))
        # Before the first addition, so that a flush that raises may be repeated and adds nothing
        # twice.
        for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
            if wanted:
                check_main_grad(parameter, native.dw1, self._parameters.name_of, index)
        into_parameters = _into_parameters(device_name(native.dw1))
        with plain_ops():
            # Finding the kernel may compile and raise, so it comes before the first addition.
            launch = None
            # The kernel knows one layout for both projections.
            if self._parameters.keeps_layout(parameters):
                launch = destinations.one_launch(parameters, trained, native, through_autograd)
            self._additions.enter(native.dw1)
            into_parameters.enter(native.dw1)
            try:
                if launch is not None:
                    returned = launch.run(self._parameters.layout, native)
                else:
                    returned = self._add_one_by_one(parameters, trained, native, through_autograd)
            finally:
                into_parameters.leave()
                self._additions.leave()
        # Last: after a launch that failed the gradients still wait, and the flush may be repeated.
        self._waiting, self._owners = 0, None
        return returned

    def _check_held(self, owners: Sequence[Tensor]) -> None:
        """Raise where gradients wait for parameters that nobody will look at any more."""
        held = set(map(id, self._parameters.parameters()))
        gone = sum(id(parameter) not in held for parameter in owners)
        if gone:
            raise RuntimeError(
                f"weight gradients wait for {gone} expert parameters that the modules held in the forward and hold no longer "
                "(replaced, or resharded as FSDP2 does); needed: step() before that, a node with flush='auto', or "
                "discard_grads()"
            )

    def _add_one_by_one(
        self,
        parameters: Sequence[Tensor],
        trained: Sequence[bool],
        native: NativeBuffer,
        through_autograd: bool,
    ) -> list[Tensor | None]:
        """The flush by plain operations. It serves what one launch cannot: hosts, destinations that
        overlap or are strided, and experts that share a parameter, whose gradients are summed one
        after the other. The accumulators are zeroed; the kernel does that while it reads.
        """
        # The layer's parameters may be others by now.
        gradients = self._parameters.user_gradients(native, parameters)
        returned: list[Tensor | None] = [None] * len(parameters)
        if through_autograd:
            # A backward that runs out of memory must have handed over nothing, so all memory is
            # taken before the first addition.
            made = list(gradients)
            returned, gradients = _for_autograd(parameters, trained, made), iter(made)
        for wanted, (parameter, gradient, accumulator) in zip(trained, gradients, strict=True):
            # `user_gradients` yields fresh tensors, so a `main_grad` that is bound to one shares no
            # memory with the accumulator that is zeroed next.
            if wanted and not add_to_main_grad(parameter, gradient) and not through_autograd:
                add_to_grad(parameter, gradient)
            # At once: if memory ends at a later parameter, a second flush goes on there and adds
            # nothing twice.
            accumulator.zero_()
        return returned


def _for_autograd(
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    gradients: Sequence[tuple[Tensor, Tensor, Tensor]],
) -> list[Tensor | None]:
    """The gradients of the parameters that have no `main_grad`, in their dtype; None for others."""
    sums: dict[int, Tensor] = {}
    for wanted, (parameter, gradient, _) in zip(trained, gradients, strict=True):
        if wanted and not hasattr(parameter, "main_grad"):
            earlier = sums.get(id(parameter))
            sums[id(parameter)] = gradient if earlier is None else earlier + gradient
    # A shared parameter is an input of the autograd node once per expert; its sum is returned at
    # the first place only.
    ordered = [(parameter, sums.pop(id(parameter), None)) for parameter in parameters]
    return [None if sum_ is None else sum_.to(p.dtype) for p, sum_ in ordered]


def _zero(native: NativeBuffer) -> None:
    with plain_ops():
        for tensor in native.tensors():
            tensor.zero_()


def _check_leaves(
    parameters: Sequence[Tensor],
    trained: Sequence[bool],
    mode: FlushMode,
    name_of: Callable[[int], str],
) -> None:
    """Refuse tensors that a gradient is added to and never passed on from."""
    if all(map(_IS_LEAF, parameters)):
        return
    for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
        if wanted and not parameter.is_leaf:
            returned = mode in _RETURNS
            expect(
                returned and not hasattr(parameter, "main_grad"),
                LayoutError,
                f"{name_of(index)} is the result of an operation (a parametrization, "
                "functional_call), which its gradient must be passed on to; needed: a parameter without main_grad and "
                "flush='auto' or 'backward', or a leaf",
            )


_IS_LEAF: Callable[[Tensor], bool] = attrgetter("is_leaf")
_said: set[str] = set()
_LOCKS: dict[str, AbstractContextManager[Any]] = {}


@cache
def _into_parameters(device: str) -> StreamOrder:
    """The order of all additions into memory of parameters on a device. It is one for the whole
    process, because several nodes may have one parameter (experts shared by two layers).
    """
    return StreamOrder()


_PARTLY_HERE = (
    "a backward failed while it added weight gradients, and left a part of them in the node; call "
    "node.discard_grads(), which drops those of every backward since the last step(), and run the "
    "step again or skip it"
)
_PARTLY_IN_MAIN_GRAD = (
    "a backward failed while it added weight gradients, and left a part of them in main_grad; zero "
    "main_grad (the optimizer's clear_grad or zero_grad), call node.discard_grads(), and run the "
    "step again or skip it"
)
