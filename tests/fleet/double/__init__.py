"""PaddleFleet's side of Sonic MoE, written from its contract, in real Paddle on the CPU.

    eager/, lazy/   `paddlefleet_ops` with either loader
    site/           `paddlefleet`: configuration, dispatch and combine, experts, layer, callback
    deep_ep.py      DeepEP's buffer over gloo
    optimizer.py    masters, fused buffers, storage that is given up
    reference.py    experts in plain Paddle
    model.py        a small language model with one such layer, and its trainer

`load()` imports the first two under their real names, and takes them away again.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
NAMES = ("paddlefleet", "paddlefleet_ops")


@contextmanager
def load(loader="eager", install=None):
    """The modules of `paddlefleet`, on a Hopper GPU that Fleet's own engine refuses; `install` is
    called once `paddlefleet_ops` can be imported and before anything of `paddlefleet` is.
    """
    from fleet.double import ops

    assert not of_fleet(), of_fleet()
    before = sys.path[:]
    sys.path[:0] = [str(HERE / loader), str(HERE / "site")]
    try:
        if install is not None:
            install()
        yield SimpleNamespace(
            ops=importlib.import_module("paddlefleet_ops"),
            config=importlib.import_module("paddlefleet.transformer.transformer_config"),
            dw_overlap=importlib.import_module("paddlefleet.transformer.dw_overlap"),
            fused_a2a=importlib.import_module("paddlefleet.transformer.moe.fused_a2a"),
            expert=importlib.import_module("paddlefleet.transformer.moe.moe_expert"),
            layer=importlib.import_module("paddlefleet.transformer.moe.moe_layer"),
            callback=importlib.import_module("paddlefleet.trainer.trainer_callback"),
        )
    finally:
        sys.path[:] = before
        sys.meta_path[:] = [
            finder
            for finder in sys.meta_path
            if not isinstance(finder, ops.HardwareIncompatibleBlocker)
        ]
        for name in of_fleet():
            del sys.modules[name]


def of_fleet():
    """Modules of both packages that this process has imported."""
    return [name for name in sys.modules if name.split(".")[0] in NAMES]
