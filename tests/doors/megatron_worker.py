"""One of two ranks of Megatron-Core with expert parallelism 2. A small GPT MoE trains on stock experts,
and on ours beside them. And one MoE layer, the stock dispatcher and experts against ours, computes
under each option that decides what a dispatcher gets or does; refusals of a dispatcher. Arguments: a
directory for checkpoints. Prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

if __name__ == "__main__":
    torch.set_num_threads(1)
    import megatron_on_cpu  # noqa: F401  before anything of Megatron's

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.activations import fast_gelu, squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerModelChunkSchedulePlan,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.pipeline_parallel.utils import set_streams
from megatron.core.transformer.moe import moe_layer, token_dispatcher
from megatron.core.transformer.transformer_config import TransformerConfig

from sonicmoe.errors import ConfigError
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
        "bias_dropout_fusion": False, "bias_activation_fusion": False, "masked_softmax_fusion": False, "hidden_dropout": 0.0,
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


# One layer under each option

PARALLEL = {
    "": {"expert_model_parallel_size": 2},
    "one rank has all experts": {"expert_model_parallel_size": 1},
    "attention has 2 tensor ranks": {
        "expert_model_parallel_size": 2,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "sequence_parallel": True,
    },
    "experts have 2 tensor ranks": {
        "expert_model_parallel_size": 1,
        "tensor_model_parallel_size": 2,
        "expert_tensor_parallel_size": 2,
        "sequence_parallel": True,
    },
}
CAPACITY = {"moe_expert_capacity_factor": 0.75, "moe_router_load_balancing_type": "aux_loss"}
PADDED = {**CAPACITY, "moe_pad_expert_input_to_capacity": True}
SHARED = {"moe_shared_expert_intermediate_size": 32}
SIGMOID = {
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
}
# Options of the layer, and where experts and attention lie.
SAME = {
    "alltoall": {},
    "allgather": {},
    "dropped": CAPACITY,
    "dropped by position": {**CAPACITY, "moe_token_drop_policy": "position"},
    "filled to capacity": PADDED,
    "filled to capacity, allgather": PADDED,
    "shared expert": SHARED,
    "shared expert, gated, allgather": {**SHARED, "moe_shared_expert_gate": True},
    "shared expert beside": {
        **SHARED, "moe_shared_expert_overlap": True, "moe_shared_expert_gate": True,
    },
    "sigmoid": SIGMOID,
    "top 1 on input": {
        "moe_router_topk": 1, "moe_router_pre_softmax": True, "moe_apply_probs_on_input": True,
        "add_bias_linear": True,
    },
    "all experts": {"moe_router_topk": 4},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "latent": {"moe_latent_size": 16},
    "gelu": {"activation_func": torch.nn.functional.gelu},
    "fast gelu": {"activation_func": fast_gelu, "add_bias_linear": True},
    "relu": {"activation_func": torch.nn.functional.relu, "gated_linear_unit": False},
    "squared relu": {
        "activation_func": squared_relu, "gated_linear_unit": False, "add_bias_linear": True,
    },
    "clamped": {"activation_func_clamp_value": 0.1, "add_bias_linear": True},
    "GPT-OSS": {
        "activation_func": quick_gelu, "activation_func_clamp_value": 0.1, "glu_linear_offset": 1.0,
    },
    "router in fp64": {"moe_router_dtype": "fp64"},
    "router in bf16": {"moe_router_dtype": None, "params_dtype": torch.bfloat16, "bf16": True},
    "padded for a quantisation": {"moe_router_padding_for_quantization": True},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}  # fmt: skip
PLACED = [
    f"{dispatcher}, {place}"
    for place in PARALLEL
    if place
    for dispatcher in ("alltoall", "allgather")
]
# Set afterwards, where the configuration itself refuses what Transformer Engine is missing for.
LATE = (
    "moe_latent_size",
    "moe_router_padding_for_quantization",
    "overlap_moe_expert_parallel_comm",
)
REFUSED = {
    "unexpected keyword argument 'topk'": ({}, {"topk": 2}),
    "needed: one of": ({}, {"kind": "nccl"}),
    "max_tokens is 0": ({}, {"wait_for_counts": False}),
    "fp8=True with moe_apply_probs_on_input True": (SAME["top 1 on input"], {"fp8": True}),
    "fp8_grad=True with overlap_moe_expert_parallel_comm True": (
        {"overlap_moe_expert_parallel_comm": True},
        {"fp8_grad": True},
    ),
    "transport is {'fp8': True} with moe_token_dispatcher_type 'flex'": (
        {"moe_token_dispatcher_type": "flex"},
        {"fp8": True},
    ),
    "cuda_graph_impl and its scope": ({"cuda_graph_impl": "local"}, True),
}


class Linear(torch.nn.Linear):
    """In the place of Transformer Engine's, which project tokens to `moe_latent_size`."""

    def __init__(self, rows, columns, **_):
        super().__init__(rows, columns, bias=False)

    def forward(self, x):
        return super().forward(x), None


moe_layer.HAVE_TE, moe_layer.TELinear = True, Linear


def layers_of(config_of, changes, transport=True):
    """A stock layer, and ours with its parameters."""
    late = {name: value for name, value in changes.items() if name in LATE}
    given = {name: value for name, value in changes.items() if name not in LATE}
    kind = given.pop("moe_token_dispatcher_type", "alltoall")
    config = config_of(kind, **{"gradient_accumulation_fusion": False, **given})
    for name, value in late.items():
        setattr(config, name, value)
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False).submodules.mlp
    torch.manual_seed(3 + parallel_state.get_expert_model_parallel_rank())
    stock = spec(config=config, layer_number=1)
    ours = use_sonicmoe(spec, transport=transport)(config=config, layer_number=1)
    return stock, ours


def pairs(stock, ours):
    """Each parameter of stock layers, and ours."""
    mine = dict(ours.named_parameters())
    for name, parameter in stock.named_parameters():
        words = name.split(".")
        if "local_experts" in words:
            at = words.index("local_experts")
            words = [*words[:at], words[at + 2], words[at + 3] + words[at + 1]]
        yield parameter, mine.pop(".".join(words))
    assert not mine


@contextmanager
def nothing_permuted():
    """Inside, nobody permutes a row for a dispatcher, makes a multihot map or reads a sum off the
    device.
    """
    names = "permute", "unpermute", "sort_chunks_by_idxs"
    raising = {name: mock.Mock(side_effect=AssertionError(name)) for name in names}
    manager = token_dispatcher._DeepepManager
    unused = "get_permuted_hidden_states_by_experts", "get_restored_hidden_states_by_experts"
    with (
        mock.patch.multiple(token_dispatcher, **raising),
        mock.patch.multiple(manager, **dict.fromkeys(unused)),
    ):
        yield


def results_of(layer, parameters, length):
    """Output and gradients for one batch of this rank."""
    torch.manual_seed(10 + torch.distributed.get_rank())
    dtype = layer.config.params_dtype
    x = torch.randn(length, BATCH, HIDDEN).to(dtype).requires_grad_()
    out, bias = layer(x)
    assert bias is None
    out.backward(torch.randn(out.shape).to(out.dtype))
    # Nobody has told autograd of an expert without rows.
    missing = [p if p.grad is not None else torch.zeros_like(p) for p in parameters]
    return [out, x.grad, *(p.grad if p.grad is not None else p for p in missing)]


def difference(config_of, changes, transport=True, length=LENGTH):
    """The largest relative difference of any result."""
    stock, ours = layers_of(config_of, changes, transport)
    assert type(ours.token_dispatcher) is TokenDispatcher
    both = [*zip(*pairs(stock, ours), strict=True)]
    with torch.no_grad():
        for its, mine in zip(*both, strict=True):
            mine.copy_(its.normal_(std=0.1))
    # Of a recipe of Transformer Engine's.
    with mock.patch.object(token_dispatcher, "get_align_size_for_quantization", lambda _: 16):
        wanted = results_of(stock, both[0], length)
    with nothing_permuted():
        found = results_of(ours, both[1], length)
    return max(
        float((one - other).detach().norm() / other.detach().norm().clamp(min=1e-6))
        for one, other in zip(found, wanted, strict=True)
    )


def refusal(config_of, changes, transport):
    try:
        layers_of(config_of, changes, transport)
    except (ConfigError, TypeError) as error:
        return str(error)
    return "built"


def compared(config_of):
    """Differences by name of the case, and the words of each refusal."""
    found = {}
    for name, changes in SAME.items():
        kind = "allgather" if "allgather" in name else "alltoall"
        found[name] = difference(config_of, {"moe_token_dispatcher_type": kind, **changes})
    refused = {words: refusal(config_of, *given) for words, given in REFUSED.items()}
    fewer = LENGTH - 7 * torch.distributed.get_rank()
    found["fewer tokens on one rank"] = difference(config_of, {}, length=fewer)
    # The ways of make_dispatcher, in the place of its own choice.
    found["no wait"] = difference(
        config_of, {}, {"wait_for_counts": False, "max_tokens": LENGTH * BATCH}
    )
    found["fp8"] = difference(config_of, {}, {"fp8": True, "fp8_grad": True})
    found["fp8, recompute"] = difference(config_of, SAME["recompute"], {"fp8": True})
    for name in PLACED:
        kind, _, place = name.partition(", ")
        parallel = PARALLEL[place]
        parallel_state.destroy_model_parallel()
        sizes = {key: value for key, value in parallel.items() if key != "sequence_parallel"}
        parallel_state.initialize_model_parallel(**sizes)
        found[name] = difference(config_of, {"moe_token_dispatcher_type": kind, **parallel})
    return found, refused


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
