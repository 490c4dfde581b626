"""Leaves out of the processes that tests start two imports which nothing in them uses. Python runs
this file as it starts, where this folder is on its path.

PyTorch imports its compiler for the first optimizer, only to keep it away from that optimizer; that
is half of a small training run. And Paddle's library imports tvm_ffi, which imports PyTorch where it
finds it, as on no machine that trains with Paddle.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

Execute = Callable[[ModuleType], None]


def without_pytorch(execute: Execute, paddle: ModuleType) -> None:
    if "torch" in sys.modules:
        return execute(paddle)
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        execute(paddle)
    finally:
        sys.modules.pop("torch", None)


# What PyTorch keeps its compiler away from. Each has the attribute under which PyTorch remembers
# the guarded function, and is its own guard until there is something to guard it from.
UNGUARDED: list[Any] = []


def with_lazy_guards(execute: Execute, module: Any) -> None:
    """`torch._compile`, whose decorator imports the compiler at the first call of a function."""
    execute(module)
    decorate = module._disable_dynamo

    def remembered(function: Any = None, recursive: bool = True) -> Any:
        if function is None:
            return partial(remembered, recursive=recursive)
        function.__dynamo_disable = function
        UNGUARDED.append(function)
        return decorate(function, recursive)

    module._disable_dynamo = remembered


def guard_again() -> None:
    for function in UNGUARDED:
        del function.__dynamo_disable
    UNGUARDED.clear()


def when_it_is_used(execute: Execute, compiler: ModuleType) -> None:
    """`torch._dynamo`, which a step of an optimizer imports to call a function that does nothing
    where nothing is compiled.
    """

    class Waiting(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            # Who walks over `sys.modules` asks for these; who imports a module of the package
            # asks for its path.
            if name.startswith("__") and name != "__path__":
                return super().__getattribute__(name)
            if name == "graph_break":
                return lambda *_: None
            if name == "trace_rules":  # of which a process group empties a cache
                return SimpleNamespace(clear_lru_cache=lambda: None)
            self.__class__ = ModuleType
            guard_again()
            execute(self)
            return getattr(self, name)

    compiler.__class__ = Waiting


class AsTheyAreImported:
    """A finder of `sys.meta_path` that has modules executed by these functions."""

    def __init__(self) -> None:
        self.left = {
            "paddle": without_pytorch,
            "torch._compile": with_lazy_guards,
            "torch._dynamo": when_it_is_used,
        }

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        execute = self.left.pop(name, None)
        if execute is None:
            return None
        spec = find_spec(name)
        self.left[name] = execute  # for the import, because this may be a question alone
        if spec and spec.loader:
            loader: Any = spec.loader
            loader.exec_module = partial(execute, loader.exec_module)
        return spec


sys.meta_path.insert(0, AsTheyAreImported())  # type: ignore[arg-type]
