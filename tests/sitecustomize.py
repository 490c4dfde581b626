"""Leaves out of the processes that tests start three imports which nothing in them uses, and most
collections of garbage. Python runs this file as it starts, where this folder is on its path.

PyTorch imports its compiler for the first optimizer, only to keep it away from that optimizer; that
is half of a small training run. It imports sympy to compare the shape of a gradient that a backward
is given. And Paddle's library imports tvm_ffi, which imports PyTorch where it finds it, as on no
machine that trains with Paddle.
"""

from __future__ import annotations

import rare_collections  # noqa: F401  before the imports that it is about

# isort: split
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


def when_it_is_used(
    execute: Execute, module: ModuleType, known: dict[str, Any], first: Callable[[], None]
) -> None:
    """A module that is executed, after `first`, when anybody asks it for more than it has `known`."""

    class Waiting(ModuleType):
        def __getattribute__(self, name: str) -> Any:
            # Who walks over `sys.modules` asks for these; who imports a module of a package asks
            # for its path.
            is_package = "__path__" in super().__getattribute__("__dict__")
            if name.startswith("__") and not (name == "__path__" and is_package):
                return super().__getattribute__(name)
            if name in known:
                return known[name]
            self.__class__ = ModuleType
            first()
            execute(self)
            return getattr(self, name)

    module.__class__ = Waiting


def compiler_when_it_is_used(execute: Execute, compiler: ModuleType) -> None:
    """`torch._dynamo`, which a step of an optimizer imports to call a function that does nothing
    where nothing is compiled, and a process group to empty a cache.
    """
    known = {
        "graph_break": lambda *_: None,
        "trace_rules": SimpleNamespace(clear_lru_cache=lambda: None),
    }
    when_it_is_used(execute, compiler, known, guard_again)


def shapes_when_they_are_symbolic(execute: Execute, shapes: ModuleType) -> None:
    """`torch.fx.experimental.symbolic_shapes`, which a backward that is given a gradient imports to
    compare two shapes.
    """

    def executed() -> Any:
        assert shapes.ShapeEnv
        return shapes

    def sym_eq(one: Any, other: Any) -> Any:
        plain = all(type(size) is int for size in (*one, *other))
        return one == other if plain else executed().sym_eq(one, other)

    def expect_true(found: Any, skip: int = 0) -> Any:
        return found if isinstance(found, bool) else executed().expect_true(found, skip)

    known = {"sym_eq": sym_eq, "expect_true": expect_true}
    when_it_is_used(execute, shapes, known, lambda: None)


class AsTheyAreImported:
    """A finder of `sys.meta_path` that has modules executed by these functions."""

    def __init__(self) -> None:
        self.left = {
            "paddle": without_pytorch,
            "torch._compile": with_lazy_guards,
            "torch._dynamo": compiler_when_it_is_used,
            "torch.fx.experimental.symbolic_shapes": shapes_when_they_are_symbolic,
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
