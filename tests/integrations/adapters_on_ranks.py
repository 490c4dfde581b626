"""One of two ranks: trains adapters of peft on a model that FSDP2 shards, and compares them with those
of one process that sees both ranks' batches. And transformers' experts with biases, sharded, as
functional/parallel_worker.py has the other faces.

python adapters_on_ranks.py RANK STORE_FILE
"""

from __future__ import annotations

import sys

import peft
import torch
import torch.distributed as dist
from functional.parallel_worker import FACES, E, H, I, check_results_written_in_place
from integrations.hf_models import FAMILIES, build, relative_rmse, text
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.integrations.transformers import register

TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def adapted(implementation: str) -> peft.PeftModel:
    base = build(FAMILIES["qwen3-moe"](2), implementation)
    torch.manual_seed(3)
    options = {"target_modules": ["q_proj"], "init_lora_weights": False}
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_parameters=TARGETS, **options))


def train(model: torch.nn.Module, ranks: list[int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of two steps over the batches of these ranks, and the trained adapters."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=0.01, eps=1e-3)
    losses = []
    for step in range(2):
        for rank in ranks:
            ids = text(seed=10 * step + rank)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / len(ranks)).backward()
            losses.append(loss.item())
        assert all(p.grad is not None for p in trained.values())
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in trained.items()}
    return losses, {name: tensor.detach().clone() for name, tensor in whole.items()}


class GptOss(torch.nn.Module):
    """transformers' experts with two biases, in FP8."""

    def __init__(self) -> None:
        super().__init__()
        config = GptOssConfig(hidden_size=H, intermediate_size=I, num_local_experts=E)
        config._experts_implementation = "sonicmoe_fp8"
        self.experts = GptOssExperts(config)
        torch.manual_seed(0)
        for parameter in self.experts.parameters():
            torch.nn.init.normal_(parameter, std=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(48).reshape(24, 2) % E
        out: torch.Tensor = self.experts(x, ids, torch.full((24, 2), 0.5))
        return out


def main() -> None:
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    register()
    FACES["GPT-OSS"] = GptOss, (24, H)
    for reshard in (True, False):
        check_results_written_in_place(rank, "GPT-OSS", reshard, x_grad=reshard)
    del ReferenceEngine.backward_dw  # frozen weights want none
    for implementation, param_dtype, bound in (
        ("sonicmoe", None, 1e-5),
        ("sonicmoe_fp8", torch.bfloat16, 0.05),
    ):
        losses, expected = train(adapted(implementation), [0, 1])
        model = adapted(implementation)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        for layer in model.get_base_model().model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        # The gradient is the mean over the ranks.
        own, found = train(model, [rank])
        wanted = losses[rank::2]
        assert all(abs(a - b) < bound * b for a, b in zip(own, wanted, strict=True)), (own, losses)
        errors = {name: relative_rmse(found[name], expected[name]) for name in expected}
        assert len(errors) == 2 * (4 + 2) and max(errors.values()) < bound, errors
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
