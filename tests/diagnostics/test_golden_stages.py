"""The golden of every diagnosis: its gradients are the derivatives of its output."""

import numpy as np
import pytest

from sonicmoe.diagnostics.golden_stages import RowLayout, golden_stages
from sonicmoe.diagnostics.step_dump import StepDump, StepSettings
from sonicmoe.enums import ActivationType, is_glu


@pytest.mark.parametrize("bias", [False, True], ids=["", "biases"])
@pytest.mark.parametrize("activation", list(ActivationType), ids=lambda member: member.value)
def test_gradients_are_the_derivatives_of_the_output(activation, bias):
    """Central differences of <dout, out> in fp64, along a random direction of each input."""
    rng = np.random.default_rng(1)
    width = 8 if is_glu(activation) else 4
    inputs = {
        "x": rng.standard_normal((4, 6)), "w1": rng.standard_normal((3, width, 6)),
        "w2": rng.standard_normal((3, 6, 4)), "probs": rng.uniform(0.1, 1, (4, 2)),
    }  # fmt: skip
    biases = {"b1": rng.standard_normal((3, width)), "b2": rng.standard_normal((3, 6))}
    inputs |= biases if bias else {}
    inputs |= {
        "indices": np.array([[0, 2], [-1, 1], [3, 0], [2, 1]]),
        "dout": rng.standard_normal((4, 6)),
    }
    settings = StepSettings(activation=activation.value, recipe=None)

    def golden(**changed):
        step = StepDump("random", settings, **{**inputs, **changed})
        return golden_stages(step, RowLayout.of(step, alignment=1))

    def loss(**changed):
        return float((golden(**changed)["out"] * inputs["dout"]).sum())

    gradients = golden()
    pairs = {"x": "dx", "w1": "dw1", "w2": "dw2", "probs": "ds"}
    pairs |= {name: f"d{name}" for name in biases if bias}
    for name, gradient in pairs.items():
        direction = rng.standard_normal(inputs[name].shape)
        step = 1e-6 * direction
        slope = (loss(**{name: inputs[name] + step}) - loss(**{name: inputs[name] - step})) / 2e-6
        along = float((gradients[gradient] * direction).sum())
        assert slope == pytest.approx(along, rel=1e-6, abs=1e-8), name
