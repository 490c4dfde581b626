"""torchtitan's own trainer and debug models on a CPU, on tokens of our own.

Every shim of this file stands for something that torchtitan expects of a machine with GPUs, and
says why. None touches the experts, their dispatcher, parallelism, checkpoints or overrides.
"""

from __future__ import annotations

import sys
import types
from pathlib import Path

import torch
from torchtitan.tools import utils

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

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
from torchtitan_tokens import NoTokenizer, OurTokens  # noqa: E402


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


def job(config, folder, *, steps=20, imports=(), layers=2):
    """The debug job of a model on a CPU: its first blocks, short sequences, our tokens."""
    config.model_spec.model.layers = config.model_spec.model.layers[:layers]
    config.dump_folder = str(folder)
    config.dataloader, config.tokenizer = OurTokens.Config(), NoTokenizer.Config()
    config.training.steps, config.training.seq_len, config.training.local_batch_size = steps, 64, 2
    config.training.disable_cuda_graphs = True
    config.optimizer.implementation = "foreach"  # the fused one is CUDA's
    config.override.imports = list(imports)
    config.checkpoint.enable, config.checkpoint.last_save_model_only = True, True
    config.checkpoint.export_dtype = "float32"
    config.debug.seed = 0
    return config


def losses(trainer):
    """Of every step of the job."""
    found, data = [], trainer.batch_generator(trainer.dataloader)
    trainer.metrics_processor.log = lambda step, loss, *_, **__: found.append(loss)
    for _ in range(trainer.config.training.steps):
        trainer.step += 1
        trainer.train_step(data)
    return found
