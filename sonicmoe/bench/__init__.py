"""How fast the engine is on this machine: shapes, interleaved timing, kernel breakdown, floors, and
the cost model fitted to a sweep.
"""
