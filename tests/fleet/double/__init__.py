"""PaddleFleet's side of Sonic MoE, written from its contract, in real Paddle on the CPU.

    site/           `paddlefleet`: configuration, dispatch and combine, experts, layer, callback
    deep_ep.py      DeepEP's buffer over gloo
    optimizer.py    masters, fused buffers, storage that is given up
    reference.py    experts in plain Paddle
    model.py        a small language model with one such layer, and its trainer

`load()` imports the first and `paddlefleet_ops` with either loader (`small_fleet.py`) under their
real names, and takes them away again.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from fleet import small_fleet

HERE = Path(__file__).parent
# What Fleet's ops do besides as they are imported: DeepEP, and one more library under Paddle's proxy,
# which is then switched off for everybody.
BESIDES = """
import paddle
from fleet.double import deep_ep
sys.modules["paddlefleet_ops.deep_ep"] = deep_ep
paddle.enable_compat(scope={"triton"}, silent=True)
paddle.disable_compat()


def is_deep_ep_available():
    return True
"""


def write_ops(folder, loader="eager"):
    """`paddlefleet_ops` as a file below `folder`, which is returned."""
    package = Path(folder, "paddlefleet_ops")
    package.mkdir()
    (package / "__init__.py").write_text(small_fleet.SOURCES[loader] + BESIDES)
    return str(folder)


@contextmanager
def load(loader="eager", install=None):
    """The modules of `paddlefleet`, on a Hopper GPU that Fleet's own engine refuses; `install` is
    called once `paddlefleet_ops` can be imported and before anything of `paddlefleet` is.
    """
    assert not small_fleet.loaded(), small_fleet.loaded()
    before, held = sys.path[:], tempfile.TemporaryDirectory()
    sys.path[:0] = [write_ops(held.name, loader), str(HERE / "site")]
    importlib.invalidate_caches()
    try:
        if install is not None:
            install()
        yield SimpleNamespace(
            ops=importlib.import_module("paddlefleet_ops"),
            config=importlib.import_module("paddlefleet.transformer.transformer_config"),
            fused_a2a=importlib.import_module("paddlefleet.transformer.moe.fused_a2a"),
            expert=importlib.import_module("paddlefleet.transformer.moe.moe_expert"),
            layer=importlib.import_module("paddlefleet.transformer.moe.moe_layer"),
            callback=importlib.import_module("paddlefleet.trainer.trainer_callback"),
        )
    finally:
        held.cleanup()
        sys.path[:] = before
        blocks = [one for one in sys.meta_path if type(one).__module__ == "paddlefleet_ops"]
        sys.meta_path[:] = [one for one in sys.meta_path if one not in blocks]
        for name in small_fleet.loaded():
            del sys.modules[name]
