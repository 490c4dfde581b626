"""The sizes a benchmark runs at, by name. Imports no framework.

Legend: T tokens, K routing slots per token, all of them local; E local experts, H hidden, I expert
intermediate size.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ShapeError, expect

MOST = 2**31 - 1  # of a size, which is a 32-bit number in the kernels
STACK_TOKENS = 65536  # of all layers of a timed step
FLOP_PER_ROW = 18  # per routed row and per H * I, gated: 6 forward, 6 for dx, 6 for the weights


@dataclass(frozen=True, order=True)
class Shape:
    """T, H, I, E, K of one call. ShapeError where a size is no number from 1 to `MOST`, or a token
    would need more experts than there are.
    """

    tokens: int
    hidden: int
    intermediate: int
    experts: int
    topk: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            sound = isinstance(value, int) and 1 <= value <= MOST
            expect(sound, ShapeError, f"{name} is {value!r:.60}; needed: 1 to {MOST}")
        expect(
            self.topk <= self.experts,
            ShapeError,
            f"topk is {self.topk}; needed: at most the number of experts, {self.experts}",
        )

    @property
    def rows(self) -> int:
        """TK: routed rows, without padding."""
        return self.tokens * self.topk

    @property
    def flop(self) -> float:
        """Floating-point operations of one forward and backward: `18 * T * K * H * I`."""
        return float(FLOP_PER_ROW * self.rows * self.hidden * self.intermediate)

    @property
    def stack_layers(self) -> int:
        """Layers of a timed step: as many as hide the host's time, fewer where one layer takes long
        and much memory.
        """
        # A step of a few long layers hides the host as well as one of many short ones.
        return max(2, min(8, STACK_TOKENS // self.tokens))

    def __str__(self) -> str:
        """`T=8192 H=3072 I=1536 E=8 K=8`."""
        sizes = zip("THIEK", vars(self).values(), strict=True)
        return " ".join(f"{letter}={value}" for letter, value in sizes)


REFERENCE = Shape(8192, 3072, 1536, 8, 8)
SMALL = Shape(256, 256, 128, 8, 2)  # what the reference engine does on a CPU in a blink

# Public models at 8192 tokens; `-epN` has the local experts of one of N ranks and every slot routed
# to them.
SHAPES: dict[str, Shape] = {
    "small": SMALL,
    "reference": REFERENCE,
    "reference-1k": Shape(1024, 3072, 1536, 8, 8),
    "reference-2k": Shape(2048, 3072, 1536, 8, 8),
    "reference-4k": Shape(4096, 3072, 1536, 8, 8),
    "reference-16k": Shape(16384, 3072, 1536, 8, 8),
    "square-4096": Shape(8192, 4096, 4096, 8, 8),
    "experts-32": Shape(8192, 3072, 1536, 32, 8),
    "fine-grained": Shape(16384, 2048, 768, 128, 8),
    "wide-128": Shape(32768, 4096, 1024, 128, 8),
    "qwen3-30b-a3b": Shape(8192, 2048, 768, 128, 8),
    "qwen3-235b-a22b-ep8": Shape(8192, 4096, 1536, 16, 8),
    "deepseek-v3-ep32": Shape(8192, 7168, 2048, 8, 8),
    "mixtral-8x7b": Shape(8192, 4096, 14336, 8, 2),
    "gpt-oss-120b-ep4": Shape(8192, 2880, 2880, 32, 4),
    "olmoe-1b-7b": Shape(8192, 2048, 1024, 64, 8),
    "ernie-4.5-21b-a3b": Shape(8192, 2560, 1536, 64, 6),
    "ernie-4.5-300b-a47b-ep8": Shape(8192, 8192, 3584, 8, 8),
}
