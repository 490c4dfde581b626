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
        """vocabulary: how many tokens occur, the first ones of the model's. drawn: the share of tokens
        that are drawn at random. No model foretells these, so the loss stays above 0: above 4.9 where
        half of the tokens are drawn from 4,096, by the entropy of such a sequence.
        """

        vocabulary: int = 256
        drawn: float = 0.0

    def __init__(
        self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any
    ) -> None:
        self.shape, self.vocabulary = (local_batch_size, seq_len + 1), config.vocabulary
        self.drawn = config.drawn
        self.generator = torch.Generator().manual_seed(dp_rank)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        (batch, length), generator = self.shape, self.generator
        places = torch.arange(length).expand(batch, -1)
        positions = places[:, :-1].clone()
        while True:
            drawn = torch.randint(0, self.vocabulary, self.shape, generator=generator)
            follows = torch.rand(self.shape, generator=generator) >= self.drawn
            follows[:, 0] = False
            # Where the last one was drawn, from which the others follow.
            start = torch.where(follows, 0, places).cummax(1).values
            tokens = (drawn.gather(1, start) + 7 * (places - start)) % self.vocabulary
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
