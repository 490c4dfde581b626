"""What dispatchers of expert parallelism refuse."""

from __future__ import annotations

import re
from functools import partial

import torch
from refusals.table import rows, scenes

from sonicmoe.ep import Dispatcher, LocalDispatcher, make_dispatcher
from sonicmoe.ep.deepep import DeepEPTransport
from sonicmoe.ep.dispatcher import LocalTransport, Route
from sonicmoe.errors import ConfigError, DTypeError, RoutingError, ShapeError


class Group:
    """What a transport asks of a process group of two."""

    def size(self):
        return 2

    def rank(self):
        return 0


def deepep(experts=8):
    return DeepEPTransport(experts, Group(), None)


X, IDS, WEIGHTS = torch.zeros(4, 8), torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 2)


def arguments(x=X, ids=IDS, weights=WEIGHTS):
    return x, ids, weights


def dispatch(fp8=None, fp8_grad=None, **changes):
    LocalDispatcher(4).dispatch(*arguments(**changes), fp8=fp8, fp8_grad=fp8_grad)


def dispatch_over_deepep(fp8=None, fp8_grad=None, experts=4, **changes):
    over = Dispatcher(deepep(experts))
    over.dispatch(*arguments(**changes), fp8=fp8, fp8_grad=fp8_grad)


def combine(out=X, handle=None):
    local = LocalDispatcher(4)
    local.combine(out, local.dispatch(*arguments()).handle if handle is None else handle)


def combine_over_deepep(out=X, handle=None):
    Dispatcher(deepep(4)).combine(out, handle)


def make(num_experts=8, group=None, **options):
    make_dispatcher(num_experts, group, **options)


ROUTE = Route(LocalTransport(4), None, torch.zeros(4, 2), torch.zeros(4, 2))
UNFIT = [
    (TypeError, "x must be a torch tensor", {"x": X.numpy()}),
    (DTypeError, "x is int32", {"x": X.to(torch.int32)}),
    (DTypeError, "topk_idx is float32; needed: int64", {"ids": IDS.float()}),
    (DTypeError, "topk_weights is float64; needed: float32", {"weights": WEIGHTS.double()}),
    (ShapeError, r"x has shape \(8,\)", {"x": X[0]}),
    (ShapeError, r"topk_idx has shape \(2,\)", {"ids": IDS[0]}),
    (ShapeError, r"topk_idx has shape \(3, 2\).*\(4, 2\)", {"ids": IDS[:3]}),
    (ShapeError, r"topk_weights has shape \(4, 1\).*\(4, 2\)", {"weights": WEIGHTS[:, :1]}),
]
OUT = (TypeError, "out must be a torch tensor", {"out": X.numpy()})
WIDE = torch.zeros(4, 200)
BLIND = {"wait_for_counts": False, "max_tokens": 9}
INFINITE = float("inf"), float("nan")
ROWS = [
    *rows(dispatch, *UNFIT),
    *rows(combine, OUT, (TypeError, "handle is int; needed: the", {"handle": 12})),
    *rows(
        make,
        *((RoutingError, re.escape(f"num_experts is {bad!r}; "), {"num_experts": bad})
          for bad in (0, -4, True, "4", 4.0, None)),
        (ConfigError, "kind is 'nvshmem'", {"kind": "nvshmem"}),
        (ConfigError, "needs a group", {"kind": "deepep"}),
        (ConfigError, "one rank", {"group": Group(), "kind": "local"}),
        (ConfigError, "wait_for_counts is 'no'; needed: True or False", {"wait_for_counts": "no", "max_tokens": 8}),
        *((ConfigError, rf"max_tokens is {bad!r}; needed with wait_for_",
           {"group": group, "wait_for_counts": False, "max_tokens": bad})
          for group in (None, Group()) for bad in (0, -1, True, 8.0, "8")),
        *((ConfigError, rf"max_load is {bad!r}; needed: a factor", {"group": Group(), "max_load": bad} | BLIND)
          for bad in (0.5, 0, -1, True, "2", *INFINITE)),
        *((ConfigError, rf"^{name} is {bad!r}; needed: True or False", {name: bad})
          for name in ("fp8", "fp8_grad") for bad in ("row", 1, None)),
    ),
    *scenes(
        *((error, words, partial(dispatch_over_deepep, **change)) for error, words, change in (
            *UNFIT,
            (DTypeError, "x is float32; DeepEP carries bfloat16", {}),
            (ShapeError, "x has 4 columns; DeepEP needs a multiple of 8", {"x": X[:, :4].bfloat16()}),
            # Also of gradients: a backward would be too late to say it.
            *((ShapeError, "x has 200 columns; DeepEP carries FP8 rows", {"x": WIDE, name: True})
              for name in ("fp8", "fp8_grad")),
        )),
        *((TypeError, f"handle is {type(bad).__name__}; needed: the", partial(combine_over_deepep, handle=bad))
          for bad in (None, 12)),
        (TypeError, "out must be a torch tensor", partial(combine_over_deepep, X.numpy(), ROUTE)),
        *((RoutingError, re.escape(f"num_experts is {bad!r}; "), partial(deepep, bad))
          for bad in (0, -4, True, "4", 4.0, None)),
        (RoutingError, "num_experts is 9; 2 ranks", lambda: deepep(9)),
    ),
]  # fmt: skip
