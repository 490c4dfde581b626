"""Where the node's settings come from, and what it refuses by name. Also that the PyTorch face is not for
Paddle.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext

import numpy as np
import pytest
from engine.moe_golden import assert_same_bits, make_problem, run_engine
from framework import IS_PADDLE, numpy, torch
from node.node_harness import Layer

from sonicmoe.config import SonicMoEConfig, current_config
from sonicmoe.engine.interface import EngineSettings
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.enums import FlushMode
from sonicmoe.errors import FrameworkError, RoutingError
from sonicmoe.gradients.sink import GradientSink
from sonicmoe.layer import plan
from sonicmoe.layer.bound import BoundLayer
from sonicmoe.quant.recipes import RECIPES


class TestConfiguration:
    """An explicit configuration beats the activated one, which beats the environment, which beats
    the default.
    """

    def recipe_used(self, layer):
        return layer.node._plan.in_force().settings.recipe

    def test_environment_decides_where_nobody_else_does(self, set_flags):
        layer = Layer(config=None)
        plain = numpy(layer.call().out)
        set_flags(SONIC_MOE_FP8_MODE="perf", SONIC_MOE_FP8_RECIPE="1x128")
        assert self.recipe_used(layer) is RECIPES["1x128"]
        assert not np.array_equal(numpy(layer.call().out), plain)
        set_flags(SONIC_MOE_FP8_MODE=None)
        np.testing.assert_array_equal(numpy(layer.call().out), plain)

    def test_a_backward_uses_the_settings_of_its_forward(self, set_flags):
        layer = Layer(config=None, main_grad=0.0)
        set_flags(SONIC_MOE_FP8_MODE="perf")
        call = layer.call()
        set_flags(SONIC_MOE_FP8_MODE=None)
        call.backward()
        layer.node.step()
        wanted = run_engine(layer.problem, EngineSettings(recipe=RECIPES["dx256"]))
        assert_same_bits(layer.result(call), wanted)

    def test_validation_follows_the_configuration(self, set_flags):
        problem = make_problem(topk=2)
        problem = problem.but(indices=np.where(np.arange(37)[:, None] == 11, 1, problem.indices))
        layer = Layer(problem, config=None)
        layer.call(counts="none")
        set_flags(SONIC_MOE_VALIDATE_DISPATCH="1")
        with pytest.raises(RoutingError, match="token 11 names expert 1 twice"):
            layer.call(counts="none")

    @pytest.mark.parametrize("mode", list(FlushMode), ids=lambda m: m.value)
    def test_flush_mode_by_name_or_member(self, mode):
        assert Layer(flush=mode.value).node.flush_mode is Layer(flush=mode).node.flush_mode is mode
        assert Layer(flush="backward").node.flush_mode is FlushMode.AUTO

    @pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "activated"])
    def test_is_in_force_in_everything_the_node_does(self, explicit, monkeypatch, tmp_path):
        """The choice of the engine, weight caches, both passes and the flush load kernels: from the
        node's own cache directory, and under its own ban on compiling.
        """
        seen = {}

        def watch(owner, name):
            original = getattr(owner, name)

            def spy(*arguments, **options):
                seen[name] = current_config().cache_dir, current_config().forbid_compile
                return original(*arguments, **options)

            monkeypatch.setattr(owner, name, spy)

        of_calls = "forward", "backward_dx", "backward_dw"
        for name in of_calls:
            watch(ReferenceEngine, name)
        watch(plan, "ready_engine")
        watch(BoundLayer, "_read_at")
        watch(GradientSink, "close")
        watch(GradientSink, "flush")
        config = SonicMoEConfig(cache_dir=tmp_path, forbid_compile=True)
        layer = Layer(config=config if explicit else None, flush="step")
        with nullcontext() if explicit else config.activate():
            call = layer.call()
        call.backward()
        with nullcontext() if explicit else config.activate():
            layer.node.step()
        everywhere = *of_calls, "ready_engine", "_read_at", "close", "flush"
        assert seen == dict.fromkeys(everywhere, (tmp_path, True))
        seen.clear()
        with nullcontext() if explicit else config.activate():
            layer.node.prequantize_weights()
        assert "_read_at" in seen and set(seen.values()) == {(tmp_path, True)}


@pytest.mark.parametrize(
    ("sizes", "dtype", "words"),
    [
        ((40, 48), torch.bfloat16, "not hopper: H is 40 and I is 48, and"),
        ((64, 64), torch.float16, "not hopper: tokens are float16, and it"),
        ((64, 64), torch.bfloat16, None),
    ],
)
def test_fp8_that_no_gpu_computes_is_said_once(sizes, dtype, words, caplog):
    caplog.set_level(logging.WARNING, logger="sonicmoe")
    hidden, inner = sizes
    problem = make_problem(hidden=hidden, intermediate=inner)
    for config in (SonicMoEConfig(), SonicMoEConfig(fp8_mode="perf")):
        layer = Layer(problem, dtype=dtype, config=config)
        for _ in range(2):
            layer.call(x_grad=False, probs_grad=False)
        said = [r.getMessage() for r in caplog.records if "emulates FP8, but" in r.getMessage()]
        assert len(said) == (config.fp8_mode is not None and words is not None)
        assert not said or words in said[0]


@pytest.mark.skipif(not IS_PADDLE, reason="Paddle's proxy for PyTorch")
@pytest.mark.parametrize(
    "statement",
    [
        "from sonicmoe import MoE",
        "import sonicmoe; sonicmoe.MoE",
        "from sonicmoe import moe_general_routing_inputs",
        "import sonicmoe.moe",
        "import sonicmoe.functional",
    ],
)
def test_the_pytorch_face_is_not_for_paddle_and_says_which_one_is(statement):
    words = "PyTorch face.*sonicmoe.ernie_compat.SonicMoEMlpNode"
    for _ in range(2):
        with pytest.raises(FrameworkError, match=words):
            exec(statement)
