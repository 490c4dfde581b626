"""One layer per pair of parameters. PaddleFleet passes both weights to every call and keeps no object
of ours, so the layer is found again by them.

    (weight1, weight2) ──weak──► FleetLayer ──► LayerState: weight caches, the way of gradients
                                     └─ a node over it for each configuration and activation

Nothing here keeps a parameter alive, and nothing is written on one. A copied or loaded model has
parameters, and therefore layers, of its own.

Nobody calls `step()`. Weight gradients never wait for it (`FlushMode.AUTO`). Writes to the weights
are found, or every forward prepares the weights again, as docs/design.md, "Stale weights", says:
`weights_changed` announces one. A change of the layout in place is always seen.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch

from ..config import SonicMoEConfig
from ..enums import ActivationParameters, ActivationType, FirstBackward, FlushMode, is_glu
from ..errors import ConfigError, expect
from ..layer.state import LayerState
from ..node.mlp_node import SonicMoEMlpNode
from ..observe import FLEET
from ..weights.stacked import PairParameters
from .deferral import current_offer

Tensor = torch.Tensor

_NODES = 16  # of one layer; a program has one or two configurations


class FleetLayer:
    """The experts of one pair of parameters.

    parameters: of the layer, in the layout that they have at each call.
    state: what all nodes of the layer share.
    """

    def __init__(self, weight1: Tensor, weight2: Tensor, hidden: int) -> None:
        self.parameters = PairParameters(weight1, weight2, hidden)
        self.state = LayerState(self.parameters, FlushMode.AUTO)
        self.state.offers, self.state.face = current_offer, FLEET
        (self.experts, _, _), _ = self.parameters.native_shapes
        self._nodes: dict[tuple[Any, ...], SonicMoEMlpNode] = {}
        self._references: tuple[Any, ...] = ()

    def node(
        self,
        config: SonicMoEConfig,
        activation: ActivationType,
        activation_parameters: ActivationParameters = (),
    ) -> SonicMoEMlpNode:
        """The node for these settings; found again for the identical `config`."""
        # By identity, because comparing two configurations takes as long as a launch. The node
        # keeps its configuration alive, so the id stays its own.
        key = (id(config), activation, activation_parameters)
        if key in self._nodes:
            return self._nodes[key]
        needed = "a gated activation, whose w1 has 2I columns"
        words = f"activation_type is {activation.value!r}; needed: {needed}"
        expect(is_glu(activation), ConfigError, words)
        expect(
            config.resolve().first_backward is FirstBackward.ADD,
            ConfigError,
            "first_backward='overwrite' counts from node.step(), which nobody calls here; needed: "
            "'add', or overwrite_main_grad on w1 and w2",
        )
        # A caller who makes a configuration per call would fill the memory with nodes.
        if len(self._nodes) >= _NODES:
            self._nodes.clear()
        # Caches of weights and gradients belong to the layer, so the nodes share them.
        self._nodes[key] = node = SonicMoEMlpNode.over(
            self.state, activation, config=config, activation_parameters=activation_parameters
        )
        return node

    def belongs_to(self, weight1: Tensor, weight2: Tensor) -> bool:
        """Whether these are the parameters, and not others that took over their ids."""
        # Python hands the id of a parameter that is gone to the next object.
        first, second = self._references
        return first() is weight1 and second() is weight2

    def keep_until_dropped(self, key: tuple[int, int], weight1: Tensor, weight2: Tensor) -> None:
        """Put the layer among those that are found, until a parameter goes."""

        # Called once for each of the two references, and the first of them drops the layer.
        def forget(_reference: Any) -> None:
            _layers.pop(key, None)

        self._references = weakref.ref(weight1, forget), weakref.ref(weight2, forget)
        _layers[key] = self


# By ids, because a tensor compares element by element and is no key of a dictionary.
_layers: dict[tuple[int, int], FleetLayer] = {}
_making = threading.Lock()


def layer_of(weight1: Tensor, weight2: Tensor, hidden: int) -> FleetLayer:
    """The layer of two parameters, made at the first call; `hidden`: H of the tokens."""
    layer = known_layer(weight1, weight2)
    if layer is None:
        # Threads that come together to a new pair must not make two layers, whose gradients would
        # not know each other.
        with _making:
            layer = known_layer(weight1, weight2)
            if layer is None:
                layer = FleetLayer(weight1, weight2, hidden)
                layer.keep_until_dropped((id(weight1), id(weight2)), weight1, weight2)
    return layer


def known_layer(weight1: Tensor, weight2: Tensor) -> FleetLayer | None:
    """The layer of two parameters; None before their first call."""
    layer = _layers.get((id(weight1), id(weight2)))
    return layer if layer is not None and layer.belongs_to(weight1, weight2) else None


def weights_changed(weight1: Tensor, weight2: Tensor) -> None:
    """Have the next forward on these parameters prepare its weights again. To be called after an
    optimizer step, or after any other write to them.
    """
    layer = known_layer(weight1, weight2)
    if layer is not None:
        layer.state.bound.invalidate()


def all_weights_changed() -> None:
    """`weights_changed` for every pair of parameters of this process."""
    # A list of its own: a parameter may go while this runs, and takes its layer along.
    for layer in list(_layers.values()):
        layer.state.bound.invalidate()


def drop_weight_caches() -> None:
    """Free what the layers of this process have prepared of their weights; copies that hang on
    parameters are not theirs.
    """
    for layer in list(_layers.values()):
        layer.state.bound.drop()
