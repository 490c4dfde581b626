"""Plain weights that an engine reads in the user's own memory, as those of a node that are native
already. Nothing else treats such weights apart.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..engine.expert_matrices import ExpertMatrices, tensors_of
from ..engine.interface import EngineWeight, EngineWeights
from ..interop import IS_PADDLE, data_ptr, holds_memory, is_cuda, plain_ops
from ..layouts import GateUp
from ..quant.format import BlockScaledTensor
from .changes import versions_of

Tensor = torch.Tensor


class LentWeights:
    """The tensors, and their versions when a forward read them."""

    def __init__(self, tensors: Sequence[Tensor], versions: tuple[int, ...]) -> None:
        self._tensors, self._versions = tensors, versions

    def check(self, weights: EngineWeights) -> EngineWeights:
        """Raise if a backward that reads them would read other values than its forward did. Else
        `weights`, of which these are, as `found_again` has them.
        """
        # Under Paddle a tensor without memory must not be asked where it lies.
        apart = isinstance(weights.w1, ExpertMatrices) and not IS_PADDLE
        found = found_again(weights) if apart else weights
        # A matrix that lies where it lay has its memory.
        freed = not (apart and found is weights) and not all(map(holds_memory, self._tensors))
        if freed or versions_of(self._tensors) != self._versions:
            happened = "freed" if freed else "modified by an inplace operation"
            raise RuntimeError(
                f"the expert weights were {happened} between this forward and its backward, which "
                "reads them where they lie; its gradients would be wrong. Finish every backward "
                "before the weights change"
            )
        return found_again(weights) if IS_PADDLE else found


def found_again(weights: EngineWeights) -> EngineWeights:
    """The weights as a backward finds them. FSDP frees those of separate experts after the forward, and may
    gather them at other addresses.
    """
    w1, w2 = map(_where_it_lies, (weights.w1, weights.w2))
    if w1 is weights.w1 and w2 is weights.w2:
        return weights
    return replace(weights, w1=w1, w2=w2, w1_dgrad=w1, w2_dgrad=w2)


def _where_it_lies(weight: EngineWeight) -> EngineWeight:
    if not isinstance(weight, ExpertMatrices):
        return weight
    now = ExpertMatrices(weight.tensors)
    # The object of the forward stays as it is, because later forwards may find it in the cache.
    return weight if now.addresses == weight.addresses else now


def lent_by(
    parameters: Sequence[Tensor], weights: EngineWeights, versions: tuple[int, ...] = ()
) -> tuple[LentWeights | None, EngineWeights]:
    """What a training forward reads of the parameters' own memory, and all that it reads. versions:
    those of all parameters, where somebody asked before.
    """
    # Block-scaled weights are memory of the engine's own.
    if isinstance(weights.w1, BlockScaledTensor) or isinstance(weights.w2, BlockScaledTensor):
        return None, weights
    plain = tensors_of(weights.w1), tensors_of(weights.w2)
    # An address is enough: the first of a projection lies where all of it begins, and of separate
    # matrices all are the user's, or none.
    firsts = data_ptr(parameters[0]), data_ptr(parameters[len(parameters) // 2])
    lent = tuple(itertools.chain(*[each for each in plain if data_ptr(each[0]) in firsts]))
    if not lent:
        return None, weights
    if is_cuda(lent[0]):
        # In the order of the parameters, which count their writes.
        counted = versions if len(versions) == len(lent) else versions_of(lent)
        return LentWeights(lent, counted), weights
    # Nothing on a host shows a write between a forward and its backward, so these read a copy.
    with plain_ops():
        w1, w2 = map(_copied, (weights.w1, weights.w2))
    return None, EngineWeights(w1, w2, w1, w2, layout=weights.layout)


def _copied(weight: EngineWeight) -> Tensor | ExpertMatrices:
    # A node takes no pair of tensors, and block-scaled weights did not come here.
    assert not isinstance(weight, (GateUp, BlockScaledTensor))
    if isinstance(weight, ExpertMatrices):
        return ExpertMatrices([tensor.clone() for tensor in weight.tensors])
    return weight.clone()
