"""Train `MoE` on several ranks under DDP, with gradient accumulation: ranks exchange gradients once
per optimizer step.

torchrun --nproc-per-node 2 examples/train_ddp.py --accumulate 4

One process without torchrun sees the same micro-batches: --accumulate 8 then gives the same losses.
"""

import argparse
import contextlib
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from sonicmoe import MoE

parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--steps", type=int, default=20, help="optimizer steps")
parser.add_argument("--accumulate", type=int, default=2, help="micro-batches per rank and step")
parser.add_argument("--lr", type=float, default=1e-2)
arguments = parser.parse_args()

for name, alone in {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}.items():
    os.environ.setdefault(name, alone)  # torchrun has set them
on_gpu = torch.cuda.is_available()
device = (
    torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
)
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
moe = MoE(num_experts=4, num_experts_per_tok=2, hidden_size=128, intermediate_size=128, std=0.1)
teacher = (torch.randn(128, 128) / 128**0.5).to(device)
model = DistributedDataParallel(moe.to(device))  # fp32 masters; autocast makes the tokens bf16
optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)

for step in range(arguments.steps):
    total = torch.zeros((), device=device)
    for micro in range(arguments.accumulate):
        number = (step * arguments.accumulate + micro) * world + rank
        x = torch.randn(128, 128, generator=torch.Generator().manual_seed(number)).to(device)
        # Without no_sync() DDP would exchange gradients in every backward.
        last = micro == arguments.accumulate - 1
        with contextlib.nullcontext() if last else model.no_sync():
            with torch.autocast(device.type, torch.bfloat16):
                output, _ = model(x, use_fp8=True)
            error = (output.float() - torch.tanh(x @ teacher)).square().mean()
            # DDP takes the mean over ranks; the sum over micro-batches is divided here.
            (error / arguments.accumulate).backward()
        total += error.detach() / arguments.accumulate
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the same on every rank
    optimizer.step()  # FP8 weights are quantised anew in the next forward
    optimizer.zero_grad()
    dist.all_reduce(total)
    if rank == 0 and (step % 5 == 0 or step == arguments.steps - 1):
        print(f"step {step:2}: error {total.item() / world:.5f}")
dist.destroy_process_group()
