"""Megatron-Core (0.16 to 0.19): the engine as the experts of its MoE layers.

    from sonicmoe.integrations.megatron import use_sonicmoe

    spec = use_sonicmoe(get_gpt_layer_local_spec(num_experts=64), fp8_mode="perf")
    model = GPTModel(config=config, transformer_layer_spec=spec, ...)

docs/megatron.md says which options are honoured and which are refused.
"""

from ...errors import FrameworkError

try:
    # First, because Megatron's modules import each other in circles.
    import megatron.core.tensor_parallel  # noqa: F401
except ImportError as error:
    raise FrameworkError(
        "sonicmoe.integrations.megatron needs megatron-core 0.16 to 0.19 "
        f"(pip install megatron-core==0.16.1): {error}"
    ) from error

from .dispatcher import RowsDispatcher, SonicMoELayer, TokenDispatcher
from .experts import SonicExperts
from .spec import use_sonicmoe

__all__ = ["RowsDispatcher", "SonicExperts", "SonicMoELayer", "TokenDispatcher", "use_sonicmoe"]
