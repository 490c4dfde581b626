"""Every snippet of ernie_compat/README.md runs, in order, in one Paddle process, and does what its
text says.
"""

from __future__ import annotations

import re

import pytest
from small_run import run_program
from worlds import ROOT

README = (ROOT / "ernie_compat" / "README.md").read_text(encoding="utf-8")
SNIPPET = re.compile(r"^#+ ([^\n]+)\n(?:(?!^#+ ).)*?```python\n(.*?)```", re.MULTILINE | re.DOTALL)

# What surrounds each snippet: the names it assumes, and what must hold afterwards.
BEFORE = {
    "ERNIE-4.5 style: one module per expert": "from readme_standins import *",
    "With a dispatcher of this package": "rig = Rig('auto'); node, num_experts, group = rig.node, EXPERTS, None",
    "PaddleFleet": """
experts = paddle.nn.Layer()
experts.weight1 = paddle.create_parameter([EXPERTS, HIDDEN, 2 * INTERMEDIATE], "float32")
experts.weight2 = paddle.create_parameter([EXPERTS, INTERMEDIATE, HIDDEN], "float32")
pointers = [w.data_ptr() for w in experts.parameters()]
""",
    "The lines before Fleet": """
import sys, tempfile
from fleet import double
ops_folder = tempfile.TemporaryDirectory()
sys.path[:0] = double.write(ops_folder.name)
import sonicmoe.fleet.install as installing
installing._device = lambda reference: "compute capability 9.0, says the test"
""",
    "A loop of your own": """
rig, micro_batches = Rig("auto"), make_batches(3)
model, wanted = rig.model, rig.wanted(micro_batches)
for p in model.parameters():
    del p.main_grad  # the snippet is to give it
""",
    "PaddleFormers trainer": """
trainer = rig = Rig("auto")
wanted = rig.wanted(micro_batches)
""",
    "Pipeline parallel: `train_batch`": """
rig = Rig("auto")
optimizer, pipeline_model, data = rig.optimizer, PipelineParallel(rig), micro_batches
lr_scheduler = scaler = None
wanted, stale = rig.wanted(micro_batches), output(rig, micro_batches)
""",
    "A batch that is skipped": """
rigs = Rig("auto"), Rig("step")
nodes, found_inf = [each.node for each in rigs], True
for each in rigs:
    each.model((micro_batches[0][0] * float("inf"), *micro_batches[0][1:])).backward()
optimizer = SimpleNamespace(clear_grad=lambda: [each.optimizer.clear_grad() for each in rigs])
""",
    "Loss scaling": """
rig = Rig("step")
model, nodes, optimizer = rig.model, [rig.node], rig.optimizer
""",
    "After loading weights": """
model = rig.model
state = {name: value * 2 for name, value in model.state_dict().items()}
""",
}
AFTER = {
    "A process": "assert SonicMoEMlpNode is not None",
    "ERNIE-4.5 style: one module per expert": """
layer = NodeMOELayer(paddle.nn.Linear(HIDDEN, 5, bias_attr=False), [None, Expert(), Expert(), None, Expert()], 3, k=2)
out = layer(paddle.randn([TOKENS, HIDDEN]).astype("bfloat16").astype("float32"))
out.square().mean().backward()
layer.node.step()
assert out.shape == [TOKENS, HIDDEN] and layer.node.n_experts == 3
assert all(p.grad is not None for e in layer.experts if e is not None for p in e.parameters())
""",
    "With a dispatcher of this package": """
x, ids, probs = make_batches(1)[0]
assert (moe_forward(x, ids, probs) == node(x, None, ids, probs)).all()
""",
    "PaddleFleet": """
x, ids, probs = make_batches(1)[0]
for w in experts.parameters():
    w.main_grad = paddle.zeros(w.shape)
node(x, None, ids, probs).sum().backward()
assert [w.data_ptr() for w in experts.parameters()] == pointers
assert all(float(w.main_grad.abs().sum()) > 0 for w in experts.parameters())
assert node.gradient_bytes == 0
""",
    "The lines before Fleet": """
from types import SimpleNamespace as Names
from paddlefleet.transformer.transformer_config import TransformerConfig
from paddlefleet_ops.sonicmoe import run_sonic_moe
assert run_sonic_moe.__module__ == "sonicmoe.fleet.run"
config = TransformerConfig(128, 64, 4, 2, fp8="e4m3")
layer = MoELayer(config, Names(nranks=1))
for w in layer.grouped_gemm_experts.parameters():
    w.main_grad = paddle.zeros(w.shape)
def train():
    x = paddle.randn([8, 128]).astype("bfloat16")
    x.stop_gradient = False
    layer(x).sum().backward()
    assert x.grad.dtype == paddle.bfloat16
from sonicmoe.fleet import carrier
# The next section chooses before the first dispatch.
assert carrier.declared_carrier() is None
""",
    "What is sent, and who says so": """
train()
assert carrier.declared_carrier() is carrier.Carrier.FP32_1X128
try:
    declare_carrier("e8m0_1x32")
    raise SystemExit("a second meaning was taken")
except Exception as error:
    assert "one carrier per process" in str(error), error
fleet.uninstall()
""",
    "A loop of your own": """
same(rig.weights(), wanted)
assert nodes == [rig.node] and rig.node.gradient_bytes == 0
""",
    "PaddleFormers trainer": """
trainer.train(micro_batches)
assert nodes == [rig.node]
assert rig.reduced > 0 and rig.node.gradient_bytes == 0
assert "expert weight gradients are added straight into main_grad" in lines
same(rig.weights(), wanted)
""",
    "Pipeline parallel: `train_batch`": """
assert rig.reduced > 0 and loss > 0 and nodes == [rig.node]
same(rig.weights(), wanted)
assert not np.array_equal(output(rig, micro_batches), stale)
""",
    "A batch that is skipped": """
for each in rigs:
    for batch in micro_batches:
        each.model(batch).backward()
    each.node.step()
    each.optimizer.step()
    same(each.weights(), each.wanted(micro_batches))
""",
    "Loss scaling": """
same(rig.weights(), rig.wanted(micro_batches))
assert not found_inf
# An overflow leaves weights and the next step alone.
before, good = rig.weights(), micro_batches
micro_batches = [(good[0][0] * float("inf"), *good[0][1:]), *good[1:]]
exec(LOSS_SCALING)
assert found_inf
same(rig.weights(), before)
micro_batches = good
exec(LOSS_SCALING)
assert not found_inf and not np.array_equal(rig.weights()[0], before[0])
model = rig.model
fresh = output(rig, good)
""",
    "After loading weights": """
assert not np.array_equal(output(rig, micro_batches), fresh)
""",
}
HELPERS = """
import json, logging, warnings
from types import SimpleNamespace
warnings.filterwarnings("ignore")
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
logging.getLogger("sonicmoe").addHandler(Keep())
logging.getLogger("sonicmoe").setLevel(logging.INFO)
def output(rig, batches):
    x, *routed = batches[0]
    return rig.node(x, None, *routed).numpy()
# Both sides are the same operations in the same order, so the bits are equal on any processor.
def same(actual, wanted):
    for a, b in zip(actual, wanted, strict=True):
        assert np.allclose(a, b, rtol=1e-4, atol=1e-6), float(np.abs(a - b).max())
"""


def snippets():
    return dict(SNIPPET.findall(README))


def test_every_snippet_is_known():
    assert list(snippets()) == list(AFTER)
    assert README.count("```python") == len(AFTER)


@pytest.mark.trained
@pytest.mark.paddle
def test_every_snippet_runs_and_does_what_it_says():
    parts = [HELPERS, f"LOSS_SCALING = {snippets()['Loss scaling']!r}"]
    for name, code in snippets().items():
        parts += [BEFORE.get(name, ""), code, AFTER[name]]
    parts.append('print(json.dumps([line for line in lines if "docs/gradients.md" in line]))')
    assert run_program("\n".join(parts)) == []


def test_named_files_exist():
    named = re.findall(r"`(\w+\.py)`", README)
    assert named and [name for name in named if not (ROOT / "ernie_compat" / name).exists()] == []
