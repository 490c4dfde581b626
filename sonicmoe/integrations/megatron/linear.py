"""The parameters of one projection of all local experts, under the names of Transformer Engine's
grouped linear layers, and their entries of a checkpoint.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.tensor_parallel.random import get_expert_parallel_rng_tracker_name
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import nn

Tensor = torch.Tensor
# The process groups by which 0.19 cuts what FSDP2 has sharded already.
_TAKES_GROUPS = "dp_group" in inspect.signature(apply_swiglu_sharded_factory).parameters


class ExpertLinear(nn.Module):
    """`weight{i} [rows, columns]` and, with biases, `bias{i} [rows]` of every local expert i.

    It computes nothing: the experts module reads its parameters. It is called in every forward all
    the same, because Megatron's hooks on it wait for parameters that are still being gathered.

    Args:
        split: the axis that expert tensor parallelism cuts: 0 rows, 1 columns.
        stride: 2 where gate rows and up rows are cut apart.
        groups: Megatron's process groups.
        puts_off: `backward_dw` of the experts runs the weight gradients, but not those of biases.
    """

    def __init__(
        self,
        config: Any,
        experts: int,
        shape: tuple[int, int],
        init_method: Callable[[Tensor], None],
        *,
        split: int,
        stride: int,
        groups: Any,
        puts_off: bool,
    ) -> None:
        super().__init__()
        self.config, self.experts, self.shape = config, experts, shape
        self._init_method, self._split, self._stride = init_method, split, stride
        self._groups, self._puts_off = groups, puts_off
        self._hooks: list[Callable[[], None]] = []
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        if getattr(config, "init_model_with_meta_device", False):
            device = "meta"
        shapes = (
            {"weight": shape, "bias": shape[:1]} if config.add_bias_linear else {"weight": shape}
        )
        for name, of_one in shapes.items():
            for expert in range(experts):
                memory = torch.empty(of_one, device=device, dtype=config.params_dtype)
                self.register_parameter(f"{name}{expert}", nn.Parameter(memory))
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_without_extra_states)

    def reset_parameters(self) -> None:
        """Initial values, and the attributes by which Megatron knows expert parameters. Called once more
        by a trainer that builds models without memory.
        """
        parallel = self.config.expert_model_parallel_size > 1
        other = self.config.expert_tensor_parallel_size != self.config.tensor_model_parallel_size
        parameter: Any  # Megatron hangs attributes on it
        for name, parameter in self.named_parameters():
            is_weight = name.startswith("weight")
            parameter.allreduce = not (parallel or other)
            # The bias of the down-projection is whole on each rank.
            parameter.tensor_model_parallel = is_weight or self._split == 0
            parameter.partition_dim = self._split if is_weight else 0
            parameter.partition_stride = self._stride
            # Data parallelism then hangs its hook on this module, and not on the parameter.
            parameter.skip_backward_post_hook = is_weight and self._puts_off
            if not is_weight:
                parameter.data.zero_()
            elif self.config.perform_initialization and not parameter.is_meta:
                self._initialize(parameter)

    def _initialize(self, weight: Tensor) -> None:
        if not self.config.use_cpu_initialization:
            with (
                torch.no_grad(),
                get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()),
            ):
                self._init_method(weight)
            return
        group = self._groups.expt_tp
        whole = [
            size * (group.size() if n == self._split else 1) for n, size in enumerate(self.shape)
        ]
        _initialize_affine_weight_cpu(
            *(weight, *whole, self.shape[self._split], self._split, self._init_method),
            stride=self._stride,
            params_dtype=self.config.params_dtype,
            rank=group.rank(),
            world_size=group.size(),
            skip_set_tensor_parallel_attributes=True,
        )

    def forward(self) -> None:
        """See the class."""

    def biases(self) -> Tensor:
        """`[E, rows]`, of the parameters' graph."""
        return torch.stack([self.get_parameter(f"bias{expert}") for expert in range(self.experts)])

    # Delayed weight gradients, in the words of Transformer Engine's modules.

    def need_backward_dw(self) -> bool:
        return self._puts_off

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Have `hook()` called each time that delayed weight gradients are complete."""
        self._hooks.append(hook)

    def fire_hooks(self) -> None:
        """Weight gradients are complete: call the hooks of this module, or, where there are none, those
        of the weights, which autograd has not reached.
        """
        for hook in self._hooks:
            hook()
        # Autograd has fired the hooks of biases already, so weights alone remain.
        named = () if self._hooks else self.named_parameters()
        weights = [each for name, each in named if name.startswith("weight")]
        for weight in (weight for weight in weights if weight.grad is not None):
            stand_in, weight.grad = weight.grad, None
            with torch.enable_grad():  # also from within a backward
                weight.view_as(weight).backward(stand_in)

    # Checkpoints. Megatron's own layers and Transformer Engine's have an extra state.

    def get_extra_state(self) -> None:
        """None: nothing is kept beside the parameters."""
        return None

    def set_extra_state(self, state: Any) -> None:
        """Ignored: an FP8 state of Transformer Engine has no meaning here."""

    def sharded_entries(
        self, expert: int, key: str, offsets: Any, apart: bool, metadata: Any
    ) -> Iterator[tuple[str, Any]]:
        """`(name in the module, entry)` of one expert. key: the prefix of its name in the checkpoint."""
        held = self.state_dict(prefix="", keep_vars=True)
        mine = {name: held.get(f"{name}{expert}") for name in ("weight", "bias")}
        mine = {name: value for name, value in mine.items() if value is not None}
        entries = make_sharded_tensors_for_checkpoint(
            {**mine, "_extra_state": held["_extra_state"]},
            key,
            {"weight": self._split} if self._split else {"weight": 0, "bias": 0},
            offsets,
            tp_group=self._groups.expt_tp,
            dp_cp_group=metadata["dp_cp_group"],
        )
        groups = {"tp_group": self._groups.expt_tp, "dp_group": metadata["dp_cp_group"]}
        for name in (*mine, "_extra_state"):
            entry = entries[key + name]
            fully = getattr(entry, "is_data_parallel_fully_shard", False)
            entry.replica_id = *entry.replica_id[:2], 0 if fully else self._groups.expt_dp.rank()
            if self._stride == 2 and name in mine:
                # Gate rows and up rows apart, so that another number of ranks can load them.
                given = groups if _TAKES_GROUPS else {}
                entry = apply_swiglu_sharded_factory(entry, offsets, apart, **given)
            # Transformer Engine's names: _extra_state, _extra_state1, ...
            yield name if name == "_extra_state" and expert == 0 else f"{name}{expert}", entry


def _without_extra_states(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Drop those of every expert but the first, and have that one."""
    for expert in range(1, module.experts):
        state.pop(f"{prefix}_extra_state{expert}", None)
    state.setdefault(f"{prefix}_extra_state", None)
