"""Train experts under Paddle: the node, fp32 main_grad, AdamW; save and continue.

python examples/train_paddle.py --save run
python examples/train_paddle.py --load run --steps 40
"""

import argparse
from pathlib import Path

import numpy as np
import paddle

paddle.enable_compat(scope={"sonicmoe"}, silent=True)  # before the first import of sonicmoe
from paddle.distributed.fleet.utils.mix_precision_utils import (  # noqa: E402
    MixPrecisionLayer,
    MixPrecisionOptimizer,
)

from sonicmoe import SonicMoEConfig  # noqa: E402
from sonicmoe.ernie_compat import SonicMoEMlpNode  # noqa: E402

E, K, H, I = 4, 2, 128, 128  # experts, experts per token, hidden and intermediate size


class Expert(paddle.nn.Layer):
    """ERNIE's expert: gate and up in one weight, gate first."""

    def __init__(self):
        super().__init__()
        self.up_gate_proj = paddle.nn.Linear(H, 2 * I, bias_attr=False)
        self.down_proj = paddle.nn.Linear(I, H, bias_attr=False)


class MoELayer(paddle.nn.Layer):
    """A router, and a node over the experts. The node is no Layer: it adds nothing to the
    state_dict.
    """

    def __init__(self):
        super().__init__()
        self.gate = paddle.nn.Linear(H, E, bias_attr=False)
        self.experts = paddle.nn.LayerList([Expert() for _ in range(E)])
        self.node = SonicMoEMlpNode(self.experts, E, H, I, config=SonicMoEConfig(fp8_mode="perf"))

    def forward(self, x):
        probs, indices = paddle.topk(paddle.nn.functional.softmax(self.gate(x)), K)
        return self.node(x.astype("bfloat16"), None, indices, probs).astype("float32")


def part_of(state, prefix):
    """The entries whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): state[name] for name in state if name.startswith(prefix)}


parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
parser.add_argument("--steps", type=int, default=20, help="step to train to")
parser.add_argument("--micro-batches", type=int, default=2)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--save", type=Path, help="directory for weights and optimizer")
parser.add_argument("--load", type=Path, help="directory to continue from")
arguments = parser.parse_args()

paddle.seed(0)
model = MoELayer()  # fp32 parameters are their own master weights
teacher = paddle.randn([H, H]) / H**0.5
wrapped = MixPrecisionLayer(model, dtype="bfloat16")  # gives every parameter a main_grad
adamw = paddle.optimizer.AdamW(arguments.lr, parameters=model.parameters())
optimizer = MixPrecisionOptimizer(adamw)  # reads main_grad; a plain AdamW would not
first = 0
if arguments.load:
    with np.load(arguments.load / "training.npz", allow_pickle=False) as saved:
        state = {name: paddle.to_tensor(saved[name]) for name in saved.files}
    first = int(state.pop("step"))
    model.set_state_dict(part_of(state, "model/"))
    adamw.set_state_dict(part_of(state, "optimizer/"))
    model.node.invalidate_caches()  # weights changed outside of an optimizer step

for step in range(first, arguments.steps):
    total = 0.0
    for micro in range(arguments.micro_batches):
        paddle.seed(1 + step * arguments.micro_batches + micro)
        x = paddle.randn([256, H])
        error = (wrapped(x) - paddle.tanh(x @ teacher)).square().mean()
        (error / arguments.micro_batches).backward()
        total += float(error) / arguments.micro_batches
    model.node.step()  # after the last backward: that place is right in every mode
    optimizer.step()
    optimizer.clear_grad()
    if step % 5 == 0 or step == arguments.steps - 1:
        print(f"step {step:2}: error {total:.5f}")

if arguments.save:
    state = {f"model/{name}": value.numpy() for name, value in model.state_dict().items()}
    moments = adamw.state_dict()
    state |= {f"optimizer/{name}": value.numpy() for name, value in moments.items()}
    arguments.save.mkdir(parents=True, exist_ok=True)
    np.savez(arguments.save / "training.npz", step=arguments.steps, **state)
