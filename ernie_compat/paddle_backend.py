"""The learner in Paddle, wired as ERNIE trainers wire it: `MixPrecisionLayer` and
`MixPrecisionOptimizer` around AdamW.

Every parameter has an fp32 `main_grad`; the node adds its weight gradients there at `node.step()`,
everything else arrives through Paddle's gradient hooks. Parameters are fp32, so they are their own
master weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import paddle
from paddle.distributed.fleet.utils.mix_precision_utils import (
    MixPrecisionLayer,
    MixPrecisionOptimizer,
)
from paddle.nn import functional as F

from sonicmoe.interop import device_name

from .checkpoint import require_matching_arrays
from .initial_weights import has_weight_decay, initial_weights
from .metrics import StepResult
from .model_config import ModelConfig, TrainConfig
from .paddle_model import ErnieMoEDecoder
from .parallel import Parallel, gather_state, is_expert, whole_shapes
from .precision import engine_in_use, node_config, token_dtype_name

Tensor: TypeAlias = paddle.Tensor
MOMENTS = {
    "moment1": "moment1_0",
    "moment2": "moment2_0",
    "beta1_power": "beta1_pow_acc_0",
    "beta2_power": "beta2_pow_acc_0",
}


def make_learner(
    model: ModelConfig, train: TrainConfig, precision: str, engine: str, parallel: Parallel
) -> PaddleLearner:
    """The decoder on Paddle's current device, at its initial weights."""
    decoder = ErnieMoEDecoder(
        model, node_config(precision, engine), token_dtype_name(precision), parallel
    )
    in_use = engine_in_use(model, precision, engine, device_name(next(iter(decoder.parameters()))))
    return PaddleLearner(decoder, model, train, in_use, parallel)


class PaddleLearner:
    """`Learner` on a `paddle_model.ErnieMoEDecoder`."""

    def __init__(
        self,
        decoder: ErnieMoEDecoder,
        model: ModelConfig,
        train: TrainConfig,
        engine: str,
        parallel: Parallel,
    ) -> None:
        """Load the initial weights, give every parameter a `main_grad` and create the optimizer
        state.
        """
        self.decoder, self.model, self.train, self.parallel = decoder, model, train, parallel
        self.device, self.engine = str(paddle.device.get_device()), engine
        self.parameters = dict(decoder.named_parameters())
        self.num_parameters = sum(
            int(np.prod(p.shape)) * (parallel.layout.ep_size if is_expert(name) else 1)
            for name, p in self.parameters.items()
        )
        self._load_weights(initial_weights(model, train.seed))
        self.layer = MixPrecisionLayer(decoder, dtype="bfloat16")
        for parameter in self.parameters.values():
            # Allocated gradients keep an expert that got no token in the optimizer step, resumed or
            # not.
            parameter.main_grad = paddle.zeros(parameter.shape, dtype="float32")
        self.optimizer = MixPrecisionOptimizer(self._adamw())

    def train_step(self, tokens: np.ndarray, learning_rate: float) -> StepResult:
        parts = [self._micro_batch(part) for part in np.split(tokens, self.train.micro_batches)]
        # After the last backward and before ranks add up their gradients: a later step() would
        # leave the experts' gradients out of that sum (docs/design.md, "The place of step").
        for node in self.decoder.nodes:
            node.step()
        self._reduce_gradients()
        grad_norm = self._grad_norm()
        self._clip_gradients(grad_norm)
        self.optimizer.set_lr(learning_rate)
        self.optimizer.step()
        self.optimizer.clear_grad()
        losses = paddle.stack([losses for losses, _ in parts]).mean(0)
        loss, aux_loss, z_loss = self._mean_over_ranks(losses).tolist()
        counts = paddle.stack([counts for _, counts in parts]).sum(0).astype("int64")
        return StepResult(loss, aux_loss, z_loss, grad_norm, counts.numpy())

    def evaluate(self, tokens: np.ndarray) -> float:
        with paddle.no_grad():
            inputs, targets = self._inputs_and_targets(tokens)
            return float(self._mean_over_ranks(F.cross_entropy(self.layer(inputs).logits, targets)))

    def state(self) -> dict[str, np.ndarray]:
        return gather_state(self._local_state(), self.parallel, self.model.num_experts)

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        local = {name: array.shape for name, array in self._local_state().items()}
        require_matching_arrays(arrays, whole_shapes(local, self.parallel, self.model.num_experts))
        self._load_weights({name: arrays[f"weight/{name}"] for name in self.parameters})
        optimizer_state = self.optimizer.state_dict()
        for name, parameter in self.parameters.items():
            for key, suffix in MOMENTS.items():
                optimizer_state[f"{parameter.name}_{suffix}"].set_value(arrays[f"{key}/{name}"])

    def _adamw(self) -> paddle.optimizer.AdamW:
        decayed = {p.name for name, p in self.parameters.items() if has_weight_decay(name)}
        train = self.train
        optimizer = paddle.optimizer.AdamW(
            learning_rate=train.lr,
            beta1=train.beta1,
            beta2=train.beta2,
            epsilon=train.adam_eps,
            weight_decay=train.weight_decay,
            apply_decay_param_fun=lambda name: name in decayed,
            # Paddle's clipping sees this rank's experts alone.
            grad_clip=paddle.nn.ClipGradByGlobalNorm(train.clip_norm)
            if self.parallel.layout.ep_size == 1
            else None,
            parameters=list(self.parameters.values()),
        )
        # Normally the first step does this; a checkpoint of step 0, and loading one, need the
        # moments now.
        optimizer._create_accumulators(
            paddle.base.framework.default_main_program().global_block(), optimizer._parameter_list
        )
        return optimizer

    def _local_state(self) -> dict[str, np.ndarray]:
        optimizer_state = self.optimizer.state_dict()
        arrays = {}
        for name, parameter in self.parameters.items():
            arrays[f"weight/{name}"] = np.array(parameter.numpy())
            for key, suffix in MOMENTS.items():
                arrays[f"{key}/{name}"] = np.array(
                    optimizer_state[f"{parameter.name}_{suffix}"].numpy()
                )
        return arrays

    def _gradients(self, experts: bool) -> list[Tensor]:
        return [
            parameter.main_grad
            for name, parameter in self.parameters.items()
            if is_expert(name) == experts
        ]

    def _reduce_gradients(self) -> None:
        """Each rank's loss is its share of the mean, so gradients add up; an expert's already hold
        its whole group's tokens.
        """
        self.parallel.sum_world(self._gradients(experts=False))
        self.parallel.sum_replicas(self._gradients(experts=True))

    def _grad_norm(self) -> float:
        """Over all parameters of all ranks."""
        squares = [
            paddle.stack([gradient.square().sum() for gradient in self._gradients(experts)]).sum()
            for experts in (False, True)
        ]
        self.parallel.sum_ep(squares[1:])
        return float(paddle.stack(squares).sum().sqrt())

    def _clip_gradients(self, norm: float) -> None:
        if self.parallel.layout.ep_size > 1 and norm > self.train.clip_norm:
            for parameter in self.parameters.values():
                parameter.main_grad.scale_(self.train.clip_norm / norm)

    def _mean_over_ranks(self, values: Tensor) -> Tensor:
        self.parallel.sum_world([values])
        return values / self.parallel.layout.world_size

    def _micro_batch(self, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        inputs, targets = self._inputs_and_targets(tokens)
        out = self.layer(inputs)
        loss = F.cross_entropy(out.logits, targets)
        total = loss + self.model.aux_loss_coef * out.aux_loss + self.model.z_loss_coef * out.z_loss
        (total / (self.train.micro_batches * self.parallel.layout.world_size)).backward()
        return paddle.stack([loss, out.aux_loss, out.z_loss]).detach(), out.expert_counts

    def _inputs_and_targets(self, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        own = self.parallel.layout.shard(tokens)
        return paddle.to_tensor(np.ascontiguousarray(own[:, :-1])), paddle.to_tensor(
            own[:, 1:].reshape(-1)
        )

    def _load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        for name, parameter in self.parameters.items():
            parameter.set_value(weights[name])
        for node in self.decoder.nodes:
            node.invalidate_caches()
            # an engine that cannot run here, or not at these sizes, says so now
            node.prequantize_weights()
