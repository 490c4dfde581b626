"""torchtitan's experts modules: the overrides, and what they put in their place."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from doors import torchtitan_on_cpu  # noqa: F401  before anything of torchtitan
from processes import ROOT
from torchtitan.config import ConfigManager
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts
from torchtitan.protocols.module import Module

from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.errors import (
    ConfigError,
    EngineUnavailableError,
    LayoutError,
    RoutingError,
    ShapeError,
)
from sonicmoe.functional import routed
from sonicmoe.integrations import torchtitan as door
from sonicmoe.layer import plan
from sonicmoe.weights.shards import ExpertShard

EXPERTS, TOPK, DIM, HIDDEN, TOKENS = 6, 2, 256, 128, 96
SIZES = {"dim": DIM, "hidden_dim": HIDDEN, "num_experts": EXPERTS}
DOOR = "sonicmoe.integrations.torchtitan"


@pytest.fixture(autouse=True)
def with_compiler():
    """Megatron's tests switch it off, and may have run in this process."""
    with torch._dynamo.config.patch(disable=False):
        yield


def normal(scale):
    return partial(torch.nn.init.normal_, std=scale)


def stock_config(kind=GroupedExperts, **more):
    """Routed experts of this class, whose weights have unit gain."""
    names = ("w1_EFD", "w3_EFD", "w2_EDF", "mlp1_weight_EGD", "mlp2_weight_EDF", "mlp1_bias_EG",
             "mlp2_bias_ED")  # fmt: skip
    init = {name: normal(0.3 if "bias" in name else DIM**-0.5) for name in names}
    if kind is GroupedExperts:
        init = {name: init[name] for name in names[:3]}
    if kind is GptOssGroupedExperts:
        more["swiglu_limit"] = 1.5  # which these weights reach
    inner = kind.Config(**SIZES, param_init=init, **more)
    dispatcher = AllToAllTokenDispatcher.Config(num_experts=EXPERTS, top_k=TOPK)
    return RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher)


class Model(Module):
    """A tree with one layer of routed experts, and a policy of activation checkpointing."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        experts: RoutedExperts.Config
        policy: SelectiveAC.Config


def overridden(config, override="routed_experts", **options):
    """override: "ranks" is `routed_experts` under expert parallelism, here of one rank."""
    override = "routed_experts" if override == "ranks" else override
    tree = Model.Config(experts=copy.deepcopy(config), policy=SelectiveAC.Config())
    apply_overrides(OverrideConfig(imports=[(f"{DOOR}.{override}", options)]), tree)
    return tree


def pair(kind=GroupedExperts, override="routed_experts", **options):
    """A stock module, and ours with its weights, out of its state dict."""
    torch.manual_seed(0)
    stock = stock_config(kind).build()
    stock.init_states()
    ours = overridden(stock_config(kind), override, **options).experts.build()
    ours.load_state_dict(stock.state_dict())
    if override == "ranks":
        ours._group = routed.name_of(routed.ExpertGroup(EXPERTS, None))
    return stock, ours


def batch():
    torch.manual_seed(1)
    x = torch.randn(2, TOKENS // 2, DIM).bfloat16()
    scores, ids = torch.rand(2, TOKENS // 2, EXPERTS - 1).topk(TOPK)  # the last one gets none
    counts = torch.bincount(ids.reshape(-1), minlength=EXPERTS)
    return (x, scores, ids, counts), torch.randn_like(x)


def run(module, given, dout):
    """The output, and the gradients of tokens, scores and weights by their stock names."""
    x, scores, ids, counts = given
    x, scores = x.clone().requires_grad_(), scores.clone().requires_grad_()
    out = module(x, scores, ids, counts)
    out.backward(dout)
    found = {"out": out.detach(), "x": x.grad, "scores": scores.grad}
    for name, weight in module.named_parameters():
        if name.endswith("w13"):
            found["inner_experts.w1_EFD"], found["inner_experts.w3_EFD"] = weight.grad.unbind(2)
        else:
            found[name] = weight.grad
    return found


def assert_close(ours, stock, bar):
    assert set(ours) == set(stock)
    for name, wanted in stock.items():
        distance = ours[name].double() - wanted.double()
        assert distance.norm() <= bar * wanted.double().norm(), name


KINDS = pytest.mark.parametrize("kind", [GroupedExperts, GptOssGroupedExperts])


@KINDS
@pytest.mark.parametrize("override", ["routed_experts", "ranks", "grouped_experts"])
@pytest.mark.parametrize(("mode", "bar"), [("off", 0.02), ("perf", 0.1)])
def test_computes_what_the_stock_module_does(kind, override, mode, bar):
    """In bf16 within its rounding, which the stock module does after every product. FP8 has its exact
    bars in tests/engine; here it is far from another recipe, and from a factor.
    """
    (stock, ours), (given, dout) = pair(kind, override, fp8_mode=mode), batch()
    wanted = run(stock, given, dout)
    # The stock module sorts tokens, and so does ours where only its experts are replaced.
    assert isinstance(ours, door.SonicRoutedExperts) == (override != "grouped_experts")
    # Rounding moves a value over the limit of its clamp, which then has no gradient.
    bar += 0.04 if kind is GptOssGroupedExperts else 0
    assert_close(run(ours, given, dout), wanted, bar)


def test_rows_beyond_the_counts_are_not_read():
    stock, ours = (module.inner_experts for module in pair(GptOssGroupedExperts))
    x, counts = torch.randn(70, DIM).bfloat16(), torch.tensor([3, 0, 20, 7, 30, 0])
    wanted = stock(x, counts)
    x[60:] = float("nan")
    out = ours(x, counts)
    assert torch.isfinite(out).all() and (out[60:] == 0).all()
    assert (out[:60] - wanted[:60]).norm() < 0.02 * wanted[:60].norm()


def test_weights_are_read_where_they_lie():
    for kind in (GroupedExperts, GptOssGroupedExperts):
        _, ours = pair(kind)
        addresses = {weight.data_ptr() for weight in ours.parameters()}
        read = [weight for weight in ours.inner_experts._weights() if weight is not None]
        assert {weight.data_ptr() for weight in read} == addresses
        assert tuple(read[0].shape) == (EXPERTS, 2 * HIDDEN, DIM) and read[0].is_contiguous()


def test_each_half_keeps_its_initialiser():
    config = stock_config()
    config.inner_experts.param_init |= {"w1_EFD": normal(1.0), "w3_EFD": torch.nn.init.zeros_}
    ours = overridden(config).experts.build()
    ours.init_states()
    gate, up = ours.inner_experts.w13.unbind(2)
    assert abs(float(gate.detach().std()) - 1) < 0.05 and (up == 0).all()


def other(kind):
    """A class that somebody has derived from a stock one."""

    class Other(kind):
        @dataclass(kw_only=True, slots=True)
        class Config(kind.Config):
            pass

    return Other


def test_a_dispatcher_that_does_more_is_used():
    """One that pads, for example, also where all experts are on this rank."""

    (_, ours), (given, dout) = pair(), batch()
    assert ours._is_local()
    wanted = run(ours, given, dout)
    ours.zero_grad()
    ours.token_dispatcher = (
        other(AllToAllTokenDispatcher).Config(num_experts=EXPERTS, top_k=TOPK).build()
    )
    assert not ours._is_local()
    assert_close(run(ours, given, dout), wanted, 0.02)


def under_ranks(dispatcher, ranks, **options):
    """Routed experts that were parallelised over a mesh of so many ranks, which nobody asks."""
    mesh = SimpleNamespace(size=lambda: ranks, get_group=lambda: SimpleNamespace(group_name="7"))
    config = stock_config()
    config.token_dispatcher = dispatcher.Config(num_experts=EXPERTS, top_k=TOPK)
    experts = overridden(config, **options).experts.build()
    dims = SimpleNamespace(ep_enabled=True, tp=1, get_optional_mesh=lambda name: mesh)
    experts.parallelize(dims)
    return experts, mesh


def test_a_stock_dispatcher_is_replaced_and_takes_no_memory():
    """Not even that of MinimalAsyncEP, which a CPU does not have; and that one waits for nothing."""
    for kind, waits in ((AllToAllTokenDispatcher, True), (MinimalAsyncEPTokenDispatcher, False)):
        experts, mesh = under_ranks(kind, 2)
        assert experts.token_dispatcher.ep_mesh is mesh
        group = routed._groups[experts._group]
        assert group.num_experts == EXPERTS and group.group.group_name == "7"
        assert group.options == {"wait_for_counts": waits}
    given = {"wait_for_counts": True, "kind": "collective"}
    experts, _ = under_ranks(MinimalAsyncEPTokenDispatcher, 2, transport=given)
    assert routed._groups[experts._group].options == given
    with pytest.raises(RoutingError, match="num_experts is 6; 4 ranks need a positive multiple"):
        under_ranks(AllToAllTokenDispatcher, 4)


def test_a_dispatcher_that_stays():
    own = other(AllToAllTokenDispatcher)
    experts, mesh = under_ranks(own, 2)
    assert experts._group is None and experts.token_dispatcher.ep_mesh is mesh
    words = (
        "transport is .*'collective'.* with .*Other, which stays .* AllToAllTokenDispatcher or Min"
    )
    with pytest.raises(ConfigError, match=words):
        under_ranks(own, 2, transport={"kind": "collective"})
    experts, mesh = under_ranks(AllToAllTokenDispatcher, 2, transport=False)
    assert experts._group is None and experts.token_dispatcher.ep_mesh is mesh


def test_other_classes_stay_and_overrides_are_idempotent(caplog):
    own = other(GroupedExperts)
    with caplog.at_level(logging.WARNING):
        left = overridden(stock_config(own)).experts
    assert type(left.inner_experts) is own.Config and type(left) is RoutedExperts.Config
    assert sum("stay as they are" in line for line in caplog.messages) == 1
    once = overridden(stock_config()).experts
    assert (
        door.routed_experts(once) is once
        and door.grouped_experts(once.inner_experts) is once.inner_experts
    )


def test_the_page_switches_it_on(monkeypatch):
    page = (ROOT / "docs" / "torchtitan.md").read_text(encoding="utf-8")
    command = page.split("-m torchtitan.train ")[1].split("\n\n")[0].replace("\\\n", " ")
    job, own, way = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    given, overrides = {}, ModuleType("my_overrides")
    exec(job, given)
    exec(way, given)
    name, options = given["routed"]
    assert name == f"{DOOR}.routed_experts"
    assert overridden(stock_config(), **options).experts.transport == options["transport"]
    exec(own, overrides.__dict__)
    monkeypatch.setitem(sys.modules, "my_overrides", overrides)
    some = deepseek_v3_debugmodel()
    some.override.imports = ["my_overrides.inner_layers"]
    typed = ConfigManager().parse_args(shlex.split(command))
    for config, layers in ((typed, 48), (given["config"], 5), (some, 4)):
        apply_overrides(config.override, config)
        replaced = list(config.model_spec.model.traverse(door.SonicRoutedExperts.Config))
        assert len(replaced) == layers
        options = [each.inner_experts.options for _, each, *_ in replaced]
        assert all(each == {"fp8_mode": "perf"} for each in options)
    assert type(given["config"].activation_checkpoint) is door.SonicSelectiveAC.Config


def test_unknown_options_and_sizes_that_no_engine_takes_are_named(monkeypatch):
    with pytest.raises(ConfigError, match=r"option 'fp8_mod' .* did you mean 'fp8_mode'"):
        overridden(stock_config(), fp8_mod="perf")
    for transport, words in (
        ({"max_token": 7}, "transport 'max_token' .* is no option of make_disp.* did you mean 'max_tokens'"),
        # As everything that tests/refusals has of make_dispatcher.
        ({"max_load": 0.5}, "max_load is 0.5; needed: a factor"),
        *((bad, "transport is .*; needed: a mapping of options, True or False") for bad in (None, 1, "no", [])),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            overridden(stock_config(), transport=transport)
    with pytest.raises(ConfigError, match="fp8_mode='prf' is not understood"):
        overridden(stock_config(), fp8_mode="prf").experts.build()
    with pytest.raises(EngineUnavailableError, match="engine 'hopper' cannot run"):
        overridden(stock_config(), engine="hopper").experts.build()
    experts = overridden(stock_config()).experts.build().inner_experts
    words = "hidden_dim 128 of the experts is no multiple of tensor_parallel_degree 3"
    with pytest.raises(ConfigError, match=words):
        experts.parallelize(SimpleNamespace(ep_enabled=False, tp=3))
    # As on a GPU where every engine has refused.
    choose = door.choose_engine

    def nobody(*given):
        return replace(choose(*given), falls_back=True, reason="not hopper: I is 136")

    monkeypatch.setattr(door, "choose_engine", nobody)
    words = "no engine takes experts of dim 256 and hidden_dim 128: not hopper: I is 136"
    with pytest.raises(EngineUnavailableError, match=words):
        overridden(stock_config()).experts.build()


def test_checkpoints_that_do_not_fit_are_named():
    stock, ours = pair()
    state = stock.state_dict()
    assert set(ours.state_dict()) == set(state)
    alone = {name: value for name, value in state.items() if "w3" not in name}
    with pytest.raises(LayoutError, match=r"has inner_experts\.w1_EFD alone; needed: .*w3_EFD"):
        ours.load_state_dict(alone)
    turned = {name: value.transpose(1, 2) for name, value in state.items()}
    words = r"inner_experts\.w1_EFD has shape \(6, 256, 128\); needed: \(6, 128, 256\)"
    with pytest.raises(ShapeError, match=words):
        ours.load_state_dict(turned)
    fused = {"inner_experts.w13": ours.inner_experts.w13 * 2}
    ours.load_state_dict(fused, strict=False)
    assert torch.equal(ours.state_dict()["inner_experts.w1_EFD"], 2 * state["inner_experts.w1_EFD"])


@pytest.mark.parametrize("path", ["routed_experts", "ranks"])
@pytest.mark.parametrize(("override", "forwards"), [("selective_ac", 1), ("routed_experts", 2)])
def test_selective_checkpointing_keeps_the_experts(override, forwards, path, monkeypatch):
    """Under the stock policy they are computed again."""
    (_, ours), (given, dout) = pair(override=path), batch()
    policy = overridden(stock_config(), override).policy.build()
    calls, forward = [], ReferenceEngine.forward
    monkeypatch.setattr(
        ReferenceEngine, "forward", lambda *a, **k: calls.append(1) or forward(*a, **k)
    )
    wanted = run(ours, given, dout)
    ours.zero_grad()
    calls.clear()
    block = policy._wrap_block(ours)
    found = run(block, given, dout)
    assert len(calls) == forwards
    named = {name.removeprefix("_checkpoint_wrapped_module."): t for name, t in found.items()}
    assert_close(named, wanted, 1e-6)


@pytest.mark.parametrize("override", ["routed_experts", "ranks", "grouped_experts"])
def test_compiles_into_one_graph(override):
    (_, ours), (given, dout) = pair(GptOssGroupedExperts, override), batch()
    wanted = run(ours, given, dout)
    ours.zero_grad()
    torch._dynamo.reset()
    ours.compile(fullgraph=True, backend="aot_eager")
    assert_close(run(ours, given, dout), wanted, 1e-6)


@pytest.mark.parametrize("override", ["routed_experts", "ranks"])
def test_accumulates_and_validates(override):
    (_, ours), (given, dout) = pair(override=override), batch()
    wanted = {name: tensor.clone() for name, tensor in run(ours, given, dout).items()}
    for name, tensor in run(ours, given, dout).items():
        times = 2 if name.startswith("inner_experts") else 1
        assert torch.equal(tensor, times * wanted[name]), name
    with torch.no_grad():
        assert torch.equal(ours.eval()(*given), wanted["out"])


def test_compiles_where_the_number_of_rows_is_data():
    """As behind an all-to-all."""
    _, ours = pair(GroupedExperts, "grouped_experts")
    x, counts = torch.randn(70, DIM).bfloat16(), torch.tensor([3, 0, 20, 7, 30, 0])

    def received(x, counts):
        rows = int(counts.sum())
        torch._check(rows <= x.shape[0])
        return ours.inner_experts(x[:rows], counts)

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = torch.compile(received, fullgraph=True, backend="aot_eager")
        for given in (counts, torch.zeros_like(counts)):
            assert torch.equal(compiled(x, given), received(x, given))


@KINDS
@pytest.mark.parametrize("way", [copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_is_copied_in_every_state_of_its_life(kind, way):
    _, ours = pair(kind, fp8_mode="perf")
    expected = run(way(ours), *batch())
    for state in ("fresh", "after inference", "after a backward", "after a second one"):
        if state == "after inference":
            with torch.no_grad():
                ours(*batch()[0])
        elif state != "fresh":
            run(ours, *batch())
        other = way(ours)
        other.zero_grad()
        torch.testing.assert_close(run(other, *batch()), expected, rtol=0, atol=0, msg=state)


def test_a_copy_is_compiled_in_a_process_that_knows_no_plan(monkeypatch):
    """Its plan has a number in graphs."""
    stored = pickle.dumps(pair()[1])
    monkeypatch.setattr(plan, "_plans", {})
    inner = pickle.loads(stored).inner_experts
    assert plan.plan_of(inner._number) == inner._plan


@KINDS
def test_a_copy_has_codes_of_its_own(kind):
    """Pipeline parallelism copies a model once for each stage, before FSDP2 takes it."""
    made = overridden(stock_config(kind), gather_codes=True, fp8_mode="perf").experts.build()
    ours, other = made.inner_experts, copy.deepcopy(made.inner_experts)
    for module in (ours, other):
        weights = [p for p in module.parameters() if isinstance(p, ExpertShard)]
        assert len(weights) == 2 and all(weight.codes is module._codes for weight in weights)
    assert ours._codes is not other._codes
    with pytest.raises(ConfigError, match="gather_codes is 1; needed: True or False"):
        overridden(stock_config(kind), gather_codes=1)
