"""What Megatron-Core asks of a GPU, of apex, of DeepEP or of Transformer Engine, where there are none.
Each stand-in has its reason. None touches the experts, nor the dispatchers between two exchanges.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as exchange

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from megatron.core import utils
from megatron.core.extensions import transformer_engine
from megatron.core.transformer.moe import token_dispatcher
from on_cpu import for_megatron  # noqa: F401  before anything of Megatron's
from packaging.version import Version

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
