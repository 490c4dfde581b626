"""Weight gradients between the backwards that add them and the parameters that get them."""
