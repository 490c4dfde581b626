"""A nearly idle rank of eight, 48 layers deep, on both GPU engines: six optimizer steps in memory
full of NaN change no bit.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace

import pytest
from node.sentinel_layers import CONFIGS, Scenario, assert_same_bits, train, train_twice

from sonicmoe.jit import no_compile
from sonicmoe.jit_warmup import warmup_jit

pytestmark = pytest.mark.gpu

ENGINES = ("hopper", "bf16")
SIZES = Scenario(CONFIGS["hopper"])


@pytest.fixture(scope="module")
def traces():
    """Both runs of both engines, at full size; nothing compiles meanwhile."""
    for engine in ENGINES:
        sizes = SIZES.experts, SIZES.hidden, SIZES.intermediate
        assert warmup_jit(*sizes, "cuda", config=CONFIGS[engine], jobs=os.cpu_count()).complete
    with no_compile():
        return {engine: train_twice(replace(SIZES, config=CONFIGS[engine])) for engine in ENGINES}


@pytest.mark.parametrize("engine", ENGINES)
def test_same_bits_in_memory_full_of_nan(traces, engine):
    """`train` has looked at every tensor of every step: all finite, zeros where nobody computes,
    idle experts as they were.
    """
    clean, poisoned = traces[engine]
    assert len(clean.losses) == SIZES.steps >= 5
    assert len(clean.made) == SIZES.steps * SIZES.layers * 3
    assert_same_bits(clean, poisoned)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_loss_falls_at_every_step(traces, engine):
    losses = traces[engine][0].losses
    assert all(math.isfinite(loss) for loss in losses) and losses == sorted(losses, reverse=True), (
        losses
    )
    assert losses[-1] < 0.9 * losses[0], losses


def test_engines_train_alike(traces):
    """FP8 beside BF16 from the same weights: the first loss sees the forward alone, the last one
    all that was learnt.
    """
    ours, theirs = (traces[engine][0].losses for engine in ENGINES)
    assert abs(ours[0] / theirs[0] - 1) < 0.01, (ours[0], theirs[0])
    drop, wanted = ours[0] - ours[-1], theirs[0] - theirs[-1]
    assert abs(drop / wanted - 1) < 0.1, (ours, theirs)


def test_the_reference_engine_trains_alike(traces):
    """The emulation on the same GPU, two steps: the second loss has seen every gradient."""
    emulated = train(replace(SIZES, config=CONFIGS["reference"], steps=2)).losses
    for ours, theirs in zip(traces["hopper"][0].losses, emulated, strict=False):
        assert abs(ours / theirs - 1) < 0.01, (ours, theirs)
