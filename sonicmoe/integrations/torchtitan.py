"""torchtitan 0.3: overrides that put the engine under its routed experts.

    --override.imports 'sonicmoe.integrations.torchtitan.routed_experts={"fp8_mode": "perf"}'

Fields of `SonicMoEConfig` are the keyword arguments. docs/torchtitan.md says what is honoured.

Legend, as torchtitan has it: T tokens, K slots per token, R rows in expert order, E experts of this
rank, D model dimension, F expert dimension.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.config import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalTokenDispatcher,
    MinimalAsyncEPTokenDispatcher,
)
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, ScaleBiasForward
from torchtitan.tools.utils import device_type

from ..config import SonicMoEConfig
from ..engine.select import choose_engine
from ..engine.settings import Workload
from ..enums import ActivationType, EngineName, layer_parameters
from ..ep.interface import check_num_experts
from ..ep.select import check_options
from ..errors import ConfigError, EngineUnavailableError, did_you_mean, expect
from ..fsdp import FoundExperts, coded, finders
from ..functional.autograd import planned_mlp
from ..functional.routed import ExpertGroup, name_of, routed_mlp
from ..layer.plan import Plan, make_plan, number_of
from ..layouts import NATIVE
from ..log import log_once
from ..observe import GPT_OSS_EXPERTS, GROUPED_EXPERTS
from ..weights.stacked_cache import Weights
from .torchtitan_weights import fused_initialisers, fused_shardings, split, stack

Tensor = torch.Tensor
Topk = tuple[Tensor, Tensor]  # expert ids and scores, both [T, K]
# Under expert parallelism these are replaced as a whole, and no class that does more.
REPLACED = AllToAllTokenDispatcher, MinimalAsyncEPTokenDispatcher
# Options of `make_dispatcher` that a job may give.
TRANSPORT = [*inspect.signature(check_options).parameters]


class _OnEngine(nn.Module):
    """The common part of both kinds of experts; it stands before their own class."""

    def _prepare(self, config: Any, plan: Plan, bias: bool) -> None:
        """Take the plan; EngineUnavailableError where no engine takes the sizes."""
        # The number stands for the plan in graphs, which hold numbers and tensors only.
        self._plan, self._number = plan, number_of(plan)
        self._sizes = config.dim, config.hidden_dim, bias
        _check_sizes(plan, *self._sizes)
        self._gathers_codes = config.gather_codes
        self._take_codes()

    def _take_codes(self) -> None:
        self._codes = coded(_found_experts(self)) if self._gathers_codes else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy, as pipeline parallelism makes one of each stage, has codes of its own."""
        super().__setstate__(state)
        self._take_codes()

    def parallelize(self, parallel_dims: Any) -> None:
        """As the stock module; the part of F that tensor parallelism leaves must suit an engine."""
        super().parallelize(parallel_dims)  # type: ignore[misc]
        parts = 1 if parallel_dims.ep_enabled else parallel_dims.tp
        dim, hidden_dim, bias = self._sizes
        words = f"hidden_dim {hidden_dim} of the experts is no multiple of tensor_parallel_degree {parts}"
        expect(hidden_dim % parts == 0, ConfigError, words)
        _check_sizes(self._plan, dim, hidden_dim // parts, bias)
        if self._codes is not None:
            self._codes.wrap()  # the stock module has made other parameters

    def _weights(self) -> Weights:
        """This rank's weights in the native layout, of which torchtitan's are views."""
        raise NotImplementedError

    def forward(
        self,
        x_RD: Tensor,
        num_tokens_per_expert_E: Tensor,
        topk: Topk | None = None,
        group: str | None = None,
    ) -> Tensor:
        """Rows in expert order and their counts, which are not multiplied with scores; or tokens
        `[T, D]` and, as `topk`, where they go: then the output is the sum over K.

        group: `name_of` the `ExpertGroup` whose experts the ids of `topk` count; None: this rank.
        """
        routes, probs = num_tokens_per_expert_E, None
        if topk is not None:
            routes, probs = topk[0], topk[1].float()
        # The stock module multiplies in bfloat16, whatever it is given.
        x, weights = x_RD.bfloat16(), self._weights()
        if group is None:
            out = planned_mlp(self._plan, self._number, x, routes, probs, weights, self)
        else:
            assert probs is not None
            out = routed_mlp(self._number, group, x, routes, probs, weights)
        return out.type_as(x_RD)


class SonicGroupedExperts(_OnEngine, GroupedExperts):
    """`GroupedExperts` with gate and up in one parameter `w13 [E, F, 2, D]`, whose memory is that of
    the native `[E, 2F, D]`. Its state dict has the stock names.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """options: fields of `SonicMoEConfig`. gather_codes: as in `routed_experts`."""

        options: dict[str, Any] = field(default_factory=dict)
        gather_codes: bool = False

    def __init__(self, config: Config) -> None:
        """The stock parameters, gate and up in one."""
        super().__init__(config)
        del self.w1_EFD, self.w3_EFD
        shape = config.num_experts, config.hidden_dim, 2, config.dim
        self.w13 = nn.Parameter(torch.empty(shape))
        self.register_state_dict_post_hook(split)
        self.register_load_state_dict_pre_hook(stack)
        self._prepare(config, _plan(config.options, ActivationType.SWIGLU, GROUPED_EXPERTS), False)

    def _weights(self) -> Weights:
        return _local(self.w13).flatten(1, 2), _local(self.w2_EDF), None, None


class SonicGptOssGroupedExperts(_OnEngine, GptOssGroupedExperts):
    """`GptOssGroupedExperts`, whose parameters are native already."""

    @dataclass(kw_only=True, slots=True)
    class Config(GptOssGroupedExperts.Config):
        """options: fields of `SonicMoEConfig`. gather_codes: as in `routed_experts`."""

        options: dict[str, Any] = field(default_factory=dict)
        gather_codes: bool = False

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        limit = {"limit": config.swiglu_limit}
        plan = _plan(config.options, ActivationType.SWIGLU_OAI, GPT_OSS_EXPERTS, limit)
        self._prepare(config, plan, True)

    def _weights(self) -> Weights:
        names = "mlp1_weight_EGD", "mlp2_weight_EDF", "mlp1_bias_EG", "mlp2_bias_ED"
        w1, w2, b1, b2 = (_local(getattr(self, name)) for name in names)
        # Tensor parallelism sums the outputs of its ranks, and each adds its share of the bias. The
        # stock module leaves the gradient whole, too.
        parts = self._sizes[1] // w2.shape[-1]
        return w1, w2, b1, ScaleBiasForward.apply(b2, parts, b2.dtype) if parts > 1 else b2


def _found(module: nn.Module) -> FoundExperts | None:
    """For `fsdp.gather_codes`."""
    return _found_experts(module) if isinstance(module, _OnEngine) else None


def _found_experts(module: _OnEngine) -> FoundExperts:
    fused, apart = ("w13", "w2_EDF"), ("mlp1_weight_EGD", "mlp2_weight_EDF")
    names = fused if isinstance(module, SonicGroupedExperts) else apart
    weights = tuple((module, name) for name in names)
    return FoundExperts(weights, NATIVE, module._sizes[2], lambda _: module._plan)


finders.append(_found)


class SonicRoutedExperts(RoutedExperts):
    """`RoutedExperts` that sorts no token: where all experts are on this rank, and under expert
    parallelism in place of a stock dispatcher.
    """

    _group: str | None = None  # the ranks of the experts, where their dispatcher is replaced

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """transport: as in `routed_experts`."""

        transport: dict[str, Any] | bool = True

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._transport = config.transport

    def parallelize(self, parallel_dims: Any) -> None:
        """As the stock module, which would wire a dispatcher that is not called, and take memory for
        its buffers.
        """
        mesh = parallel_dims.get_optional_mesh("ep")
        kind, options = type(self.token_dispatcher), self._transport
        if mesh is None or kind not in REPLACED or options is False:
            fits = mesh is None or kind in REPLACED or options in (True, False)
            words = (
                f"transport is {options} with {kind.__qualname__}, which stays as it is; needed:"
            )
            names = " or ".join(each.__qualname__ for each in REPLACED)
            expect(fits, ConfigError, f"{words} no such argument, or {names}")
            super().parallelize(parallel_dims)
            return
        super(RoutedExperts, self).parallelize(parallel_dims)
        self.token_dispatcher.ep_mesh = mesh
        # MinimalAsyncEP waits for nothing, so that a step may become a CUDA graph.
        given = {} if options is True else options
        options = {"wait_for_counts": kind is AllToAllTokenDispatcher, **given}
        experts = self.token_dispatcher.num_experts
        check_num_experts(experts, mesh.size())
        self._group = name_of(ExpertGroup(experts, mesh.get_group(), options))

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        if self._group is None and not self._is_local():
            given = topk_scores_BLK, topk_expert_ids_BLK, num_local_tokens_per_expert_E
            return super().forward(x_BLD, *given)
        topk = topk_expert_ids_BLK.flatten(0, 1), topk_scores_BLK.flatten(0, 1)
        x_TD, counts_E = x_BLD.flatten(0, 1), num_local_tokens_per_expert_E
        return self.inner_experts(x_TD, counts_E, topk, self._group).view(x_BLD.shape)

    def _is_local(self) -> bool:
        # Any other dispatcher may do something of its own on one rank too, such as padding.
        dispatcher = self.token_dispatcher
        known = type(dispatcher) in (LocalTokenDispatcher, AllToAllTokenDispatcher)
        return known and getattr(dispatcher, "ep_mesh", None) is None


class SonicSelectiveAC(SelectiveAC):
    """`SelectiveAC` that keeps what the experts computed, as it keeps the products of others."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        """The same fields."""

    def get_save_ops(self) -> set[Any]:
        names = "expert_mlp", "routed_dispatch", "routed_mlp"
        ours = (getattr(torch.ops.sonicmoe, name).default for name in names)
        return {*super().get_save_ops(), *ours}


@override(target=RoutedExperts.Config, description="sonicmoe engine, and the way to the experts")
def routed_experts(
    config: Any,
    *,
    transport: Mapping[str, Any] | bool = True,
    gather_codes: bool = False,
    **options: Any,
) -> Any:
    """Replace experts, and with them the way to them where their dispatcher is a stock one.

    transport: options of `make_dispatcher` under expert parallelism; False: torchtitan's dispatcher
        stays there. Without `max_tokens` a rank that does not wait has as many tokens as the others.
    gather_codes: whether FSDP2 gathers the experts' codes in place of values (`fsdp.gather_codes`).
    """
    words = f"transport is {transport!r}; needed: a mapping of options, True or False"
    expect(isinstance(transport, bool | Mapping), ConfigError, words)
    if not isinstance(transport, bool):
        transport = dict(transport)
        _check_names(transport, TRANSPORT, "transport", "option of make_dispatcher")
        check_options(**transport)
    inner = _on_engine(config.inner_experts, options, gather_codes)
    if inner is config.inner_experts:
        return config
    if type(config) is not RoutedExperts.Config:
        return dataclasses.replace(config, inner_experts=inner)
    return derive(config, SonicRoutedExperts.Config, inner_experts=inner, transport=transport)


@override(target=GroupedExperts.Config, description="sonicmoe engine; any dispatcher")
def grouped_experts(config: Any, *, gather_codes: bool = False, **options: Any) -> Any:
    """Replace experts alone, beside an override of their dispatcher. gather_codes: as above."""
    return _on_engine(config, options, gather_codes)


@override(target=SelectiveAC.Config, exact=True, description="keeps the outputs of sonicmoe")
def selective_ac(config: Any) -> Any:
    """Add the experts to what selective activation checkpointing keeps."""
    return derive(config, SonicSelectiveAC.Config)


def _on_engine(config: Any, options: Mapping[str, Any], codes: bool) -> Any:
    """The configuration of the same experts on the engine; those of classes that it does not know
    stay as they are. codes: whether FSDP2 gathers those.
    """
    known = [flag.name for flag in dataclasses.fields(SonicMoEConfig)]
    _check_names(options, known, "option", "field of SonicMoEConfig")
    words = f"gather_codes is {codes!r}; needed: True or False"
    expect(isinstance(codes, bool), ConfigError, words)
    kind, given = type(config), {"options": dict(options), "gather_codes": codes}
    if kind is GptOssGroupedExperts.Config:
        return derive(config, SonicGptOssGroupedExperts.Config, **given)
    if kind is GroupedExperts.Config:
        made = derive(config, SonicGroupedExperts.Config, **given)
        made.param_init = fused_initialisers(config.param_init)
        if config.sharding_config is not None:
            made.sharding_config = fused_shardings(config.sharding_config)
        return made
    if kind not in (SonicGroupedExperts.Config, SonicGptOssGroupedExperts.Config):
        words = "experts of class %s stay as they are: sonicmoe knows GroupedExperts and GptOssGroupedExperts"
        log_once(logging.WARNING, words, kind.__qualname__.removesuffix(".Config"))
    return config


def _check_names(given: Mapping[str, Any], known: Sequence[str], what: str, of: str) -> None:
    for name in given:
        words = f"{what} {name!r} of the sonicmoe override is no {of}"
        expect(name in known, ConfigError, words + did_you_mean(name, known))


def _plan(
    options: Mapping[str, Any],
    activation: ActivationType,
    face: str,
    parameters: Mapping[str, float | None] | None = None,
) -> Plan:
    """Of these options, and for others of the environment."""
    with SonicMoEConfig(**options).activate():
        own = layer_parameters(activation, parameters)
        return dataclasses.replace(make_plan(activation, NATIVE, None, own, face), is_own=True)


def _check_sizes(plan: Plan, dim: int, hidden_dim: int, bias: bool) -> None:
    """Raise where only the reference engine would be left on a GPU, which is no engine to train on."""
    # A job may be looked at where it does not run.
    on_gpu = device_type == "cuda" and torch.cuda.is_available()
    device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"
    workload = Workload(plan.settings, dim, hidden_dim, "bfloat16", bias)
    with plan.config.activate():
        choice = choose_engine(device, plan.engine, workload)
    left = choice.falls_back and choice.name is EngineName.REFERENCE
    words = f"no engine takes experts of dim {dim} and hidden_dim {hidden_dim}: {choice.reason}"
    expect(not left, EngineUnavailableError, words)


def _local(weight: Any) -> Tensor:
    """This rank's part of a DTensor."""
    # A view of a temporary tensor, of which the caches keep nothing: a write to the DTensor does not
    # show in the version of its part.
    return weight.to_local()[:] if isinstance(weight, DTensor) else weight
