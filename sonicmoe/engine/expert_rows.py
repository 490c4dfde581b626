"""The rows of each expert on the device, and sums over them, for the GEMMs of `bf16`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ..interop import IS_PADDLE, current_stream, device_name
from ..kernels.cuda_wgrad import expert_rows_module
from ..routing.backends import index_of_gpu
from ..routing.metadata import RoutingMetadata
from .gpu import gpu_of

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The rows of each expert as the kernels want them, made on the device.

    The GEMMs run over padded rows: they know an expert as the rows between two neighbouring
    offsets, which cannot skip padding, and a tile has 128 rows anyway. A padding row gathers what
    its expert's last true row gathers, with probability 0: it is finite wherever the expert's own
    rows are, its dz and y1s are zeros, and no index is out of bounds.

    cu_rows int32 `[E+1]`; gather_index int32 `[R]`, a token in every row; native: the module of
    the row kernels.
    """

    cu_rows: Tensor
    gather_index: Tensor
    stream: int
    native: Any

    @classmethod
    def of(cls, routing: RoutingMetadata) -> ExpertRows:
        device = routing.row_token.device
        # int32, because the GEMMs take 32-bit offsets; the metadata's are int64.
        cu_rows = torch.empty((routing.num_experts + 1,), dtype=torch.int32, device=device)
        gather_index = torch.empty((routing.num_rows,), dtype=torch.int32, device=device)
        stream = current_stream(routing.row_token)
        native = expert_rows_module(gpu_of(device_name(routing.row_token)).arch)
        counts, ends = routing.expert_counts, routing.padded_offsets
        native.index_rows(routing.row_token, counts, ends, gather_index, cu_rows, stream)
        return cls(cu_rows, gather_index, stream, native)

    def sum_partials(self, partials: Tensor, dout: Tensor, b2: Tensor | None) -> Tensor:
        """fp32 `[R]`: partials `[R, tiles]` summed, plus `<dout, b2>` of each row where there is a
        bias; one launch.
        """
        out = torch.empty((int(partials.shape[0]),), dtype=torch.float32, device=partials.device)
        bias = partials if b2 is None else b2  # without a bias that argument is not read
        self.native.row_sums(
            partials, dout, self.gather_index, bias, self.cu_rows, out, b2 is not None, self.stream
        )
        return out

    def add_columns(self, values: Tensor, accumulator: Tensor, *, weight: Tensor | None) -> None:
        """`accumulator[e]` += column sums of the expert's rows: of tokens gathered and weighted, or
        of row values; one launch.
        """
        gathered = weight is not None
        unread = self.gather_index if weight is None else weight
        self.native.column_sums(
            values, self.gather_index, unread, self.cu_rows, accumulator, gathered, self.stream
        )


@contextmanager
def launch_scope(tensor: Tensor) -> Iterator[None]:
    """The device and stream of the caller, for kernels that take them from the process's state."""
    if IS_PADDLE:
        # From PyTorch's tensors apache-tvm-ffi takes the stream by itself.
        import tvm_ffi

        device = tvm_ffi.device("cuda", index_of_gpu(device_name(tensor)))
        with tvm_ffi.use_raw_stream(device, current_stream(tensor)):
            yield
    else:
        with torch.cuda.device(tensor.device):
            yield
