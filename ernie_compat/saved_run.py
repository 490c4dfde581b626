"""What a checkpoint says about its run, checked field by field: the file may be damaged, or from
somewhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sonicmoe.errors import ConfigError, expect

from .checkpoint import CheckpointError, read_header
from .corpus import Corpus, CorpusError, load_corpus
from .model_config import MOST, RunConfig


@dataclass(frozen=True)
class SavedRun:
    """The header of a checkpoint.

    Attributes:
        step: optimizer steps done.
        text_sha256: of the text; empty where the checkpoint does not say.
        data: the paths of the text, absolute; none: the interpreter's standard library.
    """

    step: int
    config: RunConfig
    text_sha256: str = ""
    data: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> SavedRun:
        """From the checkpoint at `path`; reads no weight. CheckpointError where there is none, or
        it is damaged, or no run of this package.
        """
        return cls.from_header(path, read_header(path))

    @classmethod
    def from_header(cls, path: Path, header: Mapping[str, Any]) -> SavedRun:
        """From a header that was read already; `path` is named in errors. CheckpointError where a
        field is missing, or is not what it should be.
        """
        step: Any = header.get("step")
        text, data = header.get("text_sha256"), header.get("data")
        # True is an int to Python.
        counted = isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= MOST
        expect(counted, CheckpointError, f"checkpoint {path} has step {step!r}")
        # None where the run read the standard library of its Python.
        named = data is None or (
            isinstance(data, list) and all(isinstance(one, str) and one for one in data)
        )
        expect(named, CheckpointError, f"checkpoint {path} has data {data!r}; needed: paths")
        words = f"checkpoint {path} has text_sha256 {text!r}"
        expect(text is None or isinstance(text, str), CheckpointError, words)
        try:
            config = RunConfig.from_json(header.get("config", {}))
        except ConfigError as error:
            raise CheckpointError(f"checkpoint {path} is damaged: {error}") from None
        return cls(step, config, text or "", tuple(data or ()))

    def to_header(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "text_sha256": self.text_sha256,
            "data": list(self.data),
            "config": self.config.to_json(),
        }

    def require_resumable(self, config: RunConfig) -> None:
        """Check that this run can be continued as `config`; only the schedule (steps, learning
        rate, ...) may differ. CheckpointError names the first setting that differs, its saved and
        its requested value.
        """
        had, wanted = self.config.to_json(), config.to_json()
        # Moments and names of parameters belong to one framework; a change of precision would be
        # another experiment under the same curve.
        for name in ("framework", "precision", "compare"):
            _require_equal(name, had[name], wanted[name])
        # A baseline that was not asked for is taken from the checkpoint and has nothing to
        # contradict.
        if config.compare and config.against is not None:
            _require_equal("against", had["against"], config.against)
        for name, value in wanted["model"].items():
            _require_equal(name, had["model"][name], value)
        # These decide which tokens a step sees and in which order gradients add up.
        for name in ("seed", "batch_size", "micro_batches"):
            _require_equal(name, had["train"][name], wanted["train"][name])
        steps = config.train.steps
        words = f"the checkpoint is at step {self.step}, past the {steps} steps asked for"
        expect(self.step <= steps, CheckpointError, words)

    def text(self) -> Corpus:
        """The text that it was trained on, unchanged. CorpusError or ConfigError where it is not
        there, or no longer the same.
        """
        another = "to continue on another text, give --data"
        try:
            corpus = load_corpus(self.data)
        except CorpusError as error:
            raise CorpusError(f"the text of the checkpoint is gone: {error}; {another}") from None
        where = ", ".join(self.data) or "this Python's standard library"
        words = f"the text in {where} is not the one that the checkpoint was trained on; {another}"
        expect(self.text_sha256 in ("", corpus.sha256), ConfigError, words)
        return corpus


def _require_equal(name: str, saved: Any, wanted: Any) -> None:
    words = f"checkpoint has {name} = {saved!r}, this run {wanted!r}; resume with the saved value"
    expect(saved == wanted, CheckpointError, words)
