"""Configuration, caches and the hook for deferred weight gradients."""

from types import SimpleNamespace

_WGRAD_DEFERRAL_HOOK = None


def _refresh_fp8_config():
    return SimpleNamespace(
        enabled=False,
        fp8_wgrad=True,
        epilogue_quant=True,
        fused_gated=True,
        save_z_fp8=False,
        recompute_z=False,
        swiglu_clamp_value=0.0,
    )


def clear_all_fp8_weight_caches():
    """Nothing is cached outside the parameters."""


def set_wgrad_deferral_hook(hook):
    global _WGRAD_DEFERRAL_HOOK
    _WGRAD_DEFERRAL_HOOK = hook
