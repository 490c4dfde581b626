"""One training step of a case through every face of the package: `run(case, scene)` gives the output and
all gradients as fp64 arrays in the user's layouts, whoever computed them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import numpy as np
from faults import CAUGHT, FULL_GPU, FULL_HOST, Allocations
from framework import IS_PADDLE, numpy, parameter, recomputed, tensor, torch, want_gradient
from oracle.case import AXES, GATED, OWN, Case
from oracle.golden import ADAPTER_SCALE, ROUTERS, Scene
from oracle.held import Hooked, Snapshot, in_a_buffer, spelled, written_beside
from weights.freed_memory import free

from sonicmoe.config import SonicMoEConfig
from sonicmoe.engine.low_rank import Adapters, LowRank
from sonicmoe.enums import ActivationType
from sonicmoe.ernie_compat import SonicMoEMlpNode
from sonicmoe.errors import OutOfMemoryError
from sonicmoe.layer.state import LayerState
from sonicmoe.layouts import Codes, GateUp, WeightLayout
from sonicmoe.quant.tokens import quantize_tokens
from sonicmoe.weights.parameters import NumberedParameters

HELD = 0.25  # in every `main_grad` before the step
ON_HOST = " on host"  # behind the name of a GPU's engine whose kernels a host computes
OF_FP8 = ("save_z", "fp8_wgrad", "iso_weight")
MODES = ("recompute_z", "stagewise_memory")  # of FP8 and of the rest
EAGER = tuple(value for value in AXES["schedule"] if value != "graph")


def host(value: Any) -> np.ndarray:
    """fp64, or int64, copy of a tensor."""
    return numpy(value if IS_PADDLE else value.cpu())


def device_of(engine: str) -> str:
    """Where an engine of a name computes."""
    return "cpu" if engine == "reference" or engine.endswith(ON_HOST) else "cuda"


def config_of(case: Case, engine: str) -> SonicMoEConfig:
    """The settings of a case."""
    fp8 = {"fp8_mode": "perf", "recipe": case.recipe} if case.fp8 else {}
    own = {name: getattr(case, name) for name in (*MODES, *(OF_FP8 if case.fp8 else ()))}
    name = engine.removesuffix(ON_HOST)
    return SonicMoEConfig(engine=name, first_backward=case.first, **fp8, **own)


class Layer:
    """The parameters of a case, and how one face calls them. Subclasses say which values of the axes
    they take, where not all, and the arrangements in which they take frozen codes.
    """

    takes: ClassVar[dict[str, tuple[Any, ...]]] = {}
    freezes: ClassVar[tuple[str, ...]] = ()

    def __init__(self, case: Case, scene: Scene, engine: str) -> None:
        self.case, self.scene = case, scene
        self.device = device_of(engine)
        self.config = config_of(case, engine)
        self.dtype = getattr(torch, case.dtype)
        self.activation = ActivationType(case.activation)
        self.weights = self.make_weights()
        self.biases = self.make_biases()
        self.weights = self.freeze() if case.trains == "codes" else self.weights
        self.pairs = {
            name: LowRank(
                self.leaf(a, self.dtype, True),
                self.leaf(self.rows(b, 1) if name == "up" else b, self.dtype, True),
                ADAPTER_SCALE,
            )
            for name, (a, b) in scene.pairs.items()
        }
        for weight in self.weights:
            if case.gradients != "autograd":
                weight.main_grad = None if case.gradients == "unset" else self.main_grad_of(weight)
            if case.frozen:
                want_gradient(weight, False)
        own = {f"weight {index}": weight for index, weight in enumerate(self.weights)}
        own |= {f"{n}.{f}": getattr(pair, f) for n, pair in self.pairs.items() for f in ("a", "b")}
        self.snapshots = [] if case.copies else [Snapshot(**own)]
        self.main_grads = [getattr(weight, "main_grad", None) for weight in self.weights]

    def main_grad_of(self, weight: Any) -> Any:
        return in_a_buffer(self.tensor(np.full(tuple(weight.shape), HELD)), self.case.places)

    def require_untouched(self) -> None:
        """A step writes gradients, and nothing else of its caller's."""
        changes = [words for snapshot in self.snapshots for words in snapshot.changes()]
        assert not changes, changes
        for weight, held in zip(self.weights, self.main_grads, strict=True):
            if held is not None:
                assert weight.main_grad is held and not written_beside(held)

    @property
    def has_hooks(self) -> bool:
        """Whether hooks of the weights fire once in each backward, with what it leaves."""
        return self.case.flush == "auto"

    def watch_hooks(self) -> Hooked:
        watched = self.weights if self.has_hooks and not self.case.frozen else []
        return Hooked(watched, lambda weight: host(self.gradient(weight)))

    def require_hooks(self, hooked: Hooked, backwards: int) -> None:
        for weight, seen in zip(self.weights, hooked.seen, strict=False):
            assert len(seen) == backwards
            np.testing.assert_array_equal(seen[-1], host(self.gradient(weight)))

    @property
    def bias_trains(self) -> list[bool]:
        return [self.case.trains in ("all", "biases", "codes", name) for name in ("b1", "b2")]

    @cached_property
    def options(self) -> dict[str, float]:
        return dict(self.scene.own)

    @property
    def adapters(self) -> Adapters | None:
        return Adapters(self.pairs.get("up"), self.pairs.get("down")) if self.pairs else None

    def tensor(self, array: Any, dtype: Any = None) -> Any:
        made = tensor(np.ascontiguousarray(array), dtype or torch.float32)
        return made if self.device == "cpu" else made.to(self.device)

    def leaf(self, array: Any, dtype: Any, wanted: bool, spelling: str = "contiguous") -> Any:
        made = spelled(self.tensor(array).to(dtype), spelling)
        want_gradient(made, wanted)
        return made

    def parameter(self, array: Any) -> Any:
        made = parameter(np.ascontiguousarray(array, np.float32), self.dtype)
        return made if IS_PADDLE else torch.nn.Parameter(spelled(made.detach().to(self.device)))

    def make_biases(self) -> list[Any]:
        b1, b2 = self.scene.b1, self.scene.b2
        arrays = [] if b1 is None else [self.rows(b1, -1), b2]
        pairs = zip(arrays, self.bias_trains, strict=False)
        return [self.leaf(array, torch.float32, trains) for array, trains in pairs]

    def freeze(self) -> list[Any]:
        """Codes and scales of w1 and of w2, in the place of the weights."""
        from sonicmoe.functional import freeze_weights

        turned = [weight.permute(1, 2, 0) for weight in self.weights]
        halves = self.case.arrangement == "concat"
        with frozen_for(self.case) as checked:
            w1, w2, lost = freeze_weights(*turned, self.activation, halves)
            checked(lost)
        return [*w1, *w2]

    @property
    def codes(self) -> list[Codes]:
        """Of w1 and of w2, as functions take them; none where these are not frozen."""
        held = self.weights
        return [Codes(*held[:2]), Codes(*held[2:])] if self.case.trains == "codes" else []

    def rows(self, array: np.ndarray, axis: int) -> np.ndarray:
        """Rows of a split-half w1 in the order of this layer's weights."""
        return array if self.order is None else np.take(array, self.order, axis)

    @cached_property
    def order(self) -> np.ndarray | None:
        """Of the native layout, where gate and up come in turns."""
        if self.case.arrangement not in ("native", "turned") or not self.case.gated:
            return None
        inner = self.scene.down.shape[1]
        return np.arange(2 * inner).reshape(2, inner).T.reshape(-1)

    def make_weights(self) -> list[Any]:
        raise NotImplementedError

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        raise NotImplementedError

    def traced(self, function: Any) -> Any:
        """The function; one graph of it where the case says so. The compiler allows few graphs of one
        function, so those of other cases go.
        """
        if self.case.schedule != "graph":
            return function
        torch._dynamo.reset()
        return torch.compile(function, fullgraph=True, backend="aot_eager")

    def backward(self, call: Call) -> None:
        call.value.backward(call.gradient)

    def finish(self) -> None:
        """What ends a step."""

    def gradients(self) -> dict[str, np.ndarray]:
        """Of the weights, `[E, H, N1]` and `[E, I, H]`."""
        found = [host(self.gradient(weight)) for weight in self.weights]
        return dict(zip(("dw1", "dw2"), self.in_user_layout(found), strict=True))

    def gradient(self, weight: Any) -> Any:
        if self.case.gradients == "autograd":
            return weight.grad
        assert weight.grad is None and weight.main_grad.dtype == torch.float32
        return weight.main_grad

    def in_user_layout(self, found: list[np.ndarray]) -> list[np.ndarray]:
        """The inverse of `make_weights`."""
        if self.case.arrangement == "fused":
            return found
        if self.case.arrangement == "turned":
            return [
                found[0] if self.order is None else found[0][:, :, np.argsort(self.order)],
                found[1],
            ]
        if self.case.arrangement == "halves":
            return [np.concatenate(found[:2], 1).transpose(0, 2, 1), found[2].transpose(0, 2, 1)]
        dw1, dw2 = (array.transpose(0, 2, 1) for array in found)
        return [dw1 if self.order is None else dw1[:, :, np.argsort(self.order)], dw2]

    def stacked(self) -> list[np.ndarray]:
        """Arrays of two stacked parameters, or of three."""
        up, down = self.scene.up_gate, self.scene.down
        if self.case.arrangement == "fused":
            return [up, down]
        if self.case.arrangement == "halves":
            return [*np.split(up.transpose(0, 2, 1), 2, 1), down.transpose(0, 2, 1)]
        if self.case.arrangement == "turned":
            return [self.rows(up, -1), down]
        if self.case.arrangement == "concat":
            return [up.transpose(0, 2, 1), down.transpose(0, 2, 1)]
        return [self.rows(up.transpose(0, 2, 1), 1), down.transpose(0, 2, 1)]


class Node(Layer):
    """`SonicMoEMlpNode`."""

    takes: ClassVar = {
        "arrangement": ("per_expert", "fused", "native", "numbered"), "schedule": EAGER,
    }  # fmt: skip

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.copies = self.node.make_copies() if self.case.copies else None
        if self.copies is not None:
            free(*self.weights)

    def make_weights(self) -> list[Any]:
        options: dict[str, Any] = {"activation_parameters": self.options, "config": self.config}
        if self.case.arrangement == "numbered":
            return self.make_numbered(**options)
        options["flush"] = self.case.flush
        if self.case.arrangement == "per_expert":
            arrays = [rows for part in (self.scene.up_gate, self.scene.down) for rows in part]
            weights = [self.parameter(array) for array in arrays]
            half = len(weights) // 2
            experts = [
                SimpleNamespace(
                    up_gate_proj=SimpleNamespace(weight=up), down_proj=SimpleNamespace(weight=down)
                )
                for up, down in zip(weights[:half], weights[half:], strict=True)
            ]
            hidden, inner = self.scene.x.shape[1], self.scene.down.shape[1]
            self.node = SonicMoEMlpNode(experts, half, hidden, inner, self.activation, **options)
            return weights
        weights = [self.parameter(array) for array in self.stacked()]
        make = getattr(SonicMoEMlpNode, f"from_{self.case.arrangement}")
        self.node = make(*weights, self.activation, **options)
        return weights

    def make_numbered(self, **options: Any) -> list[Any]:
        parts = (array.transpose(0, 2, 1) for array in (self.scene.up_gate, self.scene.down))
        named = [{f"weight{e}": self.parameter(rows) for e, rows in enumerate(p)} for p in parts]
        sizes = self.scene.num_experts, self.scene.x.shape[1], self.scene.down.shape[1]
        modules = (SimpleNamespace(_parameters=weights) for weights in named)
        state = LayerState(NumberedParameters(*modules, sizes, self.activation), self.case.flush)
        self.node = SonicMoEMlpNode.over(state, self.activation, **options)
        return [weight for weights in named for weight in weights.values()]

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        given: dict[str, Any] = {"biases": tuple(self.biases) or None, "adapters": self.adapters}
        if self.case.arrivals in ("x", "both"):
            self.sent = sent = quantize_tokens(x.detach())
            x, given = sent.codes, given | {"x_scale": sent.scale_inv, "dx_to": x}
        if self.case.arrivals in ("dout", "both"):
            given["dout_source"] = Source(quantize_tokens(self.tensor(scene.dout).to(self.dtype)))
        return self.node(x, self.counts(scene), indices, probs, copies=self.copies, **given)

    def counts(self, scene: Scene) -> Any:
        counts = np.bincount(scene.indices[scene.valid], minlength=scene.num_experts)
        if self.case.counts == "none":
            return None
        if self.case.counts == "list":
            return counts.tolist()
        self.tokens_per_expert = tensor(counts)
        self.snapshots.append(Snapshot(counts=self.tokens_per_expert))
        return self.tokens_per_expert

    def backward(self, call: Call) -> None:
        """Forward's order of the copies may go before the first of two backwards."""
        if self.copies is not None and self.case.schedule == "crossed" and self.case.law != "full":
            self.copies.release_forward()
        super().backward(call)

    def finish(self) -> None:
        self.node.step()

    def in_user_layout(self, found: list[np.ndarray]) -> list[np.ndarray]:
        if self.case.arrangement not in ("per_expert", "numbered"):
            return super().in_user_layout(found)
        half, turned = len(found) // 2, self.case.arrangement == "numbered"
        stacks = [np.stack(found[:half]), np.stack(found[half:])]
        return [stack.transpose(0, 2, 1) for stack in stacks] if turned else stacks


class Source:
    """Has the gradient of the output, as its sender quantised it."""

    def __init__(self, gradient: Any) -> None:
        self.gradient = gradient

    def take(self, gradient: Any) -> Any:
        return self.gradient


SORTED: dict[str, tuple[Any, ...]] = {
    "copies": (False,), "arrivals": ("plain",), "index": ("int64",), "schedule": EAGER, "counts": ("list", "none"),
}  # fmt: skip


def in_expert_order(layer: Layer, scene: Scene, x: Any, probs: Any) -> tuple[Any, Any, Any, Any]:
    """Rows and probabilities of one slot a token, the numbers of rows, and what puts rows back into the
    order of tokens. Rows of no expert come last.
    """
    experts = scene.num_experts
    chosen = np.where(scene.valid, scene.indices, experts)[:, 0]
    order = np.argsort(chosen, kind="stable")
    counts = np.bincount(chosen, minlength=experts)[:experts]
    if not len(order):  # Paddle takes no rows of none
        return x, probs[:, 0], counts, lambda rows: rows
    there, back = (tensor(places).to(layer.device) for places in (order, np.argsort(order)))
    return x[there], probs[:, 0][there], counts, lambda rows: rows[back]


class Sorted(Node):
    """The node on rows that a dispatcher has sorted by expert."""

    takes: ClassVar = {**Node.takes, **SORTED}

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        rows, scores, counts, back = in_expert_order(self, scene, x, probs)
        given = {"biases": tuple(self.biases) or None, "adapters": self.adapters}
        listed = None if self.case.counts == "none" else counts.tolist()
        counts = tensor(counts).to(self.device)
        return back(self.node.forward_sorted(rows, counts, scores, listed, **given))


OF_TORCH = {
    "gradients": ("autograd",), "flush": ("auto",), "first": ("add",), "arrivals": ("plain",),
    "counts": ("none",), "stagewise_memory": (False,), "copies": (False,),
}  # fmt: skip


class Stacked(Layer):
    """`expert_mlp`, which serves the layer and the integrations."""

    takes: ClassVar = {**OF_TORCH, "arrangement": ("fused", "native", "concat", "halves")}
    freezes: ClassVar = ("native",)

    def make_weights(self) -> list[Any]:
        return [self.parameter(array) for array in self.stacked()]

    @property
    def layout(self) -> WeightLayout:
        return {
            "native": WeightLayout(),
            "fused": WeightLayout(transposed=True, split_half=self.case.gated),
            "concat": WeightLayout(split_half=self.case.gated),
            "halves": WeightLayout(split_half=True, apart=True),
        }[self.case.arrangement]

    @property
    def given(self) -> tuple[Any, ...]:
        """Weights and biases as functions take them."""
        *up, down = self.codes or self.weights
        return GateUp(*up) if len(up) == 2 else up[0], down, *(self.biases or (None, None))

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        from sonicmoe.functional.autograd import expert_mlp

        return self.traced(expert_mlp)(
            *(x, indices, probs, *self.given, self.activation),
            parameters=self.scene.own, layout=self.layout, adapters=self.adapters,
        )  # fmt: skip


class Rows(Stacked):
    """`planned_mlp` on sorted rows, as torchtitan's experts call it: the plan is the layer's own."""

    takes: ClassVar = {
        **Stacked.takes, "index": ("int64",), "adapters": ("none",),
    }  # fmt: skip
    freezes: ClassVar = ()

    @cached_property
    def plan(self) -> Any:
        from sonicmoe.layer.plan import make_plan

        return make_plan(self.activation, self.layout, None, self.scene.own)

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        from sonicmoe.functional.autograd import planned_mlp
        from sonicmoe.layer.plan import number_of

        rows, scores, counts, back = in_expert_order(self, scene, x, probs)
        routes = tensor(counts).to(self.device)
        given = rows, routes, scores, self.given, None
        return back(self.traced(planned_mlp)(self.plan, number_of(self.plan), *given))


class Triples(Layer):
    """`moe_general_routing_inputs`, upstream's signature."""

    takes: ClassVar = {
        **OF_TORCH,
        "arrangement": ("native", "concat", "halves"),
        "adapters": ("none",),
    }
    freezes: ClassVar = ("native", "concat")
    make_weights = Stacked.make_weights

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        from sonicmoe.functional import moe_general_routing_inputs

        *up, down = self.codes or (weight.permute(1, 2, 0) for weight in self.weights)
        b1, b2 = self.biases or (None, None)
        topk = scene.indices.shape[1]
        token = torch.arange(len(scene.x)).repeat_interleave(topk).to(self.device)
        out, counts = self.traced(moe_general_routing_inputs)(
            *(x, probs.reshape(-1), token, indices.reshape(-1)),
            *(tuple(up) if len(up) == 2 else up[0], b1, down, b2),
            activation_type=self.activation,
            concat_layout=self.case.arrangement == "concat",
            max_experts_per_token=topk,
            activation_parameters=self.options or None,
        )
        wanted = np.bincount(scene.indices[scene.valid], minlength=scene.num_experts)
        assert counts.tolist() == wanted.tolist()
        return out


class Owned(Layer):
    """A face whose parameters belong to a module. biases_of: each of them by its owner and its name."""

    module: Any
    biases_of: Sequence[tuple[Any, str]]

    def make_biases(self) -> list[Any]:
        made = [torch.nn.Parameter(b.detach(), b.requires_grad) for b in super().make_biases()]
        for (owner, name), bias in zip(self.biases_of, made, strict=False):
            setattr(owner, name, bias)
        return made

    def freeze(self) -> list[Any]:
        from sonicmoe.integrations.frozen import freeze_experts

        with frozen_for(self.case) as checked:
            checked(freeze_experts(self.module))
        return [held for held in self.module.parameters() if not held.is_floating_point()]


class MoELayer(Owned):
    """`sonicmoe.MoE`, which routes by itself."""

    takes: ClassVar = {
        **OF_TORCH, "arrangement": ("native",), "routing": ("full",), "dtype": ("float32",),
        "scene": ("usual",),
        "index": ("int64",), "law": ("repeat", "memory", "trains", "recompute", "split"),
    }  # fmt: skip
    freezes: ClassVar = ("native",)
    backend = "sonicmoe"

    def make_weights(self) -> list[Any]:
        from sonicmoe import MoE

        experts, hidden, _ = self.scene.up_gate.shape
        sizes = experts, self.scene.indices.shape[1], hidden, self.scene.down.shape[1]
        options = {"activation_parameters": self.options or None}
        self.module = MoE(*sizes, self.activation, self.scene.b1 is not None, **options)
        self.module.to(self.device)
        parts = self.module.c_fc, self.module.c_proj, self.module.router
        self.biases_of = [(part, "bias") for part in parts[:2]]
        with torch.no_grad():
            for part, array in zip(parts, [*self.stacked(), self.scene.router], strict=True):
                part.weight.copy_(self.tensor(array))
        return [part.weight for part in parts[:2]]

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        return self.traced(self.module)(x, self.backend, adapters=self.adapters)[0]

    def gradients(self) -> dict[str, np.ndarray]:
        return super().gradients() | {"drouter": host(self.module.router.weight.grad)}


class Plain(MoELayer):
    """Its operations of PyTorch alone, with which users compare it."""

    takes: ClassVar = {
        **MoELayer.takes, "recipe": ("none",), "law": ("repeat", "split"), "schedule": EAGER,
    }  # fmt: skip
    freezes: ClassVar = ()
    backend = "torch"


class Transformers(Owned):
    """An experts module of transformers under `register()`."""

    ACTIVATIONS: ClassVar = {
        "swiglu": "silu", "geglu": "gelu", "reglu": "relu", "geglu_tanh": "gelu_pytorch_tanh",
        "relu_sq": "relu2", "relu": "relu", "gelu": "gelu", "silu": "silu",
        "gelu_tanh": "gelu_pytorch_tanh",
    }  # fmt: skip
    takes: ClassVar = {
        **OF_TORCH, "arrangement": ("fused", "native", "concat", "turned"), "own": (False,),
        "activation": tuple(ACTIVATIONS),
    }  # fmt: skip
    freezes: ClassVar = takes["arrangement"]

    def make_weights(self) -> list[Any]:
        from transformers import PretrainedConfig
        from transformers.activations import ACT2FN
        from transformers.integrations.moe import use_experts_implementation

        from sonicmoe.integrations.transformers import register

        register()
        weights = [self.parameter(array) for array in self.stacked()]
        gated = self.case.gated
        names = "gate_up_proj" if gated else "up_proj", "down_proj"
        experts, act = self.scene.num_experts, ACT2FN[self.ACTIVATIONS[self.case.activation]]

        class Experts(torch.nn.Module):
            def __init__(self, config: Any) -> None:
                super().__init__()
                self.num_experts, self.act_fn = experts, act
                for name, weight in zip(names, weights, strict=True):
                    setattr(self, name, weight)

            def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
                raise AssertionError("the eager forward ran")

        decorated = use_experts_implementation(
            is_transposed=self.case.arrangement in ("fused", "turned"),
            is_concatenated=self.order is None,
            has_bias=self.scene.b1 is not None,
            has_gate=gated,
        )(Experts)
        self.module, self.names = decorated(PretrainedConfig()), names
        self.biases_of = [(self.module, f"{name}_bias") for name in names]
        name = "sonicmoe_fp8" if self.case.fp8 else "sonicmoe"
        self.module.config._experts_implementation = name
        return weights

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        pairs = dict(zip(self.names, self.adapters or (), strict=False))
        return self.traced(self.module)(x, indices, probs, adapters=pairs)


class Fleet(Layer):
    """`run_sonic_moe`, as PaddleFleet calls it."""

    takes: ClassVar = {
        "arrangement": ("native", "fused"), "dtype": ("bfloat16",), "bias": (False,),
        "adapters": ("none",), "flush": ("auto",), "first": ("add",), "arrivals": ("plain",),
        "copies": (False,), "activation": tuple(GATED), "spelling": ("contiguous",), "schedule": EAGER,
        "places": ("contiguous", "turned"),
    }  # fmt: skip
    make_weights = Stacked.make_weights
    counts = Node.counts

    def main_grad_of(self, weight: Any) -> Any:
        """In the weight's layout, or in the other one."""
        experts, *sizes = weight.shape
        sizes = sizes[::-1] if self.case.places == "turned" else sizes
        return in_a_buffer(self.tensor(np.full((experts, *sizes), HELD)), "contiguous")

    def in_user_layout(self, found: list[np.ndarray]) -> list[np.ndarray]:
        """Shapes tell the layout of each; Fleet has rules where they do not."""
        fused = [self.case.arrangement == "fused"] * 2
        turned = self.case.places == "turned"
        inner, hidden = self.scene.down.shape[1:]
        grouped = [fused[0] != (turned and hidden != 2 * inner), fused[1] != turned]
        if self.case.gradients == "unset" or (
            inner == hidden and self.case.gradients == "main_grad"
        ):
            grouped[1] = True
        rows = np.arange(2 * inner).reshape(inner, 2).T.reshape(-1)
        dw1, dw2 = (
            array if is_grouped else array.transpose(0, 2, 1)
            for array, is_grouped in zip(found, grouped, strict=True)
        )
        return [dw1 if grouped[0] else dw1[:, :, rows], dw2]

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        from sonicmoe.fleet.run import run_sonic_moe

        return run_sonic_moe(
            *(x, indices, probs, scene.indices.shape[1], scene.num_experts, *self.weights),
            fp8=self.case.fp8,
            tokens_per_expert=self.counts(scene),
            activation_type=self.activation,
            fp8_config=self.fleets_config,
        )

    @cached_property
    def fleets_config(self) -> Any:
        """Where a layer of Fleet's has the numbers of its activation; None where it has its own."""
        from sonicmoe.fleet.configuration import FP8Config

        made, numbers = FP8Config(), dict(self.scene.own)
        if self.activation is ActivationType.SITU_GLU:
            made.situ_beta = numbers.get("beta", 1.0)
            made.situ_linear_beta = numbers.get("linear_beta", "none")
            return made
        made.swiglu_clamp_value = numbers.get("limit")
        return made if numbers else None


class Steps(Fleet):
    """`ExpertsStep`, whose backward is a call of its own; in FP8 with Fleet's handle of a gradient."""

    takes: ClassVar = {
        **Fleet.takes, "arrivals": AXES["arrivals"], "schedule": ("one", "two", "crossed"),
    }  # fmt: skip

    @property
    def has_hooks(self) -> bool:
        return IS_PADDLE

    def call(self, x: Any, probs: Any, indices: Any, scene: Scene) -> Any:
        from sonicmoe.fleet.overlap import ExpertsStep

        sent = quantize_tokens(x.detach()) if self.case.arrivals in ("x", "both") else None
        codes, scale = (x, None) if sent is None else (sent.codes, sent.scale_inv)
        handle: dict[str, Any] = {}
        step = ExpertsStep(
            *(scene.indices.shape[1], scene.num_experts, *self.weights, self.case.fp8, handle),
            *(self.fleets_config, self.activation),
        )
        out = step.forward(codes, indices, probs, self.counts(scene), scale)
        if self.case.arrivals in ("dout", "both"):
            made = quantize_tokens(self.tensor(scene.dout).to(self.dtype))
            handle |= {"data": made.codes, "scale": made.scale_inv}
        out.step, out.handle = step, handle
        return out

    def backward(self, call: Call) -> None:
        dout = call.gradient
        if call.value.handle:  # what autograd hands over is a placeholder
            dout = self.tensor(np.full(tuple(dout.shape), np.nan)).to(dout.dtype)
        call.leaf.grad, call.probs.grad = call.value.step.backward(dout)
        assert not call.value.handle


LAYERS: dict[str, type[Layer]] = {
    "node": Node, "sorted": Sorted, "stacked": Stacked, "triples": Triples, "moe": MoELayer, "plain": Plain,
    "transformers": Transformers, "fleet": Fleet, "steps": Steps, "rows": Rows,
}  # fmt: skip
ONE_SLOT = "sorted", "rows"
NAMES_A_CURE = "node", "sorted", "fleet"  # where memory runs out
OF_FLEET = "fleet", "steps"
FACES = ("node", "sorted", *OF_FLEET) if IS_PADDLE else tuple(LAYERS)


# What the engines of a GPU have of the axes: their tokens have 16 bits.
ON_A_GPU: dict[str, tuple[Any, ...]] = {
    "face": tuple(name for name in ("node", *FACES) if name not in (*ROUTERS, "steps")),
    "law": tuple(law for law in AXES["law"] if law != "full"),  # tests/gpu/test_faults_gpu.py
    "dtype": ("bfloat16", "float16"), "schedule": EAGER, "copies": (False,),
}  # fmt: skip
WITHOUT_CODES = {"trains": tuple(value for value in AXES["trains"] if value != "codes")}
ENGINES: dict[str, dict[str, tuple[Any, ...]]] = {
    "reference": {},
    "hopper": ON_A_GPU | {
        "recipe": ("dx256",), "activation": tuple(GATED), "dtype": ("bfloat16",), "iso_weight": (False,),
        "save_z": ("adaptive", "int8", "bf16"),
    },
    "mxfp8": ON_A_GPU | WITHOUT_CODES | {
        "recipe": ("iso32-pow2",), "activation": tuple(GATED), "save_z": ("bf16",), "dtype": ("bfloat16",), "bias": (False,),
        "adapters": ("none",), "arrivals": ("plain",), "fp8_wgrad": (True,),
    },
    "bf16": ON_A_GPU | WITHOUT_CODES | {"recipe": ("none",)},
    "triton": ON_A_GPU | WITHOUT_CODES | {"recipe": ("none",)},
}  # fmt: skip
# The reference engine's own functions compute the kernels of these engines. So other scenes find nothing
# there, because they only move numbers, nor do laws of which a stricter one runs.
OF_ITS_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "scene": ("usual", "w1 unit"),
    "law": tuple(law for law in ON_A_GPU["law"] if law not in ("repeat", "scaled")),
}
EMULATED = {name + ON_HOST: OF_ITS_FUNCTIONS for name in ("hopper", "mxfp8")} | {
    # A kernel is compiled for each activation. These have no, two and one number, or no gate.
    "bf16" + ON_HOST: OF_ITS_FUNCTIONS
    | {"activation": ("swiglu", "swiglu_oai", "swiglu_clamp", "relu_sq")}
}
# Whole blocks, ragged rows, an expert of few rows, no token: of sizes that TMA takes; small ones where a
# host computes the kernels.
SIZES_ON_HOST = (
    *((150, 128, 192, 3, 2), (37, 256, 64, 4, 2), (70, 288, 192, 4, 3), (1, 128, 64, 3, 2)),
    (0, 128, 64, 3, 2),
)
SIZES_ON_A_GPU = (
    *((300, 512, 256, 8, 2), (37, 256, 128, 4, 3), (130, 272, 320, 3, 2), (257, 384, 192, 5, 2)),
    *((1, 512, 256, 8, 4), (0, 256, 128, 4, 2), (700, 128, 64, 6, 3)),
)
# Tiles end inside of H and of I, many experts, and an I at which tokens are gathered before the GEMMs:
# of BF16's GEMMs, which take any multiple of 8.
OF_NO_TILE = ((300, 264, 200, 4, 2), (400, 128, 136, 40, 4), (20, 72, 8200, 2, 2))
# Three pairs of H and I, because Triton compiles every kernel anew for each pair, which takes seconds.
SIZES_OF_TRITON = (
    *((300, 256, 128, 8, 2), (37, 256, 128, 4, 3), (257, 264, 200, 5, 2), (1, 256, 128, 8, 4)),
    *((0, 256, 128, 4, 2), (700, 256, 128, 6, 3), (400, 264, 200, 40, 4), (20, 72, 8200, 2, 2)),
)


def normal(case: Case, engine: str = "reference") -> Case:
    """The case with what its face and the engine have in the place of what they have not."""
    if case.face not in FACES:
        case = replace(case, face=FACES[len(case.face) % len(FACES)])
    of_engine = ENGINES[engine.removesuffix(ON_HOST)] | EMULATED.get(engine, {})
    case = _with(case, of_engine)
    if case.trains == "codes":
        known = LAYERS[case.face].freezes
        frozen = {"recipe": ("dx256",), "arrangement": known}
        case = _with(case, frozen) if known else replace(case, trains="biases")
    of_face = {
        name: tuple(value for value in values if value in of_engine.get(name, values))
        for name, values in LAYERS[case.face].takes.items()
    }
    case = _with(case, of_face)
    return replace(case, **_that_exclude_each_other(case, engine))


def _with(case: Case, takes: dict[str, tuple[Any, ...]]) -> Case:
    others = {
        name: values[case.seed % len(values)]
        for name, values in takes.items()
        if getattr(case, name) not in values
    }
    return replace(case, **others) if others else case


def _that_exclude_each_other(case: Case, engine: str) -> dict[str, Any]:
    """Values in the place of those that mean nothing beside others of the case, or are refused."""
    changes = _of_the_law(case)
    if not case.fp8:
        changes |= {name: AXES[name][0] for name in (*OF_FP8, "copies")}
    elif not case.recipe.startswith("iso"):
        changes["iso_weight"] = False
    if case.activation not in OWN or (case.face in OF_FLEET and case.activation == "swiglu_oai"):
        changes["own"] = False
    if IS_PADDLE:
        turned = "contiguous" if case.face not in OF_FLEET else case.places
        changes |= {"spelling": "contiguous", "places": turned}
    if case.arrangement == "halves" and not case.gated:
        changes["arrangement"] = "native"
    if case.arrivals != "plain":
        changes["dtype"] = "bfloat16"
        if IS_PADDLE and case.schedule == "checkpoint":  # tests/node/test_node_fp8.py has it
            changes["schedule"] = "one"
    if not case.bias:
        changes["trains"] = {"weights": "all", "b1": "biases", "b2": "biases"}.get(
            case.trains, case.trains
        )
    if case.frozen:
        changes |= {"gradients": "autograd", "flush": "auto", "first": "add"}
    if changes.get("gradients", case.gradients) != "main_grad":
        changes |= {"first": "add", "places": "contiguous"}
    elif case.flush == "step":
        changes["first"] = "add"
    return changes | _of_sizes(case, engine)


def _of_the_law(case: Case) -> dict[str, Any]:
    if case.schedule == "graph":  # each graph takes time
        return {"law": "split"}
    if case.law != "full":
        return {}
    # What a sender quantises, and the copy of strided tokens, are made outside of a call.
    named = "full" if case.face in NAMES_A_CURE else "repeat"
    # Paddle's indexing leaves gradients off where the forward that its backward repeats has failed.
    if IS_PADDLE and case.face == "sorted" and case.schedule == "checkpoint":
        named = "repeat"
    return {"arrivals": "plain", "spelling": "contiguous", "law": named}


def _of_sizes(case: Case, engine: str) -> dict[str, Any]:
    changes: dict[str, Any] = {}
    many, some = AXES["sizes"][2], AXES["sizes"][1]
    sizes = case.sizes
    if engine != "reference":
        if engine.endswith(ON_HOST):
            known = SIZES_ON_HOST
        elif engine == "triton":
            known = SIZES_OF_TRITON
        else:
            known = SIZES_ON_A_GPU if case.fp8 else SIZES_ON_A_GPU + OF_NO_TILE
        many, some, *_ = known
        if sizes[1] % 16 or sizes[2] % 64 or engine == "triton":
            sizes = known[case.seed % len(known)]
    if case.scene == "w1 unit":
        sizes, changes["routing"] = many, "full"
        if case.dtype == "float16":  # whose largest value its square passes
            changes["dtype"] = "bfloat16"
        if case.save_z == "int8":  # which loses it, as docs/env.md says
            changes["save_z"] = "adaptive"
    elif case.scene != "usual" and sizes[0] < 37:
        sizes = some  # among few numbers an outlier is nearly all that there is
    tokens, hidden, inner, experts, topk = sizes
    if case.law == "permuted" and (hidden % 16 or inner % 16):
        # The host's products have other bits where an expert's memory begins off a vector's boundary.
        changes["law"] = "repeat"
    if case.law == "scaled" and case.dtype == "float16":  # which has few powers of two
        changes["law"] = "repeat"
    topk = 1 if case.face in ONE_SLOT else min(topk, experts)
    return changes | {"sizes": (tokens, hidden, inner, experts, topk)}


@contextmanager
def frozen_for(case: Case) -> Iterator[Callable[[Any], None]]:
    """Weights of a case are frozen inside; yields a check of what that lost. Codes stand for them exactly,
    save under law `trains`, where they are those that an engine makes of weights that it has.
    """
    from sonicmoe.quant.recipes import ScaleFormat
    from sonicmoe.weights import frozen

    def check(lost: Any) -> None:
        assert lost.weights and (case.law == "trains" or not lost.changed), lost

    as_engines = (ScaleFormat.FP32,) if case.law == "trains" else frozen._FORMATS
    with mock.patch.object(frozen, "_FORMATS", as_engines):
        yield check


@contextmanager
def everywhere(config: SonicMoEConfig) -> Iterator[None]:
    """In force on autograd's threads too, which repeat a checkpointed forward and read the environment."""
    with mock.patch("sonicmoe.config._NOTHING_SET", config):
        yield


class Trial:
    """Makes the calls of a step one after the other. Of those that have a number in `fails_at` this
    allocation fails, and they are made again. seen: how many allocations each of them made.
    """

    def __init__(self, fails_at: Sequence[int | None] = ()) -> None:
        self.fails_at, self.seen, self.errors = [*fails_at], list[int](), list[str]()

    def __call__(self, call: Callable[[], Any], again: Callable[[], Any] | None = None) -> Any:
        number = self.fails_at.pop(0) if self.fails_at else None
        allocations = Allocations(number, FULL_GPU if (number or 0) % 2 else FULL_HOST)
        try:
            with allocations:
                return call()
        except (*CAUGHT, OutOfMemoryError) as error:
            self.errors.append(str(error))
        finally:
            self.seen.append(allocations.seen)
        return (again or call)()


def run(
    case: Case, scene: Scene, engine: str = "reference", trial: Trial | None = None
) -> dict[str, np.ndarray]:
    """Output and gradients by name, as `golden` has them; those of one micro-batch after the other."""
    made = trial or (lambda call, again=None: call())
    layer = LAYERS[case.face](case, scene, engine)
    hooked = layer.watch_hooks()
    half = len(scene.x) // 2
    halves = [slice(None, half), slice(half, None)]
    parts = halves if case.schedule in ("two", "crossed") else [slice(None)]
    # A node has its configuration; the others read the one in force.
    with nullcontext() if isinstance(layer, Node) else everywhere(layer.config):
        calls = []
        for part in parts:
            calls.append(made(partial(Call, layer, scene.tokens(part))))
            if case.schedule != "crossed":
                made(calls[-1].backward, calls[-1].again)
        for call in reversed(calls) if case.schedule == "crossed" else ():
            made(call.backward, call.again)
        made(layer.finish)
    layer.require_untouched()
    layer.require_hooks(hooked, len(calls))
    found = {
        name: np.concatenate([getattr(call, name) for call in calls])
        for name in ("out", "dx", "dprobs")
    }
    if case.face in ROUTERS:
        del found["dprobs"]
    found |= {} if case.frozen else layer.gradients()
    for name, bias, trains in zip(("db1", "db2"), layer.biases, layer.bias_trains, strict=False):
        if not trains:
            assert bias.grad is None
            continue
        gradient = host(bias.grad)
        back = np.argsort(layer.order) if name == "db1" and layer.order is not None else slice(None)
        found[name] = gradient[:, back]
    for name, pair in layer.pairs.items():
        found[f"{name}.a"], b = host(pair.a.grad), host(pair.b.grad)
        back = np.argsort(layer.order) if name == "up" and layer.order is not None else slice(None)
        found[f"{name}.b"] = b[:, back]
    return found


class Call:
    """A forward of one micro-batch whose backward is still to come."""

    def __init__(self, layer: Layer, scene: Scene) -> None:
        self.layer, case = layer, layer.case
        self.leaf = layer.leaf(scene.x, layer.dtype, True, case.spelling)
        self.probs = layer.leaf(scene.probs, torch.float32, case.face not in ROUTERS, case.spelling)
        self.gradient = layer.leaf(scene.dout, layer.dtype, False, case.spelling)
        indices = tensor(scene.indices).to(getattr(torch, case.index)).to(layer.device)
        self.indices = indices = spelled(indices, case.spelling)
        mine = {"x": self.leaf, "probs": self.probs, "dout": self.gradient, "indices": indices}
        layer.snapshots.append(Snapshot(**mine))

        def call(x: Any, probs: Any) -> Any:
            return layer.call(x, probs, indices, scene)

        again = partial(recomputed, call, use_reentrant=bool(case.seed % 2))
        self.call = again if case.schedule == "checkpoint" else call
        self.forward()
        assert self.value.dtype == layer.dtype and tuple(self.value.shape) == scene.x.shape

    def forward(self) -> None:
        """The caller adds a residual to the output in place, so no backward reads it."""
        self.value = self.call(self.leaf, self.probs)
        self.out = host(self.value)
        with torch.no_grad():
            self.value.detach().zero_()

    def backward(self) -> None:
        self.layer.backward(self)

    def again(self) -> None:
        """Behind a backward that failed. Paddle runs none twice, and other operations freed what they
        had saved.
        """
        case = self.layer.case
        repeats = case.face == "node" and case.schedule != "checkpoint"
        if IS_PADDLE or case.stagewise_memory or not repeats:
            self.forward()
        self.backward()

    @property
    def dx(self) -> np.ndarray:
        assert self.leaf.grad.dtype == self.leaf.dtype
        return host(self.leaf.grad)

    @property
    def dprobs(self) -> np.ndarray | None:
        return np.zeros(0) if self.probs.grad is None else host(self.probs.grad)
