"""The `sonicmoe` console command. Nothing here imports a framework at module top level: a command
chooses one first.
"""
