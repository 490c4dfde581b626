"""The library's own operations under autograd: `apply` runs a `DifferentiableCall` (`protocol.py`)
through the bridge of the framework in use.
"""

from ..interop import IS_PADDLE
from .protocol import DifferentiableCall, refuse_second_derivative

if IS_PADDLE:
    from .paddle_bridge import apply
else:
    from .torch_bridge import apply

__all__ = ["DifferentiableCall", "apply", "refuse_second_derivative"]
