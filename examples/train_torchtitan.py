"""Train torchtitan's small DeepSeek-V3 with the experts on this engine, through torchtitan's own
trainer: on every GPU that torchrun gives it, or on a CPU.

python examples/train_torchtitan.py                              # one GPU, or a CPU
torchrun --nproc-per-node 2 examples/train_torchtitan.py --ep 2  # two GPUs
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--steps", type=int, default=10, help="optimizer steps")
parser.add_argument(
    "--layers", type=int, default=2, help="decoder layers, 6 at most; the first is dense"
)
parser.add_argument("--ep", type=int, default=1, help="expert_parallel_degree")
parser.add_argument("--fp8-mode", default="perf", help="off, perf or mem (docs/env.md)")
parser.add_argument("--stock", action="store_true", help="torchtitan's own experts, to compare")
arguments = parser.parse_args()

alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)  # torchrun has set them
on_gpu = torch.cuda.is_available()
if not on_gpu:
    from on_cpu import for_torchtitan  # noqa: F401  before anything else of torchtitan's

from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

# Tokens in which each follows from the one before, because the package ships no data set. Your job
# has its own dataloader and tokenizer.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from torchtitan_tokens import NoTokenizer, OurTokens

init_logger()
config = deepseek_v3_debugmodel()
config.model_spec.model.layers = config.model_spec.model.layers[: arguments.layers]
config.dataloader, config.tokenizer = OurTokens.Config(), NoTokenizer.Config()
config.training.steps, config.training.seq_len = arguments.steps, 64
config.training.local_batch_size = 2
config.training.disable_cuda_graphs = True
config.parallelism.expert_parallel_degree = arguments.ep
# The default backend asks FSDP2 for more than PyTorch 2.13 has.
config.parallelism.spmd_backend = "partial_dtensor"
if not on_gpu:
    config.optimizer.implementation = "foreach"  # the fused one is CUDA's
config.checkpoint.enable = False
config.dump_folder = tempfile.mkdtemp()
config.debug.seed = 0
if not arguments.stock:
    config.override.imports = [
        ("sonicmoe.integrations.torchtitan.routed_experts", {"fp8_mode": arguments.fp8_mode}),
        "sonicmoe.integrations.torchtitan.selective_ac",
    ]

if not hasattr(torch.distributed, "set_timeout"):
    # After the first step torchtitan shortens the timeout of its groups by a function that no
    # release of PyTorch has yet, up to 2.13.
    torch.distributed.set_timeout = lambda timeout, group: None
trainer = Trainer(config)
trainer.train()
trainer.close()
torch.distributed.destroy_process_group()
