"""Native functions that read tensors of a routing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .metadata import RoutingMetadata

Bind = Callable[[Any, list[str], int], Any]


class RoutedCall:
    """A native function among whose arguments are tensors of a routing. A call names the routing in
    front of all other arguments.
    """

    def __init__(self, function: Any, at: int, fields: str, bind: Bind | None = None) -> None:
        """A function of one module.

        Args:
            function: of the module.
            at: how many of the other arguments come before the routing's.
            fields: which tensors of the routing, in their order, by names with spaces between.
            bind: `with_routing` of the module that fills routings, which then cuts these tensors
                off the routing's memory: views of a framework take the host longer than a launch.
                None: the function gets such views.
        """
        self._function, self._at, self._fields = function, at, fields.split()
        self._bound = None if bind is None else bind(function, self._fields, at)

    def __call__(self, routing: RoutingMetadata, *arguments: Any) -> None:
        if self._bound is not None and routing.memory is not None:
            tokens, topk, experts, _, rows = routing.sizes
            self._bound(routing.memory, tokens, topk, experts, rows, *arguments)
            return
        own = [getattr(routing, field) for field in self._fields]
        self._function(*arguments[: self._at], *own, *arguments[self._at :])
