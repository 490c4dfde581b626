"""The node: the expert MLP of one MoE layer as an operation of Paddle's or PyTorch's autograd, with
its gradients and weight caches.

`mlp_node` is the public class, `mlp_call` one forward and what its backward needs. Import the class
from `sonicmoe.ernie_compat`.
"""
