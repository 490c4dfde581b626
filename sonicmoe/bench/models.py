"""The sizes of a layer of experts, by the name of a model or from its `config.json`. Imports no
framework.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError, did_you_mean, expect
from .shapes import Shape

CARD, DATE = "NVIDIA H200", "2026-11-28"  # of what was measured


class Measured(NamedTuple):
    """One layer on a `CARD`, forward and backward, new weights in every call: microseconds by the
    clock of transformers' module with `grouped_mm` under `torch.compile`, of this package in BF16,
    and in FP8. `shape` is one rank's share where there are several: every slot is local.
    """

    model: str
    shape: Shape
    compiled: int
    bf16: int
    fp8: int
    ranks: int = 1


MEASURED = (
    Measured("Qwen3-30B-A3B", Shape(8192, 2048, 768, 128, 8), 5497, 3726, 3917),
    Measured("Qwen3-30B-A3B", Shape(2048, 2048, 768, 128, 8), 2494, 1510, 2003),
    Measured("Qwen3-30B-A3B", Shape(512, 2048, 768, 128, 8), 1888, 1366, 1699),
    Measured("OLMoE-7B", Shape(8192, 2048, 1024, 64, 8), 6165, 4548, 3984),
    Measured("Moonlight-16B", Shape(8192, 2048, 1408, 64, 6), 6047, 4955, 4325),
    Measured("ERNIE-4.5-21B-A3B", Shape(8192, 2560, 1536, 64, 6), 8016, 6586, 5436),
    Measured("Qwen3-Next-80B", Shape(8192, 2048, 512, 512, 10), 7210, 4631, 6354),
    Measured("Mixtral-8x7B", Shape(8192, 4096, 14336, 8, 2), 30342, 30252, 19280),
    Measured("Llama-4-Scout's sizes", Shape(8192, 5120, 8192, 16, 1), 12842, 11850, 9891),
    Measured("gpt-oss-20b", Shape(8192, 2880, 2880, 32, 4), 10289, 9915, 7279),
    Measured("gpt-oss-120b", Shape(8192, 2880, 2880, 128, 4), 14241, 12116, 12660),
    Measured("ERNIE-4.5-300B EP8", Shape(4096, 8192, 3584, 8, 8), 44572, 29037, 18192, 8),
    Measured("DeepSeek-V3 EP8", Shape(4096, 7168, 2048, 32, 8), 29197, 15478, 11349, 8),
    Measured("Qwen3-235B EP8", Shape(4096, 4096, 1536, 16, 8), 15317, 6107, 4817, 8),
    Measured("GLM-4.5-Air EP8", Shape(4096, 4096, 1408, 16, 8), 14649, 5387, 4506, 8),
    Measured("MiniMax-M2 EP8", Shape(4096, 3072, 1536, 32, 8), 12233, 4600, 4132, 8),
)

# What configurations of transformers call a size; the first name that is there counts.
SIZES = {
    "hidden": ("hidden_size",),
    "intermediate": ("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "topk": ("num_experts_per_tok", "moe_topk", "moe_k"),
}


def model_shape(model: str) -> Shape:
    """The sizes of `model` with the tokens that were measured: a name of `MEASURED`, with or without
    " EP8", or the path of a `config.json` or of its folder.

    Raises:
        ConfigError: there is no such model and no such file; or the file is no configuration of a
            mixture of experts, with the name that is missing.
    """
    path = Path(model)
    # A folder of the working directory may have the name of a model; only one with a path is meant.
    if path.suffix == ".json" or "/" in model or (path / "config.json").is_file():
        return _configured(path / "config.json" if path.is_dir() else path)
    names = {each.model.removesuffix(" EP8").lower(): each.shape for each in reversed(MEASURED)}
    wanted = model.lower().removesuffix(" ep8")
    hint = did_you_mean(wanted, names)
    known = ", ".join(dict.fromkeys(each.model for each in MEASURED))
    words = f"model is {model!r:.80}{hint}; needed: the path of a config.json, or one of {known}"
    expect(wanted in names, ConfigError, words)
    return names[wanted]


def nearest(shape: Shape) -> Measured:
    """The measured layer whose rows per expert, size of an expert and experts are nearest, by the
    sum of the logarithms of their ratios.
    """

    def features(one: Shape) -> tuple[float, float, float]:
        return one.rows / one.experts, float(one.hidden * one.intermediate), float(one.experts)

    own = features(shape)
    return min(
        MEASURED,
        key=lambda each: sum(
            abs(math.log(a / b)) for a, b in zip(features(each.shape), own, strict=True)
        ),
    )


def _configured(path: Path) -> Shape:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        words = "needed: the path of a config.json of transformers"
        raise ConfigError(f"model is {str(path)!r:.120}, which is no file; {words}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"model: {path} is no JSON: {error}") from None
    expect(isinstance(config, dict), ConfigError, f"model: {path} has no JSON object")
    # A model of text and images keeps the sizes of its decoder one level deeper.
    text = config.get("text_config")
    sizes = {size: _size_of(text if isinstance(text, dict) else config, size) for size in SIZES}
    for size, names in SIZES.items():
        words = f"model: {path} has no {' or '.join(names)}; needed: the {size} of its experts"
        expect(sizes[size] is not None, ConfigError, words)
    return Shape(MEASURED[0].shape.tokens, **sizes)


def _size_of(config: dict[str, Any], size: str) -> Any:
    found = [config[name] for name in SIZES[size] if config.get(name) is not None]
    # Some configurations list one number for text and one for images.
    return (
        found[0][0]
        if found and isinstance(found[0], list) and found[0]
        else next(iter(found), None)
    )
