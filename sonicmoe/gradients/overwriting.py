"""Which gradients a backward writes into `main_grad`, where it adds the others. Each of three asks
for it by itself:

* a `main_grad` that is None, for which memory is made;
* `overwrite_main_grad` of a parameter, at every backward while it is true;
* `SonicMoEConfig(first_backward="overwrite")`, for the first gradient of each parameter since
  `step()` or `discard_grads()`. Nothing else tells which one is the first: no trace of an optimizer
  step is relied on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, repeat
from operator import is_
from typing import Any
from weakref import WeakValueDictionary

import torch

from ..enums import FirstBackward, FlushMode
from ..errors import ConfigError
from ..interop import holds_memory
from ..weight_source import same_objects
from .batch import ABSENT, GradientBatch

Tensor = torch.Tensor


class Overwriting:
    """What the backwards of one layer have written since `step()`, and which gradients the next one
    writes.
    """

    def __init__(self, way: FlushMode, name_of: Callable[[int], str]) -> None:
        """No backward came yet. name_of: of the layer's parameters, by position."""
        self._way, self._name_of = way, name_of
        # Of the backwards since `step()` or `discard_grads()`; None: none came.
        self._rule: FirstBackward | None = None
        self._came = False  # whether one came since `step()`
        # Under "overwrite", those of the last backward, and the ids of those that were written.
        self._parameters: list[Tensor] = []
        self._written: set[int] = set()

    @property
    def is_on(self) -> bool:
        """Whether the first gradients since `step()` are written."""
        return self._rule is FirstBackward.OVERWRITE

    def check(self, rule: FirstBackward) -> None:
        """Refuse to write gradients that wait."""
        if rule is FirstBackward.OVERWRITE and self._way is FlushMode.STEP:
            raise ConfigError(
                "first_backward='overwrite' with flush='step': gradients wait for step(), "
                "which adds them; needed: flush='auto', or first_backward='add'"
            )

    def begin(self, rule: FirstBackward, parameters: Sequence[Tensor]) -> None:
        """A backward of these parameters begins, of which perhaps none trains."""
        if rule is FirstBackward.OVERWRITE:
            self.check(rule)
        if self._rule not in (None, rule):
            raise ConfigError(
                f"first_backward is {rule.value!r} in this backward, and was otherwise in those "
                "since step(); needed: one setting for all backwards of an optimizer step"
            )
        if rule is FirstBackward.OVERWRITE:
            if not same_objects(parameters, self._parameters):
                self._refuse_shared(parameters)
                self._claim(parameters)
        elif _owners:
            self._claim(())
            self._refuse_shared(parameters)
        self._rule, self._came = rule, True

    def written_by(
        self,
        parameters: Sequence[Tensor],
        trained: Sequence[bool],
        main_grads: Sequence[Any],
    ) -> list[bool]:
        """Which gradients the backward that has begun writes; empty where it writes none.

        main_grads: of those that `trained` marks, or `ABSENT`.
        """
        # Read at every backward and never written here: Megatron-FSDP sets it when it unshards.
        asked = list(map(getattr, parameters, repeat("overwrite_main_grad"), repeat(False)))
        if any(asked):
            asked = [flag and not _keeps_sums(p) for flag, p in zip(asked, parameters, strict=True)]
        if self._rule is FirstBackward.OVERWRITE:
            at = next((index for index, held in enumerate(main_grads) if held is ABSENT), None)
            if at is not None:
                raise ConfigError(
                    f"first_backward='overwrite' writes main_grad, and {self._name_of(at)} has "
                    "none, so that autograd would add its gradient to .grad; needed: the attribute, "
                    "which may be None, or first_backward='add'"
                )
            pairs = zip(asked, parameters, strict=True)
            asked = [flag or id(parameter) not in self._written for flag, parameter in pairs]
        elif not any(asked) and not any(map(is_, main_grads, repeat(None))):
            return []
        return [
            wanted and (held is None or bool(flag))
            for wanted, held, flag in zip(trained, main_grads, asked, strict=True)
        ]

    def done(self, batch: GradientBatch) -> None:
        """The gradients of a backward are where they belong."""
        if self._rule is FirstBackward.OVERWRITE:
            self._written.update(map(id, compress(batch.parameters, batch.trained)))

    def discard(self) -> None:
        """What the backwards have left is not wanted."""
        # Until a backward writes over it, `step()` zeroes it.
        self._rule, self._written = None, set()

    def end_step(self) -> list[Tensor]:
        """`step()` came. Returns the memory that it is to zero: each `main_grad` that none of the
        backwards since the last step has written, if there was one.
        """
        came, written = self._came, self._written
        self._rule, self._came, self._written = None, False, set()
        if not came:
            return []
        left = (parameter for parameter in self._parameters if id(parameter) not in written)
        memory = (getattr(parameter, "main_grad", None) for parameter in left)
        return [held for held in memory if held is not None and holds_memory(held)]

    def refuse_capture(self) -> None:
        """Refuse to capture a backward that writes or adds by turns: all replays of a CUDA graph do alike."""
        if self.is_on:
            raise ConfigError(
                "first_backward='overwrite' while a backward is captured into a CUDA graph, which "
                "writes or adds at every replay; needed: first_backward='add', or, for a graph "
                "that is to write, overwrite_main_grad on the parameters"
            )

    def refuse_flags(self, parameters: Sequence[Tensor], trained: Sequence[bool]) -> None:
        """Refuse to keep gradients of parameters that ask each backward to write."""
        for index, (parameter, wanted) in enumerate(zip(parameters, trained, strict=True)):
            if wanted and getattr(parameter, "overwrite_main_grad", False):
                raise ConfigError(
                    f"{self._name_of(index)}.overwrite_main_grad is true, which asks each backward "
                    "to write main_grad, and with flush='step' gradients wait for step(), "
                    "which adds them; needed: flush='auto', or a flag that is false"
                )

    def _refuse_shared(self, parameters: Sequence[Tensor]) -> None:
        """Refuse parameters whose `main_grad` another node writes without knowing of this one."""
        for index, parameter in enumerate(parameters):
            if _owners.get(id(parameter), self) is not self:
                raise ConfigError(
                    f"{self._name_of(index)} is a parameter of another node too, which writes its "
                    "main_grad (first_backward='overwrite') and would lose what this one leaves "
                    "there; needed: first_backward='add' for both, or one node"
                )

    def _claim(self, parameters: Sequence[Tensor]) -> None:
        for parameter in self._parameters:
            _owners.pop(id(parameter), None)
        # Held, so that their ids are nobody else's.
        self._parameters = list(parameters)
        self._written.intersection_update(map(id, parameters))
        _owners.update(dict.fromkeys(map(id, parameters), self))


def _keeps_sums(parameter: Tensor) -> bool:
    """Whether Megatron-FSDP keeps this gradient whole, as in a group of one rank. It sets
    `overwrite_main_grad` there too, although earlier backwards of the step have their sums there.
    """
    return not getattr(getattr(parameter, "_gbuf", None), "is_data_distributed", True)


# Of each parameter whose first gradients are written, by id. A node that is dropped is none.
_owners: WeakValueDictionary[int, Overwriting] = WeakValueDictionary()
