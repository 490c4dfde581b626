"""Experts whose weights live as FP8 codes alone, 1 byte a weight: fine-tuning of large models by
adapters on one GPU.

    with freezing_experts() as rounding:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16,
        experts_implementation="sonicmoe_fp8")
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import FrameworkError, LayoutError, expect
from ..fsdp import finders
from ..functional.border import WEIGHT_DTYPES
from ..functional.frozen import (
    codes_in,
    freeze_weight,
    frozen_in,
    local_part,
    put_codes,
    thaw_weight,
)
from ..layouts import NATIVE, Codes, WeightLayout
from ..moe import MoE, under_wrappers
from ..quant.format import scale_shape
from ..weights.frozen import BLOCKS, Rounding
from .transformers import _is_experts, _layout, _weight_names, unsupported_reason

Tensor = torch.Tensor
Weight = tuple[nn.Module, str, WeightLayout, int]  # owner, name, layout, 0 for w1 and 1 for w2


def freeze_experts(model: nn.Module) -> Rounding:
    """Replace the weights of all experts in a model by FP8 codes, one weight after the other, each of
    which gives its memory back before the next one.

    The experts are those that transformers dispatches, and `MoE`. They have 1 byte a weight from
    then on and 4 bytes a block of 128x128 or more; they never train. Adapters, biases and everything
    around them do. Only `sonicmoe_fp8` (`use_fp8=True`) computes with them.

    Returns:
        What the codes lost, of all weights together.

    Raises:
        LayoutError: the model has no such experts, or a weight is not whole; or a weight is not finite,
            and none is frozen.
        ConfigError: a weight is no plain parameter.
    """
    weights, rounding = _weights(model), Rounding()
    _check_finite(model, weights)
    for weight in weights:
        rounding += freeze_weight(*weight)
    return rounding


def _check_finite(model: nn.Module, weights: list[Weight]) -> None:
    """Refuse a weight that is not finite before the first one is frozen, because no call takes codes of
    one projection beside values of the other.
    """
    paths = {module: path for path, module in model.named_modules()}
    for module, name, *_ in weights:
        held: Any = module._parameters.get(name)
        if held is None or held.dtype not in WEIGHT_DTYPES or held.is_meta:
            continue  # `freeze_weight` judges these
        local = local_part(held).detach()
        # The smallest and the largest value take no memory, and are NaN where a value is.
        is_finite = not local.numel() or bool(torch.stack(local.aminmax()).isfinite().all())
        words = f"{paths[module]}.{name}".lstrip(".")
        expect(is_finite, LayoutError, f"{words} is not finite; needed: finite weights to freeze")


def thaw_experts(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> None:
    """Replace all codes of `freeze_experts` by the weights that they stand for, in `dtype`. What the
    codes lost stays lost. The weights require no gradient.

    Raises:
        LayoutError: the model has no experts.
    """
    for module, name, *_ in _weights(model):
        if name in frozen_in(module):
            thaw_weight(module, name, dtype)


def frozen_bytes(model: nn.Module) -> int:
    """Bytes of codes and scales in a model."""
    found = [codes_in(module, name) for module in model.modules() for name in frozen_in(module)]
    return sum(part.numel() * part.element_size() for codes in found for part in codes)


def empty_codes(model: nn.Module, device: Any = None) -> None:
    """Give all experts of a model codes of their sizes that stand for zeros, whatever their weights
    hold and wherever they lie, on `device` (None: where the weights are).

    For a model whose codes come from somewhere else: `load_frozen`, or random ones.
    """
    for module, name, layout, index in _weights(model):
        weight = getattr(module, name)
        experts, first, second = weight.shape
        shape = (experts, second, first) if layout.transposed else tuple(weight.shape)
        place = weight.device if device is None else device
        held = torch.zeros(shape, dtype=torch.uint8, device=place)
        scales = torch.zeros(scale_shape(shape, BLOCKS[index]), dtype=torch.int32, device=place)
        put_codes(module, name, Codes(held, scales), layout, index)


def _no_shard(module: nn.Module) -> None:
    """Of `fsdp.finders`: codes of codes would be made."""
    is_frozen = any(frozen_in(part) for part in module.modules())
    words = "the experts are frozen as codes, which fsdp.gather_codes would take for values"
    expect(not is_frozen, LayoutError, f"{words}; needed: thaw_experts(model) before it")


finders.insert(0, _no_shard)


def _weights(model: nn.Module) -> list[Weight]:
    found: list[Weight] = []
    for module in model.modules():
        if isinstance(module, MoE):
            both = enumerate(map(under_wrappers, (module.c_fc, module.c_proj)))
            found += [(owner, "weight", NATIVE, index) for index, owner in both]
        elif _is_experts(module):
            reason = unsupported_reason(module)
            expect(reason is None, LayoutError, str(reason))
            names, layout = _weight_names(module)[:2], _layout(module)
            found += [(module, name, layout, index) for index, name in enumerate(names)]
    kind = type(model).__name__
    expect(bool(found), LayoutError, f"{kind} has no experts of transformers and no MoE")
    return found


class Loaded:
    """What `freezing_experts` has done.

    rounding: of all experts so far. worst: the weight whose codes lost most, and its error.
    """

    def __init__(self) -> None:
        self.rounding, self.worst = Rounding(), ("", 0.0)

    def add(self, name: str, rounding: Rounding) -> None:
        """One weight more."""
        self.rounding += rounding
        self.worst = max(self.worst, (name, rounding.error), key=lambda each: each[1])


@contextlib.contextmanager
def freezing_experts() -> Iterator[Loaded]:
    """Inside this block `from_pretrained` freezes every weight of experts as soon as it has read it:
    host and device never hold more in BF16 than the weights of one projection of one layer.

    Checkpoints may be in BF16, and in a quantised format that transformers dequantises while it
    loads (`FineGrainedFP8Config(dequantize=True)`, `Mxfp4Config(dequantize=True)`).

    Yields:
        `Loaded`, which says what the codes lost.

    Raises:
        FrameworkError: this version of transformers loads in a way that is not known here.
    """
    from transformers import core_model_loading as loading
    from transformers import modeling_utils
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    loaded = Loaded()

    def put_frozen(put: Any, model: nn.Module, target: str, *arguments: Any) -> Any:
        done = put(model, target, *arguments)
        found = _projection(model, target)
        # One of another shape is left to transformers, which reports it.
        if found is not None and not getattr(found[0], found[1]).is_meta:
            loaded.add(target, freeze_weight(*found))
        return done

    def in_fp32(dtype_of: Any, operation: Any, model: Any, target: Any) -> Any:
        # BF16 between the codes of the file and these would round their scales.
        is_ours = None not in (model, target) and _projection(model, target) is not None
        return torch.float32 if is_ours else dtype_of(operation, model, target)

    with (
        _replaced(loading, "set_param_for_module", put_frozen),
        # It takes the memory of the whole model in BF16 beforehand.
        _replaced(modeling_utils, "caching_allocator_warmup", lambda *arguments: None),
        _replaced(Fp8Dequantize, "_get_target_dtype", in_fp32),
    ):
        yield loaded


def _projection(model: nn.Module, target: str) -> Weight | None:
    """The weight of experts that a name is of, if it is of one."""
    path, _, name = target.rpartition(".")
    module = model.get_submodule(path)
    names = _weight_names(module)[:2] if _is_experts(module) else ()
    return (module, name, _layout(module), names.index(name)) if name in names else None


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Inside this block a function of transformers is `by`, which gets it before its arguments."""
    held = getattr(owner, name, None)
    words = f"transformers has no {owner.__name__}.{name}; needed: 5.17 to 5.24"
    expect(held is not None, FrameworkError, words)

    def replacement(*arguments: Any, **options: Any) -> Any:
        return by(held, *arguments, **options)

    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, held)


def load_frozen(directory: str | Path, device: Any = "cpu", **options: Any) -> nn.Module:
    """The model that `model.save_pretrained(directory)` has saved with frozen experts, codes and all.
    No weight of experts is BF16 on the way.

    Args:
        directory: of the saved model.
        device: where its parameters go.
        options: of `AutoModelForCausalLM.from_config`, as `dtype`.

    Raises:
        LayoutError: the files do not have what the model needs.
    """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    options = {"experts_implementation": "sonicmoe_fp8", **options}
    config = AutoConfig.from_pretrained(directory)
    # Parameters that nobody writes take addresses and no memory of the host.
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, **options)
    empty_codes(model, "meta")
    missing = set(model.state_dict())
    for path in sorted(Path(directory).glob("*.safetensors")):
        state = load_file(path, device=str(device))
        found = model.load_state_dict(state, strict=False, assign=True)
        words = f"{path.name} has {found.unexpected_keys[:3]}, which the model does not have"
        expect(not found.unexpected_keys, LayoutError, words)
        missing -= set(state)
    model.tie_weights()
    missing -= set(getattr(model, "all_tied_weights_keys", None) or ())
    expect(not missing, LayoutError, f"{directory} has no {sorted(missing)[:3]}")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    return model.to(device).eval()
