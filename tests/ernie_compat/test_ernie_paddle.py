"""The Paddle learner beside its PyTorch twin: equal, resumable bit for bit. One process of Paddle does
all of its part.
"""

from __future__ import annotations

import pytest
from small_run import first_steps, run_program

PROGRAM = """
import json, sys
from pathlib import Path
from small_run import first_steps, run_config
text, out = sys.argv[1], Path(sys.argv[2])
found = {"steps": first_steps("paddle", text)}

from ernie_compat.checkpoint import load_checkpoint
from ernie_compat.corpus import load_corpus
from ernie_compat.trainer import Trainer
corpus = load_corpus([text])
config = run_config(framework="paddle", compare=True, train={"micro_batches": 2})
whole = Trainer.start(config, corpus, out / "whole")
assert whole.train()
first = Trainer.start(config, corpus, out / "parts")
assert not first.train(should_stop=lambda: first.step >= 3)
second = Trainer.resume(config, corpus, out / "parts")
assert second.train()
a, b = (load_checkpoint(out / name / "checkpoint.npz")[1] for name in ("whole", "parts"))
found["resumed"] = {
    "names": sorted(a) == sorted(b), "arrays": len(a), "kinds": sorted({n.split("/")[1] for n in a}),
    "differing": [name for name in a if a[name].tobytes() != b[name].tobytes()],
    "whole": [r.loss for r in whole.records], "parts": [r.loss for r in second.records],
}

print(json.dumps(found))
"""
# Relative distance of the twins: of the first step's losses, of its gradient norm, and of the losses
# of four steps. Paddle and PyTorch call different libraries, so they differ as two processors do. One
# FP8 code that rounds to its other neighbour (one seed in 8 has such a code) moves them by 4e-6, 1e-3
# and 9e-4.
FIRST, NORM, LATER = 1e-4, 1e-2, 1e-2


@pytest.fixture(scope="module")
def of_paddle(text, tmp_path_factory):
    return run_program(PROGRAM, str(text), str(tmp_path_factory.mktemp("runs")))


@pytest.mark.trained
@pytest.mark.paddle
def test_twins_agree(of_paddle, text):
    """Both train in FP8; test_ernie_ranks.py has two ranks of Paddle beside PyTorch in fp32."""
    ours, twin = of_paddle["steps"], first_steps("torch", text)
    assert (ours["shapes"], ours["counts"]) == (twin["shapes"], twin["counts"])
    assert ours["held_out"] == pytest.approx(twin["held_out"], rel=FIRST)
    for name, bound in (("loss", FIRST), ("aux", FIRST), ("z", FIRST), ("norm", NORM)):
        assert ours[name][0] == pytest.approx(twin[name][0], rel=bound), name
    # Later steps see each framework's own optimizer: AdamW, clipping and decay must mean the same
    # in both.
    assert ours["loss"] == pytest.approx(twin["loss"], rel=LATER)
    assert max(ours["loss"]) - min(ours["loss"]) > 0.1  # 0.87 to 1.10


@pytest.mark.paddle
def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(of_paddle):
    result = of_paddle["resumed"]
    assert result["names"] and result["arrays"] > 100
    assert result["kinds"] == ["beta1_power", "beta2_power", "moment1", "moment2", "weight"]
    assert result["differing"] == []
    assert result["parts"] == result["whole"] and len(result["whole"]) == 6
