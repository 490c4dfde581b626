"""A gate is recognised by what it computes, and refused where that is something else, or where it
reads what could change unseen.
"""

from __future__ import annotations

import copy
import gc
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN
from transformers.integrations.moe import _default_apply_gate, use_experts_implementation
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.inkling2.modeling_inkling2 import Inkling2Experts, Inkling2SoftcappedSwiGLU
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from sonicmoe.enums import ActivationType
from sonicmoe.errors import LayoutError
from sonicmoe.integrations import gates, transformers
from sonicmoe.integrations.transformers import check_model, register, unsupported_reason

A = ActivationType
NO_LIMIT = ("limit", 2.0**126)
GIVEN = torch.randn(3, 16), torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1)


def make(act="silu", *, gate=None, has_gate=True, pairs=False, of_class=(), **attributes):
    """Experts with this activation, and a gate of their own where there is one."""
    body = {**dict(of_class)} if gate is None else {"_apply_gate": gate, **dict(of_class)}
    kind = type("Experts", (Experts,), body)
    arrangement = {"is_concatenated": not pairs, "has_gate": has_gate}
    experts = use_experts_implementation(**arrangement)(kind)(SimpleNamespace(), act)
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


class Experts(nn.Module):
    def __init__(self, config, act):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(2, 32, 16))
        self.up_proj = nn.Parameter(torch.zeros(2, 16, 16))
        self.down_proj = nn.Parameter(torch.zeros(2, 16, 16))
        self.act_fn = ACT2FN[act] if isinstance(act, str) else act

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise NotImplementedError


def oai(gate=GptOssExperts._apply_gate, pairs=True, alpha=1.702, limit=7.0, **others):
    return make(gate=gate, pairs=pairs, alpha=alpha, limit=limit, **others)


def softcapped():
    config = SimpleNamespace(mlp_gate_softcap=3.0, mlp_up_softcap=20.0)
    return make(Inkling2SoftcappedSwiGLU(config), gate=Inkling2Experts._apply_gate)


def gate_of_halves(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return GptOssExperts._apply_gate(self, torch.stack([gate, up], -1).flatten(-2))


def gate_of_its_configuration(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    limit = self.config.swiglu_limit
    return self.act_fn(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def gate_with_defaults(self, gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    limit = getattr(self, "gate_limit", None) or getattr(self.config, "my_limit", None)
    if hasattr(self, "other_limit"):
        limit = self.other_limit
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return self.act_fn(gate) * up


class Limited(nn.Module):
    beta = 1.0

    def forward(self, x):
        x = x.clamp(max=getattr(self, "highest", math.inf))
        return x * torch.sigmoid(self.beta * x)


CLAMPED_AT_3 = A.SWIGLU_CLAMP, (("limit", 3.0),)


def with_configuration(experts, **numbers):
    experts.config = SimpleNamespace(**numbers)
    return experts


# tests/oracle has the names of activations, and test_transformers_walk.py the gates of all models.
RECOGNISED = {
    "gelu_new": (lambda: make("gelu_new"), (A.GEGLU_TANH, ())),
    "functions": (lambda: make(functional.silu), (A.SWIGLU, ())),
    "functions of C": (lambda: make(torch.relu), (A.REGLU, ())),
    "arguments bound to a function": (lambda: make(partial(functional.gelu, approximate="tanh")), (A.GEGLU_TANH, ())),
    "a gate that reads its module": (lambda: oai(gate=gate_that_reads_more, num_experts=1), (A.SWIGLU_OAI, ())),
    "a limit read with a default": (lambda: make(gate=gate_with_defaults, gate_limit=3.0), CLAMPED_AT_3),
    "a limit of the class": (lambda: make(gate=gate_with_defaults, of_class={"gate_limit": 3.0}), CLAMPED_AT_3),
    "a limit of the configuration by default": (
        lambda: with_configuration(make(gate=gate_with_defaults), my_limit=3.0),
        CLAMPED_AT_3,
    ),
    "no limit, where there might be one": (lambda: make(gate=gate_with_defaults), (A.SWIGLU, ())),
    "a limit of an activation": (lambda: make(Limited()), (A.SWIGLU, ())),
    "no gate, though there is one": (lambda: make("relu2", gate=GptOssExperts._apply_gate, has_gate=False), (A.RELU_SQ, ())),
    "GPT-OSS's gate in halves": (lambda: oai(gate=gate_of_halves, pairs=False), (A.SWIGLU_OAI, ())),
    "other numbers": (lambda: oai(alpha=1.5, limit=3), (A.SWIGLU_OAI, (("alpha", 1.5), ("limit", 3.0)))),
    "no limit": (lambda: oai(limit=math.inf), (A.SWIGLU_OAI, (NO_LIMIT,))),
    "a limit beyond everything": (lambda: oai(limit=1e30), (A.SWIGLU_OAI, (("limit", 1e30),))),
    "DeepSeek-V4 without a limit": (lambda: make(gate=DeepseekV4Experts._apply_gate, limit=math.inf), (A.SWIGLU, ())),
    "softcaps of a submodule": (softcapped, (A.SITU_GLU, (("beta", 3.0), ("linear_beta", 20.0)))),
    "a limit of the configuration": (
        lambda: with_configuration(make(gate=gate_of_its_configuration), swiglu_limit=4.0, hidden_size=8),
        (A.SWIGLU_CLAMP, (("limit", 4.0),)),
    ),
    "clamps behind the activation that are none": (lambda: make(gate=Step3p7Experts._apply_gate, limit=math.inf), (A.SWIGLU, ())),
}  # fmt: skip


@pytest.mark.parametrize("case", RECOGNISED)
def test_activations_are_recognised(case):
    make_experts, wanted = RECOGNISED[case]
    experts = make_experts()
    assert gates.activation_of(experts, _default_apply_gate)[0] == wanted
    assert unsupported_reason(experts) is None


def gate_without_one(self, gate_up):
    gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2]
    return up.clamp(-self.limit, self.limit) * gate * torch.sigmoid(gate * self.alpha)


def gate_with_other_gradients(self, gate_up):
    value = GptOssExperts._apply_gate(self, gate_up)
    return value.detach() + (gate_up[..., ::2] - gate_up[..., ::2].detach())


def gate_that_reads_more(self, gate_up):
    return GptOssExperts._apply_gate(self, gate_up) * self.num_experts


def with_own_gate(experts):
    experts._apply_gate = partial(GptOssExperts._apply_gate, experts)
    return experts


class Clipped(nn.Module):
    def forward(self, x):
        return functional.silu(x).clamp(max=1000.0)


class OtherInEvaluation(nn.Module):
    def forward(self, x):
        return functional.silu(x) if self.training else functional.hardswish(x)


def with_buffer():
    experts = make(gate=gate_with_defaults)
    experts.register_buffer("gate_limit", torch.tensor(3.0))
    return experts


REFUSED = {
    "another activation": (lambda: make("mish"), "the activation MishActivation, tried .* equals one of swiglu, geglu"),
    "squared ReLU under a gate": (lambda: make("relu2"), "activation ReLUSquaredActivation, tried"),
    "SiLU to 1000": (lambda: make(Clipped()), "activation Clipped, tried"),
    "a parameter": (lambda: make(nn.PReLU(init=0.0)), "activation PReLU, which reads weight, .*may change unseen"),
    "chance": (lambda: make(nn.Sequential(nn.SiLU(), nn.Dropout(0.5))), r"Sequential, tried .* numbers \[0.5\]"),
    "another one in evaluation": (lambda: make(OtherInEvaluation()), "activation OtherInEvaluation, tried"),
    "a limit that may change": (lambda: oai(limit=[7.0]), "a gate of its own, .*may change unseen"),
    "no activation": (lambda: make(None), "activation None"),
    "halves under a module that declares pairs": (lambda: oai(gate=gate_of_halves), "a gate of its own, tried"),
    "no 1 added to up": (lambda: oai(gate=gate_without_one), r"with the numbers \[1.702, 7.0\]"),
    "other gradients": (lambda: oai(gate=gate_with_other_gradients), "a gate of its own, tried"),
    "a gate that reads what is not there": (lambda: oai(gate=gate_that_reads_more), "'num_experts'"),
    "a limit in a buffer": (with_buffer, "reads gate_limit, which may change unseen"),
    "a limit that is no number": (lambda: oai(limit=None), "a gate of its own, which fails .* must not be None"),
    "clamps behind the activation": (lambda: make(gate=Step3p7Experts._apply_gate, limit=7.0), r"numbers \[7.0\]"),
    "a gate of the instance": (lambda: with_own_gate(oai()), "an _apply_gate of this instance"),
    "8-bit weights": (lambda: make(down_proj=nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn), False)), "down_proj in"),
    "no weight": (lambda: make(gate_up_proj=None), "no weight gate_up_proj"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_class_and_the_reason(case):
    make_experts, reason = REFUSED[case]
    experts, words = make_experts(), f"Experts .*{reason}"
    register()
    with pytest.raises(LayoutError, match=words):
        check_model(experts)
    experts.config._experts_implementation = "sonicmoe"
    with pytest.raises(LayoutError, match=f"cannot run this model: {words}"):
        experts(torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1))


def running(experts):
    """A function that runs them by this package."""
    register()
    for weight in experts.parameters():
        nn.init.normal_(weight)
    experts.config._experts_implementation = "sonicmoe"
    return lambda: experts(*GIVEN)


class Scaled(Limited):
    """A class of its own for every case, because cases change it."""

    def forward(self, x):
        return super().forward(x) + 0.0


def scaled(**attributes):
    return make(type("Scaled", (Scaled,), {})(), **attributes)


def halved(module, inputs, output):
    return output / 2


def twice(module, inputs):
    return (inputs[0] * 2,)


def its_gradient(module, of_inputs, of_outputs):
    return (of_inputs[0] / 2,)


def rectified(self, x):
    return functional.relu(x)


def of_act(name, hook):
    return lambda experts: getattr(experts.act_fn, name)(hook)


DIFFER = "Scaled, whose hooks, forward or attributes make it differ from swiglu in "
BOTH = r": [-\d.e+]+, where the engine has [-\d.e+]+"
CHANGES = {
    "a hook": (scaled, of_act("register_forward_hook", halved), DIFFER + "values" + BOTH),
    "a hook before": (scaled, of_act("register_forward_pre_hook", twice), DIFFER + "values" + BOTH),
    "a hook of a gradient": (scaled, of_act("register_full_backward_hook", its_gradient), DIFFER + "gradients" + BOTH),
    "a forward of the instance": (scaled, lambda e: setattr(e.act_fn, "forward", torch.tanh), DIFFER + "values" + BOTH),
    "a hook of a part": (
        lambda: make(nn.Sequential(nn.SiLU())),
        lambda e: e.act_fn[0].register_forward_hook(halved),
        "Sequential, whose hooks, .* differ from swiglu in values",
    ),
    "an attribute of the activation's class": (scaled, lambda e: setattr(type(e.act_fn), "beta", 2.0), "Scaled, tried"),
    "the forward of the activation's class": (
        scaled, lambda e: setattr(type(e.act_fn), "forward", rectified), ""),
    "what the activation reads by default": (scaled, lambda e: setattr(e.act_fn, "highest", 1.0), "Scaled, tried"),
    "what a gate reads by default": (
        lambda: make(gate=gate_with_defaults), lambda e: setattr(e, "gate_limit", 0.5), ""),
    "what a gate asks for": (lambda: make(gate=gate_with_defaults), lambda e: setattr(e, "other_limit", 0.5), ""),
    "what its class has by default": (
        lambda: make(gate=gate_with_defaults), lambda e: setattr(type(e), "gate_limit", 0.5), ""),
    "what its configuration has by default": (
        lambda: make(gate=gate_with_defaults), lambda e: setattr(e.config, "my_limit", 0.5), ""),
    "what became a buffer": (
        lambda: make(gate=gate_with_defaults),
        lambda e: e.register_buffer("gate_limit", torch.tensor(0.5)),
        "reads gate_limit, which may change unseen",
    ),
    "pairs": (make, lambda experts: setattr(experts, "is_concatenated", False), ""),
    "another activation": (make, lambda experts: setattr(experts, "act_fn", nn.GELU()), ""),
    "its form": (lambda: make(nn.GELU()), lambda experts: setattr(experts.act_fn, "approximate", "tanh"), ""),
    "a parameter": (oai, lambda experts: setattr(experts, "limit", 2.0), ""),
    "one that may change": (oai, lambda experts: setattr(experts, "limit", [2.0]), "may change unseen"),
    "a gate of the class": (make, lambda experts: setattr(type(experts), "_apply_gate", gate_that_reads_more), "a gate of"),
    "a gate of the instance": (make, with_own_gate, "_apply_gate of this instance"),
    "no weight": (make, lambda experts: setattr(experts, "down_proj", None), "no weight down_proj"),
    "a dtype": (make, lambda experts: experts.to(torch.float64), "gate_up_proj in torch.float64"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_a_forward_looks_again_at_what_changed(case, monkeypatch):
    make_experts, change, words = CHANGES[case]
    looked, verdict = [], transformers._verdict
    monkeypatch.setattr(transformers, "_verdict", lambda *a: looked.append(a) or verdict(*a))
    run = running(experts := make_experts())
    run()
    looked.clear()
    before = run()
    assert not looked
    change(experts)
    if words:
        with pytest.raises(LayoutError, match=words):
            run()
    else:
        assert not torch.equal(run(), before)


# One of each kind that a compiler guards: it reads what the eager forward does.
GRAPHED = (
    *("a hook", "a forward of the instance", "the forward of the activation's class", "pairs"),
    *("an attribute of the activation's class", "what the activation reads by default"),
    *("what a gate reads by default", "what its configuration has by default", "a parameter"),
    *("what became a buffer", "another activation", "a gate of the class", "a dtype"),
)


@pytest.mark.parametrize("case", GRAPHED)
def test_a_graph_is_made_again_for_what_changed(case):
    """But for hooks: torch.compile guards none, and says so in its settings. A number that changes
    is no constant to it any longer, which it refuses.
    """
    make_experts, change, words = CHANGES[case]
    if case in ("a parameter", "an attribute of the activation's class"):
        words = "conversion failed"
    torch._dynamo.reset()
    running(experts := make_experts())
    graph = torch.compile(experts, fullgraph=True, backend="aot_eager")
    before = graph(*GIVEN)
    change(experts)
    if case == "a hook":
        torch._dynamo.reset()
    if words:
        with pytest.raises(Exception, match=words):
            graph(*GIVEN)
    else:
        assert not torch.equal(graph(*GIVEN), before)


def test_layers_of_one_kind_share_a_graph():
    torch._dynamo.reset()
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layers = [make(gate=gate_with_defaults, gate_limit=3.0)]
    layers += [copy.deepcopy(layers[0]) for _ in range(2)]
    for layer in layers:
        running(layer)
        layer.compile(fullgraph=True, backend=count)
        layer(*GIVEN)
    assert count.frame_count == 1


def test_hooks_that_change_nothing_are_no_reason_to_refuse():
    """As DeepSpeed hangs on every module. A layer is tried once, and its second forward tries nothing."""
    experts, seen = make(), []
    experts.act_fn.register_forward_hook(lambda *_: seen.append("forward"))
    experts.act_fn.register_full_backward_pre_hook(lambda *_: seen.append("backward"))
    run = running(experts)
    run()
    assert seen == ["forward", "backward"]
    run()
    assert len(seen) == 2


def test_what_no_description_shows_is_tried_on_every_instance():
    """A gate that reads around its attributes."""

    def gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return self.act_fn(gate.clamp(max=vars(self).get("hidden", math.inf))) * up

    experts = make(gate=gate)
    running(experts)()
    other = copy.deepcopy(experts)
    other.hidden = 2.0
    running(experts)()
    with pytest.raises(LayoutError, match=r"make it differ from swiglu in values: .*, where"):
        running(other)()


def test_nothing_is_kept_of_modules_that_are_gone():
    kept = len(transformers._known)
    experts = make()
    running(experts)()
    assert len(transformers._known) == kept + 1
    del experts
    gc.collect()
    assert len(transformers._known) <= kept


@pytest.mark.parametrize("way", ["checkpoint", "inference", "compiled"])
def test_the_first_trial_may_come_from_inside_anything(way):
    """A checkpoint counts the tensors that its forward saves, and inference keeps no gradients."""
    register()
    experts = softcapped()
    experts.config._experts_implementation = "sonicmoe"
    gates._recognised.cache_clear()
    if way == "checkpoint":
        checkpoint(experts, *GIVEN, use_reentrant=False).sum().backward()
    elif way == "inference":
        with torch.inference_mode(), torch.autocast("cpu"):
            experts(*GIVEN)
    else:
        torch._dynamo.reset()
        torch.compile(experts, fullgraph=True, backend="aot_eager")(*GIVEN)
    # Once more with what the first trial read, and for no kind of call again.
    assert gates._recognised.cache_info().misses == 2
