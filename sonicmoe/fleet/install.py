"""This package in place of the engine that PaddleFleet ships, where that one cannot run.

import paddle
paddle.enable_compat(scope={"sonicmoe"}, silent=True)
from sonicmoe.ernie_compat import fleet
fleet.install()
import paddlefleet    # only now
"""

from __future__ import annotations

import importlib
import re
import sys
import threading
from collections.abc import MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from .. import __version__
from ..errors import EngineUnavailableError, FrameworkError
from ..interop import HOW_TO_ENABLE, IS_PADDLE, torch
from ..log import logger
from .symbols import MOUNT, SYMBOLS, MountedModule, mounted_modules

OPS = "paddlefleet_ops"
MINIMUM_PYTHON = (3, 11)
HOPPER = (9, 0)
_AVAILABLE, _FLAG, _LOADER = "is_sonic_moe_available", "_SONIC_MOE_AVAILABLE", "load_sonic_moe"
_MESSAGES = "blocked_import_messages"
# Modules of Fleet that ask for the engine, or bind its names, when they are imported.
_READERS = ("fused_a2a", "fusion_layer_utils", "moe_expert", "moe_layer", "token_dispatcher")
_BEFORE_FLEET = "call install() before anything of paddlefleet is imported"
_NOTHING = object()  # None may be what stood there


@dataclass
class _Installation:
    line: str
    ops: ModuleType
    top: MountedModule
    undo: ExitStack

    def holds(self) -> bool:
        """Whether both modules are still the imported ones."""
        return sys.modules.get(OPS) is self.ops and sys.modules.get(MOUNT) is self.top


_LOCK = threading.RLock()
_installed: _Installation | None = None


def install(*, reference: bool = False) -> str:
    """Mount this package as `paddlefleet_ops.sonicmoe` and have `is_sonic_moe_available()` say yes.

    Call it once per process, after `paddle.enable_compat` and before anything of `paddlefleet` is
    imported; it imports `paddlefleet_ops`. A later call changes nothing. Where it raises, nothing
    has changed. `uninstall` takes it back.

    Args:
        reference: also where no GPU of compute capability 9.0 is. The reference engine then
            computes, which is slow: for tests.

    Returns:
        What it did, in one line, which the log has too.

    Raises:
        EngineUnavailableError: it would break something here; the message says what.
        FrameworkError: this package, or a part of it, was imported with PyTorch.
    """
    global _installed
    with _LOCK:
        if _installed is not None:
            if _installed.holds():
                return _installed.line
            # Somebody has removed the modules. What is left of that installation goes first.
            _installed.undo.close()
            _installed = None
        # Everything that can be refused is refused before anything is changed.
        _require_python()
        device = _device(reference)
        ops = _import_ops()
        loader = _require_free(ops)
        _keep_compat()  # first: what is mounted is imported now
        with ExitStack() as undo:  # where one of these raises, what came before is undone
            modules = mounted_modules()
            _mount(ops, modules, undo)
            _open_gates(ops, modules[MOUNT], undo)
            _verify(ops, modules)
            line = (
                f"PaddleFleet: {MOUNT} is sonicmoe {__version__} ({len(modules)} modules, "
                f"{len(SYMBOLS)} names; {loader} loader) on {device}; {_AVAILABLE}() is True"
            )
            _installed = _Installation(line, ops, modules[MOUNT], undo.pop_all())
    logger.info("%s", line)
    return line


def uninstall() -> str:
    """Take back what `install` did; without an installation nothing happens.

    Modules of Fleet that were imported meanwhile keep the names that they bound; the line names
    them.

    Returns:
        What it did, in one line, which the log has too.
    """
    global _installed
    with _LOCK:
        if _installed is None:
            return "PaddleFleet: nothing was installed"
        _installed.undo.close()
        _installed = None
        line = f"PaddleFleet: {MOUNT} is no longer sonicmoe"
        if kept := sorted(name for name, _ in _fleet_modules()):
            line += f"; {', '.join(kept)} keep what they imported"
    logger.info("%s", line)
    return line


def _require_python() -> None:
    if sys.version_info[:2] < MINIMUM_PYTHON:
        found, needed = (".".join(map(str, v)) for v in (sys.version_info[:2], MINIMUM_PYTHON))
        raise EngineUnavailableError(f"this is Python {found}; needed: {needed} or newer")


def _device(reference: bool) -> str:
    """What will compute, in words."""
    if not IS_PADDLE:
        came = "sonicmoe was imported with PyTorch, and PaddleFleet needs it with Paddle"
        raise FrameworkError(f"{came}: {HOW_TO_ENABLE}")
    # This module imports no Paddle of its own: under PyTorch there may be none.
    paddle = sys.modules["paddle"]
    found = "no GPU is here"
    if paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count():
        capability = tuple(paddle.device.cuda.get_device_capability())
        if capability == HOPPER:
            return "compute capability 9.0"
        found = f"the GPU has compute capability {'.'.join(map(str, capability))}"
    if reference:
        return f"the reference engine ({found})"
    way_out = "install(reference=True) has the reference engine compute, for tests"
    raise EngineUnavailableError(f"{found}, and the FP8 engine needs 9.0 (Hopper); {way_out}")


def _import_ops() -> ModuleType:
    try:
        return importlib.import_module(OPS)
    except ModuleNotFoundError as error:
        # Another module is missing: that is an error of Fleet's own installation.
        if error.name != OPS:
            raise
        what = f"there is no {OPS}, the package of PaddleFleet that this one is mounted in"
        raise EngineUnavailableError(f"{what}; needed: PaddleFleet installed") from error


def _require_free(ops: ModuleType) -> str:
    """The kind of Fleet's loader; raises where installing would break something."""
    here = vars(ops)
    lazy = callable(here.get(_LOADER))
    if not callable(here.get(_AVAILABLE)) or not (lazy or isinstance(here.get(_MESSAGES), dict)):
        unknown = f"{OPS} {here.get('__version__', 'without a version')} is not known"
        needed = f"it needs {_AVAILABLE}() and {_LOADER}() or {_MESSAGES}"
        raise EngineUnavailableError(f"{unknown} to this package: {needed}")
    # Modules that bound names of another engine would go on calling it.
    others = [name for name in sys.modules if name == MOUNT or name.startswith(f"{MOUNT}.")]
    if others or "sonicmoe" in here:
        raise EngineUnavailableError(
            f"another engine is imported as {MOUNT} already; {_BEFORE_FLEET}, or use that engine"
        )
    if here[_AVAILABLE]():
        raise EngineUnavailableError(
            f"{OPS}.{_AVAILABLE}() is True already: PaddleFleet's own engine runs on this GPU"
        )
    # Eager Fleet asks once, as it is imported; lazy Fleet asks when a layer is made.
    if late := [name for name, module in _fleet_modules() if not lazy or _is_bound(module, here)]:
        raise EngineUnavailableError(
            f"{', '.join(sorted(late))} imported already, without an engine; {_BEFORE_FLEET}"
        )
    return "lazy" if lazy else "eager"


def _fleet_modules() -> list[tuple[str, ModuleType]]:
    """Loaded modules of Fleet's MoE layer, also where PaddleFormers carries a copy."""
    spelt = re.compile(rf"paddle.*\.transformer\.moe\.({'|'.join(_READERS)})")
    modules = list(sys.modules.items())
    return [(name, module) for name, module in modules if module and spelt.fullmatch(name)]


def _is_bound(module: ModuleType, ops: dict[str, Any]) -> bool:
    """Whether a module of a lazily loading Fleet keeps an answer from before: a function that will
    be replaced, or the flag that says no.
    """
    replaced = [ops[_LOADER]] + ([] if _FLAG in ops else [ops[_AVAILABLE]])
    if any(value is function for value in vars(module).values() for function in replaced):
        return True
    return vars(module).get("HAVE_SONIC_MOE") is False


def _put(where: MutableMapping[str, Any], key: str, value: Any, undo: ExitStack) -> None:
    before = where.get(key, _NOTHING)
    where[key] = value

    def back() -> None:
        # Somebody else may have put something there meanwhile, which stays.
        if where.get(key, _NOTHING) is not value:
            return
        if before is _NOTHING:
            del where[key]
        else:
            where[key] = before

    undo.callback(back)


def _mount(ops: ModuleType, modules: dict[str, MountedModule], undo: ExitStack) -> None:
    for name, module in modules.items():
        _put(sys.modules, name, module, undo)
    _put(vars(ops), "sonicmoe", modules[MOUNT], undo)


def _open_gates(ops: ModuleType, top: MountedModule, undo: ExitStack) -> None:
    """Have Fleet's checks answer yes, and its importer let the name pass."""
    here = vars(ops)
    # The flag rather than the function, which other modules may have bound.
    gate, opened = (_FLAG, True) if _FLAG in here else (_AVAILABLE, lambda: True)
    _put(here, gate, opened, undo)
    if _LOADER in here:
        # Fleet's own would import the engine that it ships.
        _put(here, _LOADER, lambda *args, **kwargs: top, undo)
    blocked = [here.get(_MESSAGES), *(getattr(f, "error_messages", None) for f in sys.meta_path)]
    for messages in blocked:
        if isinstance(messages, dict):
            for key in [key for key in messages if f"{key}.".startswith(f"{MOUNT}.")]:
                undo.callback(messages.setdefault, key, messages.pop(key))


def _verify(ops: ModuleType, modules: dict[str, MountedModule]) -> None:
    """Ask as Fleet will ask."""
    wrong = [name for name in modules if importlib.import_module(name) is not modules[name]]
    if wrong or getattr(ops, _AVAILABLE)() is not True:
        what = ", ".join(wrong) or f"{_AVAILABLE}() stays False"
        words = f"{OPS} does not take this package: {what}; this version of PaddleFleet"
        raise EngineUnavailableError(f"{words} is not supported")
    # A module that was imported while the proxy was off has PyTorch's tensors in its hands.
    astray = sorted(
        name
        for name, module in list(sys.modules.items())
        if name.startswith("sonicmoe.")
        and getattr(module, "torch", torch) is not torch
        and module.torch.Tensor is not torch.Tensor
    )
    if astray:
        raise FrameworkError(
            f"{', '.join(astray)} were imported with PyTorch, while Paddle's torch proxy was off; "
            "needed: install() before other imports of sonicmoe"
        )


def _keep_compat() -> None:
    # Some modules of this package are imported later, and need Paddle's torch proxy then.
    # `paddlefleet_ops` switches the proxy on for its own libraries while it is imported, and then
    # off again, for everybody.
    if not _proxies_this_package():
        sys.modules["paddle"].enable_compat(scope={"sonicmoe"}, silent=True)


def _proxies_this_package() -> bool:
    # Paddle has no public question for this, and switching the proxy on twice takes two switches to
    # undo.
    return any(
        getattr(finder, "_globally_enabled", False)
        or "sonicmoe" in getattr(finder, "_local_enabled_scope", ())
        for finder in sys.meta_path
        if type(finder).__name__ == "TorchProxyMetaFinder"
    )
