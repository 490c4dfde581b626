"""What torchtitan expects of a machine with GPUs, where there are none. Imported before anything else
of torchtitan.

Every shim of this file says what it stands for. None touches the experts, their dispatcher,
parallelism, checkpoints or overrides.
"""

from __future__ import annotations

import types

import torch
from torchtitan.tools import utils

# torchtitan takes "cuda" where it finds no accelerator. Its modules copy both names when they are
# imported, so this comes first.
utils.device_type = "cpu"
utils.device_module = types.SimpleNamespace(
    # What the memory monitor and the trainer ask of a device; a host has no answer.
    set_device=lambda device: None,
    device_count=lambda: 1,
    current_device=lambda: 0,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: types.SimpleNamespace(total_memory=1 << 34),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device: {},
    synchronize=lambda: None,
)

from torch.nn.attention.flex_attention import AuxOutput, create_block_mask  # noqa: E402
from torchtitan.distributed import fsdp  # noqa: E402
from torchtitan.models.common import attention  # noqa: E402


def causal_attention(q, k, v, *, scale, enable_gqa, **_):
    """Each of our sequences is one document, so the mask of the block is the causal one. GPT-OSS
    weighs its sinks against the log of the sum of exponentials, for which zeros stand.
    """
    attend = torch.nn.functional.scaled_dot_product_attention
    out = attend(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa)
    return out, AuxOutput(lse=q.new_zeros(q.shape[:-1]))


# FlexAttention has no backward on a CPU.
attention.FlexAttention._compiled_flex_attn = staticmethod(causal_attention)
attention.FlexAttention.inductor_configs = {}  # else a compiled block tunes what is not there
# Compiling the mask, which nobody reads, takes longer than twenty steps.
attention._compiled_create_block_mask = create_block_mask


def sums_without_division(model, as_ever=fsdp.disable_fsdp_gradient_division):
    """gloo cannot scale while it reduces; a sum by the same factor of 1 is the same."""
    as_ever(model)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


fsdp.disable_fsdp_gradient_division = sums_without_division
