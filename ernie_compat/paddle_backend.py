"""The learner in Paddle, wired as ERNIE trainers wire it: `MixPrecisionLayer` and
`MixPrecisionOptimizer` around AdamW.

Every parameter has an fp32 `main_grad`. The node adds its weight gradients there in every backward;
everything else arrives through Paddle's gradient hooks. Parameters are fp32, so they are their own
master weights.
"""

from __future__ import annotations

from typing import ClassVar, TypeAlias

import numpy as np
import paddle
from paddle.distributed.fleet.utils.mix_precision_utils import (
    MixPrecisionLayer,
    MixPrecisionOptimizer,
)

from .decoder import ErnieMoEDecoder
from .decoder_learner import DecoderLearner
from .initial_weights import has_weight_decay
from .model_config import ModelConfig, TrainConfig
from .parallel import Parallel
from .precision import node_config, token_dtype_name

Tensor: TypeAlias = paddle.Tensor


def make_learner(
    model: ModelConfig, train: TrainConfig, precision: str, engine: str, parallel: Parallel
) -> PaddleLearner:
    """The decoder on Paddle's current device, at its initial weights."""
    token_dtype = getattr(paddle, token_dtype_name(precision))
    decoder = ErnieMoEDecoder(
        model, node_config(precision, engine), token_dtype, paddle.float32, parallel
    )
    device = str(paddle.device.get_device())
    return PaddleLearner(decoder, model, train, precision, engine, parallel, device)


class PaddleLearner(DecoderLearner):
    """With `paddle.optimizer.AdamW`."""

    gradient = "main_grad"
    moments: ClassVar[dict[str, str]] = {
        "moment1": "moment1_0",
        "moment2": "moment2_0",
        "beta1_power": "beta1_pow_acc_0",
        "beta2_power": "beta2_pow_acc_0",
    }

    def _make_optimizer(self) -> None:
        # The wrapper installs the hooks that add gradients into `main_grad`. Forwards go through
        # it; parameters are still those of the decoder.
        self.layer = MixPrecisionLayer(self.decoder, dtype="bfloat16")
        for parameter in self.parameters.values():
            # Allocated gradients keep an expert that got no token in the optimizer step, resumed or
            # not.
            parameter.main_grad = paddle.zeros(parameter.shape, dtype="float32")
        self.optimizer = MixPrecisionOptimizer(self._adamw())
        self._moments = self.optimizer.state_dict()

    def _adamw(self) -> paddle.optimizer.AdamW:
        # Paddle calls the function with its own names of parameters, which differ from the names in
        # the module tree.
        decayed = {p.name for name, p in self.parameters.items() if has_weight_decay(name)}
        train = self.train
        # Paddle's clipping sees this rank's experts alone.
        clip = paddle.nn.ClipGradByGlobalNorm(train.clip_norm)
        optimizer = paddle.optimizer.AdamW(
            learning_rate=train.lr,
            beta1=train.beta1,
            beta2=train.beta2,
            epsilon=train.adam_eps,
            weight_decay=train.weight_decay,
            apply_decay_param_fun=lambda name: name in decayed,
            grad_clip=clip if self.parallel.layout.ep_size == 1 else None,
            parameters=list(self.parameters.values()),
        )
        # Normally the first step does this; a checkpoint of step 0, and loading one, need the
        # moments now.
        optimizer._create_accumulators(
            paddle.base.framework.default_main_program().global_block(), optimizer._parameter_list
        )
        return optimizer

    def _clip_gradients(self) -> Tensor:
        """On one rank the optimizer clips."""
        # Reported in any case. Only with expert parallelism is it also used, because then no rank's
        # optimizer sees all gradients.
        norm = self._norm_over_ranks()
        if self.parallel.layout.ep_size > 1 and (total := float(norm)) > self.train.clip_norm:
            for parameter in self.parameters.values():
                parameter.main_grad.scale_(self.train.clip_norm / total)
        return norm

    def _update(self, learning_rate: float) -> None:
        self.optimizer.set_lr(learning_rate)
        self.optimizer.step()
        self.optimizer.clear_grad()

    def _moment(self, parameter: Tensor, key: str) -> Tensor:
        return self._moments[f"{parameter.name}_{key}"]

    def _on_device(self, array: np.ndarray) -> Tensor:
        return paddle.to_tensor(np.ascontiguousarray(array))

    def _assign(self, tensor: Tensor, array: np.ndarray) -> None:
        tensor.set_value(array)
