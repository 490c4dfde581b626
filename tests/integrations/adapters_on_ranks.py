"""One of two ranks: trains adapters of peft on a model that FSDP2 shards, and compares them with those
of one process that sees both ranks' batches. Then transformers' experts with biases, sharded, as
functional/parts_worker.py has the other faces; and frozen experts under expert parallelism.

python adapters_on_ranks.py RANK STORE_FILE
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from functional.parts_worker import FACES, E, H, I, check_results_written_in_place
from integrations.hf_models import FAMILIES, build, relative_rmse, text
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.distributed import DistributedConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from sonicmoe.diagnostics.capture import dump
from sonicmoe.diagnostics.nonfinite import detect_nonfinite
from sonicmoe.diagnostics.step_dump import load_dump
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.errors import LayoutError
from sonicmoe.integrations.frozen import freeze_experts, freezing_experts, thaw_experts
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


def loss_of(model: torch.nn.Module, seed: int) -> float:
    ids = text(seed=seed)
    return model(input_ids=ids, labels=ids).loss.item()


def experts_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of the experts, each rank's own part of them."""
    state = model.model.layers[0].mlp.experts.state_dict()
    return {
        name: part.to_local() if isinstance(part, DTensor) else part for name, part in state.items()
    }


def check_a_weight_is_named_as_without_ranks(implementation: str, path: Path) -> None:
    """A parameter that is gathered for the call has its own name in a finding, and in a dump its layer."""
    model = build(FAMILIES["qwen3-moe"](2), implementation)
    with torch.no_grad():
        model.model.layers[1].mlp.experts.gate_up_proj[5, 60, 3] = float("nan")
    for part in (*model.model.layers, model):
        fully_shard(part)
    dump(model.model.layers[0].mlp.experts, path)

    def step() -> None:
        model(input_ids=text(), labels=text(), use_cache=False).loss.backward()

    step()
    assert load_dump(path).caller.layer == "model.layers.0.mlp.experts"
    try:
        with detect_nonfinite():
            step()
    except ArithmeticError as error:
        named = "model.layers.1.mlp.experts.gate_up_proj at expert 5, row "
        assert f"first bad: input w1 = {named}" in str(error), error
    else:
        raise AssertionError("not found")


def check_frozen_experts_are_divided(rank: int, family: str, folder: Path) -> None:
    """Each rank has the codes of its own experts, of a model that is loaded in bf16 or frozen while it
    is loaded, with FSDP2 around them and without; the losses are those of one process.
    """
    if rank == 0:
        build(FAMILIES[family](1)).to(torch.bfloat16).save_pretrained(folder)
    dist.barrier()

    def load(**options: object) -> torch.nn.Module:
        kinds = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
        kinds["experts_implementation"] = "sonicmoe_fp8"
        return AutoModelForCausalLM.from_pretrained(folder, **kinds, **options)

    whole = load()
    freeze_experts(whole)
    wanted = experts_of(whole)
    half = next(iter(wanted.values())).shape[0] // 2
    for sizes, seed in (({"tp_size": 2}, 0), ({"fsdp_size": 2}, rank)):
        config = DistributedConfig(ep_size=2, **sizes)
        late = load(distributed_config=config)
        freeze_experts(late)
        with freezing_experts():
            early = load(distributed_config=config)
        for model in (late, early):
            found = experts_of(model)
            assert found.keys() == wanted.keys()
            for name, part in found.items():
                own = wanted[name][rank * half : (rank + 1) * half]
                assert torch.equal(*[each.contiguous().view(torch.uint8) for each in (part, own)])
            loss = loss_of(whole, seed)
            assert abs(loss_of(model, seed) - loss) < 2e-3 * loss
        thaw_experts(late)
        assert not any("scale" in name for name in experts_of(late))
        weight = experts_of(late)["down_proj"]
        assert weight.dtype == torch.bfloat16 and weight.shape[0] == half


def check_parts_are_refused(rank: int) -> None:
    """Codes of a part of the experts would be gathered with scales of another; and a part of each expert
    has blocks that are not those of the whole.
    """
    mesh = dist.init_device_mesh("cpu", (2,))
    for axis, held in ((0, "3 of 6"), (1, "6 of 6")):
        layer = build(FAMILIES["qwen3-moe"](1)).model.layers[0]
        fully_shard(layer, mesh=mesh, shard_placement_fn=lambda p, axis=axis: Shard(axis % p.dim()))
        words = f"{held} experts on this rank; needed: whole experts: freeze_experts before"
        try:
            freeze_experts(layer)
        except LayoutError as error:
            assert words in str(error), error
        else:
            raise AssertionError("frozen")


def check_sharded_codes_are_loaded_and_stay(family: str) -> None:
    """The state of one process goes into shards and comes out of them; FSDP2 would put codes back in the
    place of weights that were thawed.
    """
    whole = build(FAMILIES[family](1), "sonicmoe_fp8").to(torch.bfloat16)
    layer = whole.model.layers[0].mlp.experts
    freeze_experts(layer)
    sharded = copy.deepcopy(layer)
    for parameter in sharded.parameters():
        parameter.data.zero_()
    fully_shard(sharded)
    options = StateDictOptions(full_state_dict=True)
    state = layer.state_dict()
    set_model_state_dict(sharded, dict(state), options=options)
    found = get_model_state_dict(sharded)
    assert found.keys() == state.keys()
    for name, part in found.items():
        held, wanted = (each.view(torch.uint8) for each in (part.to_local(), state[name]))
        assert torch.equal(held, wanted.chunk(2)[dist.get_rank()])
    try:
        thaw_experts(sharded)
    except LayoutError as error:
        assert "needed: whole experts: thaw_experts before fully_shard" in str(error), error
    else:
        raise AssertionError("thawed")
    assert get_model_state_dict(sharded).keys() == state.keys()


def main() -> None:
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
    register()
    FACES["GPT-OSS"] = GptOss, (24, H)
    for reshard in (True, False):
        check_results_written_in_place(rank, "GPT-OSS", reshard, x_grad=reshard)
    for implementation in ("sonicmoe", "sonicmoe_fp8"):
        path = Path(f"{sys.argv[2]}-{rank}-{implementation}.npz")
        check_a_weight_is_named_as_without_ranks(implementation, path)
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
    check_parts_are_refused(rank)
    for family in ("qwen3-moe", "gpt-oss"):
        check_sharded_codes_are_loaded_and_stay(family)
        check_frozen_experts_are_divided(rank, family, Path(f"{sys.argv[2]}-{family}"))
    dist.destroy_process_group()
    print("equal")


if __name__ == "__main__":
    main()
