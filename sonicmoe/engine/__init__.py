"""Engines behind one seam: `interface` (forward, backward, Saved), `select` (which one runs and
why), `reference`.
"""
