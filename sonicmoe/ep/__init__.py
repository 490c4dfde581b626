"""Expert parallelism: carry tokens to the ranks that hold their experts, and the results back.

    dispatcher = make_dispatcher(num_experts, group)          # the fastest that serves the group
    tokens = dispatcher.dispatch(x, topk_idx, topk_weights)   # global expert ids in, local ids out
    out = node(tokens.x, tokens.tokens_per_expert, tokens.indices, tokens.probs)
    y = dispatcher.combine(out, tokens.handle)                # [T, H], the sum over ranks

With `fp8=True` tokens travel quantised, and the node takes two arguments more:
`x_scale=tokens.x_scale, dx_to=tokens.dx_to`. With `fp8_grad=True` the gradients of its output do,
and it takes `dout_source=tokens.dout_source`.

Every dispatcher keeps one contract (`interface.Dispatched`) and is differentiable with DeepEP's
algebra: the backward of dispatch is a combine of dx that carries dprobs, the backward of combine is
a cached dispatch of dout.
"""

from .. import interop  # noqa: F401  first: where no framework is reachable, it says what to do
from .dispatcher import Dispatcher, LocalDispatcher
from .interface import Dispatched, Received, Transport
from .select import make_dispatcher

__all__ = [
    "Dispatched",
    "Dispatcher",
    "LocalDispatcher",
    "Received",
    "Transport",
    "make_dispatcher",
]
