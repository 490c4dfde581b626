"""The passes of an engine one after the other, as no face calls them."""


def backward(engine, dout, saved, weights, targets):
    """`backward_dx`, then `backward_dw`: dx and dprobs."""
    dx, dprobs, pending = engine.backward_dx(dout, saved, weights)
    if targets is not None:  # else the weights are frozen
        engine.backward_dw(pending, targets)
    return dx, dprobs
