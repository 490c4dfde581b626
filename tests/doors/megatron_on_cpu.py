"""What Megatron-Core asks of a GPU, of apex, of DeepEP or of Transformer Engine, where there are none.
Each stand-in has its reason. None touches the experts, nor the dispatchers between two exchanges.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing.dummy
import sys
from types import SimpleNamespace
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.nn.functional as exchange

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
from megatron.core import tensor_parallel, utils  # noqa: E402
from megatron.core.dist_checkpointing.strategies import filesystem_async  # noqa: E402
from megatron.core.extensions import transformer_engine  # noqa: E402
from megatron.core.tensor_parallel import layers  # noqa: E402
from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: E402
from packaging.version import Version  # noqa: E402

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


# DeepEP, by exchanges of everything: all ranks have equally many tokens.


def _fused_dispatch(x, indices, probs, num_experts, group, **_):
    all_x, all_probs = (torch.cat(exchange.all_gather(t.contiguous(), group)) for t in (x, probs))
    all_ids = [torch.empty_like(indices) for _ in range(group.size())]
    dist.all_gather(all_ids, indices, group)
    experts = num_experts // group.size()
    ids = torch.cat(all_ids) - group.rank() * experts
    here = (ids >= 0) & (ids < experts)
    rows = here.any(1).nonzero().squeeze(1)
    ids = torch.where(here, ids, -1)[rows]
    # DeepEP leaves zeros where an id is -1.
    probs = torch.where(ids >= 0, all_probs[rows], 0.0)
    counts = torch.bincount(ids[ids >= 0], minlength=experts)
    return all_x[rows], ids, probs, counts, (rows, int(all_x.shape[0]))


def _fused_combine(rows, group, handle, **_):
    places, count = handle
    whole = rows.new_zeros(count, rows.shape[1]).index_add(0, places, rows)
    return exchange.all_reduce(whole, group=group).chunk(group.size())[group.rank()], None


token_dispatcher.fused_dispatch = _fused_dispatch
token_dispatcher.fused_combine = _fused_combine
token_dispatcher.set_deepep_num_sms = lambda _: None


# Transformer Engine, where stock experts have their parameters. All that names and cuts them in a
# checkpoint is Megatron's, in a module that is imported once more as if there were one.


class _GroupedLinear(torch.nn.Module):
    fp8 = fp8_calibration = False
    fp8_meta = {"fp8_checkpoint": False}  # noqa: RUF012

    def __init__(self, num_gemms, in_features, out_features, *, bias, **_):
        super().__init__()
        self.num_gemms, self.use_bias = num_gemms, bias
        for name, shape in (("weight", (out_features, in_features)), ("bias", (out_features,))):
            for expert in range(num_gemms if bias or name == "weight" else 0):
                self.register_parameter(f"{name}{expert}", torch.nn.Parameter(torch.randn(shape)))

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)  # as without FP8

    def set_extra_state(self, state):
        pass

    def init_fp8_metadata(self, num_gemms):
        pass


class _Package:
    """Finds a module of any name in it."""

    def find_spec(self, name, *_):
        if name.partition(".")[0] == "transformer_engine":
            return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec):
        made = mock.MagicMock(__path__=[], GroupedLinear=_GroupedLinear)
        made.pytorch.GroupedLinear = _GroupedLinear
        return made

    def exec_module(self, module):
        pass


@contextlib.contextmanager
def grouped_linears():
    """Megatron's column- and row-parallel layers over such parameters."""
    spec = importlib.util.spec_from_file_location("with_engine", transformer_engine.__file__)
    module = importlib.util.module_from_spec(spec)
    with (
        mock.patch.object(utils, "_te_version", Version("2.10.0")),
        mock.patch.dict(sys.modules, {spec.name: module}),
        mock.patch.object(sys, "meta_path", [_Package(), *sys.meta_path]),
    ):
        spec.loader.exec_module(module)
        yield module.TEColumnParallelGroupedLinear, module.TERowParallelGroupedLinear
