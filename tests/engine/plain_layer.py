"""A case that has its settings, for engines that quantise nothing. No tile divides its sizes."""

from __future__ import annotations

import torch
from engine import fp8_layer
from engine.fp8_layer import E  # noqa: F401

from sonicmoe.engine.interface import EngineSettings

BF16, H, I = torch.bfloat16, 72, 40


class Case(fp8_layer.Case):
    def __init__(self, settings, bias):
        super().__init__(150, H, I, biased=bias)
        self.settings = settings

    def pending(self, engine):
        return super().pending(engine, self.settings)


def make_case(*, bias=True, **settings):
    return Case(EngineSettings(**settings), bias)


def run(case, engine, targets=None):
    return case.run(engine, case.settings, targets)
