"""AdamW with fp32 masters over one fused buffer per colour, as Paddle's sharding optimizer keeps
them: parameters and `main_grad` are views, and the bf16 storage of a colour can be given up.

The views are Paddle's own (`ShardingGradView`), because the order of its calls is what the experts
have to live with.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import paddle
from paddle.distributed.fleet.utils.tensor_fusion_helper import ShardingGradView

ALIGNMENT = 64  # elements
BETAS = 0.9, 0.95


class Fused:
    """Parameters of one colour and one dtype in one buffer."""

    def __init__(self, parameters):
        self.parameters = parameters
        sizes = [-(-int(np.prod(p.shape)) // ALIGNMENT) * ALIGNMENT for p in parameters]
        *starts, total = np.cumsum([0, *sizes]).tolist()
        self.storage = paddle.zeros([total], dtype=parameters[0].dtype)
        self.grad = paddle.zeros([total], dtype="float32")
        self.views = [
            ShardingGradView(p, self.storage, self.grad, start, size, 1, 0, use_main_grad=True)
            for p, start, size in zip(parameters, starts, sizes, strict=True)
        ]
        self.master = None
        self.moments = [paddle.zeros([total]) for _ in range(2)]

    def keep_master(self):
        if self.master is None:
            self.master = self.storage.astype("float32")

    def free(self):
        self.storage._clear_to_zero_allocation()
        for view in self.views:
            view._clear_param_buffer()

    def restore(self):
        """New memory with anything in it."""
        if self.storage._is_initialized():
            return
        fresh = paddle.full_like(self.storage, float("nan"))
        fresh._share_buffer_to(self.storage)
        for view in self.views:
            view._reset_param_buffer(fresh)


class ShardingOptimizer:
    """`_inner_opt._parameter_list` and `_master_weights` are what callbacks look at."""

    def __init__(self, parameters, lr):
        parameters = list(parameters)
        self._inner_opt = SimpleNamespace(_parameter_list=parameters)
        self._master_weights = {}
        self.lr, self.steps = lr, 0
        colours = {}
        for parameter in parameters:
            colour = getattr(parameter, "color", None)
            name = colour["color"] if isinstance(colour, dict) else None
            colours.setdefault((name, parameter.dtype), []).append(parameter)
        self.fused = {key: Fused(held) for key, held in colours.items()}
        # What the engine does not write straight into `main_grad` arrives by autograd's hook.
        for parameter in parameters:
            parameter._register_grad_hook(into_main_grad(parameter))

    @paddle.no_grad()
    def clear_param_storage(self, colour):
        for (name, _), fused in self.fused.items():
            if name == colour:
                self._keep_master(fused)
                fused.free()

    def _keep_master(self, fused):
        fused.keep_master()
        self._master_weights.update({p.name: fused.master for p in fused.parameters})

    @paddle.no_grad()
    def step(self):
        self.steps += 1
        for fused in self.fused.values():
            self._keep_master(fused)
            fused.restore()
            corrected, values = [], (fused.grad, fused.grad.square())
            for moment, beta, value in zip(fused.moments, BETAS, values, strict=True):
                moment.scale_(beta).add_(value * (1 - beta))
                corrected.append(moment / (1 - beta**self.steps))
            fused.master.subtract_(self.lr * corrected[0] / (corrected[1].sqrt() + 1e-8))
            paddle.assign(fused.master.astype(fused.storage.dtype), output=fused.storage)

    @paddle.no_grad()
    def clear_grad(self):
        for fused in self.fused.values():
            fused.grad.zero_()


def into_main_grad(parameter):
    """A hook that adds what autograd brings."""

    @paddle.no_grad()
    def hook(gradient):
        if gradient is not None and gradient._is_initialized():
            parameter.main_grad.add_(gradient.astype("float32"))
            gradient._clear_data()

    return hook
