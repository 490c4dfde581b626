"""Weight gradients of the experts, put off to the bubbles of a pipeline."""

POINTS = ("moe_sonic_expert_up_gate_proj", "moe_sonic_expert_down_proj")
_waiting = []


def install_sonic_moe_dw_deferral(config):
    """Give the engine a hook where points are configured; elsewhere an engine without it is fine."""
    points = [point for point in config.p2p_overlap_dw_calc or () if point in POINTS]
    try:
        from paddlefleet_ops.sonicmoe.functional import set_wgrad_deferral_hook
    except ImportError:
        if points:
            raise
        return
    set_wgrad_deferral_hook(_hook_for(points) if points else None)


def _hook_for(points):
    def hook(point, weight, run_wgrad):
        """Whether `run_wgrad` is taken; it runs later, and the weight's hooks after it."""
        if point not in points:
            return False
        _waiting.append((weight, run_wgrad))
        return True

    return hook


def run_deferred():
    """All that waits, oldest first. Returns the weights in the order of their hooks."""
    fired = []
    while _waiting:
        weight, run_wgrad = _waiting.pop(0)
        run_wgrad()
        if hasattr(weight, "_apply_backward_hook"):
            weight._apply_backward_hook()
        fired.append(weight)
    return fired
