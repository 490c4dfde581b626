"""Train experts with fp32 gradients: every backward adds its weight gradients straight into
`main_grad`.

python examples/train_node_main_grad.py
"""

import torch

from sonicmoe import SonicMoEConfig
from sonicmoe.ernie_compat import SonicMoEMlpNode

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
E, H, I = 4, 128, 128
masters = [
    torch.randn(*shape, device=device) / shape[1] ** 0.5 for shape in ((E, H, 2 * I), (E, I, H))
]
weights = [torch.nn.Parameter(master.bfloat16()) for master in masters]
for master, weight in zip(masters, weights, strict=True):  # the node adds where the optimizer reads
    master.grad = weight.main_grad = torch.zeros_like(master)
node = SonicMoEMlpNode.from_fused(*weights, config=SonicMoEConfig(fp8_mode="perf"))
optimizer = torch.optim.AdamW(masters, lr=1e-2)
teacher = torch.randn(H, H, device=device) / H**0.5

for step in range(40):
    for _ in range(2):  # micro-batches
        x = torch.randn(256, H, device=device, dtype=torch.bfloat16)
        scores = torch.rand(256, E, device=device)
        probs, indices = scores.topk(2)  # index -1 would mean: not on this rank
        out = node(x, None, indices, probs)
        error = (out.float() - torch.tanh(x.float() @ teacher)).square().mean()
        (error / 2).backward()
    node.step()  # the weights are about to change; after the last backward is always right
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)  # `main_grad` stays the tensor it is
    for master, weight in zip(masters, weights, strict=True):
        weight.data.copy_(master)
    if step % 13 == 0:
        print(f"step {step:2}: error {error.item():.4f}")
