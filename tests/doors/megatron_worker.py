"""One of two ranks that train a small GPT MoE of Megatron-Core with expert parallelism 2: stock
experts, and ours beside them. Arguments: a directory for checkpoints. Prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

if __name__ == "__main__":
    torch.set_num_threads(1)
    import megatron_on_cpu  # noqa: F401  before anything of Megatron's

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_layers import compared, nothing_permuted

from sonicmoe.integrations.megatron import (
    RowsDispatcher,
    SonicExperts,
    TokenDispatcher,
    use_sonicmoe,
)

EXPERTS, HIDDEN, FFN, LENGTH, BATCH, VOCABULARY = 4, 32, 64, 16, 2, 64


def config_of(dispatcher, **changes):
    options = {
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 2, "ffn_hidden_size": FFN,
        "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_ffn_hidden_size": FFN,
        "expert_model_parallel_size": 2, "gated_linear_unit": True, "add_bias_linear": False,
        "activation_func": torch.nn.functional.silu, "use_cpu_initialization": True,
        "moe_token_dispatcher_type": dispatcher, "moe_router_dtype": "fp32",
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "hidden_dropout": 0.0,
        "attention_dropout": 0.0, "moe_router_load_balancing_type": "none",
        "gradient_accumulation_fusion": True, "moe_flex_dispatcher_backend": "deepep",
    }  # fmt: skip
    return TransformerConfig(**{**options, **changes})


def model_of(config, ours, **options):
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    spec = use_sonicmoe(spec, **options) if ours else spec
    torch.manual_seed(11)
    made = {"vocab_size": VOCABULARY, "max_sequence_length": LENGTH}
    return GPTModel(config=config, transformer_layer_spec=spec, **made)


def batch(step):
    torch.manual_seed(100 * step + dist.get_rank())
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH))
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    return ids, positions, torch.ones(LENGTH, LENGTH, dtype=bool).triu(1)[None, None]


def scheduled(model, parallel, batches):
    """Losses of micro-batches by Megatron's own schedule, which runs the forward of one through the
    backward of the one before, frees what it takes for used up, and delays weight gradients.
    """
    run = TransformerModelChunkSchedulePlan.run
    before, gradient, losses = None, None, []
    for batch in (*batches, None):
        plan = batch and model.build_schedule_plan(*batch, labels=batch[0])
        with parallel.no_sync() if batch else torch.enable_grad():
            out = run(plan, before, b_grad=gradient)
        if batch:
            losses.append(float(out.mean()))
            before, gradient = plan, torch.full_like(out, 1 / out.numel())
    return losses


def train(model, steps=3, late=False):
    """The losses of this rank, and the norms of the expert gradients of each step."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, delay_wgrad_compute=late
    )
    parallel = DistributedDataParallel(model.config, config, model)
    losses, norms = [], []
    for step in range(steps):
        parallel.zero_grad_buffer()
        batches = [batch(2 * step + micro) for micro in range(2)]
        if late:
            losses += scheduled(model, parallel, batches)
        for micro, (ids, *rest) in enumerate(() if late else batches):
            loss = parallel(ids, *rest, labels=ids).mean()
            losses.append(float(loss))
            # Reductions begin with the last micro-batch.
            with parallel.no_sync() if micro == 0 else torch.enable_grad():
                loss.backward()
        parallel.finish_grad_sync()
        experts = [p for name, p in model.named_parameters() if ".experts." in name]
        norms.append(float(torch.stack([p.main_grad.square().sum() for p in experts]).sum()))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.main_grad, alpha=-0.1)
    return losses, norms


def saved(model, folder):
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    dist_checkpointing.save(model.sharded_state_dict(), str(folder))
    return folder


def load(model, folder):
    model.load_state_dict(dist_checkpointing.load(model.sharded_state_dict(), str(folder)))
    return model


def weights(model):
    """fc1 and fc2 of all experts of this rank, by layer and expert, whoever holds them."""
    found = {}
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            words = name.split(".")
            at = words.index("local_experts") if "local_experts" in words else None
            expert = words[at + 1] if at else words[-1].removeprefix("weight")
            projection = next(word for word in words if word.startswith("linear_fc"))
            found[words[2], expert, projection] = parameter.detach().clone()
    return found


def equal(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[k], others[k]) for k in some)


def wrong_shape(folder):
    try:
        load(model_of(config_of("alltoall", moe_ffn_hidden_size=2 * FFN), ours=True), folder)
    except CheckpointException as error:  # which is no Exception
        return str(error).splitlines()[-1]
    return "loaded"


def main(root):
    results = {}
    start = saved(model_of(config_of("alltoall"), ours=False), root / "start")
    for dispatcher in ("alltoall", "allgather", "flex"):
        for who, ours in (("stock", False), ("ours", True)):
            model = load(model_of(config_of(dispatcher), ours), start)
            with nothing_permuted() if ours else nullcontext():
                results[f"{dispatcher} {who}"] = train(model)
            kind = RowsDispatcher if dispatcher == "flex" else TokenDispatcher
            assert not ours or all(
                type(m.mlp.token_dispatcher) is kind for m in model.decoder.layers
            )
            if dispatcher == "alltoall" and ours:
                assert all(
                    type(layer.mlp.experts) is SonicExperts for layer in model.decoder.layers
                )
                other = load(model_of(config_of("alltoall"), False), saved(model, root / "ours"))
                results["exchanged"] = equal(weights(model), weights(other))
                marks = {p.allreduce for n, p in model.named_parameters() if ".experts." in n}
                results["allreduce"] = sorted(marks)
    for name, changes, options in (
        ("autograd", {"gradient_accumulation_fusion": False}, {}),
        ("fp8", {}, {"fp8_mode": "perf"}),
        ("late", {}, {}),
        ("late flex", {"moe_token_dispatcher_type": "flex"}, {}),
        ("late sorted", {}, {"transport": False}),
        ("late fp8", {}, {"fp8_mode": "perf", "transport": {"fp8": True}}),
    ):
        config = config_of("alltoall", **changes)
        late = name.startswith("late")
        # Set here, because the configuration asks for Transformer Engine first.
        config.delay_wgrad_compute = config.overlap_moe_expert_parallel_comm = late
        model = load(model_of(config, ours=True, **options), start)
        results[name] = train(model, late=late)
    results["wrong shape"] = wrong_shape(start)
    results["layers"], results["refused"] = compared(config_of)
    print(json.dumps(results))


if __name__ == "__main__":
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    set_streams()
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
