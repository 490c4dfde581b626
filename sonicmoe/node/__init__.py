"""The node: the expert MLP of one MoE layer as an operation of Paddle's or PyTorch's autograd, with
its gradients and weight caches.

`mlp_node` is the public class; its calls are those of `layer/node_call.py`. Import the class
from `sonicmoe.ernie_compat`.
"""
