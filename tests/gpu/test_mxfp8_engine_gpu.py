"""The MXFP8 engine on a GPU of its architectures, in every way of calling it, against the reference
engine. This project has no such GPU: whoever has one runs this first.
"""

import pytest
import torch

from sonicmoe.architectures import arch_name
from sonicmoe.engine import trial
from sonicmoe.engine.capabilities import MXFP8
from sonicmoe.engine.mxfp8 import Mxfp8Engine
from sonicmoe.engine.reference import ReferenceEngine
from sonicmoe.engine.settings import EngineSettings, Workload
from sonicmoe.enums import ZCode
from sonicmoe.quant.recipes import RECIPES

SETTINGS = {"recipe": RECIPES["iso32-pow2"], "save_z": ZCode.BF16}


def is_served() -> bool:
    if not torch.cuda.is_available():
        return False
    arch = arch_name(torch.cuda.get_device_capability())
    return MXFP8.architecture(arch) is not None


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not is_served(), reason="needs a GPU of compute capability 10.0 or 10.3"),
]


@pytest.mark.parametrize("sizes", [(512, 256), (1024, 800), (2880, 2880)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"recompute_z": True},
        {"frees_stagewise": True},
        {"fp8_wgrad": False},
        {"gemm_num_sms": 64},
    ],
    ids=str,
)
def test_every_way_of_calling_it(sizes, changes):
    settings = EngineSettings(**SETTINGS, **changes)
    problem, engine = trial.Problem(Workload(settings, *sizes), "cuda:0"), Mxfp8Engine()
    found = [
        trial.judged(engine, case, wanted, trial.bars_of(settings))
        for case, wanted in trial.cases(problem, engine)
    ]
    assert [result["problem"] for result in found] == [None] * len(found)


@pytest.mark.parametrize("activation", MXFP8.activations, ids=lambda a: a.value)
def test_every_activation(activation):
    settings = EngineSettings(activation, **SETTINGS)
    problem, engine = trial.Problem(Workload(settings, 512, 256), "cuda:0"), Mxfp8Engine()
    wanted = problem.train(ReferenceEngine())
    case, bars = trial.Case("training", problem.train), trial.bars_of(settings)
    judged = trial.judged(engine, case, wanted, bars)
    assert judged["problem"] is None
