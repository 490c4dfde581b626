"""What torchtitan's trainer reads where there is no data set and no tokenizer: tokens of our own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer


class OurTokens(BaseDataLoader):
    """Endless batches of tokens in which each follows from the one before: a task that a model
    learns. The package ships no data set.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """vocabulary: how many tokens occur, the first ones of the model's."""

        vocabulary: int = 256

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.shape, self.vocabulary = (local_batch_size, seq_len + 1), config.vocabulary
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        batch, length = self.shape
        positions = torch.arange(length - 1).expand(batch, -1).clone()
        while True:
            first = torch.randint(0, self.vocabulary, (batch, 1), generator=self.generator)
            tokens = (first + 7 * torch.arange(length)) % self.vocabulary
            yield {"input": tokens[:, :-1].clone(), "positions": positions}, tokens[:, 1:].clone()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    """Our data are tokens already; the package ships no tokenizer."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """The same fields."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise NotImplementedError

    decode = get_vocab_size = encode  # type: ignore[assignment]
