"""Tests of what only Paddle has. They run with `SONICMOE_TEST_FRAMEWORK=paddle` and say so where
they do not.
"""

from __future__ import annotations

import pytest
from paddle_face import SKIP_REASON


def pytest_terminal_summary(terminalreporter):
    """A suite that did not run must not look like one that passed."""
    if SKIP_REASON is not None:
        terminalreporter.write_line(f"tests/paddle did NOT run: {SKIP_REASON}", yellow=True)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    """Flags of the caller's shell must not choose what is tested."""
    from sonicmoe.config import FLAGS

    for flag in FLAGS:
        monkeypatch.delenv(flag.env, raising=False)


if SKIP_REASON is None:
    import paddle

    @pytest.fixture(autouse=True)
    def _grad_mode_survives():
        """No call of the package may leave autograd switched off behind it."""
        yield
        assert paddle.is_grad_enabled()
