"""One layer's experts against Megatron-Core's own `SequentialMLP`: every option that decides what they
compute, the refusals of those that they do not serve, and their state_dict.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from types import SimpleNamespace

import megatron_on_cpu  # noqa: F401  before anything of Megatron's
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional as F

from sonicmoe.errors import ConfigError, LayoutError, ShapeError
from sonicmoe.integrations.megatron import SonicExperts, SonicMoELayer, use_sonicmoe
from sonicmoe.integrations.megatron.dispatcher import Routes

ROOT = Path(__file__).parents[2]
E, H, FFN = 3, 16, 32
COUNTS = torch.tensor([5, 0, 4])
STOCK = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)


def group(size=1, rank=0):
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


def groups(**others):
    return SimpleNamespace(**{"ep": group(), "expt_tp": group(), "expt_dp": group()} | others)


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
    "fp8", "fp4", "activation_func_fp8_input_store", "fine_grained_activation_offloading",
    "offload_modules", "moe_mlp_glu_interleave_size", "delay_wgrad_compute", "moe_paged_stash",
    "moe_latent_size", "recompute_granularity", "recompute_modules",
)  # fmt: skip


def built(kind, config, **options):
    torch.manual_seed(5)
    if kind is SequentialMLP:
        return kind(E, config, STOCK, groups())
    return kind(E, config, pg_collection=groups(), **options)


def stock_weights(experts, values):
    """`weight{i}` of ours as stock experts name them."""
    for expert, mlp in enumerate(experts.local_experts):
        for name in ("linear_fc1", "linear_fc2"):
            for kind in ("weight", "bias"):
                mine = getattr(values.get_submodule(name), f"{kind}{expert}", None)
                if mine is not None:
                    yield mine, getattr(getattr(mlp, name), kind)


def gradients_of(experts, given, dout):
    x, probs = (tensor.clone().requires_grad_() for tensor in given)
    out, bias = experts(x, COUNTS, probs)
    assert bias is None
    out.backward(dout)
    return [out, x.grad, probs.grad]


SAME = [
    {},
    {"activation_func": F.gelu},
    {"activation_func": F.relu, "gated_linear_unit": False},
    {"activation_func": squared_relu, "gated_linear_unit": False, "add_bias_linear": True},
    {"activation_func_clamp_value": 0.5, "add_bias_linear": True},
    {"activation_func": quick_gelu, "activation_func_clamp_value": 0.5, "glu_linear_offset": 1.0},
    {"moe_apply_probs_on_input": True, "moe_router_topk": 1, "add_bias_linear": True},
    {"moe_latent_size": 8},
    {"recompute_granularity": "selective", "recompute_modules": ["moe_act"]},
]


@pytest.mark.parametrize("changes", SAME, ids=str)
def test_computes_what_stock_experts_compute(changes):
    config = config_of(**changes)
    ours, stock = built(SonicExperts, config), built(SequentialMLP, config)
    with torch.no_grad():
        for mine, its in stock_weights(stock, ours):
            mine.copy_(torch.randn_like(mine))
            its.copy_(mine)
    rows, width = int(COUNTS.sum()), config.moe_latent_size or H
    x, dout, probs = torch.randn(rows, width), torch.randn(rows, width), torch.rand(rows)
    close = functools.partial(torch.testing.assert_close, rtol=2e-5, atol=2e-5)
    close(gradients_of(ours, (x, probs), dout), gradients_of(stock, (x, probs), dout))
    for mine, its in stock_weights(stock, ours):
        # Nobody has told autograd of an expert without rows.
        close(mine.grad, torch.zeros_like(its) if its.grad is None else its.grad)


def test_initial_values_come_from_the_methods_of_the_configuration():
    ours = built(SonicExperts, config_of(init_method=torch.nn.init.ones_))
    assert (ours.linear_fc1.weight2 == 1.0).all()
    assert ours.linear_fc2.weight2.detach().std().item() == pytest.approx(0.02 / 2**0.5, rel=0.2)


@pytest.mark.parametrize("topk", [1, 2])
def test_rows_with_routes_are_summed_over_their_slots(topk):
    config = config_of(moe_router_topk=topk, moe_apply_probs_on_input=topk == 1)
    experts = built(SonicExperts, config)
    x, ids = torch.randn(4, H), torch.tensor([[0, 2], [-1, 2], [-1, -1], [2, 0]])[:, :topk]
    probs = torch.rand(ids.shape)
    out, _ = experts(x, Routes(ids, None), probs)
    for row in range(4):
        wanted = torch.zeros(H)
        for slot in range(topk):
            if ids[row, slot] >= 0:
                one = torch.zeros(E, dtype=torch.long)
                one[ids[row, slot]] = 1
                wanted = wanted + experts(x[row : row + 1], one, probs[row, slot : slot + 1])[0][0]
        torch.testing.assert_close(out[row], wanted)


def test_expert_tensor_parallelism_sums_to_the_whole_and_adds_b2_once():
    config = config_of(add_bias_linear=True)
    whole, parts = built(SonicExperts, config), []
    for rank in range(2):
        torch.manual_seed(5)
        own = groups(expt_tp=group(2, rank))
        parts.append(SonicExperts(E, config, pg_collection=own))
    with torch.no_grad():
        for expert in range(E):
            for name in ("linear_fc1", "linear_fc2"):
                torch.nn.init.normal_(getattr(whole.get_submodule(name), f"bias{expert}"))
            for rank, part in enumerate(parts):
                one, two = part.linear_fc1, part.linear_fc2
                gate, up = getattr(whole.linear_fc1, f"weight{expert}").chunk(2)
                mine = torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
                # The initial values are cut so already.
                torch.testing.assert_close(getattr(one, f"weight{expert}"), mine)
                gate, up = getattr(whole.linear_fc1, f"bias{expert}").chunk(2)
                getattr(one, f"bias{expert}").copy_(
                    torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]])
                )
                getattr(two, f"bias{expert}").copy_(getattr(whole.linear_fc2, f"bias{expert}"))
    x, probs = torch.randn(9, H), torch.rand(9)
    found = [part(x, COUNTS, probs)[0] for part in parts]
    torch.testing.assert_close(sum(found), whole(x, COUNTS, probs)[0])
    found[1].sum().backward()
    assert (parts[1].linear_fc2.bias0.grad == 0.0).all()  # in the graph, with a gradient of zeros


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
    "fp4 is 'e2m1'": {"fp4": "e2m1"},
    "activation_func_fp8_input_store is True": {"activation_func_fp8_input_store": True},
    "moe_mlp_glu_interleave_size is 32": {"moe_mlp_glu_interleave_size": 32},
    "moe_paged_stash is True": {"moe_paged_stash": True},
    r"offload_modules has \['moe_act'\]": OFFLOADED,
    "gradient_accumulation_fusion False": {"delay_wgrad_compute": True},
    "add_bias_linear True": {**PUT_OFF, "add_bias_linear": True},
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
    with pytest.raises(ConfigError, match=r"got \['output_buffer'\]"):
        experts(x, COUNTS, probs, output_buffer=x, grad_input_buffer=None)


def test_state_dicts_have_transformer_engines_names():
    experts = built(SonicExperts, config_of(add_bias_linear=True))
    state = experts.state_dict()
    names = [f"{kind}{expert}" for kind in ("weight", "bias") for expert in range(E)]
    names = [f"linear_fc{at}.{name}" for at in (1, 2) for name in [*names, "_extra_state"]]
    assert list(state) == names
    # One of Transformer Engine's has bytes there, and loads of a sharded checkpoint one of each expert.
    state["linear_fc1._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    state["linear_fc1._extra_state2"] = None
    del state["linear_fc2._extra_state"]
    experts.load_state_dict(state)
    state["linear_fc2.weight1"] = state["linear_fc2.weight1"].T
    with pytest.raises(RuntimeError, match=r"linear_fc2.weight1: .* torch.Size\(\[32, 16\]\)"):
        experts.load_state_dict(state)


def test_specs_of_both_kinds_are_copied():
    """`ModuleSpec` of 0.16; builders, as 0.19 has them."""
    spec = get_gpt_layer_local_spec(num_experts=E, moe_grouped_gemm=False)
    made = use_sonicmoe(spec, fp8_mode="perf")
    experts = made.submodules.mlp.submodules.experts
    assert made.submodules.mlp.module is SonicMoELayer
    assert (experts.module, experts.params) == (SonicExperts, {"fp8_mode": "perf"})
    assert spec.submodules.mlp.submodules.experts.module is SequentialMLP
    builder = functools.partial(MoELayer, submodules=MoESubmodules(experts=SequentialMLP))
    made = use_sonicmoe(builder, fp8_mode="perf")
    assert made.func is SonicMoELayer
    assert made.keywords["submodules"].experts.func is SonicExperts
    assert builder.func is MoELayer
    block = SimpleNamespace(layer_specs=[spec, get_gpt_layer_local_spec()])
    assert use_sonicmoe(block).layer_specs[0].submodules.mlp.module is SonicMoELayer
    with pytest.raises(LayoutError, match="no MoE layer is in it"):
        use_sonicmoe(get_gpt_layer_local_spec())


def test_the_snippet_of_the_page_runs_and_every_link_of_it_leads_somewhere(caplog):
    page = ROOT / "docs" / "megatron.md"
    text = page.read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        parallel_state.initialize_model_parallel()
        made: dict = {}
        exec(snippet, made)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()
    assert all(type(layer.mlp.experts) is SonicExperts for layer in made["model"].decoder.layers)
    # 0.16 warns of layers that it does not know, and passes them no process groups.
    assert "Unknown MLP type" not in caplog.text
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert (page.parent / target).exists(), target
