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
        """From the checkpoint at `path`; reads no weight.

        Raises:
            CheckpointError: there is none, or it is damaged, or no run of this package.
        """
        return cls.from_header(path, read_header(path))

    @classmethod
    def from_header(cls, path: Path, header: Mapping[str, Any]) -> SavedRun:
        """From a header that was read already; `path` is named in errors.

        Raises:
            CheckpointError: a field is missing, or is not what it should be.
        """
        step: Any = header.get("step")
        text, data = header.get("text_sha256"), header.get("data")
        # True is an int to Python.
        counted = isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= MOST
        expect(counted, CheckpointError, f"checkpoint {path} has step {step!r}")
        named = data is None or (
            isinstance(data, list) and all(isinstance(one, str) and one for one in data)
        )
        expect(named, CheckpointError, f"checkpoint {path} has data {data!r}; needed: paths")
        expect(
            text is None or isinstance(text, str),
            CheckpointError,
            f"checkpoint {path} has text_sha256 {text!r}",
        )
        try:
            config = RunConfig.from_json(header.get("config", {}))
        except ConfigError as error:
            raise CheckpointError(f"checkpoint {path} is damaged: {error}") from None
        return cls(step, config, text or "", tuple(data or ()))

    def to_header(self) -> dict[str, Any]:
        """Inverse of `from_header`."""
        return {
            "step": self.step,
            "text_sha256": self.text_sha256,
            "data": list(self.data),
            "config": self.config.to_json(),
        }
