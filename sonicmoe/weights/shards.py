"""Parameters of experts whose all-gather FSDP2 leaves to the codes of their layer (`gathered.py`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import LayoutError
from ..interop import device_name
from ..quant.format import BlockScaledTensor

Tensor = torch.Tensor

_aten = torch.ops.aten
LayerCodes = Any  # `gathered.LayerCodes`, which imports this module
# By these FSDP2 cuts a parameter into shards, and modules move, cast and materialise one.
_STAYS_SHARD = {
    _aten.detach.default,
    _aten.empty_like.default,
    _aten.new_zeros.default,
    _aten.slice.Tensor,
    _aten._to_copy.default,
}


class ExpertShard(torch.Tensor):
    """A parameter of experts, whole or a rank's part of it: the memory and the values of the tensor
    that it was made of. Operations return plain tensors, and so does a copy or a checkpoint of it.

    codes: of its layer. role: 0, 1, ... in the order of the layer's parameters.
    """

    codes: LayerCodes
    role: int
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def of(cls, values: Tensor, codes: LayerCodes, role: int) -> ExpertShard:
        """In the memory of `values`."""
        made = torch.Tensor._make_subclass(cls, values)
        made.codes, made.role = codes, role
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        shards: dict[int, ExpertShard] = {}

        def unwrapped(value: Any) -> Any:
            if not isinstance(value, ExpertShard):
                return value
            plain = value.plain()
            shards[id(plain)] = value
            return plain

        plain_args, plain_kwargs = tree_map(unwrapped, (args, kwargs or {}))
        out = func(*plain_args, **plain_kwargs)
        if func in _STAYS_SHARD:
            return cls.of(out, args[0].codes, args[0].role)
        # What was written in place is the tensor that came.
        return tree_map(lambda value: shards.get(id(value), value), out)

    def plain(self) -> Tensor:
        """An ordinary tensor over the memory."""
        with torch.no_grad():
            empty = torch.empty(0, dtype=self.dtype, device=self.device)
            storage, offset = self.untyped_storage(), self.storage_offset()
            return empty.set_(storage, offset, self.size(), self.stride())  # type: ignore[call-overload,no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        """A copy of a module gathers values, until it is given to `gather_codes` itself."""
        made = self.plain().clone()
        parameter = (
            nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        )
        memo[id(self)] = parameter
        return parameter

    @property
    def fsdp_pre_all_gather(self) -> Callable[..., Any]:
        """FSDP2's hook. It has another signature for values, because FSDP2 asks of a hook with five
        arguments that what it gathers has the shape of the shard, and scales have not.
        """
        gathers_codes = self.codes.chooses_codes()
        hook: Any = partial(self._pre_codes if gathers_codes else self._pre_values)
        # FSDP2 asks `inspect` for it at every gather, and `inspect` works it out where it is missing.
        hook.__signature__ = _OF_CODES if gathers_codes else _OF_VALUES
        return hook  # type: ignore[no-any-return]

    def _pre_codes(self, mesh: Any) -> tuple[tuple[Tensor, ...], Gathered]:
        return self.codes.inputs(self, mesh)

    def _pre_values(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], None]:
        """What FSDP2 gathers of any other parameter."""
        self.codes.freeze(None)
        values = padded(self, -(-outer_size[0] // mesh.size()))
        return (values.to(mp_policy.param_dtype or values.dtype),), None

    def fsdp_post_all_gather(
        self,
        outputs: tuple[Tensor, ...],
        metadata: Gathered | None,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """FSDP2's hook. `out` is the parameter that an earlier call returned."""
        if metadata is None:
            return None if out is not None else (outputs[0], ())
        self.codes.hold(self.role, outputs, metadata)
        return None if out is not None else (_Unread.of(self.codes, outputs[0], param_dtype), ())


# As FSDP2 sees the hooks, which have their shard already.
_hooks: tuple[Any, Any] = (ExpertShard._pre_codes, ExpertShard._pre_values)
_OF_CODES, _OF_VALUES = (signature(partial(hook, None)) for hook in _hooks)


class _Unread(torch.Tensor):
    """Stands for gathered values on their way into a parameter: FSDP2 asks for a view of the whole
    shape, and gets one of a single NaN.
    """

    @classmethod
    def of(cls, codes: LayerCodes, beside: Tensor, dtype: torch.dtype) -> _Unread:
        nothing = torch.full((1,), float("nan"), dtype=dtype, device=beside.device)
        _layers[nothing.untyped_storage()] = codes
        return nothing.as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.as_strided:
            return super().__torch_function__(func, types, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return args[0].as_subclass(torch.Tensor).expand(args[1])


class Gathered(NamedTuple):
    """What the codes that are under way are. experts: E, without FSDP2's padding. like: the codes of
    the shard; None where another parameter of the layer brings them. scales: of a single rank, whose
    second input FSDP2 does not take along.
    """

    experts: int
    like: BlockScaledTensor | None
    scales: Tensor | None = None


# By the memory of the parameters that stand for gathered codes.
_layers = WeakIdKeyDictionary()
GATHERED = _layers.data  # empty where no codes are gathered, which costs no call to ask


def codes_behind(weight: Tensor) -> LayerCodes | None:
    """The layer whose codes were gathered for this parameter, or view of one; None for any other."""
    return _layers.get(weight.untyped_storage()) if GATHERED else None  # type: ignore[no-any-return]


def expire_codes(weight: Tensor) -> None:
    """Have the next gather quantise, whatever shows: somebody announced a write to this weight."""
    local = getattr(weight, "_local_tensor", weight)
    codes = local.codes if isinstance(local, ExpertShard) else codes_behind(local)
    if codes is not None:
        codes.expire()


def padded(shard: Tensor, experts: int) -> Tensor:
    """The shard with the zeros that FSDP2 has behind it, as an ordinary tensor."""
    values = shard.plain() if isinstance(shard, ExpertShard) else shard
    if values.shape[0] == experts:
        return values
    size = experts, *values.shape[1:]
    room = values.untyped_storage().nbytes() // values.element_size() - values.storage_offset()
    if room < experts * values[0:1].numel() or room == 0:
        raise LayoutError(
            f"a shard of {values.shape[0]} experts on {device_name(values)} has no room for {experts}; needed: a parameter that "
            "fully_shard has cut"
        )
    return values.as_strided(size, values.stride(), values.storage_offset())
