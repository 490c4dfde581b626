"""The weights of the engines that quantise nothing, `bf16` and `triton`: read where they lie, in
bfloat16 or float16. Their passes are those of `products.py`.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from dataclasses import replace
from typing import Any

import torch

from ..errors import DeviceError, DTypeError, EngineUnavailableError, expect
from ..interop import aligned, device_name, dtype_name, is_cuda, plain_ops
from ..log import log_once
from ..weight_source import WeightSource
from .adapted_products import AdaptedProducts
from .border import check_weights, require_operands
from .capabilities import require
from .expert_matrices import tensors_of
from .interface import EngineWeights
from .products import Products, ProductsEngine, plain_operand
from .settings import EngineSettings, Workload
from .tokens import PendingWgrad, Tokens, plain_tokens

Tensor = torch.Tensor


class PlainEngine(ProductsEngine):
    """All of such an engine but `Products`, sums of biases and addition of weight gradients."""

    def prepare_weights(
        self, w1: Tensor, w2: Tensor, b1: Tensor | None, b2: Tensor | None, settings: EngineSettings
    ) -> EngineWeights:
        """The native weights as they are; forward and dgrad read the same storage."""
        check_weights(w1, w2, b1, b2, settings.activation)
        with plain_ops():
            # `aligned` copies only what a 16-byte load could not read. Otherwise these are the
            # user's tensors.
            w1, w2 = aligned(w1), aligned(w2)
            weights = EngineWeights(w1, w2, w1, w2, _fp32(b1), _fp32(b2))
        self._check_kinds(weights, settings)
        return weights

    def _check_kinds(self, weights: EngineWeights, settings: EngineSettings) -> None:
        """Refuse weights of another dtype, size or device than this engine computes."""
        record = self.record
        w1, w2 = (tensors_of(weight)[0] for weight in (weights.w1, weights.w2))
        dtypes = [dtype_name(weight.dtype) for weight in (w1, w2)]
        expect(
            dtypes[0] == dtypes[1] and dtypes[0] in record.dtypes,
            DTypeError,
            f"w1 is {dtypes[0]}, w2 is {dtypes[1]}; "
            f"the {self.name} engine needs both of one of {list(record.dtypes)}",
        )
        # Before the device is asked for: on a host a user still learns what the engine cannot
        # compute.
        sizes = weights.hidden_size, weights.intermediate_size
        require(record, Workload(settings, *sizes, dtypes[0], weights.b1 is not None))
        expect(
            is_cuda(w1),
            DeviceError,
            f"w1 is on {device_name(w1)}; "
            f"the {self.name} engine needs a GPU of {', '.join(map(str, record.architectures))}",
        )

    def refresh(
        self,
        source: WeightSource,
        settings: EngineSettings,
        previous: EngineWeights | None = None,
        written: bool = True,
    ) -> EngineWeights:
        """Round fp32 master weights to bfloat16, as autocast would, and prepare them as every engine."""
        return super().refresh(self._computed_in_bfloat16(source), settings, previous, written)

    def _computed_in_bfloat16(self, source: WeightSource) -> WeightSource:
        """fp32 weights are; a node with fp32 parameters would otherwise have no engine on a GPU."""
        if source.anchor.dtype == torch.float32 and source.compute_dtype is None:
            return replace(source, compute_dtype=torch.bfloat16)
        return source

    def bias_gradients(self, pending: PendingWgrad) -> tuple[Tensor, Tensor]:
        """A launch for each of the two, of dz as it is stored."""
        require_operands(pending)
        dz, dout = plain_operand(pending.dz), plain_tokens(pending.dout)
        sizes = [(pending.routing.num_experts, int(rows.shape[1])) for rows in (dz, dout)]
        with plain_ops():
            db1, db2 = (torch.zeros(s, dtype=torch.float32, device=dz.device) for s in sizes)
            if pending.routing.num_rows:
                self._sum_biases(pending, db1, db2)
        return db1, db2

    @abstractmethod
    def _sum_biases(self, pending: PendingWgrad, db1: Tensor, db2: Tensor) -> None:
        """Add the rows of each expert, of dz and of dout times probability, to zeros."""

    def _adapted(self, products: Products, settings: EngineSettings, projected: Any) -> Any:
        """With plain grouped GEMMs, which the log says once."""
        words = (
            f"the {self.name} engine has low-rank adapters by torch.nn.functional.grouped_mm only"
        )
        has = hasattr(torch.nn.functional, "grouped_mm")
        expect(has, EngineUnavailableError, f"{words}; needed: PyTorch 2.10, or engine 'reference'")
        words = "engine %s computes low-rank adapters by PyTorch's grouped GEMMs, beside its own"
        log_once(logging.WARNING, words, self.name)
        return AdaptedProducts(products, settings, projected)

    def _check_tokens(self, x: Tokens, weights: EngineWeights) -> None:
        w1 = tensors_of(weights.w1)[0]
        expect(
            x.dtype == w1.dtype,
            DTypeError,
            f"x is {dtype_name(x.dtype)}; the weights are {dtype_name(w1.dtype)}, and one dtype is needed",
        )


def _fp32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else aligned(bias.detach().to(torch.float32))
