"""The Paddle learner, in processes of its own: equal to its PyTorch twin, wired through
`main_grad`, resumable bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from small_run import first_steps, run_program

pytestmark = pytest.mark.paddle

STEPS = """
import json, sys
from small_run import first_steps
print(json.dumps({precision: first_steps(sys.argv[1], precision, sys.argv[2]) for precision in ("fp32", "fp8")}))
"""

RESUME = """
import json, sys
from pathlib import Path
from small_run import run_config
from ernie_compat.checkpoint import load_checkpoint
from ernie_compat.corpus import load_corpus
from ernie_compat.trainer import Trainer
text, out = sys.argv[1], Path(sys.argv[2])
corpus = load_corpus([text])
config = run_config(framework="paddle", compare=True, train={"micro_batches": 2})
whole = Trainer.start(config, corpus, out / "whole")
assert whole.train()
first = Trainer.start(config, corpus, out / "parts")
assert not first.train(should_stop=lambda: first.step >= 3)
second = Trainer.resume(config, corpus, out / "parts")
assert second.train()
a, b = (load_checkpoint(out / name / "checkpoint.npz")[1] for name in ("whole", "parts"))
differing = [name for name in a if a[name].tobytes() != b[name].tobytes()]
print(json.dumps({
    "names": sorted(a) == sorted(b), "arrays": len(a), "differing": differing, "kinds": sorted({n.split("/")[1] for n in a}),
    "whole": [r.loss for r in whole.records], "parts": [r.loss for r in second.records],
}))
"""

WIRING = """
import json, sys
from small_run import SIZES, train_config
from ernie_compat.corpus import load_corpus
from ernie_compat.learner import make_learner
learner = make_learner("paddle", SIZES, train_config(), "fp8", "auto")
corpus = load_corpus([sys.argv[1]])
grads = {name: p.main_grad for name, p in learner.parameters.items()}
before = learner.state()
tokens = corpus.batch(1, 4, SIZES.seq_len, 0)
seen = {}
inner = learner.optimizer.step
def watched():
    seen.update({name: float(p.main_grad.abs().max()) for name, p in learner.parameters.items()})
    inner()
learner.optimizer.step = watched
result = learner.train_step(tokens, 1e-3)
after = learner.state()
idle = {f"layers.1.mlp.experts.{e}." for e, n in enumerate(result.expert_counts[0]) if n == 0}
print(json.dumps({
    "rebound": [n for n, p in learner.parameters.items() if p.main_grad is not grads[n]],
    "grad": [n for n, p in learner.parameters.items() if p.grad is not None],
    "without gradient": [n for n, g in seen.items() if g == 0 and not n.startswith(tuple(idle))],
    "left over": [n for n, p in learner.parameters.items() if float(p.main_grad.abs().max()) != 0],
    "unmoved": [n for n in learner.parameters if (before["weight/" + n] == after["weight/" + n]).all() and not n.startswith(tuple(idle))],
}))
"""


# Relative distance of the twins: of the first step's losses, of its gradient norm, and of the losses
# of four steps. Paddle and PyTorch call different libraries, so they differ as two processors do:
# fp32 2e-7, 3e-7 and 2e-7 over 8 seeds, both frameworks and three instruction sets. One FP8 code that
# rounds to its other neighbour (one seed in 8 has such a code) moves them by 4e-6, 1e-3 and 9e-4.
BOUNDS = {"fp32": (1e-5, 1e-5, 1e-4), "fp8": (1e-4, 1e-2, 1e-2)}


@pytest.mark.trained
def test_twins_agree(text: Path) -> None:
    paddle = run_program(STEPS, "paddle", str(text))
    for precision, (first, norm, later) in BOUNDS.items():
        torch_twin, paddle_twin = first_steps("torch", precision, text), paddle[precision]
        assert paddle_twin["shapes"] == torch_twin["shapes"]
        assert paddle_twin["counts"] == torch_twin["counts"]
        assert paddle_twin["held_out"] == pytest.approx(torch_twin["held_out"], rel=first)
        for name, bound in (("loss", first), ("aux", first), ("z", first), ("norm", norm)):
            assert paddle_twin[name][0] == pytest.approx(torch_twin[name][0], rel=bound), name
        # Later steps see each framework's own optimizer: AdamW, clipping and decay must mean the
        # same in both.
        assert paddle_twin["loss"] == pytest.approx(torch_twin["loss"], rel=later)
        assert max(paddle_twin["loss"]) - min(paddle_twin["loss"]) > 0.1  # 0.87 to 1.10


def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(text: Path, tmp_path: Path) -> None:
    result = run_program(RESUME, str(text), str(tmp_path))
    assert result["names"] and result["arrays"] > 100
    assert result["kinds"] == ["beta1_power", "beta2_power", "moment1", "moment2", "weight"]
    assert result["differing"] == []
    assert result["parts"] == result["whole"] and len(result["whole"]) == 6


def test_every_gradient_arrives_in_the_main_grad_the_optimizer_was_given(text: Path) -> None:
    result = run_program(WIRING, str(text))
    assert result == {name: [] for name in result} and len(result) == 5
