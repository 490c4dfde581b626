"""One step of a layer of experts as a file: inputs, settings, and the names that its caller has for
them, for `sonicmoe bisect`. Imports no framework.

Legend: T tokens, K slots, E experts, H hidden, I intermediate, N1 = 2I (gated) or I; native weights
`w1 [E, N1, H]` (gate, up interleaved), `w2 [E, H, I]`, biases `b1 [E, N1]`, `b2 [E, H]`.
"""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..config import FLAGS, ResolvedConfig
from ..engine.settings import EngineSettings
from ..enums import ActivationType, EngineName, is_glu, layer_parameters
from ..errors import ConfigError, ShapeError, SonicMoEError, expect, writing
from ..flags import spelling
from ..npz import NotNpzError, NpzError, read_npz, require_numbers
from ..quant.recipes import RECIPES

Array = np.ndarray

ARRAYS = ("x", "indices", "probs", "w1", "w2")
OPTIONAL = ("dout", "b1", "b2", "x_codes", "x_scale", "dout_codes", "dout_scale")
TOKEN_DTYPES = ("bfloat16", "float16", "float32")


class DumpError(SonicMoEError, ValueError):
    """A file cannot be read or does not hold one step of a layer of experts."""


def need_shape(fits: bool, name: str, array: Array, needed: object) -> None:
    """Raise ShapeError unless the array fits. `refusals.need_shape` would load a framework."""
    expect(fits, ShapeError, f"{name} has shape {array.shape}; needed: {needed}")


# A new flag that changes what a step computes joins the file by its own record.
STEP_FLAGS = tuple(flag for flag in FLAGS if flag.in_steps)


@dataclass(frozen=True)
class StepSettings:
    """How the step ran: names only, so that it survives a file.

    Attributes:
        recipe: None for unquantised operands.
        activation_parameters: those that the layer sets for itself.
        flags: the flags that decide what a step computes (`STEP_FLAGS`); nothing else is set.
    """

    activation: str = ActivationType.SWIGLU.value
    recipe: str | None = "dx256"
    dtype: str = "bfloat16"
    engine: str = EngineName.REFERENCE.value
    activation_parameters: dict[str, float] = field(default_factory=dict)
    flags: ResolvedConfig = field(default_factory=ResolvedConfig)

    def __post_init__(self) -> None:
        for name, value, known in (
            ("activation", self.activation, [member.value for member in ActivationType]),
            ("recipe", self.recipe, [None, *RECIPES]),
            ("dtype", self.dtype, TOKEN_DTYPES),
        ):
            expect(value in known, DumpError, f"{name} is {value!r}; needed: one of {list(known)}")
        try:
            # The property raises for a parameter that the activation does not have.
            self.computed  # noqa: B018  asked for its check
        except ConfigError as error:
            raise DumpError(str(error)) from None

    @functools.cached_property
    def computed(self) -> EngineSettings:
        """What an engine computes of the step. Memory is not saved, so that every stage can be shown."""
        kind = ActivationType(self.activation)
        recipe = None if self.recipe is None else RECIPES[self.recipe]
        flags = {flag.field: getattr(self.flags, flag.field) for flag in STEP_FLAGS}
        parameters = layer_parameters(kind, self.activation_parameters)
        return EngineSettings(
            kind, recipe, **{**flags, "recompute_z": False}, activation_parameters=parameters
        )

    @classmethod
    def of(cls, **names: Any) -> StepSettings:
        """Settings by name, flags among them, as `names` gives them; DumpError for a name or a value
        that no build knows.
        """
        # `pop`, so that an unknown name is left over and the constructor refuses it.
        flags = {flag.field: names.pop(flag.field, None) for flag in STEP_FLAGS}
        try:
            return cls(flags=ResolvedConfig(**flags), **names)
        except (ConfigError, TypeError) as error:
            raise DumpError(f"settings of a step: {error}") from None

    def names(self) -> dict[str, Any]:
        """What `of` takes, as JSON has it."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "flags"}
        values = {flag.field: getattr(self.flags, flag.field) for flag in STEP_FLAGS}
        return own | {
            name: value if isinstance(value, bool) else spelling(value)
            for name, value in values.items()
        }


GRADIENT = "the gradient of "
# Stage: the tensor whose elements it shows, and what it says about them.
_TENSOR_OF_STAGE = {
    "x": ("x", ""), "x_fp8": ("x", ""), "dx": ("x", GRADIENT),
    "out": ("out", ""), "dout": ("out", GRADIENT), "dout_fp8": ("out", GRADIENT),
    "probs": ("probs", ""), "ds": ("probs", GRADIENT),
    **{name: (name, "") for name in ("w1", "w2", "b1", "b2")},
    **{f"{name}_fp8": (name, "") for name in ("w1", "w2")},
    **{f"d{name}": (name, GRADIENT) for name in ("w1", "w2", "b1", "b2")},
}  # fmt: skip


@dataclass(frozen=True)
class Caller:
    """What the caller of one step calls its tensors. A diagnosis finds an element of a native tensor,
    and says the name that the tensor has in the caller's model, the expert, and the native row and
    column.

    tensors: by their names in a step ("x", "out", "probs", "w1", ...), those that it has: its name,
        or those of the E matrices of a weight that is one parameter per expert.
    layer: the module that has the weights, by its name in the model; empty where it was not found.
    """

    tensors: dict[str, tuple[str, ...]] = field(default_factory=dict)
    layer: str = ""

    def called(self, stage: str, expert: int | None = None) -> str | None:
        """The tensor that a stage of a call shows (`out`, `dx`, `w1_fp8`, ...), in the caller's
        words; None where it has no such tensor, or one per expert and `expert` is not given.
        """
        tensor, prefix = _TENSOR_OF_STAGE.get(stage, ("", ""))
        names = self.tensors.get(tensor, ())
        if len(names) > 1:
            # Per expert the caller has tensors of their own, so the expert decides the name. Names out
            # of a damaged file may be too few.
            names = () if expert is None else names[expert : expert + 1]
        return prefix + names[0] if names else None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Caller:
        """Inverse of `to_json`; ValueError where the data is something else."""
        try:
            # A name is a list of characters too, so a tuple is made of lists alone.
            tensors = {
                str(tensor): tuple(map(str, names)) if isinstance(names, list) else ()
                for tensor, names in data["tensors"].items()
            }
            return cls(tensors, str(data["layer"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"caller: {type(error).__name__}: {error}") from None


@dataclass(frozen=True, eq=False)
class StepDump:
    """Inputs of one forward and, with `dout`, one backward: x, dout `[T, H]`, w1, w2 fp32; probs
    fp32, indices int64 `[T, K]`. Probabilities are as the experts got them, so a router's softmax
    and its normalisation are in them.

    b1, b2: fp32, both or neither. caller: what the caller calls these tensors; None for a step of
    no caller. x_codes, x_scale: where tokens arrived in FP8, their e4m3 codes as uint8 `[T, H]` and
    their multipliers, fp32 `[T, ceil(H/128)]`; x then holds their values. dout_codes, dout_scale:
    the same of dout. ShapeError where the arrays do not belong together.
    """

    name: str
    settings: StepSettings
    x: Array
    indices: Array
    probs: Array
    w1: Array
    w2: Array
    dout: Array | None = None
    x_codes: Array | None = None
    x_scale: Array | None = None
    dout_codes: Array | None = None
    dout_scale: Array | None = None
    b1: Array | None = None
    b2: Array | None = None
    caller: Caller | None = None

    def __post_init__(self) -> None:
        for tokens in ("x", "dout"):
            self._check_tokens(tokens)
        need_shape(self.w2.ndim == 3 and self.w2.size > 0, "w2", self.w2, "[E, H, I]")
        need_shape(self.indices.ndim == 2, "indices", self.indices, "[T, K]")
        (tokens, topk), (experts, hidden, width) = self.indices.shape, self.w2.shape
        n1 = width * (2 if is_glu(self.settings.computed.activation) else 1)
        wanted = {
            "x": (tokens, hidden), "dout": (tokens, hidden), "probs": (tokens, topk),
            "w1": (experts, n1, hidden), "b1": (experts, n1), "b2": (experts, hidden),
        }  # fmt: skip
        for name, shape in wanted.items():
            found = getattr(self, name)
            if found is not None:
                need_shape(found.shape == shape, name, found, f"{shape} of indices and w2")
        # Engines add both biases or none, and half of them would be a damaged file.
        lacking = "b1" if self.b1 is None else "b2"
        both = (self.b1 is None) == (self.b2 is None)
        expect(both, ShapeError, f"{lacking} is missing; needed: both biases, or neither")

    def _check_tokens(self, name: str) -> None:
        codes, scale = getattr(self, f"{name}_codes"), getattr(self, f"{name}_scale")
        if codes is None and scale is None:
            return
        values = getattr(self, name)
        shape = None if values is None else values.shape
        expect(
            codes is not None and scale is not None and codes.shape == shape,
            ShapeError,
            f"{name}_codes has shape {getattr(codes, 'shape', None)} and "
            f"{name}_scale {getattr(scale, 'shape', None)}; {name} needs both, and codes of its shape {shape}",
        )
        assert codes is not None and scale is not None
        tokens, words = len(values), -(-values.shape[-1] // 128)
        fits = scale.shape in ((tokens, words), (tokens, 1))
        needed = f"{(tokens, words)} or {(tokens, 1)}, of {name} {values.shape}"
        need_shape(fits, f"{name}_scale", scale, needed)

    @property
    def num_experts(self) -> int:
        return int(self.w2.shape[0])

    def but(self, **changes: Any) -> StepDump:
        """A copy with other fields; names of settings go to the settings."""
        names = self.settings.names()
        # Flags and other settings are given by the same names as fields of the dump; each goes
        # where it belongs.
        names |= {name: changes.pop(name) for name in names if name in changes}
        return replace(self, settings=StepSettings.of(**names), **changes)


def save_dump(path: str | Path, step: StepDump) -> None:
    """Write an .npz that `load_dump` reads; steps with `dout` are cases for `load_case` too."""
    # Text goes in as arrays of no dimension, which numpy reads without unpickling.
    words = {"name": step.name, "settings": json.dumps(step.settings.names())}
    if step.caller is not None:
        words["caller"] = json.dumps(step.caller.to_json())
    arrays = {name: np.array(text) for name, text in words.items()}
    held = {name: getattr(step, name) for name in (*ARRAYS, *OPTIONAL)}
    arrays |= {name: array for name, array in held.items() if array is not None}
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        writing(path),
        path.open("wb") as file,
    ):  # np.savez would add a suffix to a name without one
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_dump(path: str | Path) -> StepDump:
    """Read what `save_dump` wrote; a captured call without settings is taken to have run in the
    default FP8 recipe. DumpError where the file is missing, no .npz, or lacks an array, which it
    names; ShapeError where the arrays do not belong together.
    """
    try:
        found = read_npz(Path(path))
        arrays = {name: found[name] for name in ARRAYS}
        arrays |= {name: found[name] for name in OPTIONAL if name in found}
        require_numbers(arrays, integers=("indices", "x_codes", "dout_codes"))
        settings, caller = StepSettings(), None
        if "settings" in found:
            settings = StepSettings.of(**json.loads(str(found["settings"])))
        if "caller" in found:
            caller = Caller.from_json(json.loads(str(found["caller"])))
        return StepDump(str(found["name"]), settings, **arrays, caller=caller)
    except KeyError as error:
        raise DumpError(f"{path} is no dump of a step: it has no {error.args[0]!r}") from None
    except (ShapeError, DumpError) as error:
        raise type(error)(f"{path}: {error}") from None
    except NotNpzError as error:
        raise DumpError(f"{path} is no dump of sonicmoe: {error}") from None
    # Settings that are no JSON, or of other types than theirs.
    except (NpzError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DumpError(f"cannot read a step from {path}: {error}") from None
