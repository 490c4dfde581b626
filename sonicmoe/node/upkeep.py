"""What a training loop asks of a node between its calls: steps, caches, warm-up."""

from __future__ import annotations

from pathlib import Path

import torch

from ..engine.settings import TokenFormat
from ..enums import ActivationParameters, ActivationType
from ..interop import device_name, dtype_name, is_cuda
from ..jit_warmup import warmup_jit
from ..late_errors import raise_found
from ..layer.plan import OwnPlan, dtype_beside
from ..layer.state import LayerState
from ..observe import stage
from ..out_of_memory import advising
from ..routing.backends import arch_of
from ..weights.copies import WeightCopies
from ..weights.parameters import check_memory

Tensor = torch.Tensor


class NodeUpkeep:
    """The part of `SonicMoEMlpNode` that computes no output.

    n_experts, hidden_size, intermediate_size: E, H, I.
    """

    n_experts: int
    hidden_size: int
    intermediate_size: int
    activation_type: ActivationType
    activation_parameters: ActivationParameters
    _state: LayerState
    _plan: OwnPlan

    def step(self) -> None:
        """Have every weight gradient with its parameter, and mark weight caches stale.

        Call it once per optimizer step: after the last backward and before gradients are reduced,
        clipped or applied. Gradients that wait in the node (`flush="step"`) are added in place: to
        `main_grad` (a new fp32 tensor where it is None), or to `.grad` of a parameter without that
        attribute. All others are there already. With `first_backward="overwrite"` each gradient
        that no backward has written since the last step gets zeros, and the next backward writes.
        Idempotent.

        Raises:
            RuntimeError: gradients wait, and somebody replaced or wrote the memory that they go to,
                or the modules hold other parameters (`discard_grads` skips what waits); a backward
                failed while it added weight gradients; or `main_grad` was replaced after a backward
                that adds to it was captured into a CUDA graph.
            OutOfMemoryError: nothing is lost; call it again when there is memory.
            RoutingError: a dispatch before had more slots than `max_load` of `make_dispatcher` makes
                room for, so gradients are incomplete.
        """
        raise_found()
        self.flush_grads()
        self._state.gradients.end_step()
        self._state.questions.at_step(self._state.trained())
        # The optimizer writes the weights next, and no trace of that is relied on.
        self._state.bound.invalidate("node.step() announced an optimizer step")

    def flush_grads(self) -> None:
        """The gradient half of `step()`: flush, keep the weight caches. May run between
        micro-batches.
        """
        gradients = self._state.gradients
        # Where none waits there is no stage, and nothing that an activated configuration decides.
        if not gradients.waiting:
            gradients.flush()
            return
        with (
            self._plan.scope(),
            stage("flush"),
            advising("step()", self._plan.in_force().settings),
        ):
            gradients.flush()

    def invalidate_caches(self) -> None:
        """Forget everything derived from the weights; call it after loading or swapping weights
        outside an optimizer step.
        """
        self._state.bound.invalidate()

    def discard_grads(self) -> None:
        """Drop every weight gradient that waits in the node: of a batch that is skipped, or of a
        backward that failed half-way. What was added to `main_grad` goes when that is cleared; with
        `first_backward="overwrite"` the next backward writes over it, or `step()` zeroes it.
        """
        self._state.gradients.discard()

    def release_grads(self) -> None:
        """Free the accumulators until the next backward, and forget memory that captured backwards
        add to.

        Raises:
            RuntimeError: they hold gradients that were not flushed.
        """
        self._state.gradients.release()

    def prequantize_weights(self) -> None:
        """Build the weight caches now, ahead of the first forward of a step, for a backward too."""
        parameters = self._state.parameters.parameters()
        # The guard is that of a forward of plain tokens, so that it finds all of this bound. Gradients
        # may be off here, as inside a dispatch.
        kind = dtype_beside(parameters[0]), TokenFormat.PLAIN, False, False
        with self._plan.scope() as config, torch.enable_grad():
            given = self._plan, config.resolve(), parameters[0], kind, parameters
            self._state.bound.bind(*given)

    def make_copies(self) -> WeightCopies:
        """FP8 copies of the weights as they are now, for `forward(copies=)`.

        The caller holds them, and may then free the parameters' memory: by
        `_clear_to_zero_allocation()` under Paddle, by `untyped_storage().resize_(0)` under PyTorch.
        `step()`, `invalidate_caches()` and, under PyTorch, a step of an optimizer of the parameters
        make them stale (docs/weights.md).

        Raises:
            ConfigError: the configuration, or the engine that `auto` chooses, computes without FP8.
            LayoutError: the memory of a weight has been freed already.
        """
        layer = self._state.parameters
        parameters = layer.parameters()
        check_memory(parameters)
        plan = self._plan.fitted_to_weight(parameters[0])
        with self._plan.scope(), advising("make_copies()", plan.settings):
            return WeightCopies(plan.chosen, plan.settings, layer)

    def warmup(self) -> tuple[str, ...]:
        """Compile every kernel this node needs, once per cluster; returns their names (none on the
        CPU). Allocates no gradients.

        Raises:
            CompileError: a kernel does not compile, or compiling is forbidden.
        """
        weight = self._state.parameters.parameters()[0]
        device = device_name(weight)
        report = warmup_jit(
            self.n_experts,
            self.hidden_size,
            self.intermediate_size,
            device,
            dtype=dtype_name(dtype_beside(weight)),
            activation=self.activation_type,
            activation_parameters=self.activation_parameters,
            arch=arch_of(device) if is_cuda(weight) else None,
            config=self._plan.config,
        )
        return tuple(outcome.kernel for outcome in report.kernels)

    def dump(self, path: str | Path) -> None:
        """Write the inputs of the next backward, and of its forward, to `path`, for `sonicmoe
        bisect`. Copies weights and tokens to the host.

        Raises:
            DumpError: `path` cannot be written.
        """
        # One of the two lazy doors to `diagnostics/` (docs/design.md): a model that dumps nothing
        # loads none of it.
        from ..diagnostics.capture import dump

        dump(self, path)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of fp32 accumulators the node holds now; 0 unless `flush="step"`."""
        return self._state.gradients.nbytes
