"""The weights of the engines that compute in FP8 on a GPU, `hopper` and `mxfp8`: quantised where the
user's lie, and kept up to date in place. Their passes are their own.
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from ..interop import plain_ops
from ..observe import stage, staged
from ..quant.gpu import QuantizedWeights
from ..weight_source import WeightSource
from .border import check_shapes, check_weights
from .capabilities import require
from .interface import Engine, EngineWeights
from .settings import EngineSettings, Workload

Tensor = torch.Tensor


class QuantisedEngine(Engine):
    """All that such an engine does with weights."""

    @abstractmethod
    def _empty_store(self, settings: EngineSettings) -> QuantizedWeights:
        """What keeps the codes of one layer."""

    def refresh(
        self,
        source: WeightSource,
        settings: EngineSettings,
        previous: EngineWeights | None = None,
        written: bool = True,
    ) -> EngineWeights:
        """Quantise the weights where they lie. `previous` is brought up to date in place: at every
        call a kernel compares a sample of the weights with checksums, and the next one quantises
        them where they differ. That also happens at every replay of a CUDA graph.
        """
        if previous is None:  # else the same settings were checked when it was made
            self._check_computable(source, settings)
        store = None if previous is None else previous.store
        if not isinstance(store, QuantizedWeights):
            previous, store = None, self._empty_store(settings)
        has_choice = self.in_one_order(settings) is not settings
        grows = has_choice and previous is not None and not previous.two_orders
        with stage("prepare_weights"), plain_ops():
            if grows:
                store.add_dgrad()
            # Without a known write the device decides, by a sample of the weights.
            store.update(source, force=written)
            biases = _native_biases(source, previous)
            # Views of the store, so that an update in place is seen by weights that were handed
            # out.
            forward = store.w1, store.w2
            dgrad = forward if store.iso_weight else (store.w1_dgrad, store.w2_dgrad)
            if previous is not None and previous.w1 is store.w1:
                if grows:
                    previous.add_backward(*dgrad)
                return previous
            return EngineWeights(*forward, *dgrad, *biases, store=store)

    def keep(self, previous: EngineWeights, written: bool = False) -> bool:
        """The launches of `refresh`: a comparison on the device, and what quantises where it finds a
        change, or wherever the host knows of one. Not of biases, which `refresh` copies every time:
        they are too small to be sampled.
        """
        store = previous.store
        if previous.b1 is not None or not isinstance(store, QuantizedWeights):
            return False
        return staged("prepare_weights", store.keep, previous.w1, written)

    def prepare_weights(
        self, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, settings: EngineSettings
    ) -> EngineWeights:
        check_weights(w1, w2, b1, b2, settings.activation)
        return self.refresh(WeightSource.stacked(w1, w2, b1, b2), settings)

    def _check_computable(self, source: WeightSource, settings: EngineSettings) -> None:
        experts, sizes = len(source.up), (source.hidden_size, source.intermediate_size)
        require(self.record, Workload(settings, *sizes, bias=source.b1 is not None))
        shapes = (experts, source.n1, source.hidden_size), (experts, *sizes)
        biases = (None if b is None else tuple(b.shape) for b in (source.b1, source.b2))
        check_shapes(*shapes, *biases, settings.activation)


def _native_biases(
    source: WeightSource, previous: EngineWeights | None
) -> tuple[Tensor | None, Tensor | None]:
    """b1 and b2 in fp32, native, in the memory that `previous` has of them."""
    # Copies: what a cache keeps must not keep the user's biases alive, and a CUDA graph of this
    # follows them at every replay.
    if source.b1 is None or source.b2 is None:
        return None, None
    given = source.layout.native_b1(source.b1), source.b2
    if previous is None or previous.b1 is None or previous.b2 is None:
        b1, b2 = (bias.to(torch.float32, copy=True).contiguous() for bias in given)
        return b1, b2
    previous.b1.copy_(given[0])
    previous.b2.copy_(given[1])
    return previous.b1, previous.b2
