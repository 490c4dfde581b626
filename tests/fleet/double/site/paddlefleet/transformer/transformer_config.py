"""The fields of Fleet's configuration that the expert path reads, with their defaults."""

from dataclasses import dataclass, field


@dataclass
class TransformerConfig:
    hidden_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    hidden_act: str = "silu"
    activation_func_clamp_value: float | None = None
    activation_situ_beta: float = 1.0
    activation_situ_linear_beta: float | None = None
    using_sonic_moe: bool = True
    fp8: str | None = None
    fp8_wgrad: bool = True
    fp8_weight_quant_format: str = "32x32"
    recompute_granularity: str | None = None
    recompute_modules: list = field(default_factory=list)
