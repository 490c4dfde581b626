"""The learner in Paddle, wired as ERNIE trainers wire it: `MixPrecisionLayer` and
`MixPrecisionOptimizer` around AdamW.

Every parameter has an fp32 `main_grad`. The node adds its weight gradients there in every backward;
everything else arrives through Paddle's gradient hooks. Parameters are fp32, so they are their own
master weights. And the ranks over `paddle.distributed`: NCCL on GPUs, gloo on CPUs.
"""

from __future__ import annotations

import warnings
from typing import Any, ClassVar, TypeAlias

import numpy as np
import paddle
import paddle.distributed as dist
from paddle.distributed.fleet.utils.mix_precision_utils import (
    MixPrecisionLayer,
    MixPrecisionOptimizer,
)

from .decoder import ErnieMoEDecoder
from .decoder_learner import DecoderLearner
from .initial_weights import has_weight_decay
from .model_config import ModelConfig, TrainConfig, node_config, token_dtype_name
from .ranks import RankLayout, Ranks

Tensor: TypeAlias = paddle.Tensor


class Learner(DecoderLearner):
    """With `paddle.optimizer.AdamW`."""

    gradient = "main_grad"
    moments: ClassVar[dict[str, str]] = {
        "moment1": "moment1_0",
        "moment2": "moment2_0",
        "beta1_power": "beta1_pow_acc_0",
        "beta2_power": "beta2_pow_acc_0",
    }

    def __init__(
        self, model: ModelConfig, train: TrainConfig, precision: str, engine: str,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """The decoder on Paddle's current device, at its initial weights."""
        ranks = ranks or Ranks()
        dtypes = getattr(paddle, token_dtype_name(precision)), paddle.float32
        decoder = ErnieMoEDecoder(model, node_config(precision, engine), *dtypes, ranks)
        device = str(paddle.device.get_device())
        super().__init__(decoder, model, train, precision, engine, ranks, device)

    def _make_optimizer(self) -> None:
        # The wrapper installs the hooks that add gradients into `main_grad`. Forwards go through
        # it; parameters are still those of the decoder.
        self.layer = MixPrecisionLayer(self.decoder, dtype="bfloat16")
        for parameter in self.parameters.values():
            # Allocated gradients keep an expert that got no token in the optimizer step, resumed or
            # not.
            parameter.main_grad = paddle.zeros(parameter.shape, dtype="float32")
        # Paddle calls the function with its own names of parameters, which differ from the names in
        # the module tree.
        decayed = {p.name for name, p in self.parameters.items() if has_weight_decay(name)}
        train = self.train
        optimizer = paddle.optimizer.AdamW(
            learning_rate=train.lr,
            beta1=train.beta1,
            beta2=train.beta2,
            epsilon=train.adam_eps,
            weight_decay=train.weight_decay,
            apply_decay_param_fun=lambda name: name in decayed,
            parameters=list(self.parameters.values()),
        )
        # Normally the first step does this; a checkpoint of step 0, and loading one, need the
        # moments now.
        optimizer._create_accumulators(
            paddle.base.framework.default_main_program().global_block(), optimizer._parameter_list
        )
        self.optimizer = MixPrecisionOptimizer(optimizer)
        self._moments = self.optimizer.state_dict()

    def _update(self, learning_rate: float) -> None:
        self.optimizer.set_lr(learning_rate)
        self.optimizer.step()
        self.optimizer.clear_grad()

    def _moment(self, parameter: Tensor, key: str) -> Tensor:
        return self._moments[f"{parameter.name}_{key}"]


class JoinedRanks(Ranks):
    """The launcher's ranks, joined."""

    def __init__(self, layout: RankLayout, max_tokens: int) -> None:
        super().__init__(layout, max_tokens)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.init_parallel_env()

    @paddle.no_grad()
    def sum(self, tensors: list[Tensor]) -> None:
        flat = paddle.concat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        start = 0
        for tensor in tensors:
            size = int(np.prod(tensor.shape))
            paddle.assign(flat[start : start + size].reshape(tensor.shape), output=tensor)
            start += size

    def gather(self, values: np.ndarray) -> list[np.ndarray]:
        pieces: list[Tensor] = []
        dist.all_gather(pieces, paddle.to_tensor(values))
        return [piece.numpy() for piece in pieces]

    def largest(self, value: int) -> int:
        # As fp32, hence the bound of 2^24 in `Ranks.largest`.
        number = paddle.to_tensor([float(value)])
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number.item())

    def close(self) -> None:
        dist.destroy_process_group()

    def _group(self) -> Any:
        return dist.get_group()
