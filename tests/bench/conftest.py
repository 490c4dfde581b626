"""These tests are about the machine without a GPU, also where there is one."""

import pytest


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
