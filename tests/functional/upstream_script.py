"""What a user of upstream SonicMoE writes, its import paths and keywords included; takes the device
as its argument.
"""

import sys

import torch

from sonicmoe import KernelBackendMoE, MoE, enable_quack_gemm
from sonicmoe.enums import ActivationType, is_glu
from sonicmoe.functional import count_cumsum, moe_general_routing_inputs, moe_TC_softmax_topk_layer

device = sys.argv[1]
torch.manual_seed(0)
layer = MoE(
    num_experts=8,
    num_experts_per_tok=2,
    hidden_size=64,
    intermediate_size=32,
    activation_function=ActivationType.SWIGLU,
    is_glu=is_glu(ActivationType.SWIGLU),
    add_bias=False,
    std=0.02,
).to(device=device, dtype=torch.bfloat16)

tokens = torch.randn(4, 16, 64, device=device, dtype=torch.bfloat16)
output, aux_loss = layer(tokens, kernel_backend_moe=KernelBackendMoE.sonicmoe)
assert output.shape == tokens.shape and output.dtype == torch.bfloat16
assert aux_loss.shape == () and torch.isfinite(output).all()

reference, reference_aux = layer(tokens, kernel_backend_moe=KernelBackendMoE.torch)
assert torch.allclose(output.float(), reference.float(), atol=1.4e-2, rtol=2e-2)
assert torch.allclose(aux_loss, reference_aux)
assert output.abs().max() > 0

with enable_quack_gemm(True):
    assert torch.equal(layer(tokens)[0], output)

optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
before = layer.c_fc.weight.detach().clone()
(output.float().square().mean() + 0.01 * aux_loss).backward()
optimizer.step()
assert not torch.equal(layer.c_fc.weight, before)

with torch.autocast(device, torch.float32):
    assert layer(tokens)[0].dtype == torch.bfloat16

w1, w2, router_w = layer.c_fc.weight, layer.c_proj.weight, layer.router.weight
flat = tokens.view(-1, 64)
out, logits, frequency = moe_TC_softmax_topk_layer(
    flat,
    router_w,
    w1.permute(1, 2, 0),
    None,
    w2.permute(1, 2, 0),
    None,
    layer.top_k,
    layer.stream_id,
    ActivationType.SWIGLU,
)
scores, experts = logits.float().topk(2)
rows = torch.arange(64, device=device, dtype=torch.int32).repeat_interleave(2)
general, general_frequency = moe_general_routing_inputs(
    flat, scores.softmax(-1).flatten(), rows, experts.flatten().int(), w1.permute(1, 2, 0), None, w2.permute(1, 2, 0), None,
    8, layer.stream_id, ActivationType.SWIGLU, False,
)  # fmt: skip
assert torch.allclose(general, out, atol=1.4e-2, rtol=2e-2) and torch.equal(
    general_frequency, frequency
)
counts, offsets = count_cumsum(experts.flatten(), 8, do_cumsum=True)
assert torch.equal(counts, frequency) and torch.equal(offsets, counts.cumsum(0).int())
gradients = torch.autograd.grad(out, [w1, w2, router_w], torch.ones_like(out))
assert is_glu(ActivationType.SWIGLU) and all(gradient.abs().max() > 0 for gradient in gradients)

layer.eval()
with torch.no_grad():
    first, _ = layer(tokens, is_inference_mode=True)
again = MoE(8, 2, 64, 32, ActivationType.SWIGLU, False, 0.02).to(
    device=device, dtype=torch.bfloat16
)
again.load_state_dict(layer.state_dict())
assert torch.equal(again.eval()(tokens)[0], first)
print(f"shape {tuple(output.shape)}, aux loss {aux_loss.item():.4f}")
