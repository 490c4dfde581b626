"""Train `MoE` with FP8 experts: gradients arrive in `.grad`, any PyTorch optimizer applies them.

python examples/train_moe.py
"""

import torch

from sonicmoe import MoE

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
moe = MoE(num_experts=4, num_experts_per_tok=2, hidden_size=128, intermediate_size=128, std=0.1)
moe = moe.to(device, torch.bfloat16)
teacher = torch.randn(128, 128, device=device) / 128**0.5
optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-2)

for step in range(40):
    x = torch.randn(256, 128, device=device, dtype=torch.bfloat16)
    output, aux_loss = moe(x, use_fp8=True)
    error = (output.float() - torch.tanh(x.float() @ teacher)).square().mean()
    (error + 0.01 * aux_loss).backward()
    optimizer.step()  # FP8 weights are quantised anew in the next forward, and only then
    optimizer.zero_grad()
    if step % 13 == 0:
        print(f"step {step:2}: error {error.item():.4f}")
