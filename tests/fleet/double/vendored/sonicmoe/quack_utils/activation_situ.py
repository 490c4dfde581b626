def encode_situ_activation(beta, linear_beta):
    """The descriptor that `run_sonic_moe` takes as `activation_type`."""
    return f"situ_glu:b={beta}:lb={'none' if linear_beta is None else linear_beta}"
