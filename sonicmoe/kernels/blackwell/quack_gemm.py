"""The BF16 grouped GEMMs of an expert MLP for Blackwell, on the kernels of quack-kernels: which
variant, compiled how, called with what. Those for Hopper are our own (`engine/bf16_sm90.py`).

Compiled ahead of time into this package's own cache, not through quack's: a warm machine needs
neither quack nor CuTe DSL, `no_compile()` holds, and no variant depends on a token count. Tensors
are handed on as they come: no framework is imported.

Legend: R padded rows in expert order, cut by `cu_rows`; other letters as in `engine.interface`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...architectures import ARCHITECTURES
from ...enums import ACTIVATIONS, ActivationParameters, ActivationType, is_glu
from .cute_kernel import CuteKernel
from .quack_tilings import FAMILIES, PRODUCTS, Candidates, GemmConfig, family_of

_HERE = Path(__file__).parent
_BUILDER = f"{__package__}.quack_build"
# They compile the GEMMs: quack's builders change from version to version.
PACKAGES = {"quack-kernels": "0.6.5", "nvidia-cutlass-dsl": "4.8.1"}

Launch = Callable[..., None]


class Stored(Enum):
    """How the weight gradients of one projection lie in memory; W is N1 of up, I of down.

    The rows of a gradient may be any distance apart that is a multiple of 16 bytes, and so may the
    matrices of two experts. The axis that is contiguous is compiled in.
    """

    INNER = "inner"  # [E, H, W], contiguous along W
    HIDDEN = "hidden"  # [E, W, H], contiguous along H
    HALVES = "halves"  # of up, as HIDDEN: all gate rows come first, and all up rows follow


# Of each product, that of the native layout first.
STORED = {
    "wgrad_down": (Stored.INNER, Stored.HIDDEN),
    "wgrad_up": (Stored.HIDDEN, Stored.INNER, Stored.HALVES),
}


@dataclass(frozen=True)
class MlpShape:
    """What the variants of one expert MLP are compiled for; static over a training run.

    dtype: "bfloat16" or "float16". bias: whether z and y2 get one. parameters: those of the
    activation that the layer sets; they are constants of the compiled code. capped: whether the
    GEMMs are held to fewer multiprocessors than the device has. arch: "sm_100a". family: whose GEMM
    class serves it; see `quack_tilings.family_of`.
    """

    hidden: int
    intermediate: int
    activation: ActivationType
    dtype: str = "bfloat16"
    bias: bool = False
    parameters: ActivationParameters = ()
    capped: bool = False
    arch: str = field(kw_only=True)
    family: str = field(default="", kw_only=True)

    def __post_init__(self) -> None:
        """Raises ConfigError where no class serves the architecture."""
        if not self.family:
            object.__setattr__(self, "family", family_of(self.arch))

    @property
    def n1(self) -> int:
        return self.intermediate * (2 if is_glu(self.activation) else 1)

    def width(self, product: str) -> int:
        """Columns of a product's result."""
        if product in ("up", "wgrad_up"):
            return self.n1
        return self.hidden if product in ("down", "dgrad") else self.intermediate


def candidates(product: str, shape: MlpShape) -> Candidates:
    """The tilings of a product, as its device can run them."""
    family = FAMILIES[shape.family]
    # Cluster launch control starts a block per tile, so a number of multiprocessors would bind
    # nothing.
    known = ARCHITECTURES.get(shape.arch)
    clc = known is not None and known.family in family.clc_targets and not shape.capped
    return tuple(
        (config if clc else replace(config, clc=False), time)
        for config, time in family.candidates[product]
    )


def choose_config(product: str, shape: MlpShape) -> GemmConfig:
    """The tiling of a product: least columns times relative time."""
    width = shape.width(product)
    # The choice is a pure function of static sizes. A timing at run time could choose differently
    # from process to process, and with it the bits and the compile keys.
    best, _ = min(
        candidates(product, shape), key=lambda candidate: candidate[0].columns(width) * candidate[1]
    )
    return best


def up_kernel(shape: MlpShape, *, store_z: bool, config: GemmConfig | None = None) -> CuteKernel:
    """`z = x w1^T + b1` (kept when `store_z`), `y1 = act(z)`; x gathered."""
    special = {**_activation(shape), "bias": shape.bias, "store_z": store_z}
    return _kernel("up", "compile_up", shape, config or choose_config("up", shape), special)


# It runs the builder of the down-projection, because without an activation `up` is a plain grouped
# GEMM whose A rows are gathered. The same tiling gives the same order of additions, on which "the
# same bits" rests.
def up_again_kernel(shape: MlpShape) -> CuteKernel:
    """z alone, for backward when forward did not keep it: the sums, and so the bits, of
    `up_kernel`.
    """
    special = {"bias": shape.bias, "transpose": False, "gather": True}
    return _kernel("up_again", "compile_down", shape, choose_config("up", shape), special)


def down_kernel(shape: MlpShape, config: GemmConfig | None = None) -> CuteKernel:
    """`y2 = y1 w2^T + b2`."""
    special = {"bias": shape.bias, "transpose": False, "gather": False}
    return _kernel("down", "compile_down", shape, config or choose_config("down", shape), special)


def dgated_kernel(shape: MlpShape, config: GemmConfig | None = None) -> CuteKernel:
    """`dy1 = dout w2` (dout gathered), then dz, probability-weighted y1 and partial row sums of
    `dy1 * y1`.
    """
    config = config or choose_config("dgated", shape)
    return _kernel("dgated", "compile_dgated", shape, config, _activation(shape))


def dgrad_kernel(shape: MlpShape, config: GemmConfig | None = None) -> CuteKernel:
    """`dx_rows = dz w1`."""
    special = {"bias": False, "transpose": True, "gather": False}
    return _kernel("dgrad", "compile_down", shape, config or choose_config("dgrad", shape), special)


# One name for both products: where the tilings agree, both launch the same artefact.
def wgrad_kernel(
    product: str, shape: MlpShape, stored: Stored, config: GemmConfig | None = None
) -> CuteKernel:
    """`dw2[e] += dout^T y1s` ("wgrad_down") or `dw1[e] += dz^T x` ("wgrad_up") over the rows of e;
    tokens gathered.
    """
    config = config or choose_config(product, shape)
    return _kernel("wgrad", "compile_wgrad", shape, config, {"stored": stored.value})


def variants(shape: MlpShape) -> dict[Hashable, CuteKernel]:
    """All variants of a shape: "up", "up_only" (without z), "up_again", "down", "dgated", "dgrad", and each
    product in `STORED` with each way to store it that the activation has.
    """
    # Two compiled functions for up, because a store that is switched off at run time would still
    # cost its registers.
    made: dict[Hashable, CuteKernel] = {
        "up": up_kernel(shape, store_z=True),
        "up_only": up_kernel(shape, store_z=False),
        "up_again": up_again_kernel(shape),
        "down": down_kernel(shape),
        "dgated": dgated_kernel(shape),
        "dgrad": dgrad_kernel(shape),
    }
    for product, every in STORED.items():
        for stored in every:
            # Only gated activations have halves.
            if stored is not Stored.HALVES or is_glu(shape.activation):
                made[product, stored] = wgrad_kernel(product, shape, stored)
    return made


def all_kernels(shape: MlpShape, *, recompute_z: bool = False) -> tuple[CuteKernel, ...]:
    """Every variant that training and inference of `shape` launch: training keeps z, inference, and
    training that recomputes z, does not.
    """
    found = variants(shape)
    if not recompute_z:
        del found["up_again"]
    return tuple(dict.fromkeys(found.values()))


def wgrad_kernels(shape: MlpShape) -> tuple[CuteKernel, ...]:
    """The distinct variants that weight gradients launch, however their memory lies."""
    found = variants(shape).items()
    return tuple(dict.fromkeys(kernel for name, kernel in found if isinstance(name, tuple)))


def _activation(shape: MlpShape) -> dict[str, Any]:
    statics = {"activation": shape.activation.value, "gated": is_glu(shape.activation)}
    text = parameters_text(shape.activation, shape.parameters)
    return {**statics, "parameters": text} if text else statics


def parameters_text(activation: ActivationType, parameters: ActivationParameters) -> str:
    """The parameters of an activation as a compile key has them: keys have no floats, and `repr`
    gives back the same number.
    """
    values = ACTIVATIONS[activation].values(parameters)
    return " ".join(f"{name}={value!r}" for name, value in sorted(values.items()))


def _kernel(
    name: str, builder: str, shape: MlpShape, config: GemmConfig, special: dict[str, Any]
) -> CuteKernel:
    # Only choices go into the key. H, I, E and row counts stay symbolic in the compiled code, so
    # models of different sizes share an artefact wherever the choices agree.
    statics = {**special, "dtype": shape.dtype, "family": shape.family, **config.statics}
    # The generated code follows from these two files and from the packages' versions, which are in
    # the toolchain of the key.
    sources = (_HERE / "quack_build.py", _HERE / "quack_epilogues.py")
    return CuteKernel.make(
        f"bf16_{name}", f"{_BUILDER}:{builder}", statics, *sources, arch=shape.arch
    )


class Gemms:
    """The variants of one shape by name. Each is loaded, or compiled, at its first launch: an
    inference process never loads, or compiles, the backward.
    """

    def __init__(self, variants: Mapping[Hashable, tuple[Any, int]]) -> None:
        """variants: each of them, and on how many clusters it runs."""
        self._variants = variants
        self._loaded: dict[Hashable, Launch] = {}

    def load(self, name: Hashable) -> Launch:
        """The loaded function; raises CompileForbiddenError or ToolchainError where it is neither
        cached nor to be compiled.
        """
        found = self._loaded.get(name)
        if found is None:
            found = self._loaded[name] = self._variants[name][0].load()
        return found

    def launch(self, name: Hashable, *operands: Any) -> None:
        """Launch one on the current stream, and wait for nothing. operands: those of its builder, but
        for the number of clusters.
        """
        self.load(name)(*operands, self._variants[name][1])


# One object per shape and device type, so that all layers of a model share the loaded functions.
@lru_cache(maxsize=64)
def grouped_gemms(shape: MlpShape, multiprocessors: int) -> Gemms:
    """The process's `variants` of a shape. For a device of so many multiprocessors, on which the
    persistent kernels run one thread block each; where tiles come from cluster launch control, the
    device counts by itself.
    """
    # Persistent kernels: as many clusters as fit on the device at once, each of which takes tile
    # after tile. More of them would wait for a place, fewer leave multiprocessors idle.
    clusters = {
        product: multiprocessors // math.prod(choose_config(product, shape).cluster)
        for product in PRODUCTS
    }
    clusters |= dict.fromkeys(("up_only", "up_again"), clusters["up"])
    return Gemms(
        {
            name: (kernel, clusters[name[0] if isinstance(name, tuple) else str(name)])
            for name, kernel in variants(shape).items()
        }
    )


def dprob_tiles(shape: MlpShape) -> int:
    """Columns of the partial sums of dprobs, which the caller sums in a fixed order: adding them up with
    atomics inside the GEMM would give other bits in every run.
    """
    return choose_config("dgated", shape).tiles(shape.intermediate)
