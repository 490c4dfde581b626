"""The learner in PyTorch: AdamW over fp32 parameters. An expert's `main_grad` is the very tensor that
its `.grad` is, so the node adds weight gradients where the optimizer reads them. And the ranks over
`torch.distributed`: NCCL on GPUs, gloo on CPUs.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist

from .decoder import ErnieMoEDecoder
from .decoder_learner import DecoderLearner
from .initial_weights import has_weight_decay
from .model_config import ModelConfig, TrainConfig, node_config, token_dtype_name
from .ranks import RankLayout, Ranks, is_expert

Tensor = torch.Tensor


def dense_dtype_on(device: str, precision: str) -> torch.dtype:
    """Of the products outside the experts: fp32 on a host; on a GPU bf16 beside fp8 and bf16
    experts, fp32 beside fp32 ones.
    """
    return torch.float32 if device == "cpu" or precision == "fp32" else torch.bfloat16


class Learner(DecoderLearner):
    """With `torch.optim.AdamW`, fused on a GPU."""

    gradient = "grad"
    # Steps are saved too: AdamW corrects its moments by their number.
    moments: ClassVar[dict[str, str]] = {
        "moment1": "exp_avg",
        "moment2": "exp_avg_sq",
        "steps": "step",
    }

    def __init__(
        self, model: ModelConfig, train: TrainConfig, precision: str, engine: str,
        ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """The decoder on this rank's GPU if there is one, else on the CPU, at its initial weights."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        ranks = ranks or Ranks()
        dtypes = getattr(torch, token_dtype_name(precision)), dense_dtype_on(device, precision)
        decoder = ErnieMoEDecoder(model, node_config(precision, engine), *dtypes, ranks).to(device)
        super().__init__(decoder, model, train, precision, engine, ranks, device)

    def _make_optimizer(self) -> None:
        train = self.train
        decayed = [p for name, p in self.parameters.items() if has_weight_decay(name)]
        plain = [p for name, p in self.parameters.items() if not has_weight_decay(name)]
        fused = self.device != "cpu"
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": train.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            betas=(train.beta1, train.beta2),
            eps=train.adam_eps,
            fused=fused,
        )
        for name, parameter in self.parameters.items():
            # Allocated gradients keep an expert that got no token in the optimizer step, resumed or
            # not.
            parameter.grad = torch.zeros_like(parameter)
            if is_expert(name):
                # Without `main_grad` every backward would return the gradients through autograd, by
                # way of memory for all of them.
                parameter.main_grad = parameter.grad  # type: ignore[attr-defined]
            self.optimizer.state[parameter] = {
                # The fused optimizer counts its steps on the device, the plain one on the host.
                "step": torch.zeros((), device=self.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def _update(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        # Gradients stay allocated: an expert without tokens then has a gradient of zero in every
        # step, and the optimizer treats it alike in a resumed and in an uninterrupted run.
        self.optimizer.zero_grad(set_to_none=False)

    def _moment(self, parameter: Tensor, key: str) -> Tensor:
        return self.optimizer.state[parameter][key]  # type: ignore[no-any-return]


class JoinedRanks(Ranks):
    """The launcher's ranks, joined."""

    def __init__(self, layout: RankLayout, max_tokens: int) -> None:
        super().__init__(layout, max_tokens)
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", layout.local_rank)
            # Before the process group: NCCL takes the current device, and all ranks of a host would
            # share GPU 0.
            torch.cuda.set_device(self.device)
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=10))

    def sum(self, tensors: list[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.all_reduce(flat)
        pieces = flat.split([tensor.numel() for tensor in tensors])
        for tensor, piece in zip(tensors, pieces, strict=True):
            tensor.copy_(piece.reshape(tensor.shape))

    def gather(self, values: np.ndarray) -> list[np.ndarray]:
        own = torch.from_numpy(values).to(self.device)
        pieces = [torch.empty_like(own) for _ in range(self.layout.world_size)]
        dist.all_gather(pieces, own)
        return [piece.cpu().numpy() for piece in pieces]

    def largest(self, value: int) -> int:
        number = torch.tensor(value, device=self.device)
        dist.all_reduce(number, op=dist.ReduceOp.MAX)
        return int(number)

    def close(self) -> None:
        dist.destroy_process_group()

    def _group(self) -> Any:
        return dist.group.WORLD
