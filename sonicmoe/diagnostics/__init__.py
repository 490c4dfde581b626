"""What is wrong with this machine or this run: `doctor` looks at the environment, `selftest` runs
an engine against a golden.
"""
