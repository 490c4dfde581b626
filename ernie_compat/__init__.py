"""A small ERNIE-style MoE decoder and its training loop on `sonicmoe.ernie_compat.SonicMoEMlpNode`:
what an ERNIE repository drops in.

Importing this package imports no framework; `learner.make_learner` loads Paddle or PyTorch.
"""
