"""H and I of the experts of public MoE models, from their published configurations. H is
`hidden_size` (`d_model`), I is `moe_intermediate_size` (`intermediate_size`, `ffn_hidden_size`).
"""

from __future__ import annotations

from sonicmoe.bench.shapes import SHAPES

MEASURED = (
    "qwen3-30b-a3b", "qwen3-235b-a22b-ep8", "deepseek-v3-ep32", "mixtral-8x7b", "gpt-oss-120b-ep4",
    "olmoe-1b-7b", "ernie-4.5-21b-a3b", "ernie-4.5-300b-a47b-ep8",
)  # fmt: skip
OTHERS = {
    "dbrx": (6144, 10752),
    "deepseek-v2": (5120, 1536),
    "deepseek-v2-lite": (2048, 1408),
    "glm-4.5-air": (4096, 1408),
    "granite-3.0-1b-a400m": (1024, 512),
    "granite-3.0-3b-a800m": (1536, 512),
    "llama-4-scout": (5120, 8192),
    "mixtral-8x22b": (6144, 16384),
    "phi-3.5-moe": (4096, 6400),
    "qwen2-57b-a14b": (3584, 2560),
    "qwen3-next-80b-a3b": (2048, 512),
}
# Those that the benchmark measures have their sizes there.
EXPERT_SIZES: dict[str, tuple[int, int]] = {
    **{name: (SHAPES[name].hidden, SHAPES[name].intermediate) for name in MEASURED},
    **OTHERS,
}
