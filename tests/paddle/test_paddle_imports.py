"""Import orders and installations, each in a process of its own: an interpreter imports a framework
once.
"""

from __future__ import annotations

import importlib.util
import os
import textwrap
from pathlib import Path

import processes
import pytest

ROOT = Path(__file__).parents[2]
HAS_TORCH = importlib.util.find_spec("torch") is not None
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="PyTorch is not installed")

# The path finder of an interpreter that has no PyTorch: it finds everything else, and Paddle's own
# finder stays in charge of its proxy.
WITHOUT_TORCH = """
import sys
from importlib.machinery import PathFinder

class NoTorch:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return None if name.split(".")[0] == "torch" else PathFinder.find_spec(name, path, target)
    find_distributions = PathFinder.find_distributions

sys.meta_path[sys.meta_path.index(PathFinder)] = NoTorch
"""

# One forward and backward of a small node against numpy.
WORKS = """
import sys
import numpy as np

def forget():
    for name in [name for name in sys.modules if name.split(".")[0] == "sonicmoe"]:
        del sys.modules[name]

def node_works(paddle):
    from sonicmoe.ernie_compat import SonicMoEMlpNode
    from sonicmoe import interop
    assert interop.FRAMEWORK == "paddle"
    class Expert(paddle.nn.Layer):
        def __init__(self):
            super().__init__()
            self.up_gate_proj = paddle.nn.Linear(8, 12, bias_attr=False)
            self.down_proj = paddle.nn.Linear(6, 8, bias_attr=False)
    expert = Expert()
    node = SonicMoEMlpNode([expert], 1, 8, 6)
    x = paddle.to_tensor(np.linspace(-1, 1, 24, dtype="float32").reshape(3, 8), stop_gradient=False)
    indices = paddle.to_tensor(np.array([[0, -1], [-1, -1], [-1, 0]]))
    probs = paddle.full([3, 2], 0.5)
    out = node(x, [2], indices, probs)
    out.sum().backward()
    node.step()
    up, down = expert.up_gate_proj.weight.numpy(), expert.down_proj.weight.numpy()
    z = x.numpy() @ up
    y = z[:, :6] / (1 + np.exp(-z[:, :6])) * z[:, 6:]
    wanted = 0.5 * (y @ down) * np.array([[1], [0], [1]])
    assert np.allclose(out.numpy(), wanted, atol=1e-6), (out.numpy(), wanted)
    assert np.allclose(expert.down_proj.weight.grad.numpy(), 0.5 * (y[0] + y[2])[:, None], atol=1e-6)
    return node, x, indices, probs

def refuses(error, words, call, *arguments):
    try:
        call(*arguments)
    except error as raised:
        assert all(word in str(raised) for word in words), str(raised)
        return
    raise AssertionError(f"not refused: {words}")
"""
BESIDE = """
from types import SimpleNamespace

def works_beside(paddle, torch):
    paddle.enable_compat(scope={"sonicmoe"}, silent=True)
    node, x, indices, probs = node_works(paddle)
    assert sys.modules["torch"] is torch and torch.Tensor is not paddle.Tensor
    assert (torch.ones(2).requires_grad_() * 2).sum().item() == 4
    from sonicmoe.errors import FrameworkError
    theirs = torch.zeros(3, 8)
    refuses(FrameworkError, ["x is a torch tensor", "Paddle"], node, theirs, [2], indices, probs)
    refuses(FrameworkError, ["dispatched_probs is a torch tensor"], node, x, [2], indices, torch.zeros(3, 2))
    from sonicmoe.ernie_compat import SonicMoEMlpNode
    pair = torch.nn.Linear(8, 12, bias=False), torch.nn.Linear(6, 8, bias=False)
    expert = SimpleNamespace(up_gate_proj=pair[0], down_proj=pair[1])
    refuses(FrameworkError, ["experts[0].up_gate_proj.weight is a torch tensor"], SonicMoEMlpNode, [expert], 1, 8, 6)
"""
# `enable_compat()` without a scope, also after the other scopes that a training framework enables.
GLOBALLY = """
paddle.enable_compat(scope={"quack", "triton"}, silent=True)
paddle.enable_compat(silent=True)
node_works(paddle)
"""


def python(*parts, **environment):
    """Run the parts as one script; its output is the failure message."""
    script = "\n".join(textwrap.dedent(part) for part in parts) + "\nprint('done')\n"
    env = {k: value for k, value in os.environ.items() if not k.startswith(("SONIC", "COV_"))}
    env |= {"PYTHONPATH": str(ROOT), "GLOG_minloglevel": "3", "OMP_NUM_THREADS": "1", **environment}
    done = processes.run(["-c", script], env, ROOT, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("done\n"), f"{done.stdout}\n{done.stderr}"


@needs_torch
def test_proxies_beside_real_torch():
    """The package runs on Paddle, everything else keeps the real PyTorch, and their tensors are told
    apart. Then the same under a global proxy.
    """
    python(
        WORKS,
        BESIDE,
        """
        import paddle, torch
        assert torch.Tensor is not paddle.Tensor
        works_beside(paddle, torch)
        forget()
        """,
        GLOBALLY,
    )


@needs_torch
def test_package_imported_with_torch_explains_itself_to_paddle_users():
    """Nobody enabled the proxy: the package took PyTorch and says what to do when Paddle objects
    arrive. Forgotten, and imported under the proxy, it runs on Paddle in this order of imports too.
    """
    python(
        WORKS,
        BESIDE,
        """
        import torch, paddle
        from sonicmoe import interop
        from sonicmoe.errors import FrameworkError
        from sonicmoe.ernie_compat import SonicMoEMlpNode
        assert interop.FRAMEWORK == "torch"
        how = ["sonicmoe was imported with PyTorch", 'enable_compat(scope={"sonicmoe"}']
        pair = lambda make: SimpleNamespace(up_gate_proj=make(8, 12), down_proj=make(6, 8))
        refuses(FrameworkError, how, SonicMoEMlpNode, [pair(paddle.nn.Linear)], 1, 8, 6)
        flipped = lambda inputs, outputs: torch.nn.Linear(outputs, inputs, bias=False)
        node = SonicMoEMlpNode([pair(flipped)], 1, 8, 6)
        ids, probs = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
        refuses(FrameworkError, ["x is a paddle tensor", *how], node, paddle.zeros([3, 8]), [3], ids, probs)
        refuses(FrameworkError, ["dispatched_probs is a paddle tensor", *how], node, torch.zeros(3, 8), [3], ids, paddle.ones([3, 1]))
        assert node(torch.ones(3, 8), [3], ids, probs).shape == (3, 8)
        paddle.enable_compat(scope={"sonicmoe"}, silent=True)
        refuses(FrameworkError, how, SonicMoEMlpNode, [pair(paddle.nn.Linear)], 1, 8, 6)
        forget()
        works_beside(paddle, torch)
        """,
    )


def test_scoped_proxy_with_a_blocked_torch_module():
    """PaddleFormers, imported first, puts None where torch would be."""
    python(
        WITHOUT_TORCH,
        WORKS,
        """
        sys.modules["torch"] = None
        import paddle
        paddle.enable_compat(scope={"sonicmoe"}, silent=True)
        node_works(paddle)
        """,
    )


def test_without_torch():
    """One process, the package forgotten between the cases: no framework at all, no proxy enabled, a
    Paddle from before the proxy; a scoped proxy, and the trap of PaddleFormers, which must not matter
    to a package whose imports are done; a global proxy.
    """
    python(
        WITHOUT_TORCH,
        WORKS,
        """
        import importlib.util
        assert importlib.util.find_spec("torch") is None

        def load():
            import sonicmoe.ernie_compat

        def refused_with(*words):
            forget()
            refuses(ImportError, words, load)

        refused_with("needs PyTorch", "pip install 'sonicmoe[torch", "[paddle]", "enable_compat")
        import paddle
        refused_with("torch proxy is not enabled", 'paddle.enable_compat(scope={"sonicmoe"}, silent=True)', "before the first")
        kept, version = paddle.enable_compat, paddle.__version__
        del paddle.enable_compat
        paddle.__version__ = "3.2.2"
        refused_with("paddle 3.2.2 has no torch proxy", "3.3.0")
        paddle.enable_compat, paddle.__version__ = kept, version
        forget()
        paddle.enable_compat(scope={"sonicmoe"}, silent=True)
        assert importlib.util.find_spec("torch") is None
        node, x, indices, probs = node_works(paddle)
        assert "torch" not in sys.modules, "the proxy leaked into the process"
        sys.modules["torch"] = None
        assert np.isfinite(node(x, [2], indices, probs).numpy()).all()
        node.step()
        node.warmup()
        del sys.modules["torch"]
        forget()
        """,
        GLOBALLY,
    )
