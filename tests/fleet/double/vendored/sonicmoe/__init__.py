"""Stands for the engine that Fleet ships: the same names over plain fp32 Paddle, 1x32 scales on the
wire, no scales in the weights. What Fleet's side does is tested with it, and compared with ours.
"""

from .interface import run_sonic_moe as run_sonic_moe
