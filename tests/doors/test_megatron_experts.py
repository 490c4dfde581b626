"""One layer's experts: refusals of options that they do not serve, their state_dict beside that of
Megatron-Core's own experts, and what becomes of their gradients. megatron_worker.py has what they
compute.
"""

from __future__ import annotations

import functools
import re
from types import SimpleNamespace

import megatron_on_cpu  # before anything of Megatron's
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from processes import ROOT
from torch.nn import functional as F

from sonicmoe.enums import ActivationType
from sonicmoe.ep import Dispatched
from sonicmoe.errors import ConfigError, LayoutError, ShapeError
from sonicmoe.integrations.megatron import (
    SonicExperts,
    SonicMoELayer,
    TokenDispatcher,
    use_sonicmoe,
)

E, H, FFN = 3, 16, 32
COUNTS = torch.tensor([5, 0, 4])
STOCK = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def group(size=1, rank=0):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def routes(ids):
    """What a dispatcher passes on beside rows and probabilities."""
    return Dispatched(None, None, ids, None, None)


def groups(**others):
    names = "ep", "expt_tp", "expt_dp", "expt_gtp_remat"
    found = {name: group() for name in names} | others
    return SimpleNamespace(expt_dp_gtp_remat=found["expt_dp"], **found)


def config_of(**changes):
    given = {
        "num_layers": 1, "hidden_size": H, "num_attention_heads": 1, "moe_ffn_hidden_size": FFN,
        # Of two ranks: stock experts of one sum over groups that no process here has.
        "num_moe_experts": 2 * E, "expert_model_parallel_size": 2, "moe_router_pre_softmax": True,
        "gated_linear_unit": True, "add_bias_linear": False,
        "activation_func": F.silu, "use_cpu_initialization": True, "bias_dropout_fusion": False,
        "bias_activation_fusion": False, "moe_router_load_balancing_type": "none",
    }  # fmt: skip
    # Set afterwards, where the configuration itself refuses what Transformer Engine is missing for.
    late = {k: changes.pop(k) for k in list(changes) if k in LATE}
    config = TransformerConfig(**{**given, **changes})
    for name, value in late.items():
        setattr(config, name, value)
    return config


LATE = (
    "fp8", "fp4", "quant_recipe", "expert_gtp_weight_remat_size", "transformer_impl",
    "overlap_moe_expert_parallel_comm", "use_te_activation_func", "activation_func_fp8_input_store",
    "fine_grained_activation_offloading",
    "offload_modules", "moe_mlp_glu_interleave_size", "delay_wgrad_compute", "moe_paged_stash",
    "moe_latent_size", "recompute_granularity", "recompute_modules",
)  # fmt: skip


@pytest.fixture
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def built(kind, config, among=None, **options):
    torch.manual_seed(5)
    among = among or groups()
    if kind is SequentialMLP:
        return kind(E, config, STOCK, among)
    if kind is TEGroupedMLP:
        with megatron_on_cpu.grouped_linears() as (column, row):
            return kind(E, config, MLPSubmodules(linear_fc1=column, linear_fc2=row), among)
    return kind(E, config, pg_collection=among, **options)


def test_gelu_of_transformer_engine_is_its_tanh_form():
    config = config_of(activation_func=F.gelu, use_te_activation_func=True)
    assert built(SonicExperts, config).node.activation_type is ActivationType.GEGLU_TANH


def test_initial_values_come_from_the_methods_of_the_configuration():
    ours = built(SonicExperts, config_of(init_method=torch.nn.init.ones_))
    assert (ours.linear_fc1.weight2 == 1.0).all()
    assert ours.linear_fc2.weight2.detach().std().item() == pytest.approx(0.02 / 2**0.5, rel=0.2)


@pytest.mark.parametrize("slices", [1, 2])
def test_a_token_has_the_ids_of_its_experts_on_every_slice(slices):
    """Against the map that Megatron makes of routes for all ranks of both parallelisms. Probabilities
    are dense, as a router of one's own may give them; a NaN is one.
    """
    config = SimpleNamespace(moe_router_topk=2)
    sizes = {"tp_size": slices, "ep_size": 2, "num_local_experts": 3}
    given = SimpleNamespace(config=config, shared_experts=None, **sizes)
    given._to_every_slice = functools.partial(TokenDispatcher._to_every_slice, given)
    probs, here = torch.rand(5, 6) + 0.1, torch.zeros(5, 6, dtype=torch.bool)
    for token, experts in enumerate([(0, 5), (4, 3), (2, 3), (1,), ()]):
        here[token, list(experts)] = True
    probs[1, 4], probs[3, 1] = 0.0, float("nan")
    x = torch.randn(5, 1, H)
    rows, weights = TokenDispatcher.dispatch_preprocess(given, x, here, probs)
    assert torch.equal(rows, x[:, 0])
    assert given.ids.shape == weights.shape == (5, 2 * slices) and weights.dtype == torch.float32
    there = probs.masked_fill(~here, 0.0)
    wanted = MoEFlexTokenDispatcher._initialize_metadata(given, here, there)[1].reshape(5, -1)
    found = torch.zeros_like(wanted)
    for token, slot in (given.ids >= 0).nonzero().tolist():
        found[token, given.ids[token, slot]] += weights[token, slot]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    # Neither the slot without an expert nor that of probability 0 goes anywhere.
    assert (given.ids >= 0).sum() == 6 * slices


def test_initial_values_of_tensor_ranks_are_parts_of_the_whole():
    whole = built(SonicExperts, config_of())
    for rank in range(2):
        part = built(SonicExperts, config_of(), groups(expt_tp=group(2, rank)))
        gate, up = whole.linear_fc1.weight2.chunk(2)
        wanted = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
        torch.testing.assert_close(part.linear_fc1.weight2, wanted)
        wanted = whole.linear_fc2.weight2.chunk(2, 1)[rank]
        torch.testing.assert_close(part.linear_fc2.weight2, wanted)


PUT_OFF = {"delay_wgrad_compute": True, "gradient_accumulation_fusion": True}
OFFLOADED = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["moe_act", "core_attn"],
}
REFUSED = {
    "no engine has activation_func tanh": {"activation_func": torch.tanh},
    "glu_linear_offset 0.0": {"activation_func": quick_gelu},
    "clamp_value 3.0": {"activation_func": F.gelu, "activation_func_clamp_value": 3.0},
    "fp8 is 'hybrid', which is Transformer Engine's": {"fp8": "hybrid"},
    "quant_recipe is 'mine', which is Transformer Engine's": {"quant_recipe": "mine"},
    "expert_gtp_weight_remat_size is 2": {"expert_gtp_weight_remat_size": 2},
    "transformer_impl is 'inference_optimized'": {"transformer_impl": "inference_optimized"},
    "fp4 is 'e2m1'": {"fp4": "e2m1"},
    "activation_func_fp8_input_store is True": {"activation_func_fp8_input_store": True},
    "moe_mlp_glu_interleave_size is 32": {"moe_mlp_glu_interleave_size": 32},
    "moe_paged_stash is True": {"moe_paged_stash": True},
    r"offload_modules has \['moe_act'\]": OFFLOADED,
    "gradient_accumulation_fusion False": {"delay_wgrad_compute": True},
    "with moe_router_topk 2": {"moe_apply_probs_on_input": True, "moe_router_topk": 2},
}
OPTIONS = {
    "options of the experts: .*fp8_mod": {"fp8_mod": "perf"},
    "fp8_mode": {"fp8_mode": "fast"},
    "first_backward='overwrite' needs node.step": {"first_backward": "overwrite"},
}


@pytest.mark.parametrize("words", [*REFUSED, *OPTIONS])
def test_an_option_that_is_not_served_is_named(words):
    with pytest.raises(ConfigError, match=words):
        built(SonicExperts, config_of(**REFUSED.get(words, {})), **OPTIONS.get(words, {}))


def test_sizes_are_refused_by_name_and_fp8_is_served_by_name():
    with pytest.raises(
        ShapeError, match=r"moe_ffn_hidden_size gives 20 on each rank.*multiples of"
    ):
        built(SonicExperts, config_of(moe_ffn_hidden_size=20))
    with pytest.raises(ShapeError, match="moe_ffn_hidden_size is 32 on 5 ranks"):
        SonicExperts(E, config_of(), pg_collection=groups(expt_tp=group(5)))
    built(SonicExperts, config_of(moe_ffn_hidden_size=20), engine="reference")
    quantised = config_of(fp8="hybrid", activation_func_fp8_input_store=True)
    experts = built(SonicExperts, quantised, fp8_mode="perf")
    x, probs = torch.randn(9, H), torch.rand(9)
    exact = built(SonicExperts, config_of())(x, COUNTS, probs)[0]
    error = (experts(x, COUNTS, probs)[0] - exact).norm() / exact.norm()
    assert 0.005 < error < 0.1
    for at, name in enumerate(("hidden_states", "tokens_per_expert", "probs")):
        with pytest.raises(TypeError, match=f"^{name} .*list"):
            experts(*([3, 0, 6] if n == at else t for n, t in enumerate((x, COUNTS, probs))))
    with pytest.raises(ConfigError, match=r"got \['output_buffer'\]"):
        experts(x, COUNTS, probs, output_buffer=x, grad_input_buffer=None)


def test_state_dicts_load_with_the_extra_states_of_others():
    experts = built(SonicExperts, config_of(add_bias_linear=True))
    state = experts.state_dict()
    # One of Transformer Engine's has bytes there, and loads of a sharded checkpoint one of each expert.
    state["linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    state["linear_fc1._extra_state2"] = None
    del state["linear_fc2._extra_state"]
    experts.load_state_dict(state)
    state["linear_fc2.weight1"] = state["linear_fc2.weight1"].T
    with pytest.raises(RuntimeError, match=r"linear_fc2.weight1: .* torch.Size\(\[32, 16\]\)"):
        experts.load_state_dict(state)


def entries_of(experts, apart, names=True):
    """What `experts` say about each piece of a checkpoint."""
    metadata = {"singleton_local_shards": apart, "dp_cp_group": group()}
    found = []
    for name, entry in experts.sharded_state_dict("mlp.experts.", (), metadata).items():
        for piece in entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]:
            shapes = getattr(piece, "local_shape", ()), piece.global_shape, piece.global_offset
            cut = getattr(piece, "axis_fragmentations", ()), getattr(piece, "prepend_axis_num", 0)
            found.append((name if names else "", piece.key, *shapes, *cut, piece.replica_id))
    return sorted(found)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("gated", "bias", "ep", "tp", "dp"),
    [
        (True, True, 1, 1, 2),
        (True, False, 2, 2, 1),
        (False, True, 2, 2, 2),
        (False, False, 1, 1, 1),
    ],
)
def test_checkpoints_are_cut_and_named_as_those_of_both_stock_experts(
    gated, bias, ep, tp, dp, apart
):
    config = config_of(gated_linear_unit=gated, add_bias_linear=bias)
    sizes = {"ep": ep, "expt_tp": tp, "expt_dp": dp}
    among = groups(**{name: group(size, size - 1) for name, size in sizes.items()})
    ours = built(SonicExperts, config, among)
    grouped = built(TEGroupedMLP, config, among)
    assert entries_of(ours, apart) == entries_of(grouped, apart)
    assert list(ours.state_dict()) == list(grouped.state_dict())
    assert isinstance(ours, TEGroupedMLP)  # Megatron-FSDP and upcycling ask who has such parameters
    if tp == 1:  # whose layers ask a real group to cut initial values
        sequential = built(SequentialMLP, config, among)
        assert entries_of(ours, apart, False) == entries_of(sequential, apart, False)


def hooked(experts):
    """Give every parameter memory for its gradient; returns the list of the parameters whose hooks fire."""
    fired = []
    for parameter in experts.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.grad_added_to_main_grad = False
        parameter.register_post_accumulate_grad_hook(fired.append)
    return fired


@pytest.mark.parametrize("fused", [False, True])
def test_no_rows_leave_gradients_of_zero(fused):
    """A rank that nobody sends a token to; its hooks must fire all the same."""
    config = config_of(gradient_accumulation_fusion=fused, add_bias_linear=True)
    experts = built(SonicExperts, config)
    fired = hooked(experts)
    for counts in (
        torch.zeros(E, dtype=torch.long),
        routes(torch.empty(0, 2, dtype=torch.long)),
    ):
        fired.clear()
        shape = (0,) if isinstance(counts, torch.Tensor) else (0, 2)
        x = torch.empty(0, H, requires_grad=True)
        out, _ = experts(x, counts, torch.empty(shape))
        out.sum().backward()
        assert out.shape == x.grad.shape == (0, H)
        assert len(fired) == len(list(experts.parameters()))
        assert all((p.grad == 0.0).all() and (p.main_grad == 0.0).all() for p in fired)


@pytest.mark.parametrize("registered", [False, True])
def test_late_weight_gradients_fire_hooks_of_the_module_or_of_the_weights(registered):
    """Data parallelism has a hook on the module, or on the weights, where it was not told; those of
    biases fire in the backward.
    """
    experts = built(SonicExperts, config_of(**PUT_OFF, add_bias_linear=True))
    fired = hooked(experts)
    weights = [p for name, p in experts.named_parameters() if ".weight" in name]
    biases = [p for name, p in experts.named_parameters() if ".bias" in name]
    for projection in (experts.linear_fc1, experts.linear_fc2) if registered else ():
        projection.register_wgrad_accumulation_and_reduce_hooks(lambda: fired.append(None))
    experts(torch.randn(9, H).requires_grad_(), COUNTS, torch.rand(9))[0].sum().backward()
    # Those of biases are complete, and whatever trains them has seen that.
    assert set(fired) == set(biases) and experts.linear_fc2.bias0.grad.any()
    fired.clear()
    experts.backward_dw()
    assert set(fired) == ({None} if registered else set(weights))
    assert len(fired) == (2 if registered else len(weights))
    assert all((weight.grad == 0.0).all() for weight in weights)
    assert experts.linear_fc1.weight0.main_grad.any()


@pytest.mark.parametrize("way", ["one expert", "routes", "quantised"])
def test_rows_that_the_schedule_frees_are_kept(way):
    """With `overlap_moe_expert_parallel_comm`, once the experts' forward is over."""
    changes = {"fp8": "hybrid", "moe_token_dispatcher_type": "flex"} if way == "quantised" else {}
    config = config_of(overlap_moe_expert_parallel_comm=True, **changes)
    options = {"pg_collection": groups(), "fp8_mode": "off"}
    experts = SonicExperts(1 if way == "one expert" else E, config, **options)
    given = {"one expert": torch.tensor([9]), "quantised": COUNTS}
    received = routes(torch.tensor([[0, 2, -1]]).expand(9, 3).contiguous())
    probs = torch.rand(9, 3) if way == "routes" else torch.rand(9)
    found = []
    for freed in (False, True):
        torch.manual_seed(1)
        x = torch.randn(9, H).requires_grad_()
        out, _ = experts(x, given.get(way, received), probs)
        if freed:
            x.data.fill_(float("nan"))  # which is what the next owner of the memory does
        experts.zero_grad()
        out.sum().backward()
        found.append([x.grad, *(p.grad.clone() for p in experts.parameters())])
    assert all(map(torch.equal, *found))


def test_specs_of_both_kinds_are_copied():
    """`ModuleSpec` of 0.16; builders, as 0.19 has them."""
    spec = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)
    layer = ModuleSpec(MoELayer, submodules=MoESubmodules(experts=SequentialMLP))
    made = use_sonicmoe(layer, fp8_mode="perf")
    experts = made.submodules.experts
    assert made.module is SonicMoELayer
    assert (experts.module, experts.params) == (SonicExperts, {"fp8_mode": "perf"})
    assert made.params == {"transport": True}
    assert layer.submodules.experts is SequentialMLP
    builder = functools.partial(MoELayer, submodules=MoESubmodules(experts=SequentialMLP))
    made = use_sonicmoe(builder, fp8_mode="perf", transport=False)
    assert made.func is SonicMoELayer and made.keywords["transport"] is False
    assert use_sonicmoe(made, transport={"fp8": True}).keywords["transport"] == {"fp8": True}
    assert made.keywords["submodules"].experts.func is SonicExperts
    assert builder.func is MoELayer
    below = [get_gpt_layer_local_spec(), [spec], TransformerBlockSubmodules(layer_specs=[spec])]
    for one in use_sonicmoe(below)[1][0], use_sonicmoe(below)[2].layer_specs[0]:
        mlp = one.submodules.mlp
        kind = mlp.func if isinstance(mlp, functools.partial) else mlp.module
        assert kind is SonicMoELayer
    own = ModuleSpec(type("Own", (MoELayer,), {}), submodules=layer.submodules)
    assert use_sonicmoe(own).module is own.module
    with pytest.raises(
        LayoutError, match="transport is False, and Own has a dispatcher of its own"
    ):
        use_sonicmoe(own, transport=False)
    with pytest.raises(LayoutError, match="spec of a MoELayer has no submodules"):
        use_sonicmoe(ModuleSpec(MoELayer))
    with pytest.raises(LayoutError, match="no MoE layer is in it"):
        use_sonicmoe(get_gpt_layer_local_spec())


@pytest.mark.usefixtures("one_rank")
def test_the_snippet_of_the_page_runs(caplog):
    text = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    made: dict = {}
    exec(snippet, made)
    assert all(type(layer.mlp.experts) is SonicExperts for layer in made["model"].decoder.layers)
    # 0.16 warns of layers that it does not know, and passes them no process groups.
    assert "Unknown MLP type" not in caplog.text
