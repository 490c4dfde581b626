"""What Megatron-Core asks of a GPU or of apex, where there are none. Imported before anything of
Megatron's. Each stand-in has its reason. None touches the experts, nor their dispatchers.
"""

from __future__ import annotations

import contextlib
import multiprocessing.dummy
from types import SimpleNamespace

import torch
import torch._dynamo

# Its functions are decorated with torch.compile, which would start a C++ compiler for each.
torch._dynamo.config.disable = True
# Memory is made on this device without a question.
torch.cuda.current_device = lambda: "cpu"
torch.cuda.synchronize = lambda *_: None


class _Stream:
    """Or an event. The alltoall dispatcher copies counts to the host on a stream of its own, and the
    schedule that overlaps micro-batches has two.
    """

    def _nothing(self, *_):
        return self

    wait = record = synchronize = wait_stream = wait_event = record_event = _nothing


_STREAM = _Stream()
torch.cuda.Event = lambda *_, **__: _STREAM
torch.Tensor.record_stream = lambda *_: None
torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = lambda *_: None
torch.cuda.Stream = lambda *_, **__: _STREAM
torch.cuda.current_stream = lambda *_: _STREAM
torch.cuda.stream = lambda _: contextlib.nullcontext()

# After the above, because these modules ask for the device as they are imported.
from megatron.core import tensor_parallel  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: E402

# The tracker of random states has states of CUDA devices only.
tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
# Recompute keeps them, too.
tensor_parallel.random._get_cuda_rng_state = lambda *_, **__: None
tensor_parallel.random._set_cuda_rng_state = lambda *_, **__: None
# 0.16.1 defines this name only where Transformer Engine is installed, and reads it anywhere.
moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
# Writers of a checkpoint are forked, and threads of PyTorch do not survive a fork.
filesystem_async.mp = SimpleNamespace(get_context=lambda _: multiprocessing.dummy)
# The layers of attention delay their weight gradients in Transformer Engine only.
layers.ColumnParallelLinear.backward_dw = lambda _: None
layers.RowParallelLinear.backward_dw = lambda _: None
# apex has the GEMM by which stock layers add to main_grad.
layers._grad_accum_fusion_available = True
layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
    wgrad_gemm_accum_fp32=lambda x, dy, main_grad: main_grad.addmm_(dy.T, x)
)


def _as_array(tensor, as_numpy=False, record_stream=False):
    """On a host the splits of an exchange stay tensors, which gloo does not take."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


token_dispatcher.maybe_move_tensor_to_cpu = _as_array
