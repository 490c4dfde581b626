"""Frees the memory of parameters as frameworks do, and gives it back as optimizers do."""

from __future__ import annotations

from framework import IS_PADDLE, torch


def free(*parameters):
    """The parameters keep their shapes, and nothing may be read of them any more."""
    for parameter in parameters:
        if IS_PADDLE:
            parameter._clear_to_zero_allocation()
        else:
            parameter.untyped_storage().resize_(0)


def restore(parameter, values):
    """Other memory for a freed parameter, with `values` in it."""
    if IS_PADDLE:
        # As Paddle's `FusedCommBuffer._reset_param_storage`.
        values.detach().clone()._share_buffer_to(parameter)
        return
    parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
    # As an optimizer that writes through `.data`: no version counter moves.
    with torch.no_grad():
        parameter.data.copy_(values)


def holds_memory(parameter):
    return parameter._is_initialized() if IS_PADDLE else parameter.untyped_storage().nbytes() > 0
