"""Train a small GPT MoE of Megatron-Core with the experts and their dispatcher on this engine: on every
GPU that torchrun gives it, or on a CPU.

python examples/train_megatron.py                              # one GPU, or a CPU
torchrun --nproc-per-node 2 examples/train_megatron.py --ep 2  # two of them
"""

import argparse
import os

import torch
import torch.distributed as dist

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--ep", type=int, default=1, help="expert_model_parallel_size")
parser.add_argument("--hidden", type=int, default=128, help="hidden size; experts have the same")
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--fp8-mode", default="perf", help="off, perf or mem (docs/env.md)")
parser.add_argument("--stock", action="store_true", help="Megatron's own experts, to compare")
arguments = parser.parse_args()

alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
for name, value in {**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
    os.environ.setdefault(name, value)  # torchrun has set them
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
else:
    from on_cpu import for_megatron  # noqa: F401  before anything of Megatron's
device = "cuda" if on_gpu else "cpu"

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from sonicmoe.integrations.megatron import use_sonicmoe

EXPERTS, LENGTH, BATCH, VOCABULARY = 8, 128, 4, 256

dist.init_process_group("nccl" if on_gpu else "gloo")
parallel_state.initialize_model_parallel(expert_model_parallel_size=arguments.ep)
if on_gpu:
    model_parallel_cuda_manual_seed(0)
torch.manual_seed(0)
config = TransformerConfig(
    num_layers=2,
    hidden_size=arguments.hidden,
    num_attention_heads=4,
    num_moe_experts=EXPERTS,
    moe_router_topk=2,
    moe_router_dtype="fp32",
    moe_ffn_hidden_size=arguments.hidden,
    moe_token_dispatcher_type="alltoall",
    expert_model_parallel_size=arguments.ep,
    activation_func=torch.nn.functional.silu,
    gated_linear_unit=True,
    add_bias_linear=False,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_cpu_initialization=True,
    bf16=True,
    params_dtype=torch.bfloat16,
    # True lets the engine add into `main_grad` itself, but then attention needs apex for its own.
    gradient_accumulation_fusion=False,
    masked_softmax_fusion=False,  # needs apex, too
    bias_dropout_fusion=False,
)
spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
if not arguments.stock:
    spec = use_sonicmoe(spec, fp8_mode=arguments.fp8_mode)
model = GPTModel(
    config, transformer_layer_spec=spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH
)
model = model.to(device, torch.bfloat16)
reduced = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
parallel = DistributedDataParallel(config, reduced, model)
# Megatron's own optimizer reads `main_grad` too. This one keeps fp32 masters in a few lines.
masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=arguments.lr)

positions = torch.arange(LENGTH, device=device).expand(BATCH, LENGTH)
hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)[None, None]
drawn = torch.Generator().manual_seed(dist.get_rank())
for step in range(arguments.steps):
    # Each token follows from the one before, which the model learns.
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=drawn)
    tokens = ((first + 7 * torch.arange(LENGTH + 1)) % VOCABULARY).to(device)
    parallel.zero_grad_buffer()
    loss = parallel(tokens[:, :-1], positions, hidden, labels=tokens[:, 1:].contiguous()).mean()
    loss.backward()
    parallel.finish_grad_sync()
    for master, parameter in zip(masters, model.parameters(), strict=True):
        master.grad = parameter.main_grad.float()
    optimizer.step()
    with torch.no_grad():
        for master, parameter in zip(masters, model.parameters(), strict=True):
            parameter.copy_(master)
    total = loss.detach().clone()
    dist.all_reduce(total)
    if dist.get_rank() == 0 and (step % 5 == 0 or step == arguments.steps - 1):
        print(f"step {step:2}: loss {total.item() / dist.get_world_size():.4f}")
dist.destroy_process_group()
