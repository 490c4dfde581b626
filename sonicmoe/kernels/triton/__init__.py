"""The grouped GEMMs of an expert MLP in Triton, for every GPU that Triton compiles for.

`tilings.py` is the table of tiles per architecture, `variants.py` names what is compiled; neither
imports Triton. `gemms.py` and `rows.py` hold the kernels, `activations.py` their epilogues'
formulas, `launches.py` what an engine calls.
"""
