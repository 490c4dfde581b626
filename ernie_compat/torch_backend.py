"""The learner in PyTorch: AdamW over fp32 parameters; the node adds its weight gradients into
`.grad`.

On a GPU a step is launched without waiting for the device, and its figures come back in one copy at
the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.nn import functional as F

from sonicmoe.interop import device_name

from .checkpoint import require_matching_arrays
from .initial_weights import has_weight_decay, initial_weights
from .metrics import StepResult
from .model_config import ModelConfig, TrainConfig
from .parallel import Parallel, gather_state, is_expert, whole_shapes
from .precision import engine_in_use, node_config, token_dtype_name
from .torch_model import ErnieMoEDecoder

Tensor = torch.Tensor
MOMENTS = {"moment1": "exp_avg", "moment2": "exp_avg_sq", "steps": "step"}


def make_learner(
    model: ModelConfig, train: TrainConfig, precision: str, engine: str, parallel: Parallel
) -> TorchLearner:
    """The decoder on this rank's GPU if there is one, else on the CPU, at its initial weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    token_dtype, dense_dtype = (
        getattr(torch, token_dtype_name(precision)),
        dense_dtype_on(device, precision),
    )
    decoder = ErnieMoEDecoder(
        model, node_config(precision, engine), token_dtype, dense_dtype, parallel
    ).to(device)
    in_use = engine_in_use(model, precision, engine, device_name(decoder.lm_head.weight))
    return TorchLearner(decoder, model, train, device, in_use, parallel)


def dense_dtype_on(device: str, precision: str) -> torch.dtype:
    """Of the products outside the experts: fp32 on a host; on a GPU bf16 beside fp8 and bf16
    experts, fp32 beside fp32 ones.
    """
    return torch.float32 if device == "cpu" or precision == "fp32" else torch.bfloat16


class TorchLearner:
    """`Learner` on a `torch_model.ErnieMoEDecoder`."""

    def __init__(
        self,
        decoder: ErnieMoEDecoder,
        model: ModelConfig,
        train: TrainConfig,
        device: str,
        engine: str,
        parallel: Parallel,
    ) -> None:
        """Load the initial weights and create the optimizer state, so that a checkpoint has one
        shape at every step.
        """
        self.decoder, self.model, self.train = decoder, model, train
        self.device, self.engine, self.parallel = device, engine, parallel
        self.parameters = dict(decoder.named_parameters())
        self.num_parameters = sum(
            p.numel() * (parallel.layout.ep_size if is_expert(name) else 1)
            for name, p in self.parameters.items()
        )
        self._load_weights(initial_weights(model, train.seed))
        decayed = [p for name, p in self.parameters.items() if has_weight_decay(name)]
        plain = [p for name, p in self.parameters.items() if not has_weight_decay(name)]
        fused = device != "cpu"
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": train.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            betas=(train.beta1, train.beta2),
            eps=train.adam_eps,
            fused=fused,
        )
        for parameter in self.parameters.values():
            # Allocated gradients keep an expert that got no token in the optimizer step, resumed or
            # not.
            parameter.grad = torch.zeros_like(parameter)
            self.optimizer.state[parameter] = {
                "step": torch.zeros((), device=device if fused else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def train_step(self, tokens: np.ndarray, learning_rate: float) -> StepResult:
        # Before the first launch: a copy to the device waits for everything that was launched.
        batches = [
            self._inputs_and_targets(part) for part in np.split(tokens, self.train.micro_batches)
        ]
        loss, aux_loss, z_loss, grad_norm, *counts = self.launch_step(
            batches, learning_rate
        ).tolist()
        shape = len(self.model.moe_layers), self.model.num_experts
        return StepResult(
            loss, aux_loss, z_loss, grad_norm, np.array(counts, dtype=np.int64).reshape(shape)
        )

    def launch_step(self, batches: list[tuple[Tensor, Tensor]], learning_rate: float) -> Tensor:
        """One optimizer step on inputs `[B, S]` and targets `[B * S]` per micro-batch; on a GPU it
        waits for nothing.

        Returns:
            fp64 `[4 + L_moe * E]` on the device: the fields of `StepResult`, in its order.
        """
        parts = [self._micro_batch(*batch) for batch in batches]
        # After the last backward and before ranks add up their gradients: a later step() would
        # leave the experts' gradients out of that sum (docs/design.md, "The place of step").
        for node in self.decoder.nodes:
            node.step()
        self._reduce_gradients()
        grad_norm = self._clip_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        # Gradients stay allocated: an expert without tokens then has a gradient of zero in every
        # step, and the optimizer treats it alike in a resumed and in an uninterrupted run.
        self.optimizer.zero_grad(set_to_none=False)
        losses = self._mean_over_ranks(torch.stack([losses for losses, _ in parts]).mean(0))
        counts = torch.stack([counts for _, counts in parts]).sum(0)
        return torch.cat(
            [figures.reshape(-1).to(torch.float64) for figures in (losses, grad_norm, counts)]
        )

    def evaluate(self, tokens: np.ndarray) -> float:
        with torch.no_grad():
            inputs, targets = self._inputs_and_targets(tokens)
            return float(
                self._mean_over_ranks(F.cross_entropy(self.decoder(inputs).logits, targets))
            )

    def state(self) -> dict[str, np.ndarray]:
        return gather_state(self._local_state(), self.parallel, self.model.num_experts)

    def load_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        local = {name: array.shape for name, array in self._local_state().items()}
        require_matching_arrays(arrays, whole_shapes(local, self.parallel, self.model.num_experts))
        self._load_weights({name: arrays[f"weight/{name}"] for name in self.parameters})
        for name, parameter in self.parameters.items():
            for key, torch_key in MOMENTS.items():
                value = torch.from_numpy(np.array(arrays[f"{key}/{name}"]))
                self.optimizer.state[parameter][torch_key].copy_(value)

    def _micro_batch(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = self.decoder(inputs)
        loss = F.cross_entropy(out.logits, targets)
        total = loss + self.model.aux_loss_coef * out.aux_loss + self.model.z_loss_coef * out.z_loss
        (total / (self.train.micro_batches * self.parallel.layout.world_size)).backward()
        return torch.stack([loss, out.aux_loss, out.z_loss]).detach(), out.expert_counts

    def _inputs_and_targets(self, tokens: np.ndarray) -> tuple[Tensor, Tensor]:
        on_device = torch.from_numpy(self.parallel.layout.shard(tokens)).to(self.device)
        return on_device[:, :-1].contiguous(), on_device[:, 1:].reshape(-1)

    def _local_state(self) -> dict[str, np.ndarray]:
        arrays = {}
        for name, parameter in self.parameters.items():
            arrays[f"weight/{name}"] = _to_numpy(parameter)
            for key, torch_key in MOMENTS.items():
                arrays[f"{key}/{name}"] = _to_numpy(self.optimizer.state[parameter][torch_key])
        return arrays

    def _gradients(self, experts: bool) -> list[Tensor]:
        return [
            p.grad
            for name, p in self.parameters.items()
            if is_expert(name) == experts and p.grad is not None
        ]

    def _reduce_gradients(self) -> None:
        """Each rank's loss is its share of the mean, so gradients add up; an expert's already hold
        its whole group's tokens.
        """
        self.parallel.sum_world(self._gradients(experts=False))
        self.parallel.sum_replicas(self._gradients(experts=True))

    def _clip_gradients(self) -> Tensor:
        """The norm over all parameters of all ranks, before clipping."""
        if self.parallel.layout.ep_size == 1:
            return torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.train.clip_norm)
        squares = [sum_of_squares(self._gradients(experts)) for experts in (False, True)]
        self.parallel.sum_ep(squares[1:])
        norm = torch.stack(squares).sum().sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), self.train.clip_norm, norm)
        return norm

    def _mean_over_ranks(self, values: Tensor) -> Tensor:
        self.parallel.sum_world([values])
        return values / self.parallel.layout.world_size

    @torch.no_grad()
    def _load_weights(self, weights: Mapping[str, np.ndarray]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(torch.from_numpy(np.array(weights[name])))
        for node in self.decoder.nodes:
            node.invalidate_caches()
            # an engine that cannot run here, or not at these sizes, says so now
            node.prequantize_weights()


def sum_of_squares(tensors: list[Tensor]) -> Tensor:
    """0-d sum over all elements of all tensors."""
    return torch.stack([tensor.square().sum() for tensor in tensors]).sum()


def _to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().numpy().copy()
