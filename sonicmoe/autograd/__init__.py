"""The library's own operations under autograd: `apply` runs a `DifferentiableCall` (`protocol.py`)
through the bridge of the framework in use.
"""

from ..interop import IS_PADDLE
from .protocol import DifferentiableCall, refuse_second_derivative

if IS_PADDLE:
    from .paddle_bridge import apply, eagerly, refuse_transforms
else:
    from .torch_bridge import apply, eagerly, refuse_transforms

__all__ = [
    "DifferentiableCall",
    "apply",
    "eagerly",
    "refuse_second_derivative",
    "refuse_transforms",
]
