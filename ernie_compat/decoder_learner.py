"""The half of a learner that both frameworks share: a decoder, its step, its state. `torch` is
PyTorch or Paddle's torch proxy.

A step is launched without waiting for a GPU where the framework's optimizer allows it, and its
figures come back in one copy at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sonicmoe.config import current_config
from sonicmoe.engine.select import choose_engine
from sonicmoe.engine.settings import EngineSettings, Workload
from sonicmoe.enums import ActivationType
from sonicmoe.interop import device_name

from .checkpoint import require_matching_arrays
from .decoder import ErnieMoEDecoder
from .initial_weights import initial_weight
from .metrics import StepResult
from .model_config import ModelConfig, TrainConfig, node_config, token_dtype_name
from .ranks import Ranks, gather_state, is_expert, names_on_all_ranks

if TYPE_CHECKING:
    import torch
else:
    from sonicmoe.interop import torch
F = torch.nn.functional
Tensor = torch.Tensor


class DecoderLearner(ABC):
    """A decoder with its optimizer in one framework. Equal calls on equal state give equal bits.

    Under several ranks, every rank makes the same calls with the whole batch and takes its own part
    of it; results are those of all.

    Attributes:
        engine: of the experts: the one that runs, never "auto".
        gradient: the attribute in which a parameter's gradient is complete after the last backward
            and `node.step()`.
        moments: name in a checkpoint -> name in the optimizer's state.
        layer: the module that a forward calls, the decoder or a wrapper of it.
    """

    gradient: ClassVar[str]
    moments: ClassVar[Mapping[str, str]]
    layer: Any

    def __init__(
        self,
        decoder: ErnieMoEDecoder,
        model: ModelConfig,
        train: TrainConfig,
        precision: str,
        engine: str,
        ranks: Ranks,
        device: str,
    ) -> None:
        """Load the initial weights, then make what the optimizer keeps."""
        self.decoder, self.layer, self.model, self.train = decoder, decoder, model, train
        self.device, self.ranks, self.precision = device, ranks, precision
        self.engine = engine_in_use(model, precision, engine, device_name(decoder.lm_head.weight))
        self.parameters: dict[str, Any] = dict(decoder.named_parameters())
        for name, p in self.parameters.items():
            self._assign(p, initial_weight(name, tuple(p.shape), model, train.seed))
        self._weights_changed()
        self._make_optimizer()

    def train_step(self, tokens: np.ndarray, learning_rate: float) -> StepResult:
        """One optimizer step on int64 tokens `[B, S + 1]`, split into the configured number of
        micro-batches.
        """
        # Before the first launch: a copy to the device waits for everything that was launched.
        batches = [
            self._inputs_and_targets(part) for part in np.split(tokens, self.train.micro_batches)
        ]
        figures = self.launch_step(batches, learning_rate)
        # `tolist` is the one wait of a step.
        loss, aux_loss, z_loss, grad_norm, *counts = figures.tolist()
        shape = len(self.model.moe_layers), self.model.num_experts
        by_expert = np.array(counts, dtype=np.int64).reshape(shape)
        return StepResult(loss, aux_loss, z_loss, grad_norm, by_expert)

    def launch_step(self, batches: list[tuple[Tensor, Tensor]], learning_rate: float) -> Tensor:
        """One optimizer step on inputs `[B, S]` and targets `[B * S]` per micro-batch; PyTorch on a
        GPU waits for nothing.

        Returns:
            fp64 `[4 + L_moe * E]` on the device: the fields of `StepResult`, in its order.
        """
        parts = [self._micro_batch(*batch) for batch in batches]
        # Every weight has an fp32 `main_grad`, so gradients are there already and step() says that
        # the weights are about to change. An engine that cannot add there keeps gradients until
        # step(), which must therefore come before ranks add them up (docs/gradients.md, "The place of
        # step").
        for node in self.decoder.nodes:
            node.step()
        # The order matters: gradients are summed over ranks, then clipped by the norm of the sum,
        # then applied. Each rank's loss is its share of the mean, so gradients add up; an expert's
        # already hold all ranks' tokens.
        self.ranks.sum(self._gradients(experts=False))
        grad_norm = self._clip_gradients()
        self._update(learning_rate)
        losses = self._mean_over_ranks(torch.stack([losses for losses, _ in parts]).mean(0))
        counts = torch.stack([counts for _, counts in parts]).sum(0)
        return torch.cat(
            # fp64 holds counts and losses exactly, so one tensor and one copy serve both.
            [figures.reshape([-1]).to(torch.float64) for figures in (losses, grad_norm, counts)]
        )

    def evaluate(self, tokens: np.ndarray) -> float:
        """Mean cross entropy in nats on int64 tokens `[B, S + 1]`, without gradients."""
        with torch.no_grad():
            inputs, targets = self._inputs_and_targets(tokens)
            return float(self._mean_over_ranks(F.cross_entropy(self.layer(inputs).values, targets)))

    def dump_next_step(self, layer: int, path: Path) -> None:
        """Write the inputs of the experts of one MoE layer in the next step, forward and backward,
        to `path` (`sonicmoe.diagnostics.capture.dump`): those of the first micro-batch. DumpError
        where `path` cannot be written.
        """
        self.decoder.nodes[self.model.moe_layers.index(layer)].dump(path)

    def state(self) -> dict[str, np.ndarray]:
        """Copies of all ranks' parameters and optimizer state by name; `load_state` of them
        continues bit for bit.

        Every rank calls it. The names do not depend on the number of ranks, so any other number may
        load them.
        """
        local = {n: np.array(tensor.detach().cpu().numpy()) for n, tensor in self._local_state()}
        return gather_state(local, self.ranks, self.model.num_experts)

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Take over `state()` of an equally configured learner. CheckpointError names the first
        array that is missing, unknown or of another shape.
        """
        wanted = {
            there: tuple(tensor.shape)
            for name, tensor in self._local_state()
            for there in names_on_all_ranks(name, self.ranks.layout, self.model.num_experts)
        }
        require_matching_arrays(arrays, wanted)
        # `arrays` holds all ranks' experts; this takes those that this rank has.
        for name, tensor in self._local_state():
            self._assign(tensor, arrays[name])
        self._weights_changed()

    @abstractmethod
    def _make_optimizer(self) -> None:
        """Give every parameter a gradient, and make the optimizer with its state: all of it here,
        so that a checkpoint has one shape at every step.
        """

    @abstractmethod
    def _update(self, learning_rate: float) -> None:
        """Apply the gradients and set them to zero."""

    @abstractmethod
    def _moment(self, parameter: Tensor, key: str) -> Tensor:
        """The optimizer's own tensor; `key` is a value of `moments`."""

    def _assign(self, tensor: Tensor, array: np.ndarray) -> None:
        """Overwrite a tensor in place."""
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.array(array)))

    def _micro_batch(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = self.layer(inputs)
        loss = F.cross_entropy(out.values, targets)
        total = loss + self.model.aux_loss_coef * out.aux_loss + self.model.z_loss_coef * out.z_loss
        # Gradients of micro-batches and ranks are added up, so each loss is divided by their number
        # to make the sum a mean.
        (total / (self.train.micro_batches * self.ranks.layout.world_size)).backward()
        return torch.stack([loss, out.aux_loss, out.z_loss]).detach(), out.expert_counts

    def _inputs_and_targets(self, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        own = np.ascontiguousarray(self.ranks.layout.shard(tokens))
        on_device = torch.from_numpy(own).to(self.device)
        return on_device[:, :-1].contiguous(), on_device[:, 1:].reshape([-1])

    def _local_state(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's parameters and optimizer state, by their names in a checkpoint."""
        for name, parameter in self.parameters.items():
            yield f"weight/{name}", parameter
            for key, own in self.moments.items():
                yield f"{key}/{name}", self._moment(parameter, own)

    def _gradients(self, experts: bool) -> list[Tensor]:
        return [
            getattr(p, self.gradient)
            for name, p in self.parameters.items()
            if is_expert(name) == experts
        ]

    def _clip_gradients(self) -> Tensor:
        """Clip to `train.clip_norm`, without waiting; the norm over all parameters of all ranks, before.
        The frameworks' own clipping sees this rank's experts alone.
        """
        norm = self._norm_over_ranks()
        factor = (self.train.clip_norm / (norm + 1e-6)).clip(max=1.0)
        with torch.no_grad():
            for gradient in (*self._gradients(experts=False), *self._gradients(experts=True)):
                gradient.mul_(factor)
        return norm

    def _norm_over_ranks(self) -> Tensor:
        """The norm of all parameters' gradients, those of other ranks' experts included."""
        replicated, of_experts = (
            torch.stack([gradient.square().sum() for gradient in self._gradients(experts)]).sum()
            for experts in (False, True)
        )
        self.ranks.sum([of_experts])
        return (replicated + of_experts).sqrt()

    def _mean_over_ranks(self, values: Tensor) -> Tensor:
        self.ranks.sum([values])
        return values / self.ranks.layout.world_size

    def _weights_changed(self) -> None:
        for node in self.decoder.nodes:
            node.invalidate_caches()
            # an engine that cannot run here, or not at these sizes, says so now
            node.prequantize_weights()


def engine_in_use(model: ModelConfig, precision: str, engine: str, device: str) -> str:
    """Name of the engine that the nodes of such a model run on `device` ("cpu", "cuda:0"), with
    `auto` resolved. EngineUnavailableError where one that was asked for by name cannot run.
    """
    config = current_config(node_config(precision, engine))
    settings = EngineSettings.from_config(config, ActivationType.SWIGLU)
    workload = Workload(
        settings, model.hidden_size, model.intermediate_size, token_dtype_name(precision)
    )
    return choose_engine(device, config.engine, workload).engine.name
