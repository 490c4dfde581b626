"""A small ERNIE-style MoE decoder and its training loop on `sonicmoe.ernie_compat.SonicMoEMlpNode`,
for an ERNIE repository to copy or import.

Importing this package imports no framework; `trainer.backend` loads Paddle or PyTorch.
"""
