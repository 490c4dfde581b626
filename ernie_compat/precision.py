"""A run's precision in the terms of the node: configuration, dtype of the tokens, engine. Imports no
framework.
"""

from __future__ import annotations

from sonicmoe import SonicMoEConfig
from sonicmoe.config import current_config

from .model_config import ModelConfig


def node_config(precision: str, engine: str) -> SonicMoEConfig:
    """The node's configuration: only `fp8` quantises; bf16 and fp32 differ in the dtype of the
    tokens alone. Of the two FP8 modes `perf`, unless `SONIC_MOE_FP8_MODE` names the other.
    """
    if precision != "fp8":
        return SonicMoEConfig(fp8_mode="off", engine=engine)
    config = current_config()
    return SonicMoEConfig(fp8_mode=config.fp8_mode if config.fp8 else "perf", engine=engine)


def token_dtype_name(precision: str) -> str:
    """Dtype in which tokens enter the node."""
    return "float32" if precision == "fp32" else "bfloat16"


def engine_in_use(model: ModelConfig, precision: str, engine: str, device: str) -> str:
    """Name of the engine that the nodes of such a model run on `device` ("cpu", "cuda:0"), with
    `auto` resolved. EngineUnavailableError where one that was asked for by name cannot run.
    """
    # Imported here, because choosing an engine loads the framework.
    from sonicmoe.engine.interface import EngineSettings
    from sonicmoe.engine.select import choose_engine
    from sonicmoe.engine.settings import Workload
    from sonicmoe.enums import ActivationType

    config = current_config(node_config(precision, engine))
    settings = EngineSettings.from_config(config, ActivationType.SWIGLU)
    workload = Workload(
        settings, model.hidden_size, model.intermediate_size, token_dtype_name(precision)
    )
    return choose_engine(device, config.engine, workload).engine.name
