"""What the activations of GPU tests are tried with: how large z must be, and the parameters that a
layer sets.
"""

from __future__ import annotations

from engine.moe_golden import GAINS

from sonicmoe.enums import ActivationType

# Every parameter of an activation away from its default. At these z lies on both sides of a limit,
# and where tanh bends.
OWN = {
    ActivationType.SWIGLU_OAI: (("alpha", 1.1), ("limit", 3.0)),
    ActivationType.SWIGLU_CLAMP: (("limit", 2.5),),
    ActivationType.SITU_GLU: (("beta", 4.0), ("linear_beta", 2.5)),
}


def gain_of(activation: ActivationType) -> float:
    """The standard deviation of z."""
    return GAINS.get(activation.value, 1.0)
