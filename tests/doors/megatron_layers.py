"""One MoE layer of Megatron-Core on two ranks: stock dispatcher and experts against ours, for each
option that decides what a dispatcher gets or does, and the refusals of a dispatcher.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import moe_layer, token_dispatcher

from sonicmoe.errors import ConfigError
from sonicmoe.integrations.megatron import TokenDispatcher, use_sonicmoe

EXPERTS, HIDDEN, LENGTH, BATCH = 4, 32, 16, 2
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
    },
    "all experts": {"moe_router_topk": 4},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "latent": {"moe_latent_size": 16},
    "biases": {"add_bias_linear": True},
    "router in fp64": {"moe_router_dtype": "fp64"},
    "router in bf16": {"moe_router_dtype": None, "params_dtype": torch.bfloat16, "bf16": True},
    "padded for a quantisation": {"moe_router_padding_for_quantization": True},
    "recompute": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}  # fmt: skip
PLACED = {
    f"{dispatcher}, {place}": {}
    for place in PARALLEL
    if place
    for dispatcher in ("alltoall", "allgather")
}
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
