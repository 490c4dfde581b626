"""Engines of Blackwell: the GEMMs of quack-kernels behind `bf16` (`quack_products.py`), and `mxfp8`. No
path of another architecture leads here.
"""
