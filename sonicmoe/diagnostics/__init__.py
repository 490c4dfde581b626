"""Finding faults of a machine or a run: `doctor` looks at the environment, `selftest` runs an
engine against a golden.
"""
