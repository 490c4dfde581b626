"""torchtitan's own trainer and debug models on a CPU, on tokens of our own."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "examples")]
from on_cpu import for_torchtitan  # noqa: F401  before anything of torchtitan's
from torchtitan_tokens import NoTokenizer, OurTokens


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
