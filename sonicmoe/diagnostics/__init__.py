"""Finding faults of a machine or a run: `doctor` looks at the environment, `doctor_engine` runs an engine
against fp64, `bisect` names the first wrong stage of a step, `verify` checks any experts.
"""
