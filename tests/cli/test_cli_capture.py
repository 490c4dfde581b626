"""Cases for `numerics --captured` out of a training run."""

from __future__ import annotations

import framework  # noqa: F401  before anything of sonicmoe
import numpy as np

from ernie_compat.model_config import ModelConfig
from sonicmoe.cli.capture import capture_from_training
from sonicmoe.diagnostics.cases import load_case


def test_training_yields_one_case_per_moe_layer(tmp_path):
    model = ModelConfig(hidden_size=32, intermediate_size=16, num_layers=3, num_heads=2, seq_len=16)
    seen = []
    paths = capture_from_training(2, tmp_path, seen.append, model=model, batch=2)
    assert seen == [1, 2]
    cases = [load_case(path) for path in paths]
    assert [case.name for case in cases] == ["step 2, layer 1", "step 2, layer 2"]
    for case in cases:
        assert case.x.shape == (32, 32)
        assert case.w1.shape == (8, 32, 32)
        assert all(
            np.abs(getattr(case, name)).max() > 0 for name in ("x", "w1", "w2", "dout", "probs")
        )
